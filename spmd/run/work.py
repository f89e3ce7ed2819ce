"""What a row of a batch is for the devices, from which a run's rates follow: tokens per second, and model FLOPs utilization."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.train.compiled_step import Program
from spmd.train.metrics import PerExample

TEXT = ("tokens", "input_ids")  # keys of a batch


@dataclasses.dataclass(frozen=True)
class Work:
    """A row's tokens and model FLOPs, and what the devices can do.

    Attributes:
      tokens: of a row; 0 where rows are no text.
      peak: FLOPs per second of all devices together, at the dtype that the model computes in; 0 where it is not known.
      count_flops: the model's FLOPs for a row, forward and backward; called once, and only where a peak is known.

    Example:
      >>> Work(tokens=128, peak=4e12, count_flops=lambda: 1e9).rates(2000.0)
      {'tokens_per_second': 256000.0, 'mfu': 0.5}
    """

    tokens: int = 0
    peak: float = 0.0
    count_flops: Callable[[], float] = lambda: 0.0

    @functools.cached_property
    def flops(self) -> float:
        """The model's FLOPs for a row."""
        return self.count_flops()

    def rates(self, rows: float) -> dict[str, float]:
        """What this number of rows per second is; only what is known."""
        found = {"tokens_per_second": round(rows * self.tokens, 1)} if self.tokens else {}
        if self.peak and self.flops:
            found["mfu"] = round(rows * self.flops / self.peak, 4)
        return found


UNKNOWN = Work()


def tokens_per_row(program: Program) -> int:
    """Length of the rows of a batch of text, 0 for others.

    A batch is text if it has an integer array [rows, length] under "tokens" or "input_ids", or if the loss's inputs and targets are
    integer arrays of one shape [rows, length]. Positions that a mask leaves out count, since devices compute them.
    """
    sample, loss = program.sample, program.placed.objective.loss
    if isinstance(sample, dict):
        for key in TEXT:
            if key in sample and _is_text(sample[key]):
                return sample[key].shape[1]
    if isinstance(loss, PerExample):
        inputs, targets = loss.split(sample)
        if _is_text(inputs) and _is_text(targets) and inputs.shape == targets.shape:
            return inputs.shape[1]
    return 0


def _is_text(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer)


def peak_memory() -> int:
    """Bytes that the fullest device of this process has used at once; 0 where devices do not report it, as CPUs do not."""
    return max(((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()), default=0)
