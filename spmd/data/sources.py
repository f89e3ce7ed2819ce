"""Sources of batches: arrays, iterables of batches, or records of files (`records.py`). Each can
resume from a position.
"""

import base64
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from spmd.base.tree import Tree, abstract, describe, flatten
from spmd.data import data_hash
from spmd.data.batches import HostBatch, Placer, as_arrays, check_leaves, check_matches
from spmd.data.bucketing import Buckets
from spmd.data.records import Records, warn_skipped
from spmd.data.shuffle import RecordOrder
from spmd.errors import (
    DataError,
    OptionError,
    check_integer,
    first_line,
    join_names,
    option,
    short_repr,
    type_name,
)
from spmd.models.wrap import missing_arguments

T = TypeVar("T")
KINDS = "a dict or tuple of arrays, an iterable of batches, or a grain data set"
OF_EXAMPLES = (  # a data set as PyTorch has it: examples by number
    "jax.tree.map(lambda *rows: numpy.stack(rows), *(data[i] for i in range(len(data)))), which "
    "holds all of it; "
    "or batches as they are needed, grain.MapDataset.source(data).shuffle(seed=0).batch(128)."
)
READERS = (  # by the endings of files' names
    ((".csv", ".tsv"), 'spmd.data.csv("{path}", batch_size=...)'),
    ((".parquet",), 'spmd.data.parquet("{path}", batch_size=...)'),
    ((".jsonl", ".txt"), 'spmd.data.text("{path}", ...)'),
    ((".tfrecord", ".tfrecords"), 'spmd.data.tfrecord("{path}", features=..., batch_size=...)'),
    ((".array_record", ".arrayrecord"), 'spmd.data.array_record("{path}", batch_size=...)'),
    ((".npy",), 'numpy.load("{path}")'),
    ((".npz",), 'dict(numpy.load("{path}"))'),
)
_ADDRESS = re.compile(rb" at 0x[0-9a-f]+>")
# in a fingerprint; checkpoints of earlier versions do not have it
RECORDS_SEED = "seed of the records"


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Batches of arrays [examples, ...], in an order that `seed` and the epoch's number determine.

    Every example comes once per epoch; the last batch of an epoch may be short. Each process holds
    (or maps) all arrays and reads only the rows of its own devices.
    """

    arrays: Tree
    examples: int
    batch_size: int
    shuffle: bool
    seed: int
    threaded = False

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch, a short last one counted."""
        return -(-self.examples // self.batch_size)

    def sample(self) -> Tree:
        """The shapes of one full batch."""
        return _batch_shapes(self.arrays, self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """int64[examples]: the order of this epoch."""
        return RecordOrder(self.examples, self.shuffle, self.seed).epoch(epoch)

    def epoch(self, number: int, start: int = 0, position: Any = None) -> Iterator[HostBatch]:
        """The batches of one epoch, from batch `start` on."""
        del position  # number and start are the position
        order = self.order(number)
        for first in range(start * self.batch_size, self.examples, self.batch_size):
            index = order[first : first + self.batch_size]
            yield HostBatch(self.arrays, len(index), index)

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that must be equal for a run to resume with the same data; each array as
        a hash (`data_hash.of_arrays`).
        """
        facts: dict[str, Any] = {
            "examples": self.examples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        for path, digest in data_hash.of_arrays(self.arrays).items():
            facts[f"contents {path}".strip()] = digest
        return facts


def _batch_shapes(tree: Tree, rows: int) -> Tree:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), abstract(tree)
    )


def _iterated_twice(yields: str) -> DataError:
    fix = "a list, or a function that returns a fresh iterator: lambda: batches()."
    return DataError(f"the data yields {yields}: it can be iterated only once.", fix=fix)


class IterableSource:
    """Batches as an iterable yields them: a list, a generator, a function that returns one, a grain
    data set.

    An iterator with `get_state` and `set_state` (grain's) resumes by its state; any other by
    reading up to its position.
    """

    threaded = True

    def __init__(self, data: Any, batch_size: int | None):
        self.steps_per_epoch: int | None = None
        if hasattr(data, "__len__"):
            self.steps_per_epoch = len(data)
        self._make: Callable[[], Any] = lambda: data
        if callable(data) and not hasattr(data, "__iter__"):
            self._make = data
        self._first: Iterator | None = self._iterate()
        try:
            sample = as_arrays(next(self._first), "the first batch")
        except StopIteration:
            # `iter` of an iterator is the iterator itself.
            if self._first is data:
                raise _iterated_twice("nothing") from None
            fix = (
                "look at what it is made from; an iterator that was read before has to be made "
                "anew."
            )
            raise DataError("the data is empty: it yields no batch.", fix=fix) from None
        # An iterator cannot be wound back, so the first epoch begins with this batch.
        self._head: list[Tree] = [sample]
        rows = check_leaves(sample, "the first batch")
        if rows == 0:
            raise DataError(
                "the data is empty: its first batch has 0 rows.",
                fix="look at what it was read or filtered from.",
            )
        self.batch_size = rows * jax.process_count()
        if batch_size is not None and batch_size != self.batch_size:
            fix = f"leave batch_size out, or yield {batch_size}."
            raise DataError(
                f"{option('batch_size', batch_size)}, but the data yields batches of "
                f"{self.batch_size} rows.",
                fix=fix,
            )
        self._sample = _batch_shapes(sample, self.batch_size)

    def _iterate(self) -> Iterator:
        batches = self._make()
        # `iter` also takes an object that has only __getitem__.
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise DataError(
                f"the function that was given as data returned {type_name(batches)}.",
                fix="an iterator or a list of batches.",
            )
        return iter(batches)

    def can_read_again(self, position: Any) -> bool:
        """Return True if an epoch that has begun can be opened again: not where `iter` gives the
        same iterator, unless its state can be set.
        """
        try:
            again = self._iterate()
        except Exception:  # it cannot be opened now, and perhaps after a pause
            return True
        return again is not self._iterator or (self._is_stateful and position is not None)

    @property
    def _is_stateful(self) -> bool:
        # With several processes each has its own reader, but a checkpoint holds one position: all
        # processes read up to it.
        has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        return has_state and jax.process_count() == 1

    def sample(self) -> Tree:
        """The shapes of the first batch, over all processes."""
        return self._sample

    def epoch(self, number: int, start: int = 0, position: Any = None) -> Iterator[HostBatch]:
        """The batches of one epoch, from batch `start` on; `position` is the iterator's own state
        there, if it has one.
        """
        iterator, head = self._first, self._head
        if iterator is None:
            iterator, head = self._iterate(), []
        self._first, self._head, self._iterator = None, [], iterator
        stateful = self._is_stateful
        if stateful and position is not None:
            _restore(iterator, _from_json(position))
            head, start = [], 0
        count = 0
        for count, leaves in enumerate(itertools.chain(head, iterator), 1):
            if count <= start:
                continue
            batch = f"batch {count} of epoch {number + 1}"
            leaves = as_arrays(leaves, batch)
            rows = check_leaves(leaves, batch)
            if rows == 0:
                raise DataError(f"{batch} has 0 rows.", fix="leave out batches without rows.")
            if rows * jax.process_count() > self.batch_size:
                raise DataError(
                    f"{batch} has {rows} rows, more than the {self.batch_size} of the first one.",
                    fix="batches of one size; only the last may be smaller.",
                )
            check_matches(leaves, self._sample, batch)
            # The state is taken before its batch is yielded: batches read ahead do not count.
            state = None
            if stateful:
                state = _to_json(iterator.get_state())  # type: ignore[union-attr]
            yield HostBatch(leaves, rows, None, state)
        # a restored state may be at the end
        if count == 0 and not (stateful and position is not None):
            raise _iterated_twice(f"nothing in epoch {number + 1}")
        if count < start:
            raise DataError(
                f"the data has {count} batches; the run to be resumed was at batch {start} of "
                f"epoch {number + 1}.",
                fix="the data of that run.",
            )

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that must be equal for a run to resume with the same data."""
        return {"batch_size": self.batch_size, "batches": self.steps_per_epoch}


def _to_json(state: Any) -> Any:
    """A reader's state as JSON can store it: grain's `DataLoader` returns bytes, its data sets
    return a dict.
    """
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return state


def _from_json(state: Any) -> Any:
    if isinstance(state, dict) and set(state) == {"base64"}:
        return base64.b64decode(state["base64"])
    return state


def _restore(iterator: Any, state: Any) -> None:
    """Set an iterator to a saved state.

    Raises:
      DataError: it refuses the state, as grain's `DataLoader` does where its source, sampler or
        number of workers is another.
    """
    try:
        if isinstance(state, bytes):
            state = _with_addresses_here(state, iterator)
        iterator.set_state(state)
    except Exception as error:
        why = (
            f"{type_name(iterator)} refuses the position in the data of the checkpoint: "
            f"{first_line(error).rstrip('.')}"
        )
        raise DataError(
            f"{why}.",
            fix="the source, the sampler and the number of workers that the run began with.",
        ) from error


def _with_addresses_here(state: bytes, iterator: Any) -> bytes:
    """A saved state with the addresses that a new one has: grain compares the `repr` of a source,
    which by default holds its address.
    """
    here = _ADDRESS.findall(iterator.get_state())
    if len(here) != len(_ADDRESS.findall(state)):
        return state
    return _ADDRESS.sub(lambda _: here.pop(0), state)


class RecordSource:
    """Batches of `spmd.data.csv` and the like: each process reads the records of its own devices'
    rows.

    The position is the epoch and the batch, so a run may resume with another number of processes.
    """

    threaded = True

    def __init__(self, records: Records):
        self.records, self.batch_size, self.examples = records, records.batch_size, records.examples
        self.steps_per_epoch: int | None = records.steps_per_epoch
        self.local_rows: np.ndarray | None = None

    def sample(self) -> Tree:
        """The shapes of one full batch."""
        shapes = {}
        for name, field in self.records.fields.items():
            shape = (self.batch_size, *field.shape)
            shapes[name] = jax.ShapeDtypeStruct(shape, field.dtype)
        return abstract(shapes)

    def epoch(self, number: int, start: int = 0, position: Any = None) -> Iterator[HostBatch]:
        """The batches of one epoch, from batch `start` on; `position` holds the number of records
        skipped before.
        """
        skipped = 0
        if position is not None:
            skipped = position["skipped"]
        for leaves, good in self.records.read_epoch(number, start, self.local_rows):
            rows = len(good)
            if not good.all():
                skipped += rows - int(good.sum())
                if rows < self.batch_size:  # all processes read all of a short batch
                    if not good.any():
                        continue  # so all of them leave it out
                    leaves = {name: leaf[good] for name, leaf in leaves.items()}
                    rows = int(good.sum())
            # a step on no rows has no gradient
            if rows == self.batch_size and self.local_rows is None and not good.any():
                raise DataError(
                    f"none of the {rows} records of a batch of epoch {number + 1} can be read.",
                    fix="repair the files; or larger batches, or shuffle=True if bad records are "
                    "next to each other.",
                )
            weights, index, position = None, None, None
            if rows == self.batch_size and not good.all():
                weights = good.astype(np.float32)
            # With an index, `Placer` takes the leaves for the rows of all processes, not for local
            # ones.
            if jax.process_count() > 1:
                index = np.arange(rows)
            if skipped:
                position = {"skipped": skipped}
            yield HostBatch(leaves, rows, index, position, None, weights)
        warn_skipped(self.records, number, skipped)

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that must be equal for a run to resume with the same data; the records'
        seed has a name of its own, since a run has one, too.
        """
        facts = self.records.facts()
        facts[RECORDS_SEED] = facts.pop("seed")
        return facts


def bind_rows(reader: "Source", prepared: tuple[T, Placer]) -> tuple[T, Placer]:
    """`prepared`, after setting the rows of a batch that a reader of records must read for the
    devices of this process.
    """
    if isinstance(reader, RecordSource):
        reader.local_rows = prepared[1].local_rows()
    return prepared


Source = ArraySource | IterableSource | RecordSource


def is_arrays(data: Any) -> bool:
    """Return True for a tree of arrays, and False for data that yields batches."""
    if isinstance(data, dict):
        return True
    if isinstance(data, tuple):
        return all(hasattr(leaf, "shape") or isinstance(leaf, dict) for leaf in data)
    return hasattr(data, "shape")


def as_source(
    data: Any, *, batch_size: int | None, shuffle: bool | None, seed: int, short_ok: bool = False
) -> Source:
    """The user's `data` as a source of batches.

    Raises:
      DataError: ragged or empty arrays, fewer examples than one batch (unless `short_ok`), or
        unreadable data.
      OptionError: an option that does not apply to this kind of data.
    """
    if data is None or isinstance(data, str | os.PathLike):
        raise DataError(
            f"data={short_repr(data)} is {type_name(data)}, not data.", fix=_how_to_read(data)
        )
    if shuffle is not None and not isinstance(shuffle, bool):
        raise OptionError(
            f"{option('shuffle', short_repr(shuffle))}.",
            fix="True, False, or None (True for arrays).",
        )
    if isinstance(data, Buckets):
        raise OptionError(
            f"batches of {len(data.bounds)} lengths, and a step is compiled for one shape.",
            fix="the records without buckets, where spmd.data.padded makes all alike; or a loop of "
            "your own.",
        )
    if isinstance(data, Records):
        for name, value, of_records in [
            ("shuffle", shuffle, data.reading.shuffle),
            ("batch_size", batch_size, data.batch_size),
        ]:
            if value not in (None, of_records):
                fix = f"leave {name} out here; it is given to what reads the files."
                raise OptionError(
                    f"{option(name, value)}, but the records come with {name}={of_records}.",
                    fix=fix,
                )
        _check_size(data.examples, data.batch_size, short_ok=short_ok)
        return RecordSource(data)
    if not is_arrays(data):
        if shuffle:
            why = "shuffle=True: batches of an iterable come in its own order."
            raise OptionError(why, fix="shuffle where they are made, or give arrays.")
        if (
            callable(data)
            and not hasattr(data, "__iter__")
            and (missing := missing_arguments(data))
        ):
            why = f"the function given as data takes arguments: {join_names(missing)}."
            raise DataError(why, fix="a function of none: lambda: batches(...).")
        if not hasattr(data, "__iter__") and not callable(data):
            is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
            fix = f"{KINDS}."
            if is_dataset:
                fix = OF_EXAMPLES
            raise DataError(
                f"the data is {type_name(data)}: not arrays, and it cannot be iterated.", fix=fix
            )
        return IterableSource(data, batch_size)
    arrays = as_arrays(data, "the data")
    examples = check_leaves(arrays, "the data")
    arrays = jax.tree.map(np.asarray, arrays)
    if examples == 0:
        raise DataError(
            f"the data is empty: {_describe_arrays(arrays)}.",
            fix="look at what it was read or filtered from.",
        )
    if batch_size is None:
        raise OptionError(
            "batch_size is missing: arrays must be split into batches.",
            fix=f"such as {option('batch_size', 128)}.",
        )
    check_integer(batch_size, "batch_size")
    _check_size(examples, batch_size, short_ok=short_ok)
    return ArraySource(arrays, examples, int(batch_size), shuffle is not False, seed)


def _describe_arrays(arrays: Tree) -> str:
    """Return path, dtype and shape of each array, in words."""
    described = []
    for path, leaf in flatten(arrays).items():
        described.append(f"{path} {describe(leaf)}".strip())
    return ", ".join(described)


def _how_to_read(data: Any) -> str:
    """A fix for a path in the place of data."""
    if data is None:
        return f"{KINDS}."
    path = os.fspath(data)
    name = path.lower().removesuffix(".gz")
    for endings, call in READERS:
        if name.endswith(endings):
            return f"{call.format(path=path)}."
    return f"{KINDS}; spmd.data reads files."


def _check_size(examples: int, batch_size: int, *, short_ok: bool) -> None:
    if examples < batch_size and not short_ok:
        raise DataError(
            f"the data has {examples} examples, fewer than one batch of {batch_size}.",
            fix=f"{option('batch_size', examples)} or less.",
        )
