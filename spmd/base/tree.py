"""Paths, shapes and sizes of a pytree's leaves, as layouts, errors, plans and checkpoints write
them.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

# A pytree: JAX has no type for it.
Tree = Any


def path_of(keys: tuple) -> str:
    """A key path as one string, levels joined by "/".

    >>> path_of(
    ...     (
    ...         jax.tree_util.DictKey("blocks"),
    ...         jax.tree_util.SequenceKey(0),
    ...         jax.tree_util.GetAttrKey("kernel"),
    ...     )
    ... )
    'blocks/0/kernel'
    """
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def flatten(tree: Tree) -> dict[str, Any]:
    """Return leaves by path, in the tree's own order.

    >>> flatten({"a": {"b": 1}, "c": [2, 3]})
    {'a/b': 1, 'c/0': 2, 'c/1': 3}
    """
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_paths(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Map as `jax.tree.map` does, with the leaf's path as the first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, *leaves: function(path_of(keys), *leaves), tree, *others
    )


def children(node: Tree) -> list[Any]:
    """The subtrees of a node; none of a leaf."""
    below = jax.tree.leaves(node, is_leaf=lambda part: part is not node)
    if len(below) == 1 and below[0] is node:
        return []
    return below


def nodes(tree: Tree) -> Iterator[Any]:
    """A tree and all of its subtrees.

    >>> list(nodes((1, [2])))
    [(1, [2]), 1, [2], 2]
    """
    yield tree
    for child in children(tree):
        yield from nodes(child)


def abstract(tree: Tree, sharding: jax.sharding.Sharding | None = None) -> Tree:
    """The tree with every leaf replaced by its shape, dtype and this sharding; no data is read or
    moved.
    """

    def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(dtype_of(leaf), allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)

    return jax.tree.map(abstract_leaf, tree)


def dtype_of(leaf: Any) -> np.dtype:
    """The dtype of an array, a `ShapeDtypeStruct` or a Python number."""
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    return np.asarray(leaf).dtype


def nbytes(leaf: Any) -> int:
    """Bytes of the global array, from its shape and dtype."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def describe(leaf: Any) -> str:
    """Return dtype and shape, as errors and tables write them.

    >>> describe(jax.ShapeDtypeStruct((512, 10), "float32"))
    'float32[512, 10]'
    """
    return f"{dtype_of(leaf)}[{', '.join(map(str, np.shape(leaf)))}]"


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes, or that of a text with a unit: B, KiB, MiB, GiB, TiB, or KB, MB,
    GB, TB in powers of 1000.

    >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes(80)
    (1536, 2000000000, 80)

    Raises:
      ValueError: it is neither.
    """
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", size)
    if not match:
        raise ValueError(f"{size!r} is not a number of bytes")
    number, prefix, binary = match.groups()
    base = 1000
    if binary:
        base = 1024
    return round(float(number) * base ** " KMGT".index(prefix or " "))


def format_bytes(count: float) -> str:
    """Return a byte count in binary units.

    >>> format_bytes(1536), format_bytes(80)
    ('1.5 KiB', '80 B')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{count:.0f} B"
    return f"{count:.1f} {units[0]}"
