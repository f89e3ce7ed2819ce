"""`Trainer.save` and `Trainer.steps(resume=...)` in several processes."""

from pathlib import Path

import pytest
from launched import launch

JOB = Path(__file__).parent / "loop_job.py"


@pytest.mark.system
def test_loop_of_processes_resumes_where_it_was_saved(tmp_path):
    """Bit for bit with as many processes, whose sums have the same order; and one process restores
    what two have saved.
    """
    runs = [
        launch("--processes", processes, "--simulate", 4 // processes, JOB, tmp_path / folder, stop)
        for processes, folder, stop in (
            (2, "undisturbed", 0),
            (2, "saved", 5),
            (2, "saved", 0),
            (1, "saved", 0),
        )
    ]
    assert [run.code for run in runs] == [0, 0, 0, 0], "\n".join(run.text for run in runs)
    (undisturbed,), (first,), (restored, last), (of_one,) = (run.hashes for run in runs)
    assert first == restored and first[1] == "5" and first[0] != last[0]
    assert undisturbed == last == of_one and last[1] == "9"
