"""The HTTP port of dispatchers and workers: health, readiness and metrics (docs/operations.md)."""
