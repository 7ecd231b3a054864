"""Parses the parameters of a storage's URL, and hides the passwords in it."""

from __future__ import annotations

import re

_USER = re.compile(r"(://[^:/?#]*:).*@")
_SECRET = re.compile(r"([?&][^=&]*password=)[^&]*")

PERCENT = "what is special in a password is percent-encoded"


def redact(url: str) -> str:
    """`url` without its passwords. In doubt, removes too much."""
    return _SECRET.sub(r"\1***", _USER.sub(r"\1***@", url, count=1))


def take_seconds(values: dict[str, str], name: str, default: float) -> float:
    """Remove the parameter from `values`, and return its number. Raises ValueError."""
    text = values.pop(name, str(default))
    if not re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        raise ValueError(f"{name}={text!r} is not a number of seconds")
    return float(text)
