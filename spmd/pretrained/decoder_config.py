"""What a `Decoder` is made of, and how a config.json of a known family says so."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmd.errors import PretrainedError, did_you_mean, short_repr
from spmd.pretrained.config_keys import MOST_LAYERS, ConfigKeys, is_count, is_number
from spmd.pretrained.rope import KINDS, Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer.

    Attributes:
      window: how many keys a query sees, its own position's included; None: all before it.
      rope: which of the config's `ropes` turns queries and keys; None: none does.
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
      activation: "silu", "gelu", "gelu_tanh" or "relu". gated: whether the MLP multiplies by a
        third linear map.
      norm: "rms" or "layer". norm_eps: added to the variance. norm_offset: added to the scale.
      post_norms: norms also after attention and MLP. qk_norm: norms of each head's queries and
        keys.
      qkv_bias, out_bias, mlp_bias: which linear maps have biases.
      tied: the head is the embedding's table.
      scale: of the scores of attention; None: 1 / sqrt(head_dim). soft_cap, final_soft_cap: bounds
        on scores and logits; None: none.
      embedding_scale: embeddings are multiplied by it, in their dtype.
      notes: what the file asks for that the decoder leaves to the training run.

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
        wrong = [
            f"{name}={getattr(self, name)!r}" for name in sizes if not is_count(getattr(self, name))
        ]
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
        """After how many layers their kinds repeat."""
        kinds = self.layers
        return next(
            n
            for n in range(1, len(kinds) + 1)
            if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> "DecoderConfig":
        """From the content of a config.json, as any version of `transformers` writes it.

        Raises:
          PretrainedError: an unknown `model_type`; or all keys that are missing, unknown, or ask
            for what the decoder does not have.

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
        fields = _gpt2(keys) if kind == "gpt2" else _modern(keys, FAMILIES[kind])
        keys.finish(where)
        return cls(**fields, notes=tuple(keys.notes))


@dataclasses.dataclass(frozen=True)
class Family:
    """What the config.json of a family leaves unsaid, or says by keys that others lack."""

    kv_heads: int | None = None  # where the key is missing; None: as many as heads
    head_dim: int | None = None  # None: width / heads
    qkv_bias: bool | None = None  # None: `attention_bias` says so, of the output too
    qk_norm: bool = False
    theta: float = 10_000.0
    local_theta: float | None = None  # of layers with a window, where theirs differs
    tied: bool = False
    gemma: bool = False
    pre_attn_scalar: bool = False  # and soft caps and norms after attention and MLP
    # which layers have one, if the file does not say: "all", the "last", all "but one" of `every`
    windows: str = "none"
    every: int = 1
    mlp_bias: bool = False  # whether the key `mlp_bias` is read


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
        **{
            "kv_heads": 4,
            "head_dim": 256,
            "tied": True,
            "gemma": True,
            "pre_attn_scalar": True,
            "windows": "but one",
            "every": 6,
        },
        **{"qk_norm": True, "theta": 1_000_000.0, "local_theta": 10_000.0},
    ),
    "gpt2": Family(),
}


