"""The folder of checkpoints in memory: private, bounded, and removed when no run needs it."""

import fcntl
import json
import os
import shutil
import time
from collections import namedtuple

import pytest

from spmd.errors import OptionError
from spmd.run import memory_folder
from spmd.run.memory_folder import (
    MemoryFolder,
    is_memory_folder,
    memory_base,
    remove_unused,
    run_id,
)


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with an id."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def opened(tmp_path, run, *, keep=True):
    return MemoryFolder(tmp_path / "base", run, run_id(run, keep=keep))


def test_base(monkeypatch, tmp_path):
    monkeypatch.delenv("SPMD_MEMORY_FOLDER", raising=False)
    monkeypatch.setattr(memory_folder, "DEFAULT_BASE", tmp_path)
    assert memory_base(None) == tmp_path and memory_base("/a/b").as_posix() == "/a/b"
    monkeypatch.setenv("SPMD_MEMORY_FOLDER", "/c")
    assert memory_base(None).as_posix() == "/c"
    monkeypatch.delenv("SPMD_MEMORY_FOLDER")
    monkeypatch.setattr(memory_folder, "DEFAULT_BASE", tmp_path / "absent")
    with pytest.raises(
        OptionError, match=r"memory_every needs .*/absent, which this machine does not have"
    ):
        memory_base(None)


def test_id_is_kept_by_a_run_that_resumes(run):
    first = run_id(run, keep=True)
    assert run_id(run, keep=True) == first != run_id(run, keep=False)
    (run / "checkpoints" / memory_folder.ID_FILE).write_text("../../etc")
    assert len(run_id(run, keep=True)) == 16


def test_folder_is_private(tmp_path, run):
    folder = opened(tmp_path, run)
    for path in (folder.path, folder.path.parent):
        assert path.stat().st_mode & 0o077 == 0
    assert is_memory_folder(folder.path)


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_what_others_could_have_made_is_refused(tmp_path, run, what):
    user = tmp_path / "base" / f"spmd-{os.geteuid()}"
    user.parent.mkdir()
    if what == "open to others":
        user.mkdir()
        user.chmod(0o755)
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        user.symlink_to(tmp_path / "elsewhere")
    else:
        user.touch(mode=0o600)
    with pytest.raises(OSError, match="is not a folder that only this user may use"):
        opened(tmp_path, run)


def test_pieces_and_keep_only(tmp_path, run):
    folder = opened(tmp_path, run)
    for name in ("20.0", "20.1.3", "24.0", "24.1.77.part", "28.0", "x.0", "20"):
        (folder.path / name).touch()
    assert sorted(folder.pieces().values()) == [(20, 0), (20, 1), (24, 0), (28, 0)]
    folder.keep_only({20, 28})
    assert {path.name for path in folder.path.iterdir()} == {
        "20.0",
        "20.1.3",
        "28.0",
        "x.0",
        "20",
        "run.json",
        "lock",
    }


def test_room_is_that_of_the_file_system_and_of_the_memory(tmp_path, run, monkeypatch):
    folder = opened(tmp_path, run)
    (folder.path / "20.0").write_bytes(bytes(1000))
    (folder.path / "24.0").write_bytes(bytes(5000))
    monkeypatch.setattr(
        os, "statvfs", lambda path: namedtuple("Info", "f_bavail f_frsize")(10, 1000)
    )
    monkeypatch.setattr(memory_folder, "in_memory", lambda path: False)
    assert folder.lacks_room(10_000, {24}) == "", "11000 bytes with step 20, which will be removed"
    why = f"10.7 KiB are free in its file system ({folder.path}), 1.1 times 9.9 KiB are needed"
    assert folder.lacks_room(10_100, {24}) == why
    monkeypatch.setattr(memory_folder, "in_memory", lambda path: True)
    monkeypatch.setattr(memory_folder, "available_memory", lambda: 0)
    assert "1000 B are free in this host's memory" in folder.lacks_room(1000, {24})


def test_available_memory_is_known_here():
    assert 0 < memory_folder.available_memory() < 1 << 50
    assert memory_folder.in_memory(memory_folder.DEFAULT_BASE) and not memory_folder.in_memory(
        memory_folder.Path("/proc")
    )


def test_used_folder_is_not_removed(tmp_path, run):
    folder = opened(tmp_path, run)
    assert not remove_unused(folder.path) and folder.path.exists()
    folder.close()
    assert remove_unused(folder.path) and not folder.path.exists()


