"""MFU counts the model's own operations; HFU counts what the program executes, with kernels of
attention counted by their shapes.
"""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

import spmd
from spmd.errors import CompileError
from spmd.planner import model_flops
from spmd.planner.cluster import Cluster
from spmd.planner.compile import PLUGIN
from spmd.planner.cost import cost_of, uncounted
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.hlo import parse
from spmd.planner.model_flops import flops

ROWS, LENGTH, HEADS, WIDTH = 8, 128, 2, 16
INNER = HEADS * WIDTH


class Attends(nnx.Module):
    """One layer of attention between two products."""

    def __init__(self, implementation, rngs):
        self.first, self.last = (
            nnx.Linear(INNER, 3 * INNER, rngs=rngs),
            nnx.Linear(INNER, INNER, rngs=rngs),
        )
        self.implementation = implementation

    def __call__(self, x):
        query, key, value = (
            part.reshape(*x.shape[:2], HEADS, WIDTH)
            for part in jnp.split(self.first(x), 3, axis=-1)
        )
        out = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=self.implementation
        )
        return self.last(out.reshape(x.shape))


def make_plan(implementation="xla", layout="data_parallel", target="2xcpu", **options):
    batch = {"x": jax.ShapeDtypeStruct((ROWS, LENGTH, INNER), "float32")}
    step = {
        "loss": lambda model, batch: (model(batch["x"]) ** 2).mean(axis=(1, 2)),
        "optimizer": optax.sgd(0.1),
    }
    return spmd.plan(
        lambda: Attends(implementation, nnx.Rngs(0)),
        batch,
        **step,
        layout=layout,
        target=target,
        **options,
    )


# two products, and scores and output of attention
FORWARD = 2 * ROWS * LENGTH * INNER * (3 * INNER + INNER + 2 * LENGTH)
UNNEEDED = 2 * ROWS * LENGTH * INNER * 3 * INNER  # the gradient of the batch


def test_each_branch_is_counted_once(monkeypatch):
    depth = 8

    def branches(x, depth):
        if not depth:
            return x
        return jax.lax.cond(x > 0, lambda x: branches(x, depth - 1), lambda x: 2 * x, x)

    count, calls = model_flops.flops, []
    monkeypatch.setattr(model_flops, "flops", lambda jaxpr: calls.append(jaxpr) or count(jaxpr))
    model_flops.flops(jax.make_jaxpr(branches, static_argnums=1)(1.0, depth).jaxpr)
    assert len(calls) == 1 + 2 * depth


@pytest.mark.system
def test_remat_adds_to_hfu_only():
    plain, remat = (
        make_plan(),
        make_plan(layout=spmd.Layout(remat=spmd.Remat("nothing"), mesh=(("data", 2),))),
    )
    assert plain.timeline.flops == plain.timeline.model_flops == (3 * FORWARD - UNNEEDED) / 2, (
        "on each of two devices"
    )
    assert plain.timeline.mfu == plain.timeline.hfu
    assert remat.timeline.model_flops == 3 * FORWARD / 2 < remat.timeline.flops
    assert remat.timeline.mfu < remat.timeline.hfu
    assert json.loads(remat.to_json())["timeline"]["hfu"] == remat.timeline.hfu


