"""The loss and the metrics, as (sum, count) pairs over rows."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from spmd.base.tree import describe, flatten, path_of
from spmd.errors import (
    LossError,
    SpmdError,
    closest,
    did_you_mean,
    first_line,
    short_repr,
    type_name,
)
from spmd.models.base import NO_VALUES, explain_jax_error, needs_values
from spmd.train.metrics import Columns, PerExample, Sums, as_sum
from spmd.train.sum_metrics import FromSums

LOSS = "loss"
RATES = (
    "steps_per_second",
    "samples_per_second",
    "tokens_per_second",
    "mfu",
    "hfu",
    "peak_memory",
    "data_wait",
    "goodput",
)  # of log records
# of `spmd.losses`
LOSSES = ("cross_entropy", "cross_entropy_from_features", "mean_squared_error", "next_token")
OUTPUTS = (
    "logits",
    "log_probs",
    "log_predictions",
    "outputs",
    "predictions",
    "preds",
    "scores",
    "y_hat",
    "y_pred",
    "y_true",
)
MOST_METRICS = 10_000
# names that a step's other numbers have
RESERVED = (LOSS, "wire_bytes", "compression_ratio", "residual_norm", "mean_error", *RATES)


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss with the metrics that go with it.

    `loss(model, batch)` or `loss(model, batch, rng)` returns one value per example or a scalar (the
    mean over its rows), alone or as `(value, {name: metric})`.
    """

    loss: Callable[..., Any]
    metrics: Mapping[str, Callable[..., Any]]
    # shapes that the model has given to the loss
    outputs: list[tuple[int, ...]] = dataclasses.field(default_factory=list, compare=False)

    def __post_init__(self):
        _check_function(self.loss)
        for name, metric in self.metrics.items():
            if not callable(metric) or name in RESERVED:
                why = (
                    f'metric "{name}" must be a function (model, batch), under another name than '
                    f"{', '.join(RESERVED)}."
                )
                fix = f"metrics={{{name!r}: spmd.metrics.accuracy}}, or another name for it."
                raise LossError(why, fix=fix)

    def for_training(self) -> "Objective":
        """Only the metrics that share the loss's forward pass: they cost nothing."""
        shared = {name: metric for name, metric in self.metrics.items() if self._shares(metric)}
        return dataclasses.replace(self, metrics=shared)

    def _shares(self, metric: Any) -> bool:
        """Return whether a metric calls the model on the inputs of the loss, and so shares its
        forward pass.
        """
        if not isinstance(metric, PerExample) or isinstance(metric, FromSums):
            return False
        return isinstance(self.loss, PerExample) and metric.inputs == self.loss.inputs

    def __call__(self, model: Any, batch: Any, rng: Any) -> tuple[Any, dict[str, Any]]:
        """Return what `call` does; an error of the user's functions becomes a `LossError` that
        names them.
        """

        def call_again(batch: Any) -> Any:
            return call_loss(self.loss, model, batch, rng)

        with naming_in_trace("the loss", batch, call_again):
            return self.call(model, batch, rng)

    def call(self, model: Any, batch: Any, rng: Any) -> tuple[Any, dict[str, Any]]:
        """The loss as the user's function gave it, and every metric by name; calls the model."""
        shared = _Memo(model)  # for functions that only call the model, so that they call it once

        def pick(function: Any) -> Any:
            if isinstance(function, PerExample):
                return shared
            return model

        value = call_loss(self.loss, pick(self.loss), batch, rng)
        shapes = [outputs.shape for _, outputs in shared.calls if hasattr(outputs, "shape")]
        self.outputs[:] = shapes[:1]
        value, extra = self._split_extra(value)
        _check_count(len(extra) + len(self.metrics))
        for name, metric in self.metrics.items():
            measure = functools.partial(metric, pick(metric))
            with naming_in_trace(f'metric "{name}"', batch, measure):
                extra = {**extra, name: measure(batch)}
        for name, measured in extra.items():
            self._check_measured(name, measured)
        return value, extra

    def _split_extra(self, value: Any) -> tuple[Any, dict[str, Any]]:
        """Return what the user's loss has returned as arrays of the loss, and its metrics."""
        extra: dict[str, Any] = {}
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
            value, extra = value
        is_pair = isinstance(value, tuple) and len(value) == 2
        numbers = (value,)
        if is_pair:
            numbers = value
        if not _are_numbers(numbers):
            raise LossError(
                f"the loss returned {type_name(value)}; wanted a scalar, the mean over the batch, "
                "or one value per example.",
                fix="return it alone, or as (value, {name: metric}).",
            )
        for name in extra:
            if name in RESERVED or name in self.metrics:
                raise LossError(
                    f'the loss also returns a metric "{name}", which is the name of another.',
                    fix="another name for it.",
                )
        if is_pair:
            return tuple(map(jnp.asarray, value)), extra
        return jnp.asarray(value), extra

    def _check_measured(self, name: str, measured: Any) -> None:
        """Refuse a metric that is no number, numbers of rows, or a pair."""
        if isinstance(measured, Columns) and not isinstance(self.metrics.get(name), FromSums):
            why = (
                f'metric "{name}" is called inside of a loss or of another metric, and is a '
                "function of sums over all rows."
            )
            fix = f'metrics={{"{name}": spmd.metrics.FromSums(...)}}, or spmd.metrics.auc as it is.'
            raise LossError(why, fix=fix)
        numbers = measured
        if not isinstance(measured, tuple | list):
            numbers = (getattr(measured, "values", measured),)
        if not _are_numbers(numbers):
            raise LossError(
                f'metric "{name}" returned {type_name(measured)}; wanted a scalar, one value '
                "per example, or a (sum, count) pair.",
                fix="an array or a number.",
            )

    def sums(self, value: jax.Array, extra: Mapping[str, Any], weights: jax.Array) -> Sums:
        """The loss and every metric as (sum, count) over the rows of weight 1."""
        measured = {LOSS: value, **extra}
        return {name: as_sum(name, metric, weights) for name, metric in measured.items()}


