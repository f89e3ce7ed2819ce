"""One decoder for the families of open language models that `DecoderConfig` describes.

A layer is attention and an MLP, each with a residual connection. Layers are a `spmd.nn.LayerStack`,
so a layout may pipeline them, and gather their parameters one layer at a time; parameters carry
logical axis names: vocab, embed, heads, kv_heads, mlp.
"""

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd.errors import DataError, ModelError, OptionError
from spmd.nn.attention import attention
from spmd.nn.embed import Embed
from spmd.nn.layer_stack import LayerStack
from spmd.nn.stacking import repeat
from spmd.pretrained.decoder_config import DecoderConfig
from spmd.pretrained.kv_cache import Cache, cached_attention
from spmd.pretrained.rope import rotate

EXACT_GELU = functools.partial(nnx.gelu, approximate=False)
ACTIVATIONS: dict[str, Any] = {
    "silu": nnx.silu,
    "gelu": EXACT_GELU,
    "gelu_tanh": nnx.gelu,
    "relu": nnx.relu,
}


class Inputs(NamedTuple):
    """What every layer is given beside its input, [rows, length, ...] each."""

    positions: jax.Array
    segment_ids: jax.Array | None
    tables: tuple[tuple[jax.Array, jax.Array], ...]


def named(init: Any, *names: str | None) -> Any:
    """An initializer whose parameter carries these logical axis names."""
    return nnx.with_partitioning(init, names, eager_sharding=False)


def linear(
    sizes: tuple[int, int],
    names: tuple[str, str | None],
    bias: bool,
    dtype: Any,
    rngs: nnx.Rngs,
    **options: Any,
) -> nnx.Linear:
    """A linear map whose kernel [in, out] carries these names."""
    inits = {
        "kernel_init": named(nnx.initializers.normal(0.02), *names),
        "bias_init": named(nnx.initializers.zeros, names[1]),
    }
    return nnx.Linear(*sizes, use_bias=bias, param_dtype=dtype, rngs=rngs, **inits, **options)


class Norm(nnx.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm, computed in float32."""

    def __init__(
        self, width: int, dtype: Any, eps: float, *, centered: bool = True, offset: float = 0.0
    ):
        self.eps, self.offset, self.centered = eps, offset, centered
        self.scale = nnx.Param(jnp.full(width, 1.0 - self.offset, dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype)) if self.centered else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shaped like `x`, in its dtype."""
        y = x.astype(jnp.float32)
        y = y - y.mean(axis=-1, keepdims=True) if self.centered else y
        y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + self.eps)
        if not self.centered and not self.offset:
            # Llama rounds before it scales, the others afterwards
            return y.astype(x.dtype) * self.scale[...].astype(x.dtype)
        y = y * (self.offset + self.scale[...].astype(jnp.float32))
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(x.dtype)


@functools.cache  # a model is traced several times, and says it once
def _warn_of_length(length: int, longest: int) -> None:
    text = (
        "rows of %d tokens, and config.json says that the model was made for %d "
        "(max_position_embeddings)"
    )
    logging.getLogger("spmd").warning(text, length, longest)


def _norm(config: DecoderConfig, width: int, dtype: Any) -> Norm:
    return Norm(
        width, dtype, config.norm_eps, centered=config.norm == "layer", offset=config.norm_offset
    )


