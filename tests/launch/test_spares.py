"""Spare processes of `spmd launch --spares`: which are used, what they get, and that none is left
behind.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd.distributed import coordination
from spmd.launch import spares
from spmd.launch.cli import main
from spmd.launch.process_group import start_processes
from spmd.launch.spares import Spares, wait_as_spare

# A worker that prints its environment; as a spare one, it does first what the test says, and then
# what `wait_as_spare` does.
WORKER = """
import json, os, socket, sys, time
if "SPMD_SPARE" in os.environ:
    print("was", sorted(name for name in os.environ if name.startswith("SPMD_")), flush=True)
    {first}
    with socket.socket(fileno=int(os.environ["SPMD_SPARE"])) as launcher:
        launcher.sendall(b"\\n")
        line = launcher.makefile().readline()
    os.environ.clear()
    os.environ.update(json.loads(line))
print("is", os.getpid(), os.environ["SPMD_TOKEN"], os.environ["ODD"].encode(errors="surrogateescape"), flush=True)
"""  # noqa: E501


def worker(first="pass", token="first"):
    environment = {
        "SPMD_TOKEN": token,
        "SPMD_PROCESS": "0",
        "SPMD_STALL": "step=9",
        "ODD": "\udcff",
    }
    return {0: ([sys.executable, "-S", "-c", WORKER.format(first=first)], environment)}


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def folder(tmp_path):
    """Of the records of an attempt that trains."""
    write_heartbeat(tmp_path, "step")
    return tmp_path


def write_heartbeat(folder, phase):
    record = {
        "at": 0.0,
        "phase": phase,
        "step": 0,
        "since": 0.0,
        "busy": False,
        "stopped": None,
        "end": "",
    }
    (folder / "life.0.json").write_text(json.dumps(record))


def attempt(pool, commands):
    """What the processes of an attempt print."""
    lines = []
    with start_processes(
        commands, lambda rank: "", write=lines.append, pop_spare=pool.pop_ready
    ) as group:
        assert group.wait(5.0) == {0: 0}
    return "".join(lines)


def test_spare_process_continues_with_the_next_environment(folder):
    logged = []
    with Spares(1, logged.append) as pool:
        with pool.replace(worker(), folder):
            until(lambda: logged)
            (spare,) = pool._spares
        assert logged == ["1 of 1 spare processes are ready"]
        text = attempt(pool, worker(token="second"))
        assert (
            text == "was ['SPMD_GROUP', 'SPMD_LAUNCHER', 'SPMD_SPARE', 'SPMD_STALL']\nis "
            f"{spare.process.pid} second b'\\xff'\n"
        )
        with pool.replace(worker(), folder):
            until(lambda: len(logged) == 3)
            assert logged[1] == "restarted in 1 of 1 spare processes"
            (replaced,) = pool._spares
            assert replaced.process.pid != spare.process.pid and alive(replaced.process.pid)
    assert not alive(replaced.process.pid)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("print('no module'); sys.exit(3)", r"spare process {pid} ended with code 3: no module"),
        ("os.kill(os.getpid(), 9)", r"spare process {pid} ended with signal 9: was ['SPMD_GROUP'"),
    ],
)
def test_spare_process_that_ended_is_reported_and_not_used(folder, first, message):
    logged = []
    with Spares(1, logged.append) as pool:
        with pool.replace(worker(first), folder):
            until(lambda: len(logged) == 2 and logged[1] == "0 of 1 spare processes are ready")
        assert logged[0].startswith(message.format(pid=logged[0].split()[2]))
        assert f"is {logged[0].split()[2]}" not in attempt(pool, worker())
        with pool.replace(worker(), folder):
            assert (
                logged[2]
                == "restarted in 0 of 1 spare processes; no more were ready, so Python starts again"
            )


def test_spare_process_that_ends_after_it_was_ready_is_not_used(folder):
    logged = []
    with Spares(1, logged.append) as pool:
        with pool.replace(worker(), folder):
            until(lambda: logged)
        pid = pool._spares[0].process.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid))
        assert "is " in attempt(pool, worker()) and logged[1].startswith(
            f"spare process {pid} ended with signal 9"
        )


def test_spare_process_that_still_imports_is_kept_for_later(folder, tmp_path):
    waits = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    logged = []
    with Spares(1, logged.append) as pool:
        with pool.replace(worker(waits), folder):
            until(lambda: pool._spares)
        (spare,) = pool._spares
        assert attempt(pool, worker()).startswith("is ") and alive(spare.process.pid)
        with pool.replace(worker(), folder):
            pass
        (tmp_path / "go").touch()
        until(lambda: spare.check() and spare.is_ready)
        assert f"is {spare.process.pid} second" in attempt(pool, worker(token="second"))


def test_spare_processes_start_once_an_attempt_trains(tmp_path, monkeypatch):
    looks, logged, read = [], [], spares.read_records
    monkeypatch.setattr(spares, "LOOK", 0.01)
    monkeypatch.setattr(spares, "read_records", lambda folder: looks.append(folder) or read(folder))
    write_heartbeat(tmp_path, "compile")
    with Spares(2, logged.append) as pool, pool.replace(worker(), tmp_path):
        until(lambda: len(looks) > 3)
        assert not pool._spares
        write_heartbeat(tmp_path, "step")
        until(lambda: logged)
        assert logged == ["2 of 2 spare processes are ready"]


def test_attempt_without_heartbeats_counts_as_begun_after_a_while(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(spares, "BEGIN", 0.0)
    with Spares(1, logged.append) as pool, pool.replace(worker(), tmp_path):
        until(lambda: logged)


LAUNCHER = """
import sys, time
from pathlib import Path
from spmd.launch.spares import Spares
with Spares(1, print) as pool, pool.replace({0: ([sys.executable, "-S", "-c", sys.argv[2]], {})}, Path(sys.argv[1])):
    time.sleep(600)
