"""Writes files so that they are complete and on disk when a function returns, and errors of the
disk, here also of reading, name the file.

The system's own errors do so only where a file is opened. The last line of some files holds a
checksum, which reveals flipped bits, truncation and edits by hand; not tampering that also writes a
new checksum.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHECKSUM = re.compile(rb'\n\{"sha256": "([0-9a-f]{64})"\}\n\Z')
# Bytes of the last line, with the line break before it.
_LENGTH = 80


@contextlib.contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Add this file's name to an `OSError` in the block that names none.

    >>> with name_errors(Path("runs/a.bin")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'runs/a.bin'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file."""
    with name_errors(path):
        return path.read_bytes()


class OutputFile(io.FileIO):
    """A file without a buffer, whose errors name it."""

    def write(self, content: Any) -> int:
        """Write a part of the bytes, and return how many; `write_at`, or the buffer of
        `open_output`, writes all of them.
        """
        with name_errors(self.name):
            return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        """Change the size of the file."""
        with name_errors(self.name):
            return super().truncate(size)

    def close(self) -> None:
        """Close the file; a network file system may refuse only here what was written."""
        with name_errors(self.name):
            super().close()


def open_output(
    path: Path, mode: str = "wb", opener: Callable[[str, int], int] | None = None
) -> io.BufferedWriter:
    """The open file of a path, for writing bytes with a buffer; its errors, also those of the last
    flush, name the path.
    """
    return io.BufferedWriter(OutputFile(path, mode, opener=opener))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    with name_errors(path):
        try:
            file = os.open(path, os.O_RDONLY)
        except PermissionError:
            if not path.is_dir():
                raise
            # A folder that may be written but not read: it is synced with everything else.
            os.sync()
            return
        try:
            os.fsync(file)
        except OSError as error:
            # which says that this file system has no such call for folders
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(file)


@contextlib.contextmanager
def replace_atomically(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A new file beside `path` for the block to fill, which then takes its place: concurrent
    readers, and the next start after a kill, find the old contents or all of the new.

    When the block raises, for example since the disk is full, `path` stays as it was.

    Args:
      path: the file; a link is replaced too.
      durable: False: do not wait for the disk. If the machine then loses its power, contents can be
        lost whose name is there.

    Raises:
      OSError: the disk did not take a part of it; it names a path.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replace_atomically(path) as part:
    ...     _ = part.write_text("new")
    >>> path.read_text()
    'new'
    """
    # Without the name of `path`, which may be as long as names may be, and without its suffix, by
    # which readers of a folder find their files.
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with name_errors(path):
            yield part
            if durable:
                # Else the new name can be on disk before the contents are.
                sync(part)
            part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    if durable:
        # The name is durable only after its folder is synced.
        sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Wait until a folder, all that is in it, and its name are on disk.

    Raises:
      OSError: the disk did not take a part of it.
    """
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(parent) / name for name in names), Path(parent)):
            # another host of the run has removed a temporary file
            with contextlib.suppress(FileNotFoundError):
                sync(path)
    sync(folder.parent)


def publish(working: Path, target: Path) -> None:
    """Give a finished folder its name, in place of an empty folder; a loss of power leaves all of
    it, or none.

    Raises:
      OSError: the disk did not take a part of it.
    """
    sync_tree(working)
    working.rename(target)
    sync(target.parent)


def write_at(file: int, content: bytes, offset: int, path: Path) -> None:
    """Write all of some bytes into an open file, from an offset on: a disk that is almost full
    takes a part of them, without an error.

    Raises:
      OSError: they cannot all be written; it names `path`.
    """
    view = memoryview(content)
    with name_errors(path):
        while view:
            count = os.pwrite(file, view, offset)
            view = view[count:]
            offset = offset + count


class DamagedFileError(Exception):
    """A file differs from what was written; the message says how."""


def write_checked(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file, and return when it is on disk; concurrent readers get the old content or the
    new.

    Args:
      path: the file.
      content: the bytes that `read_checked` returns.
      durable: False: do not wait for the disk. If the machine then loses its power, the file may be
        damaged, which `read_checked` notices.
    """
    with replace_atomically(path, durable=durable) as part, part.open("wb") as file:
        file.write(content)
        file.write(b'\n{"sha256": "%s"}\n' % hashlib.sha256(content).hexdigest().encode())


def read_checked(path: Path) -> bytes | None:
    """The content that `write_checked` wrote; None if there is no such file.

    Raises:
      DamagedFileError: it differs from what was written, or cannot be read.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "a"
      >>> read_checked(path), write_checked(path, b"1 2 3"), read_checked(path)
      (None, None, b'1 2 3')
      >>> _ = path.write_bytes(path.read_bytes().replace(b"1 2", b"1 4"))
      >>> read_checked(path)
      Traceback (most recent call last):
      spmd.base.output_files.DamagedFileError: its contents do not match its checksum
    """
    # `exists` is False for a broken link, which is damage.
    if not path.exists() and not path.is_symlink():
        return None
    if not path.is_file():
        raise DamagedFileError("it is not a file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"it cannot be read: {error}") from error
    # Searched in the last bytes only, since the content may be large.
    checksum = _CHECKSUM.search(content, max(0, len(content) - _LENGTH))
    if checksum is None:
        raise DamagedFileError(f"it has no checksum at the end of its {len(content)} bytes")
    content = content[: checksum.start()]
    if hashlib.sha256(content).hexdigest().encode() != checksum[1]:
        raise DamagedFileError("its contents do not match its checksum")
    return content
