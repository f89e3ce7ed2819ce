"""Models of flax's examples, gemma and lm1b, as they are there: trained with `[attention]
implementation = "chunked"` and `"as_written"`.

    # gemma needs: pip install jaxtyping
    git clone --depth 1 https://github.com/google/flax /tmp/flax
    # prints the largest difference of losses, and what computed attention
    python benchmarks/flax_attention.py /tmp/flax/examples

With the GPU compiler (pip install -e '.[gpu-compiler]') it also prints the kernels in the program
for an H100.
"""

import argparse
import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spmd

LENGTH, VOCAB, STEPS = 256, 256, 6


def gemma(length: int) -> tuple[Any, Any]:
    """A Gemma 2 of its `Transformer`: grouped queries, alternating windows, soft caps."""
    transformer, config = __import__("transformer"), __import__("transformer_cfg")
    kinds = (config.AttentionType.LOCAL_SLIDING, config.AttentionType.GLOBAL)
    sizes = {
        "num_layers": 2,
        "num_embed": VOCAB,
        "embed_dim": 128,
        "hidden_dim": 256,
        "num_heads": 4,
        "head_dim": 64,
        "num_kv_heads": 2,
    }
    caps = {
        "final_logit_softcap": 30.0,
        "attn_logits_soft_cap": 50.0,
        "sliding_window_size": length // 4,
    }
    chosen = config.TransformerConfig(
        **sizes, **caps, use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=kinds
    )

    def loss(model: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        mask = jnp.ones_like(tokens, bool)
        positions = transformer.build_positions_from_mask(mask)
        logits, _ = model(tokens, positions, None, transformer.make_causal_attn_mask(mask))
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean(
            axis=1
        )

    return lambda: transformer.Transformer(chosen, rngs=nnx.Rngs(0)), loss


def lm1b(length: int) -> tuple[Any, Any]:
    """Its `TransformerLM`, a linen module of `nn.MultiHeadDotProductAttention`."""
    models = __import__("models")
    sizes = {
        "emb_dim": 128,
        "num_heads": 2,
        "num_layers": 2,
        "qkv_dim": 128,
        "mlp_dim": 256,
        "max_len": length,
    }
    config = models.TransformerConfig(
        vocab_size=VOCAB, output_vocab_size=VOCAB, deterministic=True, **sizes
    )

    def loss(model: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean(axis=1)

    return models.TransformerLM(config), loss


def losses(model: Any, loss: Any, layout: Any, tokens: np.ndarray) -> tuple[list[float], list[str]]:
    """Of each step, and the notes on attention."""
    trainer = spmd.Trainer(
        model, loss=loss, optimizer=optax.sgd(0.05, momentum=0.9), layout=layout, mesh="data=8"
    )
    state, values = trainer.init({"tokens": tokens[:16]}), []
    for step in range(STEPS):
        state, metrics = trainer.step(state, {"tokens": tokens[16 * step : 16 * (step + 1)]})
        values.append(float(metrics["loss"]))
    return values, [note for note in trainer.notes() if "attention" in note]


def kernels(model: Any, loss: Any, layout: Any, length: int) -> str:
    """How often which kernel of attention is in the program for eight H100s; "" without the
    compiler.
    """
    batch = {"tokens": jax.ShapeDtypeStruct((16, length), "int32")}
    try:
        plan = spmd.plan(
            model,
            batch,
            loss=loss,
            optimizer=optax.sgd(0.05),
            target="8xh100",
            layout=layout,
            precision="bfloat16",
        )
    except spmd.SpmdError as error:
        return f"no plan: {str(error).splitlines()[0]}"
    return "; ".join(note for note in plan.notes if "attention" in note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train models of flax's examples with fused attention."
    )
    parser.add_argument("examples", type=Path, help="the folder examples/ of a checkout of flax")
    args = parser.parse_args()
    spmd.simulate_devices(8)
    default = spmd.Layout.load("data_parallel")
    plain, fused = (
        dataclasses.replace(default, attention=spmd.Attention(name))
        for name in ("as_written", "chunked")
    )
    for make in (gemma, lm1b):
        sys.path.insert(0, str(args.examples / make.__name__))
        model, loss = make(LENGTH)
        tokens = np.random.default_rng(0).integers(1, VOCAB, (16 * STEPS, LENGTH), dtype=np.int32)
        run = functools.partial(losses, model, loss, tokens=tokens)
        (without, _), (given, notes) = run(layout=plain), run(layout=fused)
        worst = max(abs(a - b) / abs(b) for a, b in zip(given, without, strict=True))
        print(
            f"{make.__name__}: losses {without[0]:.4f} to {without[-1]:.4f}, largest relative "
            f"difference {worst:.1e}"
        )
        print("  on CPUs:", "; ".join(re.sub(r"^note: ", "", note) for note in notes))
        print("  on 8 H100s:", kernels(model, loss, default, LENGTH))
        sys.path.pop(0)


if __name__ == "__main__":
    main()
