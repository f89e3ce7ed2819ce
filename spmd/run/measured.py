"""Metrics as callbacks see them, and what they add."""

from collections.abc import Mapping
from typing import Any, cast

import jax

from spmd.errors import OptionError, brief


class Measured(dict):
    """Metrics that are measured already: what a callback would put in here is refused, since nobody would see it."""

    def _refuse(self, *given: Any, **named: Any) -> Any:
        raise OptionError(
            "info.metrics cannot be changed here: it would show nowhere.\n"
            "    fix: fit(metrics=...), or (value, {name: metric}) from the loss; in on_eval, what is added is recorded."
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = cast(Any, _refuse)


def as_numbers(metrics: Mapping[str, Any], step: int) -> dict[str, float]:
    """Metrics as callbacks have left them after an evaluation.

    Raises:
      OptionError: one of them is no number.
    """
    found = {}
    for name, value in metrics.items():
        try:
            with jax.transfer_guard("allow"):
                found[str(name)] = float(value)
        except (TypeError, ValueError):
            raise OptionError(f"step {step}: on_eval has put {brief(value)} into info.metrics[{name!r}].", fix="a number.") from None
    return found
