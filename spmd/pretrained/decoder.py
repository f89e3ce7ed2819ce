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
from spmd.pretrained.rope import rotate

EXACT_GELU = functools.partial(nnx.gelu, approximate=False)
ACTIVATIONS: dict[str, Any] = {
    "silu": nnx.silu,
    "gelu": EXACT_GELU,
    "gelu_tanh": nnx.gelu,
    "relu": nnx.relu,
}


# Two arrays for all layers, which a scan over layers carries, so that XLA updates them in place.
Cache = dict[str, jax.Array]  # "keys" and "values", [layers, rows, length, kv_heads, head_dim]


class Inputs(NamedTuple):
    """Arguments of every layer beside its input, [rows, length, ...] each."""

    positions: jax.Array
    segment_ids: jax.Array | None
    tables: tuple[tuple[jax.Array, jax.Array], ...]


def named(init: Any, *names: str | None) -> Any:
    """An initializer whose parameter carries these logical axis names."""
    # eager_sharding: flax 0.12 would place the parameter by these names, without the layout
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
    kernel_init = named(nnx.initializers.normal(0.02), *names)
    bias_init = named(nnx.initializers.zeros, names[1])
    inits = {"kernel_init": kernel_init, "bias_init": bias_init}
    return nnx.Linear(*sizes, use_bias=bias, param_dtype=dtype, rngs=rngs, **inits, **options)


