"""Tracebacks of our own errors show the user's frames, and not those between the user's call and
the place of the error.
"""

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import traceback
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
    def call_trimmed(*arguments: Any, **options: Any) -> Any:
        try:
            try:
                return function(*arguments, **options)
            except TypeError:
                wrong = _wrong_arguments(function, arguments, options)
                if wrong is None:
                    raise
                raise wrong from None
        except SpmdError as error:
            if os.environ.get("SPMD_TRACEBACK", "0") in ("", "0"):
                error.__traceback__ = trim(error)
            # Adds no frame, since the error was raised before.
            raise

    return call_trimmed  # type: ignore[return-value]


def _wrong_arguments(
    function: Callable[..., Any], arguments: tuple, options: dict[str, Any]
) -> OptionError | None:
    """Return the error of a call that the function does not take; None if it takes it."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **options)
        return None
    except TypeError as error:
        # "missing a required keyword-only argument: 'loss'" since Python 3.12
        problem = str(error).replace("keyword-only ", "")
    parameters = list(signature.parameters.values())
    name = function.__qualname__.removesuffix(".__init__")
    if parameters[0].name == "self":
        parameters = parameters[1:]
        arguments = arguments[1:]
        name = name.rpartition(".")[2]
    names = []
    positional = []
    # The required arguments, as a call has them.
    words = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        names.append(parameter.name)
        word = f"{parameter.name}=..."
        if parameter.kind != parameter.KEYWORD_ONLY:
            positional.append(parameter.name)
            word = parameter.name
        if parameter.default is parameter.empty:
            words.append(word)
    unknown = [option for option in options if option not in names]
    if unknown and len(names) == len(parameters):
        return OptionError(
            f'{name}(): there is no argument "{unknown[0]}".', fix=did_you_mean(unknown[0], names)
        )
    why = ""
    if len(arguments) > len(positional):
        problem = f"takes {len(positional)} positional arguments, and was given {len(arguments)}"
        if "data" in positional and hasattr(arguments[len(positional)], "shape"):
            if "data" in words:
                words[words.index("data")] = "(x, y)"
            why = ", since inputs and targets are one argument"
    return OptionError(f"{name}(): {problem}.", fix=f"{name}({', '.join(words)}){why}.")


def trim(error: SpmdError) -> types.TracebackType | None:
    """Return the user's frames of an error; other frames of its causes, and a note of JAX, are
    removed.
    """
    for cause in _causes(error):
        users_frames = _users(cause.__traceback__)
        # An error of others without a frame of the user's is a fault of ours: it stays as it is.
        if users_frames is not None or isinstance(cause, SpmdError):
            cause.__traceback__ = users_frames
    # JAX adds a note that says how to see its own frames, which are removed here.
    notes = getattr(error, "__notes__", None)
    if notes:
        notes[:] = [note for note in notes if JAX_NOTE not in note]
    return _users(error.__traceback__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that are shown above an error."""
    visited = {id(error)}
    cause = _cause(error)
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = _cause(cause)


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _users(link: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of libraries."""
    entries = list[types.TracebackType]()
    libraries = _libraries()
    while link is not None:
        frame = link.tb_frame
        file = frame.f_code.co_filename
        module = frame.f_globals.get("__name__", "")
        # The dataclasses module compiles methods from strings.
        generated = file == "<string>" and module.startswith("spmd.")
        if not generated and not file.startswith(libraries):
            entries.append(link)
        link = link.tb_next
    chained = None
    for entry in reversed(entries):
        chained = types.TracebackType(chained, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chained


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the first line of the user's among (file, line), the innermost first, as "file.py:12";
    "" if there is none.
    """
    libraries = _libraries()
    for file, line in frames:
        if not file.startswith(libraries):
            return f"{Path(file).name}:{line}"
    return ""


def _libraries() -> tuple[str, ...]:
    """Return the beginnings of file names of libraries."""
    folders = [Path(__file__).parents[1]]
    for name in LIBRARIES:
        folders += getattr(sys.modules.get(name), "__path__", ())
    return (*(f"{folder}{os.sep}" for folder in folders), *PLUMBING)


def failing_line(error: BaseException) -> str:
    """Return the last line of user code in an exception's traceback, formatted for an error; "" if
    there is none.
    """
    libraries = (
        str(Path(__file__).parents[1]),
        *sysconfig.get_paths().values(),
        # the standard library of the Python that a virtual environment stands on
        sys.base_prefix + f"{os.sep}lib",
        "<frozen",
    )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(libraries):
            path = frame.filename.removeprefix(os.getcwd() + os.sep)
            return f"\n    in {path}, line {frame.lineno}: {frame.line}"
    return ""
