"""Arguments of a read that make no sense are refused by each call, before a dispatcher is asked."""

from __future__ import annotations

from typing import Any

import pytest

from forebay import service
from forebay.service.errors import InvalidArgument

SERVICE = "127.0.0.1:1"
ONCE = {"delivery": "at_least_once"}
IN_ORDER = {"ordered": True}
CACHED = {"cross_trainer_cache": service.CrossTrainerCache("a"), "job_name": "j"}
FILE = {"processing_mode": service.ShardingPolicy.FILE}
SECOND_OF_TWO = {"consumer_index": 2, "num_consumers": 2}


def distribute(target: str, dataset_id: str, **how: Any) -> Any:
    return service.distribute(service=target, **how)


def from_dataset_id(target: str, dataset_id: str, **how: Any) -> Any:
    return service.from_dataset_id(service=target, dataset_id=dataset_id, **how)


@pytest.mark.parametrize("call", [service.read, from_dataset_id, distribute])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"delivery": "exactly_once"}, "delivery='exactly_once' must be 'at_most_once' or"),
        ({**ONCE, **IN_ORDER}, "ordered=True and delivery=.*give one of them"),
        (
            {**ONCE, "num_consumers": 2, "consumer_index": 0},
            "num_consumers=2 and delivery=.*give one of them",
        ),
        ({**ONCE, "seed": 1.5}, "seed=1.5 must be an integer"),
        ({**ONCE, "bundle_splits": 0}, "bundle_splits=0 must be an integer from 1"),
        ({**ONCE, "batch_size": 4}, "batch_size: no argument of a read at least once, which takes"),
        ({**ONCE, "cycle_length": 4, "start_step": 1}, "cycle_length, start_step: no argument of"),
        ({**ONCE, **FILE}, "processing_mode=FILE: give OFF or"),
        ({**ONCE, "max_outstanding_requests": 5}, "max_outstanding_requests=5: leave it out"),
        ({**ONCE, "target_workers": "LOCAL"}, "target_workers='LOCAL': leave it out"),
        ({**ONCE, **CACHED}, "cross_trainer_cache: leave it out"),
        ({**ONCE, "initial_epoch": 1}, "initial_epoch=1 needs a job_name"),
        ({**IN_ORDER, "drop_remainder": True}, "drop_remainder=True.*give batch_size"),
        ({**IN_ORDER, "start_position": 1, "start_step": 1}, "start_position=1 and start_step=1"),
        ({**IN_ORDER, "start_position": -1}, "start_position=-1 must be an integer from 0"),
        ({**IN_ORDER, "batch_size": 0}, "batch_size=0 must be an integer from 1"),
        ({**IN_ORDER, "cycle_length": 0}, "cycle_length=0 must be an integer from 1"),
        ({**IN_ORDER, "consumer_index": 1}, "`consumer_index` and `num_consumers`, or neither"),
        ({**IN_ORDER, **SECOND_OF_TWO}, "consumer_index=2 must be from 0 to 1"),
        ({**IN_ORDER, **FILE}, "processing_mode=FILE: give OFF or DYNAMIC"),
        ({**IN_ORDER, "initial_epoch": 1, "job_name": "j"}, "give start_step or start_position"),
        ({**IN_ORDER, "max_outstanding_requests": 3}, "max_outstanding_requests=3: leave it out"),
        ({**IN_ORDER, **CACHED}, "cross_trainer_cache: leave it out"),
        ({**IN_ORDER, "target_workers": "LOCAL"}, "target_workers='LOCAL': leave it out"),
        ({"initial_epoch": 1}, "initial_epoch=1 needs a job_name"),
        ({"initial_epoch": -1, "job_name": "j"}, "initial_epoch=-1"),
        ({"initial_epoch": True, "job_name": "j"}, "initial_epoch=True"),
        ({"processing_mode": "distributed"}, "processing mode should be"),
        ({"processing_mode": "DYNAMIC"}, "Give ShardingPolicy.DYNAMIC"),
        ({"job_name": ""}, "`job_name` must not be empty"),
        ({"job_name": 5}, "`job_name` must be a string"),
        ({"consumer_index": 0, "job_name": "j"}, "either set both `consumer_index` and `num_cons"),
        ({"seed": 1, "batch_size": 2}, "seed.*of an ordered read; give ordered=True as well"),
        ({"add_position": True}, "add_position.*(ordered=True as well|no such argument)"),
        ({"target_workers": "REMOTE"}, r"must be one of \['AUTO', 'ANY', 'LOCAL'\]"),
        *(
            ({"data_transfer_protocol": name}, "use 'AUTO', 'local', 'unix', 'tcp' or 'grpc'")
            for name in ("http", "", 5)
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call(SERVICE, "any", **{"processing_mode": "distributed_epoch", **wrong})
