"""Checkpoints in memory with real processes: they are killed, with or without their host's memory, and end in the same bits.

A host is an address of this machine whose processes have a memory folder of their own; its memory is lost when that folder is removed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launched import JOB, ROOT, launch

SLOW = pytest.mark.slow
SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
export SPMD_MEMORY_FOLDER={memory}/$host
exec /bin/sh -c "$*"
"""


@pytest.fixture
def hosts(tmp_path):
    """A launcher of jobs on hosts 127.0.0.1, 127.0.0.2, ...; the memory of each is a folder in `tmp_path/memory`."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(memory=tmp_path / "memory"))
    ssh.chmod(0o755)

    def start(*words, processes=(1, 1), restarts=2, **more):
        file = tmp_path / "hosts.txt"
        file.write_text("".join(f"127.0.0.{number} processes={count}\n" for number, count in enumerate(processes, 1)))
        options = ["--hosts", file, "--ssh", ssh, "--folder", ROOT, "--simulate", 2, "--max-restarts", restarts]
        job = [JOB, "--folder", tmp_path / "run", "--every", 15, *words]
        return launch(*options, *job, SPMD_TEST_TAG=str(tmp_path), **more)

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of a run without faults, by the number of processes; the devices are as many."""
    hashes = {}

    def of(processes):
        if processes not in hashes:
            words = ["--processes", processes, "--simulate", 2, JOB, "--folder", tmp_path_factory.mktemp("undisturbed") / "run"]
            run = launch(*words)
            assert run.code == 0 and len(set(run.hashes)) == 1, run.text
            hashes[processes] = run.hashes[0]
        return hashes[processes]

    return of


def kill_host(number, tag):
    """SIGKILL to the agent of a host and to its processes."""
    pids = subprocess.run(["pgrep", "-f", f"spmd.launch.ssh_agent 127.0.0.{number}$"], capture_output=True, text=True, check=False).stdout
    for agent in map(int, pids.split()):
        with contextlib.suppress(OSError):
            if f"SPMD_TEST_TAG={tag}\0".encode() not in Path(f"/proc/{agent}/environ").read_bytes():
                continue
            children = subprocess.run(["pgrep", "-P", str(agent)], capture_output=True, text=True, check=False).stdout.split()
            for pid in (*map(int, children), agent):
                os.kill(pid, signal.SIGKILL)


def wait_for_pieces(process, tmp_path, pieces):
    """Until so many pieces of step 24 are in memory, and step 15 is on disk; training waits for longer."""
    while process.poll() is None:
        if len(list((tmp_path / "memory").rglob("24.?"))) == pieces and (tmp_path / "run" / "checkpoints" / "15").exists():
            return
        time.sleep(0.02)


def faults(tmp_path, pieces, *, killed=(), lost=()):
    """After step 25, when all have step 24 in memory: kill hosts, and remove the memory of hosts."""

    def act(process, run):
        wait_for_pieces(process, tmp_path, pieces)
        for number in killed:
            kill_host(number, tmp_path)
        for number in lost:
            shutil.rmtree(tmp_path / "memory" / f"127.0.0.{number}")

    return act


def resumed(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record.get("source", "disk")) for record in records if record.get("event") == "resumed"]