def test_folder_that_is_removed_before_it_is_locked_is_created_again(tmp_path, run, monkeypatch):
    flock, before = memory_folder._flock, opened(tmp_path, run)
    before.close()

    def remove_first(descriptor, *, exclusive):
        monkeypatch.setattr(memory_folder, "_flock", flock)
        assert remove_unused(before.path)
        flock(descriptor, exclusive=exclusive)

    monkeypatch.setattr(memory_folder, "_flock", remove_first)
    folder = opened(tmp_path, run)
    assert (folder.path / memory_folder.RUN_FILE).exists() and not remove_unused(folder.path)
    folder.close()


def test_stale_folders_are_removed_by_the_next_run(tmp_path, run):
    """Of another run in the same folder, of a run whose folder is gone, and an old one. One in use
    stays, and so do a recent one, and that of a run whose folder may only be unmounted here.
    """
    replaced = opened(tmp_path, run)
    replaced.close()
    names = {name: tmp_path / name for name in ("gone", "old", "recent", "used", "mount/unmounted")}
    folders = {}
    for name, path in names.items():
        (path / "checkpoints").mkdir(parents=True)
        folders[name] = opened(tmp_path, path)
    for name in names.keys() - {"used"}:
        folders[name].close()
    for path in (names["gone"], names["used"], tmp_path / "mount"):
        shutil.rmtree(path)
    old = time.time() - memory_folder.MAX_AGE - 60
    for path in folders["old"].path.iterdir():
        os.utime(path, (old, old))
    now = opened(tmp_path, run, keep=False)
    assert (
        not replaced.path.exists()
        and not folders["gone"].path.exists()
        and not folders["old"].path.exists()
    )
    assert folders["recent"].path.exists() and folders["used"].path.exists() and now.path.exists()
    assert folders["mount/unmounted"].path.exists()


VERSIONS = {
    2: ("0::{path}\n", ".", ("memory.max", "memory.current", "memory.stat"), ""),
    1: (
        "5:devices:/\n4:cpu,memory:{path}\n0::/\n",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
        "total_",
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", ["/", "/job_7/step_0", "/kubepods/pod8/seen/by/the/host/only"])
def test_memory_left_is_that_of_the_cgroup_without_the_cache_of_files(tmp_path, version, path):
    """The limit is that of the job above the process, as under SLURM, or of a container, which sees
    its own group as the root.
    """
    text, folder, names, prefix = VERSIONS[version]
    limited, inside = (
        tmp_path / folder / ("job_7" if "job" in path else "."),
        tmp_path / folder / "job_7" / "step_0",
    )
    inside.mkdir(parents=True)
    for group, limit in [(inside, "max" if version == 2 else 1 << 63), (limited, 1000)]:
        counted = f"anon 300\n{prefix}inactive_file 400\n{prefix}active_file 150"
        for name, content in zip(names, (limit, 900, counted), strict=True):
            (group / name).write_text(f"{content}\n")
    assert (
        min(memory_folder._left_in_cgroups(text.format(path=path), tmp_path))
        == 1000 - 900 + 400 + 150
    )


def test_memory_left_is_unknown_without_cgroups(tmp_path):
    assert (
        memory_folder._left_in_cgroups("0::/a\n", tmp_path) == []
        and memory_folder._left_in_cgroups("", tmp_path) == []
    )


def test_only_folders_of_this_module_are_memory_folders(tmp_path, run):
    folder = opened(tmp_path, run)
    assert not is_memory_folder(tmp_path) and not is_memory_folder(folder.path.parent)
    (folder.path / "run.json").unlink()
    assert not is_memory_folder(folder.path)


def test_host_is_that_of_the_storage(tmp_path, run):
    first, second = opened(tmp_path, run), opened(tmp_path, run)
    assert (
        first.host
        == second.host
        != MemoryFolder(tmp_path / "other", run, run_id(run, keep=True)).host
    )


def test_remove(tmp_path, run):
    folder = opened(tmp_path, run)
    (folder.path / "20.0").touch()
    folder.remove()
    assert not folder.path.parent.exists()
    folder.close()


def test_lock_is_shared(tmp_path, run):
    folder, another = opened(tmp_path, run), opened(tmp_path, run)
    record = json.loads((folder.path / "run.json").read_text())
    assert record["folder"] == str(run)
    folder.close()
    with open(another.path / "lock", "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
