"""A crowd's save: saves a dataset of ELEMENTS elements while the crowd reads.

After the run, `saved` starts another process with TensorFlow, which reads it back.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Mapping

import msgspec

from ..service.connections.dispatcher_client import DispatcherClient
from ..service.processes import ChildProcess, forebay, tail
from ..service.proto import forebay_pb2 as pb
from ..service.save_files import DONE, ERROR

ELEMENTS = 500
LOOK_S = 0.2


def request_in(directory: pathlib.Path) -> pathlib.Path:
    """The file with the StartSaveRequest, which has no save path yet."""
    return directory / "save.request"


def path_in(records: pathlib.Path) -> pathlib.Path:
    """The directory of the save of the crowd with these records."""
    return records / "saved"


def save(service: str, records: pathlib.Path) -> None:
    """Save the dataset, and wait for the end. Raises ValueError with the save's own error."""
    path = path_in(records).absolute()
    request = pb.StartSaveRequest.FromString(request_in(records.parent).read_bytes())
    request.path = str(path)
    with DispatcherClient(service) as dispatcher:
        dispatcher.call_numbered(request, pb.StartSaveResponse)
    while not (path / DONE).exists():
        if (path / ERROR).exists():
            raise ValueError(f"{path} was not saved: {(path / ERROR).read_text()}")
        time.sleep(LOOK_S)


class Saved(msgspec.Struct, frozen=True):
    """The elements that were read back. `damaged` are those whose content contradicts their id."""

    ids: list[int]
    damaged: list[int]


def saved(paths: Mapping[str, pathlib.Path], directory: pathlib.Path) -> dict[str, Saved]:
    """Read the completed saves, by the same names. Raises ValueError if one cannot be read."""
    done = {name: str(path) for name, path in paths.items() if (path / DONE).exists()}
    if not done:
        return {}
    answer, log = directory / "saved", directory / "saved.log"
    asked = msgspec.json.encode(done).decode()
    if ChildProcess(forebay("chaos.saves", asked, str(answer)), log).finish():
        raise ValueError(f"what was saved cannot be read: {tail(log, 3)}")
    return msgspec.json.decode(answer.read_bytes(), type=dict[str, Saved])


def main(paths: Mapping[str, str], answer: pathlib.Path) -> None:
    """Read all saves, and write the results to the file `answer`."""
    import tensorflow as tf

    found = {}
    for name, path in paths.items():
        elements = list(tf.data.Dataset.load(path).as_numpy_iterator())
        damaged = [int(e["id"]) for e in elements if (e["payload"] != e["id"]).any()]
        found[name] = Saved([int(e["id"]) for e in elements], damaged)
    answer.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=dict[str, str]), pathlib.Path(sys.argv[2]))
