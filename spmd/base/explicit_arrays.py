"""Finds arrays on a mesh with explicit axes that functions close over: JAX refuses to compute with
them elsewhere.
"""

import functools
import inspect
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from spmd.base.tree import describe

# The most objects that are looked at.
MOST_OBJECTS = 20_000
# The most parts of one object that are looked at.
MOST_PARTS = 1_000
LEAVES = (
    str
    | bytes
    | int
    | float
    | complex
    | np.ndarray
    | types.ModuleType
    | types.BuiltinFunctionType
    | None
)


def closed_over(roots: Iterable[Any]) -> list[str]:
    """Return arrays on a mesh with explicit axes that functions among these objects, or inside of
    them, close over or use as globals: name, shape, and the function. Arrays that are no part of a
    function, such as a model's, are not among them. At most `MOST_OBJECTS` objects are looked at,
    those nearest to the roots first, and `MOST_PARTS` of each; one that fails as it is looked at is
    passed over.

    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    >>> weights = jax.device_put(jax.numpy.ones(4), NamedSharding(mesh, jax.P()))
    >>> def loss(model, batch, weights=weights):
    ...     return weights
    >>> [line] = closed_over([{"loss": loss}])
    >>> line.partition(" (")[0]
    'weights float32[4], in loss'
    """
    lines = dict[int, str]()
    visited = set[int]()
    # Objects that are still there, so that no other object gets their numbers.
    alive = list[Any]()
    waiting = deque(("", "", root) for root in itertools.islice(roots, MOST_PARTS))
    left = MOST_OBJECTS - len(waiting)
    while waiting:
        name, function, value = waiting.popleft()
        try:
            if isinstance(value, LEAVES):
                continue
            if id(value) in visited and not isinstance(value, jax.Array):
                continue
            visited.add(id(value))
            alive.append(value)
            if not isinstance(value, jax.Array):
                parts = list(itertools.islice(_parts(name, function, value), min(left, MOST_PARTS)))
                left -= len(parts)
                waiting += parts
            elif function and _is_explicit(value):
                lines.setdefault(id(value), f"{name} {describe(value)}, in {function}")
        except Exception:
            # A user's object raised: the error that is being explained matters, not this one.
            continue
    return list(lines.values())


def _is_explicit(array: jax.Array) -> bool:
    return (
        isinstance(array.sharding, NamedSharding)
        and AxisType.Explicit in array.sharding.mesh.axis_types
    )


def _parts(name: str, function: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the parts of an object: names, the function that holds it or "", and the values."""
    if isinstance(value, types.FunctionType):
        code = value.__code__
        place = f"{value.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        yield from ((each, place, part) for each, part in _variables(value))
    elif isinstance(value, types.MethodType):
        yield name, function, value.__func__
        yield name, value.__qualname__, value.__self__
    elif isinstance(value, functools.partial):
        inside = getattr(value.func, "__qualname__", "functools.partial")
        yield name, function, value.func
        for number, part in enumerate(value.args, 1):
            yield f"argument {number}", inside, part
        for each, part in value.keywords.items():
            yield each, inside, part
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", function, part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{number}]", function, part) for number, part in enumerate(value))
    elif isinstance(value, type):
        for part in list(vars(value).values()):
            if isinstance(part, types.FunctionType):
                yield name, function, part
    else:
        # What `jax.jit` and the like return; no `__getattr__` is called.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if wrapped is not None:
            yield name, function, wrapped
        for key, part in list(_attributes(value).items()):
            yield f"{name}.{key}", function, part
        # The methods' globals.
        yield name, function, type(value)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {}


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield variables that a function closes over, its defaults, and the globals that it names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    yield from zip(code.co_varnames[first : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name in _named(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _named(code: types.CodeType) -> Iterator[str]:
    """Yield names that a function, and functions defined in it, may look up among globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)
