"""Runs scenarios with faults: a process that has imported the library, and has no devices yet,
forks one process for each case.

    LD_PRELOAD=faults.so python tests/faults/fault_server.py FOLDER

It reads {"scenario", "fault", "at"} from lines of JSON, and answers with a line for each, a
`Verdict`. Without "fault", it answers how many calls there are for each fault in a run without one.
FOLDER holds runs, the results of those without faults, and compiled programs.
"""

import atexit
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import fault_shim
import numpy as np
import power_loss
from fault_scenarios import SCENARIOS, Arrays
from fault_shim import FAULTS, Call

import spmd
from spmd.errors import SpmdError

RIGHT, NAMED, WRONG, LOST, HANG, RAW, NOT_REACHED = (
    "right", "error with path", "wrong", "not resumable", "hang",
        "error without path", "not reached"
)  # fmt: skip
IDLE = 10.0  # seconds in which a process that does not hang has computed something
ENOUGH = 120.0  # seconds for anything that a process is asked to do
# what the library and JAX import when they first need it
IMPORTED_LATE = (
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
    "orbax.checkpoint.args",
    "scipy.linalg",
)
TAIL = "tail loss"  # of the steps of a call: all, or the last ones of a run that was resumed


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
      kind: RIGHT and the others above.
      call: the call that had the fault.
      error: what the process with the fault ended with.
      why: what is wrong.
    """

    kind: str
    call: str = ""
    error: str = ""
    why: str = ""


def cpu_time(process: int) -> int:
    """The ticks for which a process has computed, in all of its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_for(ready: int, process: int) -> bool:
    """Wait for a file of a process; returns whether it came to be ready before the process hung. On
    a busy machine a process may get little of a CPU, so a hang is to compute nothing for a while.
    """
    ticks = cpu_time(process)
    computed = began = time.monotonic()
    while not select.select([ready], [], [], 0.5)[0]:
        now = time.monotonic()
        if (newest := cpu_time(process)) != ticks:
            ticks, computed = newest, now
        if now - computed > IDLE or now - began > ENOUGH:
            return False
    return True


