"""The loss and metrics of an evaluation: the columns that the program gives for a batch, and their
values on all rows of the data.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base.tree import Tree
from spmd.data.batches import with_rows
from spmd.errors import SpmdError
from spmd.jaxpr.programs import equations
from spmd.models.base import Variables
from spmd.nn.parallel_context import UNSHARDED, ParallelConfig
from spmd.train.activations import Seen
from spmd.train.batch_rows.evaluation import SHARD_MAP, FromBatches, Traces, traces_by_name
from spmd.train.batch_rows.loss import held_inputs
from spmd.train.loss_trace import trace_objective
from spmd.train.losses import SHIPPED
from spmd.train.metrics import Columns, PerExample, means, pack
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LOSS, Objective
from spmd.train.sum_metrics import FromSums

DEPENDS = (
    'the evaluation computes "%s" once, on all %d rows: %.6g. With each row twice it would be '
    "%.6g, so it depends on the number of rows, "
    "and is another number than on the batch of a step.\n"
    "    fix: means in place of sums; or spmd.losses.of_parts around the loss or metric, for the "
    "mean over batches."
)
TEXT = (
    "the evaluation takes the mean over batches of %d rows of %s. That may differ from the value "
    "on all rows: spmd does not know %s as a "
    "mean over rows, or a function of means over rows.\n"
    "    fix: return (sum, count), both summed over the rows given, or one value per row that "
    "depends on no other row. Where the mean over "
    "batches is what you want: spmd.losses.of_parts around the loss or metric."
)


@dataclasses.dataclass(frozen=True, eq=False)
class EvalOutputs:
    """The loss and metrics of an evaluation on batches like `sample`, of `rows` rows; traced when
    first needed.
    """

    placed: PlacedModel
    objective: Objective
    sample: Tree
    rows: int
    warned: set[str] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the loss and metrics."""
        return (LOSS, *self._shapes[1])

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The name that each column of `sums` belongs to: a function of sums has several."""
        metrics = self._shapes[1]
        columns = []
        for name in self.names:
            width = max(self._sum_count(name), 1)
            if isinstance(metrics.get(name), Columns):
                width = metrics[name].values.shape[-1]
            columns += [name] * width
        return tuple(columns)

    @functools.cached_property
    def pads(self) -> bool:
        """True if padding can be left out of the loss and all metrics."""
        leaves = jax.tree.leaves(self._shapes, is_leaf=lambda leaf: isinstance(leaf, Columns))
        return all(isinstance(leaf, Columns) or leaf.shape == (self.rows,) for leaf in leaves)

    @property
    def undefined(self) -> dict[str, str]:
        """Reasons why metrics from sums are NaN, by name."""
        metrics = self.objective.metrics.items()
        return {name: metric.undefined for name, metric in metrics if isinstance(metric, FromSums)}

    # of a batch -----------------------------------------------------------------------------------

    def sums(
        self,
        forward: Callable[[Variables, Tree, Any], tuple],
        variables: Variables,
        batch: Tree,
        weights: jax.Array,
    ) -> jax.Array:
        """Return sums over the rows of a batch, and counts, float32[2, columns]; called in a trace.

        Args:
          forward: returns the loss and metrics for variables, a batch and a key.
          weights: float32[rows], 0 for padding.
        """
        value, extra = forward(variables, batch, jax.random.key(0))
        sums = self.objective.sums(value, extra, weights)
        names = [name for name in self.names if self._sum_count(name)]
        if not names:
            return pack(sums, self.names)
        rows = weights.shape[0]
        # for dims of size 1 JAX may trace another program: it broadcasts them
        copies = 1
        if rows == 1:
            copies = 2
        batch = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), batch)
        key = jax.random.key(0)

        def trace(rows: int) -> tuple[Any, tuple]:
            shapes = with_rows(batch, rows)
            return jax.make_jaxpr(forward, return_shape=True)(variables, shapes, key)

        kinds = [held.kind for held in held_inputs(variables, batch)]
        arrays = jax.tree.leaves((variables, batch, key))
        traces = traces_by_name(trace, rows * copies, kinds, arrays)
        for name in names:
            batch_sums = traces[name].of_batch() / copies
            sums[name] = (batch_sums, jnp.full(batch_sums.shape, rows, jnp.float32))
        return pack(sums, self.names)

    # of all batches -------------------------------------------------------------------------------

    def finish(self, total: np.ndarray, batches: int) -> dict[str, float]:
        """Return the loss and metrics by name, from sums and counts over all rows, float[2,
        columns] on the host.

        A warning names, once, those of which several batches do not give the value on all rows.
        """
        columns = np.array(self.columns)
        values = {}
        for name in self.names:
            sums, counts = np.asarray(total, np.float64)[:, columns == name]
            metric = self.objective.metrics.get(name)
            if isinstance(metric, FromSums):
                values[name] = metric.value(name, sums)
            elif self._sum_count(name) and counts[0]:
                values[name] = self._function_of_sums(name, sums, counts[0])
            else:
                values[name] = float(means(sums, counts)[0])
        if batches > 1:
            self._warn_of_means()
        return values

    def drawings(self, total: np.ndarray) -> dict[str, Callable[[], Any]]:
        """Return functions that draw metrics from sums, by name, from the total that `finish` gets;
        none where sums are not finite.
        """
        columns = np.array(self.columns)
        drawings = {}
        for name, metric in self.objective.metrics.items():
            if isinstance(metric, FromSums) and metric.draw is not None:
                sums = np.asarray(total, np.float64)[0, columns == name]
                if np.isfinite(sums).all():
                    drawings[name] = functools.partial(metric.picture, name, sums)
        return drawings

    def _warn_of_means(self) -> None:
        """Warn once of each mean over batches that may differ from the value on all rows."""
        names = []
        for name in self.names:
            is_mean = not self._is_proved(name) and self._from_batches[name] == FromBatches()
            if is_mean and name not in self.warned:
                names.append(name)
        self.warned.update(names)
        if names:
            quoted_names = ", ".join(f'"{name}"' for name in names)
            pronoun = "them"
            if len(names) == 1:
                pronoun = "it"
            logging.getLogger("spmd").warning(TEXT, self.rows, quoted_names, pronoun)

    # the traces -----------------------------------------------------------------------------------

    @functools.cached_property
    def _shapes(self) -> tuple:
        return self._trace(self.rows)[0]

    def _trace(self, rows: int, parallel: ParallelConfig | None = None) -> tuple[tuple, Any]:
        return trace_objective(
            self.placed,
            self.objective,
            self.sample,
            rows,
            Seen(self.placed.resolved),
            parallel=parallel,
        )

    def _traces_under(self, parallel: ParallelConfig | None) -> dict[str, Traces]:
        variables = self.placed.abstract_state.variables
        kinds = [held.kind for held in held_inputs(variables, self.sample)]
        # for dims of size 1 JAX may trace another program: it broadcasts them
        rows = max(self.rows, 2)

        def trace(rows: int) -> tuple[Any, tuple]:
            shapes, jaxpr = self._trace(rows, parallel)
            return jaxpr, shapes

        return traces_by_name(trace, rows, kinds)

    @functools.cached_property
    def _traces(self) -> dict[str, Traces]:
        return self._traces_under(None)

    @functools.cached_property
    def _from_batches(self) -> dict[str, FromBatches]:
        """The functions by which values on all rows come from batches, by name."""
        try:
            by_name = {name: traces.from_batches() for name, traces in self._traces.items()}
        except SpmdError:  # the loss or a metric takes no other number of rows, and may join them
            return dict.fromkeys(self.names, FromBatches())
        equations_of_loss = equations(self._traces[LOSS].first.jaxpr)
        if all(equation.primitive.name != SHARD_MAP for equation in equations_of_loss):
            return by_name
        # a layout's own functions are not read, so the loss has to be the same function of rows
        # without them
        unsharded = self._traces_under(dataclasses.replace(UNSHARDED, used=set()))
        for name, traces in unsharded.items():
            if by_name[name] != traces.from_batches():
                by_name[name] = FromBatches()
        return by_name

    @functools.cached_property
    def _functions_of_sums(self) -> dict[str, Callable[..., jax.Array]]:
        functions = {}
        for name, traces in self._traces.items():
            if self._sum_count(name):
                functions[name] = jax.jit(traces.of_all)
        return functions

    def _function_of_sums(self, name: str, sums: np.ndarray, rows: float) -> float:
        """Return the value on all rows; warn once if it would be another on twice these rows."""

        def value(times: int) -> float:
            scaled_sums = (times * sums).astype(np.float32)
            scaled_rows = np.float32(times * rows)
            # a few sums move to a device, also where the user's guard refuses transfers
            with jax.transfer_guard("allow"):
                return float(self._functions_of_sums[name](scaled_sums, scaled_rows))

        on_all = value(1)
        if self._from_batches[name].scales or name in self.warned:
            return on_all
        on_twice = value(2)
        if not np.isclose(on_twice, on_all, rtol=1e-3, equal_nan=True):
            self.warned.add(name)
            logging.getLogger("spmd").warning(DEPENDS, name, rows, on_all, on_twice)
        return on_all

    def _sum_count(self, name: str) -> int:
        """Return the number of sums over rows of which a scalar is a function; 0 where it is the
        mean of its values on batches.
        """
        loss_shape, shapes = self._shapes
        output = loss_shape
        if name != LOSS:
            output = shapes[name]
        if self._is_proved(name) or getattr(output, "shape", None) != ():
            return 0
        return self._from_batches[name].sums

    def _is_proved(self, name: str) -> bool:
        """Return whether the mean of a metric is right without a proof from its trace."""
        metric = self.objective.metrics.get(name)
        if metric is None and name == LOSS:
            metric = self.objective.loss
        if isinstance(metric, FromSums):
            return True
        if isinstance(metric, PerExample) and metric.function in SHIPPED:
            return True
        return getattr(metric, "of_parts", False)
