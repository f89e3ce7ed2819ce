"""One owner per run folder: a file in it names the process that may write there, until that process
releases it or dies.

On the owner's machine the kernel says whether the process is alive. On others only its heartbeat
does: the owner increments a number in the file, and another process takes over after it has watched
that number stay the same for `TAKEOVER_SECONDS` of its own clock. Clocks of two machines are never
compared. An owner that was suspended during a takeover finds another name in the file before it
commits its next save.
"""

import calendar
import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from spmd.base.output_files import write_at
from spmd.base.user_paths import run_file, wrap_os_errors
from spmd.distributed import coordination
from spmd.errors import CheckpointError, printable
from spmd.run.manifest import open_regular

OWNER_FILE = "owner.json"
HEARTBEAT_SECONDS = 5.0
# Without a heartbeat for this time, an owner on another machine counts as dead. Network file
# systems may cache a file for half of it.
TAKEOVER_SECONDS = 60.0
MAX_BYTES = 4096  # bytes of the file that are looked at
# A disk or a network may fail for a moment.
READS = 5  # attempts to read the file
READ_SECONDS = 1.0  # between two attempts
SINCE = "%Y-%m-%d %H:%M:%S UTC"
JOB_SECONDS = 60  # in which the processes of a job begin

# By token: the thread of this process that took ownership.
_owning_threads: dict[str, threading.Thread] = {}
_ownerships = weakref.WeakSet["FolderOwnership"]()


def _release_all() -> None:
    for ownership in list(_ownerships):
        ownership.release()


# A process that ends because another one failed: its run may start again on another machine, which
# would wait for a heartbeat for a minute.
coordination.before_exit(_release_all)


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process on a machine, as recorded in the file.

    Attributes:
      machine: id of the machine's boot and of the process namespace: process ids are unique only
        within both.
      born: when the process started, in the kernel's unit, since process ids are reused.
      file: inode of the file; a copied folder has no owner yet.
      token: identifies one ownership: a process may release a folder and own it again.
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
        return (
            f"process {self.process} on {printable(self.host, 100)}, since "
            f"{printable(self.since, 40)}"
        )


