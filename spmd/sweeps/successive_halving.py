"""Successive halving: all trials train a little, the better ones continue."""

import dataclasses
import math

from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError, check_integer


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Halving:
    """Successive halving, for `spmd.sweep(search=Halving(...))` (Jamieson and Talwalkar 2016,
    algorithm 1).

    All trials train for the first part of the steps; the best of them, one in `factor`, train
    `factor` times as long, and so on, until the last rung has had all steps. A trial's score at a
    rung is that of `spmd.sweep`.

    Args:
      factor: one trial in `factor` continues.
      rungs: how many there are; None: as many as leave one trial in the last.

    Example:
      >>> Halving(factor=4).plan(trials=16, steps=800)
      [(16, 50), (4, 200), (1, 800)]
    """

    factor: int = 3
    rungs: int | None = None

    def __post_init__(self):
        check_integer(self.factor, "Halving: factor", 2)
        check_integer(self.rungs, "Halving: rungs", 2, optional=True)

    def plan(self, trials: int, steps: int) -> list[tuple[int, int]]:
        """The number of trials of each rung, and the step at which it ends.

        Raises:
          OptionError: more rungs than the trials or the steps allow.
        """
        # log(243) / log(3) is a little below 5, which the 1e-9 corrects.
        most = 1 + int(math.log(trials) / math.log(self.factor) + 1e-9)
        count = most if self.rungs is None else self.rungs
        if count > most or self.factor ** (count - 1) > steps:
            needed = (
                f"{count} rungs of factor {self.factor} want {self.factor ** (count - 1)} trials "
                "and steps"
            )
            raise OptionError(
                f"Halving: {needed}; there are {trials} and {steps}.",
                fix="fewer rungs, more trials, or more steps.",
            )
        return [
            (max(1, trials // self.factor**rung), steps // self.factor ** (count - 1 - rung))
            for rung in range(count)
        ]
