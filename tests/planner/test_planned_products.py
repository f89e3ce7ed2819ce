"""What plans say of `[[precision]]`: which products the compiled program really holds."""

import dataclasses
import importlib.util

import jax
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt_pipeline
from spmd.planner.compile import PLUGIN
from spmd.planner.hlo import parse
from spmd.planner.layer_products import layer_products, precision_notes

LAYERS = [
    f"blocks/layers/{name}"
    for name in (
        "attention/key",
        "attention/out",
        "attention/query",
        "attention/value",
        "down",
        "up",
    )
]


def planned(products, target, layout="fsdp"):
    batch = {name: jax.ShapeDtypeStruct((4, 128), "int32") for name in ("tokens", "targets")}
    rules = (spmd.Precision("blocks/**", products),) if products else ()
    return spmd.plan(
        lambda: gpt_pipeline.GPT(
            vocab=256, width=128, depth=2, heads=2, length=128, rngs=nnx.Rngs(0)
        ),
        batch,
        loss=gpt_pipeline.cross_entropy,
        optimizer=optax.sgd(0.1),
        mesh="data=2",
        layout=dataclasses.replace(spmd.Layout.load(layout), precision=rules),
        target=target,
        precision="bfloat16",
    )


def notes(products, target):
    return [note for note in planned(products, target).notes if "products in" in note]


@pytest.mark.system
def test_a_program_for_cpus_has_no_products_in_float8():
    (note,) = notes("float8", "2xcpu")
    assert (
        note
        == "note: [[precision]] asks for products in float8, and the program multiplies float32 "
        f"in {', '.join(LAYERS)}."
    )


@pytest.mark.system
@pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)
def test_programs_for_gpus():
    plan = planned("float8", "2xh100")
    found = layer_products(parse(plan.compiled.hlo), dict.fromkeys(LAYERS, "float8"))
    named = [path for path, layer in found.items() if layer.forward == {"float8e4m3fn"}]
    assert {"blocks/layers/down", "blocks/layers/up"} <= set(named)
    assert all(layer.backward == {"float8e4m3fn", "float8e5m2"} for layer in found.values())
    lines = [note for note in plan.notes if "products in float8" in note]
    assert sorted(path for line in lines for path in LAYERS if path in line) == LAYERS and not any(
        "note:" in line for line in lines
    )
    assert plan.timeline.peak == 1979e12 > planned(None, "2xh100").timeline.peak
    (note,) = notes("float8", "2xa100_80")
    assert "the program multiplies float16 in" in note and all(path in note for path in LAYERS)
    assert all(
        "products in int8, gradients in bfloat16" in note for note in notes("int8", "2xa100_80")
    )


def test_a_layer_without_products():
    assert precision_notes(parse(""), {"a/b": "int8"}) == [
        "note: [[precision]] asks for products in int8, and the program multiplies nothing in a/b."
    ]
    assert precision_notes(parse(""), {}) == []
