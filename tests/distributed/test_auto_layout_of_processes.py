"""`fit(layout="auto")` in several processes: process 0 searches, and all train under what it finds,
or raise what it raises.
"""

import re
from pathlib import Path

import pytest
from launched import launch

JOB = Path(__file__).parent / "auto_job.py"


@pytest.mark.system
def test_process_0_searches_for_all(tmp_path):
    run = launch("--processes", 2, "--simulate", 2, JOB, tmp_path / "run")
    assert run.code == 0, run.text
    found = dict(re.findall(r"LAYOUT (\d) (.*)", run.text))
    assert found.keys() == {"0", "1"} and found["0"] == found["1"] and len(found["0"].split()) > 1
    assert re.findall(r"SEARCHED (\d)", run.text) == ["0", "0"], (
        "once, not in the resumed run, and once for the wrong loss"
    )
    assert (
        (tmp_path / "run" / "layout.toml")
        .read_text()
        .startswith("# Found by spmd.search for 1x4xcpu: ")
    )
    said = [line for _, line in run.lines if "waits for process 0: it searches" in line]
    assert len(said) == 3 and all(line.startswith("[1]") for line in said)
    failed = dict(re.findall(r"FAILED (\d) (.*)", run.text))
    assert failed.keys() == {"0", "1"} and failed["0"] == failed["1"] and "nothing" in failed["0"]
