"""Workers that train alone and synchronize now and then: local SGD, DiLoCo and its streaming form,
as an optax transformation.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, flatten, map_paths, nbytes
from spmd.errors import CommunicationError, OptionError, check_integer, short_repr
from spmd.wire.assignment import assign
from spmd.wire.codec.base import Codec
from spmd.wire.codec.exact import EXACT
from spmd.wire.communication import Communication, WireState, check_state, make_communication
from spmd.wire.region import FIX_SPLIT, Axes, as_arrays, axis_sizes, bound_sizes, count_rows
from spmd.wire.states import check_no_communication, check_transformation
from spmd.wire.transfer import Leaves, Memory

DATA = ("step", "params", "inner", "outer", "pending", "fresh", "wire")


@functools.partial(jax.tree_util.register_dataclass, data_fields=DATA, meta_fields=("axes", "mix"))
@dataclasses.dataclass(frozen=True)
class LocalState:
    """The state of `local_sgd`.

    Attributes:
      step: int32, updates so far.
      params: each worker's parameters, [workers, ...], sharded over workers.
      inner: each worker's optimizer state, [workers, ...], sharded likewise.
      outer: the state of the outer optimizer, equal on all workers.
      pending: outer updates that were computed and are not applied yet (`overlap`); None without
        overlap.
      fresh: bool[fragments], whether the last update changed the global parameters of a fragment,
        which workers then take.
      wire: of the communication of the outer gradients.
      axes: the mesh axes of the workers, outermost first.
      mix: as the option.
    """

    step: jax.Array
    params: Tree
    inner: Any
    outer: Any
    pending: Tree
    fresh: jax.Array
    wire: WireState
    axes: tuple[str, ...]
    mix: float

    def specs(self) -> "LocalState":
        """The spec of every leaf."""

        def every(spec: PartitionSpec, tree: Tree) -> Tree:
            return jax.tree.map(lambda _: spec, tree)

        of_worker = PartitionSpec(self.axes)
        return dataclasses.replace(
            every(PartitionSpec(), self),
            params=every(of_worker, self.params),
            inner=every(of_worker, self.inner),
            wire=self.wire.specs(),
        )

    def local_params(self, params: Tree) -> Tree:
        """Return this worker's own parameters, or those that it takes from the servers now."""
        params = as_arrays(params)
        owner = split_fragments(params, self.fresh.shape[0])

        def local(path: str, full: jax.Array, copies: jax.Array) -> jax.Array:
            mixed = full
            if self.mix:
                mixed = (self.mix * copies[0] + (1 - self.mix) * full).astype(full.dtype)
            return jnp.where(self.fresh[owner[path]], mixed, copies[0])

        return map_paths(local, params, self.params)


