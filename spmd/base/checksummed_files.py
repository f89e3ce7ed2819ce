"""Writes files atomically, with a last line that holds a checksum.

The checksum reveals flipped bits, truncation and edits by hand; not tampering that also writes a
new checksum.
"""

import hashlib
import re
from pathlib import Path

from spmd.base.output_files import replace_atomically

_CHECKSUM = re.compile(rb'\n\{"sha256": "([0-9a-f]{64})"\}\n\Z')
# Bytes of the last line, with the line break before it.
_LENGTH = 80


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
      Damaged: it differs from what was written, or cannot be read.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "a"
      >>> read_checked(path), write_checked(path, b"1 2 3"), read_checked(path)
      (None, None, b'1 2 3')
      >>> _ = path.write_bytes(path.read_bytes().replace(b"1 2", b"1 4"))
      >>> read_checked(path)
      Traceback (most recent call last):
      spmd.base.checksummed_files.DamagedFileError: its contents do not match its checksum
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
    # In the last bytes only, since the content may be large.
    checksum = _CHECKSUM.search(content, max(0, len(content) - _LENGTH))
    if checksum is None:
        raise DamagedFileError(f"it has no checksum at the end of its {len(content)} bytes")
    content = content[: checksum.start()]
    if hashlib.sha256(content).hexdigest().encode() != checksum[1]:
        raise DamagedFileError("its contents do not match its checksum")
    return content
