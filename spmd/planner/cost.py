"""The cost of one instruction of a compiled program: what it multiplies, the bytes that it reads
and writes, and how long a kernel takes for them on a target.

A product is computed in tiles, one on each core at a time, so it takes a number of complete waves
of tiles: 109 take as long on 108 cores as 216 (NVIDIA, Matrix Multiplication Background User's
Guide, sections 2.3 and 3). The best is taken of the tiles that libraries have, and of numbers of
parts of the depth. Shares of the peak are those of the target's `[achieved]`.
"""

import dataclasses
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spmd.planner.hlo import Array, Instruction, Module, captured, integers
from spmd.planner.target import HIGHEST, Target

# rows, columns: cuBLAS's usual ones
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8, 16, 32)  # of the depth over several tiles, whose results are added up
WAVE = 1e-6  # seconds to fill the cores' pipelines and to write a tile's result; assumed
# A tile of a x b elements does a b / (a + b) operations for each element that it loads. At this
# number, loads take as long as operations.
BALANCED = 16.0
# for each core and clock (CUDA C++ Programming Guide, arithmetic instructions, compute capability
# 8.0 and 9.0)
EXPONENTIALS = 16
# bytes: glibc returns a larger block to the system, so the next step gets new pages (mallopt(3),
# M_MMAP_THRESHOLD)
KEPT = 32 * 2**20
# queries and keys of a block of attention; those on the diagonal are computed completely
DIAGONAL = 128
# XLA makes no kernels of these.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "domain",
}
# operations whose FLOPs are not modelled
UNCOUNTED = re.compile(r"lapack|solver|cholesky|triangular|fft", re.IGNORECASE)
# custom calls that run a kernel of the program's own (Pallas)
KERNEL = re.compile(r"triton|mosaic|tpu_custom_call")
ATTENTION = re.compile(r"mha|attention|flash", re.IGNORECASE)  # names of kernels
# Products of the size of the scores that a kernel makes, by what its name says, and how many of
# them repeat what another product has made. Forward: scores and output. Backward, with the scores
# made again: 5; jax.experimental.pallas.ops.gpu.attention makes scores and their gradient twice;
# others have a kernel for keys and values and one for queries.
PRODUCTS = (
    (r"preprocess", 0, 0),
    (r"mha_backward", 7, 3),
    (r"dkv|dk_dv", 4, 1),
    (r"dq", 3, 2),
    (r"backward|bwd", 5, 1),
    (r"", 2, 0),
)
SLICES = ("slice", "dynamic-slice", "gather")
_HIGHEST_PRECISION = re.compile(r"operand_precision=\{highest|\"operand_precision\":\[\"HIGHEST\"")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, a convolution as one, or an attention.

    Attributes:
      kind: "matmul", "convolution", "attention" or "attention_backward".
      dtype: what is multiplied.
      flops: a multiplication and an addition count as two; of attention, all scores count.
      sides: (how many, rows, columns, depth) of a product; () for attention.
      scores: of attention, how many.
      share: of `flops` and `scores` that are computed: about half under a causal mask.
    """

    kind: str
    dtype: str
    flops: float
    sides: tuple[float, ...] = ()
    scores: float = 0.0
    share: float = 1.0


def matmul(dtype: str, sides: tuple[float, ...], kind: str = "matmul") -> Product:
    """Return the product of (how many, rows, columns, depth)."""
    return Product(kind, dtype, 2.0 * math.prod(sides), sides)


def causal_share(queries: int, keys: int) -> float:
    """Return the share of scores that a kernel computes under a causal mask.

    >>> causal_share(2048, 2048), causal_share(128, 128)
    (0.53125, 1.0)
    """
    if queries != keys:
        return 1.0
    return min((1 + DIAGONAL / max(queries, 1)) / 2, 1.0)


def product_time(product: Product, target: Target) -> float:
    """Return the seconds of a product on one device, without its launch.

    >>> from spmd.planner.target import load
    >>> a100 = load("a100_80")  # 108 cores
    >>> waves = [
    ...     product_time(matmul("bfloat16", (1, count * 256, 128, 4096)), a100)
    ...     for count in (108, 109)
    ... ]
    >>> 1.4 < waves[1] / waves[0] < 2.0
    True
    """
    rate = target.rate(product.dtype) * getattr(target.achieved, product.kind)
    if not product.sides:
        seconds = product.flops / rate
        if target.cores:
            # Softmax takes an exponential of each score, which matrix units do not compute.
            seconds += product.scores / (EXPONENTIALS * target.cores * target.clock)
        return product.share * seconds
    if not target.cores:
        return product.flops / rate
    count, rows, columns, _ = product.sides
    # a part of each result is written in float32, and read
    addition = memory_time(2 * 4.0 * count * rows * columns, target)
    fastest = math.inf
    for tile, split in itertools.product(TILES, SPLITS):
        seconds = _tiled(product.sides, tile, split, rate / target.cores, target.cores)
        if split > 1:
            seconds += split * addition
        fastest = min(fastest, seconds)
    return fastest


def _tiled(
    sides: tuple[float, ...], tile: tuple[int, int], split: int, rate: float, cores: int
) -> float:
    """Return the seconds with one size of tile; `rate` is one core's, in the largest tile."""
    count, rows, columns, depth = sides
    tiles = count * math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]) * split
    # A core computes one tile at a time, and those without a tile in the last wave wait.
    waves = math.ceil(tiles / cores)
    return waves * (2.0 * tile[0] * tile[1] * (depth / split) / (rate * _relative(tile)) + WAVE)