def test_flops_of_a_jaxpr_by_hand():
    w, image, kernel = jnp.ones((8, 8)), jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, 5))

    def of(function, *arguments):
        return flops(jax.make_jaxpr(function)(*arguments).jaxpr)

    product = 2 * 4 * 8 * 8
    x = jnp.ones((4, 8))
    assert of(lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), x) == product
    assert (
        of(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x), x)
        == 2 * product
    )
    assert of(lambda x: jax.vmap(lambda row: w @ row)(x), x) == product
    assert of(lambda x: jax.lax.fori_loop(0, 7, lambda _, x: x @ w, x), x) == 7 * product
    convolved = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert convolved.shape == (2, 4, 4, 5)
    assert of(
        lambda i: jax.lax.conv_general_dilated(
            i, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        image,
    ) == 2 * convolved.size * (3 * 3 * 3)


HEAD = (
    "HloModule m, is_scheduled=true, num_partitions=8\n\nENTRY %main (q: bf16[4,1024,12,64]) -> "
    "bf16[4,1024,12,64] {\n"
)
OPERANDS = "".join(
    f"  %{name} = bf16[4,1024,12,64]{{3,2,1,0}} parameter({n})\n" for n, name in enumerate("qkvo")
)
CONFIG = (
    'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": '
    '"BF16", "dimensions": ["4", "12", "1024", "1024"], "tuple_shapes": [], "layout": '
    '{"minor_to_major": ["3", "2", "1", "0"]}, "is_dynamic_dimension": [false, false]}, '
    '"mask_type": "CAUSAL"}}'
)
SCORES = 2 * 4 * 12 * 1024 * 1024 * 64  # FLOPs of one product of the scores' size


def kernel(name, scope):
    """A call as jaxlib 0.10.2 compiles it for an H100."""
    config = (
        CONFIG
        if "fmha" in name
        else "backend_config={debug = false, grid_x = 8 : i32, ir = ..., num_warps = 4 : i32}"
    )
    arrays = "(bf16[4,1024,12,64]{3,2,1,0}, f32[4,12,1024]{2,1,0})"
    target = f'custom_call_target="{name}", metadata={{op_name="jit(f)/{scope}"}}'
    return (
        f"{HEAD}{OPERANDS}  ROOT %call = {arrays} custom-call(%q, %k, %v, %o), {target}, {config}\n"
        f"}}\n"
    )


@pytest.mark.parametrize(
    "name, scope, products",
    [
        ("__cudnn$fmhaSoftmax", "jvp()/custom_partitioning", 2),
        ("__cudnn$fmhaSoftmaxBackward", "transpose(jvp())/custom_partitioning", 5),
        ("__gpu$xla.gpu.triton", "jvp()/shard_map/flash_attention_forward/pallas_call", 2),
        ("__gpu$xla.gpu.triton", "transpose(jvp())/shard_map/flash_attention_dkv/pallas_call", 4),
        ("__gpu$xla.gpu.triton", "transpose(jvp())/shard_map/flash_attention_dq/pallas_call", 3),
        ("__gpu$xla.gpu.triton", "transpose(jvp())/shard_map/flash_attention_dbias/pallas_call", 2),
        ("__gpu$xla.gpu.triton", "jvp()/jit(mha)/mha_forward/pallas_call", 2),
        ("__gpu$xla.gpu.triton", "transpose(jvp())/mha_preprocess_backward/pallas_call", 0),
        ("__gpu$xla.gpu.triton", "transpose(jvp())/mha_backward/pallas_call", 7),
        ("__gpu$xla.gpu.triton", "blocks/attention/my_kernel/pallas_call", 0),
    ],
)
def test_attention_kernels_are_counted_by_shapes(name, scope, products):
    module = parse(kernel(name, scope))
    (call,) = (instr for instr in module.computations["main"] if instr.op == "custom-call")
    assert sum(cost_of(module, "main", call).flops.values()) == products * SCORES
    assert uncounted(module) == (("my_kernel",) if "my_kernel" in scope else ())


def test_cudnn_is_answered_only_while_a_plan_asks():
    q = jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16")

    def trace():
        return jax.eval_shape(
            lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn"), q
        )

    before = dict(vars(fused_attention_stablehlo))
    with gpu_of(Cluster.parse("8xa100_80").target):
        assert trace().shape == q.shape
        wide = jnp.zeros((2, 128, 2, 256), "bfloat16")
        # JAX's, which must stay: an A100 takes no wider heads
        with pytest.raises(NotImplementedError, match="128"):
            jax.nn.dot_product_attention(wide, wide, wide, implementation="cudnn")
    assert before == dict(vars(fused_attention_stablehlo))
    with gpu_of(Cluster.parse("8xcpu").target):
        assert before == dict(vars(fused_attention_stablehlo))


@pytest.mark.system
@pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)
def test_cudnn_attention_is_planned_without_cudnn():
    plain, fused = (
        make_plan(implementation, target="2xh100", precision="bfloat16")
        for implementation in ("xla", "cudnn")
    )
    assert fused.compiled.hlo.count('custom_call_target="__cudnn$fmha') == 2
    assert plain.timeline.model_flops == plain.timeline.flops == (3 * FORWARD - UNNEEDED) / 2
    assert fused.timeline.model_flops == 3 * FORWARD / 2 < fused.timeline.flops + UNNEEDED / 2
    assert fused.timeline.flops == plain.timeline.flops + 2 * ROWS * LENGTH * INNER * LENGTH / 2, (
        "scores, again in the backward pass"
    )
    assert str(fused).count("MFU") == 1
    by_compiler = spmd.Layout(mesh=(("data", 2),))
    assert (
        make_plan("cudnn", by_compiler, "2xh100", precision="bfloat16").timeline.flops
        == fused.timeline.flops
    ), "on each device's shards"
    as_written = dataclasses.replace(by_compiler, attention=spmd.Attention("as_written"))
    with pytest.raises(CompileError, match="cuDNN's attention where XLA partitions it"):
        make_plan("cudnn", as_written, "2xh100", precision="bfloat16")


@pytest.mark.system
def test_rows_do_not_change_flops_per_row():
    assert np.isclose(
        make_plan(accumulate=2).timeline.model_flops, make_plan().timeline.model_flops
    )


FUSION = """HloModule jit_f, is_scheduled=true

%fused (stack: f32[8,4,16], index: s32[], grad: f32[4,16]) -> f32[8,4,16] {
  %stack = f32[8,4,16]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %grad = f32[4,16]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %view = f32[8,1,64]{2,1,0} bitcast(%stack)
  %slice = f32[1,1,64]{2,1,0} dynamic-slice(%view, %index, %zero, %zero), dynamic_slice_sizes={1,1,64}
  %layer = f32[4,16]{1,0} bitcast(%slice)
  %sum = f32[4,16]{1,0} add(%layer, %grad)
  %new = f32[1,4,16]{2,1,0} bitcast(%sum)
  ROOT %updated = f32[8,4,16]{2,1,0} dynamic-update-slice(%stack, %new, %index, %zero, %zero)
}

ENTRY %main (stack: f32[8,4,16], index: s32[], grad: f32[4,16]) -> f32[8,4,16] {
  %stack = f32[8,4,16]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %grad = f32[4,16]{1,0} parameter(2)
  ROOT %fusion = f32[8,4,16]{2,1,0} fusion(%stack, %index, %grad), kind=kLoop, calls=%fused
}
"""  # noqa: E501


def test_a_layer_that_is_added_to_in_place_is_read_and_written_and_its_stack_is_not():
    module = parse(FUSION)
    fusion = module.computations["main"][-1]
    layer, index = 4 * 16 * 4, 4
    # the layer, its gradient, and the sum
    assert cost_of(module, "main", fusion).bytes == 3 * layer + index
    assert (
        cost_of(parse(FUSION.replace("bitcast(%stack)", "negate(%stack)")), "main", fusion).bytes
        > 8 * layer
    )
