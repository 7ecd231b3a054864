"""What a crowd saves, beside its readers: a dataset of ELEMENTS elements, until that is done.

Once the run is over another process, with TensorFlow, reads it back: `saved` starts that.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Mapping

import msgspec

from ..connections.dispatcher_client import DispatcherClient
from ..processes import Child, forebay, tail
from ..proto import forebay_pb2 as pb
from ..save_files import DONE, ERROR

ELEMENTS = 500
LOOK_S = 0.2


def request_in(directory: pathlib.Path) -> pathlib.Path:
    """The file with a StartSaveRequest that lacks its path."""
    return directory / "save.request"


def path_in(records: pathlib.Path) -> pathlib.Path:
    """Where the crowd with these records saves."""
    return records / "saved"


def save(service: str, records: pathlib.Path) -> None:
    """Have it saved. Raises ValueError with what the save says of its failure."""
    path = path_in(records).absolute()
    request = pb.StartSaveRequest.FromString(request_in(records.parent).read_bytes())
    request.path = str(path)
    dispatcher = DispatcherClient(service)
    try:
        dispatcher.call_numbered(request, pb.StartSaveResponse)
    finally:
        dispatcher.close()
    while not (path / DONE).exists():
        if (path / ERROR).exists():
            raise ValueError(f"{path} was not saved: {(path / ERROR).read_text()}")
        time.sleep(LOOK_S)


class Saved(msgspec.Struct, frozen=True):
    """What was read back. `damaged` are those whose content is not what their id says."""

    ids: list[int]
    damaged: list[int]


def saved(paths: Mapping[str, pathlib.Path], directory: pathlib.Path) -> dict[str, Saved]:
    """Of the saves that are done, by the same names. Raises ValueError if one cannot be read."""
    done = {name: str(path) for name, path in paths.items() if (path / DONE).exists()}
    if not done:
        return {}
    answer, log = directory / "saved", directory / "saved.log"
    asked = msgspec.json.encode(done).decode()
    if Child(forebay("chaos.saves", asked, str(answer)), log).finish():
        raise ValueError(f"what was saved cannot be read: {tail(log, 3)}")
    return msgspec.json.decode(answer.read_bytes(), type=dict[str, Saved])


def main(paths: Mapping[str, str], answer: pathlib.Path) -> None:
    """Read all, and write it to the file `answer`."""
    import tensorflow as tf

    found = {}
    for name, path in paths.items():
        elements = list(tf.data.Dataset.load(path).as_numpy_iterator())
        damaged = [int(e["id"]) for e in elements if (e["payload"] != e["id"]).any()]
        found[name] = Saved([int(e["id"]) for e in elements], damaged)
    answer.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=dict[str, str]), pathlib.Path(sys.argv[2]))
