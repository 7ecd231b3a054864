"""The dispatcher's event loop in a simulated thread: asyncio's own, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .kernel import Kernel, SimThread, kernel


class SimLoop(asyncio.BaseEventLoop):
    """Its selector waits in the kernel, and nothing else is selected."""

    def __init__(self, this: Kernel) -> None:
        super().__init__()
        self._this = this
        self._selector = self  # asyncio calls its `select`
        self._thread: SimThread | None = None  # that waits in `select`
        self._woken = False
        self._clock_resolution = 1e-9
        self.signals: dict[int, Callable[[], object]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.set_default_executor(ThreadPoolExecutor(4, thread_name_prefix="asyncio"))
        self.set_exception_handler(self._failed)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type] # it may be a function

    def time(self) -> float:
        return self._this.now

    def select(self, timeout: float | None) -> list[object]:
        if not self._woken and timeout != 0:
            self._thread = self._this.current
            self._this.wait(timeout)
            self._thread = None
        else:
            self._this.maybe_yield()
        self._woken = False
        return []

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        self.signals[sig] = lambda: self.call_soon_threadsafe(callback, *args)

    def _process_events(self, event_list: list[object]) -> None: ...

    def _write_to_self(self) -> None:
        self._woken = True
        if self._thread is not None:
            self._this.wake(self._thread)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.tasks.append(task)
        return task

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._this.over and "exception" in context:
            self._this.crashed(str(context.get("message")), context["exception"])

    def abandon(self) -> None:
        """Its process is dead: end what is left, quietly. For after the run."""
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                try:
                    task.get_coro().close()
                except BaseException:  # noqa: BLE001, S110 - its cleaning up finds the world gone
                    pass
        self._default_executor = None
        self.close()


def run(main: Coroutine[Any, Any, Any], loops: list[SimLoop]) -> Any:
    """asyncio.run, in the current simulated thread."""
    loop = SimLoop(kernel())
    loops.append(loop)
    return loop.run_until_complete(main)
