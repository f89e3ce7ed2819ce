"""Puts the arrays of a folder on eight devices in one way after the other, and prints the most host
memory so far after each.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.pretrained.name_map import NameMap
from spmd.pretrained.read_weights import aligned
from spmd.pretrained.safetensors_files import INDEX, open_files, write_file

# 300 MB as bfloat16 in the files, 600 MB as float32 on the devices
COUNT, INPUTS, OUTPUTS = 12, 4096, 3072
FILES = 4
NAMES = NameMap.loads(
    '[[tensors]]\nfile = "{name}.weight"\nmodel = "{name}/kernel"\ntranspose = true'
)


class Network(nnx.Module):
    def __init__(self):
        for number in range(COUNT):
            setattr(
                self, f"map{number}", nnx.Linear(INPUTS, OUTPUTS, use_bias=False, rngs=nnx.Rngs(0))
            )


def write(folder):
    """Files of as many tensors each, with an index."""
    files = [f"model-{number + 1:05}-of-{FILES:05}.safetensors" for number in range(FILES)]
    weight_map = {f"map{number}.weight": files[number % FILES] for number in range(COUNT)}
    for file in files:
        names = [name for name in weight_map if weight_map[name] == file]
        write_file(
            folder / file, {name: np.full((OUTPUTS, INPUTS), 0.5, jnp.bfloat16) for name in names}
        )
    (folder / f"model{INDEX}").write_text(
        f'{{"metadata": {{}}, "weight_map": {str(weight_map).replace(chr(39), chr(34))}}}'
    )


def load(folder, sharding):
    """As `spmd.pretrained.load` reads it."""
    model = spmd.pretrained.load(
        folder,
        model=lambda: Network(),
        name_map=NAMES,
        mesh=sharding.mesh,
        layout="fsdp",
        progress=False,
    )
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def make(folder, sharding):
    """The same arrays, without reading."""
    shape, arrays = (INPUTS, OUTPUTS), []
    for _ in range(COUNT):
        buffers = [aligned(sharding.shard_shape(shape), np.dtype("float32")) for _ in jax.devices()]
        for buffer in buffers:
            buffer.fill(0.5)
        shards = list(map(jax.device_put, buffers, jax.devices()))
        arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, shards))
    return arrays


def all_at_once(folder, sharding):
    """All tensors are read first."""
    tensors = [
        np.fromfile(tensor.file, tensor.dtype, OUTPUTS * INPUTS, offset=tensor.offset)
        .reshape(tensor.shape)
        .T.astype(np.float32)
        for tensor in open_files(folder).tensors.values()
    ]
    return [jax.device_put(values, sharding) for values in tensors]


def main():
    folder = Path(sys.argv[1])
    spmd.simulate_devices(8)
    sharding = NamedSharding(spmd.make_mesh("data=8"), PartitionSpec("data"))
    for way in sys.argv[2:]:
        arrays = jax.block_until_ready(
            {"load": load, "make": make, "all_at_once": all_at_once}[way](folder, sharding)
        )
        assert len(arrays) == COUNT
        for array in arrays:
            assert array.dtype == jnp.float32 and len(array.sharding.device_set) == 8
            assert all(
                float(shard.data[0, 0]) == 0.5 and shard.data.size == INPUTS * OUTPUTS // 8
                for shard in array.addressable_shards
            )
        del array, arrays
        # not getrusage, which counts the program that started this process, too
        print(int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10)


if __name__ == "__main__":
    main()
