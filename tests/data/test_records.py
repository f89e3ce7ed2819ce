"""Records of files: their order, the saved position, the rows that each process reads, and records
that cannot be read.
"""

import gc
import json
import logging
import os
import pickle

import numpy as np
import pytest
import written
from linear import fit, same

import spmd
from spmd.data import record_index
from spmd.data.shuffle import RecordOrder
from spmd.data.sources import RecordSource, as_source
from spmd.errors import DataError, OptionError
from tests.compare import assert_close

ROWS = 50


@pytest.fixture
def folder(tmp_path):
    """Three CSV files; x is the number of the record, y half of it."""
    for number, (first, end) in enumerate([(0, 20), (20, 21), (21, ROWS)]):
        written.csv(
            tmp_path / f"part-{number}.csv", [f"{at},{at / 2}" for at in range(first, end)], "x,y"
        )
    return tmp_path


def records(folder, **options):
    return spmd.data.csv(folder / "part-*.csv", **{"batch_size": 8, "seed": 3, **options})


def numbers(batches):
    return [batch["x"].tolist() for batch in batches]


def flat(batches):
    return [number for batch in batches for number in batch]


# order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False, 2, 16, 49, 1000])
def test_every_record_comes_once_per_epoch(folder, shuffle):
    data = records(folder, shuffle=shuffle)
    epochs = [flat(numbers(data.epoch(number))) for number in range(3)]
    assert all(sorted(order) == list(range(ROWS)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == (1 if shuffle is False else 3)


def test_all_shuffled_is_the_order_of_arrays(folder):
    arrays = as_source({"x": np.arange(ROWS)}, batch_size=8, shuffle=True, seed=3)
    for epoch in (0, 5):
        assert flat(numbers(records(folder).epoch(epoch))) == arrays.order(epoch).tolist()


def test_a_window_mixes_and_reads_in_runs():
    """Within 160 records there are runs of 10 neighbours; none is spread over more than two
    windows.
    """
    order = RecordOrder(1600, 160, seed=0).epoch(0)
    windows = [set(order[first : first + 160] // 10) for first in range(0, 1600, 160)]
    assert all(len(runs) == 16 for runs in windows)
    assert np.abs(np.diff(order[:160])).mean() > 100  # and they are far from each other
    # without a window there are more runs
    assert len(set(RecordOrder(1600, True, seed=0).epoch(0)[:160] // 10)) > 60


# position -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("taken", [0, 1, 4, 6, 7])
def test_resuming_from_a_state_equals_never_stopping(folder, workers, taken):
    expected = numbers(records(folder).epoch(2))
    batches = records(folder, workers=workers).epoch(2)
    head = [next(batches)["x"].tolist() for _ in range(taken)]
    state = json.loads(json.dumps(batches.get_state()))
    batches.close()
    rest = iter(records(folder, workers=3 - workers))
    rest.set_state(state)
    assert head + numbers(rest) == expected


def test_a_state_of_other_data_is_refused(folder):
    state = iter(records(folder)).get_state()
    with pytest.raises(
        DataError, match=r"seed was 3, and is 4; .*|.*seed was 3, and is 4\."
    ) as raised:
        iter(records(folder, seed=4)).set_state(state)
    assert "batch_size" not in str(raised.value)
    for part in ({"data": None}, {"batch": -1}, {"epoch": True}, {"skipped": "0"}):
        with pytest.raises(DataError, match="this is no state of records"):
            iter(records(folder)).set_state({**state, **part})


def global_batches(reader, size, epoch=1, start=0):
    """Global batches of `size` processes: each process reads its local rows of a full batch, and
    all rows of a short one.
    """
    by_process = []
    for rank in range(size):
        part = RecordSource(reader)
        part.local_rows = np.arange(8).reshape(size, -1)[rank] if size > 1 else None
        by_process.append(list(part.epoch(epoch, start)))
    for batches in zip(*by_process, strict=True):
        rows = batches[0].rows
        local_rows = [
            np.arange(8).reshape(size, -1)[rank] if size > 1 and rows == 8 else np.arange(rows)
            for rank in range(size)
        ]
        global_batch = np.zeros(rows, np.int32)
        for batch, local in zip(batches, local_rows, strict=True):
            global_batch[local] = batch.leaves["x"][local]
        yield global_batch.tolist()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 3])
def test_batches_are_the_same_in_any_number_of_processes(folder, size, start):
    """Also from any position, which is a number of batches."""
    assert (
        list(global_batches(records(folder, workers=size % 3), size, start=start))
        == numbers(records(folder).epoch(1))[start:]
    )


def test_a_process_reads_its_own_rows_only(folder):
    data, read = records(folder), []
    read_records = data.format.read_records
    data.format.read_records = lambda ids: read.append(len(ids)) or read_records(ids)
    half = RecordSource(data)
    half.local_rows = np.arange(4)
    batches = list(half.epoch(0))
    # one batch, two together, then the rest: the last one is short, and all of its rows are read
    assert read == [4, 2 * 4, 3 * 4 + 2]
    assert not batches[0].leaves["x"][4:].any() and batches[0].leaves["x"][:4].all()


def test_records_go_to_other_processes(folder):
    data = records(folder)
    list(data)
    assert numbers(pickle.loads(pickle.dumps(data))) == numbers(data)


def open_files(folder):
    """The paths in a folder that this process has open."""
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sorted(
        os.path.basename(path) for path in links if path.startswith(str(folder.resolve()))
    )


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="open files are listed only on Linux"
)
@pytest.mark.parametrize("most", [256, 2], ids=["kept open", "opened for each read"])
def test_files_are_closed_with_the_records_or_after_each_read(folder, monkeypatch, most):
    monkeypatch.setattr(record_index, "OPEN", most)
    data = records(folder, shuffle=False)
    assert flat(numbers(data)) == list(range(ROWS))
    assert open_files(folder) == (
        [f"part-{number}.csv" for number in range(3)] if most == 256 else []
    )
    del data
    gc.collect()
    assert open_files(folder) == []


# training -----------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, 16)).astype(np.float32)
    y = x[:, 0] - 2 * x[:, 1]
    names = [f"x{at}" for at in range(16)]
    lines = [
        ",".join(map(repr, map(float, [*row, label]))) for row, label in zip(x, y, strict=True)
    ]
    path = written.csv(tmp_path / "table.csv", lines, ",".join([*names, "y"]))
    options = {"columns": {"x": names, "y": ["y"]}, "batch_size": 16}
    return path, options, {"x": x, "y": y[:, None]}


def test_training_on_a_file_is_training_on_its_arrays(table):
    path, options, arrays = table
    data = spmd.data.csv(path, workers=2, **options)
    assert data.fields["x"].shape == (16,)
    by_file, by_array = fit(data, epochs=2), fit(arrays, batch_size=16, epochs=2)
    assert len(by_file.history) == 6 and same(by_file.state, by_array.state)
    assert by_file.evaluate(data) == by_array.evaluate(data)
    assert not same(fit(spmd.data.csv(path, seed=1, **options), epochs=2).state, by_array.state)


@pytest.mark.system
@pytest.mark.parametrize("stop", [3, 5])
def test_resumed_run_equals_uninterrupted_run(table, tmp_path, stop):
    path, options, _ = table
    uninterrupted = fit(spmd.data.csv(path, **options), epochs=3)
    fit(spmd.data.csv(path, workers=2, **options), steps=stop, checkpoint=tmp_path / "run")
    rest = fit(spmd.data.csv(path, **options), epochs=3, checkpoint=tmp_path / "run", resume=True)
    assert same(rest.state, uninterrupted.state) and int(rest.state.step) == 9
    assert rest.history["loss"] == uninterrupted.history["loss"][stop:]


def test_resume_rejects_other_files(table, tmp_path):
    path, options, _ = table
    fit(spmd.data.csv(path, **options), steps=1, checkpoint=tmp_path / "run")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    with pytest.raises(spmd.errors.CheckpointError, match="examples"):
        fit(spmd.data.csv(path, **options), epochs=1, checkpoint=tmp_path / "run", resume=True)


def test_fit_rejects_options_that_contradict_the_records(table):
    path, options, _ = table
    data = spmd.data.csv(path, **options)
    with pytest.raises(OptionError, match="batch_size=8, but the records come with batch_size=16"):
        fit(data, batch_size=8, epochs=1)
    with pytest.raises(
        OptionError,
        match=r"shuffle=False, but the records come with shuffle=True\.\n    fix: leave shuffle "
        r"out "
        r"here; it is given to what reads",
    ):
        fit(data, shuffle=False, epochs=1)
    with pytest.raises(DataError, match="fewer than one batch of 64"):
        fit(spmd.data.csv(path, **{**options, "batch_size": 64}), epochs=1)


# batches that are read together -------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_read_together_are_those_read_alone(folder, monkeypatch, workers):
    data, alone = records(folder, workers=workers, batch_size=3), records(folder, batch_size=3)
    alone.format.together = 1
    sizes = [
        [len(group) for group in reader.group_batches(list(range(17)), 3)]
        for reader in (data, alone)
    ]
    assert sizes == [[1, 2, 4, 4, 4, 2] if workers else [1, 2, 4, 8, 2], [1] * 17], (
        "each thread has some"
    )
    # a record has 8 bytes, a batch 3 records
    monkeypatch.setattr("spmd.data.records.BYTES", 8 * 3 * 5)
    assert max(len(group) for group in data.group_batches(list(range(40)), 3)) == 5
    for epoch, start in [(0, 0), (1, 5), (1, 17)]:
        for batch, expected in zip(
            data.epoch(epoch, start), alone.epoch(epoch, start), strict=True
        ):
            assert batch.keys() == expected.keys() and all(
                np.array_equal(batch[name], expected[name]) for name in batch
            )


@pytest.mark.parametrize("workers", [0, 2])
def test_error_is_raised_at_the_batch_that_it_belongs_to(folder, workers):
    """Record 13 cannot be read; later the third file has shrunk. Earlier batches are still yielded,
    though read with later ones.
    """
    path = folder / "part-0.csv"
    path.write_text(path.read_text().replace("13,", "1x,"))
    batches = iter(records(folder, shuffle=False, workers=workers, batch_size=2))
    assert [next(batches)["x"].tolist() for _ in range(6)] == [
        [at, at + 1] for at in range(0, 12, 2)
    ]
    with pytest.raises(
        DataError, match=r"part-0.csv, line 15: column \"x\" has '1x', which is not a number\n"
    ):
        next(batches)
    data = records(folder, shuffle=False, workers=workers, on_error="skip", batch_size=2)
    last = folder / "part-2.csv"
    last.write_bytes(last.read_bytes()[:-4])
    seen = []
    with pytest.raises(
        DataError, match=r"part-2.csv has \d+ bytes, and had \d+ when it was indexed"
    ):
        for batch in data:
            seen += batch["x"].tolist()
    assert seen == [at for at in range(48) if at != 13]


# records that cannot be read ----------------------------------------------------------------------


def damaged(table):
    """Records 5 and 40 have no number."""
    path, _, _ = table
    lines = path.read_text().splitlines()
    for record in (5, 40):
        lines[record + 1] = "x" + lines[record + 1]
    path.write_text("\n".join(lines))


def test_first_unreadable_record_stops_the_run(table):
    damaged(table)
    path, options, _ = table
    with pytest.raises(
        DataError, match=r"table.csv, line 7: column \"x0\" has 'x0\.\d+', which is not a number"
    ) as raised:
        fit(spmd.data.csv(path, shuffle=False, types={"x0": "float32"}, **options), epochs=1)
    assert "fix: repair the file, or on_error=" in str(raised.value)


def test_skipped_records_have_no_weight_and_are_counted(table, caplog):
    damaged(table)
    path, options, arrays = table
    data = spmd.data.csv(
        path, shuffle=False, types={"x0": "float32"}, on_error="skip", workers=2, **options
    )
    with caplog.at_level(logging.WARNING, "spmd"):
        result = fit(data, epochs=1)
    assert "epoch 1 did without 2 of 44 records" in caplog.text
    labels = np.delete(arrays["y"][:16], 5, axis=0)
    losses = result.history["loss"]
    assert_close(losses[0], np.mean(labels**2))  # parameters are zeros at the first step
    assert losses[0] != pytest.approx(np.mean(arrays["y"][:16] ** 2), rel=1e-3)
    assert len(losses) == 3
    batches = iter(data)
    assert [len(batch["x"]) for batch in batches] == [15, 16, 11]


def test_skips_are_in_the_state(table, caplog):
    damaged(table)
    path, options, _ = table
    options = {**options, "shuffle": False, "types": {"x0": "float32"}, "on_error": "skip"}
    batches = iter(spmd.data.csv(path, **options))
    next(batches)
    state = batches.get_state()
    assert state["skipped"] == 1 and state["batch"] == 1
    rest = iter(spmd.data.csv(path, **options))
    rest.set_state(state)
    with caplog.at_level(logging.WARNING, "spmd"):
        list(rest)
    assert "without 2 of 44" in caplog.text


def test_skipping_needs_a_loss_per_row(table):
    damaged(table)
    path, options, _ = table
    data = spmd.data.csv(path, shuffle=False, types={"x0": "float32"}, on_error="skip", **options)
    with pytest.raises(
        DataError,
        match=r"1 of the 16 records of a batch were skipped\. Neither a loss with one number",
    ):
        fit(
            data, epochs=1, loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
        )


def test_invalid_options_raise(folder):
    for options, text in [
        ({"batch_size": 0}, "batch_size=0.\n    fix: a whole number from 1"),
        ({"workers": -1}, "workers=-1"),
        ({"shuffle": 1}, "shuffle=1 is an int"),
        ({"shuffle": "yes"}, "shuffle='yes' is a str"),
        ({"on_error": "skp"}, 'did you mean "skip"'),
        ({"seed": 2**63}, r"a whole number below 2\*\*63"),
    ]:
        with pytest.raises(OptionError, match=text):
            records(folder, **options)
    data = records(folder)
    for where, text in [
        ((-1,), "epoch=-1.\n    fix: a whole number from 0"),
        ((0, -1), "start=-1"),
        ((0.5,), "epoch=0.5"),
    ]:
        with pytest.raises(OptionError, match=text):
            data.epoch(*where)
    for state in ({}, None, {"epoch": 0}):
        with pytest.raises(
            DataError, match=r"this is no state of records.*\n    fix: what get_state"
        ):
            iter(data).set_state(state)


def test_options_accept_numpy_numbers(folder):
    batches = iter(records(folder, batch_size=np.int64(8), seed=np.int64(3), shuffle=np.int64(16)))
    next(batches)
    assert json.loads(json.dumps(batches.get_state()))["data"]["batch_size"] == 8


def broken(table, bad):
    """Records without a number."""
    path, options, _ = table
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join("x" + line if at - 1 in bad else line for at, line in enumerate(lines))
    )
    return spmd.data.csv(path, **options, shuffle=False, types={"x0": "float32"}, on_error="skip")


def test_batches_without_a_readable_record_are_skipped(table, caplog):
    batches = iter(broken(table, range(16, 44)))
    with caplog.at_level(logging.WARNING, "spmd"):
        assert [len(batch["x"]) for batch in batches] == [16]
    assert batches.taken == 3 and "without 28 of 44" in caplog.text


def test_short_last_batch_without_a_readable_record_is_no_step(table, caplog):
    data = broken(table, range(32, 44))
    with caplog.at_level(logging.WARNING, "spmd"):
        result = fit(data, epochs=2)
    assert len(result.history["loss"]) == 4 and np.isfinite(result.history["loss"]).all()
    assert "epoch 2 did without 12 of 44" in caplog.text


def test_all_processes_have_the_same_batches_where_one_reads_nothing(table):
    data = broken(table, [*range(8), *range(32, 44)])
    by_process = []
    for rank in range(2):
        part = RecordSource(data)
        part.local_rows = np.arange(16).reshape(2, 8)[rank]
        by_process.append(list(part.epoch(0)))
    assert [[batch.rows for batch in batches] for batches in by_process] == [[16, 16]] * 2
    nothing = by_process[0][0]
    assert not nothing.weights[:8].any() and not nothing.leaves["x"].any()
    assert by_process[1][0].weights is None and by_process[1][0].leaves["x"][8:].any()


def test_full_batch_without_a_readable_record_stops_the_run(table):
    with pytest.raises(DataError, match="none of the 16 records of a batch of epoch 1 can be read"):
        fit(broken(table, range(16)), steps=2)
