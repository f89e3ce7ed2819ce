"""Options of the compiler that a search tries on its best layouts."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import spmd
from spmd.errors import CompileError
from spmd.planner.candidates import Candidate
from spmd.planner.cluster import Cluster
from spmd.planner.compile import PLUGIN
from spmd.planner.known_changes import why_not_tuned
from spmd.planner.suggestions import tune

GPU = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)
UNROLLED = {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"}


def figures(seconds, exposed, peak, *, layout=None, fits=True, target="2xh100", exact=True):
    """A plan with these figures, of a step with gathers in a loop and two reductions."""
    transfers = [
        SimpleNamespace(kind=kind, times=times)
        for kind, times in (("all_gather", 6), ("all_reduce", 1), ("all_reduce", 1))
    ]
    return SimpleNamespace(
        layout=layout or spmd.Layout(),
        fits=fits,
        cluster=Cluster.parse(target),
        compiled=SimpleNamespace(options=UNROLLED, exact=exact, compiler="an ESTIMATE by XLA:CPU"),
        traffic=SimpleNamespace(transfers=transfers),
        timeline=SimpleNamespace(seconds=seconds, exposed=exposed),
        memory=SimpleNamespace(peak=peak),
    )


def tuned(results, layout=None):
    """What is kept and rejected of options, where `results` has the figures of each, by the options
    that differ from the layout's own.
    """
    layout, asked = layout or spmd.Layout(), []

    def build(candidate):
        asked.append(candidate.layout.compiler.keys)
        result = results[len(asked) - 1]
        if isinstance(result, CompileError):
            raise result
        return result

    start = Candidate(layout, 1, 0, 0)
    kept, rejected = tune(start, figures(10.0, 3.0, 100, layout=layout), build)
    return asked, [candidate.layout.compiler.keys for candidate in kept], list(rejected.values())


def test_an_option_is_kept_if_less_communication_is_exposed():
    asked, kept, rejected = tuned(
        [figures(9.0, 2.0, 200), figures(9.0, 2.0, 150), figures(9.0, 2.0, 150)]
    )
    single = {"double_buffering": False}
    assert asked == [
        single,
        single | {"pipelined_collectives": True},
        asked[1] | {"combine_all_reduce": "256 MiB"},
    ]
    assert kept == asked[:2], "the second needs less memory, and the third changes nothing"
    assert rejected == [
        "no better than without combine_all_reduce: 2 s exposed of 9 s, peak 150 B; without, 2 s "
        "exposed of 9 s, peak 150 B"
    ]


def test_an_option_is_rejected_if_the_step_is_slower_or_does_not_fit_or_does_not_compile():
    asked, kept, rejected = tuned(
        [figures(11.0, 1.0, 100), figures(8.0, 1.0, 100, fits=False), CompileError("it fails")]
    )
    assert len(asked) == len(rejected) == 3 and not kept
    assert (
        rejected[0].startswith("no better than without double_buffering: 1 s exposed of 11 s")
        and rejected[2] == "it fails"
    )


def test_options_that_the_layout_sets_are_not_changed():
    layout = spmd.Layout(compiler=spmd.Compiler(double_buffering=True, combine_all_reduce=0))
    asked, _, _ = tuned([figures(10.0, 3.0, 100)], layout)
    assert asked == [
        {"double_buffering": True, "combine_all_reduce": 0, "pipelined_collectives": True}
    ]


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (figures(1, 1, 1, target="2xcpu"), "they are for GPUs, and XLA:CPU has none of them"),
        (figures(1, 1, 1, target="2xtpu_v5e"), "they are for GPUs, and XLA:TPU has none of them"),
        (figures(1, 1, 1, exact=False), "an ESTIMATE by XLA:CPU"),
        (figures(1, 1, 1), None),
    ],
)
def test_search_says_why_a_target_has_no_such_options(plan, why):
    assert why_not_tuned(plan) == (why and f"options of the compiler were not tried: {why}")


MODEL = spmd.FunctionalModel(
    lambda key: {f"layer{number}": jnp.zeros((256, 256)) for number in range(4)},
    lambda params, x: jax.lax.fori_loop(
        0, 3, lambda _, y: jnp.tanh(sum(y @ leaf for leaf in params.values())), x
    ),
)
STEP = {
    "batch": {
        "x": jax.ShapeDtypeStruct((32, 256), "float32"),
        "y": jax.ShapeDtypeStruct((32, 256), "float32"),
    },
    "loss": spmd.losses.mean_squared_error,
    "optimizer": optax.sgd(0.1),
    "compiler_options": True,
}


@pytest.mark.system
def test_search_for_cpus_says_why_it_tries_none():
    found = spmd.search(MODEL, **STEP, target="2xcpu", candidates=["data_parallel"], compiles=1)
    assert found.left_out["[compiler]"].startswith(
        "options of the compiler were not tried: they are for GPUs"
    )
    assert "[compiler]: options of the compiler were not tried" in str(found)


@GPU
@pytest.mark.system
def test_search_for_gpus_writes_the_options_that_it_keeps():
    layout = dataclasses.replace(
        spmd.Layout.load("data_parallel"), gradients=spmd.Gradients("all_reduce")
    )
    found = spmd.search(MODEL, **STEP, target="2x8xh100", candidates=[layout], compiles=1)
    tried = [
        candidate
        for candidate in [*dict(found.plans), *found.rejected]
        if candidate.layout.compiler != layout.compiler
    ]
    assert tried, "options were compiled"
    plain = next(
        plan for candidate, plan in found.plans if candidate.layout.compiler == layout.compiler
    )
    for candidate, plan in found.plans:
        if candidate in tried:
            assert (plan.timeline.exposed, plan.memory.peak) < (
                plain.timeline.exposed,
                plain.memory.peak,
            )
            assert plan.timeline.seconds <= plain.timeline.seconds
    assert ("[compiler]" in found.to_toml()) == bool(found.layout.compiler.keys)
