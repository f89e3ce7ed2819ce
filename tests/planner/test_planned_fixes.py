"""Notes of plans that name a change: it removes them."""

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmd
from spmd.planner.compile import PLUGIN
from spmd.planner.target import shipped

WIDTH, LAYERS = 64, 6
GPU = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    """Six blocks, as a stack or as a list, and optionally a penalty that reads a weight of the
    stack outside of it.
    """

    def __init__(self, stacked):
        blocks = [Block(nnx.Rngs(number)) for number in range(LAYERS)]
        self.blocks, self.stacked = (
            spmd.nn.LayerStack(blocks) if stacked else nnx.List(blocks),
            stacked,
        )

    def __call__(self, x):
        for block in [self.blocks] if self.stacked else self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2, -1)


def penalised(model, batch):
    return loss(model, batch) + 1e-3 * jnp.sum(model.blocks.layers.up.kernel.get_value() ** 2)


def planned(layout, target="4xcpu", *, stacked=True, loss=loss, **options):
    batch = {"x": jax.ShapeDtypeStruct((16, WIDTH), "float32")}
    step = {"loss": loss, "optimizer": optax.sgd(0.1), "layout": layout, "mesh": "data=4"}
    return spmd.plan(lambda: Net(stacked), batch, target=target, **step, **options)


def notes(word, *args, **options):
    return [note for note in planned(*args, **options).notes if word in note]


def fsdp(**gradients):
    return spmd.Layout(default=spmd.Default("shard:data"), gradients=spmd.Gradients(**gradients))


FULL = "gathered in full before the loop"


@pytest.mark.system
def test_stacks_gathered_before_their_loop_are_named_and_the_fix_removes_them():
    (note,) = notes(FULL, fsdp(reduction="reduce_scatter"))
    size = 4 * LAYERS * (2 * WIDTH * 4 * WIDTH + 5 * WIDTH)
    assert f", {size / 2**20:.1f} MiB, " in note or f", {size / 2**10:.1f} KiB, " in note, note
    assert "blocks/layers/" in note and note.endswith(
        '[gradients] gather = "layer" gathers one layer at a time.'
    )
    assert notes(FULL, fsdp(reduction="reduce_scatter", gather="layer")) == []


@pytest.mark.system
def test_the_fix_of_a_layout_whose_collectives_xla_chooses_removes_the_note():
    (note,) = notes(FULL, fsdp(reduction="compiler"))
    assert note.endswith(
        '[gradients] reduction = "reduce_scatter", gather = "layer" gathers one layer at a time.'
    )


@pytest.mark.system
def test_no_fix_is_named_where_it_would_be_refused():
    assert notes(FULL, fsdp(reduction="reduce_scatter"), loss=penalised) == []


@pytest.mark.system
def test_small_buckets_are_named_and_the_fix_removes_them():
    codec = {"reduction": "all_reduce", "codec": "bfloat16"}
    layout = spmd.Layout(gradients=spmd.Gradients(**codec, bucket_bytes=1))
    (note,) = notes("on latency", layout, stacked=False)
    # 24 gradients, two collectives each
    assert note.startswith("note: 48 collectives of less than 256.0 KiB send ") and "(" in note
    assert note.endswith("[gradients] bucket_bytes = 26214400 merges them.")
    fixed = dataclasses.replace(layout, gradients=spmd.Gradients(**codec, bucket_bytes=26214400))
    assert notes("on latency", fixed, stacked=False) == []


@GPU
@pytest.mark.system
@pytest.mark.parametrize(
    ("reduction", "key"),
    [("compiler", "combine_all_reduce"), ("reduce_scatter", "combine_all_gather")],
)
def test_a_threshold_that_separates_collectives_is_named_and_the_fix_removes_it(reduction, key):
    layout = fsdp(reduction=reduction) if reduction != "compiler" else spmd.Layout()
    separate, merged = (
        dataclasses.replace(layout, compiler=spmd.Compiler(**{key: size})) for size in (0, "30 MiB")
    )
    (note,) = notes("on latency", separate, "4xh100", stacked=False)
    assert note.endswith(f'[compiler] {key} = "30 MiB" merges them.')
    assert (
        notes("on latency", merged, "4xh100", stacked=False)
        == notes("on latency", layout, "4xh100", stacked=False)
        == []
    )


@GPU
@pytest.mark.system
def test_gradients_that_xla_reduces_in_bfloat16_are_named_and_both_fixes_remove_the_note():
    word, options = (
        "which the layout does not ask for",
        {"target": "4xh100", "precision": "bfloat16"},
    )
    (note,) = notes(word, spmd.Layout(), **options)
    assert note.endswith('reduction = "all_reduce" or "reduce_scatter" reduces them in float32.')
    for reduction in ("all_reduce", "reduce_scatter"):
        assert notes(word, spmd.Layout(gradients=spmd.Gradients(reduction)), **options) == []


@GPU
@pytest.mark.system
def test_memory_that_jax_does_not_use_is_named_and_the_variable_removes_the_note(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    h100, path = shipped()["h100"].read_text(), tmp_path / "small.toml"
    h100 = re.sub(r"(?ms)^\[overhead\].*?^(?=\[compiler\])|^overhead = .*?$", "", h100)
    memory = int(planned(spmd.Layout(), "4xh100").memory.peak / 0.97)
    path.write_text(re.sub(r"(?m)^memory = .*$", f"memory = {memory}", h100, count=1))
    (note,) = notes("MEM_FRACTION", spmd.Layout(), f"4x{path}")
    fraction = re.search(
        r"JAX uses 75% of a GPU's memory; this step needs "
        r"XLA_PYTHON_CLIENT_MEM_FRACTION=(0\.9\d)\.",
        note,
    )[1]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
    assert notes("MEM_FRACTION", spmd.Layout(), f"4x{path}") == []
