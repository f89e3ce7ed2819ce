"""Sharding constraints in a model's own code, which was written for a loop in which the compiler
sees the whole mesh.

Inside a step they are passed to the compiler for the auto mesh axes only: a manual region has
already sharded its arrays over the others. Flax's boxes around parameters are opened without a
constraint, since the layout decides the sharding of parameters.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
from flax.core import meta
from flax.linen import spmd as logical
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import entry_axes
from spmd.errors import ModelError, did_you_mean
from spmd.models.patches import Patches


def manual_axes() -> tuple[str, ...]:
    """Return the mesh axes along which the code that is being traced sees one device's shard."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


@contextlib.contextmanager
def constraints_on(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """Let `jax.lax.with_sharding_constraint` inside, in a model's own code, refer to this mesh;
    with None it does nothing.

    Other threads are not affected.
    """
    # A tuple, since a scope with None is a scope, too.
    with _PATCHES.scope((mesh,)):
        yield


# Taken before the name is replaced: the replacement calls it.
_constrain = jax.lax.with_sharding_constraint


def _with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Stand for `jax.lax.with_sharding_constraint`."""
    scope = _PATCHES.value
    if scope is None:
        return _constrain(x, shardings)

    def constrain(sharding: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda leaf: _constrained(leaf, sharding, scope[0]), subtree)

    return jax.tree.map(
        constrain, shardings, x, is_leaf=lambda s: s is None or isinstance(s, PartitionSpec)
    )


def _constrained(x: jax.Array, sharding: Any, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    spec = sharding
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
    if spec is None or mesh is None:
        return x
    if not isinstance(spec, PartitionSpec):
        return _constrain(x, sharding)
    manual = manual_axes()
    entries = [
        _auto_entry(entry, size, manual, mesh) for entry, size in zip(spec, x.shape, strict=False)
    ]
    if not any(size > 1 for axis, size in mesh.shape.items() if axis not in manual):
        return x
    # Inside a manual region JAX takes the mesh of that region only.
    if manual:
        mesh = jax.sharding.get_abstract_mesh()
    return _constrain(x, NamedSharding(mesh, PartitionSpec(*entries)))


def _auto_entry(entry: Any, size: int, manual: tuple[str, ...], mesh: Mesh | AbstractMesh) -> Any:
    """Return an entry of a spec reduced to auto mesh axes, for a dim of this size."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    axes = entry_axes(entry)
    for axis in axes:
        if axis not in mesh.shape:
            sizes = ", ".join(f"{name}={count}" for name, count in mesh.shape.items())
            why = (
                f'the model calls with_sharding_constraint with mesh axis "{axis}", which mesh '
                f"{sizes} does not have."
            )
            raise ModelError(
                why, fix=f"{did_you_mean(axis, mesh.shape)} Or a mesh and a layout with that axis."
            )
    free = tuple(axis for axis in axes if axis not in manual)
    if size % math.prod(mesh.shape[axis] for axis in free) == 0:
        return free
    return PartitionSpec.UNCONSTRAINED


def _unboxed(box: Any, apply_constraint: bool = True) -> Any:
    """Stand for `unbox` of flax's boxes."""
    if _PATCHES.value is not None:
        return box.value
    return _UNBOX[type(box)](box, apply_constraint)


_UNBOX = {kind: kind.unbox for kind in (meta.Partitioned, logical.LogicallyPartitioned)}
_PATCHES = Patches(
    "constraints_on",
    [
        (jax.lax, "with_sharding_constraint", _with_sharding_constraint),
        *((kind, "unbox", _unboxed) for kind in _UNBOX),
    ],
)
