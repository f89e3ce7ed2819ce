"""What one instruction of a compiled program costs: operations of matrix products and convolutions, and bytes of memory."""

import dataclasses
import json
import math
import re

import numpy as np

from spmd.planner.hlo import Array, Instruction, Module
from spmd.planner.target import HIGHEST

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "opt-barrier",
    "add-dependency", "domain",
}  # fmt: skip
UNCOUNTED = re.compile(r"lapack|solver|cholesky|triangular|fft", re.IGNORECASE)  # operations that no formula here knows
SLICES = ("slice", "dynamic-slice", "gather")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations by the dtype that is multiplied, and bytes read and written."""

    flops: dict[str, float]
    bytes: float

    @property
    def total(self) -> float:
        """Operations of all dtypes."""
        return sum(self.flops.values())


def cost_of(module: Module, computation: str, one: Instruction) -> Cost:
    """The cost of an instruction that is no collective and no loop, with all that is fused into it."""
    if one.op in FREE:
        return Cost({}, 0.0)
    flops: dict[str, float] = {}
    for place, part in [(computation, one), *(found for called in one.called for found in module.inside(called))]:
        count, dtype = _products(module, place, part)
        if count:
            flops[dtype] = flops.get(dtype, 0.0) + count
    return Cost(flops, _bytes(module, computation, one))


def uncounted(module: Module) -> tuple[str, ...]:
    """Solvers and transforms of a program, by name: their operations count as none."""
    found = {}
    for lines in module.computations.values():
        for one in lines:
            target = re.search(r'custom_call_target="([^"]*)"', one.rest) if one.op == "custom-call" else None
            name = target.group(1) if target else one.op
            if UNCOUNTED.search(name):
                found[name] = None
    return tuple(found)


def _products(module: Module, computation: str, one: Instruction) -> tuple[float, str]:
    """Operations of a matrix product or a convolution, a multiplication and an addition counting as two."""
    if one.op not in ("dot", "convolution", "custom-call") or not one.arrays:
        return 0.0, ""
    inputs = [part.arrays[0] for part in module.operands(computation, one) if part.arrays]
    if len(inputs) < 2:
        return 0.0, ""
    dtype = inputs[0].dtype
    if dtype == "float32" and re.search(r"operand_precision=\{highest|\"operand_precision\":\[\"HIGHEST\"", one.rest):
        dtype = HIGHEST
    if one.op == "dot":
        return 2.0 * one.arrays[0].size * _contracted(inputs[0], re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)), dtype
    if one.op == "convolution":
        return _convolution(one, inputs[0], inputs[1], one.arrays[0]), dtype
    target = re.search(r'custom_call_target="([^"]*)"', one.rest)
    name = target.group(1) if target else ""
    if "gemm" in name or "matmul" in name:
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.rest)
        return 2.0 * one.arrays[0].size * _contracted(inputs[0], dims), dtype
    if "conv" in name.lower():
        if "BackwardFilter" in name:  # from the input and the output's gradient
            return _convolution(one, inputs[0], one.arrays[0], inputs[1]), dtype
        ends = (one.arrays[0], inputs[0]) if "BackwardInput" in name else (inputs[0], one.arrays[0])
        return _convolution(one, ends[0], inputs[1], ends[1]), dtype
    if "fmha" in name or "Attention" in name:
        return _attention(one, inputs, name), dtype
    return 0.0, ""


def _contracted(left: Array, dims: re.Match[str] | None) -> int:
    numbers = re.findall(r"\d+", dims.group(1)) if dims else []
    return math.prod(left.shape[int(number)] for number in numbers)


def _convolution(one: Instruction, image: Array, kernel: Array, output: Array) -> float:
    """Products of a kernel's pixels with an image's, those beyond its border and between its dilated pixels left out."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    if labels is None:
        return 2.0 * output.size * kernel.size / max(kernel.shape[-1], 1)
    of_image, of_kernel, of_output = labels.groups()
    dims = sorted(label for label in of_kernel if label.isdigit())
    window = {key: re.findall(r"-?\d+(?:_-?\d+)?", value) for key, value in re.findall(r"(\w+)=([\dx_-]+)", _window(one))}
    total = 2.0 * output.shape[of_output.index("b")] * output.shape[of_output.index("f")] * kernel.shape[of_kernel.index("i")]
    for number, label in enumerate(dims):
        get = lambda key, default: int(window[key][number]) if key in window else default
        low = int(window["pad"][number].split("_")[0]) if "pad" in window else 0
        sides = [array.shape[text.index(label)] for array, text in ((image, of_image), (kernel, of_kernel), (output, of_output))]
        total *= _pairs(tuple(sides), low, get("stride", 1), get("rhs_dilate", 1), get("lhs_dilate", 1))
    return total


def _window(one: Instruction) -> str:
    found = re.search(r"window=\{([^}]*)\}", one.rest)
    return found.group(1) if found else ""


def _pairs(sides: tuple[int, ...], low: int, stride: int, spread: int, dilated: int) -> int:
    """Along one dim, how many pairs of an output's and a kernel's pixel meet a pixel of the image."""
    image, kernel, output = sides
    at = np.arange(output)[:, None] * stride - low + np.arange(kernel)[None] * spread
    return int(((at >= 0) & (at <= (image - 1) * dilated) & (at % dilated == 0)).sum())


def _attention(one: Instruction, inputs: list[Array], name: str) -> float:
    """Two products in the forward pass, five in the backward one, of queries and keys [rows, length, heads, width] in some order."""
    found = re.search(r'"intermediate_tensor_shape":(\{.*?\}[^{}]*\})', one.rest)
    scores = [int(n) for n in json.loads(found.group(1)).get("dimensions", [])] if found else []
    width = inputs[0].shape[-1]
    return (2 if "Backward" not in name and "backward" not in name else 5) * 2.0 * math.prod(scores) * width if scores else 0.0


def _bytes(module: Module, computation: str, one: Instruction) -> float:
    """What is read and written; of what a fusion only takes slices of, the slices; of what it updates in place, the update twice."""
    inputs = module.operands(computation, one)
    if one.op in SLICES:
        return 2.0 * sum(array.bytes for array in one.arrays)
    if one.op in ("dynamic-update-slice", "scatter"):
        return 2.0 * sum(array.bytes for part in inputs[1:2] for array in part.arrays)
    whole = [sum(array.bytes for array in part.arrays) for part in inputs]
    result = float(sum(array.bytes for array in one.arrays))
    body = module.computations.get(one.named("calls"), ()) if one.op == "fusion" else ()
    if not body:
        return sum(whole) + result
    total = result
    table = {part.name: part for part in body}
    for number, size in enumerate(whole):
        name = next((part.name for part in body if part.op == "parameter" and part.rest.startswith(f"({number})")), "")
        users = [part for part in body if name in part.operands]
        if users and all(part.op in SLICES and part.operands[0] == name for part in users):
            size = min(size, sum(array.bytes for part in users for array in part.arrays))
        elif users and all(part.op == "dynamic-update-slice" and part.operands[0] == name for part in users):
            updates = sum(array.bytes for part in users for array in table[part.operands[1]].arrays)
            size, total = 0.0, total - min(result, size) + updates  # what is updated is not read; the update comes from elsewhere
        total += size
    return max(total, 0.0)
