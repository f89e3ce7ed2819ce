"""Batches of records of like length, each as long as its bucket, for those who own their loop."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.data.records import Batches, RecordBatch, Records, flatten_groups, run_ahead
from spmd.errors import DataError, OptionError, type_name

READ = 1024  # records that are measured together


class Buckets:
    """Batches of records whose sequences are of like length; `spmd.data.buckets` makes it.

    Attributes:
      lengths: int64[examples], how long the sequence of each record is; 0 of one that cannot be read, which so is in the first bucket.
      bounds: the lengths of the buckets.
    """

    def __init__(self, records: Records, name: str, bounds: tuple[int, ...]):
        self.records, self.name, self.bounds = records, name, bounds
        self.lengths = _measured(records, name)
        self._bucket = np.searchsorted(bounds, self.lengths)
        longest = int(self.lengths.max())
        if longest > bounds[-1]:
            where = records.format.where(int(self.lengths.argmax()))
            raise DataError(
                f'{where}: "{name}" has {longest} numbers, and the longest bucket {bounds[-1]}.', fix=f"lengths up to {longest}."
            )

    @property
    def examples(self) -> int:
        """Records of all files."""
        return self.records.examples

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; each bucket may have a short last one."""
        return sum(-(-int(count) // self.records.batch_size) for count in np.bincount(self._bucket))

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Batches:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Batches:
        """The batches of one epoch, from batch `start` on."""
        return Batches(self, number, start)

    def facts(self) -> dict[str, Any]:
        """What must be the same to go on."""
        return {**self.records.facts(), "buckets": list(self.bounds), "of": self.name}

    def read(self, number: int, start: int = 0) -> Iterator[RecordBatch]:
        """The batches of an epoch, and bool[rows] which of their rows hold a record."""
        order, size = self.records.order, self.records.batch_size
        ids = order.epoch(number)
        batches = []
        for bucket in range(len(self.bounds)):
            mine = ids[self._bucket[ids] == bucket]
            batches += [(bucket, mine[first : first + size]) for first in range(0, len(mine), size)]
        if order.shuffle is not False:
            turn = np.random.Generator(np.random.Philox(key=np.array([order.seed, number], np.uint64))).permutation(len(batches))
            batches = [batches[at] for at in turn]
        together = self.records.group_batches(batches[start:], size)
        return flatten_groups(run_ahead(((lambda some=some: self._several(some)) for some in together), self.records.reading.workers))

    def _several(self, batches: list[tuple[int, np.ndarray]]) -> list[RecordBatch | Exception]:
        made = self.records.read_batches([ids for _, ids in batches])
        return [one if isinstance(one, Exception) else self._cut(*each, *one) for each, one in zip(batches, made, strict=True)]

    def _cut(self, bucket: int, ids: np.ndarray, leaves: dict[str, np.ndarray], good: np.ndarray) -> RecordBatch | Exception:
        bound = self.bounds[bucket]
        longer = np.flatnonzero(leaves[f"{self.name}_mask"][:, bound:].any(axis=1) & good)
        if len(longer):
            where = self.records.format.where(int(ids[longer[0]]))
            fix = "files that nobody writes to"
            return DataError(f'{where}: "{self.name}" is longer than it was when it was measured.', fix=f"{fix}.")
        return {**leaves, **{name: leaves[name][:, :bound] for name in (self.name, f"{self.name}_mask")}}, good


def buckets(records: Records, name: str, lengths: Sequence[int]) -> Buckets:
    """Batches of records of like length: dicts in which `name` is as long as the bucket, and `NAME_mask` says where data is.

    All records are read once to measure them. A step is compiled for one shape, so `fit` takes no buckets: one that you call yourself is
    compiled once for each. For `fit`, `spmd.data.padded` alone makes all sequences as long as the longest.

    Args:
      records: as `spmd.data.tfrecord` gives them, `name` among them padded.
      lengths: of the buckets; a record is in the first that holds it.

    Raises:
      OptionError: `name` is not padded, or lengths that do not grow.
      DataError: a record is longer than all buckets.
    """
    if not isinstance(records, Records):
        raise OptionError(f"buckets: of {type_name(records)}.", fix="of records, as spmd.data.tfrecord gives them.")
    field = records.fields.get(name)
    if field is None or f"{name}_mask" not in records.fields:
        padded = [one for one in records.fields if f"{one}_mask" in records.fields]
        raise OptionError(
            f'buckets: "{name}" is no padded feature; there are: {", ".join(padded) or "none"}.', fix="spmd.data.padded(...)."
        )
    bounds = tuple(lengths) if isinstance(lengths, Sequence) else ()
    if not bounds or any(not isinstance(one, int) or one < 1 for one in bounds) or sorted(set(bounds)) != list(bounds):
        raise OptionError(f"buckets: lengths {lengths!r}.", fix="whole numbers that grow, such as [16, 32, 64].")
    if bounds[-1] > field.shape[0]:
        raise OptionError(f'buckets: a length of {bounds[-1]}, and "{name}" is padded to {field.shape[0]}.', fix="the same for both.")
    return Buckets(records, name, bounds)


def _measured(records: Records, name: str) -> np.ndarray:
    cuts = (np.arange(first, min(first + READ, records.examples)) for first in range(0, records.examples, READ))

    def measure(ids: np.ndarray) -> np.ndarray:
        leaves, good = records.read_rows(ids)
        return np.where(good, leaves[f"{name}_mask"].sum(axis=1), 0)  # what stands in for a bad record says nothing of it

    return np.concatenate(list(run_ahead(((lambda ids=ids: measure(ids)) for ids in cuts), records.reading.workers)))
