"""Where the time of a run went that was killed and restarted by `spmd launch`."""

import json
import re

import pytest
from launched import JOB, launch

from spmd.run.goodput import Goodput, Timeline

pytestmark = pytest.mark.system


def test_account_survives_sigkill(tmp_path):
    """Of process 0, which keeps it. The steps after the checkpoint are repeated, and nothing is
    counted twice or left out.
    """
    folder = tmp_path / "run"
    options = ["--processes", 2, "--simulate", 1, "--max-restarts", 1]
    run = launch(*options, JOB, "--folder", folder, "--fault", "KILL", "--rank", 0, "--every", 5)
    assert run.code == 0 and len(set(run.hashes)) == 1, run.text
    stored = json.loads((folder / "goodput.json").read_text())
    goodput = Goodput(Timeline.from_json(stored))
    assert len(goodput.timeline.attempts) == 2 and goodput.timeline.began == stored["launched"]
    assert sum(goodput.values()) == pytest.approx(goodput.seconds, rel=1e-9)
    missing = [
        phase
        for phase in (
            "training",
            "repeated",
            "compiling",
            "saving",
            "restoring",
            "starting",
            "down",
        )
        if goodput[phase] <= 0
    ]
    assert not missing, goodput
    printed = [at for at, line in run.lines if re.search("HASH", line)]
    assert goodput.timeline.attempts[1] > run.when(
        "FAULT at"
    ) - 1 and goodput.timeline.until <= max(printed)
    assert goodput.timeline.until >= [at for at, line in run.lines if "STEP 26" in line][-1] - 1
    print(f"FIGURE {goodput}")
