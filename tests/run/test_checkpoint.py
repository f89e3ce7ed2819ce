"""Checkpoints: a run that was stopped and resumed is one that was never stopped, on any mesh, and
says so when it cannot be.
"""

import functools
import json
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from small import FEATURES, Net, fit, fit_net, host, labelled, linear, numbers, same

import spmd
from spmd.base.tree import flatten
from spmd.errors import CheckpointError, OptionError, short_repr
from spmd.run.checkpoint import Checkpoint, CheckpointStore


def opened(path, **options):
    return CheckpointStore(Checkpoint(path, **options))


def steps_on_disk(path):
    return sorted(
        int(entry.name) for entry in (path / "checkpoints").iterdir() if entry.name.isdigit()
    )


# stopped and resumed ------------------------------------------------------------------------------


def lists():
    data = numbers(80)
    return [
        {name: leaf[first : first + 32] for name, leaf in data.items()}
        for first in range(0, 80, 32)
    ]


RUNS = {  # the first has everything that a stop could lose, the others another kind of data
    "arrays": functools.partial(fit_net, labelled(80)),
    "list": functools.partial(fit, lists(), batch_size=None),
    "function": functools.partial(fit, lambda: iter(lists()), batch_size=None),
}


@functools.cache
def undisturbed(kind):
    return RUNS[kind](epochs=3)


@pytest.mark.system
@pytest.mark.parametrize("stop", [4, 6], ids=["mid-epoch", "epoch's end"])
@pytest.mark.parametrize("kind", RUNS)
def test_resumed_run_matches_uninterrupted_run(kind, stop, tmp_path):
    """Parameters, moments, batch statistics, dropout's stream, the order of the data: bit for
    bit.
    """
    uninterrupted = undisturbed(kind)
    first = RUNS[kind](steps=stop, checkpoint=tmp_path)
    rest = RUNS[kind](epochs=3, checkpoint=tmp_path, resume=True)
    assert int(first.state.step) == stop and int(rest.state.step) == 9
    assert same(rest.state, uninterrupted.state) and not same(first.state, uninterrupted.state)
    for name in uninterrupted.history.names:
        assert rest.history[name] == uninterrupted.history[name][stop:]
    assert next(rest.history.rows())["step"] == stop + 1


@pytest.mark.system
def test_reference_runs_depend_on_order_and_dropout():
    """Otherwise another seed would change nothing, and the comparisons above would prove
    nothing.
    """
    assert (
        fit_net(labelled(80), steps=4, seed=1).history["loss"]
        != undisturbed("arrays").history["loss"][:4]
    )
    assert undisturbed("list").history["loss"] != fit(numbers(80), epochs=3).history["loss"]
    assert undisturbed("list").history["loss"] == undisturbed("function").history["loss"]


def test_stopped_many_times(tmp_path):
    losses = []
    for stop in (1, 2, 3, 5, 7):
        losses += fit(steps=stop, checkpoint=tmp_path, resume=True).history["loss"]
    rest = fit(epochs=3, checkpoint=tmp_path, resume=True)
    assert same(rest.state, fit(epochs=3).state)
    assert losses + rest.history["loss"] == fit(epochs=3).history["loss"]


@pytest.mark.system
def test_resuming_a_finished_run_trains_no_step(tmp_path):
    uninterrupted = fit(epochs=2, checkpoint=tmp_path)
    again = fit(epochs=2, checkpoint=tmp_path, resume=True)
    assert (
        same(again.state, uninterrupted.state)
        and len(again.history) == 0
        and again.stop_reason is None
    )
    longer = fit(epochs=3, checkpoint=tmp_path, resume=True)
    assert same(longer.state, fit(epochs=3).state)


def test_resume_in_an_empty_folder_starts_at_step_0(tmp_path):
    assert same(fit(epochs=1, checkpoint=tmp_path, resume=True).state, fit(epochs=1).state)


