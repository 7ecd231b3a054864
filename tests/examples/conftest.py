"""The environment of examples without TensorFlow."""

from ..frameworks.conftest import frameworks

__all__ = ["frameworks"]
