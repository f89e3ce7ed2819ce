"""The tests that are marked `gpu`; their outcome by test."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.measure import Part, run_part

ROOT = Path(__file__).resolve().parents[2]


def main(part: Part) -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "no:cacheprovider", "-vv", "--tb=short", "--durations=5"]
    environment = {**os.environ, "SPMD_TEST_GPU": "rehearse" if part.small else "gpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, outcomes = [], []
    for line in process.stdout or ():
        print(line, end="", flush=True)  # to the part's log
        said.append(line)
        if match := re.match(r"(tests/\S.*) (PASSED|FAILED|ERROR|SKIPPED)", line):
            test, outcome = match.groups()
            outcomes.append(outcome)
            part.write(test.strip()[:200], check="test", right=outcome in ("PASSED", "SKIPPED"), outcome=outcome)
    code = process.wait()
    part.write("tests", exit_code=code, summary=said[-1].strip() if said else "", passed=outcomes.count("PASSED"))


if __name__ == "__main__":
    run_part(main)