class Process:
    """A fork of this process that does what it is asked to, one thing after the other, in a folder
    of its own.

    Args:
      folder: of what it prints and returns.
      name: of its files there.
    """

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        (its_requests, self._requests), (self._answers, its_answers) = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(self._requests)
            self._serve(its_requests, its_answers)
        os.close(its_requests)
        os.close(its_answers)

    def _file(self, suffix: str) -> Path:
        return self._folder / f"{self._name}.{suffix}"

    def _serve(self, requests: int, answers: int) -> None:
        """In the fork: it ends as Python does, except for what takes long and waits for nothing."""
        code = 70
        try:
            out = os.open(self._file("out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            while request := os.read(requests, 1 << 16):
                error = self._do(json.loads(request))
                os.write(answers, b"raised" if error else b"done")
            threading._shutdown()
            atexit._run_exitfuncs()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _do(self, request: dict) -> bool:
        """Call a function of a scenario; whether it raised an error."""
        try:
            np.savez(self._file("npz"), **do(**request))
            return False
        except Exception as error:
            traceback.print_exception(error)
            text = {
                "last": "".join(traceback.format_exception_only(error)),
                "expected": isinstance(error, SpmdError | FileNotFoundError),
            }
            self._file("error").write_text(json.dumps(text))
            return True

    def ask(self, **request: object) -> str:
        """Ask for something, and wait: "done", "raised", "killed", or "hang", when it is ended."""
        if self._file("out").exists():
            os.truncate(self._file("out"), 0)
        os.write(self._requests, json.dumps(request).encode())
        if not wait_for(self._answers, self._process):
            self.end(hangs=True)
            return "hang"
        answer = os.read(self._answers, 16).decode()
        return answer or "killed"

    def end(self, *, hangs: bool = False) -> int | None:
        """Let it end; its exit code, minus the signal that ended it, or None if it hangs and had to
        be ended.
        """
        os.close(self._requests)
        os.close(self._answers)
        running = os.pidfd_open(self._process)
        ended = not hangs and wait_for(running, self._process)
        if not ended:
            os.kill(self._process, signal.SIGUSR1)  # it prints where its threads are
            select.select([running], [], [], 1.0)
            os.kill(self._process, signal.SIGKILL)
        os.close(running)
        _, status = os.waitpid(self._process, 0)
        return os.waitstatus_to_exitcode(status) if ended else None

    def arrays(self) -> Arrays:
        """What the function returned."""
        with np.load(self._file("npz")) as stored:
            return dict(stored)

    def error(self) -> dict:
        """The end of what is printed for the error that the function raised, and whether it is of
        the library.
        """
        return json.loads(self._file("error").read_text())

    def printed(self) -> str:
        """The end of what it printed."""
        return self._file("out").read_text(errors="replace")[-6000:]


def do(
    scenario: str,
    what: str,
    root: str,
    log: str = "",
    copies: str = "",
    fault: str = "",
    at: int = 0,
) -> Arrays:
    """Call a function of a scenario, with a log and a fault if there is a log."""
    if log:
        fault_shim.begin(
            Path(root), Path(copies) if copies else None, Path(log), FAULTS.get(fault), at
        )
    return getattr(SCENARIOS[scenario], what)(Path(root)) or {}


def difference(arrays: Arrays, wanted: Arrays, *, complete: bool) -> str:
    """How a result differs from the one without faults; "" if it does not.

    Args:
      complete: "rows ..." must all be there; if not, some of them.
    """
    for name, right in wanted.items():
        if name not in arrays:
            return f"there is no {name}"
        ours = arrays[name]
        if name.startswith("tail "):
            right = right[len(right) - len(ours) :]
        if name.startswith("rows "):
            ours, right = ({tuple(row) for row in rows.tolist()} for rows in (ours, right))
            same = ours == right if complete else ours <= right
        else:
            same = (
                ours.dtype == right.dtype
                and ours.shape == right.shape
                and ours.tobytes() == right.tobytes()
            )
        if not same:
            return f"{name}: {ours} in place of {right}"
    return ""


def saved_step(prepared: Path, calls: list[Call], *, durable: bool) -> int:
    """The newest checkpoint that was there before, or was committed; `durable`: and is on disk,
    with its name.
    """
    renamed = synced = saved = max(
        (int(path.name) for path in prepared.glob("run/checkpoints/*") if path.name.isdigit()),
        default=0,
    )
    for call in calls:
        if call.result >= 0 and not call.faulty:
            step = re.search(r"/run/checkpoints/(\d+)$", call.other or call.path)
            renamed = int(step[1]) if step and call.name == "rename" else renamed
            synced = int(step[1]) if step and call.name == "fsync" else synced
            if not durable:
                saved = renamed
            elif call.name == "fsync" and call.path.endswith("/run/checkpoints"):
                saved = synced
    return saved


class Server:
    """Runs cases, one after the other.

    Args:
      folder: of all servers of a sweep.
    """

    def __init__(self, folder: Path):
        self._shared, self._own = folder, folder / f"server-{os.getpid()}"
        self._root, self._copies, self._log = (
            self._own / name for name in ("root", "copies", "log")
        )
        self._own.mkdir()
        self._reader: Process | None = None  # serves many cases: the program is compiled once

    def _run(self, scenario: str, fault: str = "", at: int = 0) -> tuple[str, int | None, Process]:
        """Run a scenario in a new folder: how that ended, and how the process."""
        for path in (self._root, self._copies):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._shared / f"prepared-{scenario}", self._root, symlinks=True)
        self._copies.mkdir()
        self._log.unlink(missing_ok=True)
        process = Process(self._own, "run")
        copies = str(self._copies) if fault and FAULTS[fault].power else ""
        ended = process.ask(
            scenario=scenario,
            what="run",
            root=str(self._root),
            log=str(self._log),
            copies=copies,
            fault=fault,
            at=at,
        )
        return ended, None if ended == "hang" else process.end(), process

    def _calls(self) -> list[Call]:
        return fault_shim.read_log(self._log) if self._log.exists() else []

    def _read(self, scenario: str, what: str) -> tuple[str, Process]:
        """Call a function of a scenario without faults."""
        if self._reader is None:
            self._reader = Process(self._own, "reader")
        reader = self._reader
        ended = reader.ask(scenario=scenario, what=what, root=str(self._root))
        if ended == "killed":
            reader.end()
        if ended in ("killed", "hang"):
            self._reader = None
        return ended, reader

    def count(self, scenario: str) -> dict[str, int]:
        """Run a scenario without a fault: what it comes to is kept, and how many calls there are
        for each fault.
        """
        prepared = self._shared / f"prepared-{scenario}"
        if not prepared.exists():
            shutil.rmtree(self._root, ignore_errors=True)
            self._root.mkdir()
            ended, process = self._read(scenario, "prepare")
            if ended != "done":
                raise RuntimeError(f"{scenario} cannot be prepared:\n{process.printed()}")
            self._root.rename(prepared)
        for _ in range(2):  # the second one finds compiled programs
            ended, code, process = self._run(scenario)
            if (ended, code) != ("done", 0):
                raise RuntimeError(f"{scenario} does not run without a fault:\n{process.printed()}")
        np.savez(self._shared / f"{scenario}.npz", **process.arrays())
        calls = self._calls()
        return {fault: fault_shim.count(calls, FAULTS[fault]) for fault in FAULTS}

    def case(self, scenario: str, fault: str, at: int) -> Verdict:
        """One case: a run with a fault, then a run without. `at` 0 is a loss of power after the
        end.
        """
        ended, code, process = self._run(scenario, fault, at)
        calls = self._calls()
        faulty = next((call for call in calls if call.faulty), None)
        if at and faulty is None and (ended, code) == ("done", 0):
            return Verdict(NOT_REACHED)
        call = str(faulty or "the end").replace(str(self._root), "")
        error = process.error()["last"] if ended == "raised" else ""
        if ended == "hang" or code is None:
            return Verdict(HANG, call, error, f"the process does not end:\n{process.printed()}")
        with np.load(self._shared / f"{scenario}.npz") as stored:
            wanted = dict(stored)
        if ended == "done" and (why := difference(process.arrays(), wanted, complete=True)):
            return Verdict(WRONG, call, "", f"the run with the fault: {why}")
        power = FAULTS[fault].power
        if power:
            before = power_loss.before(self._shared / f"prepared-{scenario}")
            power_loss.lose_power(
                self._root, before, self._copies, calls, names=FAULTS[fault].names
            )
            if SCENARIOS[scenario].lost:
                shutil.rmtree(self._root / SCENARIOS[scenario].lost, ignore_errors=True)
        saved = saved_step(self._shared / f"prepared-{scenario}", calls, durable=power)
        wrong = self._after(scenario, wanted, saved, complete=not power, ended=at == 0)
        if wrong is not None:
            return Verdict(wrong[0], call, error, wrong[1])
        if code not in (0, -signal.SIGKILL if FAULTS[fault].action == fault_shim.KILL else 0):
            return Verdict(RAW, call, error, f"it ended with {code}:\n{process.printed()}")
        if ended != "raised":
            return Verdict(RIGHT, call)
        return Verdict(NAMED if str(self._root) in error else RAW, call, error, process.printed())

    def _after(
        self, scenario: str, wanted: Arrays, saved: int, *, complete: bool, ended: bool
    ) -> tuple[str, str] | None:
        """What is wrong with what a process has left, or with a run that comes after it; None if
        nothing is.
        """
        if SCENARIOS[scenario].look is not None:
            how, reader = self._read(scenario, "look")
            expected = (
                how == "raised"
                and SCENARIOS[scenario].may_miss
                and reader.error()["expected"]
                and not ended
            )
            left = reader.arrays() if how == "done" else {}
            if why := difference(
                left, {name: wanted[name] for name in left if name in wanted}, complete=complete
            ):
                return WRONG, f"what is left: {why}"
            if how != "done" and not expected:
                return (
                    HANG if how == "hang" else WRONG
                ), f"what is left ({how}): {reader.printed()}"
        how, reader = self._read(scenario, "again")
        if how != "done":
            return (HANG if how == "hang" else LOST), f"again ({how}): {reader.printed()}"
        arrays = reader.arrays()
        if why := difference(arrays, wanted, complete=complete):
            return WRONG, f"again: {why}"
        if TAIL in wanted:
            total = int(wanted["rows of history.bin"][-1][0])
            begins = total - len(arrays[TAIL])
            if begins < saved:
                return (
                    LOST,
                    f"again: it begins at step {begins}, and step {saved} was saved\n"
                    f"{reader.printed()}",
                )
        return None


def main(folder: Path) -> None:
    """Answer each line."""
    # What is not imported here, each fork imports when it first needs it.
    for module in pkgutil.walk_packages(spmd.__path__, "spmd."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    server = Server(folder)
    gc.collect()
    gc.freeze()  # so that no page of a fork is copied since the collector looks at it
    for line in sys.stdin:
        request = json.loads(line)
        answer = (
            dataclasses.asdict(server.case(**request))
            if "fault" in request
            else server.count(**request)
        )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
