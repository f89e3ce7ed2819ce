"""Trials of an optimizer: a call as in a step, and updates of parameters that are packed as servers
keep them.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd.base.tree import Tree
from spmd.errors import OptimizerError, first_line
from spmd.train.adapt_optimizer import interface_fix
from spmd.wire.server.packing import Storage

# of a dim in the trial: longer than 128, from which optax factors second moments
LONGEST = 160
# sums of float32 in another order; of values that are rounded more coarsely, one rounding
NOISE = 1e-5
# steps with updates: the second sees what the first has left in the state
STEPS = 2
# all steps: a schedule that warms up, or gradients that are gathered, update nothing at first
MOST = 130


def check_update(optimizer: optax.GradientTransformation, params: Tree) -> None:
    """Refuse an optimizer that needs more than gradients, parameters and the loss; `params` are
    shapes.

    Raises:
      OptimizerError: its update fails on these.
    """
    inner = optax.with_extra_args_support(optimizer)
    try:
        jax.eval_shape(lambda p: inner.update(p, inner.init(p), p, value=jnp.float32(0)), params)
    except OptimizerError:
        raise
    except Exception as error:
        raise OptimizerError(
            "the optimizer's update fails on gradients, parameters and value=loss: "
            f"{first_line(error)}",
            fix=interface_fix(inner, params),
        ) from error


def check_packed(optimizer: optax.GradientTransformation, storage: Storage) -> None:
    """Compare updates of packed parameters with those of unpacked ones, on random numbers and
    parameters of at most `LONGEST` per dim.

    Raises:
      OptimizerError: they differ; with the transformation of a chain that makes them differ.
    """

    def shortened(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(min(size, LONGEST) for size in leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    small = jax.tree.map(shortened, storage.like)
    trial = Storage(small, storage.placement, storage.positions, storage.servers)
    difference = _difference(optimizer, trial)
    if not difference:
        return
    share = "none at all"
    if math.isfinite(difference):
        share = f"off by {difference:.0%}"
    culprit = f"the optimizer ({_states(optimizer, small)})"
    for name, part in _chain_parts(optimizer):
        if _difference(part, trial):
            culprit = f"{name}, a part of the optimizer,"
            break
    fix = (
        "element-wise transformations (sgd, adamw without a mask, ...; clip_by_global_norm is "
        "exact too), or [gradients] "
        'reduction = "reduce_scatter", which does not pack them.'
    )
    if storage.placement != "sliced":
        fix += ' placement = "sliced" keeps the norm of each parameter.'
    raise OptimizerError(
        f"{culprit} gives parameters other updates when they are packed into rows, as the servers "
        f"keep them ({storage.placement}): in a "
        f"trial they are {share}. It depends on shapes, paths or norms of single parameters.",
        fix=fix,
    )


def _difference(optimizer: optax.GradientTransformation, storage: Storage) -> float:
    """Return the largest difference of an update, as a share of its parameter's largest, above
    noise; infinite where packed parameters cannot even be updated.
    """
    inner = optax.with_extra_args_support(optimizer)
    rng = np.random.default_rng(0)
    largest = 0.0

    def draw() -> Tree:
        def normal(leaf: Any) -> np.ndarray:
            return rng.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)

        return jax.tree.map(normal, storage.like)

    @jax.jit
    def begin(params: Tree) -> tuple:
        return inner.init(params), inner.init(storage.pack(params))

    @jax.jit
    def update(grads: Tree, params: Tree, unpacked_state: Any, packed: Any) -> tuple:
        updates, unpacked_state = inner.update(grads, unpacked_state, params, value=jnp.float32(1))
        rows, packed = inner.update(
            storage.pack(grads), packed, storage.pack(params), value=jnp.float32(1)
        )
        return updates, storage.unpack(rows), unpacked_state, packed

    try:
        params = draw()
        unpacked_state, packed = begin(params)
        moved = tried = 0
        while moved < STEPS and tried < MOST:
            tried += 1
            updates, unpacked, unpacked_state, packed = update(
                draw(), params, unpacked_state, packed
            )
            moved += any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(updates))
            for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(unpacked), strict=True):
                difference = _relative_difference(a, b)
                if not math.isfinite(difference):
                    return math.inf
                largest = max(largest, difference)
    except (TypeError, ValueError, KeyError, AttributeError):
        # a mask or labels of the model's own structure
        return math.inf
    return largest


def _relative_difference(a: jax.Array, b: jax.Array) -> float:
    """Return the largest difference of two arrays, as a share of the largest of `a`; 0 if it may be
    noise.
    """
    noise = max(NOISE, float(jnp.finfo(a.dtype).eps))
    exact_a, exact_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    largest = max(np.abs(exact_a).max(initial=0), 1e-12)
    difference = np.abs(exact_a - exact_b).max(initial=0) / largest
    # not `<`: a NaN is no noise
    if difference <= noise:
        return 0.0
    return difference


def _chain_parts(optimizer: Any) -> Iterator[tuple[str, optax.GradientTransformation]]:
    """Yield the transformations of a chain, by name, as far as its closure shows them."""
    of_update = _closure(optimizer.update)
    inits = _closure(optimizer.init).get("init_fns", ())
    for init, update in zip(inits, of_update.get("update_fns", ()), strict=False):
        yield _made_by(update), optax.GradientTransformation(init, update)
    wrapped = of_update.get("tx")
    if wrapped is not None:
        yield from _chain_parts(wrapped)


def _closure(function: Any) -> Mapping[str, Any]:
    """Return the variables by name that a function closes over."""
    # an optimizer may be of objects that can be called, and `getclosurevars` refuses these
    if not inspect.isfunction(function):
        return {}
    return inspect.getclosurevars(function).nonlocals


def _made_by(update: Any) -> str:
    """Return the name of the function that made an update, under what only wraps it."""
    if update.__qualname__.startswith("with_extra_args_support"):
        inner = inspect.getclosurevars(update).nonlocals.get("tx")
        if inner is not None:
            return _made_by(inner.update)
    return update.__qualname__.partition(".")[0]


def _states(optimizer: optax.GradientTransformation, like: Tree) -> str:
    """Return the names of the states of an optimizer whose parts are not known."""
    state = jax.eval_shape(optimizer.init, like)
    parts = (state,)
    if type(state) is tuple:
        parts = state
    return ", ".join(type(part).__name__ for part in parts)
