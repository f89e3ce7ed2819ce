"""Files and folders that a user names: made and written, or refused with the reason that the file system has."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, SpmdError, short_repr, type_name


def as_path(value: Any, name: str) -> Path:
    """What the user gave as `name`, as a path.

    Raises:
      OptionError: it is none, or empty.

    >>> as_path("runs/digits", "checkpoint").name
    'digits'
    """
    if not isinstance(value, str | os.PathLike):
        raise OptionError(f"{name}={short_repr(value)} is {type_name(value)}.", fix="a path.")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{name}={short_repr(text)} names nothing that could be on a disk.", fix="a path, such as runs/digits.")
    return Path(text)


def make_folder(path: Path, error: type[SpmdError]) -> None:
    """Make a folder and those above it, where they are missing."""
    with wrap_os_errors(path, error, "folder"):
        path.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> Path:
    """A text as a file that the user has named; its folder is made if it is not there.

    Raises:
      OptionError: the file cannot be written.
    """
    make_folder(path.parent, OptionError)
    with wrap_os_errors(path, OptionError):
        path.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def wrap_os_errors(path: Path, error: type[SpmdError], what: str = "file") -> Iterator[None]:
    """Around what writes at `path`: what the file system refuses is raised as an `error` that says why."""
    try:
        yield
    except OSError as refused:
        verb = "made" if what == "folder" else "written"
        raise error(f"the {what} {path} cannot be {verb}: {explain_os_error(path, refused)}.", fix="another path.") from refused


def explain_os_error(path: Path, error: OSError) -> str:
    """Why nothing can be written at `path`: what is in the way, or the words of the operating system."""
    overwritten = os.path.isfile(path) and not isinstance(error, FileExistsError | NotADirectoryError)
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder"
    return blocking_file(path.parent if overwritten else path) or error.strerror or str(error)


def blocking_file(path: Path) -> str | None:
    """The file, or the link that leads nowhere, that keeps `path` from being a folder; None where there is none."""
    path = Path(os.path.abspath(path))
    for place in (*reversed(path.parents), path):
        if os.path.islink(place) and not os.path.exists(place):
            return f"{place} is a link to {os.readlink(place)}, which does not exist"
        if os.path.exists(place) and not os.path.isdir(place):
            return f"{place} is a file"
    return None
