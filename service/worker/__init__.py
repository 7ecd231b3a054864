"""Workers: they lease splits, run pipelines over them, and stream blocks to consumers."""

from .observer import Observer, Undelivered
from .tasks import Pipelines
from .worker import Worker, WorkerOptions

__all__ = ["Observer", "Pipelines", "Undelivered", "Worker", "WorkerOptions"]
