"""The numbers that a script gives its optimizer and the optimizer keeps in its state, such as the
learning rate of `optax.inject_hyperparams`.

A checkpoint has such a number twice: in the state, where training may have changed it, and in the
metadata, as the script gave it. So a run that resumes knows whether the script has changed.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from spmd.base.tree import Tree, describe, flatten, map_paths, path_of
from spmd.layout.resolve import Resolved
from spmd.run.reshard_checkpoint import OPT
from spmd.train.optimizer_metrics import INJECTED
from spmd.train.skipped_updates import SpikeSkip
from spmd.train.state import State, owner_of, place_copy

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
        """Return the values as a checkpoint's metadata keeps them."""
        return {path: value.tolist() for path, value in self.values.items()}

    def update(self, state: State, saved: Mapping[str, Any] | None) -> tuple[State, list[str]]:
        """Return a restored state in which the numbers that the script has changed are those of the
        script, and lines that say so.

        A number that training has changed, and the script has not, is kept. Of those that the
        script has changed, a constant of `optax.inject_hyperparams` is replaced, and so is any
        other number that is as it began; one that training computes is kept.

        Args:
          saved: what the script gave when the checkpoint was written; None: the checkpoint is of an
            earlier version and does not say.
        """
        leaves = flatten(state)
        replaced: dict[str, np.ndarray] = {}
        lines = []
        for path, value in self.values.items():
            if saved is None:
                if path in self.injected and not _holds(leaves[path], value):
                    replaced[path] = value
                    why = (
                        "and the checkpoint, of an earlier version, does not record the script's "
                        "value: training may have set it"
                    )
                    lines.append(
                        f"{self._named(path)} was {_shown(_first_worker(leaves[path], value))}, is "
                        f"{_shown(value)}, {why}"
                    )
                continue
            if path not in saved:
                continue
            began = np.asarray(saved[path], value.dtype)
            if _equal(began, value):
                continue
            trained = not _holds(leaves[path], began)
            if trained and path not in self.injected:
                held = _shown(_first_worker(leaves[path], value))
                lines.append(
                    f"{path} began at {_shown(began)} and now begins at {_shown(value)}; it stays "
                    f"{held}, which training made of it"
                )
                continue
            replaced[path] = value
            since = ""
            if trained:
                held = _shown(_first_worker(leaves[path], value))
                since = f", and {held} when it was saved"
            lines.append(f"{self._named(path)} was {_shown(began)}{since}, is {_shown(value)}")

        def replace(path: str, leaf: Any) -> Any:
            if path not in replaced:
                return leaf
            return place_copy(np.broadcast_to(replaced[path], leaf.shape), leaf.sharding)

        if not replaced:
            return state, lines
        return map_paths(replace, state), lines

    def _named(self, path: str) -> str:
        """Return the name of a number in a report."""
        if path in self.injected:
            return f"{path} of optax.inject_hyperparams"
        return path


def find_script_numbers(
    init: Callable[[Tree], Any], params: Tree, placed: Resolved
) -> ScriptNumbers:
    """Return the numbers in the state of an optimizer, read from the trace of `init`.

    Args:
      params: shapes.
      placed: of the parameters; an array of the state that belongs to one is no number.
    """
    traced, opt = jax.make_jaxpr(init, return_shape=True)(params)
    leaves = {f"{OPT}/{path}": leaf for path, leaf in flatten(opt).items()}
    injected = injected_paths(opt)
    constants = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    values: dict[str, np.ndarray] = {}
    computed: set[str] = set()
    for (path, leaf), var in zip(leaves.items(), traced.jaxpr.outvars, strict=True):
        # Random keys are no numbers.
        if not jnp.issubdtype(leaf.dtype, np.number):
            continue
        # JAX writes a Python number into a trace as a Literal, and an array as a constant.
        if isinstance(var, Literal):
            value = var.val
        else:
            value = constants.get(var)
        if value is None:
            computed |= {path} & injected
        elif path in injected or (leaf.size <= MOST and owner_of(path, leaf, placed) is None):
            values[path] = np.asarray(value, leaf.dtype)
    if computed:
        # The trace converts a constant to the parameters' dtype, for example.
        values |= _compute_numbers(init, params, computed)
    # The skips that are left follow from an option, which is compared as such.
    skips_left = {_join(path, "left") for path, _ in _states(opt, SpikeSkip)}
    ordered = [path for path in leaves if path in values and path not in skips_left]
    return ScriptNumbers({path: values[path] for path in ordered}, frozenset(injected))


def _compute_numbers(
    init: Callable[[Tree], Any], params: Tree, paths: Collection[str]
) -> dict[str, np.ndarray]:
    """Return the numbers at some paths of the optimizer's first state, which `init` computes."""

    def compute() -> dict[str, Any]:
        opt = init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params))
        leaves = {f"{OPT}/{path}": leaf for path, leaf in flatten(opt).items()}
        return {path: leaf for path, leaf in leaves.items() if path in paths}

    # Under jit XLA drops all of the state that is not returned.
    return jax.tree.map(np.asarray, jax.jit(compute)())


def injected_paths(opt: Any) -> set[str]:
    """Return the paths, in a `State`, of the constants of `optax.inject_hyperparams`; a schedule's
    value is none, since each step computes it.

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


def _join(path: str, field: str) -> str:
    return "/".join(part for part in (OPT, path, field) if part)


def _states(opt: Any, kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the states of a kind, each with its path."""
    if isinstance(opt, kind):
        yield path, opt
    below = jax.tree_util.tree_leaves_with_path(opt, is_leaf=lambda part: part is not opt)
    for keys, node in below:
        if keys:
            yield from _states(node, kind, f"{path}/{path_of(keys)}".removeprefix("/"))


def _holds(leaf: jax.Array, value: np.ndarray) -> bool:
    """Return whether all of an array is `value`; all processes agree."""
    # A program on the devices, since no process may hold all of the array. A NaN equals a NaN.
    return bool(jax.jit(lambda x: ((x == value) | ((x != x) & (value != value))).all())(leaf))


def _first_worker(leaf: jax.Array, value: np.ndarray) -> np.ndarray:
    """Return the first worker's part of an array."""
    return np.asarray(jax.jit(lambda x: x.reshape(-1)[: value.size].reshape(value.shape))(leaf))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays are equal; a NaN equals a NaN."""
    if one.shape != other.shape:
        return False
    both_nan = (one != one) & (other != other)
    return bool(((one == other) | both_nan).all())


def _shown(value: np.ndarray) -> str:
    if value.size > SHOWN:
        return f"another {describe(value)}"
    return ", ".join(f"{number:.7g}" for number in value.reshape(-1).tolist())
