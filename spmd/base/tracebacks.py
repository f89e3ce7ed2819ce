"""Tracebacks of our own errors show the user's frames, and not those between the user's call and
the place of the error.
"""

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spmd.errors import OptionError, SpmdError, did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax")
PLUMBING = (contextlib.__file__, functools.__file__, "<frozen ")
# JAX notes on errors of others, too, that it has removed frames
JAX_NOTE = "JAX_TRACEBACK_FILTERING"


def trims_tracebacks(function: Function) -> Function:
    """Makes a public function, or the making of a class's objects, raise an `SpmdError` without the
    frames of libraries.

    $SPMD_TRACEBACK=1 keeps them. The frames of the exceptions that caused it are left out as well,
    where some of the user's remain. Other exceptions are as they are, but for the TypeError of
    arguments that the function does not take, which becomes an `OptionError`.

    Example:
      >>> import traceback, spmd
      >>> try:
      ...     spmd.Layout.load("fdsp")
      ... except spmd.SpmdError as error:
      ...     [frame.name for frame in traceback.extract_tb(error.__traceback__)]
      ['<module>']
    """
    if isinstance(function, type):
        function.__init__ = trims_tracebacks(function.__init__)
        return function  # type: ignore[return-value]

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            try:
                return function(*arguments, **options)
            except TypeError:
                if (wrong := _wrong_arguments(function, arguments, options)) is None:
                    raise
                raise wrong from None
        except SpmdError as error:
            if os.environ.get("SPMD_TRACEBACK", "0") in ("", "0"):
                error.__traceback__ = trim(error)
            raise  # adds no frame, since the error was raised before

    return call  # type: ignore[return-value]


def _wrong_arguments(
    function: Callable[..., Any], arguments: tuple, options: dict[str, Any]
) -> OptionError | None:
    """The error of a call that the function does not take; None if it takes it."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **options)
        return None
    except TypeError as error:
        # "missing a required keyword-only argument: 'loss'" since Python 3.12
        problem = str(error).replace("keyword-only ", "")
    parameters, name = (
        list(signature.parameters.values()),
        function.__qualname__.removesuffix(".__init__"),
    )
    if parameters[0].name == "self":
        parameters, arguments, name = parameters[1:], arguments[1:], name.rpartition(".")[2]
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    unknown = [option for option in options if option not in names]
    if unknown and len(names) == len(parameters):
        return OptionError(
            f'{name}(): there is no argument "{unknown[0]}".', fix=did_you_mean(unknown[0], names)
        )
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name in names
    ]
    words, why = [word if word in positional else f"{word}=..." for word in required], ""
    if len(arguments) > len(positional):
        problem = f"takes {len(positional)} positional arguments, and was given {len(arguments)}"
        if "data" in positional and hasattr(arguments[len(positional)], "shape"):
            words, why = (
                ["(x, y)" if word == "data" else word for word in words],
                ", since inputs and targets are one argument",
            )
    return OptionError(f"{name}(): {problem}.", fix=f"{name}({', '.join(words)}){why}.")


def trim(error: SpmdError) -> types.TracebackType | None:
    """The user's frames of an error; those of its causes, and a note of JAX, are removed from
    it.
    """
    for cause in _causes(error):
        cause.__traceback__ = _users(cause.__traceback__) or cause.__traceback__
    if notes := getattr(error, "__notes__", None):
        notes[:] = [note for note in notes if JAX_NOTE not in note]
    return _users(error.__traceback__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that are shown above an error."""
    seen, cause = (
        {id(error)},
        error.__cause__ or (None if error.__suppress_context__ else error.__context__),
    )
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _users(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of libraries."""
    entries, libraries = list[types.TracebackType](), _libraries()
    while traceback is not None:
        frame = traceback.tb_frame
        # by dataclasses
        generated = frame.f_code.co_filename == "<string>" and frame.f_globals.get(
            "__name__", ""
        ).startswith("spmd.")
        if not generated and not frame.f_code.co_filename.startswith(libraries):
            entries.append(traceback)
        traceback = traceback.tb_next
    chained = None
    for entry in reversed(entries):
        chained = types.TracebackType(chained, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chained


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """The first line of the user's among (file, line), the innermost first, as "file.py:12"; "" if
    there is none.
    """
    libraries = _libraries()
    return next(
        (f"{Path(file).name}:{line}" for file, line in frames if not file.startswith(libraries)), ""
    )


def _libraries() -> tuple[str, ...]:
    """What file names of libraries begin with."""
    loaded = (module for name in LIBRARIES if (module := sys.modules.get(name)) is not None)
    folders = [
        Path(__file__).parents[1],
        *(folder for module in loaded for folder in getattr(module, "__path__", ())),
    ]
    return (*(f"{folder}{os.sep}" for folder in folders), *PLUMBING)
