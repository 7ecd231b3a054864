"""What tests of files have in common."""

import pytest

from ..writers import writers_are_closed as writers_are_closed

pytest.register_assert_rewrite("forebay.storage.contract")
