"""Checkpoints of loops that users write: `Trainer.save`, and loops and runs that continue from
them.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from small import Net, host, labelled, same

import spmd
from spmd.errors import CheckpointError, OptionError
from tests.compare import assert_close

OPTIONS = {
    "loss": spmd.losses.cross_entropy,
    "optimizer": optax.adam(1e-2),
    "metrics": {"accuracy": spmd.metrics.accuracy},
}
DATA = labelled(80)
KINDS = {
    "arrays": (DATA, {"batch_size": 32}),
    "list": (
        [
            {name: leaf[first : first + 32] for name, leaf in DATA.items()}
            for first in range(0, 80, 32)
        ],
        {},
    ),
}


@functools.cache
def trainer_on(mesh, layout="data_parallel"):
    return spmd.Trainer(lambda: Net(nnx.Rngs(0)), mesh=mesh, layout=layout, **OPTIONS)


def batch(step):
    return {name: leaf[np.arange(step * 16, step * 16 + 32) % 80] for name, leaf in DATA.items()}


def train(trainer, state, until):
    for step in range(int(state.step), until):
        state, _ = trainer.step(state, batch(step))
    return state


@functools.cache
def undisturbed(layout):
    trainer = trainer_on("data=8", layout)
    return host(train(trainer, trainer.init(), 6))


@pytest.mark.sampled(system=3)
@pytest.mark.parametrize("layout", ["fsdp", "data_parallel", "zero1", "parameter_server"])
def test_saved_loop_continues_bit_for_bit(layout, tmp_path):
    """Saved, consumed by the next step, and read by another trainer."""
    trainer = trainer_on("data=8", layout)
    state = trainer.init()
    for step in range(4):
        state, _ = trainer.step(state, batch(step))
        trainer.save(state, spmd.Checkpoint(tmp_path, keep=1))
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["4"] and not (
        tmp_path / "owner.json"
    ).exists()
    assert same(host(state), trainer.restore(tmp_path))
    other = spmd.Trainer(lambda: Net(nnx.Rngs(1)), mesh="data=8", layout=layout, **OPTIONS)
    assert same(train(other, other.restore(tmp_path), 6), undisturbed(layout)) and not same(
        state, undisturbed(layout)
    )


@pytest.mark.parametrize("name", ["lr[0.1]", "a*", "what?", "back\\slash"])
def test_loop_does_not_save_where_it_could_not_be_read_again(name, tmp_path):
    trainer = trainer_on("data=8")
    with pytest.raises(CheckpointError, match="could not be read again") as raised:
        trainer.save(trainer.init(), tmp_path / name / "run")
    assert f'"{tmp_path / name}"' in raised.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.system
def test_run_that_was_renamed_is_restored_or_refused(tmp_path):
    """Only writing reads a path as a pattern; a backslash is read as a slash in reading, too."""
    trainer = trainer_on("data=8")
    state = trainer.init()
    folder = tmp_path / "run"
    trainer.save(state, folder)
    for name in ("lr[0.1]", "a*", "what?"):
        folder = folder.rename(tmp_path / name)
        assert same(trainer.restore(folder), host(state))
    folder = folder.rename(tmp_path / "back\\slash")
    with pytest.raises(CheckpointError, match="cannot be read") as raised:
        trainer.restore(folder)
    better = re.fullmatch('another name, such as "(.*)" in place of "(.*)".', raised.value.fix)
    assert better is not None and better[2] == str(folder)
    assert same(trainer.restore(folder.rename(better[1])), host(state))


@pytest.mark.system
@pytest.mark.parametrize("mesh", ["data=4", "data=2"])
def test_saved_fsdp_loop_is_restored_on_other_devices(mesh, tmp_path):
    trainer, fewer = (
        trainer_on("data=8", "fsdp"),
        trainer_on(spmd.make_mesh(mesh, devices=jax.devices()[: int(mesh[-1])]), "fsdp"),
    )
    state = train(trainer, trainer.init(), 4)
    trainer.save(state, tmp_path)
    restored = fewer.restore(tmp_path)
    assert same(restored, host(state)) and len(
        restored.params["up"]["kernel"].sharding.device_set
    ) == int(mesh[-1])
    expected = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), host(state), fewer.abstract_state
    )
    assert same(train(fewer, restored, 6), train(fewer, expected, 6))


@functools.cache
def all_steps(kind):
    data, options = KINDS[kind]
    return [
        (info.step, info.metrics["loss"], host(info.state))
        for info in trainer_on("data=8", "fsdp").steps(data, epochs=3, **options)
    ]


@pytest.mark.sampled(system=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_steps_resume_at_their_position(kind, stop, tmp_path):
    trainer, (data, options) = trainer_on("data=8", "fsdp"), KINDS[kind]
    reference = all_steps(kind)
    # of an empty folder: from the beginning
    for info in trainer.steps(data, epochs=3, resume=tmp_path, **options):
        if info.step == stop:
            trainer.save(info, tmp_path)
            break
    rest = [
        (info.step, info.metrics["loss"], host(info.state))
        for info in trainer.steps(data, epochs=3, resume=tmp_path, **options)
    ]
    assert [entry[:2] for entry in rest] == [entry[:2] for entry in reference[stop:]] and len(
        reference
    ) == 9
    assert same(rest[-1][2], reference[-1][2])
    fitted = spmd.fit(
        lambda: Net(nnx.Rngs(0)),
        data,
        mesh="data=8",
        layout="fsdp",
        epochs=3,
        checkpoint=tmp_path,
        resume=True,
        **options,
        **OPTIONS,
    )
    assert same(fitted.state, reference[-1][2])


@pytest.mark.system
def test_steps_refuse_other_data(tmp_path):
    trainer = trainer_on("data=8")
    info = next(trainer.steps(DATA, batch_size=32))
    trainer.save(info, tmp_path)
    with pytest.raises(CheckpointError, match="its data is not the same") as raised:
        next(trainer.steps(labelled(80, seed=1), batch_size=32, resume=tmp_path))
    assert [problem.where for problem in raised.value.problems] == ["contents x", "contents y"]
    with pytest.raises(OptionError, match="state and resume both"):
        next(trainer.steps(DATA, batch_size=32, resume=tmp_path, state=trainer.init()))


@pytest.mark.system
def test_state_alone_has_no_position(tmp_path):
    """Nothing is guessed about the data: the error says what to save, and the fix works."""
    trainer = trainer_on("data=8")
    trainer.save(train(trainer, trainer.init(), 2), tmp_path)
    with pytest.raises(CheckpointError, match=r"step 2 .* is a state alone") as raised:
        next(trainer.steps(DATA, batch_size=32, resume=tmp_path))
    assert "state=trainer.restore(folder)" in raised.value.fix
    fit = functools.partial(
        spmd.fit,
        lambda: Net(nnx.Rngs(0)),
        DATA,
        batch_size=32,
        mesh="data=8",
        checkpoint=tmp_path,
        **OPTIONS,
    )
    with pytest.raises(CheckpointError, match=r"step 2 .* is a state alone") as raised:
        fit(resume=True, steps=4)
    assert 'resume="changed_data"' in raised.value.fix
    result = fit(resume="changed_data", steps=4)
    *_, last = trainer.steps(DATA, batch_size=32, state=trainer.restore(tmp_path, step=2))
    assert int(result.state.step) == 4 and result.history["loss"] != [] and last.step == 5


@pytest.mark.system
def test_save_never_mixes_runs(tmp_path):
    trainer, other = (
        trainer_on("data=8"),
        spmd.Trainer(lambda: Net(nnx.Rngs(0)), mesh="data=8", **OPTIONS),
    )
    state = train(trainer, trainer.init(), 1)
    trainer.save(state, tmp_path)
    trainer.save(state, tmp_path)  # of the same state: it is there already
    state = train(trainer, state, 2)
    trainer.save(state, tmp_path)
    with pytest.raises(CheckpointError, match="already holds a run, up to step 2") as raised:
        other.save(other.init(), tmp_path)
    assert "trainer.restore(folder)" in raised.value.fix
    with pytest.raises(CheckpointError, match="step 2 is not after step 2"):
        trainer.save(train(trainer, trainer.init(), 2), tmp_path)
    earlier = other.restore(tmp_path, step=1)
    with pytest.raises(CheckpointError, match="holds step 2, and this loop continues step 1"):
        other.save(earlier, tmp_path)
    restored = other.restore(tmp_path)
    other.save(restored, tmp_path)
    other.save(dataclasses.replace(restored, step=restored.step + 1), tmp_path)
    assert int(trainer.restore(tmp_path).step) == 3


@pytest.mark.system
def test_save_refuses_consumed_states_and_options_of_fit(tmp_path):
    trainer = trainer_on("data=8")
    state = trainer.init()
    trainer.step(state, batch(0))
    with pytest.raises(spmd.errors.SpmdError, match=r"consumed|deleted"):
        trainer.save(state, tmp_path)
    with pytest.raises(OptionError, match="every has no effect"):
        trainer.save(trainer.init(), spmd.Checkpoint(tmp_path, every=2))
    with pytest.raises(OptionError, match='no metric "eval_loss"') as raised:
        trainer.save(
            trainer.init(), spmd.Checkpoint(tmp_path, best="eval_loss"), metrics={"eval_los": 1.0}
        )
    assert (
        raised.value.fix == 'did you mean "eval_los"?' and not (tmp_path / "checkpoints").exists()
    )
    with pytest.raises(CheckpointError, match="no folder"):
        trainer.save(trainer.init(), None)


@pytest.mark.system
def test_save_ranks_checkpoints(tmp_path):
    trainer, config = trainer_on("data=8"), spmd.Checkpoint(tmp_path, best="eval_loss", keep=1)
    state = trainer.init()
    for value in (3.0, 1.0, 2.0):
        state = train(trainer, state, int(state.step) + 1)
        trainer.save(state, config, metrics={"eval_loss": value})
    trainer.save(state, config, metrics={"eval_loss": 2.0})
    assert (
        int(trainer.restore(tmp_path, step="best").step) == 2
        and int(trainer.restore(tmp_path).step) == 3
    )


@pytest.mark.system
def test_loop_continues_after_a_failed_save(tmp_path, monkeypatch):
    trainer = trainer_on("data=8")
    state = train(trainer, trainer.init(), 1)
    trainer.save(state, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            "spmd.run.checkpoint.write_manifest",
            lambda folder: (_ for _ in ()).throw(OSError("disk on fire")),
        )
        state = train(trainer, state, 2)
        with pytest.raises(CheckpointError, match="could not be written"):
            trainer.save(state, tmp_path)
    trainer.save(state, tmp_path)
    assert int(trainer.restore(tmp_path).step) == 2


@pytest.mark.system
def test_predict_after_restore(tmp_path):
    trainer = trainer_on("data=8")
    state = train(trainer, trainer.init(), 1)
    expected = trainer.predict(state, DATA["x"])
    trainer.save(state, tmp_path)
    other = spmd.Trainer(lambda: Net(nnx.Rngs(0)), mesh="data=8", **OPTIONS)
    restored = other.restore(tmp_path)
    with pytest.raises(OptionError, match="batch size is not known") as raised:
        other.predict(restored, DATA["x"])
    assert (
        raised.value.fix
        == "trainer.prepare(batch) first, with arrays like a batch of training, or with their "
        "shapes."
    )
    other.evaluate(restored, DATA, batch_size=16)
    assert_close(other.predict(restored, DATA["x"]), expected)
    other.prepare(
        {
            name: jax.ShapeDtypeStruct((32, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in DATA.items()
        }
    )
    assert (other.predict(restored, DATA["x"]) == expected).all()


def test_step_is_saved_once_with_all_that_belongs_to_it(tmp_path):
    trainer = trainer_on("data=8")
    info = next(trainer.steps(DATA, batch_size=32))
    trainer.save(info.state, tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"step 1 is saved in .* already, with other metrics or another position",
    ):
        trainer.save(info, tmp_path)
    ranked = spmd.Checkpoint(tmp_path / "ranked", best="accuracy", mode="max", keep=1)
    trainer.save(info, ranked, metrics={"accuracy": np.float32(0.5)})
    trainer.save(info, ranked, metrics={"accuracy": 0.5})
    with pytest.raises(CheckpointError, match="already, with other metrics"):
        trainer.save(info, ranked, metrics={"accuracy": 0.6})
    with pytest.raises(
        CheckpointError,
        match='keeps the best checkpoint by "accuracy", which this save would not rank',
    ):
        trainer.save(info, tmp_path / "ranked")
    assert trainer.restore(tmp_path / "ranked", step="best").step == 1


@pytest.mark.system
def test_best_of_a_loop_is_read_while_it_continues(tmp_path):
    """Not a number ranks last."""
    trainer, config = (
        trainer_on("data=8"),
        spmd.Checkpoint(tmp_path, best="accuracy", mode="max", keep=1),
    )
    state = trainer.init()
    for value in (float("nan"), 0.5, 0.25):
        state = train(trainer, state, int(state.step) + 1)
        trainer.save(state, config, metrics={"accuracy": jax.numpy.float32(value)})
        trainer.restore(tmp_path / "." if value else tmp_path, step="best")
    assert int(trainer.restore(tmp_path, step="best").step) == 2


@pytest.mark.parametrize(
    "metrics", [{"accuracy": "high"}, {"accuracy": np.ones(2)}, [1.0], {"loss": 1.0}], ids=str
)
def test_metrics_that_cannot_rank_are_refused(metrics, tmp_path):
    best = None if "loss" in metrics else "accuracy"
    with pytest.raises(OptionError, match=r"not a number|not a dict|no effect"):
        trainer_on("data=8").save(
            trainer_on("data=8").init(), spmd.Checkpoint(tmp_path, best=best), metrics=metrics
        )


@pytest.mark.system
def test_states_of_other_trainers_are_refused(tmp_path):
    states = [
        trainer_on(*kind).init() for kind in (("data=8", "fsdp"), ("data=8", "parameter_server"))
    ]
    four = trainer_on(spmd.make_mesh("data=4", devices=jax.devices()[:4]))
    for state in [*states, four.init()]:
        with pytest.raises(OptionError, match="this state is not of this trainer"):
            trainer_on("data=8").save(state, tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.system
def test_damaged_and_inner_folders(tmp_path, caplog):
    """A loop resumes before what is damaged, and not from within a folder."""
    trainer = trainer_on("data=8")
    for info in trainer.steps(DATA, batch_size=32, epochs=2):
        if info.step in (2, 4):
            trainer.save(info, tmp_path)
    for inside in ("checkpoints", "checkpoints/4"):
        with pytest.raises(CheckpointError, match="is inside of the folder of a run"):
            next(trainer.steps(DATA, batch_size=32, epochs=2, resume=tmp_path / inside))
    files = [path for path in (tmp_path / "checkpoints" / "4").rglob("*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"x")
    rest = [info.step for info in trainer.steps(DATA, batch_size=32, epochs=2, resume=tmp_path)]
    assert rest == [3, 4, 5, 6] and "it was moved to" in caplog.text


@pytest.mark.system
def test_epoch_of_assigned_rows_is_resumed(tmp_path):
    """Of an asynchronous parameter server an epoch has more rounds than batches."""
    server = spmd.ParameterServer(mode="asynchronous", compute_time="lognormal(1.0, 0.8)")
    layout = spmd.Layout(gradients=spmd.Gradients("parameter_server"), parameter_server=server)
    trainer = spmd.Trainer(
        lambda: Net(nnx.Rngs(0)),
        mesh="data=8",
        layout=layout,
        **{**OPTIONS, "optimizer": optax.sgd(0.05)},
    )
    data, wanted = labelled(128), []
    for info in trainer.steps(data, batch_size=32, epochs=1):
        wanted.append(host(info.state))
        if info.step >= 4:  # batches of an epoch
            trainer.save(info, tmp_path / str(info.step))
    assert len(wanted) > 5
    for stop in (4, len(wanted)):
        rest = [
            host(info.state)
            for info in trainer.steps(data, batch_size=32, epochs=1, resume=tmp_path / str(stop))
        ]
        assert len(rest) == len(wanted) - stop and (not rest or same(rest[-1], wanted[-1]))
    assert trainer.restore(tmp_path / str(len(wanted))).step == len(wanted)
