"""The choice of the steps of a run that have histograms, of parameters or of gradients."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError, check_integer, short_repr
from spmd.train.histograms import read_counts

# by kind ("parameters" or "gradients") and path, on the devices
Counts = Mapping[str, Mapping[str, Any]]


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Watch:
    """The choice of steps that have histograms, of each parameter and of its gradient.

    Gradients are those that the optimizer gets: means over all workers, after a lossy codec,
    without the scale of a loss in float16, and before the optimizer clips them. Parameters are
    those after the step's update. Of a stack of layers each layer has its own histograms. Those
    that are not trained have none, since they never change; nor have updates, which follow from the
    parameters of two steps.

    Args:
      every: steps between two that have histograms.
      parameters: whether parameters have any.
      gradients: whether gradients have any. A step that counts gradients is another program, which
        is compiled when it is first due; all other steps are as without `Watch`.

    Raises:
      OptionError: one of these is invalid, or neither parameters nor gradients have any.

    Example:
      >>> Watch(every=50).is_due(100), Watch(every=50, gradients=False).is_due(101)
      (True, False)
    """

    every: int = 100
    parameters: bool = True
    gradients: bool = True

    def __post_init__(self) -> None:
        check_integer(self.every, "Watch: every")
        for name in ("parameters", "gradients"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(
                    f"Watch: {name}={short_repr(getattr(self, name))}.", fix="True or False."
                )
        if not (self.parameters or self.gradients):
            raise OptionError(
                "Watch(parameters=False, gradients=False) watches nothing.",
                fix="one of them, or watch=None.",
            )

    def is_due(self, step: int) -> bool:
        """Return whether the update with this number has histograms."""
        return step % self.every == 0

    def __str__(self) -> str:
        kinds = " and ".join(name for name in ("parameters", "gradients") if getattr(self, name))
        text = f"histograms of {kinds} every {self.every} steps"
        if self.gradients:
            text += (
                "; a step that counts gradients is another program, compiled when it is first due"
            )
        return text


def as_watch(value: Any) -> Watch | None:
    """Return the option `watch` of `fit` as a `Watch`.

    Raises:
      OptionError: it is neither None, nor a number of steps, nor a `Watch`.
    """
    if value is None or isinstance(value, Watch):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(
            f"watch={short_repr(value)}.",
            fix="a number of steps, such as 100; or spmd.Watch(every=100).",
        )
    return Watch(value)


def histogram_record(counts: Counts, stacks: Mapping[str, int]) -> dict[str, Any]:
    """Return the part of a log record that holds histograms, as JSON values: the fields of
    `spmd.loggers.Histogram` by name.
    """
    fields: dict[str, Any] = {}
    for kind, kind_counts in counts.items():
        for name, histogram in read_counts(kind, kind_counts, stacks).items():
            fields[name] = dataclasses.asdict(histogram)
    return {"histograms": fields}
