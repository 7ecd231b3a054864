"""The HTTP port itself: who is let in, what is refused, and the form of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import resource
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.service import Credentials
from forebay.service.client import metrics as of_clients
from forebay.service.connections.access import AccessRules
from forebay.service.connections.admission import Admission
from forebay.service.connections.credentials import client_context
from forebay.service.dispatcher import metrics as of_dispatchers
from forebay.service.dispatcher import server as dispatcher_server
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.permissions import Permissions
from forebay.service.errors import AddressInUse
from forebay.service.http import acceptor, families, server
from forebay.service.http.exposition import encode
from forebay.service.http.families import Buckets, Family, Measured, Tallies
from forebay.service.http.server import HttpServer, HttpThread
from forebay.service.worker import metrics as of_workers
from forebay.service.worker.options import WorkerOptions
from forebay.service.worker.worker import Worker

from ..certificates import Authority, token
from ..standbys import wait_until

DOCS = Path(__file__).parent.parent.parent / "docs" / "operations.md"
NASTY = [
    '"}\n# TYPE a counter\na 1\n',
    "back\\slash\\",
    "\r\0\x1b[2J",
    "<script>",
    "",
    10_000 * "ä",
]


def declared() -> list[Family]:
    """The families of servers, dispatchers, workers and clients, in the order of their modules."""
    found: list[Family] = []
    for module in (families, of_dispatchers, of_workers, of_clients):
        for kept in vars(module).values():
            some = kept.values() if isinstance(kept, dict) else [kept]
            found += [one for one in some if isinstance(one, Family)]
    return [*dict.fromkeys(found)]


def any_value(family: Family, *labels: str) -> Measured:
    histogram = family.kind == "histogram"
    return family(Buckets([("0.5", 1.0), ("+Inf", 2.0)], 3.0) if histogram else 7, *labels)


def all_families() -> list[Measured]:
    """Each family, and a nasty value of each label."""
    return [
        any_value(family, *[text] * len(family.labels))
        for family in declared()
        for text in (NASTY if family.labels else [""])
    ]


class Everything:
    """Tells of all families."""

    why_not = ""

    def unhealthy(self) -> str:
        return ""

    def unready(self) -> str:
        return self.why_not

    async def measured(self) -> Sequence[Measured]:
        return all_families()


@contextlib.contextmanager
def served(
    credentials: Credentials | None = None, permissions: Permissions | None = None
) -> Iterator[tuple[Everything, int]]:
    observed = Everything()
    may_see = None if permissions is None else permissions.check_metrics
    thread = HttpThread(HttpServer(observed, credentials, may_see))
    thread.start("127.0.0.1", 0)
    try:
        yield observed, int(thread.address.rpartition(":")[2])
    finally:
        thread.stop()
        thread.stop()


def get(
    port: int, path: str, tls: ssl.SSLContext | None = None, authorization: bytes = b""
) -> tuple[int, str]:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        if tls is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=tls)
    )
    with contextlib.closing(connection):
        headers = {"Authorization": authorization} if authorization else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_nothing_is_injected_and_a_browser_may_leave(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    with served() as (observed, port):
        for said in (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\0\xff\n", b"GET "):
            with socket.create_connection(("127.0.0.1", port)) as browser:
                browser.sendall(said)  # and does not wait
        code, text = get(port, "/metrics")
        assert code == 200
        families = list(text_string_to_metric_families(text))
        ours = {family.name for family in declared()}
        names = {sample.name for family in families for sample in family.samples}
        assert ours <= names | {re.sub("_(bucket|sum|count)$", "", name) for name in names}
        foreign = {f.name for f in families if not f.name.startswith("forebay_")}
        assert all(name.startswith(("process_", "python_")) for name in foreign)
        labels = [v for f in families for s in f.samples for v in s.labels.values()]
        assert max(map(len, labels)) == 100
        assert all(label.isprintable() for label in labels)
        assert get(port, "/readyz") == (200, "ok\n")
        observed.why_not = "stands by, leader h:1"
        assert get(port, "/readyz") == (503, "stands by, leader h:1\n")
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/etc/passwd")[0] == 404
    assert set(threading.enumerate()) <= before
    assert [r for r in caplog.records if r.exc_info] == []


def ended(connection: socket.socket) -> bool:
    """Whether the server ends it; waits for that, or for an answer."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1000) == b""
    return True