def split_fragments(params: Tree, fragments: int) -> dict[str, int]:
    """The fragment of each parameter, so that fragments are of nearly equal size.

    >>> split_fragments({"a": jnp.zeros(6), "b": jnp.zeros(4), "c": jnp.zeros(3)}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    sizes = {path: nbytes(leaf) for path, leaf in flatten(params).items()}
    return dict(assign("largest_first", sizes, fragments).owner)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """The parts that `local_sgd` is made of; attributes as its arguments."""

    communication: Communication
    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    every: int
    fragments: int
    overlap: int
    mix: float

    def init(self, params: Tree) -> LocalState:
        """Return the state at step 0: every worker has `params`."""
        params = as_arrays(params)
        sizes, in_region = axis_sizes(self.communication.axes, params)
        workers = count_rows(sizes, in_region=in_region)

        def stack(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf, (workers, *jnp.shape(leaf)))

        stacked = jax.tree.map(stack, params)
        # vmap gives scalars of optax, such as a count, the dim of workers too, along which
        # `jax.shard_map` splits the state.
        inner_state = jax.vmap(self.inner.init, axis_size=workers)(stacked)
        outer_state = tuple(self.outer.init(part) for part in _split(params, self.fragments))
        check_no_communication("inner", inner_state)
        check_no_communication("outer", outer_state)
        step = jnp.zeros((), jnp.int32)
        pending = None
        if self.overlap:
            pending = jax.tree.map(jnp.zeros_like, params)
        return LocalState(
            step=step,
            params=stacked,
            inner=inner_state,
            outer=outer_state,
            pending=pending,
            fresh=jnp.zeros(self.fragments, bool),
            wire=self.communication.init(params),
            axes=self.communication.axes,
            mix=self.mix,
        )

    def update(
        self, grads: Tree, state: LocalState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, LocalState]:
        """Return the change of the global parameters, of most steps zero, and the next state."""
        if params is None:
            raise OptionError(
                "wire.local_sgd: update without params.",
                fix="update(grads, state, params), with the global parameters.",
            )
        grads = as_arrays(grads)
        params = as_arrays(params)
        self._check_state(state, params)
        local, inner_state = self._step(grads, state, params, extra)
        number = state.step + 1
        memory = dict(state.wire.memory)
        outer_states = []
        fresh = []
        pending: Leaves = {}
        updates: Leaves = {}
        parts = zip(_split(params, self.fragments), _split(local, self.fragments), strict=True)
        for turn, (full, trained) in enumerate(parts):
            send, receive = self._turn(number, turn)
            pending_part = self._pending_part(full, state)
            part_memory = {path: memory[path] for path in full if path in memory}
            synchronize = functools.partial(self._synchronize, full, trained, state.wire.step)
            keep = functools.partial(_keep, full, pending_part)
            # All workers take the same branch, by the number of the step: a collective in a branch
            # that one of them does not take would wait for it forever.
            with jax.named_scope(f"synchronize/{turn}"):
                computed, part_memory, outer_state = lax.cond(
                    send, synchronize, keep, part_memory, state.outer[turn]
                )
            memory |= part_memory
            outer_states.append(outer_state)
            pending |= computed
            for path, leaf in computed.items():
                updates[path] = jnp.where(receive, leaf, jnp.zeros_like(leaf))
            fresh.append(receive)
        after = LocalState(
            step=number,
            params=jax.tree.map(lambda x: x[None], local),
            inner=inner_state,
            outer=tuple(outer_states),
            pending=None,
            fresh=jnp.stack(fresh),
            wire=WireState(state.wire.step + 1, memory, state.axes),
            axes=state.axes,
            mix=state.mix,
        )
        if self.overlap:
            after = dataclasses.replace(after, pending=_unflatten(params, pending))
        return _unflatten(params, updates), after

    def _turn(self, number: jax.Array, turn: int) -> tuple[jax.Array, jax.Array]:
        """Return whether a fragment is sent in step `number`, and whether a result of it arrives
        then.
        """
        sent_at = (turn + 1) * (self.every // self.fragments)
        send = (number - sent_at) % self.every == 0
        arrived_at = number - self.overlap
        # Multiples below 0 have the remainder 0, too: nothing arrives before the first exchange.
        receive = ((arrived_at - sent_at) % self.every == 0) & (arrived_at > 0)
        return send, receive

    def _pending_part(self, full: Leaves, state: LocalState) -> Leaves | None:
        """Return the outer updates of a fragment that are on their way; None without overlap."""
        if not self.overlap:
            return None
        waiting = flatten(state.pending)
        return {path: waiting[path] for path in full}

    def _check_state(self, state: LocalState, params: Tree) -> None:
        bound_sizes(self.communication.axes)
        check_state(state, LocalState, self.communication.axes)
        shapes = jax.tree.map(lambda leaf: (1, *leaf.shape), params)
        if jax.tree.map(jnp.shape, state.params) != shapes:
            raise CommunicationError(
                "the state is not that of these parameters, or is not split over workers.",
                fix=FIX_SPLIT,
            )

    def _step(
        self, grads: Tree, state: LocalState, params: Tree, extra: dict[str, Any]
    ) -> tuple[Tree, Any]:
        """Return this worker's own parameters and optimizer state after a step of its own."""

        def update(grads: Tree, inner_state: Any, params: Tree) -> tuple[Tree, Any]:
            return self.inner.update(grads, inner_state, params, **extra)

        local = state.local_params(params)
        grads, stacked = jax.tree.map(lambda x: x[None], (grads, local))
        updates, inner_state = jax.vmap(update, axis_size=1)(grads, state.inner, stacked)
        updates = jax.tree.map(lambda x: x[0], updates)
        return optax.apply_updates(local, updates), inner_state

    def _synchronize(
        self, full: Leaves, local: Leaves, step: jax.Array, memory: Memory, outer_state: Any
    ) -> tuple[Any, Memory, Any]:
        """Return the outer updates of a fragment: the mean over workers of (global - local
        parameters) is the outer optimizer's gradient.
        """
        # Global minus local: an optimizer subtracts, and so moves towards the workers.
        deltas = {path: (leaf - local[path]).astype(leaf.dtype) for path, leaf in full.items()}
        state = WireState(step, memory, self.communication.axes)
        mean, after = self.communication.update(deltas, state)
        updates, outer_state = self.outer.update(mean, outer_state, full)
        return updates, after.memory, outer_state


