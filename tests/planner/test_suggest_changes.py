"""Known changes to the largest costs: each is planned separately, and written as it is used."""

import dataclasses
import importlib.util
import json
import tomllib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import CompileError, OptionError
from spmd.nn.parallel_context import ParallelConfig
from spmd.planner import notes, plan_data
from spmd.planner.compile import PLUGIN, Compiled
from spmd.planner.known_changes import (
    ANOTHER_BATCH,
    fuse_attention,
    layout_difference,
    recompute_time,
)
from spmd.planner.model_flops import LargeProducts
from spmd.planner.suggestions import COMPILES, plan_with
from tests.planner.test_planned_fixes import WIDTH, Net, fsdp, loss
from tests.planner.test_text_report import CASES, KEPT, make_plan

GPU = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)


@pytest.fixture
def compiler(monkeypatch):
    """Every step has the same program, which is kept; `fails` says of which layouts compiling
    fails.
    """
    compiled = Compiled(**json.loads((KEPT / "fsdp_on_too_small.json").read_text(encoding="utf-8")))
    state = {"calls": 0, "fails": lambda program: False}

    def compile_step(program, *args, **options):
        state["calls"] += 1
        if state["fails"](program):
            raise CompileError("XLA fails.", fix="another one.")
        return compiled

    monkeypatch.setattr(plan_data, "compile_step", compile_step)
    return state


FIRST = [  # of each of the three largest costs the first, then the second of each
    'precision="bfloat16"',
    '[default] params = "replicate", [optimizer] shard = "data"',
    "batch_size=64",
    '[gradients] weights = "bfloat16"',
    '[gradients] codec = "bfloat16"',
    "batch_size=64, accumulate=2",
]


def test_changes_are_planned_in_turn_up_to_the_limit(compiler):
    plan, said = make_plan("fsdp_on_too_small"), []
    assert [cost.what.partition(":")[0] for cost in plan.costs[:3]] == [
        "matrix products, at 100% of peak",
        *["exposed communication"] * 2,
    ]
    changes = plan.changes(say=said.append)
    names = [line.partition(": ")[2] for line in said]
    assert sorted(names) == sorted([*FIRST, 'batch_size=64, [remat] save = "dots"']), names
    assert said[0].startswith(f"planning change 1 of at most {COMPILES}: ") and compiler[
        "calls"
    ] == 1 + len(names)
    again = plan.changes()
    assert str(again) == str(changes), "deterministic"
    few = plan.changes(compiles=2)
    assert len(few.tried) == 2 and {change.change for change in few.tried} == set(names[:2])
    assert (
        few.left_out[0] == "not planned, beyond 2 programs: "
        f"{'; '.join(name for name in names[2:] if 'remat' not in name)}"
    )


def test_what_alters_training_is_said_and_is_never_among_the_same(compiler):
    changes = make_plan("fsdp_on_too_small").changes()
    differs = {change.change: change.differs for change in changes.tried}
    assert {name for name, why in differs.items() if not why} == {FIRST[1]}
    assert (
        differs['[gradients] codec = "bfloat16"']
        == differs['[gradients] weights = "bfloat16"']
        == "communication is lossy (bfloat16)"
    )
    assert (
        differs["batch_size=64"] == ANOTHER_BATCH
        and differs['precision="bfloat16"'] == "computed in bfloat16"
    )
    assert changes.tried[0].differs == "", "those that train the same are first"


def test_changes_are_tables_of_a_layout_or_arguments(compiler):
    plan = make_plan("fsdp_on_too_small")
    written = {change.change: change for change in plan.changes().tried}
    before = tomllib.loads(plan.layout.to_toml())
    for name, tables in (
        ("codec", {"gradients"}),
        ("weights", {"gradients"}),
        ("[default]", {"optimizer"}),
    ):
        (change,) = (change for text, change in written.items() if name in text)
        assert set(tomllib.loads(change.to_use)) == tables
        assert before | tomllib.loads(change.to_use) == tomllib.loads(
            change.plan.layout.to_toml()
        ) | ({"default": before["default"]} if name == "[default]" else {})
    assert written["batch_size=64, accumulate=2"].to_use == (
        "fit(..., batch_size=64, accumulate=2), or `spmd plan --batch-size 64 --accumulate 2`"
    )


