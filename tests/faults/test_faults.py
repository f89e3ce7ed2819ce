"""Nothing is lost, and nothing hangs, when a file-system call fails: a sample of the cases of
`sweep.py`, which tries them all.
"""

import subprocess
import sys
from pathlib import Path

import fault_shim
import power_loss
import pytest
from fault_shim import FAULTS, Call
from sweep import BAD, SCENARIOS, every_nth, sweep, table

from tests.processes import environment

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(fault_shim.why_not()), reason=fault_shim.why_not()),
]
CALLS = 3  # of each scenario and fault


def spread(count):
    """Numbers of a few calls, from the first to the last."""
    return sorted(
        {1 + (2 * part + 1) * count // (2 * CALLS) for part in range(CALLS)}
        & set(range(1, count + 1))
    )


def test_sample_of_calls():
    results = list(sweep(SCENARIOS, list(FAULTS), spread))
    bad = [(request, verdict) for request, verdict in results if verdict["kind"] in BAD]
    assert not bad, f"{bad}\n{table(results)}"
    assert {
        (request["scenario"], request["fault"])
        for request, verdict in results
        if verdict["kind"] != "not reached"
    } == {(scenario, fault) for scenario in SCENARIOS for fault in FAULTS}


def test_file_that_is_written_in_place_is_found():
    """The judge can say that something is wrong."""
    kinds = {}
    for request, verdict in sweep(["in place"], list(FAULTS), every_nth(1)):
        kinds.setdefault(request["fault"], set()).add(verdict["kind"])
    assert (
        kinds["kill"] == {"right", "wrong"}
        and "wrong" in kinds["power"]
        and kinds["short"] == {"right"}
    )
    assert "wrong" in kinds["enospc"] and "wrong" in kinds["full"] and "wrong" in kinds["eio"]


def test_process_that_waits_for_nothing_hangs():
    ((_, verdict),) = sweep(["waits"], ["enospc"], lambda count: [1])
    assert verdict["kind"] == "hang" and "wait_in_place" in verdict["why"]


PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import fault_shim
root, copies, log = map(Path, sys.argv[2:5])
fault_shim.begin(root, copies, log, fault_shim.FAULTS.get(sys.argv[5]), int(sys.argv[6]))
os.mkdir(root / "a")
file = os.open(root / "a/new", os.O_WRONLY | os.O_CREAT)
print(os.write(file, b"12345678"), flush=True)
os.fsync(file)
os.close(file)
(root.parent / "elsewhere").write_text("1")
os.rename(root / "a", root / "b")
os.replace(root / "b/new", root / "old")
os.unlink(root / "gone")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fault_shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def run(library, tmp_path):
    """`run(fault, at)` runs the program, in a folder with the files "old" and "gone": how it ended,
    and its calls.
    """
    root, copies, log = (tmp_path / name for name in ("root", "copies", "log"))
    for folder in (root, copies):
        folder.mkdir()
    (root / "old").write_text("old")
    (root / "gone").write_text("gone")

    def run(fault="", at=0):
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            str(Path(__file__).parent),
            str(root),
            str(copies),
            str(log),
            fault,
            str(at),
        ]
        done = subprocess.run(
            command, env=environment(LD_PRELOAD=library), capture_output=True, text=True, timeout=60
        )
        return done, fault_shim.read_log(log)

    return run


def names(calls):
    return [call.name for call in calls]


def test_shim_counts_the_calls_below_the_folder(run, tmp_path):
    done, calls = run()
    assert done.returncode == 0, done.stderr
    assert names(calls) == [
        "mkdir",
        "creating open",
        "write",
        "fsync",
        "close",
        "rename",
        "rename",
        "unlink",
    ]
    assert calls[5].path == str(tmp_path / "root/a") and calls[5].other == str(tmp_path / "root/b")
    assert [call.kept for call in calls] == [0, 0, 0, 0, 0, 0, 1, 0] and (
        tmp_path / "copies/1"
    ).read_text() == "old"
    assert {fault: fault_shim.count(calls, FAULTS[fault]) for fault in FAULTS} == {
        "enospc": 7, "full": 7, "eio": 8, "short": 1, "kill": 6, "power": 7, "emptied": 7
    }  # fmt: skip


