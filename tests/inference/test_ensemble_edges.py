"""Edge cases of ensembles: probabilities too small for a float, padding rows, and concurrent
threads.
"""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from trained import deadlines_pass_after, untrained

import spmd
from spmd.errors import EnsembleError, OptionError
from spmd.inference import ensemble as module, uncertainty
from spmd.inference.workers import Workers
from tests.compare import assert_close

ROWS = {"x": np.linspace(-1, 2, 32, dtype=np.float32), "y": np.arange(32) % 3}


def scaled(by):
    """Of a number x, the logits x * by."""
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.asarray(by, jnp.float32)}, lambda params, x: x[:, None] * params["w"]
    )
    return untrained(model, ROWS)


def masked(members):
    """Logits of four classes, too sure of one of three, which is right in 70 rows of 100; the
    fourth is masked.
    """
    sure = np.tile([20.0, 0, 0, -1e3], (100, 1))
    return np.stack([sure] * members), np.arange(100) // 70 * (1 + np.arange(100) % 2)


@pytest.mark.parametrize("low", [-1e3, -np.inf])
def test_a_masked_class_does_not_spoil_the_temperature(low):
    logits, labels = masked(2)
    logits[..., 3] = low
    temperatures = {
        combine: uncertainty.fit_temperature(uncertainty.log_combined(logits, combine), labels)
        for combine in ("mean", "logits")
    }
    # exp(20 / t) / (exp(20 / t) + 2) is 0.7; the masked class has some probability at -1e3 too, but
    # nearly none
    assert_close(list(temperatures.values()), [20 / np.log(0.7 * 2 / 0.3)] * 2)


def test_the_mean_of_probabilities_that_are_too_small_has_a_logarithm():
    logits = np.array([[[0.0, -1e3]], [[0.0, -2e3]]])
    np.testing.assert_allclose(
        uncertainty.log_combined(logits, "mean"), [[0, -1e3 - np.log(2)]], rtol=1e-12
    )


def test_a_temperature_brings_small_probabilities_back():
    """In float32, exp(-200) is 0; at temperature 40 it is exp(-5)."""
    made = spmd.Ensemble([scaled([200.0, 0.0])])
    x = np.ones(2, np.float32)
    assert made.predict(x)[0].tolist() == [1.0, 0.0]
    made.temperature = 40.0
    np.testing.assert_allclose(
        made.predict(x)[0], [1 / (1 + np.exp(-5)), 1 / (1 + np.exp(5))], rtol=1e-5
    )


def test_a_right_class_that_is_impossible_has_no_temperature():
    made = spmd.Ensemble([scaled([1.0, 1.0, -np.inf])])
    with pytest.raises(
        EnsembleError, match=r"1 of 2 labels have probability 0.*\n    fix: members that give"
    ):
        made.calibrate(np.ones(2, np.float32), np.array([0, 2]))
    assert made.temperature == 1.0


def test_records_that_were_skipped_are_no_data(tmp_path):
    """A row in place of one that cannot be read has weight 0; the last batch is short."""
    lines = ["1,0", "2,1", "bad,2", "3,2", "bad,0"]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *lines, ""]))

    def read():
        return spmd.data.csv(
            tmp_path / "a.csv",
            batch_size=3,
            shuffle=False,
            on_error="skip",
            types={"x": "float32", "y": "int32"},
        )

    made = spmd.Ensemble([scaled([3.0, -1.0, 0.5]), scaled([1.0, 2.0, 0.0])])
    x, y = np.array([1, 2, 3], np.float32), np.array([0, 1, 2])
    from_file, from_arrays = made.evaluate(read()), made.evaluate((x, y))
    for actual, expected in (
        (from_file.ensemble, from_arrays.ensemble),
        (from_file.members["1"], from_arrays.members["1"]),
    ):
        assert_close(actual, expected)
    counted = made.evaluate((np.append(x, np.float32(0)), np.append(y, 0)))
    assert abs(counted.ensemble["log loss"] - from_arrays.ensemble["log loss"]) > 0.01, (
        "one row more would be seen"
    )


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_batch_size_that_is_none(size):
    made = spmd.Ensemble([scaled([1.0, 2.0])])
    x, y = ROWS["x"], np.zeros(32, int)
    calls = [
        lambda n: made.predict(x, batch_size=n),
        lambda n: made.members(x, batch_size=n),
        lambda n: made.uncertainty(x, batch_size=n),
    ]
    calls += [
        lambda n: made.evaluate((x, y), batch_size=n),
        lambda n: made.calibrate(x, y, batch_size=n),
    ]
    for call in calls:
        with pytest.raises(
            OptionError, match=rf"batch_size={size}.\n    fix: a whole number from 1\."
        ):
            call(size)


