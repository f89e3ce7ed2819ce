"""The implementations of attention, the choice of one, and calls of those that others wrote."""

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
# A scope in which `spmd.nn.written_attention` replaces nothing.
AS_WRITTEN = "attention_as_written"
# JAX's own function: `spmd.nn.model_calls` replaces the name while a model is traced.
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
        """The options that change scores, in words."""
        scoring = self.scoring
        arrays = self.arrays
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
        _, queries, heads, size = self.query.shape
        _, keys, groups, _ = self.key.shape
        lengths = f"{queries} queries, {keys} keys"
        if queries == keys:
            lengths = f"{queries} queries and keys"
        all_heads = f"{heads} heads of {size}"
        if groups != heads:
            all_heads += f" ({groups} of keys)"
        return ", ".join([lengths, all_heads, jnp.dtype(self.query.dtype).name, *self.options])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation.

    Attributes:
      compute: the attention, of arrays of one device.
      takes: the options that it has.
      refuses: why it does not take shapes or dtypes, or is not there; None if it does and is.
      platforms: where it runs; none: everywhere.
      on_shards: it is a program that XLA cannot partition: it has to see each device's shards.
      tiles: its attention to some of all keys, from which a ring is made.
    """

    compute: Callable[[Attend], jax.Array]
    # None: all options.
    takes: frozenset[str] | None = None
    refuses: Callable[[Attend], str | None] = lambda call: None
    platforms: tuple[str, ...] = ()
    on_shards: bool = False
    tiles: TileKernel | None = None

    def reason_against(self, call: Attend, platform: str, in_ring: bool = False) -> str | None:
        """Return the reason why it cannot compute this; None if it can."""
        if in_ring and self.tiles is None:
            return "it does not return the normalisers from which a ring is merged"
        if self.platforms and platform not in self.platforms:
            hardware = "GPUs"
            if "tpu" in self.platforms:
                hardware = "TPUs"
            return f"it is for {hardware}, and the step is compiled for {platform}"
        if self.takes is not None:
            refused = [option for option in call.options if option not in self.takes]
            if refused:
                return f"it does not take {', '.join(refused)}"
        return self.refuses(call)


def _xla(call: Attend) -> jax.Array:
    """Return attention as JAX computes it, with no options but masks; JAX gives a query that sees
    no key the mean of all values, and this gives it zeros.
    """
    scoring = call.scoring
    arrays = call.arrays
    if set(call.options) - {"a causal mask", "a key mask"}:
        return plain_attention(scoring, call.inputs)
    if arrays.key_mask is None:
        return dot_product_attention(
            call.query, call.key, call.value, scale=scoring.scale, is_causal=scoring.causal
        )
    visible = arrays.key_mask[:, None, None, :]
    out = dot_product_attention(
        call.query,
        call.key,
        call.value,
        mask=visible,
        scale=scoring.scale,
        is_causal=scoring.causal,
    )
    if scoring.causal:
        visible = visible & jnp.tri(call.query.shape[1], call.key.shape[1], dtype=bool)
    return jnp.where(visible.any(axis=-1).swapaxes(1, 2)[..., None], out, jnp.zeros_like(out))


def _chunked(call: Attend) -> jax.Array:
    return chunked_attention(call.scoring, call.inputs)


def _cudnn(call: Attend) -> jax.Array:
    """cuDNN's fused attention, as JAX calls it.

    JAX makes a bias of a mask, an array of all scores and one for its gradient, and gives a query
    that sees no key the mean of all values: hence masks are left to the kernels that read them as
    they are.
    """
    before, _ = call.scoring.window
    window = None
    if before is not None:
        window = (before, 0)
    lengths = call.arrays.key_lengths
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    return dot_product_attention(
        call.query,
        call.key,
        call.value,
        call.arrays.bias,
        scale=call.scoring.scale,
        is_causal=call.scoring.causal,
        local_window_size=window,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def _cudnn_refuses(call: Attend) -> str | None:
    """Return the reason why cuDNN does not take this. JAX is asked: it knows the dtypes, sizes and
    versions, and finds out when the call is traced.
    """
    before, _ = call.scoring.window
    lengths = call.arrays.key_lengths
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
        dtype = jnp.dtype(call.query.dtype).name
        expected = f"{dtype}[..., {scores[0]}, {scores[1]}], for even lengths"
        return f"it takes a bias as {expected}, not {describe(bias)}"
    if bias is not None:
        # The shape on one device, as those of the query; dims of 1 stay.
        rows, heads = bias.shape[:2]
        if rows != 1:
            rows = call.query.shape[0]
        if heads != 1:
            heads = call.query.shape[2]
        bias = jax.ShapeDtypeStruct((rows, heads, *scores), bias.dtype)
    row_lengths: Any = None
    if lengths is not None:
        row_lengths = jax.ShapeDtypeStruct(call.query.shape[:1], jnp.int32)

    # Both passes are traced, since the backward pass takes less.
    def both_passes(query: Any, key: Any, value: Any, arrays: ScoreArrays) -> Any:
        def attend(query: Any, key: Any, value: Any) -> jax.Array:
            return _cudnn(
                dataclasses.replace(call, query=query, key=key, value=value, arrays=arrays)
            )

        out, back = jax.vjp(attend, query, key, value)
        return back(out)

    arrays = ScoreArrays(bias=bias, key_lengths=row_lengths)
    try:
        jax.eval_shape(both_passes, call.query, call.key, call.value, arrays)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        # These are the classes of exceptions in which JAX (0.10, 0.11) reports what cuDNN does not
        # take.
        return str(error).partition("\n")[0].removesuffix(".")
    return None


def _triton(call: Attend) -> jax.Array:
    return tiled_attention(FLASH, call.scoring, call.inputs)


def _triton_refuses(call: Attend) -> str | None:
    return flash_kernel.refuses(call.scoring, call.inputs)


def _splash(call: Attend, *, interpret: bool = False) -> jax.Array:
    """Return attention by the kernel for TPUs that JAX ships
    (`jax.experimental.pallas.ops.tpu.splash_attention`).
    """
    splash = importlib.import_module(SPLASH)
    scoring = call.scoring
    segments = call.arrays.segments
    _, queries, heads, _ = call.query.shape
    lengths = (queries, call.key.shape[1])
    before, after = scoring.window
    if scoring.causal:
        after = 0
    mask: Any = splash.FullMask(lengths)
    if scoring.window != (None, None):
        mask = splash.LocalMask(lengths, (before, after), 0)
    elif scoring.causal:
        mask = splash.CausalMask(lengths)
    block_q = _divisor(queries, _SPLASH_BLOCKS)
    block_kv = _divisor(call.key.shape[1], _SPLASH_BLOCKS)
    blocks = splash.BlockSizes(
        block_q, block_kv, block_kv, block_q, block_kv, block_kv, block_q, block_kv
    )
    masks = splash.MultiHeadMask([mask] * heads)
    options = {
        "block_sizes": blocks,
        "attn_logits_soft_cap": scoring.soft_cap,
        "interpret": interpret,
    }
    kernel = splash.make_splash_mha_single_device(masks, **options)
    # The kernel has no scale, and takes one row, [heads, length, head_dim].
    query = jnp.moveaxis(call.query * scoring.scale, 2, 1)
    key = jnp.moveaxis(call.key, 2, 1)
    value = jnp.moveaxis(call.value, 2, 1)
    ids = segments and splash.SegmentIds(*segments)
    out: Any = jax.vmap(kernel)(query.astype(call.query.dtype), key, value, ids)
    return jnp.moveaxis(out, 1, 2)


_SPLASH_BLOCKS = (512, 256, 128)


def _splash_refuses(call: Attend) -> str | None:
    _, queries, _, size = call.query.shape
    keys = call.key.shape[1]
    width = call.value.shape[3]
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
    """Return the first of the sizes that divides a length."""
    return next(size for size in sizes if length % size == 0)


def _missing(module: str) -> str | None:
    """Return the reason why a module cannot be imported; None if it can."""
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
# The platform of a plan for GPUs or TPUs without their compiler begins with this.
IN_PLACE = "cpu, in place of "
# By platform, the best first.
PREFERRED = {**dict.fromkeys(GPU, ("cudnn", "triton")), "tpu": ("splash",)}


def choose(
    implementation: str, call: Attend, platform: str, *, in_ring: bool = False
) -> tuple[str, dict[str, str]]:
    """Return the name of the kernel that computes `call` on a platform, or its tiles in a ring, and
    the reason against each kernel before it.

    A kernel that is asked for and cannot is chosen, too, with the reason.
    """
    if implementation == "as_written":
        implementation = "xla"
    if implementation != "auto":
        why = KERNELS[implementation].reason_against(call, platform, in_ring)
        if why:
            return implementation, {implementation: why}
        return implementation, {}
    reasons: dict[str, str] = {}
    target = platform.removeprefix(IN_PLACE)
    for name in PREFERRED.get(target, ()):
        if in_ring and KERNELS[name].tiles is None:
            continue
        why = KERNELS[name].reason_against(call, target, in_ring)
        if why is None:
            # On a CPU in place of the target, no scores are stored where the target stores none.
            if target != platform:
                name = "chunked"
            return name, reasons
        reasons[name] = why
    # A ring needs tiles.
    if in_ring:
        return "chunked", reasons
    return "xla", reasons


def may_replace(parallel: ParallelConfig) -> bool:
    """Return whether attention that a model computes itself may be computed in another way."""
    platform = (parallel.platform or jax.default_backend()).removeprefix(IN_PLACE)
    automatic = platform in PREFERRED or parallel.sequence.axis is not None
    if parallel.attention == "auto":
        return automatic
    return parallel.attention != "as_written"