def _relative(tile: tuple[int, int]) -> float:
    """Return the rate of a tile, relative to the largest."""

    def reached(rows: int, columns: int) -> float:
        intensity = rows * columns / (rows + columns)
        return intensity / (intensity + BALANCED)

    return reached(*tile) / reached(*TILES[0])


def memory_time(size: float, target: Target) -> float:
    """Return the seconds to move bytes between a device's cores and its memory, without a
    launch.
    """
    return size / (target.memory_bandwidth * target.achieved.memory)


def first_touch_time(temporaries: float, target: Target) -> float:
    """Return the seconds in which the operating system clears the memory of a step's temporaries;
    0 where steps keep it.
    """
    if not target.first_touch or temporaries <= KEPT:
        return 0.0
    return temporaries / target.first_touch


@dataclasses.dataclass(frozen=True)
class Cost:
    """The products that an instruction computes, and the bytes that it reads and writes."""

    products: tuple[Product, ...]
    bytes: float

    @property
    def flops(self) -> Mapping[str, float]:
        """FLOPs by the dtype that is multiplied."""
        total: dict[str, float] = defaultdict(float)
        for product in self.products:
            total[product.dtype] += product.flops
        return total


def cost_of(module: Module, computation: str, instr: Instruction) -> Cost:
    """Return the cost of an instruction other than a collective or a loop, with everything that is
    fused into it.
    """
    if instr.op in FREE:
        return Cost((), 0.0)
    products = []
    for name, part in module.fused(computation, instr):
        product = product_of(module, name, part)
        if product is not None and product.flops:
            products.append(product)
    return Cost(tuple(products), _bytes(module, computation, instr))


def host_bytes(module: Module, computation: str, instr: Instruction) -> float:
    """Return the bytes that an instruction, or an asynchronous copy that it starts, moves between
    the memories of device and host.

    Of arrays in both memories the smaller side counts: a slice of a stack is copied, not the stack.
    """
    if instr.op in FREE or instr.op in ("while", "conditional", "call", "custom-call"):
        return 0.0
    if instr.op.endswith("-done"):
        return 0.0
    arrays = list(instr.arrays)  # of a start: operands and results
    if not instr.op.endswith("-start"):
        for part in module.operands(computation, instr):
            arrays += part.arrays
    # scalars, such as the index of a slice, are no copies
    arrays = [array for array in arrays if array.shape]
    on_host = sum(array.bytes for array in arrays if array.host)
    on_device = sum(array.bytes for array in arrays if not array.host)
    return float(min(on_host, on_device))


