"""What to do about an optional package that is missing: one place for such hints."""

from __future__ import annotations


def install(*extras: str, beside: str = "") -> str:
    """The command that installs Forebay's extras, for errors. It is for a clone, as no index has
    Forebay yet. `beside` is a folder of the clone to install with them."""
    return f"pip install '.[{','.join(extras)}]'{beside and f' {beside}'} in a clone of Forebay"