def test_a_generator_read_once_can_be_resumed_with_a_fresh_one(tmp_path):
    fit(iter(lists()), batch_size=None, steps=2, checkpoint=tmp_path)
    rest = fit(iter(lists()), batch_size=None, epochs=1, checkpoint=tmp_path, resume=True)
    assert rest.history["loss"] == undisturbed("list").history["loss"][2:3]


# other data ---------------------------------------------------------------------------------------


def test_resume_refuses_other_data_options(tmp_path):
    fit(numbers(96), steps=4, checkpoint=tmp_path)
    with pytest.raises(CheckpointError) as raised:
        fit(
            numbers(64),
            batch_size=16,
            shuffle=False,
            seed=1,
            steps=8,
            checkpoint=tmp_path,
            resume=True,
        )
    assert str(raised.value) == (
        f"the run in {tmp_path} cannot be resumed: its data is not the same\n"
        "4 problems:\n"
        "\n"
        "  examples\n"
        "      saved 96, now 64\n"
        "\n"
        "  batch_size\n"
        "      saved 32, now 16\n"
        "\n"
        "  shuffle\n"
        "      saved True, now False\n"
        "\n"
        "  seed\n"
        "      saved 0, now 1\n"
        '      fix: data, batches and order as the run began; or resume="changed_data", which '
        "keeps weights, optimizer and step, and says "
        "what of the order is lost."
    )


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 16}, {"data": numbers(95)}, {"shuffle": False}],
    ids=lambda c: next(iter(c)),
)
def test_resume_refuses_each_difference_alone(change, tmp_path):
    fit(steps=1, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="1 problem:"):
        fit(**{"steps": 2, "checkpoint": tmp_path, "resume": True, **change})
    assert int(fit(steps=2, checkpoint=tmp_path, resume=True).state.step) == 2


def test_resume_refuses_an_iterable_of_another_length_or_size(tmp_path):
    fit(lists(), batch_size=None, steps=2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="batches\n      saved 3, now 2"):
        fit(lists()[:2], batch_size=None, steps=3, checkpoint=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="batch_size\n      saved 32, now 16"):
        fit(
            [{k: v[:16] for k, v in batch.items()} for batch in lists()],
            batch_size=None,
            steps=3,
            checkpoint=tmp_path,
            resume=True,
        )


# another mesh, another layout ---------------------------------------------------------------------

PLACES = {
    "8 devices, replicated": lambda: ("data=8", "data_parallel"),
    "8 devices, fsdp": lambda: ("data=8", "fsdp"),
    "4 devices, fsdp": lambda: (spmd.make_mesh("data=4", devices=jax.devices()[:4]), "fsdp"),
    "4 devices, replicated": lambda: (
        spmd.make_mesh("data=4", devices=jax.devices()[:4]),
        "data_parallel",
    ),
    "1 device": lambda: (spmd.make_mesh("data=1", devices=jax.devices()[:1]), "data_parallel"),
}


def trainer_at(place):
    mesh, layout = PLACES[place]()
    return spmd.Trainer(
        lambda: Net(nnx.Rngs(0)),
        loss=spmd.losses.cross_entropy,
        optimizer=optax.adam(1e-2),
        mesh=mesh,
        layout=layout,
    )


@functools.cache
def trained(place):
    """A state that has seen a few steps, and a copy of it on the host."""
    trainer = trainer_at(place)
    state = trainer.init()
    for _ in range(2):
        state, _ = trainer.step(state, labelled(32))
    return state, host(state)


