"""Metrics: functions of (model, batch) giving one value per example, and the (sum, count) pairs
they become.

A mean over workers, microbatches or batches is exact only if sums and counts are kept separate, so
every metric is a pair until a person reads it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.tree import describe
from spmd.errors import DataError, LossError, OptionError, check_integer, did_you_mean, short_repr

INPUTS = ("x", "inputs", "input", "image", "images", "tokens", "features", "input_ids")
TARGETS = ("y", "targets", "target", "labels", "label")
# Programs dispatched whose metrics are not yet read. Unbounded, XLA:CPU deadlocks in its rendezvous
# on more than two devices (jax 0.10.2).
IN_FLIGHT = 2

# name -> (sum over rows, number of rows), both float32 scalars, or [k] of `Columns`
Sums = dict[str, tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """Several numbers for each row, float32[rows, k], whose sums over all rows make one metric."""

    values: Any


@dataclasses.dataclass(frozen=True)
class PerExample:
    """A loss or metric that calls the model once on the inputs and compares with the targets, row
    by row.

    `function(outputs, targets)` gives one value per row, or one for each position of a row, [rows,
    ...], of which the row's is the mean. Or it gives two such arrays, of which the metric is the
    ratio of the sums over all rows: what was counted, and of how many. Those that share `inputs`
    share one forward pass, and so are measured during training at no cost.

    With `mask` or `ignore` the mean is over the positions that count, over all rows of the batch,
    as (sum, count).

    Args:
      function: `function(outputs, targets)`, see above.
      name: for messages.
      inputs: the key of the model's inputs in a dict batch; None: it is found.
      targets: the key of the targets; None: it is found.
      mask: the key of a mask like the targets: 0 or False where a position does not count.
      ignore: the target of positions that do not count, such as -100.

    Example:
      >>> mine = accuracy.on(inputs="pixels", targets="digit")
      >>> mine.inputs
      'pixels'
      >>> accuracy.on(mask="mask", ignore=-100).ignore
      -100
    """

    function: Callable[[Any, Any], Any]
    name: str
    inputs: str | None = None
    targets: str | None = None
    mask: str | None = None
    ignore: int | None = None

    def on(
        self,
        *,
        inputs: str | None = None,
        targets: str | None = None,
        mask: str | None = None,
        ignore: int | None = None,
    ) -> "PerExample":
        """Return the same function, for these keys of a dict batch.

        Args:
          mask: the key of an array like the targets, of bool or of 0 and 1: 0 or False where a
            position does not count.
          ignore: the target of positions that do not count, such as -100.

        Raises:
          OptionError: `ignore` is no whole number.
        """
        is_integer = isinstance(ignore, int | np.integer) and not isinstance(ignore, bool)
        if ignore is not None and not is_integer:
            raise OptionError(
                f"{self.name}.on(ignore={short_repr(ignore)}): a target is a whole number.",
                fix="such as ignore=-100.",
            )
        fields = {"inputs": inputs, "targets": targets, "mask": mask, "ignore": ignore}
        changed = {name: value for name, value in fields.items() if value is not None}
        return dataclasses.replace(self, **changed)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch: a pair, or a dict with keys that are known or were
        named with `on`.

        Raises:
          DataError: when it is not clear which is which.
        """
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        if not isinstance(batch, dict):
            raise DataError(
                f"{self.name} wants a pair (inputs, targets) or a dict; the batch is a "
                f"{type(batch).__name__}.",
                fix="(inputs, targets).",
            )
        inputs = batch[self._key(batch, self.inputs, INPUTS, "inputs")]
        return inputs, batch[self._key(batch, self.targets, TARGETS, "targets")]

    def _key(self, batch: dict, named: str | None, usual: tuple[str, ...], role: str) -> str:
        """Return the key of a batch that was named for a role, or the only usual one."""
        if named is not None:
            if named not in batch:
                raise DataError(
                    f'{self.name}: the batch has no key "{named}".',
                    fix=f"{did_you_mean(named, batch)}",
                )
            return named
        keys = [key for key in usual if key in batch]
        if len(keys) == 1:
            return keys[0]
        count = "no key is known as"
        if keys:
            count = f"{len(keys)} keys could be"
        raise DataError(
            f"{self.name}: {count} the {role}; the batch has {', '.join(map(str, batch))}.",
            fix=f'name them: {self.name}.on(inputs="...", targets="...").',
        )

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return one value per row, or (sum, count) over the positions that count; call the
        model.
        """
        values, counts = self._values(model, batch)
        if counts is None:
            if isinstance(values, tuple):
                return tuple(per_row(jnp.asarray(value), jnp.sum) for value in values)
            if getattr(values, "ndim", 0) <= 1:
                return values
            return per_row(values)
        targets = self.split(batch)[1]
        if not isinstance(values, tuple):
            values = values, jnp.ones(counts.shape)
        for value in values:
            if value.shape != counts.shape:
                raise LossError(
                    f"{self.name}: {describe(value)} for targets {describe(targets)}, so positions "
                    "cannot be left out.",
                    fix="a function with one value for each target.",
                )
        numbers, denominators = values
        invalid = self.no_mask(batch)
        numbers = jnp.where(counts, numbers.astype(jnp.float32), 0.0)
        total = jnp.where(invalid, jnp.nan, numbers).sum()
        return total, jnp.where(counts, denominators.astype(jnp.float32), 0.0).sum()

    def _values(self, model: Any, batch: Any) -> tuple[Any, jax.Array | None]:
        """Return the result of the function, and which targets count, None if all; call the
        model.
        """
        inputs, targets = self.split(batch)
        if self.mask is None and self.ignore is None:
            return self.function(model(inputs), targets), None
        counts = self.counts(batch)
        outputs = model(inputs)
        # a target that does not count may be no class, and its NaN would spread in the gradient
        targets = jnp.where(counts, targets, jnp.zeros_like(targets))
        return self.function(outputs, targets), counts

    def counts(self, batch: Any) -> jax.Array:
        """Return which targets count, as `mask` and `ignore` say."""
        targets = self.split(batch)[1]
        mask = self._mask(batch)
        if mask is None:
            counts = jnp.ones(targets.shape, bool)
        else:
            counts = mask != 0
        if self.ignore is None:
            return counts
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            return counts & (targets != self.ignore)
        limits = jnp.iinfo(targets.dtype)
        # JAX would wrap the number around to one that the dtype holds
        if not limits.min <= self.ignore <= limits.max:
            raise LossError(
                f"{self.name}.on(ignore={self.ignore}): the targets are {describe(targets)}, from "
                f"{limits.min} to {limits.max}, "
                f"so none can be {self.ignore}.",
                fix="targets of a dtype that holds it, such as int32, made before they are marked; "
                "or the number that marks them.",
            )
        return counts & (targets != self.ignore)

    def no_mask(self, batch: Any) -> jax.Array:
        """Return which entries of the mask are neither 0 nor 1."""
        mask = self._mask(batch)
        if mask is None or mask.dtype == bool:
            return jnp.zeros((), bool)
        return (mask != 0) & (mask != 1)

    def _mask(self, batch: Any) -> jax.Array | None:
        """Return the mask, like the targets; None without one."""
        if self.mask is None:
            return None
        targets = self.split(batch)[1]
        if not isinstance(batch, dict) or self.mask not in batch:
            fix = "a batch that is a dict, with the mask under a name."
            if isinstance(batch, dict):
                fix = did_you_mean(self.mask, batch)
            raise DataError(f'{self.name}: the batch has no mask "{self.mask}".', fix=fix)
        mask = batch[self.mask]
        if mask.shape != targets.shape:
            raise LossError(
                f"{self.name}: the mask is {describe(mask)}, the targets are {describe(targets)}.",
                fix="one mask for each.",
            )
        return mask


def per_row(values: jax.Array, over: Callable[..., jax.Array] = jnp.mean) -> jax.Array:
    """Return the mean, or another function, over everything but dim 0, in float32."""
    values = values.astype(jnp.float32)
    if values.ndim > 1:
        return over(values, axis=tuple(range(1, values.ndim)))
    return values


def same_shape(name: str, outputs: jax.Array, targets: jax.Array) -> None:
    """Refuse shapes that would be broadcast against each other."""
    if outputs.shape != targets.shape:
        raise LossError(
            f"{name}: the targets are {describe(targets)}, but the outputs ask for "
            f"{describe(outputs)}.",
            fix="reshape one of them; they are not broadcast.",
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


def _class_ratio(name: str, positive: int, counted: Callable[..., tuple]) -> PerExample:
    """Return a metric of a class: the ratio of the sums of two arrays, which `counted` gives for
    the positions that the model takes for the class, and those that are of it, bool arrays.
    """
    check_integer(positive, f"{name}: positive", 0)

    def function(outputs: jax.Array, targets: jax.Array) -> tuple:
        return counted(*_hits(name, outputs, targets, positive))

    return PerExample(function, f"spmd.metrics.{name}")


def _hits(
    name: str, outputs: jax.Array, targets: jax.Array, positive: int
) -> tuple[jax.Array, jax.Array]:
    """Return which outputs, and which targets, are the positive class: the largest logit of a row,
    or one logit above 0.
    """
    if outputs.shape == targets.shape:
        predicted, classes = jnp.where(outputs > 0, 1, 0), 2
    else:
        same_shape(name, outputs[..., 0], targets)
        predicted, classes = outputs.argmax(axis=-1), outputs.shape[-1]
        if classes == 1:
            raise LossError(
                f"{name}: the outputs are {describe(outputs)}, one class.",
                fix="outputs[..., 0], one logit for each target.",
            )
    if positive >= classes:
        raise LossError(
            f"{name}(positive={positive}): the outputs are {describe(outputs)}.",
            fix=f"a class from 0 to {classes - 1}.",
        )
    return predicted == positive, targets == positive


def top_k(k: int) -> PerExample:
    """A metric: the share of rows (and positions) whose integer target is among the k largest
    logits.

    Of equal logits the target's counts as the largest; one that is NaN counts as larger than all
    others.

    Args:
      k: from 1 to the number of classes.

    Returns:
      A metric, for `metrics=` of `fit`; `.on(...)` names keys of the batch.

    Raises:
      OptionError: k is no such number.

    Example:
      >>> import jax.numpy as jnp
      >>> logits = jnp.array([[0.1, 0.3, 0.2], [0.9, 0.1, 0.0]])
      >>> top_k(2).function(logits, jnp.array([2, 2])).tolist()
      [1.0, 0.0]
    """
    check_integer(k, "top_k: k", 1)

    def function(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        same_shape("top_k", outputs[..., 0], targets)
        if k > outputs.shape[-1]:
            raise LossError(
                f"top_k({k}): the outputs are {describe(outputs)}.",
                fix=f"at most {outputs.shape[-1]}.",
            )
        # compared, not looked up, as in `spmd/train/losses.py`
        is_target = jnp.arange(outputs.shape[-1]) == targets[..., None]
        target_logits = jnp.where(is_target, outputs, -jnp.inf).max(axis=-1, keepdims=True)
        is_class = (targets >= 0) & (targets < outputs.shape[-1])
        # not `outputs > target_logits`, by which a NaN would be larger than none
        larger = (~(outputs <= target_logits)).sum(axis=-1)
        return (is_class & (larger < k)).astype(jnp.float32)

    return PerExample(function, f"spmd.metrics.top_k({k})")


def precision(positive: int = 1) -> PerExample:
    """A metric: of the rows (and positions) that the model takes for a class, the share that is of
    it.

    Counts are added over all rows before they are divided, so it is exact over batches and workers.
    Where the model takes no row for the class it is NaN: training leaves it out of the logs, and an
    evaluation warns of it.

    Args:
      positive: the class. Outputs [..., classes] are logits of classes, of which the largest is
        taken, and targets [...] are their numbers. Outputs that are shaped like the targets are one
        logit each: class 1 is a logit above 0, and targets are 0 or 1.

    Returns:
      A metric, for `metrics=` of `fit`; `.on(...)` names keys of the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> right, of = precision().function(jnp.array([2.0, 1.0, -1.0]), jnp.array([1, 0, 1]))
      >>> float(right.sum() / of.sum())
      0.5
    """
    return _class_ratio("precision", positive, lambda hits, true: (hits & true, hits))


def recall(positive: int = 1) -> PerExample:
    """A metric: of the rows (and positions) that are of a class, the share that the model takes for
    it; arguments as of `precision`.

    Args:
      positive: the class.

    Returns:
      A metric, for `metrics=` of `fit`; `.on(...)` names keys of the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> right, of = recall().function(jnp.array([2.0, 1.0, -1.0, 3.0]), jnp.array([1, 0, 1, 1]))
      >>> round(float(right.sum() / of.sum()), 4)
      0.6667
    """
    return _class_ratio("recall", positive, lambda hits, true: (hits & true, true))


def f1(positive: int = 1) -> PerExample:
    """A metric: the harmonic mean of precision and recall of a class; arguments as of `precision`.

    Args:
      positive: the class.

    Returns:
      A metric, for `metrics=` of `fit`; `.on(...)` names keys of the batch.

    Example:
      >>> import jax.numpy as jnp
      >>> right, of = f1().function(jnp.array([2.0, 1.0, -1.0, 3.0]), jnp.array([1, 0, 1, 1]))
      >>> round(float(right.sum() / of.sum()), 4)  # 2 right, 1 wrong, 1 missed
      0.6667
    """
    return _class_ratio(
        "f1", positive, lambda hits, true: (2 * (hits & true), hits.astype(jnp.int32) + true)
    )


def as_sum(name: str, value: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a metric's value as (sum, count) over the rows whose weight is 1.

    Accepts a (sum, count) pair, a pair of both for each row, one value per row, `Columns`, or a
    scalar, taken as the mean over these rows. Rows of weight 0 are left out with `where`, so that a
    NaN in padding cannot spread.
    """
    count = weights.sum()
    if isinstance(value, Columns):
        sums = jnp.where(weights[:, None] > 0, value.values, 0).sum(axis=0)
        return sums, jnp.broadcast_to(count, sums.shape)
    if isinstance(value, tuple | list) and len(value) == 2:
        pair = [jnp.asarray(number, jnp.float32) for number in value]
        if all(number.shape == weights.shape for number in pair):
            pair = [jnp.where(weights > 0, number, 0).sum() for number in pair]
        if all(number.shape == () for number in pair):
            return pair[0], pair[1]
        raise LossError(
            f'metric "{name}" is a pair of {" and ".join(map(describe, pair))}.',
            fix="two scalars, or two values per example.",
        )
    value = jnp.asarray(value)
    if value.shape == weights.shape:
        return jnp.where(weights > 0, value.astype(jnp.float32), 0).sum(), count
    if value.shape == ():
        return value.astype(jnp.float32) * count, count
    raise LossError(
        f'metric "{name}" is {describe(value)}; wanted a scalar, one value per example, '
        f"float32[{weights.shape[0]}], "
        "or a (sum, count) pair.",
        fix="the mean over the other dims, such as  values.mean(axis=tuple(range(1, "
        "values.ndim))).",
    )


