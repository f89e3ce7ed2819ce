"""The folder of a run's checkpoints in memory on one host: whose it is, how much room it has, and
when it is removed.

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

from spmd.errors import OptionError
from spmd.output_files import name_errors
from spmd.tree import format_bytes
from spmd.user_paths import as_path, run_file

ID_FILE = "memory_id"  # beside the checkpoints on disk
RUN_FILE, LOCK_FILE = "run.json", "lock"
DEFAULT_BASE = Path("/dev/shm")
HEADROOM = 1.1  # times the size of a checkpoint that must be free
CGROUPS = Path("/sys/fs/cgroup")
# seconds without a write after which a folder that no process uses is removed
MAX_AGE = 24 * 3600.0
# step, rank of the writer, and rank of the sender of shards that were lost
_PIECE = re.compile(r"(\d{1,15})\.(\d{1,9})(\.\d{1,9})?")


def memory_base(chosen: str | Path | None) -> Path:
    """Where folders of checkpoints in memory are: as chosen, $SPMD_MEMORY_FOLDER, or /dev/shm.

    Raises:
      OptionError: there is no /dev/shm on this machine.
    """
    given = chosen or os.environ.get("SPMD_MEMORY_FOLDER") or DEFAULT_BASE
    base = as_path(
        given, "Checkpoint: memory_folder" if chosen else "$SPMD_MEMORY_FOLDER"
    ).absolute()
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
    """The id of the run in a folder: the one in it if `keep`, else a new one, which is written
    there.
    """
    path = run_folder / "checkpoints" / ID_FILE
    if keep and (known := _read_id(path)):
        return known
    new = secrets.token_hex(8)
    part = run_file(path.parent, f".{ID_FILE}.{os.getpid()}")
    with name_errors(part):
        part.write_text(new, encoding="ascii")
    part.replace(path)
    return new


def _read_id(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        text = path.read_text(encoding="ascii")
        return text if re.fullmatch("[0-9a-f]{16}", text) else ""
    return ""


def forget_run(run_folder: Path) -> None:
    """Let no later start of the run find what is in memory."""
    (run_folder / "checkpoints" / ID_FILE).unlink(missing_ok=True)


def newest_step(run_folder: Path) -> int:
    """The newest step of a run, not necessarily complete, of which this host's memory has a piece;
    -1 if there is none.
    """
    with contextlib.suppress(OptionError, OSError):
        path = (
            memory_base(None)
            / f"spmd-{os.geteuid()}"
            / _name(run_folder, _read_id(run_folder / "checkpoints" / ID_FILE))
        )
        if _is_private(path.parent) and _is_private(path):
            return max(
                (int(match[1]) for name in os.listdir(path) if (match := _PIECE.fullmatch(name))),
                default=-1,
            )
    return -1


def _name(run_folder: Path, identity: str) -> str:
    """The name of a run's folder of pieces."""
    return f"{hashlib.sha256(os.fsencode(run_folder.absolute())).hexdigest()[:16]}-{identity}"


