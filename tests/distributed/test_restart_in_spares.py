"""`spmd launch --spares` with real processes: a restart uses those that wait, ends in the same
bits, and leaves none behind.
"""

import contextlib
import json
import re
import signal
import time
from pathlib import Path

import pytest
from launched import JOB, ROOT, launch

from spmd.run.goodput import Goodput, Timeline

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]
SLOW = pytest.mark.slow
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
shift
exec /bin/sh -c "$*"
"""


@pytest.fixture
def start(tmp_path):
    """A launcher of a job of two processes, on one machine or on two hosts. Its fault is once a
    file exists, `tmp_path/ready`.
    """

    def run(*words, hosts=False, options=(), meanwhile=lambda process, run: None):
        where = ["--processes", 2]
        if hosts:
            (tmp_path / "ssh").write_text(SSH)
            (tmp_path / "ssh").chmod(0o755)
            (tmp_path / "hosts.txt").write_text("127.0.0.1 processes=1\n127.0.0.2 processes=1\n")
            where = ["--hosts", tmp_path / "hosts.txt", "--ssh", tmp_path / "ssh", "--folder", ROOT]
        # a fault may wait for long on a busy machine
        more = ["--simulate", 1, "--max-restarts", 2, "--stall", "step=300", *options]
        words = [JOB, "--after", tmp_path / "ready", *words]
        return launch(*where, *more, *words, meanwhile=meanwhile, SPMD_TEST_TAG=str(tmp_path))

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = launch(
        "--processes", 2, "--simulate", 1, JOB, "--folder", tmp_path_factory.mktemp("undisturbed")
    )
    assert run.code == 0 and len(set(run.hashes)) == 1, run.text
    return run.hashes[0]


def processes(tag):
    """What a launcher of this test has started, and the launcher."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pids += (
                [int(path.name)]
                if f"SPMD_TEST_TAG={tag}\0".encode() in (path / "environ").read_bytes()
                else []
            )
    return pids


def when_ready(count, then):
    """Once so many spare processes are ready, do something with the launcher."""

    def meanwhile(process, run):
        pattern = r"(\d) of \d spare processes are ready"
        while sum(map(int, re.findall(pattern, run.text))) < count and process.poll() is None:
            time.sleep(0.02)
        then(process)

    return meanwhile


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("hosts", [False, True])
def test_killed_process_is_restarted_in_a_spare_one(start, undisturbed, tmp_path, hosts):
    folder = tmp_path / "run"
    ready = when_ready(2, lambda process: (tmp_path / "ready").touch())
    run = start(
        "--folder",
        folder,
        "--fault",
        "KILL",
        "--rank",
        0,
        hosts=hosts,
        options=["--spares"],
        meanwhile=ready,
    )
    assert run.code == 0 and set(run.hashes) == {undisturbed} and len(run.hashes) == 2, run.text
    assert "restart 1 of at most 2" in run.text and "restart 2" not in run.text
    used = re.findall(r"restarted in (\d) of (\d) spare processes\n", run.text)
    assert used == ([("1", "1"), ("1", "1")] if hosts else [("2", "2")]), run.text
    assert not processes(tmp_path)

    goodput = Goodput(Timeline.from_json(json.loads((folder / "goodput.json").read_text())))
    assert len(goodput.timeline.attempts) == 2 and sum(goodput.values()) == pytest.approx(
        goodput.seconds, rel=1e-9
    )
    assert goodput.timeline.attempts[1] > run.when("FAULT at") - 1, (
        "it had started before, and was no part of the run while it waited"
    )


@pytest.mark.sampled(system=2)
@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", pytest.param("SIGTERM", marks=SLOW)])
def test_spare_processes_end_with_the_launcher(start, tmp_path, name, hosts):
    seen = []

    def end(process):
        seen.extend(processes(tmp_path))
        process.send_signal(getattr(signal, name))

    words = [
        "--folder",
        tmp_path / "run",
        "--fault",
        "none of these",
        "--steps",
        1_000_000,
        "--at",
        -1,
        "--pause",
        0.1,
    ]
    run = start(*words, hosts=hosts, options=["--spares"], meanwhile=when_ready(2, end))
    assert run.code == {"SIGKILL": -9, "SIGINT": 0, "SIGTERM": 143}[name], run.text
    assert len(seen) >= 5, "the launcher, two processes and two spare ones"
    until = time.monotonic() + 120
    while processes(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not processes(tmp_path) and "restarted" not in run.text


@SLOW
def test_processes_that_were_spare_ones_end_with_a_killed_launcher(start, tmp_path):
    """The system shows the environment with which they were started, in which the attempt's cookie
    is not.
    """
    seen = []

    def kill_twice(process, run):
        when_ready(2, lambda process: (tmp_path / "ready").touch())(process, run)
        while not re.search("restarted in 2 of 2(.|\n)*STEP", run.text) and process.poll() is None:
            time.sleep(0.02)
        seen.extend(processes(tmp_path))
        process.kill()

    words = ["--folder", tmp_path / "run", "--fault", "KILL", "--steps", 1_000_000, "--pause", 0.1]
    run = start(*words, options=["--spares"], meanwhile=kill_twice)
    assert run.code == -9 and "restarted in 2 of 2" in run.text and len(seen) >= 3, run.text
    until = time.monotonic() + 120
    while processes(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert not processes(tmp_path)
