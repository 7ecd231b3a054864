"""What servers write to stderr: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import typer

from ..errors import InvalidArgument
from ..http.families import printable
from ..processes import LOG_LEVEL

LogFormat = Literal["text", "json"]
FORMAT: LogFormat = typer.Option("text", "--log-format", help="text, or json: an object a line.")
EXTRA = ("command", "sequence", "events")
"""What a record may have besides its message: of a decision."""


def log_to_stderr(log_format: LogFormat) -> None:
    """Raises InvalidArgument for a level that there is not."""
    level = os.environ.get(LOG_LEVEL, "info")
    if level.upper() not in logging.getLevelNamesMapping():
        raise InvalidArgument(
            f"{LOG_LEVEL}={level!r} is no level; use debug, info, warning, error or critical"
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())


class TextFormatter(logging.Formatter):
    """A line a record, and indented ones for a traceback. Whatever a message holds, such as the
    error of a user's function, begins no line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the same
        return "\n".join(
            f"    {printable(line)}" for line in super().formatException(ei).split("\n")
        )


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        made = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: vars(record)[name] for name in EXTRA if name in vars(record)},
        }
        if record.exc_info:
            made["exception"] = self.formatException(record.exc_info)
        return json.dumps(made)
