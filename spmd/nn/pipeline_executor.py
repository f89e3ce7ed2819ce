"""Runs the forward pass of a schedule: what each stage computes in each tick, and what it sends to
the next stage.

One `lax.scan` over ticks; its body is one tick of every stage, with one `ppermute` between
neighbours: at its end, or, if the schedule has a hop of two ticks, at its beginning, so that
communication overlaps computation. An idle stage computes a result that is discarded and has zero
gradients. A branch that only some stages take would cost more: gradients of all its parameters are
copied out of it in every tick, a GPU waits for the host to choose the branch, and no collective may
run inside it. Where a stage has a convolution, on a CPU, ticks are unrolled: XLA:CPU runs a
convolution inside a loop some 40 times slower.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base.tree import Tree
from spmd.nn.parallel_context import ParallelConfig
from spmd.nn.schedule import Schedule, Work
from spmd.wire import collectives

# (params, state, number, group, x) -> (state, y)
Stage = Callable[[Tree, Tree, jax.Array, jax.Array, Tree], tuple[Tree, Tree]]


def run_schedule(
    parallel: ParallelConfig,
    schedule: Schedule,
    work: Stage,
    params: Tree,
    state: Tree,
    inputs: Tree,
) -> tuple[Tree, Tree]:
    """Run this stage's part of a forward pass, inside a region that is manual along the pipeline's
    axis.

    Args:
      work: `(params, state, number, group, x) -> (state, y)`: one group of layers on one
        microbatch; y is shaped like x. `number` and `group` are those of the microbatch and of the
        stage's group of layers.
      params: all arrays that `work` uses and that have a gradient.
      state: arrays that this stage keeps from tick to tick; an idle tick does not change them.
      inputs: leaves [microbatches, ...], replicated over the stages; only the first stage uses
        them.

    Returns:
      The state after the last tick, and the results [microbatches, ...], which are valid on the
      last stage and zeros on the others.
    """
    table = schedule.forward.table
    axis = str(parallel.pipeline.axis)
    rows = np.zeros((len(table), schedule.stages, 2), np.int32)
    for at, tick_work in enumerate(table):
        for stage_number, item in enumerate(tick_work):
            rows[at, stage_number] = (-1, 0)
            if item is not None:
                rows[at, stage_number] = (item.microbatch, item.group)
    stage = collectives.worker_index((axis,))
    last = schedule.stages - 1
    run_masked = masked(work)
    overlaps = schedule.hop > 1

    def send(y: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: collectives.shift(leaf, axis, around=schedule.groups > 1), y
        )

    def tick(carry: tuple, row: jax.Array) -> tuple[tuple, Tree]:
        state, arrived, outgoing = carry
        number, group = row
        # With a hop of 2 ticks, this overlaps the computation of this tick.
        incoming = send(outgoing)
        new = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, jnp.maximum(number, 0), keepdims=False), inputs
        )
        x = jax.tree.map(functools.partial(jnp.where, (stage == 0) & (group == 0)), new, arrived)
        state, y = run_masked(number >= 0, params, state, number, group, x)
        if overlaps:
            return (state, incoming, y), y
        return (state, send(y), ()), y

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), inputs)
    begin = (state, nothing, ())
    if overlaps:
        begin = (state, nothing, nothing)
    steps = 1
    if parallel.unroll:
        steps = len(table)
    (state, *_), results = lax.scan(tick, begin, jnp.asarray(rows)[:, stage], unroll=steps)
    ends = {tick_work[last]: at for at, tick_work in enumerate(table)}
    order = np.array(
        [ends[Work(number, schedule.groups - 1)] for number in range(schedule.microbatches)]
    )

    def of_last_stage(y: jax.Array) -> jax.Array:
        # Zeros elsewhere, so that a sum over the stages is the last one's result.
        return jnp.where(stage == last, y[order], jnp.zeros_like(y[order]))

    return state, jax.tree.map(of_last_stage, results)


def masked(work: Stage) -> Callable[..., tuple[Tree, Tree]]:
    """Return `work`, run in any case; if not `live` the state does not change, and gradients are
    zero even if the result is NaN.
    """

    # An idle stage computes too, on what it has, and 0 * NaN is NaN: its gradients are replaced by
    # zeros, and not multiplied by zero.
    def run_masked(
        live: jax.Array, params: Tree, state: Tree, number: jax.Array, group: jax.Array, x: Tree
    ) -> tuple[Tree, Tree]:
        def gate_leaf(leaf: jax.Array) -> jax.Array:
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                return gate(live, leaf)
            return leaf

        gated = functools.partial(jax.tree.map, gate_leaf)
        # An idle stage has the number -1, which would be the last microbatch.
        after, y = work(gated(params), gated(state), jnp.maximum(number, 0), group, gated(x))
        # The state before is not gated: where it does not change, its gradient goes through.
        return jax.tree.map(functools.partial(jnp.where, live), after, state), y

    return run_masked


@jax.custom_vjp
def gate(live: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x`, whose gradient is replaced by zero (not multiplied by it) if not `live`."""
    del live
    return x


def _gate_forward(live: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, live


def _gate_backward(live: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, jnp.where(live, cotangent, jnp.zeros_like(cotangent))


gate.defvjp(_gate_forward, _gate_backward)


def from_last_stage(y: Tree, axis: str, *, scatter: bool) -> Tree:
    """Return the last stage's array (other stages have zeros): dim 0 sharded over the stages
    (`scatter`), or replicated.
    """
    if scatter:
        return jax.tree.map(lambda y: collectives.reduce_scatter(y, (axis,), 0), y)
    return jax.tree.map(lambda y: collectives.all_reduce(y, (axis,)), y)
