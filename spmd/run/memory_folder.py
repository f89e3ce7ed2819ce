"""The folder of a run's checkpoints in memory on one host: its owner, its room and its removal.

It is BASE/spmd-UID/RUN, with /dev/shm as BASE: files there outlive the processes that wrote them,
but not the machine. RUN names the run's folder and an id in it, so that another run in the same
folder finds other files. Processes that use it hold a shared lock, which the kernel releases when
they end.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from spmd.base.output_files import name_errors, replace_atomically
from spmd.base.tree import format_bytes
from spmd.base.user_paths import as_path
from spmd.errors import OptionError

ID_FILE = "memory_id"  # beside the checkpoints on disk
RUN_FILE = "run.json"
LOCK_FILE = "lock"
DEFAULT_BASE = Path("/dev/shm")
HEADROOM = 1.1  # times the size of a checkpoint that must be free
CGROUPS = Path("/sys/fs/cgroup")
# Seconds without a write after which a folder that no process uses is removed.
MAX_AGE = 24 * 3600.0
# Step, rank of the writer, and rank of the sender of shards that were lost.
_PIECE = re.compile(r"(\d{1,15})\.(\d{1,9})(\.\d{1,9})?")


class _CgroupFiles(NamedTuple):
    """The names of files, and of fields in `memory.stat`, in a version of cgroups."""

    limit: str
    used: str
    stat_prefix: str


CGROUP_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
CGROUP_2 = _CgroupFiles("memory.max", "memory.current", "")


def memory_base(chosen: str | Path | None) -> Path:
    """Return where folders of checkpoints in memory are: as chosen, $SPMD_MEMORY_FOLDER, or
    /dev/shm.

    Raises:
      OptionError: there is no /dev/shm on this machine.
    """
    path = chosen or os.environ.get("SPMD_MEMORY_FOLDER") or DEFAULT_BASE
    option_name = "Checkpoint: memory_folder" if chosen else "$SPMD_MEMORY_FOLDER"
    base = as_path(path, option_name).absolute()
    if base == DEFAULT_BASE and not base.is_dir():
        fix = (
            "Checkpoint(memory_folder=...) or $SPMD_MEMORY_FOLDER, a folder in memory or on a fast "
            "local disk; or no memory_every."
        )
        raise OptionError(
            f"Checkpoint: memory_every needs {DEFAULT_BASE}, which this machine does not have.",
            fix=fix,
        )
    return base


def run_id(run_folder: Path, *, keep: bool) -> str:
    """Return the id of the run in a folder: the one in it if `keep`, else a new one, which is
    written there.
    """
    path = run_folder / "checkpoints" / ID_FILE
    earlier = _read_id(path) if keep else ""
    if earlier:
        return earlier
    new = secrets.token_hex(8)
    with replace_atomically(path, durable=False) as part:
        part.write_text(new, encoding="ascii")
    return new


def _read_id(path: Path) -> str:
    """Return the id in a file; "" if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        text = path.read_text(encoding="ascii")
        if re.fullmatch("[0-9a-f]{16}", text):
            return text
    return ""


def forget_run(run_folder: Path) -> None:
    """Remove the id of the run, so that no later start of it finds what is in memory."""
    (run_folder / "checkpoints" / ID_FILE).unlink(missing_ok=True)


def newest_step(run_folder: Path) -> int:
    """Return the newest step of a run, not necessarily complete, of which this host's memory has a
    piece; -1 if there is none.
    """
    with contextlib.suppress(OptionError, OSError):
        user = memory_base(None) / f"spmd-{os.geteuid()}"
        path = user / _name(run_folder, _read_id(run_folder / "checkpoints" / ID_FILE))
        if _is_private(user) and _is_private(path):
            matches = [_PIECE.fullmatch(name) for name in os.listdir(path)]
            return max((int(match[1]) for match in matches if match), default=-1)
    return -1


def _name(run_folder: Path, identity: str) -> str:
    """Return the name of a run's folder of pieces."""
    digest = hashlib.sha256(os.fsencode(run_folder.absolute())).hexdigest()
    return f"{digest[:16]}-{identity}"


