"""Matrices of a parameter that devices own, for `matrix_owners.py`: the mesh axes that shard them,
and how shards become full matrices on their owners, and shards again.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from spmd.base.specs import Spec, entry_axes, make_entry, spec_axes
from spmd.base.xla import printed
from spmd.jaxpr.programs import closed_jaxprs
from spmd.layout.resolve import Placement, spread
from spmd.train.matrix_regions import Region
from spmd.wire import collectives

Axes = tuple[str, ...]  # mesh axes that shard one dim together
MOST_BATCH_DIMS = 2  # in front of a matrix: layers, and matrices of each layer, such as experts


@dataclasses.dataclass(frozen=True)
class Member:
    """A region with the program of one matrix.

    Attributes:
      program: a jaxpr.
      shape: the shape of the matrix.
      batch: sizes of the dims in front, layers and matrices of each layer, if each entry is a
        matrix of its own.
      stacked: for each input and output, True if it has the dims of the batch.
      batch_axes: mesh axes that shard each dim of the batch.
      routes: mesh axes along which matrices are sent to owners, one after the other.
      specs: the shardings of inputs and outputs.
    """

    region: Region
    program: Any
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    stacked: tuple[bool, ...]
    batch_axes: tuple[Axes, ...]
    routes: tuple[Axes, ...]
    specs: tuple[Spec, ...]

    @property
    def key(self) -> tuple:
        """A key that is equal for members of one group."""
        shared = self.region.shared
        return self.kind, tuple(shared[x] for x in self.region.inputs if x in shared)

    @property
    def kind(self) -> tuple:
        """A key that is equal for members of one group, and of groups that differ in shared inputs
        alone.
        """
        constants: list[int] = []
        for jaxpr in closed_jaxprs(self.program):
            constants += map(id, jaxpr.consts)
        return (
            self.region.level,
            # jaxprs compare by identity, and equal ones print equally
            printed(self.program),
            tuple(constants),
            len(self.batch),
            self.stacked,
            self.batch_axes,
            self.routes,
            self.specs,
        )

    @property
    def of_batch(self) -> Callable[..., Any]:
        """The program of a batch of matrices."""
        dims = [None if x in self.region.shared else 0 for x in self.region.inputs]
        return jax.vmap(jaxpr_as_fun(ClosedJaxpr(self.program, ())), in_axes=dims)

    def can_be_batched(self) -> bool:
        """Return whether there is a program of a batch of matrices."""
        shapes = []
        for outer, inner in zip(self.region.inputs, self.program.invars, strict=True):
            batch = (1,)
            if outer in self.region.shared:
                batch = ()
            shapes.append(shaped_like(inner.aval, (*batch, *inner.aval.shape)))
        try:
            jax.eval_shape(self.of_batch, *shapes)
        except Exception:  # a primitive, such as a callback, may refuse batches in any way
            return False
        return True

    def local_batch(self, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
        """Return the batch of matrices that the devices of one position along `batch_axes` have."""
        pairs = zip(self.batch, self.batch_axes, strict=True)
        return tuple(size // device_count(axes, mesh) for size, axes in pairs)


def shaped_like(like: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return an abstract array like another one, in another shape."""
    # a Python number has a weak type, by which JAX promotes dtypes in another way
    kind = like
    if not hasattr(like, "weak_type"):
        kind = jax.typeof(like)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)


def axes_of_batch(placement: Placement, batch: int) -> tuple[Axes, ...]:
    """Return the mesh axes that shard each of the first dims, as the layers of a stack."""
    entries = (*placement.state_spec, *[None] * batch)
    return tuple(map(entry_axes, entries[:batch]))


def routes_to_owners(
    placement: Placement, batch: int, mesh: Mesh | AbstractMesh
) -> tuple[Axes, ...]:
    """Return the mesh axes along which the parameter's matrices are sent to owners: those that
    shard a dim together, then all others.

    Args:
      batch: the number of first dims that are a batch of matrices.
    """
    routes = list(map(entry_axes, placement.state_spec[batch:]))
    sharding_axes = spec_axes(placement.state_spec)
    routes += [(axis,) for axis in mesh.axis_names if axis not in sharding_axes]
    return tuple(axes for axes in routes if device_count(axes, mesh) > 1)


