"""One step's exchange of gradients: which codec for which, which of them travel together, and what is remembered.

`GradientSync.push` is the whole of it: group, add the residuals, let the codecs meet, keep what they lost.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.layout.resolve import Resolved, pspec
from spmd.layout.schema import Spec, keep_axes, spec_axes
from spmd.tree import Tree, flatten, map_paths
from spmd.wire import collectives
from spmd.wire.codec.base import Bucket
from spmd.wire.codec.bfloat16 import self_test
from spmd.wire.codec.exact import reduce as exactly
from spmd.wire.comm_log import WARM_UP
from spmd.wire.gradient_plan import ALONE, GradientSpec, buckets, plan_gradients, ways_of
from spmd.wire.param_server.placement import assign
from spmd.wire.strategies import REDUCTIONS, MeshAxes, Reduction, constrain
from spmd.xla import shard_map

RESIDUAL = "residual"  # what a worker's codec has lost so far: float32[workers, *parameter], over workers on dim 0
HELD = "held"  # the weights that each worker has read: [positions, workers, row], over the servers' positions on dim 0
SUM = "sum"  # of the weighted gradients that the next update waits for: [positions, row], likewise
GATHERED = "gathered"  # the sum of their weights, and how many they are: [2]
SQUARES = "squares"  # the servers' moving mean of gradients squared: [positions, row], over positions
OWN = "own"  # each worker's own weights: [workers, positions, row], over workers
READ = "read"  # the weights that workers took from the servers last: [positions, row], equal everywhere
OUTER = "outer"  # the outer optimizer's momentum: float32[positions, row], over positions
CODEC = "codec"  # what the codec itself remembers: [blocks along the other axes, ...], equal on all workers


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """A layout's `[gradients]`, applied to a model on a mesh."""

    resolved: Resolved
    mesh_axes: MeshAxes

    @functools.cached_property
    def reduction(self) -> Reduction:
        """With a single worker there is nothing to meet, and the auto step is the faster one."""
        several = self.resolved.workers > 1 or self.local
        return REDUCTIONS[self.resolved.layout.gradients.reduction if several else "compiler"]

    @functools.cached_property
    def items(self) -> dict[str, GradientSpec]:
        """Every parameter's gradient, by path."""
        return plan_gradients(self.resolved, self.mesh_axes, self.reduction)

    @functools.cached_property
    def fragments(self) -> list[list[str]]:
        """Paths that meet at one time: all, or as many parts of equal size as can be where workers train by themselves."""
        sizes = {path: place.nbytes for path, place in self.resolved.placements.items()}
        owner = assign("largest_first", sizes, self.resolved.layout.parameter_server.fragments).owner
        return [[path for path in sizes if owner[path] == part] for part in range(max(owner.values(), default=-1) + 1)]

    @functools.cached_property
    def buckets(self) -> list[list[str]]:
        """Paths of the gradients that travel together."""
        limit = self.resolved.layout.gradients.bucket_bytes
        limit = min(limit, ALONE) if self.asynchronous else limit  # weights travel in the same company, and exactly
        return [found for paths in self.fragments for found in buckets({path: self.items[path] for path in paths}, limit)]

    # what is remembered between steps --------------------------------------------------------------------------------

    @property
    def worker_count(self) -> int:
        """How many workers there are: one at each position along the data axes, or as many as a parameter server simulates."""
        declared = self.resolved.layout
        return (declared.gradients.reduction == "parameter_server" and declared.parameter_server.workers) or self.resolved.workers

    @property
    def asynchronous(self) -> bool:
        """Whether gradients are applied each by itself, in order of arrival."""
        declared = self.resolved.layout
        return declared.gradients.reduction == "parameter_server" and declared.parameter_server.asynchronous

    @property
    def local(self) -> bool:
        """Whether workers have weights and an optimizer of their own, and meet at a parameter server now and then."""
        declared = self.resolved.layout
        return declared.gradients.reduction == "parameter_server" and declared.parameter_server.local

    def init(self, key: jax.Array, params: Tree) -> dict[str, dict[str, Any]]:
        """The memory at step 0, by path: zero residuals, each codec's own state, and what an asynchronous server knows; under a trace."""
        if self.asynchronous:
            return {path: self._served(path, leaf) for path, leaf in flatten(params).items()}
        memory: dict[str, dict[str, Any]] = {}
        for number, (path, item) in enumerate(self.items.items() if self.reduction.manual else ()):
            entry: dict[str, Any] = {}
            if item.feedback:
                entry[RESIDUAL] = jnp.zeros((self.resolved.workers, *item.place.shape), jnp.float32)
            blocks = ways_of(self.mesh_axes, spec_axes(item.rest)) if item.nested else 1
            keys = jax.random.split(jax.random.fold_in(key, number), blocks)
            own = jax.vmap(lambda k, item=item: item.codec.init(k, item.cut.shape, item.place.shape))(keys)
            entry |= {CODEC: own} if own else {}
            memory |= {path: entry} if entry else {}
        if self.local:
            return {path: memory.get(path, {}) | self._alone(leaf) for path, leaf in flatten(params).items()}
        return memory

    def _alone(self, leaf: jax.Array) -> dict[str, jax.Array]:
        """Every worker begins with the servers' weights."""
        declared = self.resolved.layout.parameter_server
        entry = {OWN: jnp.broadcast_to(leaf, (self.worker_count, *leaf.shape))}
        entry |= {READ: leaf} if declared.mode == "local" else {}
        return entry | ({OUTER: jnp.zeros(leaf.shape, jnp.float32)} if declared.mode == "local" and declared.outer_momentum else {})

    def _served(self, path: str, leaf: jax.Array) -> dict[str, jax.Array]:
        """Everybody has read the first weights."""
        positions, width = leaf.shape
        declared, zeros = self.resolved.layout.parameter_server, jnp.zeros(leaf.shape, jnp.float32)
        entry = {HELD: jnp.broadcast_to(leaf[:, None], (positions, self.worker_count, width))}
        entry |= {SUM: zeros, GATHERED: jnp.zeros(2, jnp.float32)} if declared.per_update(self.worker_count) > 1 else {}
        entry |= {SQUARES: zeros} if declared.delay_decay is not None else {}
        return entry | ({RESIDUAL: jnp.zeros((self.worker_count, positions, width), jnp.float32)} if self.items[path].feedback else {})

    def specs(self, memory: Tree) -> Tree:
        """The spec of every leaf of the memory."""
        return {
            path: {kind: jax.tree.map(lambda _, k=kind, p=path: self._spec(p, k), part) for kind, part in entry.items()}
            for path, entry in memory.items()
        }

    def _spec(self, path: str, kind: str) -> Spec:
        item = self.items[path]
        if kind in (GATHERED, READ):
            return ()
        if kind in (HELD, SUM, SQUARES, OWN, OUTER):
            return (self.mesh_axes.data_axes,)
        if kind == RESIDUAL:
            return (self.mesh_axes.data_axes, *(item.rest if item.nested else ()))
        axes = spec_axes(item.rest) if item.nested else ()
        return (axes or None,)

    # the exchange ----------------------------------------------------------------------------------------------------

    def reduce_gradients(self, grads: Tree, memory: Tree, step: Any) -> tuple[Tree, Tree, Any]:
        """From each worker's own gradients to this worker's pieces of their mean, the next memory, and what was measured.

        Args:
          grads: per worker, whole over the workers, not yet averaged: the gradient of the mean loss over its rows.
          memory: this worker's: residuals [1, ...].

        Returns:
          The measurements are float32[2, measures], values and counts (1), equal on all workers.
        """
        if not self.reduction.manual:
            pushed = map_paths(lambda path, grad: constrain(self.mesh_axes, self.resolved.placements[path].state_spec, grad), grads)
            return pushed, memory, jnp.zeros((2, 0))
        flat, structure = flatten(grads), jax.tree.structure(grads)
        means, after, measured = {}, {}, jnp.zeros(3)
        for nested in (False, True):
            inside = {path: grad for path, grad in flat.items() if self.items[path].nested == nested}
            if inside:
                inside = {path: grad.astype(self.items[path].dtype) for path, grad in inside.items()}
                kept = {path: entry for path, entry in memory.items() if path in inside}
                run = self._over_rest(inside, kept) if nested else self._sync_buckets
                more_means, more_after, more = run(inside, kept, step)
                means |= more_means
                after |= more_after
                measured += more.reshape(-1, 3).sum(0)
        pushed = jax.tree.unflatten(structure, [means[path].astype(grad.dtype) for path, grad in flat.items()])
        if self.reduction.name == "parameter_server":  # its bits are those of an all-reduce: nothing is to be fused over the exchange
            pushed = lax.optimization_barrier(pushed)
        return pushed, {path: after[path] for path in memory}, self._summed(measured)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of what is measured in every step: the norm of a worker's residuals (root mean square over workers), and
        |mean - exact mean| / |exact mean| of what the codecs were given (gradients plus residuals)."""
        return ("residual_norm", "mean_error") if self.reduction.manual and self.resolved.layout.gradients.diagnostics else ()

    def _summed(self, measured: jax.Array) -> jax.Array:
        """Per worker: the measurements by name as (value, 1), float32[2, names], from every worker's share."""
        if not self.metric_names:
            return jnp.zeros((2, 0))
        with jax.named_scope("measure"):
            residual, error, exact = collectives.all_reduce(measured, self.mesh_axes.data_axes)
        values = jnp.stack([jnp.sqrt(residual), jnp.sqrt(error / jnp.where(exact == 0, 1.0, exact))])
        return jnp.stack([values, jnp.ones_like(values)])

    def _over_rest(self, grads: dict[str, Any], memory: dict[str, Any]) -> Callable[..., Any]:
        """`_meet` on each device's own piece along the remaining axes, so that only that piece travels.

        Left to the partitioner, a collective on an array cut over the model axis gathers it there first.
        """
        rest = self.mesh_axes.rest
        of_grads = {path: pspec(self.items[path].rest) for path in grads}
        of_memory = jax.tree.map(lambda spec: pspec(keep_axes(spec, rest)), self.specs(memory), is_leaf=lambda x: isinstance(x, tuple))
        specs = (of_grads, of_memory)
        return shard_map(self._sync_buckets, in_specs=(*specs, PartitionSpec()), out_specs=(*specs, PartitionSpec(rest)), axis_names=rest)

    def _sync_buckets(self, grads: dict[str, Any], memory: dict[str, Any], step: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """All buckets; exactly before `start_step`."""
        start = self.resolved.layout.gradients.start_step
        if not start:
            return self._compressed(grads, memory)
        with jax.named_scope(WARM_UP):
            return lax.cond(step < start, self._exactly, self._compressed, grads, memory)

    def _exactly(self, grads: dict[str, Any], memory: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
        with jax.named_scope("push/exact"):
            return {path: exactly(self.items[path].cut, grad) for path, grad in grads.items()}, memory, jnp.zeros(3)

    def _compressed(self, grads: dict[str, Any], memory: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
        means, after, measured, declared = {}, dict(memory), jnp.zeros(3), self.resolved.layout.gradients
        for number, paths in enumerate(self.buckets):
            if paths[0] not in grads:
                continue
            items = [self.items[path] for path in paths]
            with jax.named_scope(f"push/{items[0].name}/{number}"):
                bucket = Bucket(tuple(item.cut for item in items), declared.exact_axes)
                for path, mean, entry in zip(
                    paths,
                    *exchange_with_error_feedback(items, [grads[p] for p in paths], [memory.get(p, {}) for p in paths], bucket),
                    strict=True,
                ):
                    means[path] = mean.astype(grads[path].dtype)
                    after |= {path: entry} if entry else {}
            if declared.diagnostics:
                with jax.named_scope("measure"):
                    measured += sum(
                        self._measured(items[n], grads[p], memory.get(p, {}), after.get(p, {}), means[p]) for n, p in enumerate(paths)
                    )
        return means, after, measured

    def _measured(self, item: GradientSpec, grad: Any, memory: dict[str, Any], after: dict[str, Any], mean: Any) -> jax.Array:
        """float32[3] of one gradient, divided by how many devices add the same to the sum."""
        residual = after[RESIDUAL][0] if item.feedback else jnp.zeros(())
        whole = grad.astype(jnp.float32)
        exact = exactly(item.cut, whole + memory[RESIDUAL][0] if item.feedback else whole)
        squares = jnp.stack([jnp.sum(x.astype(jnp.float32) ** 2) for x in (residual, mean - exact, exact)])
        same = ways_of(self.mesh_axes, item.cut.left)
        alike = (
            ways_of(self.mesh_axes, tuple(axis for axis in self.mesh_axes.rest if axis not in spec_axes(item.rest))) if item.nested else 1
        )
        return squares / jnp.array([item.cut.workers, same, same], jnp.float32) / alike

    def check_rounding(self) -> None:
        """Prove on the backend in hand that bfloat16 is rounded to, once per process, if anything travels so."""
        declared = self.resolved.layout.gradients
        if self.reduction.manual and ("bfloat16" in declared.codecs or declared.weights == "bfloat16"):
            self_test()


def exchange_with_error_feedback(
    items: list[GradientSpec], grads: list[Any], memory: list[dict[str, Any]], bucket: Bucket
) -> tuple[list[Any], list[Any]]:
    """A codec with error feedback: what it lost is added to the next gradient (Karimireddy et al. 2019, arXiv:1901.09847).

    Summed over steps, what was applied plus the mean of the workers' residuals is the sum of the true mean gradients. The
    residual is of the gradient, not of the update: a changing learning rate does not rescale it. (The mean for a parameter that is
    itself bfloat16 is rounded to it at the very end, and nobody keeps that.)
    """
    residuals = [
        entry[RESIDUAL][0].reshape(grad.shape) if item.feedback else None for item, grad, entry in zip(items, grads, memory, strict=True)
    ]
    whole = [grad if rest is None else grad.astype(jnp.float32) + rest for grad, rest in zip(grads, residuals, strict=True)]
    states = [{name: leaf[0] for name, leaf in entry.get(CODEC, {}).items()} for entry in memory]
    means, kept, states = items[0].codec.mean(whole, states, bucket)
    after = []
    for item, full, part, state, residual in zip(items, whole, kept, states, residuals, strict=True):
        entry: dict[str, Any] = {RESIDUAL: finite(full - part, residual)[None]} if item.feedback else {}
        after.append(entry | ({CODEC: {name: leaf[None] for name, leaf in state.items()}} if state else {}))
    return means, after


def finite(new: Any, old: Any) -> jax.Array:
    """`new`, and `old` where that is not finite: a step that the optimizer skips must not spoil all that come after."""
    return jnp.where(jnp.isfinite(new), new, old)
