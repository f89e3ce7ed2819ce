"""Arrays that are sharded over workers and gathered where they are used: the opposite of
`reduce_scatter`, and parameters of one layer at a time (FSDP).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd.base.specs import Spec, entry_axes, pspec
from spmd.base.tree import Tree, describe, flatten, map_paths
from spmd.errors import CommunicationError, OptionError, short_repr
from spmd.wire import collectives
from spmd.wire.codec.base import Codec, packed_collective
from spmd.wire.codec.bfloat16 import send_rounded
from spmd.wire.codec.exact import EXACT
from spmd.wire.communication import Communication, dim_spec, make_communication, shard_spec
from spmd.wire.reduction import reduce_buckets
from spmd.wire.region import (
    Axes,
    as_axes,
    bound_sizes,
    check_dtypes,
    check_encodable,
    check_grads,
    on_local_shards,
)
from spmd.wire.shard_layout import ShardLayout
from spmd.wire.transfer import (
    MAX_EXACT_BUCKET,
    RESIDUAL,
    Transfer,
    make_transfer,
)

FORMATS = ("exact", "bfloat16")


def all_gather(shards: Tree, axes: Axes, like: Tree) -> Tree:
    """Full arrays from this worker's shards, as `reduce_scatter` and `zero1` split them.

    Args:
      shards: this worker's; a tree.
      axes: mesh axes of the workers, outermost first.
      like: the full arrays, or their shapes.

    Returns:
      A tree of the shapes of `like`, equal on all workers.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> full = jax.shard_map(
      ...     lambda shards: all_gather(shards, "data", jnp.zeros((8, 2))),
      ...     mesh=mesh,
      ...     in_specs=P("data"),
      ...     out_specs=P(),
      ...     check_vma=False,
      ... )
      >>> full(jnp.ones((8, 2))).shape
      (8, 2)
    """
    sizes = bound_sizes(as_axes(axes))
    names = tuple(sizes)
    workers = collectives.worker_count(names)

    def join(path: str, shard: jax.Array, full: Any) -> jax.Array:
        shape = jnp.shape(full)
        spec = shard_spec(shape, sizes)
        shard_shape = ShardLayout(shape, spec, names, tuple(sizes.values())).shard_shape
        if jnp.shape(shard) != shard_shape:
            raise CommunicationError(
                f"all_gather: the shard of {path} is {describe(shard)}; that of {describe(full)} "
                f"is {list(shard_shape)} on each of {workers} workers.",
                fix="like=params, the full arrays that the gradients belong to.",
                path=path,
            )
        return join_shards(shard, spec)

    structure = jax.tree.structure(shards)
    fix = "like=params, the full arrays, in the same tree."
    leaves = _leaves_as(structure, like, "all_gather: like", fix)
    return map_paths(join, shards, jax.tree.unflatten(structure, leaves))


def _leaves_as(structure: Any, tree: Tree, what: str, fix: str) -> list[Any]:
    """The leaves of a tree that must have this structure."""
    try:
        return structure.flatten_up_to(tree)
    except ValueError:
        why = f"{what} is a tree {jax.tree.structure(tree)}; the shards are {structure}."
        raise CommunicationError(why, fix=fix) from None


def join_shards(shard: jax.Array, spec: Spec) -> jax.Array:
    """Return the array of which this worker has a shard; `spec` shards it over workers."""
    for dim, entry in enumerate(spec):
        shard = collectives.all_gather(shard, entry_axes(entry), dim)
    return shard


def gather(
    shards: Tree,
    axes: Axes,
    codec: Codec = EXACT,
    *,
    dim: int | Tree = 0,
    residual: Tree = None,
    weights: str = "exact",
) -> Tree:
    """Full parameters from this worker's shards, where they are used; their gradients are
    reduce-scattered in the backward pass (FSDP).

    Under `jax.checkpoint` they are gathered again in the backward pass instead of being kept. In a
    `lax.scan` over layers, full parameters of one layer exist at a time. All arrays of `shards` are
    sent in one bucket.

    Error feedback works through the gradient: `jax.grad` with respect to `(shards, residual)` gives
    the mean gradient of this worker's shards, and **the next residual in place of the residual's
    gradient** (Karimireddy et al. 2019, arXiv:1901.09847, applied in the backward pass).

    Args:
      shards: this worker's; a tree, such as a layer's parameters.
      codec: of the gradients: any but `power_sgd`, which keeps arrays. It is not used for a
        gradient that it does not make smaller.
      dim: the dim along which arrays are sharded, one for all or a tree of them.
      residual: `residual_like(shards, ...)`, float32 of the full shapes; None: no error feedback.
      weights: "exact" or "bfloat16", the format in which parameters are gathered.
      axes: mesh axes of the workers, outermost first.

    Returns:
      Full arrays. The gradient of a shard is the mean over workers of their gradients.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> def loss(shard, x):
      ...     return jnp.sum(x @ gather(shard, "data"))
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> grad = jax.shard_map(
      ...     jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
      ... )
      >>> grad(jnp.ones((4, 2)), jnp.ones((3, 4))).shape
      (4, 2)
    """
    on_or_off = (
        "residual=wire.residual_like(shards, axes), of which jax.grad returns the next.",
        "residual=None.",
    )
    options = {"error_feedback": residual is not None}
    communication = make_communication(axes, codec, options, on_or_off=on_or_off)
    if weights not in FORMATS:
        raise OptionError(f"weights={weights!r}.", fix='"exact" or "bfloat16".')
    sizes = bound_sizes(communication.axes)
    leaves, structure = jax.tree.flatten(shards)
    if not leaves:
        return shards
    transfers = _transfers(communication, shards, dim, sizes)
    residuals: dict[int, jax.Array] = {}
    if residual is not None:
        like = "wire.residual_like(shards, axes, dim=dim)."
        listed = _leaves_as(structure, residual, "gather: residual", like)
        residuals = {number: leaf for number, leaf in enumerate(listed) if leaf is not None}
    _check_residuals(transfers, residuals)
    gathering = Gathering(tuple(transfers.values()), weights)
    full: list[jax.Array] = gather_leaves(gathering, leaves, residuals)  # type: ignore[assignment]
    return jax.tree.unflatten(structure, full)


def _transfers(
    communication: Communication, shards: Tree, dim: int | Tree, sizes: dict[str, int]
) -> dict[str, Transfer]:
    """Return how the gradient of each shard is reduced."""
    by_path = flatten(shards)
    fix = "gather parameters that have gradients; others with jax.lax.all_gather(x, axes, "
    check_dtypes(by_path, fix=fix + "tiled=True).")
    if isinstance(dim, int):
        dims = [dim] * len(jax.tree.leaves(shards))
    else:
        fix = "dim=0, or a tree of numbers."
        dims = _leaves_as(jax.tree.structure(shards), dim, "gather: dim", fix)
    transfers = {}
    for (path, leaf), along in zip(by_path.items(), dims, strict=True):
        if type(along) is not int or not 0 <= along < jnp.ndim(leaf):
            raise CommunicationError(
                f"gather: dim={short_repr(along)} of a shard {describe(leaf)}.",
                fix="a dim of the array.",
                path=path,
            )
        transfers[path] = _transfer(communication, leaf, along, sizes)
    check_encodable(by_path, transfers, fix="a call of gather of its own, with wire.exact().")
    return transfers


def _check_residuals(transfers: dict[str, Transfer], residuals: dict[int, jax.Array]) -> None:
    """Refuse codecs that keep arrays, and residuals, by number, of other shapes than full
    gradients.
    """
    for number, (path, transfer) in enumerate(transfers.items()):
        if transfer.codec_shapes:
            why = f"{transfer.codec} keeps arrays from step to step, for which gather has no place."
            fix = "a codec of rows, such as wire.int8(block=256)."
            raise OptionError(f"gather: {why}", fix=fix)
        residual = residuals.get(number)
        shape = transfer.shard_layout.shape
        if residual is not None and residual.shape != shape:
            why = f"gather: the residual of {path} is {describe(residual)}; "
            why += f"its full gradient is {list(shape)}."
            fix = "wire.residual_like(shards, axes, dim=dim)."
            raise CommunicationError(why, fix=fix, path=path)


def residual_like(shards: Tree, axes: Axes, *, dim: int | Tree = 0) -> Tree:
    """Zero residuals for `gather`: float32 of the full shapes, each worker's own.

    Args:
      shards, axes, dim: as in `gather`.

    Returns:
      A tree like `shards`, of float32.

    Example:
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> zeros = jax.shard_map(
      ...     lambda shard: residual_like(shard, "data"),
      ...     mesh=mesh,
      ...     in_specs=P("data"),
      ...     out_specs=P("data"),
      ...     check_vma=False,
      ... )
      >>> zeros(jnp.ones((4, 2), jnp.bfloat16)).dtype
      dtype('float32')
    """
    sizes = bound_sizes(as_axes(axes))
    workers = collectives.worker_count(tuple(sizes))
    dims = dim
    if isinstance(dim, int):
        dims = jax.tree.map(lambda _: dim, shards)

    def zeros(leaf: jax.Array, along: int) -> jax.Array:
        return jnp.zeros(_full_shape(leaf.shape, along, workers), jnp.float32)

    return jax.tree.map(zeros, shards, dims)


def _full_shape(shape: tuple[int, ...], dim: int, workers: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * workers, *shape[dim + 1 :])


def _transfer(
    communication: Communication, leaf: jax.Array, dim: int, sizes: dict[str, int]
) -> Transfer:
    axes = communication.axes
    workers = collectives.worker_count(axes)
    shape = _full_shape(leaf.shape, dim, workers)
    layout = ShardLayout(shape, dim_spec(dim, axes), axes, tuple(sizes.values()))
    feedback = communication.error_feedback
    return make_transfer(communication.codec, layout, error_feedback=feedback, is_sent=workers > 1)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """The plan by which some arrays are gathered together, and their gradients reduced.

    Attributes:
      transfers: one for each array.
      weights: the format in which float32 arrays are gathered, "exact" or "bfloat16".
      dtype: to which float32 shards are cast before; None: they are not.
      model_axes: mesh axes that are not manual here. `Transfer.model_spec` shards the full arrays
        along them, and each device sends its local shard.
    """

    transfers: tuple[Transfer, ...]
    weights: str = "exact"
    dtype: Any = None
    model_axes: tuple[str, ...] = ()

    def gather(self, shards: list[jax.Array]) -> list[jax.Array]:
        """The full arrays."""
        specs = self._specs()
        gather = on_local_shards(self._gather, self.model_axes, (specs,), specs)
        return gather(shards)

    def reduce(
        self, grads: list[jax.Array], residuals: dict[int, jax.Array]
    ) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        """This worker's shards of the mean gradients, and the next residuals."""
        grad_specs = self._specs()
        specs = grad_specs, {number: grad_specs[number] for number in residuals}
        reduce = on_local_shards(self._reduce, self.model_axes, specs, specs)
        return reduce(grads, residuals)

    def _specs(self) -> list[PartitionSpec]:
        return [pspec(transfer.model_spec) for transfer in self.transfers]

    def _gather(self, shards: list[jax.Array]) -> list[jax.Array]:
        # Logs, plans and profiles read from this scope what a collective is for.
        with jax.named_scope("gather_params"):
            if self.dtype is not None:
                shards = [self._cast(shard) for shard in shards]
            return send_rounded(shards, self._gather_as_is, rounded=self.weights == "bfloat16")

    def _cast(self, shard: jax.Array) -> jax.Array:
        if shard.dtype != jnp.float32:
            return shard
        return shard.astype(self.dtype)

    def _gather_as_is(self, shards: list[jax.Array]) -> list[jax.Array]:
        layouts = [transfer.shard_layout for transfer in self.transfers]
        full = list(shards)
        for numbers in _small_together(shards, layouts):
            bucket_shards = [shards[number] for number in numbers]
            gathered = _all_gather(bucket_shards, [layouts[number] for number in numbers])
            for number, leaf in zip(numbers, gathered, strict=True):
                full[number] = leaf
        return full

    def _reduce(
        self, grads: list[jax.Array], residuals: dict[int, jax.Array]
    ) -> tuple[list[jax.Array], dict[int, jax.Array]]:
        transfers = {str(number): transfer for number, transfer in enumerate(self.transfers)}
        named_grads = {str(number): grad for number, grad in enumerate(grads)}
        lossless = all(transfer.codec.lossless for transfer in self.transfers)
        check_grads(self.transfers[0].shard_layout.axes, named_grads, lossless=lossless)
        memory = {str(number): {RESIDUAL: leaf[None]} for number, leaf in residuals.items()}
        means, memory = reduce_buckets(transfers, named_grads, memory, numbered=False)
        after = {number: memory[str(number)][RESIDUAL][0] for number in residuals}
        return list(means.values()), after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_leaves(
    gathering: Gathering, shards: list[jax.Array], residuals: dict[int, jax.Array]
) -> list[jax.Array]:
    """Do what `gather` does, for a list of arrays; `residuals` by number, of those with error
    feedback.
    """
    del residuals
    return gathering.gather(shards)


