"""The faults, and the C library that makes them (`shim.c`): it is built where there is a compiler,
and called where it is loaded.
"""

import ctypes
import dataclasses
import errno
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
# as in shim.c
LOOK, CREATE, READ, WRITE, SYNC, RENAME, REMOVE, FOLDER, SIZE, CLOSE, LINK = (
    1 << bit for bit in range(11)
)
FAIL, SHORTEN, KILL = range(3)
CHANGES = CREATE | WRITE | RENAME | REMOVE | FOLDER | SIZE | LINK
NEEDS_SPACE = CREATE | WRITE | SYNC | RENAME | FOLDER | SIZE | CLOSE | LINK
KINDS = {
    "open": LOOK,
    "creating open": CREATE,
    "truncating open": CREATE,
    "read": READ,
    "pread": READ,
    "readv": READ,
    "preadv": READ,
    "write": WRITE,
    "pwrite": WRITE,
    "writev": WRITE,
    "pwritev": WRITE,
    "sendfile": WRITE,
    "copy_file_range": WRITE,
    "fsync": SYNC,
    "fdatasync": SYNC,
    "rename": RENAME,
    "unlink": REMOVE,
    "rmdir": REMOVE,
    "mkdir": FOLDER,
    "ftruncate": SIZE,
    "truncate": SIZE,
    "close": CLOSE,
    "link": LINK,
    "symlink": LINK,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a call.

    Attributes:
      kinds: of calls to which it can happen.
      action: FAIL, SHORTEN or KILL.
      error: the errno of FAIL.
      always: to all of these calls from the n-th on, not only to the n-th.
      power: the power is lost, too, and with it what was not synced; `names`: of names, too.
    """

    kinds: int
    action: int
    error: int = 0
    always: bool = False
    power: bool = False
    names: bool = False


FAULTS = {
    "enospc": Fault(NEEDS_SPACE, FAIL, errno.ENOSPC),
    "full": Fault(NEEDS_SPACE, FAIL, errno.ENOSPC, always=True),
    "eio": Fault(2 * LINK - 1, FAIL, errno.EIO),
    "short": Fault(WRITE, SHORTEN),
    "kill": Fault(CHANGES, KILL),
    "power": Fault(CHANGES | SYNC, KILL, power=True, names=True),
    "emptied": Fault(CHANGES | SYNC, KILL, power=True),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A line of the log: a call on a path below the folder.

    Attributes:
      number: among the calls to which the fault can happen; 0 for others.
      faulty: the fault happened to it.
      seconds: of the monotonic clock.
      result: minus the errno where it failed.
      other: the new name of a rename or link.
      kept: the number of the copy of what a rename replaced; 0: it replaced no file.
    """

    number: int
    faulty: bool
    seconds: float
    name: str
    result: int
    path: str
    other: str
    kept: int

    def __str__(self) -> str:
        return f"{self.name} {self.path}" + (f" -> {self.other}" if self.other else "")


def build(folder: Path) -> Path:
    """Compile the library into a folder, and return its path."""
    library = folder / "faults.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, SOURCE],
        check=True,
        timeout=60,
    )
    return library


def why_not() -> str:
    """Why faults cannot be made here; "" if they can."""
    return (
        ""
        if shutil.which("cc") and Path("/proc/self/fd").exists()
        else "there is no C compiler (cc), or no /proc, on this machine"
    )


def begin(folder: Path, copies: Path | None, log: Path, fault: Fault | None, at: int) -> None:
    """Begin to count and to write a log in this process, and let the call with the number `at` have
    the fault (0: none).
    """
    function = ctypes.CDLL(None).faults_begin
    function.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_int] * 3 + [ctypes.c_long, ctypes.c_int]
    fault = fault or Fault(0, FAIL)
    kept = None if copies is None else str(copies).encode()
    function(
        str(folder).encode(),
        kept,
        str(log).encode(),
        fault.kinds,
        fault.action,
        fault.error,
        at,
        fault.always,
    )


def end() -> None:
    """Let all later calls of this process pass; nothing where the library is not loaded, as in a
    test of a scenario alone.
    """
    function = getattr(ctypes.CDLL(None), "faults_end", None)
    if function is not None:
        function()


def read_log(log: Path) -> list[Call]:
    """The calls of a log, in their order."""
    calls = []
    for line in log.read_text(encoding="utf-8").splitlines():
        number, faulty, seconds, name, result, path, other, kept = line.split("\t")
        calls.append(
            Call(
                int(number), bool(faulty), float(seconds), name, int(result), path, other, int(kept)
            )
        )
    return calls


def count(calls: list[Call], fault: Fault) -> int:
    """How many of the calls a fault can happen to."""
    return sum(bool(KINDS[call.name] & fault.kinds) for call in calls)
