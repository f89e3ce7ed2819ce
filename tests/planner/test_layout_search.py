"""Searches and fixes: what they choose from, that nothing is lost by what they leave out, and the
reasons they give.
"""

import dataclasses
import functools
import html
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmd
from spmd.errors import CompileError, SpmdError
from spmd.launch.cli import main
from spmd.layout.layout_files import shipped
from spmd.layout.schema import Batch, Remat
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner import plan_data
from spmd.planner.candidates import (
    CandidateSpace,
    chosen_layouts,
    lower_bounds_of,
    microbatches,
    remats,
    update_differences,
)
from spmd.planner.cluster import Cluster
from spmd.planner.layout_search import SearchRun
from spmd.planner.plan_data import build_plan
from spmd.planner.planning import Plan
from spmd.planner.text_report import seconds
from spmd.planner.timeline import Timeline
from spmd.train.model_setup import PlacedModel, TrainConfig
from tests.planner.test_planning import SMALL
from tests.train.plain import MODELS, batches

pytestmark = pytest.mark.system

WIDE, ROWS = 128, 256
MODEL = spmd.FunctionalModel(
    lambda key: {
        "up": jnp.zeros((64, WIDE)),
        "middle": jnp.zeros((WIDE, WIDE)),
        "down": jnp.zeros((WIDE, 8)),
    },
    lambda params, x: jnp.tanh(jnp.tanh(x @ params["up"]) @ params["middle"]) @ params["down"],
)
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, 64), "float32"),
    "y": jax.ShapeDtypeStruct((ROWS, 8), "float32"),
}
TRAINS = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1)}
TENSOR = spmd.Layout(
    mesh=(("data", -1), ("model", 2)),
    params=(
        spmd.Rule("up", (None, "model")),
        spmd.Rule("middle", ("model",)),
        spmd.Rule("down", ()),
    ),
    gradients=spmd.Gradients("all_reduce"),
    name="tensor",
)
PARAMETERS = 4 * (64 * WIDE + WIDE * WIDE + WIDE * 8)  # bytes
KIB = 1024


@pytest.fixture
def device(tmp_path):
    """A target's file with so much memory."""

    def make(memory):
        path = tmp_path / f"small{memory}.toml"
        path.write_text(SMALL.replace("memory = 60_000", f"memory = {memory}"))
        return path

    return make


def placed(mesh, layout, **options):
    spec = MeshSpec.parse(mesh)
    placed_model = PlacedModel(
        TrainConfig(MODEL, **TRAINS, **options),
        abstract_mesh(spec),
        spmd.Layout.load(layout),
        platform="cpu",
    )
    placed_model.spec.learn(BATCH)
    return placed_model


LESS = (Remat("dots"), Remat("nothing"))


def space(*layouts, devices=4, rows=ROWS, remats=LESS):
    return CandidateSpace(tuple(map(spmd.Layout.load, layouts)), remats, devices, rows)


REPLICAS = ["replica=1,data=4", "replica=2,data=2", "replica=4,data=1"]


@pytest.mark.parametrize(
    ("layout", "devices", "wanted"),
    [
        ("data_parallel", 6, ["data=6"]),
        ("fsdp_tensor_parallel", 8, ["data=4,model=2", "data=2,model=4", "data=1,model=8"]),
        ("fsdp_tensor_parallel", 6, ["data=3,model=2", "data=2,model=3", "data=1,model=6"]),
        ("fsdp_tensor_parallel", 1, []),
        ("pipeline", 8, ["data=2,stage=4", "data=1,stage=8", "data=4,stage=2"]),
        (
            "fsdp_pipeline_tensor",
            8,
            ["data=2,stage=2,model=2", "data=1,stage=2,model=4", "data=1,stage=4,model=2"],
        ),
        (
            spmd.Layout(params=(spmd.Rule("up", ("model",)),)),
            4,
            ["data=2,model=2", "data=1,model=4"],
        ),
        (
            spmd.Layout(mesh=(("replica", 1), ("data", -1)), batch=Batch((("replica", "data"),))),
            4,
            REPLICAS,
        ),
    ],
)
def test_meshes_use_all_devices_and_each_sharded_axis_has_two(layout, devices, wanted):
    """Those nearest to what the layout declares come first; without a declared mesh, the axes are
    those of its rules.
    """
    assert [
        str(mesh).replace(" ", "") for mesh in space(layout, devices=devices).meshes(0)
    ] == wanted