def test_who_floods_the_port_harms_himself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HEAD_S", 2.0)
    with served() as (_, port), contextlib.ExitStack() as stack:

        def connect(host: str = "127.0.0.2") -> socket.socket:
            made = socket.create_connection(("127.0.0.1", port), 30, source_address=(host, 0))
            return stack.enter_context(made)

        silent = [connect() for _ in range(acceptor.MOST_OF_ADDRESS)]
        assert all(ended(connect()) for _ in range(20))
        assert get(port, "/healthz")[0] == 200  # of another address
        slow = silent[0]
        slow.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while not select.select([slow], [], [], 0.1)[0]:
                slow.sendall(b"A: b\r\n")
        assert all(map(ended, silent))
        for _ in range(20):
            garbage = connect()
            garbage.sendall(b"GET / HTTP/1.1\r\nContent-Length: \xff\r\n\r\n")
            assert b" 400 " in garbage.recv(1000)
        others = [stack.enter_context(socket.socket()) for _ in range(2)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for other in others:
                other.connect(("127.0.0.1", port))
            wait_until(lambda: "cannot accept a connection" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert get(port, "/healthz")[0] == 200
    assert [r for r in caplog.records if r.exc_info] == []
    said = [r.getMessage().partition(" ")[0] for r in caplog.records if r.name != "asyncio"]
    assert sorted(said) == ["a", "cannot", "closed", "cut"], "each once, however often it was"


def test_a_body_that_breaks_off_or_is_late_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.5)
    head = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\na"
    with served() as (_, port):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as breaks_off:
                breaks_off.sendall(head)
                time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", port)) as late:
            late.sendall(head)
            assert late.recv(1000).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", port)) as garbage:
            garbage.sendall(head.replace(b"100\r\n", b"4\r\nContent-Encoding: gzip\r\n") + b"bcd")
            assert garbage.recv(1000).startswith(b"HTTP/1.1 408 ")
    said = [r.getMessage() for r in caplog.records if r.name != "asyncio"]
    assert len([line for line in said if "was cut off" in line]) == 1, said
    assert [r for r in caplog.records if r.exc_info] == []


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("[::1]", 200), ("127.0.0.7", 200), ("evil.example", 421), ("[", 421)],
)
def test_on_loopback_a_name_that_is_not_this_hosts_is_refused(host: str, status: int) -> None:
    """It may be a page's that has its name lead here, to read what a browser gets here."""
    with served() as (_, port), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert sock.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def test_metrics_need_a_certificate_and_probes_do_not(authority: Authority, tmp_path: Path) -> None:
    server, client = authority.issue("server"), authority.issue("prometheus", "p.example")
    without = ssl.create_default_context(cafile=server.tls_ca)
    with served(server) as (_, port):
        assert get(port, "/healthz", without)[0] == get(port, "/readyz", without)[0] == 200
        code, text = get(port, "/metrics", without)
        assert code == 401
        assert "no certificate was sent" in text
        assert get(port, "/metrics", client_context(client))[0] == 200
        stranger = Authority(tmp_path / "other").issue("stranger")
        theirs = ssl.create_default_context(cafile=server.tls_ca)
        theirs.load_cert_chain(stranger.tls_cert, stranger.tls_key)
        with pytest.raises(OSError):  # TLS itself refuses it
            get(port, "/metrics", theirs)

        def shown() -> bytes | None:
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                without.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                return connection.getpeercert(binary_form=True)

        before = shown()
        authority.issue("server")
        wait_until(lambda: shown() != before)
        assert get(port, "/metrics", client_context(client))[0] == 200
        with pytest.raises(OSError):
            get(port, "/healthz")


def test_metrics_need_a_token_and_probes_do_not(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("tokens")
    secret = token(tmp_path / "cluster.token", "secret\n")
    server = Credentials(
        tls_ca=files.tls_ca, tls_cert=files.tls_cert, tls_key=files.tls_key, token_file=secret
    )
    tls = ssl.create_default_context(cafile=files.tls_ca)
    with served(server) as (_, port):
        assert get(port, "/readyz", tls)[0] == 200
        for wrong in (
            b"",
            b"Bearer ",
            b"Bearer wrong",
            b"secret",
            b"Bearer \xff\xfe",
            b"Basic eDp4",
        ):
            code, text = get(port, "/metrics", tls, wrong)
            assert code == 401
            assert "secret" not in text
        assert get(port, "/metrics", tls, b"Bearer secret")[0] == 200


def test_an_access_file_says_who_sees_metrics(authority: Authority, tmp_path: Path) -> None:
    server = authority.issue("guarded")
    rules = tmp_path / "access.toml"
    rules.write_text('[[grant]]\nto = ["prometheus"]\nroles = ["viewer"]\n')
    permissions = Permissions(AccessRules(str(rules)), Admission(server))
    with served(server, permissions) as (_, port):
        viewer, trainer = (
            client_context(authority.issue(name, "x.example")) for name in ("prometheus", "trainer")
        )
        assert get(port, "/metrics", viewer)[0] == 200
        code, text = get(port, "/metrics", trainer)
        assert code == 403
        assert "it needs the role operator or viewer, and has none" in text
        assert get(port, "/readyz", trainer)[0] == 200


@pytest.mark.parametrize("kind", ["dispatcher", "worker"])
def test_a_port_in_use_is_an_error_in_words(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            AddressInUse, match=f"--http-port: cannot listen on .*:{port}: it is in"
        ):
            if kind == "dispatcher":
                asyncio.run(dispatcher_server.serve(DispatcherOptions(http_port=port), print))
            else:
                Worker(WorkerOptions(dispatcher="127.0.0.1:1", http_port=port)).start()


def test_labels_are_bounded_and_no_sum_shrinks() -> None:
    family = Family("forebay_x_total", "counter", "", ("job_id",))
    tallies, before = Tallies(most=3), 0.0
    for number in range(10):
        for job in (number, 0, number // 2):
            tallies.add(str(job), {"x": 2})
        found = [*tallies.measured({"x": family})]
        assert len(found) <= 4
        total = sum(one.value for one in found if not isinstance(one.value, Buckets))
        assert total == before + 6
        before = total
        other = [one.value for one in found if one.labels == ("other",)]
        assert bool(other) == (number >= 3)


def test_the_documentation_has_each_metric() -> None:
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in DOCS.read_text().splitlines()
        if line.startswith("| `forebay_")
    ]
    wanted = [
        [f"`{f.name}`", f.kind, ", ".join(f"`{label}`" for label in f.labels), f.help]
        for f in declared()
    ]
    assert rows == wanted


@pytest.mark.long
def test_promtool_finds_nothing_to_mend() -> None:
    text, _ = encode(all_families(), "")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
