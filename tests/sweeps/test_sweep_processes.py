"""A sweep over the devices of several processes ends as it does in one process, byte for byte."""

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launched import launch

pytestmark = pytest.mark.system

JOB = Path(__file__).parent / "processes_job.py"
CASES = {
    "large": {"more": "large", "trials": 32, "at_once": 12, "keep": 3},
    "halving": {"more": "halving", "trials": 11, "epochs": 3, "keep": 1, "again": True},
    "data": {
        "more": "scalar",
        "trials": 6,
        "mesh": "net=4,data=2",
        "epochs": 1,
        "exact": False,
        "kind": "statistics and dropout",
    },
}


def swept(folder, processes, *words, cases=CASES, options=(), ends=0):
    """Run the cases in a launch of so many processes."""
    folder.mkdir(exist_ok=True)
    command = [
        "--processes",
        processes,
        "--simulate",
        8 // processes,
        *options,
        JOB,
        folder,
        json.dumps(cases),
        *words,
    ]
    run = launch(*command)
    assert run.code == ends, run.text
    return run


def written(folder, name, rank=0):
    """Every file with results, by its path: those of the sweep's folder, and those that a process
    wrote.
    """
    places = [("sweep", folder / name / "sweep"), ("process", folder / name / str(rank))]
    files = [
        (f"{kind}/{path.relative_to(place)}", path)
        for kind, place in places
        for path in place.rglob("*")
        if path.is_file()
    ]
    return {
        key: path.read_bytes()
        for key, path in files
        if not {"checkpoints", "programs"} & {*path.parts}
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The cases in one process."""
    folder = tmp_path_factory.mktemp("processes") / "one"
    swept(folder, 1)
    return folder


def check_equal(one, folder, names=CASES):
    """Every process has what one process has; of a killed sweep older histories may be left."""
    for name in names:
        wanted = written(one, name)
        assert (
            len(wanted) > 6
            and len(wanted["process/table.csv"].splitlines()) == 1 + CASES[name]["trials"]
        )
        for rank in (0, 1):
            assert written(folder, name, rank) == wanted


def test_two_processes_match_one(one, tmp_path):
    swept(tmp_path / "two", 2)
    check_equal(one, tmp_path / "two")
    assert (
        written(one, "large")["process/table.csv"] != written(one, "halving")["process/table.csv"]
    )


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_killed_process_is_restarted_and_results_are_the_same(one, tmp_path, rank):
    run = swept(tmp_path / "killed", 2, rank, 9, options=("--max-restarts", 1))
    assert run.text.count("FAULT") == 1 and f"process {rank} ended with signal 9" in run.text
    # of 9: neither finished nor saved steps are repeated
    assert max(map(int, re.findall("CALLS large (\\d+)", run.text))) <= 2
    check_equal(one, tmp_path / "killed")


def test_processes_that_are_asked_to_end_save_at_the_same_step(one, tmp_path):
    run = swept(tmp_path / "asked", 2, 1, 2, "SIGTERM", cases={"large": CASES["large"]}, ends=143)
    assert "CALLS" not in run.text and "2 processes ended with code 143 after SIGTERM" in run.text
    chunks = tmp_path / "asked" / "large" / "sweep" / "chunks"
    assert (
        len(list(chunks.glob("*/checkpoints/[0-9]*"))) == 1
        and len(list(chunks.glob("*/done.json"))) <= 1
    )
    run = swept(tmp_path / "asked", 2, cases={"large": {**CASES["large"], "resume": True}})
    # of 9: 3 chunks of 3
    assert len(left := set(re.findall("CALLS large (\\d+)", run.text))) == 1 and left < {
        "6",
        "7",
        "8",
    }
    check_equal(one, tmp_path / "asked", ["large"])


def test_sweep_over_processes_refuses_other_trials_and_trials_that_cross(tmp_path):
    cases = {
        "other": {"trials": None, "search": "grid", "differ": True},
        "crossing": {"mesh": "net=1,data=8"},
        "fine": {"epochs": 1},
    }
    run = swept(tmp_path / "refused", 2, cases=cases)
    assert (
        run.text.count(
            "REFUSED other: the processes do not agree: trial 1 is {'learning_rate': 0.2"
        )
        == 2
    )
    why = (
        "REFUSED crossing: mesh net=1, data=8: the positions along net are on processes 0+1. Each "
        "trial needs devices of one process"
    )
    assert run.text.count(why) == 2 and run.text.count('fix: "net=2,data=4".') == 2
    assert (tmp_path / "refused" / "fine" / "1" / "table.csv").exists()
