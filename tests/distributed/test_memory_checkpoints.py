"""Checkpoints in memory with real processes: they are killed, with or without their host's memory,
and end in the same bits.
"""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from launched import JOB, launch
from simulated_hosts import simulated_hosts

SLOW = pytest.mark.slow


@pytest.fixture
def hosts(tmp_path):
    with simulated_hosts(tmp_path, 3) as hosts:
        yield hosts


@pytest.fixture
def start(hosts, tmp_path):
    """Starts a job on hosts, with so many processes on each."""

    def start(*words, processes=(1, 1), restarts=2, options=(), **more):
        job = [JOB, "--folder", tmp_path / "run", "--every", 15, *words]
        return launch(*hosts.options(processes), "--max-restarts", restarts, *options, *job, **more)

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of a run without faults, by the number of processes; the devices are as many."""
    hashes = {}

    def of(processes):
        if processes not in hashes:
            words = [
                "--processes",
                processes,
                "--simulate",
                2,
                JOB,
                "--folder",
                tmp_path_factory.mktemp("undisturbed") / "run",
            ]
            run = launch(*words)
            assert run.code == 0 and len(set(run.hashes)) == 1, run.text
            hashes[processes] = run.hashes[0]
        return hashes[processes]

    return of


def wait_for_pieces(process, tmp_path, pieces, count):
    """Until so many pieces of step 24 are in memory, and step 15 is on disk; training waits for
    longer.
    """
    while process.poll() is None:
        if count() == pieces and (tmp_path / "run" / "checkpoints" / "15").exists():
            return
        time.sleep(0.02)


def resumed(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (record["step"], record.get("source", "disk"))
        for record in records
        if record.get("event") == "resumed"
    ]


def counts(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(record for record in records if record.get("event") == "memory")


def kill_worker(host):
    host.kill_workers(1)


def kill_workers(host):
    host.kill_workers()


def kill_agent(host):
    """And its processes."""
    host.kill()


def lose(host):
    host.kill()
    host.lose_memory()


OWN = "memory (process {ranks}: own host), 9 steps after the newest checkpoint on disk"
CASES = {  # processes of each host, what is done to which hosts, step, source
    "a worker": ((1, 1), kill_worker, (1,), 24, OWN),
    "neighbour": (
        (1, 1),
        lose,
        (1,),
        24,
        "memory (process 0: own host; process 1: {0}), 9 steps after the newest checkpoint on disk",
    ),
    "two hosts of three": ((2, 1, 1), lose, (1, 2), 15, "disk"),
    "all workers of a host": ((2, 2), kill_workers, (1,), 24, OWN),
    "a worker of two": ((2, 2), kill_worker, (1,), 24, OWN),
    "an agent": ((2, 2), kill_agent, (1,), 24, OWN),
    "neighbour of process 0": (
        (1, 1),
        lose,
        (0,),
        24,
        "memory (process 0: {1}; process 1: own host), 9 steps after",
    ),
    "one host of three": (
        (2, 1, 1),
        lose,
        (2,),
        24,
        "memory (process 0, 1, 2: own host; process 3: {0}), 9 steps after",
    ),
    "all hosts": ((1, 1), lose, (0, 1), 15, "disk"),
}


@pytest.mark.sampled(system=4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW if number > 3 else ()) for number, name in enumerate(CASES)],
)
def test_killed_processes_resume_from_memory_with_the_same_bits(
    hosts, start, undisturbed, tmp_path, name
):
    processes, harm, victims, step, source = CASES[name]

    def act(process, run):
        wait_for_pieces(process, tmp_path, 2 * sum(processes), lambda: hosts.pieces(24))
        for number in victims:
            harm(hosts[number])

    run = start("--memory-every", 4, "--fault", "sleep", processes=processes, meanwhile=act)
    assert run.code == 0 and set(run.hashes) == {undisturbed(sum(processes))}, run.text
    ((resumed_step, resumed_source),) = resumed(tmp_path / "run")
    source = re.escape(source.replace("{ranks}", ", ".join(map(str, range(sum(processes))))))
    for number, host in enumerate(hosts.hosts):
        source = source.replace(rf"\{{{number}\}}", host.shown)
    assert resumed_step == step and re.match(source, resumed_source), resumed_source
    again = [at for at, line in run.lines if "STEP 26" in line][-1] - run.when(
        "ended with signal 9|connection is lost"
    )
    done = counts(tmp_path / "run")
    print(f"FIGURE {name}: {25 - step} steps lost, step 26 again after {again:.1f} s; {done}")
    assert done["saved"] and not done["failed"] and (done["bytes_sent"] > 0)
    assert not any(list(host.memory.glob("*/*")) for host in hosts.hosts), (
        "the memory of a run that has ended well is free"
    )


@SLOW
def test_disconnected_host_resumes_from_memory(hosts, start, undisturbed, tmp_path):
    """The network of a host is down until both are restarted and wait for each other."""
    if hosts[1].holder is None:
        pytest.skip("network namespaces need privileges, and ip, unshare and nsenter")

    def disconnect(process, run):
        wait_for_pieces(process, tmp_path, 4, lambda: hosts.pieces(24))
        hosts[1].connect("down")
        (tmp_path / "run" / "released").touch()
        while (
            not any("waiting for process" in line for _, line in run.lines)
            and process.poll() is None
        ):
            time.sleep(0.02)
        hosts[1].connect("up")

    run = start(
        "--memory-every",
        4,
        "--fault",
        "release",
        options=["--stall", "step=5"],
        meanwhile=disconnect,
    )
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    assert "stalled: no progress" in run.text and "restart 1 of at most" in run.text
    ((step, source),) = resumed(tmp_path / "run")
    assert step == 24 and source.startswith("memory (process 0, 1: own host), 9 steps after")


@SLOW
def test_same_fault_without_memory(hosts, start, undisturbed, tmp_path):
    def kill(process, run):
        while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
            time.sleep(0.02)
        hosts[1].kill()

    run = start("--fault", "sleep", meanwhile=kill)
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    assert resumed(tmp_path / "run") == [(15, "disk")]
    again = [at for at, line in run.lines if "STEP 26" in line][-1] - run.when("connection is lost")
    print(f"FIGURE without checkpoints in memory: 10 steps lost, step 26 again after {again:.1f} s")


@SLOW
def test_memory_is_removed_when_there_is_no_restart(hosts, start):
    run = start("--memory-every", 4, "--fault", "raise", "--always", restarts=5)
    assert run.code == 1 and "no restart" in run.text, run.text
    assert list(hosts[0].memory.glob("spmd-*")) and not any(
        list(host.memory.glob("spmd-*/*-*")) for host in hosts.hosts
    ), run.text


@SLOW
@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_damaged_piece_is_replaced_by_an_older_step_or_the_disk(undisturbed, tmp_path, damage):
    """Two processes on this host: one piece of step 24 is damaged; 20 is still there, or not."""
    memory = tmp_path / "memory"

    def harm(process, run):
        wait_for_pieces(
            process, tmp_path, 2, lambda: len(list((tmp_path / "memory").rglob("24.?")))
        )
        for name in ("20.0", "20.1", "24.0", "24.1") if damage == "all" else ("24.1",):
            for path in memory.glob(f"*/*/{name}"):
                _damage(path, damage)
        workers = subprocess.run(
            ["pgrep", "-P", str(process.pid), "-f", "spmd.launch.runner"],
            capture_output=True,
            text=True,
            check=True,
        )
        os.kill(int(workers.stdout.split()[0]), signal.SIGKILL)

    words = [
        "--processes",
        2,
        "--simulate",
        2,
        "--max-restarts",
        2,
        JOB,
        "--folder",
        tmp_path / "run",
        "--every",
        15,
    ]
    run = launch(
        *words,
        "--memory-every",
        4,
        "--fault",
        "sleep",
        meanwhile=harm,
        SPMD_MEMORY_FOLDER=str(memory),
    )
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    ((step, source),) = resumed(tmp_path / "run")
    assert (step, source.split()[0]) == ((15, "disk") if damage == "all" else (20, "memory")), (
        run.text
    )
    assert "is damaged (" in run.text and "and was removed" in run.text


def _damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if how != "a bit" else content)


@pytest.mark.system
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=SLOW)])
def test_script_that_is_started_again_by_hand_finds_its_memory(undisturbed, tmp_path, processes):
    """The launcher itself is killed, so nothing removes the memory; the next launch, of as many
    devices, resumes from it.
    """

    def kill(process, run):
        wait_for_pieces(
            process, tmp_path, 2, lambda: len(list((tmp_path / "memory").rglob("24.?")))
        )
        process.kill()

    job = [JOB, "--folder", tmp_path / "run", "--every", 15, "--memory-every", 4]
    memory = str(tmp_path / "memory")
    launch(
        "--processes",
        2,
        "--simulate",
        2,
        *job,
        "--fault",
        "sleep",
        meanwhile=kill,
        SPMD_MEMORY_FOLDER=memory,
    )
    run = launch(
        "--processes",
        processes,
        "--simulate",
        4 // processes,
        *job,
        "--resume",
        SPMD_MEMORY_FOLDER=memory,
    )
    assert run.code == 0 and set(run.hashes) == {undisturbed(2)}, run.text
    ((step, source),) = resumed(tmp_path / "run")
    ranks = ", ".join(map(str, range(processes)))
    assert step == 24 and source.startswith(f"memory (process {ranks}: own host)")
