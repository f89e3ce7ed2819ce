"""Whether metrics are means over rows, as the mean over batches and workers takes them to be; those that are not are warned of."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd.errors import SpmdError
from spmd.jaxpr import equations
from spmd.nn.parallel_context import MIXTURE
from spmd.train.batch_rows.kinds import KEY, Fixed, PerRow
from spmd.train.batch_rows.walk import Held, is_mean, read_loss
from spmd.train.losses import SHIPPED
from spmd.train.metrics import PerExample, means
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import Objective
from spmd.train.state import State
from spmd.train.sum_metrics import FromSums
from spmd.tree import Tree

COARSE = (jnp.bfloat16, jnp.float16)
RELATIVE, RELATIVE_COARSE = 1e-4, 1e-2  # below which nothing is a difference; where something is computed in fewer bits than float32 has


@dataclasses.dataclass
class MetricRows:
    """The metrics of an evaluation; each is looked at once, on the first batch that is given for it.

    Attributes:
      names: of the columns that `evaluate` gives, in their order; the loss is the first.
      trace: of a number of rows, shapes of (value, metrics) and the jaxpr of an evaluation.
    """

    placed: PlacedModel
    objective: Objective
    names: Callable[[], tuple[str, ...]]
    rows: int
    trace: Callable[..., tuple[tuple, Any]]
    evaluate: Callable[[State, Tree, Any], jax.Array]
    seen: set[str] = dataclasses.field(default_factory=set)

    def once(self, state: State, batch: Tree, weights: Any, names: Iterable[str], where: str, rows: Any = None) -> None:
        """Warn of those of `names` whose value on this batch is not the mean of those on its halves.

        Args:
          where: over what the mean is taken, in words.
          rows: as of `Comparison.once`.
        """
        fresh = {name for name in names if name not in self.seen and self.may_join(name)}
        self.seen |= fresh
        if fresh and weights.shape[-1] > 1:
            with contextlib.suppress(SpmdError):  # a model that cannot be evaluated may still be trained
                self.compare(fresh & self.unproved & {*self.names()}, state, batch, weights, where, rows)

    def compare(self, fresh: set[str], state: State, batch: Tree, weights: Any, where: str, rows: Any) -> None:
        """The same for these names; where there are none, nothing is run."""
        if not fresh:
            return
        size = weights.shape[-1]
        with jax.transfer_guard("allow"):
            if rows is not None:
                batch, weights = jax.jit(lambda data, rows: jax.tree.map(lambda x: x[rows[0]], data))(batch, rows), weights[0]
            half, take_rows = size // 2, functools.partial(self.take_rows, batch, weights)
            full, *parts = [jax.device_get(self.evaluate(state, *take_rows(*at))) for at in ((0, size), (0, half), (half, size))]
        for name, one, mean in zip(self.names(), means(*full), means(*np.sum(parts, axis=0)), strict=True):
            if name in fresh and np.isfinite(one) and not abs(one - mean) <= self.relative * max(abs(one), abs(mean)):
                logging.getLogger("spmd").warning(TEXT.format(name, where, size, one, mean, name))

    def may_join(self, name: str) -> bool:
        """Whether nothing says what the metric is."""
        metric = self.objective.metrics.get(name, self.objective.loss)
        shipped = (
            name in self.objective.metrics
            and isinstance(metric, PerExample)
            and (metric.function in SHIPPED or isinstance(metric, FromSums))
        )
        return not shipped and not getattr(metric, "of_parts", False)

    def take_rows(self, batch: Tree, weights: Any, first: int, end: int) -> tuple[Tree, jax.Array]:
        """Some rows, on all workers where they divide them."""
        data = self.placed.resolved.data_axes if (end - first) % self.placed.resolved.workers == 0 else ()
        at = NamedSharding(self.placed.mesh, PartitionSpec(data))
        take = jax.jit(lambda tree: jax.tree.map(lambda x: x[first:end], tree), out_shardings=at)
        return jax.block_until_ready(take((batch, weights)))  # so that no more programs are in flight than the loop allows

    @functools.cached_property
    def _traced(self) -> tuple[tuple, Any]:
        return self.trace(rows=self.rows)

    @functools.cached_property
    def relative(self) -> float:
        """Of a value, what rounding may be."""
        made = (var for found in equations(self._traced[1].jaxpr) for var in found.outvars)
        return RELATIVE_COARSE if any(getattr(var.aval, "dtype", None) in COARSE for var in made) else RELATIVE

    @functools.cached_property
    def unproved(self) -> set[str]:
        """Metrics that their trace does not prove to be means over rows; none where parts of a batch draw or are routed otherwise."""
        (value, extra), first = self._traced
        draws = any(found.primitive.name == "random_bits" and found.outvars[0].aval.shape for found in equations(first.jaxpr))
        if draws or MIXTURE in self.placed.parallel.used:
            return set()
        others = self.rows // 2 if self.rows // 2 % self.placed.resolved.workers == 0 and self.rows > 3 else 2 * self.rows
        state = self.placed.abstract_state
        given = [*map(lambda _: Fixed(), jax.tree.leaves((state.params, state.frozen, state.stats)))]
        given += map(lambda _: KEY, jax.tree.leaves(state.rngs))
        given += [PerRow(0)] * (len(first.in_avals) - len(given) - 1) + [KEY]
        try:
            found = iter(read_loss(first, self.trace(rows=others)[1], [Held(kind) for kind in given], self.rows, others)[0])
        except Exception:  # another number of rows does not suit it
            return set(extra)
        [next(found) for _ in jax.tree.leaves(value)]
        outputs = {name: [(next(found).kind, leaf.shape) for leaf in jax.tree.leaves(extra[name])] for name in sorted(extra)}
        return {name for name, leaves in outputs.items() if not is_mean([value for value, _ in leaves], leaves[0][1])}


TEXT = (
    'the metric "{}" is no mean over rows, but the mean over {} is taken: of {} rows it is {:.6g}, and the mean over two halves of them '
    "is {:.6g}.\n"
    "    fix: return (sum, count), both summed over the rows given, or one value per row that depends on no other row. Where a mean over "
    'parts is what you want: metrics={{"{}": spmd.losses.of_parts(metric)}}, or of_parts around a loss that returns it.'
)
