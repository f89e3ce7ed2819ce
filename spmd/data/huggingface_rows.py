"""Data sets of Hugging Face's package `datasets`: rows that are read by number, or streams."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.data import data_hash
from spmd.data.decoder import Decoder, check_decode
from spmd.data.features import Feature
from spmd.data.records import FileFormat, ReadOptions, Records
from spmd.errors import DataError, OptionError, check_integer, join_names, option, type_name

MODULE = "datasets"
SAMPLED = 1024  # rows whose contents are hashed


def is_huggingface(data: Any) -> bool:
    """Return True for a data set, or a dict of them, of the package `datasets`."""
    return any(kind.__module__.partition(".")[0] == MODULE for kind in type(data).__mro__)


class Rows(FileFormat):
    """The rows of a data set that has a length."""

    file_kind = "data set"
    record_kind = "row"
    remedy = "repair the row (dataset.map)"

    def __init__(self, dataset: Any, decode: Callable[[Any], Any] | None, pad: Mapping[str, Any]):
        self._dataset, self._is_decoded = dataset, decode is not None
        self.paths, self.counts, self.sizes = (_name(dataset),), [len(dataset)], [0]
        self._into = Decoder(decode or dict, pad)
        if self.counts[0]:
            learn(self._into, dataset[0], self.where(0))
            self.fields = self._into.fields

    def read_into(
        self, leaves: dict[str, np.ndarray], records: np.ndarray, bad: dict[int, str]
    ) -> None:
        """Read rows in one call; columns of one shape are copied as they are."""
        columns = self._dataset[records.tolist()]
        if not self._is_decoded and self._copy(columns, leaves):
            return
        for at in range(len(records)):
            row = {name: values[at] for name, values in columns.items()}
            self._into.read_record(row, leaves, at, bad)

    def _copy(self, columns: Mapping[str, Any], leaves: dict[str, np.ndarray]) -> bool:
        """Copy columns; False if one of them is padded, or its rows have several shapes."""
        for name, leaf in leaves.items():
            values = columns.get(name)
            if not isinstance(values, np.ndarray):
                return False
            if values.dtype != leaf.dtype or values.shape != leaf.shape:
                return False
        for name, leaf in leaves.items():
            leaf[:] = columns[name]
        return True

    def contents(self) -> str:
        """A hash of rows, evenly spaced if there are many."""
        count = self.counts[0]
        rows = np.unique(np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64))
        digest = hashlib.sha256()
        for first in range(0, len(rows), 64):
            leaves, bad = self.read_records(rows[first : first + 64])
            digest.update(repr((data_hash.of_arrays(leaves), sorted(bad))).encode())
        return digest.hexdigest()[:16]


class Stream:
    """Batches of a data set that is a stream; each process reads its own part."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        decode: Callable[[Any], Any] | None,
        pad: Mapping[str, Any],
    ):
        processes = jax.process_count()
        if batch_size % processes:
            raise OptionError(
                f"{option('batch_size', batch_size)}, for {processes} processes, each of which "
                "reads its own part of a stream.",
                fix=f"a multiple of {processes}.",
            )
        self._dataset, self._rows = dataset, batch_size // processes
        self._new_decoder = functools.partial(Decoder, decode or dict, pad)

    def set_epoch(self, number: int) -> None:
        """Begin the next iteration with this epoch's order, if the stream is shuffled."""
        self._dataset.set_epoch(number)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        into = self._new_decoder()
        dataset = self._dataset
        if jax.process_count() > 1:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(
                dataset, rank=jax.process_index(), world_size=jax.process_count()
            )
        batch: list[Any] = []
        for number, row in enumerate(dataset):
            if not into.fields:
                learn(into, row, f"row {number} of the stream")
            batch.append(row)
            if len(batch) == self._rows:
                yield _stacked(into, batch, number)
                batch = []
        if batch:
            yield _stacked(into, batch, number)


def _stacked(into: Decoder, rows: Sequence[Any], last: int) -> dict[str, np.ndarray]:
    """The arrays of consecutive rows of a stream, the last of which has this number.

    Raises:
      DataError: a row differs from the first.
    """
    leaves = {}
    for name, field in into.fields.items():
        leaves[name] = np.zeros((len(rows), *field.shape), field.dtype)
    bad: dict[int, str] = {}
    for at, row in enumerate(rows):
        into.read_record(row, leaves, at, bad)
    if bad:
        first = min(bad)
        number = last - len(rows) + 1 + first
        raise DataError(f"row {number} of the stream: {bad[first]}.", fix="rows of one shape.")
    return leaves


