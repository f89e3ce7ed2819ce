"""Steps of `srun` on nodes of which one was lost for a while, by stubs of SLURM's commands that
behave as SLURM 22.05 did in two network namespaces.
"""

import os
import time

import pytest

from spmd.launch.restart_policy import no_restart_reason
from spmd.launch.settings import Settings
from spmd.launch.srun import Allocation

RECORD = '{"at": 1.0, "step": 7, "error": "no answer"}'
# It notes its arguments; the first call starts a process that fails, and never ends.
SRUN = """\
#!/bin/sh
echo "$@" >> calls
case $(wc -l < calls) in
    1) echo '{record}' > "$SPMD_REPORT/0.json"; exec sleep 600;;
    2) exit 233;;
    *) echo '{{"phase": "step"}}' > "$SPMD_REPORT/life.0.json";;
esac
"""


@pytest.fixture
def allocation(tmp_path, monkeypatch):
    """An allocation with these answers of `squeue`, whose clock is a hundred times faster."""

    def make(squeue):
        programs = {
            "srun": SRUN.format(record=RECORD),
            "scancel": "#!/bin/sh\nexit 1\n",
            "squeue": f"#!/bin/sh\n{squeue}\n",
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        lines, waits = [], []
        made = Allocation("7", lines.append, lambda: 100 * time.monotonic(), waits.append)

        def attempt():
            return made.attempt(["srun", "job"], Settings(), [0.0, 1.0], os.environ)

        return attempt, lines, waits, tmp_path / "calls"

    return make


def test_step_that_never_ends_is_ended_and_nodes_are_tried_again(allocation):
    attempt, lines, waits, calls = allocation("echo RUNNING")
    first = attempt()
    assert any(first.codes.values()) and first.failures == {0: (7, "no answer")}
    assert any("srun has not ended 30 s after a process has failed" in line for line in lines)
    assert no_restart_reason([first], 3) is None
    # The next step may share what SLURM takes for used, and its first try starts nothing.
    second = attempt()
    assert not any(second.codes.values())
    assert calls.read_text().splitlines() == ["job", "--overlap job", "--overlap job"]
    assert len(waits) == 1 and any("no process has started" in line for line in lines)


def test_step_whose_processes_have_not_failed_is_left_alone(allocation):
    attempt, lines, _, calls = allocation("echo RUNNING")
    calls.write_text("one\ntwo\n")
    assert not any(attempt().codes.values()) and lines == []


@pytest.mark.parametrize(
    "squeue",
    ["echo COMPLETING", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'],
)
def test_allocation_that_is_gone_needs_no_restart(allocation, squeue):
    attempt, _, _, calls = allocation(squeue)
    last = attempt()
    reason = no_restart_reason([last], 3)
    assert reason == "SLURM has ended job 7: a node failed, or its time is over"
    assert len(calls.read_text().splitlines()) == 1


def test_squeue_that_fails_does_not_end_the_job(allocation):
    attempt, *_ = allocation("exit 1")
    assert attempt().final == ""
