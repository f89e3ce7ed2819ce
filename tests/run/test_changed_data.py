"""Resuming with other batches, another order or other data keeps weights, moments and step, and
reports what of the order is lost.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.data.shuffle import RecordOrder
from spmd.data.work_assignment import Position
from spmd.run.saved_settings import resumed_position
from tests.compare import assert_close
from tests.run.small import FEATURES, fit, fit_net, numbers


def plain(batches):
    """Adam on one device over these batches."""
    weights, optimizer = {"w": jnp.zeros((FEATURES, 1))}, optax.adam(0.05)
    opt = optimizer.init(weights)
    for x, y in batches:
        grads = jax.grad(lambda p, x=x, y=y: ((x @ p["w"] - y) ** 2).mean())(weights)
        updates, opt = optimizer.update(grads, opt, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def batches(data, epoch, size, seed=0, shuffle=True, first=0):
    """Batches of an epoch from an example on, in the order of numpy's permutation."""
    rows = np.random.Generator(
        np.random.Philox(key=np.array([seed, epoch], np.uint64))
    ).permutation(len(data["x"]))
    rows = rows if shuffle else np.arange(len(data["x"]))
    return [
        (data["x"][rows[at : at + size]], data["y"][rows[at : at + size]])
        for at in range(first, len(rows), size)
    ]


def said(folder):
    """What the resumed run reports as changed."""
    (resumed,) = [
        record
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "changed" in (record := json.loads(line))
    ]
    return resumed["changed"]


@pytest.mark.parametrize(
    ("size", "first", "line"),
    [
        (16, 64, "it continues behind the first 64 examples of epoch 1"),
        (
            48,
            48,
            "it continues behind the first 48 examples of epoch 1; "
            "16 that were taken are taken again, because no batch of 48 ends after 64",
        ),
    ],
)
def test_resume_with_another_batch_size_continues_behind_what_was_taken(
    tmp_path, size, first, line
):
    data = numbers(96)
    fit(data, steps=2, checkpoint=tmp_path)
    result = fit(data, batch_size=size, epochs=2, checkpoint=tmp_path, resume="changed_data")
    rest = [
        *batches(data, 0, 32)[:2],
        *batches(data, 0, size, first=first),
        *batches(data, 1, size),
    ]
    assert_close(result.state.params, plain(rest))
    assert int(result.state.step) == len(rest) and said(tmp_path) == [
        f"batch_size was 32, is {size}",
        line,
    ]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"seed": 3}, ["seed was 0, is 3"]),
        ({"shuffle": False}, ["shuffle was True, is False"]),
        (
            {"data": numbers(128, seed=1)},
            [
                "contents x of the data have changed",
                "contents y of the data have changed",
                "examples was 96, is 128",
            ],
        ),
    ],
    ids=["seed", "shuffle", "examples"],
)
def test_resume_in_another_order_begins_the_epoch_again(tmp_path, change, lines):
    data = numbers(96)
    fit(data, steps=5, checkpoint=tmp_path)
    result = fit(
        **{"data": data, "epochs": 2, "checkpoint": tmp_path, "resume": "changed_data", **change}
    )
    again = {"seed": change.get("seed", 0), "shuffle": change.get("shuffle", True)}
    rest = [
        *batches(data, 0, 32),
        *batches(data, 1, 32)[:2],
        *batches(change.get("data", data), 1, 32, **again),
    ]
    assert_close(result.state.params, plain(rest))
    lost = (
        "epoch 2 begins again, in the new order: what it had taken before, 2 batches (64 "
        "examples), is taken again"
    )
    drawn = (
        ["random numbers, such as those of dropout, are drawn from the new seed"]
        if "seed" in change
        else []
    )
    assert said(tmp_path) == [*lines, lost, *drawn]


def test_resume_at_the_end_of_an_epoch_loses_nothing(tmp_path):
    data = numbers(96)
    fit(data, epochs=1, checkpoint=tmp_path)
    result = fit(data, seed=3, epochs=2, checkpoint=tmp_path, resume="changed_data")
    assert_close(result.state.params, plain([*batches(data, 0, 32), *batches(data, 1, 32, seed=3)]))
    assert "epoch 2 begins, in the new order" in said(tmp_path)