def test_shim_fails_one_call(run):
    done, calls = run("enospc", 3)
    assert "OSError: [Errno 28] No space left on device" in done.stderr and done.stdout == ""
    assert [call.number for call in calls if call.faulty] == [3] and calls[2].result == -28


def test_shim_fails_all_calls_from_one_on(run):
    done, calls = run("full", 1)
    assert (
        "FileNotFoundError" not in done.stderr
        and "Errno 28" in done.stderr
        and names(calls) == ["mkdir"]
    )


def test_shim_shortens_a_write(run, tmp_path):
    done, _ = run("short", 1)
    assert (
        done.stdout == "4\n"
        and done.returncode == 0
        and (tmp_path / "root/old").read_text() == "1234"
    )


def test_shim_kills_before_the_call(run, tmp_path):
    done, calls = run("kill", 3)
    assert (
        done.returncode == -9
        and names(calls) == ["mkdir", "creating open", "write"]
        and calls[-1].faulty
    )
    assert (tmp_path / "root/a/new").read_bytes() == b""


@pytest.mark.parametrize(
    ("at", "left"),
    {
        # nothing of the new folder is on disk, whose name was not synced
        4: {"old": "old", "gone": "gone"},
        7: {"old": "old", "gone": "gone"},
        0: {"old": "old"},  # a deletion is on disk at once
    }.items(),
)
def test_loss_of_power_without_synced_folders(at, left, run, tmp_path):
    root = tmp_path / "root"
    tree = power_loss.before(root)
    _, calls = run("power", at)
    power_loss.lose_power(root, tree, tmp_path / "copies", calls)
    assert {path.name: path.read_text() for path in root.iterdir()} == left


@pytest.mark.parametrize("synced", [(), ("a",), ("a", "."), ("a", ".", "a/b", "a/b/file")], ids=len)
def test_loss_of_power_with_synced_folders(synced, tmp_path):
    """A folder "a" with "b/file", renamed to "c" in the end; what is on disk needs its own sync,
    and that of each folder above it.
    """
    root = tmp_path / "root"
    root.mkdir()
    tree = power_loss.before(root)
    made = [("mkdir", "a"), ("mkdir", "a/b"), ("creating open", "a/b/file"), ("write", "a/b/file")]
    calls = [
        Call(0, False, 0.0, name, 0, str(root / path), "", 0)
        for name, path in (*made, *(("fsync", path) for path in synced))
    ]
    calls.append(Call(0, False, 0.0, "rename", 0, str(root / "a"), str(root / "c"), 0))
    (root / "c/b").mkdir(parents=True)
    (root / "c/b/file").write_text("contents")
    power_loss.lose_power(root, tree, tmp_path, calls)
    left = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    assert left == {0: set(), 1: set(), 2: {"a", "a/b"}, 4: {"a", "a/b", "a/b/file"}}[len(synced)]
    if "a/b/file" in left:
        assert (root / "a/b/file").read_text() == "contents"


def test_contents_that_changed_after_they_were_synced_are_lost(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("before")
    tree = power_loss.before(root)
    calls = [
        Call(0, False, 0.0, name, 0, str(root / "file"), "", 0)
        for name in ("write", "fsync", "pwrite")
    ]
    power_loss.lose_power(root, tree, tmp_path, calls[:2])
    assert (root / "file").read_text() == "before"
    power_loss.lose_power(root, power_loss.before(root), tmp_path, calls)
    assert (root / "file").read_text() == ""


def test_names_may_be_on_disk_before_contents(run, tmp_path):
    root = tmp_path / "root"
    tree = power_loss.before(root)
    _, calls = run()
    calls = [call for call in calls if call.name != "fsync"]
    power_loss.lose_power(root, tree, tmp_path / "copies", calls, names=False)
    assert {path.name: path.read_text() for path in root.glob("*") if path.is_file()} == {
        "old": ""
    } and (root / "b").is_dir()
