"""Kernels for GPUs are lowered without cuDNN and without a GPU. Everything private to JAX that
concerns plans is in this file.

`jax.nn.dot_product_attention(..., implementation="cudnn")` asks the installed cuDNN for its version
and the first GPU for its compute capability, and claims to need devices, though lowering needs none
of them where all mesh axes are manual, as in the library's own step. While a plan traces and
exports a step, the target answers. (Elsewhere JAX has the partitioner call back into Python: such a
step cannot be exported.) From jax 0.11 on, kernels of Triton ask for the compute capability too.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as fused_attention

from spmd.planner.target import Target

VERSION = (9, 10, 0)  # as the description of a target says that the GPU compiler gets


@contextlib.contextmanager
def gpu_of(target: Target) -> Iterator[None]:
    """Inside, JAX's lowering finds the cuDNN and the compute capability of a target; unchanged
    unless it is an NVIDIA GPU.
    """
    if target.platform != "cuda":
        yield
        return
    major, minor = target.compiler["compute_capability"]
    # As cuDNN numbers its versions, from 9 on.
    number = VERSION[0] * 10000 + VERSION[1] * 100 + VERSION[2]

    def compute_capability(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers: list[tuple[Any, str, Any]] = [
        (fused_attention, "check_cudnn_version", lambda: number),
        (
            fused_attention,
            "check_compute_capability",
            lambda least: (major, minor) >= compute_capability(least),
        ),
        (
            fused_attention,
            "is_cuda_compute_capability_equal",
            lambda version: (major, minor) == compute_capability(version),
        ),
    ]
    # before jax 0.11 all kernels are lowered for 9.0 where no GPU is present
    with contextlib.suppress(ImportError):
        gpu_info = importlib.import_module("jax._src.pallas.triton.gpu_info")
        info = gpu_info.GpuInfo(
            gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor
        )
        answers.append((gpu_info, "get_gpu_info", lambda: info))
    # JAX refuses to lower these without devices, because XLA calls back into Python to partition
    # them (custom_partitioning). On shards, inside of `jax.shard_map`, there is nothing to
    # partition.
    devices = dispatch.prim_requires_devices_during_lowering
    needless = {
        primitive for primitive in devices if primitive.name.startswith("dot_product_attention_")
    }
    before = [(module, name, getattr(module, name)) for module, name, _ in answers]
    try:
        for module, name, answer in answers:
            setattr(module, name, answer)
        devices -= needless
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
        devices |= needless
