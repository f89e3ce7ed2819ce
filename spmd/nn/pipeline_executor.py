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
    """This stage's part of a forward pass, inside a region that is manual along the pipeline's
    axis.

    Args:
      work: `(params, state, number, group, x) -> (state, y)`: one group of layers on one
        microbatch; y is shaped like x. `number` and `group` are those of the microbatch and of the
        stage's group of layers.
      params: all arrays that `work` uses and that have a gradient.
      state: what this stage keeps from tick to tick; an idle tick does not change it.
      inputs: leaves [microbatches, ...], replicated over the stages; only the first stage uses
        them.

    Returns:
      The state after the last tick, and the results [microbatches, ...], which are valid on the
      last stage and zeros on the others.
    """
    table, axis = schedule.forward.table, str(parallel.pipeline.axis)
    column = np.array(
        [
            [(-1, 0) if work is None else (work.microbatch, work.group) for work in tick]
            for tick in table
        ],
        np.int32,
    )
    stage, last = collectives.worker_index((axis,)), schedule.stages - 1
    run, send = (
        masked(work),
        functools.partial(
            jax.tree.map, lambda y: collectives.shift(y, axis, around=schedule.groups > 1)
        ),
    )

    def tick(carry: tuple, row: jax.Array) -> tuple[tuple, Tree]:
        state, arrived, outgoing = carry
        number, group = row
        # with a hop of 2 ticks, this overlaps the computation of this tick
        incoming = send(outgoing)
        new = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, jnp.maximum(number, 0), keepdims=False), inputs
        )
        x = jax.tree.map(functools.partial(jnp.where, (stage == 0) & (group == 0)), new, arrived)
        state, y = run(number >= 0, params, state, number, group, x)
        return (state, incoming, y) if schedule.hop > 1 else (state, send(y), ()), y

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), inputs)
    begin = (state, nothing, nothing if schedule.hop > 1 else ())
    (state, *_), results = lax.scan(
        tick, begin, jnp.asarray(column)[:, stage], unroll=len(table) if parallel.unroll else 1
    )
    done = {work: at for at, work in enumerate(tick[last] for tick in table)}
    order = np.array(
        [done[Work(number, schedule.groups - 1)] for number in range(schedule.microbatches)]
    )
    return state, jax.tree.map(
        lambda y: jnp.where(stage == last, y[order], jnp.zeros_like(y[order])), results
    )


def masked(work: Stage) -> Callable[..., tuple[Tree, Tree]]:
    """`work`, run in any case; if not `live` the state does not change, and gradients are zero even
    if the result is NaN.
    """

    def run(
        live: jax.Array, params: Tree, state: Tree, number: jax.Array, group: jax.Array, x: Tree
    ) -> tuple[Tree, Tree]:
        gated = functools.partial(
            jax.tree.map,
            lambda leaf: gate(live, leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf,
        )
        after, y = work(gated(params), gated(state), jnp.maximum(number, 0), group, gated(x))
        # an unchanged state keeps its gradient
        return jax.tree.map(functools.partial(jnp.where, live), after, state), y

    return run


@jax.custom_vjp
def gate(live: jax.Array, x: jax.Array) -> jax.Array:
    """`x`, whose gradient is replaced by zero (not multiplied by it) if not `live`."""
    del live
    return x


def _gate_forward(live: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, live


def _gate_backward(live: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, jnp.where(live, cotangent, jnp.zeros_like(cotangent))


gate.defvjp(_gate_forward, _gate_backward)


def from_last_stage(y: Tree, axis: str, *, scatter: bool) -> Tree:
    """The last stage's array (other stages have zeros): dim 0 sharded over the stages (`scatter`),
    or replicated.
    """
    if scatter:
        return jax.tree.map(lambda y: collectives.reduce_scatter(y, (axis,), 0), y)
    return jax.tree.map(lambda y: collectives.all_reduce(y, (axis,)), y)
