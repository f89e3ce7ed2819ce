"""Sweeps: a trial is what `fit` would have trained alone, whatever runs beside it."""

import math
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from swept import CLASSES, FEATURES, FEEDBACK, MODELS, RATES, adam, close, labelled, options, sweep

import spmd
from spmd.errors import CheckpointError, OptionError
from spmd.optimizers import skip_spikes
from spmd.run.progress import NoProgress
from spmd.sweeps.scheduler import SweepRunner
from spmd.sweeps.vmapped_trials import VmappedTrials
from tests.compare import assert_close, relative_difference


def alone(kind, tried):
    """The same trial by `fit`, on one device."""
    values = dict(tried.values)
    rate, seed = values.pop("learning_rate"), values.pop("seed", tried.trial.seed)
    return spmd.fit(
        lambda: MODELS[kind](seed=seed, **values),
        labelled(),
        optimizer=adam(rate),
        mesh=spmd.make_mesh("data=1", devices=jax.devices()[:1]),
        seed=seed,
        **{name: value for name, value in options().items() if name != "eval_data"},
    )


@pytest.mark.system
@pytest.mark.parametrize("kind", MODELS)
def test_a_trial_is_what_fit_trains_alone(kind):
    swept = sweep(kind, space={**RATES, "seed": range(6)}, keep=6, mesh="net=8")
    # a short batch cannot be padded there
    assert swept.programs == 2 if kind == "statistics and dropout" else swept.programs >= 1
    assert len({tried.values["learning_rate"] for tried in swept.trials}) == 6
    for tried in swept.trials[::3] if kind == "plain" else swept.trials[3:4]:
        single = alone(kind, tried)
        assert close(tried.result().state.params, single.state.params)
        assert relative_difference(tried.history["loss"], single.history["loss"]) <= 1e-6
        assert single.evaluate(labelled(50, 1)) == pytest.approx(
            {name.removeprefix("eval_"): value for name, value in tried.metrics.items()}, rel=1e-5
        )
    assert (
        relative_difference(
            swept.trials[0].result().state.params, swept.trials[1].result().state.params
        )
        > 1e-6
    )


def test_evaluations_of_trials_are_of_all_rows(caplog):
    """A ratio of counts of all rows, as numpy has it; a median is named, since its mean over
    batches is not that of all rows.
    """

    def found(model, batch):
        hits = (model(batch["x"]).argmax(-1) == batch["y"]) & (batch["y"] == 1)
        return hits.sum() / (batch["y"] == 1).sum()

    def median(model, batch):
        return jnp.median(model(batch["x"]))

    how = {
        "space": {"learning_rate": [1e-2]},
        "search": "grid",
        "trials": None,
        "epochs": 1,
        "eval_data": labelled(60, 1),
    }
    mesh = spmd.make_mesh("net=1", devices=jax.devices()[:1])
    (tried,) = sweep(
        "plain", **how, mesh=mesh, metrics={"found": found, "median": median}, batch_size=20
    ).trials
    data, model = labelled(60, 1), tried.result().model
    guess = np.asarray(model(data["x"])).argmax(-1)
    assert tried.metrics["eval_found"] == pytest.approx(
        float((guess == data["y"])[data["y"] == 1].mean()), rel=1e-5
    )
    assert [line.split('"')[1] for line in caplog.messages if "the mean over batches" in line] == [
        "median"
    ]


@pytest.mark.system
def test_abreast_they_are_equal_up_to_rounding():
    mesh = spmd.make_mesh("net=2", devices=jax.devices()[:2])
    exact, abreast = (sweep(keep=6, mesh=mesh, epochs=1, exact=exact) for exact in (True, False))
    mine, its = (
        [swept.trials[number].result().state.params for number in (0, 5)]
        for swept in (exact, abreast)
    )
    assert close(mine, its, 1e-4) and relative_difference(mine[0], its[1]) > 1e-4


@pytest.mark.system
def test_what_runs_beside_a_trial_does_not_matter():
    uninterrupted, some = sweep(keep=6, mesh="net=8"), (0, 5)
    wanted = {number: uninterrupted.trials[number].result().state.params for number in some}
    assert relative_difference(*wanted.values()) > 1e-6
    for other in (
        sweep(keep=6, mesh="net=8", at_once=2),
        sweep(keep=6, mesh="net=4,data=2"),
        sweep(keep=6, mesh="net=8", steps_per_call=1),
    ):
        assert [tried.values for tried in other.trials] == [
            tried.values for tried in uninterrupted.trials
        ]
        for mine, its in zip(uninterrupted.trials, other.trials, strict=True):
            assert_close(mine.score, its.score)
        for number in some:
            assert close(wanted[number], other.trials[number].result().state.params)