@pytest.mark.system
@pytest.mark.parametrize(
    "there, here",
    [
        ("8 devices, fsdp", "4 devices, fsdp"),
        ("8 devices, fsdp", "8 devices, replicated"),
        ("8 devices, replicated", "8 devices, fsdp"),
        ("8 devices, fsdp", "1 device"),
        ("4 devices, fsdp", "1 device"),
        ("1 device", "8 devices, fsdp"),
    ],
)
def test_restored_anywhere_bit_for_bit(there, here, tmp_path):
    state, copy = trained(there)
    store = opened(tmp_path)
    assert store.save(state, 2, {}, {})
    store.wait()
    wanted = trainer_at(here).abstract_state
    restored, notes = store.restore(2, wanted)
    store.close()
    assert same(restored, copy) and not notes
    for leaf, target in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == target.sharding and leaf.dtype == target.dtype

    def sharded_paths(tree):
        return {
            path
            for path, leaf in flatten(tree.params).items()
            if not leaf.sharding.is_fully_replicated
        }

    assert sharded_paths(restored) == sharded_paths(wanted)
    assert sharded_paths(restored) != sharded_paths(state) or len(restored.step.devices()) != len(
        state.step.devices()
    )


def test_training_resumes_on_fewer_devices(tmp_path):
    """The same run on fewer and fewer devices. Sums over workers are taken in another order, hence
    1e-5.
    """
    places = ["8 devices, fsdp", "4 devices, replicated", "1 device"]
    losses = []
    for stop, place in zip((3, 6, 9), places, strict=True):
        mesh, layout = PLACES[place]()
        result = fit(steps=stop, checkpoint=tmp_path, resume=True, mesh=mesh, layout=layout)
        assert len(result.state.step.devices()) == mesh.size if not isinstance(mesh, str) else 8
        losses += result.history["loss"]
        assert (tmp_path / "layout.toml").read_text() == spmd.Layout.load(layout).to_toml()
    uninterrupted = fit(steps=9)
    np.testing.assert_allclose(losses, uninterrupted.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(result.state.params["w"], uninterrupted.state.params["w"], rtol=1e-5)


# what does not fit --------------------------------------------------------------------------------


@pytest.mark.system
def test_restore_lists_every_array_that_does_not_fit(tmp_path):
    fit_net(steps=1, checkpoint=tmp_path, metrics={})

    class Other(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            del self.norm, self.drop
            self.out = nnx.Linear(16, 5, rngs=rngs)
            self.extra = nnx.Linear(5, 3, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.extra(self.out(self.up(x)))

    with pytest.raises(CheckpointError) as raised:
        spmd.fit(
            lambda: Other(nnx.Rngs(0)),
            labelled(),
            loss=spmd.losses.cross_entropy,
            optimizer=optax.sgd(1e-2),
            batch_size=32,
            steps=2,
            checkpoint=tmp_path,
            resume=True,
        )
    text = str(raised.value)
    head, _, body = text.partition("\n\n")
    body, _, fix = body.partition("\n    fix: ")
    assert fix.startswith(
        '2 arrays of the model fit. Trainer.restore(folder, only="up/*") puts them into a new state'
    )
    assert head == (
        f"the checkpoint of step 1 in {tmp_path} does not fit this model and optimizer\n22 "
        "problems (4 arrays fit):"
    )
    assert (
        "  params/out/kernel\n      saved float32[16, 3], wanted float32[16, 5]\n" in body
        and body.count("saved float32[16], wanted nothing") == 1
    )
    table = {problem.where: problem.why[0] for problem in raised.value.problems}
    assert table["params/out/kernel"] == "saved float32[16, 3], wanted float32[16, 5]"
    assert table["params/out/bias"] == "saved float32[3], wanted float32[5]"
    assert table["params/extra/kernel"] == "saved nothing, wanted float32[5, 3]"
    assert table["params/norm/scale"] == "saved float32[16], wanted nothing"
    assert table["stats/norm/mean"] == "saved float32[16], wanted nothing"
    assert table["opt/0/count"] == "saved int32[], wanted nothing"
    assert len(table) == 22 and "params/up/kernel" not in table


def test_restore_into_wider_model_lists_every_difference(tmp_path):
    data = numbers()
    fit(data, optimizer=optax.sgd(0.1), steps=1, checkpoint=tmp_path)
    wider = {"x": np.concatenate([data["x"], data["x"]], axis=1), "y": data["y"]}
    with pytest.raises(CheckpointError) as raised:
        spmd.fit(
            linear(2 * FEATURES),
            wider,
            loss=spmd.losses.mean_squared_error,
            optimizer=optax.sgd(0.1, momentum=0.9),
            batch_size=32,
            steps=2,
            checkpoint=tmp_path,
            resume=True,
        )
    assert str(raised.value) == (
        f"the checkpoint of step 1 in {tmp_path} does not fit this model and optimizer\n"
        "2 problems (2 arrays fit):\n"
        "\n"
        "  params/w\n"
        "      saved float32[8, 1], wanted float32[16, 1]\n"
        "\n"
        "  opt/0/trace/w\n"
        "      saved nothing, wanted float32[16, 1]\n\n"
        "    fix: the model, and the optimizer, that the run was trained with; or another folder, "
        "for a run of this one."
    )


@pytest.mark.parametrize(
    "options, text",
    [
        ({"mode": "best"}, 'Checkpoint: no mode "best".\n    fix: known: min, max.'),
        ({"mode": "mx"}, 'Checkpoint: no mode "mx".\n    fix: did you mean "max"?'),
        ({"every": 0}, "Checkpoint: every=0.\n    fix: a whole number from 1."),
        ({"keep": True}, "Checkpoint: keep=True.\n    fix: a whole number from 1."),
    ],
)
def test_invalid_checkpoint_options_are_refused(options, text):
    with pytest.raises(OptionError) as raised:
        Checkpoint("runs", **options)
    assert str(raised.value) == text


# which are kept -----------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize(
    "keep, left",
    [
        (1, [9]),
        (2, [8, 9]),
        (4, [6, 7, 8, 9]),
        (100, list(range(1, 10))),
        (None, list(range(1, 10))),
    ],
)
def test_the_newest_are_kept(keep, left, tmp_path):
    fit(epochs=3, checkpoint=Checkpoint(tmp_path, every=1, keep=keep))
    assert steps_on_disk(tmp_path) == left


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("every, left", [(None, [3, 6, 9, 10]), (4, [4, 8, 10]), (5, [5, 10])])
def test_how_often_and_the_last_step_always(every, left, tmp_path):
    fit(steps=10, checkpoint=Checkpoint(tmp_path, every=every, keep=100))
    assert steps_on_disk(tmp_path) == left


class Scripted:
    """Evaluation results as written down: the metric reads the data, and the data changes from one
    evaluation to the next.
    """

    def __init__(self, scores):
        self.scores = iter(scores)

    def __call__(self):
        score = next(self.scores)
        yield {**numbers(32, 1), "score": np.full(32, score, np.float32)}


def loss_and_score(model, batch):
    return (model(batch["x"]) - batch["y"])[:, 0] ** 2, {"score": batch["score"]}


def scored(scores, path, **options):
    config = Checkpoint(path, **{"best": "eval_score", "keep": 1, **options})
    data = {**numbers(96), "score": np.zeros(96, np.float32)}
    return fit(
        data, loss=loss_and_score, epochs=len(scores), eval_data=Scripted(scores), checkpoint=config
    )


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("every", [None, 3], ids=["each epoch", "every 3 of 3"])
@pytest.mark.parametrize("mode, best", [("max", 6), ("min", 9)])
def test_the_best_is_kept_beside_the_newest(mode, best, every, tmp_path):
    result = scored([0.5, 0.75, 0.25, 0.5], tmp_path, mode=mode, every=every)
    assert result.history["eval_score"] == [0.5, 0.75, 0.25, 0.5]
    assert steps_on_disk(tmp_path) == [best, 12]


@pytest.mark.parametrize(
    "mode, scores, best",
    [
        ("max", [0.25, 0.75, math.nan, 0.5], 6),
        ("min", [math.nan, 0.75, math.nan, 0.75], 6),  # of equals the first
        ("max", [0.25, math.inf, 0.5, 0.25], 9),
    ],
)
def test_a_score_that_is_not_finite_is_the_worst(mode, scores, best, tmp_path):
    result = scored(scores, tmp_path, mode=mode)
    assert steps_on_disk(tmp_path) == [best, 12]
    assert int(result.trainer.restore(tmp_path, step="best").step) == best


@pytest.mark.system
def test_the_best_survives_a_resumed_run(tmp_path):
    scored([0.5, 0.75, 0.25, 0.5], tmp_path, mode="max")
    data = {**numbers(96), "score": np.zeros(96, np.float32)}
    config = Checkpoint(tmp_path, best="eval_score", mode="max", keep=1)
    result = fit(
        data,
        loss=loss_and_score,
        epochs=6,
        eval_data=Scripted([0.1, 0.2]),
        checkpoint=config,
        resume=True,
    )
    assert steps_on_disk(tmp_path) == [6, 18], "step 6, of the first run, is still the best"
    assert int(result.trainer.restore(tmp_path, step="best").step) == 6


@pytest.mark.system
def test_the_best_and_any_other_can_be_loaded(tmp_path):
    result = scored([0.5, 0.75, 0.25, 0.5], tmp_path, mode="max", keep=2)
    trainer = result.trainer
    steps = {
        which: int(trainer.restore(tmp_path, step=which).step) for which in ("best", "latest", 9)
    }
    assert steps == {"best": 6, "latest": 12, 9: 9}
    assert same(trainer.restore(tmp_path), result.state)


def test_a_checkpoint_that_is_not_there(tmp_path):
    trainer = fit(epochs=1, checkpoint=tmp_path).trainer
    for which, text in (
        ("best", "does not rank checkpoints"),
        (7, "there is no checkpoint of step 7 in .*\n    fix: 3\\."),
    ):
        with pytest.raises(CheckpointError, match=text):
            trainer.restore(tmp_path, step=which)
    for path, text in (
        (tmp_path / "none", "there is no such folder"),
        (None, "there is no such folder"),
    ):
        with pytest.raises(CheckpointError, match=text):
            trainer.restore(path)
    with pytest.raises(
        OptionError, match=r"checkpoint=5 is an int\.\n    fix: a folder, or an spmd\.Checkpoint\."
    ):
        fit(epochs=1, checkpoint=5)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/3/meta/metadata"])
def test_restore_of_a_file_names_the_run_that_it_is_in(name, tmp_path):
    trainer = fit(epochs=1, checkpoint=tmp_path).trainer
    with pytest.raises(CheckpointError) as raised:
        trainer.restore(tmp_path / name)
    file = tmp_path / name
    assert str(raised.value) == (
        f"checkpoint={short_repr(str(file))}: {file} is a file, and not the folder of a run.\n    "
        f"fix: {tmp_path}, which it is in."
    )
    assert int(trainer.restore(tmp_path).step) == 3


def test_restore_of_a_file_that_is_in_no_run(tmp_path):
    trainer, file = fit(epochs=1).trainer, tmp_path / "weights.npz"
    file.touch()
    with pytest.raises(CheckpointError) as raised:
        trainer.restore(file)
    assert (
        str(raised.value)
        == f"checkpoint={short_repr(str(file))}: {file} is a file.\n    fix: the folder of a run, "
        "which fit(checkpoint=...) was given."
    )


@pytest.mark.system
def test_resume_records_changed_options(tmp_path, capsys):
    fit(epochs=1, checkpoint=tmp_path, mesh={"data": 8})
    four = spmd.make_mesh("data=4", devices=jax.devices()[:4])
    fit(
        epochs=2,
        checkpoint=tmp_path,
        mesh=four,
        resume=True,
        accumulate=2,
        layout="fsdp",
        progress=True,
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["changed"] for line in records if line.get("event") == "resumed"] == [
        ["mesh was data=8, is data=4", "accumulate was 1, is 2", "the layout has changed"]
    ]
    assert "accumulate was 1, is 2" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.system
def test_every_checkpoint_that_could_be_the_best_is_evaluated(tmp_path):
    """Saves every 2 steps, epochs of 3: evaluated at 2, 3, 4, 6, 8, 9, 10, 12; the best is the save
    of step 8.
    """
    scores = [0.1, 0.9, 0.2, 0.3, 0.7, 0.8, 0.4, 0.5]
    data = {**numbers(96), "score": np.zeros(96, np.float32)}
    config = Checkpoint(tmp_path, every=2, keep=1, best="eval_score", mode="max")
    result = fit(data, loss=loss_and_score, epochs=4, eval_data=Scripted(scores), checkpoint=config)
    assert [row["step"] for row in result.history.evaluations] == [2, 3, 4, 6, 8, 9, 10, 12]
    assert steps_on_disk(tmp_path) == [8, 12]


def test_a_best_metric_that_is_not_there(tmp_path):
    with pytest.raises(OptionError) as raised:
        scored([0.5], tmp_path, best="eval_scores")
    assert (
        str(raised.value)
        == 'Checkpoint: there is no metric "eval_scores".\n    fix: did you mean "eval_score"?'
    )


# beside the arrays --------------------------------------------------------------------------------


def test_the_layout_stands_beside(tmp_path):
    fit(steps=1, checkpoint=tmp_path, layout="fsdp")
    text = spmd.Layout.load("fsdp").to_toml()
    assert (tmp_path / "layout.toml").read_text() == text
    assert (
        spmd.Layout.load(tmp_path / "layout.toml")
        == spmd.Layout.load("fsdp")
        != spmd.Layout.load("data_parallel")
    )
    store = opened(tmp_path)
    meta = store.meta(1)
    store.close()
    assert meta["layout"] == text and meta["mesh"] == "data=8" and meta["data"]["seed"] == 0
    assert meta["position"] == {"epoch": 0, "batch": 1, "reader": None, "parts": 0, "workers": 0}
    assert meta["arrays"]["params/w"] == "float32[8, 1]"
    json.dumps(meta)


# asynchronous saving ------------------------------------------------------------------------------


@pytest.mark.system
def test_steps_that_follow_do_not_change_what_is_being_saved(tmp_path):
    """The state is donated to the next step while it is still being written: 16 MiB, so that this
    takes a while.
    """
    trainer = spmd.Trainer(
        linear(500_000), loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1)
    )
    batch = {"x": np.ones((8, 500_000), np.float32), "y": np.ones((8, 1), np.float32)}
    state, copies = trainer.init(), {}
    store = opened(tmp_path, keep=100)
    state, _ = trainer.step(state, batch)
    for _ in range(3):
        step = int(state.step)
        copies[step] = host(state)
        store.save(state, step, {}, {})
        for _ in range(3):
            old, (state, _) = state, trainer.step(state, batch)
            assert old.params["w"].is_deleted()  # donated: its memory is being written over
    store.wait()
    assert store.steps() == list(copies) == [1, 4, 7]
    for step, copy in copies.items():
        assert same(store.restore(step, trainer.abstract_state)[0], copy)
    assert not same(copies[1].params, copies[4].params)
    store.close()


def test_a_step_is_saved_once(tmp_path):
    state, _ = trained("8 devices, replicated")
    store = opened(tmp_path)
    assert store.save(state, 2, {}, {}) and not store.save(state, 2, {}, {})
    store.close()
    store = opened(tmp_path)
    assert store.latest() == 2 and not store.save(state, 2, {}, {})
    store.close()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    state, _ = trained("8 devices, replicated")
    store = opened(tmp_path)
    store.save(state, 2, {}, {})
    monkeypatch.setattr(
        store._manager, "check_for_errors", lambda: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(
        CheckpointError,
        match=rf"a checkpoint could not be written to {tmp_path}: OSError: no space left",
    ):
        store.close()


# what a user may forget ---------------------------------------------------------------------------


def test_resume_refuses_another_seed(tmp_path):
    batches = [
        {"x": np.ones((8, 1), np.float32) * n, "y": np.ones((8, 1), np.float32)} for n in range(4)
    ]
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.sgd(0.1),
        "checkpoint": tmp_path,
    }
    spmd.fit(linear(1), batches, steps=2, **options)
    with pytest.raises(spmd.errors.CheckpointError, match="saved 0, now 7"):
        spmd.fit(linear(1), batches, epochs=1, resume=True, seed=7, **options)
    # the folder was released
    result = spmd.fit(linear(1), batches, epochs=1, resume=True, **options)
    assert int(result.state.step) == 4


def test_best_without_an_evaluation(tmp_path):
    with pytest.raises(
        OptionError,
        match=r"Checkpoint\(best=...\) is 'eval_loss', but there is nothing to evaluate",
    ):
        fit(epochs=1, checkpoint=spmd.Checkpoint(tmp_path, best="eval_loss"))
    with pytest.raises(OptionError, match="eval_every is 2, but there is nothing to evaluate"):
        fit(epochs=1, eval_every=2)


def test_best_of_data_whose_length_is_not_known(tmp_path):
    """The last step of an epoch is known to be the last, so its checkpoint is judged by the
    evaluation of that epoch.
    """

    def batches():
        for n in range(3):
            yield {"x": np.full((8, 1), n, np.float32), "y": np.ones((8, 1), np.float32)}

    spmd.fit(
        linear(1),
        batches,
        loss=spmd.losses.mean_squared_error,
        optimizer=optax.sgd(-0.1),
        epochs=2,
        eval_data=list(batches()),
        checkpoint=spmd.Checkpoint(tmp_path, every=3, keep=1, best="eval_loss"),
    )
    store = opened(tmp_path)
    assert store.steps() == [3, 6], (
        "step 6 is the newest; step 3 the best, as the rate drives the loss up"
    )
    store.close()


class Count(spmd.callbacks.Callback):
    def __init__(self):
        self.seen = 0

    def on_step(self, info):
        self.seen += 1

    def save(self):
        return {"seen": self.seen}

    def restore(self, saved):
        self.seen = saved["seen"]


def test_resume_restores_callback_state(tmp_path):
    fit(steps=4, checkpoint=tmp_path, callbacks=[Count()])
    count = Count()
    fit(steps=6, checkpoint=tmp_path, resume=True, callbacks=[count])
    assert count.seen == 6


def test_early_stopping_of_a_resumed_run_stops_where_the_undisturbed_one_does(tmp_path):
    def run(steps, folder, **options):
        stopping = spmd.callbacks.EarlyStopping("loss", patience=5, mode="max")
        return fit(steps=steps, checkpoint=folder, callbacks=[stopping], **options)

    uninterrupted = run(50, tmp_path / "uninterrupted")
    run(3, tmp_path / "parts")
    parts = run(50, tmp_path / "parts", resume=True)
    assert uninterrupted.stop_reason == parts.stop_reason is not None
    assert int(uninterrupted.state.step) == int(parts.state.step) < 50


def test_resume_in_an_empty_folder_says_that_a_new_run_begins(tmp_path, caplog):
    for resume, said in ((False, 0), (True, 1), (True, 0)):
        caplog.clear()
        fit_net(
            steps=1,
            checkpoint=tmp_path / ("new" if resume else "other"),
            resume=resume,
            progress=False,
        )
        lines = [message for message in caplog.messages if "holds no run to resume" in message]
        assert lines == [f"{tmp_path / 'new'} holds no run to resume: a new one begins"] * said
