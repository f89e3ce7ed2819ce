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

from spmd.base import output_files
from spmd.base.output_files import DamagedFileError
from spmd.base.user_paths import explain_os_error

SCHEME = "spmd-programs://"
# The end of names of JAX's entries.
SUFFIX = "-cache"
# The end of names of our records, which are removed in the same way: each script has its own.
RECORDS = ".json"
# Beyond this the least recently used entries are removed.
MOST_BYTES = 4 << 30
MOST_ENTRIES = 10_000
# of these limits when one is reached, so that not every program after it looks through the folder
KEPT = 0.9
# a file this old that is not renamed yet was left by a process that was killed
STALE_SECONDS = 3600.0

# called with the name of an entry that is not there, before it is compiled
on_miss: list[Callable[[str], None]] = []
# Bytes and entries of folders that this process has written to.
_sizes: dict[Path, list[int]] = {}
# Folders that this process has found or made.
_present: set[Path] = set()
_logged: set[tuple[Path, str]] = set()


@epath.register_path_cls(SCHEME)
class EntryPath:
    """A file or folder of the cache, as far as JAX uses one."""

    def __init__(self, uri: str):
        self._uri = uri
        self._content = b""

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
        """Return whether there is an intact entry; it is then read already."""
        content = _read_entry(self.path)
        self._content = content or b""
        if content is not None:
            return True
        for call in on_miss:
            call(self.path.name.removesuffix(SUFFIX))
        return False

    def read_bytes(self) -> bytes:
        """Return the entry, after `exists`."""
        return self._content

    def write_bytes(self, content: bytes) -> None:
        """Keep an entry, if that is possible."""
        _write_entry(self.path, content)


def log_once(folder: Path, kind: str, text: str) -> None:
    """Warn of a folder, once for each kind of problem."""
    if (folder, kind) not in _logged:
        _logged.add((folder, kind))
        logging.getLogger("spmd").warning(text)


def _read_entry(path: Path) -> bytes | None:
    try:
        content = output_files.read_checked(path)
        if content is not None:
            _present.add(path.parent)
            with contextlib.suppress(OSError):
                # Marks it as recently used.
                os.utime(path)
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


def _write_entry(path: Path, content: bytes) -> None:
    if was_removed(path.parent):
        return
    try:
        make_private(path.parent)
        _make_room(path.parent, len(content))
        # Not durable: dozens of programs would each wait for the disk.
        output_files.write_checked(path, content, durable=False)
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
    """Return whether a folder was there and is not any more: a temporary run, whose folder must not
    come back.
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
            # Another process may have removed it.
            with contextlib.suppress(OSError):
                status = entry.stat()
                if entry.name.endswith((SUFFIX, RECORDS)):
                    entries.append((status.st_mtime, status.st_size, entry.path))
                elif entry.name.startswith(".") and status.st_mtime < time.time() - STALE_SECONDS:
                    os.unlink(entry.path)
        entries.sort()
        size = [sum(size for _, size, _ in entries), len(entries)]
        share = 1.0
        if size[0] + needed > MOST_BYTES or size[1] >= MOST_ENTRIES:
            share = KEPT
        while entries and (
            size[0] + needed > share * MOST_BYTES or size[1] >= share * MOST_ENTRIES
        ):
            _, freed, oldest = entries.pop(0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(oldest)
            size = [size[0] - freed, size[1] - 1]
    _sizes[folder] = [size[0] + needed, size[1] + 1]
