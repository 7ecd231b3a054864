"""Row `restart`: from kill -9 of the dispatcher to the first split that a new one serves.

The new dispatcher listens on the same port, and a caller asks for a split until it gets one.
Our journal is made by the dispatcher itself, with its snapshots; it ends as far behind the last
of them as one ever does. The peer's is made by a dispatcher too, but for a few splits: the
record of a split is the same for every split of an iteration, so the others are copies of it.
Journals are in the page cache on both sides, as they are after a kill on one machine.

Row `get_split`: how many splits a second a dispatcher hands out by GetSplit, TensorFlow's own call.
Ours are fsynced before they are answered; the peer's journal is flushed, and not fsynced.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import time
from collections.abc import Callable
from functools import partial

from ..journal.proto import events_pb2 as ev
from ..service.core import commands as c
from ..service.dispatcher.candidate import Candidate
from ..service.dispatcher.options import DispatcherOptions
from ..service.errors import ForebayError
from ..storage import open_storage
from ..storage.tfrecord import frame, read_frames
from .calls import ENDLESS, begin_iteration, first_split, open_channel, splits_per_second
from .results import Result
from .servers import OURS, PEERS, Server, our_dispatcher, peer_dispatcher
from .setting import Setting

SPLITS = 500_000
QUICK_SPLITS = 2_000
SPARE_EVENTS = 500  # between what the rounds add and the next snapshot
AT_ONCE = 1_000  # decisions in one commit
CALLERS = {4: 0.8, 16: None, 64: 0.6}  # of GetSplit; the ratio that is required


def restart(setting: Setting) -> list[Result]:
    """Restarts with a journal of many splits."""
    splits = QUICK_SPLITS if setting.quick else SPLITS
    directory = setting.directory("restart")
    peers = _peer_journal(directory, splits)
    own = asyncio.run(fill_journal(str(directory / OURS), splits))
    start_peer, start_ours = partial(peer_dispatcher, directory), partial(our_dispatcher, directory)
    found = setting.alternate(
        peer=partial(kill_to_first_split, start_peer, peers),
        ours=partial(kill_to_first_split, start_ours, own),
    )
    return [
        Result(
            row="restart",
            what=f"kill -9 to the first split, {splits:,} splits journaled",
            unit="s",
            less=True,
            required_ratio=2,
            ours=found["ours"],
            peer=found["peer"],
        )
    ]


def get_split(setting: Setting) -> list[Result]:
    """One iteration of each side for all numbers of callers."""
    directory = setting.directory("get_split")
    results = []
    with our_dispatcher(directory) as ours, peer_dispatcher(directory) as peer:
        iterations = {s.address: begin_iteration(s.address) for s in (ours, peer)}
        for callers, ratio in [*CALLERS.items()][: 1 if setting.quick else None]:
            found = setting.alternate(
                **{
                    side: partial(splits_per_second, at, iterations[at], callers, setting.seconds)
                    for side, at in (("peer", peer.address), ("ours", ours.address))
                }
            )
            results.append(
                Result(
                    row="get_split",
                    what=f"GetSplit, {callers} callers",
                    unit="splits/s",
                    required_ratio=ratio,
                    ours=found["ours"],
                    peer=found["peer"],
                )
            )
    return results


def kill_to_first_split(start: Callable[[int], Server], iteration_id: int) -> float:
    """Start a dispatcher on a port, kill it, start another there; seconds to its first split."""
    with start(0) as old, open_channel(old.address) as channel:
        first_split(channel, iteration_id)
        begun = time.perf_counter()
        old.kill()
        with start(old.port):
            first_split(channel, iteration_id)
            return time.perf_counter() - begun


async def fill_journal(url: str, splits: int) -> int:
    """A dispatcher's journal of so many GetSplit calls and a tail without a snapshot; the
    iteration's id."""
    storage = open_storage(url)
    options = DispatcherOptions(client_timeout_ms=-1)  # nobody sends heartbeats here
    dispatcher = await Candidate(storage, options, "127.0.0.1:0").take_over()
    source = ev.SplitSource(arithmetic=ev.Arithmetic(start=0, stop=ENDLESS, step=1))
    dataset_id = await dispatcher.execute(
        c.RegisterDataset(dataset_id="", definition=ev.DatasetDefinition(sources=[source]))
    )
    job_id = await dispatcher.execute(
        c.GetOrCreateJob(dataset_id=dataset_id, name="", sharding=ev.DYNAMIC)
    )
    joined = await dispatcher.execute(c.JoinIteration(job_id=job_id, epoch=0))
    command = c.GetSplit(iteration_id=joined.iteration_id, pass_number=0, source=0)
    tail = options.snapshot_events - SPARE_EVENTS if splits > options.snapshot_events else 0
    for done in range(0, splits + tail, AT_ONCE):
        count = min(AT_ONCE, splits + tail - done)
        await asyncio.gather(*(dispatcher.execute(command) for _ in range(count)))
    await dispatcher.close()
    storage.close()
    return int(joined.iteration_id)


def _peer_journal(directory: pathlib.Path, splits: int) -> int:
    with peer_dispatcher(directory) as peer:
        iteration_id = begin_iteration(peer.address)
        with open_channel(peer.address) as channel:
            for _ in range(2):
                first_split(channel, iteration_id)
        peer.kill()
    (journal,) = (directory / PEERS).glob("*/journal_0")
    with journal.open("rb+") as file:
        *_, (_, second), (_, last) = read_frames(file.fileno())
        if second != last:
            raise ForebayError("the peer's journal is not as expected: its split records differ")
        file.seek(0, os.SEEK_END)
        file.write(frame(last) * splits)
    return iteration_id
