"""What tests of files have in common."""

from ..writers import writers_are_closed as writers_are_closed
