"""Records of a Flax linen module, made while its calls are traced: the random streams that they
draw from, the variables that they write and sow, and all else that traces have shown.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen
from flax.core import Scope

from spmd.errors import ModelError, Problem, raise_problems
from spmd.models.base import UnboundAxes
from spmd.models.patches import Patches

# collections that flax makes to look into a call; no state
NOT_KEPT = ("intermediates", "perturbations")


@dataclasses.dataclass
class Record:
    """Random draws and written variables of calls, over all traces.

    Attributes:
      draws: random streams that were drawn from, as (path of the module, name of the stream).
      writes: variables that were given a new value, as "collection/path/name".
      sown: variables that `sow` wrote.
    """

    draws: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    writes: set[str] = dataclasses.field(default_factory=set)
    sown: set[str] = dataclasses.field(default_factory=set)

    @property
    def streams(self) -> set[str]:
        """Names of the random streams that were drawn from."""
        return {name for _, name in self.draws}


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Add to `record` what linen modules do, and to those of scopes around this one."""
    with _PATCHES.scope((*_PATCHES.value, record)):
        yield


def _make_rng(scope: Scope, name: str = "params") -> Any:
    for record in _PATCHES.value:
        record.draws.add(("/".join(scope.path), name))
    return _MAKE_RNG(scope, name)


# Not Scope.put_variable: lifted transforms write back all variables by it, changed or not.
def _set_value(variable: Any, new: Any) -> None:
    _VALUE.fset(variable, new)
    for record in _PATCHES.value:
        record.writes.add("/".join((variable.collection, *variable.scope.path, variable.name)))


def _put_variable(module: linen.Module, col: str, name: str, new: Any) -> None:
    _PUT_VARIABLE(module, col, name, new)
    for record in _PATCHES.value:
        record.writes.add("/".join((col, *module.path, name)))


def _sow(module: linen.Module, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
    stored = _SOW(module, col, name, *args, **kwargs)
    if stored:
        for record in _PATCHES.value:
            record.sown.add("/".join((col, *module.path, name)))
    return stored


_MAKE_RNG = Scope.make_rng
_VALUE: Any = linen.Variable.value
_PUT_VARIABLE = linen.Module.put_variable
_SOW = linen.Module.sow
_PATCHES = Patches(
    "linen_records",
    [
        (Scope, "make_rng", _make_rng),
        (linen.Variable, "value", property(_VALUE.fget, _set_value)),
        (linen.Module, "put_variable", _put_variable),
        (linen.Module, "sow", _sow),
    ],
    outside=(),
)


@dataclasses.dataclass
class Observations:
    """Everything that traces of a linen module have shown.

    Attributes:
      training: what calls in training do.
      returned: collections that calls return, by `mutable`.
      rematerialised: paths of modules that were recomputed.
      norms: paths of the `BatchNorm`s that were called in training.
      dropouts: paths of the modules with dropout that were called in training, with their rates.
      unbound: axes of `BatchNorm`s that the model does not bind.
      checked: calls whose arguments were looked at: the function, and which arguments it is given.
    """

    training: Record = dataclasses.field(default_factory=Record)
    returned: set[str] = dataclasses.field(default_factory=set)
    rematerialised: set[str] = dataclasses.field(default_factory=set)
    norms: dict[str, None] = dataclasses.field(default_factory=dict)
    dropouts: dict[str, float] = dataclasses.field(default_factory=dict)
    checked: set[tuple] = dataclasses.field(default_factory=set)
    unbound: UnboundAxes = dataclasses.field(default_factory=UnboundAxes)

    def without_sown(self, collections: Mapping[str, Any]) -> dict[str, Any]:
        """Return collections without the values that calls sow and return: each call sows them
        anew.
        """
        sown = {path for path in self.training.sown if path.partition("/")[0] in self.returned}
        return without(collections, sown)

    def check_sown(self) -> None:
        """Refuse values that the module sows and the loss does not take: they are no statistics,
        and one more is added in every call.
        """
        problems = []
        for path in sorted(self.training.sown):
            collection = path.partition("/")[0]
            if collection not in self.returned:
                text = (
                    f'sown into the collection "{collection}", which the loss does not read; each '
                    "call would add to it"
                )
                fix = (
                    f'outputs, sown = model(x, mutable=["{collection}"]) in the loss, which may '
                    "add sum(jax.tree.leaves(sown)); "
                )
                problems.append(
                    Problem(
                        path,
                        [text],
                        f"{fix}or self.variable, for a value that is kept from step to step.",
                    )
                )
        raise_problems(
            ModelError, "the linen module sows values that the loss does not take", problems
        )

    def note_call(self, module: linen.Module, path: str, kwargs: Mapping[str, Any]) -> None:
        """Record a module that is called in training, if it has statistics or drops."""
        if isinstance(module, linen.BatchNorm):
            self.norms[path] = None
        if isinstance(module, linen.Dropout):
            rate = module.rate
        else:
            rate = getattr(module, "dropout_rate", 0)
        if (
            isinstance(module, linen.Dropout | linen.MultiHeadDotProductAttention)
            and isinstance(rate, int | float)
            and 0 < rate < 1
        ):
            # with a key that is given, none is drawn
            if not {"rng", "dropout_rng"} & kwargs.keys():
                self.dropouts[path] = rate

    def notes(self) -> list[str]:
        """Return lines on norms and dropouts that stayed in evaluation mode in training."""
        frozen = []
        for path in self.norms:
            mean = "/".join(filter(None, ("batch_stats", path, "mean")))
            if mean not in self.training.writes:
                frozen.append(path)
        drawn = {path for path, _ in self.training.draws}
        idle = [
            f"{path or 'the module'} (rate {rate})"
            for path, rate in self.dropouts.items()
            if path not in drawn
        ]
        return [
            *_note("batch statistics are frozen, by use_running_average=True", frozen),
            *_note("dropout drops nothing in training, by deterministic=True", idle),
            *self.unbound.notes(),
        ]


def _note(text: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = ""
    if len(names) > 1:
        more = f" and {len(names) - 1} more"
    return [f"note: {text}: {names[0] or 'the module'}{more}."]


def without(tree: Mapping[str, Any], paths: set[str], at: str = "") -> dict[str, Any]:
    """Return nested dicts without the nodes at these paths, nor dicts that are empty then."""
    pruned: dict[str, Any] = {}
    for name, part in tree.items():
        path = f"{at}/{name}".lstrip("/")
        if path in paths:
            continue
        if not isinstance(part, Mapping):
            pruned[name] = part
        elif (inner := without(part, paths, path)) or not part:
            pruned[name] = inner
    return pruned
