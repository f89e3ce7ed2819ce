"""The region in which a transformation runs: `jax.shard_map` with the workers' axes manual."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spmd.base.tree import Tree, describe, dtype_of
from spmd.base.xla import shard_map, varying_axes
from spmd.errors import CommunicationError, OptionError, closest, did_you_mean, short_repr
from spmd.wire import collectives
from spmd.wire.transfer import Transfer

Axes = str | Sequence[str]

FIX_SPLIT = (
    "init with these parameters, and wire.specs(state) among the in_specs and out_specs of "
    "jax.shard_map."
)
ENCODABLE = (jnp.float32, jnp.bfloat16, jnp.float16)
FLOATS_ONLY = (
    "gradients of floating-point parameters only: optax.partition, with optax.set_to_zero() for "
    "all others."
)


def as_axes(axes: Axes) -> tuple[str, ...]:
    """The names of mesh axes, outermost first.

    Raises:
      OptionError: they are no names, or one is given twice.
    """
    names: tuple[str, ...] = ()
    if isinstance(axes, str):
        names = (axes,)
    elif isinstance(axes, Sequence):
        names = tuple(axes)
    all_names = all(isinstance(name, str) for name in names)
    if not names or not all_names or len(set(names)) < len(names):
        fix = 'the name of a mesh axis, or several: "data", or ("host", "gpu").'
        raise OptionError(f"axes={short_repr(axes)}.", fix=fix)
    return names


def bound_sizes(axes: tuple[str, ...]) -> dict[str, int]:
    """Workers along each axis, inside the region.

    Raises:
      CommunicationError: an axis is not manual here.
    """
    sizes = {}
    for axis in axes:
        # No mesh names an axis that `jax.vmap` binds, so JAX is asked for its size.
        try:
            sizes[axis] = collectives.worker_count((axis,))
        except NameError:
            raise _not_manual(axis, axes) from None
    return sizes


def automatic_sizes(model_axes: tuple[str, ...], axes: tuple[str, ...]) -> dict[str, int]:
    """Devices along each mesh axis over which XLA shards arrays inside the region.

    Args:
      model_axes: the axes.
      axes: those of the workers.

    Raises:
      CommunicationError: an axis is manual here, or the mesh lacks it.
    """
    if not model_axes:
        return {}
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        why = "model_specs: there is no mesh here, such as under jax.vmap."
        raise CommunicationError(why, fix="jax.shard_map on a mesh with these axes.")
    check_axes(model_axes, mesh.axis_names)
    for axis in model_axes:
        if axis in mesh.manual_axes:
            needed = ", ".join(f'"{name}"' for name in axes)
            raise CommunicationError(
                f'model_specs: the mesh axis "{axis}" is manual here, so gradients are local '
                "shards along it already.",
                fix=f"no model_specs; or jax.shard_map(..., axis_names={{{needed}}}).",
            )
    return {axis: mesh.shape[axis] for axis in model_axes}


def _not_manual(axis: str, axes: tuple[str, ...]) -> CommunicationError:
    """Return the error for one of these axes that is not manual."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    fix = ""
    near = closest(axis, manual)
    if near:
        fix = f'did you mean "{near}"? Else '
    needed = ", ".join(f'"{name}"' for name in dict.fromkeys((*axes, *manual)))
    fix += (
        f"jax.shard_map(..., axis_names={{{needed}}}, check_vma=False) around it; without "
        "axis_names every axis is manual."
    )
    return CommunicationError(f'"{axis}" is not a manual mesh axis here.', fix=fix)