def test_candidates_are_all_that_can_be_said():
    """2 ways to reduce, 3 that keep less and less, and 1, 2, 4 … 64 microbatches of 256 rows on 4
    workers; in a pipeline its own too.
    """
    candidates = list(space("data_parallel").all())
    assert len(candidates) == len(set(candidates)) == 2 * 3 * 7
    assert {
        (candidate.layout.gradients.reduction, candidate.layout.remat.saves, candidate.accumulate)
        for candidate in candidates
    } == set(
        itertools.product(
            ("all_reduce", "compiler"),
            ("everything", "dots", "nothing"),
            (2**power for power in range(7)),
        )
    )
    piped = list(space("pipeline", rows=64, remats=()).groups(0))
    four_stages = [
        candidate for candidate in piped if candidate.mesh == MeshSpec.parse("data=1,stage=4")
    ]
    assert {candidate.layout.pipeline.microbatches for candidate in four_stages} == {None, 4, 8, 32}
    layout = dataclasses.replace(spmd.Layout.load("fsdp"), remat=Remat("dots"))
    assert {candidate.layout.remat.saves for candidate in space(layout).all()} == {
        "dots",
        "nothing",
    }, "never less than the layout asks for"


def test_one_layout_is_searched_as_all_that_its_axes_make():
    """A candidate has no axis of one device, no pipeline of one stage has microbatches, and what
    two layouts share comes once.
    """
    chosen = space("fsdp_tensor_parallel", "transformer_parallel", devices=8, remats=())
    groups = {str(group.mesh).replace(" ", ""): group for group in chosen.groups(1)}
    assert {
        "data=8",
        "replica=2,data=4",
        "stage=2,data=2,model=2",
        "data=2,context=2,model=2",
        "data=1,model=8",
    } <= groups.keys()
    plain = groups["data=8"].layout
    assert (plain.batch.spec, plain.pipeline.axis, plain.sequence.axis) == (("data",), None, None)
    assert dict(plain.axes)["embed"] == "data" and dict(plain.axes)["mlp"] is None
    counts = {group.mesh.sizes.get("stage", 1): set() for group in chosen.groups(1)}
    for group in chosen.groups(1):
        counts[group.mesh.sizes.get("stage", 1)].add(group.layout.pipeline.microbatches)
    assert counts[1] == {None} and counts[4] == {None, 4, 8, 32}
    both = dataclasses.replace(
        space("transformer_parallel"),
        layouts=(
            spmd.Layout.load("fsdp_tensor_parallel"),
            spmd.Layout.load("transformer_parallel"),
        ),
    )
    assert (
        not both.groups(0)
        and both.impossible(0) == "every candidate of it is one of a layout with more axes"
    )


def test_what_may_be_recomputed_is_what_repeats():
    def of(model, batch):
        config = TrainConfig(model, spmd.losses.cross_entropy, optax.sgd(0.1))
        placed_model = PlacedModel(config, abstract_mesh(MeshSpec.parse("data=1")), spmd.Layout())
        placed_model.spec.learn(batch)
        return [(remat.save, remat.modules) for remat in remats(placed_model)]

    def linear(seed=0):
        return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))

    stacked = of(
        lambda: nnx.Dict(stack=spmd.nn.LayerStack([linear(seed) for seed in range(2)])), {}
    )
    assert stacked == [("dots", ("stack/layers",)), ("nothing", ("stack/layers",))]
    assert of(
        lambda: nnx.Dict(blocks=nnx.List([nnx.Dict(up=linear(seed)) for seed in range(2)])), {}
    )[0] == ("dots", ("blocks/*",))
    assert of(linear, {})[0] == ("dots", ()), "nothing repeats: the whole forward pass"


