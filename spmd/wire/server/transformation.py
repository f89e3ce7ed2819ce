"""The simulated parameter server as an optax transformation: the workers along some axes are its
servers, too.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, map_paths
from spmd.errors import CommunicationError, OptionError, short_repr, type_name
from spmd.wire import collectives
from spmd.wire.codec.base import Codec, RowCodec
from spmd.wire.codec.exact import EXACT
from spmd.wire.communication import (
    Communication,
    WireState,
    arrays_by_path,
    check_patterns,
    make_communication,
)
from spmd.wire.region import (
    FIX_SPLIT,
    Axes,
    as_arrays,
    axis_sizes,
    bound_sizes,
    check_dtypes,
    check_encodable,
    check_grads,
)
from spmd.wire.server.arrivals import apply_arrivals, init_server_memory
from spmd.wire.server.clock import local_fix
from spmd.wire.server.events import Events
from spmd.wire.server.exchange import Buckets, fetch_params, gather_rows, send_gradients
from spmd.wire.server.packing import from_server_rows, to_server_rows
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.states import check_no_communication, check_transformation
from spmd.wire.transfer import (
    HELD,
    MAX_EXACT_BUCKET,
    Memory,
    Transfer,
    make_buckets,
    partition_specs,
)
from spmd.wire.zero import check_elementwise, moment_specs

# a server's parameters minus those that the loop carries: [servers, width], sharded over servers on
# dim 0
ROUNDING = "rounding"
EVENTS = "events=clock.step_inputs(n)"
FIX_CLIP = (
    "an optimizer that works element by element, such as optax.adamw. For clipping: "
    "optax.chain(optax.clip_by_global_norm(...), "
    "wire.parameter_server(...)), which clips each worker's own gradients."
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "memory", "inner"),
    meta_fields=("axes", "inner_specs"),
)
@dataclasses.dataclass(frozen=True)
class ServerState:
    """The state of `parameter_server`. The servers keep a parameter as [servers, width], a row
    each, padded with zeros.

    Attributes:
      step: int32, updates so far: the number of the clock's next events.
      memory: by parameter path: "residual", what each worker's codec has lost, [workers, servers,
        width], sharded over `axes` on dim 0; "codec", the codec's own arrays. In asynchronous modes
        also "held", the parameters that each worker has read, [servers, workers, width], and
        "rounding", the servers' parameters minus those that the loop carries: what was lost when
        the change was rounded; "sum" and "gathered" of gradients for the next update; "squares" of
        gradients. They are sharded over `axes` on dim 0.
      inner: the optimizer's state; moments are [servers, width].
      axes: the mesh axes of the workers, outermost first.
      inner_specs: of `inner`, in the order of its leaves.
    """

    step: jax.Array
    memory: Memory
    inner: Any
    axes: tuple[str, ...]
    inner_specs: tuple[PartitionSpec, ...]  # of the leaves of `inner`

    def specs(self) -> "ServerState":
        """Return the spec of every leaf."""
        memory = partition_specs(self.memory, self.axes)
        inner = jax.tree.unflatten(jax.tree.structure(self.inner), self.inner_specs)
        return dataclasses.replace(self, step=PartitionSpec(), memory=memory, inner=inner)  # type: ignore[arg-type]

    def local_params(self, params: Tree) -> Tree:
        """The parameters that this worker last read: one all-to-all per bucket. In synchronous mode
        `params`.
        """
        if not any(HELD in entry for entry in self.memory.values()):
            return params
        params = as_arrays(params)
        sizes = bound_sizes(self.axes)
        buckets = _exact_buckets(_pack_all(params, sizes), sizes)
        held = fetch_params(self.memory, buckets, self.axes)
        return map_paths(lambda path, leaf: from_server_rows(held[path][0], leaf), params)


@dataclasses.dataclass(frozen=True)
class Servers:
    """The parts that `parameter_server` is made of."""

    communication: Communication
    optimizer: optax.GradientTransformationExtraArgs
    clock: Events

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes of the workers."""
        return self.communication.axes

    @property
    def asynchronous(self) -> bool:
        """Return whether gradients are applied in order of arrival."""
        return self.clock.declared.asynchronous

    def init(self, params: Tree) -> ServerState:
        """The state at step 0: every worker has read `params`."""
        params = as_arrays(params)
        sizes, in_region = axis_sizes(self.axes, params)
        self._check_workers(sizes)
        packed = _pack_all(params, sizes)
        rows = packed
        if in_region:
            rows = self._local_rows(packed)
        check_patterns([pattern for pattern, _ in self.communication.codecs], params)
        inner = self.optimizer.init(rows)
        check_no_communication("optimizer", inner)
        specs = jax.tree.map(lambda _: PartitionSpec(self.axes), rows)
        memory = self.communication.init_memory(arrays_by_path(packed), sizes, in_region)
        if self.asynchronous:
            memory = self._init_arrivals(rows, memory)
        inner_specs = moment_specs("wire.parameter_server", self.optimizer, inner, rows, specs)
        return ServerState(jnp.zeros((), jnp.int32), memory, inner, self.axes, inner_specs)

    def _init_arrivals(self, rows: Tree, memory: Memory) -> Memory:
        """Return a memory with what an asynchronous server keeps, too."""
        after = {}
        for path, row in arrays_by_path(rows).items():
            entry = init_server_memory(self.clock.declared, row, self.clock.workers)
            entry[ROUNDING] = jnp.zeros_like(row)
            after[path] = entry | memory.get(path, {})
        return after

    def update(
        self,
        grads: Tree,
        state: ServerState,
        params: Tree = None,
        *,
        events: Any = None,
        value: Any = None,
        **extra: Any,
    ) -> tuple[Tree, ServerState]:
        """The change of the servers' parameters, equal on every worker, and the next state."""
        if params is None:
            raise OptionError(
                "wire.parameter_server: update without params.",
                fix="update(grads, state, params, events=events).",
            )
        grads = as_arrays(grads)
        params = as_arrays(params)
        sizes = bound_sizes(self.axes)
        self._check_workers(sizes)
        self._check_events(events)
        check_dtypes(arrays_by_path(grads))
        # the update ends in an all-gather in any format
        check_grads(self.axes, arrays_by_path(grads), lossless=False)
        rows = self._local_rows(_pack_all(params, sizes))
        self._check_state(state, rows)
        losses = None
        if value is not None:
            # Every server applies the gradients of all workers, and an optimizer may use the loss
            # of each.
            losses = collectives.all_gather(jnp.reshape(value, 1), self.axes, 0)
        apply = self._apply_mean
        if self.asynchronous:
            apply = self._apply_arrivals
        change, memory, inner = apply(_pack_all(grads, sizes), state, rows, events, losses, extra)
        buckets = _exact_buckets(_pack_all(params, sizes), sizes)
        full = gather_rows(arrays_by_path(change), buckets, self.axes)
        updates = map_paths(lambda path, leaf: from_server_rows(full[path], leaf), params)
        return updates, dataclasses.replace(state, step=state.step + 1, memory=memory, inner=inner)

    def _apply_mean(
        self,
        grads: Tree,
        state: ServerState,
        rows: Tree,
        events: Mapping[str, Any],
        losses: Any,
        extra: dict[str, Any],
    ) -> tuple[Tree, Memory, Any]:
        """An update with the mean over the workers that are present."""
        present = jnp.asarray(events.get("present", jnp.ones(self.clock.workers, bool)))
        if "present" in events:  # the mean over all workers is then that over those who are present
            share = present.sum() / self.clock.workers

            def scale(g: jax.Array) -> jax.Array:
                return (g.astype(jnp.float32) / share).astype(g.dtype)

            grads = jax.tree.map(scale, self._where_present(present, grads))
        if losses is not None:
            total = jnp.where(present, losses, jnp.zeros_like(losses)).sum()
            extra = extra | {"value": total / present.sum()}
        wire_state = WireState(state.step, state.memory, self.axes)
        means, wire_state = self.communication.update(grads, wire_state)
        # fused with it, the update would be rounded otherwise
        means = lax.optimization_barrier(means)
        check_elementwise(
            "wire.parameter_server", FIX_CLIP, self.optimizer, means, state.inner, rows, extra
        )
        updates, inner = self.optimizer.update(means, state.inner, rows, **extra)
        return updates, wire_state.memory, inner

    def _apply_arrivals(
        self,
        grads: Tree,
        state: ServerState,
        rows: Tree,
        events: Mapping[str, Any],
        losses: Any,
        extra: dict[str, Any],
    ) -> tuple[Tree, Memory, Any]:
        """One update after the other, in order of arrival."""
        optimizer = optax.GradientTransformationExtraArgs(
            self.optimizer.init, functools.partial(self.optimizer.update, **extra)
        )
        value = {}
        if losses is not None:
            value["value"] = losses[0]
        check_elementwise(
            "wire.parameter_server", FIX_CLIP, optimizer, rows, state.inner, rows, value
        )
        transfers = self.communication.transfers(arrays_by_path(grads), bound_sizes(self.axes))
        check_encodable(arrays_by_path(grads), transfers)
        buckets = make_buckets(transfers, min(self.communication.bucket_bytes, MAX_EXACT_BUCKET))
        present = jnp.asarray(events["present"])
        grads = self._where_present(present, grads)
        mine = present[collectives.worker_index(self.axes)]
        worker_grads = {path: g[None] for path, g in arrays_by_path(grads).items()}
        arrived, memory = send_gradients(worker_grads, transfers, buckets, state.memory, mine[None])
        # the loop's parameters are sums of rounded changes; what was lost is added again
        before = map_paths(lambda path, row: row + memory[path][ROUNDING], rows)
        after, inner, memory = apply_arrivals(
            self.clock.declared,
            optimizer,
            before,
            state.inner,
            memory,
            arrived=arrived,
            events=events,
            losses=losses,
        )
        change = jax.tree.map(lambda new, old: new - old, after, rows)
        rounding = jax.tree.map(lambda new, old, by: new - (old + by), after, rows, change)
        lost = arrays_by_path(rounding)
        memory = {path: entry | {ROUNDING: lost[path]} for path, entry in memory.items()}
        return change, memory, inner

    def _local_rows(self, packed: Tree) -> Tree:
        """Return this server's rows, [1, width]."""

        def local_row(x: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(x, collectives.worker_index(self.axes), 0)

        return jax.tree.map(local_row, packed)

    def _where_present(self, present: jax.Array, grads: Tree) -> Tree:
        """This worker's gradients; zeros if it takes no part."""
        mine = present[collectives.worker_index(self.axes)]
        # never by multiplying: 0 * NaN
        return jax.tree.map(lambda g: jnp.where(mine, g, jnp.zeros_like(g)), grads)

    def _check_workers(self, sizes: Mapping[str, int]) -> None:
        workers = math.prod(sizes.values())
        if workers != self.clock.workers:
            along = " x ".join(f"{size} along {axis}" for axis, size in sizes.items())
            raise CommunicationError(
                f"wire.parameter_server: the clock is of {self.clock.workers} workers, and the "
                f"mesh has {along}.",
                fix=f"wire.server_clock(workers={workers}, ...).",
            )

    def _check_events(self, events: Any) -> None:
        if events is None:
            raise OptionError(
                "wire.parameter_server: update without events.",
                fix=f"update(..., {EVENTS}), of step n.",
            )
        shapes: Any = type_name(events)
        if isinstance(events, Mapping):
            shapes = {name: jnp.shape(leaf) for name, leaf in events.items()}
        needed = {name: jnp.shape(leaf) for name, leaf in self.clock.step_inputs(0).items()}
        if shapes != needed:
            why = (
                f"the events are {short_repr(shapes)}; those of this clock are "
                f"{short_repr(needed)}."
            )
            raise OptionError(
                f"wire.parameter_server: {why}",
                fix=f"{EVENTS}, of step n, of the clock that wire.parameter_server was given.",
            )

    def _check_state(self, state: ServerState, rows: Tree) -> None:
        """Refuse the state of another tree, or one that `jax.shard_map` did not split over
        servers.
        """
        inner = jax.eval_shape(self.optimizer.init, rows)
        held = {path: entry[HELD].shape for path, entry in state.memory.items() if HELD in entry}
        needed = {}
        if self.asynchronous:
            for path, row in arrays_by_path(rows).items():
                needed[path] = (1, self.clock.workers, row.shape[1])
        same_inner = jax.tree.map(jnp.shape, state.inner) == jax.tree.map(jnp.shape, inner)
        if held != needed or not same_inner:
            raise CommunicationError(
                "the state is not that of these parameters, or is not split over servers.",
                fix=FIX_SPLIT,
            )


def parameter_server(
    axes: Axes,
    optimizer: optax.GradientTransformation,
    clock: Events,
    codec: Codec = EXACT,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """A parameter server, simulated: who is late is data from `clock`, and the updates are real.

    Each worker along `axes` is also a server, which keeps a row of each parameter and the
    optimizer's state for it. `update` needs `params` and `events=clock.step_inputs(n)`, of step
    `n`. Its updates are the change of the servers' parameters; the loop carries the parameters as
    always, equal on all workers.

    In mode "synchronous" an update is the mean over the workers that `events` counts as present
    (all but the spares; Chen et al., arXiv:1604.00981). In modes "asynchronous", "bounded" (SSP, Ho
    et al. 2013) and "softsync" (Zhang et al., arXiv:1511.05950) a step is a round: each worker
    computes its gradient at `wire.local_params(state, params)`, the parameters that it last read;
    gradients are applied one after the other, in order of arrival; and who reads in between gets
    the version of that moment.

    Args:
      axes: mesh axes of the workers.
      optimizer: the servers'; it works element by element, such as adamw, since each server has a
        part of each parameter.
      clock: from `server_clock`, which has all options of the parameter server.
      codec: of the gradients, on their way to the servers.
      options: as for `all_reduce`; an asynchronous server makes no mean, so it
        takes neither `start_step` nor a codec that works on a mean.

    Returns:
      An optax gradient transformation, whose state is a `ServerState`.

    Raises:
      OptionError: an option is wrong; in `update`: without `params` or `events`, or events of
        another clock.
      CommunicationError: in `init` or `update`: another number of workers, or the state of another
        tree.
      OptimizerError: `optimizer` combines elements of an array, or draws random numbers.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from spmd import wire
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones(2)}
      >>> clock = wire.server_clock(workers=1, mode="asynchronous")
      >>> tx = wire.parameter_server("data", optax.sgd(0.5), clock)
      >>> def step(params, state, events):
      ...     grads = jax.tree.map(jnp.ones_like, wire.local_params(state, params))
      ...     updates, state = tx.update(grads, state, params, events=events)
      ...     return optax.apply_updates(params, updates), state
      >>> state = wire.init(tx, params, mesh)
      >>> specs = (P(), wire.specs(state))
      >>> step = jax.jit(
      ...     jax.shard_map(
      ...         step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs, check_vma=False
      ...     )
      ... )
      >>> for n in range(2):
      ...     params, state = step(params, state, clock.step_inputs(n))
      ...     print(params["w"].tolist(), clock.metrics(n)["simulated_seconds"])
      [0.5, 0.5] 1.0
      [0.0, 0.0] 2.0
    """
    if not isinstance(clock, Events):
        raise OptionError(
            f"wire.parameter_server: clock={short_repr(clock)} is {type_name(clock)}.",
            fix="wire.server_clock(workers=...).",
        )
    parameters = ("optimizer", "clock", "codec")
    communication = make_communication(axes, codec, options, rows=True, parameters=parameters)
    check_transformation("wire.parameter_server: optimizer", optimizer)
    declared = clock.declared
    if declared.local:
        raise OptionError(
            f'wire.parameter_server: mode "{declared.mode}" has no servers.',
            fix=local_fix(declared.mode),
        )
    if declared.asynchronous:
        _check_asynchronous(communication)
    # So that `value` reaches an optimizer that takes it, and no other.
    servers = Servers(communication, optax.with_extra_args_support(optimizer), clock)
    return optax.GradientTransformationExtraArgs(servers.init, servers.update)  # type: ignore[arg-type]


def _check_asynchronous(communication: Communication) -> None:
    """Refuse options that need a mean over workers."""
    for codec in (communication.codec, *dict(communication.codecs).values()):
        if not codec.lossless and not (isinstance(codec, RowCodec) and codec.reports_loss):
            why = (
                f"{codec} works on a mean over workers; an asynchronous server applies each "
                "gradient separately."
            )
            raise OptionError(
                f"wire.parameter_server: {why}",
                fix='a codec of rows, such as wire.int8(), or mode="synchronous".',
            )
    if communication.start_step:
        why = f"start_step={communication.start_step}: nothing reads it in an asynchronous mode."
        raise OptionError(f"wire.parameter_server: {why}", fix="leave it out.")


def _pack_all(tree: Tree, sizes: Mapping[str, int]) -> Tree:
    """Every array as [servers, width], padded with zeros."""
    servers = math.prod(sizes.values())
    return jax.tree.map(lambda leaf: to_server_rows(leaf, servers, servers), tree)


def _exact_buckets(packed: Tree, sizes: Mapping[str, int]) -> Buckets:
    """The parameters that are sent together."""
    axes = tuple(sizes)
    counts = tuple(sizes.values())
    transfers = {}
    for path, leaf in arrays_by_path(packed).items():
        layout = ShardLayout(leaf.shape, (axes,), axes, counts)
        transfers[path] = Transfer(layout, EXACT, error_feedback=False)
    return make_buckets(transfers, MAX_EXACT_BUCKET)
