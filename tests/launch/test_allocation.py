"""Steps of `srun` on nodes of which one was lost for a while, by stubs of SLURM's commands that
behave as SLURM 22.05 did in two network namespaces.
"""

import itertools
import json
import os

import pytest

from spmd.launch.restart_policy import no_restart_reason
from spmd.launch.settings import Settings
from spmd.launch.srun import Allocation
from spmd.launch.step_watch import DONE_SECONDS, StepWatch

FAILURE = '{"at": 1.0, "step": 7, "error": "no answer"}'
# It notes its arguments. At the first call two processes leave these records, and it never ends.
SRUN = """\
#!/bin/sh
echo "$@" >> calls
case $(wc -l < calls) in
    1) echo '{"id": "7.0"}' > "$SPMD_REPORT/srun.json"
       cp first/* "$SPMD_REPORT"; exec sleep 600;;
    2) exit 233;;
    *) echo '{"phase": "step"}' > "$SPMD_REPORT/life.0.json";;
esac
"""
LEFT, DONE, ALIVE = (json.dumps({"phase": "step", "end": end}) for end in ("left", "done", ""))


@pytest.fixture
def allocation(tmp_path, monkeypatch):
    """An allocation with this answer of `squeue`, and records of the first step's processes."""

    def make(squeue, **records):
        (tmp_path / "first").mkdir()
        for name, text in records.items():
            (tmp_path / "first" / f"{name.replace('_', '.').strip('.')}.json").write_text(text)
        programs = {
            "srun": SRUN,
            "scancel": "#!/bin/sh\nexit 1\n",
            "squeue": f"#!/bin/sh\n{squeue}\n",
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        lines, waits = [], []
        # A hundred seconds pass at each look.
        clock = itertools.count(0, 100)
        made = Allocation("7", lines.append, lambda: next(clock), waits.append)

        def attempt():
            return made.attempt(["srun", "job"], Settings(), [0.0, 1.0], os.environ)

        return attempt, lines, waits, tmp_path / "calls"

    return make


def test_step_that_never_ends_is_ended_and_nodes_are_tried_again(allocation):
    records = {"_0": FAILURE, "life_0": LEFT, "life_1": ALIVE}
    attempt, lines, waits, calls = allocation("echo 7 RUNNING", **records)
    first = attempt()
    assert first.codes == {0: 1} and first.failures == {0: (7, "no answer")}
    assert first.cause == "process 0 at step 7: no answer"
    assert any("srun has not, as when a node was lost" in line for line in lines)
    assert no_restart_reason([first], 3) is None
    # The next step may share what SLURM takes for used, and its first try starts nothing.
    second = attempt()
    assert not any(second.codes.values())
    assert calls.read_text().splitlines() == ["job", "--overlap job", "--overlap job"]
    assert len(waits) == 1 and any("no process has started" in line for line in lines)


def test_step_whose_processes_are_done_has_succeeded(allocation):
    attempt, lines, *_ = allocation("echo 7 RUNNING", life_0=DONE, life_1=DONE)
    assert attempt().codes == {-1: 0}
    assert any("its step is ended" in line for line in lines)


@pytest.mark.parametrize("records", [{"life_0": DONE, "life_1": ALIVE}, {"life_0": LEFT}])
def test_step_that_ended_without_a_report_has_not_succeeded(allocation, records):
    """One of its processes was killed before it could leave one."""
    attempt, *_ = allocation("echo 7 RUNNING", **records)
    assert any(attempt().codes.values())


@pytest.mark.parametrize(
    ("squeue", "reason"),
    [
        ("echo 7 COMPLETING", "SLURM has ended job 7: a node failed, or its time is over"),
        ("echo 8 RUNNING", "SLURM has ended job 7: a node failed, or its time is over"),
        (
            'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
            "SLURM has ended job 7: a node failed, or its time is over",
        ),
        ("echo 7 SIGNALING", None),
        ("exit 1", None),
    ],
)
def test_allocation_that_is_gone_needs_no_restart(allocation, squeue, reason):
    records = {"_0": FAILURE, "life_0": LEFT, "life_1": ALIVE}
    attempt, _, _, calls = allocation(squeue, **records)
    assert no_restart_reason([attempt()], 3) == reason
    assert len(calls.read_text().splitlines()) == 1


def watch(folder, records):
    """What a watch says of these records, at one look for each, every 10 s."""
    clock = itertools.count(0, 10)
    now = [0]

    def read_clock():
        return now[0]

    watch, said = StepWatch(folder, read_clock), []
    for texts in records:
        now[0] = next(clock) + 10
        for name, text in texts.items():
            (folder / f"{name}.json").write_text(text)
        said.append(watch.is_over())
    return said


def test_process_that_lives_keeps_its_step(tmp_path):
    """The others have failed, and this one writes a record each second."""
    lives = [
        {"0": FAILURE, "life.0": LEFT, "life.1": f'{{"since": {at}, "end": ""}}'} for at in range(9)
    ]
    assert not any(watch(tmp_path, lives))


def test_records_that_stop_without_a_failure_end_no_step(tmp_path):
    """As where their file system is away."""
    assert not any(watch(tmp_path, [{"life.0": ALIVE, "life.1": ALIVE}] * 99))


def test_single_process_may_take_its_time_to_exit(tmp_path):
    assert not any(watch(tmp_path, [{"0": FAILURE}] * 99))


def test_processes_that_are_done_have_six_minutes_to_exit(tmp_path):
    said = watch(tmp_path, [{"life.0": DONE, "life.1": DONE}] * 99)
    assert said.index(True) == DONE_SECONDS / 10
