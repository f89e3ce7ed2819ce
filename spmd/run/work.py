"""The work of a row of a batch for the devices, from which a run's rates follow: tokens per second,
MFU and HFU.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd.base.tree import flatten
from spmd.train.compiled_step import TrainingProgram
from spmd.train.metrics import PerExample

TEXT = ("tokens", "input_ids")  # keys of a batch


class PeakSeconds(NamedTuple):
    """Seconds in which all devices together compute a row's FLOPs at their peak, forward and
    backward; 0 where they are not known.

    Attributes:
      model: those of the model, for MFU.
      executed: those of the compiled program, which computes some again, for HFU.
    """

    model: float = 0.0
    executed: float = 0.0


@dataclasses.dataclass(frozen=True)
class Work:
    """A row's tokens, and the time that it takes at the peak of the devices.

    Attributes:
      tokens: of a row; 0 where rows are no text.
      measure: returns the time at the peak; called once. None where the peak is not known, as of
        CPUs.

    Example:
      >>> Work(tokens=128, measure=lambda: PeakSeconds(1e9 / 4e12, 1.2e9 / 4e12)).rates(2000.0)
      {'tokens_per_second': 256000.0, 'mfu': 0.5, 'hfu': 0.6}
    """

    tokens: int = 0
    measure: Callable[[], PeakSeconds] | None = None

    @functools.cached_property
    def seconds(self) -> PeakSeconds:
        """The time of a row at the peak."""
        return self.measure() if self.measure else PeakSeconds()

    def rates(self, rows: float) -> dict[str, float]:
        """Return the rates of this number of rows per second, without those that are not known."""
        rates = {}
        if self.tokens:
            rates["tokens_per_second"] = round(rows * self.tokens, 1)
        for name, time in zip(("mfu", "hfu"), self.seconds, strict=True):
            if time:
                rates[name] = round(rows * time, 4)
        return rates


UNKNOWN = Work()


def tokens_per_row(program: TrainingProgram) -> int:
    """Return the length of the rows of a batch of text, 0 for others.

    A batch is text if it has an integer array [rows, length] under "tokens" or "input_ids", at any
    depth, or if a shipped loss's inputs and targets are integer arrays of one shape [rows, length].
    Positions that a mask leaves out count, since devices compute them.
    """
    sample, loss = program.sample, program.placed.objective.loss
    for path, leaf in flatten(sample).items():
        if path.rpartition("/")[2] in TEXT and _is_text(leaf):
            return leaf.shape[1]
    if isinstance(loss, PerExample):
        inputs, targets = loss.split(sample)
        if _is_text(inputs) and _is_text(targets) and inputs.shape == targets.shape:
            return inputs.shape[1]
    return 0


def _is_text(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)


def peak_memory() -> int:
    """Return the bytes that the fullest device of this process has used at once; 0 where devices do
    not report it, as CPUs do not.
    """
    peak = 0
    for device in jax.local_devices():
        # JAX returns None for a device that has no statistics, such as a CPU.
        stats = device.memory_stats() or {}
        peak = max(peak, stats.get("peak_bytes_in_use", 0))
    return peak