def device_count(axes: Axes, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices along mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def border_spec(
    shape: tuple[int, ...],
    placement: Placement,
    mesh: Mesh | AbstractMesh,
    *,
    batch: int | None = None,
) -> Spec:
    """Return how an array that belongs to a parameter is sharded outside of regions: as the
    parameter's moments, or over as many devices as the sizes of its dims allow, if it has at least
    two.

    Args:
      batch: the number of first dims that are a batch of matrices, as the layers of a stack; None
        if their sizes have to show it.
    """
    if shape == placement.shape:
        return (*placement.state_spec, *[None] * (len(shape) - len(placement.state_spec)))
    if batch is None:
        most = min(len(placement.shape), len(shape), MOST_BATCH_DIMS + 2) - 2
        batch = 0
        while batch < most and shape[batch] == placement.shape[batch]:
            batch += 1
    routes = routes_to_owners(placement, batch, mesh)
    counts = {make_entry(axes): device_count(axes, mesh) for axes in routes}
    inner = shape[batch:]
    spec: Spec = (None,) * len(inner)
    if len(inner) > 1:
        spec = spread(inner, counts)
    return (*map(make_entry, axes_of_batch(placement, batch)), *spec)


def local_update(
    member: Member, arrays_of_each: list[int], batches: list[tuple[int, ...]]
) -> Callable[..., Any]:
    """Return the update of one device: from its shards of a group's arrays to matrices that it
    owns, their update, and back to shards.

    Args:
      member: any of the group.
      arrays_of_each: the numbers of inputs that are arrays of each member.
      batches: the batch of matrices of each member at this position along `batch_axes`.
    """
    inputs = member.region.inputs
    dims = len(member.batch)
    counts = [math.prod(batch) for batch in batches]
    ends = list(itertools.accumulate(counts))

    def matrices_of(shard: jax.Array, number: int, count: int) -> jax.Array:
        """Return an input of `count` programs, [count, ...], from a shard."""
        if member.stacked[number]:
            return shard.reshape(count, *[1] * dims, *shard.shape[dims:])
        return jnp.broadcast_to(shard, (count, *shard.shape))

    def shard_of(matrices: jax.Array, number: int, batch: tuple[int, ...]) -> jax.Array:
        """Return the shard of which these are the matrices."""
        if member.stacked[number]:
            return matrices.reshape(*batch, *matrices.shape[1 + dims :])
        return matrices[0]

    def local(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
        owned = []
        for number, shards in zip(arrays_of_each, arrays, strict=True):
            pairs = zip(shards, counts, strict=True)
            # one array of all members: one collective for all of them
            joined = jnp.concatenate([matrices_of(shard, number, count) for shard, count in pairs])
            owned.append(_to_owners(joined, _matrix_spec(member, number), member.routes))
        owned_arrays = iter(owned)
        shared_arrays = iter(shared)
        arguments = []
        for variable in inputs:
            if variable in member.region.shared:
                arguments.append(next(shared_arrays))
            else:
                arguments.append(next(owned_arrays))
        results = []
        for number, matrices in enumerate(member.of_batch(*arguments), len(inputs)):
            rows = _from_owners(matrices, _matrix_spec(member, number), member.routes)
            shards = []
            for end, count, batch in zip(ends, counts, batches, strict=True):
                shards.append(shard_of(rows[end - count : end], number, batch))
            results.append(shards)
        return results

    return local


def _matrix_spec(member: Member, number: int) -> Spec:
    """Return the sharding of one matrix of an input or output, as the program of one matrix has
    it.
    """
    spec = member.specs[number]
    if not member.stacked[number]:
        return spec
    dims = len(member.batch)
    return (*[None] * dims, *spec[dims:])


def _sharded_dims(spec: Spec, routes: tuple[Axes, ...]) -> list[tuple[Axes, int | None]]:
    """Return each route, with the dim of [matrices, ...] that its axes shard, or None."""
    dims = {entry_axes(entry): dim for dim, entry in enumerate(spec, 1) if entry is not None}
    return [(axes, dims.get(axes)) for axes in routes]


def _to_owners(shards: jax.Array, spec: Spec, routes: tuple[Axes, ...]) -> jax.Array:
    """Return the matrices that this device owns, from its shards of all, [matrices, ...]."""
    owners = math.prod(collectives.worker_count(axes) for axes in routes)
    count = shards.shape[0]
    missing = -count % owners
    if missing:
        # some matrices twice, not zeros, on which an iteration might never converge
        copies = [shards] * (missing // count)
        shards = jnp.concatenate([shards, *copies, shards[: missing % count]])
    for axes, dim in _sharded_dims(spec, routes):
        size = collectives.worker_count(axes)
        if dim is None:
            each = shards.shape[0] // size
            shards = lax.dynamic_slice_in_dim(shards, collectives.worker_index(axes) * each, each)
            continue
        rows = shards.reshape(size, -1, *shards.shape[1:])
        rows = jnp.moveaxis(collectives.all_to_all(rows, axes), 0, dim)
        shards = rows.reshape(*rows.shape[:dim], size * rows.shape[dim + 1], *rows.shape[dim + 2 :])
    return shards


def _from_owners(matrices: jax.Array, spec: Spec, routes: tuple[Axes, ...]) -> jax.Array:
    """Return the shards of all matrices, from the matrices that this device owns."""
    # In the opposite order: the last split is undone first.
    for axes, dim in reversed(_sharded_dims(spec, routes)):
        size = collectives.worker_count(axes)
        if dim is None:
            matrices = collectives.all_gather(matrices, axes, 0)
            continue
        parts = matrices.reshape(*matrices.shape[:dim], size, -1, *matrices.shape[dim + 1 :])
        rows = collectives.all_to_all(jnp.moveaxis(parts, dim, 0), axes)
        matrices = rows.reshape(-1, *rows.shape[2:])
    return matrices
