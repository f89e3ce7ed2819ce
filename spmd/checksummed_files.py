"""Files that are written completely or not at all, and whose last line is a checksum that reveals damage.

It reveals a flipped bit, a file cut short, a number edited by hand; not tampering by somebody who writes a new checksum too.
"""

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

_SEAL = re.compile(rb'\n\{"sha256": "([0-9a-f]{64})"\}\n\Z')
_LENGTH = 80  # bytes of the last line, with the line break before it


class DamagedFileError(Exception):
    """A file is not what was written; in words, what is wrong with it."""


def write(path: Path, content: bytes) -> None:
    """Replace a file, and return when the disk has it; whoever reads meanwhile gets the old content or the new."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.write(b'\n{"sha256": "%s"}\n' % hashlib.sha256(content).hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the name is durable only when its folder is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> bytes | None:
    """What `write` was given; None if there is no such file.

    Raises:
      Damaged: it is not what was written, or cannot be read.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "a"
      >>> read(path), write(path, b"1 2 3"), read(path)
      (None, None, b'1 2 3')
      >>> _ = path.write_bytes(path.read_bytes().replace(b"1 2", b"1 4"))
      >>> read(path)
      Traceback (most recent call last):
      spmd.checksummed_files.Damaged: its contents do not match its checksum
    """
    if not path.exists() and not path.is_symlink():
        return None
    if not path.is_file():
        raise DamagedFileError("it is not a file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"it cannot be read: {error}") from error
    seal = _SEAL.search(content, max(0, len(content) - _LENGTH))
    if seal is None:
        raise DamagedFileError(f"it has no checksum at the end of its {len(content)} bytes")
    content = content[: seal.start()]
    if hashlib.sha256(content).hexdigest().encode() != seal[1]:
        raise DamagedFileError("its contents do not match its checksum")
    return content
