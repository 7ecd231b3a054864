"""Workers lease splits, run pipelines over them, and stream blocks to consumers."""

from .options import WorkerOptions as WorkerOptions