class MemoryFolder:
    """This host's folder of one run; it is created, with permissions for this user only.

    Raises:
      OSError: it cannot be created, or something of another user is in its place.
    """

    def __init__(self, base: Path, run_folder: Path, identity: str):
        user = base / f"spmd-{os.geteuid()}"
        self.path = user / _name(run_folder, identity)
        self._record = {"folder": str(run_folder.absolute()), "id": identity}
        self._lock = -1
        self.create()
        remove_stale(user)

    def create(self) -> None:
        """Create the folder if it is not there, as after it was removed by hand.

        Raises:
          OSError: as for the class.
        """
        if self._holds_lock():
            return
        self.close()
        self.path.parent.parent.mkdir(parents=True, exist_ok=True)
        while self._lock < 0:
            _make_private(self.path.parent)
            _make_private(self.path)
            self._lock = os.open(
                self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            _flock(self._lock, exclusive=False)
            # Another process may have removed the folder before this one had the lock.
            if not self._holds_lock():
                self.close()
        # A process that reads finds a complete record: all processes of a host write the same.
        record = self.path / f"{RUN_FILE}.{os.getpid()}"
        with name_errors(record):
            record.write_text(json.dumps(self._record), encoding="utf-8")
        record.replace(self.path / RUN_FILE)

    def _holds_lock(self) -> bool:
        """Return whether the lock is the one of the folder that exists now."""
        if self._lock < 0:
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), (self.path / LOCK_FILE).lstat())
        return False

    @property
    def host(self) -> str:
        """A text that identifies the storage: processes with the same text lose their pieces
        together.
        """
        info = self.path.stat()
        # Two machines may have equal device and inode numbers, and containers of one machine have
        # one boot.
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {info.st_dev} {info.st_ino}"

    def pieces(self) -> dict[Path, tuple[int, int]]:
        """Return step and rank of every complete file of a piece."""
        pieces = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                match = _PIECE.fullmatch(entry.name)
                if match:
                    pieces[Path(entry.path)] = (int(match[1]), int(match[2]))
        return pieces

    def piece(self, step: int, rank: int, sender: int | None = None) -> Path:
        """Return the file of a piece."""
        if sender is None:
            return self.path / f"{step}.{rank}"
        return self.path / f"{step}.{rank}.{sender}"

    def keep_only(self, steps: Collection[int]) -> None:
        """Remove the pieces of all other steps, also incomplete ones."""
        names = {str(step) for step in steps}
        for entry in os.scandir(self.path):
            step, dot, _ = entry.name.partition(".")
            if dot and step.isdigit() and step not in names:
                remove_piece(Path(entry.path))

    def lacks_room(self, size: int, keeping: Collection[int]) -> str:
        """Return the reason for which a number of bytes does not fit beside the pieces of some
        steps, as text; "" if it fits.
        """
        freed = 0
        for path, (step, _) in self.pieces().items():
            if step not in keeping:
                freed += path.stat().st_size
        limits: dict[str, int | None] = {"free in its file system": _free(self.path)}
        # A tmpfs may have a larger limit than the host has memory.
        if in_memory(self.path):
            limits["free in this host's memory"] = available_memory()
        for limit, free in limits.items():
            if free is not None and free + freed < HEADROOM * size:
                return (
                    f"{format_bytes(free + freed)} are {limit} ({self.path}), {HEADROOM} times "
                    f"{format_bytes(size)} are needed"
                )
        return ""

    def remove(self) -> None:
        """Remove the folder with all pieces."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        # Fails unless this was the user's last folder.
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def close(self) -> None:
        """Release the folder; the pieces stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_piece(path: Path) -> None:
    """Remove what has the name of a piece, whatever it is, if that is possible."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_stale(user: Path) -> None:
    """Remove folders of runs that no process uses, and that are old or whose run's folder has begun
    another run or is gone.
    """
    for path in list(user.iterdir()):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if not _is_private(path):
                continue
            record = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
            age = time.time() - max(entry.stat().st_mtime for entry in os.scandir(path))
            if age > MAX_AGE or not _may_resume(Path(record["folder"]), record["id"]):
                remove_unused(path)


def _may_resume(run_folder: Path, identity: str) -> bool:
    """Return whether a run may still need its pieces; a run's folder that is not mounted here, as
    in another container, may be there elsewhere.
    """
    try:
        return (run_folder / "checkpoints" / ID_FILE).read_text(encoding="ascii") == identity
    except FileNotFoundError:
        return not run_folder.parent.is_dir()
    except OSError:
        return True


def remove_unused(path: Path) -> bool:
    """Remove a folder unless a process uses it; return whether that was done."""
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        _flock(lock, exclusive=True)
        # With the lock: a process that waits for it creates the folder again.
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def is_memory_folder(path: Path) -> bool:
    """Return whether a path is a folder that `MemoryFolder` has made for this user; a launcher
    removes no other.
    """
    if not path.is_absolute() or path.parent.name != f"spmd-{os.geteuid()}":
        return False
    if not re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", path.name):
        return False
    with contextlib.suppress(OSError):
        is_private = _is_private(path.parent) and _is_private(path)
        return is_private and (path / RUN_FILE).is_file()
    return False


def _make_private(path: Path) -> None:
    """Make a folder for this user only; all users can write to /dev/shm, so that something of
    another may be in its place.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private(path):
        raise PermissionError(errno.EPERM, f"{path} is not a folder that only this user may use")


