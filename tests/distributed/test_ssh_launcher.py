"""`spmd launch --hosts` over a stand-in for ssh: first on loopback, then between network
namespaces.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched import JOB, ROOT, launch
from simulated_hosts import simulated_hosts

from spmd.launch import ssh_launcher
from spmd.launch.hostfile import Host
from spmd.launch.settings import Settings

SLOW = pytest.mark.slow
STAND_IN = """#!/bin/sh
# What ssh does, on this machine: [-T] [-x] [-o OPTION] HOST COMMAND. A host is down while there is a file of its name.
while [ "${{1#-}}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
if [ -e "{folder}/$host.down" ]; then echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; fi
exec /bin/sh -c "$*"
"""  # noqa: E501


@pytest.fixture
def hosts(tmp_path):
    """A launcher of jobs on two hosts, 127.0.0.1 and 127.0.0.2."""
    ssh = tmp_path / "ssh"
    ssh.write_text(STAND_IN.format(folder=tmp_path))
    ssh.chmod(0o755)

    def start(
        *words,
        names=("127.0.0.1 processes=1", "127.0.0.2 processes=1"),
        options=(),
        suffix=".txt",
        **more,
    ):
        file = tmp_path / f"hosts{suffix}"
        file.write_text("\n".join(names))
        return launch(
            "--hosts",
            file,
            "--ssh",
            ssh,
            "--folder",
            ROOT,
            "--simulate",
            2,
            *options,
            JOB,
            *words,
            SPMD_TEST_TAG=str(tmp_path),
            **more,
        )

    return start


def left(folder):
    """Processes that have something to do with a folder."""
    return subprocess.run(
        ["pgrep", "-f", f"runner .*{folder}"], capture_output=True, text=True, check=False
    ).stdout.split()


def agents(name, tag):
    """Agents of a host, of this test: of their environment."""
    pids = subprocess.run(
        ["pgrep", "-f", f"spmd.launch.ssh_agent {name}$"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    of_this_test = []
    for number in map(int, pids):
        with contextlib.suppress(OSError):
            of_this_test += [number] * (
                f"SPMD_TEST_TAG={tag}\0".encode() in Path(f"/proc/{number}/environ").read_bytes()
            )
    return of_this_test


@pytest.mark.system
def test_fault_on_a_host_is_reported_and_the_run_succeeds(hosts, tmp_path):
    names = ["[jobs]", 'chief = ["127.0.0.1"]', 'worker = ["127.0.0.2"]']
    words = ["--folder", tmp_path / "run", "--fault", "raise"]
    run = hosts(*words, names=names, suffix=".toml", options=["--max-restarts", 2])
    assert run.code == 0, run.text
    assert len(set(run.hashes)) == 1 and len(run.hashes) == 2, run.text
    assert re.search(
        r"(?m)^\[chief:0\] spmd 0: process 1 on \S+ failed at step 2\d \(\w+\): CallbackError: .* "
        r"raises ValueError: boom on process 1",
        run.text,
    )
    assert re.search(
        r"(?m)^spmd launch: process 1 at step 2\d: CallbackError: .* raises ValueError: boom on "
        r"process 1",
        run.text,
    )
    assert "[worker:0] spmd 1: process 1 of 2 (spmd launch), process 0 at 127.0.0.1:" in run.text
    assert not agents("127.0.0.1", tmp_path) and not agents("127.0.0.2", tmp_path)


@SLOW
def test_lost_host_is_left_out(hosts, tmp_path):
    """One of two hosts dies and stays away: its work is done by the other, with twice the
    microbatches.
    """

    def end(process, run):
        while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
            time.sleep(0.02)
        (tmp_path / "127.0.0.2.down").touch()
        for number in agents("127.0.0.2", tmp_path):
            for child in subprocess.run(
                ["pgrep", "-P", str(number)], capture_output=True, text=True, check=False
            ).stdout.split():
                os.kill(int(child), signal.SIGKILL)
            os.kill(number, signal.SIGKILL)

    words = ["--layout", "fsdp", "--folder", tmp_path / "run", "--fault", "wait"]
    run = hosts(*words, options=["--max-restarts", 4, "--min-hosts", 1], meanwhile=end)
    assert run.code == 0 and len(run.hashes) == 1 and run.hashes[0][1] == "40", run.text
    assert "spmd launch: 127.0.0.2: the connection is lost" in run.text
    assert (
        "spmd launch: 127.0.0.2: ssh: connect to host 127.0.0.2 port 22: No route to host"
        in run.text
    )
    assert "spmd launch: continuing with 1 of 2 processes, on 127.0.0.1" in run.text
    (tmp_path / "127.0.0.2.down").unlink()
    reference = hosts("--layout", "fsdp", "--folder", tmp_path / "reference")
    assert reference.code == 0, reference.text
    last, wanted = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "reference")
    )
    resumed = next(record for record in last if record.get("event") == "resumed")
    assert {"accumulate was 1, is 2", "mesh was data=4, is data=2"} <= set(resumed["changed"])
    assert (
        last[-1]["loss"] == pytest.approx(wanted[-1]["loss"], rel=1e-5)
        and wanted[-1]["loss"] != wanted[0]["loss"]
    )


@SLOW
def test_unreachable_hosts(hosts, tmp_path):
    (tmp_path / "127.0.0.2.down").touch()
    run = hosts(options=["--max-restarts", 1, "--min-hosts", 1])
    assert run.code == 255 and not run.hashes, "a first attempt needs all: a name may be wrong"
    assert run.text.count("spmd launch: 1 of 2 hosts are ready") == 2
    run = hosts(names=["127.0.0.1 processes=1", "192.0.2.1 processes=1"])
    assert (
        run.code == 2
        and "192.0.2.1 is not an address of this host" in run.text
        and "fix: 192.0.2.1 address=ADDRESS" in run.text
    )


@SLOW
@pytest.mark.parametrize("whom", ["SIGTERM", "SIGKILL"])
def test_processes_end_with_the_launcher(hosts, tmp_path, whom):
    def end(process, run):
        while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(getattr(signal, whom))

    run = hosts(
        "--folder", tmp_path / "run", "--fault", "none", "--steps", 1_000_000, meanwhile=end
    )
    assert run.code == (143 if whom == "SIGTERM" else -9), run.text
    until = time.monotonic() + 120
    while (
        agents("127.0.0.1", tmp_path) + agents("127.0.0.2", tmp_path) and time.monotonic() < until
    ):
        time.sleep(0.1)
    assert not agents("127.0.0.1", tmp_path) and not agents("127.0.0.2", tmp_path)
    assert not left(tmp_path / "run")
    if whom == "SIGTERM":
        assert max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) > 25


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo Welcome to gpu02", "127.0.0.2: unexpected output, not from spmd: Welcome to gpu02"),
        ("exec sleep 1000", "127.0.0.2: no answer in 60 s"),
        ("echo 5", "127.0.0.2: unexpected output, not from spmd: 5"),
        ("echo no such user >&2; exit 1", "127.0.0.2: no such user"),
    ],
)
def test_unexpected_answer_of_one_host_is_reported(tmp_path, monkeypatch, does, message):
    """The second of three hosts. The clock stands until the others have answered."""
    ssh = tmp_path / "stand_in"
    ssh.write_text(
        f'#!/bin/sh\nif [ "$1" = 127.0.0.2 ]; then {does}; exit 0; fi\nshift\nexec /bin/sh -c '
        '"$*"\n'
    )
    ssh.chmod(0o755)
    now, answered, hear = (
        [time.monotonic() - ssh_launcher.HELLO],
        set(),
        ssh_launcher.AgentConnection.hear,
    )

    def heard(agent, seconds):
        message = hear(agent, seconds)
        answered.update([agent.host.name] if message is not None else [])
        now[0] += ssh_launcher.LOG_SECONDS * (
            agent.host.name == "127.0.0.2" and answered == {"127.0.0.1", "127.0.0.3"}
        )
        return message

    monkeypatch.setattr(ssh_launcher.AgentConnection, "hear", heard)
    monkeypatch.setattr(ssh_launcher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    logged = []
    three = tuple(Host(f"127.0.0.{number}", 1) for number in (1, 2, 3))
    config = ssh_launcher.SshConfig(three, ssh=str(ssh), settings=Settings(simulate=1))
    assert ssh_launcher.launch_on_hosts([str(JOB)], config, logged.append) == 255
    if "sleep" in does:
        assert [logged.pop(0) for _ in range(6)] == [
            f"waiting for 127.0.0.2 ({spent} s of 60)" for spent in range(10, 70, 10)
        ]
    assert logged[0].startswith(message) and logged[1] == "2 of 3 hosts are ready", logged


@pytest.mark.system
def test_agents_are_kept_over_restarts_and_replaced_when_they_are_gone(tmp_path):
    """The agent of the second host is killed between two attempts."""
    ssh = tmp_path / "stand_in"
    ssh.write_text('#!/bin/sh\nshift\nexec /bin/sh -c "$*"\n')
    ssh.chmod(0o755)
    script = (
        "import os, sys; print(os.getppid(), file=open(sys.argv[1] + os.environ['SPMD_PROCESS'], "
        "'a')); sys.exit(%s)"
    )
    (tmp_path / "job.py").write_text(script % "3 if os.environ['SPMD_ATTEMPT'] == '0' else 0")
    logged = []

    def log(text):
        logged.append(text)
        if text.startswith("restart 1"):
            os.kill(int((tmp_path / "agents1").read_text()), signal.SIGKILL)

    hosts = (Host("127.0.0.1", 1), Host("127.0.0.2", 1))
    config = ssh_launcher.SshConfig(
        hosts, ssh=str(ssh), settings=Settings(simulate=1, max_restarts=1)
    )
    assert (
        ssh_launcher.launch_on_hosts(
            [str(tmp_path / "job.py"), str(tmp_path / "agents")], config, log
        )
        == 0
    ), logged
    kept, replaced = ((tmp_path / f"agents{rank}").read_text().split() for rank in (0, 1))
    assert len(kept) == len(replaced) == 2 and kept[0] == kept[1] and replaced[0] != replaced[1], (
        logged
    )
    assert logged[1:] == ["restart 1 of at most 1"], (
        "the lost connection is made again in the same attempt"
    )


PRINTS = """
import sys
print("x" * 300_000 + chr(0x1e) * 100_000 + "\u2588" * 1000)
print("half", end="")
sys.exit(3)
"""


@pytest.mark.system
def test_long_lines_and_unencodable_characters(tmp_path, monkeypatch):
    ssh = tmp_path / "stand_in"
    ssh.write_text('#!/bin/sh\nshift\nexec /bin/sh -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "prints.py").write_text(PRINTS)
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", shown)
    config = ssh_launcher.SshConfig(
        (Host("127.0.0.1", 1),), ssh=str(ssh), settings=Settings(simulate=1)
    )
    assert (
        ssh_launcher.launch_on_hosts([str(tmp_path / "prints.py")], config, lambda text: None) == 3
    )
    text = shown.buffer.getvalue().decode("latin-1")
    assert text.count("x") >= 300_000 and "half" in text


@SLOW
def test_disconnected_host_comes_back(tmp_path):
    with simulated_hosts(tmp_path, 2) as hosts:
        if hosts[1].holder is None:
            pytest.skip("network namespaces need privileges, and ip, unshare and nsenter")

        def disconnect(process, run):
            for text, state in (
                ("FAULT at", "down"),
                ("restart 1 of at most", "down"),
                ("waiting for process", "up"),
            ):
                while not any(text in line for _, line in run.lines) and process.poll() is None:
                    time.sleep(0.02)
                hosts[1].connect(state)

        options = hosts.options((1, 1))
        reference = launch(*options, JOB, "--folder", tmp_path / "reference")
        assert reference.code == 0 and len(set(reference.hashes)) == 1, reference.text
        assert "spmd 1: process 1 of 2 (spmd launch), process 0 at 10.77.0.1:" in reference.text
        more = ["--max-restarts", 3, "--stall", "step=5"]
        run = launch(
            *options,
            *more,
            JOB,
            "--folder",
            tmp_path / "run",
            "--fault",
            "wait",
            meanwhile=disconnect,
        )
    assert run.code == 0 and set(run.hashes) == set(reference.hashes), run.text
    assert "stalled: no progress" in run.text and "restart 1 of at most 3" in run.text
