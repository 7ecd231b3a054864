"""Reads the journal for the dashboard: its events, and the state as of any of them.

A replay and a search take processor time, for which a dispatcher's event loop would have to wait.
So a process of its own does that, at a lower priority, one request at a time, and ends when nobody
has asked for a while. It keeps the last state that it was asked for, and goes on from there.

Run as a program, this file is that process. A request is a line of JSON on its standard input, the
first one how the storage is opened, and each answer a line on its standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter, deque
from typing import Any

from ...journal.codec import decode
from ...journal.words import fold, summary
from ...storage import Missing, Storage, StorageError, open_storage
from ..core.state import State
from ..core.status import status
from ..dashboard import split_map
from ..errors import InvalidArgument, Unavailable
from ..processes import forebay, tied
from .recovery import apply_journaled, recover

PATIENCE_S = 60.0
"""For an answer; then the process is ended, and what it was asked for is refused."""

IDLE_S = 120.0
"""The process ends when nobody has asked for so long."""

MOST_WAITING = 4
"""Requests that may wait for the one in progress."""

MOST_EVENTS = 100
"""Of an answer."""

_WINDOW = 2_000
_SEARCH_S = 2.0
_LOWER = 10  # priority
_LINE_BYTES = 1 << 24


class JournalProcess:
    """Implements `JournalReader` (service/dashboard/pages.py): asks the process, and starts it."""

    def __init__(self, storage: Storage, url: str, *, allow_volatile: bool) -> None:
        """`url` and `allow_volatile` are what it was opened with."""
        self._storage = storage
        self._opens = {"url": url, "allow_volatile": allow_volatile}
        self._process: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()
        self._waiting = 0
        self._idle: asyncio.TimerHandle | None = None
        self._reader = StorageReader(storage)  # of a journal that lives in this process only

    async def ask(self, **request: Any) -> Any:
        """What StorageReader answers. Raises InvalidArgument, and Unavailable if it is
        too much, or the storage cannot be read."""
        if self._waiting >= MOST_WAITING:
            raise Unavailable(
                f"{self._waiting} requests for the journal's past wait already, and one is answered"
                " at a time: try again"
            )
        self._waiting += 1
        try:
            async with self._one:
                if self._idle is not None:
                    self._idle.cancel()
                answer = await self._ask(request)
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)
        finally:
            self._waiting -= 1
        if "invalid" in answer:
            raise InvalidArgument(answer["invalid"])
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    async def _ask(self, request: dict[str, Any]) -> Any:
        if not self._storage.lasting:
            return await asyncio.to_thread(self._reader.answer, request)
        try:
            async with asyncio.timeout(PATIENCE_S):
                process = self._process
                if process is None or process.returncode is not None:  # it was killed
                    process = await self._start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(request).encode() + b"\n")
                line = await process.stdout.readline()
        except ValueError:  # too long a line
            self._end()
            raise Unavailable(
                f"the state is too large for a page, over {_LINE_BYTES >> 20} MB: see `forebay "
                "journal show --at`"
            ) from None
        except (TimeoutError, OSError) as error:
            self._end()
            raise Unavailable(
                f"the journal's past was not read within {PATIENCE_S:.0f} s ({error!r}): "
                "`forebay journal show --at` has time"
            ) from error
        except BaseException:  # its answer would be taken for the next one's
            self._end()
            raise
        if not line:
            self._end()
            raise Unavailable("the process that reads the journal's past has ended: see the log")
        return json.loads(line)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = tied(forebay("service.dispatcher.journal_reader"))
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=_LINE_BYTES
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._opens).encode() + b"\n")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """Ends the process. Idempotent."""
        process = self._process
        if self._idle is not None:
            self._idle.cancel()
        self._end()
        if process is not None:
            await process.wait()


class StorageReader:
    """Reads a storage. Blocking."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._state: State | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """JSON-ready. `do` says what: "events" or "at", with these methods' arguments."""
        arguments = {name: value for name, value in request.items() if name != "do"}
        try:
            do = self.events if request["do"] == "events" else self.at
            return do(**arguments)
        except (Missing, InvalidArgument) as error:  # Missing: it was trimmed
            return {"invalid": str(error)}
        except StorageError as error:
            return {"error": str(error)}

    def events(
        self, before: int = 0, query: str = "", known: int = 0, folds: bool = False
    ) -> dict[str, Any]:
        """The newest events below `before` (0: all), newest first, that have the text `query`.

        `folds`: quiet ones are counted instead (words.fold), and there is no query.
        `known` is the newest event that is durable (0: whatever the storage has).
        """
        extent = self._storage.extent()
        last = min(extent.last, known or extent.last)
        stop = min(before, last + 1) if before else last + 1
        found: list[dict[str, Any]] = []
        give_up_s, query = time.monotonic() + _SEARCH_S, query.lower()
        while stop > extent.first and len(found) < MOST_EVENTS:
            if time.monotonic() > give_up_s:
                break
            window = _WINDOW if query or folds else MOST_EVENTS
            start = max(extent.first, stop - window)
            some: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS - len(found))
            for record in self._storage.read(start - 1):
                if record.sequence >= stop:
                    break
                event = decode(record.sequence, record.data)
                if folds:
                    fold(some, record.sequence, event)
                    continue
                told = summary(record.sequence, event)
                if query in f"{told['name']} {told['fields']}".lower():
                    some.append(told)
            full = len(some) == some.maxlen
            if found and some and "quiet" in found[-1] and "quiet" in some[-1]:
                older, newer = some.pop(), found[-1]
                counts = Counter(older["quiet"]) + Counter(newer["quiet"])
                newer |= {"sequence": older["sequence"], "quiet": dict(counts)}
            found += reversed(some)
            stop = found[-1]["sequence"] if full else start
        return {"first": extent.first, "last": last, "events": found, "before": stop}

    def at(self, sequence: int, job_id: int = 0) -> dict[str, Any]:
        """The status as of an event, and of one job the maps of its iterations."""
        begun_s = time.monotonic()
        extent = self._storage.extent()
        if not 1 <= sequence <= extent.last:
            raise InvalidArgument(
                f"there is no event {sequence}: the journal has events up to {extent.last}, and "
                f"the log those from {extent.first} on"
            )
        state, replayed = self._state, 0
        nearest = max((s for s in self._storage.snapshots() if s <= sequence), default=0)
        if state is None or not max(1, nearest) <= state.sequence <= sequence:
            self._state = None
            state, replayed = recover(self._storage, sequence)
        elif state.sequence < sequence:
            self._state = None  # until it is whole again
            for record in self._storage.read(state.sequence):
                if record.sequence > sequence:
                    break
                apply_journaled(state, record.sequence, decode(record.sequence, record.data))
                replayed += 1
        self._state = state
        event = [summary(number, event) for number, event in state.recent if number == sequence]
        maps = {
            i.iteration_id: [each for each in split_map.mapped(state, i) if each is not None]
            for i in split_map.shown_iterations(state, job_id)
        }
        return {
            "status": status(state), "maps": maps, "event": event, "replayed": replayed,
            "seconds": time.monotonic() - begun_s, "first": extent.first, "last": extent.last,
        }  # fmt: skip


def main() -> None:
    """Answer until the input ends."""
    os.nice(_LOWER)
    reader = StorageReader(open_storage(**json.loads(sys.stdin.readline())))
    for line in sys.stdin:
        print(json.dumps(reader.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
