"""Reads files of records with a Python function, beside webdataset in a DataLoader and Grain.

    python -m scripts.map_bench --json FILE [--rows tar|arrayrecord] [--rounds 3]

In an environment of its own: pip install -e '.[torch,arrayrecord]' grain webdataset pillow
scikit-learn. Each round reads one epoch in a new trainer's process, which only consumes batches;
its clock runs from the tenth batch to the last one. All files stay in the page cache.

- tar: JPEGs of 256×256 to 400×300 pixels, tiles of scikit-learn's two photographs, with a class.
  The function decodes, crops to 224×224 and flips, in batches of 64. webdataset has two workers.
- arrayrecord: records of 1 KB, shuffled, in batches of 250; the function is np.frombuffer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import io
import json
import multiprocessing
import pathlib
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

SHARDS, SAMPLES, COPIES = 8, 250, 3
FILES, RECORDS = 50, 1000
SIZES = [(256, 256), (320, 240), (300, 400), (400, 300)]
CROP, IMAGES, ROWS = 224, 64, 250
FIRST = 10  # batches before the clock runs


def augment(sample: dict[str, bytes]) -> dict[str, Any]:
    from PIL import Image

    image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
    left = random.randint(0, image.width - CROP)
    top = random.randint(0, image.height - CROP)
    image = image.crop((left, top, left + CROP, top + CROP))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return {"image": np.asarray(image), "label": int(sample["cls"])}


def as_array(record: bytes) -> Any:
    return np.frombuffer(record, np.uint8)


def as_arrays(records: list[bytes]) -> Any:
    return np.stack([np.frombuffer(record, np.uint8) for record in records])


def write_tars(directory: pathlib.Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    draw = random.Random(0)
    for shard in range(SHARDS):
        path = directory / f"{shard:03}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(SAMPLES):
                photograph, (width, height) = draw.choice(photographs), draw.choice(SIZES)
                left = draw.randint(0, photograph.width - width)
                top = draw.randint(0, photograph.height - height)
                tile = photograph.crop((left, top, left + width, top + height))
                tile.save(data := io.BytesIO(), "JPEG", quality=90)
                described = json.dumps({"width": width, "height": height}).encode()
                content = {"cls": b"%d" % draw.randrange(10), "jpg": data.getvalue()}
                for extension, value in {**content, "json": described}.items():
                    member = tarfile.TarInfo(f"{shard:03}{number:05}.{extension}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))
        for copy in range(1, COPIES):
            (directory / f"{copy * SHARDS + shard:03}.tar").write_bytes(path.read_bytes())


def write_records(directory: pathlib.Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    noise = np.random.default_rng(0)
    for number in range(FILES):
        path = str(directory / f"{number:03}.array_record")
        writer = ArrayRecordWriter(path, "group_size:1,uncompressed")  # as Grain advises
        for _ in range(RECORDS):
            writer.write(noise.bytes(1024))
        writer.close()


# -- in the trainer's process ---------------------------------------------------------------------


def forebay_torch(target: str, dataset_id: str, **how: Any) -> Iterable[Any]:
    from forebay.torch import ServiceDataset

    batches: Iterable[Any] = ServiceDataset(target, dataset_id, batch_size=IMAGES, **how)
    return batches


def forebay_numpy(target: str, dataset_id: str, **how: Any) -> Iterable[Any]:
    from forebay import service

    batches: Iterable[Any] = service.read(target, dataset_id, batch_size=ROWS, **how)
    return batches


def webdataset(directory: str) -> Iterable[Any]:
    import torch.utils.data
    import webdataset as wds

    shards = sorted(map(str, pathlib.Path(directory).glob("*.tar")))
    samples = wds.WebDataset(shards, shardshuffle=len(shards)).map(augment).batched(IMAGES)
    loader: Iterable[Any] = torch.utils.data.DataLoader(samples, batch_size=None, num_workers=2)
    return loader


def grain_loader(directory: str, workers: int) -> Iterable[Any]:
    import grain.python as grain  # type: ignore[import-not-found]
    from absl import flags

    class AsArray(grain.MapTransform):  # type: ignore[misc]
        def map(self, element: bytes) -> Any:
            return as_array(element)

    flags.FLAGS.mark_as_parsed()  # as a program of absl's has
    source = grain.ArrayRecordDataSource(
        sorted(map(str, pathlib.Path(directory).glob("*.array_record")))
    )
    sampler = grain.IndexSampler(
        len(source), shard_options=grain.NoSharding(), shuffle=True, num_epochs=1, seed=1
    )
    operations = [AsArray(), grain.Batch(ROWS)]
    loader: Iterator[Any] = iter(
        grain.DataLoader(
            data_source=source, sampler=sampler, operations=operations, worker_count=workers
        )
    )
    return loader


def rate(way: Callable[..., Iterable[Any]], *args: Any, **how: Any) -> tuple[int, float]:
    """Elements of an epoch, and elements a second behind its first batches."""
    had, begun_s, counted = 0, 0.0, 0
    for number, batch in enumerate(way(*args, **how)):
        size = len(batch["image"]) if isinstance(batch, dict) else len(batch)
        had += size
        if number == FIRST:
            begun_s, counted = time.perf_counter(), had
    return had, (had - counted) / (time.perf_counter() - begun_s)


def in_new_process(*args: Any, **how: Any) -> tuple[int, float]:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as executor:
        return executor.submit(rate, *args, **how).result()


# -- in this one ----------------------------------------------------------------------------------


def forebay(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server, and what it prints once it serves."""
    command = [str(pathlib.Path(sys.executable).with_name("forebay")), *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


Ways = dict[str, tuple[Callable[..., Iterable[Any]], list[Any], dict[str, Any]]]


def tar_ways(target: str, directory: pathlib.Path) -> Ways:
    from forebay import service

    columns = ["jpg", "cls"]
    images = service.register_files(target, f"{directory}/*.tar", columns=columns, map=augment)
    return {
        "webdataset": (webdataset, [str(directory)], {}),
        "at most once": (forebay_torch, [target, images], {}),
        "in order": (forebay_torch, [target, images], {"ordered": True, "seed": 1}),
    }


def arrayrecord_ways(target: str, directory: pathlib.Path) -> Ways:
    from forebay import service

    files, shuffled = f"{directory}/*.array_record", dict[str, Any](shuffle_records=True)
    how = {"ordered": True, "seed": 1, "cycle_length": 1}
    by_map = service.register_files(target, files, map=as_array, **shuffled)
    by_batch = service.register_files(target, files, map_batch=as_arrays, **shuffled)
    return {
        **{f"grain {n} workers": (grain_loader, [str(directory), n], {}) for n in (0, 1, 2)},
        "map": (forebay_numpy, [target, by_map], how),
        "map_batch": (forebay_numpy, [target, by_batch], how),
    }


def measure(row: str, rounds: int, directory: pathlib.Path, only: list[str]) -> dict[str, Any]:
    write, ways_of, elements = {
        "tar": (write_tars, tar_ways, SHARDS * SAMPLES * COPIES),
        "arrayrecord": (write_records, arrayrecord_ways, FILES * RECORDS),
    }[row]
    if not directory.exists():
        directory.mkdir(parents=True)
        write(directory)
    dispatcher, target = forebay("dispatcher")
    worker, _ = forebay("worker", "--dispatcher", target, "--allow-python")
    try:
        ways = ways_of(target, directory)
        ways = {name: way for name, way in ways.items() if not only or name in only}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (way, args, how) in ways.items():
                count, found = in_new_process(way, *args, **how)
                assert count == elements, (name, count)
                rates[name].append(round(found))
                print(row, name, round(found), flush=True)
    finally:
        for server in (worker, dispatcher):
            server.terminate()
            server.wait()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rows", nargs="+", default=["tar", "arrayrecord"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="ways of a row")
    parser.add_argument("--files", type=pathlib.Path, help="keep the files there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        files = given.files or pathlib.Path(name)
        rates = {row: measure(row, given.rounds, files / row, given.only) for row in given.rows}
    for row, of in rates.items():
        for way, found in of.items():
            print(f"{row}, {way}: {statistics.median(found):,.0f}/s, {min(found)} to {max(found)}")
    if given.json:
        given.json.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
