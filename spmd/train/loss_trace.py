"""The loss, traced on the shapes of a batch."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax

from spmd.base.tree import Tree, abstract
from spmd.base.xla import scope_of
from spmd.data.batches import with_rows
from spmd.errors import LayoutError, SpmdError
from spmd.jaxpr.programs import equations, has_convolution
from spmd.models.base import Call, Variables
from spmd.models.blocks import BlockTrace
from spmd.models.frozen import join
from spmd.nn.parallel_context import FUSED, ParallelConfig, parallel_scope
from spmd.nn.schedule import Schedule
from spmd.nn.written_loops import rewritten
from spmd.sync.layer_gather import block_trace
from spmd.train.activations import Seen
from spmd.train.losses import nan_causes
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LOSS, Objective, naming_in_trace
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """The loss of a placed model in training, traced on the shapes of a full batch.

    Attributes:
      objective: the loss, and the metrics that share its forward pass.
      value: the shape of the loss, or of (sum, count).
      extra: the shapes of its metrics, by name.
      jaxpr: of (variables, batch, key).
      called: the submodules that the model calls.
      blocks: the calls of blocks.
      schedules: the pipeline schedule of each stack, by path.
      choices: what modules say about their choices; the keys are lines.
      nan_causes: what in a batch makes the loss NaN, as the end of a sentence.
    """

    placed: PlacedModel
    sample: Tree
    objective: Objective
    value: Any
    extra: dict[str, Any]
    jaxpr: Any
    called: Seen
    blocks: BlockTrace
    schedules: dict[str, Schedule]
    choices: dict[str, None]
    nan_causes: str

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows of a full batch."""
        return jax.tree.leaves(self.sample)[0].shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the loss and its metrics."""
        return (LOSS, *self.extra)

    @property
    def rowwise(self) -> bool:
        """Return whether the loss gives one value per row."""
        return not isinstance(self.value, tuple) and self.value.shape == (self.rows,)

    @functools.cached_property
    def pads(self) -> bool:
        """True if padding can be left out of the loss, its metrics and the statistics."""
        by_row = all(leaf.shape == (self.rows,) for leaf in jax.tree.leaves(self.extra))
        return self.rowwise and by_row and not jax.tree.leaves(self.placed.abstract_state.stats)

    @functools.cached_property
    def optimized(self) -> Tree:
        """The shapes of the parameters as the optimizer sees them."""
        return jax.eval_shape(self.placed.optimizer_params, self.placed.abstract_state.params)

    @functools.cached_property
    def has_convolutions(self) -> bool:
        """True if the loss computes convolutions."""
        return has_convolution(equations(self.jaxpr.jaxpr))

    @property
    def unrolls(self) -> bool:
        """Return whether loops are unrolled, and the state is not donated."""
        # XLA:CPU runs a convolution inside a loop an order of magnitude slower, and begins a step
        # by copying the donated kernels of convolutions and of the layers behind them
        return self.has_convolutions and self.placed.platform == "cpu"

    @functools.cached_property
    def parallel(self) -> ParallelConfig:
        """The part of the layout that modules see in compiled programs."""
        return dataclasses.replace(
            self.placed.parallel, unroll=self.unrolls, schedules={}, notes={}
        )


def trace_loss(placed: PlacedModel, sample: Tree) -> TracedLoss:
    """Trace the loss of a placed model in training, on a full batch like `sample`."""
    placed.spec.learn(sample)
    state = placed.abstract_state
    called = Seen(placed.resolved)
    schedules: dict[str, Schedule] = {}
    choices: dict[str, None] = {}
    params = join(state.params, state.frozen)
    blocks = block_trace(placed.exchange, placed.model, params, placed.memory_left)
    objective = placed.objective.for_training()
    rows = jax.tree.leaves(sample)[0].shape[0]
    (value, extra), jaxpr = trace_objective(
        placed, objective, sample, rows, called, schedules, choices, blocks
    )
    # now: later traces, with other rows, write to `outputs` too
    causes = nan_causes(objective.loss, objective.outputs)
    return TracedLoss(
        placed,
        sample,
        objective,
        value,
        extra,
        jaxpr,
        called,
        blocks,
        schedules,
        choices,
        causes,
    )


def trace_objective(
    placed: PlacedModel,
    objective: Objective,
    sample: Tree,
    rows: int,
    seen: Seen,
    schedules: dict[str, Schedule] | None = None,
    notes: dict[str, None] | None = None,
    blocks: BlockTrace | None = None,
    parallel: ParallelConfig | None = None,
) -> tuple[tuple, Any]:
    """Return the shapes that an objective returns on `rows` rows like those of `sample`, and its
    jaxpr.

    Args:
      seen: records the submodules that the model calls.
      blocks: records calls of blocks.
      notes: takes what modules say about their choices.
      parallel: the part of the layout that modules see; None: that of `placed`.
      schedules: takes the pipeline schedule of each stack; None traces evaluation, and records
        none.
    """
    training = schedules is not None
    dtype = compute_dtype(placed.config.precision)
    row_splits = placed.config.accumulate * placed.exchange.worker_count // placed.resolved.workers
    if parallel is None:
        parallel = placed.parallel
    declared = dataclasses.replace(
        parallel,
        row_splits=row_splits,
        schedules={},
        notes={},
    )
    if schedules is not None:
        declared = dataclasses.replace(declared, schedules=schedules)
    if notes is not None:
        declared = dataclasses.replace(declared, notes=notes)

    def forward(variables: Variables, batch: Tree, key: Any) -> tuple:
        variables = cast_variables(variables, dtype)
        call = Call(training, None, dtype=dtype, output_hook=seen, products=placed.products)
        if training:
            remat = module_policies(placed.resolved.layout.remat)
            call = dataclasses.replace(call, key=key, remat=remat)
        if blocks is not None:
            call = dataclasses.replace(call, blocks=blocks)
            blocks.begin()
        return objective(placed.model.bind(variables, call), batch, key)

    def under(parallel: ParallelConfig) -> Callable[..., tuple]:
        def scoped_forward(variables: Variables, batch: Tree, key: Any) -> tuple:
            with parallel_scope(parallel):
                return rewritten(forward)(variables, batch, key)

        return scoped_forward

    variables = abstract(placed.abstract_state.variables)
    sample = with_rows(sample, rows)
    with naming_in_trace("the loss", sample):
        trace = jax.make_jaxpr(under(declared), return_shape=True)
        arguments = variables, sample, jax.eval_shape(lambda: jax.random.key(0))
        jaxpr, shapes = trace(*arguments)
    if training and FUSED in declared.used and _has_derivatives(jaxpr):
        _check_second_derivative(under, declared, arguments, placed.resolved.layout.source)
    return shapes, jaxpr


def _has_derivatives(jaxpr: Any) -> bool:
    """Return whether a loss differentiates a part of the model itself."""
    # JAX names the scope of an equation by the transformations that made it
    scopes = map(scope_of, equations(jaxpr.jaxpr))
    return any(re.search(r"\b(jvp|transpose)\(", scope) for scope in scopes)


def _check_second_derivative(
    under: Callable[[ParallelConfig], Callable[..., tuple]],
    parallel: ParallelConfig,
    arguments: tuple[Any, ...],
    source: str,
) -> None:
    """Check that a loss with derivatives in it has a gradient.

    Raises:
      LayoutError: it has none with fused attention, and one with attention as it is written.
    """

    def differentiate(parallel: ParallelConfig) -> Exception | None:
        def outputs(variables: Variables, *others: Any) -> Any:
            def of_params(params: Any) -> tuple:
                return under(parallel)(dataclasses.replace(variables, params=params), *others)

            return jax.vjp(of_params, variables.params)[0]

        try:
            jax.eval_shape(outputs, *arguments)
        # JAX raises one of these where an operation has no derivative, by the kind of kernel; the
        # model's own code turns them into a LossError. None is lost: below it is raised with its
        # fix, or it is not about attention, and the step's own trace raises it.
        except (SpmdError, NotImplementedError, TypeError, ValueError) as error:
            return error
        return None

    fused = differentiate(dataclasses.replace(parallel, notes={}))
    as_written = dataclasses.replace(parallel, attention="as_written", calls={}, notes={})
    if fused is not None and differentiate(as_written) is None:
        why = (
            f"{source}: the loss differentiates its attention, and fused attention has one "
            "derivative only, in reverse mode."
        )
        raise LayoutError(why, fix='[attention] implementation = "as_written".') from fused
