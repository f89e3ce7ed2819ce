"""A run that is killed with SIGKILL and resumes: the same bits, the time to the first step, and
what the second start compiles.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from benchmarks.gpu.measure import Part, distance, end_with_parent, run_part
from benchmarks.gpu.restart_job import RESULT

JOB = Path(__file__).with_name("restart_job.py")
STEPS, EVERY, KILLED_AT = 20, 5, 12


def main(part: Part) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "SPMD_CACHE": str(folder / "programs")}
        undisturbed = run(
            part, "undisturbed, nothing compiled before", folder / "undisturbed", environment
        )
        killed = run(
            part,
            f"all compiled before, killed after step {KILLED_AT}",
            folder / "killed",
            environment,
            kill=True,
        )
        resumed = run(part, "resumed", folder / "killed", environment)
        if not (undisturbed and killed and resumed):
            part.write(
                "resume",
                failed="ours",
                error="a run did not reach its end within the limit: see the exit codes",
            )
            sys.exit(1)
        with (
            np.load(folder / "killed" / RESULT) as ours,
            np.load(folder / "undisturbed" / RESULT) as right,
        ):
            weights = [[each[name] for name in each.files] for each in (ours, right)]
    equal = [one.tobytes() for one in weights[0]] == [one.tobytes() for one in weights[1]]
    part.check(
        "resume", "weights of the resumed run against the undisturbed one", distance(*weights), 1e-3
    )
    # Sums on a GPU may have no fixed order, and then two undisturbed runs differ, too.
    part.write("resume", equal_bit_for_bit=equal, resumed_from=resumed["begin"]["step"])


def run(
    part: Part, title: str, folder: Path, environment: dict[str, str], *, kill: bool = False
) -> dict[str, dict]:
    """What a run says when it begins and ends; {} if it fails."""
    command = [sys.executable, str(JOB), str(folder), str(STEPS), str(EVERY), str(int(part.small))]
    said: dict[str, dict] = {}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    )
    # reading its output has no limit of its own
    timer = threading.Timer(max(part.left, 0.0), process.kill)
    timer.start()
    try:
        for line in process.stdout or ():
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            said[event["event"]] = event
            if event["event"] == "begin":
                part.write(
                    f"first step, {title}",
                    **{name: event[name] for name in ("seconds", "compiled", "loaded")},
                )
            if kill and event["event"] == "step" and event["step"] >= KILLED_AT:
                process.kill()
                break
        code = process.wait(timeout=60)
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    part.write(title, exit_code=code, events=list(said))
    return said if kill or code == 0 else {}


if __name__ == "__main__":
    run_part(main)
