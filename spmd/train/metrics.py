"""Metrics: functions of (model, batch) giving one value per example, and the (sum, count) pairs they become.

A mean over workers, microbatches or batches is exact only if sums and counts are kept separate, so every metric is
a pair until a person reads it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.errors import DataError, LossError, OptionError, did_you_mean, short_repr
from spmd.tree import describe

INPUTS = ("x", "inputs", "input", "image", "images", "tokens", "features", "input_ids")
TARGETS = ("y", "targets", "target", "labels", "label")
IN_FLIGHT = 2  # programs dispatched whose metrics are not yet read; unbounded, XLA:CPU deadlocks on more than two devices

Sums = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum over rows, number of rows), both float32 scalars


@dataclasses.dataclass(frozen=True)
class PerExample:
    """A loss or metric that calls the model once on the inputs and compares with the targets, row by row.

    `function(outputs, targets)` gives one value per row, or one for each position of a row, [rows, ...], of which the row's is the mean.
    Those that share `inputs` share one forward pass, and so are measured during training at no cost.

    With `mask` or `ignore` the mean is over the positions that count, over all rows of the batch, as (sum, count).

    Example:
      >>> mine = accuracy.on(inputs="pixels", targets="digit")
      >>> mine.inputs
      'pixels'
      >>> accuracy.on(mask="mask", ignore=-100).ignore
      -100
    """

    function: Callable[[Any, Any], jax.Array]
    name: str
    inputs: str | None = None
    targets: str | None = None
    mask: str | None = None
    ignore: int | None = None

    def on(
        self, *, inputs: str | None = None, targets: str | None = None, mask: str | None = None, ignore: int | None = None
    ) -> "PerExample":
        """The same function, reading these keys of a dict batch.

        Args:
          mask: the key of an array like the targets, of bool or of 0 and 1: 0 or False where a position does not count.
          ignore: the target of positions that do not count, such as -100.

        Raises:
          OptionError: `ignore` is no whole number.
        """
        if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int | np.integer)):
            raise OptionError(f"{self.name}.on(ignore={short_repr(ignore)}): a target is a whole number.", fix="such as ignore=-100.")
        given = {"inputs": inputs, "targets": targets, "mask": mask, "ignore": ignore}
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch: a pair, or a dict with keys that are known or were named with `on`.

        Raises:
          DataError: when it is not clear which is which.
        """
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        if not isinstance(batch, dict):
            raise DataError(f"{self.name} wants a pair (inputs, targets) or a dict; the batch is a {type(batch).__name__}.")
        return batch[self._key(batch, self.inputs, INPUTS, "inputs")], batch[self._key(batch, self.targets, TARGETS, "targets")]

    def _key(self, batch: dict, named: str | None, known: tuple[str, ...], role: str) -> str:
        if named is not None:
            if named not in batch:
                raise DataError(f'{self.name}: the batch has no key "{named}".', fix=f"{did_you_mean(named, batch)}")
            return named
        found = [key for key in known if key in batch]
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} keys could be" if found else "no key is known as"
        raise DataError(
            f"{self.name}: {what} the {role}; the batch has {', '.join(map(str, batch))}.\n"
            f'    fix: name them: {self.name}.on(inputs="...", targets="...").'
        )

    def __call__(self, model: Any, batch: Any) -> Any:
        """One value per row, or (sum, count) over the positions that count; calls the model."""
        inputs, targets = self.split(batch)
        if self.mask is None and self.ignore is None:
            values = self.function(model(inputs), targets)
            return per_row(values) if getattr(values, "ndim", 0) > 1 else values
        counts = self.counts(batch)
        values = self.function(model(inputs), jnp.where(counts, targets, jnp.zeros_like(targets)))
        if values.shape != counts.shape:
            raise LossError(
                f"{self.name}: {describe(values)} for targets {describe(targets)}, so positions cannot be left out.\n"
                "    fix: a function with one value for each target."
            )
        values = jnp.where(self.no_mask(batch), jnp.nan, jnp.where(counts, values.astype(jnp.float32), 0.0))
        return values.sum(), counts.sum(dtype=jnp.float32)

    def counts(self, batch: Any) -> jax.Array:
        """Which targets count, as `mask` and `ignore` say."""
        targets = self.split(batch)[1]
        mask = self._mask(batch)
        counts = jnp.ones(targets.shape, bool) if mask is None else mask != 0
        if self.ignore is None:
            return counts
        if jnp.issubdtype(targets.dtype, jnp.integer) and not (limits := jnp.iinfo(targets.dtype)).min <= self.ignore <= limits.max:
            raise LossError(
                f"{self.name}.on(ignore={self.ignore}): the targets are {describe(targets)}, from {limits.min} to {limits.max}, "
                f"so none can be {self.ignore}.\n"
                "    fix: targets of a dtype that holds it, such as int32, made before they are marked; or the number that marks them."
            )
        return counts & (targets != self.ignore)

    def no_mask(self, batch: Any) -> jax.Array:
        """Where the mask is neither 0 nor 1."""
        mask = self._mask(batch)
        return jnp.zeros((), bool) if mask is None or mask.dtype == bool else (mask != 0) & (mask != 1)

    def _mask(self, batch: Any) -> jax.Array | None:
        """The mask, like the targets; None without one."""
        if self.mask is None:
            return None
        targets = self.split(batch)[1]
        if not isinstance(batch, dict) or self.mask not in batch:
            fix = did_you_mean(self.mask, batch) if isinstance(batch, dict) else "a batch that is a dict, with the mask under a name."
            raise DataError(f'{self.name}: the batch has no mask "{self.mask}".', fix=f"{fix}")
        mask = batch[self.mask]
        if mask.shape != targets.shape:
            raise LossError(f"{self.name}: the mask is {describe(mask)}, the targets are {describe(targets)}.", fix="one mask for each.")
        return mask


