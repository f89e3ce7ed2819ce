"""The `[compiler]` table: options of XLA under plain names or their own, the defaults, and which of
them a platform has.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from spmd.base.fields import Conflict, as_toml, check_types
from spmd.base.tracebacks import trims_tracebacks
from spmd.base.tree import parse_bytes
from spmd.errors import OptionError, type_name

# Platforms, as JAX and as targets of plans call them.
GPU = ("gpu", "cuda", "rocm")
XLA_NAMES = {  # of each key: the options of XLA:GPU that it sets; other compilers have none of them
    "latency_hiding": ("xla_gpu_enable_latency_hiding_scheduler",),
    "combine_all_gather": ("xla_gpu_all_gather_combine_threshold_bytes",),
    "combine_reduce_scatter": ("xla_gpu_reduce_scatter_combine_threshold_bytes",),
    "combine_all_reduce": ("xla_gpu_all_reduce_combine_threshold_bytes",),
    "pipelined_collectives": (
        "xla_gpu_enable_pipelined_all_gather",
        "xla_gpu_enable_pipelined_reduce_scatter",
        "xla_gpu_enable_pipelined_all_reduce",
    ),
    "double_buffering": ("xla_gpu_enable_while_loop_unrolling",),
    "command_buffers": ("xla_gpu_enable_command_buffer",),
    "deterministic": ("xla_gpu_deterministic_ops",),
}
THRESHOLDS = tuple(key for key in XLA_NAMES if key.startswith("combine_"))
# What is recorded: all that jaxlib 0.10.2 records by default, or nothing.
COMMAND_BUFFERS = {
    True: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL",
    False: "",
}
# Defaults on GPUs; a layout's own value replaces one, and so does the option in $XLA_FLAGS. XLA's
# own default is off. The scheduler moves collectives so that computation hides them: the one option
# that NVIDIA's images of JAX set for every model
# (https://docs.nvidia.com/jax-toolbox/environment-variables), and a part of XLA's optimization
# level 1 (https://openxla.org/xla/gpu_optimization_levels). The others of that level cost memory,
# and stay choices of the layout.
GPU_DEFAULTS = {"latency_hiding": True}
# Beside them, where layers of a stack are gathered in their loop. Gathers of several weights are
# one operation: XLA waits for each before it begins the next, and computes nothing in between. The
# loop's two copies of a layer's parameters take turns, where they would be copied.
LAYERWISE_DEFAULTS = {"combine_all_gather": "256 MiB", "double_buffering": True}
# On CPUs with several devices. XLA:CPU runs independent operations at once, and lets a collective
# begin once a loop before it has begun: one device may reach it before the collectives in that
# loop, others after, and they wait until XLA ends the process (seen with jaxlib 0.11). In programs
# that its other scheduler orders, this does not happen. Simulated devices share cores anyway.
CPU_DEFAULTS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
# Turned off to compile a plan's program again that XLA cannot tile.
TRITON = "xla_gpu_enable_triton_gemm"
UNROLLING = {True: "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER", False: "WHILE_LOOP_UNROLLING_NO_UNROLL"}


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Compiler:
    """Options of XLA with which the step, evaluation and prediction are compiled.

    Plain names are for GPUs, and are not used elsewhere; None leaves the choice to the library or
    to XLA.

    Attributes:
      latency_hiding: schedule collectives early enough that computation hides them; the default.
      combine_all_gather, combine_reduce_scatter, combine_all_reduce: collectives are merged up to
        this size: bytes, or text such as "512 MiB". Larger ones use links better, and hold more
        memory.
      pipelined_collectives: move collectives of a loop's body into its iteration before or after,
        where computation hides them.
      double_buffering: two iterations of a loop as one, so that what one hands to the next is not
        copied.
      command_buffers: record sequences of kernels as CUDA graphs, which are launched at once.
      deterministic: equal results in every run; some operations are slower, and some cannot be
        compiled.
      options: further options by XLA's own names, which differ between releases of jaxlib, for any
        platform (a dict is accepted).

    Example:
      >>> from spmd import Layout
      >>> print(
      ...     Layout(
      ...         compiler=Compiler(
      ...             combine_all_gather="512 MiB", options={"xla_cpu_enable_fast_math": False}
      ...         )
      ...     ).to_toml(),
      ...     end="",
      ... )
      [compiler]
      combine_all_gather = "512 MiB"
      options = { xla_cpu_enable_fast_math = false }
    """

    latency_hiding: bool | None = None
    combine_all_gather: int | str | None = None
    combine_reduce_scatter: int | str | None = None
    combine_all_reduce: int | str | None = None
    pipelined_collectives: bool | None = None
    double_buffering: bool | None = None
    command_buffers: bool | None = None
    deterministic: bool | None = None
    options: tuple[tuple[str, Any], ...] | Mapping[str, Any] = ()

    def __post_init__(self) -> None:
        check_types(self)
        options = self.options
        if isinstance(options, Mapping):
            options = options.items()
        options = tuple(options)
        for name, value in options:
            if not isinstance(name, str) or type(value) not in (bool, int, str):
                raise OptionError(
                    f"Compiler: option {name!r} is {value!r}, {type_name(value)}.",
                    fix="True or False, a whole number, a string.",
                )
        object.__setattr__(self, "options", options)

    @property
    def keys(self) -> dict[str, Any]:
        """The plain names that are set, with their values."""
        return {key: value for key in XLA_NAMES if (value := getattr(self, key)) is not None}

    @property
    def chosen(self) -> frozenset[str]:
        """XLA's names of the options that the layout sets."""
        return (
            frozenset(name for key in self.keys for name in XLA_NAMES[key])
            | dict(self.options).keys()
        )