@pytest.mark.system
def test_shapes_make_groups_and_floats_do_not():
    swept = sweep(space={**RATES, "width": [4, 8]}, trials=8, epochs=1)
    assert {tried.values["width"] for tried in swept.trials} == {4, 8} and swept.programs == 2
    best = swept.best[0].result()
    assert best.state.params["up"]["kernel"].shape == (FEATURES, swept.best[0].values["width"])
    assert best.predict(labelled()["x"]).shape == (80, CLASSES)


@pytest.mark.system
def test_diverged_trial_is_reported_and_changes_no_other():
    rates = [1e-3, 1e38, 1e-2]
    swept = sweep(
        space={"learning_rate": rates},
        search="grid",
        trials=None,
        keep=3,
        optimizer=lambda learning_rate: optax.sgd(learning_rate),
    )
    fine = sweep(
        space={"learning_rate": [1e-3, 1e-2, 1e-2]},
        search="grid",
        trials=None,
        keep=3,
        optimizer=lambda learning_rate: optax.sgd(learning_rate),
    )
    assert [tried.ended for tried in fine.trials] == ["done"] * 3
    assert swept.trials[1].ended.startswith("diverged at step ") and np.isnan(swept.trials[1].score)
    for number in (0, 2):
        mine, its = swept.trials[number], fine.trials[number]
        assert mine.ended == "done" and close(
            mine.result().state.params, its.result().state.params, 0
        )
    assert {tried.number for tried in swept.best} == {0, 2}
    with pytest.raises(OptionError, match="the arrays of trial 1 were not kept"):
        swept.trials[1].result()
    assert [row["trial"] for row in swept.rows()][-1] == 1


@pytest.mark.system
def test_trial_that_skips_updates_diverges_where_fit_ends():
    data = labelled()
    data["x"][17] = np.nan  # in one step of each epoch
    how = {
        "space": {"learning_rate": [1e-2]},
        "search": "grid",
        "shuffle": False,
        "eval_data": None,
    }

    def skipping(max_in_a_row):
        how["optimizer"] = lambda learning_rate: skip_spikes(
            optax.sgd(learning_rate), max_in_a_row=max_in_a_row
        )
        return spmd.sweep(MODELS["plain"], data, **options(**how)).trials[0]

    patient, strict = skipping(2), skipping(1)
    assert (
        patient.ended == "done"
        and np.isnan(patient.history["loss"]).sum() > 0
        and np.isfinite(patient.score)
    )
    first = int(np.argmax(patient.history["skipped"])) + 1
    assert strict.ended == f"diverged at step {first}" and np.isnan(strict.score)


@pytest.mark.system
def test_halving_drops_the_worse_and_leaves_the_others_as_they_were():
    halved = sweep(trials=9, search=spmd.Halving(factor=3), epochs=3, keep=2)
    uninterrupted = sweep(trials=9, epochs=3, keep=9)
    assert spmd.Halving(factor=3).plan(9, 9) == [(9, 1), (3, 3), (1, 9)]
    assert sorted(len(tried.history) for tried in halved.trials) == [1] * 6 + [3] * 2 + [9]
    (winner,) = halved.best
    assert winner.ended == "done" and close(
        winner.result().state.params, uninterrupted.trials[winner.number].result().state.params
    )
    for tried in halved.trials:
        losses = uninterrupted.trials[tried.number].history["loss"]
        assert relative_difference(tried.history["loss"], losses[: len(tried.history)]) <= 1e-6
    first = {tried.number: tried.history.evaluations[0]["eval_loss"] for tried in halved.trials}
    kept = sorted(first, key=first.get)[:3]
    assert {tried.number for tried in halved.trials if len(tried.history) > 1} == set(kept)


# interrupted and resumed --------------------------------------------------------------------------


class StoppedError(Exception):
    pass


