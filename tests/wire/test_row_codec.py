"""The exchange of row codecs: a lossless codec gives the exact mean for every arrangement of axes,
shards and nodes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.wire.codec.base import Bucket, RowCodec
from spmd.wire.codec.exact import Exact
from spmd.wire.shard_layout import ShardLayout

SHAPES = ((8, 16), (16, 3, 8), (24,))


@dataclasses.dataclass(frozen=True)
class Nothing(RowCodec):
    """Loses nothing; or, with `steps`, all that is finer than 1 / steps."""

    steps: int = 0

    def error(self, shape):
        return 0.0

    def encode(self, rows):
        return jnp.round(rows * self.steps) / self.steps if self.steps else rows

    def decode(self, payload, width):
        return payload


def reduce_with(codec, mesh, specs, inside):
    """Full means, every worker's `kept`, and the gradients they were made of."""
    mesh = spmd.make_mesh(mesh)
    axes, sizes = mesh.axis_names, tuple(mesh.shape.values())
    shard_layouts = tuple(
        ShardLayout(shape, spec, axes, sizes) for shape, spec in zip(SHAPES, specs, strict=True)
    )
    random = np.random.default_rng(0)
    grads = [random.normal(size=(8, *shape)).astype(np.float32) for shape in SHAPES]

    def worker(*local):
        means, kept, _ = codec.mean(
            [x[0] for x in local], [{} for _ in local], Bucket(shard_layouts, inside)
        )
        return means, [x[None] for x in kept]

    rows = [P(axes)] * len(SHAPES)
    run = jax.jit(
        jax.shard_map(
            worker,
            mesh=mesh,
            in_specs=tuple(rows),
            out_specs=([P(*spec) for spec in specs], rows),
            check_vma=False,
        )
    )
    means, kept = run(*grads)
    return [np.asarray(x) for x in means], [np.asarray(x) for x in kept], grads


WHERE = {
    "one axis, replicated": ("data=8", ((), (), ()), ()),
    "one axis, shards": ("data=8", (("data",), (None, None, "data"), ("data",)), ()),
    "two axes, replicated": ("node=2,data=4", ((), (), ()), ()),
    "two axes on one dim": (
        "node=2,data=4",
        ((("node", "data"),), (None, None, ("data", "node")), (("data", "node"),)),
        (),
    ),
    "two axes on two dims": (
        "node=2,data=4",
        (("data", "node"), ("node", None, "data"), (("node", "data"),)),
        (),
    ),
    "shards over the inner axis": ("node=2,data=4", (("data",), ("data",), ("data",)), ()),
    "shards over the outer axis": (
        "node=2,data=4",
        (("node",), (None, None, "node"), ("node",)),
        (),
    ),
    "nodes, replicated": ("node=2,data=4", ((), (), ()), ("data",)),
    "nodes, shards over both": (
        "node=2,data=4",
        ((("node", "data"),), ("node", None, "data"), (("data", "node"),)),
        ("data",),
    ),
    "nodes, shards inside": (
        "node=2,data=4",
        (("data",), (None, None, "data"), ("data",)),
        ("data",),
    ),
    "nodes, shards across": ("node=2,data=4", (("node",), ("node",), ("node",)), ("data",)),
    "the inner axis crosses": ("data=4,node=2", ((), (), ()), ("data",)),
    "three axes, the middle one exact": (
        "a=2,b=2,c=2",
        (("c",), (None, None, "c"), ("c",)),
        ("b",),
    ),
    "three axes, two exact": ("a=2,b=2,c=2", (("a",), ("a",), ("a",)), ("a", "c")),
}


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("mesh, specs, inside", WHERE.values(), ids=WHERE.keys())
def test_lossless_codec_gives_exact_mean(mesh, specs, inside):
    means, kept, grads = reduce_with(Nothing(), mesh, specs, inside)
    exact, _, _ = reduce_with(Exact(), mesh, specs, ())
    for ours, theirs, part, grad in zip(means, exact, kept, grads, strict=True):
        np.testing.assert_allclose(theirs, grad.mean(0), rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        np.testing.assert_allclose(part, grad, rtol=0, atol=2e-6)  # no worker lost anything


@pytest.mark.sampled(quick=5)
@pytest.mark.parametrize("mesh, specs, inside", WHERE.values(), ids=WHERE.keys())
def test_mean_of_kept_equals_returned_mean(mesh, specs, inside):
    """The contract of error feedback, with a codec so coarse that a mistake cannot hide."""
    means, kept, grads = reduce_with(Nothing(steps=2), mesh, specs, inside)
    for mean, part, grad in zip(means, kept, grads, strict=True):
        np.testing.assert_allclose(part.mean(0), mean, rtol=0, atol=1e-6)
        assert np.abs(mean - grad.mean(0)).max() > 0.01, "something was lost"
