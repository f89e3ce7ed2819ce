"""Batches on the mesh: padded, weighted, and never sharing memory with the user's buffers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear import FEATURES, aligned, examples, fit, same, trainer

import spmd
from spmd.data import batches
from spmd.data.batches import HostBatch, Placer
from spmd.data.device_dataset import replicate_arrays
from spmd.data.narrow import narrow
from spmd.errors import DataError
from spmd.layout.schema import Batch


def one_device():
    return spmd.make_mesh("data=1", devices=jax.devices()[:1])


def placer(mesh="data=8", rows=16, *, pad=True):
    return Placer(spmd.make_mesh(mesh), lambda path: ("data",), ("data",), rows, pad=pad)


def host(rows):
    return HostBatch(examples(rows), rows)


# dtypes that jax makes narrower -------------------------------------------------------------------

WIDE = {
    "labels": (np.int64, 2**40, "int32 of int64, which holds -2147483648 to 2147483647"),
    "unsigned": (np.uint64, 2**32, "uint32 of uint64, which holds 0 to 4294967295"),
    "floats": (np.float64, 1e300, "float32 of float64, which holds -3.40"),
}


def wide_rows(kind):
    dtype, value, _ = WIDE[kind]
    y = np.zeros((16, 2), dtype)
    y[11, 1] = value
    return {"x": np.zeros((16, 2), np.float32), "y": y}


@pytest.mark.parametrize(
    "way", ["contiguous", "indexed", "one device", "of one process", "resident"]
)
@pytest.mark.parametrize("kind", WIDE)
def test_placer_names_value_that_narrower_dtype_does_not_hold(kind, way, monkeypatch):
    data, place = wide_rows(kind), placer()
    owner = "the data" if way in ("indexed", "resident") else "the batch"
    with pytest.raises(DataError) as raised:
        if way == "resident":
            replicate_arrays(data, spmd.make_mesh("data=8"))
        elif way == "of one process":
            monkeypatch.setattr(place, "_many_processes", True)
            place(HostBatch(data, 16))
        elif way == "one device":
            Placer(one_device(), lambda path: ("data",), ("data",), 16, pad=True)(
                HostBatch(data, 16)
            )
        else:
            place(HostBatch(data, 16, np.arange(16)[::-1] if way == "indexed" else None))
    value, narrowed = WIDE[kind][1:]
    text = str(raised.value)
    assert text.startswith(f"y: row 11 of {owner} holds {value}. jax makes {narrowed}")
    assert "jax_enable_x64" in text


def test_narrow_keeps_values_that_fit():
    batch = placer()(
        HostBatch({"y": np.arange(16), "z": np.full(16, np.inf), "n": np.full(16, np.nan)}, 16)
    )
    assert (
        np.array_equal(batch.leaves["y"], np.arange(16))
        and np.isinf(batch.leaves["z"]).all()
        and np.isnan(batch.leaves["n"]).all()
    )


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint32, np.float32, bool])
def test_narrow_does_not_read_dtypes_that_jax_keeps(dtype):
    class Unread(np.ndarray):
        def min(self, *args, **named):
            raise AssertionError

    values = np.ones(4, dtype).view(Unread)
    assert narrow(values, copy=False) is values


# padding and weights ------------------------------------------------------------------------------


def test_a_whole_batch_is_placed_as_it_is():
    batch = placer()(host(16))
    assert same(batch.leaves, examples(16))
    assert batch.rows == 16 and batch.split
    assert batch.leaves["x"].sharding.spec == jax.P("data") and batch.leaves[
        "x"
    ].addressable_shards[3].data.shape == (2, FEATURES)
    assert np.array_equal(batch.weights, np.ones(16)) and batch.weights.dtype == np.float32


@pytest.mark.parametrize("rows", [1, 5, 8, 15])
def test_a_short_batch_is_filled_with_its_first_row_of_weight_0(rows):
    batch = placer()(host(rows))
    x = np.asarray(batch.leaves["x"])
    assert x.shape == (16, FEATURES) and batch.rows == rows and batch.split
    assert np.array_equal(x[:rows], examples(rows)["x"])
    assert np.array_equal(x[rows:], np.repeat(examples(rows)["x"][:1], 16 - rows, axis=0))
    assert np.array_equal(batch.weights, np.arange(16) < rows)


@pytest.mark.parametrize("rows, split", [(8, True), (5, False)], ids=["divides", "does not divide"])
def test_without_padding_a_short_batch_keeps_its_rows(rows, split):
    batch = placer(pad=False)(host(rows))
    assert same(batch.leaves, examples(rows))
    assert batch.split is split and batch.leaves["x"].sharding.is_fully_replicated is not split
    assert (
        np.array_equal(batch.weights, np.ones(rows))
        and batch.weights.sharding.is_fully_replicated is not split
    )


def test_an_index_picks_the_rows():
    data, index = examples(40), np.array([39, 0, 7, 7, 3, 20, 21, 22])
    batch = placer(rows=8)(HostBatch(data, 8, index))
    assert np.array_equal(batch.leaves["x"], data["x"][index])
    short = placer(rows=8)(HostBatch(data, 3, index[:3]))
    assert np.array_equal(short.leaves["x"], data["x"][np.array([39, 0, 7, 39, 39, 39, 39, 39])])


@pytest.mark.parametrize("rows", [16, 5])
def test_arrays_that_are_on_a_device_already_are_placed_likewise(rows):
    on_device = jax.tree.map(jnp.asarray, examples(rows))
    assert same(placer()(HostBatch(on_device, rows)).leaves, placer()(host(rows)).leaves)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(on_device))


def test_wide_numbers_become_the_width_jax_computes_in():
    batch = placer()(HostBatch({"x": np.arange(16.0), "n": np.arange(16)}, 16))
    assert batch.leaves["x"].dtype == np.float32 and batch.leaves["n"].dtype == np.int32


def test_each_leaf_follows_its_own_rule():
    rules = Batch(("data",), (spmd.Rule("x", ("data", "model")),))
    layout = dataclasses.replace(spmd.Layout.load("data_parallel"), batch=rules)
    batch = trainer(mesh="data=4,model=2", layout=layout).place(examples(16))
    assert batch.leaves["x"].sharding.spec == jax.P("data", "model") and batch.leaves[
        "y"
    ].sharding.spec == jax.P("data")
    assert same(batch.leaves, examples(16))


# memory of the caller's own -----------------------------------------------------------------------


def test_jax_alone_shares_aligned_memory_with_the_caller():
    """Why the tests below can fail: on CPU, what `device_put` returns changes when the caller's
    buffer does.
    """
    mesh = spmd.make_mesh("data=8")
    for sharding in (None, jax.NamedSharding(mesh, jax.P("data"))):
        buffer = aligned((64, FEATURES))
        buffer[:] = 1
        shared = jax.block_until_ready(jax.device_put(buffer, sharding))
        buffer[:] = 2
        assert np.asarray(shared).max() == 2


@pytest.mark.parametrize(
    "pad, rows", [(True, 64), (True, 40), (False, 64), (False, 40), (False, 20)]
)
@pytest.mark.parametrize("index", [None, "in order"])
@pytest.mark.parametrize("devices", [8, 1])
def test_a_placed_batch_shares_no_memory_with_the_buffer(pad, rows, index, devices):
    buffer = aligned((64, FEATURES))
    buffer[:] = 1
    host_batch = HostBatch({"x": buffer[:rows]}, rows, None if index is None else np.arange(rows))
    batch = placer("data=8" if devices == 8 else one_device(), rows=64, pad=pad)(host_batch)
    buffer[:] = 2
    assert np.asarray(batch.leaves["x"]).max() == 1


def test_resident_arrays_share_no_memory_with_the_buffer():
    from spmd.data.device_dataset import replicate_arrays

    buffer = aligned((64, FEATURES))
    buffer[:] = 1
    resident = replicate_arrays({"x": buffer}, spmd.make_mesh())
    buffer[:] = 2
    assert np.asarray(resident["x"]).max() == 1


def fresh_batches(count=6, rows=64):
    for number in range(count):
        yield examples(rows, seed=number)


def reused_batches(count=6, rows=64):
    """Every batch in the same two buffers, filled with NaN as soon as the reader is asked for the
    next one.
    """
    buffers = {"x": aligned((rows, FEATURES)), "y": aligned((rows, 1))}
    for batch in fresh_batches(count, rows):
        for name, buffer in buffers.items():
            buffer[:] = batch[name]
        yield buffers
        for buffer in buffers.values():
            buffer[:] = np.nan


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("layout", ["data_parallel", "fsdp", "one device"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_generator_may_reuse_its_buffer(prefetch, layout):
    mesh, layout = (one_device(), "data_parallel") if layout == "one device" else (None, layout)
    expected = fit(
        fresh_batches,
        prefetch=prefetch,
        epochs=2,
        mesh=mesh,
        layout=layout,
        eval_data=fresh_batches,
    )
    result = fit(
        reused_batches,
        prefetch=prefetch,
        epochs=2,
        mesh=mesh,
        layout=layout,
        eval_data=reused_batches,
    )
    assert same(result.state, expected.state)
    assert result.history["loss"] == expected.history["loss"]
    assert result.history["eval_loss"] == expected.history["eval_loss"]


def test_generator_test_would_notice_shared_memory(monkeypatch):
    def share(self, host_batch):
        leaves = jax.tree.map(
            lambda x: jax.device_put(x, jax.NamedSharding(self._mesh, jax.P("data"))),
            host_batch.leaves,
        )
        return batches.Batch(
            leaves,
            self.weights(host_batch.rows, host_batch.rows, True),
            host_batch.rows,
            True,
            host_batch.position,
        )

    expected = fit(fresh_batches)
    monkeypatch.setattr(Placer, "__call__", share)
    with pytest.raises(spmd.errors.DivergedError):
        fit(reused_batches, prefetch=2)
    assert np.isfinite(expected.history["loss"]).all()


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("devices", [8, 1])
def test_a_buffer_given_to_trainer_step_may_be_overwritten_at_once(devices):
    def train(overwrite):
        ours, buffer = trainer(mesh=None if devices == 8 else one_device()), aligned((64, FEATURES))
        state = ours.init()
        for batch in fresh_batches():
            buffer[:] = batch["x"]
            state, metrics = ours.step(state, {"x": buffer, "y": batch["y"]})
            if overwrite:
                buffer[:] = np.nan
        return state, metrics["loss"]

    (left, loss), (right, other_loss) = train(True), train(False)
    assert same(left, right) and loss == other_loss
