"""Times of kernels from their sizes: waves of tiles, fused attention with its mask, and bytes of
fusions that slice what they get.
"""

import dataclasses

import numpy as np
import pytest

from spmd.planner.cost import (
    BALANCED,
    EXPONENTIALS,
    WAVE,
    Product,
    causal_share,
    cost_of,
    matmul,
    memory_time,
    product_time,
)
from spmd.planner.hlo import parse
from spmd.planner.target import Achieved, load
from tests.planner.test_model_flops import SCORES, kernel

A100 = dataclasses.replace(
    load("a100_80"), achieved=Achieved(0.5, 0.8, 0.75, 4e-6, attention=0.6, attention_backward=0.4)
)
CORE = 312e12 * 0.5 / 108  # FLOPs per second of one core in the largest tile


def wave(rows, columns, depth):
    """Seconds of one wave of tiles."""
    largest, intensity = 256 * 128 / (256 + 128), rows * columns / (rows + columns)
    relative = intensity / (intensity + BALANCED) * (largest + BALANCED) / largest
    return 2 * rows * columns * depth / (CORE * relative) + WAVE


@pytest.mark.parametrize(
    "sides, tile, waves, depth",
    [
        ((1, 108 * 256, 128, 4096), (256, 128), 1, 4096),
        # one large tile too many: five waves of small ones take less than two
        ((1, 109 * 256, 128, 512), (128, 64), 5, 512),
        # a part of a tile is computed as all of it
        ((1, 108 * 256 - 255, 127, 4096), (256, 128), 1, 4096),
        ((108, 256, 128, 4096), (256, 128), 1, 4096),
    ],
)
def test_products_take_complete_waves_of_tiles(sides, tile, waves, depth):
    rows, columns = tile
    np.testing.assert_allclose(
        product_time(matmul("bfloat16", sides), A100),
        waves * wave(rows, columns, depth),
        rtol=1e-12,
    )


def test_the_depth_is_split_where_cores_would_be_idle():
    sides, split = (1, 256, 27 * 128, 4 * 8192), 4  # 27 tiles on 108 cores
    added = split * 8 * 256 * 27 * 128 / (2.039e12 * 0.8)
    np.testing.assert_allclose(
        product_time(matmul("bfloat16", sides), A100), wave(256, 128, 8192) + added, rtol=1e-12
    )


def test_small_products_reach_less_of_the_peak():
    def reached(side):
        product = matmul("bfloat16", (1, side, side, side))
        return product.flops / product_time(product, A100) / 312e12

    shares = [reached(side) for side in (128, 256, 512, 1024, 4096, 16384)]
    assert shares == sorted(shares) and shares[0] < 0.02 and 0.45 < shares[-1] <= 0.5
    tpu = load("tpu_v4")
    assert product_time(matmul("bfloat16", (1, 128, 128, 128)), tpu) == 2 * 128**3 / (
        tpu.rate("bfloat16") * tpu.achieved.matmul
    )


def test_attention_is_computed_below_the_mask_and_counted_in_full():
    special = EXPONENTIALS * 108 * 1.41e9
    for name, kind, share in (
        ("__cudnn$fmhaSoftmax", "attention", 0.6),
        ("__cudnn$fmhaSoftmaxBackward", "attention_backward", 0.4),
    ):
        module = parse(kernel(name, "jvp()/custom_partitioning"))
        (call,) = (instr for instr in module.computations["main"] if instr.op == "custom-call")
        (product,) = cost_of(module, "main", call).products
        assert (
            (product.kind, product.share)
            == (kind, causal_share(1024, 1024))
            == (kind, (1 + 128 / 1024) / 2)
        )
        assert product.flops == (2 if kind == "attention" else 5) * SCORES
        scores = 4 * 12 * 1024 * 1024
        wanted = product.share * (product.flops / (312e12 * share) + scores / special)
        np.testing.assert_allclose(product_time(product, A100), wanted, rtol=1e-12)
        unmasked = dataclasses.replace(product, share=1.0)
        assert product_time(unmasked, A100) > 1.7 * product_time(product, A100)