def _small_together(shards: list[jax.Array], layouts: list[ShardLayout]) -> list[list[int]]:
    """Their numbers: small arrays over the same axes are sent together, and each large one alone,
    as it would be copied out of a bucket.
    """
    together: dict[tuple[str, ...], list[int]] = {}
    alone = []
    for number, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
        if shard.dtype.itemsize * math.prod(layout.shape) <= MAX_EXACT_BUCKET:
            together.setdefault(layout.sharded_axes, []).append(number)
        else:
            alone.append([number])
    return [*together.values(), *alone]


def _all_gather(shards: list[jax.Array], layouts: list[ShardLayout]) -> list[jax.Array]:
    axes = layouts[0].sharded_axes
    dims = [len(layout.spec) - 1 for layout in layouts]
    if len(shards) == 1:
        return [collectives.all_gather(shards[0], axes, dims[0])]
    stacked = packed_collective(
        [x[None] for x in shards], 1, lambda part: collectives.all_gather(part, axes, 0)
    )
    full = []
    for parts, dim, layout in zip(stacked, dims, layouts, strict=True):
        # Workers are in dim 0 after the gather; their shards lie one after the other along `dim`.
        full.append(jnp.moveaxis(parts, 0, dim).reshape(layout.shape))
    return full


def _gather_forward(
    gathering: Gathering, shards: list[jax.Array], residuals: dict[int, jax.Array]
) -> tuple:
    full = gathering.gather(shards)
    # Of the shards only dtypes are needed. A custom_vjp keeps only arrays, so arrays without
    # elements carry them.
    return full, (residuals, [jnp.zeros(0, shard.dtype) for shard in shards])


def _gather_backward(
    gathering: Gathering,
    saved: tuple[dict[int, jax.Array], list[jax.Array]],
    grads: list[jax.Array],
) -> tuple:
    residuals, typed = saved
    # Gradients have the dtype in which `_cast` has gathered; a custom_vjp would pass them on in it,
    # whatever the parameter's is (jax 0.10).
    grads = [grad.astype(empty.dtype) for grad, empty in zip(grads, typed, strict=True)]
    return gathering.reduce(grads, residuals)


gather_leaves.defvjp(_gather_forward, _gather_backward)
