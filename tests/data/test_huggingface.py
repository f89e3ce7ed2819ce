"""Data sets of Hugging Face's package: against its own iteration, and numpy."""

import datasets
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import DataError, OptionError

ROWS = 50
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = np.arange(ROWS) % 4


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict(
        {"x": X.tolist(), "y": Y.tolist()},
        features=datasets.Features(
            x=datasets.List(datasets.Value("float32"), length=3), y=datasets.Value("int64")
        ),
    )


def shards(text=False):
    """A stream of five shards."""

    def generate(numbers):
        for number in numbers:
            row = {"x": X[number], "y": Y[number]}
            yield row | {"text": "a"} if text else row

    return datasets.IterableDataset.from_generator(
        generate, gen_kwargs={"numbers": np.arange(ROWS).tolist()}
    )


def train(data, **options):
    return spmd.fit(
        lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
        data,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(0.1, momentum=0.9),
        progress=False,
        **options,
    )


def joined(batches):
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_rows_in_order(rows):
    records = spmd.data.huggingface(rows, batch_size=8, shuffle=False)
    assert (records.examples, records.steps_per_epoch) == (ROWS, 7)
    read = joined(records)
    np.testing.assert_array_equal(read["x"], X)
    np.testing.assert_array_equal(read["y"], Y)
    assert read["x"].dtype == np.float32 and read["y"].dtype == np.int64


