"""The sizes and kind of a `Decoder`, read from a config.json of a known family."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmd.errors import PretrainedError, did_you_mean, short_repr
from spmd.pretrained.config_keys import MOST_LAYERS, ConfigKeys, is_count, is_number
from spmd.pretrained.rope import KINDS, Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The properties in which layers may differ.

    Attributes:
      window: keys that a query sees, its own position's included; None: all before it.
      rope: the number of the rotation of queries and keys among the config's `ropes`; None: there
        is none.
    """

    window: int | None = None
    rope: int | None = None


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and kind of a decoder.

    Attributes:
      vocab, width: of the embedding. heads, kv_heads, head_dim: of attention; kv_heads divides
        heads. mlp_width: of the MLP.
      layers: the kind of each.
      ropes: rotations by position. learned_positions: of a learned table of positions; None: there
        is none.
      max_positions: the longest text that the model was made for; longer ones are warned of.
      activation: "silu", "gelu", "gelu_tanh" or "relu". gated: the MLP multiplies by a third
        linear map.
      norm: "rms" or "layer". norm_eps: added to the variance. norm_offset: added to the scale.
      post_norms: norms also after attention and MLP. qk_norm: norms of each head's queries and
        keys.
      qkv_bias, out_bias, mlp_bias: linear maps of this kind have biases.
      tied: the head is the embedding's table.
      scale: of the scores of attention; None: 1 / sqrt(head_dim). soft_cap, final_soft_cap: bounds
        on scores and logits; None: none.
      embedding_scale: embeddings are multiplied by it, in their dtype.
      notes: requests of the file that the decoder leaves to the training run.

    Raises:
      PretrainedError: sizes that do not match.

    Example:
      >>> config = DecoderConfig(
      ...     vocab=10,
      ...     width=8,
      ...     heads=2,
      ...     kv_heads=1,
      ...     head_dim=4,
      ...     mlp_width=16,
      ...     layers=(LayerKind(4), LayerKind()) * 3,
      ... )
      >>> config.period
      2
    """

    vocab: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    layers: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...] = ()
    max_positions: int | None = None
    learned_positions: int | None = None
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float | None = None
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self):
        sizes = ("vocab", "width", "heads", "kv_heads", "head_dim", "mlp_width")
        wrong = []
        for name in sizes:
            value = getattr(self, name)
            if not is_count(value):
                wrong.append(f"{name}={value!r}")
        if wrong or not self.layers:
            raise PretrainedError(
                f"DecoderConfig: {', '.join(wrong) or 'no layers'}.", fix="whole numbers from 1."
            )
        if self.heads % self.kv_heads:
            why = (
                f"DecoderConfig: {self.heads} heads over {self.kv_heads} kv_heads leaves "
                f"{self.heads % self.kv_heads}."
            )
            raise PretrainedError(why, fix="kv_heads that divide heads.")

    @property
    def period(self) -> int:
        """The number of layers after which their kinds repeat."""
        depth = len(self.layers)
        for period in range(1, depth):
            repeated = self.layers[:period] * (depth // period + 1)
            if repeated[:depth] == self.layers:
                return period
        return depth

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> "DecoderConfig":
        """Return the config of a config.json, as any version of `transformers` writes it.

        Raises:
          PretrainedError: an unknown `model_type`; or all keys that are missing, unknown, or ask
            for something that the decoder does not have.

        Example:
          >>> sizes = {
          ...     "vocab_size": 10,
          ...     "hidden_size": 8,
          ...     "intermediate_size": 16,
          ...     "num_hidden_layers": 2,
          ...     "num_attention_heads": 2,
          ... }
          >>> DecoderConfig.from_config({"model_type": "llama", **sizes}).head_dim
          4
        """
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise PretrainedError(
                f"{where}: model_type = {short_repr(kind)} is no known family of decoders.",
                fix=did_you_mean(str(kind), list(FAMILIES)),
            )
        keys = ConfigKeys(config, "decoder")
        if kind == "gpt2":
            fields = _gpt2(keys)
        else:
            fields = _modern(keys, FAMILIES[kind])
        keys.finish(where)
        return cls(**fields, notes=tuple(keys.notes))


@dataclasses.dataclass(frozen=True)
class Family:
    """Properties of a family that its config.json leaves out, or has in keys that others lack."""

    kv_heads: int | None = None  # where the key is missing; None: as many as heads
    head_dim: int | None = None  # None: width / heads
    qkv_bias: bool | None = None  # None: the key `attention_bias`, which is for the output too
    qk_norm: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None  # of layers with a window, where theirs differs
    tied: bool = False
    gemma: bool = False
    pre_attn_scalar: bool = False  # and soft caps and norms after attention and MLP
    # layers with a window by default: "none", "all", the "last", all "but one" of `every`
    windows: str = "none"
    every: int = 1
    mlp_bias: bool = False  # the key `mlp_bias` is read


LAYER_TYPES = ("full_attention", "sliding_attention")
# Sizes, bases and `tied` are the defaults of transformers' configuration classes.
FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias=True),
    "mistral": Family(kv_heads=8, qkv_bias=False, windows="all"),
    "qwen2": Family(kv_heads=32, qkv_bias=True, windows="last"),
    "qwen3": Family(kv_heads=32, head_dim=128, qk_norm=True, windows="last"),
    "gemma": Family(kv_heads=16, head_dim=256, tied=True, gemma=True),
    "gemma2": Family(
        kv_heads=4,
        head_dim=256,
        tied=True,
        gemma=True,
        pre_attn_scalar=True,
        windows="but one",
        every=2,
    ),
    "gemma3_text": Family(
        kv_heads=4,
        head_dim=256,
        tied=True,
        gemma=True,
        pre_attn_scalar=True,
        windows="but one",
        every=6,
        qk_norm=True,
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "gpt2": Family(),
}


def _modern(keys: ConfigKeys, family: Family) -> dict[str, Any]:
    """The fields of a family with rotary positions and gated MLPs."""
    width = keys.count("hidden_size")
    heads = keys.count("num_attention_heads")
    depth = keys.count("num_hidden_layers", most=MOST_LAYERS)
    kv_heads_default = family.kv_heads
    if "num_key_value_heads" in keys.config or family.kv_heads is None:  # null: as many as heads
        kv_heads_default = heads
    kv_heads = keys.count("num_key_value_heads", kv_heads_default)
    head_dim = keys.count("head_dim", family.head_dim or max(width // heads, 1))
    if not keys.problems:  # of missing and wrong numbers, each is a problem once
        _check_heads(keys, family, width, heads, kv_heads, head_dim)
    fields: dict[str, Any] = {
        "vocab": keys.count("vocab_size"),
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": keys.count("intermediate_size"),
        "activation": _activation(keys, family),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "tied": keys.flag("tie_word_embeddings", family.tied),
        "qk_norm": family.qk_norm,
    }
    if family.qkv_bias is None:
        fields["qkv_bias"] = fields["out_bias"] = keys.flag("attention_bias", False)
    else:
        fields["qkv_bias"] = family.qkv_bias
    if family.mlp_bias:
        fields["mlp_bias"] = keys.flag("mlp_bias", False)
    if family.gemma:
        fields |= {"norm_offset": 1.0, "embedding_scale": math.sqrt(width)}
    if family.pre_attn_scalar:
        cap, final_cap = 50.0, 30.0
        if family.local_theta is not None:  # Gemma 3 has norms of queries and keys instead
            cap, final_cap = None, None
        fields |= {"post_norms": True, "scale": keys.number("query_pre_attn_scalar", 256) ** -0.5}
        fields["soft_cap"] = _cap(keys, "attn_logit_softcapping", cap)
        fields["final_soft_cap"] = _cap(keys, "final_logit_softcapping", final_cap)
    windows = _windows(keys, family, depth)
    longest = keys.count("max_position_embeddings", None)
    ropes = _ropes(keys, family, head_dim, longest)
    kinds = []
    for window in windows:
        has_local_rope = len(ropes) > 1 and window is not None
        kinds.append(LayerKind(window, int(has_local_rope)))
    return fields | {"ropes": ropes, "layers": tuple(kinds), "max_positions": longest}


def _check_heads(
    keys: ConfigKeys, family: Family, width: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Note sizes of attention that do not divide."""
    if heads % kv_heads:
        keys.wrong("num_key_value_heads", f"{heads} heads / {kv_heads} leaves {heads % kv_heads}")
    if keys.config.get("head_dim") is None and family.head_dim is None and width % heads:
        keys.wrong(
            "num_attention_heads",
            f"hidden_size {width} / {heads} leaves {width % heads}, and there is no head_dim",
        )
    elif head_dim % 2:
        key = "hidden_size"
        if "head_dim" in keys.config:
            key = "head_dim"
        keys.wrong(key, f"rotary positions need an even head_dim, not {head_dim}")


