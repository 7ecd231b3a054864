"""Python datasets: functions that fail, and the processes that they run in.

Who sleeps for an hour here hangs, and what is tested is that it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from forebay.service.errors import PipelineError, Unavailable
from forebay.service.pipelines import Run, SplitRange
from forebay.service.pipelines.kinds.functions import python_dataset, request_of
from forebay.service.pipelines.python import child, run_states
from forebay.service.pipelines.python.child_blocks import (
    LINGER_S,
    MESSAGE_BYTES,
    SLABS,
    FunctionFailed,
)
from forebay.service.pipelines.python.child_connections import PythonChild, StoredDataset
from forebay.service.pipelines.python.fork_server import HERE
from forebay.service.shared import new_slab

from .contract import Ranges
from .functions import INT, Function, numbers, pipeline_of, read


def until(number: int, last: Callable[[], object]) -> Function:
    """Numbers of two to a split; at this split, after one, something else."""

    def function(split: int) -> Iterator[int]:
        yield 2 * split
        if split == number:
            last()
        yield 2 * split + 1

    return function


def raises(error: BaseException) -> Callable[[], object]:
    def function() -> None:
        raise type(error)(*error.args)

    return function


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("why"), "UNKNOWN", "KeyError('why')"),
        (ValueError("why"), "INVALID_ARGUMENT", "ValueError: why"),
        (MemoryError(), "RESOURCE_EXHAUSTED", "MemoryError"),
        (StopIteration(), "UNKNOWN", "generator raised StopIteration"),
        (KeyboardInterrupt(), "UNKNOWN", "KeyboardInterrupt"),
        (SystemExit(2), "UNKNOWN", "SystemExit"),
    ],
)
def test_an_exception_comes_with_the_functions_traceback(
    error: BaseException, code: str, said: str
) -> None:
    pipeline = pipeline_of(until(3, raises(error)), range(9))
    for _ in range(2):  # the process lives on
        with pytest.raises(PipelineError) as raised:
            list(pipeline.run(None).blocks())
        assert raised.value.code == code
        message = raised.value.message
        assert message.startswith("worker w:1: split 3 (3), element 1: ")
        for part in (said, Path(__file__).name, "in function", "last()"):
            assert part in message
        assert "child.py" not in message
    pipeline.close()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda split: split, "returned 1 (int), and is to return an iterable of elements: yield"),
        (lambda split: {"a": split}, "the function returned a dict of ['a'], and is to return an"),
        (lambda split: "text", "the function returned 'text' (str), and is to return an iterable"),
        (lambda split: None, "the function returned None (NoneType), and is to return an iterable"),
        (lambda: [1], "takes 0 positional arguments but 1 was given"),
        (raises(StopIteration()), "takes 0 positional arguments"),
    ],
)
def test_what_is_no_function_of_a_split(function: Function, said: str) -> None:
    with pytest.raises(PipelineError, match=r"split 0 .*element 0") as raised:
        read(function, [1, 2])
    assert said in raised.value.message


DEATHS = {
    "exit code 7": lambda: os._exit(7),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "killed by signal 40": lambda: os.kill(os.getpid(), 40),
    "SIGKILL, perhaps because memory was short": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_process_that_dies_is_an_error_there_and_nowhere_else(how: str) -> None:
    pipeline = pipeline_of(until(3, DEATHS[how]), range(9))
    other = pipeline_of(until(-1, print), range(100))
    unaffected = other.run(None).blocks()
    first = next(unaffected)
    with pytest.raises(PipelineError) as raised:
        list(pipeline.run(None).blocks())
    assert raised.value.code == "ABORTED"
    assert "split 3, element 1: the process that ran it ended: " in raised.value.message
    assert how in raised.value.message
    fine = pipeline.run(Ranges([SplitRange(4, 2, 0)]))
    assert numbers(fine.blocks()) == [8, 9, 10, 11]
    assert numbers(itertools.chain([first], unaffected)) == [*range(200)]
    pipeline.close()
    other.close()


def test_what_fails_is_skipped_if_that_is_registered() -> None:
    """The rest of the split; no more of them than it may."""
    for last in (raises(ValueError("no")), DEATHS["exit code 7"]):
        found = read(until(3, last), range(9), on_error="skip", limit=1)
        assert set(found) - {6} == set(range(18)) - {6, 7}
        assert len(found) == len(set(found))
        with pytest.raises(PipelineError, match="split 3"):
            read(until(3, last), range(9), on_error="skip", limit=0)

    def odd(split: int) -> Iterator[object]:
        yield split if split % 2 else "even"

    assert read(odd, range(9), on_error="skip", limit=5) == [1, 3, 5, 7]
    with pytest.raises(PipelineError, match=r"split 6 \(6\), element 0"):
        read(odd, range(9), on_error="skip", limit=3)


def test_what_fails_is_run_again_if_that_is_registered(tmp_path: Path) -> None:
    """From behind the last element that came; as often as it may."""
    for name, last in {"raised": raises(ValueError("no")), "died": lambda: os._exit(7)}.items():

        def twice(path: str = str(tmp_path / name), last: Function = last) -> None:  # type: ignore[assignment]
            with open(path, "a") as file:
                file.write("x")
            if os.path.getsize(path) <= 2:
                last()  # type: ignore[call-arg]

        function = until(3, twice)
        with pytest.raises(PipelineError, match="split 3"):
            read(function, range(9), on_error="retry", limit=0)
        assert read(function, range(9), on_error="retry", limit=1) == [*range(18)]


@pytest.mark.parametrize("how", ["raised", "died"])
def test_a_split_that_has_come_is_not_run_again(how: str, tmp_path: Path) -> None:
    """Though the one behind it fails before its first element."""
    path = str(tmp_path / "calls")

    def function(split: int) -> Iterator[int]:
        with open(path, "a") as file:
            file.write(f"{split} ")
        if split == 1:
            os._exit(7) if how == "died" else raises(ValueError("no"))()
        if split != 3:  # which has none
            yield split

    assert read(function, range(6), on_error="skip", limit=1) == [0, 2, 4, 5]
    assert Path(path).read_text().split() == [*"012345"]


def test_what_a_fork_of_the_process_does_is_not_what_it_has_done(tmp_path: Path) -> None:
    path = tmp_path / "died"

    def function(split: int, path: str = str(path)) -> Iterator[int]:
        if split == 1:
            if (fork := os.fork()) == 0:
                return  # this split is nothing to it
            os.waitpid(fork, 0)
            if not os.path.exists(path):
                open(path, "w").close()
                os._exit(7)
        yield split

    assert read(function, range(4), on_error="retry", limit=1) == [0, 1, 2, 3]


def test_a_split_that_is_run_again_must_yield_the_same(tmp_path: Path) -> None:
    """Elements of the next one are not taken for its own."""
    path = tmp_path / "count"

    def function(split: int, path: str = str(path)) -> Iterator[int]:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) == 1:
            for i in range(3):
                time.sleep(LINGER_S)  # so slow that none waits for company
                yield i
            os._exit(7)
        yield from (10 * split, 10 * split + 1)

    with pytest.raises(PipelineError, match=r"split 0 .*it has 2 elements now, and 3 had come"):
        read(function, range(3), on_error="retry", limit=1)
    path.unlink()
    assert read(function, range(3), on_error="skip", limit=1) == [0, 1, 2, 10, 11, 20, 21]


def test_a_bundle_that_is_run_again_is_the_same_bundle(tmp_path: Path) -> None:
    path = str(tmp_path / "count")

    def function(split: int) -> Iterator[int]:
        for _ in range(3):
            yield random.randrange(1 << 40)
        if split == 2:
            with open(path, "a") as file:
                file.write("x")
            if os.path.getsize(path) == 1:
                os._exit(1)
        yield random.randrange(1 << 40)

    pipeline = pipeline_of(function, range(5), on_error="retry", limit=1)
    read = [
        numbers(pipeline.bundle(SplitRange(0, 5, 0), number=3, seed=1).blocks()) for _ in range(2)
    ]
    pipeline.close()
    assert read[0] == read[1]
    assert len(set(read[0])) == 20


def test_an_element_that_takes_too_long_ends_its_process() -> None:
    """Though it has left its group."""

    def hangs(split: int) -> Iterator[int]:
        yield split
        os.setpgid(0, os.getpgid(os.getppid()))
        time.sleep(3600)  # until it is killed, which is what is tested

    with pytest.raises(PipelineError, match=r"split 0, element .: it has taken longer than") as e:
        read(hangs, [1], timeout_s=0.5)
    assert e.value.code == "DEADLINE_EXCEEDED"


def test_an_element_takes_too_long_whoever_else_delivers() -> None:
    def function(split: int) -> Iterator[int]:
        while split:
            yield split
            time.sleep(0.003)
        time.sleep(3600)  # the same

    pipeline = pipeline_of(function, range(2), processes=2, timeout_s=0.5)
    with pytest.raises(PipelineError, match=r"split \d, .*: it has taken longer than") as e:
        for _ in itertools.islice(pipeline.run(None).blocks(), 100_000):
            pass
    pipeline.close()
    assert e.value.code == "DEADLINE_EXCEEDED"


class Starting:
    """In its first process, something happens before the first element."""

    def __init__(self, path: Path, what: Callable[[], object]) -> None:
        self.path, self.what = str(path), what

    def setup(self) -> None:
        with open(self.path, "a") as file:
            file.write("x")
        if os.path.getsize(self.path) == 1:
            self.what()

    def __call__(self, split: int) -> list[int]:
        return [split]


def test_a_process_that_does_not_start_is_said_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read(lambda split: [split], [0])  # so that their fork server has started
    monkeypatch.setattr(run_states, "SILENT_S", 1.0)
    # It sleeps until it is killed, which is what is tested.
    hangs = Starting(tmp_path / "starts", lambda: time.sleep(3600))
    with pytest.raises(PipelineError, match="its start: it has taken longer than 1 s") as e:
        read(hangs, [1], timeout_s=0.5)
    assert e.value.code == "DEADLINE_EXCEEDED"
    assert "function is in its start for" in caplog.text


def test_a_process_that_dies_before_its_first_element_is_tried_again(tmp_path: Path) -> None:
    for on_error in ("retry", "skip"):
        dies = Starting(tmp_path / on_error, lambda: os._exit(7))
        assert read(dies, range(3), on_error=on_error, limit=1) == [0, 1, 2]
    dies = Starting(tmp_path / "others", lambda: os._exit(7))
    with pytest.raises(PipelineError, match="its start: the process that ran it ended: exit co"):
        read(dies, range(3))


def test_a_process_that_dies_while_it_has_nothing_to_do_is_replaced() -> None:
    found: list[int] = []

    class Killing(Ranges):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            if len(found) == 1:  # it has ended its split, or nothing would be asked for
                os.kill(found[0], signal.SIGKILL)
                while (idle := pipeline._children._idle) and idle[0].lives:
                    time.sleep(0.001)
            return super().next_range(source, opening, endless)

    pipeline = pipeline_of(lambda split: [os.getpid()], range(2))
    run = pipeline.run(Killing([SplitRange(0, 1, 0), SplitRange(1, 1, 0)]))
    for block in run.blocks():
        found += numbers(iter([block]))
    assert len(set(found)) == 2
    pipeline.close()


def test_a_process_that_dies_before_it_begins_what_it_was_handed_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand, begun = PythonChild.run, list[int]()

    def hand_and_kill(to: PythonChild, *what: Any, **how: Any) -> None:
        for process in begun:
            os.kill(process, signal.SIGSTOP)
        hand(to, *what, **how)
        for process in begun:
            os.kill(process, signal.SIGKILL)

    monkeypatch.setattr(PythonChild, "run", hand_and_kill)
    pipeline = pipeline_of(lambda split: [os.getpid()], range(2))
    begun += numbers(pipeline.run(Ranges([SplitRange(0, 1, 0)])).blocks())
    with pytest.raises(PipelineError, match="before split 1, element 0: the process that ran it e"):
        list(pipeline.run(Ranges([SplitRange(1, 1, 0)])).blocks())
    pipeline.close()


def test_a_structure_may_be_large() -> None:
    names = [f"{number:05}{'x' * 100}" for number in range(2500)]
    structure = json.dumps({"dict": [[name, json.loads(INT)] for name in names]})
    assert len(structure) > MESSAGE_BYTES
    (element,) = read(lambda split: [dict.fromkeys(split, 1)], [names], structure)
    assert element == dict.fromkeys(names, 1)
    with pytest.raises(PipelineError, match=r"element is a dict of .*, and was registered as a"):
        read(lambda split: [{}], [0], structure)


def test_a_function_may_do_what_it_likes_to_its_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = os.getcwd()
    folder = str(tmp_path)

    def function(split: int) -> Iterator[int]:
        os.chdir(folder)
        print("printed", flush=True)
        # The thread and a fork stay until they are ended, as they have to be.
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        if os.fork() == 0:
            time.sleep(3600) if split % 2 else None  # one that stays, and one that goes on
        sys.stdin.close()
        os.environ.clear()
        yield split if os.path.sameopenfile(1, 2) else -1

    assert read(function, range(4)) == [0, 1, 2, 3]
    assert os.getcwd() == here
    assert "printed" not in capfd.readouterr().out


def test_an_endless_function_is_left_whenever_one_likes() -> None:
    pipeline = pipeline_of(lambda split: itertools.count(), range(2), processes=2)
    run = pipeline.run(None).blocks()
    assert numbers(itertools.islice(run, 20))[0] == 0
    bundle = pipeline.bundle(SplitRange(1, 1, 0), number=0, seed=0).blocks()
    assert next(bundle).index == 0
    bundle.close()
    run.close()
    pipeline.close()


# -- processes ------------------------------------------------------------------------------------


def test_several_processes_share_the_splits() -> None:
    def function(split: int) -> Iterator[int]:
        for i in range(10):
            time.sleep(0.001)
            yield (os.getpid() << 20) + 10 * split + i

    pipeline = pipeline_of(function, range(100), processes=2)
    for run in (pipeline.run(None), pipeline.run(Ranges([SplitRange(0, 60, 0)] * 2))):
        found = numbers(run.blocks())
        assert len({x >> 20 for x in found}) == 2
    elements = [x & 0xFFFFF for x in found]
    assert sorted(elements) == sorted([*range(600)] * 2)
    pipeline.close()


def test_the_feeds_error_is_the_runs() -> None:
    class Stopped(Ranges):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            if (found := super().next_range(source, opening, endless)) is None:
                raise Unavailable("the task has been stopped")
            return found

    pipeline = pipeline_of(lambda split: [split], range(9))
    run: Run = pipeline.run(Stopped([SplitRange(2, 3, 0)]))
    found: list[int] = []
    with pytest.raises(Unavailable, match="has been stopped"):
        for block in run.blocks():
            found += numbers(iter([block]))
    assert found == [2, 3, 4]
    pipeline.close()


def test_an_error_does_not_wait_for_who_asks_for_splits() -> None:
    answered = threading.Event()
    in_vain: list[bool] = []

    class Away(Ranges):
        def next_range(self, source: int, opening: int, endless: bool) -> SplitRange | None:
            if (found := super().next_range(source, opening, endless)) is None:
                in_vain.append(not answered.wait(20))
            return found

    pipeline = pipeline_of(raises(KeyError("why")), range(9), processes=2)
    run = pipeline.run(Away([SplitRange(2, 3, 0)]))
    with pytest.raises(PipelineError, match="split 2"):
        list(run.blocks())
    answered.set()
    assert not any(in_vain)
    pipeline.close()


def test_what_is_there_comes_though_the_function_makes_nothing_more(tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def function(split: int) -> Iterator[int]:
        yield from range(3)
        for _ in range(2000):
            if seen.exists():
                yield 3
                return
            time.sleep(0.01)
        raise TimeoutError("nobody has seen what was there")

    pipeline = pipeline_of(function, [0])
    blocks = pipeline.run(None).blocks()
    found: list[int] = []
    while len(found) < 3:
        found += numbers(itertools.islice(blocks, 1))
    seen.touch()
    assert found + numbers(blocks) == [0, 1, 2, 3]
    pipeline.close()


def test_the_first_element_of_each_run_travels_alone() -> None:
    """Somebody waits for it, though its process has just ended another run, or splits without any
    element; in the parts that follow nobody does."""

    def function(split: int) -> list[int]:
        return [os.getpid()] * (100 if split else 0)

    pipeline = pipeline_of(function, range(3))
    processes: set[int] = set()
    for _ in range(20):
        parts = Ranges([SplitRange(split, 1, 0) for split in range(3)])
        first, *rest = pipeline.run(parts).blocks()
        assert first.count == 1
        assert sum(block.count for block in rest) == 199
        processes.update(numbers(iter([first, *rest])))
    assert len(processes) == 1
    pipeline.close()


def test_bundles_run_in_the_processes_of_those_that_have_ended() -> None:
    pipeline, found = pipeline_of(lambda _: [os.getpid()] * 2, range(3)), []
    for _ in range(2):  # three are open at a time, and one process may work
        runs = [pipeline.bundle(SplitRange(n, 1, 0), number=n, seed=1).blocks() for n in range(3)]
        found.append({*numbers(itertools.chain(*itertools.zip_longest(*runs)))})
    assert len(found[0]) == 3 and found[0] == found[1]
    pipeline.close()


def test_what_does_not_fit_is_said_though_it_was_sent_in_a_pause() -> None:
    """Which is by a thread of its own."""

    def function(split: int) -> Iterator[object]:
        yield 1
        yield 2
        yield "three"
        time.sleep(0.2)
        yield 4

    with pytest.raises(PipelineError, match=r"split 0 \(0\), element 2: element is 'three'"):
        read(function, [0])


def test_a_block_that_cannot_be_sent_fails_at_its_first_element_and_costs_no_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that nothing of it is lost, nor waited for."""
    errors: list[Exception] = [OSError(errno.EMFILE, "too many"), MemoryError(), OSError("no"), *[
        FunctionFailed("RESOURCE_EXHAUSTED", "it cannot be described", 2, 1)
    ]]  # fmt: skip

    def refused(size: int) -> NoReturn:
        raise errors.pop()

    with child_here(lambda split: range(2), 3) as (made, said):
        made.run(0, 1, 0, None, True)
        assert [count for _, count, *_ in said()] == [1, 1]
        monkeypatch.setattr(made, "_ended_s", 2 * time.monotonic())  # that has just come
        monkeypatch.setattr(made.sender._lender, "reserve", refused)
        credit = made.sender._credit
        while errors:
            with pytest.raises(FunctionFailed) as failed:
                made.run(0, 3, 1, None, False)
            assert failed.value.args[0] == "RESOURCE_EXHAUSTED"
            assert failed.value.args[2:] == (0, 1)
        assert not said()
        assert made.sender._credit == credit


