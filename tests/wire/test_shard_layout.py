"""`ShardLayout` against plain numpy and against where jax places the shards, on meshes of several
data axes.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.base.specs import entry_axes, pspec
from spmd.wire.shard_layout import ShardLayout

# axes with their sizes (outermost first), shape, spec
LAYOUTS = [
    ({"data": 8}, (24, 16), ()),
    ({"data": 8}, (24, 16), ("data",)),
    ({"data": 8}, (3, 16), (None, "data")),
    ({"data": 8}, (7, 9), ()),
    ({"data": 8}, (13,), ()),
    ({"data": 8}, (1,), ()),
    ({"data": 8}, (), ()),
    ({"node": 2, "data": 4}, (7, 9), ()),
    ({"node": 2, "data": 4}, (8, 3), (("node", "data"),)),
    ({"node": 2, "data": 4}, (8, 3), (("data", "node"),)),
    ({"data": 4, "node": 2}, (8, 3), (("node", "data"),)),
    ({"data": 4, "node": 2}, (8, 3), (("data", "node"),)),
    ({"node": 2, "data": 4}, (12, 6), ("data", "node")),
    ({"node": 2, "data": 4}, (12, 6), ("node", None)),
    ({"node": 2, "data": 4}, (12, 5), ("data",)),
    ({"data": 4, "node": 2}, (12, 5), ("data",)),
    ({"data": 4, "node": 2}, (12, 5), ("node",)),
    ({"node": 2, "data": 4}, (5, 3, 8), (None, None, ("data", "node"))),
    ({"node": 2, "data": 4}, (4, 3, 5), ("data", None)),
    ({"pod": 2, "node": 2, "data": 2}, (5, 8, 3), (None, ("data", "pod"))),
    ({"pod": 2, "node": 2, "data": 2}, (8, 3), (("node", "data", "pod"),)),
    ({"pod": 2, "node": 2, "data": 2}, (6, 10), ("data", "pod")),
    ({"pod": 2, "node": 2, "data": 2}, (7, 6), (None, "node")),
]
every_layout = pytest.mark.parametrize(
    "axes, shape, spec", LAYOUTS, ids=lambda value: str(value).replace(" ", "").replace("'", "")
)


def make(axes, shape, spec):
    return ShardLayout(shape, spec, tuple(axes), tuple(axes.values()))


def numbered(shape):
    """Every element another number, none of them 0."""
    return np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)


def places(axes):
    """The coordinates of every worker, in the order of their numbers."""
    return [
        dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))
    ]


def number(at, names, axes):
    """The position of a worker along some axes, the first one slowest."""
    return sum(
        at[name] * math.prod(axes[later] for later in names[n + 1 :])
        for n, name in enumerate(names)
    )


def piece_at(x, axes, spec, at):
    """By hand: the piece of the worker at these coordinates."""
    for dim, entry in enumerate(spec):
        names = entry_axes(entry)
        size = x.shape[dim] // math.prod(axes[name] for name in names)
        x = np.take(
            x, range(number(at, names, axes) * size, (number(at, names, axes) + 1) * size), axis=dim
        )
    return x


def rows_at(x, axes, spec):
    """By hand: what each worker owns of its piece, and which of these places are only filled up."""
    used = [name for entry in spec for name in entry_axes(entry)]
    left = [name for name in axes if name not in used]
    share, rows = math.prod(axes[name] for name in left), []
    for at in places(axes):
        piece = piece_at(x, axes, spec, at).reshape(-1)
        width = -(-piece.size // share)
        padded = np.pad(piece, (0, share * width - piece.size))
        rows.append(padded[number(at, left, axes) * width :][:width])
    return np.stack(rows)


@pytest.mark.sampled(quick=3)
@every_layout
def test_to_rows_gives_each_worker_its_elements(axes, shape, spec):
    layout, x = make(axes, shape, spec), numbered(shape)
    rows, wanted = np.asarray(layout.to_rows(jnp.asarray(x))), rows_at(x, axes, spec)
    assert rows.shape == (layout.workers, layout.width) and rows.dtype == np.float32
    assert np.array_equal(rows, wanted)
    assert sorted(rows[rows != 0]) == sorted(x.reshape(-1))  # every element has one owner


@pytest.mark.sampled(quick=3)
@every_layout
def test_from_rows_inverts_to_rows(axes, shape, spec):
    layout, x = make(axes, shape, spec), numbered(shape)
    rows = layout.to_rows(jnp.asarray(x))
    assert np.array_equal(layout.from_rows(rows), x)
    # what fills rows up is thrown away, whatever became of it
    assert np.array_equal(layout.from_rows(jnp.where(rows == 0, jnp.nan, rows)), x)
    if math.prod(shape) > layout.width > 0:
        assert not np.array_equal(layout.from_rows(rows[::-1]), x)


@every_layout
def test_shards_are_in_the_order_of_the_axes(axes, shape, spec):
    layout, x = make(axes, shape, spec), numbered(shape)
    pieces = np.asarray(layout.shards(jnp.asarray(x)))
    used = {name for entry in spec for name in entry_axes(entry)}
    assert layout.sharded_axes == tuple(
        name for name in axes if name in used
    ) and layout.replicated_axes == tuple(name for name in axes if name not in used)
    for at in places(axes):
        piece = piece_at(x, axes, spec, at)
        assert piece.shape == layout.shard_shape
        assert np.array_equal(pieces[number(at, layout.sharded_axes, axes)], piece.reshape(-1))


@pytest.mark.sampled(quick=3)
@every_layout
def test_join_rows_gives_shard(axes, shape, spec):
    layout, x = make(axes, shape, spec), numbered(shape)
    rows, everybody = np.asarray(layout.to_rows(jnp.asarray(x))), places(axes)
    for at in everybody:
        sharing = [
            n
            for n, other in enumerate(everybody)
            if all(other[name] == at[name] for name in layout.sharded_axes)
        ]
        assert np.array_equal(
            layout.join_rows(jnp.asarray(rows[sharing])), piece_at(x, axes, spec, at)
        )


@pytest.mark.sampled(quick=3)
@every_layout
def test_local_shard_equals_jax_placement(axes, shape, spec):
    layout, x = make(axes, shape, spec), numbered(shape)
    mesh = spmd.make_mesh(axes)
    local = jax.jit(
        jax.shard_map(
            layout.local_shard, mesh=mesh, in_specs=jax.P(), out_specs=pspec(spec), check_vma=False
        )
    )(x)
    assert np.array_equal(local, x)
    placed = {
        shard.device: np.asarray(shard.data)
        for shard in jax.device_put(x, jax.NamedSharding(mesh, pspec(spec))).addressable_shards
    }
    shards = {shard.device: np.asarray(shard.data) for shard in local.addressable_shards}
    assert set(shards) == set(mesh.devices.flat)
    assert all(np.array_equal(shards[device], placed[device]) for device in shards)
    assert all(
        np.array_equal(shards[device], piece_at(x, axes, spec, at))
        for device, at in zip(mesh.devices.flat, places(axes), strict=True)
    )


def test_order_of_axes_in_entry_decides_shard():
    x, axes = jnp.asarray(numbered((8, 3))), {"node": 2, "data": 4}
    node_first, data_first = (
        make(axes, (8, 3), (("node", "data"),)),
        make(axes, (8, 3), (("data", "node"),)),
    )
    assert np.array_equal(node_first.shards(x), x.reshape(8, 3))
    assert np.array_equal(
        data_first.shards(x), np.asarray(x).reshape(4, 2, 3).swapaxes(0, 1).reshape(8, 3)
    )
    assert not np.array_equal(node_first.to_rows(x), data_first.to_rows(x))


def test_rows_of_bfloat16_are_exact_float32():
    x = jnp.asarray(numbered((7, 9)), jnp.bfloat16)
    rows = make({"data": 8}, (7, 9), ()).to_rows(x)
    assert rows.dtype == jnp.float32 and rows.shape == (8, 8)
    assert np.array_equal(rows.reshape(-1)[:63], x.reshape(-1).astype(jnp.float32))
    assert not np.any(rows.reshape(-1)[63:])


@pytest.mark.parametrize(
    "shape, width, filled",
    [((13,), 2, 3), ((1,), 1, 7), ((8,), 1, 0), ((9,), 2, 7), ((7, 9), 8, 1)],
)
def test_last_rows_are_padded_with_zeros(shape, width, filled):
    layout = make({"node": 2, "data": 4}, shape, ())
    rows = np.asarray(layout.to_rows(jnp.asarray(numbered(shape))))
    assert layout.width == width and (rows == 0).sum() == filled
    assert np.array_equal(
        np.flatnonzero(rows.reshape(-1) == 0), np.arange(8 * width - filled, 8 * width)
    )


def test_shard_layout_equality_and_hash():
    layout = make({"data": 8}, (24, 16), ("data",))
    assert layout == make({"data": 8}, (24, 16), ("data",)) and hash(layout) == hash(
        make({"data": 8}, (24, 16), ("data",))
    )
    assert layout != dataclasses.replace(layout, spec=())