def test_a_change_that_fails_is_rejected_with_its_reason(compiler):
    plan = make_plan("fsdp_on_too_small")
    compiler["fails"] = lambda program: program.placed.config.precision == "bfloat16"
    changes = plan.changes()
    (failed,) = (change for change in changes.tried if change.plan is None)
    assert (failed.change, failed.why) == ('precision="bfloat16"', "XLA fails.") and changes.tried[
        -1
    ] is failed
    assert '\nrejected: precision="bfloat16": XLA fails.' in str(changes)


def test_the_cost_of_a_run_is_that_of_equal_rows(compiler):
    changes = make_plan("fsdp_on_too_small").changes(steps=1000, price=3)
    assert changes.run.steps == 1000 and changes.run.rows == 32_000
    for change in changes.tried:
        assert change.run.rows == 32_000 and change.run.steps == (
            500 if "batch_size" in change.change else 1000
        )
        assert change.run.money[0] == pytest.approx(
            3 * 4 * change.run.steps * change.plan.timeline.seconds / 3600, rel=1e-9
        )
    header = next(line for line in str(changes).splitlines() if "rows/s" in line)
    assert header.split() == [
        "change",
        "step",
        "rows/s",
        "memory",
        "device-hours",
        "money",
        "training",
    ]
    assert "device-hours" not in str(make_plan("fsdp_on_too_small").changes(compiles=1))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"compiles": 0}, "compiles=0.\n    fix: a number of programs, from 1."),
        ({"compiles": True}, "compiles=True.\n    fix: a number of programs, from 1."),
        (
            {"price": 2.5},
            "one of tokens, rows and steps says how long the run is, and none is given.",
        ),
        (
            {"tokens": 1e9},
            "tokens of a row are not known: no array of the batch is one of integers",
        ),
    ],
)
def test_invalid_options_are_refused_before_anything_is_compiled(options, wanted, compiler):
    plan = make_plan("fsdp_on_too_small")
    with pytest.raises(OptionError) as caught:
        plan.changes(**options)
    assert str(caught.value).startswith(wanted) and compiler["calls"] == 1


