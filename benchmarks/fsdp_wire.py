"""Bytes that FSDP sends on GPUs: compiled for H100s by XLA:GPU, without a GPU.

    pip install jax-cuda13-plugin jax-cuda13-pjrt  # the compiler alone, 400 MB, no CUDA libraries
    JAX_PLATFORMS=cpu python benchmarks/fsdp_wire.py   # writes benchmarks/results/fsdp_wire.md

A GPT of 12 layers and width 768, 8 sequences of 1024 tokens per GPU, bfloat16, AdamW. Three
programs: the shardings of inputs and outputs alone (naive), the auto step and the manual step of
the layout `fsdp`. Bytes are those one GPU sends per step in a ring, from the collectives of the
compiled program.
"""

import argparse
import dataclasses
import datetime
import functools
import math
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import spmd
from spmd.base.tree import map_paths
from spmd.sync import parameter_sync
from spmd.sync.gradient_sync import GradientSync
from spmd.train.compiled_step import TrainingProgram
from spmd.train.model_setup import PlacedModel, TrainConfig
from spmd.train.step import train_step

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import gpt
import reported
from flax import nnx

LENGTH, PER_GPU = 1024, 8
# facts of the chip, as NVIDIA's data sheet and device query give them
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" device_address_bits: 64 pcie_bandwidth: 34359738368
  name: "NVIDIA H100 80GB HBM3" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""  # noqa: E501
BYTES = {
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "s8": 1,
    "u8": 1,
    "pred": 1,
    "u16": 2,
    "s64": 8,
}


def sent(kind: str, group: int, result: int) -> float:
    """Bytes one device sends in a ring, from the bytes of its result."""
    share = (group - 1) / group
    factors = {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": group - 1,
        "all-to-all": share,
        "collective-permute": 1.0,
    }
    return factors[kind] * result


def wire(hlo: str, devices: int) -> dict[str, float]:
    """Bytes sent per device and step, by kind and dtype; loops would have to be multiplied out, so
    there must be none.
    """
    total: dict[str, float] = {}
    for line in hlo.splitlines():
        match = re.match(
            r"\s*(?:ROOT )?%?\S+ = (.*?) "
            r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(",
            line,
        )
        if not match:
            continue
        arrays = [
            (kind, math.prod(int(n) for n in dims.split(",") if n) * BYTES[kind])
            for kind, dims in re.findall(r"\b([a-z]\w+)\[([\d,]*)\]", match[1])
        ]
        if match[3] and match[2] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # a start gives (operands, results)
        groups = re.search(r"replica_groups=\{\{([\d,]+)\}", line) or re.search(
            r"replica_groups=\[\d+,(\d+)\]", line
        )
        group = (
            devices
            if groups is None
            else len(groups[1].split(","))
            if "," in groups[1]
            else int(groups[1])
        )
        for kind, size in arrays:
            key = f"{match[2]} {kind}"
            total[key] = total.get(key, 0.0) + sent(match[2], group, size)
    return total


def program(devices: list, arm: str):
    layout = spmd.Layout.load("fsdp")
    if arm != "manual":
        layout = dataclasses.replace(layout, gradients=spmd.Gradients("compiler"))
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def model():
        return gpt.GPT(
            vocab=50304, width=768, depth=12, heads=12, length=LENGTH, dropout=0.0, rngs=nnx.Rngs(0)
        )

    placed = PlacedModel(
        TrainConfig(model, spmd.losses.cross_entropy, optax.adamw(1e-3), precision="bfloat16"),
        mesh,
        layout,
    )
    rows = PER_GPU * len(devices)
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), np.int32)
    ready = TrainingProgram(placed, {"tokens": tokens, "targets": tokens})
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    batch = map_paths(
        lambda _, s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=over_data), ready.sample
    )
    weights = jax.ShapeDtypeStruct((rows,), np.float32, sharding=over_data)
    jitted = jax.jit(
        functools.partial(train_step, ready.make_step(rows, True)),
        donate_argnums=0,
        out_shardings=(placed.shardings, NamedSharding(mesh, PartitionSpec())),
    )
    return jitted.lower(placed.abstract_state, batch, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", default="8,64")
    options = parser.parse_args()
    command = f"JAX_PLATFORMS=cpu python benchmarks/fsdp_wire.py --gpus {options.gpus}"
    lines = [
        "# Bytes FSDP sends",
        "",
        f"`{command}`, {datetime.date.today()}, compiled for H100s without a GPU, jax "
        f"{jax.__version__}.",
        "",
    ]
    lines += [__doc__.strip().split("\n\n")[-1], ""]
    header = (
        "GPUs",
        "program",
        "MB sent per GPU and step",
        "of which",
        "memory: arguments + temporaries, GB",
        "compile s",
    )
    lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    gather_param = parameter_sync.gather_param
    reduce_gradients = GradientSync.reduce_gradients
    for count in map(int, options.gpus.split(",")):
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology=f"1x{max(1, count // 8)}x{min(8, count)}"
        )
        for arm in ("naive", "auto", "manual"):
            # naive: the partitioner knows how arrays are stored, and not where parameters are used
            # replicated
            parameter_sync.gather_param = (
                (lambda sync, placement, shard, **options: shard)
                if arm == "naive"
                else gather_param
            )
            GradientSync.reduce_gradients = (
                (lambda self, grads, memory, step: (grads, memory, jnp.zeros((2, 0))))
                if arm == "naive"
                else reduce_gradients
            )
            started = time.perf_counter()
            compiled = program(list(topology.devices), arm).compile()
            took, memory, moved = (
                time.perf_counter() - started,
                compiled.memory_analysis(),
                wire(compiled.as_text(), count),
            )
            parts = ", ".join(
                f"{key} {value / 1e6:.0f}"
                for key, value in sorted(moved.items(), key=lambda item: -item[1])
                if value >= 5e5
            )
            size = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9
            lines.append(
                f"| {count} | {arm} | {sum(moved.values()) / 1e6:.0f} | {parts} | {size:.2f} | "
                f"{took:.0f} |"
            )
            print(lines[-1], flush=True)
    reported.write("fsdp_wire", lines)


if __name__ == "__main__":
    main()
