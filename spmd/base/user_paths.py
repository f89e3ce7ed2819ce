"""Creates files and folders at paths that users give; errors say what is in the way."""

import contextlib
import errno
import os
import re
import shutil
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd.base.output_files import replace_atomically, sync
from spmd.errors import CheckpointError, OptionError, SpmdError, option, short_repr, type_name

# Pathlib leaves one of two slashes.
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
VARIABLE = re.compile(r"\$(\w+|\{\w+\})(?=/|$)")


def as_path(value: Any, name: str) -> Path:
    """The option `name` as a path; `~` and an environment variable at its beginning are expanded,
    as in a shell.

    Every path of a user goes through here: without it, "~/runs" and "s3://bucket/runs" would be
    folders in the working folder.

    Raises:
      OptionError: it is not a path, is empty, has a scheme such as s3://, or begins with an unknown
        user or variable.

    >>> as_path("runs/digits", "checkpoint").name
    'digits'
    >>> as_path("~/runs", "checkpoint") == as_path(
    ...     "$HOME/runs", "checkpoint"
    ... ) == Path.home() / "runs"
    True
    """
    if not isinstance(value, str | os.PathLike):
        raise OptionError(
            f"{option(name, short_repr(value))} is {type_name(value)}.", fix="a path."
        )
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(
            f"{option(name, short_repr(text))} is not a valid path.",
            fix="a path, such as runs/digits.",
        )
    path = Path(_expand(text, name))
    # "./~x" is a folder of that name here, and pathlib leaves out the "./"
    if str(path)[0] in "~$" or SCHEME.match(str(path)):
        return path.absolute()
    return path


def _expand(text: str, name: str) -> str:
    """The text with its `~` or variable replaced by what it stands for."""
    headline = option(name, short_repr(text))
    if variable := VARIABLE.match(text):
        key = variable[1].strip("{}")
        if not os.environ.get(key):
            raise OptionError(
                f"{headline}: the environment variable {key} is not set.",
                fix=f"export {key}=..., or the path itself.",
            )
        text = os.environ[key] + text[variable.end() :]
    if text.startswith("~"):
        user = text.partition("/")[0]
        text = os.path.expanduser(text)
        if text.startswith("~"):
            why = "this user has no home folder"
            if user[1:]:
                why = f"there is no user {user[1:]}"
            raise OptionError(
                f"{headline}: {why}.",
                fix=f'"{os.path.abspath(text)}" for a folder of this name here, or another path.',
            )
    scheme = SCHEME.match(text)
    if scheme is None:
        return text
    if scheme[1].lower() == "file":
        local = urllib.parse.unquote(re.sub("^localhost/", "", text[scheme.end() :]))
        raise OptionError(
            f"{headline}: file:// is not supported.", fix=f'the path without it, "/{local}".'
        )
    raise OptionError(
        f"{headline}: {scheme[1]}:// is not supported.",
        fix="a local path; copy files from there before a run, or to there after it.",
    )


def output_path(value: Any, what: str, suffixes: Sequence[str], *, overwrite: bool = False) -> Path:
    """The path of a file that will be written, checked before the work whose result it gets; its
    folder is created if missing.

    Raises:
      OptionError: it is not a path, or has another suffix than `what`, such as "a layout file", may
        have; the file exists; or it cannot be written.
    """
    path = as_path(value, "path")
    if path.suffix.lower() not in suffixes:
        example = path.parent / f"{path.stem or 'new'}{suffixes[0]}"
        raise OptionError(
            f'"{path}" is not the name of {what}.',
            fix=f'a name that ends in {" or ".join(suffixes)}, such as "{example}".',
        )
    exists = path.exists()
    if exists and not overwrite:
        raise OptionError(f"{path} exists.", fix=f"another name, or {option('overwrite', True)}.")
    make_folder(path.parent, OptionError)
    with wrap_os_errors(path, OptionError), contextlib.suppress(_Undone), replace_file(path):
        raise _Undone
    return path


def run_file(folder: Path, name: str) -> Path:
    """The path of a file that a run writes in its folder, which may come from elsewhere.

    Raises:
      CheckpointError: a link is in its place, and would lead what is written into another file.
    """
    path = folder / name
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}: a run does not write through links.",
            fix="remove the link.",
        )
    return path


