"""Batches of records of similar length, padded to their bucket, for your own training loop."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.data.records import Batches, RecordBatch, Records, flatten_groups, run_ahead
from spmd.errors import DataError, OptionError, type_name

READ = 1024  # records measured together


class Buckets:
    """Batches of records whose sequences have similar lengths; made by `spmd.data.buckets`.

    Attributes:
      lengths: int64[examples], the length of each record's sequence; 0 if it cannot be read, which puts it in the first bucket.
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
                f'{where}: "{name}" has {longest} numbers, but the longest bucket {bounds[-1]}.', fix=f"lengths up to {longest}."
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
        """What must be equal to resume."""
        return {**self.records.facts(), "buckets": list(self.bounds), "of": self.name}

    def read(self, number: int, start: int = 0) -> Iterator[RecordBatch]:
        """The batches of an epoch, and bool[rows] which of their rows hold a record."""
        order, size = self.records.order, self.records.batch_size
        ids = order.epoch(number)
        batches = []
        for bucket in range(len(self.bounds)):
            in_bucket = ids[self._bucket[ids] == bucket]
            batches += [(bucket, in_bucket[first : first + size]) for first in range(0, len(in_bucket), size)]
        if order.shuffle is not False:
            permutation = np.random.Generator(np.random.Philox(key=np.array([order.seed, number], np.uint64))).permutation(len(batches))
            batches = [batches[at] for at in permutation]
        groups = self.records.group_batches(batches[start:], size)
        return flatten_groups(run_ahead(((lambda group=group: self._read_group(group)) for group in groups), self.records.reading.workers))

    def _read_group(self, batches: list[tuple[int, np.ndarray]]) -> list[RecordBatch | Exception]:
        results = self.records.read_batches([ids for _, ids in batches])
        return [made if isinstance(made, Exception) else self._trim(*batch, *made) for batch, made in zip(batches, results, strict=True)]

    def _trim(self, bucket: int, ids: np.ndarray, leaves: dict[str, np.ndarray], good: np.ndarray) -> RecordBatch | Exception:
        bound = self.bounds[bucket]
        longer = np.flatnonzero(leaves[f"{self.name}_mask"][:, bound:].any(axis=1) & good)
        if len(longer):
            where = self.records.format.where(int(ids[longer[0]]))
            return DataError(f'{where}: "{self.name}" is longer than when it was measured.', fix="files that do not change.")
        return {**leaves, **{name: leaves[name][:, :bound] for name in (self.name, f"{self.name}_mask")}}, good


def buckets(records: Records, name: str, lengths: Sequence[int]) -> Buckets:
    """Batches of records of similar length: dicts in which `name` is as long as the bucket, and `NAME_mask` is True where data is.

    All records are read once to measure them. `fit` compiles the step for one shape, so it takes no buckets; a step in your own loop is
    compiled once for each bucket. For `fit`, `spmd.data.padded` pads all sequences to one length.

    Args:
      records: from `spmd.data.tfrecord` or the like, with `name` padded.
      lengths: of the buckets; a record is in the first that is long enough.

    Raises:
      OptionError: `name` is not padded, or lengths do not increase.
      DataError: a record is longer than all buckets.
    """
    if not isinstance(records, Records):
        raise OptionError(f"buckets: of {type_name(records)}.", fix="records, such as spmd.data.tfrecord(...).")
    field = records.fields.get(name)
    if field is None or f"{name}_mask" not in records.fields:
        padded = [one for one in records.fields if f"{one}_mask" in records.fields]
        raise OptionError(
            f'buckets: "{name}" is not a padded feature; padded features: {", ".join(padded) or "none"}.', fix="spmd.data.padded(...)."
        )
    bounds = tuple(lengths) if isinstance(lengths, Sequence) else ()
    if not bounds or any(not isinstance(one, int) or one < 1 for one in bounds) or sorted(set(bounds)) != list(bounds):
        raise OptionError(f"buckets: lengths {lengths!r}.", fix="increasing whole numbers, such as [16, 32, 64].")
    if bounds[-1] > field.shape[0]:
        raise OptionError(f'buckets: a length of {bounds[-1]}, but "{name}" is padded to {field.shape[0]}.', fix="the same for both.")
    return Buckets(records, name, bounds)


def _measured(records: Records, name: str) -> np.ndarray:
    blocks = (np.arange(first, min(first + READ, records.examples)) for first in range(0, records.examples, READ))

    def measure(ids: np.ndarray) -> np.ndarray:
        leaves, good = records.read_rows(ids)
        return np.where(good, leaves[f"{name}_mask"].sum(axis=1), 0)  # the stand-in for a bad record has another length

    return np.concatenate(list(run_ahead(((lambda ids=ids: measure(ids)) for ids in blocks), records.reading.workers)))
