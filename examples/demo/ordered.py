"""A trainer of the demo's ordered read: it reports each step, and the state behind it, as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from forebay.service.client.reader import OrderedIterator, read


def main(
    state: str, service: str, dataset_id: str, batch_size: int, index: int, consumers: int
) -> None:
    """Read an epoch, or from the state on the rest of it."""
    batches = read(
        service,
        dataset_id,
        ordered=True,
        batch_size=batch_size,
        consumer_index=index,
        num_consumers=consumers,
    )
    assert isinstance(batches, OrderedIterator)
    with batches:
        if state:
            batches.load_state_dict(json.loads(state))
        for batch in batches:
            report = {"digests": digests(batch), "state": batches.state_dict()}
            print(json.dumps(report), flush=True)


def digests(batch: dict[str, Any]) -> list[str]:
    """Of each image: SHA-256 over its number, its label and its pixels."""
    columns = [batch[name] for name in ("id", "label", "pixels")]
    rows = zip(*columns, strict=True)
    return [hashlib.sha256(b"".join(x.tobytes() for x in row)).hexdigest() for row in rows]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
