"""Batches of records of similar length, padded to their bucket, for your own training loop."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spmd.data.records import RecordBatch, Records, flatten_groups, map_ahead
from spmd.data.shuffle import RecordOrder
from spmd.errors import DataError, OptionError, type_name

READ = 1024  # records measured together


class Buckets(Records):
    """Batches of records whose sequences have similar lengths; made by `spmd.data.buckets`.

    Attributes:
      lengths: int64[examples], the length of each record's sequence; 0 if it cannot be read, which
        puts it in the first bucket.
      bounds: the lengths of the buckets.
    """

    def __init__(self, records: Records, name: str, bounds: tuple[int, ...]):
        super().__init__(records.format, records.reading)
        self.name, self.bounds = name, bounds
        # In blocks, so that the padded arrays of all records are never in memory together.
        blocks = []
        for first in range(0, self.examples, READ):
            last = min(first + READ, self.examples)
            blocks.append([np.arange(first, last)])
        measured = flatten_groups(map_ahead(records.read_batches, blocks, records.reading.workers))
        # The row that stands in for a bad record has another length.
        lengths = []
        for leaves, good in measured:
            counts = leaves[f"{name}_mask"].sum(axis=1)
            lengths.append(np.where(good, counts, 0))
        self.lengths = np.concatenate(lengths)
        self._bucket = np.searchsorted(bounds, self.lengths)
        longest = int(self.lengths.max())
        if longest > bounds[-1]:
            record = self.format.where(int(self.lengths.argmax()))
            why = f'{record}: "{name}" has {longest} numbers, but the longest bucket {bounds[-1]}.'
            raise DataError(why, fix=f"lengths up to {longest}.")

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; each bucket may have a short last one."""
        return sum(-(-int(count) // self.batch_size) for count in np.bincount(self._bucket))

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal to resume."""
        return {**super().facts(), "buckets": list(self.bounds), "of": self.name}

    def read_epoch(
        self, number: int, start: int = 0, local_rows: np.ndarray | None = None
    ) -> Iterator[RecordBatch]:
        """The batches of an epoch, and bool[rows]: whether a row was readable."""
        del local_rows  # `fit`, which reads a part of the rows, takes no buckets
        ids, size, batches = self.order.epoch(number), self.batch_size, []
        for bucket in range(len(self.bounds)):
            in_bucket = ids[self._bucket[ids] == bucket]
            for first in range(0, len(in_bucket), size):
                batches.append((bucket, in_bucket[first : first + size]))
        # Batches are shuffled, too, or an epoch would go from short records to long ones.
        batch_order = RecordOrder(len(batches), self.order.shuffle is not False, self.order.seed)
        order = batch_order.epoch(number)
        groups = self.group_batches([batches[at] for at in order[start:]], size)
        return flatten_groups(map_ahead(self._read_group, groups, self.reading.workers))

    def _read_group(self, batches: list[tuple[int, np.ndarray]]) -> list[RecordBatch | Exception]:
        results = self.read_batches([ids for _, ids in batches])
        trimmed: list[RecordBatch | Exception] = []
        for batch, result in zip(batches, results, strict=True):
            if isinstance(result, Exception):
                trimmed.append(result)
            else:
                trimmed.append(self._trim(*batch, *result))
        return trimmed

    def _trim(
        self, bucket: int, ids: np.ndarray, leaves: dict[str, np.ndarray], good: np.ndarray
    ) -> RecordBatch | Exception:
        bound = self.bounds[bucket]
        beyond = leaves[f"{self.name}_mask"][:, bound:]
        longer = np.flatnonzero(beyond.any(axis=1) & good)
        if len(longer):
            where = self.format.where(int(ids[longer[0]]))
            return DataError(
                f'{where}: "{self.name}" is longer than when it was measured.',
                fix="files that do not change.",
            )
        for name in (self.name, f"{self.name}_mask"):
            leaves[name] = leaves[name][:, :bound]
        return leaves, good


def buckets(records: Records, name: str, lengths: Sequence[int]) -> Buckets:
    """Batches of records of similar length: dicts in which `name` is as long as the bucket, and
    `NAME_mask` is True where data is.

    All records are read once to measure them. `fit` compiles the step for one shape, so it takes no
    buckets; a step in your own loop is compiled once for each bucket. For `fit`, `spmd.data.padded`
    pads all sequences to one length.

    Args:
      records: from `spmd.data.tfrecord` or the like, with `name` padded.
      lengths: of the buckets; a record is in the first that is long enough.
      name: of the padded feature whose length counts.

    Returns:
      An iterable of batches, whose position can be saved, as of `Records`.

    Raises:
      OptionError: `name` is not padded, or lengths do not increase.
      DataError: a record is longer than all buckets.

    Example:
      >>> import spmd
      >>> padded = {"tokens": spmd.data.padded(64, "int32")}
      >>> spmd.data.buckets(
      ...     spmd.data.tfrecord("train-*.tfrecord", features=padded, batch_size=32),
      ...     "tokens",
      ...     [16, 64],
      ... )
      Traceback (most recent call last):
      spmd.errors.DataError: no file matches "train-*.tfrecord".
      ...
    """
    if not isinstance(records, Records):
        raise OptionError(
            f"buckets: of {type_name(records)}.", fix="records, such as spmd.data.tfrecord(...)."
        )
    field = records.fields.get(name)
    if field is None or f"{name}_mask" not in records.fields:
        padded = [feature for feature in records.fields if f"{feature}_mask" in records.fields]
        raise OptionError(
            f'buckets: "{name}" is not a padded feature; padded features: '
            f"{', '.join(padded) or 'none'}.",
            fix="spmd.data.padded(...).",
        )
    bounds: tuple[int, ...] = ()
    if isinstance(lengths, Sequence):
        bounds = tuple(lengths)
    are_counts = all(isinstance(bound, int) and bound > 0 for bound in bounds)
    if not bounds or not are_counts or sorted(set(bounds)) != list(bounds):
        raise OptionError(
            f"buckets: lengths {lengths!r}.", fix="increasing whole numbers, such as [16, 32, 64]."
        )
    if bounds[-1] > field.shape[0]:
        raise OptionError(
            f'buckets: a length of {bounds[-1]}, but "{name}" is padded to {field.shape[0]}.',
            fix="the same for both.",
        )
    return Buckets(records, name, bounds)