def uncounted(module: Module) -> tuple[str, ...]:
    """Return solvers, transforms and kernels other than attention of a program, by name: their
    FLOPs are not counted.
    """
    names: dict[str, None] = {}
    for _, instr in module.instructions:
        if KERNEL.search(instr.custom_call):
            kernel = _kernel(instr)
            if not ATTENTION.search(kernel):
                names[kernel or instr.name] = None
        elif UNCOUNTED.search(instr.custom_call or instr.op):
            names[instr.custom_call or instr.op] = None
    return tuple(names)


def _kernel(instr: Instruction) -> str:
    """Return the name of the Pallas kernel that a custom call runs; "" if it has none."""
    return captured(r"([^/]*)/pallas_call\b", instr.scope)


def attention_products(kernel: str, query: Sequence[int], key: Sequence[int]) -> float:
    """Return the FLOPs of a kernel of fused attention, masked scores included; 0 if its name is
    another's.

    Args:
      kernel: the name; "" is a forward pass.
      query, key: shapes [..., length or heads, heads or length, width]; a key's longer middle dim
        is the length.

    >>> attention_products("mha_forward", (2, 128, 4, 16), (2, 128, 4, 16)) == 2 * 2 * (
    ...     2 * 4 * 128 * 128
    ... ) * 16
    True
    """
    if (kernel and not ATTENTION.search(kernel)) or len(query) < 3 or len(query) != len(key):
        return 0.0
    count, _ = _kernel_products(kernel)
    # Some kernels have heads before the length, others behind it.
    return count * 2.0 * math.prod(query) * max(key[1:-1])


def _kernel_products(kernel: str) -> tuple[int, int]:
    """Return the entry of `PRODUCTS` for a kernel: its products, and those that repeat others."""
    for pattern, count, repeated in PRODUCTS[:-1]:
        if re.search(pattern, kernel):
            return count, repeated
    _, count, repeated = PRODUCTS[-1]
    return count, repeated


def attention_recomputed(instr: Instruction) -> float:
    """Return the share of a kernel's products that repeat what the forward pass, or another
    kernel, has made; 0 for other instructions.
    """
    name = instr.custom_call
    kernel = _kernel(instr)
    if KERNEL.search(name) and ATTENTION.search(kernel):
        count, repeated = _kernel_products(kernel)
        return repeated / max(count, 1)
    # cuDNN's backward pass makes the scores again, one of its five products
    if "fmha" in name and "backward" in name.lower():
        return 1 / 5
    return 0.0


def product_of(module: Module, computation: str, instr: Instruction) -> Product | None:
    """Return the matrix product, convolution or attention that an instruction is; None for
    another instruction.
    """
    if instr.op not in ("dot", "convolution", "custom-call") or not instr.arrays:
        return None
    inputs = [part.arrays[0] for part in module.operands(computation, instr) if part.arrays]
    if len(inputs) < 2:
        return None
    dtype = inputs[0].dtype
    # a dot has its precision as an attribute, a custom call in its configuration
    if dtype == "float32" and _HIGHEST_PRECISION.search(instr.attributes):
        dtype = HIGHEST
    if instr.op == "dot":
        return _matmul(instr, inputs[0], dtype, r"lhs_{}_dims=\{{([\d,]*)\}}")
    if instr.op == "convolution":
        return _convolution(instr, inputs[0], inputs[1], instr.arrays[0], dtype)
    return _custom_product(instr, inputs, dtype)