def _keep(
    full: Leaves, pending: Leaves | None, memory: Memory, outer_state: Any
) -> tuple[Leaves, Memory, Any]:
    """Return what a step that does not synchronize leaves as it is: updates that are on their way,
    or no change of the parameters `full`.
    """
    if pending is not None:
        return pending, memory, outer_state
    # Made here, in the branch, so that other steps need no memory for them.
    return {path: jnp.zeros_like(leaf) for path, leaf in full.items()}, memory, outer_state


def local_sgd(
    axes: Axes,
    *,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    every: int,
    fragments: int = 1,
    overlap: int = 0,
    mix: float = 0.0,
    codec: Codec = EXACT,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Each worker takes steps of its own, and every few steps they synchronize (DiLoCo, Douillard
    et al. 2023, arXiv:2311.08105).

    The loop carries the global parameters, equal on all workers. It computes gradients at
    `wire.local_params(state, params)`. In most steps the updates are zero. In every `every`-th step
    the mean over workers of (global - local parameters) is a gradient for `outer`, whose updates
    the loop applies as any others; then all workers continue from the result.

    Args:
      axes: mesh axes of the workers.
      inner: each worker's optimizer.
      outer: any optax optimizer; DiLoCo's is `optax.sgd(0.7, momentum=0.9, nesterov=True)`, plain
        averaging is `optax.sgd(1.0)`.
      every: steps between synchronizations of the same parameters.
      fragments: parameters are split into this many parts, which take turns (Streaming DiLoCo,
        Douillard et al. 2025, arXiv:2501.18512).
      overlap: steps between sending a fragment and applying the result, for the network to hide
        behind computation.
      mix: the share of its own parameters that a worker keeps when it takes the global ones (alpha
        of Streaming DiLoCo).
      codec: of the outer gradients.
      options: as for `all_reduce`.

    Returns:
      An optax gradient transformation, whose state is a `LocalState`.

    Raises:
      OptionError: the options contradict each other.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> from spmd import wire
      >>> mesh, params = jax.make_mesh((1,), ("data",)), {"w": jnp.ones(2)}
      >>> tx = wire.local_sgd("data", inner=optax.sgd(0.1), outer=optax.sgd(1.0), every=2)
      >>> def step(params, state):
      ...     grads = jax.tree.map(jnp.ones_like, wire.local_params(state, params))
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> state = wire.init(tx, params, mesh)
      >>> specs = (P(), wire.specs(state))
      >>> step = jax.jit(
      ...     jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
      ... )
      >>> for _ in range(2):
      ...     params, state = step(params, state)
      ...     print(params["w"].round(3).tolist())
      [1.0, 1.0]
      [0.8..., 0.8...]
    """
    parameters = ("inner", "outer", "every", "fragments", "overlap", "mix", "codec")
    communication = make_communication(axes, codec, options, parameters=parameters)
    check_integer(every, "every", 1)
    check_integer(fragments, "fragments", 1)
    check_integer(overlap, "overlap", 0)
    if fragments > every or overlap >= every:
        raise OptionError(
            f"local_sgd: every={every}, fragments={fragments}, overlap={overlap}.",
            fix="fragments at most every, so that each has a turn; overlap below every, so that a "
            "result arrives before the next is sent.",
        )
    if type(mix) not in (int, float) or not 0 <= mix < 1:
        raise OptionError(f"local_sgd: mix={short_repr(mix)}.", fix="a share from 0 to below 1.")
    check_transformation("inner", inner)
    check_transformation("outer", outer)
    steps = LocalSteps(
        communication,
        # So that `value` and the like reach an optimizer that takes them, and no other.
        inner=optax.with_extra_args_support(inner),
        outer=optax.with_extra_args_support(outer),
        every=every,
        fragments=fragments,
        overlap=overlap,
        mix=mix,
    )
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)  # type: ignore[arg-type]


def _split(params: Tree, fragments: int) -> list[dict[str, Any]]:
    """Return the parameters of each fragment, by path."""
    owner = split_fragments(params, fragments)
    parts: list[dict[str, Any]] = [{} for _ in range(fragments)]
    for path, leaf in flatten(params).items():
        parts[owner[path]][path] = leaf
    return parts


def _unflatten(like: Tree, by_path: dict[str, Any]) -> Tree:
    return map_paths(lambda path, _: by_path[path], like)
