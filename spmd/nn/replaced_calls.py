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
    """Inside, a call of `ORIGINALS[name]` is one of `functions[name]`, which takes the original
    first. Other threads are not affected.
    """
    with _PATCHES.scope(functions):
        yield


def _replacement(name: str) -> Callable[..., Any]:
    original = ORIGINALS[name]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = _PATCHES.value.get(name)
        return (
            original(*args, **kwargs) if function is None else function(original, *args, **kwargs)
        )

    return call


_REPLACEMENTS = {name: _replacement(name) for name in ORIGINALS}


class _AttentionFn:
    """Stands for a module's attribute `attention_fn`: the module's function, or its
    replacement.
    """

    def __init__(self, of_class: Any):
        self.of_class = of_class

    def __get__(self, module: Any, kind: Any = None) -> Any:
        kept = self.of_class if module is None else vars(module).get("attention_fn", self.of_class)
        return next(
            (_REPLACEMENTS[name] for name, original in ORIGINALS.items() if kept is original), kept
        )

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["attention_fn"] = value


_PATCHES = Patches(
    "replaced_calls",
    [
        *(
            (place, "dot_product_attention", _REPLACEMENTS[name])
            for name, places in _NAMES.items()
            for place in places
        ),
        *(
            (kind, "attention_fn", _AttentionFn(vars(kind).get("attention_fn")))
            for kind in _MODULES
        ),
    ],
    outside=MappingProxyType({}),
)