def _activation(keys: ConfigKeys, family: Family) -> str:
    if not family.gemma:
        return keys.activation("hidden_act", "silu")
    if family.pre_attn_scalar or keys.config.get("hidden_activation") is not None:
        # these files have hidden_act too, which transformers does not read
        keys.used.add("hidden_act")
        return keys.activation("hidden_activation", "gelu_pytorch_tanh")
    keys.used.add("hidden_activation")
    name = keys.activation("hidden_act", "gelu_pytorch_tanh")
    # Gemma 1's files have "gelu", and its weights were trained with the other
    if name == "gelu":
        return "gelu_tanh"
    return name


def _cap(keys: ConfigKeys, key: str, default: float | None) -> float | None:
    """Return a soft cap; null is none, and a missing key the family's."""
    if key in keys.config:
        default = None
    return keys.number(key, default)


def _is_from_0(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _windows(keys: ConfigKeys, family: Family, depth: int) -> list[int | None]:
    """Return the window of each layer."""
    if family.windows == "none":
        return [None] * depth
    default = 4096
    if "sliding_window" in keys.config:
        default = None
    window = keys.count("sliding_window", default)
    if family.windows == "all":
        return [window] * depth
    if family.windows == "last":
        # Qwen's files name a window also where it is off.
        if not keys.flag("use_sliding_window", False):
            window = None
        first = keys.get("max_window_layers", 28, _is_from_0, "a whole number")
        slides = [bool(window) and number >= first for number in range(depth)]
    else:
        every = keys.count("sliding_window_pattern", family.every)
        slides = [(number + 1) % every != 0 for number in range(depth)]

    def accepts(value: Any) -> bool:
        return isinstance(value, list) and len(value) == depth and set(value) <= set(LAYER_TYPES)

    default_types = [LAYER_TYPES[is_sliding] for is_sliding in slides]
    accepted = f'{depth} of "full_attention" and "sliding_attention", one for each layer'
    types = keys.get("layer_types", default_types, accepts, accepted)
    windows: list[int | None] = [None] * depth
    for number, layer_type in enumerate(types):
        if layer_type == "sliding_attention":
            windows[number] = window
    return windows


def _ropes(keys: ConfigKeys, family: Family, head_dim: int, length: int | None) -> tuple[Rope, ...]:
    """Return the rotation of all layers, or the rotations of layers without and with a window; from
    transformers 5's `rope_parameters`, or older keys.
    """
    theta, local = keys.number("rope_theta", family.theta), None
    if family.local_theta:
        local = keys.number("rope_local_base_freq", family.local_theta)
    keys.used |= {"rope_parameters", "rope_scaling"}
    key = "rope_scaling"
    if keys.config.get("rope_parameters"):
        key = "rope_parameters"
    table = keys.config.get(key) or {}
    older = keys.config.get("rope_scaling") or table
    for name, value in ((key, table), ("rope_scaling", older)):
        if not isinstance(value, Mapping):
            keys.wrong(name, "wanted a table")
            return (Rope.of(theta, head_dim),)
    if _scaling(older) != _scaling(table):
        keys.wrong(
            "rope_scaling",
            "rope_parameters says something else, and transformers lets this one win: wanted one "
            "of them",
        )
    if local is None:
        return (_rope(keys, key, table, theta, length, head_dim),)
    if key == "rope_scaling" or not table.keys() & set(LAYER_TYPES):
        return _rope(keys, key, table, theta, length, head_dim), Rope.of(local, head_dim)
    # transformers 5 writes a table for each type of layer where rotations differ.
    full, sliding = (table.get(name) or {} for name in LAYER_TYPES)
    are_tables = isinstance(full, Mapping) and isinstance(sliding, Mapping)
    if table.keys() - set(LAYER_TYPES) or not are_tables:
        keys.wrong(key, f"wanted {' and '.join(LAYER_TYPES)}, a table each")
        return Rope.of(theta, head_dim), Rope.of(local, head_dim)
    with_window = _rope(keys, key, sliding, local, length, head_dim, base="rope_local_base_freq")
    return _rope(keys, key, full, theta, length, head_dim), with_window


def _scaling(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a table besides the base, by today's names."""
    values = {name: value for name, value in table.items() if value is not None}
    values.pop("rope_theta", None)
    return {"rope_type": values.pop("type", "default"), **values}


def _rope(
    keys: ConfigKeys,
    key: str,
    table: Mapping[str, Any],
    theta: float,
    length: int | None,
    head_dim: int,
    *,
    base: str = "rope_theta",
) -> Rope:
    """Return one rotation, from its table; `base`: the older key for its base, `theta`."""
    # transformers writes a key that is not set as null.
    values = {name: value for name, value in table.items() if value is not None}
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    if "rope_theta" in values and keys.config.get(base) not in (None, values["rope_theta"]):
        keys.wrong(
            base,
            f"{key} says {short_repr(values['rope_theta'])}, and transformers lets that one win: "
            "wanted one of them",
        )
    theta = values.pop("rope_theta", theta)
    plain = Rope.of(10_000.0, head_dim)
    if not is_number(theta) or values.pop("partial_rotary_factor", 1.0) != 1.0:
        keys.wrong(key, "wanted a rope_theta above 0, and no partial_rotary_factor but 1")
        return plain
    if not isinstance(kind, str) or kind not in KINDS:
        reason = ""
        if kind in ("dynamic", "longrope"):
            reason = (
                " (it depends on the length of each call, for which cached keys would be wrong)"
            )
        why = f"the decoder does not have rope_type {short_repr(kind)}{reason}"
        keys.wrong(key, f"{why}; it has {', '.join(KINDS)}")
        return plain
    options = {name: values.get(name, default) for name, default in KINDS[kind].items()}
    # Where original_max_position_embeddings is missing, transformers takes max_position_embeddings.
    if options.get("original_max_position_embeddings", 0) is None:
        options["original_max_position_embeddings"] = length
    problems = []
    for name, value in options.items():
        if value is ... or (name.startswith("original") and value is None):
            problems.append(f"{name} is missing")
    for name in sorted(values.keys() - KINDS[kind].keys()):
        problems.append(f"{name} is not one of its keys")
    for name, value in options.items():
        if name in values and not (is_number(value) or isinstance(value, bool)):
            problems.append(f"{name} is not a number above 0")
    if problems:
        keys.wrong(key, f"rope_type {kind}: {', '.join(problems)}")
        return plain
    return Rope.of(theta, head_dim, kind, **options)


def _gpt2(keys: ConfigKeys) -> dict[str, Any]:
    """Return the fields of a GPT-2, whose keys have other names."""
    width, heads = keys.count("n_embd"), keys.count("n_head")
    positions = keys.count("n_positions", 1024)
    keys.used.add("n_ctx")  # the same number, in files of old versions
    if width % heads:
        keys.wrong("n_head", f"n_embd {width} / {heads} leaves {width % heads}")
    if keys.flag("scale_attn_by_inverse_layer_idx", False):
        keys.wrong("scale_attn_by_inverse_layer_idx", "the decoder has one scale for all layers")
    scale = None
    if not keys.flag("scale_attn_weights", True):
        scale = 1.0
    return {
        "vocab": keys.count("vocab_size", 50257),
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": max(width // heads, 1),
        "mlp_width": keys.count("n_inner", 4 * width),
        "layers": (LayerKind(),) * keys.count("n_layer", most=MOST_LAYERS),
        "learned_positions": positions,
        "activation": keys.activation("activation_function", "gelu_new"),
        "gated": False,
        "norm": "layer",
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": keys.flag("tie_word_embeddings", True),
        "scale": scale,
    }
