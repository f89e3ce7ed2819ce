"""Metrics of an evaluation that are no means: functions of sums over all rows, and so exact over
batches, workers and padding.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.tracebacks import failing_line
from spmd.base.tree import describe
from spmd.errors import LossError, OptionError, check_integer, first_line, short_repr
from spmd.train.losses import cross_entropy
from spmd.train.metrics import Columns, PerExample, same_shape

# of a confusion matrix, which has classes**2 numbers for each row on the devices
MOST_CLASSES = 1024
BLUE = (31, 119, 180)
# bins of arcsinh(logit), in all and for each unit: up to logits of 21,000 in size
BINS, FINENESS = 2048, 96


def _no_finish(sums: np.ndarray) -> float:
    # never called: a metric without `finish` is refused when it is made
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FromSums(PerExample):
    """A metric of an evaluation that is a function of sums over all rows; it is not measured in
    training.

    `function(outputs, targets)` gives k numbers for each row, or for each position of it, [rows,
    ..., k]. `finish` gets their sums over all rows and positions that count, float64[k], on the
    host, and gives the metric. Where it gives NaN, a warning says `undefined`. `draw`, if there is
    one, gets the same sums and gives a picture, which `fit` hands to loggers as `info.log_picture`
    does.

    Args:
      function: `function(outputs, targets)`, see above.
      name: for messages.
      inputs: the key of the model's inputs in a dict batch; None: it is found.
      targets: the key of the targets; None: it is found.
      mask: the key of a mask like the targets: 0 or False where a position does not count.
      ignore: the target of positions that do not count, such as -100.
      finish: from the sums, float64[k], to the metric.
      undefined: why the metric may be NaN, for the warning.
      draw: from the sums to a picture; None: there is none.

    Raises:
      OptionError: there is no `finish`, or it or `draw` is no function.

    Example:
      >>> import jax.numpy as jnp
      >>> squares = lambda outputs, targets: jnp.stack(
      ...     [(outputs - targets) ** 2, jnp.ones(outputs.shape)], axis=-1
      ... )
      >>> rmse = FromSums(squares, "rmse", finish=lambda sums: float((sums[0] / sums[1]) ** 0.5))
      >>> rmse.finish(np.array([8.0, 2.0]))
      2.0
    """

    finish: Callable[[np.ndarray], float] = _no_finish
    undefined: str = "finish gives nan for its sums"
    draw: Callable[[np.ndarray], Any] | None = None

    def __post_init__(self) -> None:
        why = ""
        if self.finish is _no_finish:
            why = "there is no `finish`"
        elif not callable(self.finish):
            why = f"finish={short_repr(self.finish)} is no function"
        if why:
            if callable(self.inputs):
                why += ", and the third argument, `inputs`, is a function"
            raise OptionError(
                f"FromSums {short_repr(self.name)}: {why}.",
                fix="FromSums(function, name, finish=...).",
            )
        if self.draw is not None and not callable(self.draw):
            why = f"draw={short_repr(self.draw)} is no function"
            raise OptionError(
                f"FromSums {short_repr(self.name)}: {why}.",
                fix="a function from sums to a picture, or None.",
            )

    def value(self, name: str, sums: np.ndarray) -> float:
        """Return the number of `finish`; `name` is that of the metric.

        Raises:
          LossError: `finish` fails, or returns no number.
        """
        description, value = _result(name, "finish", self.finish, sums)
        if np.ndim(value) or np.asarray(value).dtype.kind not in "biuf":
            raise LossError(f"{description} returned {short_repr(value)}.", fix="one number.")
        return float(value)

    def picture(self, name: str, sums: np.ndarray) -> Any:
        """Return the picture of `draw`, or None without one; `name` is that of the metric.

        Raises:
          LossError: `draw` fails.
        """
        if self.draw is None:
            return None
        _, picture = _result(name, "draw", self.draw, sums)
        return picture

    def __call__(self, model: Any, batch: Any) -> Columns:
        """Return the k numbers of each row; call the model."""
        values, counts = self._values(model, batch)
        targets = self.split(batch)[1]
        if getattr(values, "ndim", 0) < 2:
            raise LossError(
                f"{self.name}: {describe(values)}.", fix="[rows, ..., k], k numbers for each row."
            )
        rows = jax.tree.leaves(targets)[0].shape[0]
        if values.shape[0] != rows:
            raise LossError(
                f"{self.name}: {describe(values)} for {rows} rows.",
                fix="[rows, ..., k], k numbers for each row.",
            )
        values = values.astype(jnp.float32)
        if counts is not None:
            if values.shape[:-1] != counts.shape:
                raise LossError(
                    f"{self.name}: {describe(values)} for targets {describe(targets)}, so "
                    "positions cannot be left out.",
                    fix="a function with k numbers for each target.",
                )
            invalid = self.no_mask(batch)[..., None]
            values = jnp.where(counts[..., None], values, 0.0)
            values = jnp.where(invalid, jnp.nan, values)
        return Columns(values.sum(axis=tuple(range(1, values.ndim - 1))))


def _result(
    name: str, method: str, function: Callable[[np.ndarray], Any], sums: np.ndarray
) -> tuple[str, Any]:
    """Return a description of the call of a metric's function, for errors, and its result.

    Raises:
      LossError: the function fails.
    """
    description = f'metric "{name}": {method}, given the sums {describe(sums)},'
    try:
        return description, function(sums)
    except Exception as error:
        why = f"{description} raised {first_line(error)}{failing_line(error)}"
        raise LossError(why, fix="correct that line.") from error


def confusion(classes: int) -> FromSums:
    """Return the metric of the mean over classes of the recall (balanced accuracy), with a picture
    of the confusion matrix; exact over workers and padding.

    Outputs are logits [rows, ..., classes], and targets classes. In the picture, which runs with a
    folder give to their loggers after each evaluation, a row is a true class, from 0 at the top, a
    column the class with the largest logit, and blue is the share of the row.

    A target that is no class, or a logit that is NaN, makes it NaN, and a warning names the batch.
    Classes without rows are left out; NaN where there are no rows. Larger is better:
    `Checkpoint(..., best="eval_confusion", mode="max")`.

    Args:
      classes: how many there are.

    Returns:
      A metric, for `metrics=` of `fit`; `.on(...)` names keys of the batch.

    Raises:
      OptionError: `classes` is not a number from 2 to 1024.

    Example:
      >>> metric = confusion(2)
      >>> cells = metric.function(
      ...     jnp.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), jnp.array([0, 1, 1])
      ... )
      >>> cells.sum(0).reshape(2, 2).tolist(), metric.finish(np.asarray(cells.sum(0)))
      ([[1.0, 0.0], [1.0, 1.0]], 0.75)
    """
    check_integer(classes, "confusion: classes", 2, MOST_CLASSES)

    def cells(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        if outputs.shape != (*targets.shape, classes):
            raise LossError(
                f"confusion: the outputs are {describe(outputs)} for targets {describe(targets)}.",
                fix=f"logits of {classes} classes for each target.",
            )
        valid = (targets >= 0) & (targets < classes) & ~jnp.isnan(outputs).any(-1)
        # not in the dtype of the targets, which may be too narrow for classes**2
        place = targets.astype(jnp.int32) * classes + outputs.argmax(-1).astype(jnp.int32)
        cell = jnp.where(valid, place, -1)
        valid = valid[..., None]
        hits = jax.nn.one_hot(cell, classes**2, dtype=jnp.float32)
        return jnp.where(valid, hits, jnp.nan)

    def mean_recall(sums: np.ndarray) -> float:
        matrix = sums.reshape(classes, classes)
        rows = matrix.sum(1)
        present = rows != 0
        if not present.any():
            return math.nan
        return float(np.mean(matrix.diagonal()[present] / rows[present]))

    def draw(sums: np.ndarray) -> np.ndarray:
        matrix = sums.reshape(classes, classes)
        shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
        pixels = 255 - shares[..., None] * (255 - np.array(BLUE))
        side = max(480 // classes, 1)
        return np.round(pixels).astype(np.uint8).repeat(side, 0).repeat(side, 1)

    return FromSums(
        cells,
        f"spmd.metrics.confusion({classes})",
        finish=mean_recall,
        undefined="no row counts",
        draw=draw,
    )


def _entropy_and_count(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    entropy = cross_entropy.function(outputs, targets)
    return jnp.stack([entropy, jnp.ones(entropy.shape, entropy.dtype)], axis=-1)


perplexity = FromSums(
    _entropy_and_count,
    "spmd.metrics.perplexity",
    finish=lambda sums: float(np.exp(sums[0] / sums[1])) if sums[1] else math.nan,
    undefined="no position counts",
)
"""exp of the mean cross entropy over all positions that count, of logits [rows, ..., classes] and
integer targets.
"""


def _histogram(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    if outputs.ndim == targets.ndim + 1:
        if outputs.shape[-1] != 2:
            raise LossError(
                f"auc: the outputs are {describe(outputs)}.",
                fix="one logit for each target, or logits of two classes.",
            )
        outputs = outputs[..., 1].astype(jnp.float32) - outputs[..., 0].astype(jnp.float32)
    same_shape("auc", outputs, targets)
    place = jnp.floor(jnp.arcsinh(outputs.astype(jnp.float32)) * FINENESS) + BINS // 2
    place = jnp.clip(place, 0, BINS - 1)
    is_class = (targets == 0) | (targets == 1)
    invalid = jnp.isnan(place) | ~is_class
    cell = jnp.where(invalid, -1, place + BINS * (targets == 1)).astype(jnp.int32)
    invalid = (cell < 0)[..., None]
    return jnp.where(invalid, jnp.nan, jax.nn.one_hot(cell, 2 * BINS, dtype=jnp.float32))


def _area(sums: np.ndarray) -> float:
    negative, positive = sums.reshape(2, BINS)
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return math.nan
    # those of the same bin count half
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / pairs)


auc = FromSums(_histogram, "spmd.metrics.auc", finish=_area, undefined="all rows are of one class")
"""The area under the ROC curve: how often a row of class 1 has a larger logit than one of class 0;
equal ones count half.

Outputs are one logit for each target, or logits of two classes, of which the difference is taken;
targets are 0 or 1. Logits are compared in steps that grow with their size: of 1/96 near 0, and of
about 1 % of logits above 1, up to 21,000. A target that is neither 0 nor 1, or a logit that is
NaN, makes it NaN, and a warning names the batch. NaN where all rows are of one class.

Larger is better: `EarlyStopping("eval_auc", mode="max")`, and
`Checkpoint(..., best="eval_auc", mode="max")`.
"""