def huggingface(
    dataset: Any,
    *,
    batch_size: int,
    columns: Sequence[str] | None = None,
    decode: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    pad: Mapping[str, Feature] | None = None,
    shuffle: bool | int = True,
    seed: int = 0,
    workers: int = 0,
    on_error: str = "stop",
) -> "Records | Stream":
    """Batches of a data set of Hugging Face's package `datasets`, for `fit` or your own loop.

    `fit(model, dataset, batch_size=128)` calls it. A `Dataset` is read by row: a run resumes at the
    next row, with any number of processes. An `IterableDataset` is a stream in its own order, of
    which each process reads a part; a run that resumes reads it again up to its position.

    Args:
      dataset: a `Dataset` or an `IterableDataset`.
      batch_size: rows of a batch, over all processes.
      columns: to read; None: all. Text has no array: tokenize it first, or leave it out.
      decode: from a row, a dict of numpy arrays and values by column, to a dict of arrays, with the
        same shapes and dtypes for all rows; None: the row as it is.
      pad: by name, `spmd.data.padded(length, dtype)` for one-dimensional arrays whose lengths
        differ.
      shuffle, seed, workers, on_error: as in `spmd.data.csv`; not for a stream, but its own
        `shuffle` and the epoch's number give each epoch an order.

    Returns:
      A `spmd.data.Records` for a `Dataset`; for a stream, an iterable of batches.

    Raises:
      DataError: no row, a row that cannot be placed on a device, or a dict of data sets.
      OptionError: a column that is not there, or an option that a stream does not take.

    Example:
      >>> import datasets, spmd
      >>> rows = datasets.Dataset.from_dict({"x": [[0.0, 1.0], [2.0, 3.0]], "y": [0, 1]})
      >>> batch = next(iter(spmd.data.huggingface(rows, batch_size=2, shuffle=False)))
      >>> batch["x"].shape, batch["y"].tolist()
      ((2, 2), [0, 1])
    """
    if isinstance(dataset, dict):
        names = join_names(list(dataset))
        example = next(iter(dataset), "train")
        raise DataError(f"the data is a dict of data sets: {names}.", fix=f'data["{example}"].')
    if not is_huggingface(dataset):
        raise DataError(
            f"the data is {type_name(dataset)}, not a data set of the package datasets.",
            fix="datasets.load_dataset(...), with split=.",
        )
    if decode is not None or pad:
        check_decode(decode or dict, pad)
    dataset = _formatted(dataset, columns)
    if hasattr(dataset, "__len__"):
        reading = ReadOptions(batch_size, shuffle, seed, workers, on_error)
        return Records(Rows(dataset, decode, pad or {}), reading)
    for name, value, default in (
        ("shuffle", shuffle, True),
        ("seed", seed, 0),
        ("workers", workers, 0),
        ("on_error", on_error, "stop"),
    ):
        if value != default:
            raise OptionError(
                f"{option(name, value)} has no effect on a stream, whose rows come in its own "
                "order.",
                fix="dataset.shuffle(seed=0, buffer_size=10_000), or a Dataset with a length.",
            )
    check_integer(batch_size, "batch_size")
    return Stream(dataset, int(batch_size), decode, pad or {})


def _formatted(dataset: Any, columns: Sequence[str] | None) -> Any:
    """The data set with these columns, as numpy arrays. A transform of the user stays."""
    if columns is not None:
        # A stream may not know before it is read.
        known = dataset.column_names or list(next(iter(dataset), {}))
        if missing := [name for name in columns if name not in known]:
            raise OptionError(
                f"columns: there is no {join_names(missing)}.", fix=f"{join_names(known)}."
            )
        dataset = dataset.select_columns(list(columns))
    # of a Dataset; a stream has none
    if getattr(dataset, "format", {}).get("type") == "custom":
        return dataset
    return dataset.with_format("numpy")


def learn(into: Decoder, row: Mapping[str, Any], where: str) -> None:
    """Learn the fields of a data set from its first row.

    Raises:
      DataError: the row has text, or something else that cannot be placed on a device.
    """
    if why := into.learn(row):
        raise DataError(
            f"{where}: {why}.",
            fix="columns=[...] without it, tokenize it first (dataset.map), or "
            "decode=function, which returns a dict of arrays.",
        )


def _name(dataset: Any) -> str:
    """A name for messages."""
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None) or type(dataset).__name__
    split = getattr(dataset, "split", None)
    return f"{name}[{split}]" if split else str(name)
