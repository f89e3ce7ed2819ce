"""Each process traces its devices; process 0 summarises its part."""

from pathlib import Path

import pytest
from launched import launch

JOB = Path(__file__).parent / "profiled_job.py"


@pytest.mark.system
def test_each_process_traces_its_devices(tmp_path):
    run = launch("--processes", 2, "--simulate", 2, JOB, tmp_path / "run")
    assert run.code == 0, run.text
    assert (
        "PROFILED 0 StepProfile of steps 3 to 4" in run.text
        and "these are 2 of 4 devices, those of process 0" in run.text
    )
    assert "PROFILED 1 None; None" in run.text
    folders = {
        path.relative_to(tmp_path / "run" / "profile").parts[0]
        for path in tmp_path.glob("run/profile/**/*.xplane.pb")
    }
    assert folders == {"process-0", "process-1"}
