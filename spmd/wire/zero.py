"""An optimizer that works on shards of the parameters (ZeRO-1)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from spmd.base.tree import Tree, describe
from spmd.errors import CommunicationError, OptimizerError, OptionError, short_repr, type_name
from spmd.jaxpr.primitives import Kind, of_kind
from spmd.jaxpr.programs import equations
from spmd.wire import collectives
from spmd.wire.codec.base import Codec
from spmd.wire.codec.exact import EXACT
from spmd.wire.communication import Communication, WireState, make_communication, shard_spec
from spmd.wire.gathering import all_gather
from spmd.wire.region import (
    Axes,
    as_arrays,
    axis_sizes,
    bound_sizes,
)
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.states import check_no_communication, check_transformation

# of operations that combine entries of an array
COMBINING = of_kind(
    Kind.REDUCTION,
    Kind.CUMULATIVE,
    Kind.WINDOW,
    Kind.PRODUCT,
    Kind.FACTORIZATION,
    Kind.TRANSFORM,
    Kind.ORDER,
)
RANDOM = of_kind(Kind.RANDOM)
FULL_GRADIENTS = (
    "optax.chain(wire.all_reduce(...), optimizer), which gives each worker full gradients."
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("wire", "inner"), meta_fields=("inner_specs",)
)
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """The state of `zero1`: that of the communication, and that of the optimizer, whose moments are
    sharded over workers.

    Attributes:
      wire: of the communication.
      inner: of the optimizer: moments of this worker's shards.
      inner_specs: of `inner`, in the order of its leaves.
    """

    wire: WireState
    inner: Any
    inner_specs: tuple[PartitionSpec, ...]  # of the leaves of `inner`

    def specs(self) -> "ZeroState":
        """The spec of every leaf."""
        inner = jax.tree.unflatten(jax.tree.structure(self.inner), self.inner_specs)
        return ZeroState(self.wire.specs(), inner, self.inner_specs)


def zero1(
    axes: Axes,
    inner: optax.GradientTransformation,
    codec: Codec = EXACT,
    *,
    max_norm: float | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is sharded over workers (ZeRO-1, Rajbhandari et al. 2020,
    arXiv:1910.02054).

    Gradients are reduce-scattered; each worker updates its shards; updates are all-gathered. The
    parameters stay full. `update` needs `params`. Memory for moments falls by the number of
    workers.

    Args:
      axes: mesh axes of the workers, outermost first.
      inner: an optimizer that works element by element, such as adamw: on shards, a norm or a
        factored moment would be a shard's.
      codec: of the gradients; updates are gathered exactly.
      max_norm: gradients are scaled so that the norm of all of them is at most this, as
        `optax.clip_by_global_norm` does.
      options: as for `all_reduce`.

    Returns:
      An optax gradient transformation, whose state is a `ZeroState`, and whose updates are full.

    Raises:
      OptimizerError: in `update`: `inner` does not work element by element, or draws random
        numbers, as `optax.noisy_sgd` does.

    Example:
      >>> import optax
      >>> from jax.sharding import AbstractMesh
      >>> from spmd import wire
      >>> tx = wire.zero1("data", optax.adamw(1e-3), wire.bfloat16())
      >>> wire.bytes_sent(tx, {"w": jnp.zeros((1024, 1024))}, AbstractMesh((8,), ("data",)))
      5505024
    """
    parameters = ("inner", "codec", "max_norm")
    communication = make_communication(axes, codec, options, scatter=True, parameters=parameters)
    check_transformation("inner", inner)
    if max_norm is not None and not (type(max_norm) in (int, float) and max_norm > 0):
        raise OptionError(f"max_norm={short_repr(max_norm)}.", fix="a number above 0.")
    # So that `value` and the like reach an optimizer that takes them, and no other.
    inner = optax.with_extra_args_support(inner)

    def init(params: Tree) -> ZeroState:
        params = as_arrays(params)
        sizes, in_region = axis_sizes(communication.axes, params)
        start = params
        if in_region:
            start = _local_shards(communication, params, sizes)
        state = inner.init(start)
        check_no_communication("inner", state)
        full = jax.tree.map(lambda leaf: PartitionSpec(*shard_spec(leaf.shape, sizes)), params)
        inner_specs = moment_specs("wire.zero1", inner, state, start, full)
        return ZeroState(communication.init(params), state, inner_specs)

    def update(
        grads: Tree, state: ZeroState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, ZeroState]:
        if params is None:
            raise OptionError(
                "wire.zero1: update without params.",
                fix="update(grads, state, params): shards are those of the parameters.",
            )
        params = as_arrays(params)
        sizes = bound_sizes(communication.axes)
        if not isinstance(state, ZeroState):
            why = f"wire.zero1 has a state ZeroState; it is given one {type_name(state)}."
            raise CommunicationError(why, fix="the state of its init.")
        shards, wire_state = communication.update(grads, state.wire)
        if max_norm is not None:
            shards = _clip(shards, params, sizes, max_norm)
        local = _local_shards(communication, params, sizes)
        fix = f"for clipping: wire.zero1(..., max_norm=1.0); else {FULL_GRADIENTS}"
        check_elementwise("wire.zero1", fix, inner, shards, state.inner, local, extra)
        updates, inner_state = inner.update(shards, state.inner, local, **extra)
        full_updates = all_gather(updates, communication.axes, params)
        return full_updates, ZeroState(wire_state, inner_state, state.inner_specs)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _local_shards(communication: Communication, params: Tree, sizes: dict[str, int]) -> Tree:
    """Return this worker's shards of full arrays."""
    axes = communication.axes
    counts = tuple(sizes[axis] for axis in axes)

    def local_shard(leaf: jax.Array) -> jax.Array:
        layout = ShardLayout(leaf.shape, shard_spec(leaf.shape, sizes), axes, counts)
        return layout.local_shard(leaf)

    return jax.tree.map(local_shard, params)


