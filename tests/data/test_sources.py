"""Sources of batches: arrays, split in shuffled order, and iterables of every kind."""

import numpy as np
import pytest
from linear import examples, fit, same

import spmd
from spmd.data import retries
from spmd.data.retries import read_epoch
from spmd.data.sources import ArraySource, IterableSource, as_source, is_arrays
from spmd.errors import DataError, OptionError


def numbered(count):
    return {"x": np.arange(count, dtype=np.int32), "y": np.arange(count, dtype=np.float32)}


def array_source(count=50, batch_size=8, *, shuffle=True, seed=3):
    return as_source(numbered(count), batch_size=batch_size, shuffle=shuffle, seed=seed)


def rows(reader, epoch, start=0):
    """The numbers of the examples, batch by batch."""
    return [batch.leaves["x"][batch.index].tolist() for batch in reader.epoch(epoch, start)]


def flat(batches):
    return [number for batch in batches for number in batch]


# arrays -------------------------------------------------------------------------------------------


def test_every_example_comes_once_per_epoch_in_another_order_each_time():
    reader = array_source()
    epochs = [flat(rows(reader, number)) for number in range(4)]
    for order in epochs:
        assert sorted(order) == list(range(50))
    assert len({tuple(order) for order in epochs}) == 4
    assert tuple(range(50)) not in map(tuple, epochs)


def test_the_order_is_decided_by_the_seed_and_the_epoch_alone():
    assert rows(array_source(), 2) == rows(array_source(), 2)
    assert rows(array_source(seed=3), 2) != rows(array_source(seed=4), 2)
    later = array_source()
    list(later.epoch(0))
    assert rows(later, 2) == rows(array_source(), 2)