def per_row(values: jax.Array) -> jax.Array:
    """The mean over everything but dim 0, in float32."""
    values = values.astype(jnp.float32)
    return values.mean(axis=tuple(range(1, values.ndim))) if values.ndim > 1 else values


def same_shape(name: str, outputs: jax.Array, targets: jax.Array) -> None:
    """Refuse shapes that would be broadcast against each other."""
    if outputs.shape != targets.shape:
        raise LossError(
            f"{name}: the targets are {describe(targets)}, but the outputs ask for {describe(outputs)}.\n"
            "    fix: reshape one of them; they are not broadcast."
        )


def _accuracy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("accuracy", outputs[..., 0], targets)
    return (outputs.argmax(axis=-1) == targets).astype(jnp.float32)


def _mean_absolute_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    same_shape("mean_absolute_error", outputs, targets)
    return jnp.abs(outputs.astype(jnp.float32) - targets.astype(jnp.float32))


accuracy = PerExample(_accuracy, "spmd.metrics.accuracy")
"""Share of rows (and positions) whose largest logit is the integer target."""

mean_absolute_error = PerExample(_mean_absolute_error, "spmd.metrics.mean_absolute_error")
"""Mean of |output - target| over everything but dim 0."""


def as_sum(name: str, value: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A metric's value as (sum, count) over the rows whose weight is 1.

    Accepts a (sum, count) pair, one value per row, or a scalar, taken as the mean over these rows. Rows of weight 0 are
    left out with `where`, so that a NaN in padding cannot spread.
    """
    count = weights.sum()
    if isinstance(value, tuple | list) and len(value) == 2:
        return jnp.asarray(value[0], jnp.float32), jnp.asarray(value[1], jnp.float32)
    value = jnp.asarray(value)
    if value.shape == weights.shape:
        return jnp.where(weights > 0, value.astype(jnp.float32), 0).sum(), count
    if value.shape == ():
        return value.astype(jnp.float32) * count, count
    raise LossError(
        f'metric "{name}" is {describe(value)}; wanted a scalar, one value per example, float32[{weights.shape[0]}], '
        "or a (sum, count) pair."
    )


def pack(sums: Sums, names: tuple[str, ...]) -> jax.Array:
    """All pairs as one float32[2, names]: one array to reduce, one to fetch."""
    return jnp.stack([jnp.stack([sums[name][row] for name in names]) for row in (0, 1)])


def add(left: Sums, right: Sums) -> Sums:
    """Pairs of two disjoint sets of rows, joined."""
    return jax.tree.map(jnp.add, left, right)


def means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sums over counts on the host; NaN where nothing was counted, which is no sign of divergence and is left out of logs."""
    return np.divide(sums, counts, out=np.full(np.shape(sums), np.nan), where=np.asarray(counts) != 0)


def fetch() -> Callable[[jax.Array], np.ndarray]:
    """What brings sums to the host: two numbers per metric, which it has to know, and so may move."""
    if jax.default_backend() == "cpu":
        return np.asarray  # nothing moves

    def moved(packed: jax.Array) -> np.ndarray:
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(packed)

    return moved
