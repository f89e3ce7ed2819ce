"""Folders of checkpoints and exports under attack: each either loads as it was, or raises an error
of ours that names it. Nothing hangs.
"""

import logging
import shutil

import jax
import numpy as np
import optax
import pytest
from attacks import forgeries, harms, outcomes
from small import fit, linear, numbers, same

import spmd
from spmd.errors import CheckpointError, SpmdError
from spmd.run import manifest
from spmd.run.pictures import write_picture

# a restore that fails leaves tasks in Orbax's event loop, which are never awaited
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

JSON = (
    "meta/metadata",
    "_CHECKPOINT_METADATA",
    "metrics/metrics",
    "manifest.json",
    "state/_METADATA",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one checkpoint, of step 4, judged by a metric."""
    folder = tmp_path_factory.mktemp("run")
    config = spmd.Checkpoint(folder, keep=1, best="eval_loss")
    return folder, jax.device_get(fit(steps=4, checkpoint=config, eval_data=numbers(8)).state)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    fit(steps=1).export(folder)
    return folder


@pytest.fixture
def trainer():
    return spmd.Trainer(linear(), loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.05))


def check(results, fits, named):
    """Both outcomes are among them, and no other."""
    wrong = {
        name: repr(came)[:300]
        for name, came in results.items()
        if not (isinstance(came, SpmdError) and str(named) in str(came))
        and (isinstance(came, Exception) or not fits(came))
    }
    assert results and not wrong, "\n".join(f"{name}: {came}" for name, came in wrong.items())


def attack_checkpoint(run, trainer, place, attacks, step="latest"):
    shutil.copytree(run[0], place, ignore=shutil.ignore_patterns("checkpoints"))
    results = outcomes(
        run[0] / "checkpoints" / "4",
        attacks,
        place / "checkpoints" / "4",
        lambda copy: trainer.restore(place, step=step),
    )
    check(results, lambda state: same(state, run[1]), place)
    return results


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_restore_after_any_harm_to_a_file(stride, run, trainer, tmp_path):
    results = attack_checkpoint(
        run, trainer, tmp_path / "copy", list(harms(run[0] / "checkpoints" / "4"))[::stride]
    )
    refused = {name: isinstance(came, CheckpointError) for name, came in results.items()}
    marks = {
        name
        for name in refused
        if name.partition(":")[0].rpartition("/")[2] in manifest.NOT_LISTED[:2]
    }
    listed = [refused[name] for name in refused.keys() - marks]
    assert len(results) > 100 // stride and sum(listed) > 0.8 * len(listed)
    assert not any(refused[name] for name in marks), "marks of Orbax are not needed"


@pytest.mark.parametrize("stride", [211, pytest.param(11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", ["latest", "best"])
def test_restore_after_forged_metadata(stride, step, run, trainer, tmp_path):
    folder = run[0] / "checkpoints" / "4"
    attacks = [attack for name in JSON for attack in forgeries(folder, name)]
    attack_checkpoint(run, trainer, tmp_path / "copy", attacks[::stride], step)


@pytest.mark.parametrize("stride", [97, pytest.param(7, marks=pytest.mark.slow)])
def test_resume_after_forged_metadata(stride, run, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "spmd")
    place, attacks = (
        tmp_path / "copy",
        list(forgeries(run[0] / "checkpoints" / "4", "meta/metadata"))[::stride],
    )

    def resumed(copy):
        for more in ("9", "8"):
            shutil.rmtree(place / "checkpoints" / more, ignore_errors=True)
        return fit(steps=4, checkpoint=place, resume=True).state

    results = outcomes(run[0] / "checkpoints" / "4", attacks, place / "checkpoints" / "4", resumed)
    check(results, lambda state: same(state, run[1]), place)


def test_resume_of_a_step_in_a_folder_of_another_number(run, tmp_path):
    place = shutil.copytree(run[0], tmp_path / "copy")
    (place / "checkpoints" / "4").rename(place / "checkpoints" / "40")
    with pytest.raises(CheckpointError, match=r"step 40\n +meta/metadata is of step 4\n"):
        fit(steps=8, checkpoint=place, resume=True)


@pytest.mark.parametrize("name", ["04", "-1", "\N{ARABIC-INDIC DIGIT NINE}", "1e3"])
def test_folders_that_are_no_steps_are_left_alone(name, run, tmp_path):
    place = shutil.copytree(run[0], tmp_path / "copy")
    (place / "checkpoints" / name).mkdir()
    assert int(fit(steps=4, checkpoint=place, resume=True).state.step) == 4
    assert (place / "checkpoints" / name).is_dir()


WRITTEN = (
    "owner.json",
    "layout.toml",
    "metrics.jsonl",
    "history.bin",
    "goodput.json",
    ".goodput.json",
    "goodput.html",
    "profile.html",
)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("exists", [True, False], ids=["of a file", "to nowhere"])
@pytest.mark.parametrize("name", WRITTEN)
def test_run_does_not_write_through_links(name, exists, tmp_path):
    """A folder that comes from elsewhere may have a link to any file of the user in the place of
    one that a run writes.
    """
    folder, target = tmp_path / "run", tmp_path / "file of the user"
    folder.mkdir()
    if exists:
        target.write_text("notes")
    (folder / name).symlink_to(target)
    with pytest.raises(CheckpointError) as raised:
        fit(steps=3, checkpoint=folder, profile="1:2" if name == "profile.html" else None)
    assert str(raised.value) == (
        f"{folder / name} is a link to {target}: a run does not write through links.\n    fix: "
        "remove the link."
    )
    assert target.exists() == exists and (not exists or target.read_text() == "notes")
    (folder / name).unlink()
    assert int(fit(steps=3, checkpoint=folder).state.step) == 3


def test_picture_is_not_written_through_a_link(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a-00000002.png").symlink_to(tmp_path / "file of the user")
    with pytest.raises(
        CheckpointError,
        match=r"a-00000002\.png is a link to .*: a run does not write through links",
    ):
        write_picture(tmp_path, "a", 2, np.zeros((2, 2), np.uint8))
    assert not (tmp_path / "file of the user").exists()


def attack_export(folder, place, attacks):
    x = numbers(8)["x"]
    expected = spmd.load_exported(folder).predict(x)
    results = outcomes(folder, attacks, place, lambda copy: spmd.load_exported(copy).predict(x))
    check(results, lambda came: np.array_equal(came, expected), place)


def test_export_after_any_harm_to_a_file(exported, tmp_path):
    attack_export(exported, tmp_path / "copy", harms(exported))


@pytest.mark.parametrize("stride", [53, pytest.param(1, marks=pytest.mark.slow)])
def test_export_after_forged_metadata(stride, exported, tmp_path):
    attacks = [
        attack for name in ("model.json", "manifest.json") for attack in forgeries(exported, name)
    ]
    attack_export(exported, tmp_path / "copy", attacks[::stride])
