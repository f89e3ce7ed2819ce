"""Which implementation computes an attention, and the calls of those that others have written."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.tree import describe
from spmd.errors import first_line
from spmd.layout.compiler import GPU
from spmd.nn import flash_kernel
from spmd.nn.chunked_attention import CHUNKED, chunked_attention, plain_attention
from spmd.nn.flash_kernel import FLASH
from spmd.nn.parallel_context import ParallelConfig
from spmd.nn.scoring import Inputs, ScoreArrays, Scoring, TileKernel, tiled_attention

SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"
AS_WRITTEN = "attention_as_written"  # a scope in which `spmd.nn.written_attention` replaces nothing
# as JAX has it: the name may stand for another function while a model is traced
dot_product_attention = jax.nn.dot_product_attention


@dataclasses.dataclass(frozen=True)
class Attend:
    """One attention that is to be computed.

    Attributes:
      query: [rows, queries, heads, head_dim], on one device; key, value: [rows, keys, groups,
        head_dim or width]; shapes are enough.
    """

    scoring: Scoring
    query: Any
    key: Any
    value: Any
    arrays: ScoreArrays

    @property
    def inputs(self) -> Inputs:
        """The arrays."""
        return Inputs(self.query, self.key, self.value, self.arrays)

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
        lengths = (
            f"{queries} queries and keys" if queries == keys else f"{queries} queries, {keys} keys"
        )
        shared = "" if groups == heads else f" ({groups} of keys)"
        return ", ".join(
            [
                lengths,
                f"{heads} heads of {size}{shared}",
                jnp.dtype(self.query.dtype).name,
                *self.options,
            ]
        )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation.

    Attributes:
      run: the attention, of arrays of one device.
      takes: the options that it has.
      refuses: why it does not take shapes or dtypes, or is not there; None if it does and is.
      platforms: where it runs; none: everywhere.
      on_shards: it is a program that XLA cannot partition: it has to see each device's shards.
      tiles: its attention to some of all keys, from which a ring is made.
    """

    run: Callable[[Attend], jax.Array]
    takes: frozenset[str] | None = None  # all
    refuses: Callable[[Attend], str | None] = lambda call: None
    platforms: tuple[str, ...] = ()
    on_shards: bool = False
    tiles: TileKernel | None = None

    def why_not(self, call: Attend, platform: str, in_ring: bool = False) -> str | None:
        """Why it cannot compute this; None if it can."""
        if in_ring and self.tiles is None:
            return "it does not return the normalisers from which a ring is merged"
        if self.platforms and platform not in self.platforms:
            return (
                f"it is for {'TPUs' if 'tpu' in self.platforms else 'GPUs'}, and the step is "
                f"compiled for {platform}"
            )
        left = [
            option for option in call.options if self.takes is not None and option not in self.takes
        ]
        return f"it does not take {', '.join(left)}" if left else self.refuses(call)


def _xla(call: Attend) -> jax.Array:
    """The formulation that JAX has; it takes no option but masks, and gives a query that sees no
    key the mean of all values.
    """
    scoring, arrays = call.scoring, call.arrays
    if set(call.options) - {"a causal mask", "a key mask"}:
        return plain_attention(scoring, call.inputs)
    if arrays.key_mask is None:
        return dot_product_attention(
            call.query, call.key, call.value, scale=scoring.scale, is_causal=scoring.causal
        )
    seen = arrays.key_mask[:, None, None, :]
    out = dot_product_attention(
        call.query, call.key, call.value, mask=seen, scale=scoring.scale, is_causal=scoring.causal
    )
    if scoring.causal:
        seen = seen & jnp.tri(call.query.shape[1], call.key.shape[1], dtype=bool)
    return jnp.where(seen.any(axis=-1).swapaxes(1, 2)[..., None], out, jnp.zeros_like(out))


def _chunked(call: Attend) -> jax.Array:
    return chunked_attention(call.scoring, call.inputs)


