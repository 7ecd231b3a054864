"""What to do about an optional package that is missing: one place for such hints."""

from __future__ import annotations


def install(*extras: str, beside: str = "") -> str:
    """The command that installs Forebay's extras, for errors. Forebay itself is installed, and so
    pip asks no index for it. `beside` is a folder of a clone to install with them."""
    what = f"[{','.join(extras)}]'"
    in_a_clone = f"pip install '.{what} {beside} in a clone of Forebay"
    return in_a_clone if beside else f"pip install 'forebay{what}"
