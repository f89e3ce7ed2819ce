"""Matrices of a parameter that devices own, for `matrix_owners.py`: which mesh axes shard them, and
how shards become whole matrices on their owners, and shards again.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
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

Way = tuple[str, ...]  # mesh axes along which matrices are sent to their owners at once
MOST_BATCH_DIMS = 2  # in front of a matrix: layers, and what each layer has several of


@dataclasses.dataclass(frozen=True)
class Member:
    """A region with the program of one matrix.

    Attributes:
      program: a jaxpr.
      shape: of the matrix.
      batch: sizes of the dims in front, layers and what each has several of, if each entry is a
        matrix of its own.
      stacked: for each input and output whether it has these dims.
      slots: mesh axes that shard them.
      ways: how matrices are sent to owners, one after the other.
      specs: how inputs and outputs are sharded.
    """

    region: Region
    program: Any
    shape: tuple[int, ...]
    batch: tuple[int, ...]
    stacked: tuple[bool, ...]
    slots: tuple[Way, ...]
    ways: tuple[Way, ...]
    specs: tuple[Spec, ...]

    @property
    def key(self) -> tuple:
        """Return what is equal for members of one group."""
        shared = self.region.shared
        return self.kind, tuple(shared[x] for x in self.region.inputs if x in shared)

    @property
    def kind(self) -> tuple:
        """Return what is equal for members of one group, and of groups that differ in shared
        inputs alone.
        """
        constants = tuple(id(x) for jaxpr in closed_jaxprs(self.program) for x in jaxpr.consts)
        kind = self.region.level, printed(self.program), constants, len(self.batch)
        return *kind, self.stacked, self.slots, self.ways, self.specs

    @property
    def of_batch(self) -> Callable[..., Any]:
        """Return the program of a batch of matrices."""
        dims = [None if x in self.region.shared else 0 for x in self.region.inputs]
        return jax.vmap(jaxpr_as_fun(ClosedJaxpr(self.program, ())), in_axes=dims)

    def can_be_batched(self) -> bool:
        """Return whether there is a program of a batch of matrices."""
        shapes = []
        for outer, inner in zip(self.region.inputs, self.program.invars, strict=True):
            batch = () if outer in self.region.shared else (1,)
            shapes.append(shaped_like(inner.aval, (*batch, *inner.aval.shape)))
        try:
            jax.eval_shape(self.of_batch, *shapes)
        except Exception:  # a primitive, such as a callback, may refuse batches in any way
            return False
        return True

    def local_batch(self, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
        """Return the batch of matrices that the devices of one position along `slots` have."""
        pairs = zip(self.batch, self.slots, strict=True)
        return tuple(size // way_size(way, mesh) for size, way in pairs)


def shaped_like(like: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return an abstract array like another one, in another shape."""
    kind = like if hasattr(like, "weak_type") else jax.typeof(like)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)


def slots_of(placement: Placement, batch: int) -> tuple[Way, ...]:
    """Return the mesh axes that shard each of the first dims, as the layers of a stack."""
    return tuple(map(entry_axes, (*placement.state_spec, *[None] * batch)[:batch]))


def ways_of(
    placement: Placement, slots: tuple[Way, ...], mesh: Mesh | AbstractMesh
) -> tuple[Way, ...]:
    """Return the mesh axes along which the parameter's matrices are sent to owners: those that
    shard a dim together, then all others.
    """
    sharded = map(entry_axes, placement.state_spec[len(slots) :])
    used = spec_axes(placement.state_spec)
    ways = (*sharded, *((axis,) for axis in mesh.axis_names if axis not in used))
    return tuple(way for way in ways if way_size(way, mesh) > 1)