@pytest.mark.parametrize("start", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_starting_in_the_middle_is_the_tail_of_the_epoch(start, shuffle):
    assert (
        rows(array_source(shuffle=shuffle), 1, start)
        == rows(array_source(shuffle=shuffle), 1)[start:]
    )


def test_the_last_batch_is_short_and_nothing_is_dropped():
    reader = array_source(50, 8)
    assert [len(batch) for batch in rows(reader, 0)] == [8] * 6 + [2]
    assert reader.steps_per_epoch == 7
    assert [batch.rows for batch in reader.epoch(0)] == [8] * 6 + [2]
    assert array_source(48, 8).steps_per_epoch == 6


def test_without_shuffling_rows_come_as_they_are():
    assert (
        flat(rows(array_source(shuffle=False), 0))
        == flat(rows(array_source(shuffle=False), 5))
        == list(range(50))
    )


def test_arrays_are_shuffled_unless_asked_not_to():
    assert as_source(numbered(50), batch_size=8, shuffle=None, seed=0).shuffle


def test_training_for_epochs_sees_every_example_once_per_epoch():
    data = {"x": np.zeros((48, 16), np.float32), "y": np.arange(48, dtype=np.float32)}
    result = fit(
        data,
        loss=lambda model, batch: (model(batch["x"])[:, 0], {"y": batch["y"]}),
        batch_size=16,
        epochs=2,
    )
    seen = result.history["y"]
    assert len(seen) == 6
    # whole numbers and a power of 2: the means are exact
    assert 16 * sum(seen[:3]) == 16 * sum(seen[3:]) == 48 * 47 / 2
    assert seen[:3] != seen[3:]


def test_arrays_and_iterables_are_distinguished():
    x = np.zeros((4, 2))
    assert is_arrays(x) and is_arrays((x, x)) and is_arrays({"x": x}) and is_arrays(({"a": x}, x))
    assert not is_arrays([x]) and not is_arrays(lambda: [x]) and not is_arrays(iter([x]))
    assert isinstance(as_source((x, x), batch_size=2, shuffle=None, seed=0), ArraySource)
    assert isinstance(as_source([{"x": x}], batch_size=None, shuffle=None, seed=0), IterableSource)


BAD_ARRAYS = {
    "nothing": (
        None,
        {},
        DataError,
        "data=None is None, not data.\n    fix: a dict or tuple of arrays, an iterable of batches, "
        "or a grain data set.",
    ),
    "a path": (
        "digits.npz",
        {},
        DataError,
        "data='digits.npz' is a str, not data.\n    fix: dict(numpy.load(\"digits.npz\")).",
    ),
    "a number": (
        7,
        {},
        DataError,
        "the data is an int: not arrays, and it cannot be iterated.\n"
        "    fix: a dict or tuple of arrays, an iterable of batches, or a grain data set.",
    ),
    "no leaves": (
        {},
        {},
        DataError,
        "the data holds no arrays: {}.\n    fix: a dict or tuple of arrays of shape [rows, ...].",
    ),
    "no examples": (
        numbered(0),
        {},
        DataError,
        "the data is empty: x int32[0], y float32[0].\n    fix: look at what it was read or "
        "filtered from.",
    ),
    "fewer than one batch": (
        numbered(5),
        {},
        DataError,
        "the data has 5 examples, fewer than one batch of 8.\n    fix: batch_size=5 or less.",
    ),
    "ragged": (
        {"x": np.zeros((8, 2), np.float32), "y": np.zeros(7, np.int32)},
        {},
        DataError,
        "the data is ragged: its leaves have different numbers of rows\n2 problems:\n\n"
        "  x   float32[8, 2]\n      has 8 rows.\n\n  y   int32[7]\n      has 7 rows.\n"
        "      fix: the same number of rows in every leaf; the smallest has 7, the largest 8.",
    ),
    "a scalar": (
        {"x": np.zeros(8), "scale": np.float32(2)},
        {},
        DataError,
        "the data: scale has no dim 0 of rows.\n    fix: arrays of shape [rows, ...].",
    ),
    "no batch size": (
        numbered(8),
        {"batch_size": None},
        OptionError,
        "batch_size is missing: arrays must be split into batches.\n    fix: such as "
        "batch_size=128.",
    ),
    "batch size 0": (
        numbered(8),
        {"batch_size": 0},
        OptionError,
        "batch_size=0.\n    fix: a whole number from 1.",
    ),
    "batch size 2.5": (
        numbered(8),
        {"batch_size": 2.5},
        OptionError,
        "batch_size=2.5.\n    fix: a whole number from 1.",
    ),
    "shuffled iterable": (
        [numbered(8)],
        {"shuffle": True},
        OptionError,
        "shuffle=True: batches of an iterable come in its own order.\n    fix: shuffle where they "
        "are made, or give arrays.",
    ),
}


@pytest.mark.parametrize("data, options, error, text", BAD_ARRAYS.values(), ids=BAD_ARRAYS.keys())
def test_data_that_cannot_be_batched_says_why(data, options, error, text):
    with pytest.raises(error) as raised:
        as_source(data, **{"batch_size": 8, "shuffle": None, "seed": 0, **options})
    assert str(raised.value) == text


def test_evaluation_data_may_be_smaller_than_a_batch():
    reader = as_source(numbered(5), batch_size=8, shuffle=False, seed=0, short_ok=True)
    assert rows(reader, 0) == [[0, 1, 2, 3, 4]]


# iterables ----------------------------------------------------------------------------------------


def batches(count=3, size=16, seed=0):
    data = examples(count * size, seed)
    return [
        {name: leaf[i * size : (i + 1) * size] for name, leaf in data.items()} for i in range(count)
    ]


def test_a_list_a_function_and_arrays_train_alike():
    arrays = examples(48)
    expected = fit(arrays, batch_size=16, shuffle=False, epochs=2)
    for data in (batches(), lambda: iter(batches()), lambda: batches()):
        result = fit(data, epochs=2)
        assert same(result.state, expected.state)
        assert result.history["loss"] == expected.history["loss"]
    assert not same(fit(batches(seed=1), epochs=2).state, expected.state)


def test_the_first_batch_is_read_once_for_its_shapes_and_not_lost():
    calls = []

    def make():
        calls.append("made")
        yield from batches()

    reader = as_source(make, batch_size=None, shuffle=None, seed=0)
    assert reader.sample()["x"].shape == (16, 16)
    assert len(list(reader.epoch(0))) == 3 and len(calls) == 1
    assert len(list(reader.epoch(1))) == 3 and len(calls) == 2


def test_starting_an_iterable_in_the_middle_is_the_tail_of_the_epoch():
    data = batches(5)
    epoch = list(as_source(data, batch_size=None, shuffle=None, seed=0).epoch(0))
    tail = list(as_source(data, batch_size=None, shuffle=None, seed=0).epoch(0, 2))
    assert [batch.leaves["x"].tobytes() for batch in tail] == [
        batch.leaves["x"].tobytes() for batch in epoch[2:]
    ]
    assert list(as_source(data, batch_size=None, shuffle=None, seed=0).epoch(0, 5)) == []


def test_a_resumed_run_notices_that_its_iterable_has_become_shorter():
    with pytest.raises(
        DataError,
        match=r"the data has 3 batches; the run to be resumed was at batch 4 of epoch 1\.",
    ):
        list(as_source(batches(3), batch_size=None, shuffle=None, seed=0).epoch(0, 4))


def test_a_generator_that_can_be_read_once_says_so_in_epoch_2():
    with pytest.raises(DataError) as raised:
        fit((batch for batch in batches()), epochs=2)
    assert str(raised.value) == (
        "the data yields nothing in epoch 2: it can be iterated only once.\n"
        "    fix: a list, or a function that returns a fresh iterator: lambda: batches()."
    )


def test_a_generator_that_can_be_read_once_is_enough_for_one_epoch():
    result = fit((batch for batch in batches()), epochs=1)
    assert len(result.history) == 3
    assert same(result.state, fit(batches(), epochs=1).state)


def test_a_generator_read_once_as_evaluation_data_says_so_the_second_time():
    with pytest.raises(DataError) as raised:
        fit(batches(), epochs=2, eval_data=(batch for batch in batches()))
    assert "it can be iterated only once" in str(raised.value)


BAD_ITERABLES = {
    "nothing": (
        [],
        {},
        "the data is empty: it yields no batch.\n"
        "    fix: look at what it is made from; an iterator that was read before has to be made "
        "anew.",
    ),
    "no rows": (
        [{"x": np.zeros((0, 2))}],
        {},
        "the data is empty: its first batch has 0 rows.\n    fix: look at what it was read or "
        "filtered from.",
    ),
    "another size": (
        [numbered(8)],
        {"batch_size": 16},
        "batch_size=16, but the data yields batches of 8 rows.\n    fix: leave batch_size out, or "
        "yield 16.",
    ),
    "ragged": (
        [{"x": np.zeros((8, 2), np.float32), "y": np.zeros(6, np.int32)}],
        {},
        "the first batch is ragged: its leaves have different numbers of rows\n2 problems:\n\n"
        "  x   float32[8, 2]\n      has 8 rows.\n\n  y   int32[6]\n      has 6 rows.\n"
        "      fix: the same number of rows in every leaf; the smallest has 6, the largest 8.",
    ),
}


@pytest.mark.parametrize("data, options, text", BAD_ITERABLES.values(), ids=BAD_ITERABLES.keys())
def test_iterables_that_cannot_be_used_say_why(data, options, text):
    with pytest.raises(DataError) as raised:
        as_source(data, **{"batch_size": None, "shuffle": None, "seed": 0, **options})
    assert str(raised.value) == text


LATER = {
    "larger": (numbered(9), r"batch 2 of epoch 1 has 9 rows, more than the 8 of the first one\."),
    "empty": (numbered(0), r"batch 2 of epoch 1 has 0 rows\."),
    "ragged": ({**numbered(8), "y": np.zeros(3)}, r"batch 2 of epoch 1 is ragged"),
    "wider": (
        {name: np.stack([leaf, leaf], 1) for name, leaf in numbered(8).items()},
        r"only the number of rows may differ\.",
    ),
    "another leaf": (
        {**numbered(8), "z": np.zeros(8)},
        r"batch 2 of epoch 1 holds .*, z; the first one held",
    ),
}


@pytest.mark.parametrize("second, pattern", LATER.values(), ids=LATER.keys())
def test_a_later_batch_that_does_not_fit_is_named(second, pattern):
    with pytest.raises(DataError, match=pattern):
        list(as_source([numbered(8), second], batch_size=None, shuffle=None, seed=0).epoch(0))


def test_a_short_batch_of_an_iterable_is_trained_on_and_counted():
    data = examples(40)
    short_last = [
        {name: leaf[first : first + 16] for name, leaf in data.items()} for first in (0, 16, 32)
    ]
    assert same(
        fit(short_last, epochs=2).state, fit(data, batch_size=16, shuffle=False, epochs=2).state
    )
    assert not same(fit(short_last[:2], epochs=3).state, fit(short_last, epochs=2).state)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_users_generator_is_closed_when_the_run_ends_early(prefetch):
    events = []

    def make():
        try:
            while True:
                yield batches(1)[0]
        finally:
            events.append("closed")

    result = fit(make, steps=3, prefetch=prefetch)
    assert int(result.state.step) == 3
    assert events == ["closed"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_users_reader_comes_out_with_its_own_lines(prefetch):
    def broken_reader():
        yield from batches(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as raised:
        fit(broken_reader, steps=10, prefetch=prefetch)
    assert "broken_reader" in [entry.name for entry in raised.traceback]


@pytest.mark.parametrize(
    "data, options, pattern",
    [
        ({"x": np.array(["a", "b"])}, {}, r"the data: x <U1\[2\] cannot be placed on a device"),
        ({"x": np.zeros(8)}, {"shuffle": "no"}, r"shuffle='no'.\n    fix: True, False, or None"),
        (
            {"x": np.zeros(8)},
            {"batch_size": True},
            r"batch_size=True.\n    fix: a whole number from 1",
        ),
    ],
    ids=["words", "shuffle", "batch size"],
)
def test_arrays_and_options_that_cannot_be_used_say_why(data, options, pattern):
    with pytest.raises(spmd.errors.SpmdError, match=pattern):
        as_source(data, **{"batch_size": 2, "shuffle": None, "seed": 0, **options})


def test_a_batch_size_may_be_numpys_own_number():
    assert (
        as_source({"x": np.zeros(8)}, batch_size=np.int64(4), shuffle=None, seed=0).batch_size == 4
    )


def test_fingerprints_of_different_data_differ():
    prints = [
        array_source().fingerprint(),
        array_source(seed=4).fingerprint(),
        array_source(48).fingerprint(),
        array_source(50, 16).fingerprint(),
        array_source(shuffle=False).fingerprint(),
    ]
    assert all(left != right for i, left in enumerate(prints) for right in prints[:i])
    short, long = (
        as_source(batches(n), batch_size=None, shuffle=None, seed=0).fingerprint() for n in (2, 3)
    )
    assert short != long


def test_fit_takes_a_tuple_of_arrays():
    data = examples(32)
    assert same(
        fit((data["x"], data["y"]), batch_size=16).state.params,
        fit(data, batch_size=16).state.params,
    )


# reading again ------------------------------------------------------------------------------------


class AwayError(OSError):
    pass


class Flaky:
    """Batches of numbers; reading some of them fails, each a number of times."""

    def __init__(self, **failures):
        self.failures = {int(name[1:]): count for name, count in failures.items()}
        self.opened = 0

    def __call__(self):
        self.opened += 1
        for number in range(5):
            if self.failures.get(number, 0):
                self.failures[number] -= 1
                raise AwayError(f"batch {number} is away")
            yield examples(8, seed=number)


@pytest.fixture
def patient(monkeypatch):
    """No long pauses."""
    monkeypatch.setattr(retries, "PAUSES", (0.0, 0.25))


def test_batches_that_cannot_be_read_are_read_again(patient, caplog):
    source = IterableSource(Flaky(), None)
    wanted = [batch.leaves["x"][0, 0] for batch in source.epoch(0)]
    flaky = Flaky(_2=3, _4=1)
    read = [
        batch.leaves["x"][0, 0] for batch in read_epoch(IterableSource(flaky, None), 0, retries=3)
    ]
    assert read == wanted and len(set(read)) == 5 and flaky.opened == 5
    where = "batch 3 of epoch 1, or one before it, could not be read (AwayError: batch 2 is away)"
    assert caplog.messages[0] == f"{where}; it is read again in 0 s, attempt 1 of 3."
    assert [message.partition("again in ")[2].split(" s,")[0] for message in caplog.messages] == [
        "0",
        "0.25",
        "0.25",
        "0",
    ]


@pytest.mark.parametrize("count", [0, 2])
def test_after_the_last_retry_the_first_error_is_raised(patient, count):
    flaky, taken = Flaky(_3=9), []
    with pytest.raises(AwayError, match="batch 3 is away") as raised:
        for batch in read_epoch(IterableSource(flaky, None), 0, retries=count):
            taken.append(batch.rows)
    assert len(taken) == 3 and flaky.opened == 1 + count and not hasattr(raised.value, "__notes__")


class Moving:
    """An iterator that continues after an error, without the batch that was not read."""

    def __init__(self):
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number == 2:
            raise AwayError
        if self.number == 5:
            raise StopIteration
        return examples(8, seed=self.number)


@pytest.mark.parametrize("make", [lambda: Flaky(_3=1)(), Moving], ids=["generator", "iterator"])
def test_an_iterator_that_can_be_opened_only_once_is_not_read_again(patient, make, caplog):
    with pytest.raises(AwayError):
        list(read_epoch(IterableSource(make(), None), 0, retries=9))
    assert not caplog.messages


def test_data_that_cannot_be_opened_for_a_moment_is_opened_again(patient):
    flaky, opened = Flaky(_2=1), []

    def make():
        opened.append(None)
        # when it is asked whether it can be opened again, and after the first pause
        if len(opened) in (2, 3):
            raise AwayError
        return flaky()

    assert len(list(read_epoch(IterableSource(make, None), 0, retries=3))) == 5 and len(opened) == 5


def test_batches_of_a_wrong_shape_are_not_read_again(patient, caplog):
    batches = [examples(8), {"x": np.zeros((8, 3), np.float32), "y": np.zeros((8, 1), np.float32)}]
    with pytest.raises(DataError):
        list(read_epoch(IterableSource(batches, None), 0, retries=9))
    assert not caplog.messages


def test_a_request_to_stop_ends_the_pauses(monkeypatch):
    monkeypatch.setattr(retries, "PAUSES", (1000.0,))
    assert (
        len(list(read_epoch(IterableSource(Flaky(_2=1), None), 0, retries=1, stops=lambda: True)))
        == 5
    )


@pytest.mark.system
def test_a_run_that_reads_again_is_the_undisturbed_run(patient):
    undisturbed = fit(Flaky(), epochs=2, eval_data=Flaky(), shuffle=None)
    flaky, away = Flaky(_1=1, _3=2), Flaky(_2=1)
    assert same(
        fit(flaky, epochs=2, eval_data=away, data_retries=2, shuffle=None).state, undisturbed.state
    )
    assert not any(flaky.failures.values()) and not any(away.failures.values())
    with pytest.raises(AwayError):
        fit(Flaky(_1=1), epochs=2, shuffle=None)
    with pytest.raises(OptionError, match="data_retries"):
        fit(Flaky(), data_retries=-1, shuffle=None)
