"""The tests that are marked `gpu`, in four processes where pytest-xdist is installed; their outcome
by test.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.measure import Part, end_with_parent, run_part

ROOT = Path(__file__).resolve().parents[2]


def main(part: Part) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-vv",
        "--tb=short",
        "--durations=5",
    ]
    if importlib.util.find_spec("xdist") and not part.small:
        # compiling them takes most of the time, and uses the cores of the host
        command += ["-n", "4"]
    environment = {**os.environ, "SPMD_TEST_GPU": "rehearse" if part.small else "gpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, preexec_fn=end_with_parent, **pipes
    )
    said, outcomes = [], []
    for line in process.stdout or ():
        print(line, end="", flush=True)  # to the log
        said.append(line)
        if outcome_of_test := read(line):
            test, outcome = outcome_of_test
            outcomes.append(outcome)
            part.write(
                test.strip()[:200],
                check="test",
                right=outcome in ("PASSED", "SKIPPED"),
                outcome=outcome,
            )
    code = process.wait()
    part.write(
        "tests",
        exit_code=code,
        summary=said[-1].strip() if said else "",
        passed=outcomes.count("PASSED"),
    )


def read(line: str) -> tuple[str, str] | None:
    """A test and its outcome, from a line of pytest: the outcome comes first where several
    processes run tests.
    """
    outcomes = "(PASSED|FAILED|ERROR|SKIPPED)"
    if match := re.match(rf"(tests/\S.*) {outcomes}", line):
        return match[1], match[2]
    if match := re.match(rf"\[gw\d+\].* {outcomes} (tests/\S.*)", line):
        return match[2], match[1]
    return None


if __name__ == "__main__":
    run_part(main)
