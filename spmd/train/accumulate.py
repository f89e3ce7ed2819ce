"""Microbatches: gradients of a large batch in the memory of a small one.

Gradients are only summed here, on each worker. The sum is reduced over workers once, by
`reduced_gradients` in `spmd/train/step.py`. Gradients of weights that are gathered layer by layer
may be reduced in every microbatch instead: `choose_accumulation` decides.
"""

import dataclasses
from collections.abc import Callable, Mapping
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
    """Return every leaf [rows, ...] as [count, rows / count, ...]; microbatch m holds rows m, m +
    count, m + 2 count, ...

    Taken with a stride, a microbatch of the whole batch is the union of the workers' microbatches,
    on any number of workers, and no row leaves its device.
    """

    def split(leaf: jax.Array) -> jax.Array:
        # With a stride, a row of the batch is in the same microbatch, and so draws the same random
        # numbers, on every mesh.
        rows = leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:])
        return jnp.moveaxis(rows, 1, 0)

    return jax.tree.map(split, tree)


def split_workers(tree: Tree, count: int) -> Tree:
    """Return every leaf [rows, ...] as [count, rows / count, ...], of contiguous rows for each."""

    def split(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])

    return jax.tree.map(split, tree)


def accumulate(
    function: Callable[[Any, Any, Any], tuple[Tree, Any]],
    carry: Any,
    xs: Tree,
    count: int,
    *,
    unroll: bool,
) -> tuple[Tree, Any]:
    """Sum `function(carry, x, index) -> (summed, carry)` over the microbatches in `xs`, in a
    `lax.scan` or unrolled.
    """
    first = jax.tree.map(lambda x: x[0], xs)
    shapes, _ = jax.eval_shape(function, carry, first, jnp.int32(0))
    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(state: tuple, inputs: tuple) -> tuple:
        total, carry = state
        summed, carry = function(carry, *inputs)
        return (jax.tree.map(jnp.add, total, summed), carry), None

    # XLA:CPU runs a convolution inside a loop body 12 to 43 times slower than outside of one
    unrolled = 1
    if unroll:
        unrolled = count
    indices = jnp.arange(count)
    (total, carry), _ = lax.scan(body, (total, carry), (xs, indices), unroll=unrolled)
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
    """Return `sync` with `sums_layers` as the layout says, or as memory allows; and notes on that.

    The choice depends on the layout, the state and the devices alone: all processes, and a run that
    resumes on such devices, choose alike.
    """
    declared = sync.resolved.layout.gradients.accumulate
    count = placed.config.accumulate
    trained = sync.layerwise & sync.resolved.placements.keys()
    if count == 1 or not trained:
        if declared == "auto":
            return sync, []
        why = "no gradients are those of weights that are gathered layer by layer"
        if count == 1:
            why = "there is one microbatch"
        return sync, [f'note: [gradients] accumulate = "{declared}" is not used: {why}.']
    sizes = {path: full_bytes(sync, path) for path in trained}
    size = sum(sizes.values())
    fits, why = _fits(placed, sync, sizes)
    if declared != "auto":
        why = f'[gradients] accumulate = "{declared}"'
    kinds = {"stacks": sizes.keys() & placed.model.stacks().keys(), "blocks": sync.blocks}
    names = " and ".join(kind for kind, present in kinds.items() if present)
    subject = f"gradients of {len(sizes)} parameters of {names} ({format_bytes(size)})"
    if declared == "local" or (declared == "auto" and fits):
        note = f"{subject} are summed over {count} microbatches and reduced once: {why}."
        return dataclasses.replace(sync, sums_layers=True), [note]
    return sync, [f"{subject} are reduced in each of {count} microbatches: {why}."]


def _fits(placed: PlacedModel, sync: GradientSync, sizes: Mapping[str, int]) -> tuple[bool, str]:
    """Return whether full gradients of these sizes fit on a device, and why."""
    state_leaves = placed.memory_left
    if state_leaves is None:
        return False, "devices do not say how much memory they have"
    # of each parameter: the number of layers or blocks of which it is one
    layers = dict(placed.model.stacks())
    for group in sync.blocks:
        for block in group:
            paths = [path for path in sizes if path.startswith(f"{block}/")]
            layers |= dict.fromkeys(paths, len(group))
    two_layers = sum(2 * size // layers[path] for path, size in sizes.items())
    left = state_leaves - two_layers
    fits = sum(sizes.values()) <= ROOM * left
    verb = "exceed"
    if fits:
        verb = "fit into"
    return fits, (
        f"in full they {verb} {ROOM:.0%} of the {format_bytes(max(left, 0))} that state and two "
        "layers leave on a device"
    )