def _custom_product(instr: Instruction, inputs: list[Array], dtype: str) -> Product | None:
    """Return the product that a custom call computes, by the name of the library's function."""
    name = instr.custom_call
    result = instr.arrays[0]
    # cuBLAS and cublasLt on GPUs, oneDNN on CPUs
    if "gemm" in name or "matmul" in name:
        return _matmul(instr, inputs[0], dtype, r'"lhs_{}_dimensions":\[([^\]]*)\]')
    if "conv" in name.lower():
        if "BackwardFilter" in name:  # from the input and the output's gradient
            return _convolution(instr, inputs[0], result, inputs[1], dtype)
        if "BackwardInput" in name:
            return _convolution(instr, result, inputs[1], inputs[0], dtype)
        return _convolution(instr, inputs[0], inputs[1], result, dtype)
    if KERNEL.search(name):
        kernel = _kernel(instr)
        if not kernel:
            return None
        flops = attention_products(kernel, inputs[0].shape, inputs[1].shape)
        return _attention(kernel, flops, inputs, dtype)
    if "fmha" in name or "Attention" in name:
        return _cudnn_attention(instr, inputs, name)
    return None


def _matmul(instr: Instruction, left: Array, dtype: str, dims: str) -> Product:
    """Return a matrix product; `dims` is the pattern of the dims of its left operand, contracting
    or batch.
    """
    contracting, batch = (
        integers(captured(dims.format(kind), instr.attributes)) for kind in ("contracting", "batch")
    )
    depth = math.prod(left.shape[dim] for dim in contracting)
    count = math.prod(left.shape[dim] for dim in batch)
    if not left.size:
        return matmul(dtype, (count, 0.0, 0.0, depth))
    rows = left.size / (depth * count)
    return matmul(dtype, (count, rows, instr.arrays[0].size / (count * rows), depth))


def _convolution(
    instr: Instruction, image: Array, kernel: Array, output: Array, dtype: str
) -> Product:
    """Return a convolution, without products with padding or between dilated pixels, as a product
    with the last dim of its result as columns.
    """
    flops = _convolution_flops(instr, image, kernel, output)
    result = instr.arrays[0]
    columns = 1
    if result.shape:
        columns = result.shape[-1]
    rows, depth = result.size / max(columns, 1), flops / (2.0 * max(result.size, 1))
    return Product("convolution", dtype, flops, (1, rows, columns, depth))


def _convolution_flops(instr: Instruction, image: Array, kernel: Array, output: Array) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instr.attributes)
    if labels is None:
        return 2.0 * output.size * kernel.size / max(kernel.shape[-1], 1)
    of_image, of_kernel, of_output = labels.groups()
    fields = re.findall(r"(\w+)=([\dx_-]+)", captured(r"window=\{([^}]*)\}", instr.attributes))
    window = {key: re.findall(r"-?\d+(?:_-?\d+)?", value) for key, value in fields}
    total = 2.0 * output.shape[of_output.index("b")] * output.shape[of_output.index("f")]
    total *= kernel.shape[of_kernel.index("i")]
    for number, label in enumerate(sorted(filter(str.isdigit, of_kernel))):
        stride, kernel_dilation, image_dilation = (
            # XLA's text leaves out what has its default.
            int(window[key][number]) if key in window else 1
            for key in ("stride", "rhs_dilate", "lhs_dilate")
        )
        low = 0
        if "pad" in window:
            low = int(window["pad"][number].split("_")[0])
        sides = (
            image.shape[of_image.index(label)],
            kernel.shape[of_kernel.index(label)],
            output.shape[of_output.index(label)],
        )
        total *= _pairs(sides, low, stride, kernel_dilation, image_dilation)
    return total


def _pairs(
    sides: tuple[int, int, int], low: int, stride: int, kernel_dilation: int, image_dilation: int
) -> int:
    """Count, along one dim, the pairs of an output pixel and a kernel pixel that fall on a pixel
    of the image.
    """
    image, kernel, output = sides
    at = np.arange(output)[:, None] * stride - low + np.arange(kernel)[None] * kernel_dilation
    inside = (at >= 0) & (at <= (image - 1) * image_dilation)
    return int((inside & (at % image_dilation == 0)).sum())