@pytest.mark.system
@pytest.mark.parametrize(
    "search",
    [pytest.param("random", marks=pytest.mark.slow), spmd.Halving(factor=2, rungs=2)],
    ids=["random", "halving"],
)
def test_stopped_anywhere_it_ends_in_the_same_table(search, tmp_path, monkeypatch):
    more = {"search": search, "trials": 4, "at_once": 2, "keep": 1, "steps_per_call": 1}
    uninterrupted = sweep(**more)
    count, calls = SweepRunner._count, []

    def stop(self, *given):
        calls.append(None)
        if len(calls) % 6 == 0:
            raise StoppedError
        return count(self, *given)

    monkeypatch.setattr(SweepRunner, "_count", stop)
    swept = None
    for _ in range(8):
        try:
            swept = sweep(**more, checkpoint=spmd.Checkpoint(tmp_path, every=2), resume=bool(calls))
            break
        except StoppedError:
            pass
    assert swept is not None and len(calls) > 12
    assert swept.to_csv() == uninterrupted.to_csv()
    for mine, its in zip(swept.best, uninterrupted.best, strict=True):
        assert mine.number == its.number and close(
            mine.result().state.params, its.result().state.params
        )
    monkeypatch.undo()
    again = sweep(**more, checkpoint=spmd.Checkpoint(tmp_path, every=2), resume=True)
    assert again.to_csv() == uninterrupted.to_csv() and close(
        again.best[0].result().state.params, uninterrupted.best[0].result().state.params
    )


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, SystemExit),
        pytest.param(signal.SIGINT, KeyboardInterrupt, marks=pytest.mark.system),
    ],
)
def test_signal_ends_a_sweep_after_a_save(number, error, tmp_path, monkeypatch):
    more, calls, steps = {"trials": 2, "keep": 1, "steps_per_call": 1}, [], VmappedTrials.steps
    uninterrupted = sweep(**more)

    def signalled(self, *given):
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return steps(self, *given)

    monkeypatch.setattr(VmappedTrials, "steps", signalled)
    with pytest.raises(error) as ended:
        sweep(**more, checkpoint=spmd.Checkpoint(tmp_path, every=50))
    assert error is not SystemExit or ended.value.code == 143
    done = len(calls)
    assert [path.name for path in (tmp_path / "chunks" / "0-0" / "checkpoints").glob("[0-9]*")] == [
        str(done)
    ] and done < 5
    resumed = sweep(**more, checkpoint=spmd.Checkpoint(tmp_path, every=50), resume=True)
    assert (
        len(calls) == len(uninterrupted.trials[0].history)
        and resumed.to_csv() == uninterrupted.to_csv()
    )


@pytest.mark.system
def test_best_trials_are_runs_that_can_be_resumed(tmp_path):
    swept = sweep(keep=2, checkpoint=tmp_path)
    tried = swept.best[0]
    folder = tmp_path / "best" / f"trial-{tried.number:04d}"
    assert {path.name for path in (tmp_path / "best").iterdir()} == {
        f"trial-{tried.number:04d}" for tried in swept.best
    }
    assert close(tried.result().trainer.restore(folder).params, tried.result().state.params, 0)
    rate = tried.values["learning_rate"]
    shared = {name: value for name, value in options(epochs=3).items() if name != "eval_data"}
    on = spmd.fit(
        lambda: MODELS["plain"](),
        labelled(),
        optimizer=adam(rate),
        mesh="data=8",
        checkpoint=folder,
        resume=True,
        **shared,
    )
    uninterrupted = spmd.fit(
        lambda: MODELS["plain"](), labelled(), optimizer=adam(rate), mesh="data=8", **shared
    )
    assert (
        int(on.state.step) == 9
        and len(on.history) == 3
        and close(on.state.params, uninterrupted.state.params)
    )
    with pytest.raises(CheckpointError, match="already holds a sweep"):
        sweep(keep=2, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"it was another(.|\n)*trials"):
        sweep(keep=2, trials=7, checkpoint=tmp_path, resume=True)


# the table ----------------------------------------------------------------------------------------


def test_the_table_has_every_trial_the_best_first():
    swept = sweep(space={**RATES, "width": [4, 8]}, epochs=1)
    rows = swept.rows()
    assert [row["eval_loss"] for row in rows] == sorted(row["eval_loss"] for row in rows) and len(
        rows
    ) == 6
    head, *lines = swept.to_csv().splitlines()
    assert (
        head == "trial,learning_rate,width,eval_loss,eval_accuracy,steps,ended" and len(lines) == 6
    )
    assert len(str(swept).splitlines()) == 7
    assert swept._repr_html_().count("<tr>") == 7
    assert swept.best[0].number == rows[0]["trial"]


@pytest.mark.system
def test_progress_ends_at_the_last_step(monkeypatch, tmp_path):
    """And counts the rows that were trained on: none where everything is restored."""
    seen, samples = [], []

    class Recorded(NoProgress):
        def start(self, step, total):
            seen.append(total)

        def update(self, step, epoch, metrics, pace):
            seen.append(step)
            samples.append(pace.samples)

    monkeypatch.setattr("spmd.sweeps.api.make_progress", lambda wanted: Recorded())
    sweep(epochs=1, checkpoint=tmp_path)
    sweep(epochs=1, checkpoint=tmp_path, resume=True)
    assert len(seen) == 4 and len({*seen}) == 1  # it is never due, and yet drawn at the end
    assert samples[0] > 0 and samples[1] == 0


