"""Numbers that a script gives its optimizer and the optimizer keeps in its state, such as the
learning rate of `optax.inject_hyperparams`.

A checkpoint has such a number twice: in the state, where training may have changed it, and in the
metadata, as the script gave it. So a run that resumes knows whether the script has changed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from spmd.layout.resolve import Resolved
from spmd.run.reshard_checkpoint import OPT
from spmd.train.optimizer_metrics import INJECTED
from spmd.train.spike_skip import SpikeSkip
from spmd.train.state import State, owner_of, place_copy
from spmd.tree import Tree, describe, flatten, map_paths, path_of

MOST = 64  # elements of an array that counts as numbers, unless it is injected
SHOWN = 4  # elements that a line shows


@dataclasses.dataclass(frozen=True)
class ScriptNumbers:
    """The numbers that the optimizer's state holds at step 0, whatever the parameters are.

    Attributes:
      values: by path in a `State`; where each worker has its own state, of one worker.
      injected: paths of those that are constants of `optax.inject_hyperparams`.
    """

    values: Mapping[str, np.ndarray]
    injected: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        """The values as a checkpoint's metadata keeps them."""
        return {path: value.tolist() for path, value in self.values.items()}

    def update(self, state: State, saved: Mapping[str, Any] | None) -> tuple[State, list[str]]:
        """A restored state in which the numbers that the script has changed are those of the
        script, and lines that say so.

        A number that training has changed, and the script has not, is kept. Of those that the
        script has changed, a constant of `optax.inject_hyperparams` is replaced, and so is any
        other number that is as it began; one that training computes is kept.

        Args:
          saved: what the script gave when the checkpoint was written; None: the checkpoint is of an
            earlier version and does not say.
        """
        leaves, replaced, lines = flatten(state), dict[str, np.ndarray](), []
        for path, value in self.values.items():
            if saved is None:
                if path in self.injected and not _holds(leaves[path], value):
                    replaced[path] = value
                    why = (
                        "and the checkpoint, of an earlier version, does not record the script's "
                        "value: training may have set it"
                    )
                    lines.append(
                        f"{self._named(path)} was {_shown(_one(leaves[path], value))}, is "
                        f"{_shown(value)}, {why}"
                    )
                continue
            if path not in saved or _equal(began := np.asarray(saved[path], value.dtype), value):
                continue
            trained = not _holds(leaves[path], began)
            if trained and path not in self.injected:
                held = _shown(_one(leaves[path], value))
                lines.append(
                    f"{path} began at {_shown(began)} and now begins at {_shown(value)}; it stays "
                    f"{held}, which training made of it"
                )
                continue
            replaced[path] = value
            since = (
                f", and {_shown(_one(leaves[path], value))} when it was saved" if trained else ""
            )
            lines.append(f"{self._named(path)} was {_shown(began)}{since}, is {_shown(value)}")

        def replace(path: str, leaf: Any) -> Any:
            return (
                place_copy(np.broadcast_to(replaced[path], leaf.shape), leaf.sharding)
                if path in replaced
                else leaf
            )

        return (map_paths(replace, state) if replaced else state), lines

    def _named(self, path: str) -> str:
        return f"{path} of optax.inject_hyperparams" if path in self.injected else path


def find_script_numbers(
    init: Callable[[Tree], Any], params: Tree, placed: Resolved
) -> ScriptNumbers:
    """The numbers in the state of an optimizer, read from the trace of `init`.

    Args:
      params: shapes.
      placed: of the parameters; an array of the state that belongs to one is no number.
    """
    traced, opt = jax.make_jaxpr(init, return_shape=True)(params)
    leaves = {f"{OPT}/{path}": leaf for path, leaf in flatten(opt).items()}
    injected, known = (
        injected_paths(opt),
        dict(zip(traced.jaxpr.constvars, traced.consts, strict=True)),
    )
    values, computed = dict[str, np.ndarray](), set[str]()
    for (path, leaf), var in zip(leaves.items(), traced.jaxpr.outvars, strict=True):
        if not jnp.issubdtype(leaf.dtype, np.number):
            continue  # such as a random key
        value = var.val if isinstance(var, Literal) else known.get(var)
        if value is None:
            computed |= {path} & injected
        elif path in injected or (leaf.size <= MOST and owner_of(path, leaf, placed) is None):
            values[path] = np.asarray(value, leaf.dtype)
    if computed:  # such as a constant that is converted to the parameters' dtype

        def compute() -> dict[str, Any]:
            opt = init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
            return {
                path: leaf
                for name, leaf in flatten(opt).items()
                if (path := f"{OPT}/{name}") in computed
            }

        values |= jax.tree.map(np.asarray, jax.jit(compute)())
    # it follows from an option, which is compared as such
    left = {_join(path, "left") for path, _ in _states(opt, SpikeSkip)}
    return ScriptNumbers(
        {path: values[path] for path in leaves if path in values and path not in left},
        frozenset(injected),
    )


def injected_paths(opt: Any) -> set[str]:
    """Paths, in a `State`, of the constants of `optax.inject_hyperparams`; a schedule's value is
    none, since each step computes it.

    Example:
      >>> import optax
      >>> optimizer = optax.inject_hyperparams(optax.sgd)(
      ...     learning_rate=0.5, momentum=optax.constant_schedule(0.9)
      ... )
      >>> injected_paths(jax.eval_shape(optimizer.init, {}))
      {'opt/hyperparams/learning_rate'}
    """
    paths = set()
    for path, node in _states(opt, INJECTED):
        constants = node.hyperparams.keys() - getattr(node, "hyperparams_states", {}).keys()
        paths |= {_join(path, f"hyperparams/{name}") for name in constants}
    return paths


def _join(path: str, rest: str) -> str:
    return "/".join(part for part in (OPT, path, rest) if part)


def _states(opt: Any, kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The states of a kind, each with its path."""
    if isinstance(opt, kind):
        yield path, opt
    below = jax.tree_util.tree_leaves_with_path(opt, is_leaf=lambda part: part is not opt)
    for keys, node in below:
        if keys:
            yield from _states(node, kind, f"{path}/{path_of(keys)}".removeprefix("/"))


def _holds(leaf: jax.Array, value: np.ndarray) -> bool:
    """Return whether all of an array is `value`; all processes agree."""
    return bool(jax.jit(lambda x: ((x == value) | ((x != x) & (value != value))).all())(leaf))


def _one(leaf: jax.Array, value: np.ndarray) -> np.ndarray:
    """The first worker's part of an array."""
    return np.asarray(jax.jit(lambda x: x.reshape(-1)[: value.size].reshape(value.shape))(leaf))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def _shown(value: np.ndarray) -> str:
    return (
        ", ".join(f"{number:.7g}" for number in value.reshape(-1).tolist())
        if value.size <= SHOWN
        else f"another {describe(value)}"
    )
