"""Fused attention in plans for GPUs, of programs compiled by XLA:GPU without one: kernels on every
mesh, and no array of all scores.
"""

import dataclasses
import functools
import importlib.util
import re

import jax
import optax
import pytest
from flax import nnx

import spmd
from examples import gpt
from spmd.planner import compile as compiling
from spmd.planner.compile import COMPILERS, PLUGIN

LENGTH, ROWS = 1280, 8  # no other dim is as long
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None,
    reason=f"package {PLUGIN} is missing: pip install '.[gpu-compiler]'",
)


class Stacked(nnx.Module):
    """A stack of two of the GPT's blocks, and one token to predict per row."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens = spmd.nn.Embed(512, 256, embedding_init=gpt.named("vocab", "embed"), rngs=rngs)
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(2, lambda rngs: gpt.Block(256, 4, 0.0, rngs=rngs), rngs=rngs)
        )
        self.head = nnx.Linear(
            256, 512, use_bias=False, kernel_init=gpt.named("embed", "vocab"), rngs=rngs
        )

    def __call__(self, tokens):
        return self.head(self.blocks(self.tokens(tokens))[:, -1])


class Unchanged(nnx.Module):
    """One layer of flax's attention."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.tokens, self.head = nnx.Embed(512, 256, rngs=rngs), nnx.Linear(256, 512, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 256, decode=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.attention(self.tokens(tokens), is_causal=True)[:, -1])


def planned(implementation, layout, mesh, model=Stacked, **options):
    """A plan, the number of calls of cuDNN and Triton in its program, and whether that has an array
    of all scores.

    Layers that are gathered while others compute are called in a loop and once more outside of it:
    such calls count once.
    """
    layout = dataclasses.replace(
        spmd.Layout.load(layout), attention=spmd.Attention(implementation), **options
    )
    batch = {
        "tokens": jax.ShapeDtypeStruct((ROWS, LENGTH), "int32"),
        "targets": jax.ShapeDtypeStruct((ROWS,), "int32"),
    }
    chosen = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "mesh": mesh,
        "layout": layout,
    }
    plan = spmd.plan(lambda: model(), batch, target="4xh100", precision="bfloat16", **chosen)
    hlo = plan.compiled.hlo
    calls = [
        line
        for line in hlo.replace("while/body/closed_call/", "").splitlines()
        if "custom-call" in line and "op_name" in line
    ]
    names = [
        {line.partition('op_name="')[2] for line in calls if re.search(kind, line)}
        for kind in (r"__cudnn\$fmha", r"flash_attention_(?:forward|dq|dkv)")
    ]
    kernels = tuple(len({name.partition('"')[0] for name in of_kind}) for of_kind in names)
    return plan, kernels, bool(re.search(rf"\[[\d,]*{LENGTH},{LENGTH}\]", hlo))


BY_LAYER = {"remat": spmd.Remat(modules=("blocks/layers",))}
CASES = [
    pytest.param("auto", "fsdp", "data=4", (2, 0), {}, id="fsdp"),
    pytest.param(
        "cudnn",
        "fsdp_tensor_parallel",
        "data=2,model=2",
        (3, 0),
        BY_LAYER,
        id="model axes, recomputed",
    ),
    pytest.param(
        "auto",
        "tensor_parallel",
        "data=2,model=2",
        (2, 0),
        {"gradients": spmd.Gradients("compiler")},
        id="compiler",
    ),
    pytest.param("triton", "fsdp_tensor_parallel", "data=2,model=2", (0, 3), {}, id="triton"),
    pytest.param("chunked", "fsdp_tensor_parallel", "data=2,model=2", (0, 0), {}, id="chunked"),
    pytest.param("auto", "fsdp", "data=4", (2, 0), {"model": Unchanged}, id="flax, unchanged"),
]


@needs_compiler
@pytest.mark.system
@pytest.mark.parametrize(("implementation", "layout", "mesh", "kernels", "options"), CASES)
def test_kernels_in_the_program_for_h100s(implementation, layout, mesh, kernels, options):
    """Forward and backward (of Triton, one for queries and one for keys), and forward again where
    layers are recomputed.
    """
    plan, found, all_scores = planned(implementation, layout, mesh, **options)
    assert plan.compiled.exact
    assert found == kernels
    assert not all_scores
    name = "cudnn" if implementation == "auto" else implementation
    heads = 2 if "model" in mesh else 4
    assert (
        f"attention of {LENGTH} queries and keys, {heads} heads of 64, bfloat16, a causal mask: "
        f"{name}." in plan.notes
    )


@needs_compiler
@pytest.mark.system
def test_kernels_in_a_ring_of_h100s():
    """Local keys, the others in a loop, and the last: two blocks of the causal mask at least in
    each, forward and backward.
    """
    layout = spmd.Layout.load("context_parallel")
    batch = {
        "tokens": jax.ShapeDtypeStruct((ROWS, 2 * LENGTH), "int32"),
        "targets": jax.ShapeDtypeStruct((ROWS, 2 * LENGTH), "int32"),
    }
    chosen = {
        "loss": spmd.losses.cross_entropy,
        "optimizer": optax.adamw(1e-3),
        "mesh": "data=2,context=4",
        "layout": layout,
    }
    model = functools.partial(gpt.GPT, vocab=512, width=256, depth=1, heads=4, length=2 * LENGTH)
    plan = spmd.plan(
        lambda: model(rngs=nnx.Rngs(0)), batch, target="8xh100", precision="bfloat16", **chosen
    )
    hlo = plan.compiled.hlo
    calls = {
        name: len(re.findall(rf"custom-call.*flash_attention_{name}(?:_causal)?/", hlo))
        for name in ("forward", "dq", "dkv")
    }
    assert calls == dict.fromkeys(("forward", "dq", "dkv"), 3 + 2 + 2)
    assert re.search(r"custom-call.*while/body.*flash_attention_forward(?:_causal)?/", hlo)
    assert not re.search(rf"\[[\d,]*{LENGTH // 4},{LENGTH // 4}\]", hlo), "no scores of a block"
    expected = (
        f"attention of {2 * LENGTH} queries and keys, 4 heads of 64, bfloat16, a causal mask, in a "
        "ring of 4 devices: triton."
    )
    assert expected in plan.notes


@needs_compiler
@pytest.mark.system
def test_plain_attention_has_all_scores():
    """So the search above would find them."""
    assert planned("as_written", "fsdp", "data=4")[1:] == ((0, 0), True)


@pytest.mark.system
def test_an_estimate_chooses_for_the_compiler_it_has(monkeypatch):
    """Without XLA:GPU, kernels for GPUs cannot be compiled."""
    monkeypatch.setattr(
        compiling, "COMPILERS", {**COMPILERS, "cuda": ("no_such_module", *COMPILERS["cuda"][1:])}
    )
    plan, kernels, all_scores = planned("auto", "fsdp", "data=4")
    assert not plan.compiled.exact
    assert (kernels, all_scores) == ((0, 0), False)
    assert any(note.endswith("chunked.") for note in plan.notes)
