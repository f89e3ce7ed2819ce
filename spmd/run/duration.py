"""How long a run goes on, where it stands in its data, and how that data is read."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from spmd.data.batches import Placer
from spmd.data.sources import Source
from spmd.train.compiled_step import Program


@dataclasses.dataclass(frozen=True)
class Length:
    """How long to run and how often to look: counts of steps; None means once per epoch for `eval_every`."""

    epochs: int | None
    steps: int | None
    eval_every: int | None
    log_every: int


def full_steps(source: Source, program: Program, placer: Placer) -> list[int]:
    """How many steps of an epoch can be made in one call: all, but for a short last one that cannot be padded; none where nobody knows."""
    steps, short = source.steps_per_epoch, getattr(source, "examples", 0) % program.rows
    return [] if steps is None else [max(1, steps - bool(short and (program.drops_remainder or not placer.pad)))]


def allowing(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; reading them may move arrays as the user's code pleases."""
    while True:
        with jax.transfer_guard("allow"):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