class Norm(nnx.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm, computed in float32."""

    def __init__(
        self, width: int, dtype: Any, eps: float, *, centered: bool = True, offset: float = 0.0
    ):
        self.eps, self.offset, self.centered = eps, offset, centered
        # Gemma's files hold the scale less 1, and Llama's the scale.
        self.scale = nnx.Param(jnp.full(width, 1.0 - self.offset, dtype))
        if self.centered:
            self.bias = nnx.Param(jnp.zeros(width, dtype))
        else:
            self.bias = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shaped like `x`, in its dtype."""
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - y.mean(axis=-1, keepdims=True)
        mean_square = jnp.square(y).mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(mean_square + self.eps)
        if not self.centered and not self.offset:
            # Llama rounds before it scales, the others afterwards
            return y.astype(x.dtype) * self.scale[...].astype(x.dtype)
        y = y * (self.offset + self.scale[...].astype(jnp.float32))
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


@functools.cache  # a model is traced several times, and warns once
def _warn_of_length(length: int, longest: int) -> None:
    text = (
        "rows of %d tokens, and config.json says that the model was made for %d "
        "(max_position_embeddings)"
    )
    logging.getLogger("spmd").warning(text, length, longest)


def _norm(config: DecoderConfig, width: int, dtype: Any, used: bool = True) -> Any:
    """Return a norm of the config's kind; None if the model does not use it."""
    if not used:
        return None
    return Norm(
        width, dtype, config.norm_eps, centered=config.norm == "layer", offset=config.norm_offset
    )


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: tuple[jax.Array, ...],
    positions: jax.Array,
    window: int | None,
    **options: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Causal attention to new keys and values and to those of the cache, where the new ones are
    stored first.

    Args:
      query: [rows, length, heads, head_dim]; key and value: [rows, length, kv_heads, head_dim].
      cache: keys and values of all layers, and the number of this layer.
      positions: int32[rows, length], where new keys and values are stored; nothing is stored at the
        cache's length or after it.
      window: keys that a query sees, its own included; None: all at its position and before.
      options: of `spmd.nn.attention`.

    Returns:
      The result, shaped like the query, and the cache for the next layer.
    """
    keys, values, number = cache
    keys = _store(keys, key, number, positions)
    values = _store(values, value, number, positions)
    # Places that are not filled yet come after every query, so this mask hides them, too.
    distance = positions[:, :, None] - jnp.arange(keys.shape[2])
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    key, value = keys[number].astype(query.dtype), values[number].astype(query.dtype)
    result = attention(query, key, value, mask=mask[:, None], **options)
    return result, (keys, values, number + 1)


def _store(stored: jax.Array, new: jax.Array, number: jax.Array, positions: jax.Array) -> jax.Array:
    """Return all layers' keys or values with new ones."""
    # Rows are batching dims, which the partitioner leaves where they are: with
    # `stored.at[number, rows, positions].set(new)` it gathers the new ones of all rows on every
    # device (jax 0.10).
    at = jnp.stack([jnp.broadcast_to(number, positions.shape), positions], axis=-1)
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(
        stored, at, new.astype(stored.dtype), dims, mode=jax.lax.GatherScatterMode.FILL_OR_DROP
    )


class Attention(nnx.Module):
    """Causal attention with grouped queries; the layer's kind has the window of keys that a query
    sees, and the rotation by positions.
    """

    def __init__(self, config: DecoderConfig, index: int, dtype: Any, rngs: nnx.Rngs):
        self.config, self.kind = config, config.layers[index]
        width = config.width
        heads, groups = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = linear((width, heads), ("embed", "heads"), config.qkv_bias, dtype, rngs)
        self.key = linear((width, groups), ("embed", "kv_heads"), config.qkv_bias, dtype, rngs)
        self.value = linear((width, groups), ("embed", "kv_heads"), config.qkv_bias, dtype, rngs)
        self.out = linear((heads, width), ("heads", "embed"), config.out_bias, dtype, rngs)
        self.query_norm = _norm(config, config.head_dim, dtype, config.qk_norm)
        self.key_norm = _norm(config, config.head_dim, dtype, config.qk_norm)

    def __call__(
        self, x: jax.Array, inputs: Inputs, cache: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The result [rows, length, width], and the cache with these keys and values: (keys,
        values, number of the layer), or ().
        """
        config, window = self.config, self.kind.window
        shape = (*x.shape[:2], -1, config.head_dim)
        query = self.query(x).reshape(shape)
        key = self.key(x).reshape(shape)
        value = self.value(x).reshape(shape)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.kind.rope is not None:
            table = inputs.tables[self.kind.rope]
            query, key = rotate(query, table), rotate(key, table)
        options: dict[str, Any] = {"scale": config.scale, "soft_cap": config.soft_cap}
        if not cache:
            before = None
            if window is not None:
                # transformers counts the query itself in the window.
                before = (window - 1, 0)
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
        if config.gated:
            self.gate = linear(wide, ("embed", "mlp"), bias, dtype, rngs)
        else:
            self.gate = None
        self.up = linear(wide, ("embed", "mlp"), bias, dtype, rngs)
        self.down = linear(narrow, ("mlp", "embed"), bias, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The result [rows, length, width]."""
        activation, up = ACTIVATIONS[self.activation], checkpoint_name(self.up(x), "mlp_up")
        if self.gate is None:
            return self.down(activation(up))
        return self.down(activation(checkpoint_name(self.gate(x), "mlp_gate")) * up)


class Block(nnx.Module):
    """A layer."""

    def __init__(self, config: DecoderConfig, index: int, dtype: Any, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, config.width, dtype)
        self.mlp_norm = _norm(config, config.width, dtype)
        self.attention = Attention(config, index, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs)
        self.attention_post_norm = _norm(config, config.width, dtype, config.post_norms)
        self.mlp_post_norm = _norm(config, config.width, dtype, config.post_norms)

    def __call__(self, state: Any, inputs: Inputs) -> Any:
        """The layer's output from its input [rows, length, width]; with a cache, (output, keys,
        values, number of the next layer).
        """
        x, cache = state, ()
        if isinstance(state, tuple):
            x, *cache = state
        y, cache = self.attention(self.attention_norm(x), inputs, tuple(cache))
        # names for policies of remat, such as `[remat] save = ["attn_out"]`
        y = checkpoint_name(y, "attn_out")
        if self.attention_post_norm is not None:
            y = self.attention_post_norm(y)
        x = x + y
        y = self.mlp(self.mlp_norm(x))
        if self.mlp_post_norm is not None:
            y = self.mlp_post_norm(y)
        x = x + y
        if cache:
            return (x, *cache)
        return x


class Group(nnx.Module):
    """Layers of the kinds that a model repeats, named by number."""

    def __init__(self, config: DecoderConfig, start: int, count: int, dtype: Any, rngs: nnx.Rngs):
        self.count = count
        for number in range(count):
            setattr(self, str(number), Block(config, start + number, dtype, rngs))

    def __call__(self, state: Any, inputs: Inputs) -> Any:
        """The last layer's output; arguments and result as in `Block`."""
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
        if config.learned_positions:
            self.position = nnx.Embed(
                config.learned_positions,
                config.width,
                embedding_init=named(init, None, "embed"),
                param_dtype=dtype,
                rngs=rngs,
            )
        else:
            self.position = None
        period, depth = config.period, len(config.layers)

        def make(rngs: nnx.Rngs) -> nnx.Module:
            if period == 1:
                return Block(config, 0, dtype, rngs)
            return Group(config, 0, period, dtype, rngs)

        self.stack = LayerStack(repeat(depth // period, make, rngs))
        if depth % period:
            self.tail = Group(config, depth // period * period, depth % period, dtype, rngs)
        else:
            self.tail = None
        self.final_norm = _norm(config, config.width, dtype)
        if config.tied:
            self.head = None
        else:
            self.head = linear(
                (config.width, config.vocab),
                ("embed", "vocab"),
                False,
                dtype,
                rngs,
                # For the reason in `__call__`.
                preferred_element_type=jnp.float32,
            )

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
        features = self.features(tokens, positions=positions, segment_ids=segment_ids, cache=cache)
        if cache is not None:
            features, cache = features
        if self.head is None:
            table = self.embed.embedding[...].astype(features.dtype)
            # else XLA would round the logits of bfloat16 features before the softmax
            logits = jnp.einsum("rlw,vw->rlv", features, table, preferred_element_type=jnp.float32)
        else:
            logits = self.head(features).astype(jnp.float32)
        cap = self.config.final_soft_cap
        if cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        if cache is not None:
            return logits, cache
        return logits

    def features(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """The input of the head, [rows, length, width]; with a cache, also the cache.

        Args:
          tokens: int32[rows, length].
          positions: int32[rows, length]; by default counted from 0, in each segment anew.
          segment_ids: int32[rows, length], documents packed into a row, which do not see each
            other. Not with a cache.
          cache: keys and values of earlier tokens, from `init_cache`. These tokens' are stored at
            their `positions`; those that are not below the cache's length are dropped. A token sees
            what is stored at its position and before, so padding goes at a row's end.
        """
        longest, made_for = self.config.learned_positions, self.config.max_positions
        row_length = tokens.shape[1]
        length = row_length
        if cache is not None:
            length = cache["keys"].shape[2]
        if longest is not None and length > longest:
            raise DataError(
                f"rows of {row_length} tokens, and the model has {longest} positions.",
                fix="shorter rows.",
            )
        if cache is None and made_for is not None and row_length > made_for:
            _warn_of_length(row_length, made_for)
        if cache is not None and segment_ids is not None:
            raise OptionError(
                "the decoder does not take segment_ids with a cache.",
                fix="one document in each row.",
            )
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(row_length), tokens.shape)
            if segment_ids is not None:
                is_equal = segment_ids[:, 1:] == segment_ids[:, :-1]
                continues = jnp.pad(is_equal, ((0, 0), (1, 0)))
                begins = jnp.where(continues, 0, positions)
                positions = positions - jax.lax.cummax(begins, axis=1)
        x = self.embed(tokens)
        if self.config.embedding_scale is not None:
            # Gemma was trained with this factor rounded to the dtype of the embeddings.
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.position is not None:
            x = x + self.position(positions)
        tables = tuple(rope.table(positions) for rope in self.config.ropes)
        inputs = Inputs(positions, segment_ids, tables)
        state: Any = x
        if cache is not None:
            # The layer's number is carried, because a scan traces its body once for all layers.
            state = (x, cache["keys"], cache["values"], jnp.zeros((), jnp.int32))
        state = self.stack(state, inputs)
        if self.tail is not None:
            state = self.tail(state, inputs)
        if cache is None:
            return self.final_norm(state)
        x, keys, values, _ = state
        return self.final_norm(x), {"keys": keys, "values": values}

    def output_head(self) -> dict[str, Any]:
        """The arguments of `spmd.losses.cross_entropy_from_features` beside features, so that
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
        head, vocab_dim = self.embed.embedding, 0
        if self.head is not None:
            head, vocab_dim = self.head.kernel, 1
        return {"head": head[...], "vocab_dim": vocab_dim, "soft_cap": self.config.final_soft_cap}

    def init_cache(self, rows: int, length: int, dtype: Any = jnp.float32) -> Cache:
        """An empty cache for so many tokens in each row: "keys" and "values", [layers, rows,
        length, kv_heads, head_dim].
        """
        shape = (len(self.config.layers), rows, length, self.config.kv_heads, self.config.head_dim)
        return {"keys": jnp.zeros(shape, dtype), "values": jnp.zeros(shape, dtype)}
