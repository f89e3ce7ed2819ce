"""Checks that a model, a loss, an optimizer and a batch fit a layout: lists of functions, in the
order in which their errors are raised.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, SingleDeviceSharding

from spmd.base.tree import Tree
from spmd.data.batches import check_batch
from spmd.errors import LayoutError, ModelError, OptionError
from spmd.layout.compiler import xla_options
from spmd.train.compiler_options import check_compiler_options
from spmd.train.differentiable import check_gradient, check_products
from spmd.train.idle_axes import check_idle_axes
from spmd.train.loss_trace import TracedLoss
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import check_loss, check_names
from spmd.train.optimizer_metrics import measured_names
from spmd.train.packing_check import check_update
from spmd.train.remat import check_remat
from spmd.train.skipped_updates import check_loss_scale, check_skips
from spmd.train.weight_average import check_average

# Before the loss is traced ------------------------------------------------------------------------


def check_compiler_table(placed: PlacedModel, sample: Tree) -> None:
    """Check that XLA knows the options of `[compiler]`, where there are devices to ask."""
    del sample
    if isinstance(placed.mesh, AbstractMesh):
        return
    layout = placed.resolved.layout
    options = xla_options(
        layout.compiler, placed.platform, devices=placed.mesh.size, layerwise=True
    )
    device = SingleDeviceSharding(placed.mesh.local_devices[0])
    check_compiler_options(options, layout.source, device)


def check_batch_size(placed: PlacedModel, sample: Tree) -> None:
    """Check that the batch divides into the workers' rows and their microbatches."""
    check_batch(sample, placed.resolved.layout, placed.resolved.mesh, placed.config.accumulate)


def check_scale_of_loss(placed: PlacedModel, sample: Tree) -> None:
    """Check that an optimizer which scales the loss is used with float16 alone."""
    del sample
    check_loss_scale(placed.abstract_state.opt, placed.config.precision)


BATCH_CHECKS: tuple[Callable[[PlacedModel, Tree], None], ...] = (
    check_compiler_table,
    check_batch_size,
    check_scale_of_loss,
)

# Of the traced loss -------------------------------------------------------------------------------


def check_optimizer_update(loss: TracedLoss) -> None:
    """Check that a step can call the optimizer."""
    check_update(loss.placed.given_optimizer, loss.optimized)


def check_averaged_weights(loss: TracedLoss) -> None:
    """Check that the layout keeps an average of the weights that the optimizer asks for."""
    placed = loss.placed
    check_average(placed.abstract_state.opt, loss.optimized, placed.resolved, placed.exchange)


def check_skipped_updates(loss: TracedLoss) -> None:
    """Check that the reduction can skip updates, if the optimizer does."""
    check_skips(loss.placed.abstract_state.opt, loss.placed.exchange)


def check_tables_used(loss: TracedLoss) -> None:
    """Check that modules use the tables of the layout that are for them."""
    placed = loss.placed
    placed.parallel.check_used(placed.resolved.layout.source, loss.choices)


def check_pipeline(loss: TracedLoss) -> None:
    """Check a `[pipeline]` against the stacks that the traced loss has called.

    Raises:
      LayoutError: the loss calls no stack, or none of the kind that an option is for.
      ModelError: the model has batch statistics, and the schedule is 1F1B.
    """
    placed = loss.placed
    parallel = placed.parallel
    source = placed.resolved.layout.source
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


def check_rounding(loss: TracedLoss) -> None:
    """Check that this backend rounds to bfloat16, if anything is sent in it."""
    loss.placed.exchange.check_rounding()


def check_workers(loss: TracedLoss) -> None:
    """Check that the model can run on each worker's rows alone, where gradients are averaged."""
    exchange = loss.placed.exchange
    if exchange.reduction.manual and not (exchange.asynchronous or exchange.local):
        loss.placed.given.check_workers()


def check_remat_modules(loss: TracedLoss) -> None:
    """Check that the model has the modules of `[remat]`."""
    loss.placed.model.check_remat(loss.placed.resolved.layout.remat.patterns)


def check_remat_names(loss: TracedLoss) -> None:
    """Check that the loss has the values that `[remat]` keeps."""
    check_remat(loss.placed, loss.jaxpr.jaxpr)


def check_adapters(loss: TracedLoss) -> None:
    """Check that the model calls the layers that have adapters."""
    loss.placed.model.check_adapters()


def check_precision(loss: TracedLoss) -> None:
    """Check that the model calls the layers of `[precision]`."""
    loss.placed.products.check(loss.called.modules, loss.placed.resolved.layout.source)


def check_activations(loss: TracedLoss) -> None:
    """Check the outputs of modules against `[[activations]]`."""
    placed = loss.placed
    loss.called.check(loss.rows, placed.exchange.worker_count * placed.config.accumulate)


LOSS_CHECKS: tuple[Callable[[TracedLoss], None], ...] = (
    check_optimizer_update,
    check_averaged_weights,
    check_skipped_updates,
    check_tables_used,
    check_pipeline,
    check_rounding,
    check_workers,
    check_remat_modules,
    check_remat_names,
    check_adapters,
    check_precision,
    check_activations,
)


# Of what the loss returns, after the choice of what is gathered by layer --------------------------


def step_metrics(placed: PlacedModel) -> tuple[str, ...]:
    """Return the names of the metrics that a step measures itself."""
    names = (*placed.exchange.metric_names,)
    if placed.events:
        names = (*names, *placed.events.metric_names)
    return (*names, *measured_names(placed.abstract_state.opt))


def check_metric_names(loss: TracedLoss) -> None:
    """Check that no metric of the loss has the name of one that a step measures itself."""
    check_names(loss.names, step_metrics(loss.placed))


def check_outputs(loss: TracedLoss) -> None:
    """Check the shapes and dtypes that the loss returns."""
    check_loss(loss.value, loss.extra, loss.rows)


OUTPUT_CHECKS: tuple[Callable[[TracedLoss], None], ...] = (check_metric_names, check_outputs)

# Of the step of a program -------------------------------------------------------------------------


def check_half_products(loss: TracedLoss, trace_step: Callable[[], Any]) -> None:
    """Check that the platform has the products of the loss."""
    del trace_step
    check_products(loss.jaxpr.jaxpr, loss.placed.platform)


def check_trained(loss: TracedLoss, trace_step: Callable[[], Any]) -> None:
    """Check that the loss has a gradient."""
    del trace_step
    check_gradient(loss.jaxpr.jaxpr, len(jax.tree.leaves(loss.placed.abstract_state.params)))


def check_mesh_used(loss: TracedLoss, trace_step: Callable[[], Any]) -> None:
    """Check that no devices do the same work."""
    check_idle_axes(loss.placed, loss.sample, trace_step)


STEP_CHECKS: tuple[Callable[[TracedLoss, Callable[[], Any]], None], ...] = (
    check_half_products,
    check_trained,
    check_mesh_used,
)

# On request ---------------------------------------------------------------------------------------


def check_collectives_known(loss: TracedLoss) -> None:
    """Check that the collectives of the step can be listed: that XLA does not place all of them.

    Raises:
      OptionError: it does, or there are none.
    """
    placed = loss.placed
    if placed.exchange.reduction.manual or loss.schedules:
        return
    why = 'under reduction "compiler" XLA places the collectives'
    if placed.resolved.workers == 1:
        why = "a single worker exchanges nothing"
    fix = 'several workers and  [gradients] reduction = "all_reduce"  or "reduce_scatter".'
    raise OptionError(f"trainer.wire: {why}.", fix=fix)
