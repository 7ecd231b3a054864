"""Workers: they lease splits, run pipelines over them, and stream blocks to consumers."""

from .worker import Worker, WorkerOptions

__all__ = ["Worker", "WorkerOptions"]
