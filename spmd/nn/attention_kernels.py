"""Which implementation computes an attention, and the calls of those that others have written."""

import dataclasses
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import first_line
from spmd.layout.compiler import GPU
from spmd.nn.chunked_attention import ScoreArrays, Scoring, chunked_attention, plain_attention

TRITON, SPLASH = "jax.experimental.pallas.ops.gpu.attention", "jax.experimental.pallas.ops.tpu.splash_attention"
dot_product_attention = jax.nn.dot_product_attention  # as JAX has it: the name may stand for another function while a model is traced


@dataclasses.dataclass(frozen=True)
class Attend:
    """One attention that is to be computed.

    Attributes:
      query: [rows, queries, heads, head_dim], on one device; key, value: [rows, keys, groups, head_dim or width]; shapes are enough.
    """

    scoring: Scoring
    query: Any
    key: Any
    value: Any
    arrays: ScoreArrays

    @property
    def options(self) -> list[str]:
        """What changes scores, in words."""
        scoring, arrays = self.scoring, self.arrays
        named = {
            "a causal mask": scoring.causal,
            "a window": scoring.window != (None, None),
            "a soft cap": scoring.soft_cap is not None,
            "dropout": scoring.dropout > 0,
            "a precision": scoring.precision is not None and self.query.dtype == jnp.float32,
            "a mask": arrays.mask is not None,
            "a bias": arrays.bias is not None,
            "a key mask": arrays.key_mask is not None,
            "key lengths": arrays.key_lengths is not None,
            "segment ids": arrays.segments is not None,
        }
        return [name for name, present in named.items() if present]

    def __str__(self) -> str:
        (_, queries, heads, size), (_, keys, groups, _) = self.query.shape, self.key.shape
        lengths = f"{queries} queries and keys" if queries == keys else f"{queries} queries, {keys} keys"
        shared = "" if groups == heads else f" ({groups} of keys)"
        return ", ".join([lengths, f"{heads} heads of {size}{shared}", jnp.dtype(self.query.dtype).name, *self.options])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation.

    Attributes:
      run: the attention, of arrays of one device.
      takes: the options that it has.
      refuses: why it does not take shapes or dtypes, or is not there; None if it does and is.
      platforms: where it runs; none: everywhere.
      on_shards: it is a program that XLA cannot partition: it has to see each device's shards.
    """

    run: Callable[[Attend], jax.Array]
    takes: frozenset[str] | None = None  # all
    refuses: Callable[[Attend], str | None] = lambda call: None
    platforms: tuple[str, ...] = ()
    on_shards: bool = False

    def why_not(self, call: Attend, platform: str) -> str | None:
        """Why it cannot compute this; None if it can."""
        if self.platforms and platform not in self.platforms:
            return f"it is for {'TPUs' if 'tpu' in self.platforms else 'GPUs'}, and the step is compiled for {platform}"
        left = [option for option in call.options if self.takes is not None and option not in self.takes]
        return f"it does not take {', '.join(left)}" if left else self.refuses(call)


def _xla(call: Attend) -> jax.Array:
    """The formulation that JAX has; it takes no option but masks, and gives a query that sees no key the mean of all values."""
    scoring, arrays = call.scoring, call.arrays
    if set(call.options) - {"a causal mask", "a key mask"}:
        return plain_attention(scoring, call.query, call.key, call.value, arrays)
    if arrays.key_mask is None:
        return dot_product_attention(call.query, call.key, call.value, scale=scoring.scale, is_causal=scoring.causal)
    seen = arrays.key_mask[:, None, None, :]
    out = dot_product_attention(call.query, call.key, call.value, mask=seen, scale=scoring.scale, is_causal=scoring.causal)
    if scoring.causal:
        seen = seen & jnp.tri(call.query.shape[1], call.key.shape[1], dtype=bool)
    return jnp.where(seen.any(axis=-1).swapaxes(1, 2)[..., None], out, jnp.zeros_like(out))


def _chunked(call: Attend) -> jax.Array:
    return chunked_attention(call.scoring, call.query, call.key, call.value, call.arrays)


def _cudnn(call: Attend) -> jax.Array:
    """cuDNN's fused attention, as JAX calls it."""
    (before, _), lengths = call.scoring.window, call.arrays.key_lengths
    return dot_product_attention(
        call.query,
        call.key,
        call.value,
        scale=call.scoring.scale,
        is_causal=call.scoring.causal,
        local_window_size=None if before is None else (before, 0),
        key_value_seq_lengths=None if lengths is None else lengths.astype(jnp.int32),
        implementation="cudnn",
    )


def _cudnn_refuses(call: Attend) -> str | None:
    """JAX is asked: it knows the dtypes, sizes and versions, and finds out when the call is traced."""
    (before, _), lengths = call.scoring.window, call.arrays.key_lengths
    if call.scoring.window != (None, None) and (before is None or not call.scoring.causal or lengths is not None):
        return "it takes a window only of keys before a query, under a causal mask, without key lengths"
    if call.query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {jnp.dtype(call.query.dtype).name}"
    lengths = None if lengths is None else jax.ShapeDtypeStruct(call.query.shape[:1], jnp.int32)

    def run(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
        return _cudnn(dataclasses.replace(call, query=query, key=key, value=value, arrays=ScoreArrays(key_lengths=lengths)))

    try:
        jax.eval_shape(run, call.query, call.key, call.value, lengths)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return str(error).partition("\n")[0].removesuffix(".")
    return None


def _triton(call: Attend, *, interpret: bool = False) -> jax.Array:
    """The kernel in Triton that JAX ships (`jax.experimental.pallas.ops.gpu.attention`)."""
    pallas, heads, segments = _import(TRITON), call.query.shape[2], call.arrays.segments
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (call.key, call.value))
    most = 32 * 1024 if jnp.dtype(call.query.dtype).itemsize == 2 else 16 * 1024
    row_bytes = call.query.shape[3] * jnp.dtype(call.query.dtype).itemsize
    # of a block of queries, at most: a program has several in shared memory, of which an RTX 4090 has 99 KiB
    fitting = tuple(size for size in _TRITON_BLOCKS if size * row_bytes <= most)
    forward, backward = (_divisor(call.query.shape[1], sizes) for sizes in (fitting, _TRITON_BLOCKS[-2:]))
    blocks = pallas.BlockSizes(forward, forward, *[backward] * 4)
    options = {"block_sizes": blocks, "interpret": interpret}
    ids = segments and segments[0]
    return pallas.mha(call.query, key, value, ids, call.scoring.scale, call.scoring.causal, **options)


