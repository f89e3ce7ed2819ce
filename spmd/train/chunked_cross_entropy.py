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
from spmd.nn.model_calls import manual_axes
from spmd.nn.parallel_context import current
from spmd.wire import collectives

# Tokens: logits of 2,048 x 128,256 in float32 are 1 GiB. Each chunk adds to the head's gradient, so
# small ones are slow.
CHUNK = 2048


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings of the loss of a token, apart from its arrays.

    Attributes:
      vocab_dim: the dim of the head along which the classes are.
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
    class_dim = _vocab_dim(features, head, vocab_dim)
    settings = _Settings(class_dim, label_smoothing, z_loss, soft_cap, chunk)
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    else:
        weights = jnp.asarray(weights)
    if bias is not None:
        bias = jnp.asarray(bias)
    _check(settings, features, head, labels, weights, bias)
    weights = weights.astype(jnp.float32)
    with jax.named_scope("cross_entropy"):
        return _total(settings, features, head, bias, labels, weights), weights.sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(settings: _Settings, *arrays: Any) -> jax.Array:
    """Return the sum of weighted losses, from features, head, bias, labels and weights."""
    return _on_each_device(settings, False, *arrays)[0]


def _forward(settings: _Settings, *arrays: Any) -> tuple[jax.Array, tuple]:
    """Return `_total`, and its gradients."""
    _, head, bias, *_ = arrays
    total, d_features, d_head, d_bias, losses = _on_each_device(settings, True, *arrays)
    d_head = d_head.astype(head.dtype)
    if bias is not None:
        d_bias = d_bias.astype(bias.dtype)
    # the gradient by a token's weight is the token's loss
    return total, (d_features, d_head, d_bias, losses)


def _backward(settings: _Settings, gradients: tuple, scale: jax.Array) -> tuple:
    del settings

    def scaled(gradient: jax.Array) -> jax.Array:
        return (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)

    d_features, d_head, d_bias, d_weights = jax.tree.map(scaled, gradients)
    # JAX takes None for the gradient by labels, which are integers
    return d_features, d_head, d_bias, None, d_weights


_total.defvjp(_forward, _backward)


def _on_each_device(
    settings: _Settings, with_gradients: bool, features: Any, *arrays: Any
) -> tuple:
    """Return `_over_chunks` of each device's tokens."""
    spec = _token_spec(features.shape)
    axes = spec_axes(tuple(spec))
    compute = functools.partial(_over_chunks, settings, with_gradients, axes)
    # where the compiler still has to shard tokens, a loop over chunks of all would move them
    if axes:
        tokens = PartitionSpec(*spec)
        replicated = PartitionSpec()
        out_specs: tuple[PartitionSpec, ...] = (replicated,)
        if with_gradients:
            out_specs = (replicated, tokens, replicated, replicated, tokens)
        compute = shard_map(
            compute,
            # inside of another `shard_map` JAX takes the mesh of that one
            mesh=None if manual_axes() else current().mesh,
            in_specs=(tokens, replicated, replicated, tokens, tokens),
            out_specs=out_specs,
            axis_names=axes,
        )
    return compute(features, *arrays)


def _token_spec(shape: tuple[int, ...]) -> PartitionSpec:
    """Return the mesh axes, of those that are not manual yet, over which the first dims of features
    [rows, length, ..., width] are sharded.
    """
    parallel = current()
    if len(shape) < 2:
        return PartitionSpec()
    rows = parallel.auto_row_axes(shape[0])
    stage = _compiler_axis(parallel.pipeline.axis)
    sequence = _compiler_axis(parallel.sequence.axis)
    if stage is not None and shape[0] % math.prod(map(parallel.axis_size, (*rows, stage))) == 0:
        rows = (*rows, stage)
    if sequence is None or len(shape) < 3 or shape[1] % parallel.axis_size(sequence):
        return PartitionSpec(rows or None)
    return PartitionSpec(rows or None, sequence)


def _compiler_axis(axis: str | None) -> str | None:
    """Return a mesh axis if the compiler still has to shard over it; else None."""
    if axis in manual_axes() or current().axis_size(axis) == 1:
        return None
    return axis


