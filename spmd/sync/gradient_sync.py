"""Gradient synchronization: reduce the gradients of one step, with codecs and error feedback.

`spmd.wire` does the work. Here is what a layout adds: gradients that are reduced elsewhere, one
layer at a time, and parameter servers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.specs import Spec, keep_axes, pspec
from spmd.base.tree import Tree, flatten, map_paths
from spmd.layout.gradients import Gradients
from spmd.layout.resolve import Resolved
from spmd.sync.build_communication import RegisteredReduction, build_averaging
from spmd.sync.mesh_axes import MeshAxes, constrain
from spmd.wire.assignment import assign
from spmd.wire.codec.bfloat16 import self_test
from spmd.wire.reduction import Averaging
from spmd.wire.reduction_registry import REDUCTIONS, Reduction
from spmd.wire.server.arrivals import init_server_memory
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.local_training import LocalTraining, init_local_memory
from spmd.wire.transfer import (
    MAX_EXACT_BUCKET,
    RESIDUAL,
    Memory,
    Transfer,
    make_buckets,
)

# A key of what microbatches hand on, in no checkpoint: the sum of a gradient over microbatches,
# which the last of them reduces
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
        """Return the reduction of the layout; of a single worker, that of the compiler."""
        # A single worker has nothing to reduce, and the step without shard_map is faster.
        manual = self.resolved.workers > 1 or self.local
        if not manual:
            return REDUCTIONS["compiler"]
        return REDUCTIONS[self.resolved.layout.gradients.reduction]

    @functools.cached_property
    def averaging(self) -> Averaging:
        """Return how gradients are averaged, if no registered reduction does it."""
        return build_averaging(self.resolved, self.mesh_axes, self.reduction)

    @functools.cached_property
    def communication(self) -> Averaging | RegisteredReduction:
        """Return the value that reduces gradients."""
        if self.reduction.make is None:
            return self.averaging
        return RegisteredReduction(self.reduction, self.resolved, self.mesh_axes)

    @property
    def transfers(self) -> Mapping[str, Transfer]:
        """Return how every parameter's gradient is communicated, by path."""
        return self.averaging.transfers

    @functools.cached_property
    def _frozen_transfers(self) -> Mapping[str, Transfer]:
        """Return how gradients of frozen arrays would be communicated."""
        layout = self.resolved.layout
        # Without codecs: these transfers only say how shards lie, and nothing is reduced.
        gradients = Gradients(layout.gradients.reduction)
        layout = dataclasses.replace(layout, gradients=gradients)
        frozen = Resolved(layout, self.resolved.mesh, self.resolved.frozen)
        return build_averaging(frozen, self.mesh_axes, self.reduction).transfers

    def transfer(self, path: str) -> Transfer:
        """Return how a parameter's gradient is communicated; of a frozen array, how it would be."""
        if path in self.transfers:
            return self.transfers[path]
        return self._frozen_transfers[path]

    @functools.cached_property
    def fragments(self) -> list[list[str]]:
        """Return paths that are synchronized in the same step: all of them, or the fragments of
        local SGD, of nearly equal size.
        """
        sizes = {path: placement.nbytes for path, placement in self.resolved.placements.items()}
        count = self.resolved.layout.parameter_server.fragments
        owner = assign("largest_first", sizes, count).owner
        fragments: list[list[str]] = [[] for _ in range(max(owner.values(), default=-1) + 1)]
        for path in sizes:
            fragments[owner[path]].append(path)
        return fragments

    @property
    def _server(self) -> ParameterServer | None:
        """Return the layout's parameter server, if gradients are sent to one."""
        layout = self.resolved.layout
        if layout.gradients.reduction != "parameter_server":
            return None
        return layout.parameter_server

    @functools.cached_property
    def buckets(self) -> list[list[str]]:
        """Return paths of the gradients that are communicated together."""
        limit = self.resolved.layout.gradients.bucket_bytes
        if self.asynchronous:  # parameters are sent in the same buckets, and exactly
            limit = min(limit, MAX_EXACT_BUCKET)
        buckets = []
        for paths in self.fragments:
            buckets += make_buckets({path: self.transfers[path] for path in paths}, limit)
        return buckets

    def is_sharded(self, path: str) -> bool:
        """Return whether a parameter is sharded over workers."""
        return any(keep_axes(self.resolved.placement(path).spec, self.mesh_axes.data_axes))

    def of_quantized(self, path: str) -> bool:
        """Return whether a frozen array is one of codes, or of their scales."""
        owner = path.rpartition("/")[0]
        return {f"{owner}/codes", f"{owner}/scales"} <= self.resolved.frozen.keys()

    # state between steps --------------------------------------------------------------------------

    @property
    def worker_count(self) -> int:
        """Return the number of workers: one at each position along the data axes, or as many as a
        parameter server simulates.
        """
        server = self._server
        if server is not None and server.workers:
            return server.workers
        return self.resolved.workers

    @property
    def rounds_params(self) -> bool:
        """Return whether float32 parameters are sent as bfloat16."""
        return self.resolved.layout.gradients.weights == "bfloat16"

    @property
    def asynchronous(self) -> bool:
        """Return whether gradients are applied one by one, in order of arrival."""
        server = self._server
        return server is not None and server.asynchronous

    @property
    def local(self) -> bool:
        """Return whether each worker has its own parameters and optimizer, and synchronizes with
        the servers every few steps.
        """
        server = self._server
        return server is not None and server.local

    def init(self, key: jax.Array, params: Tree) -> dict[str, dict[str, Any]]:
        """Return the state at step 0, by path: zero residuals, each codec's own state, and that of
        the servers. Works under a trace.
        """
        if not self.reduction.manual and not self.asynchronous and not self.local:
            return {}
        by_path = flatten(params)
        workers = self.resolved.workers
        if self.asynchronous:
            workers = self.worker_count
        entries = {path: self._init_server_entry(leaf) for path, leaf in by_path.items()}
        memory = self.communication.init_memory(key, by_path, workers)
        for path, entry in entries.items():
            if entry:
                memory[path] = memory.get(path, {}) | entry
        return memory

    def _init_server_entry(self, rows: jax.Array) -> dict[str, jax.Array]:
        """Return the arrays that a server, or a worker that trains alone, keeps of a parameter."""
        server = self.resolved.layout.parameter_server
        if self.asynchronous:
            return init_server_memory(server, rows, self.worker_count)
        if self.local:
            return init_local_memory(server, rows, self.worker_count)
        return {}

    def layer_carries(self, comm_state: Memory, *, sums: bool) -> Memory:
        """Return what this worker's first microbatch begins with, of the parameters of `layerwise`:
        residuals, and, with `sums`, totals of zero; full shapes.
        """
        carries: Memory = {}
        placements = self.resolved.placements
        for path in sorted(self.layerwise & placements.keys()):
            carry = {}
            if sums:
                carry[TOTAL] = jnp.zeros(placements[path].shape, placements[path].dtype)
            if RESIDUAL in comm_state.get(path, {}):
                carry[RESIDUAL] = comm_state[path][RESIDUAL][0]
            if carry:
                carries[path] = carry
        return carries

    def with_layer_residuals(self, comm_state: Memory, carries: Memory) -> Memory:
        """Return `comm_state` with the residuals of `carries`."""
        after = dict(comm_state)
        for path, carry in carries.items():
            if RESIDUAL in carry:
                after[path] = comm_state[path] | {RESIDUAL: carry[RESIDUAL][None]}
        return after

    def specs(self, comm_state: Tree) -> Tree:
        """Return the spec of every leaf of the state."""
        return self.communication.memory_specs(comm_state)

    @property
    def local_training(self) -> LocalTraining:
        """Return the synchronization of workers that each train parameters of their own."""
        return LocalTraining(
            self.resolved.layout.parameter_server,
            self.averaging,
            self.buckets,
            self.worker_count,
            self.rounds_params,
        )

    def map_params(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        """Map `function(placement, leaf, ...)` over trees of parameters, trained or frozen."""
        return map_paths(
            lambda path, *leaves: function(self.resolved.placement(path), *leaves), *trees
        )

    def data_spec(self, spec: Spec) -> PartitionSpec:
        """Return the part of a spec that `jax.shard_map` over the data axes may name."""
        return pspec(keep_axes(spec, self.mesh_axes.data_axes))

    def data_specs(self, comm_state: Tree) -> Tree:
        """Return `data_spec` of every leaf of the state."""
        return jax.tree.map(
            self.data_spec, self.specs(comm_state), is_leaf=lambda x: isinstance(x, tuple)
        )

    # communication --------------------------------------------------------------------------------

    def reduce_gradients(self, grads: Tree, comm_state: Tree, step: Any) -> tuple[Tree, Tree, Any]:
        """Return this worker's shards of the mean gradients, the next state, and measurements.

        Args:
          grads: per worker, not sharded over workers, not yet averaged: the gradient of the mean
            loss over its rows. Those of `layerwise` are reduced already.
          comm_state: this worker's: residuals [1, ...].

        Returns:
          The measurements are float32[2, names], values and counts (1), equal on all workers.
        """
        if not self.reduction.manual:
            placements = self.resolved.placements

            def shard(path: str, grad: jax.Array) -> jax.Array:
                return constrain(self.mesh_axes, placements[path].state_spec, grad)

            return map_paths(shard, grads), comm_state, jnp.zeros((2, 0))
        layers = self.layerwise
        sent = {path: grad for path, grad in flatten(grads).items() if path not in layers}
        memory = {path: entry for path, entry in comm_state.items() if path not in layers}
        means, after, measured = self.communication.reduce(sent, memory, step)
        reduced = map_paths(lambda path, grad: means.get(path, grad), grads)
        # without fusion across it, the bits are those of an all-reduce
        if self.reduction.name == "parameter_server":
            reduced = lax.optimization_barrier(reduced)
        return reduced, comm_state | after, measured

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the measurements of every step."""
        if not self.reduction.manual:
            return ()
        return self.averaging.metric_names

    def check_rounding(self) -> None:
        """Check once per process that this backend rounds to bfloat16, if anything is sent as
        that.
        """
        declared = self.resolved.layout.gradients
        rounds = "bfloat16" in declared.codecs or declared.weights == "bfloat16"
        if self.reduction.manual and rounds:
            self_test()
