"""Gradient synchronization: reduce the gradients of one step, with codecs and error feedback.

`spmd.wire.reduction` does the work. Here is what a layout adds: which gradients are sharded how,
and parameter servers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.specs import Spec, keep_axes, pspec, spec_axes
from spmd.base.tree import Tree, flatten, map_paths
from spmd.base.xla import shard_map
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import Resolved
from spmd.sync.gradient_plan import GradientSpec, devices_along, plan_gradients
from spmd.sync.mesh_axes import MeshAxes, constrain
from spmd.sync.registered_reduction import RegisteredReduction
from spmd.wire import collectives
from spmd.wire.assignment import assign
from spmd.wire.codec.bfloat16 import self_test
from spmd.wire.codec.exact import exact_mean
from spmd.wire.reduction import CODEC, MAX_EXACT_BUCKET, RESIDUAL, Memory, make_buckets, reduce_mean
from spmd.wire.reduction_registry import REDUCTIONS, Reduction
from spmd.wire.server.arrivals import GATHERED, HELD, SQUARES, SUM, init_memory

# keys of the communication state, as stored in checkpoints; with those of `spmd.wire.reduction` and
# `spmd.wire.server.arrivals`
OWN = "own"  # each worker's local parameters: [workers, positions, row], sharded over workers
# the parameters that workers last read from the servers: [positions, row], replicated
READ = "read"
OUTER = "outer"  # the outer optimizer's momentum: float32[positions, row], sharded over positions
# in no checkpoint: the sum of a gradient over microbatches, which the last of them reduces
TOTAL = "total"


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """A layout's `[gradients]`, applied to a model on a mesh.

    `layerwise`: paths of the parameters that are gathered one layer at a time; their gradients are
    reduced there (`layer_gather.py`), in the backward pass of every microbatch, or, if
    `sums_layers`, in that of the last one, with those of the others. `blocks`: paths of equal
    modules outside of stacks whose parameters are among them, in the order of their calls.
    """

    resolved: Resolved
    mesh_axes: MeshAxes
    layerwise: frozenset[str] = frozenset()
    blocks: tuple[tuple[str, ...], ...] = ()
    sums_layers: bool = False

    @functools.cached_property
    def reduction(self) -> Reduction:
        """A single worker has nothing to reduce, and the auto step is faster."""
        manual = self.resolved.workers > 1 or self.local
        return REDUCTIONS[self.resolved.layout.gradients.reduction if manual else "compiler"]

    @functools.cached_property
    def registered(self) -> RegisteredReduction | None:
        """The user's reduction, if the layout names one."""
        return (
            RegisteredReduction(self.reduction, self.resolved, self.mesh_axes)
            if self.reduction.make
            else None
        )

    @functools.cached_property
    def gradient_specs(self) -> dict[str, GradientSpec]:
        """The spec of every parameter's gradient, by path."""
        return plan_gradients(self.resolved, self.mesh_axes, self.reduction)

    @functools.cached_property
    def _frozen_specs(self) -> dict[str, GradientSpec]:
        """How frozen arrays are sharded."""
        layout = dataclasses.replace(
            self.resolved.layout, gradients=Gradients(self.resolved.layout.gradients.reduction)
        )
        return plan_gradients(
            Resolved(layout, self.resolved.mesh, self.resolved.frozen),
            self.mesh_axes,
            self.reduction,
        )

    def spec(self, path: str) -> GradientSpec:
        """How a parameter's gradient is sharded; of a frozen array, how it would be."""
        return (
            self.gradient_specs[path] if path in self.gradient_specs else self._frozen_specs[path]
        )

    @functools.cached_property
    def fragments(self) -> list[list[str]]:
        """Paths that are synchronized in the same step: all of them, or the fragments of local SGD,
        of nearly equal size.
        """
        sizes = {path: placement.nbytes for path, placement in self.resolved.placements.items()}
        owner = assign(
            "largest_first", sizes, self.resolved.layout.parameter_server.fragments
        ).owner
        return [
            [path for path in sizes if owner[path] == part]
            for part in range(max(owner.values(), default=-1) + 1)
        ]

    @functools.cached_property
    def buckets(self) -> list[list[str]]:
        """Paths of the gradients that are communicated together."""
        limit = self.resolved.layout.gradients.bucket_bytes
        if self.asynchronous:  # parameters are sent in the same buckets, and exactly
            limit = min(limit, MAX_EXACT_BUCKET)
        specs = self.gradient_specs
        return [
            bucket
            for paths in self.fragments
            for bucket in make_buckets({path: specs[path] for path in paths}, limit)
        ]

    def is_sharded(self, path: str) -> bool:
        """Whether a parameter is sharded over workers."""
        return any(keep_axes(self.resolved.placement(path).spec, self.mesh_axes.data_axes))

    def of_quantized(self, path: str) -> bool:
        """Whether a frozen array is one of codes, or of their scales."""
        owner = path.rpartition("/")[0]
        return {f"{owner}/codes", f"{owner}/scales"} <= self.resolved.frozen.keys()

    # state between steps --------------------------------------------------------------------------

    @property
    def worker_count(self) -> int:
        """Number of workers: one at each position along the data axes, or as many as a parameter
        server simulates.
        """
        declared = self.resolved.layout
        return (
            declared.gradients.reduction == "parameter_server" and declared.parameter_server.workers
        ) or self.resolved.workers

    @property
    def rounds_params(self) -> bool:
        """Whether float32 parameters are sent as bfloat16."""
        return self.resolved.layout.gradients.weights == "bfloat16"

    @property
    def asynchronous(self) -> bool:
        """Whether gradients are applied one by one, in order of arrival."""
        declared = self.resolved.layout
        return (
            declared.gradients.reduction == "parameter_server"
            and declared.parameter_server.asynchronous
        )

    @property
    def local(self) -> bool:
        """Whether each worker has its own parameters and optimizer, and synchronizes with the
        servers every few steps.
        """
        declared = self.resolved.layout
        return (
            declared.gradients.reduction == "parameter_server" and declared.parameter_server.local
        )

    def init(self, key: jax.Array, params: Tree) -> dict[str, dict[str, Any]]:
        """The state at step 0, by path: zero residuals, each codec's own state, and that of the
        servers. Works under a trace.
        """
        if self.asynchronous:
            return {path: self._init_async(path, leaf) for path, leaf in flatten(params).items()}
        if self.registered:
            return self.registered.init(params)
        comm_state: dict[str, dict[str, Any]] = {}
        for number, (path, spec) in enumerate(
            self.gradient_specs.items() if self.reduction.manual else ()
        ):
            entry: dict[str, Any] = {}
            if spec.error_feedback:
                entry[RESIDUAL] = jnp.zeros(
                    (self.resolved.workers, *spec.placement.shape), jnp.float32
                )
            blocks = devices_along(self.mesh_axes, spec_axes(spec.model_spec)) if spec.nested else 1
            keys = jax.random.split(jax.random.fold_in(key, number), blocks)
            init_codec = functools.partial(
                spec.codec.init, shape=spec.shard_layout.shape, full_shape=spec.placement.shape
            )
            codec_state = jax.vmap(init_codec)(keys)
            entry |= {CODEC: codec_state} if codec_state else {}
            comm_state |= {path: entry} if entry else {}
        if self.local:
            return {
                path: comm_state.get(path, {}) | self._init_local(leaf)
                for path, leaf in flatten(params).items()
            }
        return comm_state

    def layer_carries(self, comm_state: Memory, *, sums: bool) -> Memory:
        """Of `layerwise`, with which this worker's first microbatch begins: residuals, and, with
        `sums`, totals of zero; full shapes.
        """
        carries: Memory = {}
        for path in sorted(self.layerwise & self.resolved.placements.keys()):
            placement, residual = (
                self.resolved.placements[path],
                comm_state.get(path, {}).get(RESIDUAL),
            )
            carry = {TOTAL: jnp.zeros(placement.shape, placement.dtype)} if sums else {}
            carry |= {RESIDUAL: residual[0]} if residual is not None else {}
            carries |= {path: carry} if carry else {}
        return carries

    def with_layer_residuals(self, comm_state: Memory, carries: Memory) -> Memory:
        """`comm_state` with the residuals of these."""
        residuals = {
            path: carry[RESIDUAL][None] for path, carry in carries.items() if RESIDUAL in carry
        }
        return comm_state | {
            path: comm_state[path] | {RESIDUAL: residual} for path, residual in residuals.items()
        }

    def _init_local(self, leaf: jax.Array) -> dict[str, jax.Array]:
        """Every worker starts with the servers' parameters."""
        declared = self.resolved.layout.parameter_server
        entry = {OWN: jnp.broadcast_to(leaf, (self.worker_count, *leaf.shape))}
        entry |= {READ: leaf} if declared.mode == "local" else {}
        return entry | (
            {OUTER: jnp.zeros(leaf.shape, jnp.float32)}
            if declared.mode == "local" and declared.outer_momentum
            else {}
        )

    def _init_async(self, path: str, leaf: jax.Array) -> dict[str, jax.Array]:
        """Every worker has read the initial parameters."""
        entry = init_memory(self.resolved.layout.parameter_server, leaf, self.worker_count)
        if self.gradient_specs[path].error_feedback:
            entry[RESIDUAL] = jnp.zeros((self.worker_count, *leaf.shape), jnp.float32)
        return entry

    def specs(self, comm_state: Tree) -> Tree:
        """The spec of every leaf of the state."""
        if self.registered:
            return self.registered.specs
        return {
            path: {
                kind: jax.tree.map(lambda _, k=kind, p=path: self._spec(p, k), part)
                for kind, part in entry.items()
            }
            for path, entry in comm_state.items()
        }

    def _spec(self, path: str, kind: str) -> Spec:
        spec = self.gradient_specs[path]
        if kind in (GATHERED, READ):
            return ()
        if kind in (HELD, SUM, SQUARES, OWN, OUTER):
            return (self.mesh_axes.data_axes,)
        if kind == RESIDUAL:
            return (self.mesh_axes.data_axes, *(spec.model_spec if spec.nested else ()))
        axes = spec_axes(spec.model_spec) if spec.nested else ()
        return (axes or None,)

    def map_params(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        """`function(placement, leaf, ...)` over trees of parameters, trained or frozen."""
        return map_paths(
            lambda path, *leaves: function(self.resolved.placement(path), *leaves), *trees
        )

    def data_spec(self, spec: Spec) -> PartitionSpec:
        """The part of a spec that `jax.shard_map` over the data axes may name."""
        return pspec(keep_axes(spec, self.mesh_axes.data_axes))

    def data_specs(self, comm_state: Tree) -> Tree:
        """`data_spec` of every leaf of the state."""
        return jax.tree.map(
            self.data_spec, self.specs(comm_state), is_leaf=lambda x: isinstance(x, tuple)
        )

    # communication --------------------------------------------------------------------------------

    def reduce_gradients(self, grads: Tree, comm_state: Tree, step: Any) -> tuple[Tree, Tree, Any]:
        """This worker's shards of the mean gradients, the next state, and the step's measurements.

        Args:
          grads: per worker, not sharded over workers, not yet averaged: the gradient of the mean
            loss over its rows. Those of `layerwise` are reduced already.
          comm_state: this worker's: residuals [1, ...].

        Returns:
          The measurements are float32[2, names], values and counts (1), equal on all workers.
        """
        if not self.reduction.manual:
            placements = self.resolved.placements
            means = map_paths(
                lambda path, grad: constrain(self.mesh_axes, placements[path].state_spec, grad),
                grads,
            )
            return means, comm_state, jnp.zeros((2, 0))
        flat, structure = flatten(grads), jax.tree.structure(grads)
        if self.registered:
            flat, next_state = self.registered.reduce(flat, comm_state)
            return jax.tree.unflatten(structure, list(flat.values())), next_state, jnp.zeros((2, 0))
        means = {path: grad for path, grad in flat.items() if path in self.layerwise}
        next_state, measured = (
            {path: entry for path, entry in comm_state.items() if path in self.layerwise},
            jnp.zeros(3),
        )
        for nested in (False, True):
            chosen = [
                path
                for path in flat
                if self.gradient_specs[path].nested == nested and path not in self.layerwise
            ]
            part = {path: flat[path].astype(self.gradient_specs[path].dtype) for path in chosen}
            if part:
                part_state = {path: entry for path, entry in comm_state.items() if path in part}
                sync = self._sync_nested(part, part_state) if nested else self._sync
                part_means, part_next_state, part_measured = sync(part, part_state, step)
                means |= part_means
                next_state |= part_next_state
                measured += part_measured.reshape(-1, 3).sum(0)
        reduced = jax.tree.unflatten(
            structure, [means[path].astype(grad.dtype) for path, grad in flat.items()]
        )
        # without fusion across it, the bits are those of an all-reduce
        if self.reduction.name == "parameter_server":
            reduced = lax.optimization_barrier(reduced)
        return reduced, {path: next_state[path] for path in comm_state}, self._summed(measured)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the measurements of every step: the norm of a worker's residuals (root mean
        square over workers), and
        |mean - exact mean| / |exact mean| of the codecs' inputs (gradients plus residuals).
        """
        return (
            ("residual_norm", "mean_error")
            if self.reduction.manual and self.resolved.layout.gradients.diagnostics
            else ()
        )

    @property
    def _measured_axes(self) -> tuple[str, ...]:
        """Model axes whose devices add up what they measure: along others all have the same."""
        idle = self.resolved.idle_axes()
        return tuple(axis for axis in self.mesh_axes.model_axes if axis not in idle)

    def _summed(self, measured: jax.Array) -> jax.Array:
        """Per worker: the measurements by name as (value, 1), float32[2, names], from every
        worker's part.
        """
        if not self.metric_names:
            return jnp.zeros((2, 0))
        with jax.named_scope("measure"):
            residual, error, exact = collectives.all_reduce(measured, self.mesh_axes.data_axes)
        values = jnp.stack(
            [jnp.sqrt(residual), jnp.sqrt(error / jnp.where(exact == 0, 1.0, exact))]
        )
        return jnp.stack([values, jnp.ones_like(values)])

    def _sync_nested(self, grads: dict[str, Any], comm_state: Memory) -> Callable[..., Any]:
        """`_sync` on each device's local shard along the model axes, so that only that shard is
        sent.

        Left to the partitioner, a collective on an array that is sharded over a model axis gathers
        it there first.
        """
        axes = self.mesh_axes.model_axes
        grad_specs = {path: pspec(self.gradient_specs[path].model_spec) for path in grads}
        state_specs = jax.tree.map(
            lambda spec: pspec(keep_axes(spec, axes)),
            self.specs(comm_state),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        specs = (grad_specs, state_specs)
        outputs = (*specs, PartitionSpec(self._measured_axes))
        return shard_map(
            self._sync, in_specs=(*specs, PartitionSpec()), out_specs=outputs, axis_names=axes
        )

    def _sync(
        self, grads: dict[str, Any], comm_state: Memory, step: Any
    ) -> tuple[dict[str, Any], Memory, jax.Array]:
        """The mean gradients, the next state, and what is measured if the layout asks for it."""
        declared = self.resolved.layout.gradients
        specs = {path: self.gradient_specs[path] for path in grads}
        means, next_state = reduce_mean(
            specs,
            grads,
            comm_state,
            step,
            bucket_bytes=declared.bucket_bytes,
            inside=declared.exact_axes,
            start_step=declared.start_step,
        )
        measured = jnp.zeros(3)
        with jax.named_scope("measure"):
            for path, spec in specs.items() if declared.diagnostics else ():
                before, after = comm_state.get(path, {}), next_state.get(path, {})
                measured += self._measured(spec, grads[path], before, after, means[path])
        return means, next_state, measured

    def _measured(
        self,
        spec: GradientSpec,
        grad: Any,
        before: dict[str, Any],
        after: dict[str, Any],
        mean: Any,
    ) -> jax.Array:
        """float32[3] of one gradient, divided by the number of devices that add the same value to
        the sum.
        """
        residual = after[RESIDUAL][0] if spec.error_feedback else jnp.zeros(())
        codec_input = grad.astype(jnp.float32)
        exact = exact_mean(
            spec.shard_layout,
            codec_input + before[RESIDUAL][0] if spec.error_feedback else codec_input,
        )
        squares = jnp.stack(
            [jnp.sum(x.astype(jnp.float32) ** 2) for x in (residual, mean - exact, exact)]
        )
        copies = devices_along(self.mesh_axes, spec.shard_layout.replicated_axes)
        other_axes = tuple(
            axis for axis in self._measured_axes if axis not in spec_axes(spec.model_spec)
        )
        model_copies = devices_along(self.mesh_axes, other_axes) if spec.nested else 1
        return (
            squares
            / jnp.array([spec.shard_layout.workers, copies, copies], jnp.float32)
            / model_copies
        )

    def check_rounding(self) -> None:
        """If anything is sent as bfloat16, check once per process that this backend rounds to
        it.
        """
        declared = self.resolved.layout.gradients
        if self.reduction.manual and (
            "bfloat16" in declared.codecs or declared.weights == "bfloat16"
        ):
            self_test()
