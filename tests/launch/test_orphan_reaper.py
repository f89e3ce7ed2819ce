"""What a launcher has started ends with it, however it ends, and nothing else does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd.launch import orphan_reaper

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux only")

LAUNCHER = """
import subprocess, sys, time
from spmd.launch.process_group import start_processes
other = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(other.pid, flush=True)
script = "sleep 600 & setsid sleep 600 & echo $$ $!; wait"
with start_processes({0: (["sh", "-c", script], {}), 1: (["sh", "-c", "kill -STOP $$"], {})}, lambda rank: f"{rank} ") as group:
    sys.stdout.write(" ".join(["ranks", *(str(process.pid) for process in group.processes.values())]) + "\\n")
    sys.stdout.flush()
    time.sleep(600)
"""  # noqa: E501


def alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_killed_launcher_leaves_no_process_behind(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    other = int(launcher.stdout.readline())
    try:
        lines = [launcher.stdout.readline().split() for _ in range(2)]
        ranks = next(list(map(int, words[1:])) for words in lines if words[0] == "ranks")
        detached = next(int(words[2]) for words in lines if words[0] == "0")
        group = [
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and _group(path.name) == ranks[0]
        ]
        assert len(group) >= 2 and alive(detached) and all(map(alive, ranks))
        launcher.kill()
        launcher.wait()
        everything = {*ranks, *group, detached}
        assert until(lambda: not any(map(alive, everything))), [
            number for number in everything if alive(number)
        ]
        assert alive(other), "it belongs to the launcher, but not to the group"
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        os.kill(other, signal.SIGKILL)


def _group(number):
    try:
        return os.getpgid(int(number))
    except OSError:
        return None


def test_processes_are_found_by_their_cookie_alone():
    cookies = (
        {orphan_reaper.NAME: "abc"},
        {orphan_reaper.NAME: "x,abc,y"},
        {orphan_reaper.NAME: "abcd"},
        {},
    )
    path = {"PATH": os.environ["PATH"]}
    with_cookie, nested, others, without = processes = [
        subprocess.Popen(["sleep", "600"], env=path | cookie) for cookie in cookies
    ]
    try:
        assert until(
            lambda: {with_cookie.pid, nested.pid} <= set(orphan_reaper.processes_with_cookie("abc"))
        )
        assert (
            set(orphan_reaper.processes_with_cookie("abc")) == {with_cookie.pid, nested.pid}
            and orphan_reaper.processes_with_cookie("abcd") == [others.pid]
            and alive(without.pid)
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_reaper_ends_with_the_block():
    def children():
        command = ["pgrep", "-P", str(os.getpid()), "-f", "orphan_reaper.py"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    with orphan_reaper.reap_orphans("a-cookie"):
        assert until(children)
    assert not children()