@contextlib.contextmanager
def child_here(
    function: Function, splits: int
) -> Iterator[tuple[child.FunctionProcess, Callable[[], list[list[object]]]]]:
    """In this process, and what it has said since that was asked for."""
    told = python_dataset(range(splits))(function)
    definition = request_of(told, range(splits), INT).python
    dataset = StoredDataset(INT, definition)
    progress, _ = new_slab(child.PROGRESS_BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    setup = msgspec.msgpack.encode(["setup", *dataset.sizes])
    socket.send_fds(ours, [setup], [dataset.descriptor, progress])
    os.close(progress)

    def said() -> list[list[object]]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(msgspec.msgpack.decode(ours.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)))
        return found

    with ours, theirs:
        made = child.FunctionProcess(theirs)
        made.load()
        yield made, said


def test_blocks_that_are_held_cost_a_bounded_number_of_descriptors() -> None:
    """However many of them wait for their trainers."""

    def function(split: int) -> Iterator[int]:
        for number in range(15):
            time.sleep(LINGER_S)  # so slow that none waits for company
            yield number

    pipeline = pipeline_of(function, range(2))
    blocks = pipeline.run(None).blocks()
    held = [next(blocks)]
    before = len(os.listdir("/proc/self/fd"))
    held += blocks
    assert len(held) > 20
    assert len(os.listdir("/proc/self/fd")) < before + SLABS
    assert numbers(iter(held)) == [*range(15)] * 2
    pipeline.close()


