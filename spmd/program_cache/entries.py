"""The files of the cache. JAX reads and writes its entries through `EntryPath`, which it takes for
a path of another file system.

JAX's files can be left half written, and stay so. These are replaced atomically, and have a
checksum; a damaged one is removed, and compiled again. Whatever fails here is logged once, and
never ends a run.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from etils import epath

from spmd.base import checksummed_files
from spmd.base.checksummed_files import DamagedFileError
from spmd.base.user_paths import explain_os_error

SCHEME = "spmd-programs://"
SUFFIX = "-cache"  # of JAX's entries
RECORDS = ".json"  # of our records, which are removed in the same way: each script has its own
MOST_BYTES, MOST_ENTRIES = 4 << 30, 10_000  # the least recently used ones are removed
# of these limits when one is reached, so that not every program after it looks through the folder
KEPT = 0.9
# a file this old that is not renamed yet was left by a process that was killed
STALE_SECONDS = 3600.0

# called with the name of an entry that is not there, before it is compiled
on_miss: list[Callable[[str], None]] = []
_sizes: dict[Path, list[int]] = {}  # of folders that this process has written to: bytes and entries
_present: set[Path] = set()  # folders that this process has found or made
_logged: set[tuple[Path, str]] = set()


@epath.register_path_cls(SCHEME)
class EntryPath:
    """A file or folder of the cache, as far as JAX uses one."""

    def __init__(self, uri: str):
        self._uri, self._content = uri, b""

    def joinpath(self, *names: str) -> "EntryPath":
        """A file in this folder; of no names, the folder."""
        return EntryPath("/".join([self._uri, *names]))

    def __truediv__(self, name: str) -> "EntryPath":
        return self.joinpath(name)

    def __str__(self) -> str:
        return self._uri

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self._uri.removeprefix(SCHEME))

    def mkdir(self, **options: bool) -> None:
        """The folder is made when there is something to write."""

    def exists(self) -> bool:
        """Whether there is an intact entry; it is then read already."""
        content = _read(self.path)
        self._content = content or b""
        for call in on_miss if content is None else ():
            call(self.path.name.removesuffix(SUFFIX))
        return content is not None

    def read_bytes(self) -> bytes:
        """The entry, after `exists`."""
        return self._content

    def write_bytes(self, content: bytes) -> None:
        """Keep an entry, if that is possible."""
        _write(self.path, content)


def log_once(folder: Path, kind: str, text: str) -> None:
    """Warn of a folder, once for each kind of problem."""
    if (folder, kind) not in _logged:
        _logged.add((folder, kind))
        logging.getLogger("spmd").warning(text)


def _read(path: Path) -> bytes | None:
    try:
        content = checksummed_files.read(path)
        if content is not None:
            _present.add(path.parent)
            with contextlib.suppress(OSError):
                os.utime(path)  # marks it as recently used
        return content
    except DamagedFileError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        log_once(
            path.parent, "damaged", f"{path} is damaged ({error}): this program is compiled again."
        )
    except OSError as error:
        why = (
            f"the compiled programs in {path.parent} cannot be read: "
            f"{explain_os_error(path, error)}"
        )
        log_once(path.parent, "read", f"{why}; they are compiled again.")
    return None


def _write(path: Path, content: bytes) -> None:
    if was_removed(path.parent):
        return
    try:
        make_private(path.parent)
        _make_room(path.parent, len(content))
        # dozens of programs would each wait for the disk
        checksummed_files.write(path, content, durable=False)
    except OSError as error:
        why = f"compiled programs cannot be kept in {path.parent}: {explain_os_error(path, error)}."
        log_once(
            path.parent,
            "write",
            f"{why} The next start compiles them again, unless compile_cache= is another folder.",
        )


def make_private(folder: Path) -> None:
    """Create a folder, and the one that it is in, so that only this user can read and write
    there.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _present.add(folder)


def was_removed(folder: Path) -> bool:
    """Whether a folder was there and is not any more: a temporary run, whose folder must not come
    back.
    """
    return folder in _present and not folder.exists()


def begin(folder: Path) -> None:
    """A run begins to use a folder; that it was there before means nothing."""
    _present.discard(folder)
    _sizes.pop(folder, None)


def _make_room(folder: Path, needed: int) -> None:
    """Remove the least recently used entries where there would be too many, and what killed
    processes have left.
    """
    size = _sizes.get(folder)
    if size is None or size[0] + needed > MOST_BYTES or size[1] >= MOST_ENTRIES:
        entries = []
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # another process has removed it
                found = entry.stat()
                if entry.name.endswith((SUFFIX, RECORDS)):
                    entries.append((found.st_mtime, found.st_size, entry.path))
                elif entry.name.startswith(".") and found.st_mtime < time.time() - STALE_SECONDS:
                    os.unlink(entry.path)
        entries.sort()
        size = [sum(size for _, size, _ in entries), len(entries)]
        share = KEPT if size[0] + needed > MOST_BYTES or size[1] >= MOST_ENTRIES else 1.0
        while entries and (
            size[0] + needed > share * MOST_BYTES or size[1] >= share * MOST_ENTRIES
        ):
            _, freed, oldest = entries.pop(0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(oldest)
            size = [size[0] - freed, size[1] - 1]
    _sizes[folder] = [size[0] + needed, size[1] + 1]