def _modern(keys: ConfigKeys, family: Family) -> dict[str, Any]:
    """The fields of a family with rotary positions and gated MLPs."""
    width, heads, depth = (
        keys.count("hidden_size"),
        keys.count("num_attention_heads"),
        keys.count("num_hidden_layers", most=MOST_LAYERS),
    )
    null_is_heads = "num_key_value_heads" in keys.config or family.kv_heads is None
    kv_heads = keys.count("num_key_value_heads", heads if null_is_heads else family.kv_heads)
    head_dim = keys.count("head_dim", family.head_dim or max(width // heads, 1))
    if not keys.problems:  # of missing and wrong numbers, each is said once
        if heads % kv_heads:
            keys.wrong(
                "num_key_value_heads", f"{heads} heads / {kv_heads} leaves {heads % kv_heads}"
            )
        if keys.config.get("head_dim") is None and family.head_dim is None and width % heads:
            keys.wrong(
                "num_attention_heads",
                f"hidden_size {width} / {heads} leaves {width % heads}, and there is no head_dim",
            )
        elif head_dim % 2:
            keys.wrong(
                "head_dim" if "head_dim" in keys.config else "hidden_size",
                f"rotary positions need an even head_dim, not {head_dim}",
            )
    all_biases = keys.flag("attention_bias", False) if family.qkv_bias is None else None
    fields: dict[str, Any] = {
        **{
            "vocab": keys.count("vocab_size"),
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        },
        **{"mlp_width": keys.count("intermediate_size"), "activation": _activation(keys, family)},
        **{
            "norm_eps": keys.number("rms_norm_eps", 1e-6),
            "tied": keys.flag("tie_word_embeddings", family.tied),
        },
        **{
            "qkv_bias": bool(all_biases if family.qkv_bias is None else family.qkv_bias),
            "out_bias": bool(all_biases),
        },
        **{
            "mlp_bias": keys.flag("mlp_bias", False) if family.mlp_bias else False,
            "qk_norm": family.qk_norm,
        },
    }
    if family.gemma:
        fields |= {"norm_offset": 1.0, "embedding_scale": math.sqrt(width)}
    if family.pre_attn_scalar:
        # Gemma 2; Gemma 3 has norms of queries and keys instead
        capped = family.local_theta is None
        fields |= {"post_norms": True, "scale": keys.number("query_pre_attn_scalar", 256) ** -0.5}
        fields |= {"soft_cap": _cap(keys, "attn_logit_softcapping", 50.0 if capped else None)}
        fields |= {
            "final_soft_cap": _cap(keys, "final_logit_softcapping", 30.0 if capped else None)
        }
    windows = _windows(keys, family, depth)
    longest = keys.count("max_position_embeddings", None)
    ropes = _ropes(keys, family, head_dim, longest)
    kinds = [LayerKind(window, int(len(ropes) > 1 and window is not None)) for window in windows]
    return fields | {"ropes": ropes, "layers": tuple(kinds), "max_positions": longest}


def _activation(keys: ConfigKeys, family: Family) -> str:
    if not family.gemma:
        return keys.activation("hidden_act", "silu")
    if family.pre_attn_scalar or keys.config.get("hidden_activation") is not None:
        # which these files have beside the other, and transformers does not read
        keys.used.add("hidden_act")
        return keys.activation("hidden_activation", "gelu_pytorch_tanh")
    keys.used.add("hidden_activation")
    name = keys.activation("hidden_act", "gelu_pytorch_tanh")
    # Gemma 1's files say "gelu" where the weights are of the other
    return "gelu_tanh" if name == "gelu" else name


def _cap(keys: ConfigKeys, key: str, default: float | None) -> float | None:
    """A soft cap; null is none, and a missing key the family's."""
    return keys.number(key, None if key in keys.config else default)


def _windows(keys: ConfigKeys, family: Family, depth: int) -> list[int | None]:
    """The window of each layer."""
    if family.windows == "none":
        return [None] * depth
    window = keys.count("sliding_window", None if "sliding_window" in keys.config else 4096)
    if family.windows == "all":
        return [window] * depth
    if family.windows == "last":
        window = window if keys.flag("use_sliding_window", False) else None
        first = keys.get(
            "max_window_layers",
            28,
            lambda value: isinstance(value, int) and value >= 0,
            "a whole number",
        )
        types = [
            "sliding_attention" if window and number >= first else "full_attention"
            for number in range(depth)
        ]
    else:
        every = keys.count("sliding_window_pattern", family.every)
        types = [
            "sliding_attention" if (number + 1) % every else "full_attention"
            for number in range(depth)
        ]

    def holds(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == depth
            and set(value) <= {"sliding_attention", "full_attention"}
        )

    types = keys.get(
        "layer_types",
        types,
        holds,
        f'{depth} of "full_attention" and "sliding_attention", one for each layer',
    )
    return [window if name == "sliding_attention" else None for name in types]


def _ropes(keys: ConfigKeys, family: Family, head_dim: int, length: int | None) -> tuple[Rope, ...]:
    """The rotation of all layers, or those of layers without and with a window; from transformers
    5's `rope_parameters`, or older keys.
    """
    theta = keys.number("rope_theta", family.theta)
    local = keys.number("rope_local_base_freq", family.local_theta) if family.local_theta else None
    keys.used |= {"rope_parameters", "rope_scaling"}
    key = "rope_parameters" if keys.config.get("rope_parameters") else "rope_scaling"
    said = keys.config.get(key) or {}
    older = keys.config.get("rope_scaling") or said
    if wrong := [
        name
        for name, table in ((key, said), ("rope_scaling", older))
        if not isinstance(table, Mapping)
    ]:
        keys.wrong(wrong[0], "wanted a table")
        return (Rope.of(theta, head_dim),)
    if _scaling(older) != _scaling(said):
        keys.wrong(
            "rope_scaling",
            "rope_parameters says something else, and transformers lets this one win: wanted one "
            "of them",
        )
    if local is None:
        return (_rope(keys, key, said, theta, length, head_dim),)
    if key == "rope_scaling" or not said.keys() & {"full_attention", "sliding_attention"}:
        return _rope(keys, key, said, theta, length, head_dim), Rope.of(local, head_dim)
    bases = {"full_attention": theta, "sliding_attention": local}
    if said.keys() - bases.keys() or not all(
        isinstance(said.get(name) or {}, Mapping) for name in bases
    ):
        keys.wrong(key, f"wanted {' and '.join(bases)}, a table each")
        return Rope.of(theta, head_dim), Rope.of(local, head_dim)
    full, sliding = (said.get(name) or {} for name in bases)
    with_window = _rope(keys, key, sliding, local, length, head_dim, base="rope_local_base_freq")
    return _rope(keys, key, full, theta, length, head_dim), with_window


def _scaling(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table says besides the base, by today's names."""
    said = {
        name: value for name, value in table.items() if value is not None and name != "rope_theta"
    }
    return {"rope_type": said.pop("type", "default"), **said}


def _rope(
    keys: ConfigKeys,
    key: str,
    said: Mapping[str, Any],
    theta: float,
    length: int | None,
    head_dim: int,
    *,
    base: str = "rope_theta",
) -> Rope:
    """One rotation, from its table; `base`: the older key for its base, `theta`."""
    said = {name: value for name, value in said.items() if value is not None}
    kind = said.pop("rope_type", said.pop("type", "default"))
    said.pop("type", None)
    if "rope_theta" in said and keys.config.get(base) not in (None, said["rope_theta"]):
        keys.wrong(
            base,
            f"{key} says {short_repr(said['rope_theta'])}, and transformers lets that one win: "
            "wanted one of them",
        )
    theta = said.pop("rope_theta", theta)
    plain = Rope.of(10_000.0, head_dim)
    if not is_number(theta) or said.pop("partial_rotary_factor", 1.0) != 1.0:
        keys.wrong(key, "wanted a rope_theta above 0, and no partial_rotary_factor but 1")
        return plain
    if not isinstance(kind, str) or kind not in KINDS:
        depends = (
            " (it depends on the length of each call, for which cached keys would be wrong)"
            if kind in ("dynamic", "longrope")
            else ""
        )
        keys.wrong(
            key,
            f"the decoder does not have rope_type {short_repr(kind)}{depends}; it has "
            f"{', '.join(KINDS)}",
        )
        return plain
    options = {name: said.get(name, default) for name, default in KINDS[kind].items()}
    if options.get("original_max_position_embeddings", 0) is None:
        options["original_max_position_embeddings"] = length
    missing = [
        name
        for name, value in options.items()
        if value is ... or (name.startswith("original") and value is None)
    ]
    unknown = sorted(said.keys() - KINDS[kind].keys())
    strange = [
        name
        for name, value in options.items()
        if name in said and not (is_number(value) or isinstance(value, bool))
    ]
    if missing or unknown or strange:
        names = [
            *(f"{name} is missing" for name in missing),
            *(f"{name} is not one of its keys" for name in unknown),
        ]
        keys.wrong(
            key,
            f"rope_type {kind}: "
            f"{', '.join([*names, *(f'{name} is not a number above 0' for name in strange)])}",
        )
        return plain
    return Rope.of(theta, head_dim, kind, **options)


def _gpt2(keys: ConfigKeys) -> dict[str, Any]:
    """The fields of a GPT-2, whose keys have other names."""
    width, heads, positions = (
        keys.count("n_embd"),
        keys.count("n_head"),
        keys.count("n_positions", 1024),
    )
    keys.used.add("n_ctx")  # the same number, in files of old versions
    if width % heads:
        keys.wrong("n_head", f"n_embd {width} / {heads} leaves {width % heads}")
    if keys.flag("scale_attn_by_inverse_layer_idx", False):
        keys.wrong("scale_attn_by_inverse_layer_idx", "the decoder has one scale for all layers")
    return {
        **{
            "vocab": keys.count("vocab_size", 50257),
            "width": width,
            "heads": heads,
            "kv_heads": heads,
        },
        **{"head_dim": max(width // heads, 1), "mlp_width": keys.count("n_inner", 4 * width)},
        **{
            "layers": (LayerKind(),) * keys.count("n_layer", most=MOST_LAYERS),
            "learned_positions": positions,
        },
        **{"activation": keys.activation("activation_function", "gelu_new"), "gated": False},
        **{"norm": "layer", "norm_eps": keys.number("layer_norm_epsilon", 1e-5)},
        **{
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "tied": keys.flag("tie_word_embeddings", True),
        },
        "scale": None if keys.flag("scale_attn_weights", True) else 1.0,
    }