def test_layouts_that_change_the_updates_are_left_out_with_the_reason():
    layouts, out = chosen_layouts("exact")
    assert (
        {layout.name for layout in layouts} | set(out)
        == set(shipped())
        == {layout.name for layout in chosen_layouts("all")[0]}
    )
    assert out == {
        "backup_workers": "1 of the workers' gradients are dropped in every step",
        "data_parallel_bf16": "communication is lossy (bfloat16)",
        "diloco": "communication is lossy (bfloat16) and workers do not wait for each other (mode "
        "local)",
        "fsdp_bf16": "communication is lossy (bfloat16)",
        "hierarchical_int8": "communication is lossy (int8)",
        "parameter_server_async": "communication is lossy (bfloat16) and workers do not wait for "
        "each other (mode "
        "asynchronous)",
        "power_sgd": "communication is lossy (power_sgd)",
    }
    alone = spmd.Layout(
        gradients=spmd.Gradients("parameter_server"),
        parameter_server=spmd.ParameterServer(mode="asynchronous"),
    )
    assert update_differences(alone) == "workers do not wait for each other (mode asynchronous)"


@pytest.mark.parametrize(
    ("mesh", "layout", "state", "sent"),
    [
        ("data=4", "data_parallel", 3 * PARAMETERS, 2 * 3 / 4 * PARAMETERS),
        ("data=4", "zero1", PARAMETERS + 2 * PARAMETERS // 4, 3 / 4 * PARAMETERS),
        ("data=4", "fsdp", 3 * PARAMETERS // 4, 3 / 4 * PARAMETERS),
        ("data=1,model=4", TENSOR, 3 * (PARAMETERS // 4 + 4 * WIDE * 8 * 3 // 4), 0.0),
    ],
)
def test_lower_bounds_by_hand(device, mesh, layout, state, sent):
    """Three copies of what a device has of the parameters; all gradients once over links of 1e8
    bytes per second, two nodes of two.
    """
    cluster = Cluster.parse(f"1x4x{device(10**9)}")
    alone = Timeline(
        4.0,
        products=4.0,
        memory=0.0,
        launches=0.0,
        exposed=0.0,
        hidden=0.0,
        flops=4e9,
        model_flops=4e9,
        peak=1e9,
        spans=(),
    )
    bounds = lower_bounds_of(placed(mesh, layout), cluster, alone, {"up", "middle", "down"})
    assert bounds.state == state + 16, "and Adam's count, the step and the key"
    assert (bounds.seconds, bounds.why) == (1.0, "matrix products, divided evenly")
    quick = lower_bounds_of(
        placed(mesh, layout),
        cluster,
        dataclasses.replace(alone, products=0.0),
        {"up", "middle", "down"},
    )
    latencies = {"data_parallel": 4, "zero1": 2, "fsdp": 2}.get(
        layout if isinstance(layout, str) else "", 0
    )
    links = sent / 1e8 + latencies * 1e-6 + 1e-9 if sent else 0.0
    assert quick.seconds == pytest.approx(max(links, 2 * (state + 4) / 1e9), rel=1e-12)


def search_run(target, *layouts, batch=BATCH):
    cluster = Cluster.parse(target)
    alone = build_plan(Plan, placed("data=1", spmd.Layout()), batch, Cluster(1, 1, cluster.target))
    chosen = space(
        *layouts,
        devices=cluster.count,
        rows=batch["x"].shape[0],
        remats=remats(alone.program.placed),
    )
    return SearchRun(alone, cluster, chosen, 600.0, lambda line: None)


@pytest.mark.slow
def test_search_finds_the_best_of_all_candidates(device):
    """Every candidate compiled: whatever a device has, the fastest that fits is found with fewer,
    and no floor is above its plan.
    """
    batch = {
        name: jax.ShapeDtypeStruct((32, *leaf.shape[1:]), leaf.dtype)
        for name, leaf in BATCH.items()
    }
    layouts = ("data_parallel", "fsdp", TENSOR)
    run = search_run(f"4x{device(10**9)}", *layouts, batch=batch)
    everything = {
        candidate: build_plan(Plan, run._placed(candidate), batch, run.cluster)
        for candidate in run.space.all()
    }
    for candidate, plan in everything.items():
        bounds = run._bounds_of(candidate)
        assert bounds.seconds <= plan.timeline.seconds and bounds.state <= plan.memory.peak, (
            candidate
        )
    peaks = sorted({plan.memory.peak for plan in everything.values()})
    assert len(everything) >= 90 and len(peaks) >= 9
    for memory in (peaks[-1], peaks[len(peaks) // 2], peaks[2], peaks[0]):
        best = min(
            plan.timeline.seconds for plan in everything.values() if plan.memory.peak <= memory
        )
        search = spmd.search(
            MODEL, batch, target=f"4x{device(memory)}", candidates=layouts, compiles=None, **TRAINS
        )
        assert search.complete and search.best.timeline.seconds == pytest.approx(best, rel=1e-12), (
            "the same terms, in another order"
        )
        assert set(everything) == {candidate for candidate, _ in search.plans} | set(
            search.rejected
        )
        compiled = len(search.plans) + sum(
            "compiled, and" in why for why in search.rejected.values()
        )
        print(f"{memory} bytes: {compiled} of {len(everything)} compiled")
        assert compiled < len(everything)
    assert peaks[0] < peaks[-1] and search.best.memory.peak == peaks[0]


THREE = {
    "gpt": (MODELS["gpt"], batches("gpt")[0], spmd.losses.cross_entropy),
    "cnn": (MODELS["cnn"], batches("cnn")[0], spmd.losses.cross_entropy),
    "mlp": (MODEL, BATCH, spmd.losses.mean_squared_error),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["8xcpu", "2x4xl4", "4xh100"])
@pytest.mark.parametrize("name", THREE)
def test_the_winner_is_at_least_as_fast_as_every_shipped_layout(name, target):
    model, batch, loss = THREE[name]
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    options = {"loss": loss, "optimizer": optax.adamw(1e-3), "target": target}
    search = spmd.search(model, batch, candidates="all", **options)
    planned_too = 0
    for layout in shipped():
        try:
            plan = spmd.plan(model, batch, layout=layout, **options)
        except SpmdError:
            continue  # it does not fit the model
        planned_too += 1
        # local SGD sends parameters in few of its steps
        assert search.best.period.seconds <= plan.period.seconds, layout
    assert planned_too >= 8


def test_a_search_as_a_user_sees_it(device, tmp_path, monkeypatch):
    """Names, reasons, a layout that can be committed; the same again gives the same, from the
    cache.
    """
    target = f"2x{device(600 * KIB)}"
    options = {
        "target": target,
        "candidates": ["data_parallel", "fsdp", "pipeline"],
        "compiles": 3,
        **TRAINS,
    }
    said = []
    search = spmd.search(MODEL, BATCH, say=said.append, **options)
    assert said[0] == f"compiling for one device, of 1x2x{Path(target).stem}" and len(said) == 6, (
        "and two that are refused"
    )
    assert search.best.fits and search.best.timeline.seconds == min(
        plan.timeline.seconds for _, plan in search.plans
    )
    assert len(search.plans) + len(search.rejected) == len(
        list(space("data_parallel", "fsdp", "pipeline", devices=2).all())
    )
    assert str(search) == str(spmd.search(MODEL, BATCH, **options))
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(search).splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    path = search.save(tmp_path / "deep" / "mine.toml")
    assert spmd.Layout.load(path) == search.layout and dict(search.layout.mesh) == {"data": 2}
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert (
        first.startswith(f"# Found by spmd.search for 1x2x{Path(target).stem}: ")
        and second == "# fit(..., layout=<this file>, batch_size=256)"
    )
    with pytest.raises(SpmdError, match=r"fix: a name that ends in \.toml"):
        search.save(tmp_path / "mine.txt")
    with pytest.raises(SpmdError, match=r"mine\.toml exists\."):
        search.save(path)
    assert search.save(path, overwrite=True) == path
    again = spmd.plan(MODEL, BATCH, layout=path, target=target, **TRAINS)
    assert (
        again.timeline.seconds == search.best.timeline.seconds
        and again.memory == search.best.memory
    )
    pipeline = {
        why for candidate, why in search.rejected.items() if candidate.layout.name == "pipeline"
    }
    assert len(pipeline) == 1 and "calls none" in pipeline.pop()
    front, peaks = search.front, [plan.memory.peak for _, plan in search.plans]
    assert front[0] == search.plans[0] and front[-1][1].memory.peak == min(peaks)
    assert all(
        other.memory.peak > plan.memory.peak or other.timeline.seconds >= plan.timeline.seconds
        for _, plan in front
        for _, other in search.plans
    )
    drawing = search.drawing()
    assert drawing.count("<circle") == len(search.plans) and drawing.count('r="7"') == len(
        front
    ) == str(search).count("front\n")
    assert "Pareto front" in str(search)
    shown = dataclasses.replace(search, left_out={"<b>odd</b>": "why"})._repr_html_()
    assert (
        shown.count("<tr>") == 1 + len(search.plans)
        and "&lt;b&gt;odd&lt;/b&gt;: why" in shown
        and "<b>odd" not in shown
    )
    assert repr(search.best).startswith(
        f"Plan of {search.best.layout.name} on mesh data=2 of 1x2x"
    ) and "\n" not in repr(search.best)


def test_nothing_fits_and_the_smallest_mesh_that_would_hold_it(device):
    """Under fsdp a device of two needs 511 KiB and one of four 322; with one more doubling nothing
    would change, so that is not tried.
    """
    target = f"2x{device(340 * KIB)}"
    search = spmd.search(MODEL, BATCH, target=target, candidates=["fsdp"], compiles=1, **TRAINS)
    assert (
        search.best is None
        and not search.plans
        and search.would_hold.fits
        and search.would_hold.cluster.count == 4
    )
    assert (
        f"Nothing that was compiled fits 1x2xsmall{340 * KIB}; fsdp on mesh "
        f"data={search.would_hold.cluster.count}" in str(search)
    )
    assert (
        "Nothing that was compiled fits" in search._repr_html_()
        and "<table" not in search._repr_html_()
    )
    with pytest.raises(SpmdError, match="nothing that was compiled fits") as caught:
        search.layout  # noqa: B018
    assert "would hold it" in str(caught.value)
    nowhere = spmd.search(
        MODEL,
        BATCH,
        target=f"4x{device(120 * KIB)}",
        candidates=["data_parallel"],
        compiles=1,
        **TRAINS,
    )
    assert nowhere.would_hold is None and nowhere.complete
    assert "Nothing fits" in str(nowhere) and "state alone is 300.0 KiB of 120.0 KiB" in str(
        nowhere
    )


@pytest.mark.slow
def test_half_of_the_smallest_mesh_holds_nothing_whatever_is_tried(device):
    half = search_run(f"2x{device(340 * KIB)}", "fsdp")
    half.compile_candidates(math.inf)
    assert half.best is None and len(half.plans) > 1


def test_fixes_are_planned_in_their_order_and_end_with_one_that_fits(device):
    plan = spmd.plan(MODEL, BATCH, target=f"2x{device(340 * KIB)}", **TRAINS)
    assert not plan.fits and "plan.fixes()" in str(plan)
    fixes = plan.fixes()
    changes_ = [fix.change for fix in fixes]
    assert changes_[:2] == ['[remat] save = "dots"', '[remat] save = "nothing"']
    order = ("[remat]", "accumulate", "[optimizer]", "[default]", "target")
    ranks = [
        next(rank for rank, start in enumerate(order) if change.startswith(start))
        for change in changes_
    ]
    assert ranks == sorted(ranks) and fixes[-1].fits and not any(fix.fits for fix in fixes[:-1])
    last = fixes[-1].plan
    options = last.program.placed.config
    same = spmd.plan(
        MODEL,
        BATCH,
        target=last.cluster,
        mesh=last.mesh,
        layout=last.layout,
        accumulate=options.accumulate,
        **TRAINS,
    )
    assert same.memory == last.memory and str(fixes[-1]).startswith(f"{fixes[-1].change}: fits, ")
    assert same.fixes() == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiles": 0}, "compiles=0.\n    fix: a positive integer, or None for no limit."),
        ({"max_seconds": 0}, "max_seconds=0.\n    fix: a positive number of seconds."),
        ({"candidates": "best"}, "candidates='best' is a str."),
        ({"candidates": []}, "candidates=[] is empty."),
        ({"candidates": ["fsdpp"]}, 'did you mean "fsdp"?'),
        ({"target": "4xh10"}, 'did you mean "h100"?'),
        ({"precision": "bf16"}, "precision"),
        ({"metrics": 3}, "metrics=3 is not a dict."),
        ({"timeout": 0}, "timeout=0.\n    fix: a positive number of seconds."),
        ({"timeout": "a"}, "timeout='a'."),
        ({"batch": {"x": jnp.zeros(())}}, "the batch"),
    ],
)
def test_search_rejects_bad_input_before_compiling(options, message):
    options = {"batch": BATCH, "target": "2xcpu"} | options
    with pytest.raises(SpmdError) as caught:
        spmd.search(
            MODEL, options.pop("batch"), say=lambda line: pytest.fail(line), **TRAINS, **options
        )
    assert message in str(caught.value)


def test_layouts_are_ranked_by_the_average_step_of_a_period(device):
    """The step in which DiLoCo synchronizes is slower than any of data_parallel's; its steps on
    average are faster.
    """
    search = spmd.search(
        MODEL, BATCH, target=f"4x{device(10**9)}", candidates=["data_parallel", "diloco"], **TRAINS
    )
    plans = {candidate.layout.name: plan for candidate, plan in reversed(search.plans)}
    assert (
        plans["diloco"].timeline.seconds
        > plans["data_parallel"].timeline.seconds
        > plans["diloco"].period.seconds
    )
    assert search.best.layout.name == "diloco"
    assert search.rows()[1][2] == seconds(plans["diloco"].period.seconds)


def test_a_mesh_that_is_ruled_out_does_not_rule_out_the_others(device):
    """On data=4, model=2 the state alone is too large; on data=1, model=8 it fits, and is found."""
    more = {"target": f"8x{device(80_000)}", "compiles": 4}
    model = spmd.FunctionalModel(
        lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 8))},
        lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"],
    )
    batch = {
        "x": jax.ShapeDtypeStruct((32, 64), "float32"),
        "y": jax.ShapeDtypeStruct((32, 8), "float32"),
    }
    layout = spmd.Layout(
        mesh=(("data", -1), ("model", 2)),
        params=(spmd.Rule("up", (None, "model")), spmd.Rule("down", ("model",))),
    )
    search = spmd.search(model, batch, candidates=layout, **more, **TRAINS)
    assert search.best.fits and str(search.best.mesh) == "data=1, model=8"
    assert any(
        "state alone" in why
        for candidate, why in search.rejected.items()
        if candidate.mesh == MeshSpec.parse("data=4,model=2")
    )


def test_no_program_is_started_after_the_last_second(device, monkeypatch):
    """The clock is past the end as soon as the step on one device is planned."""
    clock = itertools.count(step=100.0)
    monkeypatch.setattr(
        "spmd.planner.layout_search.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    search = spmd.search(
        MODEL, BATCH, target=f"2x{device(10**9)}", candidates=["fsdp"], max_seconds=50, **TRAINS
    )
    assert (
        not search.plans
        and not search.complete
        and {why.kind for why in search.rejected.values()} == {"limit"}
    )
    assert set(search.rejected.values()) == {"not compiled: the time limit was reached"}
    count = len(search.rejected)
    ended = (
        f"The time limit of 50 s was reached after 0 programs: {count} of {count} candidates were "
        "not tried; "
    )
    ended += "max_seconds (--max-seconds) sets it."
    assert ended in str(search).replace("\n", " ") and ended in html.unescape(search._repr_html_())
    assert search.conclusion().replace("\n", " ").endswith("s, then the time limit of 50 s.")


def test_a_candidate_that_cannot_be_compiled_is_rejected_and_the_search_continues(
    device, monkeypatch
):
    def fail(program, cluster, original=plan_data.compile_step, **options):
        if program.placed.resolved.layout.optimizer.shard:
            raise CompileError("XLA gave up\nand said so at length", summary="XLA gave up")
        return original(program, cluster, **options)

    monkeypatch.setattr(plan_data, "compile_step", fail)
    search = spmd.search(
        MODEL,
        BATCH,
        target=f"2x{device(10**9)}",
        candidates=["zero1", "data_parallel"],
        compiles=3,
        **TRAINS,
    )
    assert search.best.layout.name == "data_parallel" and not search.complete
    assert {
        why for candidate, why in search.rejected.items() if candidate.layout.name == "zero1"
    } >= {"XLA gave up"}


def test_activations_of_one_device_rule_out_what_cannot_fit(device):
    """An even share of what sixteen products keep does not fit, so the first program that is
    compiled keeps or computes less at once.
    """
    deep = spmd.FunctionalModel(
        lambda key: {f"w{number}": jnp.zeros((64, 64)) for number in range(16)},
        lambda params, x: functools.reduce(
            lambda x, name: jnp.tanh(x @ params[name]), sorted(params), x
        ),
    )
    batch = {
        "x": jax.ShapeDtypeStruct((16384, 64), "float32"),
        "y": jax.ShapeDtypeStruct((16384, 64), "float32"),
    }
    said = []
    search = spmd.search(
        deep,
        batch,
        target=f"2x{device(20 * 2**20)}",
        candidates=["fsdp"],
        compiles=4,
        say=said.append,
        **TRAINS,
    )
    least = [
        why for candidate, why in search.rejected.items() if "the activations of one device" in why
    ]
    assert least and all(why.kind == "memory" for why in least)
    assert search.best.fits and not any(
        "; the best" not in line and line.endswith("reduction reduce_scatter") for line in said
    ), said


def test_lower_bounds_leave_out_frozen_parameters(device):
    """An optimizer that freezes a large table: it is neither sent nor written, so it rules out no
    layout.
    """
    model = spmd.FunctionalModel(
        lambda key: {"table": jnp.zeros((20_000, 64)), "head": jnp.zeros((64, 8))},
        lambda params, x: params["table"][x] @ params["head"],
    )
    batch = {
        "x": jax.ShapeDtypeStruct((32,), "int32"),
        "y": jax.ShapeDtypeStruct((32, 8), "float32"),
    }
    frozen = optax.multi_transform(
        {"train": optax.adam(0.1), "keep": optax.set_to_zero()}, {"table": "keep", "head": "train"}
    )
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": frozen,
        "target": f"4x{device(10**9)}",
    }
    search = spmd.search(model, batch, candidates=["data_parallel", "fsdp"], compiles=2, **options)
    assert search.layout.name == "data_parallel"
    assert (
        search.best.timeline.seconds
        == spmd.plan(model, batch, layout="data_parallel", **options).timeline.seconds
    )


