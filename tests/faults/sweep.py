"""Let file-system calls fail, one after the other, and see what becomes of a run: a table of
scenarios and faults.

    python tests/faults/sweep.py [--scenario train] [--fault enospc] [--every 10] [--jobs 2]

Faults: "enospc" (no space, for one call), "full" (no space from this call on), "eio" (an
input/output error), "short" (half is written), "kill" (the process is killed before the call),
"power" (the power is lost before the call, and what was not synced: `power_loss.py`), "emptied" (as
"power", but only contents of files are lost). After each, the run is resumed, or the action
repeated, without faults. The exit code is 1 if a case is wrong, cannot be resumed, hangs (computes
nothing for 10 seconds, or takes 120), or ends with an error that does not name a path.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("SPMD_TEST_FLAGS", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fault_shim

from tests.processes import environment

HERE = Path(__file__).parent
COLUMNS = ("right", "error with path", "wrong", "not resumable", "hang", "error without path")
BAD = COLUMNS[2:]
ROOM = 256 << 20  # bytes for compiled programs and runs
SCENARIOS = (
    "train",
    "best",
    "memory",
    "resume",
    "sweep",
    "export",
    "weights",
    "adapters",
    "index",
    "programs",
    "plans",
    "overwrite",
)  # of fault_scenarios.py, which imports JAX


class Servers:
    """Processes of `fault_server.py`, each of which runs one case at a time.

    Args:
      folder: for their files.
      count: how many.
    """

    def __init__(self, folder: Path, count: int):
        variables = {
            "LD_PRELOAD": fault_shim.build(folder),
            "SPMD_CACHE": folder / "cache",
            "OPENBLAS_NUM_THREADS": 1,
        }
        variables = environment(**variables)
        # of the tests' own programs; "programs" has another
        for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
            variables.pop(name, None)
        command = [sys.executable, HERE / "fault_server.py", folder]
        self._all = [
            subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for _ in range(count)
        ]
        self._free: queue.Queue[subprocess.Popen] = queue.Queue()
        for server in self._all:
            self._free.put(server)

    def ask(self, **request: object) -> dict:
        """The answer of a server that is free."""
        server = self._free.get()
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            if not answer:
                raise RuntimeError(f"a server ended with {server.wait()} at {request}")
            return json.loads(answer)
        finally:
            self._free.put(server)

    def close(self) -> None:
        """End them, and what they have started."""
        for server in self._all:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def in_memory() -> Path | None:
    """A folder in memory, where thousands of syncs wait for no disk; None: the usual folder for
    temporary files.
    """
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > ROOM else None


def every_nth(every: int) -> Callable[[int], Iterable[int]]:
    """A choice of calls, from how many there are."""
    return lambda count: range(1, count + 1, every)


def cases(
    servers: Servers,
    scenarios: Sequence[str],
    faults: Sequence[str],
    choose: Callable[[int], Iterable[int]],
) -> list[dict]:
    """The requests for chosen calls of each scenario and fault, and for a loss of power after the
    end.
    """
    requests = []
    for scenario in scenarios:
        counts = servers.ask(scenario=scenario)
        for fault in faults:
            numbers = [*choose(counts[fault]), *([0] if fault_shim.FAULTS[fault].power else [])]
            requests += [{"scenario": scenario, "fault": fault, "at": at} for at in numbers]
    return requests


def table(results: Iterable[tuple[dict, dict]]) -> str:
    """Scenarios and faults, and how many cases came to what."""
    counts: dict[tuple[str, str], collections.Counter] = collections.defaultdict(
        collections.Counter
    )
    for request, verdict in results:
        if verdict["kind"] != "not reached":
            counts[request["scenario"], request["fault"]][verdict["kind"]] += 1
    lines = [
        "| scenario | fault | cases | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "--:|" * (len(COLUMNS) + 1),
    ]
    for (scenario, fault), row in counts.items():
        cells = [scenario, fault, sum(row.values()), *(row[column] for column in COLUMNS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def sweep(
    scenarios: Sequence[str],
    faults: Sequence[str],
    choose: Callable[[int], Iterable[int]],
    jobs: int = 2,
    known: Container[tuple] = (),
) -> Iterator[tuple[dict, dict]]:
    """Each request with its verdict, as they come; those that are known are left out."""
    with tempfile.TemporaryDirectory(prefix="spmd-faults-", dir=in_memory()) as folder:
        servers, pool = (
            Servers(Path(folder).resolve(), jobs),
            concurrent.futures.ThreadPoolExecutor(jobs),
        )
        try:
            requests = [
                request
                for request in cases(servers, scenarios, faults, choose)
                if tuple(request.values()) not in known
            ]
            started = {pool.submit(servers.ask, **request): request for request in requests}
            for done in concurrent.futures.as_completed(started):
                yield started[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            servers.close()


def read(out: Path) -> list[tuple[dict, dict]]:
    """Requests and verdicts of a file that an earlier sweep has written."""
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return [({name: row.pop(name) for name in ("scenario", "fault", "at")}, row) for row in rows]


def main() -> int:
    """Print the bad cases as they come, then the table."""
    if why := fault_shim.why_not():
        sys.exit(why)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scenario",
        action="append",
        choices=SCENARIOS,
        help="default: all; may be given several times",
    )
    parser.add_argument(
        "--fault",
        action="append",
        choices=list(fault_shim.FAULTS),
        help="default: all; may be given several times",
    )
    parser.add_argument("--every", type=int, default=1, help="only every n-th call")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time")
    parser.add_argument(
        "--out",
        type=Path,
        help="a file for all cases, as lines of JSON; those in it are not tried again",
    )
    options = parser.parse_args()
    # so that servers and their folder go, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = read(options.out) if options.out and options.out.exists() else []
    scenarios, faults = options.scenario or SCENARIOS, options.fault or list(fault_shim.FAULTS)
    known = {tuple(request.values()) for request, _ in results}
    for request, verdict in sweep(scenarios, faults, every_nth(options.every), options.jobs, known):
        results.append((request, verdict))
        if options.out:
            with options.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(request | verdict) + "\n")
        if verdict["kind"] in BAD:
            print(
                f"{' '.join(map(str, request.values()))}: {verdict['kind']}, at {verdict['call']}\n"
                f"{verdict['error']}{verdict['why']}",
                flush=True,
            )
    results.sort(key=lambda result: list(map(str, result[0].values())))
    print(table(results))
    return int(any(verdict["kind"] in BAD for _, verdict in results))


if __name__ == "__main__":
    sys.exit(main())
