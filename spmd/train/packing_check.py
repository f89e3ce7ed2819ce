"""What an optimizer can do, tried and not guessed: whether a step can call it, and with parameters
packed as servers keep them.
"""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd.base.tree import Tree
from spmd.errors import OptimizerError, first_line
from spmd.train.adapt_optimizer import interface_fix
from spmd.wire.server.packing import Storage

LONGEST = 160  # of a dim in the trial: longer than 128, from which optax factors second moments
NOISE = 1e-5  # sums of float32 in another order; of what is rounded more coarsely, one rounding
STEPS = 2  # with updates: the second sees what the first has left in the state
MOST = 130  # without: a schedule that warms up, gradients that are gathered


def check_update(optimizer: optax.GradientTransformation, params: Tree) -> None:
    """An optimizer that wants more than gradients, parameters and the loss cannot be used; `params`
    are shapes.
    """
    inner = optax.with_extra_args_support(optimizer)
    try:
        jax.eval_shape(lambda p: inner.update(p, inner.init(p), p, value=jnp.float32(0)), params)
    except OptimizerError:
        raise
    except Exception as error:
        why = (
            "the optimizer's update fails on gradients, parameters and value=loss: "
            f"{first_line(error)}"
        )
        raise OptimizerError(why, fix=interface_fix(inner, params)) from error


def check_packed(optimizer: optax.GradientTransformation, storage: Storage) -> None:
    """Compare updates of packed parameters with those of unpacked ones, on random numbers and
    parameters of at most `LONGEST` per dim.

    Raises:
      OptimizerError: they differ; with the transformation of a chain that makes them differ.
    """
    small = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            tuple(min(size, LONGEST) for size in leaf.shape), leaf.dtype
        ),
        storage.like,
    )
    trial = Storage(small, storage.placement, storage.positions, storage.servers)
    off = _difference(optimizer, trial)
    if not off:
        return
    share = f"off by {off:.0%}" if math.isfinite(off) else "none at all"
    guilty = next((name for name, part in _parts(optimizer) if _difference(part, trial)), None)
    named = (
        f"{guilty}, a part of the optimizer,"
        if guilty
        else f"the optimizer ({_states(optimizer, small)})"
    )
    also = (
        ' placement = "sliced" keeps the norm of each parameter.'
        if storage.placement != "sliced"
        else ""
    )
    raise OptimizerError(
        f"{named} gives parameters other updates when they are packed into rows, as the servers "
        f"keep them ({storage.placement}): in a "
        f"trial they are {share}. It depends on shapes, paths or norms of single parameters.",
        fix="element-wise transformations (sgd, adamw without a mask, ...; clip_by_global_norm is "
        "exact too), or [gradients] "
        f'reduction = "reduce_scatter", which does not pack them.{also}',
    )


def _difference(optimizer: optax.GradientTransformation, storage: Storage) -> float:
    """The largest difference of an update, of its parameter's largest, above noise; infinite where
    packed ones cannot even be updated.
    """
    inner, rng, worst = optax.with_extra_args_support(optimizer), np.random.default_rng(0), 0.0

    def draw() -> Tree:
        return jax.tree.map(
            lambda x: rng.standard_normal(x.shape, np.float32).astype(x.dtype), storage.like
        )

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
                noise, a, b = (
                    max(NOISE, float(jnp.finfo(a.dtype).eps)),
                    np.asarray(a, np.float64),
                    np.asarray(b, np.float64),
                )
                off = np.abs(a - b).max(initial=0) / max(np.abs(a).max(initial=0), 1e-12)
                worst = max(worst, off if off > noise else 0.0) if math.isfinite(off) else math.inf
    except (TypeError, ValueError, KeyError, AttributeError):
        # a mask or labels of the model's own structure
        return math.inf
    return worst if math.isfinite(worst) else math.inf


def _parts(optimizer: Any) -> Iterator[tuple[str, optax.GradientTransformation]]:
    """The transformations of a chain, by name, as far as its closure shows them."""
    inner = (
        inspect.getclosurevars(optimizer.update).nonlocals
        if inspect.isfunction(optimizer.update)
        else {}
    )
    inits = (
        inspect.getclosurevars(optimizer.init).nonlocals.get("init_fns", ())
        if inspect.isfunction(optimizer.init)
        else ()
    )
    for init, update in zip(inits, inner.get("update_fns", ()), strict=False):
        yield _name(update), optax.GradientTransformation(init, update)
    wrapped = inner.get("tx")
    if wrapped is not None:
        yield from _parts(wrapped)


def _name(update: Any) -> str:
    """The function that made it, under what only wraps it."""
    inner = (
        inspect.getclosurevars(update).nonlocals.get("tx")
        if update.__qualname__.startswith("with_extra_args_support")
        else None
    )
    return _name(inner.update) if inner is not None else update.__qualname__.partition(".")[0]


def _states(optimizer: optax.GradientTransformation, like: Tree) -> str:
    """What the optimizer's state is made of, for one whose parts are not known."""
    state = jax.eval_shape(optimizer.init, like)
    return ", ".join(type(part).__name__ for part in (state if type(state) is tuple else (state,)))
