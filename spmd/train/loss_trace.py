"""The loss, traced on the shapes of a batch, and a check that the layout's pipeline fits it."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax

from spmd.base.tree import Tree, abstract
from spmd.base.xla import scope_of
from spmd.errors import LayoutError, ModelError, SpmdError
from spmd.jaxpr.programs import equations
from spmd.models.base import Call, Variables
from spmd.models.blocks import BlockTrace
from spmd.nn.parallel_context import FUSED, ParallelConfig, parallel_scope
from spmd.nn.schedule import Schedule
from spmd.nn.written_attention import fuse_attention
from spmd.train.activations import Seen
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import Objective, naming_in_trace
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies


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
    training, dtype = schedules is not None, compute_dtype(placed.config.precision)
    row_splits = placed.config.accumulate * placed.exchange.worker_count // placed.resolved.workers
    declared = dataclasses.replace(
        placed.parallel if parallel is None else parallel,
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
                return fuse_attention(forward)(variables, batch, key)

        return scoped_forward

    variables = abstract(placed.abstract_state.variables)
    sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), sample)
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


def check_pipeline(placed: PlacedModel) -> None:
    """Check a `[pipeline]` against the stacks that the traced loss has called.

    Raises:
      LayoutError: the loss calls no stack, or none of the kind that an option is for.
      ModelError: the model has batch statistics, and the schedule is 1F1B.
    """
    parallel, source = placed.parallel, placed.resolved.layout.source
    pipeline = parallel.pipeline
    if pipeline.axis is not None and "pipeline" not in parallel.used:
        raise LayoutError(
            f'{source}: [pipeline] splits stacks of layers over "{pipeline.axis}", and the loss '
            "calls none.",
            fix="spmd.nn.LayerStack or spmd.nn.RNNStack in the model, or a layout without "
            "[pipeline].",
        )

    def check_stack(key: str, part: str, kind: str, fix: str) -> None:
        if part not in parallel.used:
            raise LayoutError(
                f"{source}: [pipeline] {key} is for spmd.nn.{kind}, and the loss calls none.",
                fix=fix,
            )

    if pipeline.microbatches:
        check_stack("microbatches", "microbatches", "LayerStack", "leave it out.")
    if pipeline.groups > 1:
        fix = 'leave it out; schedule = "gpipe".'
        check_stack("groups", "microbatches", "LayerStack", fix)
    if pipeline.time_chunk:
        check_stack("time_chunk", "time_chunk", "RNNStack", "leave it out.")
    if parallel.manual_backward and jax.tree.leaves(placed.abstract_state.stats):
        raise ModelError(
            f'{source}: [pipeline] schedule = "1f1b" runs the loss microbatch by microbatch, in an '
            "order that keeps no batch statistics.",
            fix='LayerNorm or GroupNorm in place of BatchNorm, or  schedule = "gpipe".',
        )
