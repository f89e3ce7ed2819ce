"""A profile has the numbers that its trace has, read here a second time from JSON, and the plan's
words and predictions beside them.
"""

import gzip
import itertools
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.device_trace import REST, Event, events_of, layer_of, measure
from spmd.planner.hlo import parse
from spmd.planner.step_profile import CLEARED, OTHER, Line, StepProfile, profile_of
from spmd.planner.timeline import LIMITS, timeline_of
from spmd.run.step_profiler import Profile

COLLECTIVE = r"psum\b|(all|reduce)[-_](reduce|gather|scatter)\b"


def read_by_hand(folder):
    """Seconds of the step's program in `trace.json.gz`: by device {"windows": [(begin, end)],
    "operations": [(name, begin, end)]}.
    """
    (path,) = folder.glob("*.trace.json.gz")
    entries = [
        entry
        for entry in json.loads(gzip.open(path).read())["traceEvents"]
        if entry.get("ph") == "X"
    ]
    begun = [
        entry for entry in entries if entry.get("args", {}).get("hlo_module") == "jit_train_step"
    ]
    ends = defaultdict(list)
    for entry in entries:
        if entry["name"].startswith("end: "):
            ends[entry["name"].removeprefix("end: ")].append((entry["ts"], entry["tid"]))
    later = []  # operations that end in another thread
    for entry in begun:
        entry["end"] = entry["ts"] + entry["dur"]
        here = [
            one
            for one in ends[entry["name"]]
            if one[1] == entry["tid"] and entry["ts"] <= one[0] <= entry["end"]
        ]
        if here:
            ends[entry["name"]].remove(here[0])
        else:
            later.append(entry)
    for entry in sorted(later, key=lambda entry: entry["ts"]):
        after = sorted(one for one in ends[entry["name"]] if one[0] >= entry["ts"])
        if after:
            entry["end"] = max(entry["end"], after[0][0])
            ends[entry["name"]].remove(after[0])
    devices = defaultdict(lambda: {"operations": [], "windows": defaultdict(list)})
    for entry in begun:
        device = devices[entry["args"]["device_ordinal"]]
        device["operations"].append((entry["name"], entry["ts"] * 1e-6, entry["end"] * 1e-6))
        device["windows"][entry["args"]["run_id"]] += [entry["ts"] * 1e-6, entry["end"] * 1e-6]
    for device in devices.values():
        device["windows"] = sorted((min(times), max(times)) for times in device["windows"].values())
    return devices


def summed_by_hand(devices):
    """Per step and device: seconds by operation, and of launches, exposed and hidden communication,
    steps, and gaps between them.
    """
    totals, operations = (
        dict.fromkeys(("launches", "exposed", "hidden", "step", "between"), 0.0),
        defaultdict(float),
    )
    for device in devices.values():
        ran, windows = device["operations"], device["windows"]
        totals["step"] += sum(end - begin for begin, end in windows)
        totals["between"] += sum(
            later[0] - early[1] for early, later in itertools.pairwise(windows)
        )
        points = sorted({at for _, begin, end in ran for at in (begin, end)})
        for begin, end in itertools.pairwise(points):
            if not any(window[0] <= begin and end <= window[1] for window in windows):
                continue
            active = [one for one in ran if one[1] <= begin and end <= one[2]]
            work = [one for one in active if not re.match(COLLECTIVE, one[0])]
            if not active:
                totals["launches"] += end - begin
                continue
            totals["exposed"] += (end - begin) * (not work)
            totals["hidden"] += (end - begin) * (bool(work) and len(work) < len(active))
            operations[max(work or active, key=lambda one: one[1])[0]] += end - begin
    steps = sum(len(device["windows"]) for device in devices.values())
    gaps = totals.pop("between") / (steps - len(devices))
    return {name: value / steps for name, value in totals.items()} | {"between": gaps}, {
        name: value / steps for name, value in operations.items()
    }


def two_layers(key):
    return {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 8))}


def apply(params, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["up"])
    with jax.named_scope("second"):
        return x @ params["down"]


