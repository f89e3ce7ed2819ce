"""Cross-entropy from features and a head, over chunks of tokens: logits of all tokens never exist.

The gradient is computed in the forward pass, chunk by chunk, while the logits of the chunk are
there (as in Hsu et al. 2024, arXiv:2410.10989): three matrix products per chunk, as many as without
chunks. A loop that is recomputed in the backward pass needs four.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd.base.specs import spec_axes
from spmd.base.tree import describe
from spmd.base.xla import shard_map
from spmd.errors import LossError, short_repr
from spmd.nn.constraints import manual_axes
from spmd.nn.parallel_context import current
from spmd.wire import collectives

# tokens: logits of 2,048 x 128,256 in float32 are 1 GiB. Each chunk adds to the head's gradient, so
# small ones are slow
CHUNK = 2048


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What is computed of each token's logits; `vocab_dim` is the dim of the head along which the
    classes are.
    """

    vocab_dim: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    chunk: int


def cross_entropy_from_features(
    features: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    vocab_dim: int | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Softmax cross-entropy of `features @ head + bias` against integer labels, as (sum, count): a
    loss may return it as it is.

    At most `chunk` tokens have logits at a time, in float32. Products take the common dtype of
    features and head, and are summed in float32. Equal to the plain loss but for the order of sums.
    Where a layout shards rows, sequences or the vocabulary, each device computes its tokens and
    classes, with the head's gradient summed over devices once. Reverse-mode derivatives only, and
    first ones.

    A label outside [0, vocab) makes the sum NaN, unless its weight is 0.

    Args:
      features: what the head is applied to, [..., width].
      head: [width, vocab], or a table of embeddings [vocab, width].
      labels: integers, [...].
      weights: of each token, bool or float, [...]; 0 or False: it does not count. None: all count
        1.
      bias: of the head, [vocab].
      label_smoothing: the share of each label that is spread evenly over all classes, from 0 and
        below 1 (Szegedy et al. 2016, section 7).
      z_loss: adds this times the square of the log of the softmax's denominator (PaLM, Chowdhery et
        al. 2022, section 5, with 1e-4).
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` (Gemma 2 has 30).
      vocab_dim: which dim of the head is the vocabulary's, 0 or 1. None: the one that is not
        `width`.
      chunk: tokens of a device whose logits exist at a time. They are split evenly into as few
        chunks as that allows.

    Returns:
      The sum of weighted losses and the sum of weights, float32 each.

    Raises:
      LossError: shapes, dtypes or settings do not fit.

    Example:
      >>> features, head, labels = jnp.ones((2, 3, 4)), jnp.zeros((4, 10)), jnp.zeros((2, 3), int)
      >>> total, count = cross_entropy_from_features(features, head, labels)
      >>> round(float(total / count), 4) == round(math.log(10), 4)
      True
    """
    features, head, labels = map(jnp.asarray, (features, head, labels))
    settings = _Settings(
        _vocab_dim(features, head, vocab_dim), label_smoothing, z_loss, soft_cap, chunk
    )
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else jnp.asarray(weights)
    bias = None if bias is None else jnp.asarray(bias)
    _check(settings, features, head, labels, weights, bias)
    weights = weights.astype(jnp.float32)
    with jax.named_scope("cross_entropy"):
        return _total(settings, features, head, bias, labels, weights), weights.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(
    settings: _Settings, features: Any, head: Any, bias: Any, labels: Any, weights: Any
) -> jax.Array:
    """The sum of weighted losses."""
    return _on_each_device(settings, False, features, head, bias, labels, weights)[0]


def _forward(
    settings: _Settings, features: Any, head: Any, bias: Any, labels: Any, weights: Any
) -> tuple[jax.Array, tuple]:
    """`_total`, and its gradients."""
    total, d_features, d_head, d_bias, losses = _on_each_device(
        settings, True, features, head, bias, labels, weights
    )
    return total, (
        d_features,
        d_head.astype(head.dtype),
        None if bias is None else d_bias.astype(bias.dtype),
        losses,
    )


def _backward(settings: _Settings, gradients: tuple, scale: jax.Array) -> tuple:
    del settings
    d_features, d_head, d_bias, d_weights = jax.tree.map(
        lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), gradients
    )
    return d_features, d_head, d_bias, None, d_weights


_total.defvjp(_forward, _backward)


def _on_each_device(
    settings: _Settings,
    with_gradients: bool,
    features: Any,
    head: Any,
    bias: Any,
    labels: Any,
    weights: Any,
) -> tuple:
    """`_over_chunks` of each device's tokens. Where the compiler still has to shard them, a loop
    over chunks of all would move them.
    """
    spec = _token_spec(features.shape)
    axes = spec_axes(tuple(spec))
    run = functools.partial(_over_chunks, settings, with_gradients, axes)
    if axes:
        tokens, everywhere = PartitionSpec(*spec), PartitionSpec()
        out = (
            (everywhere, tokens, everywhere, everywhere, tokens)
            if with_gradients
            else (everywhere,)
        )
        mesh = None if manual_axes() else current().mesh
        run = shard_map(
            run,
            mesh=mesh,
            in_specs=(tokens, everywhere, everywhere, tokens, tokens),
            out_specs=out,
            axis_names=axes,
        )
    return run(features, head, bias, labels, weights)


def _token_spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Over which mesh axes that are not manual yet the first dims of features [rows, length, ...,
    width] are sharded.
    """
    parallel, taken = current(), manual_axes()
    if len(shape) < 2:
        return PartitionSpec()
    rows = parallel.auto_row_axes(shape[0])
    stage, sequence = (
        axis if axis not in taken and parallel.axis_size(axis) > 1 else None
        for axis in (parallel.pipeline.axis, parallel.sequence.axis)
    )
    if stage is not None and shape[0] % math.prod(map(parallel.axis_size, (*rows, stage))) == 0:
        rows = (*rows, stage)
    by_length = (
        sequence
        if sequence is not None and len(shape) > 2 and shape[1] % parallel.axis_size(sequence) == 0
        else None
    )
    return PartitionSpec(rows or None, by_length) if by_length else PartitionSpec(rows or None)


def _over_chunks(
    settings: _Settings,
    with_gradients: bool,
    axes: tuple[str, ...],
    features: Any,
    head: Any,
    bias: Any,
    labels: Any,
    weights: Any,
) -> tuple:
    """The sum over the tokens along `axes`; with gradients also those of features, head and bias,
    and the loss of each token.
    """
    tokens, width = labels.size, features.shape[-1]
    count = max(math.ceil(tokens / settings.chunk), 1)
    size = math.ceil(tokens / count)
    padding = count * size - tokens
    dtype = jnp.promote_types(features.dtype, head.dtype)
    columns = head.astype(dtype)

    def in_chunks(x: jax.Array, *shape: int) -> jax.Array:
        flat = x.reshape(tokens, *shape)
        return jnp.pad(flat, [(0, padding), *((0, 0) for _ in shape)]).reshape(count, size, *shape)

    def add_chunk(sums: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        x, labels, weights = chunk
        x = x.astype(dtype)
        logits = _product(x, columns, 1, 1 - settings.vocab_dim)
        losses, d_logits = _of_logits(
            settings,
            logits if bias is None else logits + bias.astype(logits.dtype),
            labels,
            weights,
        )
        total = sums[0] + jnp.where(weights != 0, losses * weights, 0.0).sum()
        if not with_gradients:
            return (total,), ()
        gradient = d_logits().astype(dtype)
        d_x = _product(gradient, columns, 1, settings.vocab_dim).astype(features.dtype)
        d_head = sums[1] + (
            _product(gradient, x, 0, 0) if settings.vocab_dim == 0 else _product(x, gradient, 0, 0)
        )
        d_bias = sums[2] if bias is None else sums[2] + gradient.sum(axis=0, dtype=jnp.float32)
        return (total, d_head, d_bias), (d_x, losses)

    zero = jnp.zeros((), jnp.float32)
    sums = (
        zero,
        jnp.zeros(head.shape, jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    chunks = in_chunks(features, width), in_chunks(labels), in_chunks(weights)
    sums, of_tokens = lax.scan(add_chunk, sums if with_gradients else sums[:1], chunks)
    sums = jax.tree.map(lambda x: collectives.all_reduce(x, axes), sums)
    if not with_gradients:
        return sums
    d_features, losses = (x.reshape(count * size, *x.shape[2:])[:tokens] for x in of_tokens)
    return (
        sums[0],
        d_features.reshape(features.shape),
        sums[1],
        sums[2],
        losses.reshape(labels.shape),
    )


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """Of two matrices, along these dims, summed in float32."""
    return lax.dot_general(
        a,
        b,
        (((a_dim,), (b_dim,)), ((), ())),
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _of_logits(
    settings: _Settings, logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    """The loss of each token [tokens], and a function that gives the gradient of their weighted sum
    [tokens, vocab].
    """
    cap, smoothing, vocab = settings.soft_cap, settings.label_smoothing, logits.shape[-1]
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    # compared, not looked up: XLA's partitioner aborts on a look-up in logits whose classes and
    # rows are sharded over two mesh axes
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    is_label = jnp.arange(vocab, dtype=labels.dtype) == labels[:, None]
    valid = ((labels >= 0) & (labels < vocab)) | (weights == 0)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    losses = (
        normalizer
        - (1 - smoothing) * jnp.where(is_label, logits, 0.0).sum(axis=-1)
        + settings.z_loss * normalizer**2
    )
    losses = losses - smoothing * logits.mean(axis=-1) if smoothing else losses

    def gradient() -> jax.Array:
        slope = jnp.where(weights != 0, weights, 0.0)
        softmax = (
            jnp.exp(logits - normalizer[:, None]) * (1 + 2 * settings.z_loss * normalizer)[:, None]
        )
        d_logits = slope[:, None] * (
            softmax - jnp.where(is_label, 1 - smoothing, 0.0) - smoothing / vocab
        )
        return d_logits if cap is None else d_logits * (1 - (logits / cap) ** 2)

    return jnp.where(valid, losses, jnp.nan), gradient


def _vocab_dim(features: jax.Array, head: jax.Array, vocab_dim: int | None) -> int:
    """The dim of the head along which the classes are."""
    name = "cross_entropy_from_features"
    if not features.ndim or head.ndim != 2 or features.shape[-1] not in head.shape:
        raise LossError(
            f"{name}: features are {describe(features)} and the head is {describe(head)}.",
            fix="features [..., width] and a head [width, vocab] or [vocab, width].",
        )
    width = features.shape[-1]
    if vocab_dim is None:
        if head.shape == (width, width):
            why = (
                f"{name}: the head is {describe(head)} for features of width {width}, so either "
                "dim may be the vocabulary."
            )
            raise LossError(
                why, fix="vocab_dim=1 for a head [width, vocab], vocab_dim=0 for [vocab, width]."
            )
        return 1 if head.shape[0] == width else 0
    if isinstance(vocab_dim, bool) or vocab_dim not in (0, 1) or head.shape[1 - vocab_dim] != width:
        why = (
            f"{name}: vocab_dim={short_repr(vocab_dim)}, the head is {describe(head)}, and "
            f"features are {describe(features)}."
        )
        raise LossError(why, fix="0 for a head [vocab, width], 1 for [width, vocab].")
    return vocab_dim


def _check(
    settings: _Settings, features: Any, head: Any, labels: Any, weights: Any, bias: Any
) -> None:
    """Refuse shapes, dtypes and settings that do not fit, all at once."""
    tokens, vocab = features.shape[:-1], head.shape[settings.vocab_dim]
    problems = []

    def require(holds: Any, why: str, fix: str) -> None:
        if not holds:
            problems.append((why, fix))

    for name, array in (("features are", features), ("the head is", head)):
        require(
            jnp.issubdtype(array.dtype, jnp.floating),
            f"{name} {describe(array)}",
            "a floating-point dtype",
        )
    require(
        jnp.issubdtype(labels.dtype, jnp.integer),
        f"labels are {describe(labels)}",
        "labels of an integer dtype",
    )
    require(
        labels.shape == tokens,
        f"labels are {describe(labels)} for features {describe(features)}",
        f"labels of shape {list(tokens)}",
    )
    require(
        weights.shape == tokens,
        f"weights are {describe(weights)} for features {describe(features)}",
        f"weights of shape {list(tokens)}",
    )
    is_weight = (
        weights.dtype == bool
        or jnp.issubdtype(weights.dtype, jnp.floating)
        or jnp.issubdtype(weights.dtype, jnp.integer)
    )
    require(is_weight, f"weights are {describe(weights)}", "weights of bool or floats")
    is_bias = bias is None or (bias.shape == (vocab,) and jnp.issubdtype(bias.dtype, jnp.floating))
    require(
        is_bias,
        f"the bias is {describe(bias)} for a vocabulary of {vocab}",
        f"a bias of shape [{vocab}]",
    )
    smoothing, cap, chunk = settings.label_smoothing, settings.soft_cap, settings.chunk
    require(
        _number(smoothing) and 0 <= smoothing < 1,
        f"label_smoothing={short_repr(smoothing)}",
        "a number from 0 and below 1",
    )
    require(
        _number(settings.z_loss) and settings.z_loss >= 0,
        f"z_loss={short_repr(settings.z_loss)}",
        "a number from 0, such as 1e-4",
    )
    require(
        cap is None or (_number(cap) and cap > 0),
        f"soft_cap={short_repr(cap)}",
        "a number above 0, or None",
    )
    require(
        isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0,
        f"chunk={short_repr(chunk)}",
        "a whole number of tokens from 1",
    )
    if problems:
        whys, fixes = zip(*problems, strict=True)
        raise LossError(
            f"cross_entropy_from_features: {'; '.join(whys)}.", fix=f"{'; '.join(fixes)}."
        )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
