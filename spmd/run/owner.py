"""One owner per run folder: a file in it names the process that may write there, until that process lets go or is gone.

On the owner's own machine the kernel says whether the process still lives. Elsewhere only its heartbeat does: the owner counts up a number
in the file, and another process takes the folder over when it has watched that number stand still for `GONE` seconds of its own clock.
Clocks of two machines are never compared. An owner that slept through a takeover finds another's name in the file before it commits its
next save.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from spmd.errors import CheckpointError, printable
from spmd.user_paths import wrap_os_errors

OWNER_FILE = "owner.json"
HEARTBEAT_SECONDS = 5.0  # seconds between two heartbeats
TAKEOVER_SECONDS = (
    60.0  # seconds without a heartbeat after which an owner on another machine is gone; network file systems may cache for half of it
)
LONGEST = 4096  # bytes of the file that are looked at

_held: dict[str, threading.Thread] = {}  # by token: the thread of this process that took the folder


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process on a machine, as the file names it.

    Attributes:
      machine: id of the machine's boot and of the process namespace: process numbers mean something only within both.
      born: when the process started, in the kernel's own unit: numbers are used again.
      file: inode of the file; a copy of a folder has no owner yet.
      token: of one ownership: a process may own a folder, let go, and own it again.
      beat: heartbeats so far.
    """

    host: str
    process: int
    since: str
    machine: str
    born: str
    file: int
    token: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {printable(self.host, 100)}, since {printable(self.since, 40)}"


class FolderOwnership:
    """This process owns a folder from construction until `release`.

    Args:
      clock, wait: seconds that only go forward, and a wait of so many.

    Raises:
      CheckpointError: another process owns it, or the file cannot be written.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], None] = time.sleep):
        self._folder, self._path, self._beats = folder, folder / OWNER_FILE, 0
        self._me = Owner(
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            _machine(),
            _born(os.getpid()) or "",
            0,
            uuid.uuid4().hex,
        )
        _held[self._me.token] = threading.current_thread()
        try:
            with wrap_os_errors(self._path, CheckpointError):
                self._acquire(clock, wait)
        except BaseException:
            del _held[self._me.token]
            raise
        self._released = threading.Event()
        threading.Thread(target=self._keep_alive, name="spmd owner", daemon=True).start()

    def _acquire(self, clock: Callable[[], float], wait: Callable[[float], None]) -> None:
        watched, since = None, clock()
        while True:
            with self._opened() as file:
                text, inode = _text(file)
                owner = _parsed(text)
                lives = False if not text else None if owner is None else _lives(owner, inode)
                if lives is False or (text == watched and clock() - since >= TAKEOVER_SECONDS):
                    self._me = dataclasses.replace(self._me, file=inode)
                    self._write(file)
                    return
            if lives or (watched is not None and text != watched):
                raise CheckpointError(_refusal(self._folder, owner))
            if watched is None:
                watched, since = text, clock()
                logging.getLogger("spmd").warning(
                    "%s belonged to %s: waiting up to %.0f s for a sign of life.",
                    self._folder,
                    owner or "an unknown process",
                    TAKEOVER_SECONDS,
                )
            wait(HEARTBEAT_SECONDS / 2)

    def check(self) -> None:
        """Raise where another process has taken the folder over.

        Raises:
          CheckpointError: it has, since this one was suspended for too long; or the file is not there any more.
        """
        try:
            text = _text_of(self._path)
        except OSError:
            text = b""
        owner = _parsed(text)
        if owner is None or owner.token != self._me.token:
            what = f"{self._folder} no longer belongs to this run, but to {owner or 'no run'}"
            raise CheckpointError(f"{what}: {OWNER_FILE} was changed while this process was suspended, or by hand.", fix="another folder.")

    def release(self) -> None:
        """Let go of the folder; harmless where it is let go of already, or belongs to another."""
        if self._released.is_set():
            return
        self._released.set()
        try:
            with contextlib.suppress(OSError, CheckpointError):
                self.check()
                with self._opened() as file:
                    if self._mine(file):
                        self._path.unlink()
        finally:
            _held.pop(self._me.token, None)

    def _keep_alive(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                self.beat()

    def beat(self) -> None:
        """One sign of life."""
        with self._opened(create=False) as file:
            if self._mine(file) and not self._released.is_set():
                self._beats += 1
                self._write(file)

    def _mine(self, file: int) -> bool:
        owner = _parsed(_text(file)[0])
        return owner is not None and owner.token == self._me.token

    def _write(self, file: int) -> None:
        text = json.dumps(dataclasses.asdict(dataclasses.replace(self._me, beat=self._beats))).encode()
        os.pwrite(file, text, 0)  # in place: whoever waits for the file's lock waits for this very file
        os.ftruncate(file, len(text))

    @contextlib.contextmanager
    def _opened(self, *, create: bool = True) -> Iterator[int]:
        """The file, locked where its file system can: two processes on one machine then never decide at once."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT * create | os.O_NONBLOCK, 0o644)
            try:
                with contextlib.suppress(OSError, ImportError):
                    import fcntl  # not on Windows

                    fcntl.flock(file, fcntl.LOCK_EX)
                if self._path.exists() and os.fstat(file).st_ino == self._path.stat().st_ino:  # else it was removed meanwhile
                    yield file
                    return
            finally:
                os.close(file)


def _text(file: int) -> tuple[bytes, int]:
    return os.pread(file, LONGEST, 0), os.fstat(file).st_ino


def _text_of(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return _text(file)[0]
    finally:
        os.close(file)


def _parsed(text: bytes) -> Owner | None:
    try:
        found = Owner(**json.loads(text))
        kinds = {field.name: field.type for field in dataclasses.fields(Owner)}
        return found if all(type(getattr(found, name)) is kind for name, kind in kinds.items()) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _lives(owner: Owner, inode: int) -> bool | None:
    """Whether an owner's process still runs; None: that cannot be known here."""
    if owner.machine != _machine():
        return None
    if owner.process == os.getpid():  # a thread that has ended, or a fork's parent, left it without letting go
        thread = _held.get(owner.token)
        return owner.file == inode and thread is not None and thread.is_alive()
    born = _born(owner.process)
    return owner.file == inode and born is not None and born == owner.born


def _refusal(folder: Path, owner: Owner | None) -> str:
    """Why a folder that has an owner cannot be had."""
    thread = None if owner is None else _held.get(owner.token)
    if thread is None:
        fix = "another folder; or resume=True after that process has ended."
        return f"{folder} belongs to another run: {owner or 'unknown'}.\n    fix: {fix}"
    who = f"{folder} is in use by this same process ({owner})"
    if thread is threading.current_thread():
        return (
            f"{who}: a run that this thread has started has not ended; this call is inside it, as in a callback, or it was not closed.\n"
            "    fix: another folder for this run; or call it after the first has returned."
        )
    return (
        f'{who}: a run in its thread "{thread.name}" has not ended.\n    fix: another folder; or resume=True after that run has returned.'
    )


def _machine() -> str:
    """This boot of this machine, and the namespace of process numbers: a host's name survives a reboot, and containers may share it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _born(process: int) -> str | None:
    """When a process started; "" where the system does not say, None where it does not run."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass  # somebody else's
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return "" if not Path("/proc/self/stat").exists() else None
    return None if state in "ZX" else fields[18]  # one that was killed and not reaped writes no more
