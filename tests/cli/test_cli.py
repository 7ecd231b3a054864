"""The command line: what it prints, its exit codes, and one-line errors that say what to do."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.service.address_forms import is_address
from forebay.service.cli import app, extras, main
from forebay.service.cli.console import plain_console
from forebay.service.cli.dataset import render as render_datasets
from forebay.service.cli.status import render
from forebay.service.client.datasets import DatasetInfo, list_datasets, remove_dataset
from forebay.service.client.dispatcher_status import wait_for_workers
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.structure import describe
from forebay.storage import Locked, open_storage

from .. import forks
from ..postgres_server import PASSWORD, schema_of
from ..redis_server import opened_keys
from ..stock import GRAPH, DispatcherProcess
from ..terminals import written_to
from ..transfer_servers import SERVERS

NO_MARKUP = "[/bold]j:tiger:"
"""A name that rich would fail at, or change."""


def forebay(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return forebay_within(60, *arguments, **environment)


def forebay_within(
    timeout_s: float, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["-m", "forebay.service.cli", *map(str, arguments)]
    return forks.run(command, timeout_s, forks.DISPATCHER, environment)


def error_of(*arguments: object, code: int = 1, **environment: str) -> str:
    return line_of(forebay(*arguments, **environment), code)


def line_of(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The one line that a command that fails says."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("forebay: "), done.stderr
    return lines[0]


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[DispatcherProcess]:
    with DispatcherProcess(tmp_path / "journal") as running:
        with DispatcherClient(running.target) as client:
            register = pb.RegisterDatasetRequest(graph=GRAPH, sources=[ev.SplitSource(count=9)])
            dataset_id = client.call(register, pb.RegisterDatasetResponse).dataset_id
            request = pb.GetOrCreateJobRequest(
                dataset_id=dataset_id, job_name="j", sharding="DYNAMIC"
            )
            job = client.call_numbered(request, pb.GetOrCreateJobResponse)
            join = pb.JoinIterationRequest(job_id=job.job_id)
            client.call_numbered(join, pb.JoinIterationResponse)
        yield running


class TestErrors:
    def test_usage(self) -> None:
        assert "--bogus" in error_of("dispatcher", "--bogus", code=2)
        assert "'nonsense'" in error_of("nonsense", code=2)
        assert "--dispatcher" in error_of("worker", code=2)
        assert "65535" in error_of("dispatcher", "--port", 99999, code=2)
        assert "FOREBAY_PORT" in error_of("dispatcher", code=2, FOREBAY_PORT="many")
        assert "is not UTF-8" in error_of("dataset", "remove", "127.0.0.1:1", "\udcff", code=2)
        assert "the id of a dataset is missing" in error_of("dataset", "remove", "h:1", code=2)
        assert "Missing argument 'service'" in error_of("materialize", "--output=/x", code=2)
        materialize = ("materialize", "h:1", "id", "--output=/x")
        for misspelt, meant in (("--shard", "--shards"), ("--verfy", "--verify")):
            wanted = f"there is no option {misspelt}: did you mean {meant}?"
            assert wanted in error_of(*materialize, misspelt, "5", code=2)
        assert forebay("--help").returncode == 0
        assert forebay("--version").stdout == f"forebay {version('forebay')}\n"
        assert forebay().returncode == 2

    def test_every_option_can_come_from_the_environment(self) -> None:
        group = typer.main.get_command(app)
        assert isinstance(group, typer.core.TyperGroup)
        nested = [g for g in group.commands.values() if isinstance(g, typer.core.TyperGroup)]
        assert [g.name for g in nested] == ["dataset", "job", "journal"]
        inner = [command for g in nested for command in g.commands.values()]
        kinds: dict[object, object] = {}
        for command in [*group.commands.values(), *inner]:
            for option in command.params:
                if isinstance(option, typer.core.TyperOption) and not option.hidden:
                    expected = option.opts[0].strip("-").replace("-", "_").upper()
                    names = (f"FOREBAY_{expected}", f"FOREBAY_{command.name}_{expected}".upper())
                    assert option.envvar in names, f"{command.name} {option.opts}"
                    kind = (type(option.type), option.multiple)
                    assert kinds.setdefault(option.envvar, kind) == kind, option.envvar

    @pytest.mark.parametrize(
        ("command", "missing", "wanted"),
        [
            ("chaos", ["forebay.chaos"], "[chaos]"),
            ("bench", ["forebay.benchmarks", "tensorflow"], "[bench,tensorflow]"),
        ],
    )
    def test_a_command_whose_extra_is_not_installed(
        self,
        command: str,
        missing: list[str],
        wanted: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(extras, "find_spec", lambda module: None if module in missing else "")
        monkeypatch.setattr(sys, "argv", ["forebay", command])
        monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
        with pytest.raises(SystemExit, match=r"^1$"):
            main()
        assert capsys.readouterr().err == (
            f"forebay: `forebay {command}` needs {' and '.join(missing)}, not installed here: "
            f"pip install '.{wanted}' ./deploy/tools in a clone of Forebay\n"
        )

    def test_an_address_that_nobody_could_connect_to(self) -> None:
        for right in (
            *("10.0.0.6:1", "[::1]:65535", "[fe80::1%eth0]:1", "localhost:1", "a-b.example.org.:1"),
            *("project_worker_1:5051", "worker-0.forebay.ns.svc.cluster.local:1", "3f0c:1"),
        ):
            assert is_address(right), right
        for wrong in (
            *("a b c:xx", "host", "host:0", "host:99999", "ho st:1", "ho'st:1", 'a":1', "<b>:1"),
            *("a..b:1", ".:1", "-a:1", "a\n:1", "h\u00f6st:1", "::1:1", "[::x]:1", "256.1.1.1:1"),
            *(f"{64 * 'a'}:1", f"{130 * 'a.'}b:1", "\udcff:1", "a/b:1", "a@b:1"),
        ):
            assert not is_address(wrong), wrong
        everywhere = ("--host=0.0.0.0", "--insecure")
        assert "--address HOST:%port%" in error_of("dispatcher", *everywhere)
        assert "HOST:" in error_of("worker", "--dispatcher=127.0.0.1:1", *everywhere)

    @pytest.mark.parametrize(
        ("name", "wrong", "what"),
        [
            ("HOST", "not a host", "the host 'not a host' is not a name (letters"),
            ("ADDRESS", "ho'st:%port%", """"ho'st:%port%" is not of the form HOST:PORT"""),
            ("DATA_ADDRESS", "a:b", "'a:b' is not of the form HOST:PORT"),
            ("DISPATCHER", "a b:1", "service address 'a b:1' is not of the form"),
        ],
    )
    def test_a_wrong_variable_is_named(self, name: str, wrong: str, what: str) -> None:
        given = {"FOREBAY_DISPATCHER": "127.0.0.1:1", f"FOREBAY_{name}": wrong}
        message = error_of("worker", code=2, **given)
        assert what in message and f"'FOREBAY_{name}'" in message

    def test_a_level_to_log_at(self) -> None:
        assert "'loud'" in error_of("dispatcher", FOREBAY_LOG_LEVEL="loud")
        # It is taken in either case; the next thing that is wrong is said.
        done = forebay("dispatcher", "--storage=ftp://x", FOREBAY_LOG_LEVEL="debug")
        assert " DEBUG " in done.stderr and "forebay: storage 'ftp://x'" in done.stderr

    def test_a_storage_that_cannot_be_used(self, tmp_path: Path) -> None:
        message = error_of("dispatcher", FOREBAY_STORAGE="ftp://host/x")
        assert "scheme" in message and message.endswith("(--storage, FOREBAY_STORAGE)")
        assert "can be made" in error_of("dispatcher", "--storage", "/proc/forebay")
        (tmp_path / "file").write_text("")
        assert str(tmp_path / "file") in error_of("dispatcher", "--storage", tmp_path / "file")

    def test_a_second_dispatcher_on_a_journal(
        self, dispatcher: DispatcherProcess, tmp_path: Path
    ) -> None:
        message = error_of("dispatcher", "--storage", tmp_path / "journal")
        assert "in use" in message and dispatcher.address in message

    def test_a_port_in_use(self, dispatcher: DispatcherProcess) -> None:
        port = dispatcher.address.rpartition(":")[2]
        for server in (["dispatcher"], ["worker", "--dispatcher", dispatcher.address]):
            # Not a fork: gRPC is silenced before it is imported.
            command = [sys.executable, "-m", "forebay.service.cli", *server, "--port", port]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert "choose another" in line_of(done)

    def test_a_journal_of_a_newer_format(self, tmp_path: Path) -> None:
        storage = open_storage(str(tmp_path))
        writer = storage.open_writer("test")
        elected = ev.LeaderElected(term=1, format=99)
        writer.append([encode(ev.Event(leader_elected=elected))])
        writer.close()
        before = {p: p.read_bytes() for p in (tmp_path / "segments").iterdir()}
        assert "upgrade" in error_of("dispatcher", "--storage", tmp_path)
        assert "upgrade" in error_of("journal", "show", tmp_path)
        assert before == {p: p.read_bytes() for p in (tmp_path / "segments").iterdir()}

    def test_a_corrupt_journal(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        dispatcher.stop()
        journal = tmp_path / "journal"
        segment = min((journal / "segments").iterdir())
        whole = data = bytearray(segment.read_bytes())
        segment.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        for at in ([], ["--at", "1"]):
            shown = forebay("journal", "show", journal, *at)
            assert "127.0.0.1" in shown.stdout, "what comes before the damage is shown"
            assert at or (shown.returncode == 1 and segment.name in shown.stderr)
        data[40] ^= 1
        segment.write_bytes(data)
        message = error_of("dispatcher", "--storage", journal)
        assert segment.name in message and re.search(r"\d", message)
        verified = forebay("journal", "verify", journal)
        assert verified.returncode == 1
        assert segment.name in verified.stdout
        assert "checksum" in error_of("journal", "repair", journal)
        assert bytes(data) == segment.read_bytes(), "nothing was changed"
        repaired = forebay("journal", "repair", journal, "--truncate-corrupt")
        assert repaired.returncode == 0, repaired.stderr
        assert any(bytes(data[40:80]) in p.read_bytes() for p in journal.rglob("*") if p.is_file())

    def test_a_worker_that_cannot_reach_its_dispatcher(self) -> None:
        done = forebay("worker", "--dispatcher=127.0.0.1:1", "--dispatcher-timeout-ms=300")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert "no dispatcher answers at 127.0.0.1:1" in last and "Traceback" not in done.stderr

    def test_a_path_that_holds_no_journal(self, tmp_path: Path) -> None:
        for command in ("show", "verify", "repair"):
            assert "no journal" in error_of("journal", command, tmp_path / "nothing")

    def test_status_of_nobody(self) -> None:
        assert "is it running" in error_of("status", "127.0.0.1:1")
        assert "host:port" in error_of("status", "nowhere")


class TestJournal:
    def test_show_while_it_is_in_use(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        journal = tmp_path / "journal"
        shown = forebay("journal", "show", journal)
        names = [line.split()[2] for line in shown.stdout.splitlines()]
        assert names == [
            "LeaderElected", "DatasetRegistered", "JobCreated",
            "IterationCreated", "ConsumerJoined",
        ]  # fmt: skip
        lines = forebay("journal", "show", journal, "--limit", 2, "--json").stdout.splitlines()
        assert [json.loads(line)["sequence"] for line in lines] == [4, 5]

    def test_the_state_as_of_an_event(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        journal = tmp_path / "journal"
        early, late = (
            json.loads(forebay("journal", "show", journal, "--at", at, "--json").stdout)
            for at in (2, 5)
        )
        assert early["jobs"] == [] and len(early["datasets"]) == 1
        assert late["jobs"][0]["iterations"][0]["consumers"] == 1
        assert "behind the end" in error_of("journal", "show", journal, "--at", 99)
        live = json.loads(forebay("status", dispatcher.target, "--json").stdout)
        assert late == {name: live[name] for name in late}

    def test_verify(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        verified = forebay("journal", "verify", tmp_path / "journal")
        assert verified.returncode == 0 and "is sound" in verified.stdout
        report = json.loads(forebay("journal", "verify", tmp_path / "journal", "--json").stdout)
        assert (report["last"], report["blobs"], report["problems"]) == (5, 1, [])

    def test_tail_follows(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "forebay.service.cli", "journal", "tail",
             str(tmp_path / "journal"), "--limit", "1"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert "ConsumerJoined" in process.stdout.readline()
        with DispatcherClient(dispatcher.target) as client:
            client.call(
                pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=1),
                pb.WorkerHeartbeatResponse,
            )
        assert "WorkerRegistered" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        process.stdout.close()


class TestServers:
    def test_a_clean_stop(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        assert dispatcher.stop() == 0
        with DispatcherProcess(tmp_path / "journal") as again:
            status = json.loads(forebay("status", again.target, "--json").stdout)
            assert status["term"] == 2
            assert again.stop() == 0

    def test_a_log_in_json_has_each_decision(
        self, dispatcher: DispatcherProcess, tmp_path: Path
    ) -> None:
        assert dispatcher.stop() == 0
        command = ["-m", "forebay.service.cli", "dispatcher", "--log-format", "json", "--storage"]
        running = subprocess.Popen(
            [sys.executable, *command, tmp_path / "journal"],
            env={**os.environ, "FOREBAY_LOG_LEVEL": "debug"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert running.stdout is not None
        with DispatcherClient(running.stdout.readline().strip()) as client:
            beat = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="w:1", uid=1)
            client.call(beat, pb.WorkerHeartbeatResponse)
        running.terminate()
        _, errors = running.communicate(timeout=60)
        lines = [json.loads(line) for line in errors.splitlines()]
        assert all(line["level"] and line["time"] and line["logger"] for line in lines)
        decided = {line["command"]: line for line in lines if "command" in line}
        shown = forebay("journal", "show", tmp_path / "journal", "--json").stdout.splitlines()
        last = json.loads(shown[-1])
        assert decided["RegisterWorker"]["events"][-1] == last["event"]
        assert decided["RegisterWorker"]["sequence"] == last["sequence"]
        assert decided["ElectLeader"]["events"] == ["leader_elected"]
        assert not [line for line in lines if "position_key" in str(line)]
        (told,) = (line for line in lines if "SIGTERM" in line["message"])
        assert told["level"] == "info"

    @pytest.mark.parametrize(
        "strikes",
        [
            "sys.setprofile(as_it_begins_to_wait)",  # whatever lock the main thread has
            "threading.Thread(target=in_another_thread).start()",  # Python's handler waits
        ],
    )
    def test_a_worker_hears_that_it_is_to_stop(self, strikes: str) -> None:
        program = (
            "import os, signal, sys, threading, time\n"
            "from forebay.service.cli import app\n"
            "from forebay.service.worker import worker\n"
            "def as_it_begins_to_wait(frame, event, arg):\n"
            "    waits = event == 'call' and frame.f_code is threading.Condition.wait.__code__\n"
            "    if waits or (event == 'c_call' and arg is os.read):\n"
            "        sys.setprofile(None)\n"
            "        os.kill(os.getpid(), signal.SIGTERM)\n"
            "def in_another_thread():\n"
            "    time.sleep(0.5)\n"
            "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
            "class Worker:\n"
            "    def __init__(self, options, pipelines): pass\n"
            "    def start(self): pass\n"
            "    def stop(self, drain): return True\n"
            "    @property\n"
            f"    def address(self): {strikes}; return 'h:1'\n"
            "worker.Worker = Worker\n"
            "app(['worker', '--dispatcher=h:1'])\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
        assert (done.returncode, done.stdout) == (0, b"h:1\n"), done.stderr
        assert b"told to by SIGTERM" in done.stderr

    def test_status_in_words(self, dispatcher: DispatcherProcess) -> None:
        with DispatcherClient(dispatcher.target) as client:
            (known,) = list_datasets(dispatcher.target)
            for name in (NO_MARKUP, "\x1b[2J\n9"):
                named = pb.GetOrCreateJobRequest(dataset_id=known.dataset_id, job_name=name)
                joined = pb.JoinIterationRequest(
                    job_id=client.call_numbered(named, pb.GetOrCreateJobResponse).job_id
                )
                client.call_numbered(joined, pb.JoinIterationResponse)
        for command in ("status", dispatcher.target), ("dataset", "list", dispatcher.target):
            shown = forebay(*command, COLUMNS="200").stdout
            assert NO_MARKUP in shown and "\\x1b[2J\\n9" in shown and "\x1b" not in shown
        shown = forebay("status", dispatcher.target).stdout
        assert dispatcher.address in shown and "DYNAMIC" in shown and "0 of 9" in shown
        assert "there is no job x; there are: " in error_of("status", dispatcher.target, "--job=x")
        assert "--sort x" in error_of("status", dispatcher.target, "--sort=x")
        watching = subprocess.Popen(
            [sys.executable, "-m", "forebay.service.cli", "status", dispatcher.target],
            env={**os.environ, "FOREBAY_WATCH": "1", "FOREBAY_JOB": NO_MARKUP, "COLUMNS": "200"},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with watching:
            assert watching.stdout is not None
            heads = (line for line in watching.stdout if line.startswith("dispatcher "))
            assert next(heads) == next(heads)
            master, slave = os.openpty()
            watch = [sys.executable, "-m", "forebay.service.cli", "status", "--watch"]
            live = subprocess.Popen(
                [*watch, dispatcher.target], stdout=slave, env={**os.environ, "TERM": "xterm"}
            )
            os.close(slave)
            shown_live = b""
            while b"dispatcher " not in shown_live:
                shown_live += os.read(master, 1 << 16)
            assert b"\x1b[?1049h" in shown_live, "it has a screen of its own"
            live.terminate()
            assert b"\x1b[?1049l" in written_to(master), "the terminal is as it was"
            assert live.wait() == 128 + signal.SIGTERM
            dispatcher.kill()
            assert any("no dispatcher answers" in line for line in watching.stdout)
            watching.send_signal(signal.SIGINT)
        assert watching.returncode == 0

    def test_waiting_for_workers(self, dispatcher: DispatcherProcess) -> None:
        with pytest.raises(Unavailable, match="0 of 1 workers are registered"):
            wait_for_workers(dispatcher.target, 1, timeout_s=0)
        waiting = subprocess.Popen(
            [sys.executable, "-m", "forebay.service.cli", "status", dispatcher.target, "--json"],
            env={**os.environ, "FOREBAY_WAIT_WORKERS": "2"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with DispatcherClient(dispatcher.target) as client:
            for uid in (1, 2):
                beat = pb.WorkerHeartbeatRequest(
                    transfer_servers=SERVERS, address=f"w:{uid}", uid=uid
                )
                client.call(beat, pb.WorkerHeartbeatResponse)
        shown, _ = waiting.communicate(timeout=60)
        assert len(json.loads(shown)["workers"]) == 2
        wait_for_workers(dispatcher.target, 2, timeout_s=None)
        too_many = ("--wait-workers=3", "--wait-timeout-s=0")
        assert "2 of 3 workers" in error_of("status", dispatcher.target, *too_many)
        for count in (0, -1, True, "2"):
            with pytest.raises(InvalidArgument, match="positive integer"):
                wait_for_workers(dispatcher.target, count)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="timeout_s"):
            wait_for_workers(dispatcher.target, 1, timeout_s=-1)

    @pytest.mark.parametrize("forks", [False, True])
    def test_a_dispatcher_ends_with_its_parent(self, tmp_path: Path, forks: bool) -> None:
        """Whoever the parent has forked lives on, and has all that the parent had open."""
        program = (
            "from forebay import service; import os, signal, sys, threading\n"
            "def start():\n"
            f"    config = service.DispatcherConfig(storage={str(tmp_path)!r})\n"
            "    return service.DispatchServer(config)\n"
            "servers = []\n"
            "thread = threading.Thread(target=lambda: servers.append(start()))\n"
            "thread.start(); thread.join()\n"  # it does not end with the thread
            f"if {forks} and not (pid := os.fork()): signal.pause()\n"
            f"print(servers[0].target, pid if {forks} else 0, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        target, fork = parent.stdout.readline().split()
        assert target
        assert parent.wait(60) == -signal.SIGKILL
        give_up = time.monotonic() + 30
        try:
            while True:  # until its journal is free again
                try:
                    open_storage(str(tmp_path)).open_writer("test").close()
                    break
                except Locked:
                    assert time.monotonic() < give_up
                    time.sleep(0.1)
        finally:
            parent.stdout.close()
            if int(fork):
                os.kill(int(fork), signal.SIGKILL)


class TestStatus:
    """What is shown of a state, on a narrow terminal."""

    @staticmethod
    def shown(
        *jobs: dict[str, Any], sort: str = "job", width: int = 80, **others: Any
    ) -> list[str]:
        summary = {**STATUS, "jobs": list(jobs), **others}
        console = plain_console(width=width, file=io.StringIO(), color_system=None)
        console.print(render(summary, sort))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()

    def test_a_job_has_its_users_name(self) -> None:
        stocks = job("dataset_id=/1000/imagenet-training", iteration(1))
        others = job("dataset_id=/7/other", iteration(1))
        bare = job("bare-name", iteration(1))
        unnamed = job(None, iteration(1))
        text = self.shown(stocks, others, bare, unnamed)
        rows = [line.split()[0] for line in text if "DYNAMIC" in line]
        assert rows[0] == "imagenet-training"
        assert rows[1:] == ["dataset_id=/7/other", "bare-name", "5"]

    @pytest.mark.parametrize(("sort", "first"), [("job", "3"), ("waits", "4"), ("memory", "3")])
    def test_loads_and_memory(self, sort: str, first: str) -> None:
        why = {"workers": 7, "cause": "trainers wait", "reason": "because"}
        load = {"wanted": why, "busy": 3.9, "workers": 4, "elements_per_s": 12.34}
        held = {"job_id": 3, "held_bytes": 8_000_000, "parked_tasks": 2, "shed_elements": 5}
        text = self.shown(
            job("a", iteration(1)) | {"job_id": 3}, job("b", iteration(1)) | {"job_id": 4},
            sort=sort, wanted_workers={**why, "ready": 4},
            loads=[{**load, "job_id": 3, "waits": 0.1}, {**load, "job_id": 4, "waits": 0.38}],
            memory=[{
                "address": "w:1", "budget_bytes": 64_000_000, "jobs": [held],
                "cache": {"held_bytes": 1, "limit_bytes": 2, "hit_bytes": 3, "missed_bytes": 4},
            }],
        )  # fmt: skip
        assert "workers wanted: 7, ready: 4; because" in text
        rows = [[cell.strip() for cell in line.split("│")][1:-1] for line in text if "│" in line]
        of_jobs = {"3": ["a", "12.3", "10%", "3.9 of 4", "8.0 MB", "7"]}
        of_jobs["4"] = ["b", "12.3", "38%", "3.9 of 4", "0 bytes", "7"]
        places = [rows.index(of_jobs[number]) for number in "34"]
        assert (places[0] < places[1]) == (first == "3")
        assert ["w:1", "a", "8.0 MB", "64.0 MB", "2", "5"] in rows
        assert ["w:1", "1 byte", "2 bytes", "3 bytes", "4 bytes"] in rows
        assert "b: because" in text

    def test_saves_and_for_what_they_wait(self) -> None:
        waits = {"path": "/a", "state": "being written", "streams": 3, "completed_streams": 2}
        goes_on, ended = {**waits, "path": "/b"}, {**waits, "path": "/c", "state": "finished"}
        lacks = {**waits, "waits_for": "because", "assigned": 7}
        goes_on |= {"written": 40, "assigned": 60, "splits": [100], "elements": 5000}
        rate = {"path": "/b", "elements_per_s": 50.0, "left_s": 150.0}
        text = self.shown(saves=[lacks, goes_on, ended], save_rates=[rate])
        rows = [[cell.strip() for cell in line.split("│")][1:-1] for line in text if "of 3" in line]
        assert rows == [
            ["/a", "2 of 3", "7", "0", "", "", "because"],
            ["/b", "2 of 3", "40 of 100", "5,000", "50.0/s", "2 min", ""],
        ]

    @pytest.mark.parametrize(
        ("of_job", "told"),
        [
            ({"cross_trainer_cache": True}, "DYNAMIC, cached 1 1 1 of 2"),
            (
                {
                    "order": {"known_lengths": 3, "bundles": 9},
                    "iterations": [{"group": [{"consumers": 4}] * 2, "sources": []}],
                },
                "ordered all 2 of 4 1 of 2 lengths of 3 of 9 bundles",
            ),
            (
                {
                    "order": {"known_lengths": 0, "bundles": 9, "claimed": True},
                    "iterations": [
                        {"claims": {"bundles": 9, "done": 3, "unclaimed": 4}, "sources": []}
                    ],
                },
                "at least once 1 1 1 of 2 3 of 9 bundles done",
            ),
            (
                {
                    "order": {"known_lengths": 3, "bundles": 9},
                    "iterations": [],
                    "skipped_splits": 2,
                },
                "ordered not being read lengths of 3 of 9 bundles, 2 skipped",
            ),
        ],
    )
    def test_the_row_of_a_job(self, of_job: dict[str, Any], told: str) -> None:
        runs = [iteration(1) | more for more in of_job.pop("iterations", [{}])]
        text = self.shown(job("j") | of_job | {"iterations": runs}, width=200)
        assert told in " ".join(" ".join(text).split())

    def test_a_worker_that_drains_is_said_to(self) -> None:
        worker = {"address": "w:1", "stock": False, "running_tasks": 1, "tags": []}
        workers = [worker, {**worker, "draining": True}]
        rows = [line for line in self.shown(workers=workers) if "w:1" in line]
        assert ["draining" in row for row in rows] == [False, True]

    def test_epochs_that_are_over_are_one_line(self) -> None:
        over = [iteration(n, finished=True, lost=n == 3) for n in (1, 2, 3, 5)]
        text = self.shown(job("j", *over, iteration(4), iteration(6)))
        rows = [line.split() for line in text if "DYNAMIC" in line]
        assert rows[0][3:] == ["1–3,", "5", "finished", "1", "lost"]
        assert [row[3] for row in rows[1:]] == ["4", "6"]
        summarized = {"summarized": [[1, 9], [11, 11]], "lost_splits": 2}
        late = iteration(10, finished=True, lost=True)
        text = self.shown({**job("j", late), **summarized})
        (row,) = [line.split() for line in text if "DYNAMIC" in line]
        assert row[3:] == ["1–11", "finished", "3", "lost"]

    def test_a_job_that_failed_is_said_to_with_its_errors_and_losses(self) -> None:
        error = {"time_ms": 40_000, "worker": "w:1", "code": "NOT_FOUND", "message": "/a\x1b[2J",
                 "times": 3}  # fmt: skip
        losses = [{"splits": 7, "why": "worker w:1 was given up: no sign of life"}]
        failed = {"state": "failed", "errors": [error], "losses": losses}
        text = self.shown(job("j", iteration(1)) | failed, now_ms=100_000)
        assert any("failed, 1 of 2" in line for line in text)
        rows = [[cell.strip() for cell in line.split("│")][1:-1] for line in text if "NOT" in line]
        assert rows == [["j", "60 s", "w:1", "3", "NOT_FOUND: /a\\x1b[2J"]]
        assert "j: 7 splits were lost: worker w:1 was given up: no sign of life;" in " ".join(text)

    def test_skipped_splits_are_said_with_why(self) -> None:
        skip = {"split": 3, "element": 1, "worker_address": "w:1", "reason": "[no] reason"}
        skips = [skip, skip | {"records": 1}, skip | {"records": 9}]
        runs = iteration(4) | {"skipped": 2, "skips": skips}
        text = self.shown(job("j", iteration(3, finished=True), runs) | {"skipped_splits": 5})
        rows = [line.rstrip() for line in text if "DYNAMIC" in line]
        assert rows[0].endswith("finished  5 skipped") and rows[1].endswith("0 out, 2 skipped")
        found = [[cell.strip() for cell in line.split("│")] for line in text if "reason" in line]
        assert found[0][1:6] == ["j", "4", "3, element 1", "w:1", "[no] reason"]
        assert [row[3][12:] for row in found] == ["", " alone", ": 9 records"]


STATUS = {"leader": "a:1", "term": 1, "journal_id": "x", "sequence": 9, "leases": 0, "workers": []}


def job(name: str | None, *iterations: dict[str, Any]) -> dict[str, Any]:
    known = {"dataset_id": "1000", "sharding": "DYNAMIC", "iterations": list(iterations)}
    return {"job_id": 5, "name": name, **known}


def iteration(epoch: int, *, finished: bool = False, lost: bool = False) -> dict[str, Any]:
    splits = {"splits": 9, "begun": 9 - lost, "leased": 0, "lost": int(lost)}
    tasks = {"completed_tasks": 1, "running_tasks": 1, "consumers": 1}
    return {"epoch": epoch, "finished": finished, "sources": [splits], **tasks}


class TestDatasets:
    def test_list_and_remove(self, dispatcher: DispatcherProcess) -> None:
        (known,) = list_datasets(dispatcher.target)
        assert (known.jobs, known.consumers, known.graph_bytes) == (("j",), 1, len(GRAPH))
        dataset_id = known.dataset_id
        (shown,) = json.loads(forebay("dataset", "list", dispatcher.address, "--json").stdout)
        assert shown == known.as_json()
        with pytest.raises(
            FailedPrecondition, match=r"read by 1 consumers, of the jobs j: .*force"
        ):
            remove_dataset(dispatcher.target, dataset_id)
        assert "4711" in error_of("dataset", "remove", "4711", FOREBAY_SERVICE=dispatcher.address)
        done = forebay("dataset", "remove", dispatcher.address, dataset_id, FOREBAY_FORCE="1")
        assert done.stdout == f"dataset {dataset_id} is removed, and its jobs j\n"
        assert list_datasets(dispatcher.target) == []
        with pytest.raises(NotFound, match=f"{dataset_id} not found: it was removed"):
            remove_dataset(dispatcher.target, dataset_id)
        with pytest.raises(InvalidArgument, match="must be a string"):
            remove_dataset(dispatcher.target, "")

    def test_a_dataset_is_listed_with_the_numbers_that_are_known(self) -> None:
        structure = {
            "dict": [
                ["a", {"tensor": "uint8", "shape": [224, None]}],
                ["b", {"tuple": [{"ragged": "int32", "shape": None, "ragged_rank": 1}]}],
                ["c", {"named": "P", "fields": [["x", {"constant": 1}], ["y", {"none": True}]]}],
            ]
        }
        elements = describe(json.dumps(structure))
        assert elements == "{a: uint8[224, ?], b: (ragged int32[…]), c: P(x=1, y=None)}"
        hour = 3_600_000
        known = DatasetInfo("1", elements, 12_345, 0 * hour, 47 * hour, ("dataset_id=/1/j",), 0)
        unknown = DatasetInfo("2", None, None, None, None, (), 1)
        console = plain_console(file=io.StringIO(), width=200)
        console.print(render_datasets([known, unknown], now_s=48 * 3600))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        rows = [[cell.strip() for cell in re.split("[│┃]", line)][1:-1] for line in lines]
        assert ["1", elements, "12,345 bytes", "2 d 0 h ago", "1 h 0 min ago", "j"] in rows
        assert ["2", "–", "–", "–", "now", ""] in rows


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_a_lost_journal_is_refused_until_it_is_repaired_and_no_password_shown(
    kind: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    url: str = request.getfixturevalue(f"{kind}_storage_url")
    secret = url.replace(PASSWORD, "secret").replace("redis://", "redis://:secret@")
    assert "secret" not in error_of("journal", "verify", secret)
    assert "no journal" in error_of("journal", "verify", url)
    dispatcher = DispatcherProcess(url)
    if kind == "redis":
        with opened_keys(url) as (client, keys):
            client.delete(*keys)
    else:
        server = request.getfixturevalue("postgres")
        server.execute(f'DROP SCHEMA "{schema_of(url)}" CASCADE')
    assert dispatcher.wait() == 1
    said = capfd.readouterr().err
    assert "acknowledged records are missing" in said and PASSWORD not in said
    assert "repair --truncate-corrupt" in error_of("journal", "repair", url)
    done = forebay("journal", "repair", "--truncate-corrupt", url)
    assert done.returncode == 0, done.stderr
    dispatcher.restart()
    assert dispatcher.stop() == 0
    assert forebay("journal", "verify", url).returncode == 0
