"""The servers' part of an asynchronous parameter server: gradients are applied one after the
other, in order of arrival.

The order, who reads when, and what counts are data; the updates are real. Algorithms: Downpour
(Dean et al. 2012), staleness-aware and n-softsync (Zhang et al., arXiv:1511.05950), SSP (Ho et al.
2013), DC-ASGD (Zheng et al., arXiv:1609.08326).

Arrays are [servers, ...]: global ones that are sharded over the servers, or those of one server,
[1, ...].
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from spmd.base.tree import Tree, flatten
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.transfer import GATHERED, HELD, SQUARES, SUM, Leaves, Memory


def init_server_memory(
    declared: ParameterServer, rows: jax.Array, workers: int
) -> dict[str, jax.Array]:
    """Return the arrays kept for a parameter [servers, width]: every worker has read its initial
    value.
    """
    servers, width = rows.shape
    zeros = jnp.zeros(rows.shape, jnp.float32)
    # Versions are kept at the servers, so a read copies a row there, and sends nothing.
    entry = {HELD: jnp.broadcast_to(rows[:, None], (servers, workers, width))}
    if declared.per_update(workers) > 1:
        entry[SUM] = zeros
        entry[GATHERED] = jnp.zeros(2, jnp.float32)
    if declared.delay_decay is not None:
        entry[SQUARES] = zeros
    return entry


def apply_arrivals(
    declared: ParameterServer,
    optimizer: optax.GradientTransformationExtraArgs,
    params: Tree,
    opt: Any,
    memory: Memory,
    *,
    arrived: Leaves,
    events: Tree,
    losses: jax.Array | None = None,
) -> tuple[Tree, Any, Memory]:
    """The parameters, the optimizer's state and the memory after a round.

    Args:
      params: the servers', leaves [servers, width].
      arrived: by path [servers, workers, width], the gradient of each worker.
      events: of the round (`Events.step_inputs`).
      losses: [workers], passed to the optimizer as `value`; None: no `value`.
    """
    workers = events["worker"].shape[0]
    share = 1.0
    if declared.mode == "bounded":
        share = 1 / workers
    # Where every gradient is an update, there is nothing to add up.
    complete_update = _single_gradient
    if declared.per_update(workers) > 1:
        complete_update = _accumulate

    def apply_arrival(carry: tuple, event: Tree) -> tuple[tuple, None]:
        params, opt, memory = carry
        worker = event["worker"]
        by_path = flatten(params)

        def of_worker(x: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(x, worker, 1, keepdims=False)

        grads = {path: of_worker(arrived[path]) for path in by_path}
        if declared.delay_compensation:
            read = {path: of_worker(memory[path][HELD]) for path in by_path}
            grads, memory = _compensate_delay(
                declared, grads, by_path, read, memory, event["applied"]
            )
        # 1. accumulate until an update is complete
        mean, rate, due, left = complete_update(memory, grads, event)
        # 2. the update, which counts when it is due
        mean = jax.tree.unflatten(jax.tree.structure(params), list(mean.values()))
        # fused with it, the update would be rounded otherwise
        mean = lax.optimization_barrier(mean)
        value = {}
        if losses is not None:
            value["value"] = losses[worker]
        updates, new_opt = optimizer.update(mean, opt, params, **value)
        if declared.staleness_scale != "none" or share < 1:
            updates = jax.tree.map(lambda u: (rate * share * u).astype(u.dtype), updates)

        def commit(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(lambda a, b: jnp.where(due, a, b), new, old)

        params = commit(optax.apply_updates(params, updates), params)
        opt = commit(new_opt, opt)
        memory = {path: entry | left.get(path, {}) for path, entry in memory.items()}
        # 3. workers that read now read these parameters
        return (params, opt, read_params(memory, params, event["reads"])), None

    # As data: another order of arrivals compiles nothing anew.
    inputs = {name: events[name] for name in ("worker", "applied", "weight", "commit")}
    # row 0 has the reads before the first arrival
    inputs["reads"] = events["reads"][1:]
    carry, _ = lax.scan(apply_arrival, (params, opt, memory), inputs)
    return carry


def read_params(memory: Memory, params: Tree, readers: jax.Array) -> Memory:
    """Return a memory in which these workers hold the servers' parameters. They read one at a time:
    there are rarely several.
    """
    by_path = flatten(params)
    # False sorts before True, so readers come first.
    order = jnp.argsort(~readers)

    def read_next(number: Any, held: Leaves) -> Leaves:
        after = {}
        for path, x in held.items():
            after[path] = lax.dynamic_update_index_in_dim(x, by_path[path], order[number], 1)
        return after

    count = readers.sum()
    held = lax.fori_loop(0, count, read_next, {path: entry[HELD] for path, entry in memory.items()})
    return {path: entry | {HELD: held[path]} for path, entry in memory.items()}


def _compensate_delay(
    declared: ParameterServer,
    grads: Leaves,
    params: Leaves,
    read: Leaves,
    memory: Memory,
    applied: Any,
) -> tuple[Leaves, Memory]:
    """g + lambda g g (w - w_read), by path: to first order the gradient at today's parameters
    (Zheng et al., eq. 10).

    Adaptive, lambda is divided by the root of the servers' moving mean of g g, this one included
    (their DC-ASGD-a).
    """
    compensated = {}
    after = dict(memory)
    for path, g in grads.items():
        strength = jnp.asarray(declared.delay_compensation, g.dtype)
        if declared.delay_decay is not None:
            old = memory[path][SQUARES]
            decay = declared.delay_decay
            squares = decay * old + (1 - decay) * jnp.square(g.astype(jnp.float32))
            # Where a gradient was always zero, only 1e-7 keeps lambda finite.
            strength = (strength / jnp.sqrt(squares + 1e-7)).astype(g.dtype)
            after[path] = memory[path] | {SQUARES: jnp.where(applied, squares, old)}
        compensated[path] = g + strength * g * g * (params[path] - read[path])
    return compensated, after


def _single_gradient(memory: Memory, grads: Leaves, event: Tree) -> tuple[Leaves, Any, Any, Memory]:
    """`_accumulate` where every gradient is an update, and no sum is kept; the same products, and
    so the same bits.
    """
    del memory
    weight = event["weight"]
    mean = {}
    for path, g in grads.items():
        mean[path] = (1 / weight * (weight * g.astype(jnp.float32))).astype(g.dtype)
    return mean, weight, event["applied"] & event["commit"], {}


def _accumulate(memory: Memory, grads: Leaves, event: Tree) -> tuple[Leaves, Any, Any, Memory]:
    """The weighted mean of the accumulated gradients, the rate for their mean weight, whether it is
    due, and what is left.
    """
    applied = event["applied"]
    added = {}
    for path, g in grads.items():
        added[path] = memory[path][SUM] + event["weight"] * g.astype(jnp.float32)
    total = {path: jnp.where(applied, x, memory[path][SUM]) for path, x in added.items()}
    this = jnp.where(applied, jnp.stack([event["weight"], jnp.float32(1)]), 0.0)
    # each parameter keeps the same pair
    weight_and_count = next(iter(memory.values()))[GATHERED] + this
    weight, count = weight_and_count
    due = event["commit"] & (count > 0)  # where the data ends there may be nothing
    norm = 1 / jnp.where(weight == 0, 1.0, weight)
    rate = weight / jnp.maximum(count, 1)

    def left(x: jax.Array) -> jax.Array:
        return jnp.where(due, jnp.zeros_like(x), x)

    mean = {path: (norm * total[path]).astype(g.dtype) for path, g in grads.items()}
    after = {path: {SUM: left(x), GATHERED: left(weight_and_count)} for path, x in total.items()}
    return mean, rate, due, after
