"""Tracebacks of our own errors show the user's frames, and not those between the user's call and the place of the error."""

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spmd.errors import SpmdError

Function = TypeVar("Function", bound=Callable[..., Any])

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax")
PLUMBING = (contextlib.__file__, functools.__file__, "<frozen ")
JAX_NOTE = "JAX_TRACEBACK_FILTERING"  # JAX notes on errors of others, too, that it has removed frames


def trims_tracebacks(function: Function) -> Function:
    """Makes a public function raise an `SpmdError` without the frames of libraries; $SPMD_TRACEBACK=1 keeps them.

    The frames of the exceptions that caused it are left out as well, where some of the user's remain. Other exceptions are as they are.

    Example:
      >>> import traceback, spmd
      >>> try:
      ...     spmd.Layout.load("fdsp")
      ... except spmd.SpmdError as error:
      ...     [frame.name for frame in traceback.extract_tb(error.__traceback__)]
      ['<module>']
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except SpmdError as error:
            if os.environ.get("SPMD_TRACEBACK", "0") in ("", "0"):
                error.__traceback__ = trim(error)
            raise  # adds no frame, since the error was raised before

    return call  # type: ignore[return-value]


def trim(error: SpmdError) -> types.TracebackType | None:
    """The user's frames of an error; those of its causes, and a note of JAX, are removed from it."""
    for cause in _causes(error):
        cause.__traceback__ = _users(cause.__traceback__) or cause.__traceback__
    if notes := getattr(error, "__notes__", None):
        notes[:] = [note for note in notes if JAX_NOTE not in note]
    return _users(error.__traceback__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions that are shown above an error."""
    seen, cause = {id(error)}, error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _users(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of libraries."""
    entries, libraries = list[types.TracebackType](), _libraries()
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(libraries):
            entries.append(traceback)
        traceback = traceback.tb_next
    chained = None
    for entry in reversed(entries):
        chained = types.TracebackType(chained, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chained


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """The first line of the user's among (file, line), the innermost first, as "file.py:12"; "" if there is none."""
    libraries = _libraries()
    return next((f"{Path(file).name}:{line}" for file, line in frames if not file.startswith(libraries)), "")


def _libraries() -> tuple[str, ...]:
    """What file names of libraries begin with."""
    loaded = (module for name in LIBRARIES if (module := sys.modules.get(name)) is not None)
    folders = [Path(__file__).parent, *(folder for module in loaded for folder in getattr(module, "__path__", ()))]
    return (*(f"{folder}{os.sep}" for folder in folders), *PLUMBING)
