"""Calls of JAX's and flax's attention functions in a model's own code go to other functions while
the model is traced.

Replaced are the names `jax.nn.dot_product_attention`, `flax.nnx.dot_product_attention` and
`flax.linen.dot_product_attention`, and these functions where a flax module has one as its
`attention_fn`. A name that a file has imported from there is not: it is the function itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as linen
import flax.linen.attention as linen_attention
import flax.nnx as nnx
import flax.nnx.nn.attention as nnx_attention
import jax

from spmd.models.patches import Patches

ORIGINALS: dict[str, Callable[..., Any]] = {
    "jax": jax.nn.dot_product_attention,
    "nnx": nnx.dot_product_attention,
    "linen": linen.dot_product_attention,
}
_NAMES = {"jax": (jax.nn,), "nnx": (nnx, nnx_attention), "linen": (linen, linen_attention)}
# that keep the function as `attention_fn`
_MODULES: tuple[Any, ...] = (nnx.MultiHeadAttention, linen.MultiHeadDotProductAttention)


@contextlib.contextmanager
def replaced_calls(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let calls of `ORIGINALS[name]` inside be calls of `functions[name]`, which takes the original
    first. Other threads are not affected.
    """
    with _PATCHES.scope(functions):
        yield


def _replacement(name: str) -> Callable[..., Any]:
    original = ORIGINALS[name]

    @functools.wraps(original)
    def call_replacement(*args: Any, **kwargs: Any) -> Any:
        function = _PATCHES.value.get(name)
        if function is None:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    return call_replacement


_REPLACEMENTS = {name: _replacement(name) for name in ORIGINALS}


class _AttentionFn:
    """Stands for a module's attribute `attention_fn`: the module's function, or its
    replacement.
    """

    def __init__(self, of_class: Any):
        self.of_class = of_class

    def __get__(self, module: Any, kind: Any = None) -> Any:
        function = self.of_class
        if module is not None:
            function = vars(module).get("attention_fn", self.of_class)
        for name, original in ORIGINALS.items():
            if function is original:
                return _REPLACEMENTS[name]
        return function

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["attention_fn"] = value


def _patches() -> Patches:
    replacements: list[tuple[Any, str, Any]] = []
    for name, places in _NAMES.items():
        for place in places:
            replacements.append((place, "dot_product_attention", _REPLACEMENTS[name]))
    # Flax's modules keep the function in an attribute, which a descriptor of the class reads.
    for kind in _MODULES:
        descriptor = _AttentionFn(vars(kind).get("attention_fn"))
        replacements.append((kind, "attention_fn", descriptor))
    return Patches("replaced_calls", replacements, outside=MappingProxyType({}))


_PATCHES = _patches()
