"""Grain data sets: iterated as they are, and resumed from their own state rather than by reading up
to the saved position.
"""

import functools

import grain
import grain.python as pygrain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear import examples, fit, same

import spmd
from spmd.errors import DataError

COUNT, BATCH = 48, 16


class Rows:
    """A random-access source that records which rows were read."""

    def __init__(self):
        self.data, self.read = examples(COUNT), []

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        self.read.append(int(row))
        return {name: leaf[row] for name, leaf in self.data.items()}


def mapped(rows):
    return grain.MapDataset.source(rows).seed(5).shuffle().batch(BATCH)


def streamed(rows):
    """An `IterDataset` has no length: the epoch ends where the iterator ends."""
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.source(rows).seed(5).shuffle().to_iter_dataset(options).batch(BATCH)


def augmented(rows):
    def noisy(row, rng):
        return {**row, "x": row["x"] + rng.normal(size=row["x"].shape).astype(np.float32)}

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return (
        grain.MapDataset.source(rows)
        .seed(5)
        .shuffle()
        .random_map(noisy)
        .to_iter_dataset(options)
        .batch(BATCH)
    )


KINDS = {"MapDataset": mapped, "IterDataset": streamed, "random augmentation": augmented}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def make(request):
    return request.param


@functools.cache
def undisturbed(make):
    return fit(make(Rows()), epochs=3)


@pytest.mark.system
def test_batches_train_as_a_list_of_them_does(make):
    expected = fit([dict(batch) for batch in make(Rows())], epochs=2)
    result = fit(make(Rows()), epochs=2)
    assert len(result.history) == 6
    assert same(result.state, expected.state)
    assert not same(
        result.state, fit(examples(COUNT), batch_size=BATCH, shuffle=False, epochs=2).state
    )


@pytest.mark.sampled(quick=9, system=2)
@pytest.mark.parametrize(
    "stop, prefetch",
    [(2, 2), (3, 2), (4, 0)],
    ids=["mid-epoch", "epoch's end", "second epoch, no thread"],
)
def test_resumed_run_equals_uninterrupted_run(make, stop, prefetch, tmp_path):
    uninterrupted = undisturbed(make)
    fit(make(Rows()), steps=stop, checkpoint=tmp_path, prefetch=prefetch)
    rest = fit(make(Rows()), epochs=3, checkpoint=tmp_path, resume=True, prefetch=prefetch)
    assert int(rest.state.step) == 9
    assert same(rest.state, uninterrupted.state)
    assert rest.history["loss"] == uninterrupted.history["loss"][stop:]


@pytest.mark.system
def test_resume_after_saving_at_the_end_of_an_epoch_of_unknown_length(tmp_path):
    """A checkpoint every 3 steps is written before the end of the data is known: the reader's state
    is already at its end.
    """
    uninterrupted = undisturbed(streamed)
    fit(streamed(Rows()), steps=3, checkpoint=spmd.Checkpoint(tmp_path, every=3))
    rest = fit(streamed(Rows()), epochs=3, checkpoint=tmp_path, resume=True)
    assert same(rest.state, uninterrupted.state)


def test_resume_does_not_read_skipped_batches(tmp_path):
    fit(streamed(Rows()), steps=2, checkpoint=tmp_path)
    rows = Rows()
    fit(streamed(rows), epochs=1, checkpoint=tmp_path, resume=True)
    first, rest = rows.read[:BATCH], rows.read[BATCH:]
    assert len(first) == BATCH  # the first batch is read for its shapes
    # then the third; the second is never read
    assert len(rest) == BATCH and not set(first) & set(rest)


@pytest.mark.system
def test_prefetched_batches_do_not_count_as_trained_on(tmp_path):
    """The saved position is that of the last batch trained on, although the reader was further
    ahead.
    """
    rows = Rows()
    fit(streamed(rows), steps=1, checkpoint=tmp_path, prefetch=2)
    uninterrupted = undisturbed(streamed)
    rest = fit(streamed(Rows()), epochs=1, checkpoint=tmp_path, resume=True)
    assert rest.history["loss"] == uninterrupted.history["loss"][1:3]


class Numbered:
    """A source as people write it: grain compares its `repr` on resuming, and here that is its
    address.
    """

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": np.full(4, index / 64, np.float32), "y": np.full(1, index / 32, np.float32)}


class Named(Numbered):
    def __repr__(self):
        return "Named"


def loader(source, seed=3):
    sampler = pygrain.IndexSampler(64, pygrain.NoSharding(), shuffle=True, num_epochs=1, seed=seed)
    return pygrain.DataLoader(
        data_source=source, sampler=sampler, operations=[pygrain.Batch(8)], worker_count=0
    )


def train_on(data, **options):
    model = spmd.FunctionalModel(
        lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"]
    )
    return spmd.fit(
        model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1), **options
    )


@pytest.mark.parametrize("kind", [Numbered, pytest.param(Named, marks=pytest.mark.system)])
def test_a_data_loader_whose_state_is_bytes_resumes(kind, tmp_path):
    sources = [kind() for _ in range(3)]  # at three addresses
    uninterrupted = train_on(loader(sources[0]), epochs=1)
    train_on(loader(sources[1]), steps=3, checkpoint=tmp_path)
    rest = train_on(loader(sources[2]), epochs=1, checkpoint=tmp_path, resume=True)
    assert rest.history["loss"] == uninterrupted.history["loss"][3:]
    assert np.array_equal(rest.state.params["w"], uninterrupted.state.params["w"])


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (loader(Named()), "DataSource in checkpoint does not match datasource in dataloader"),
        (loader(Numbered(), seed=4), "Sampler in"),
    ],
    ids=["source", "sampler"],
)
def test_a_data_loader_of_other_data_is_refused_by_name(other, what, tmp_path):
    train_on(loader(Numbered()), steps=3, checkpoint=tmp_path)
    with pytest.raises(DataError) as caught:
        train_on(other, epochs=1, checkpoint=tmp_path, resume=True)
    assert str(caught.value).startswith(
        "a DataLoaderIterator refuses the position in the data of the checkpoint: ValueError: "
        f"{what}"
    )
    assert str(caught.value).endswith(
        ".\n    fix: the source, the sampler and the number of workers that the run began with."
    )