class FolderOwnership:
    """This process owns a folder from construction until `release`.

    Args:
      clock, wait: a monotonic clock and a sleep, in seconds.

    Raises:
      CheckpointError: another process owns the folder, or the file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ):
        self._folder = folder
        self._path = run_file(folder, OWNER_FILE)
        self._beats = 0
        self._wait = wait
        self._me = Owner(
            host=socket.gethostname(),
            process=os.getpid(),
            since=time.strftime(SINCE, time.gmtime()),
            machine=_machine(),
            born=_start_time(os.getpid()) or "",
            file=0,
            token=uuid.uuid4().hex,
        )
        _owning_threads[self._me.token] = threading.current_thread()
        try:
            with wrap_os_errors(self._path, CheckpointError):
                self._acquire(clock)
        except BaseException:
            del _owning_threads[self._me.token]
            raise
        self._released = threading.Event()
        _ownerships.add(self)
        threading.Thread(target=self._keep_alive, name="spmd owner", daemon=True).start()

    def _acquire(self, clock: Callable[[], float]) -> None:
        """Write this owner into the file once it has no other that lives."""
        watched_text = None
        since = clock()
        while True:
            with self._opened() as file:
                text = self._retry_read(lambda file=file: os.pread(file, MAX_BYTES, 0))
                inode = os.fstat(file).st_ino
                owner = _parsed(text)
                alive = None
                if not text or text.startswith(b"\0"):
                    # A process that was killed while it began has left this.
                    alive = False
                elif owner is not None:
                    alive = _is_alive(owner, inode)
                if alive is False or (text == watched_text and clock() - since >= TAKEOVER_SECONDS):
                    self._me = dataclasses.replace(self._me, file=inode)
                    self._begin(file)
                    return
            if alive or (watched_text is not None and text != watched_text):
                raise _ownership_error(self._folder, owner)
            if watched_text is None:
                watched_text = text
                since = clock()
                message = "%s belonged to %s: waiting up to %.0f s for a heartbeat."
                logging.getLogger("spmd").warning(
                    message, self._folder, owner or "an unknown process", TAKEOVER_SECONDS
                )
            self._wait(HEARTBEAT_SECONDS / 2)

    def _retry_read(self, read_file: Callable[[], bytes]) -> bytes:
        """Return what `read_file` returns; try again where a disk or network fails for a moment.

        Raises:
          OSError: there is no such file, or each attempt has failed.
        """
        failure = OSError()
        for _ in range(READS):
            try:
                return read_file()
            except FileNotFoundError:
                raise
            except OSError as error:
                failure = error
            self._wait(READ_SECONDS)
        raise failure

    def check(self) -> None:
        """Check that this process still owns the folder.

        Raises:
          CheckpointError: another process took it over while this one was suspended, or the file is
            gone or cannot be read.
        """
        try:
            owner = _parsed(self._retry_read(lambda: _content(self._path)))
        except FileNotFoundError:
            owner = None
        except OSError as error:
            why = (
                f"{self._path}, which says whose the folder is, cannot be read in {READS} "
                f"attempts: {error.strerror or error}"
            )
            raise CheckpointError(
                f"{why}.", fix="see whether the disk of that folder works."
            ) from error
        if owner is None or owner.token != self._me.token:
            why = f"{OWNER_FILE} was changed while this process was suspended, or by hand"
            headline = f"{self._folder} no longer belongs to this run, but to {owner or 'no run'}"
            raise CheckpointError(f"{headline}: {why}.", fix="another folder.")

    def release(self) -> None:
        """Release the folder; does nothing if it was released already or belongs to another
        process.
        """
        if self._released.is_set():
            return
        self._released.set()
        try:
            with contextlib.suppress(OSError), self._opened(create=False) as file:
                if self._is_mine(file):
                    self._path.unlink()
        finally:
            _owning_threads.pop(self._me.token, None)

    def _keep_alive(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                self.beat()

    def beat(self) -> None:
        """Write one heartbeat."""
        with self._opened(create=False) as file:
            # The file may have been taken over, or removed and made again by another process.
            if self._is_mine(file) and not self._released.is_set():
                self._beats += 1
                write_at(file, self._text(), 0, self._path)

    def _is_mine(self, file: int) -> bool:
        owner = _parsed(os.pread(file, MAX_BYTES, 0))
        return owner is not None and owner.token == self._me.token

    def _begin(self, file: int) -> None:
        """Write this owner. A process that is killed or finds no room on the way leaves a file that
        begins with a zero, or is empty.
        """
        text = self._text()
        # In place, since other processes wait for the lock of this inode.
        os.ftruncate(file, 0)
        # The first byte last: until it is written, the file begins with a zero.
        write_at(file, text[1:], 1, self._path)
        write_at(file, text[:1], 0, self._path)

    def _text(self) -> bytes:
        """Return this owner as JSON, of one length for all numbers of heartbeats: a part of it over
        an earlier one is still JSON.
        """
        fields = dataclasses.asdict(self._me)
        del fields["beat"]
        return f'{{"beat": {self._beats:12}, {json.dumps(fields)[1:]}'.encode()

    @contextlib.contextmanager
    def _opened(self, *, create: bool = True) -> Iterator[int]:
        """Open the file in the block, locked if the file system supports it, so that two processes
        on one machine never decide concurrently.
        """
        # A pipe or a link in the place of the file must neither block nor be followed.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW
        if create:
            flags |= os.O_CREAT
        while True:
            file = os.open(self._path, flags, 0o644)
            try:
                # Windows has no fcntl, and some network file systems have no locks.
                with contextlib.suppress(OSError, ImportError):
                    import fcntl

                    fcntl.flock(file, fcntl.LOCK_EX)
                # The owner that had the lock may have removed the file: then its name is another
                # inode's, or nothing's, and the lock is worthless.
                if self._path.exists() and os.fstat(file).st_ino == self._path.stat().st_ino:
                    yield file
                    return
            finally:
                os.close(file)


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(MAX_BYTES)


def _parsed(text: bytes) -> Owner | None:
    """Return the owner that the file names; None if it names none that can be read."""
    try:
        owner = Owner(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    for field in dataclasses.fields(Owner):
        if type(getattr(owner, field.name)) is not field.type:
            return None
    return owner


def _is_alive(owner: Owner, inode: int) -> bool | None:
    """Return whether an owner's process is still running; None: that cannot be determined here."""
    if owner.machine != _machine():
        return None
    # A thread that has ended, or the parent of a fork, may have left the folder unreleased.
    if owner.process == os.getpid():
        thread = _owning_threads.get(owner.token)
        return owner.file == inode and thread is not None and thread.is_alive()
    born = _start_time(owner.process)
    return owner.file == inode and born is not None and born == owner.born


def _ownership_error(folder: Path, owner: Owner | None) -> CheckpointError:
    """Return the error about a folder that has another owner."""
    thread = None if owner is None else _owning_threads.get(owner.token)
    if thread is None:
        fix = "use another folder, or resume after that process has ended."
        if owner is not None and _is_new(owner):
            fix += (
                " If both processes are of one job, its launcher was not recognised, and each "
                "trains alone: docs/clusters.md, Joining."
            )
        return CheckpointError(f"{folder} belongs to another run: {owner or 'unknown'}.", fix=fix)
    if thread is threading.current_thread():
        why = (
            "a run that this thread started has not ended; this call is inside it, as in a "
            "callback, or it was not closed"
        )
        fix = "use another folder for this run, or call it after the first has returned."
    else:
        why = f'a run in its thread "{thread.name}" has not ended'
        fix = "use another folder, or resume=True after that run has returned."
    return CheckpointError(f"{folder} is in use by this same process ({owner}): {why}.", fix=fix)


def _is_new(owner: Owner) -> bool:
    """Return whether an owner began less than a minute ago, by the clocks of both machines."""
    try:
        began = time.strptime(owner.since, SINCE)
    except ValueError:
        return False
    return abs(time.time() - calendar.timegm(began)) < JOB_SECONDS


def _machine() -> str:
    """Return an id of this machine's boot and process namespace: a host name survives reboots, and
    containers may share it.
    """
    try:
        # Linux only; elsewhere the host name has to do.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_time(process: int) -> str | None:
    """Return when a process started; "" if the system does not say, None if it is not running."""
    # Signal 0 is not sent: the call only says whether the process exists.
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        # It exists, and is another user's.
        pass
    try:
        line = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        # Only Linux has such files; there, the process has ended since.
        return None if Path("/proc/self/stat").exists() else ""
    # The second field is the name of the program in parentheses, and may contain any character.
    state, *fields = line.rpartition(")")[2].split()
    # A zombie writes nothing.
    return None if state in "ZX" else fields[18]