class MemoryFolder:
    """This host's folder of one run; it is created, with permissions for this user only.

    Raises:
      OSError: it cannot be created, or something of another user is in its place.
    """

    def __init__(self, base: Path, run_folder: Path, identity: str):
        user = base / f"spmd-{os.geteuid()}"
        self.path, self._record, self._lock = (
            user / _name(run_folder, identity),
            {"folder": str(run_folder.absolute()), "id": identity},
            -1,
        )
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
            # another process removed the folder before this one had the lock
            if not self._holds_lock():
                self.close()
        record = self.path / f"{RUN_FILE}.{os.getpid()}"
        with name_errors(record):
            record.write_text(json.dumps(self._record), encoding="utf-8")
        record.replace(self.path / RUN_FILE)

    def _holds_lock(self) -> bool:
        """Whether the lock is that of the folder which is there now."""
        with contextlib.suppress(FileNotFoundError):
            return self._lock >= 0 and os.path.samestat(
                os.fstat(self._lock), (self.path / LOCK_FILE).lstat()
            )
        return False

    @property
    def host(self) -> str:
        """Identifies the storage: processes with the same text lose their pieces together."""
        info = self.path.stat()
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {info.st_dev} {info.st_ino}"

    def pieces(self) -> dict[Path, tuple[int, int]]:
        """Step and rank of every complete file of a piece."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                if match := _PIECE.fullmatch(entry.name):
                    found[Path(entry.path)] = (int(match[1]), int(match[2]))
        return found

    def piece(self, step: int, rank: int, sender: int | None = None) -> Path:
        """The file of a piece."""
        return self.path / (f"{step}.{rank}" if sender is None else f"{step}.{rank}.{sender}")

    def keep_only(self, steps: Collection[int]) -> None:
        """Remove the pieces of all other steps, also incomplete ones."""
        names = {str(step) for step in steps}
        for entry in os.scandir(self.path):
            step, dot, _ = entry.name.partition(".")
            if dot and step.isdigit() and step not in names:
                remove_piece(Path(entry.path))

    def lacks_room(self, size: int, keeping: Collection[int]) -> str:
        """Why a number of bytes does not fit beside the pieces of some steps, as text; "" if it
        does.
        """
        freed = sum(
            path.stat().st_size for path, (step, _) in self.pieces().items() if step not in keeping
        )
        limits: dict[str, int | None] = {"free in its file system": _free(self.path)}
        if in_memory(self.path):
            limits["free in this host's memory"] = available_memory()
        for what, free in limits.items():
            if free is not None and free + freed < HEADROOM * size:
                return (
                    f"{format_bytes(free + freed)} are {what} ({self.path}), {HEADROOM} times "
                    f"{format_bytes(size)} are needed"
                )
        return ""

    def remove(self) -> None:
        """Remove it with all pieces."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # if it was the last

    def close(self) -> None:
        """Release it; the pieces stay."""
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
    """Whether a run may still need its pieces; a run's folder that is not mounted here, as in
    another container, may be there elsewhere.
    """
    try:
        return (run_folder / "checkpoints" / ID_FILE).read_text(encoding="ascii") == identity
    except FileNotFoundError:
        return not run_folder.parent.is_dir()
    except OSError:
        return True


def remove_unused(path: Path) -> bool:
    """Remove a folder unless a process uses it; whether that was done."""
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        _flock(lock, exclusive=True)
        # with the lock: a process that waits for it creates the folder again
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def is_memory_folder(path: Path) -> bool:
    """Whether a path is a folder that `MemoryFolder` has made for this user; a launcher removes no
    other.
    """
    with contextlib.suppress(OSError):
        name_fits = (
            path.is_absolute()
            and path.parent.name == f"spmd-{os.geteuid()}"
            and re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", path.name)
        )
        return (
            bool(name_fits)
            and _is_private(path.parent)
            and _is_private(path)
            and (path / RUN_FILE).is_file()
        )
    return False


def _make_private(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private(path):
        raise PermissionError(errno.EPERM, f"{path} is not a folder that only this user may use")


def _is_private(path: Path) -> bool:
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _flock(descriptor: int, *, exclusive: bool) -> None:
    import fcntl  # not on Windows

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)


def _free(path: Path) -> int:
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def in_memory(path: Path) -> bool:
    """Whether a path is in a tmpfs, whose files take the host's memory."""
    best, kind = "", ""
    for mount, of in _mounts():
        inside = path == Path(mount) or Path(mount) in path.parents
        if inside and len(mount) >= len(best):
            best, kind = mount, of
    return kind in ("tmpfs", "ramfs")


def _mounts() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            _, mount, kind, *_ = line.split()
            yield mount.replace("\\040", " "), kind


def available_memory() -> int | None:
    """Bytes of memory that processes of this host may still take, within the limits of their
    cgroups; None where that is not known.
    """
    known = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError):
        known += _left_in_cgroups(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CGROUPS)
    return min(known, default=None)


def _left_in_cgroups(groups: str, root: Path) -> list[int]:
    """Bytes that each cgroup of this process with a limit has left; what files occupy in the page
    cache is given back when it is needed.

    Args:
      groups: a line "number:controllers:path" for each hierarchy. The path may be one that only the
        host sees, not the container.
      root: where the hierarchies are mounted.
    """
    known = []
    for number, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if number == "0":
            top, limit, used, prefix = root, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):  # the first version of cgroups
            top, limit, used, prefix = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        inside = top / path.lstrip("/")
        for group in (
            group for group in (inside, *inside.parents) if group == top or top in group.parents
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):  # without a limit it is "max"
                numbers = dict(
                    line.split()
                    for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
                )
                files = sum(int(numbers[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
                known.append(
                    int((group / limit).read_text()) - int((group / used).read_text()) + files
                )
    return known
