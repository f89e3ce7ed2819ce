"""Assigns rows to the workers that take part in a round: no rows are skipped, and no worker gets
two parts.

Workers draw from one common queue, as in TF 1.x: the next worker takes the next part of the data.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from spmd.data.batches import Batch, HostBatch
from spmd.data.retries import read_epoch
from spmd.data.sources import ArraySource, Source
from spmd.errors import DataError, OptionError, option, quoted
from spmd.wire.server.events import Events


@dataclasses.dataclass
class Position:
    """A run's position in the data: the epoch, batches taken from it, and the reader's state if it
    has one; and where rows are assigned to workers, the number of assigned parts, and of workers.
    """

    epoch: int = 0
    batch: int = 0
    reader: Any = None
    parts: int = 0
    workers: int = 0

    def __post_init__(self):
        wrong = []
        for name in ("epoch", "batch", "parts", "workers"):
            value = getattr(self, name)
            # Not isinstance, for which JSON's true is an int.
            if type(value) is not int or value < 0:
                wrong.append(name)
        if wrong:
            raise ValueError(f"position: {', '.join(wrong)}")

    def advance(self, has_rows: np.ndarray | None) -> None:
        """Advance by one step; `has_rows` is bool[workers], True for workers that were assigned
        rows.
        """
        self.batch += 1
        if has_rows is not None:
            self.parts += int(has_rows.sum())
            self.workers = len(has_rows)


def epoch_ended(source: Source, at: Position, *, drop: bool) -> bool:
    """Return True if an epoch has no more batches; False where its length is not known.

    Args:
      drop: a part that is not full is left out.
    """
    if not at.workers:
        return at.batch == source.steps_per_epoch
    if not isinstance(source, ArraySource):
        return False
    return at.parts >= _num_parts(source.examples, source.batch_size // at.workers, drop=drop)


def _num_parts(rows: int, unit: int, *, drop: bool) -> int:
    """Return the number of parts of `unit` rows; `drop`: without one that is not full."""
    if drop:
        return rows // unit
    return -(-rows // unit)


def epoch_batches(
    source: Source,
    clock: Events | None,
    at: Position,
    step: int,
    *,
    pad: bool,
    retries: int = 0,
    stops: Callable[[], bool] = lambda: False,
) -> Iterator[HostBatch]:
    """The batches of an epoch, from `at` on, which is step `step` of the run; rows are assigned to
    workers if only some take part. `retries` and `stops` are those of `read_epoch`.

    Raises:
      DataError: parts of this epoch were assigned to another number of workers, or full batches are
        taken now; or no rows would be used, because a remainder is dropped.
    """
    drop = clock is not None and clock.declared.drop_remainder
    if clock is not None and clock.assigns_rows and at.workers in (0, clock.workers):
        at.parts = at.parts or at.batch * clock.workers  # of a run that took full batches
        return assign_rows(
            read_epoch(source, at.epoch, retries=retries, stops=stops),
            clock,
            step,
            source.batch_size,
            at.parts,
            pad=pad,
            drop=drop,
        )
    if at.parts:
        raise DataError(
            f"the run was in epoch {at.epoch + 1}, of which {at.parts} parts had been assigned to "
            f"{at.workers} workers; this layout "
            "would lose rows or take them twice.",
            fix="resume with the layout it had, until an epoch ends.",
        )
    batches = read_epoch(source, at.epoch, at.batch, at.reader, retries=retries, stops=stops)
    if drop:
        return _full_batches(batches, source.batch_size, first=at.batch == 0)
    return batches


def _full_batches(batches: Iterator[HostBatch], size: int, *, first: bool) -> Iterator[HostBatch]:
    """Batches up to the first that is not full."""
    for number, batch in enumerate(batches):
        rows = batch.rows
        if batch.index is None:  # a batch of an iterable: each process has its part
            rows *= jax.process_count()
        if rows < size:
            if first and number == 0:
                raise _no_full_batch(rows, size)
            _check_last(batches, rows, size)
            return
        yield batch


def _check_last(batches: Iterator[HostBatch], rows: int, size: int) -> None:
    if next(batches, None) is not None:
        raise DataError(
            f"a batch of {rows} rows, where {size} were expected, in the middle of an epoch, with "
            "drop_remainder = true: "
            "all batches after it would be dropped too.",
            fix="batches of one size but for the last, or drop_remainder = false.",
        )


def _no_full_batch(rows: int, size: int) -> DataError:
    why = (
        f"an epoch begins with {rows} rows of {size}, and drop_remainder = true: nothing is left "
        "to train on."
    )
    return DataError(why, fix="larger batches, or drop_remainder = false.")


def check_source(
    source: Source, clock: Events | None, *, pad: bool, steps: int | None, epochs: int | None
) -> None:
    """Check, before a run under a parameter server begins, that its data can be assigned to
    workers.

    Raises:
      DataError: a last batch that is not full, where padding cannot be left out and not all workers
        count; or batches of several processes that would have to be assigned to workers.
      OptionError: a trace of times that ends before the run.
    """
    if clock is None:
        return
    if clock.assigns_rows and jax.process_count() > 1 and not isinstance(source, ArraySource):
        raise DataError(
            f"rows are assigned to {clock.workers} workers, but each of {jax.process_count()} "
            "processes reads batches of its own.",
            fix="arrays, which every process can index.",
        )
    drop = clock.declared.drop_remainder
    part = source.batch_size
    if clock.assigns_rows:
        part = source.batch_size // clock.workers
    if (
        not drop
        and not pad
        and clock.masked
        and isinstance(source, ArraySource)
        and source.examples % part
    ):
        raise _padded_part(source.examples, part)
    parts = None
    if epochs is not None and isinstance(source, ArraySource):
        parts = _num_parts(source.examples, part, drop=drop)
        if not clock.assigns_rows:
            steps, parts = parts * epochs, None
    if steps is not None and clock.assigns_rows:
        steps += 1  # rows of the next round are assigned while one is computed
    clock.check_trace_length(steps, parts, epochs or 1, drop=drop)


def _padded_part(rows: int, part: int) -> DataError:
    return DataError(
        f"{rows} rows are split into parts of {part}, and the last is not full: neither a loss "
        "with one number for all its rows nor "
        "batch statistics can leave out its padding.",
        fix="a loss with one value per example and no batch statistics, or a number of rows that "
        "it divides.",
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows of a host batch that one worker gets."""

    batch: HostBatch
    first: int
    rows: int