def profiled(folder, devices=8, layout="fsdp", model=apply, **options):
    data = {"x": np.ones((64, 64), np.float32), "y": np.ones((64, 8), np.float32)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    options = {"steps": 6, "batch_size": 32, "profile": Profile("2:6", folder), **options}
    steps = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.01)}
    return spmd.fit(
        spmd.FunctionalModel(two_layers, model), data, mesh=mesh, layout=layout, **steps, **options
    )


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("devices", [1, 8])
def test_numbers_are_those_of_the_trace(devices, tmp_path):
    profile = profiled(tmp_path, devices).profile
    by_hand = read_by_hand(profile.folder)
    assert len(by_hand) == profile.devices == devices and all(
        len(device["windows"]) == 4 for device in by_hand.values()
    )
    totals, operations = summed_by_hand(by_hand)
    assert {one.name: one.measured for one in profile.operations if one.measured} == pytest.approx(
        operations, abs=1e-8
    )
    measured = {line.name: line.measured for line in profile.kinds}
    names = {
        "launch overhead": "launches",
        "exposed communication": "exposed",
        "hidden communication": "hidden",
    }
    names |= {"step": "step", "between steps": "between"}
    assert {name: measured[name] for name in names} == pytest.approx(
        {name: totals[part] for name, part in names.items()}, abs=1e-8
    )
    assert totals["step"] > 0 and (totals["exposed"] > 0) == (devices > 1)


def test_kinds_and_layers_add_up_to_the_step(tmp_path):
    profile = profiled(tmp_path).profile
    parts = [line for line in profile.kinds if line.name in LIMITS]
    step, launches = profile["step"], profile["launch overhead"]
    for attribute in ("measured", "predicted"):
        assert sum(getattr(line, attribute) for line in parts) == pytest.approx(
            getattr(step, attribute), rel=1e-9
        )
        layers = sum(getattr(line, attribute) or 0.0 for line in profile.layers)
        assert layers + getattr(launches, attribute) == pytest.approx(
            getattr(step, attribute), rel=1e-9
        )
    assert {"first", "second", "gathering parameters", "reducing gradients", "metrics", REST} <= {
        line.name for line in profile.layers
    }
    assert profile["first"].measured > 0 and profile["first"].predicted > 0


@pytest.mark.system
def test_evaluations_are_other_programs(tmp_path):
    data = {"x": np.ones((64, 64), np.float32), "y": np.ones((64, 8), np.float32)}
    plain, evaluated = (
        profiled(tmp_path / str(every), **options).profile
        for every, options in {0: {}, 1: {"eval_data": data, "eval_every": 1}}.items()
    )
    assert evaluated[OTHER].measured > 0 and OTHER not in {line.name for line in plain.kinds}


def test_products_are_named_as_in_plans(tmp_path):
    profile = profiled(tmp_path, devices=1).profile
    products = [one for one in profile.operations if one.kind == "matrix products"]
    assert {one.layer for one in products} >= {"first"} and sum(
        one.measured for one in products
    ) == profile["matrix products"].measured > 0
    assert profile["matrix products"].predicted == pytest.approx(
        sum(one.predicted for one in products), rel=1e-9
    )


@pytest.mark.system
def test_predictions_are_those_of_the_plan(tmp_path):
    """`spmd.plan` compiles the step in another process, and predicts the same for it."""
    result = profiled(tmp_path)
    batch = {
        "x": jax.ShapeDtypeStruct((32, 64), "float32"),
        "y": jax.ShapeDtypeStruct((32, 8), "float32"),
    }
    options = {
        "loss": spmd.losses.mean_squared_error,
        "optimizer": optax.adam(0.01),
        "layout": "fsdp",
    }
    plan = spmd.plan(spmd.FunctionalModel(two_layers, apply), batch, target="8xcpu", **options)
    for limit, seconds in plan.timeline.parts.items():
        # kinds that a step has nothing of are left out
        if limit in {line.name for line in result.profile.kinds}:
            assert result.profile[limit].predicted == pytest.approx(seconds, rel=1e-9)


@pytest.mark.system
@pytest.mark.parametrize("other", [64, 16])
def test_program_of_another_batch_is_not_confused(other, tmp_path):
    result = profiled(tmp_path / "first")
    profiled(tmp_path / "second", batch_size=other)  # its program has the same name and operations
    (trace,) = result.profile.folder.glob("*.xplane.pb")
    again = profile_of(trace, result.trainer.placed, rows=32, first=3, last=6, calls=(1, 1, 1, 1))
    assert again.layers == result.profile.layers and again.kinds == result.profile.kinds


def test_waiting_and_the_time_between_steps_are_shares_of_the_same(tmp_path):
    result = profiled(tmp_path)
    (trace,) = result.profile.folder.glob("*.xplane.pb")
    profile = profile_of(
        trace, result.trainer.placed, rows=32, first=3, last=6, calls=(1, 1, 1, 1), waited=3.0
    )
    # in three gaps
    assert "note: of the time between steps, devices wait 1 s per step for data." in profile.notes


