"""Replicas that differ are found, by array and mesh position, and nothing else is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.distributed import replica_check
from spmd.distributed.replica_check import SMALL, check_replicas
from spmd.errors import ClusterError


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh("data=4,model=2")


def put(mesh, value, *spec):
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def changed(array, position, change):
    """The same array, with one device's shard changed."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[position] = change(shards[position])
    arrays = [
        jax.device_put(data, shard.device)
        for data, shard in zip(shards, array.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)


def state(mesh):
    random = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    return {
        "replicated": put(mesh, random),
        "sharded": put(mesh, random, None, "model"),
        "all": put(mesh, random, "data", "model"),
        "half": put(mesh, random.astype(jnp.bfloat16)),
        "tiny": put(mesh, np.arange(8, dtype="int8"), "model"),
        "yes": put(mesh, np.array([True, False])),
        "number": put(mesh, np.int32(7)),
        "nan": put(mesh, np.array([np.nan, -0.0], "float32")),
        "key": put(mesh, jax.random.key(0)),
        "none": put(mesh, np.zeros((0, 3), "float32")),
        "large": put(mesh, np.ones((SMALL + 2,), "float32")),
        "as large": put(mesh, np.zeros((2, SMALL + 2), "float32"), "model"),
    }


@pytest.fixture
def tables(monkeypatch):
    """Each table of checksums, [devices, columns], that was compared."""
    compared, real = [], replica_check._checksum_function

    def recorded(*args):
        return lambda *leaves: compared.append(np.asarray(real(*args)(*leaves))) or compared[-1]

    monkeypatch.setattr(replica_check, "_checksum_function", recorded)
    return compared


def test_equal_replicas_pass(mesh, tables):
    check_replicas(state(mesh), "now")
    check_replicas({}, "now")
    (table,) = tables
    assert sorted(len(set(sums)) for sums in table.T.tolist()) == [1, 2, 2, 8], (
        "the number of distinct shards of each sharding"
    )


def one_bit(shard):
    bits = shard.reshape(-1).view(np.uint32).copy()
    bits[0] ^= 1
    return bits.view(shard.dtype).reshape(shard.shape)


@pytest.mark.parametrize(
    ("name", "position", "change", "message"),
    [
        ("replicated", 5, one_bit, "replicated: devices 5 of the mesh (process 0)"),
        ("sharded", 3, lambda shard: shard[::-1], "sharded: devices 3 of the mesh"),
        (
            "half",
            0,
            lambda shard: shard + np.asarray(1, shard.dtype),
            "half: devices 0 of the mesh",
        ),
        ("tiny", 7, lambda shard: shard + np.int8(1), "tiny: devices 7 of the mesh"),
        ("yes", 2, np.logical_not, "yes: devices 2 of the mesh"),
        ("number", 6, lambda shard: shard + np.int32(2**31 - 1), "number: devices 6 of the mesh"),
        ("nan", 1, lambda shard: np.abs(shard), "nan: devices 1 of the mesh"),
        ("large", 4, one_bit, "large: devices 4 of the mesh"),
        (
            "as large",
            2,
            lambda shard: np.roll(shard + np.arange(SMALL + 2, dtype="float32"), 1),
            "as large: devices 2 of the mesh",
        ),
    ],
)
def test_differing_replica_is_named(mesh, name, position, change, message):
    arrays = state(mesh)
    arrays[name] = changed(arrays[name], position, change)
    with pytest.raises(ClusterError) as caught:
        check_replicas(arrays, "after step 7")
    assert "after step 7, copies of 1 of 11 arrays differ from most others:\n    " + message in str(
        caught.value
    )


def flipped(*places):
    signs = np.ones(300, "float32")
    signs[list(places)] = -1
    return signs


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ("random", lambda shard: 2 * shard),
        ("random", lambda shard: -shard),
        ("random", lambda shard: shard * np.where(np.arange(64) == 3, -1, 1).astype("float32")),
        (np.ones(64, "float32"), np.zeros_like),
        (np.zeros((256, 256), "float32"), lambda shard: shard + np.float32(0.1)),
        (np.ones(300, "float32"), lambda shard: shard * flipped(7, 11)),
        (np.arange(4096, dtype="int32"), lambda shard: np.roll(shard, 1)),
    ],
    ids=["doubled", "negated", "a column negated", "zeros", "shifted", "two signs", "rolled"],
)
def test_patterned_differences_are_found(mesh, value, change):
    """A sum of words times odd numbers would miss all but the last: the differences add up to a
    multiple of 2^32.
    """
    random = np.random.default_rng(1).normal(size=(64, 64)).astype("float32")
    array = put(mesh, random if isinstance(value, str) else value)
    arrays = {
        "before": put(mesh, np.float32(1)),
        "it": changed(array, 3, change),
        "like it": put(mesh, random),
    }
    with pytest.raises(
        ClusterError,
        match=r"now, copies of 1 of 3 arrays differ from most others:\n    it: devices 3 of the "
        r"mesh",
    ):
        check_replicas(arrays, "now")


def test_opposite_differences_in_two_arrays_do_not_cancel(mesh):
    arrays = {
        "one": put(mesh, np.zeros(SMALL + 1, "int32")),
        "two": put(mesh, np.zeros(SMALL + 2, "int32")),
    }
    arrays = {
        name: changed(leaf, 2, lambda shard, by=by: shard + by)
        for (name, leaf), by in zip(arrays.items(), (1, -1), strict=True)
    }
    with pytest.raises(ClusterError, match="copies of 2 of 2 arrays"):
        check_replicas(arrays, "now")


def test_all_differing_arrays_are_named(mesh):
    arrays = state(mesh)
    arrays |= {
        name: changed(arrays[name], position, one_bit)
        for name, position in (("replicated", 5), ("large", 5), ("sharded", 3))
    }
    with pytest.raises(ClusterError) as caught:
        check_replicas(arrays, "now")
    lines = [
        f"    {name}: devices {position} of the mesh (process 0)"
        for name, position in (("replicated", 5), ("sharded", 3), ("large", 5))
    ]
    assert sorted(lines) == sorted(str(caught.value).splitlines()[1:-1])


def test_unreplicated_shards_are_not_compared(mesh, tables):
    unreplicated = state(mesh)["all"]
    for leaf in (unreplicated, changed(unreplicated, 3, one_bit)):
        check_replicas({"all": leaf}, "now")
    before, after = tables
    assert np.flatnonzero((before != after).any(axis=1)).tolist() == [3], (
        "the checksum saw the change"
    )
