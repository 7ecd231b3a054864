"""The dashboard in Chromium, beside clusters that live, fail, or are large."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import shutil
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from forebay import service
from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.datasets import mixture
from forebay.service.dashboard import pages
from forebay.service.dashboard.pages import FORM
from forebay.service.processes import free_port
from forebay.storage import open_storage

from .. import forks
from ..certificates import Authority, token
from ..cluster import WorkerProcess
from ..core.make_fold import Cluster
from ..slow_trainer import slow_trainer
from ..standbys import LEASE_MS, leads, wait_until
from ..standbys import status as status_of
from ..stock import DispatcherProcess

pytestmark = pytest.mark.timeout(240)  # Chromium is needed

WORKERS, SPLITS = 1_000, 10**6
NASTY = [
    "<script>document.title = 'taken'</script>",
    '"><img src=x onerror="document.title = \'taken\'">',
    "' onmouseover='document.title=1' {{ 7 * 7 }} {% raw %}",
    "\x1b[2J\0\r\n\u202e backwards",
    10_000 * "ä",
]
MOST_BYTES = 100_000
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # Without a sandbox, as the tests may be root's. It opens these tests' pages alone.
        path, options = shutil.which("chromium"), ["--no-sandbox", "--disable-dev-shm-usage"]
        chromium = playwright.chromium.launch(executable_path=path, args=options)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opened(browser: Browser, **options: object) -> Iterator[Page]:
    """A page; fails if a script of ours fails, or the policy refuses anything."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page, said = context.new_page(), list[str]()
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda m: said.append(m.text) if "Content Security" in m.text else None)
    try:
        yield page
    finally:
        context.close()  # while it is being told of changes
    assert said == []


WIDER = """() => [document.documentElement, ...document.querySelectorAll("main *")].filter(e =>
  e.getBoundingClientRect().right > innerWidth + 1 && !e.closest("thead") ||
  e.scrollWidth > e.clientWidth + 1 && e.matches("html, .scroll, table, section, figure")
).map(e => e.outerHTML.slice(0, 200))"""
"""What goes beyond the edge, or would have to be scrolled sideways."""

TWICE = re.compile(r"\b([a-z]{2,}) \1\b|[a-z)][.,;:][A-Z]|\.\.$|,,", re.MULTILINE)
"""A word that stands twice, or two sentences without a space."""


def check_access(page: Page) -> None:
    """In light and dark, and at 320 and 360 px, where nothing goes beyond the edge."""
    for scheme, width in (("light", 1100), ("dark", 320), ("light", 360)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(WIDER) == [], page.url
        assert not TWICE.search(page.locator("main").inner_text()), page.url
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1100, "height": 800})


def text_of(page: Page, fact: str) -> str:
    """What stands below a heading of the facts."""
    return (
        page.locator("dl.facts > div", has_text=fact).first.locator("dd").first.text_content() or ""
    )


def number_of(page: Page, fact: str) -> int:
    return int(re.sub(r"\D", "", text_of(page, fact)))