@pytest.mark.parametrize(
    "name, kind",
    [("forward", "attention"), ("dkv", "attention_backward"), ("dbias", "attention_backward")],
)
def test_our_kernels_say_by_their_name_that_they_are_causal(name, kind):
    products = []
    for causal in ("", "_causal"):
        module = parse(
            kernel("__gpu$xla.gpu.triton", f"jvp()/flash_attention_{name}{causal}/pallas_call")
        )
        (call,) = (instr for instr in module.computations["main"] if instr.op == "custom-call")
        products += cost_of(module, "main", call).products
    unmasked, masked = products
    assert (
        unmasked.kind == masked.kind == kind
        and unmasked.flops == masked.flops
        and unmasked.scores == masked.scores == 4 * 12 * 1024 * 1024
    )
    assert (unmasked.share, masked.share) == (1.0, causal_share(1024, 1024))


def test_convolutions_have_a_share_of_their_own():
    sides, slow = (
        (1, 108 * 256, 128, 4096),
        dataclasses.replace(A100, achieved=dataclasses.replace(A100.achieved, convolution=0.25)),
    )
    convolution = Product("convolution", "bfloat16", 2.0 * np.prod(sides), sides)
    assert product_time(convolution, A100) == product_time(matmul("bfloat16", sides), A100), (
        "matmul's, if a target does not say"
    )
    np.testing.assert_allclose(
        product_time(convolution, slow) - WAVE,
        2 * (product_time(convolution, A100) - WAVE),
        rtol=1e-12,
    )


SLICES = """HloModule m, is_scheduled=true, num_partitions=1

%update (p0: s32[], p1: f32[24,4,1024,64], p2: f32[4,1024,64]) -> f32[1024,24,4,64] {
  %p1 = f32[24,4,1024,64]{3,1,0,2} parameter(1)
  %other = f32[1024,24,4,64]{3,2,1,0} bitcast(%p1)
  %p2 = f32[4,1024,64]{2,0,1} parameter(2)
  %row = f32[1024,1,4,64]{3,2,1,0} bitcast(%p2)
  %zero = s32[] constant(0)
  %p0 = s32[] parameter(0)
  ROOT %updated = f32[1024,24,4,64]{3,2,1,0} dynamic-update-slice(%other, %row, %zero, %p0, %zero, %zero)
}

%read (p0: s32[], p1: f32[24,4,1024,64]) -> f32[1024,4,64] {
  %p1 = f32[24,4,1024,64]{3,1,0,2} parameter(1)
  %other = f32[1024,24,4,64]{3,2,1,0} bitcast(%p1)
  %zero = s32[] constant(0)
  %p0 = s32[] parameter(0)
  %slice = f32[1024,1,4,64]{3,2,1,0} dynamic-slice(%other, %zero, %p0, %zero, %zero), dynamic_slice_sizes={1024,1,4,64}
  %row = f32[1024,4,64]{2,1,0} bitcast(%slice)
  ROOT %negated = f32[1024,4,64]{2,1,0} negate(%row)
}

ENTRY %main (n: s32[], stack: f32[24,4,1024,64], row: f32[4,1024,64]) -> (f32[1024,24,4,64], f32[1024,4,64]) {
  %n = s32[] parameter(0)
  %stack = f32[24,4,1024,64]{3,1,0,2} parameter(1)
  %row = f32[4,1024,64]{2,0,1} parameter(2)
  %written = f32[1024,24,4,64]{3,2,1,0} fusion(%n, %stack, %row), kind=kLoop, calls=%update
  %taken = f32[1024,4,64]{2,1,0} fusion(%n, %stack), kind=kLoop, calls=%read
  ROOT %both = (f32[1024,24,4,64]{3,2,1,0}, f32[1024,4,64]{2,1,0}) tuple(%written, %taken)
}
"""  # noqa: E501


def test_slices_of_a_stack_count_and_not_the_stack():
    """Also where XLA gives the stack another shape between the fusion's parameter and the slice."""
    module, row = parse(SLICES), 4 * 1024 * 4 * 64
    written, taken = (instr for instr in module.computations["main"] if instr.op == "fusion")
    index = 4
    assert cost_of(module, "main", written).bytes == 2 * row + index
    assert cost_of(module, "main", taken).bytes == 2 * row + index
    assert memory_time(2 * row, A100) == 2 * row / (2.039e12 * 0.8)
