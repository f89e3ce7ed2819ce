"""Microbatches: gradients of a large batch in the memory of a small one.

They are only summed here, on each worker. The sum is reduced over workers once, by
`reduced_gradients` in `spmd/train/step.py`. Those of weights that are gathered layer by layer may
be reduced in every microbatch instead: `choose_accumulation` says so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base.tree import Tree, flatten, format_bytes
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.layer_gather import ROOM, choose_layerwise, full_bytes
from spmd.train.loss_trace import TracedLoss
from spmd.train.model_setup import PlacedModel


def microbatches(tree: Tree, count: int) -> Tree:
    """Every leaf [rows, ...] as [count, rows / count, ...]; microbatch m holds rows m, m + count, m
    + 2 count, ...

    Taken with a stride, a microbatch of the whole batch is the union of the workers' own, on any
    number of workers, and no row leaves its device.
    """
    return jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0), tree
    )


def split_workers(tree: Tree, count: int) -> Tree:
    """Every leaf [rows, ...] as [count, rows / count, ...], of contiguous rows for each."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), tree)


def accumulate(
    function: Callable[[Any, Any, Any], tuple[Tree, Any]],
    carry: Any,
    xs: Tree,
    count: int,
    *,
    unroll: bool,
) -> tuple[Tree, Any]:
    """Sum `function(carry, x, index) -> (summed, carry)` over the microbatches in `xs`.

    A `lax.scan`, or unrolled: XLA:CPU runs a convolution inside a loop body 12 to 43 times slower.
    """
    first = jax.tree.map(lambda x: x[0], xs)
    shapes, _ = jax.eval_shape(function, carry, first, jnp.int32(0))
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(state: tuple, inputs: tuple) -> tuple:
        total, carry = state
        summed, carry = function(carry, *inputs)
        return (jax.tree.map(jnp.add, total, summed), carry), None

    (total, carry), _ = lax.scan(
        body, (total, carry), (xs, jnp.arange(count)), unroll=count if unroll else 1
    )
    return total, carry


def choose_gathering(loss: TracedLoss) -> tuple[GradientSync, list[str]]:
    """Return the reduction of gradients with the parameters that are gathered layer by layer, and
    with the way in which microbatches add up their gradients; and notes on both.

    Raises:
      LayoutError: see `choose_layerwise`.
    """
    placed = loss.placed
    state = placed.abstract_state
    # the first inputs of the jaxpr
    paths = [*flatten(state.params), *flatten(state.frozen)]
    sync, notes = choose_layerwise(
        placed.exchange,
        placed.model,
        loss.jaxpr.jaxpr,
        paths,
        loss.blocks,
        placed.memory_left,
    )
    sync, more = choose_accumulation(placed, sync)
    return sync, [*notes, *more]


def choose_accumulation(placed: PlacedModel, sync: GradientSync) -> tuple[GradientSync, list[str]]:
    """`sync` with `sums_layers` as the layout says, or as memory allows; and notes on that.

    The choice depends on the layout, the state and the devices alone: all processes, and a run that
    resumes on such devices, choose alike.
    """
    declared, count = sync.resolved.layout.gradients.accumulate, placed.config.accumulate
    trained = sync.layerwise & sync.resolved.placements.keys()
    if count == 1 or not trained:
        why = (
            "there is one microbatch"
            if count == 1
            else "no gradients are those of weights that are gathered layer by layer"
        )
        return sync, [] if declared == "auto" else [
            f'note: [gradients] accumulate = "{declared}" is not used: {why}.'
        ]
    state_leaves = placed.memory_left
    # of each parameter: among how many layers or blocks it is one of the same size
    layers = dict(placed.model.stacks())
    layers |= {
        path: len(group)
        for group in sync.blocks
        for block in group
        for path in trained
        if path.startswith(f"{block}/")
    }
    sizes = {path: full_bytes(sync, path) for path in trained}
    size, two_layers = (
        sum(sizes.values()),
        sum(2 * size // layers[path] for path, size in sizes.items()),
    )
    left = (state_leaves or 0) - two_layers
    fits = state_leaves is not None and size <= ROOM * left
    room = (
        f"{ROOM:.0%} of the {format_bytes(max(left, 0))} that state and two layers leave on a "
        "device"
    )
    why = (
        "devices do not say how much memory they have"
        if state_leaves is None
        else f"in full they {'fit into' if fits else 'exceed'} {room}"
    )
    why = f'[gradients] accumulate = "{declared}"' if declared != "auto" else why
    kinds = {"stacks": sizes.keys() & placed.model.stacks().keys(), "blocks": sync.blocks}
    of = " and ".join(kind for kind, present in kinds.items() if present)
    what = f"gradients of {len(sizes)} parameters of {of} ({format_bytes(size)})"
    if declared == "local" or (declared == "auto" and fits):
        return dataclasses.replace(sync, sums_layers=True), [
            f"{what} are summed over {count} microbatches and reduced once: {why}."
        ]
    return sync, [f"{what} are reduced in each of {count} microbatches: {why}."]
