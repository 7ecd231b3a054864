"""The pages of the dashboard, on the HTTP port of a dispatcher.

    GET  /            what is wrong, plots, jobs, workers
    GET  /jobs/7      a job: its progress, its splits as a picture, its consumers
    GET  /events      the journal's events, searched, newest first
    GET  /past?at=7   all of it as of an event
    GET  /live        server-sent events: the parts of a page that have changed
    POST /sign-in     a token, for which a browser is given a pass

Nobody but who may scrape the metrics sees any of them. They change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlencode

import jinja2
from aiohttp import web
from aiohttp.http import HttpProcessingError

from ..diagnosis import findings
from ..errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated, Unavailable
from ..findings import job_name
from ..http.server import HEADERS, Handler, HttpServer
from ..slicing import in_slices
from . import split_map, views
from .series import HEIGHT, WIDTH, Series

FOLDER = pathlib.Path(__file__).parent

LIVE_S = 2.0
"""How often a page is brought up to date."""

KEPT_S = 1.0
"""For how long what was rendered serves others who ask for the same."""

MOST_KEPT = 64

PASS_S = 12 * 3600
"""How long a browser is let in with the token that it was given once."""

MOST_LIVE_EVENTS = 100

MOST_FOLLOWING, MOST_OF_ADDRESS = 128, 16
"""Pages that are followed at a time, in all and from one address: connections are left for probes
and scrapes, which may come from the same one."""

FORM = "application/x-www-form-urlencoded"

OWN_PATH = re.compile(r"/(?!/)[!-\[\]-~]*")  # browsers take a backslash for a slash, and skip tabs

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {**HEADERS, "Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
FILES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}

PARTS = {
    "overview": ("head", "findings", "jobs", "workers", "plots", "notes"),
    "job": ("head", "job", "plots", "maps", "job_workers", "consumers"),
    "events": ("head",),
}
"""The parts of each page that are brought up to date."""

Query = Mapping[str, str]


class SampledLoads(Protocol):
    """Of a dispatcher that leads."""

    series: Series
    job_series: dict[int, Series]
    notes: Any  # events worth a look, the latest last
    since_ms: int


class DispatcherView(Protocol):
    """What is shown of a dispatcher."""

    @property
    def samples(self) -> SampledLoads: ...
    def role(self) -> dict[str, Any]: ...
    def durable(self) -> int: ...
    async def status(self) -> dict[str, Any]: ...
    def consumers(self, job_id: int) -> dict[int, dict[str, float | None]]: ...
    async def maps(self, job_id: int, worker: str) -> dict[int, list[dict[str, Any]]]: ...
    def recent(
        self, after: int, most: int, folded: dict[str, Any] | None
    ) -> tuple[list[dict[str, Any]], int]: ...


class JournalReader(Protocol):
    """Reads the journal's past."""

    async def ask(self, **request: Any) -> Any:
        """`do="events"` or `do="at"`. Raises InvalidArgument and Unavailable."""

    async def close(self) -> None: ...