def pack(sums: Sums, names: tuple[str, ...]) -> jax.Array:
    """Return all pairs as one float32[2, names]: one array to reduce, one to fetch. There is one
    entry for each column of `Columns`.
    """
    rows = []
    for row in (0, 1):
        numbers = [jnp.atleast_1d(sums[name][row]) for name in names]
        rows.append(jnp.concatenate(numbers))
    return jnp.stack(rows)


def means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return sums over counts on the host; NaN where nothing was counted, which is no sign of
    divergence and is left out of logs.
    """
    nans = np.full(np.shape(sums), np.nan)
    return np.divide(sums, counts, out=nans, where=np.asarray(counts) != 0)


def fetch() -> Callable[[jax.Array], np.ndarray]:
    """Return the function that brings sums to the host."""
    if jax.default_backend() == "cpu":
        return np.asarray  # nothing moves

    def copy_to_host(packed: jax.Array) -> np.ndarray:
        # two numbers per metric, also where the user's guard refuses transfers
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(packed)

    return copy_to_host


class Metrics(Mapping[str, float]):
    """The metrics of one step, by name. Reading one waits for the step; until then the device
    continues.
    """

    def __init__(self, names: tuple[str, ...], packed: jax.Array, constants: Mapping[str, float]):
        self._names, self._packed, self._constants = names, packed, constants

    @functools.cached_property
    def _values(self) -> dict[str, float]:
        values = means(*jax.device_get(self._packed)).tolist()
        return dict(zip(self._names, values, strict=True)) | dict(self._constants)

    def wait(self) -> None:
        """Wait until the step is done; nothing is fetched."""
        self._packed.block_until_ready()

    def __getitem__(self, name: str) -> float:
        if name in self._constants:
            return self._constants[name]
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._constants))

    def __len__(self) -> int:
        return len(self._names) + len(self._constants)

    def __repr__(self) -> str:
        return repr(self._values)