def _cudnn(call: Attend) -> jax.Array:
    """cuDNN's fused attention, as JAX calls it.

    JAX makes a bias of a mask, an array of all scores and one for its gradient, and gives a query
    that sees no key the mean of all values: hence masks are left to the kernels that read them as
    they are.
    """
    (before, _), lengths = call.scoring.window, call.arrays.key_lengths
    return dot_product_attention(
        call.query,
        call.key,
        call.value,
        call.arrays.bias,
        scale=call.scoring.scale,
        is_causal=call.scoring.causal,
        local_window_size=None if before is None else (before, 0),
        key_value_seq_lengths=None if lengths is None else lengths.astype(jnp.int32),
        implementation="cudnn",
    )


def _cudnn_refuses(call: Attend) -> str | None:
    """JAX is asked: it knows the dtypes, sizes and versions, and finds out when the call is
    traced.
    """
    (before, _), lengths = call.scoring.window, call.arrays.key_lengths
    if call.scoring.window != (None, None) and (
        before is None or not call.scoring.causal or lengths is not None
    ):
        return (
            "it takes a window only of keys before a query, under a causal mask, without key "
            "lengths"
        )
    if call.query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {jnp.dtype(call.query.dtype).name}"
    bias: Any = call.arrays.bias
    scores = (call.query.shape[1], call.key.shape[1])
    if bias is not None and (
        bias.shape[2:] != scores or scores[0] % 2 or scores[1] % 2 or bias.dtype != call.query.dtype
    ):
        wanted = (
            f"{jnp.dtype(call.query.dtype).name}[..., {scores[0]}, {scores[1]}], for even lengths"
        )
        return f"it takes a bias as {wanted}, not {describe(bias)}"
    if bias is not None:
        sizes = (
            size if size == 1 else most
            for size, most in zip(
                bias.shape[:2], (call.query.shape[0], call.query.shape[2]), strict=True
            )
        )
        bias = jax.ShapeDtypeStruct((*sizes, *scores), bias.dtype)
    row_lengths: Any = (
        None if lengths is None else jax.ShapeDtypeStruct(call.query.shape[:1], jnp.int32)
    )

    # the backward pass takes less
    def both_passes(query: Any, key: Any, value: Any, arrays: ScoreArrays) -> Any:
        def run(*inputs: Any) -> jax.Array:
            return _cudnn(
                dataclasses.replace(
                    call, query=inputs[0], key=inputs[1], value=inputs[2], arrays=arrays
                )
            )

        out, back = jax.vjp(run, query, key, value)
        return back(out)

    try:
        jax.eval_shape(
            both_passes,
            call.query,
            call.key,
            call.value,
            ScoreArrays(bias=bias, key_lengths=row_lengths),
        )
    except (ValueError, NotImplementedError, RuntimeError) as error:
        # so JAX says what cuDNN does not take; the caller reports it
        return str(error).partition("\n")[0].removesuffix(".")
    return None


def _triton(call: Attend) -> jax.Array:
    return tiled_attention(FLASH, call.scoring, call.inputs)


def _triton_refuses(call: Attend) -> str | None:
    return flash_kernel.refuses(call.scoring, call.inputs)


def _splash(call: Attend, *, interpret: bool = False) -> jax.Array:
    """The kernel for TPUs that JAX ships (`jax.experimental.pallas.ops.tpu.splash_attention`)."""
    splash, scoring, segments, (_, queries, heads, _) = (
        importlib.import_module(SPLASH),
        call.scoring,
        call.arrays.segments,
        call.query.shape,
    )
    lengths, (before, after) = (queries, call.key.shape[1]), scoring.window
    seen: Any = splash.FullMask(lengths)
    if scoring.window != (None, None):
        seen = splash.LocalMask(lengths, (before, 0 if scoring.causal else after), 0)
    elif scoring.causal:
        seen = splash.CausalMask(lengths)
    block_q, block_kv = (_divisor(length, _SPLASH_BLOCKS) for length in lengths)
    blocks = splash.BlockSizes(
        block_q, block_kv, block_kv, block_q, block_kv, block_kv, block_q, block_kv
    )
    masks = splash.MultiHeadMask([seen] * heads)
    options = {
        "block_sizes": blocks,
        "attn_logits_soft_cap": scoring.soft_cap,
        "interpret": interpret,
    }
    kernel = splash.make_splash_mha_single_device(masks, **options)
    query, key, value = (
        jnp.moveaxis(x, 2, 1) for x in (call.query * scoring.scale, call.key, call.value)
    )
    ids = segments and splash.SegmentIds(*segments)
    out: Any = jax.vmap(kernel)(query.astype(call.query.dtype), key, value, ids)
    return jnp.moveaxis(out, 1, 2)