def counts(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(record for record in records if record.get("event") == "memory")


CASES = {  # processes of each host, killed hosts, those whose memory is lost, step, source
    "own memory": ((1, 1), (2,), (), 24, "memory (process 0, 1: own host), 9 steps after the newest checkpoint on disk"),
    "neighbour": (
        (1, 1),
        (2,),
        (2,),
        24,
        r"memory (process 0: own host; process 1: \S+ (host 0)), 9 steps after the newest checkpoint on disk",
    ),
    "disk": ((1, 1), (1, 2), (1, 2), 15, "disk"),
    "neighbour of process 0": ((1, 1), (1,), (1,), 24, r"memory (process 0: \S+ (host 1); process 1: own host), 9 steps after"),
    "all workers of a host": ((2, 2), (2,), (), 24, "memory (process 0, 1, 2, 3: own host), 9 steps after"),
    "one host of three": ((2, 1, 1), (3,), (3,), 24, r"memory (process 0, 1, 2: own host; process 3: \S+ (host 0)), 9 steps after"),
    "two hosts of three": ((2, 1, 1), (2, 3), (2, 3), 15, "disk"),
}


@pytest.mark.system
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if number > 2 else ()) for number, name in enumerate(CASES)])
def test_killed_host_resumes_from_memory_with_the_same_bits(hosts, undisturbed, tmp_path, name):
    processes, killed, lost, step, source = CASES[name]
    words = ["--memory-every", 4, "--fault", "sleep"]
    acts = faults(tmp_path, 2 * sum(processes), killed=killed, lost=lost)
    run = hosts(*words, processes=processes, meanwhile=acts)
    assert run.code == 0 and set(run.hashes) == {undisturbed(sum(processes))}, run.text
    starts = resumed(tmp_path / "run")
    assert len(starts) == 1, run.text
    ((resumed_step, resumed_source),) = starts
    pattern = re.escape(source).replace(r"\\S\+", r"\S+")
    assert resumed_step == step and re.match(pattern, resumed_source), resumed_source
    again = [at for at, line in run.lines if "STEP 26" in line][-1] - run.when("ended with signal 9|connection is lost")
    done = counts(tmp_path / "run")
    print(f"FIGURE {name}: {25 - step} steps lost, step 26 again after {again:.1f} s; {done}")
    assert done["saved"] and not done["failed"] and (done["bytes_sent"] > 0)
    assert not list((tmp_path / "memory").glob("*/*")), "the memory of a run that has ended well is free"


@SLOW
def test_same_fault_without_memory(hosts, undisturbed, tmp_path):
    def kill(process, run):
        while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
            time.sleep(0.02)
        kill_host(2, tmp_path)

    run = hosts("--fault", "sleep", meanwhile=kill)
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    assert resumed(tmp_path / "run") == [(15, "disk")]
    again = [at for at, line in run.lines if "STEP 26" in line][-1] - run.when("connection is lost")
    print(f"FIGURE without checkpoints in memory: 10 steps lost, step 26 again after {again:.1f} s")


@SLOW
def test_memory_is_removed_when_there_is_no_restart(hosts, tmp_path):
    run = hosts("--memory-every", 4, "--fault", "raise", "--always", restarts=5)
    assert run.code == 1 and "no restart" in run.text, run.text
    assert (tmp_path / "memory" / "127.0.0.1").exists() and not list((tmp_path / "memory").glob("*/spmd-*/*-*")), run.text


@SLOW
@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_damaged_piece_is_replaced_by_an_older_step_or_the_disk(undisturbed, tmp_path, damage):
    """Two processes on this host: one piece of step 24 is damaged; 20 is still there, or not."""
    memory = tmp_path / "memory"

    def harm(process, run):
        wait_for_pieces(process, tmp_path, 2)
        for name in ("20.0", "20.1", "24.0", "24.1") if damage == "all" else ("24.1",):
            for path in memory.glob(f"*/*/{name}"):
                _damage(path, damage)
        workers = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spmd.launch.runner"], capture_output=True, text=True, check=True)
        os.kill(int(workers.stdout.split()[0]), signal.SIGKILL)

    words = ["--processes", 2, "--simulate", 2, "--max-restarts", 2, JOB, "--folder", tmp_path / "run", "--every", 15]
    run = launch(*words, "--memory-every", 4, "--fault", "sleep", meanwhile=harm, SPMD_MEMORY_FOLDER=str(memory))
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    ((step, source),) = resumed(tmp_path / "run")
    assert (step, source.split()[0]) == ((15, "disk") if damage == "all" else (20, "memory")), run.text
    assert "is damaged (" in run.text and "and was removed" in run.text


def _damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if how != "a bit" else content)


@pytest.mark.system
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=SLOW)])
def test_script_that_is_started_again_by_hand_finds_its_memory(undisturbed, tmp_path, processes):
    """The launcher itself is killed, so nothing removes the memory; the next launch, of as many devices, resumes from it."""

    def kill(process, run):
        wait_for_pieces(process, tmp_path, 2)
        process.kill()

    job = [JOB, "--folder", tmp_path / "run", "--every", 15, "--memory-every", 4]
    memory = str(tmp_path / "memory")
    launch("--processes", 2, "--simulate", 2, *job, "--fault", "sleep", meanwhile=kill, SPMD_MEMORY_FOLDER=memory)
    run = launch("--processes", processes, "--simulate", 4 // processes, *job, "--resume", SPMD_MEMORY_FOLDER=memory)
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    ((step, source),) = resumed(tmp_path / "run")
    ranks = ", ".join(map(str, range(processes)))
    assert step == 24 and source.startswith(f"memory (process {ranks}: own host)")
