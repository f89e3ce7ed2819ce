"""Memory beside XLA's program: what it is for, how likely a step fits with it, and that `fit`
refuses what a plan says does not fit.
"""

import dataclasses
import json
import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import DeviceMemoryError, OptionError
from spmd.planner.cluster import Cluster
from spmd.planner.hlo import parse
from spmd.planner.memory import FRACTIONS, usable_memory
from spmd.planner.overhead import Item, communicators, direct_peers, overhead_items
from spmd.planner.target import Estimate, Overhead, load, shipped

GIB = 2**30
MODEL = spmd.FunctionalModel(
    lambda key: {"w": jnp.zeros((64, 64))}, lambda params, x: x @ params["w"]
)
BATCH = {name: jax.ShapeDtypeStruct((32, 64), "float32") for name in "xy"}
STEP = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1)}

PROGRAM = """HloModule m, is_scheduled=true, num_partitions=16

ENTRY %main (x: f32[16,4]) -> f32[16,4] {
  %x = f32[16,4]{1,0} parameter(0)
  %sum = f32[16,4]{1,0} all-reduce(%x), replica_groups=[4,4]<=[16], to_apply=%add
  %again = f32[16,4]{1,0} all-reduce(%sum), replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, to_apply=%add
  %across = f32[16,4]{1,0} all-reduce(%again), replica_groups=[4,4]<=[4,4]T(1,0), to_apply=%add
  %alone = f32[16,4]{1,0} all-reduce(%across), replica_groups=[16,1]<=[16], to_apply=%add
  ROOT %MORE
}
"""  # noqa: E501
SWAP = "out = f32[16,4]{1,0} all-to-all(%alone), replica_groups=[2,8]<=[16], dimensions={0}"
SHIFT = (
    "out = f32[16,4]{1,0} collective-permute(%alone), source_target_pairs={{0,1},{1,2},{2,3},{7,8}}"
)


@pytest.fixture(autouse=True)
def without_compiler_of_gpus(monkeypatch):
    """Estimates by XLA:CPU, which are quick, and JAX's own share of the memory."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in FRACTIONS:
        monkeypatch.delenv(name, raising=False)


def plan(target="8xh100", **options):
    return spmd.plan(MODEL, BATCH, **STEP, target=target, **options)


def with_items(memory, capacity, *items, **changes):
    program = Item("program", 8 * GIB, 0.0)
    return dataclasses.replace(
        memory,
        capacity=capacity,
        peak=8 * GIB,
        items=(program, *items),
        pool=int(0.75 * capacity),
        **changes,
    )


def test_communicators_are_the_groups_of_a_device():
    cluster = Cluster.parse("2x8xh100")
    shift, swap = (parse(PROGRAM.replace("MORE", more)) for more in (SHIFT, SWAP))
    assert communicators(shift) == {
        frozenset(range(4)),
        frozenset((0, 4, 8, 12)),
        frozenset(range(16)),
    }
    assert communicators(swap) == {
        frozenset(range(4)),
        frozenset((0, 4, 8, 12)),
        frozenset(range(8)),
    }
    assert direct_peers(shift, cluster) == 2, "that of the middle; 7 and 8 are on two nodes"
    assert direct_peers(swap, cluster) == 7
    pairless = parse(PROGRAM.replace("MORE", SHIFT[: SHIFT.index("{{")] + "{}"))
    assert communicators(pairless) == {frozenset(range(4)), frozenset((0, 4, 8, 12))}, (
        "a permutation without pairs sends nothing"
    )
    items = {item.title: item for item in overhead_items(swap, cluster, batch=100)}
    overhead = cluster.target.overhead
    assert items["NCCL, 3 groups of devices"].expected == 3 * overhead.communicator.expected
    assert items["NCCL, 7 direct peers"].deviation == 7 * overhead.peer.deviation
    assert (
        items["batches placed ahead"].expected == 200
        and items["CUDA context"].expected == overhead.runtime.expected
    )
    assert overhead_items(swap, Cluster.parse("8xcpu"), batch=100) == ()


ATTENTION = """HloModule m, num_partitions=1

