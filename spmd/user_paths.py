"""Creates files and folders at paths that users give; errors say what is in the way."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, SpmdError, short_repr, type_name


def as_path(value: Any, name: str) -> Path:
    """The option `name` as a path.

    Raises:
      OptionError: it is not a path, or is empty.

    >>> as_path("runs/digits", "checkpoint").name
    'digits'
    """
    if not isinstance(value, str | os.PathLike):
        raise OptionError(f"{name}={short_repr(value)} is {type_name(value)}.", fix="a path.")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{name}={short_repr(text)} is not a valid path.", fix="a path, such as runs/digits.")
    return Path(text)


def output_path(value: Any, what: str, suffixes: Sequence[str], *, overwrite: bool = False) -> Path:
    """The path of a file that will be written, checked before the work whose result it gets; its folder is created if missing.

    Raises:
      OptionError: it is not a path, or has another suffix than `what`, such as "a layout file", may have; the file exists; or it cannot
        be written.
    """
    path = as_path(value, "path")
    if path.suffix.lower() not in suffixes:
        example = path.parent / f"{path.stem or 'new'}{suffixes[0]}"
        raise OptionError(f'"{path}" is not the name of {what}.', fix=f'a name that ends in {" or ".join(suffixes)}, such as "{example}".')
    exists = path.exists()
    if exists and not overwrite:
        raise OptionError(f"{path} exists.", fix="another name, or overwrite=True (--overwrite).")
    make_folder(path.parent, OptionError)
    with wrap_os_errors(path, OptionError):
        path.open("ab").close()
        if not exists:
            path.unlink()
    return path


def make_folder(path: Path, error: type[SpmdError]) -> None:
    """Create a folder and its missing parents."""
    with wrap_os_errors(path, error, "folder"):
        path.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write text to a path that the user gave; creates its folder if missing.

    Raises:
      OptionError: the file cannot be written.
    """
    make_folder(path.parent, OptionError)
    with wrap_os_errors(path, OptionError):
        path.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def wrap_os_errors(path: Path, error: type[SpmdError], kind: str = "file") -> Iterator[None]:
    """In the block, an `OSError` from writing at `path` is raised as an `error` that says why."""
    try:
        yield
    except OSError as cause:
        verb = "created" if kind == "folder" else "written"
        raise error(f"the {kind} {path} cannot be {verb}: {explain_os_error(path, cause)}.", fix="another path.") from cause


def explain_os_error(path: Path, error: OSError) -> str:
    """Why `path` cannot be written: what is in the way, or the operating system's message."""
    overwritten = os.path.isfile(path) and not isinstance(error, FileExistsError | NotADirectoryError)
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder"
    return blocking_file(path.parent if overwritten else path) or error.strerror or str(error)


def check_free(target: Path, error: type[SpmdError]) -> None:
    """Raise an `error` unless a folder can be made there: nothing is in the way, and it is not there or empty."""
    why = blocking_file(target) or (f"{target} is not empty" if os.path.isdir(target) and any(target.iterdir()) else None)
    if why is not None:
        raise error(f"{why}.", fix="another folder, or remove this one.")


def blocking_file(path: Path) -> str | None:
    """The file or broken link that keeps `path` from being a folder, as text; None if there is none."""
    path = Path(os.path.abspath(path))
    for parent in (*reversed(path.parents), path):
        if os.path.islink(parent) and not os.path.exists(parent):
            return f"{parent} is a link to {os.readlink(parent)}, which does not exist"
        if os.path.exists(parent) and not os.path.isdir(parent):
            return f"{parent} is a file"
    return None