@pytest.mark.system
def test_the_best_answer_together():
    swept = sweep(space={**RATES, "seed": range(9)}, keep=2, epochs=1)
    together, test = swept.ensemble(), labelled(50, 1)
    assert (
        together.names == tuple(f"trial {tried.number}" for tried in swept.best)
        and len(swept.ensemble(top=1)) == 1
    )
    both = np.stack(
        [np.asarray(jax.nn.softmax(tried.result().predict(test["x"]))) for tried in swept.best]
    )
    assert np.allclose(together.predict(test["x"]), both.mean(0), atol=1e-6)
    for top in (0, 3):
        with pytest.raises(OptionError, match=f"top={top}, and the arrays of 2 trials were kept"):
            swept.ensemble(top=top)


@pytest.mark.system
def test_the_largest_may_be_the_best():
    swept = sweep(score="eval_accuracy", mode="max", epochs=1)
    assert (
        swept.best[0].score
        == max(tried.score for tried in swept.trials)
        == max(tried.metrics["eval_accuracy"] for tried in swept.trials)
    )


@pytest.mark.system
@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_trials_the_first_is_the_best_and_one_without_a_number_is_the_worst(mode):
    """In the trials that are kept, in the rungs of a halving, and in the table."""
    more = {"optimizer": optax.sgd, "space": {"learning_rate": [1e38, 0.01, 0.01, 1e38]}}
    more |= {"search": "grid", "trials": None, "score": "loss", "mode": mode, "epochs": 2}
    swept = sweep(**more, keep=3)
    assert [math.isnan(tried.score) for tried in swept.trials] == [True, False, False, True]
    assert swept.trials[1].score == swept.trials[2].score
    assert [tried.number for tried in swept.best] == [1, 2]
    assert [row["trial"] for row in swept.rows()] == [1, 2, 0, 3]
    halved = sweep(**{**more, "search": spmd.Halving(rungs=2), "trials": 4}, keep=1)
    assert [tried.number for tried in halved.best] == [1]


@pytest.mark.system
def test_killed_while_the_best_are_kept_nothing_is_lost(tmp_path, monkeypatch):
    rename, calls = Path.rename, []

    def stop(self, target):
        if self.name.startswith(".trial-"):
            calls.append(None)
            if len(calls) == 2:
                raise StoppedError
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(StoppedError):
        sweep(keep=3, checkpoint=tmp_path, epochs=1)
    assert (
        len([place for place in (tmp_path / "best").iterdir() if not place.name.startswith(".")])
        == 1
    )
    swept = sweep(keep=3, checkpoint=tmp_path, epochs=1, resume=True)
    uninterrupted = sweep(keep=3, epochs=1)
    assert swept.to_csv() == uninterrupted.to_csv()
    for mine, its in zip(swept.best, uninterrupted.best, strict=True):
        assert close(mine.result().state.params, its.result().state.params)
        folder = tmp_path / "best" / f"trial-{mine.number:04d}"
        assert close(mine.result().trainer.restore(folder).params, its.result().state.params)


@pytest.mark.system
def test_a_chunk_that_is_damaged_is_done_again(tmp_path, monkeypatch):
    more = {
        "search": spmd.Halving(factor=2, rungs=2),
        "trials": 4,
        "checkpoint": tmp_path,
        "epochs": 2,
    }
    monkeypatch.setattr(SweepRunner, "_sweep", lambda *given: (_ for _ in ()).throw(StoppedError))
    with pytest.raises(StoppedError):
        sweep(**more)
    monkeypatch.undo()
    for file in (tmp_path / "chunks").glob("*/checkpoints/*/state/d/*"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert sweep(**more, resume=True).to_csv() == sweep(**{**more, "checkpoint": None}).to_csv()


@pytest.mark.system
def test_resumed_sweep_keeps_its_score(tmp_path):
    sweep(keep=1, checkpoint=tmp_path, epochs=1)
    for more in ({"eval_data": labelled(50, 2)}, {"keep": 2}):
        with pytest.raises(CheckpointError, match="it was another"):
            sweep(**{"keep": 1, "checkpoint": tmp_path, "epochs": 1, "resume": True, **more})


@pytest.mark.system
def test_a_layout_whose_codecs_have_no_memory_on_one_device_each(tmp_path):
    swept = sweep(layout=FEEDBACK, mesh="net=8", epochs=1, keep=1, checkpoint=tmp_path)
    assert swept.best[0].result().predict(labelled()["x"]).shape == (80, CLASSES)