class Attention(nnx.Module):
    """Causal attention with grouped queries; which keys a layer sees, and how positions turn them,
    is the layer's kind.
    """

    def __init__(self, config: DecoderConfig, index: int, dtype: Any, rngs: nnx.Rngs):
        self.config, self.kind = config, config.layers[index]
        width, heads, groups = (
            config.width,
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        self.query = linear((width, heads), ("embed", "heads"), config.qkv_bias, dtype, rngs)
        self.key = linear((width, groups), ("embed", "kv_heads"), config.qkv_bias, dtype, rngs)
        self.value = linear((width, groups), ("embed", "kv_heads"), config.qkv_bias, dtype, rngs)
        self.out = linear((heads, width), ("heads", "embed"), config.out_bias, dtype, rngs)
        self.query_norm, self.key_norm = (
            _norm(config, config.head_dim, dtype) if config.qk_norm else None for _ in range(2)
        )

    def __call__(
        self, x: jax.Array, inputs: Inputs, cache: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The result [rows, length, width], and the cache with these keys and values: (keys,
        values, number of the layer), or ().
        """
        config, window = self.config, self.kind.window
        query, key, value = (
            linear(x).reshape(*x.shape[:2], -1, config.head_dim)
            for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.kind.rope is not None:
            query, key = (rotate(part, inputs.tables[self.kind.rope]) for part in (query, key))
        options: dict[str, Any] = {"scale": config.scale, "soft_cap": config.soft_cap}
        if not cache:
            before = None if window is None else (window - 1, 0)
            y = attention(
                query,
                key,
                value,
                causal=True,
                window=before,
                segment_ids=inputs.segment_ids,
                **options,
            )
        else:
            y, cache = cached_attention(
                query, key, value, cache, inputs.positions, window, **options
            )
        return self.out(y.reshape(*x.shape[:2], -1)), cache


class MLP(nnx.Module):
    """Two linear maps with an activation between; or its product with a third (GLU, Shazeer,
    arXiv:2002.05202).
    """

    def __init__(self, config: DecoderConfig, dtype: Any, rngs: nnx.Rngs):
        self.activation, bias = config.activation, config.mlp_bias
        wide, narrow = (config.width, config.mlp_width), (config.mlp_width, config.width)
        self.gate = linear(wide, ("embed", "mlp"), bias, dtype, rngs) if config.gated else None
        self.up = linear(wide, ("embed", "mlp"), bias, dtype, rngs)
        self.down = linear(narrow, ("mlp", "embed"), bias, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[rows, length, width]."""
        activation, up = ACTIVATIONS[self.activation], checkpoint_name(self.up(x), "mlp_up")
        return self.down(
            activation(up)
            if self.gate is None
            else activation(checkpoint_name(self.gate(x), "mlp_gate")) * up
        )


class Block(nnx.Module):
    """A layer."""

    def __init__(self, config: DecoderConfig, index: int, dtype: Any, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = (
            _norm(config, config.width, dtype),
            _norm(config, config.width, dtype),
        )
        self.attention, self.mlp = Attention(config, index, dtype, rngs), MLP(config, dtype, rngs)
        self.attention_post_norm, self.mlp_post_norm = (
            _norm(config, config.width, dtype) if config.post_norms else None for _ in range(2)
        )

    def __call__(self, state: Any, inputs: Inputs) -> Any:
        """The layer's output from its input [rows, length, width]; with a cache, (output, keys,
        values, number of the next layer).
        """
        x, *cache = state if isinstance(state, tuple) else (state,)
        y, cache = self.attention(self.attention_norm(x), inputs, tuple(cache))
        y = checkpoint_name(y, "attn_out")
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        x = x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))
        return (x, *cache) if cache else x


class Group(nnx.Module):
    """Layers of the kinds that a model repeats, named by number."""

    def __init__(self, config: DecoderConfig, start: int, count: int, dtype: Any, rngs: nnx.Rngs):
        self.count = count
        for number in range(count):
            setattr(self, str(number), Block(config, start + number, dtype, rngs))

    def __call__(self, state: Any, inputs: Inputs) -> Any:
        """As a `Block`."""
        for number in range(self.count):
            state = getattr(self, str(number))(state, inputs)
        return state


class Decoder(nnx.Module):
    """A decoder: tokens to the logits of the next ones.

    Parameters: embed/embedding [vocab, width], stack/layers/attention/query/kernel [layers, width,
    heads * head_dim], and so on. Where kinds of layers alternate, the stack is one of groups,
    stack/layers/0/... [groups, ...] to the last of the period, and the layers that are no full
    group follow in tail/0/.... Arrays lie where the layout says, or on the default device.

    Args:
      config: sizes and kind; `DecoderConfig.from_config` reads them from a config.json.
      dtype: of the parameters. Computation is in the dtype that they have when called; norms,
        softmax and logits are in float32.

    Example:
      >>> from spmd.pretrained.decoder_config import LayerKind
      >>> config = DecoderConfig(
      ...     vocab=10,
      ...     width=8,
      ...     heads=2,
      ...     kv_heads=1,
      ...     head_dim=4,
      ...     mlp_width=16,
      ...     layers=(LayerKind(),) * 2,
      ... )
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((1, 3), int)).shape
      (1, 3, 10)
      >>> logits, cache = model(
      ...     jnp.zeros((1, 1), int),
      ...     positions=jnp.array([[0]]),
      ...     cache=model.init_cache(rows=1, length=4),
      ... )
      >>> cache["keys"].shape
      (2, 1, 4, 1, 4)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config, init = config, nnx.initializers.normal(0.02)
        self.embed = Embed(
            config.vocab,
            config.width,
            embedding_init=named(init, "vocab", "embed"),
            param_dtype=dtype,
            rngs=rngs,
        )
        places = functools.partial(
            nnx.Embed, embedding_init=named(init, None, "embed"), param_dtype=dtype, rngs=rngs
        )
        self.position = (
            places(config.learned_positions, config.width) if config.learned_positions else None
        )
        period, depth = config.period, len(config.layers)

        def make(rngs: nnx.Rngs) -> nnx.Module:
            return (
                Block(config, 0, dtype, rngs)
                if period == 1
                else Group(config, 0, period, dtype, rngs)
            )

        self.stack = LayerStack(repeat(depth // period, make, rngs))
        self.tail = (
            Group(config, depth // period * period, depth % period, dtype, rngs)
            if depth % period
            else None
        )
        self.final_norm = _norm(config, config.width, dtype)
        head = functools.partial(
            linear,
            (config.width, config.vocab),
            ("embed", "vocab"),
            preferred_element_type=jnp.float32,
        )
        self.head = None if config.tied else head(False, dtype, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Logits float32[rows, length, vocab] of the next token; with a cache, also the cache.
        Arguments as in `features`.
        """
        result = self.features(tokens, positions=positions, segment_ids=segment_ids, cache=cache)
        features, *caches = result if isinstance(result, tuple) else (result,)
        if self.head is None:
            table = self.embed.embedding[...].astype(features.dtype)
            logits = jnp.einsum("rlw,vw->rlv", features, table, preferred_element_type=jnp.float32)
        else:
            logits = self.head(features).astype(jnp.float32)
        cap = self.config.final_soft_cap
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return (logits, *caches) if caches else logits

    def features(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """What the head is applied to, [rows, length, width]; with a cache, also the cache.

        Args:
          tokens: int32[rows, length].
          positions: int32[rows, length]; by default counted from 0, in each segment anew.
          segment_ids: int32[rows, length], documents packed into a row, which do not see each
            other. Not with a cache.
          cache: keys and values of earlier tokens, from `init_cache`. These tokens' are stored at
            their `positions`; those that are not below the cache's length are dropped. A token sees
            what is stored at its position and before, so padding goes at a row's end.
        """
        longest = self.config.learned_positions
        if (
            longest is not None
            and (tokens.shape[1] if cache is None else cache["keys"].shape[2]) > longest
        ):
            raise DataError(
                f"rows of {tokens.shape[1]} tokens, and the model has {longest} positions.",
                fix="shorter rows.",
            )
        if (
            cache is None
            and self.config.max_positions is not None
            and tokens.shape[1] > self.config.max_positions
        ):
            _warn_of_length(tokens.shape[1], self.config.max_positions)
        if cache is not None and segment_ids is not None:
            raise OptionError(
                "the decoder does not take segment_ids with a cache.",
                fix="one document in each row.",
            )
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            if segment_ids is not None:
                continues = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))
                positions = positions - jax.lax.cummax(jnp.where(continues, 0, positions), axis=1)
        x = self.embed(tokens)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        x = x if self.position is None else x + self.position(positions)
        inputs = Inputs(
            positions, segment_ids, tuple(rope.table(positions) for rope in self.config.ropes)
        )
        state = (
            x if cache is None else (x, cache["keys"], cache["values"], jnp.zeros((), jnp.int32))
        )
        state = self.stack(state, inputs)
        state = state if self.tail is None else self.tail(state, inputs)
        if cache is None:
            return self.final_norm(state)
        x, keys, values, _ = state
        return self.final_norm(x), {"keys": keys, "values": values}

    def output_head(self) -> dict[str, Any]:
        """What `spmd.losses.cross_entropy_from_features` takes beside features, so that
        `spmd.losses.next_token` has few logits at a time.

        Raises:
          ModelError: the head has adapters, which are no matrix.
        """
        if hasattr(self.head, "lora_a"):
            raise ModelError(
                "the decoder's head has adapters, so it is more than the matrix that this loss "
                "takes.",
                fix="adapters on other layers, or a loss that calls the model for its logits.",
            )
        head, vocab_dim = (self.embed.embedding, 0) if self.head is None else (self.head.kernel, 1)
        return {"head": head[...], "vocab_dim": vocab_dim, "soft_cap": self.config.final_soft_cap}

    def init_cache(self, rows: int, length: int, dtype: Any = jnp.float32) -> Cache:
        """An empty cache for so many tokens in each row: "keys" and "values", [layers, rows,
        length, kv_heads, head_dim].
        """
        shape = (len(self.config.layers), rows, length, self.config.kv_heads, self.config.head_dim)
        return {"keys": jnp.zeros(shape, dtype), "values": jnp.zeros(shape, dtype)}