def _is_private(path: Path) -> bool:
    # Not `stat`: a link of another user's may point to a folder of this one's.
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _flock(descriptor: int, *, exclusive: bool) -> None:
    # Windows has no fcntl.
    import fcntl

    if exclusive:
        # Without waiting: a process that uses the folder may use it for days.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _free(path: Path) -> int:
    """Return the bytes that this user may still write in the file system of a path."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def in_memory(path: Path) -> bool:
    """Return whether a path is in a tmpfs, whose files take the host's memory."""
    longest = ""
    path_kind = ""
    for mount, kind in _mounts():
        inside = path == Path(mount) or Path(mount) in path.parents
        # A later mount hides an earlier one in the same place.
        if inside and len(mount) >= len(longest):
            longest = mount
            path_kind = kind
    return path_kind in ("tmpfs", "ramfs")


def _mounts() -> Iterator[tuple[str, str]]:
    """Yield place and kind of each file system, as far as the system has such a list."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            _, mount, kind, *_ = line.split()
            # The list separates fields by spaces, and writes a space in a path as \040.
            yield mount.replace("\\040", " "), kind


def available_memory() -> int | None:
    """Return the bytes of memory that processes of this host may still take, within the limits of
    their cgroups; None where that is not known.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            # In KiB: "MemAvailable:   16384 kB".
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                limits.append(1024 * int(amount.split()[0]))
    with contextlib.suppress(OSError):
        limits += _left_in_cgroups(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CGROUPS)
    return min(limits, default=None)


def _left_in_cgroups(groups: str, root: Path) -> list[int]:
    """Return the bytes that each cgroup of this process with a limit has left; what files occupy in
    the page cache is given back when it is needed.

    Args:
      groups: a line "number:controllers:path" for each hierarchy. The path may be one that only the
        host sees, not the container.
      root: where the hierarchies are mounted.
    """
    left = []
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = root
            names = CGROUP_2
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = CGROUP_1
        else:
            continue
        inside = top / path.lstrip("/")
        # Each group above limits this one, too.
        for group in (inside, *inside.parents):
            if group != top and top not in group.parents:
                continue
            # In version 2, a group without a limit says "max".
            with contextlib.suppress(OSError, ValueError, KeyError):
                left.append(_left_in_cgroup(group, names))
    return left


def _left_in_cgroup(group: Path, names: _CgroupFiles) -> int:
    """Return the bytes that a cgroup has left.

    Raises:
      OSError, ValueError, KeyError: it has no limit, or does not say.
    """
    lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    numbers = dict(line.split() for line in lines)
    inactive = int(numbers[f"{names.stat_prefix}inactive_file"])
    active = int(numbers[f"{names.stat_prefix}active_file"])
    limit = int((group / names.limit).read_text())
    used = int((group / names.used).read_text())
    return limit - used + inactive + active
