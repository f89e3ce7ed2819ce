"""Why a program executes more than the model asks for: each share by hand, and all of them add up
to the difference.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spmd
from spmd.mesh import MeshSpec
from spmd.planner.flop_shares import (
    BUBBLES,
    BY_XLA,
    IN_KERNELS,
    NOTHING_BEYOND,
    OTHER,
    PADDING,
    RECOMPUTED,
    REPLICATED,
    Variance,
    executed_flops,
    flop_shares,
    sharded_axes,
)
from spmd.planner.hlo import parse
from spmd.planner.model_flops import empty_places, flops
from tests.planner.test_model_flops import CONFIG, HEAD, OPERANDS, SCORES, make_plan

ROWS, WIDTH, HIDDEN = 32, 16, 64
PRODUCT = 2 * ROWS * WIDTH * HIDDEN  # FLOPs of each of the two layers


def init(key):
    return {"up": jnp.zeros((WIDTH, HIDDEN)), "down": jnp.zeros((HIDDEN, WIDTH))}


MODEL = spmd.FunctionalModel(init, lambda params, x: jnp.tanh(x @ params["up"]) @ params["down"])
BATCH = {name: jax.ShapeDtypeStruct((ROWS, WIDTH), "float32") for name in "xy"}
STEP = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1)}


def plan(
    layout: Any = "data_parallel",
    mesh: str = "data=4",
    model: Any = MODEL,
    batch: Any = BATCH,
    **options: Any,
) -> Any:
    planned = spmd.plan(
        model,
        batch,
        **STEP | options,
        target=f"{MeshSpec.parse(mesh).size}xcpu",
        layout=layout,
        mesh=mesh,
    )
    shares = planned.flops
    assert sum(shares.beyond.values()) == pytest.approx(shares.executed - shares.model, rel=1e-9)
    assert planned.timeline.flops == shares.executed and planned.timeline.model_flops == min(
        shares.model, shares.executed
    )
    assert executed_flops(parse(planned.compiled.hlo), planned.mesh) == shares.executed
    assert json.loads(planned.to_json())["flops"]["beyond"] == shares.beyond
    return planned


def only(shares, **expected):
    """That these shares alone are not zero; `other` is the gradient of the batch, which nothing
    needs.
    """
    return {
        cause: flops for cause, flops in shares.beyond.items() if flops and cause != OTHER
    } == expected


def test_nothing_is_beyond_a_plain_step():
    shares = plan().flops
    assert only(shares) and shares.beyond[OTHER] == -PRODUCT / 4 and shares.model == 6 * PRODUCT / 4
    assert str(shares) == NOTHING_BEYOND, "three times the forward pass are more than is executed"


@pytest.mark.system
def test_remat_is_recomputation():
    layout: Any = spmd.Layout(remat=spmd.Remat("nothing"), mesh=(("data", 2),))
    plain, remat = make_plan(), make_plan(layout=layout)
    assert plain.flops.beyond[RECOMPUTED] == 0 < remat.flops.executed - plain.flops.executed
    assert only(
        remat.flops,
        **{RECOMPUTED: pytest.approx(remat.flops.executed - plain.flops.executed, rel=1e-9)},
    )
    assert "% recomputed in the backward pass, -" in str(remat) and "recomputed" not in str(plain)


def test_a_product_that_xla_merges_with_its_repetition_is_not_recomputed():
    """XLA of jax 0.10 merges the two, XLA of jax 0.11 does not; the program says which."""
    remat = plan(
        dataclasses.replace(spmd.Layout.load("data_parallel"), remat=spmd.Remat("nothing"))
    )
    again = remat.flops.executed - plan().flops.executed
    assert "rematted_computation" in remat.compiled.hlo and only(
        remat.flops, **({RECOMPUTED: again} if again else {})
    )


def test_products_of_equal_values_are_replicated():
    shared, sharded = spmd.Rule("up", (None, "model")), spmd.Rule("down", ("model",))
    reduction = spmd.Gradients("all_reduce")

    def apply(params, x):
        """The model's own code uses the axis, for one number of each device."""
        unit = (
            jax.lax.with_sharding_constraint(jnp.ones(2), jax.sharding.PartitionSpec("model")).sum()
            / 2
        )
        return MODEL.apply(params, x) * unit

    replicated = plan(
        spmd.Layout(gradients=reduction), "data=2,model=2", model=spmd.FunctionalModel(init, apply)
    )
    assert only(replicated.flops, **{REPLICATED: 5 * PRODUCT / 2 / 2}), (
        "two devices of `model` compute the same"
    )
    none = plan(spmd.Layout(params=(shared, sharded), gradients=reduction), "data=2,model=2")
    assert only(none.flops) and none.flops.executed == plan().flops.executed