def what_is_seen(split: int) -> Iterator[str]:
    """By a function that looks around in its process and in those above it."""
    parents, process = [], os.getpid()
    for _ in range(split):
        parents.append(Path(f"/proc/{process}/environ").read_bytes().decode())
        stat = Path(f"/proc/{process}/stat").read_text()
        process = int(stat.rpartition(")")[2].split()[1])
    links = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            links[number] = os.readlink(f"/proc/self/fd/{number}")
    yield json.dumps([dict(os.environ), parents, links])


def test_a_function_sees_no_secret_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("FOREBAY_TOKEN_FILE", "FOREBAY_ANYTHING", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("FOR_FUNCTIONS", "is kept")
    HERE.close()
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        (seen,) = read(what_is_seen, [3], '{"tensor":"string","shape":[]}')
    HERE.close()
    environment, parents, links = json.loads(seen)
    assert environment["FOR_FUNCTIONS"] == "is kept"
    assert len(parents) == 3, "its own, its init's and the fork server's"
    assert "hunter2" not in json.dumps([environment, parents])
    assert not [name for name in environment if name.startswith("FOREBAY_")]
    kinds = {link.partition(":")[0] for number, link in links.items() if int(number) > 2}
    assert kinds <= {"socket", "pipe", "/memfd", "anon_inode"}, links