X = np.zeros((4, 1), np.float32)
SAID = np.eye(3, dtype=np.float32)[[0] * 4]


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("spmd member")]


def test_two_first_questions_start_one_set_of_threads(monkeypatch):
    """The second question comes while the threads of the first are being started."""
    built, arrived, go = [], threading.Semaphore(0), threading.Event()

    def slowly(functions):
        built.append(functions)
        assert go.wait(60)
        return Workers(functions)

    class Watched:
        """A lock that counts the threads that try to enter it."""

        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            arrived.release()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    monkeypatch.setattr(module, "Workers", slowly)
    made = spmd.Ensemble({"one": lambda inputs: SAID})
    made._starting = Watched(made._starting)
    asking = [threading.Thread(target=made.ask, args=(X,), daemon=True) for _ in range(2)]
    for thread in asking:
        thread.start()
    both = [arrived.acquire(timeout=60) for _ in range(2)]
    go.set()
    for thread in asking:
        thread.join(60)
    assert both == [True, True] and len(built) == 1 and len(threads()) == 1
    made.close(60)
    assert threads() == []


def test_closing_beside_a_question_without_a_deadline(monkeypatch):
    """The slow member is running an earlier request and holds the new one; it answers that too, and
    ends.
    """
    go, began, asked, answers = threading.Event(), threading.Event(), threading.Semaphore(0), []

    def slow(inputs):
        began.set()
        assert go.wait(60)
        return SAID

    def quick(inputs):
        asked.release()
        return SAID

    made = spmd.Ensemble({"slow": slow, "quick": quick})
    deadlines_pass_after(monkeypatch, answers=1, began=began)
    made.ask(X, deadline=5.0)
    assert asked.acquire(timeout=60)
    asking = threading.Thread(target=lambda: answers.append(made.ask(X)), daemon=True)
    asking.start()
    assert asked.acquire(timeout=60), "both have been put the second question"
    made.close(seconds=0.0)
    left = threads()
    go.set()
    asking.join(60)
    assert not asking.is_alive() and answers[0].members == ("slow", "quick")
    for thread in left:
        thread.join(60)
    assert threads() == []


def test_a_question_to_threads_that_have_ended():
    workers = Workers({"one": lambda inputs: SAID})
    workers.close(60)
    with pytest.raises(
        EnsembleError, match=r"closed before this request was sent\.\n    fix: ask again"
    ):
        workers.ask(X, 4, 60)


@pytest.mark.parametrize(
    ("said", "rows"),
    [(np.nan, 3), (-np.inf, 3), (np.inf, 3), ([[0, np.nan], [0, 1], [-np.inf, 0]], 1)],
    ids=["nan", "0", "inf", "one"],
)
def test_ask_leaves_out_members_without_finite_probabilities(said, rows):
    def fine(inputs):
        return np.zeros((len(inputs), 2), np.float32)

    def bad(inputs):
        return np.broadcast_to(np.float32(said), (len(inputs), 2))

    with spmd.Ensemble({"fine": fine, "bad": bad}) as ensemble:
        answer = ensemble.ask(np.ones((3, 4), np.float32))
    assert answer.members == ("fine",) and answer.probabilities.tolist() == [[0.5, 0.5]] * 3
    assert answer.failed == {
        "bad": f"it returned float32[3, 2], {rows} of 3 rows without finite numbers"
    }


def test_logits_of_no_classes_are_left_out():
    def fine(inputs):
        return np.zeros((len(inputs), 2), np.float32)

    with spmd.Ensemble(
        {"fine": fine, "bad": lambda inputs: np.zeros((len(inputs), 0), np.float32)}
    ) as ensemble:
        answer = ensemble.ask(np.ones((3, 4), np.float32))
    assert answer.members == ("fine",) and list(answer.failed) == ["bad"]


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), 1e300, True, "1"])
def test_deadlines_that_are_none(deadline):
    with (
        spmd.Ensemble([lambda inputs: np.zeros((len(inputs), 2))]) as ensemble,
        pytest.raises(OptionError, match="deadline="),
    ):
        ensemble.ask(np.ones((3, 4), np.float32), deadline=deadline)


@pytest.mark.parametrize("members", [None, "model", 3])
def test_members_that_are_no_list(members):
    with pytest.raises(OptionError, match=r"members is .*\n    fix: a list of members"):
        spmd.Ensemble(members)