class Deep(nnx.Module):
    """Four equal layers, one on each stage."""

    def __init__(self, rngs):
        self.stack = spmd.nn.LayerStack(
            spmd.nn.repeat(4, lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs)
        )

    def __call__(self, x):
        return self.stack(x)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(("schedule", "ticks"), [("gpipe", 11), ("1f1b", 22)])
def test_bubbles_are_those_of_the_schedule(schedule, ticks):
    """Stages compute in all ticks, and the results of 8 are used. Under 1F1B a tick takes as long
    as the slowest stage's.
    """
    layout = spmd.Layout.load("pipeline")
    layout = dataclasses.replace(
        layout, pipeline=dataclasses.replace(layout.pipeline, microbatches=8, schedule=schedule)
    )
    planned = plan(layout, "data=2,stage=4", lambda: Deep(nnx.Rngs(0)))
    assert planned.flops.beyond[BUBBLES] == pytest.approx(
        planned.flops.executed * (1 - 8 / ticks), rel=1e-9
    )
    assert only(
        planned.flops, **{BUBBLES: planned.flops.beyond[BUBBLES]}
    ) and "pipeline bubbles" in str(planned)


def test_empty_places_of_experts():
    def route(x, router, up):
        _, chosen = jax.lax.top_k(x @ router, 2)
        return jnp.einsum("ecd,edh->ech", jnp.zeros((4, 10, 8)) + chosen.sum(), up)

    jaxpr = jax.make_jaxpr(route)(jnp.ones((16, 8)), jnp.ones((8, 4)), jnp.ones((4, 8, 16))).jaxpr
    assert empty_places(jaxpr) == pytest.approx(3 * 2 * 40 * 8 * 16 * (1 - 32 / 40), rel=1e-9), (
        "2 choices of each of 16 tokens, in 4 times 10 places"
    )
    assert flops(jaxpr) > empty_places(jaxpr) / 3 > 0


def shares_of(text, model=0.0, mesh="data=8"):
    module = parse(text)
    return flop_shares(module, MeshSpec.parse(mesh), (), executed=1e12, model=model)


def test_kernels_of_attention_make_scores_again_and_leave_masked_ones_out():
    sharded = OPERANDS.replace(")\n", "), sharding={devices=[8,1,1,1]<=[8]}\n")
    call = (
        f'custom-call(%q, %k, %v, %o), custom_call_target="__cudnn$fmhaSoftmaxBackward", {CONFIG}'
    )
    shares = shares_of(
        f"{HEAD}{sharded}  ROOT %call = (bf16[4,1024,12,64]{{3,2,1,0}}) {call}\n}}\n"
    )
    assert only(shares, **{IN_KERNELS: pytest.approx(SCORES, rel=1e-9)}), "one of five products"
    assert shares.masked == pytest.approx(5 * SCORES * (1 - 0.5625), rel=1e-9), (
        "but for the blocks on the diagonal"
    )


