"""What XLA makes of a step, as plans say it: collectives that nothing hides, results computed
twice, products that need another option.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmd
from spmd.layout.compiler import TRITON, UNROLLING
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster
from spmd.planner.compile import PLUGIN
from spmd.planner.hlo import parse
from spmd.planner.notes import _rematerialized, _waits
from spmd.planner.timeline import timeline_of
from spmd.train.compiler_options import BUFFERING, BUFFERING_ERROR, TRITON_ERROR, other_options

MESH, CLUSTER = MeshSpec.parse("data=8"), Cluster.parse("8xh100")
NEEDS_COMPILER = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)
GATHER = (
    "(f32[4194304]{0}, f32[33554432]{0}) all-gather-start(%v), replica_groups=[1,8]<=[8], "
    'metadata={op_name="gather_params/gather"}'
)
SCATTER = (
    "f32[4194304]{0} reduce-scatter(%done), replica_groups=[1,8]<=[8], dimensions={0}, "
    'metadata={op_name="reduce_gradients/scatter"}'
)
PROGRAM = f"""HloModule m, num_partitions=8

ENTRY %main (v: f32[4194304], a: f32[1024,1024]) -> f32[1024,1024] {{
  %v = f32[4194304]{{0}} parameter(0)
  %a = f32[1024,1024]{{1,0}} parameter(1)
  %start = {GATHER}
  %done = f32[33554432]{{0}} all-gather-done(%start)
  %b.remat = f32[1024,1024]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %second = {GATHER}
  %c = f32[1024,1024]{{1,0}} dot(%a, %b.remat), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %end = f32[33554432]{{0}} all-gather-done(%second)
  %sum = {SCATTER}
  ROOT %d = f32[1024,1024]{{1,0}} dot(%c, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""  # noqa: E501


def test_waits_add_up_and_say_why():
    times = timeline_of(parse(PROGRAM), MESH, CLUSTER, ("data",))
    assert sum(wait.exposed for wait in times.waits) == pytest.approx(times.exposed, rel=1e-9)
    first, second = [wait for wait in times.waits if wait.transfer.kind == "all_gather"]
    product = times.products / 3 + times.launches / 3
    assert first.beside == 0
    assert second.beside == pytest.approx(product, rel=1e-9)
    assert second.exposed == pytest.approx(first.exposed - product, rel=1e-9)
    gathers, sums = _waits(times)
    gathers, sums = (gathers, sums) if "all_gather" in gathers else (sums, gathers)
    assert gathers.startswith(
        "note: all_gather of parameters (gather_params/gather) is waited for: 2 times, "
    )
    assert gathers.endswith(
        f"{second.beside * 500:,.3g} ms of computation are scheduled beside it, and it takes "
        f"{first.exposed * 1e3:,.3g} ms."
    )
    assert sums.endswith("; XLA runs it synchronously.")
    hidden = PROGRAM.replace("[1024,1024]", "[16384,16384]")
    assert [
        wait.transfer.kind for wait in timeline_of(parse(hidden), MESH, CLUSTER, ("data",)).waits
    ].count("all_gather") == 1


def test_what_xla_computes_twice():
    times = timeline_of(parse(PROGRAM), MESH, CLUSTER, ("data",))
    assert times.rematerialized == pytest.approx(times.products / 3 + times.launches / 3, rel=1e-9)
    large = timeline_of(
        parse(PROGRAM.replace("[1024,1024]", "[16384,16384]")), MESH, CLUSTER, ("data",)
    )
    (note,) = _rematerialized(large)
    assert f"takes {large.rematerialized * 1e3:,.3g} ms of a step" in note
    assert (
        _rematerialized(timeline_of(parse(PROGRAM.replace(".remat", "")), MESH, CLUSTER, ("data",)))
        == []
    )


def test_which_errors_of_xla_are_compiled_again(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    error = (
        f"INTERNAL: {TRITON_ERROR} that satisfy hlo: %dot = f32[3,3] dot(%a, %b), "
        f"metadata={{op_name=...}}\nmore"
    )
    assert other_options(error, {}, ()) == {
        "options": {TRITON: False},
        "retried": f"INTERNAL: {TRITON_ERROR} that satisfy hlo: %dot = f32[3,3] dot(%a, %b)",
    }
    assert not other_options("INTERNAL: something else", {}, ())
    unscheduled = (
        f"INTERNAL: RET_CHECK failure: get-tuple-element.1034 {BUFFERING_ERROR} loop_add_fusion.1"
    )
    assert other_options(unscheduled, {BUFFERING: UNROLLING[True]}, ())["options"] == {
        BUFFERING: UNROLLING[False]
    }
    assert not other_options(unscheduled, {BUFFERING: UNROLLING[False]}, ())
    for chosen in (
        spmd.Compiler(double_buffering=True),
        spmd.Compiler(options={BUFFERING: UNROLLING[True]}),
    ):
        assert other_options(error, {}, chosen.chosen) and not other_options(
            unscheduled, {}, chosen.chosen
        )
    assert not other_options(error, {TRITON: True}, spmd.Compiler(options={TRITON: True}).chosen)
    monkeypatch.setenv("XLA_FLAGS", f"--{TRITON}=true")
    assert not other_options(error, {}, ()) and other_options(unscheduled, {}, ())


class ViT(nnx.Module):
    """A block on 197 tokens for each image."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(12, 768, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(768, 3072, rngs=rngs), nnx.Linear(3072, 768, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return (x + self.down(nnx.gelu(self.up(x)))).mean((1, 2))


@NEEDS_COMPILER
@pytest.mark.system
def test_what_the_note_names_forbids_to_compute_twice():
    batch = jax.ShapeDtypeStruct((2048, 197, 768), jnp.float32)
    options = {
        "loss": lambda model, batch: model(batch) ** 2,
        "optimizer": optax.sgd(0.1),
        "precision": "bfloat16",
        "target": "1xa10g",
    }
    plan = spmd.plan(lambda: ViT(), batch, **options)
    assert any("computes some results twice" in note for note in plan.notes)
    chosen = spmd.Compiler(options={"xla_disable_hlo_passes": "rematerialization"})
    forbidden = spmd.plan(
        lambda: ViT(),
        batch,
        layout=dataclasses.replace(spmd.Layout.load("data_parallel"), compiler=chosen),
        **options,
    )
    assert forbidden.timeline.rematerialized == 0 < plan.timeline.rematerialized
    assert not any("computes some results twice" in note for note in forbidden.notes)


@NEEDS_COMPILER
@pytest.mark.system
def test_a_program_that_triton_cannot_tile():
    batch = jax.ShapeDtypeStruct((512, 197, 768), jnp.float32)
    options = {
        "loss": lambda model, batch: model(batch) ** 2,
        "optimizer": optax.sgd(0.1),
        "precision": "bfloat16",
        "target": "1xa100_80",
    }
    plan = spmd.plan(lambda: ViT(), batch, **options)
    assert plan.compiled.options[TRITON] is False and TRITON_ERROR in plan.compiled.retried
    assert any(
        note.startswith(f"note: compiled with {TRITON}=false, because XLA failed: ")
        for note in plan.notes
    )
    chosen = dataclasses.replace(
        spmd.Layout.load("data_parallel"), compiler=spmd.Compiler(options={TRITON: True})
    )
    with pytest.raises(spmd.SpmdError, match=TRITON_ERROR):
        spmd.plan(lambda: ViT(), batch, layout=chosen, **options)