def test_resume_with_another_seed_draws_from_it(tmp_path):
    fit_net(steps=1, checkpoint=tmp_path)
    state = fit_net(steps=2, seed=7, checkpoint=tmp_path, resume="changed_data").state
    assert np.array_equal(state.key, jax.random.key_data(jax.random.key(7, impl="threefry2x32")))
    # from then on it is the run's seed
    later = fit_net(steps=3, seed=7, checkpoint=tmp_path, resume=True).state
    assert np.array_equal(later.key, state.key)


def test_error_offers_the_way_on(tmp_path):
    fit(steps=1, checkpoint=tmp_path)
    with pytest.raises(
        spmd.errors.CheckpointError,
        match=r'or resume="changed_data", which keeps weights, optimizer and step',
    ) as raised:
        fit(steps=2, batch_size=16, checkpoint=tmp_path, resume=True)
    assert [problem.where for problem in raised.value.problems] == ["batch_size"]


def test_position_of_streams_and_of_assigned_rows():
    """A stream without a position of its own is read up to the same example; its seed orders
    nothing.
    """
    stream = {"batch_size": 32, "batches": None, "seed": 0}
    at, (_, line) = resumed_position(
        Position(0, 4), stream, {**stream, "batch_size": 64}, ["batch_size"]
    )
    assert at == Position(0, 2) and line.endswith(
        "if the data yields the same examples in the same order"
    )
    assert resumed_position(Position(0, 4), stream, {**stream, "seed": 1}, ["seed"]) == (
        Position(0, 4),
        ["seed was 0, is 1"],
    )
    at, (_, line) = resumed_position(
        Position(0, 4, {"next": 4}), stream, {**stream, "batch_size": 64}, ["batch_size"]
    )
    assert at == Position(0) and "4 batches (128 examples), is taken again" in line, (
        "the position of grain is one in the old batches"
    )
    arrays = {"examples": 96, "batch_size": 32, "seed": 0}
    at, (_, line) = resumed_position(
        Position(1, 2, None, 7, 4), arrays, {**arrays, "batch_size": 16}, ["batch_size"]
    )
    assert at == Position(1) and "7 parts of batches" in line
    assert resumed_position(Position(1, 3), arrays, {**arrays, "batch_size": 20}, ["batch_size"])[
        0
    ] == Position(2), "the epoch had ended"


def test_resume_compares_the_seed_of_records(tmp_path):
    """It orders them, and the seed of the run does not."""
    rows = np.arange(64 * (FEATURES + 1)).reshape(64, -1) % 7
    names = [*(f"x{at}" for at in range(FEATURES)), "y"]
    (tmp_path / "a.csv").write_text(
        "\n".join(",".join(map(str, row)) for row in [names, *rows.tolist()])
    )

    def read(seed):
        columns = {"x": names[:-1], "y": names[-1:]}
        return spmd.data.csv(
            tmp_path / "a.csv",
            columns=columns,
            types=dict.fromkeys(names, "float32"),
            batch_size=16,
            shuffle=True,
            seed=seed,
        )

    options = {"batch_size": None, "checkpoint": tmp_path / "run"}
    fit(read(1), steps=1, **options)
    with pytest.raises(
        spmd.errors.CheckpointError, match=r"  seed of the records\n      saved 1, now 2"
    ):
        fit(read(2), steps=2, resume=True, **options)
    fit(read(1), steps=2, seed=5, resume="changed_data", **options)
    assert said(tmp_path / "run")[0] == "seed was 0, is 5" and not any(
        "begins" in line for line in said(tmp_path / "run")
    )


def test_order_is_numpys():
    """The reference above is the documented order."""
    assert np.array_equal(
        RecordOrder(9, True, 3).epoch(1),
        np.random.Generator(np.random.Philox(key=np.array([3, 1], np.uint64))).permutation(9),
    )
