"""Losses that fit the common shapes of batches; any function `(model, batch[, rng])` does as
well.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base.tree import describe
from spmd.errors import DataError, LossError, join_names, type_name
from spmd.train.chunked_cross_entropy import cross_entropy_from_features
from spmd.train.metrics import PerExample, accuracy, mean_absolute_error, same_shape


def of_parts(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Declare that a loss is meant for the rows of one part of a batch: a worker's, or a
    microbatch's.

    A loss that joins rows is that of the full batch: workers share what it needs of other rows.
    Where the mean over parts is what you want, such as negatives from a worker's own rows, this
    says so, and nothing is shared.

    Args:
      loss: `loss(model, batch[, rng])`.

    Returns:
      The same loss, marked.

    Example:
      >>> import jax.numpy as jnp
      >>> variance = of_parts(lambda model, batch: jnp.square(batch - batch.mean()).mean())
      >>> variance.of_parts
      True
    """

    # A function of its own: a mark on the user's would hold wherever that one is used.
    @functools.wraps(loss)
    def marked(*args: Any, **named: Any) -> Any:
        return loss(*args, **named)

    marked.of_parts = True  # type: ignore[attr-defined] # a function has any attribute
    return marked


def _is_integer(targets: jax.Array) -> jax.Array | bool:
    """Return which targets are whole numbers: targets that come from files may be floats."""
    if jnp.issubdtype(targets.dtype, jnp.complexfloating):
        raise LossError(f"cross_entropy: the targets are {describe(targets)}.", fix="integers.")
    if jnp.issubdtype(targets.dtype, jnp.floating):
        return targets == jnp.floor(targets)
    return True


def _cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("cross_entropy", outputs[..., 0], targets)
    logits = outputs.astype(jnp.float32)
    classes = jnp.arange(outputs.shape[-1])
    # Compared, not looked up: XLA's partitioner aborts on a look-up in logits whose classes and
    # rows are sharded over two mesh axes (jax 0.10.2).
    target_logits = jnp.where(classes == targets[..., None], logits, 0.0).sum(axis=-1)
    is_class = (targets >= 0) & (targets < len(classes)) & _is_integer(targets)
    target_logits = jnp.where(is_class, target_logits, jnp.nan)
    return jax.nn.logsumexp(logits, axis=-1) - target_logits


def _mean_squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("mean_squared_error", outputs, targets)
    return jnp.square(outputs.astype(jnp.float32) - targets.astype(jnp.float32))


