"""One spelling of a leaf's path, and sizes from shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd.base.tree import abstract, describe, dtype_of, flatten, format_bytes, map_paths, nbytes

TREE = {
    "blocks": [{"kernel": np.ones((2, 3), np.float32)}, {"kernel": np.ones(4, np.float32)}],
    "scale": 2.0,
}


def test_paths_are_the_same_everywhere():
    assert list(flatten(TREE)) == ["blocks/0/kernel", "blocks/1/kernel", "scale"]
    assert map_paths(lambda path, leaf: path, TREE) == {
        "blocks": [{"kernel": "blocks/0/kernel"}, {"kernel": "blocks/1/kernel"}],
        "scale": "scale",
    }
    assert list(flatten(nnx.to_pure_dict(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))))) == [
        "bias",
        "kernel",
    ]
    assert flatten(3.0) == {"": 3.0}


def test_map_paths_takes_more_trees():
    doubled = map_paths(lambda path, a, b: a + b, {"x": 1, "y": [2]}, {"x": 10, "y": [20]})
    assert doubled == {"x": 11, "y": [22]}


@pytest.mark.parametrize(
    "leaf, text, size",
    [
        (jnp.ones((2, 3)), "float32[2, 3]", 24),
        (jax.ShapeDtypeStruct((512, 10), "bfloat16"), "bfloat16[512, 10]", 10240),
        (np.int8(3), "int8[]", 1),
        (np.zeros((0, 4), np.float64), "float64[0, 4]", 0),
    ],
)
def test_arrays_in_words(leaf, text, size):
    assert (describe(leaf), nbytes(leaf)) == (text, size)


def test_abstract_keeps_shapes_in_the_dtype_that_jax_would_use():
    shapes = flatten(abstract({"a": np.ones((2, 3)), "b": 3, "c": jnp.ones(4, jnp.bfloat16)}))
    assert {path: describe(leaf) for path, leaf in shapes.items()} == {
        "a": "float32[2, 3]",
        "b": "int32[]",
        "c": "bfloat16[4]",
    }
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in shapes.values())
    assert dtype_of(True) == np.bool_


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_in_words(count, text):
    assert format_bytes(count) == text