def _check_count(count: int) -> None:
    """Refuse more metrics than XLA compiles in a reasonable time."""
    if count > MOST_METRICS:
        raise LossError(
            f"{count:,} metrics; at most {MOST_METRICS:,} are compiled: 4,000 take XLA two minutes "
            "and 4.5 GiB, and the time grows faster than their number.",
            fix="fewer of them, such as one mean for many.",
        )


def _check_function(loss: Any) -> None:
    """Refuse what cannot be a loss of a model and a batch."""
    if not callable(loss):
        fix = "such as spmd.losses.mean_squared_error."
        if isinstance(loss, str) and (near := closest(loss, LOSSES)):
            fix = f"spmd.losses.{near}."
        why = f"loss={short_repr(loss)} is {type_name(loss)}, not a function (model, batch[, rng])."
        raise LossError(why, fix=fix)
    arguments = _outputs_and_targets(loss)
    if arguments:
        name = short_repr(loss)
        if _package(loss) == "optax":
            name = f"optax.{name}"
        why = f"loss={name} takes {arguments}; a loss takes the model and a batch."
        call = "model(batch[0]), batch[1]"
        fix = (
            f"lambda model, batch: {name}({call}).mean(), or with the names of the batch's arrays."
        )
        raise LossError(why, fix=fix)
    if isinstance(loss, FromSums):
        why = (
            f"loss={loss.name} is a function of sums over all rows of an evaluation, which has no "
            "gradient."
        )
        short_name = loss.name.rpartition(".")[2]
        raise LossError(why, fix=f'metrics={{"{short_name}": {loss.name}}}, and another loss.')


def _are_numbers(values: Any) -> bool:
    return all(hasattr(value, "dtype") or isinstance(value, int | float) for value in values)


