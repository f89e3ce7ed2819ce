"""Train trials side by side through a stretch of steps: the rows of each step, and its
measurements.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from spmd.data.batches import HostBatch
from spmd.data.device_dataset import row_indices
from spmd.data.sources import ArraySource
from spmd.sweeps.config import Trial
from spmd.sweeps.vmapped_trials import NET, VmappedTrials


@dataclasses.dataclass(frozen=True)
class Piece:
    """Steps `first`, `first + 1`, ... of one call: how many, and of how many rows each."""

    first: int
    count: int
    rows: int


def pieces(
    data: ArraySource, start: int, stop: int, *, limit: int, every: int, pad: bool
) -> Iterator[Piece]:
    """The calls from step `start` to `stop`, counted from 0: of `limit` steps at most, none across
    a multiple of `every`; a short batch that cannot be padded is a call of its own.

    >>> data = ArraySource({}, examples=10, batch_size=4, shuffle=False, seed=0)
    >>> print(*pieces(data, 0, 5, limit=9, every=9, pad=False), sep="\\n")
    Piece(first=0, count=2, rows=4)
    Piece(first=2, count=1, rows=2)
    Piece(first=3, count=2, rows=4)
    """
    short, epoch = data.examples % data.batch_size, data.steps_per_epoch
    step = start
    while step < stop:
        if short and not pad and step % epoch == epoch - 1:
            yield Piece(step, 1, short)
            step += 1
            continue
        ends = [stop, step + limit, (step // every + 1) * every]
        if short and not pad:
            ends.append(step // epoch * epoch + epoch - 1)
        yield Piece(step, min(ends) - step, data.batch_size)
        step = min(ends)


def calls(
    packed: VmappedTrials, start: int, stop: int, *, limit: int, every: int
) -> Iterator[Piece]:
    """The calls of a program's steps."""
    program = packed.program
    # XLA:CPU runs a convolution inside a loop an order of magnitude slower
    if program.loss.unrolls:
        limit = 1
    return pieces(packed.study.data, start, stop, limit=limit, every=every, pad=program.loss.pads)


class Rows:
    """The rows of the data that each step of a trial has: those that `spmd.fit` gives it, in the
    same order.
    """

    def __init__(self, data: ArraySource):
        self._data = data
        # Cached, because every call asks again for the order of each slot's seed and epoch.
        self._order = functools.lru_cache(maxsize=256)(
            lambda seed, epoch: dataclasses.replace(data, seed=seed).order(epoch)
        )

    def of(self, seed: int, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers and weights, int32 and float32[steps, rows]; a short batch is padded with its
        first row, at weight 0.
        """
        steps = range(piece.first, piece.first + piece.count)
        return row_indices([self._batch(seed, step) for step in steps], piece.rows)

    def _batch(self, seed: int, step: int) -> HostBatch:
        epoch, batch = divmod(step, self._data.steps_per_epoch)
        first = batch * self._data.batch_size
        index = self._order(seed, epoch)[first : first + self._data.batch_size]
        return HostBatch(self._data.arrays, len(index), index)


@dataclasses.dataclass
class Chunk:
    """Trials in one program, at a step: their states on the mesh, and all that was measured,
    float32[trials, steps, 2, names].
    """

    packed: VmappedTrials
    trials: Sequence[Trial]
    step: int
    states: Any
    measured: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def slots(self) -> list[Trial]:
        """The trial in each slot; the last one again in those that are left over."""
        return filled(self.trials, self.packed)

    def train(
        self,
        stop: int,
        *,
        limit: int,
        every: int,
        save: Callable[[], None],
        report: Callable[[np.ndarray], None],
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train all to step `stop`; at multiples of `every` and at the end `save` is called.

        Args:
          limit: steps of one call.
          report: called with the metrics of the newest steps, float32[trials, steps, 2, names].
          ends: called between two calls; whether training ends here, after a save.
        """
        rows = Rows(self.packed.study.data)
        slots = self.slots
        values = self.packed.values(slots)
        seeds = [trial.seed for trial in slots]
        # Trials of one seed have the same rows, which are placed once.
        if len(set(seeds)) == 1:
            seeds = seeds[:1]
        waiting: jax.Array | None = None

        def collect_measurements() -> None:
            if waiting is not None:
                self.measured.append(np.asarray(jax.device_get(waiting))[: len(self.trials)])
                report(self.measured[-1])

        # an implicit transfer would wait for the devices in each step
        with jax.transfer_guard("disallow"):
            for piece in calls(self.packed, self.step, stop, limit=limit, every=every):
                batches = [rows.of(seed, piece) for seed in seeds]
                index = np.stack([row_numbers for row_numbers, _ in batches])
                _, weights = batches[0]  # the same for all seeds
                self.states, measured = self.packed.steps(self.states, values, index, weights)
                collect_measurements()  # of the call before, while the devices continue
                waiting = measured
                self.step = piece.first + piece.count
                ending = self.step < stop and ends()
                if self.step % every == 0 or self.step == stop or ending:
                    collect_measurements()
                    waiting = None
                    save()
                if ending:
                    return

    @property
    def history(self) -> np.ndarray:
        """float32[trials, steps, 2, names] of all steps so far."""
        return np.concatenate(self.measured, axis=1)

    def evaluate(self) -> list[dict[str, float]]:
        """The loss and metrics on all rows of the evaluation's data, for each trial."""
        source = self.packed.study.eval_data
        evaluation = self.packed.program.evaluation.outputs
        if source is None:
            return [{} for _ in self.trials]
        total = np.zeros(())
        batches = 0
        for host in source.epoch(0):
            batches += 1
            rows = host.rows
            if evaluation.pads:
                rows = source.batch_size
            (index,), (weights,) = row_indices([host], rows)
            batch = jax.tree.map(operator.itemgetter(index), host.leaves)
            total = total + self.packed.evaluate(self.states, batch, weights)
        return [evaluation.finish(one, batches) for one in total[: len(self.trials)]]

    def host_states(self, numbers: Collection[int]) -> dict[int, Any]:
        """The states of those of its trials that have these numbers, on the host of every
        process.
        """
        slots = {
            trial.number: slot for slot, trial in enumerate(self.trials) if trial.number in numbers
        }
        states = self.packed.host_states(self.states, list(slots.values()))
        return dict(zip(slots, states, strict=True))


def filled(trials: Sequence[Trial], packed: VmappedTrials) -> list[Trial]:
    """One trial for each slot of the mesh's `net` axis, the last one again where there are more
    slots than trials.
    """
    return [*trials, *[trials[-1]] * (-len(trials) % packed.mesh.shape[NET])]
