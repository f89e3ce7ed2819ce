"""cuDNN's attention is lowered without cuDNN and without a GPU. Everything private to JAX that concerns plans is in this file.

`jax.nn.dot_product_attention(..., implementation="cudnn")` asks the installed cuDNN for its version and the first GPU for its
compute capability, and claims to need devices, though lowering needs none of them where all mesh axes are manual, as in the library's own
step. While a plan traces and exports a step, the target answers. (Elsewhere JAX has the partitioner call back into Python: such a step
cannot be exported.)
"""

import contextlib
from collections.abc import Iterator

from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as fused_attention

from spmd.planner.target import Target

VERSION = (9, 10, 0)  # as the description of a target says that the GPU compiler gets


@contextlib.contextmanager
def cudnn_of(target: Target) -> Iterator[None]:
    """Inside, JAX's lowering finds the cuDNN and the compute capability of a target; unchanged unless it is a GPU of NVIDIA."""
    if target.platform != "cuda":
        yield
        return
    major, minor = target.compiler["compute_capability"]
    number = VERSION[0] * 10000 + VERSION[1] * 100 + VERSION[2]

    def compute_capability(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers = {
        "check_cudnn_version": lambda: number,
        "check_compute_capability": lambda least: (major, minor) >= compute_capability(least),
        "is_cuda_compute_capability_equal": lambda wanted: (major, minor) == compute_capability(wanted),
    }
    devices = dispatch.prim_requires_devices_during_lowering
    needless = {primitive for primitive in devices if primitive.name.startswith("dot_product_attention_")}
    before = {name: getattr(fused_attention, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(fused_attention, name, answer)
        devices -= needless
        yield
    finally:
        for name, function in before.items():
            setattr(fused_attention, name, function)
        devices |= needless