def test_an_operator_follows_a_cluster_through_faults(browser: Browser, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        pair = []
        for port in ports:
            process = DispatcherProcess(
                tmp_path / "j", http_port=port, standby=True, leader_lease_ms=LEASE_MS,
                load_window_ms=4000, client_timeout_ms=5000, snapshot_events=200,
            )  # fmt: skip
            pair.append(stack.enter_context(process))
            wait_until(leads, pair[0])
        target = f"grpc://{pair[0].address},{pair[1].address}"
        both = target.removeprefix("grpc://")
        workers = [
            stack.enter_context(WorkerProcess(both, heartbeat_interval_ms=300)) for _ in range(2)
        ]
        ordered = {"ordered": True, "seed": 1, "batch_size": 4, "start_position": 400}
        reads: list[dict[str, Any]] = [{"job_name": NASTY[0]}, {"job_name": "in order", **ordered}]
        for how in reads:
            dataset_id = service.register_dataset(target, lambda n: [n], splits=range(10**6))
            stack.enter_context(slow_trainer(target, dataset_id, 0.001, **how))

        second = stack.enter_context(opened(browser))
        second.goto(urls[1])
        expect(second.locator(".banner")).to_contain_text(f"stands by, leader {pair[0].address}")
        check_access(second)
        second.get_by_role("link", name="its dashboard").click()
        expect(second).to_have_url(f"{urls[0]}/")
        second.goto(urls[1])

        page = stack.enter_context(opened(browser))
        page.goto(urls[0])
        expect(page.locator("#state")).to_have_text("Live")
        expect(page.locator(".findings")).to_contain_text("they are what is slow")
        jobs = page.get_by_role("region", name="Jobs")
        expect(jobs).to_contain_text(re.compile(r"\d (s|min|h \d+ min|d \d+ h)"))  # to go
        before = number_of(page, "Journal")
        wait_until(lambda: number_of(page, "Journal") > before)
        check_access(page)
        # By keyboard: the first stop is the link past the header, and focus outlasts new content.
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to the content")
        link = page.get_by_role("link", name=NASTY[0])
        link.focus()
        page.wait_for_timeout(2_500)
        expect(link).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("img", name=re.compile(r"Splits: .* begun"))).to_be_visible()
        expect(page.locator("table", has_text="Waits").locator("tbody tr")).to_have_count(1)
        its_workers = page.get_by_role("region", name="Workers that run it")
        expect(its_workers).to_contain_text(re.compile(r"\d (bytes?|kB|MB)"))  # what the job holds
        page.get_by_text("Leases by worker").click()
        page.locator("details").get_by_role("link", name=workers[0].address).click()
        expect(page.locator("path.marked")).to_be_visible()
        check_access(page)

        page.goto(urls[0])
        page.get_by_role("link", name="in order").click()
        cells = page.locator("table", has_text="Received up to").locator("tbody td")
        expect(cells.first).to_have_text("0 of 1")
        begun_at, up_to, received = (int(t.replace(",", "")) for t in cells.all_inner_texts()[1:4])
        assert begun_at == 400 and up_to == begun_at + received
        expect(page.get_by_text("so there is no map")).to_be_visible()

        # The events, live; and what was at one of them, beside what the journal's command says.
        page.get_by_role("link", name="Events").click()
        first_row = page.locator("#events tr").first
        seen = first_row.inner_text()
        expect(first_row).not_to_have_text(seen)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator("#state")).to_have_text("Paused")
        check_access(page)
        page.get_by_label("Events with the text").fill("workerREGISTERED")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(2)
        expect(page.locator("tbody")).to_contain_text(workers[1].address)
        last = int(page.locator("#slide").get_attribute("max") or 0)
        for at in (last * 2 // 3, last // 3, last // 3 + 5):  # on, back, and on from there
            page.locator("#at").fill(str(at))
            page.get_by_role("button", name="Show").click()
            expect(page.locator("h1")).to_have_text(f"As of event {at:,}")
            shown = forks.run(
                ["-m", "forebay.service.cli", "journal", "show", str(tmp_path / "j"),
                 "--at", str(at), "--json"], imports=forks.DISPATCHER,
            )  # fmt: skip
            then = json.loads(shown.stdout)
            assert number_of(page, "Journal") == then["sequence"] == at
            assert number_of(page, "Leases out") == then["leases"]
            assert number_of(page, "Workers") == len(then["workers"])
            for job in then["jobs"]:
                for source in job["iterations"][0]["sources"]:
                    done = source["begun"] + source["lost"]
                    jobs = page.get_by_role("region", name="Jobs")
                    expect(jobs).to_contain_text(f"{done:,} of")
        page.locator("#slide").focus()
        page.keyboard.press("Home")
        expect(page.locator("h1")).to_have_text("As of event 1")
        check_access(page)

        # A worker is lost, and then the leader.
        page.goto(urls[0])
        workers[0].kill()
        lost = page.locator(
            ".findings li.f-problem", has_text=f"problem worker {workers[0].address}"
        )
        expect(lost).to_contain_text("it was given up")
        expect(lost).to_contain_text(re.compile(r"since \d\d:\d\d:\d\d"))
        expect(page.get_by_role("region", name="Jobs").locator(".bad")).to_be_visible()
        expect(page.locator("path.m-lost title").first).to_contain_text(workers[0].address)
        pair[0].kill()
        expect(page.locator("#state")).to_contain_text("No answer")
        expect(second.locator(".banner")).to_have_count(0)  # by itself
        expect(second.locator(".findings")).to_contain_text("it leads in term")
        expect(second.locator(".notes")).to_contain_text("s after the event before")
        assert number_of(second, "Term") >= 2
        expect(second.locator("dl.facts > div", has_text="Snapshot")).to_contain_text(" old")
        pair[0].restart()
        expect(page.locator(".banner")).to_contain_text("stands by")  # by itself, too
        expect(page.locator("table")).to_have_count(0)
        link = page.get_by_role("link", name="its dashboard")
        expect(link).to_have_attribute("href", urls[1])


def large(cluster: Cluster) -> int:
    """WORKERS that have leased SPLITS, begun most of them, and been lost in part; the job's id."""
    cluster._times = itertools.count(time.time_ns() // 10**6)
    cluster.elect(1)
    source = ev.SplitSource(count=SPLITS)
    for dataset_id in ("d", NASTY[1], NASTY[4]):
        definition = ev.DatasetDefinition(sources=[source])
        cluster.do(c.RegisterDataset(dataset_id=dataset_id, definition=definition))
    for number, name in enumerate(NASTY):
        cluster.join(cluster.job(("d", NASTY[1], NASTY[4])[number % 3], name), caller=f"n{number}")
    workers = [
        cluster.worker(1000 + n, f"10.0.{n // 250}.{n % 250}:5051") for n in range(WORKERS - 1)
    ]
    workers.append(cluster.do(c.RegisterWorker(address=NASTY[2], uid=7, tags=(NASTY[0],))))
    ordered = cluster.do(
        c.JoinJob(
            dataset_id="d", name="ordered", sharding=ev.OFF, epoch=0, schedules=True,
            order=ev.OrderSpec(cycle_length=1, block_length=1),
            member=ev.GroupMember(consumers=1, batch_size=8),
        )
    )  # fmt: skip
    change = ev.ScheduleChange(place=80, skipped=16, reason=NASTY[2], who="ann")
    job_id = cluster.state.iterations[ordered.iteration_id].job_id
    cluster.do(c.ChangeSchedule(job_id=job_id, change=change, readers=(ordered.consumer_id,)))
    halves = [ev.MixtureSource(name=n, dataset_id="d", share=1 << 31) for n in (NASTY[1], "half")]
    cluster.do(c.RegisterDataset(dataset_id="mix", definition=mixture(cluster.state, halves)))
    cluster.do(
        c.JoinJob(
            dataset_id="mix", name="mixed", sharding=ev.OFF, epoch=0, schedules=True,
            order=ev.OrderSpec(cycle_length=1, block_length=1),
            member=ev.GroupMember(consumers=1, batch_size=8),
        )
    )  # fmt: skip
    job_id = cluster.job("d", "large")
    iteration = cluster.join(job_id).iteration_id
    its = [task for task in cluster.state.tasks.values() if task.iteration_id == iteration]
    tasks = {task.worker_id: task.task_id for task in its}
    for turn, worker_id in itertools.product(range(3), workers):
        task = tasks[worker_id]
        lease = cluster.lease(task, 2000, 2 * turn + 1)
        if (worker_id + turn) % 3:
            cluster.report(task, 2 * turn + 2, begun=(lease.lease_id,))
    for worker_id in workers[::50]:
        cluster.do(c.LoseWorker(worker_id=worker_id, reason="for the test"))
    return job_id


def written(path: Path) -> int:
    """A journal of `large`; the job's id."""
    cluster = Cluster()
    job_id = large(cluster)
    storage = open_storage(str(path))
    writer = storage.open_writer("a test")
    writer.append([encode(event) for event in cluster.events])
    writer.close()
    storage.close()
    return job_id


def test_a_large_cluster_with_nasty_names_is_a_picture(browser: Browser, tmp_path: Path) -> None:
    job_id, port = written(tmp_path / "j"), free_port()
    url = f"http://127.0.0.1:{port}"
    patient = {"worker_timeout_ms": 600_000, "reconnect_grace_ms": 600_000}  # none is real
    with (
        DispatcherProcess(
            tmp_path / "j", http_port=port, client_timeout_ms=600_000, **patient
        ) as dispatcher,
        opened(browser) as page,
    ):
        for path in ("/", f"/jobs/{job_id}"):
            page.goto(url + path)
            first = "performance.getEntriesByName('first-contentful-paint')[0]"
            wait_until(page.evaluate, f"!!{first}")
            painted = page.evaluate(f"{first}.startTime")
            size = page.evaluate(
                "performance.getEntries().reduce((n, e) => n + (e.decodedBodySize || 0), 0)"
            )
            print(f"\n{path}: first paint after {painted:.0f} ms, {size:,} bytes")
            assert size < MOST_BYTES
            check_access(page)
        told = status_of(dispatcher)
        (job,) = [j for j in told["jobs"] if j["job_id"] == job_id]
        (source,) = job["iterations"][0]["sources"]
        legend = page.locator(".map .legend").inner_text().replace(",", "")
        counts = {state: int(n) for state, n in re.findall(r"(\w+)\s+(\d+)", legend)}
        assert counts["begun"] == source["begun"]
        assert counts["lost"] == source["lost"] > 0
        assert counts["leased"] == source["leased"] > 0
        assert sum(counts.values()) == SPLITS

        (ordered,) = [j for j in told["jobs"] if j["name"] == "ordered"]
        page.goto(f"{url}/jobs/{ordered['job_id']}")
        changes = page.get_by_role("region", name="Changes of its schedule")
        for text in ("10", "2 steps left out", "ann", NASTY[2]):
            expect(changes).to_contain_text(text)
        (mixed,) = [j for j in told["jobs"] if j["name"] == "mixed"]
        page.goto(f"{url}/jobs/{mixed['job_id']}")
        bar = page.get_by_role("region", name="Changes of its schedule").locator(".share path")
        assert [one.get_attribute("d") for one in bar.all()] == [
            "M0.0 0h50.0v10H0.0z", "M50.0 0h50.0v10H50.0z",
        ]  # fmt: skip

        page.goto(url)
        expect(page.get_by_text(f"{WORKERS - 20:,} workers, page 1")).to_be_visible()
        page.get_by_role("link", name="last").click()
        expect(page.locator("nav.pages")).to_contain_text("page 20 of 20")
        page.get_by_label("Those whose address").fill("ONERROR")
        page.keyboard.press("Enter")
        expect(page.get_by_text("There are none with this text.")).to_be_visible()
        page.get_by_label("Those whose address").fill("<SCRIPT>")  # a tag
        page.get_by_label("sorted by").select_option("elements/s")
        page.get_by_role("button", name="Show").click()
        rows = page.get_by_role("region", name="Workers")
        expect(rows.get_by_role("rowheader", name=NASTY[2])).to_be_visible()

        jobs = page.get_by_role("region", name="Jobs")
        for name in NASTY[:3]:
            expect(jobs.get_by_role("link", name=name, exact=True)).to_be_visible()
        expect(jobs).to_contain_text(r"\x1b[2J\x00\r\n\u202e backwards")
        expect(jobs.locator("a", has_text="äää…")).to_be_visible()  # cut
        assert jobs.evaluate("e => e.querySelectorAll('script, img').length") == 0
        for path in ("/events", f"/events?q={NASTY[1]}", "/past?at=4000", "/past?at=1e9",
                     f"/past?at=9{'9' * 400}", "/jobs/<b>", "/jobs/77", "/live?view=<b>",
                     "/events?before=x"):  # fmt: skip
            page.goto(url + path)
            assert page.title() != "taken"
            assert "Traceback" not in page.content()
        expect(page.locator("h1")).to_have_text("This cannot be shown")
        leaves_room(f"127.0.0.1:{port}")


def leaves_room(address: str) -> None:
    """Pages that are followed leave connections of the same address for probes."""
    with contextlib.ExitStack() as stack:

        def ask(path: str, method: str = "GET") -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(address, timeout=30)
            stack.callback(connection.close)
            connection.request(method, path)
            return connection.getresponse()

        followed = 0
        while (answer := ask("/live?view=overview")).status == 200:
            followed += 1
        assert answer.status == 503 and b"close some" in answer.read()
        assert 0 < followed <= pages.MOST_OF_ADDRESS
        assert ask("/healthz").status == ask("/metrics").status == 200
        assert ask("/live?view=overview", "HEAD").status == 405

        def is_gone() -> bool:
            stack.close()  # also those of the tries before
            return b"event: gone" in ask("/live?view=job").read()

        wait_until(is_gone)  # once they are over


def test_a_token_is_asked_for_and_not_kept(browser: Browser, tmp_path: Path) -> None:
    server = Authority(tmp_path / "ca").issue("server").files()
    paths = [token(tmp_path / name, f"{name}-secret") for name in ("viewer", "trainer")]
    rules = tmp_path / "access.toml"
    rules.write_text('[[grant]]\nto = ["viewer"]\nroles = ["viewer"]\n')
    port = free_port()
    url = f"https://localhost:{port}"
    with (
        DispatcherProcess(
            tmp_path / "j", http_port=port, access_file=rules, token_file=",".join(paths), **server
        ),
        opened(browser, ignore_https_errors=True) as page,
    ):
        answer = page.goto(f"{url}/events?q=leader")
        assert answer is not None and answer.status == 401
        check_access(page)
        for given, said in (
            ("wrong", "not one that is known"),
            ("trainer-secret", "may not see metrics"),
            ("viewer-secret", ""),
        ):
            page.get_by_label("Token").fill(given)
            page.get_by_role("button", name="Sign in").click()
            if said:
                expect(page.locator("main")).to_contain_text(said)
                assert given not in page.content()
        expect(page.get_by_role("cell", name="LeaderElected")).to_be_visible()  # where it came from
        expect(page.locator("tbody")).to_contain_text(f"dashboard=https://127.0.0.1:{port}")
        expect(page.locator("#state")).to_have_text("Live")
        (cookie,) = page.context.cookies()
        assert cookie["name"].endswith(f"_{port}")  # so two dispatchers of a host have their own
        assert cookie["httpOnly"] and cookie["secure"] and cookie["sameSite"] == "Strict"
        assert "secret" not in cookie["value"]
        assert "forebay_dispatcher_leads 1" in page.request.get(f"{url}/metrics").text()
        headers = {"Cookie": f"{cookie['name']}={cookie['value'][:-1]}"}
        page.context.clear_cookies()
        assert page.request.get(f"{url}/live?view=overview", headers=headers).status == 401
        for back in ("//elsewhere/", "/\\elsewhere/", "/\t/elsewhere/", "elsewhere"):
            form: Any = {"token": "viewer-secret", "back": back}
            away = page.request.post(f"{url}/sign-in", form=form, max_redirects=0)
            assert away.headers["location"] == "/"
        for body, kind in ((b"token=\xff", FORM), (b"token=a", "multipart/form-data")):
            kinds = {"Content-Type": kind}
            sent = page.request.post(f"{url}/sign-in", data=body, headers=kinds)
            assert sent.status == 400
        strange = {"Cookie": f"forebay_pass_{port}=9999999999.\xff"}
        followed = {"Cookie": f"{cookie['name']}={cookie['value']}"}
        context = ssl.create_default_context(cafile=server["tls_ca"])
        with contextlib.ExitStack() as stack:
            for headers, status in ((strange, 401), (followed, 200)):
                connection = http.client.HTTPSConnection("localhost", port, context=context)
                stack.callback(connection.close)
                connection.request("GET", "/live?view=overview", headers=headers)
                answered = stack.enter_context(connection.getresponse())
                assert answered.status == status
            rules.write_text('[[grant]]\nto = ["trainer"]\nroles = ["viewer"]\n')
            assert b"event: gone" in answered.read()  # to its end
