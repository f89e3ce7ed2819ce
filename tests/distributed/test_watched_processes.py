"""Several processes count the histograms that one counts."""

import json
from pathlib import Path

import pytest
from launched import launch

JOB = Path(__file__).parent / "watched_job.py"


@pytest.mark.system
def test_processes_count_what_one_counts(tmp_path):
    written = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        run = launch("--processes", processes, "--simulate", 8 // processes, JOB, folder)
        assert run.code == 0, run.text
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        written.append(
            {record["step"]: record["histograms"] for record in records if "histograms" in record}
        )
        assert len([record for record in records if "histograms" in record]) == 2
    assert written[0] == written[1] and set(written[0]) == {1, 2}
    assert all(
        sum(entry["counts"]) == 128 for entries in written[0].values() for entry in entries.values()
    )
    assert written[0][1]["gradients/w"] != written[0][2]["gradients/w"]
