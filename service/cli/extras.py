"""Commands whose code is in forebay-tools, a distribution that trainers do not install."""

from __future__ import annotations

from importlib.util import find_spec

from ...storage.extras import install
from ..errors import ForebayError


def require_tools(command: str, package: str) -> None:
    """Raise ForebayError, with what to install, unless the command's package and TensorFlow are
    installed. The extra has the command's name.
    """
    extras = {f"forebay.{package}": command, "tensorflow": "tensorflow"}
    missing = [module for module in extras if find_spec(module) is None]
    if missing:
        raise ForebayError(
            f"`forebay {command}` needs {' and '.join(missing)}, not installed here: "
            f"{install(*(extras[module] for module in missing), beside='./deploy/tools')}"
        )