def check_characters(folder: Path, characters: str, consequence: str) -> None:
    r"""Refuse a folder of checkpoints with one of these characters in its path, which a library
    reads as something else than a name.

    Args:
      consequence: the end of a sentence about the checkpoints, such as "cannot be read".

    Raises:
      CheckpointError: names the characters, and a path without them.

    >>> check_characters(Path("/runs/lr[0.1]/a"), "[]", "could not be read again")
    Traceback (most recent call last):
        ...
    spmd.errors.CheckpointError: /runs/lr[0.1]/a: checkpoints in a folder with "[]" in its path could not be read again.
        fix: another name, such as "/runs/lr-0.1-" in place of "/runs/lr[0.1]".
    """  # noqa: E501
    contained = "".join(character for character in characters if character in str(folder))
    if not contained:
        return
    outermost_first = reversed((folder, *folder.parents))
    named = next(path for path in outermost_first if set(contained) & set(path.name))
    allowed_name = named.name.translate(str.maketrans(contained, "-" * len(contained)))
    other = named.with_name(allowed_name)
    raise CheckpointError(
        f'{folder}: checkpoints in a folder with "{contained}" in its path {consequence}.',
        fix=f'another name, such as "{other}" in place of "{named}".',
    )


def make_folder(path: Path, error: type[SpmdError]) -> None:
    """Create a folder and its missing parents, whose names are then on disk."""
    with wrap_os_errors(path, error, "folder"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)


def write_text(path: Path, text: str, error: type[SpmdError] = OptionError) -> Path:
    """Write text to a path that the user gave, as `replace_file` does; creates its folder if
    missing.

    Raises:
      OptionError: the file cannot be written; or another `error`.
    """
    make_folder(path.parent, error)
    with wrap_os_errors(path, error):
        replace_text(path, text)
    return path


def replace_text(path: Path, text: str) -> None:
    """Write text as `replace_file` does."""
    with replace_file(path) as part:
        part.write_text(text, encoding="utf-8")


class _Undone(Exception):
    """Ends the block of `replace_file`, so that nothing is replaced."""


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A new file for the block to fill, as `replace_atomically`, in the place of a path that the
    user gave: a link stays a link, and permissions are kept. A pipe or a device is written itself.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replace_file(path) as part:
    ...     _ = part.write_text("new")
    >>> path.read_text()
    'new'
    """
    target = Path(os.path.realpath(path))
    exists = os.path.exists(target)
    if exists and not os.path.isfile(target) and not os.path.isdir(target):
        # A pipe or a device, such as /dev/stdout, is written itself.
        yield target
        return
    if os.path.islink(target):
        why = errno.ELOOP
    elif os.path.isdir(target):
        why = errno.EISDIR
    else:
        why = 0
    if exists and not why and not os.access(target, os.W_OK):
        why = errno.EACCES
    if why:
        raise OSError(why, os.strerror(why), str(target))
    with replace_atomically(target) as part:
        part.touch()
        if exists:
            shutil.copymode(target, part)
        yield part


@contextlib.contextmanager
def wrap_os_errors(path: Path, error: type[SpmdError], kind: str = "file") -> Iterator[None]:
    """Raise an `OSError` in the block, from writing at `path`, as an `error` that says why."""
    try:
        yield
    except OSError as cause:
        verb = "written"
        if kind == "folder":
            verb = "created"
        fix = "another path."
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some disk space, or another path."
        raise error(
            f"the {kind} {path} cannot be {verb}: {explain_os_error(path, cause)}.", fix=fix
        ) from cause


def explain_os_error(path: Path, error: OSError) -> str:
    """Return the reason why `path` cannot be written: the file in the way, or the operating
    system's message.
    """
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder"
    place = path
    # The folder of a file that is overwritten is what matters.
    if os.path.isfile(path) and not isinstance(error, FileExistsError | NotADirectoryError):
        place = path.parent
    return blocking_file(place) or error.strerror or str(error)


def check_free(target: Path, error: type[SpmdError]) -> None:
    """Raise an `error` unless a folder can be made there: nothing is in the way, and it is not
    there or empty.
    """
    why = blocking_file(target)
    if why is None and os.path.isdir(target) and any(target.iterdir()):
        why = f"{target} is not empty"
    if why is not None:
        raise error(f"{why}.", fix="another folder, or remove this one.")


def blocking_file(path: Path) -> str | None:
    """Return the file or broken link that keeps `path` from being a folder, as text; None if there
    is none.
    """
    path = Path(os.path.abspath(path))
    for parent in (*reversed(path.parents), path):
        if os.path.islink(parent) and not os.path.exists(parent):
            return f"{parent} is a link to {os.readlink(parent)}, which does not exist"
        if os.path.exists(parent) and not os.path.isdir(parent):
            return f"{parent} is a file"
    return None