def test_microbatches_divide_the_rows_evenly():
    def counts(rows):
        candidates = space("data_parallel", devices=2, rows=rows, remats=()).all()
        return [candidate.accumulate for candidate in candidates][: len(microbatches(rows, 2)) + 1]

    assert counts(450) == [1, 3, 9, 25, 75, 225] and counts(32) == [1, 2, 4, 8, 16]


def test_what_could_not_be_tried_is_not_said_not_to_fit(device):
    """No mesh for the layout, no even batch, no time: none of these is a matter of memory."""
    none = spmd.search(
        MODEL, BATCH, target=f"1x{device(10**9)}", candidates=["tensor_parallel"], **TRAINS
    )
    assert (
        "No candidate could be planned" in str(none)
        and "1 device makes no mesh" in none.left_out["tensor_parallel"]
    )
    three = {
        name: jax.ShapeDtypeStruct((3, *leaf.shape[1:]), leaf.dtype) for name, leaf in BATCH.items()
    }
    odd = spmd.search(
        MODEL, three, target=f"4x{device(10**9)}", candidates=["data_parallel"], **TRAINS
    )
    assert (
        "No candidate could be planned" in str(odd)
        and "3 / 4 leaves 3" in str(odd)
        and odd.would_hold is None
    )


SCRIPT = """
import jax.numpy as jnp, numpy as np, optax, spmd
model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
data = {"x": np.zeros((64, 64), np.float32), "y": np.zeros((64, 8), np.float32)}
spmd.fit(model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1), batch_size=32, epochs=1, layout="zero1")
"""  # noqa: E501


