"""A hub like Hugging Face's, on loopback: the routes that huggingface_hub asks for, to read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_aTokenThatNobodyMaySee"


class Hub:
    """Repositories of data sets, with their commits."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Mapping[str, bytes]]] = {}  # files, by repository and sha
        self.main: dict[str, str] = {}  # the newest commit of each
        self.private: set[str] = set()
        self.asked: list[str] = []  # paths, with the bytes that were asked for
        self.url = ""
        self.home = ""  # a directory without a token, for HF_HOME

    def commit(self, repository: str, files: Mapping[str, bytes]) -> str:
        commits = self.commits.setdefault(repository, {})
        sha = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[sha], self.main[repository] = dict(files), sha
        return sha

    def answer(self, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[0] == "api":
            parts = parts[1:] if len(parts) > 4 else [*parts[1:], "revision", "main"]
        if parts[0] != "datasets":
            return _NO_ENTRY  # the library may ask for more, and does without
        _, owner, name, what, revision, *rest = parts
        repository, place = f"{owner}/{name}", "/".join(rest)
        token = headers.get("Authorization")
        if repository not in self.commits or (
            repository in self.private and token != f"Bearer {TOKEN}"
        ):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        sha = self.main[repository] if revision == "main" else revision
        if (files := self.commits[repository].get(sha)) is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if what == "revision":
            return 200, {}, json.dumps({"id": repository, "sha": sha}).encode()
        if what == "tree":
            below = f"{place}/" if place else ""
            entries = [
                {
                    "type": "file",
                    "path": one,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for one, data in files.items()
                if one.startswith(below)
            ]
            return (200, {}, json.dumps(entries).encode()) if entries else _NO_ENTRY
        if place not in files:
            return _NO_ENTRY
        first, last = map(int, headers["Range"].removeprefix("bytes=").split("-"))
        return 206, {}, files[place][first : last + 1]


_NO_ENTRY = 404, {"X-Error-Code": "EntryNotFound"}, b"{}"


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(f"{self.path} {self.headers.get('Range', '')}".strip())
            status, headers, body = hub.answer(self.path, self.headers)  # type: ignore[arg-type]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
