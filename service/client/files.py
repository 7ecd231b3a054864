"""Registers files of records that can be read at any place, without TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..pipelines.kinds.file_paths import Paths
from ..pipelines.kinds.files import definition
from .registration import Service, check_compression, compressed_by, registered


def register_files(
    service: Service,
    files: Paths,
    *,
    format: str | None = None,  # noqa: A002
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    partitioning: Any = "hive",
    fill: dict[str, Any] | None = None,
    nulls: str = "raise",
    missing: str = "raise",
    map: Callable[[Any], Any] | None = None,  # noqa: A002
    map_batch: Callable[[Any], Any] | None = None,
    element_spec: Any = None,
    packages: Iterable[str] = (),
    one_to_one: bool | None = None,
    on_error: str = "raise",
    limit: int = 100,
    shuffle_records: bool = False,
    seed: int = 0,
    split_records: int | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
    count: bool = True,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> str:
    """Register files of records, and return the dataset's id.

    Workers read them in place, under the same paths. They need the format's library, and neither
    TensorFlow nor `--allow-python`, unless a function is mapped.

    Args:
      service: as in `register_dataset`.
      files: a pattern, a file, a directory, or a list of them, as paths or as URLs (s3://…). Files
        of a pattern and of a directory, with those below it, are sorted; a list keeps its order. A
        directory with an
        index.json is MosaicML's MDS. What matches later is not read: register again.
      format: "arrayrecord", "arrow", "parquet", "tfrecord", "tokens", "webdataset", "mds", "jsonl",
        "lines"; "delta", "iceberg" or "lance" of a table, which is read as of the version that it
        has now; or one that another package brings (docs/formats.md). By default the files say. A
        record of ArrayRecord, TFRecord and lines is bytes, of "tokens" an array, and a dict of
        others. "tokens" is Megatron's .bin with its .idx, .npy, and numbers alone.
      columns: of Parquet and Arrow ("meta.score" of a struct), JSON lines, MDS and WebDataset
        (extensions, and "__key__"). By default all. Of WebDataset, it may be a dict of the
        extensions that a
        column may have, of which the first one that a sample has is read:
        {"image": ["jpg", "png"], "label": "cls"}.
      partitioning: which columns the names of directories have, of Parquet, as in pyarrow.parquet's
        read_table: "hive" for year=2020/…; None for no columns; a list of their names; or one of
        pyarrow.dataset. Of a directory, the names below it count, of a pattern, those from its
        first `*`, of files in a list their whole paths, and of a single file none.
      fill: of WebDataset, bytes or text by column, of samples that have none. Of Parquet, Arrow and
        JSON lines, a value by column, in the place of nulls, and of what a line lacks: an int,
        float, bool, str or bytes. Of a column of lists, it stands for nulls within the lists, and a
        list that is null is empty, or of a fixed size full of it. Of a column in structs, the names
        have dots: {"meta.score": 0.0}.
      nulls: of Parquet and Arrow, what becomes of nulls without a `fill`. "raise": they are an
        error. "drop": rows that have one in a column that is read are no records. "mask": they are
        zero or empty, and each column has another one of its shape, `<name>.valid`, of bools.
      missing: of WebDataset, what becomes of samples that lack a column without a `fill`. "raise":
        they are an error here. "skip": they are no records, and a warning says how many.
      map: called with each record, on the workers; returns an element, as of `python_dataset`. It
        is code, so workers need --allow-python. It may have `setup` and `teardown`. It may return
        None for no element, or a list or an iterator of several (`one_to_one`).
      map_batch: instead of `map`, called with up to 256 records of a split at once, always the
        same ones: columns are arrays of all records, or lists where records are bytes or of
        different shapes. Returns as many elements, in columns of these kinds. Where a record is
        small, it costs a fraction of `map`. An error ends the read.
      element_spec: of what `map` makes, as of `python_dataset`. Without `map`, the files say it.
      packages: as of `python_dataset`, for `map`.
      one_to_one: whether `map` makes exactly one element of each record. If so, a read begins at
        any position without running it for what is before, and another result is an error. By
        default only with `shuffle_records`: where it is False, an ordered read of shuffled records
        is refused.
      on_error: what happens if a record cannot be read, if `map` raises, or if what it returns does
        not fit. "raise": the read ends with an error. "skip": the record alone is left out: in an
        ordered read its place stays empty, in each epoch. `forebay status` and `forebay audit`
        name file and record. Files that are gone or were changed, and errors of the machine, are
        errors in any case. If `map` ends its process, the rest of the split is skipped, or the
        ordered read ends. "retry": the split runs again; see `python_dataset`.
      limit: how many records all workers may skip in an epoch, or in an ordered job altogether; or
        how often a worker retries a split. Of a Parquet file, a row group counts with all records.
      shuffle_records: each epoch is another permutation of all records, by the read's seed. Without
        it, records are in the files' order within a split, and an ordered read permutes splits. Of
        Parquet, a split reads all row groups that it has a record of.
      seed: of the shuffle, for reads that have no seed: those that are neither ordered nor at least
        once.
      split_records: about how many records a split has. By default there are up to 1024 splits. An
        ordered read of more needs `bundle_splits=1`.
      index_dir: where indices of TFRecord, WebDataset and Arrow files are, and of documents of
        tokens, if not beside them: a directory that workers see under the same path.
      storage_options: of files in object stores, what their URLs do not say: "region";
        "anonymous", whether requests are not signed; and, if so, "endpoint". No secrets: each
        process finds credentials in its own environment.
      tokens: of files of tokens, what they do not say: "dtype", of numbers alone; "window", of how
        many tokens a record is, without an overlap; or "eod", the token that ends a document, which
        is a record then, with that token.
      count: whether records are counted. False, of TFRecord, WebDataset and lines: files are not
        read here, but for their first records. Each is a split, read from its begin, whose length
        is learned when it is first read. Compressed files are a split each in any case.
      compression, dataset_id: as in `register_dataset`.

    The dispatcher is told how many records each split has, unless `one_to_one` or `count` is False
    or `on_error` is "skip". So an ordered read begins at any position without counting.

    Raises ValueError for what cannot be read, NotFound if no file matches, FailedPrecondition
    without the format's library, Corrupt for a damaged file, and Unavailable.
    """
    check_compression(compression)
    request = definition(
        files, format=format, columns=columns, partitioning=partitioning, fill=fill,
        nulls=nulls, missing=missing, map=map, map_batch=map_batch,
        element_spec=element_spec, packages=packages,
        one_to_one=one_to_one, on_error=on_error, limit=limit, shuffle_records=shuffle_records,
        seed=seed, split_records=split_records, index_dir=index_dir,
        storage_options=storage_options, tokens=tokens, count=count,
    )  # fmt: skip
    return registered(service, compressed_by(compression, request), dataset_id)
