"""One owner per run folder: who is refused, who takes over, and what each finds. Time is a fake;
other machines are names in the file.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest

from spmd.distributed import coordination
from spmd.errors import CheckpointError
from spmd.run import owner
from spmd.run.owner import HEARTBEAT_SECONDS, OWNER_FILE, TAKEOVER_SECONDS, FolderOwnership, Owner


class Time:
    """A clock that advances only in `wait`, and runs an action at each one."""

    def __init__(self, meanwhile=lambda now: None):
        self.now, self.meanwhile = 0.0, meanwhile

    def clock(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        self.meanwhile(self.now)


def own(folder, meanwhile=lambda now: None):
    time = Time(meanwhile)
    ownership = FolderOwnership(folder, time.clock, time.wait)
    ownership.waited = time.now
    return ownership


def recorded(folder):
    return Owner(**json.loads((folder / OWNER_FILE).read_text()))


def left_by(folder, **changes):
    """The file that an owner leaves if it never releases the folder."""
    ownership = own(folder)
    text = json.dumps(dataclasses.asdict(dataclasses.replace(recorded(folder), **changes)))
    ownership.release()
    (folder / OWNER_FILE).write_text(text)


def inode(folder):
    """The file's inode does not change where it is written to in place."""
    (folder / OWNER_FILE).touch()
    return (folder / OWNER_FILE).stat().st_ino


ELSEWHERE = {"machine": "another boot pid:[1]", "host": "node7", "process": 12}


def test_file_names_host_process_and_time(tmp_path):
    ownership = own(tmp_path)
    written = recorded(tmp_path)
    assert (
        written.process == os.getpid()
        and written.host
        and written.since.endswith("UTC")
        and written.machine
        and written.born
    )
    ownership.release()
    assert not (tmp_path / OWNER_FILE).exists()
    ownership.release()


def test_second_owner_in_the_same_thread_is_refused(tmp_path):
    ownership = own(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        own(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path} is in use by this same process ({recorded(tmp_path)}): a run that this thread "
        "started has not ended; this call is "
        "inside it, as in a callback, or it was not closed.\n"
        "    fix: use another folder for this run, or call it after the first has returned."
    )
    ownership.check()
    ownership.release()
    own(tmp_path).release()


@contextlib.contextmanager
def thread_that_owns(folder):
    """A thread that owns the folder until the block ends."""
    began, end, ownership = threading.Event(), threading.Event(), []

    def run():
        ownership.append(own(folder))
        began.set()
        end.wait(60)

    thread = threading.Thread(target=run, name="trainer-1")
    thread.start()
    try:
        assert began.wait(60)
        yield ownership[0]
    finally:
        end.set()
        thread.join(60)


def test_error_for_second_owner_names_the_thread(tmp_path):
    with thread_that_owns(tmp_path) as ownership:
        with pytest.raises(CheckpointError) as raised:
            own(tmp_path)
        assert str(raised.value) == (
            f"{tmp_path} is in use by this same process ({recorded(tmp_path)}): a run in its "
            'thread "trainer-1" has not ended.\n'
            "    fix: use another folder, or resume=True after that run has returned."
        )
        ownership.check()
        ownership.release()
        own(tmp_path).release()


def test_owner_of_a_thread_that_has_ended_is_replaced(tmp_path):
    with thread_that_owns(tmp_path) as before:
        pass
    ownership = own(tmp_path)
    assert ownership.waited == 0
    with pytest.raises(CheckpointError, match="no longer belongs to this run"):
        before.check()
    before.release()
    ownership.check()
    ownership.release()


def test_unheld_owner_of_this_process_is_replaced(tmp_path):
    (tmp_path / OWNER_FILE).touch()
    ownership = own(tmp_path)
    text = (tmp_path / OWNER_FILE).read_text()
    ownership.release()
    (tmp_path / OWNER_FILE).touch()
    (tmp_path / OWNER_FILE).write_text(json.dumps(json.loads(text) | {"file": inode(tmp_path)}))
    ownership = own(tmp_path)
    assert ownership.waited == 0
    ownership.release()


