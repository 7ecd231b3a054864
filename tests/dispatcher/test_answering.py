"""A face whose tables do not fit its methods is not made."""

from __future__ import annotations

from typing import Any, cast

import pytest

from forebay.service.dispatcher.answering import answering
from forebay.service.proto import forebay_pb2 as pb


async def answer(_: Any) -> Any:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize(
    ("deciding", "askers", "wrong"),
    [
        (["StartSave"], ["CompleteTask"], ""),
        ([], [], "CompleteTaskRequest.known: who asks"),
        ([], ["CompleteTask", "StartSave"], "StartSaveRequest.known: who asks"),
        ([], ["CompleteTask", "CompleteTasks"], r"\['CompleteTasks'\]"),
        (["StartsSave"], ["CompleteTask"], r"\['StartsSave'\]"),
    ],
)
def test_tables_fit_the_methods(deciding: list[str], askers: list[str], wrong: str) -> None:
    functions = dict.fromkeys(("CompleteTask", "StartSave", "GetStatus"), answer)
    who = dict.fromkeys(askers, str)
    dispatcher = cast(Any, None)
    if not wrong:
        assert answering(dispatcher, pb, functions, deciding, who).keys() == functions.keys()
        return
    with pytest.raises(AssertionError, match=wrong):
        answering(dispatcher, pb, functions, deciding, who)