def interrupted_after(count, monkeypatch):
    """Ctrl-C comes while this program is compiled, after so many others."""
    built = []

    def build(run, candidate, original=SearchRun._build):
        built.append(candidate)
        if len(built) > count:
            raise KeyboardInterrupt
        return original(run, candidate)

    monkeypatch.setattr(SearchRun, "_build", build)


def test_an_interrupted_search_keeps_what_it_has(device, monkeypatch):
    interrupted_after(2, monkeypatch)
    said = []
    candidates = ["data_parallel", "fsdp", "zero1"]
    result = spmd.search(
        MODEL, BATCH, target=f"4x{device(10**6)}", candidates=candidates, say=said.append, **TRAINS
    )
    assert (
        result.interrupted
        and not result.complete
        and len(result.plans) == result.programs == 2
        and result.best.fits
    )
    assert "not compiled: the search was interrupted" in str(result)
    shown = dataclasses.replace(result, seconds=61.2).conclusion(1).splitlines()
    assert shown[0] == "THE FASTEST 1 OF 2 THAT FIT (2 programs in 61 s, then interrupted)"
    assert (
        len(shown) == 4
        and shown[2].startswith("1")
        and shown[3].startswith(f"best: {result.plans[0][0]}: ")
    )
    assert any(re.match(r"compiling 2 of 24, \d+ s: ", line) for line in said), said