_TRITON_BLOCKS = (128, 64, 32, 16)


def _triton_refuses(call: Attend) -> str | None:
    (_, queries, _, size), keys = call.query.shape, call.key.shape[1]
    if queries != keys or queries % _TRITON_BLOCKS[-1]:
        return f"it takes as many queries as keys, a multiple of {_TRITON_BLOCKS[-1]}, not {queries} and {keys}"
    if not 16 <= size <= 128 or call.value.shape[3] != size:
        return f"it takes heads of 16 to 128, not {size}"
    if call.arrays.segments is not None and call.arrays.segments[0] is not call.arrays.segments[1]:
        return "it takes the same segment ids for queries and keys"
    return _missing(TRITON)


def _splash(call: Attend, *, interpret: bool = False) -> jax.Array:
    """The kernel for TPUs that JAX ships (`jax.experimental.pallas.ops.tpu.splash_attention`)."""
    splash, scoring, segments, (_, queries, heads, _) = _import(SPLASH), call.scoring, call.arrays.segments, call.query.shape
    lengths, (before, after) = (queries, call.key.shape[1]), scoring.window
    seen: Any = splash.FullMask(lengths)
    if scoring.window != (None, None):
        seen = splash.LocalMask(lengths, (before, 0 if scoring.causal else after), 0)
    elif scoring.causal:
        seen = splash.CausalMask(lengths)
    block_q, block_kv = (_divisor(length, _SPLASH_BLOCKS) for length in lengths)
    blocks = splash.BlockSizes(block_q, block_kv, block_kv, block_q, block_kv, block_kv, block_q, block_kv)
    masks = splash.MultiHeadMask([seen] * heads)
    options = {"block_sizes": blocks, "attn_logits_soft_cap": scoring.soft_cap, "interpret": interpret}
    kernel = splash.make_splash_mha_single_device(masks, **options)
    query, key, value = (jnp.moveaxis(x, 2, 1) for x in (call.query * scoring.scale, call.key, call.value))
    ids = segments and splash.SegmentIds(*segments)
    out: Any = jax.vmap(kernel)(query.astype(call.query.dtype), key, value, ids)
    return jnp.moveaxis(out, 1, 2)


_SPLASH_BLOCKS = (512, 256, 128)


def _splash_refuses(call: Attend) -> str | None:
    (_, queries, _, size), keys, width = call.query.shape, call.key.shape[1], call.value.shape[3]
    least = _SPLASH_BLOCKS[-1]
    if queries % least or keys % least or size % least or width % least:
        return f"it takes lengths and head sizes that are multiples of {least}, not {queries}, {keys} and {size}"
    if queries != keys and call.scoring.window != (None, None):
        return "it takes a window only for as many queries as keys"
    if call.arrays.segments is not None and call.arrays.segments[0] is not call.arrays.segments[1]:
        return "it takes the same segment ids for queries and keys"
    return _missing(SPLASH)


def _divisor(length: int, sizes: tuple[int, ...]) -> int:
    """The first of the sizes that divides a length."""
    return next(size for size in sizes if length % size == 0)


def _import(module: str) -> Any:
    """A module of JAX's; that JAX will drop the one for GPUs (a warning since 0.11) is no news to a user of `[attention]`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(module)


def _missing(module: str) -> str | None:
    """Why a module cannot be imported; None if it can."""
    try:
        _import(module)
    except ImportError as error:
        return f"this jax does not have it ({first_line(error)})"
    return None


KERNELS = {
    "cudnn": Kernel(_cudnn, frozenset({"a causal mask", "a window", "key lengths", "a precision"}), _cudnn_refuses, GPU, on_shards=True),
    "triton": Kernel(_triton, frozenset({"a causal mask", "segment ids"}), _triton_refuses, GPU, on_shards=True),
    "splash": Kernel(
        _splash, frozenset({"a causal mask", "a window", "a soft cap", "segment ids"}), _splash_refuses, ("tpu",), on_shards=True
    ),
    "xla": Kernel(_xla),
    "chunked": Kernel(_chunked),
}
PREFERRED = {**dict.fromkeys(GPU, ("cudnn", "triton")), "tpu": ("splash",)}  # by platform; "chunked" is behind them


def choose(implementation: str, call: Attend, platform: str) -> tuple[str, dict[str, str]]:
    """The name of the kernel that computes `call` on a platform, and why each one before it does not.

    A kernel that is asked for and cannot is chosen, too, with the reason.
    """
    if implementation != "auto":
        why = KERNELS[implementation].why_not(call, platform)
        return implementation, {implementation: why} if why else {}
    reasons: dict[str, str] = {}
    for name in PREFERRED.get(platform, ()):
        why = KERNELS[name].why_not(call, platform)
        if why is None:
            return name, reasons
        reasons[name] = why
    return "chunked", reasons