def _clip(shards: Tree, params: Tree, sizes: dict[str, int], max_norm: float) -> Tree:
    """Scaled so that the norm over all workers' shards is at most `max_norm`; an array that is full
    on each counts once.
    """
    sharded = jnp.zeros(())
    replicated = jnp.zeros(())
    for shard, full in zip(jax.tree.leaves(shards), jax.tree.leaves(params), strict=True):
        square = jnp.sum(jnp.square(shard.astype(jnp.float32)))
        if shard_spec(full.shape, sizes):
            sharded += square
        else:
            replicated += square
    norm = jnp.sqrt(collectives.all_reduce(sharded, tuple(sizes)) + replicated)

    def clip(shard: jax.Array) -> jax.Array:
        # the operations of optax.clip_by_global_norm, so that bits are the same
        fits = norm < max_norm
        scaled = (shard / norm.astype(shard.dtype)) * max_norm
        return jnp.where(fits, shard, scaled)

    return jax.tree.map(clip, shards)


def moment_specs(
    where: str, inner: Any, state: Any, params: Tree, specs: Tree
) -> tuple[PartitionSpec, ...]:
    """The spec of every leaf of an optimizer's state: moments are sharded as their parameters, all
    else is replicated.
    """

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    def moment_spec(moment: jax.Array, param: jax.Array, spec: PartitionSpec) -> Any:
        # a parameter of another part of optax.partition
        if is_masked(moment):
            return moment
        if moment.shape == param.shape:
            return spec
        # Adafactor has placeholders of shape (1,) for what it does not factor (optax 0.2).
        if moment.size > 1:
            raise OptimizerError(
                f"{where}: the optimizer keeps {describe(moment)} for a parameter "
                f"{describe(param)}: it combines elements of an array, "
                "and each worker has only its shard.",
                fix=FULL_GRADIENTS,
            )
        return PartitionSpec()

    # optax knows which arrays of a state belong to parameters. By shapes, the count of steps could
    # be taken for the moment of a scalar.
    tree = optax.tree_utils.tree_map_params(
        inner,
        moment_spec,
        state,
        params,
        specs,
        transform_non_params=lambda _: PartitionSpec(),
        is_leaf=is_masked,
    )
    return tuple(jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, PartitionSpec)))


def check_elementwise(
    where: str, fix: str, inner: Any, shards: Tree, state: Any, params: Tree, extra: dict[str, Any]
) -> None:
    """Refuse an optimizer that combines elements of an array: of a shard it would see only this
    worker's part.

    Nor may it draw random numbers: its key is the same on every worker, so all would draw the same
    for different shards.
    """
    program = jax.make_jaxpr(lambda *trees: inner.update(*trees, **extra))(shards, state, params)
    for equation in equations(program.jaxpr):
        name = equation.primitive.name
        shape: tuple[int, ...] = ()
        if equation.invars:
            shape = equation.invars[0].aval.shape
        if name in COMBINING and shape:
            why = f"{where}: the optimizer combines the elements of an array ({name} of "
            why += f"{list(shape)}); each worker has only its shard."
            raise OptimizerError(why, fix=fix)
        if name in RANDOM:
            why = f"{where}: the optimizer draws random numbers ({name}): every worker would draw "
            why += "the same ones for its shard."
            raise OptimizerError(why, fix=f"an optimizer that draws none; else {FULL_GRADIENTS}")
