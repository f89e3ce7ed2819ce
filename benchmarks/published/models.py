"""The shapes of models that others have measured, each written once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import spmd
from examples.gpt import Block, named
from examples.gpt_pipeline import GPT


class UnrolledGPT(nnx.Module):
    """The GPT of examples/gpt.py, with the features that a chunked loss takes, and a tied head."""

    head = None

    def __init__(
        self, *, vocab: int, width: int, depth: int, heads: int, length: int, rngs: nnx.Rngs
    ):
        self.tokens = nnx.Embed(vocab, width, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.places = nnx.Embed(length, width, embedding_init=named(None, "embed"), rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, 0.0, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def features(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class LlamaBlock(nnx.Module):
    """Grouped queries with rotary positions, and SwiGLU, each with a residual connection (Touvron
    et al. 2023, arXiv:2307.09288).
    """

    def __init__(self, width: int, heads: int, groups: int, hidden: int, *, rngs: nnx.Rngs):
        self.heads, self.groups, size = heads, groups, width // heads

        def linear(inputs: int, outputs: int, *names: str) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=named(*names), rngs=rngs)

        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.query, self.out = (
            linear(width, heads * size, "embed", "heads"),
            linear(heads * size, width, "heads", "embed"),
        )
        self.key, self.value = (
            linear(width, groups * size, "embed", "heads"),
            linear(width, groups * size, "embed", "heads"),
        )
        self.gate, self.up = (
            linear(width, hidden, "embed", "mlp"),
            linear(width, hidden, "embed", "mlp"),
        )
        self.down = linear(hidden, width, "mlp", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        query, key, value = (
            linear(h).reshape(*x.shape[:-1], count, -1) for linear, count in self._projections()
        )
        mixed = spmd.nn.attention(rotated(query), rotated(key), value, causal=True)
        x = x + self.out(mixed.reshape(*x.shape[:-1], -1))
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))

    def _projections(self) -> tuple[tuple[nnx.Linear, int], ...]:
        return (self.query, self.heads), (self.key, self.groups), (self.value, self.groups)


class Pair(nnx.Module):
    """Two layers as one, so that a layout can recompute every second layer only."""

    def __init__(self, layer: Callable[[nnx.Rngs], nnx.Module], *, rngs: nnx.Rngs):
        self.first, self.second = layer(rngs), layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def rotated(x: jax.Array, base: float = 500_000.0) -> jax.Array:
    """Rotary positions of [rows, length, heads, size] (Su et al. 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * base ** (
        -jnp.arange(half, dtype=jnp.float32) / half
    )
    cos, sin = (function(angles)[:, None, :].astype(x.dtype) for function in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


class Llama(nnx.Module):
    """Embeddings and a stack of blocks; `head` maps the features of each token to logits, or with
    `tied` the embedding's table does.
    """

    def __init__(
        self,
        *,
        vocab: int,
        width: int,
        depth: int,
        heads: int,
        groups: int,
        hidden: int,
        tied=False,
        pairs=False,
        rngs: nnx.Rngs,
    ):
        def layer(rngs: nnx.Rngs) -> nnx.Module:
            return LlamaBlock(width, heads, groups, hidden, rngs=rngs)

        def pair(rngs: nnx.Rngs) -> nnx.Module:
            return Pair(layer, rngs=rngs)

        self.tokens = nnx.Embed(vocab, width, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(depth // 2 if pairs else depth, pair if pairs else layer, rngs)
        )
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = (
            None
            if tied
            else nnx.Linear(
                width, vocab, use_bias=False, kernel_init=named("embed", "vocab"), rngs=rngs
            )
        )

    def features(self, tokens: jax.Array) -> jax.Array:
        return self.norm(self.blocks(self.tokens(tokens)))


def next_token_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of all tokens, their logits in chunks."""
    table, vocab_dim = _head(model)
    return spmd.losses.cross_entropy_from_features(
        model.features(batch["tokens"]), table, batch["targets"], vocab_dim=vocab_dim
    )


def loss_of_logits(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The same of the logits of all tokens at once, in float32."""
    table, vocab_dim = _head(model)
    features = model.features(batch["tokens"])
    logits = jnp.matmul(features, (table if vocab_dim else table.T).astype(features.dtype)).astype(
        jnp.float32
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.sum(), jnp.float32(losses.size)


def _head(model: Any) -> tuple[jax.Array, int]:
    """The table that features are multiplied by, and its dim of the vocabulary."""
    return (model.tokens.embedding[...], 0) if model.head is None else (model.head.kernel[...], 1)


class Bottleneck(nnx.Module):
    """Three convolutions, the second of them 3x3 with the stride, and a shortcut (He et al. 2015,
    arXiv:1512.03385; version 1.5).
    """

    def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs):
        def conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nnx.Conv:
            return nnx.Conv(
                inputs, outputs, (side, side), strides=stride, use_bias=False, rngs=rngs
            )

        self.conv1, self.conv2, self.conv3 = (
            conv(inputs, width, 1),
            conv(width, width, 3, stride),
            conv(width, 4 * width, 1),
        )
        self.norm1, self.norm2, self.norm3 = (
            nnx.BatchNorm(count, rngs=rngs) for count in (width, width, 4 * width)
        )
        shaped = inputs != 4 * width or stride > 1
        self.shortcut = conv(inputs, 4 * width, 1, stride) if shaped else None
        self.norm = nnx.BatchNorm(4 * width, rngs=rngs) if shaped else None

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norm1(self.conv1(x)))
        h = nnx.relu(self.norm2(self.conv2(h)))
        h = self.norm3(self.conv3(h))
        return nnx.relu(
            h + (x if self.shortcut is None or self.norm is None else self.norm(self.shortcut(x)))
        )


class ResNet50(nnx.Module):
    """Logits of 1,000 classes of images [rows, 224, 224, 3]."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.stem, self.norm = (
            nnx.Conv(3, 64, (7, 7), strides=2, use_bias=False, rngs=rngs),
            nnx.BatchNorm(64, rngs=rngs),
        )
        blocks, inputs = [], 64
        for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(depth):
                blocks.append(
                    Bottleneck(inputs, width, 2 if number == 0 and width > 64 else 1, rngs=rngs)
                )
                inputs = 4 * width
        self.blocks, self.head = nnx.List(blocks), nnx.Linear(inputs, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class ViTBlock(nnx.Module):
    """Attention to all patches and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.query, self.key, self.value, self.out = (
            nnx.Linear(width, width, rngs=rngs) for _ in range(4)
        )
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        query, key, value = (
            linear(h).reshape(*x.shape[:-1], self.heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        x = x + self.out(spmd.nn.attention(query, key, value).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    """Logits of 1,000 classes of images [rows, 224, 224, 3], from patches of 16 x 16 and a class
    token (arXiv:2010.11929).
    """

    def __init__(self, *, width: int, depth: int, heads: int, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, width, (16, 16), strides=16, padding="VALID", rngs=rngs)
        self.first, self.places = (
            nnx.Param(jnp.zeros((1, 1, width))),
            nnx.Param(jnp.zeros((1, 197, width))),
        )
        self.blocks = spmd.nn.LayerStack(
            spmd.nn.repeat(depth, lambda rngs: ViTBlock(width, heads, rngs=rngs), rngs)
        )
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], 196, -1)
        first = jnp.broadcast_to(self.first[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], 1) + self.places[...].astype(x.dtype)
        return self.head(self.norm(self.blocks(x))[:, 0])


KINDS: dict[str, Callable[..., nnx.Module]] = {
    "gpt": GPT,
    "unrolled_gpt": UnrolledGPT,
    "llama": Llama,
    "resnet50": ResNet50,
    "vit": ViT,
}
