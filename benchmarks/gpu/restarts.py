"""A run that is killed with SIGKILL and resumes: the same bits, the time to the first step, and what the second start compiles."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.measure import Part, run_part

JOB = Path(__file__).with_name("restart_job.py")
STEPS, EVERY, KILLED_AT = 20, 5, 12


def main(part: Part) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "SPMD_CACHE": str(folder / "programs")}
        undisturbed = run(part, "undisturbed, nothing compiled", folder / "undisturbed", environment)
        killed = run(part, f"killed after step {KILLED_AT}", folder / "killed", environment, kill=True)
        resumed = run(part, "resumed", folder / "killed", environment)
    if not (undisturbed and killed and resumed):
        return
    same = undisturbed["end"]["digest"] == resumed["end"]["digest"]
    title = "all weights equal those of the undisturbed run, bit for bit"
    part.write("resume", check=title, right=same, resumed_from=resumed["begin"]["step"])
    for name, events in (("cold", undisturbed), ("warm", killed), ("resumed", resumed)):
        begin = events["begin"]
        part.write(f"first step, {name}", seconds=begin["seconds"], compiled=begin["compiled"], loaded=begin["loaded"])


def run(part: Part, title: str, folder: Path, environment: dict[str, str], *, kill: bool = False) -> dict[str, dict]:
    """What a run says when it begins and ends; {} if it fails."""
    command = [sys.executable, str(JOB), str(folder), str(STEPS), str(EVERY), str(int(part.small))]
    said: dict[str, dict] = {}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    limit = time.monotonic() + max(part.left, 20.0)
    try:
        for line in process.stdout or ():
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            said[event["event"]] = event
            if (kill and event["event"] == "step" and event["step"] >= KILLED_AT) or time.monotonic() > limit:
                os.killpg(process.pid, signal.SIGKILL)
                break
        code = process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    part.write(title, exit_code=code, events=list(said))
    return said if kill or code == 0 else {}


if __name__ == "__main__":
    run_part(main)
