"""Records of files in one process and in two: the same batches, the same bits, and positions from
which each can resume the other.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from launched import launch

JOB = Path(__file__).parent / "files_job.py"
UNKNOWN = Path(__file__).parent / "unknown_length_job.py"


@pytest.mark.system
def test_two_processes_match_one_and_resume_from_each_other(tmp_path):
    """On two devices each sum is of two numbers, so bits are equal; 30 rows, of which 2 cannot be
    read, in batches of 8.
    """
    rng = np.random.default_rng(0)
    rows = [",".join(map(str, rng.integers(-8, 8, 4) / 8)) + f",{at % 4}" for at in range(30)]
    for at in (5, 18):
        rows[at] = "oops" + rows[at]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["x0,x1,x2,x3,y", *rows]) + "\n")

    def run(processes, folder, steps=0):
        result = launch(
            "--processes",
            processes,
            "--simulate",
            2 // processes,
            JOB,
            path,
            tmp_path / folder,
            steps,
        )
        assert result.code == 0, result.text
        return result

    one, two = run(1, "one"), run(2, "two")
    assert set(one.hashes) == set(two.hashes) and one.hashes[0][1] == "8"
    assert "did without 2 of 30 records" in one.text
    run(2, "from two", steps=3)
    run(1, "from one", steps=6)
    assert set(run(1, "from two").hashes) == set(run(2, "from one").hashes) == set(one.hashes)


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("stop", [4, 6], ids=["at the end of an epoch", "inside one"])
def test_processes_that_stop_at_a_step_resume_there(tmp_path, stop):
    """The number of batches is not known: no batch is left out or repeated, and no evaluation is
    repeated.
    """

    def run(folder, steps):
        result = launch("--processes", 2, "--simulate", 1, UNKNOWN, tmp_path / folder, steps)
        assert result.code == 0, result.text
        return [
            json.loads(line)
            for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        ]

    def losses(records):
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    run("parts", stop)
    parts, straight = run("parts", 8), run("straight", 8)
    assert losses(parts) == losses(straight) and len(losses(parts)) == 8
    assert [record["step"] for record in parts if "eval_loss" in record] == sorted({4, stop, 8})