def on_local_shards(
    function: Callable[..., Any], model_axes: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `function` on each device's local shard along mesh axes that are not manual here; as
    it is if there are none.

    A collective in it then sends only that shard.
    """
    if not model_axes:
        return function
    # Left to XLA's partitioner, a collective on an array that is sharded over such an axis gathers
    # the array there first (jax 0.10).
    return shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=model_axes)


def axis_sizes(axes: tuple[str, ...], params: Tree) -> tuple[dict[str, int], bool]:
    """Workers along each axis, and whether this is inside the region. Outside, the mesh is that of
    `jax.set_mesh` or of `params`.

    Raises:
      CommunicationError: the mesh lacks an axis, or there is no mesh.
    """
    try:
        return bound_sizes(axes), True
    except CommunicationError:
        meshes: list[Any] = [jax.sharding.get_abstract_mesh()]
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)]
        named = [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
        meshes += [sharding.mesh for sharding in named[:1]]
        for mesh in meshes:
            if all(axis in mesh.shape for axis in axes):
                return {axis: mesh.shape[axis] for axis in axes}, False
        check_axes(axes, jax.sharding.get_abstract_mesh().axis_names or axes)
    raise CommunicationError(
        f"how many workers there are along {', '.join(axes)} is not known here, and the state "
        "depends on it.",
        fix="wire.init(tx, params, mesh), or tx.init inside jax.shard_map.",
    )


def count_rows(sizes: Mapping[str, int], *, in_region: bool) -> int:
    """Return how many rows, one for each worker, an array has: inside the region this worker's
    own.
    """
    if in_region:
        return 1
    return math.prod(sizes.values())


def check_axes(axes: tuple[str, ...], mesh_axes: Sequence[str]) -> None:
    """Refuse an axis that the mesh does not have.

    Raises:
      CommunicationError: names it.
    """
    for axis in axes:
        if axis not in mesh_axes:
            raise CommunicationError(
                f'the mesh has no axis "{axis}".', fix=did_you_mean(axis, mesh_axes)
            )


def as_arrays(tree: Tree) -> Tree:
    """The tree with arrays in place of Python numbers."""

    def as_array(leaf: Any) -> Any:
        if hasattr(leaf, "shape"):
            return leaf
        # With a dtype, or the array would be weakly typed: another type to `jax.jit` and `lax.scan`
        # than what an update returns.
        return jnp.asarray(leaf, jnp.result_type(leaf))

    return jax.tree.map(as_array, tree)


def check_dtypes(grads: Mapping[str, Any], fix: str = FLOATS_ONLY) -> None:
    """Refuse gradients of dtypes whose mean is of another.

    Raises:
      CommunicationError: names the first of them.
    """
    for path, grad in grads.items():
        if not jnp.issubdtype(dtype_of(grad), jnp.inexact):
            dtype = str(dtype_of(grad))
            # `jax.grad` of an integer; numpy shows its dtype as a structure
            if dtype_of(grad) == jax.dtypes.float0:
                dtype = "float0"
            why = f"the gradient {path} is {dtype}{list(jnp.shape(grad))}: its mean is no {dtype}."
            raise CommunicationError(why, fix=fix, path=path)


def check_encodable(
    grads: Mapping[str, Any], transfers: Mapping[str, Transfer], fix: str = ""
) -> None:
    """Refuse gradients of dtypes that a codec cannot represent.

    Raises:
      CommunicationError: names the first of them.
    """
    for path, grad in grads.items():
        transfer = transfers[path]
        if not transfer.codec.lossless and grad.dtype not in ENCODABLE:
            why = f"the gradient {path} is {describe(grad)}, and codec {transfer.codec_name} "
            why += "computes in float32."
            fix = fix or f'codecs={{"{path}": wire.exact()}}.'
            raise CommunicationError(why, fix=fix, path=path)


def check_grads(axes: tuple[str, ...], grads: Mapping[str, Any], *, lossless: bool) -> None:
    """Refuse gradients that were reduced already, where `jax.shard_map` tracks which values vary
    (`check_vma=True`).

    Raises:
      CommunicationError: a gradient is equal on all workers, or a codec's collectives cannot be
        tracked.
    """
    # Under check_vma=False nothing varies for JAX, not even the index of a worker (jax 0.10).
    if not any(axis in varying_axes(collectives.worker_index((axis,))) for axis in axes):
        return
    for path, grad in grads.items():
        if not set(axes) & varying_axes(grad):
            raise CommunicationError(
                f"the gradient {path} is equal on all workers: under check_vma=True, jax.grad of "
                "replicated parameters sums it already, "
                "and a mean of sums would be too large.",
                fix="jax.shard_map(..., check_vma=False).",
                path=path,
            )
    if not lossless:
        raise CommunicationError(
            "codecs end in an all-gather, whose result jax.shard_map cannot prove to be "
            "replicated.",
            fix="jax.shard_map(..., check_vma=False).",
        )