def test_each_row_comes_once_in_an_epoch(rows):
    records = spmd.data.huggingface(rows.add_column("n", list(range(ROWS))), batch_size=8)
    epochs = [joined(records.epoch(number))["n"] for number in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("workers", [0, 3])
def test_fit_is_that_of_arrays(rows, workers):
    """In the same order: the weights have the same bits."""
    arrays = train({"x": X, "y": Y.astype("int32")}, batch_size=8, epochs=3)
    if workers:
        given = train(spmd.data.huggingface(rows, batch_size=8, workers=workers), epochs=3)
    else:
        given = train(rows, batch_size=8, epochs=3)
    jax.tree.map(np.testing.assert_array_equal, given.state.params, arrays.state.params)


def test_run_resumes_at_the_next_row(rows, tmp_path):
    undisturbed = train(rows, batch_size=8, epochs=3)
    train(rows, batch_size=8, steps=10, checkpoint=tmp_path)
    resumed = train(rows, batch_size=8, epochs=3, checkpoint=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, undisturbed.state.params)
    other = rows.map(lambda row: {"x": [value + 1 for value in row["x"]]})
    with pytest.raises(spmd.SpmdError, match="contents"):
        train(other, batch_size=8, epochs=3, checkpoint=tmp_path, resume=True)


@pytest.mark.parametrize("kind", [None, "torch", "pandas", "arrow", "numpy"])
def test_format_of_the_data_set_does_not_matter(rows, kind):
    if kind == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    batch = next(iter(spmd.data.huggingface(rows.with_format(kind), batch_size=8, shuffle=False)))
    np.testing.assert_array_equal(batch["x"], X[:8])


def test_transform_of_the_user_is_kept(rows):
    doubled = rows.with_transform(lambda batch: {"x": 2 * np.asarray(batch["x"], "float32")})
    batch = next(iter(spmd.data.huggingface(doubled, batch_size=8, shuffle=False)))
    np.testing.assert_array_equal(batch["x"], 2 * X[:8])


def test_columns_and_decode(rows):
    rows = rows.add_column("text", ["word"] * ROWS)
    records = spmd.data.huggingface(rows, columns=["x"], batch_size=8, shuffle=False)
    assert list(next(iter(records))) == ["x"]

    def decode(row):
        return {"length": np.int32(len(row["text"])), "y": row["y"]}

    records = spmd.data.huggingface(rows, decode=decode, batch_size=8, shuffle=False)
    batch = next(iter(records))
    assert batch["length"].tolist() == [4] * 8 and batch["y"].tolist() == Y[:8].tolist()


def test_lists_of_many_lengths_are_padded():
    tokens = [list(range(length)) for length in (3, 1, 0, 4)]
    rows = datasets.Dataset.from_dict({"tokens": tokens})
    pad = {"tokens": spmd.data.padded(4, "int32")}
    batch = next(iter(spmd.data.huggingface(rows, pad=pad, batch_size=4, shuffle=False)))
    assert batch["tokens"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert batch["tokens_mask"].sum(1).tolist() == [3, 1, 0, 4]
    with pytest.raises(DataError, match=r"row 1: .*pad=\.\.\. pads arrays"):
        list(spmd.data.huggingface(rows, batch_size=4, shuffle=False))


def test_pictures_are_arrays():
    pictures = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype("uint8")
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"])
    )
    rows = datasets.Dataset.from_dict(
        {"image": list(pictures), "label": [0, 1, 1, 0]}, features=features
    )
    batch = next(iter(spmd.data.huggingface(rows, batch_size=4, shuffle=False)))
    np.testing.assert_array_equal(batch["image"], pictures)
    assert batch["label"].tolist() == [0, 1, 1, 0]


def test_stream_is_that_of_the_package():
    read = joined(spmd.data.huggingface(shards(), batch_size=8))
    np.testing.assert_array_equal(read["x"], X)
    result = train(shards(), batch_size=8, steps=6)
    arrays = train({"x": X, "y": Y.astype("int32")}, batch_size=8, steps=6, shuffle=False)
    jax.tree.map(np.testing.assert_array_equal, result.state.params, arrays.state.params)


def test_shuffled_stream_has_another_order_in_each_epoch():
    stream = spmd.data.huggingface(shards().shuffle(seed=0, buffer_size=20), batch_size=8)
    orders = []
    for number in range(2):
        stream.set_epoch(number)
        orders.append(joined(stream)["x"])
    assert (orders[0] != orders[1]).any() and not (orders[0] == X).all()
    assert sorted(orders[0].tolist()) == sorted(X.tolist())


def test_stream_resumes_in_the_order_of_its_epoch(tmp_path):
    """In the second epoch, whose order is not that of the first."""

    def data():
        return shards().shuffle(seed=0, buffer_size=20)

    undisturbed = train(data(), batch_size=8, epochs=3)
    train(data(), batch_size=8, steps=10, checkpoint=tmp_path)
    resumed = train(data(), batch_size=8, epochs=3, checkpoint=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, undisturbed.state.params)


def test_stream_of_batches_is_an_iterable():
    batches = shards().with_format("numpy").batch(8)
    result = train(batches, steps=6)
    rows = train(shards(), batch_size=8, steps=6)
    jax.tree.map(np.testing.assert_array_equal, result.state.params, rows.state.params)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            lambda rows: datasets.DatasetDict(train=rows),
            {},
            r'dict of data sets: train.*\n.*data\["train"\]',
        ),
        (lambda rows: [1, 2], {}, "is a list, not a data set of the package datasets"),
        (lambda rows: rows, {"columns": ["z"]}, "columns: there is no z"),
        (lambda rows: rows, {"decode": 3}, "decode is an int"),
        (lambda rows: rows.select([]), {}, "no data set has a record"),
        (
            lambda rows: rows.add_column("text", ["word"] * ROWS),
            {},
            r'row 0: decode returns .* for "text", which cannot be placed.*\n.*columns=\[',
        ),
        (lambda rows: shards(text=True), {}, 'row 0 of the stream: .* for "text"'),
        (lambda rows: shards(), {"shuffle": 100}, "shuffle=100 has no effect on a stream"),
        (lambda rows: shards(), {"workers": 2}, "workers=2 has no effect on a stream"),
        (lambda rows: shards(), {"columns": ["z"]}, "there is no z"),
    ],
)
def test_what_cannot_be_read_is_named(rows, given, options, message):
    with pytest.raises((DataError, OptionError), match=message):
        next(iter(spmd.data.huggingface(given(rows), batch_size=8, **options)))


def test_fit_of_a_data_set_without_a_batch_size(rows):
    with pytest.raises(OptionError, match="batch_size is missing"):
        train(rows, epochs=1)