PAIRS = [
    (spmd.Layout.load("fsdp"), spmd.Layout.load("data_parallel")),
    (spmd.Layout(remat=spmd.Remat("nothing", ("blocks/*",))), spmd.Layout()),
    (
        spmd.Layout(),
        spmd.Layout(remat=spmd.Remat("dots"), compiler=spmd.Compiler(double_buffering=False)),
    ),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_tables_that_differ_make_the_other_layout(before, after):
    text = layout_difference(before, after)
    without = [
        line.removeprefix("# without [").rstrip("]")
        for line in text.splitlines()
        if line.startswith("# without")
    ]
    kept = {
        name: table
        for name, table in tomllib.loads(before.to_toml()).items()
        if name not in without
    }
    made, wanted = kept | tomllib.loads(text), tomllib.loads(after.to_toml())
    assert {**made, "description": ""} == {**wanted, "description": ""} and before != after


def net(layout, target="4xcpu", mesh="data=4", **options):
    batch = {"x": jax.ShapeDtypeStruct((64, WIDTH), "float32")}
    return lambda **changed: spmd.plan(
        lambda: Net(True),
        **{
            "batch": batch,
            "loss": loss,
            "optimizer": optax.sgd(0.1),
            "layout": layout,
            "target": target,
            "mesh": mesh,
        }
        | options
        | changed,
    )


@pytest.mark.system
def test_each_change_is_the_plan_with_it():
    remat = spmd.Remat("nothing", ("blocks/layers",))
    layout = dataclasses.replace(fsdp(reduction="reduce_scatter", gather="layer"), remat=remat)
    plan = net(layout, "2x4xcpu", "data=8", accumulate=4)
    changes = plan().changes(compiles=12)
    found = {change.change: change for change in changes.tried}
    assert (
        found["accumulate=2"].plan.timeline.seconds
        == plan(accumulate=2).timeline.seconds
        != changes.plan.timeline.seconds
    )
    assert found["accumulate=2"].differs == ""
    twice = {"x": jax.ShapeDtypeStruct((128, WIDTH), "float32")}
    assert (
        found["batch_size=128"].plan.memory.peak
        == plan(batch=twice).memory.peak
        != changes.plan.memory.peak
    )
    (hybrid,) = (
        change
        for change in changes.tried
        if change.change.startswith("parameters sharded inside nodes")
    )
    assert hybrid.plan is not None, hybrid.why
    assert hybrid.plan.mesh.sizes == {"node": 2, "data": 4} and hybrid.differs == ""
    assert tomllib.loads(hybrid.to_use)["batch"] == {"spec": [["node", "data"]]}
    assert hybrid.to_use.endswith('# and mesh="node=2, data=4" where fit has one')
    assert 1.5 < hybrid.plan.memory.parameters / changes.plan.memory.parameters <= 2
    between = [
        transfer
        for transfer in hybrid.plan.traffic.transfers
        if transfer.purpose == "parameters" and "node" in transfer.axes
    ]
    assert not between and changes.plan.traffic.between > hybrid.plan.traffic.between


def attend(params, x):
    q, k, v = (jnp.reshape(x @ params[name], (*x.shape[:2], 4, -1)) for name in "qkv")
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


def attention_plan(width, length, rows, target, **options):
    model = spmd.FunctionalModel(
        lambda key: {name: jnp.zeros((width, width)) for name in "qkv"}, attend
    )
    batch = {name: jax.ShapeDtypeStruct((rows, length, width), "float32") for name in "xy"}
    options |= {
        "loss": lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2, (1, 2)),
        "optimizer": optax.sgd(0.1),
    }
    return spmd.plan(model, batch, target=target, **options)


def test_loops_over_time_are_noted_on_gpus():
    loops = ParallelConfig(loop_lengths={512, 64})
    [note] = notes.loop_notes(loops, "cuda")
    assert note.startswith("note: loops over time of 64, 512 steps: each step launches")
    loops.used.add("hoisted")
    [note] = notes.loop_notes(loops, "cuda")
    assert note.startswith("note: loops over time of 64, 512 steps: what does not depend on")
    assert "cuDNN" in note
    assert not [*notes.loop_notes(loops, "cpu"), *notes.loop_notes(ParallelConfig(), "cuda")]


@pytest.mark.system
def test_chunks_of_time_are_tried_where_loops_have_more_steps():
    """And take less memory."""

    def recurrent_plan(steps):
        batch = {"x": jax.ShapeDtypeStruct((64, steps, 32), "float32")}
        return spmd.plan(
            lambda: spmd.nn.RNNStack([nnx.GRUCell(32, 32, rngs=nnx.Rngs(0))]),
            batch,
            loss=lambda model, batch: (model(batch["x"]) ** 2).mean((1, 2)),
            optimizer=optax.sgd(0.1),
            layout="data_parallel",
            target=CASES["fsdp_on_too_small"]["target"],
        )

    plan = recurrent_plan(256)
    [sixty_four, sixteen] = [changes for _, changes in recompute_time(plan)]
    assert sixty_four["layout"].recurrence.time_chunk == 64
    assert plan_with(plan, sixteen).memory.peak < 0.7 * plan.memory.peak
    assert [name for name, _ in recompute_time(plan_with(plan, sixteen))] == []
    names = [name for name, _ in recompute_time(recurrent_plan(32))]
    assert names == ["[recurrence] time_chunk = 16"]


