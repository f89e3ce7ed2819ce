"""How long each phase of a run may make no progress."""

import dataclasses

from spmd.errors import OptionError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds without progress, by phase, after which a run of several processes ends: a stall. `math.inf`: never.

    Args:
      compile: until the first step is done.
      step: between two steps; at least ten times as long as they take.
      eval: an evaluation.
      save: a checkpoint.

    Example:
      >>> Limits.parse("step=120,save=inf")
      Limits(compile=1800.0, step=120.0, eval=1800.0, save=inf)
    """

    compile: float = 1800.0
    step: float = 60.0
    eval: float = 1800.0
    save: float = 1800.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise OptionError(f"stall limit {field.name}={value!r}.", fix="seconds, more than none; inf for never.")

    @staticmethod
    def parse(text: str, where: str = "") -> "Limits":
        """Read "step=120,save=inf"; what is not named keeps its default. Errors begin with where it was found."""
        known, found = [field.name for field in dataclasses.fields(Limits)], {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            name, _, value = (part.strip() for part in word.partition("="))
            if name not in known:
                raise OptionError(f'{where}stall limit "{word}".', fix=f"{did_you_mean(name, known)}")
            try:
                found[name] = float(value)
            except ValueError:
                raise OptionError(f'{where}stall limit "{word}": "{value}" is no number.', fix=f"{name}=120, in seconds.") from None
        return Limits(**found)