@pytest.mark.system
def test_steps_before_a_codec_is_used_are_named(tmp_path):
    layout = spmd.Layout(gradients=spmd.Gradients("all_reduce", "int8", start_step=4))
    notes = profiled(tmp_path, layout=layout).profile.notes
    assert (
        "note: 2 of 4 steps reduce gradients exactly, before start_step=4; predicted is a step "
        "with the codec." in notes
    )


@pytest.mark.system
def test_loops_are_charged_for_what_they_run(tmp_path):
    def looped(params, x):
        def body(x, _):
            with jax.named_scope("inner"):
                return jnp.tanh(x @ params["up"] @ params["up"].T), None

        with jax.named_scope("stack"):
            x, _ = jax.lax.scan(body, x, length=8)
        return x @ params["up"] @ params["down"]

    profile = profiled(tmp_path, layout="data_parallel", model=looped).profile
    (inner,) = [line for line in profile.layers if line.name == "stack/inner"]
    assert inner.measured > 0 and inner.predicted > 0
    assert not [one for one in profile.operations if one.name.startswith("while") and one.measured]
    assert sum(line.measured for line in profile.kinds if line.name in LIMITS) == pytest.approx(
        profile["step"].measured, rel=1e-9
    )


# One step of a GPU: a product and a collective beside it, whose end is waited for; then a loop of
# two rounds.
PROGRAM = """HloModule jit_train_step, num_partitions=2

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %value = f32[8] get-tuple-element(%state), index=1
  %twice = f32[8] add(%value, %value), metadata={op_name="jit(train_step)/jvp(stack)/while/body/add"}
  ROOT %next = (s32[], f32[8]) tuple(%count, %twice)
}

%condition (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: f32[8,8], y: f32[8]) -> (s32[], f32[8]) {
  %x = f32[8,8] parameter(0)
  %y = f32[8] parameter(1)
  %reduce-start = f32[8] all-reduce-start(%y), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/reduce_gradients/psum"}
  %product = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp(up)/dot"}
  %reduce-done = f32[8] all-reduce-done(%reduce-start)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8]) tuple(%zero, %reduce-done)
  ROOT %loop = (s32[], f32[8]) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
}
"""  # noqa: E501


def kernel(name, begin, end, operation="", module="jit_train_step"):
    stats = (
        {"hlo_op": operation, "hlo_module": module, "program_id": 3}
        if operation
        else {"correlation_id": 7}
    )
    return SimpleNamespace(name=name, start_ns=float(begin), end_ns=float(end), stats=stats.items())


def gpu_trace(*starts):
    """A trace as XLA writes it for a GPU: a line for each stream. Each step takes 100 ns."""
    compute, communication = [], []
    for at in starts:
        compute += [
            kernel("gemm", at, at + 30, "product"),
            kernel("loop_add", at + 60, at + 70, "twice"),
        ]
        compute += [kernel("loop_add", at + 75, at + 100, "twice")]
        communication.append(kernel("ncclDevKernel", at + 10, at + 55, "reduce-start"))
    compute.append(kernel("evaluate", starts[0] + 110, starts[0] + 115, "dot", "jit__evaluate"))
    lines = [
        SimpleNamespace(name="Stream #13(Kernel)", events=compute),
        SimpleNamespace(name="Stream #22(Kernel)", events=communication),
    ]
    # made from the others by tools
    derived = SimpleNamespace(name="XLA Ops", events=[kernel("product", 0, 100, "product")])
    host = SimpleNamespace(
        name="/host:CPU", lines=[SimpleNamespace(name="python", events=[kernel("call", 0, 500)])]
    )
    return SimpleNamespace(
        planes=[SimpleNamespace(name="/device:GPU:0", lines=[*lines, derived]), host]
    )


def measured_on_gpu(trace):
    module = parse(PROGRAM)
    instructions = {
        instr.name: (name, instr) for name, lines in module.computations.items() for instr in lines
    }
    return measure(events_of(trace), ("jit_train_step", 3), module, instructions)


def test_streams_of_a_gpu():
    one = measured_on_gpu(gpu_trace(1000, 1150))
    nanoseconds = {
        name: round(getattr(one, name) * 1e9)
        for name in ("windows", "launches", "hidden", "between", "other")
    }
    assert one.executions == 2
    assert nanoseconds == {"windows": 200, "launches": 20, "hidden": 40, "between": 45, "other": 5}
    assert {name: round(took * 1e9) for name, took in one.charged.items()} == {
        "product": 60,
        "reduce-start": 50,
        "twice": 70,
    }