DOT = """HloModule m, num_partitions=2

ENTRY %main (x: f32[16,6], w: f32[6,10]) -> f32[16,10] {
  %x = f32[16,6]{1,0} parameter(0), sharding={devices=[2,1]<=[2]}
  %w = f32[6,10]{1,0} parameter(1), sharding={replicated}
  %zero = f32[] constant(0)
  %wide = f32[16,8]{1,0} pad(%x, %zero), padding=0_0x0_2, metadata={op_name="jit(f)/dot_general"}
  %high = f32[8,10]{1,0} pad(%w, %zero), padding=0_2x0_0, metadata={op_name="jit(f)/dot_general"}
  ROOT %NAME = f32[16,10]{1,0} dot(%wide, %high), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot"}
}
"""  # noqa: E501


def test_padding_and_what_xla_computes_again():
    flops = 2 * 16 * 8 * 10
    assert only(
        shares_of(DOT, mesh="data=2"), **{PADDING: pytest.approx(flops * 2 / 8, rel=1e-9)}
    ), "of the depth, once"
    assert only(
        shares_of(
            DOT.replace('dot_general"}\n  %h', 'pad"}\n  %h').replace(
                'dot_general"}\n  ROOT', 'pad"}\n  ROOT'
            ),
            mesh="data=2",
        )
    )
    assert only(shares_of(DOT.replace("%NAME", "%dot.remat"), mesh="data=2"), **{BY_XLA: flops})


def test_shardings_in_all_notations():
    mesh = MeshSpec.parse("data=2,model=4")
    for text, axes in {
        "{replicated}": set(),
        "{devices=[2,4]<=[8]}": {"data", "model"},
        "{devices=[2,1,4]<=[8] last_tile_dim_replicate}": {"data"},
        "{devices=[4,2]<=[2,4]T(1,0) last_tile_dims={replicated}}": {"model"},
        "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}": {"data"},
        "{devices=[2,4]<=[8] last_tile_dims={manual}}": {"data"},
        "{mesh[], replicated}": set(),
        "{mesh['data'=2,'model'=4], [{'data'}, {}]}": {"data"},
        "{mesh['data'=2,'model'=4], [{}, {'model'}], replicated={'data'}}": {"model"},
        "{mesh['a'=2,'b'=4], [{'a'}]}": {"data", "model"},
        "{maximal device=0}": {"data", "model"},
    }.items():
        assert sharded_axes(text, mesh) == axes, text


LOOP = """HloModule m, num_partitions=8

%body (s: (f32[4,4], f32[4,4])) -> (f32[4,4], f32[4,4]) {
  %s = (f32[4,4]{1,0}, f32[4,4]{1,0}) parameter(0)
  %a = f32[4,4]{1,0} get-tuple-element(%s), index=0
  %b = f32[4,4]{1,0} get-tuple-element(%s), index=1
  %dot = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %other = f32[4,4]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[4,4]{1,0} all-reduce(%other), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %next = (f32[4,4]{1,0}, f32[4,4]{1,0}) tuple(%sum, %other)
}

ENTRY %main (x: f32[4,4], y: f32[4,4]) -> (f32[4,4], f32[4,4]) {
  %x = f32[4,4]{1,0} parameter(0), sharding={replicated}
  %y = f32[4,4]{1,0} parameter(1), sharding={devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}
  %state = (f32[4,4]{1,0}, f32[4,4]{1,0}) tuple(%x, %y)
  ROOT %loop = (f32[4,4]{1,0}, f32[4,4]{1,0}) while(%state), condition=%c, body=%body
}
"""


def test_a_loop_is_followed_until_nothing_changes():
    module = parse(LOOP)
    variance = Variance(module, MeshSpec.parse("data=2,model=4"))
    products = {
        instr.name: variance.copies("body", instr)
        for instr in module.computations["body"]
        if instr.op == "dot"
    }
    assert products == {"dot": 8, "other": 2}, (
        "sums over `model` are equal everywhere; the others differ along it"
    )