ENTRY %main (q: bf16[4,1024,12,64]) -> bf16[4,1024,12,64] {
  %q = bf16[4,1024,12,64]{3,2,1,0} parameter(0)
  ROOT %call = (bf16[4,1024,12,64]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
"""  # noqa: E501


def test_the_largest_workspace_counts():
    cluster = Cluster.parse("h100")
    items = {
        item.title: item.expected for item in overhead_items(parse(ATTENTION), cluster, batch=0)
    }
    assert items == {"workspace of a library": 4 * 4 * 1024 * 12 * 64, "CUDA context": 550e6}, (
        "float32, of the queries' size"
    )


def test_the_items_add_up_in_every_report():
    planned, cpu = plan(), plan("8xcpu")
    memory, figures = planned.memory, json.loads(planned.to_json())["memory"]
    titles = [
        "program",
        "fragmentation",
        "batches placed ahead",
        "workspace of a library",
        "CUDA context",
        "NCCL, 1 group of devices",
    ]
    assert [item.title for item in memory.items] == titles
    assert memory.items[0].expected == memory.peak and memory.items[0].deviation == pytest.approx(
        4 * 0.05 * memory.temporaries, rel=1e-9
    )
    assert (
        memory.expected
        == figures["expected"]
        == round(sum(item["expected"] for item in figures["items"]))
    )
    low, high = figures["range"]
    assert low < memory.expected < high and figures["likelihood"] == memory.likelihood > 0.999
    assert (
        all(title in str(planned) for title in titles[1:])
        and "beside the program" in planned._repr_html_()
    )
    assert "likelihood" in str(planned) and "likelihood" not in str(cpu)
    assert [item.title for item in cpu.memory.items] == [
        "program"
    ] and cpu.memory.expected == cpu.memory.peak
    assert "beside the program" in str(spmd.compare(cpu, planned))


def test_the_verdict_is_a_likelihood():
    memory = plan().memory
    beside = (
        Item("CUDA context", 1 * GIB, 0.3 * GIB, pool=False),
        Item("workspace", 0.5 * GIB, 0.4 * GIB),
    )
    verdicts = {size: with_items(memory, int(size * GIB), *beside) for size in (20, 10, 9)}
    assert verdicts[20].verdict.startswith(
        "fits with more than 99% likelihood: 9.5 GiB of 20.0 GiB (47.5%), from 8.7 GiB to 10.3 GiB"
    )
    assert verdicts[10].verdict.startswith(
        "tight: fits with 58% likelihood: 9.5 GiB of 10.0 GiB"
    ), "0.7 deviations of both sides"
    assert verdicts[9].verdict.startswith("DOES NOT FIT with 94% likelihood: 9.5 GiB of 9.0 GiB")
    sides = (
        "; 8.5 GiB of 8.2 GiB in JAX's part (24%) and 1.0 GiB of 804.6 MiB beside it (24%); 512.0 "
        "MiB too much on each device."
    )
    assert verdicts[9].verdict.endswith(sides), "6 % are 24 % of 24 %"
    assert verdicts[9].likelihood == math.prod(side.likelihood for side in verdicts[9].sides)
    hopeless = with_items(memory, 4 * GIB, *beside).verdict
    assert (
        hopeless.startswith("DOES NOT FIT with more than 99% likelihood: 9.5 GiB of 4.0 GiB")
        and "JAX's part" not in hopeless
    )
    (alone,) = dataclasses.replace(verdicts[9], pool=None).sides
    assert (alone.where, alone.room) == ("", 9 * GIB) and alone.likelihood == pytest.approx(
        NormalDist().cdf(-1), rel=1e-9
    )
    # of all together: 9.5 of 9 GiB, and the deviations of 0.3 and 0.4 are one of 0.5
    assert [verdicts[size].fits for size in verdicts] == [True, True, False]
    assert (
        dataclasses.replace(verdicts[10], items=verdicts[10].items[:1]).verdict
        == "fits: 8.0 GiB of 10.0 GiB (80.0%), if JAX may use 80% of it."
    )


def test_each_part_has_its_own_limit():
    memory = plan().memory
    beside = (
        Item("CUDA context", 2 * GIB, 0.2 * GIB, pool=False),
        Item("workspace", 1 * GIB, 0.4 * GIB),
    )
    free = with_items(memory, 12 * GIB, *beside)
    assert free.fits and free.fraction == 0.81, (
        "9 of 12 GiB, and two thirds of the last one: JAX's part is off by twice as much"
    )
    assert f"if JAX may use {free.fraction:.0%} of it" in free.verdict

    def given(share):
        return dataclasses.replace(free, pool=int(share * 12 * GIB), pool_is_set=True)

    assert given(free.fraction).likelihood > max(given(0.79).likelihood, given(0.83).likelihood)
    # the fraction is rounded up to a hundredth, here by up to 0.12 GiB
    assert given(free.fraction).likelihood == pytest.approx(free.likelihood, abs=0.03)
    assert given(free.fraction).fraction is None
    assert not given(0.7).fits and given(0.7).headroom == pytest.approx(
        (0.7 * 12 - 9) * GIB, abs=2
    ), "JAX has too little"
    assert not given(0.9).fits and given(0.9).headroom == pytest.approx(
        (0.1 * 12 - 2) * GIB, abs=2
    ), "CUDA has too little"


def test_the_environment_sets_what_jax_uses(monkeypatch):
    monkeypatch.setenv(FRACTIONS[0], "0.9")
    memory = plan().memory
    assert memory.pool == int(0.9 * load("h100").memory) and memory.pool_is_set
    assert (
        usable_memory(load("tpu_v5e"))
        == load("tpu_v5e").memory - load("tpu_v5e").overhead.runtime.expected
    )


def test_fit_refuses_what_does_not_fit_with_the_allocators_loss(monkeypatch, capsys):
    target = dataclasses.replace(
        load("h100"),
        overhead=Overhead(fragmentation=Estimate(0.1, 0.05), temporaries=Estimate(0.0, 9.0)),
    )
    data = {name: np.ones((64, 64), np.float32) for name in "xy"}
    peak = plan("8xcpu").memory.peak

    def start(limit):
        monkeypatch.setattr("spmd.planner.memory.memory_limit", lambda mesh: limit)
        return spmd.fit(MODEL, data, batch_size=32, steps=1, mesh="data=8", progress=True, **STEP)

    start(int(1.05 * peak))
    assert "likelihood" not in capsys.readouterr().err, "of a device that no target describes"
    monkeypatch.setattr(
        "spmd.planner.memory.of_device", lambda kind: target if kind == "cpu" else None
    )
    with pytest.raises(DeviceMemoryError, match="that the allocator cannot use"):
        start(int(1.05 * peak))
    start(int(1.15 * peak))
    assert "it fits with 84% likelihood" in capsys.readouterr().err


def test_what_is_wrong_with_an_overhead(tmp_path):
    text = (
        shipped()["h100"]
        .read_text()
        .replace("runtime = [550e6, 150e6]", "runtime = 550e6\nrun = 3")
    )
    (tmp_path / "mine.toml").write_text(text.replace("[0.01, 0.01]", "[0.01, -1]"))
    with pytest.raises(OptionError) as caught:
        load(str(tmp_path / "mine.toml"))
    assert all(
        f"[overhead] {key}" in str(caught.value) for key in ("runtime", "run", "fragmentation")
    )
    assert str(caught.value).count("is not two numbers") == 2
