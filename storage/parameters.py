"""Parses the parameters of a storage's URL, and hides the passwords in it."""

from __future__ import annotations

import re

# A scheme and its punctuation, whatever is missing of them, and all up to the last @. A user is not
# told from a password: one of them may be left out, or not be percent-encoded.
_USER = re.compile(r"^([A-Za-z0-9+.-]*[:/]+)?.*@", re.DOTALL)
# An @ in the value stays, so that _USER removes all before it.
_SECRET = re.compile(r"([?&][^=&]*password=)(?:[^&]*(@))?[^&]*")

PERCENT = "what is special in a password is percent-encoded"


def redact(url: str) -> str:
    """`url` without its user and its passwords. In doubt, removes more."""
    return _USER.sub(r"\1***@", _SECRET.sub(r"\1***\2", url))


def take_seconds(values: dict[str, str], name: str, default: float) -> float:
    """Remove the parameter from `values`, and return its number. Raises ValueError."""
    text = values.pop(name, str(default))
    if not re.fullmatch(r"\d{1,9}(\.\d*)?", text):
        raise ValueError(f"{name}={text!r} is not a number of seconds")
    return float(text)