def way_size(way: Way, mesh: Mesh | AbstractMesh) -> int:
    """Return the number of devices along a way."""
    return math.prod(mesh.shape[axis] for axis in way)


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

    `batch`: how many of the first dims are a batch of matrices, as the layers of a stack; None if
    their sizes have to show it.
    """
    if shape == placement.shape:
        return (*placement.state_spec, *[None] * (len(shape) - len(placement.state_spec)))
    if batch is None:
        most = min(len(placement.shape), len(shape), MOST_BATCH_DIMS + 2) - 2
        batch = 0
        while batch < most and shape[batch] == placement.shape[batch]:
            batch += 1
    slots = slots_of(placement, batch)
    ways = {make_entry(way): way_size(way, mesh) for way in ways_of(placement, slots, mesh)}
    inner = shape[batch:]
    spec = spread(inner, ways) if len(inner) > 1 else (None,) * len(inner)
    return (*map(make_entry, slots), *spec)


def local_update(
    member: Member, arrays_of_each: list[int], batches: list[tuple[int, ...]]
) -> Callable[..., Any]:
    """Return the update of one device: from its shards of a group's arrays to matrices that it
    owns, their update, and back to shards.

    Args:
      member: any of the group.
      arrays_of_each: the numbers of inputs that are arrays of each member.
      batches: the batch of matrices of each member at this position along `slots`.
    """
    inputs, dims = member.region.inputs, len(member.batch)
    counts = [math.prod(batch) for batch in batches]
    ends = list(itertools.accumulate(counts))

    def matrices_of(shard: jax.Array, number: int, count: int) -> jax.Array:
        """Return [count, ...] of what one program takes, from a shard."""
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
            joined = jnp.concatenate([matrices_of(shard, number, count) for shard, count in pairs])
            owned.append(_to_owners(joined, _matrix_spec(member, number), member.ways))
        of_each, of_all = iter(owned), iter(shared)
        arguments = [next(of_all if x in member.region.shared else of_each) for x in inputs]
        results = []
        for number, matrices in enumerate(member.of_batch(*arguments), len(inputs)):
            rows = _from_owners(matrices, _matrix_spec(member, number), member.ways)
            shards = []
            for end, count, batch in zip(ends, counts, batches, strict=True):
                shards.append(shard_of(rows[end - count : end], number, batch))
            results.append(shards)
        return results

    return local


def _matrix_spec(member: Member, number: int) -> Spec:
    """Return how one matrix of an input or output is sharded, as the program of one matrix has
    it.
    """
    spec, dims = member.specs[number], len(member.batch)
    return (*[None] * dims, *spec[dims:]) if member.stacked[number] else spec


def _steps(spec: Spec, ways: tuple[Way, ...]) -> Iterator[tuple[Way, int | None]]:
    """Yield each way, with the dim of [matrices, ...] that it shards, or None."""
    dims = {entry_axes(entry): dim for dim, entry in enumerate(spec, 1) if entry is not None}
    return ((way, dims.get(way)) for way in ways)


def _to_owners(shards: jax.Array, spec: Spec, ways: tuple[Way, ...]) -> jax.Array:
    """Return the matrices that this device owns, from its shards of all, [matrices, ...].

    If there are fewer than devices, some are there twice: an iteration on zeros might never
    converge.
    """
    places = math.prod(collectives.worker_count(way) for way in ways)
    missing = -shards.shape[0] % places
    if missing:
        shards = jnp.concatenate(
            [shards, *[shards] * (missing // shards.shape[0]), shards[: missing % shards.shape[0]]]
        )
    for way, dim in _steps(spec, ways):
        size = collectives.worker_count(way)
        if dim is None:
            each = shards.shape[0] // size
            shards = lax.dynamic_slice_in_dim(shards, collectives.worker_index(way) * each, each)
            continue
        rows = shards.reshape(size, -1, *shards.shape[1:])
        rows = jnp.moveaxis(collectives.all_to_all(rows, way), 0, dim)
        shards = rows.reshape(*rows.shape[:dim], size * rows.shape[dim + 1], *rows.shape[dim + 2 :])
    return shards


def _from_owners(matrices: jax.Array, spec: Spec, ways: tuple[Way, ...]) -> jax.Array:
    """Return the shards of all matrices, from those that this device owns."""
    for way, dim in reversed(list(_steps(spec, ways))):
        size = collectives.worker_count(way)
        if dim is None:
            matrices = collectives.all_gather(matrices, way, 0)
            continue
        parts = matrices.reshape(*matrices.shape[:dim], size, -1, *matrices.shape[dim + 1 :])
        rows = collectives.all_to_all(jnp.moveaxis(parts, dim, 0), way)
        matrices = rows.reshape(-1, *rows.shape[2:])
    return matrices
