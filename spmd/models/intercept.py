"""Functions around the calls of a user's modules, in one order."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

# A function around a call takes (call, module, *args, **kwargs) and returns outputs;
# call(module, *args, **kwargs) is all that is inside of it, the module's own call innermost.
Around = Callable[..., Any]

# The outermost first.
ORDER = (
    # The module's scope in the program: all that follows is computed for this module.
    "scope",
    # What is placed is the result, which no recomputation and no gather sees.
    "outputs",
    # Gathers parameters: all that follows computes with full ones.
    "block",
    # Inside of a block, which recomputes in its place if the layout names both.
    "remat",
    # The call happens, even if it is traced once more for a backward pass.
    "noted",
    # Axes over which a BatchNorm averages.
    "axes",
    # Values of a quantized kernel: the adapter and the layer itself multiply by them.
    "kernel",
    # Adds to the output of the layer.
    "adapter",
)
# Of these, functions are equal from trace to trace. Flax registers each class of modules with JAX
# for good, so one class serves all traces. Others close over arrays of one trace.
LASTING = frozenset({"scope", "axes", "kernel", "adapter"})


def surround(around: Mapping[str, Around], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, of a module and its arguments, inside of these functions.

    Args:
      around: by a name in `ORDER`.

    Example:
      >>> def double(call, module, x):
      ...     return 2 * call(module, x)
      >>> def add_one(call, module, x):
      ...     return call(module, x) + 1
      >>> surround({"remat": add_one, "outputs": double}, lambda module, x: x)(None, 3)
      8
    """
    for name in sorted(around, key=ORDER.index, reverse=True):
        call = functools.partial(around[name], call)
    return call


def intercept(module: nnx.Module, around: Mapping[str, Around], *, name: str | None = None) -> None:
    """Let calls of an nnx module go through these functions, beside those of earlier calls of this.

    The module's class becomes a subclass of the user's, one for all functions.

    Args:
      around: by a name in `ORDER`.
      name: of the subclass; None: that of the module's class.

    Example:
      >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> intercept(layer, {"outputs": lambda call, module, x: -call(module, x)})
      >>> type(layer).__name__, type(layer).__bases__ == (nnx.Linear,), list(interceptions(layer))
      ('Linear', True, ['outputs'])
    """
    if not around:
        return
    functions = {**interceptions(module), **around}
    make = _subclass
    if functions.keys() <= LASTING:
        make = _cached_subclass
    kind = original_class(module)
    module.__class__ = make(kind, name or type(module).__name__, tuple(functions.items()))


def interceptions(module: Any) -> Mapping[str, Around]:
    """Return the functions around calls of this module, by name."""
    return getattr(type(module), "_spmd_around", {})


def original_class(module: Any) -> type:
    """Return the class that a module had before `intercept`."""
    return getattr(type(module), "_spmd_intercepted", type(module))


def _subclass(kind: type, name: str, functions: tuple[tuple[str, Around], ...]) -> type:
    def own_call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(module, *args, **kwargs)  # type: ignore[operator]

    around = dict(functions)
    surrounded = surround(around, own_call)

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return surrounded(self, *args, **kwargs)

    namespace = {
        "__call__": __call__,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_spmd_around": around,
        "_spmd_intercepted": kind,
    }
    return type(kind)(name, (kind,), namespace)


_cached_subclass = functools.lru_cache(maxsize=4096)(_subclass)


def change_outputs(change: Callable[[Any], Any]) -> Around:
    """Return a function around a call that gives its outputs through `change`."""

    def around(call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return change(call(module, *args, **kwargs))

    return around
