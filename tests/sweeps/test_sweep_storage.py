"""What a sweep keeps on disk: whatever is changed in it is noticed, reported, and done again."""

import json
import logging
import random
import subprocess
import sys

import numpy as np
import pytest
from swept import sweep

import spmd
from spmd.errors import CheckpointError
from spmd.run import owner
from spmd.run.owner import OWNER_FILE
from spmd.sweeps.storage import SweepStore, owned

HISTORY = np.random.default_rng(0).normal(size=(2, 3, 2, 1)).astype(np.float32)
EVALUATIONS = [{"loss": 0.125, "accuracy": 0.9375}, {"loss": float("nan"), "accuracy": 0.5}]


def finished(folder):
    """What is found of a chunk at its end, as text."""
    stored = SweepStore(folder, {"trials": "2"}, resume=True).finished(0, 0)
    return None if stored is None else (stored[0].tobytes(), stored[0].shape, str(stored[1]))


@pytest.mark.parametrize("name", ["done.json", "end.npy"])
def test_a_changed_byte_of_a_finished_chunk_is_noticed(tmp_path, caplog, name):
    """Every digit, a bit of every third byte, ends that are missing."""
    storage = SweepStore(tmp_path, {"trials": "2"}, resume=False)
    storage.place(0, 0).mkdir(parents=True)
    storage.finish(0, 0, HISTORY, EVALUATIONS)
    file, rng = storage.place(0, 0) / name, random.Random(0)
    raw, sound = file.read_bytes(), finished(tmp_path)
    assert sound == (HISTORY.tobytes(), HISTORY.shape, str(EVALUATIONS))
    others = [
        raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
        for at in range(0, len(raw), 3)
    ]
    others += [
        raw[:at] + b"%d" % ((int(raw[at : at + 1]) + 1) % 10) + raw[at + 1 :]
        for at in range(len(raw))
        if raw[at] in b"0123456789"
    ]
    others += [raw[:length] for length in (0, 1, len(raw) // 2, len(raw) - 1)] + [raw * 2]
    for other in others:
        file.write_bytes(other)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "spmd"):
            assert finished(tmp_path) is None, other
        assert f"{file} is damaged, and its chunk is trained again" in caplog.text
    file.unlink()
    assert finished(tmp_path) is None


def test_a_changed_byte_of_what_a_sweep_was_is_refused(tmp_path):
    SweepStore(tmp_path, {"trials": "2", "score": "loss min"}, resume=False)
    file = tmp_path / "sweep.json"
    raw = file.read_bytes()
    for at in range(0, len(raw), 3):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(
            CheckpointError, match=r"sweep\.json is damaged, so what the sweep was is not known"
        ):
            SweepStore(tmp_path, {"trials": "2", "score": "loss min"}, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_second_sweep_on_a_folder_is_refused_and_writes_nothing(resume, tmp_path):
    """As it is where another process has begun one: the file names that process, which lives."""
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        owned(tmp_path),
    ):
        file, other = (
            tmp_path / OWNER_FILE,
            {"process": process.pid, "born": owner._start_time(process.pid), "token": "another"},
        )
        file.write_text(json.dumps(json.loads(file.read_text()) | other))
        with pytest.raises(
            CheckpointError, match=rf"belongs to another run: process {process.pid} on "
        ):
            sweep(trials=2, checkpoint=tmp_path, resume=resume)
        assert [path.name for path in tmp_path.iterdir()] == [OWNER_FILE]
        process.kill()


@pytest.mark.system
def test_sweep_releases_its_folder_however_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(
        SweepStore, "finish", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        sweep(trials=2, checkpoint=tmp_path)
    assert not (tmp_path / OWNER_FILE).exists()


def test_sweep_that_was_taken_over_writes_no_result(tmp_path):
    with owned(tmp_path) as ownership:
        storage = SweepStore(tmp_path, {"trials": "2"}, resume=False, owner=ownership)
        storage.place(0, 0).mkdir(parents=True)
        file = tmp_path / OWNER_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | {"token": "another"}))
        with pytest.raises(CheckpointError, match="no longer belongs to this run"):
            storage.finish(0, 0, HISTORY, EVALUATIONS)
        assert not list(storage.place(0, 0).iterdir())


def edited(file):
    """One digit is another."""
    raw = file.read_bytes()
    at = next(
        at
        for at in range(len(raw) - 1, 0, -1)
        if raw[at - 1 : at + 1].isdigit() and at < len(raw) - 80
    )
    file.write_bytes(raw[:at] + b"%d" % ((raw[at] - ord("0") + 1) % 10) + raw[at + 1 :])


@pytest.mark.system
@pytest.mark.parametrize("rung", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_finished_sweep_with_a_changed_digit_ends_in_the_same_table(tmp_path, caplog, rung):
    """In a rung whose trials begin with states that the end has cleared away, too."""
    more = {
        "search": spmd.Halving(factor=2, rungs=2),
        "trials": 4,
        "checkpoint": tmp_path,
        "epochs": 2,
    }
    complete = sweep(**more).to_csv()
    edited(tmp_path / "chunks" / f"{rung}-0" / "done.json")
    with caplog.at_level(logging.WARNING, "spmd"):
        assert sweep(**more, resume=True).to_csv() == complete
    assert "done.json is damaged" in caplog.text


@pytest.mark.system
def test_measurements_that_are_damaged_are_made_again(tmp_path, caplog, monkeypatch):
    more = {"trials": 2, "checkpoint": tmp_path, "epochs": 2}
    monkeypatch.setattr(
        SweepStore, "finish", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        sweep(**more)
    monkeypatch.undo()
    (history,) = (tmp_path / "chunks" / "0-0").glob("history-6.npy")
    history.write_bytes(history.read_bytes().replace(b"NUMPY", b"NUMPZ"))
    with caplog.at_level(logging.WARNING, "spmd"):
        assert sweep(**more, resume=True).to_csv() == sweep(**{**more, "checkpoint": None}).to_csv()
    assert "history-6.npy is damaged" in caplog.text


def test_new_sweep_may_find_compiled_programs_in_its_folder(tmp_path):
    """Programs are compiled, and kept in the sweep's folder, before the sweep begins."""
    (tmp_path / "programs").mkdir()
    SweepStore(tmp_path, {"trials": "2"}, resume=False)
    assert (tmp_path / "sweep.json").exists()
