"""One encoder, for BERT (Devlin et al., arXiv:1810.04805): tokens see one another in both
directions; norms follow attention and MLP.

Layers are a `spmd.nn.LayerStack`, and parameters carry the decoder's logical axis names: vocab,
embed, heads, kv_heads, mlp.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd.errors import DataError, ModelError, PretrainedError, did_you_mean, join_names
from spmd.nn.attention import attention
from spmd.nn.embed import Embed
from spmd.nn.layer_stack import LayerStack
from spmd.nn.stacking import repeat
from spmd.pretrained.config_keys import MOST_LAYERS, ConfigKeys, is_count
from spmd.pretrained.decoder import ACTIVATIONS, Norm, linear, named

TASKS = {
    "BertModel": "features",
    "BertForMaskedLM": "masked_tokens",
    "BertForSequenceClassification": "classes",
}
# beside those of all models: of other code than transformers', or of versions that read them no
# more
IRRELEVANT = {
    *(
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    *("gradient_checkpointing", "output_past"),
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and task of an encoder.

    Attributes:
      vocab, width: of the embedding. heads: of attention; they divide width. mlp_width: of the MLP.
        depth: layers.
      positions, token_types: of the learned tables.
      activation: "gelu", "gelu_tanh", "silu" or "relu". norm_eps: added to the variance.
      task: "features", "masked_tokens" or "classes": what the model returns. classes: how many.
      notes: what the file asks for that the encoder leaves to the training run.

    Raises:
      PretrainedError: sizes that do not match.

    Example:
      >>> EncoderConfig(vocab=10, width=8, heads=2, mlp_width=16, depth=2, positions=4).token_types
      2
    """

    vocab: int
    width: int
    heads: int
    mlp_width: int
    depth: int
    positions: int
    token_types: int = 2
    activation: str = "gelu"
    norm_eps: float = 1e-12
    task: str = "features"
    classes: int = 2
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self):
        sizes = (
            "vocab",
            "width",
            "heads",
            "mlp_width",
            "depth",
            "positions",
            "token_types",
            "classes",
        )
        wrong = []
        for name in sizes:
            value = getattr(self, name)
            if not is_count(value):
                wrong.append(f"{name}={value!r}")
        if wrong:
            raise PretrainedError(
                f"EncoderConfig: {', '.join(wrong)}.", fix="whole numbers from 1."
            )
        if self.width % self.heads:
            why = (
                f"EncoderConfig: a width of {self.width} over {self.heads} heads leaves "
                f"{self.width % self.heads}."
            )
            raise PretrainedError(why, fix="heads that divide the width.")
        if self.task not in TASKS.values():
            raise PretrainedError(
                f'EncoderConfig: task="{self.task}".',
                fix=did_you_mean(self.task, list(TASKS.values())),
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> "EncoderConfig":
        """Return the config of a BERT's config.json, as any version of `transformers` writes it.

        Raises:
          PretrainedError: all keys that are missing, unknown, or ask for something that the encoder
            does not have.

        Example:
          >>> EncoderConfig.from_config(
          ...     {"model_type": "bert", "hidden_size": 128, "num_attention_heads": 2}
          ... ).mlp_width
          3072
        """
        keys = ConfigKeys(config, "encoder")
        keys.used |= IRRELEVANT
        width, heads = keys.count("hidden_size", 768), keys.count("num_attention_heads", 12)
        if not keys.problems and width % heads:
            keys.wrong(
                "num_attention_heads", f"hidden_size {width} / {heads} leaves {width % heads}"
            )
        names = config.get("architectures") or ["BertModel"]
        task = ""
        if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
            task = TASKS.get(names[0], "")
        if not task:
            keys.wrong("architectures", f"wanted one of {', '.join(TASKS)}")
        keys.get(
            "position_embedding_type",
            "absolute",
            lambda value: value == "absolute",
            '"absolute", a learned table',
        )
        keys.get(
            "is_decoder", False, lambda value: value is False, "false: tokens see those after them"
        )
        if not keys.flag("tie_word_embeddings", True) and task == "masked_tokens":
            keys.wrong(
                "tie_word_embeddings", "the head of the encoder is the table of its embedding"
            )
        fields: dict[str, Any] = {
            "vocab": keys.count("vocab_size", 30522),
            "width": width,
            "heads": heads,
            "task": task,
            "mlp_width": keys.count("intermediate_size", 3072),
            "depth": keys.count("num_hidden_layers", 12, MOST_LAYERS),
            "positions": keys.count("max_position_embeddings", 512),
            "token_types": keys.count("type_vocab_size", 2),
            "activation": keys.activation("hidden_act", "gelu"),
            "norm_eps": keys.number("layer_norm_eps", 1e-12),
            "classes": _classes(keys),
        }
        keys.finish(where)
        return cls(**fields, notes=tuple(keys.notes))


def _has_labels(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0


def _classes(keys: ConfigKeys) -> int:
    """Return the number of labels: 2, if the file has none."""
    labels = keys.get("id2label", {}, _has_labels, "a table of labels")
    counts = {name: keys.count(name, None) for name in ("num_labels", "_num_labels")}
    for name, count in counts.items():
        if labels and count not in (None, len(labels)):
            keys.wrong(name, f"id2label has {len(labels)}")
    return len(labels) or counts["num_labels"] or counts["_num_labels"] or 2


class Layer(nnx.Module):
    """Attention and an MLP, each with a residual connection and a norm of the sum."""

    def __init__(self, config: EncoderConfig, dtype: Any, rngs: nnx.Rngs):
        self.heads, self.activation, width = config.heads, config.activation, config.width
        self.query = linear((width, width), ("embed", "heads"), True, dtype, rngs)
        self.key = linear((width, width), ("embed", "kv_heads"), True, dtype, rngs)
        self.value = linear((width, width), ("embed", "kv_heads"), True, dtype, rngs)
        self.out = linear((width, width), ("heads", "embed"), True, dtype, rngs)
        self.attention_norm = Norm(width, dtype, config.norm_eps)
        self.up = linear((width, config.mlp_width), ("embed", "mlp"), True, dtype, rngs)
        self.down = linear((config.mlp_width, width), ("mlp", "embed"), True, dtype, rngs)
        self.mlp_norm = Norm(width, dtype, config.norm_eps)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """The result [rows, length, width], from such an input and bool[rows, length]."""
        shape = (*x.shape[:2], self.heads, -1)
        query = self.query(x).reshape(shape)
        key = self.key(x).reshape(shape)
        value = self.value(x).reshape(shape)
        result = attention(query, key, value, key_mask=mask)
        y = self.out(result.reshape(x.shape))
        x = self.attention_norm(x + checkpoint_name(y, "attn_out"))
        activation = ACTIVATIONS[self.activation]
        up = checkpoint_name(self.up(x), "mlp_up")
        y = self.down(activation(up))
        return self.mlp_norm(x + y)


class MaskedTokens(nnx.Module):
    """A head from features to the logits of tokens that were masked out; the last map is the
    embedding's table.
    """

    def __init__(self, config: EncoderConfig, dtype: Any, rngs: nnx.Rngs):
        self.activation = config.activation
        self.dense = linear((config.width, config.width), ("embed", "mlp"), True, dtype, rngs)
        self.norm = Norm(config.width, dtype, config.norm_eps)
        self.bias = nnx.Param(
            named(nnx.initializers.zeros, "vocab")(rngs.params(), (config.vocab,), dtype)
        )

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """The logits float32[rows, length, vocab]."""
        activation = ACTIVATIONS[self.activation]
        y = self.norm(activation(self.dense(x)))
        # float32, or XLA would round the logits of bfloat16 features before the softmax.
        logits = jnp.einsum(
            "rlw,vw->rlv", y, table.astype(y.dtype), preferred_element_type=jnp.float32
        )
        return logits + self.bias[...].astype(jnp.float32)


class Encoder(nnx.Module):
    """An encoder: tokens to features, to the logits of masked tokens, or to those of classes, as
    the config's `task` says.

    Parameters: embed/embedding [vocab, width], position/embedding, token_type/embedding,
    stack/layers/query/kernel [layers, width, width], and so on. Arrays lie where the layout says,
    or on the default device. It drops nothing in training.

    Args:
      config: sizes and task; `EncoderConfig.from_config` reads them from a config.json.
      dtype: of the parameters. Computation is in the dtype that they have when called; norms,
        softmax and logits are in float32.

    Example:
      >>> config = EncoderConfig(
      ...     vocab=10,
      ...     width=8,
      ...     heads=2,
      ...     mlp_width=16,
      ...     depth=2,
      ...     positions=4,
      ...     task="classes",
      ...     classes=3,
      ... )
      >>> model = Encoder(config, rngs=nnx.Rngs(0))
      >>> model({"tokens": jnp.array([[2, 5, 0]]), "mask": jnp.array([[1, 1, 0]])}).shape
      (1, 3)
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.config, width = config, config.width
        init, options = nnx.initializers.normal(0.02), {"param_dtype": dtype, "rngs": rngs}
        self.embed = Embed(
            config.vocab, width, embedding_init=named(init, "vocab", "embed"), **options
        )
        self.position = nnx.Embed(
            config.positions, width, embedding_init=named(init, None, "embed"), **options
        )
        self.token_type = nnx.Embed(
            config.token_types, width, embedding_init=named(init, None, "embed"), **options
        )
        self.embed_norm = Norm(width, dtype, config.norm_eps)
        self.stack = LayerStack(repeat(config.depth, functools.partial(Layer, config, dtype), rngs))
        if config.task == "masked_tokens":
            self.pooler = None
            self.predictions = MaskedTokens(config, dtype, rngs)
        else:
            self.pooler = linear((width, width), ("embed", "mlp"), True, dtype, rngs)
            self.predictions = None
        if config.task == "classes":
            self.classifier = linear(
                (width, config.classes),
                ("embed", None),
                True,
                dtype,
                rngs,
                # For the reason in `MaskedTokens`.
                preferred_element_type=jnp.float32,
            )
        else:
            self.classifier = None

    def __call__(
        self, tokens: Any, *, mask: jax.Array | None = None, token_types: jax.Array | None = None
    ) -> jax.Array:
        """Return the output of the config's `task`, from the arguments of `features`, or a dict of
        them in place of `tokens`.

        Returns:
          "features": [rows, length, width]; "masked_tokens": logits float32[rows, length, vocab];
          "classes": logits float32[rows, classes].

        Raises:
          DataError: a dict without "tokens", or with other keys than these; or rows that are too
            long.
        """
        if isinstance(tokens, Mapping):
            names = ("tokens", "mask", "token_types")
            unknown = [name for name in tokens if name not in names]
            if "tokens" not in tokens or unknown:
                fix = 'tokens under the name "tokens".'
                if "tokens" in tokens:
                    fix = did_you_mean(unknown[0], names)
                raise DataError(
                    f"the encoder takes {join_names(names)}, and is given {join_names(tokens)}.",
                    fix=fix,
                )
            return self(
                tokens["tokens"], mask=tokens.get("mask"), token_types=tokens.get("token_types")
            )
        x = self.features(tokens, mask=mask, token_types=token_types)
        if self.predictions is not None:
            return self.predictions(x, self.embed.embedding[...])
        if self.classifier is not None:
            return self.classifier(self.pool(x)).astype(jnp.float32)
        return x

    def features(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """The last layer's output [rows, length, width].

        Args:
          tokens: int32[rows, length].
          mask: bool or numbers [rows, length], False or 0 at padding, which no token sees; None:
            there is none.
          token_types: int32[rows, length], the number of a token's text in a pair; None: 0.
        """
        length, longest = tokens.shape[1], self.config.positions
        if length > longest:
            raise DataError(
                f"rows of {length} tokens, and the model has {longest} positions.",
                fix="shorter rows.",
            )
        if token_types is None:
            token_types = jnp.zeros_like(tokens)
        if mask is not None:
            # Tokenizers write masks as integers, and attention wants booleans.
            mask = mask != 0
        x = self.embed(tokens) + self.token_type(token_types) + self.position(jnp.arange(length))
        return self.stack(self.embed_norm(x), mask)

    def pool(self, features: jax.Array) -> jax.Array:
        """One vector for each row, [rows, width], from the features of its first token.

        Raises:
          ModelError: the encoder is one of masked tokens, which has no weights for that.
        """
        if self.pooler is None:
            raise ModelError("an encoder of masked tokens has no pooler.", fix="its features.")
        return jnp.tanh(self.pooler(features[:, 0]))