class Pages:
    """Adds its routes to a server. Everything runs on that server's event loop."""

    def __init__(self, server: HttpServer, source: DispatcherView, reader: JournalReader) -> None:
        self._server = server
        self._source = source
        self._reader = reader
        self._kept: dict[str, tuple[float, dict[str, str]]] = {}  # parts by page
        self._status: tuple[float, dict[str, Any]] = (0.0, {})
        self._one = asyncio.Lock()
        self._closing = asyncio.Event()
        self._following: Counter[str] = Counter()  # pages, by address
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True,
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters |= views.FILTERS
        self._templates.globals |= {
            "states": split_map.STATES, "plot_width": WIDTH, "plot_height": HEIGHT,
            "worker_columns": [*views.COLUMNS], "mark_kinds": views.MARKS,
        }  # fmt: skip
        routes = server.app.router
        for path, handler in (
            ("/", self._overview), ("/jobs/{id}", self._job), ("/events", self._events),
            ("/past", self._past_page), ("/live", self._live),
        ):  # fmt: skip
            admitted = server.admitted(self._answered(handler), self._refused)
            routes.add_get(path, admitted, allow_head=path != "/live")
        routes.add_post("/sign-in", self._sign_in)
        for name, kind in FILES.items():
            routes.add_get(f"/{name}", _file(FOLDER / "static" / name, kind))
        server.app.on_shutdown.append(self._close)

    async def _close(self, _: web.Application) -> None:
        self._closing.set()
        await self._reader.close()

    # -- pages ---------------------------------------------------------------------------------

    async def _overview(self, request: web.Request) -> web.StreamResponse:
        return await self._page("overview", request.query)

    async def _job(self, request: web.Request) -> web.StreamResponse:
        return await self._page("job", {**request.query, "id": request.match_info["id"]})

    def _title(self, query: Query) -> str:
        """Of a job's page: its name."""
        jobs = {str(job["job_id"]): job for job in self._status[1].get("jobs", [])}
        job = jobs.get(query.get("id", ""))
        return f"Job {query.get('id')}" if job is None else job_name(job)

    async def _page(self, view: str, query: Query, **more: Any) -> web.Response:
        role = self._source.role()
        parts = await self._parts(view, query)
        more["title"] = self._title(query)
        live = urlencode({**query, "view": view})
        text = self._templates.get_template(f"{view}.html").render(
            role=role, parts=parts, query=query, live=f"/live?{live}", **more
        )
        return _html(text)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        before = _whole(query.get("before", "0"), "before")
        text, shows_all = query.get("q", "")[:200], bool(query.get("all"))
        found = await self._ask(
            do="events", before=before, query=text, known=self._source.durable(),
            folds=not (text or shows_all),
        )  # fmt: skip
        kinds: Counter[str] = Counter()
        for event in found["events"]:
            kinds.update(event.get("quiet") or (event["name"],))
        about = {"q": text, **({"all": "1"} if shows_all else {})}
        return await self._page(
            "events", about, found=found, newest=not before, kinds=kinds.most_common()
        )

    async def _past_page(self, request: web.Request) -> web.StreamResponse:
        query, role = request.query, self._source.role()
        sequence = _whole(query.get("at", ""), "at")
        job_id = _whole(query.get("job", "0"), "job")
        if (durable := self._source.durable()) and sequence > durable:
            raise InvalidArgument(f"there is no event {sequence}: the newest one is {durable}")
        found = await self._ask(do="at", sequence=sequence, job_id=job_id)
        status = {"journal": None, "storage": None, "wanted_workers": None, **found["status"]}
        rows = views.jobs(status)
        job = next((row for row in rows if row["id"] == job_id), None)
        maps = [(i, views.picture(each)) for i, of in found["maps"].items() for each in of]
        page = views.workers(status, "worker", "", _whole(query.get("page", "1"), "page"))
        text = await self._rendered(
            "past.html", role=role, found=found, status=status, jobs=rows, workers=page, job=job,
            view="past", job_id=job_id, pictures=maps, query=query, sort="worker", past=sequence,
            live="",
        )  # fmt: skip
        return _html(text)

    async def _ask(self, **request: Any) -> Any:
        """What the journal's reader answers. Raises Unavailable at once while the storage hangs."""
        role = self._source.role()
        if role["leads"] and role["why_not"]:
            raise Unavailable(f"the past cannot be read: this dispatcher {role['why_not']}")
        return await self._reader.ask(**request)

    def _answered(self, handler: Handler) -> Handler:
        """The handler, with a page for each error."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except InvalidArgument as error:
                return self._said(400, "This cannot be shown", error)
            except NotFound as error:
                return self._said(404, "Not found", error)
            except Unavailable as error:
                return self._said(503, "Not now", error)

        return answer

    def _said(self, status: int, title: str, error: Exception) -> web.Response:
        page = self._templates.get_template("said.html")
        text = page.render(role=self._source.role(), title=title, said=str(error), live="")
        return _html(text, status)

    # -- parts ---------------------------------------------------------------------------------

    async def _parts(self, view: str, query: Query) -> dict[str, str]:
        """The HTML of a page's parts, by their names; some moments old, if others have asked."""
        key = json.dumps([view, sorted(query.items())])
        async with self._one:
            at_s, parts = self._kept.get(key, (0.0, {}))
            if not parts or time.monotonic() > at_s + KEPT_S:
                parts = await self._make_parts(view, query)
                if len(self._kept) >= MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = time.monotonic(), parts
        return parts

    async def _make_parts(self, view: str, query: Query) -> dict[str, str]:
        source, role = self._source, self._source.role()
        about: dict[str, Any] = {
            "role": role,
            "query": query,
            "view": view,
            "past": 0,
            "now_ms": time.time_ns() // 10**6,
        }
        nothing = dict.fromkeys(PARTS[view], "")  # nothing that was so under another leader
        if not role["leads"]:
            return nothing | {"head": await self._rendered("parts/head.html", **about, status={})}
        at_s, status = self._status
        if time.monotonic() > at_s + KEPT_S:
            status = await source.status()
            self._status = time.monotonic(), status
        about |= {"status": status, "since_ms": source.samples.since_ms}
        if not status:
            return nothing
        if view == "overview":
            sort, page = query.get("sort", "worker"), _whole(query.get("page", "1"), "page")
            about |= {
                "findings": findings(status), "now_s": time.time(), "jobs": views.jobs(status),
                "plots": views.plots(source.samples.series, source.samples.notes), "sort": sort,
                "workers": views.workers(status, sort, query.get("worker", "")[:200], page),
                "notes": [*source.samples.notes][::-1],
            }  # fmt: skip
        if view == "job":
            job_id, worker = _whole(query.get("id", ""), "the job"), query.get("worker", "")[:200]
            found = [row for row in views.jobs(status) if row["id"] == job_id]
            if not found:
                raise NotFound(
                    f"there is no job {job_id}, or it is no more: the overview lists those there "
                    "are, and the past those there were"
                )
            maps, series = await source.maps(job_id, worker), source.samples.job_series.get(job_id)
            about |= {
                "job": found[0],
                "plots": views.job_plots(series, source.samples.notes, found[0]["errors"]),
                "pictures": [(i, views.picture(each)) for i, of in maps.items() for each in of],
                "consumers": views.consumers(found[0]["running"], source.consumers(job_id)),
                "worker": worker, "by_worker": views.of_job(found[0]["load"], status["memory"]),
            }  # fmt: skip
        return {name: await self._rendered(f"parts/{name}.html", **about) for name in PARTS[view]}

    async def _rendered(self, name: str, **about: Any) -> str:
        return "".join(await in_slices(self._templates.get_template(name).generate(**about)))

    async def _live(self, request: web.Request) -> web.StreamResponse:
        query = {k: v for k, v in request.query.items() if k != "view"}
        view = request.query.get("view", "")
        if view not in PARTS:
            raise InvalidArgument(f"there is no page {view!r}")
        host = request.remote or ""
        if self._following[host] >= MOST_OF_ADDRESS or self._following.total() >= MOST_FOLLOWING:
            raise Unavailable(
                f"{self._following.total()} pages follow this dispatcher, {self._following[host]} "
                f"of them from {host}: at most {MOST_FOLLOWING} may, and {MOST_OF_ADDRESS} from one"
                " address; close some"
            )
        self._following[host] += 1
        try:
            return await self._follow(request, view, query)
        finally:
            self._following -= Counter((host,))

    async def _follow(self, request: web.Request, view: str, query: Query) -> web.StreamResponse:
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent: dict[str, str] = {}
        after, folded = self._source.durable(), dict[str, Any]()
        with contextlib.suppress(ConnectionError):  # the browser has left
            while not self._closing.is_set():
                try:
                    self._server.admit(request)  # tokens and roles may change meanwhile
                    parts = await self._parts(view, query)
                except (NotFound, InvalidArgument, Unauthenticated, PermissionDenied) as error:
                    await _send(response, "gone", str(error))
                    break
                for name, html in parts.items():
                    if sent.get(name) != html:
                        await _send(response, "part", {"name": name, "html": html})
                sent = parts
                if view == "events":
                    text = query.get("q", "").lower()
                    folds = not (text or query.get("all"))
                    events, missed = self._source.recent(
                        after, MOST_LIVE_EVENTS, folded if folds else None
                    )
                    if events:
                        after = events[-1].get("to", events[-1]["sequence"])
                        html = self._templates.get_template("parts/rows.html").render(
                            events=[e for e in events[::-1]
                                    if folds or text in f"{e['name']} {e['fields']}".lower()],
                            missed=missed,
                        )  # fmt: skip
                        # The newest row is of quiet events, which go on: it comes again.
                        await _send(response, "events", {"html": html, "again": bool(folded)})
                        folded = events[-1] if "quiet" in events[-1] else {}
                await _send(response, "alive", "")
                self._server.stays(request)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), LIVE_S)
        return response

    # -- who is let in -------------------------------------------------------------------------

    def _refused(self, request: web.Request, status: int, error: Exception) -> web.Response:
        """With a form for a token, where a token is asked for."""
        return self._sign_in_page(str(error), request.path_qs, status)

    def _sign_in_page(self, said: str, back: str, status: int) -> web.Response:
        page = self._templates.get_template("sign_in.html")
        asks = self._server.asks_for_token
        return _html(page.render(said=said, asks=asks, back=back, live=""), status)

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        if not self._server.asks_for_token:
            raise web.HTTPSeeOther("/")
        try:
            if request.content_type != FORM:
                raise ValueError(request.content_type)
            form = dict(parse_qsl((await request.read()).decode()))
        except (ValueError, web.RequestPayloadError, HttpProcessingError):
            return self._sign_in_page(f"this is no form: send {FORM} in UTF-8", "/", 400)
        given, back = form.get("token", "").strip(), form.get("back", "/")
        if not OWN_PATH.fullmatch(back):
            back = "/"  # never to another server
        try:
            issued = self._server.issue_pass(given, PASS_S)
        except Unauthenticated as error:
            self._server.rate_limited_log.warn(
                "refused %s, who signs in with no token", request.remote
            )
            return self._sign_in_page(str(error), back, 401)
        response = web.Response(status=303, headers={**PAGE_HEADERS, "Location": back})
        response.set_cookie(
            self._server.cookie,
            issued,
            max_age=PASS_S,
            httponly=True,
            secure=request.secure,
            samesite="Strict",
        )
        return response


def _file(path: pathlib.Path, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    text = path.read_text()

    async def answer(_: web.Request) -> web.Response:
        response = web.Response(text=text, content_type=kind, headers=HEADERS)
        response.enable_compression()
        return response

    return answer


def _html(text: str, status: int = 200) -> web.Response:
    response = web.Response(
        text=text, status=status, content_type="text/html", headers=PAGE_HEADERS
    )
    response.enable_compression()
    return response


async def _send(response: web.StreamResponse, event: str, data: Any) -> None:
    await response.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())


def _whole(text: str, name: str) -> int:
    """Raises InvalidArgument."""
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidArgument(f"{name} is no number: {text[:100]!r}")
    return int(text)
