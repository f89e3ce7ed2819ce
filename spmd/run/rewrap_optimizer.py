"""Restores an optimizer whose wrappers, such as `skip_spikes`, have changed: what is inside of them
keeps its state.

Wrappers are found by the paths of their arrays: a checkpoint has no types.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import optax

from spmd.run.reshard_checkpoint import OPT
from spmd.train.loss_scale import LossScale
from spmd.train.skipped_updates import SpikeSkip
from spmd.train.weight_average import WeightAverage

# the state of each, and the field with that of the optimizer inside
WRAPPERS: Mapping[str, tuple[Any, str]] = {
    "skip_spikes": (SpikeSkip, "inner"),
    "scale_loss": (LossScale, "inner"),
    "average_weights": (WeightAverage, "inner"),
    "optax.MultiSteps": (optax.MultiStepsState, "inner_opt_state"),
    "optax.apply_if_finite": (optax.ApplyIfFiniteState, "inner_state"),
}
MAY_BE_EMPTY = "skip_state"  # of optax.MultiSteps


@dataclasses.dataclass(frozen=True)
class Wrappers:
    """The wrappers of an optimizer, outermost first.

    Attributes:
      prefixes: of the paths of each one's arrays, by its name.
      inside: the prefix of those of the optimizer inside.

    Example:
      >>> wrappers_of(["opt/inner/0/mu/w", "opt/updates", "opt/average/w", "params/w"])
      Wrappers(prefixes={'average_weights': 'opt/'}, inside='opt/inner/')
    """

    prefixes: dict[str, str]
    inside: str

    def split(self, path: str) -> tuple[str, str] | None:
        """Return the wrapper, or "", to which an array of the optimizer belongs, and the path below
        its prefix; None of any other array.
        """
        if not path.startswith(f"{OPT}/"):
            return None
        if path.startswith(self.inside):
            return "", path.removeprefix(self.inside)
        # Each wrapper is inside of the one before it, so that the longest prefix is the innermost.
        above = [item for item in self.prefixes.items() if path.startswith(item[1])]
        name, prefix = max(above, key=lambda item: len(item[1]))
        return name, path.removeprefix(prefix)


def wrappers_of(paths: Iterable[str]) -> Wrappers:
    """Return the wrappers whose arrays have these paths."""
    paths = list(paths)
    inside = f"{OPT}/"
    prefixes: dict[str, str] = {}
    while True:
        fields = _fields_below(inside, paths)
        for name, (kind, inner) in WRAPPERS.items():
            all_fields = {*kind._fields}
            # A field without arrays has no path in a checkpoint.
            always_present = all_fields - {inner, MAY_BE_EMPTY}
            if name not in prefixes and always_present <= fields <= all_fields:
                break
        else:
            return Wrappers(prefixes, inside)
        prefixes[name] = inside
        inside = f"{inside}{inner}/"


def _fields_below(prefix: str, paths: Iterable[str]) -> set[str]:
    """Return the first part of each path below a prefix."""
    below = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
    return {path.partition("/")[0] for path in below}


class Rewrapping:
    """From the arrays of a checkpoint to those of an optimizer with other wrappers, planned from
    paths alone.

    Args:
      saved, target: paths of the arrays of the checkpoint, and of the new state.

    Attributes:
      names: the path in the checkpoint of each array that is kept, by that in the new state.
      new: paths of arrays of wrappers that the checkpoint does not have.
      changes: what has changed, as text.
    """

    def __init__(self, saved: Collection[str], target: Collection[str]):
        before = wrappers_of(saved)
        now = wrappers_of(target)
        added = [name for name in now.prefixes if name not in before.prefixes]
        removed = [name for name in before.prefixes if name not in now.prefixes]
        targets: dict[tuple[str, str], str] = {}
        for path in target:
            place = now.split(path)
            if place is not None:
                targets[place] = path
        self.names = dict[str, str]()
        for path in saved:
            place = before.split(path)
            if place is None:
                self.names[path] = path
            elif place[0] not in removed:
                wrapper, below = place
                prefix = now.prefixes[wrapper] if wrapper else now.inside
                self.names[targets.get(place, f"{prefix}{below}")] = path
        self.new = {path for (name, _), path in targets.items() if name in added}
        self.changes = [
            f"{name} was put around the optimizer, and starts new; the state inside is restored"
            for name in added
        ]
        self.changes += [
            f"{name} is no longer around the optimizer, and its state is dropped"
            for name in removed
        ]

    def renamed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a table of the checkpoint's arrays that are kept, by their paths in
        the new state.
        """
        return {path: arrays[saved] for path, saved in self.names.items() if saved in arrays}