"""  # noqa: E501


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux only")
def test_killed_launcher_leaves_no_spare_process_behind(folder):
    """One that does not read its socket, and has a child of another session."""
    script = f"""
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(os.getpid(), child.pid, file=open({str(folder / "pids")!r}, "w"), flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder), script])
    try:
        until(lambda: (folder / "pids").exists() and (folder / "pids").read_text().endswith("\n"))
        pids = list(map(int, (folder / "pids").read_text().split()))
        assert all(map(alive, pids))
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(map(alive, pids)))


@pytest.fixture
def as_spare(monkeypatch):
    """This process as a spare one; the launcher's end of its socket."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(os, "environ", {"SPMD_SPARE": str(theirs.detach()), "old": ""})
    monkeypatch.setattr(coordination, "backends_initialized", lambda: False)  # unlike this process
    with ours:
        yield ours


def test_waiting_process_takes_its_environment(as_spare):
    as_spare.sendall(b'{"SPMD_TOKEN": "x"}\n')
    wait_as_spare([])
    assert (
        dict(os.environ) == {"SPMD_TOKEN": "x"}
        and as_spare.recv(9) == spares.READY
        and as_spare.recv(9) == b""
    )
    wait_as_spare(["no module, which a worker does not import"])


def test_waiting_process_exits_with_its_launcher(as_spare, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(json, "loads", lambda line: {"not": line})
    as_spare.shutdown(socket.SHUT_WR)
    wait_as_spare([])
    assert codes == [0]


def test_spare_process_with_devices_is_an_error(as_spare, monkeypatch):
    monkeypatch.setattr(coordination, "backends_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="importing json made JAX look for devices"):
        wait_as_spare(["json"])
    assert as_spare.recv(9) == b"", "it was not ready"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--processes", "2"],
            "spares apply to restarts, and there are none.\n    fix: --max-restarts 10.",
        ),
        (
            ["--slurm"],
            "--spares has no effect with --slurm.\n    fix: leave it out: a restart is another "
            "step of srun",
        ),
        (
            ["--srun"],
            "--spares has no effect with --srun.\n    fix: leave it out: a restart is another step "
            "of srun",
        ),
        (
            ["--kubernetes"],
            "--spares has no effect with --kubernetes.\n    fix: leave it out: a restart is "
            "another pod",
        ),
    ],
)
def test_useless_spares_are_refused(options, message, capsys):
    assert main(["launch", "--simulate", "1", "--spares", *options, __file__]) == 2
    assert message in capsys.readouterr().err