def next_token(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of the next token, as (sum, count) over the tokens that count: for
    batches of `spmd.data.text`.

    The model is called as `model(tokens, positions=, segment_ids=)`, without the last two if the
    batch lacks them, and returns logits [rows, length, vocabulary]. One that has `features`, with
    these arguments, and `output_head()`, a dict of arguments `head`, `bias`, `vocab_dim` and
    `soft_cap` of `spmd.losses.cross_entropy_from_features`, has logits of a chunk of tokens at a
    time only.

    Args:
      model: see above.
      batch: "tokens", "targets", "positions" and "segment_ids", int32[rows, length]; and "mask",
        the weight of each target, float32[rows, length]. A target outside the vocabulary makes the
        loss NaN unless its weight is 0.

    Returns:
      The sum of the losses of tokens that count, and the sum of their weights: float32 scalars.

    Raises:
      DataError: the batch lacks a key.

    Example:
      >>> def uniform(tokens):
      ...     return jnp.zeros((*tokens.shape, 8))
      >>> batch = {
      ...     "tokens": jnp.array([[1, 2, 3]]),
      ...     "targets": jnp.array([[2, 3, 0]]),
      ...     "mask": jnp.array([[1.0, 1.0, 0.0]]),
      ... }
      >>> total, count = next_token(uniform, batch)
      >>> round(float(total / count), 4) == round(math.log(8), 4)
      True
    """
    missing = ["tokens"]
    contents = type_name(batch)
    if isinstance(batch, dict):
        missing = [name for name in ("tokens", "targets", "mask") if name not in batch]
        contents = join_names(batch)
    if missing:
        raise DataError(
            f"next_token: the batch has no {join_names(missing)}; it has {contents}.",
            fix="batches as of spmd.data.text.",
        )
    tokens = batch["tokens"]
    targets = batch["targets"]
    weights = batch["mask"].astype(jnp.float32)
    packed = {name: batch[name] for name in ("positions", "segment_ids") if name in batch}
    if hasattr(model, "features") and hasattr(model, "output_head"):
        return cross_entropy_from_features(
            model.features(tokens, **packed), labels=targets, weights=weights, **model.output_head()
        )
    values = _cross_entropy(model(tokens, **packed), jnp.where(weights != 0, targets, 0))
    return jnp.where(weights != 0, weights * values, 0.0).sum(), weights.sum()


@functools.partial(jax.jit, static_argnums=0)
def _range(loss: PerExample, batch: Any) -> jax.Array:
    """Return of the targets that count: the smallest, the largest, one that is no whole number (0
    if all are), and how many are NaN.
    """
    targets = jnp.where(loss.counts(batch), loss.split(batch)[1], 0)
    # counted, because XLA's maximum over devices may drop a NaN
    nans = jnp.isnan(targets)
    low = targets.min()
    high = targets.max()
    fraction = jnp.where(_is_integer(targets) | nans, 0, targets).max()
    return jnp.stack([low, high, fraction, nans.sum(dtype=targets.dtype)])


@functools.partial(jax.jit, static_argnums=0)
def _no_mask(function: PerExample, batch: Any) -> jax.Array:
    """Return how many entries of a mask are neither 0 nor 1, the largest of these, and how many are
    NaN.
    """
    invalid = function.no_mask(batch)
    mask = batch[function.mask].astype(jnp.float32)
    count = invalid.sum()
    # without NaN, which XLA's maximum over devices may drop
    largest = jnp.where(invalid & ~jnp.isnan(mask), mask, -jnp.inf).max()
    return jnp.stack([count, largest, jnp.isnan(mask).sum()])


def check_masks(functions: Iterable[Any], batch: Any) -> None:
    """Refuse masks of a placed batch that are more than yes and no.

    Raises:
      DataError: there are some, for a loss or metric of `on(mask=...)`.
    """
    by_mask = {}
    for function in functions:
        if isinstance(function, PerExample) and function.mask is not None:
            by_mask[function.mask] = function
    for name, function in by_mask.items():
        count, largest, nans = map(float, jax.device_get(_no_mask(function, batch)))
        if count:
            example = largest
            if nans:
                example = math.nan
            raise DataError(
                f"{function.name}: {count:g} of the {math.prod(batch[name].shape)} entries of the "
                f'mask "{name}", '
                f"{describe(batch[name])}, are neither 0 nor 1, such as "
                f"{example:g}.",
                fix="a mask of bool, or of 0 and 1. For weights, a loss of your own that returns "
                "((weights * values).sum(), weights.sum()).",
            )


def nan_causes(loss: Any, outputs: Iterable[tuple[int, ...]]) -> str:
    """Return the end of a sentence on the entries of a batch that make a declared loss NaN; empty
    where nothing is known of the loss.

    Args:
      outputs: shapes that the model has given to the loss.
    """
    if not isinstance(loss, PerExample) or loss.function is not _cross_entropy:
        return ""
    classes = "".join(f", 0 to {shape[-1] - 1}" for shape in outputs)
    text = f": {loss.name} is NaN where a target is not one of the model's classes{classes}"
    if loss.mask is not None:
        text += f', and where the mask "{loss.mask}" is neither 0 nor 1'
    return text


def check_targets(loss: Any, classes: int, batch: Any) -> None:
    """Refuse targets of a placed batch that are no class.

    Raises:
      DataError: there are some, for `cross_entropy`.
    """
    if not isinstance(loss, PerExample) or loss.function is not _cross_entropy:
        return
    low, high, fraction, nans = map(float, jax.device_get(_range(loss, batch)))
    if fraction != 0 and math.isfinite(fraction):
        raise DataError(
            f"{loss.name}: a target is {fraction:g}, which is no whole number.",
            fix="classes, counted from 0.",
        )
    if nans:
        raise DataError(
            f"{loss.name}: {nans:g} targets are NaN.",
            fix="a look at the data, or cross_entropy.on(mask=...).",
        )
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(
            f"{loss.name}: targets from {low:g} to {high:g}.",
            fix="a look at the data for NaN and infinity.",
        )
    low, high = math.floor(low), math.ceil(high)
    if low < 0 or high >= classes:
        fix = f"classes counted from 0, or a model with {max(high + 1, 1)} logits."
        if low < 0:
            fix += " Those that do not count: cross_entropy.on(ignore=-100), or on(mask=...)."
        raise DataError(
            f"{loss.name}: targets from {low} to {high}, and the model gives {classes} logits, for "
            f"classes 0 to {classes - 1}.",
            fix=fix,
        )


cross_entropy = PerExample(_cross_entropy, "spmd.losses.cross_entropy")
"""Softmax cross-entropy of logits [batch, ..., classes] against integer targets [batch, ...], in
float32.

`cross_entropy.on(mask="mask")` and `cross_entropy.on(ignore=-100)` take the mean over the tokens
that count, over all workers. A target outside [0, classes) that is not ignored makes the loss NaN,
and so ends the run, and so does a mask that is neither 0 nor 1; the first batch is checked before,
by value and range.
"""

mean_squared_error = PerExample(_mean_squared_error, "spmd.losses.mean_squared_error")
"""Mean of (output - target)² over everything but dim 0, in float32."""

# functions that join no rows
SHIPPED = tuple(
    shipped.function
    for shipped in (cross_entropy, mean_squared_error, accuracy, mean_absolute_error)
)
