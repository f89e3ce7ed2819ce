"""The configuration of a run."""

import dataclasses

import pytest
from small import fit

import spmd
from spmd.errors import OptionError
from spmd.run.config import RunConfig


def test_run_config_is_frozen_and_prints_every_field():
    config = RunConfig(steps=7, checkpoint=spmd.Checkpoint("runs/a", every=5), log_every=3)
    for field in dataclasses.fields(config):
        assert f"{field.name}={getattr(config, field.name)!r}" in repr(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 8


def test_run_config_without_a_length_is_one_epoch():
    assert (RunConfig().epochs, RunConfig(steps=3).epochs, RunConfig(epochs=2).epochs) == (
        1,
        None,
        2,
    )


def test_run_config_counts_steps_until_each_interval():
    every_4 = spmd.callbacks.StopAt(step=9)
    every_4.every, every_4.exact = 4, True
    checkpoint = spmd.Checkpoint("runs/a", every=6, memory_every=5)
    config = RunConfig(steps=20, eval_every=10, checkpoint=checkpoint, callbacks=[every_4])
    assert config.intervals == [10, 6, 5, 4]
    assert config.steps_left(13) == [7, 5, 2, 3]
    assert RunConfig(steps=20).intervals == []


def test_run_config_evaluates_where_a_checkpoint_is_ranked():
    ranked = RunConfig(checkpoint=spmd.Checkpoint("runs/a", every=6, best="eval_loss"))
    plain = RunConfig(checkpoint=spmd.Checkpoint("runs/a", every=6))
    assert [config.evaluates_after(6) for config in (ranked, plain)] == [True, False]


def test_another_way_to_resume_is_refused_before_a_folder_is_made(tmp_path):
    assert RunConfig(resume="changed_data").resumes and not RunConfig().resumes
    with pytest.raises(OptionError, match="resume='yes'"):
        fit(steps=1, checkpoint=tmp_path / "run", resume="yes")
    assert not list(tmp_path.iterdir())
