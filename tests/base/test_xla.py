"""What XLA does not do as its operations say, and what is done about it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spmd.base.xla import move_bits, replicate, shard_map

BITS = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float32": np.uint32,
}


def every_number(dtype):
    """All there are; of float32 some subnormals, NaN and others."""
    if dtype == "float32":
        bits = np.concatenate(
            [np.arange(512), np.arange(0x7F7FFF00, 0x7F800100), np.arange(0, 1 << 32, 10_000_019)]
        ).astype(np.uint32)
    else:
        bits = np.arange(np.iinfo(BITS[dtype]).max + 1).astype(BITS[dtype])
    return bits[: len(bits) // 8 * 8].view(jnp.dtype(dtype))


def bits_of(x):
    return np.asarray(x).view(BITS[str(x.dtype)])


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("call", [lambda move: move, jax.jit], ids=["eager", "compiled"])
def test_move_bits_changes_no_bit(dtype, call):
    x = every_number(dtype)
    padded = call(
        lambda x: move_bits(lambda x: jnp.pad(jnp.concatenate([x[3:], x[:3]]), (0, x.size)), x)
    )(x)
    assert padded.dtype == x.dtype
    assert np.array_equal(bits_of(padded), np.pad(np.roll(bits_of(x), -3), (0, x.size)))


def test_move_bits_leaves_integers_and_structure():
    tree = {
        "integers": jnp.arange(4),
        "flag": jnp.array([True, False]),
        "half": jnp.ones(3, jnp.bfloat16),
    }
    moved = move_bits(lambda tree: {name: leaf[::-1] for name, leaf in tree.items()}, tree)
    assert {name: (leaf.dtype, leaf.tolist()) for name, leaf in moved.items()} == {
        name: (leaf.dtype, leaf.tolist()[::-1]) for name, leaf in tree.items()
    }


@pytest.mark.parametrize("dtype", BITS)
def test_replicated_changes_no_bit(dtype):
    x, mesh = every_number(dtype), jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    replicated_x = replicate(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))
    assert replicated_x.dtype == x.dtype and replicated_x.is_fully_replicated
    assert all(
        np.array_equal(bits_of(shard.data), bits_of(x)) for shard in replicated_x.addressable_shards
    )


def test_shard_map_takes_arrays_without_elements():
    mesh, data = (
        jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,)),
        PartitionSpec("data"),
    )
    shapes = []

    def body(tree, rest):
        shapes.append(jax.tree.map(jnp.shape, (tree, rest)))
        return tree | {"sum": 2 * tree["full"]}, rest.sum()

    empty = jnp.zeros((4, 0), jnp.int32)
    run = shard_map(
        body,
        mesh=mesh,
        in_specs=(data, PartitionSpec()),
        out_specs=(data, PartitionSpec()),
        axis_names=("data",),
    )
    outputs, total = jax.jit(run)({"full": jnp.arange(4.0), "empty": empty}, jnp.zeros(0))
    assert shapes[0] == ({"full": (2,), "empty": (2, 0)}, (0,))
    assert outputs["empty"].shape == (4, 0) and outputs["empty"].dtype == jnp.int32 and total == 0
    assert outputs["sum"].tolist() == [0, 2, 4, 6]


FREE_RUNNING = """
import jax, spmd
spmd.simulate_devices(8)
mesh, data = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec("data")
x = jax.device_put(jax.numpy.ones(64), jax.sharding.NamedSharding(mesh, data))
step = jax.jit(jax.shard_map(lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=data, out_specs=data, check_vma=False))
for _ in range(2000):
    x = step(x)
print(x.sum())
"""  # noqa: E501


@pytest.mark.system
def test_simulated_devices_run_a_loop_that_never_waits():
    flags = (
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=10 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=20"
    )
    clean = {name: value for name, value in os.environ.items() if name != "NPROC"}
    command = [sys.executable, "-c", FREE_RUNNING]
    done = subprocess.run(
        command, env=clean | {"XLA_FLAGS": flags}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["64.0"]
