"""What a compiled program multiplies in the layers of the layout's `[[precision]]`: the dtype that
is asked for, or another one.
"""

import dataclasses
import re
from collections.abc import Mapping

from spmd.nn.low_precision import DTYPES, scope_of
from spmd.planner.hlo import Module

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
    def wanted(self) -> tuple[str, str | None]:
        """The dtypes for the forward pass and for a gradient; None: that of the model."""
        forward, backward = (
            dtype and dtype.dtype.name.replace("_", "") for dtype in DTYPES[self.asked]
        )
        return forward, backward

    @property
    def others(self) -> list[str]:
        """Dtypes that are multiplied, and that were not asked for."""
        forward, backward = self.wanted
        return sorted(
            (self.forward - {forward})
            | (self.backward - {forward, backward} if backward is not None else set())
        )


def layer_products(module: Module, layers: Mapping[str, str]) -> dict[str, LayerProducts]:
    """The products of layers, by path.

    Args:
      layers: by path, what `[[precision]]` asks for.
    """
    paths = {scope_of(path): path for path in layers}
    found = {path: LayerProducts(asked) for path, asked in layers.items()}
    pattern = re.compile(
        "|".join(f"{re.escape(scope)}(?![^/)])" for scope in sorted(paths, key=len, reverse=True))
    )
    for name, lines in module.computations.items() if layers else ():
        for instr in lines:
            if (match := pattern.search(instr.scope)) is None:
                continue
            layer = found[paths[match[0]]]
            if instr.op == "dot" or GEMM.search(instr.custom_call):
                dtypes = layer.backward if "transpose(" in instr.scope else layer.forward
                dtypes.update(
                    part.arrays[0].dtype for part in module.operands(name, instr)[:2] if part.arrays
                )
            elif layer.wanted[0] in {array.dtype for array in instr.arrays}:
                found[paths[match[0]]] = dataclasses.replace(layer, rounded=True)
    return found


def precision_notes(module: Module, layers: Mapping[str, str]) -> list[str]:
    """For everything that is asked for, in which layers the program multiplies that, and in which
    it does not.
    """
    found, notes = layer_products(module, layers), {}
    held = {layer.asked for layer in found.values() if layer.wanted[0] in layer.forward}
    for path, layer in found.items():
        merged = not layer.forward and layer.rounded and layer.asked in held
        if layer.others or not (layer.forward or merged):
            multiplied = ", ".join(layer.others) or "nothing"
            what = (
                f"note: [[precision]] asks for products in {layer.asked}, and the program "
                f"multiplies {multiplied} in"
            )
        else:
            gradients = (
                f", gradients in {', '.join(sorted(layer.backward))}"
                if layer.wanted[1] is None and layer.backward
                else ""
            )
            together = ", which XLA merges with those of another layer" if merged else ""
            what = f"products in {layer.asked}{gradients}{together}:"
        notes.setdefault(what, []).append(path)
    return [f"{what} {', '.join(paths)}." for what, paths in notes.items()]