def test_owner_that_was_killed_is_replaced_at_once(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        born = owner._start_time(process.pid)
        left_by(tmp_path, process=process.pid, born=born)
        with pytest.raises(
            CheckpointError, match=f"belongs to another run: process {process.pid} on"
        ):
            left_by_file = json.loads((tmp_path / OWNER_FILE).read_text()) | {
                "file": inode(tmp_path)
            }
            (tmp_path / OWNER_FILE).write_text(json.dumps(left_by_file))
            own(tmp_path)
        process.kill()
        process.wait(timeout=30)
    ownership = own(tmp_path)
    assert ownership.waited == 0
    ownership.release()


@pytest.mark.parametrize(
    ("since", "is_new"),
    [(None, True), ("2026-01-01 00:00:00 UTC", False), ("at some time", False)],
)
def test_owner_that_has_just_begun_may_be_of_the_same_job(tmp_path, since, is_new):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        changes = {} if since is None else {"since": since}
        left_by(tmp_path, process=process.pid, born=owner._start_time(process.pid), **changes)
        text = json.loads((tmp_path / OWNER_FILE).read_text()) | {"file": inode(tmp_path)}
        (tmp_path / OWNER_FILE).write_text(json.dumps(text))
        with pytest.raises(CheckpointError, match="belongs to another run") as caught:
            own(tmp_path)
        process.kill()
        process.wait(timeout=30)
    assert ("its launcher was not recognised" in caught.value.fix) is is_new


def test_another_process_of_the_same_number_is_no_owner(tmp_path):
    (tmp_path / OWNER_FILE).touch()
    left_by(tmp_path, born="1")
    ownership = own(tmp_path)
    assert ownership.waited == 0
    ownership.release()


def test_copy_of_a_folder_in_use_has_no_owner(tmp_path):
    (tmp_path / "run").mkdir()
    ownership = own(tmp_path / "run")
    copy = own(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    assert copy.waited == 0
    ownership.check()
    copy.release()
    ownership.release()


def test_owner_elsewhere_is_refused_at_its_next_heartbeat(tmp_path):
    left_by(tmp_path, **ELSEWHERE)

    def beats(now):
        text = json.loads((tmp_path / OWNER_FILE).read_text())
        if now >= 3 * HEARTBEAT_SECONDS:
            (tmp_path / OWNER_FILE).write_text(json.dumps(text | {"beat": 1}))

    with pytest.raises(CheckpointError, match="process 12 on node7"):
        own(tmp_path, beats)
    assert recorded(tmp_path).process == 12


def test_owner_elsewhere_without_heartbeat_is_replaced(tmp_path, caplog):
    left_by(tmp_path, **ELSEWHERE)
    with caplog.at_level(logging.WARNING, logger="spmd"):
        ownership = own(tmp_path)
    assert (
        TAKEOVER_SECONDS <= ownership.waited <= TAKEOVER_SECONDS + HEARTBEAT_SECONDS
        and recorded(tmp_path).process == os.getpid()
    )
    assert "belonged to process 12 on node7" in caplog.text
    ownership.release()


def test_remote_owner_is_replaced_once_it_releases(tmp_path):
    left_by(tmp_path, **ELSEWHERE)
    ownership = own(
        tmp_path,
        lambda now: (
            (tmp_path / OWNER_FILE).unlink(missing_ok=True) if now == HEARTBEAT_SECONDS else None
        ),
    )
    assert ownership.waited == HEARTBEAT_SECONDS
    ownership.release()


def test_of_two_who_wait_one_takes_over(tmp_path):
    """The second finds another text at the end of its wait, not the one that it has watched."""
    left_by(tmp_path, **ELSEWHERE)
    first = []

    def other(now):
        if now == TAKEOVER_SECONDS:
            first.append(own(tmp_path))

    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        own(tmp_path, other)
    first[0].check()
    first[0].release()


def test_owner_that_slept_through_a_takeover_finds_it(tmp_path):
    ownership = own(tmp_path)
    text = json.dumps(
        dataclasses.asdict(dataclasses.replace(recorded(tmp_path), token="another", **ELSEWHERE))
    )
    (tmp_path / OWNER_FILE).write_text(text)
    ownership.beat()
    with pytest.raises(
        CheckpointError, match="no longer belongs to this run, but to process 12 on node7"
    ):
        ownership.check()
    ownership.release()
    assert (tmp_path / OWNER_FILE).read_text() == text


def test_heartbeat_counts_up_in_place(tmp_path):
    ownership = own(tmp_path)
    before = (tmp_path / OWNER_FILE).stat().st_ino
    ownership.beat()
    ownership.beat()
    assert recorded(tmp_path).beat == 2 and (tmp_path / OWNER_FILE).stat().st_ino == before
    ownership.check()
    ownership.release()


class Killed(BaseException):
    """Nothing handles it, as if the process were gone."""


def write_in_part(monkeypatch, count):
    """From here on, the system takes `count` bytes, and then the process is killed."""
    room, write = [count], os.pwrite

    def part(file, content, offset):
        taken = write(file, bytes(content)[: room[0]], offset)
        room[0] -= taken
        if taken < len(content):
            raise Killed
        return taken

    monkeypatch.setattr(os, "pwrite", part)


@pytest.mark.parametrize("before", ["no file", "a dead owner's file"])
def test_start_that_was_killed_while_it_wrote_is_replaced_at_once(before, tmp_path, monkeypatch):
    (tmp_path / OWNER_FILE).touch()
    ownership = own(tmp_path)
    length = (tmp_path / OWNER_FILE).stat().st_size
    text = json.dumps(
        json.loads((tmp_path / OWNER_FILE).read_text()) | {"host": "another.host.with.a.long.name"}
    ).encode()
    ownership.release()
    for count in range(length):
        (tmp_path / OWNER_FILE).write_bytes(b"" if before == "no file" else text)
        with monkeypatch.context() as patch:
            write_in_part(patch, count)
            with pytest.raises(Killed):
                own(tmp_path)
        after = own(tmp_path)
        assert after.waited == 0, f"after {count} of {length} bytes"
        after.release()


def test_heartbeat_that_was_cut_off_leaves_the_owner(tmp_path, monkeypatch):
    """Its number gets another digit there."""
    ownership = own(tmp_path)
    for _ in range(9):
        ownership.beat()
    text = (tmp_path / OWNER_FILE).read_bytes()
    for count in range(len(text) + 1):
        (tmp_path / OWNER_FILE).write_bytes(text)
        ownership._beats = 9
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            write_in_part(patch, count)
            ownership.beat()
        assert recorded(tmp_path).token == ownership._me.token, f"after {count} bytes"
        ownership.check()
    ownership.release()


def fail_to_read(monkeypatch, times):
    """The disk fails the next `times` times that the file is opened for reading."""
    failures, read = [OSError(errno.EIO, "Input/output error")] * times, owner.open_regular

    def fails(path):
        if failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(owner, "open_regular", fails)
    return failures


def test_file_that_cannot_be_read_for_a_moment_is_read_again(tmp_path, monkeypatch):
    ownership = own(tmp_path)
    failures = fail_to_read(monkeypatch, 4)
    ownership.check()
    assert not failures
    ownership.release()


def test_file_that_cannot_be_read_is_what_the_error_names(tmp_path, monkeypatch):
    ownership = own(tmp_path)
    fail_to_read(monkeypatch, 100)
    with pytest.raises(CheckpointError) as raised:
        ownership.check()
    assert str(raised.value) == (
        f"{tmp_path}/{OWNER_FILE}, which says whose the folder is, cannot be read in 5 attempts: "
        "Input/output error.\n"
        "    fix: see whether the disk of that folder works."
    )
    ownership.release()
    assert not (tmp_path / OWNER_FILE).exists()


def test_first_read_of_the_file_is_tried_again(tmp_path, monkeypatch):
    read, failures = os.pread, [OSError(errno.EIO, "Input/output error")]
    monkeypatch.setattr(
        os,
        "pread",
        lambda *given: read(*given) if not failures else (_ for _ in ()).throw(failures.pop()),
    )
    ownership = own(tmp_path)
    assert not failures and recorded(tmp_path).process == os.getpid()
    ownership.release()


@pytest.mark.parametrize("text", [b"x", b"{}", b"[" * 3000, b'{"host": 1}', b"\xff\0"])
def test_file_that_cannot_be_read_is_watched_like_one_of_another_machine(text, tmp_path):
    (tmp_path / OWNER_FILE).write_bytes(text)
    ownership = own(tmp_path)
    assert ownership.waited >= TAKEOVER_SECONDS
    ownership.release()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_file_that_is_none_is_an_error(make, tmp_path):
    make(tmp_path / OWNER_FILE)
    with pytest.raises(
        CheckpointError, match=rf"the file {tmp_path}/{OWNER_FILE} cannot be written: "
    ):
        own(tmp_path)


def test_process_that_exits_at_once_releases_its_folders(tmp_path, monkeypatch):
    """As one does because another one failed: the run may start again on another machine."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    ownership = FolderOwnership(tmp_path)
    assert (tmp_path / OWNER_FILE).exists()
    coordination.exit_now(42)
    assert codes == [42] and not (tmp_path / OWNER_FILE).exists()
    ownership.release()
