"""How long a run goes on, where it stands in its data, and how that data is read."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Length:
    """How long to run and how often to look: counts of steps; None means once per epoch for `eval_every`."""

    epochs: int | None
    steps: int | None
    eval_every: int | None
    log_every: int


def allowing(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; reading them may move arrays as the user's code pleases."""
    while True:
        with jax.transfer_guard("allow"):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
