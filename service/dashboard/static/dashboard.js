"use strict";
// Keeps a page up to date. Without it, each page is as of when it was asked for.
const main = document.getElementById("main");
const state = document.getElementById("state");
const pause = document.getElementById("pause");
const MOST_ROWS = 300;
let source = null;

function say(text) {
  if (state.textContent !== text) state.textContent = text;
}

// Put `html` into `part`; focus, scrolling and what is open stay as they are.
function replace(part, html) {
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  if (focused && focused.closest("form")) return; // somebody types
  const key = (e) => e.id || e.getAttribute("href") || e.getAttribute("aria-label") || e.localName;
  const tabs = [...part.querySelectorAll(".scroll")].map((e) => e.scrollLeft);
  const open = [...part.querySelectorAll("details")].map((e) => e.open);
  const wanted = focused && key(focused);
  part.innerHTML = html;
  part.querySelectorAll(".scroll").forEach((e, n) => { e.scrollLeft = tabs[n] || 0; });
  part.querySelectorAll("details").forEach((e, n) => { e.open = open[n] || false; });
  if (wanted) {
    const again = [...part.querySelectorAll("a,summary,[tabindex]")].find((e) => key(e) === wanted);
    if (again) again.focus({ preventScroll: true });
  }
}

function leave(text) {
  source.close();
  source = null;
  say(text);
}

function follow() {
  source = new EventSource(main.dataset.live);
  source.addEventListener("part", (event) => {
    const { name, html } = JSON.parse(event.data);
    const part = main.querySelector(`[data-part="${name}"]`);
    if (part) replace(part, html);
  });
  source.addEventListener("events", (event) => {
    const rows = document.getElementById("events");
    if (!rows) return;
    const { html, again } = JSON.parse(event.data);
    if (again) rows.deleteRow(0);
    rows.insertAdjacentHTML("afterbegin", html);
    while (rows.rows.length > MOST_ROWS) rows.deleteRow(-1);
  });
  source.addEventListener("alive", () => say("Live"));
  source.addEventListener("gone", (event) => { say(JSON.parse(event.data)); source.close(); });
  source.onerror = () => say(source.readyState === 2 ? "Not followed: load it again"
    : "No answer; it tries again");
}

if (main.dataset.live) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    if (source) leave("Paused"); else follow();
    pause.textContent = source ? "Pause" : "Go on";
  });
  // Pages that nobody sees leave the dispatcher alone.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && source) leave("Hidden");
    else if (!document.hidden && state.textContent === "Hidden") follow();
  });
  follow();
}

const slide = document.getElementById("slide");
if (slide) {
  const at = document.getElementById("at");
  slide.addEventListener("input", () => { at.value = slide.value; });
  slide.addEventListener("change", () => slide.form.requestSubmit());
}
