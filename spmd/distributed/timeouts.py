"""Limits, in seconds, on how long each phase of a run may go without progress."""

import dataclasses

from spmd.errors import OptionError, did_you_mean


@dataclasses.dataclass(frozen=True)
class StallTimeouts:
    """Seconds without progress, by phase, after which a run of several processes counts as stalled.
    `math.inf`: never.

    Args:
      compile: until the first step is done.
      step: between two steps; at least ten times as long as they take.
      eval: an evaluation.
      save: a checkpoint.

    Example:
      >>> StallTimeouts.parse("step=120,save=inf")
      StallTimeouts(compile=1800.0, step=120.0, eval=1800.0, save=inf)
    """

    compile: float = 1800.0
    step: float = 60.0
    eval: float = 1800.0
    save: float = 1800.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # `not value > 0` is true of NaN as well.
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise OptionError(
                    f"stall limit {field.name}={value!r}.",
                    fix="a positive number of seconds; inf for never.",
                )

    @staticmethod
    def parse(text: str, where: str = "") -> "StallTimeouts":
        """Read "step=120,save=inf"; phases that are not named keep their defaults. `where` begins
        the errors.
        """
        phases = [field.name for field in dataclasses.fields(StallTimeouts)]
        seconds = {}
        for word in filter(None, map(str.strip, text.split(","))):
            phase, _, value = map(str.strip, word.partition("="))
            if phase not in phases:
                raise OptionError(
                    f'{where}stall limit "{word}".', fix=f"{did_you_mean(phase, phases)}"
                )
            try:
                seconds[phase] = float(value)
            except ValueError:
                raise OptionError(
                    f'{where}stall limit "{word}": "{value}" is not a number.',
                    fix=f"{phase}=120, in seconds.",
                ) from None
        return StallTimeouts(**seconds)