def _zero_sums(head: Any, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return zeros for the sums of the loss and of the gradients of head and bias, float32."""
    total = jnp.zeros((), jnp.float32)
    d_head = jnp.zeros(head.shape, jnp.float32)
    if bias is None:
        return total, d_head, None
    return total, d_head, jnp.zeros(bias.shape, jnp.float32)


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
    """Return the sum over the tokens along `axes`; with gradients also those of features, head and
    bias, and the loss of each token.
    """
    tokens = labels.size
    width = features.shape[-1]
    count = max(math.ceil(tokens / settings.chunk), 1)
    size = math.ceil(tokens / count)
    dtype = jnp.promote_types(features.dtype, head.dtype)
    columns = head.astype(dtype)

    def add_chunk(sums: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        x, labels, weights = chunk
        x = x.astype(dtype)
        logits = _product(x, columns, 1, 1 - settings.vocab_dim)
        if bias is not None:
            logits = logits + bias.astype(logits.dtype)
        losses, d_logits = _token_losses(settings, logits, labels, weights)
        # never 0 * NaN: a token of weight 0 may have any label
        total = sums[0] + jnp.where(weights != 0, losses * weights, 0.0).sum()
        if not with_gradients:
            return (total,), ()
        gradient = d_logits().astype(dtype)
        d_x = _product(gradient, columns, 1, settings.vocab_dim).astype(features.dtype)
        factors = (x, gradient)
        if settings.vocab_dim == 0:
            factors = (gradient, x)
        d_head = sums[1] + _product(*factors, 0, 0)
        d_bias = sums[2]
        if bias is not None:
            d_bias = d_bias + gradient.sum(axis=0, dtype=jnp.float32)
        return (total, d_head, d_bias), (d_x, losses)

    zeros = _zero_sums(head, bias)
    sums = zeros[:1]
    if with_gradients:
        sums = zeros
    chunks = (
        _in_chunks(features.reshape(tokens, width), count, size),
        _in_chunks(labels.reshape(tokens), count, size),
        # padding has weight 0
        _in_chunks(weights.reshape(tokens), count, size),
    )
    sums, token_arrays = lax.scan(add_chunk, sums, chunks)
    # After the loop, so that devices add up the head's gradient once, and not for each chunk.
    sums = jax.tree.map(lambda x: collectives.all_reduce(x, axes), sums)
    if not with_gradients:
        return sums
    total, d_head, d_bias = sums
    d_features, losses = (x.reshape(count * size, *x.shape[2:])[:tokens] for x in token_arrays)
    d_features = d_features.reshape(features.shape)
    return total, d_features, d_head, d_bias, losses.reshape(labels.shape)


def _in_chunks(tokens: jax.Array, count: int, size: int) -> jax.Array:
    """Return [tokens, ...] as [count, size, ...], padded with zeros."""
    missing = count * size - tokens.shape[0]
    padded = jnp.pad(tokens, [(0, missing), *[(0, 0)] * (tokens.ndim - 1)])
    return padded.reshape(count, size, *tokens.shape[1:])


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """Return the product of two matrices, along these dims, summed in float32."""
    dims = ((a_dim,), (b_dim,)), ((), ())
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _token_losses(
    settings: _Settings, logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the loss of each token [tokens], and a function that returns the gradient of their
    weighted sum [tokens, vocab].
    """
    cap = settings.soft_cap
    smoothing = settings.label_smoothing
    vocab = logits.shape[-1]
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    # Compared, not looked up: XLA's partitioner aborts on a look-up in logits whose classes and
    # rows are sharded over two mesh axes (jax 0.10.2). Labels of 8 bits could not hold the classes.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    is_label = jnp.arange(vocab, dtype=labels.dtype) == labels[:, None]
    valid = ((labels >= 0) & (labels < vocab)) | (weights == 0)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.where(is_label, logits, 0.0).sum(axis=-1)
    losses = normalizer - (1 - smoothing) * label_logits + settings.z_loss * normalizer**2
    if smoothing:
        losses = losses - smoothing * logits.mean(axis=-1)

    def gradient() -> jax.Array:
        slope = jnp.where(weights != 0, weights, 0.0)
        softmax = jnp.exp(logits - normalizer[:, None])
        softmax = softmax * (1 + 2 * settings.z_loss * normalizer)[:, None]
        slope = slope[:, None]
        label_part = jnp.where(is_label, 1 - smoothing, 0.0)
        d_logits = slope * (softmax - label_part - smoothing / vocab)
        if cap is None:
            return d_logits
        return d_logits * (1 - (logits / cap) ** 2)

    return jnp.where(valid, losses, jnp.nan), gradient


def _vocab_dim(features: jax.Array, head: jax.Array, vocab_dim: int | None) -> int:
    """Return the dim of the head along which the classes are.

    Raises:
      LossError: shapes do not show it, or `vocab_dim` does not fit them.
    """
    name = "cross_entropy_from_features"
    if not features.ndim or head.ndim != 2 or features.shape[-1] not in head.shape:
        raise LossError(
            f"{name}: features are {describe(features)} and the head is {describe(head)}.",
            fix="features [..., width] and a head [width, vocab] or [vocab, width].",
        )
    width = features.shape[-1]
    if vocab_dim is None:
        if head.shape == (width, width):
            raise LossError(
                f"{name}: the head is {describe(head)} for features of width {width}, so either "
                "dim may be the vocabulary.",
                fix="vocab_dim=1 for a head [width, vocab], vocab_dim=0 for [vocab, width].",
            )
        if head.shape[0] == width:
            return 1
        return 0
    if isinstance(vocab_dim, bool) or vocab_dim not in (0, 1) or head.shape[1 - vocab_dim] != width:
        raise LossError(
            f"{name}: vocab_dim={short_repr(vocab_dim)}, the head is {describe(head)}, and "
            f"features are {describe(features)}.",
            fix="0 for a head [vocab, width], 1 for [width, vocab].",
        )
    return vocab_dim


def _check(
    settings: _Settings, features: Any, head: Any, labels: Any, weights: Any, bias: Any
) -> None:
    """Refuse shapes, dtypes and settings that do not fit, all at once."""
    tokens = features.shape[:-1]
    vocab = head.shape[settings.vocab_dim]
    whys: list[str] = []
    fixes: list[str] = []

    def refuse(why: str, fix: str) -> None:
        whys.append(why)
        fixes.append(fix)

    for name, array in (("features are", features), ("the head is", head)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            refuse(f"{name} {describe(array)}", "a floating-point dtype")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        refuse(f"labels are {describe(labels)}", "labels of an integer dtype")
    for name, array in (("labels", labels), ("weights", weights)):
        if array.shape != tokens:
            why = f"{name} are {describe(array)} for features {describe(features)}"
            refuse(why, f"{name} of shape {list(tokens)}")
    if not any(jnp.issubdtype(weights.dtype, kind) for kind in (bool, jnp.floating, jnp.integer)):
        refuse(f"weights are {describe(weights)}", "weights of bool or floats")
    if bias is not None:
        is_floating = jnp.issubdtype(bias.dtype, jnp.floating)
        if bias.shape != (vocab,) or not is_floating:
            why = f"the bias is {describe(bias)} for a vocabulary of {vocab}"
            refuse(why, f"a bias of shape [{vocab}]")
    smoothing, z_loss = settings.label_smoothing, settings.z_loss
    if not _is_number(smoothing) or not 0 <= smoothing < 1:
        refuse(f"label_smoothing={short_repr(smoothing)}", "a number from 0 and below 1")
    if not _is_number(z_loss) or z_loss < 0:
        refuse(f"z_loss={short_repr(z_loss)}", "a number from 0, such as 1e-4")
    cap, chunk = settings.soft_cap, settings.chunk
    if cap is not None and not (_is_number(cap) and cap > 0):
        refuse(f"soft_cap={short_repr(cap)}", "a number above 0, or None")
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        refuse(f"chunk={short_repr(chunk)}", "a whole number of tokens from 1")
    if whys:
        why = f"cross_entropy_from_features: {'; '.join(whys)}."
        raise LossError(why, fix=f"{'; '.join(fixes)}.")


def _is_number(value: Any) -> bool:
    """Return whether a setting is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