@contextlib.contextmanager
def naming_in_trace(
    what: str, batch: Any, function: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Around a call of the user's loss or metric under a trace: what it raises comes out as a
    `LossError` that names it.

    `function` makes the same call with another batch: after a `KeyError`, with one that names the
    missing key.
    """
    try:
        yield
    except SpmdError:
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise _leaked(what, error) from error
    except Exception as error:
        if needs_values(error):
            why = f"{what} needs the values of arrays, and is compiled: {first_line(error)}"
            raise LossError(why, fix=NO_VALUES) from error
        leaves = flatten(batch).items()
        shapes = ", ".join(f"{path or 'array'}: {describe(leaf)}" for path, leaf in leaves)
        missing = None
        if isinstance(error, KeyError) and function is not None:
            missing = _missing_key(function, batch)
        if missing is not None:
            raise _names_key(what, missing, shapes) from error
        why, fix = explain_jax_error(error) or (
            f"{what} fails on a batch of {{{shapes}}}: {first_line(error)}",
            "check that the model takes these shapes, at the line that raised this.",
        )
        raise LossError(why, fix=fix) from error


def _names_key(what: str, missing: "_MissingKey", shapes: str) -> LossError:
    """Return the error for a key that a batch of these shapes does not have."""
    key = missing.args[0]
    fix = f"one of {', '.join(map(short_repr, missing.keys))}."
    if all(isinstance(name, str) for name in (key, *missing.keys)):
        fix = did_you_mean(key, missing.keys)
    inside = ""
    if missing.path:
        inside = f' in "{missing.path}"'
    why = f"{what} reads the key {short_repr(key)}{inside}, and a batch has {{{shapes}}}."
    return LossError(why, fix=fix)


class _MissingKey(KeyError):
    """A key that a dict of a batch does not have."""

    def __init__(self, key: Any, path: str, keys: list[Any]):
        super().__init__(key)
        self.path = path
        self.keys = keys


class _NamingDict(dict[Any, Any]):
    """A dict of a batch, at a path, that raises `_MissingKey`; a pytree as a dict is."""

    def __init__(self, items: Any, path: str):
        super().__init__(items)
        self.path = path

    def __missing__(self, key: Any) -> None:
        raise _MissingKey(key, self.path, [*self])


# JAX takes an object of a subclass of dict for a leaf unless the class is registered.
jax.tree_util.register_pytree_node(
    _NamingDict,
    lambda node: ([node[key] for key in sorted(node)], (node.path, *sorted(node))),
    lambda path_and_keys, leaves: _NamingDict(
        zip(path_and_keys[1:], leaves, strict=True), path_and_keys[0]
    ),
)


def _missing_key(function: Callable[[Any], Any], batch: Any) -> _MissingKey | None:
    """Return the key that a function which has raised a `KeyError` misses in a batch; None if the
    key is one of another dict.
    """
    try:
        function(_naming(batch))
    except _MissingKey as missing:
        return missing
    except Exception:  # whatever else it raises is reported by the call before
        pass
    return None


def _naming(tree: Any, at: tuple = ()) -> Any:
    """A batch, or the part of it at some keys, with `_NamingDict` for every dict; those that make
    up missing keys are as they were.
    """

    def is_dict(part: Any) -> bool:
        return isinstance(part, dict) and not hasattr(part, "__missing__")

    def name(below: tuple, part: Any) -> Any:
        if not is_dict(part):
            return part
        keys = (*at, *below)
        items = {key: _naming(part[key], (*keys, DictKey(key))) for key in part}
        return _NamingDict(items, path_of(keys))

    return jax.tree_util.tree_map_with_path(name, tree, is_leaf=is_dict)


class _NamingLeaks(contextlib.ContextDecorator):
    """Around a call of a compiled function, which may be traced there: JAX finds arrays of other
    traces when it is done.
    """

    def __enter__(self):
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, jax.errors.UnexpectedTracerError):
            raise _leaked("the model, the loss or a metric", error) from error


LEAKS = _NamingLeaks()


def _leaked(what: str, error: Exception) -> LossError:
    # JAX (0.10, 0.11) lists frames as "file:line:column (function)", the outermost first.
    frames = re.findall(r"(?m)^(\S+:\d+):\d+ \((\S+)\)$", str(error))
    made = ""
    for line, name in reversed(frames):
        if "/flax/" not in line:
            made = f", made at {line}, in {name}"
            break
    return LossError(
        f"{what} uses an array of a trace that is over{made}.\n"
        "    A step is traced and then runs compiled, so what a model, a loss or a metric keeps in "
        "an attribute, a list or a global is a\n"
        "    tracer, which has no value.",
        fix="return it as a metric, (loss, {name: array}); or keep it in an nnx.Variable, such as "
        "nnx.BatchStat.",
    )


class _Memo:
    """The model, called once per distinct input: a loss and its metrics share the forward pass."""

    def __init__(self, model: Any):
        self._model = model
        self.calls: list[tuple[Any, Any]] = []  # inputs and outputs

    def __call__(self, inputs: Any) -> Any:
        for earlier, outputs in self.calls:
            # By identity: under a trace, `==` of arrays is an operation and has no value yet.
            if earlier is inputs:
                return outputs
        outputs = self._model(inputs)
        self.calls.append((inputs, outputs))
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _package(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__module__", None)).partition(".")[0]


def _outputs_and_targets(loss: Callable[..., Any]) -> str:
    """The first two arguments of a function of outputs and targets, as optax and others have them;
    "" of any other.
    """
    try:
        names = list(inspect.signature(loss).parameters)[:2]
    except (TypeError, ValueError):
        return ""
    if len(names) == 2 and (names[0] in OUTPUTS or _package(loss) == "optax"):
        return " and ".join(names)
    return ""


def call_loss(loss: Callable[..., Any], model: Any, batch: Any, rng: Any) -> Any:
    """The loss, with the key under the name `rng` or `key`, or as the third argument, if it takes
    one.
    """
    # Some functions in C have no signature.
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return loss(model, batch)
    for name in ("rng", "key"):
        if name in parameters:
            return loss(model, batch, **{name: rng})
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = 0
    for parameter in parameters.values():
        if parameter.kind in positional and parameter.default is parameter.empty:
            required += 1
    if required >= 3:
        return loss(model, batch, rng)
    return loss(model, batch)


def check_loss(value: Any, extra: Mapping[str, Any], rows: int) -> None:
    """Check that the loss gives one value per example, one for all, or a pair; only shapes are
    looked at.

    Raises:
      LossError: neither, or not a floating-point number.
    """
    if isinstance(value, tuple):
        if [x.shape for x in value] != [(), ()]:
            raise LossError(
                f"the loss returned a pair of {' and '.join(map(describe, value))}; wanted (sum, "
                "count), two scalars.",
                fix="(values.sum(), counts.sum()).",
            )
        return
    shown = describe(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise LossError(
            f"the loss returned {shown}, which is not a floating-point number and has no gradient.",
            fix="return the loss itself, not a count or an index.",
        )
    if value.shape not in ((), (rows,)):
        raise LossError(
            f"the loss returned {shown}; wanted a scalar, the mean over the batch, or one value "
            f"per example, float32[{rows}].",
            fix="take the mean over the other dims, such as  loss.mean(axis=tuple(range(1, "
            "loss.ndim))).",
        )
    weights = jax.ShapeDtypeStruct((rows,), jnp.float32)
    for name, metric in extra.items():
        jax.eval_shape(functools.partial(as_sum, name), metric, weights)


def check_names(names: Collection[str], others: Collection[str]) -> None:
    """A metric, given or of the loss, must not have the name of one that the step measures itself.

    Raises:
      LossError: it has.
    """
    for name in names:
        if name in others:
            raise LossError(
                f'a metric is named "{name}", as is one that the step measures of the optimizer.',
                fix="another name for it.",
            )


def check_worker(value: Any, rows: int, *, rowwise: bool) -> None:
    """A loss that gives one value per example on the whole batch must do so on a worker's rows,
    however few they are.
    """
    if rowwise and value.shape != (rows,):
        raise LossError(
            f"the loss returned float32[rows] for the whole batch, but {describe(value)} for the "
            f"{rows} rows of one worker.",
            fix="no squeeze() without an axis in the loss, and no batch size written into it.",
        )