def test_kernels_without_a_name_are_work_without_a_name():
    trace = gpu_trace(1000, 1150)
    copy = kernel("MemcpyH2D", 1065, 1080)  # of the next batch
    copy.stats = {"memcpy_details": "size:64"}.items()
    trace.planes[0].lines[0].events += [kernel("graph", 1050, 1062), copy]
    one = measured_on_gpu(trace)
    nanoseconds = {name: round(took * 1e9) for name, took in one.charged.items()}
    assert nanoseconds == {"product": 60, "reduce-start": 45, "twice": 70, "": 10}
    assert round(one.launches * 1e9) == 15 and round(one.hidden * 1e9) == 45


def test_operation_that_began_last_is_charged():
    events = [Event(0, ("p", 1), "a", 0.0, 10.0), Event(0, ("p", 1), "b", 2.0, 4.0)]
    module = parse(
        "HloModule p\n\nENTRY %main () -> f32[] {\n  %a = f32[] add(%x, %x)\n  ROOT %b = f32[] "
        "add(%x, %x)\n}\n"
    )
    instructions = {
        instr.name: (name, instr) for name, lines in module.computations.items() for instr in lines
    }
    assert dict(measure(events, ("p", 1), module, instructions).charged) == {"a": 8.0, "b": 2.0}


@pytest.mark.parametrize(
    "scope, layer",
    {
        "shard_map/jvp(blocks/0)/attention/attention_as_written/vmap(BNTS,BSNH->BTNH)/"
        "dot_general": "blocks/0/attention",
        "shard_map/transpose(jvp(blocks))/while/body/closed_call/checkpoint/rematted_computation/"
        "up/dot_general": "blocks/up",
        "shard_map/transpose(jvp(a))/reshape;transpose(jvp(b))/reshape": "a",
        "shard_map/jvp(places)/jit(_take)/gather": "places",
        "shard_map/jvp(dropout)/jit(_threefry_fold_in)/WorkerGradients._of_worker/xor": "dropout",
        "shard_map/stats/psum": "batch statistics",
        "gather_updates/all_gather": "gathering updates",
        "state.opt[0].mu['up']['kernel']": REST,
        "": REST,
    }.items(),
)
def test_layer_of_a_scope(scope, layer):
    assert layer_of(scope) == layer


def test_operations_of_a_timeline_add_up():
    module = parse(PROGRAM)
    timeline = timeline_of(module, MeshSpec.parse("data=2"), Cluster.parse("2xh100"), ("data",))
    totals = defaultdict(float)
    for (_, part), took in timeline.operations.items():
        totals[part] += took
    assert dict(totals) == pytest.approx(
        {
            part: getattr(timeline, part)
            for part in ("products", "memory", "exposed")
            if part in totals
        },
        rel=1e-9,
    )
    assert timeline.operations["twice", "memory"] > 0 and timeline.exposed > 0


def made_profile(layers):
    kinds = Line("memory", 3.0, 1.0), Line("step", 3.0, 1.0)
    return StepProfile(1, 2, 1, kinds, tuple(layers), (), "1x1xcpu", None, ("note: made.",))


def test_layers_are_grouped_where_there_are_many():
    layers = [
        Line(f"blocks/{number}/{part}", 1.0 + number, 1.0)
        for number in range(20)
        for part in ("up", "down")
    ]
    profile = made_profile([*layers, Line(CLEARED, 0.0, 2.0)])
    assert len(profile.grouped_layers(most=64)) == 41
    grouped = profile.grouped_layers(most=24)
    assert len(grouped) == 21 and grouped[0] == Line("blocks/19", 40.0, 2.0)
    assert (
        len(
            made_profile(Line(f"layer{number}", 1.0) for number in range(40)).grouped_layers(
                most=24
            )
        )
        == 25
    )


def test_profile_as_text_and_html():
    profile = made_profile([Line("a<b", 3.0, None)])
    assert re.search(r"^memory +1 s +3 s +100.0% +0.33$", str(profile), re.MULTILINE)
    assert "a&lt;b" in profile._repr_html_() and "note: made." in profile._repr_html_()
    with pytest.raises(KeyError, match='no line "x"; there are a<b, memory, step'):
        profile["x"]