_SPLASH_BLOCKS = (512, 256, 128)


def _splash_refuses(call: Attend) -> str | None:
    (_, queries, _, size), keys, width = call.query.shape, call.key.shape[1], call.value.shape[3]
    least = _SPLASH_BLOCKS[-1]
    if queries % least or keys % least or size % least or width % least:
        return (
            f"it takes lengths and head sizes that are multiples of {least}, not {queries}, {keys} "
            f"and {size}"
        )
    if queries != keys and call.scoring.window != (None, None):
        return "it takes a window only for as many queries as keys"
    if call.arrays.segments is not None and call.arrays.segments[0] is not call.arrays.segments[1]:
        return "it takes the same segment ids for queries and keys"
    return _missing(SPLASH)


def _divisor(length: int, sizes: tuple[int, ...]) -> int:
    """The first of the sizes that divides a length."""
    return next(size for size in sizes if length % size == 0)


def _missing(module: str) -> str | None:
    """Why a module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"this jax does not have it ({first_line(error)})"
    return None


KERNELS = {
    "cudnn": Kernel(
        _cudnn,
        frozenset({"a causal mask", "a window", "a bias", "key lengths", "a precision"}),
        _cudnn_refuses,
        GPU,
        on_shards=True,
    ),
    "triton": Kernel(_triton, None, _triton_refuses, GPU, on_shards=True, tiles=FLASH),
    "splash": Kernel(
        _splash,
        frozenset({"a causal mask", "a window", "a soft cap", "segment ids"}),
        _splash_refuses,
        ("tpu",),
        on_shards=True,
    ),
    "xla": Kernel(_xla),
    "chunked": Kernel(_chunked, tiles=CHUNKED),
}
# the platform of a plan for GPUs or TPUs without their compiler begins with this
IN_PLACE = "cpu, in place of "
PREFERRED = {**dict.fromkeys(GPU, ("cudnn", "triton")), "tpu": ("splash",)}  # by platform


def choose(
    implementation: str, call: Attend, platform: str, *, in_ring: bool = False
) -> tuple[str, dict[str, str]]:
    """The name of the kernel that computes `call` on a platform, or its tiles in a ring, and why
    each one before it does not.

    A kernel that is asked for and cannot is chosen, too, with the reason.
    """
    if implementation == "as_written":
        implementation = "xla"
    if implementation != "auto":
        why = KERNELS[implementation].why_not(call, platform, in_ring)
        return implementation, {implementation: why} if why else {}
    reasons: dict[str, str] = {}
    target = platform.removeprefix(IN_PLACE)
    for name in PREFERRED.get(target, ()):
        if in_ring and KERNELS[name].tiles is None:
            continue
        why = KERNELS[name].why_not(call, target, in_ring)
        if why is None:
            # an estimate stores no scores where the target would not
            return ("chunked" if target != platform else name), reasons
        reasons[name] = why
    return "chunked" if in_ring else "xla", reasons  # a ring needs tiles


def may_replace(parallel: ParallelConfig) -> bool:
    """Whether attention that a model computes itself may be computed in another way."""
    platform = (parallel.platform or jax.default_backend()).removeprefix(IN_PLACE)
    automatic = platform in PREFERRED or parallel.sequence.axis is not None
    return automatic if parallel.attention == "auto" else parallel.attention != "as_written"
