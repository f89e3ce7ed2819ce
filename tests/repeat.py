"""Run `make test` several times, alone and beside a load, and print one line for each run: to find
flaky tests.

    python tests/repeat.py --alone 5 --loaded 5 --load 20 --nice 10

The load is busy processes. Each ends after the time limit of a run. With `--nice` above 0 they take
a smaller share of the machine, so that loaded runs take hours, not days.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

BUSY = (
    "import os, sys, time\nos.nice(int(sys.argv[1]))\nend = time.monotonic() + float(sys.argv[2])\n"
    "while time.monotonic() < end: pass"
)


@contextlib.contextmanager
def load(processes: int, nice: int, seconds: float) -> Iterator[None]:
    """Run this many busy processes during the block."""
    command = [sys.executable, "-c", BUSY, str(nice), str(seconds)]
    running = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def run(command: list[str], seconds: float) -> tuple[int, str]:
    """The exit status of one run, with its last line and its failures."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return -1, f"not done after {seconds:.0f} s"
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, "\n    ".join([lines[-1] if lines else "", *failures])


def main() -> int:
    """Print one line for each run; return the number that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alone", type=int, default=5)
    parser.add_argument("--loaded", type=int, default=5)
    parser.add_argument("--load", type=int, default=20)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600, help="that one run may take")
    parser.add_argument("command", nargs="*", default=["make", "test"])
    options = parser.parse_args()
    failed = 0
    for number in range(options.alone + options.loaded):
        busy = options.load if number >= options.alone else 0
        started = time.monotonic()
        with load(busy, options.nice, options.seconds):
            code, summary = run(options.command, options.seconds)
        failed += code != 0
        beside = f"beside {busy} (nice {options.nice})" if busy else "alone"
        print(
            f"run {number + 1} {beside}: exit {code}, {time.monotonic() - started:.0f} s, "
            f"{os.cpu_count()} cores: {summary}",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