def _attention(kernel: str, flops: float, inputs: list[Array], dtype: str) -> Product:
    """Return the attention of a Pallas kernel. Its name says whether it leaves out what a causal
    mask does.
    """
    length = max(inputs[0].shape[1:-1], default=1)
    backward = re.search(r"backward|bwd|dkv|dk_dv|dq|dbias", kernel)
    kind = "attention"
    if backward is not None:
        kind = "attention_backward"
    share = 1.0
    if "causal" in kernel:
        share = causal_share(length, length)
    scores = math.prod(inputs[0].shape[:-1]) * length
    return Product(kind, dtype, flops, scores=scores, share=share)


def _cudnn_attention(instr: Instruction, inputs: list[Array], name: str) -> Product | None:
    """Return cuDNN's attention: two matrix products in the forward pass, five in the backward
    pass; all scores count as FLOPs.
    """
    # The scores are neither operand nor result: their shape is in the configuration of the call.
    pattern = r'"intermediate_tensor_shape": ?(\{.*?\}[^{}]*\})'
    tensor = json.loads(captured(pattern, instr.attributes) or "{}")
    # JSON of protocol buffers has integers of 64 bits as text.
    shape = [int(size) for size in tensor.get("dimensions", ())]
    if not shape:
        return None
    kind, products = "attention", 2
    if "backward" in name.lower():
        kind, products = "attention_backward", 5
    scores = math.prod(shape)
    causal = "CAUSAL" in captured(r'"mask_type": ?"(\w*)"', instr.attributes)
    share = 1.0
    if causal:
        share = causal_share(shape[-2], shape[-1])
    flops = products * 2.0 * scores * inputs[0].shape[-1]
    return Product(kind, inputs[0].dtype, flops, scores=scores, share=share)


def _bytes(module: Module, computation: str, instr: Instruction) -> float:
    """Return the bytes that an instruction reads and writes."""
    inputs = module.operands(computation, instr)
    result = _size(instr)
    # only the slice is read, and written
    if instr.op in SLICES:
        return 2.0 * result
    # XLA updates an operand in place: the second operand is the update
    if instr.op in ("dynamic-update-slice", "scatter"):
        return 2.0 * sum(map(_size, inputs[1:2]))
    body = ()
    if instr.op == "fusion":
        body = module.computations.get(instr.called_as("calls"), ())
    if not body:
        return float(sum(map(_size, inputs)) + result)
    total = float(result)
    for number, part in enumerate(inputs):
        total += _fused_bytes(body, number, _size(part), result)
    return max(total, 0.0)


def _size(instr: Instruction) -> int:
    """Return the bytes of an instruction's result."""
    return sum(array.bytes for array in instr.arrays)


def _fused_bytes(body: Sequence[Instruction], number: int, size: int, result: int) -> float:
    """Return the bytes that an operand of a fusion adds to those of the fusion's result. If the
    fusion only slices the operand, the slices count; if it updates the operand in place, the
    update, twice.

    Args:
      number: the operand's place.
      size: its bytes.
      result: bytes of the fusion's result.
    """
    name = ""
    for part in body:
        if part.op == "parameter" and part.attributes.startswith(f"({number})"):
            name = part.name
    users = list(_users(body, name))
    for alias, part in users:
        if part.op not in (*SLICES, "dynamic-update-slice") or part.operands[0] != alias:
            return size
    if not users:
        return size
    table = {part.name: part for part in body}
    added = 0
    if updates := [part for _, part in users if part.op == "dynamic-update-slice"]:
        # The result of such a fusion is the operand itself, of which only the update is written.
        added = sum(_size(table[part.operands[1]]) for part in updates) - min(result, size)
    sliced = sum(_size(part) for _, part in users if part.op in SLICES)
    return added + min(size, sliced)


def _users(body: Sequence[Instruction], name: str) -> Iterator[tuple[str, Instruction]]:
    """Yield every instruction that reads a value, and the name under which it does: the value's
    own, or a bitcast's.
    """
    for part in body:
        if name in part.operands and part.op == "bitcast":
            yield from _users(body, part.name)
        elif name in part.operands:
            yield name, part