def assign_rows(
    batches: Iterator[HostBatch],
    clock: Events,
    step: int,
    size: int,
    skip: int,
    *,
    pad: bool,
    drop: bool = False,
) -> Iterator[HostBatch]:
    """Batches of `size` rows, in which every worker that takes part has rows until the data ends.

    Args:
      batches: the source's; each is split into one part per worker.
      step: the number of the first round.
      skip: parts of the epoch that were assigned before.
      pad: rows of weight 0 can be left out of the loss.
      drop: end before a round in which a worker that takes part would have no rows.

    Raises:
      DataError: a part that is not full, with a loss that cannot leave padding out.
    """
    unit, began = size // clock.workers, step
    parts = itertools.islice(_parts(batches, unit, pad=pad, drop=drop), skip, None)
    queue: collections.deque[_Part] = collections.deque()
    while True:
        takes = clock.round(step).takes
        while len(queue) < takes.sum() and (part := next(parts, None)) is not None:
            queue.append(part)
        if drop and len(queue) < takes.sum() and skip == 0 and step == began:
            raise _no_full_batch(len(queue) * unit, size)
        if not queue or (drop and len(queue) < takes.sum()):
            return
        has_rows, lots = np.zeros(clock.workers, bool), []
        for worker in np.flatnonzero(takes)[: len(queue)]:
            has_rows[worker] = True
            lots.append(queue.popleft())
        yield _assembled(lots, has_rows, unit)
        step += 1


def _parts(batches: Iterator[HostBatch], unit: int, *, pad: bool, drop: bool) -> Iterator[_Part]:
    for batch in batches:
        if batch.weights is not None:
            fix = f"{option('on_error', quoted('stop'))}."
            raise DataError(
                "records were skipped, but rows are assigned to workers in full parts.", fix=fix
            )
        for first in range(0, batch.rows, unit):
            rows = min(unit, batch.rows - first)
            if rows < unit and drop:
                _check_last(batches, rows, unit)
                return
            if rows < unit and not pad:
                raise _padded_part(batch.rows, unit)
            yield _Part(batch, first, rows)


def _assembled(lots: list[_Part], has_rows: np.ndarray, unit: int) -> HostBatch:
    """One batch with every worker's part at its position. Workers without a part get copies of some
    row, which are ignored.
    """
    turn = np.where(has_rows, np.cumsum(has_rows) - 1, 0)
    rows = [lots[at].first + np.minimum(np.arange(unit), lots[at].rows - 1) for at in turn]
    is_row = [np.arange(unit) < lots[at].rows for at in turn]
    weights = np.concatenate(is_row).astype(np.float32)
    count = sum(lot.rows for lot in lots)
    if lots[0].batch.index is not None:
        parts = []
        for at, part in zip(turn, rows, strict=True):
            parts.append(lots[at].batch.index[part])
        index = np.concatenate(parts)
        return HostBatch(lots[0].batch.leaves, count, index, None, has_rows, weights)

    def join(*leaves: Any) -> np.ndarray:
        pairs = zip(leaves, rows, strict=True)
        return np.concatenate([np.asarray(leaf)[part] for leaf, part in pairs])

    joined = jax.tree.map(join, *(lots[at].batch.leaves for at in turn))
    return HostBatch(joined, count, None, None, has_rows, weights)


def check_participation(clock: Events | None, step: int, batch: Batch) -> None:
    """Raise if rows of workers that are busy in this round would be lost silently."""
    if (
        clock is None
        or not clock.assigns_rows
        or batch.has_rows is not None
        or clock.round(step).takes.all()
    ):
        return
    absent = int((~clock.round(step).takes).sum())
    raise OptionError(
        f"step {step + 1}: {absent} of {clock.workers} workers take no part in this round, and "
        "their rows of the batch would be lost.",
        fix="fit(), or trainer.steps(), which assign rows to those that do.",
    )
