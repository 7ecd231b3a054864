"""A dispatcher that kills itself (SIGKILL) at one point of its commit path.

    crashing_dispatcher.py POINT N STORAGE PORT

POINT is before-append, after-append (durable, and nobody knows yet) or before-reply (known,
and not said yet); N counts the times that the point was reached.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from forebay.service.dispatcher.decider import Decider
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.server import serve
from forebay.storage.local.file_writer import FileWriter

reached = 0


def main(point: str, n: str, storage: str, port: str) -> None:
    def reach(here: str) -> None:
        global reached
        reached += here == point
        if reached >= int(n):
            os.kill(os.getpid(), signal.SIGKILL)

    append, durable = FileWriter.append, Decider.durable

    def crashing_append(self: FileWriter, records: Sequence[bytes]) -> int:
        reach("before-append")
        last = append(self, records)
        reach("after-append")
        return last

    async def crashing_durable(self: Decider) -> None:
        await durable(self)
        reach("before-reply")

    FileWriter.append = crashing_append  # type: ignore[method-assign]
    Decider.durable = crashing_durable  # type: ignore[method-assign]
    options = DispatcherOptions(storage=storage, port=int(port))
    asyncio.run(serve(options, lambda address: print(f"grpc://{address}", flush=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