def test_a_search_without_plans_is_interrupted(device, monkeypatch):
    interrupted_after(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        spmd.search(MODEL, BATCH, target=f"4x{device(10**6)}", candidates=["fsdp"], **TRAINS)


def test_the_command(tmp_path, capsys, device):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        "search",
        str(script),
        "--target",
        f"2x{device(10**6)}",
        "--candidates",
        "data_parallel,fsdp",
        "--compiles",
        "1",
    ]
    assert main([*command, "--save", str(tmp_path / "best.toml")]) == 0
    shown, log = capsys.readouterr()
    assert re.search(
        r"^compiling for one device, .*\ncompiling 1 of 1, \d+ s: data_parallel on data=2", log
    )
    assert re.search(r"^ +candidate +step +vs best +peak", shown, re.MULTILINE)
    assert re.search(
        r"^1 +data_parallel on data=2, reduction all_reduce +[\d.]+ us +1\.00", shown, re.MULTILINE
    )
    assert re.search(
        r"\n\nTHE FASTEST 1 OF 1 THAT FIT \(1 program in \d+ s\)\n.*\n1 .*\nbest: data_parallel on "
        r"data=2, .*\n$",
        shown,
    )
    assert spmd.Layout.load(tmp_path / "best.toml").name == "best"
    assert (
        main([*command, "--save", str(tmp_path / "best.toml")]) == 2
        and "--overwrite" in capsys.readouterr().err
    )
    nothing = [*command[:3], f"2x{device(10)}", *command[4:], "--save", str(tmp_path / "none.toml")]
    assert (
        main(nothing) == 2
        and "othing " in capsys.readouterr().out
        and not (tmp_path / "none.toml").exists()
    )
    assert (
        main([*command, "--save", "best.html"]) == 2
        and "fix: a name that ends in .toml" in capsys.readouterr().err
    )
    assert main([*command[:4], "--candidates", "nothing_like_it"]) == 2
    plan = [
        "plan",
        str(script),
        "--target",
        f"2x{device(13_000)}",
        "--layout",
        "data_parallel",
        "--fixes",
    ]
    assert main(plan) == 0
    shown = capsys.readouterr().out
    assert (
        "DOES NOT FIT" in shown
        and "FIXES\neach planned" in shown
        and shown.index("[remat]") < shown.index("[optimizer]")
    )
