"""Calls in a model's own code that go elsewhere while the model is traced: sharding constraints,
and JAX's and flax's attention.

The code was written for a loop in which the compiler sees the whole mesh. Inside a step its
sharding constraints are passed to the compiler for the auto mesh axes only: a manual region has
already sharded its arrays over the others. Flax's boxes around parameters are opened without a
constraint, since the layout decides the sharding of parameters.

Of attention the names `jax.nn.dot_product_attention`, `flax.nnx.dot_product_attention` and
`flax.linen.dot_product_attention` are replaced, and these functions where a flax module has one as
its `attention_fn`. A name that a file has imported from there is not: it is the function itself.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as linen
import flax.linen.attention as linen_attention
import flax.nnx as nnx
import flax.nnx.nn.attention as nnx_attention
import jax
from flax.core import meta
from flax.linen import spmd as logical
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import entry_axes
from spmd.errors import ModelError, did_you_mean
from spmd.models.patches import Patches

# Sharding constraints -------------------------------------------------------------------------


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
    with _CONSTRAINT_PATCHES.scope((mesh,)):
        yield


# Taken before the name is replaced: the replacement calls it.
_constrain = jax.lax.with_sharding_constraint


def _with_sharding_constraint(x: Any, shardings: Any) -> Any:
    """Stand for `jax.lax.with_sharding_constraint`."""
    scope = _CONSTRAINT_PATCHES.value
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
    if _CONSTRAINT_PATCHES.value is not None:
        return box.value
    return _UNBOX[type(box)](box, apply_constraint)


_UNBOX = {kind: kind.unbox for kind in (meta.Partitioned, logical.LogicallyPartitioned)}
_CONSTRAINT_PATCHES = Patches(
    "constraints_on",
    [
        (jax.lax, "with_sharding_constraint", _with_sharding_constraint),
        *((kind, "unbox", _unboxed) for kind in _UNBOX),
    ],
)


# Attention ------------------------------------------------------------------------------------

ORIGINALS: dict[str, Callable[..., Any]] = {
    "jax": jax.nn.dot_product_attention,
    "nnx": nnx.dot_product_attention,
    "linen": linen.dot_product_attention,
}
_NAMES = {"jax": (jax.nn,), "nnx": (nnx, nnx_attention), "linen": (linen, linen_attention)}
# that keep the function as `attention_fn`
_MODULES: tuple[Any, ...] = (nnx.MultiHeadAttention, linen.MultiHeadDotProductAttention)


@contextlib.contextmanager
def replaced_calls(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let calls of `ORIGINALS[name]` inside be calls of `functions[name]`, which takes the original
    first. Other threads are not affected.
    """
    with _ATTENTION_PATCHES.scope(functions):
        yield


def _replacement(name: str) -> Callable[..., Any]:
    original = ORIGINALS[name]

    @functools.wraps(original)
    def call_replacement(*args: Any, **kwargs: Any) -> Any:
        function = _ATTENTION_PATCHES.value.get(name)
        if function is None:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    return call_replacement


_REPLACEMENTS = {name: _replacement(name) for name in ORIGINALS}


class _AttentionFn:
    """Stands for a module's attribute `attention_fn`: the module's function, or its
    replacement.
    """

    def __init__(self, of_class: Any):
        self.of_class = of_class

    def __get__(self, module: Any, kind: Any = None) -> Any:
        function = self.of_class
        if module is not None:
            function = vars(module).get("attention_fn", self.of_class)
        for name, original in ORIGINALS.items():
            if function is original:
                return _REPLACEMENTS[name]
        return function

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["attention_fn"] = value


def _patches() -> Patches:
    replacements: list[tuple[Any, str, Any]] = []
    for name, places in _NAMES.items():
        for place in places:
            replacements.append((place, "dot_product_attention", _REPLACEMENTS[name]))
    # Flax's modules keep the function in an attribute, which a descriptor of the class reads.
    for kind in _MODULES:
        descriptor = _AttentionFn(vars(kind).get("attention_fn"))
        replacements.append((kind, "attention_fn", descriptor))
    return Patches("replaced_calls", replacements, outside=MappingProxyType({}))


_ATTENTION_PATCHES = _patches()
