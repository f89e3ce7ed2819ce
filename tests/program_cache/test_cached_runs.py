"""A restart loads its programs: fresh processes, one after the other, on one cache."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import spmd
from spmd.program_cache.folder import misordered
from tests.processes import environment

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(misordered()), reason="loading is turned off: " + misordered()),
]
JOB = Path(__file__).parent / "cached_job.py"
ROOT = Path(spmd.__file__).parents[1]
LAUNCHER = ["-m", "spmd", "launch", "--processes", "2", "--simulate", "4"]


def run(cache, *launcher, code=0, flags="", **options):
    """What a run prints, and for each of its processes what it compiled and loaded."""
    variables = environment(SPMD_CACHE=cache, XLA_FLAGS=f"{os.environ['SPMD_TEST_FLAGS']} {flags}")
    # such as the suite's own cache
    variables = {name: value for name, value in variables.items() if not name.startswith("JAX_")}
    command = [sys.executable, *launcher, JOB, json.dumps(options)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr, [
        json.loads(line) for line in re.findall(r'\{"compiled".*\}', done.stdout)
    ]


def reasons(text):
    return re.findall(r"compiling (.*): not in the cache, because (.*)\.$", text, re.MULTILINE)


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize(
    "options",
    [{}, {"loss": "mean_loss"}, {"resident": True}],
    ids=["padded", "short batch", "resident"],
)
def test_second_process_compiles_nothing(tmp_path, options):
    """Initial values, steps, a short last batch, evaluations, checks of replicas and a
    prediction.
    """
    first_text, (first,) = run(tmp_path, **options)
    second_text, (second,) = run(tmp_path, **options)
    assert {"jit(_evaluate)", "jit(_predict)", "jit(sums)"} < set(first["compiled"]) and not first[
        "loaded"
    ]
    assert second["compiled"] == [] and second["loaded"] == len(first["compiled"])
    assert second["loss"] == first["loss"]
    assert not reasons(first_text) and not reasons(second_text)


def test_second_sweep_compiles_nothing(tmp_path):
    _, (first,) = run(tmp_path, sweep=True, devices=2)
    _, (second,) = run(tmp_path, sweep=True, devices=2)
    assert (
        len(first["compiled"]) > 4 and second["compiled"] == [] and second["loss"] == first["loss"]
    )


def test_run_resumed_after_kill_compiles_nothing(tmp_path):
    """Its programs are in the folder of its checkpoints."""
    shared = {"predict": False, "compile_cache": None, "checkpoint": str(tmp_path / "run")}
    run("", code=-signal.SIGKILL, kill=7, **shared)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    text, (resumed,) = run("", **shared | {"checkpoint": str(tmp_path / "moved")})
    assert (
        re.search("resumed from step [36]", text)
        and resumed["compiled"] == []
        and resumed["loaded"] > 3
    )


def test_processes_of_a_launch_compile_nothing_after_restart(tmp_path):
    _, first = run(tmp_path, *LAUNCHER)
    _, second = run(tmp_path, *LAUNCHER)
    assert len(first) == len(second) == 2 and all(len(each["compiled"]) > 5 for each in first)
    assert [each["compiled"] for each in second] == [[], []]
    assert {each["loss"] for each in second} == {each["loss"] for each in first}


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("other", ["folder", "off"])
def test_processes_that_differ_in_their_folder_use_none(tmp_path, other):
    different = str(tmp_path / "of process 1") if other == "folder" else False
    text, both = run(tmp_path, *LAUNCHER, of_process_1={"compile_cache": different})
    assert [each["loaded"] for each in both] == [0, 0] and not list(tmp_path.rglob("*-cache"))
    assert text.count(
        "no compiled programs are kept or loaded: process 1 does not see the folder of process 0"
    ) == (other == "folder")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    run(folder)
    return folder


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"batch_size": 64},
            "batch x was float32[32, 16], is float32[64, 16], and batch y was int32[32], is "
            "int32[64]",
        ),
        ({"precision": "bfloat16"}, "precision was float32, is bfloat16"),
        (
            {"rate": 0.01},
            r"number \d+ in the step was -1.000000e-03 \(f32\), is -0.00999\S+ \(f32\)",
        ),
        ({"layout": "LAYOUT"}, "layout gradients.codec was not set, is int8"),
        (
            {"flags": "--xla_cpu_enable_fast_math=true"},
            "flag --xla_cpu_enable_fast_math was not set, is true",
        ),
        ({"width": 72}, ".*array params/first/kernel was .*"),
        ({"devices": 4}, "mesh was data=8, is data=4.*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_program_that_is_not_in_the_cache_says_what_changed(kept, tmp_path, change, why):
    shutil.copytree(kept, tmp_path / "cache")
    if "layout" in change:
        layout = (
            (ROOT / "layouts" / "fsdp.toml")
            .read_text()
            .replace("[gradients]", '[gradients]\ncodec = "int8"')
        )
        (tmp_path / "coded.toml").write_text(layout)
        change = {"layout": str(tmp_path / "coded.toml")}
    text, (changed,) = run(tmp_path / "cache", **change)
    assert "jit(train_step)" in changed["compiled"]
    found = dict(reasons(text))["the step"]
    assert found == why or re.fullmatch(why, found), found


def test_program_that_calls_the_host_prints_in_each_process(tmp_path):
    """JAX keeps such programs from 0.11 on; before, each process compiles them."""
    first_text, _ = run(tmp_path, loss="printing_loss")
    text, (second,) = run(tmp_path, loss="printing_loss")
    assert first_text.count("\nloss\n") == text.count("\nloss\n") > 0
    if jax.__version_info__ < (0, 11):
        assert second["compiled"] == ["jit(train_step)", "jit(_evaluate)"]
        assert "a program that calls the host" in dict(reasons(text))["the step"]
    else:
        assert second["compiled"] == []


def test_damaged_entries_are_compiled_again(kept, tmp_path):
    """One line says so. The next run loads what this one wrote."""
    shutil.copytree(kept, tmp_path / "cache")
    for entry in (tmp_path / "cache").rglob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:-100])
    text, (damaged,) = run(tmp_path / "cache")
    assert damaged["loaded"] == 0 and len(re.findall("is damaged", text)) == 1
    assert run(tmp_path / "cache")[1][0]["compiled"] == []


def test_cache_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    text, (only,) = run(tmp_path, compile_cache=str(tmp_path / "file" / "cache"))
    assert only["loaded"] == 0 and len(re.findall("compiled programs cannot be kept in", text)) == 1
    text, (off,) = run(tmp_path, compile_cache="off")
    assert (
        off["loaded"] == 0
        and "compiled programs" not in text
        and not list(tmp_path.rglob("*-cache"))
    )
