"""Reads the dtypes that layers with `[[precision]]` multiply from a compiled program."""

import dataclasses
import re
from collections.abc import Mapping

from spmd.nn.low_precision import DTYPES, scope_of
from spmd.planner.hlo import Module

# In the names of XLA's custom calls: cuBLAS on GPUs, oneDNN on CPUs.
GEMM = re.compile(r"gemm|matmul")


@dataclasses.dataclass(frozen=True)
class LayerProducts:
    """The products of a layer in a compiled program.

    Attributes:
      asked: "bfloat16", "float8" or "int8".
      forward, backward: dtypes that are multiplied, by XLA's names.
      rounded: the program rounds its factors to the dtype of the forward pass. Without a product of
        its own in the forward pass, it is then one with another layer's: XLA merges products of the
        same input.
    """

    asked: str
    forward: set[str] = dataclasses.field(default_factory=set)
    backward: set[str] = dataclasses.field(default_factory=set)
    rounded: bool = False

    @property
    def dtypes(self) -> tuple[str, str | None]:
        """The dtypes for the forward pass and for a gradient; None: that of the model."""
        forward, backward = (
            dtype and dtype.dtype.name.replace("_", "") for dtype in DTYPES[self.asked]
        )
        return forward, backward

    @property
    def others(self) -> list[str]:
        """Dtypes that are multiplied, and that were not asked for."""
        forward, backward = self.dtypes
        # XLA multiplies float8 in float16 on GPUs without units for it, and does not say so.
        others = self.forward - {forward}
        if backward is not None:
            others |= self.backward - {forward, backward}
        return sorted(others)


def layer_products(module: Module, layers: Mapping[str, str]) -> dict[str, LayerProducts]:
    """Return the products of layers, by path.

    Args:
      layers: by path, what `[[precision]]` asks for.
    """
    if not layers:
        return {}
    paths = {scope_of(path): path for path in layers}
    products = {path: LayerProducts(asked) for path, asked in layers.items()}
    scopes = sorted(paths, key=len, reverse=True)
    # the longest scope first: a layer may be inside of another one
    pattern = re.compile("|".join(f"{re.escape(scope)}(?![^/)])" for scope in scopes))
    for name, instr in module.instructions:
        if (match := pattern.search(instr.scope)) is None:
            continue
        layer = products[paths[match[0]]]
        if instr.op == "dot" or GEMM.search(instr.custom_call):
            dtypes = layer.forward
            # JAX writes transpose around the scopes of a backward pass.
            if "transpose(" in instr.scope:
                dtypes = layer.backward
            factors = module.operands(name, instr)[:2]
            dtypes.update(part.arrays[0].dtype for part in factors if part.arrays)
        elif layer.dtypes[0] in {array.dtype for array in instr.arrays}:
            products[paths[match[0]]] = dataclasses.replace(layer, rounded=True)
    return products


def precision_notes(module: Module, layers: Mapping[str, str]) -> list[str]:
    """Note, for everything that `[[precision]]` asks for, the layers in which the program
    multiplies that, and those in which it does not.
    """
    products = layer_products(module, layers)
    multiplied = {layer.asked for layer in products.values() if layer.dtypes[0] in layer.forward}
    notes: dict[str, list[str]] = {}
    for path, layer in products.items():
        # XLA merges products of one input, such as queries, keys and values, and keeps one of their
        # names.
        merged = not layer.forward and layer.rounded and layer.asked in multiplied
        if layer.others or not (layer.forward or merged):
            others = ", ".join(layer.others) or "nothing"
            what = (
                f"note: [[precision]] asks for products in {layer.asked}, and the program "
                f"multiplies {others} in"
            )
        else:
            what = f"products in {layer.asked}"
            if layer.dtypes[1] is None and layer.backward:
                what += f", gradients in {', '.join(sorted(layer.backward))}"
            if merged:
                what += ", which XLA merges with those of another layer"
            what += ":"
        notes.setdefault(what, []).append(path)
    return [f"{what} {', '.join(paths)}." for what, paths in notes.items()]