def compiler_problems(compiler: Compiler) -> list[Conflict]:
    """Values of `[compiler]` that cannot be valid on any platform, and options that are set
    twice.
    """
    conflicts = []
    for key in THRESHOLDS:
        if (value := getattr(compiler, key)) is not None and not _valid_size(value):
            conflicts.append(
                Conflict(
                    key,
                    f"{as_toml(value)} is not a size.",
                    'a number of bytes, or such as "512 MiB".',
                    kind="invalid_value",
                )
            )
    keys = {name: key for key in compiler.keys for name in XLA_NAMES[key]}
    for name, _ in compiler.options:
        if not re.fullmatch(r"\w+", name):
            conflicts.append(
                Conflict(
                    f"compiler.options.{name}",
                    "is not the name of an option of XLA.",
                    "such as xla_gpu_autotune_level.",
                )
            )
        elif name in keys:
            conflicts.append(
                Conflict(
                    f"compiler.options.{name}",
                    f"[compiler] {keys[name]} sets it as well.",
                    "leave one of them out.",
                )
            )
    return conflicts


def _valid_size(value: int | str) -> bool:
    try:
        # XLA keeps these thresholds in a signed 64-bit integer.
        return 0 <= parse_bytes(value) < 2**63
    except ValueError:
        return False


def xla_options(
    compiler: Compiler, platform: str, *, devices: int = 1, layerwise: bool = False
) -> dict[str, Any]:
    """The options to compile with on a platform, by XLA's names, as Python values: defaults, then
    keys, then the layout's own options.

    Args:
      devices: how many the program runs on.
      layerwise: whether the layers of a stack are gathered in their loop.

    >>> xla_options(Compiler(combine_all_gather="1 GiB"), "cuda")[
    ...     "xla_gpu_all_gather_combine_threshold_bytes"
    ... ]
    1073741824
    >>> xla_options(Compiler(latency_hiding=True), "cpu")
    {}
    """
    chosen: dict[str, Any] = {}
    flags = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    # An option of the compilation overrides that of $XLA_FLAGS, so a default must not be passed
    # where the user has set a flag.
    if platform == "cpu" and devices > 1:
        chosen = {name: value for name, value in CPU_DEFAULTS.items() if name not in flags}
    if platform in GPU:
        keys = dict(GPU_DEFAULTS)
        if layerwise:
            keys |= LAYERWISE_DEFAULTS
        # A flag of the user's own is stronger than a default.
        named = {*flags, *dict(compiler.options)}
        for key in [*keys]:
            if not named.isdisjoint(XLA_NAMES[key]):
                del keys[key]
        for key, value in (keys | compiler.keys).items():
            chosen |= dict.fromkeys(XLA_NAMES[key], _xla_value(key, value))
    return chosen | dict(compiler.options)


def _xla_value(key: str, value: Any) -> Any:
    """Return the value of a key as XLA takes it."""
    words = {"command_buffers": COMMAND_BUFFERS, "double_buffering": UNROLLING}.get(key)
    # JAX's `compiler_options` take numbers where $XLA_FLAGS have their text.
    if key in THRESHOLDS:
        return parse_bytes(value)
    if words is None:
        return value
    return words[value]


def compiler_notes(compiler: Compiler, platform: str) -> list[str]:
    """Return a note on keys for which the platform has no option."""
    if platform in GPU or not compiler.keys:
        return []
    return [f"note: [compiler] {', '.join(compiler.keys)}: for GPUs, not used on {platform}."]
