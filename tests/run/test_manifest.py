"""Damaged checkpoints are detected, moved aside and reported, and the run resumes from the newest
undamaged one.
"""

import json
import logging
import shutil

import numpy as np
import optax
import pytest

import spmd
from spmd.errors import CheckpointError
from spmd.run.checkpoint import CheckpointStore
from spmd.run.manifest import MANIFEST_FILE, find_damage, manifest_files, write_manifest

MODEL = spmd.FunctionalModel(
    lambda key: {"w": np.ones((64, 8), np.float32)}, lambda params, x: x @ params["w"]
)
RANDOM = np.random.default_rng(0)
DATA = {
    "x": RANDOM.normal(size=(64, 64)).astype("float32"),
    "y": RANDOM.normal(size=(64, 8)).astype("float32"),
}


def fit(folder, steps=6, **options):
    return spmd.fit(
        MODEL,
        DATA,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.adam(0.01),
        batch_size=16,
        steps=steps,
        checkpoint=spmd.Checkpoint(folder, every=2, keep=3),
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 6 steps with checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run")
    fit(folder)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "run")


def newest(folder):
    return folder / "checkpoints" / "6"


def test_a_checkpoint_is_as_its_manifest_says(saved):
    for step in (2, 4, 6):
        folder = saved / "checkpoints" / str(step)
        assert find_damage(folder) is None and len(manifest_files(folder)) > 10
        assert set(json.loads((folder / MANIFEST_FILE).read_text())["files"]) == set(
            manifest_files(folder)
        )
        assert all(find_damage(folder, part, 3) is None for part in range(3))


def flipped(path, random):
    data = bytearray(path.read_bytes())
    at = int(random.integers(8 * len(data)))
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def cut_off(path, random):
    data = path.read_bytes()
    path.write_bytes(data[: int(random.integers(len(data)))])


def overwritten(path, random):
    data = path.read_bytes()
    other = random.bytes(len(data))
    path.write_bytes(other if other != data else b"\0" * len(data) + b"x")


HARM = {
    "flipped": flipped,
    "cut off": cut_off,
    "deleted": lambda path, random: path.unlink(),
    "overwritten": overwritten,
}


@pytest.mark.system
def test_all_of_200_damaged_files_are_detected(run):
    """Bits flipped, files cut off, deleted or overwritten, each in a fresh copy; the manifest
    itself is one of the files.
    """
    random, detected = np.random.default_rng(7), 0
    folder = newest(run)
    names = [*manifest_files(folder), MANIFEST_FILE]
    for number in range(200):
        kind = list(HARM)[number % len(HARM)]
        path = folder / names[int(random.integers(len(names)))]
        before = path.read_bytes()
        if not before and kind != "deleted":
            kind, before = "deleted", b""
        HARM[kind](path, random)
        damage = find_damage(folder)
        # white space of JSON, or its case, that says the same
        if damage is None and path.name == MANIFEST_FILE:
            assert json.loads(path.read_bytes())["files"] == json.loads(before)["files"]
            damage = "says the same"
        assert damage is not None, f"{kind}: {path}"
        detected += 1
        path.write_bytes(before)
        assert find_damage(folder) is None
    assert detected == 200


@pytest.mark.sampled(quick=8)
@pytest.mark.parametrize("kind", [*HARM, "empty folder", "no manifest", "a file more", "a link"])
def test_resume_skips_damaged_step(run, saved, kind, caplog):
    folder = newest(run)
    data = max(
        (folder / name for name in manifest_files(folder) if name.startswith("state/")),
        key=lambda path: path.stat().st_size,
    )
    if kind in HARM:
        HARM[kind](data, np.random.default_rng(3))
    elif kind == "empty folder":
        (run / "checkpoints" / "99").mkdir()
    elif kind == "no manifest":
        (folder / MANIFEST_FILE).unlink()
    elif kind == "a file more":
        (folder / "state" / "more").write_text("x")
    else:
        shutil.move(data, run / "elsewhere")
        data.symlink_to(run / "elsewhere")
    with caplog.at_level(logging.WARNING, logger="spmd"):
        result = fit(run, steps=8, resume=True)
    lines = [
        record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()
    ]
    step = 99 if kind == "empty folder" else 6
    assert (
        len(lines) == 1
        and lines[0].startswith(f"the checkpoint of step {step} is damaged (")
        and str(run / "damaged" / str(step)) in lines[0]
    )
    assert (run / "damaged" / str(step)).is_dir() and int(result.state.step) == 8
    again = fit(shutil.copytree(saved, run.parent / "other"), steps=8, resume=True)
    assert np.array_equal(
        np.asarray(result.state.params["w"]), np.asarray(again.state.params["w"])
    ), "what was lost was trained again"


def test_resume_with_only_damaged_checkpoints_is_refused(run):
    """To lose all steps must be asked for; the fix that the error names works."""
    for step in (2, 4, 6):
        (run / "checkpoints" / str(step) / MANIFEST_FILE).unlink()
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError) as raised:
        fit(run, steps=2, resume=True)
    assert str(raised.value) == (
        f"every checkpoint in {run} is damaged\n3 problems:\n\n"
        "  step 6\n      it has no manifest\n\n  step 4\n      it has no manifest\n\n  step 2\n    "
        "  it has no manifest\n\n"
        f"    fix: use another copy of the folder, or remove {run}/checkpoints to start at step 0."
    )
    assert sorted(run.rglob("*")) == before
    shutil.rmtree(run / "checkpoints")
    assert int(fit(run, steps=2, resume=True).state.step) == 2


def test_restore_of_a_damaged_step_is_refused(run):
    flipped(newest(run) / "meta" / "metadata", np.random.default_rng(0))
    trainer = spmd.Trainer(MODEL, loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.01))
    with pytest.raises(
        CheckpointError,
        match=r"step 6 in \S+ is damaged: meta/metadata is not what was written\.\n    fix: "
        r"another: "
        r"2, 4\.",
    ):
        trainer.restore(run)
    assert int(trainer.restore(run, step=4).step) == 4 and newest(run).is_dir(), (
        "restore moves nothing aside"
    )


def test_format_2_checkpoints_without_manifest_are_read(run):
    """Format 2 had no manifest; what is in them is as before."""
    for step in (2, 4, 6):
        folder = run / "checkpoints" / str(step)
        (folder / MANIFEST_FILE).unlink()
        meta = folder / "meta" / "metadata"
        meta.write_text(meta.read_text().replace('"format": 3', '"format": 2'))
        assert '"format": 2' in meta.read_text()
    assert int(fit(run, steps=8, resume=True).state.step) == 8 and not (run / "damaged").exists()


def test_save_refuses_a_full_disk_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7000))
    with pytest.raises(
        CheckpointError,
        match=r"a checkpoint of 6\.0 KiB does not fit in \S+: 6\.8 KiB are free, 1\.2 times its "
        r"size "
        r"is needed",
    ):
        fit(tmp_path / "full")
    assert CheckpointStore(spmd.Checkpoint(tmp_path / "full")).steps() == []


def test_a_manifest_that_cannot_be_written_is_no_checkpoint(tmp_path, monkeypatch):
    def fails(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spmd.run.checkpoint.write_manifest", fails)
    with pytest.raises(
        CheckpointError, match=r"a checkpoint could not be written to .*No space left on device"
    ):
        fit(tmp_path / "run")
    assert not [
        path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()
    ]


def test_an_empty_folder_can_be_sealed(tmp_path):
    write_manifest(tmp_path)
    assert find_damage(tmp_path) is None
    (tmp_path / "file").write_text("x")
    assert find_damage(tmp_path) == "file is not in its manifest"