@pytest.mark.system
@pytest.mark.parametrize("width", [32, 64])
def test_attention_in_parts_is_the_first_fix_where_scores_are_stored(width):
    fused = '[attention] implementation = "chunked"'
    plan = attention_plan(width, 1024, 8, CASES["fsdp_on_too_small"]["target"])
    assert [name for name, _ in fuse_attention(plan)] == [fused]
    assert plan.fixes()[0].change == fused
    assert [
        name
        for name, _ in fuse_attention(
            attention_plan(width, 64, 32, CASES["fsdp_on_too_small"]["target"])
        )
    ] == [fused], "also where weights are as large as a row is long"
    assert (
        list(fuse_attention(attention_plan(width, 8, 32, CASES["fsdp_on_too_small"]["target"])))
        == []
    ), "scores smaller than queries"
    stored = SimpleNamespace(
        peak=100,
        largest=(
            (40, f"float32[{width},{width}]", "grad"),
            (20, "float32[8,4,64,64] x 2", "attend"),
        ),
    )
    (note,) = notes._large_arrays(
        stored, plan.program.placed, LargeProducts(frozenset({(64, 64)}), frozenset())
    )
    assert "float32[8,4,64,64]" in note, "a gradient of a weight is none of them"


FREE_LAUNCHES = """
title = "a device that computes slowly, and launches at once"
platform = "cpu"
memory = 60_000_000
memory_bandwidth = 1e9
flops = { float32 = 1e9, vector = 1e9 }
inside = { bandwidth = 1e12, latency = 1e-9 }
between = { bandwidth = 1e12, latency = 1e-9 }
achieved = { matmul = 1.0, memory = 1.0, link = 1.0, launch = 1e-12 }
"""


@pytest.mark.system
def test_less_rematerialization_lowers_the_cost_of_recomputation(tmp_path):
    (tmp_path / "slow.toml").write_text(FREE_LAUNCHES)
    layout = spmd.Layout(remat=spmd.Remat("nothing", ("blocks/layers",)))
    plan = net(layout, f"1x{tmp_path}/slow.toml", "data=1")
    changes = plan().changes()
    (cost,) = (cost for cost in changes.plan.costs[:3] if cost.kind == "recomputation")
    dots, kept = (
        change
        for change in sorted(changes.tried, key=lambda change: change.change)
        if cost.what in change.costs
    )
    assert (dots.change, kept.change) == (
        '[remat] save = "dots" modules = ["blocks/layers"]',
        "no [remat]",
    )
    assert dots.to_use == '[remat]\nsave = "dots"\nmodules = ["blocks/layers"]'
    assert kept.to_use == '[default]\nparams = "replicate"\n# without [remat]', (
        "a layout file has a table"
    )
    for change, remat in ((dots, spmd.Remat("dots", ("blocks/layers",))), (kept, spmd.Remat())):
        assert (
            change.plan.timeline.flops
            == plan(layout=spmd.Layout(remat=remat)).timeline.flops
            < changes.plan.timeline.flops
        )
        assert change.plan.memory.peak > changes.plan.memory.peak and change.differs == ""
    assert not any(cost.kind == "recomputation" for cost in kept.plan.costs)


@GPU
@pytest.mark.system
def test_fused_attention_and_options_of_the_compiler_are_changes_for_gpus():
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), attention=spmd.Attention("as_written")
    )
    plan = attention_plan(512, 512, 32, "8xh100", layout=layout, precision="bfloat16")
    changes = plan.changes()
    (fused,) = (
        change for change in changes.tried if change.change == '[attention] implementation = "auto"'
    )
    assert fused.plan.timeline.attention > 0 == plan.timeline.attention and fused.differs == ""
    assert fused.plan.timeline.seconds < plan.timeline.seconds
    assert not any("options of the compiler" in line for line in changes.left_out)
