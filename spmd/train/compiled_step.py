"""The compiled functions of a placed model: they train, evaluate and predict on batches of one
shape.

Nothing is compiled before the first step.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from spmd.base.specs import Spec, pspec
from spmd.base.tree import Tree, abstract, describe, flatten, map_paths
from spmd.base.xla import compiled_count
from spmd.data.batches import batch_signature, check_batch, check_leaves
from spmd.errors import DataError, LossError, SpmdError, first_line, option
from spmd.jaxpr.programs import equations, has_convolution
from spmd.layout.compiler import xla_options
from spmd.layout.gradients import Gradients
from spmd.models.base import Call, Variables
from spmd.models.frozen import join
from spmd.nn.gathered_blocks import GatheredBlocks
from spmd.nn.moe import microbatch_notes
from spmd.nn.parallel_context import parallel_scope
from spmd.nn.schedule import Schedule
from spmd.nn.written_attention import fuse_attention
from spmd.program_cache.records import watch
from spmd.sync.layer_gather import LayerGather, block_trace, choose_layerwise
from spmd.sync.parameter_sync import gather_params
from spmd.train.accumulate import choose_accumulation
from spmd.train.activations import Activations, Seen
from spmd.train.asynchronous import Asynchronous
from spmd.train.batch_rows.loss import read_objective
from spmd.train.batch_rows.reading import (
    BY_COMPILER,
    FullBatchError,
    Parts,
    Reading,
    check_pipelined,
    check_reading,
)
from spmd.train.compiler_options import check_compiler_options, without_buffering
from spmd.train.differentiable import check_gradient, check_products
from spmd.train.eval_outputs import EvalOutputs
from spmd.train.export_step import export_step
from spmd.train.histograms import count_tree
from spmd.train.host_memory import memory_notes
from spmd.train.idle_axes import check_idle_axes
from spmd.train.local_sgd import LocalSGD
from spmd.train.loss_trace import check_pipeline, trace_objective
from spmd.train.losses import check_masks, check_targets, nan_causes
from spmd.train.matrix_owners import owner_notes
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS, LOSS, check_loss, check_names
from spmd.train.optimizer_metrics import measured_names
from spmd.train.own_derivatives import nonlinear_backward
from spmd.train.packing_check import check_update
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.program_facts import facts_of_program, text_facts
from spmd.train.remat import check_remat
from spmd.train.skipped_updates import check_loss_scale, check_skips, scale_notes
from spmd.train.state import State
from spmd.train.static_metrics import StaticMetrics
from spmd.train.step import (
    Step,
    UpdateRule,
    already_in_shard_map,
    scan_steps,
    step_and_gradients,
    train_step,
)
from spmd.train.synchronous import Synchronous
from spmd.train.unread_weights import unread_weight_notes
from spmd.train.weight_average import check_average
from spmd.train.worker_gradients import WorkerGradients
from spmd.wire.comm_log import CommLog, read_collectives
from spmd.wire.server.events import Events

PROGRAMS = {  # what users call them, and what JAX does
    "step": ("the step", "jit_train_step"),
    "watched_step": ("the step that counts its gradients", "jit_watched_step"),
    "scan_steps": ("the steps of a call", "jit_scan_steps"),
    "evaluate": ("the evaluation", "jit__evaluate"),
    "predict": ("the prediction", "jit__predict"),
}


class Program:
    """The compiled functions of a `PlacedModel` for batches of one shape."""

    def __init__(self, placed: PlacedModel, sample: Tree, *, trains: bool = True):
        placed.learn(sample)
        self.placed, self.sample = placed, sample
        self.rows = jax.tree.leaves(sample)[0].shape[0]
        self._train_objective, self._eval_objective = (
            placed.objective.for_training(),
            placed.objective,
        )
        self._dtype = compute_dtype(placed.config.precision)
        stats = bool(jax.tree.leaves(placed.abstract_state.stats))
        seen = Seen(placed.resolved)
        self.schedules: dict[str, Schedule] = {}  # of a step on a full batch, by stack
        chosen: dict[str, None] = {}  # by modules
        params, left = placed.abstract_state.params, placed.memory_left
        blocks = block_trace(
            placed.exchange, placed.model, join(params, placed.abstract_state.frozen), left
        )
        trace = functools.partial(
            trace_objective, placed, self._train_objective, sample, self.rows, seen
        )
        (value, extra), self._jaxpr = trace(self.schedules, chosen, blocks)
        # what in a batch makes the loss NaN, as the end of a sentence
        self.nan_causes = nan_causes(self._train_objective.loss, self._train_objective.outputs)
        optimized = jax.eval_shape(placed.optimizer_params, params)
        check_update(placed.given_optimizer, optimized)
        check_average(placed.abstract_state.opt, optimized, placed.resolved, placed.exchange)
        check_skips(placed.abstract_state.opt, placed.exchange)
        placed.parallel.check_used(placed.resolved.layout.source, chosen)
        check_pipeline(placed)
        placed.exchange.check_rounding()
        if placed.exchange.reduction.manual and not (
            placed.exchange.asynchronous or placed.exchange.local
        ):
            placed.given.check_workers()
        placed.model.check_remat(placed.resolved.layout.remat.patterns)
        check_remat(placed, self._jaxpr.jaxpr)
        placed.model.check_adapters()
        placed.products.check(seen.modules, placed.resolved.layout.source)
        seen.check(self.rows, placed.exchange.worker_count * placed.config.accumulate)
        # of the jaxpr, the first ones
        inputs = [*flatten(params), *flatten(placed.abstract_state.frozen)]
        self.sync, self.notes = choose_layerwise(
            placed.exchange, placed.model, self._jaxpr.jaxpr, inputs, blocks, left
        )
        self.sync, accumulation = choose_accumulation(placed, self.sync)
        self.notes += [
            *accumulation,
            *chosen,
            *placed.products.notes(),
            *memory_notes(placed.resolved.layout, placed.platform),
        ]
        self.notes += scale_notes(placed.abstract_state.opt)
        self.notes += owner_notes(
            placed.given_optimizer,
            optimized,
            placed.abstract_state.opt,
            placed.optimized,
            placed.mesh,
        )
        self.notes += microbatch_notes(placed.parallel, self.rows, placed.config.accumulate)
        trace_all = functools.partial(
            trace_objective, placed, self._eval_objective, sample, self.rows, Seen(placed.resolved)
        )
        self.notes += unread_weight_notes(
            placed, sample, self._jaxpr.jaxpr, lambda: trace_all()[1].jaxpr
        )
        self._loss_names = (LOSS, *extra)
        self.own_backward = nonlinear_backward(self._jaxpr.jaxpr) if trains else ""
        self.reading, self._checked = self._read_loss() if trains else Reading(mean=True), False
        self.notes += [] if self.reading.mean else [self.reading.note()]
        if self.reading.averages and placed.config.accumulate > 1:
            rows = (
                f"the {self.rows // placed.config.accumulate} rows of a microbatch, not over the "
                f"{self.rows} of the batch"
            )
            self.notes.append(
                f"note: a module such as BatchNorm averages over {rows}, as "
                f"{option('accumulate', placed.config.accumulate)} asks for."
            )
        of_step = (
            *placed.exchange.metric_names,
            *(placed.events.metric_names if placed.events else ()),
        )
        of_step += measured_names(placed.abstract_state.opt)
        check_names(self._loss_names, of_step)
        self.names = (*self._loss_names, *of_step)
        self._rowwise = check_loss(value, extra, self.rows)
        self.pad_training = (
            self._rowwise
            and all(x.shape == (self.rows,) for x in jax.tree.leaves(extra))
            and not stats
        )
        # XLA:CPU runs a convolution inside a loop an order of magnitude slower, and begins a step
        # by copying the donated kernels of convolutions and of the layers behind them: there loops
        # are unrolled, and the state is not donated
        self.has_convolutions = has_convolution(equations(self._jaxpr.jaxpr))
        self._unroll = self.has_convolutions and placed.platform == "cpu"
        self.donate_argnums = () if self._unroll else (0,)  # of a step's arguments
        self._parallel = dataclasses.replace(
            placed.parallel, unroll=self._unroll, schedules={}, notes={}
        )
        layerwise = bool(self.sync.layerwise)
        gather = LayerGather(self.sync, manual=False) if layerwise else None
        self._outside = dataclasses.replace(self._parallel, gather_layer=gather)
        options = placed.resolved.layout.compiler
        # by XLA's names
        self.compiler_options = xla_options(
            options, placed.platform, devices=placed.mesh.size, layerwise=layerwise
        )
        # gets a line on each large program that is loaded instead of compiled
        self.say: Callable[[str], None] = lambda line: None
        self._compiled: dict[tuple, Callable] = {}
        self._ready: set[tuple] = set()  # those that were compiled or loaded
        self._traced_inputs: set[Any] = set()  # signatures of inputs that the model was traced on

    @property
    def accumulated(self) -> str | None:
        """Which gradients of weights that are gathered layer by layer microbatches add up, "local"
        or "reduced"; None if there are none.
        """
        if (
            self.placed.config.accumulate == 1
            or not self.sync.layerwise & self.sync.resolved.placements.keys()
        ):
            return None
        return "local" if self.sync.sums_layers else "reduced"

    @property
    def by_layer(self) -> int:
        """How many parameters are gathered layer by layer, of stacks and of lists of blocks."""
        return len(self.sync.layerwise)

    @functools.cached_property
    def evaluation(self) -> EvalOutputs:
        """The loss and metrics of an evaluation."""
        return EvalOutputs(self.placed, self._eval_objective, self.sample, self.rows)

    def make_step(self, rows: int, split: bool) -> Step:
        """The step for a batch of `rows` rows; see `WorkerGradients.split`."""
        placed, exchange = self.placed, self.sync
        rule: type[UpdateRule] = (
            Asynchronous if exchange.asynchronous else LocalSGD if exchange.local else Synchronous
        )
        worker_rows = rows // exchange.worker_count if split else rows
        worker = WorkerGradients(
            placed.model,
            self._train_objective,
            self._loss_names,
            exchange,
            gathers=not rule.per_worker,
            microbatches=max(
                count
                for count in range(1, placed.config.accumulate + 1)
                if worker_rows % count == 0
            ),
            workers_per_position=exchange.worker_count // placed.resolved.workers if split else 1,
            unroll=self._unroll,
            dtype=self._dtype,
            products=placed.products,
            rowwise=self._rowwise,
            split=split,
            parallel=self._parallel,
            reading=None if self.reading.mean else self.reading,
            scaled=bool(self.own_backward),
        )
        return Step(worker, rule(exchange, placed.optimizer))

    def map_trials(self, run: Callable, *trees: Tree, vectorize: bool) -> Tree:
        """`run` on each entry along dim 0 of trees.

        `vectorize`: as larger operations, which sum in another order. False, or where there are
        convolutions, which would become grouped ones: one after the other.
        """
        if vectorize and not self.has_convolutions:
            return jax.vmap(run)(*trees)
        if not self._unroll:
            return jax.lax.map(lambda inputs: run(*inputs), trees)
        count = jax.tree.leaves(trees)[0].shape[0]
        outputs = [run(*jax.tree.map(lambda x, at=at: x[at], trees)) for at in range(count)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    def scan_steps_in_shard_map(
        self, optimizer: Any, state: State, data: Tree, rows: jax.Array, weights: jax.Array
    ) -> tuple[State, jax.Array]:
        """`rows.shape[0]` updates with another optimizer, inside a `jax.shard_map` over all axes:
        `data` is replicated, `rows` and `weights` are this worker's, [steps, rows].
        """
        step = self.make_step(rows.shape[1] * self.placed.resolved.workers, True)
        step = Step(step.worker, Synchronous(self.sync, optimizer), already_in_shard_map)
        return scan_steps(
            functools.partial(train_step, step), state, data, rows, weights, {}, unroll=self._unroll
        )

    def evaluate_in_trace(self, state: State, batch: Tree, weights: jax.Array) -> jax.Array:
        """`evaluate`, called inside another trace."""
        return self._evaluate(state.variables, batch, weights)

    @property
    def parts(self) -> Parts:
        """The parts of a step on a full batch."""
        exchange, positions = self.placed.exchange, self.placed.resolved.workers
        workers = positions if exchange.reduction.manual else 1
        return Parts(
            workers,
            exchange.worker_count // positions,
            self.placed.config.accumulate,
            self.placed.parallel.manual_backward,
        )

    def _read_loss(self) -> Reading:
        """What the loss says of rows; nothing where it sees all of a batch, or is meant for
        parts.
        """
        parts, pipelined = self.parts, self.placed.parallel.stages > 1
        of_parts = not parts.several or getattr(self._train_objective.loss, "of_parts", False)
        if of_parts and not pipelined:
            return Reading(mean=True)
        blocks = [path for group in self.sync.blocks for path in group]
        reading = read_objective(self.placed, self._train_objective, self.sample, parts, blocks)
        if not of_parts:
            reading = dataclasses.replace(
                reading, mean=reading.mean and not self.own_backward, backward=self.own_backward
            )
        source = self.placed.resolved.layout.source
        if pipelined:
            check_pipelined(reading, source)
        if of_parts:
            return Reading(mean=True)
        alone = self.placed.exchange.asynchronous or bool(self.placed.exchange.local)
        by_layer = bool(self.sync.layerwise) or pipelined
        check_reading(reading, parts, source, self.rows, alone=alone, by_layer=by_layer)
        return reading

    def _check_first_batch(self, state: State, batch: Tree, rows: jax.Array | None = None) -> None:
        """Check the targets and masks of the first batch: of `batch`, or of those `rows`,
        int32[steps, rows], of it.

        Raises:
          DataError: targets that are no class, or masks that are not 0 and 1.
        """
        if self._checked:
            return
        self._checked, objective = True, self._train_objective
        with self.placed.compiling(), jax.transfer_guard("allow"):
            if rows is not None:
                batch = jax.jit(lambda data, rows: jax.tree.map(lambda x: x[rows[0]], data))(
                    batch, rows
                )
            check_masks((objective.loss, *objective.metrics.values()), batch)
            for shape in objective.outputs:
                check_targets(objective.loss, shape[-1], batch)

    @LEAKS
    def step(
        self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool = True
    ) -> tuple[State, jax.Array]:
        """One update; `state` is donated (except with convolutions on a CPU). Metrics are
        float32[2, names], sums over counts.
        """
        self._check_batch(state, batch, weights, events, split=split)
        return self._run(("step", weights.shape[0], split), state, batch, weights, events)

    @LEAKS
    def watched_step(
        self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool = True
    ) -> tuple[State, jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        """As `step`, with counts of the gradients (`count_tree`), replicated over all devices:
        another program than that of `step`.
        """
        self._check_batch(state, batch, weights, events, split=split)
        return self._run(("watched_step", weights.shape[0], split), state, batch, weights, events)

    def count_parameters(self, state: State) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Counts of the parameters that are trained (`count_tree`), replicated over all devices."""
        key = ("parameters",)
        with contextlib.nullcontext() if key in self._ready else self.placed.compiling():
            counts = self._function(key)(state.params)
        self._ready.add(key)
        return counts

    def _check_batch(
        self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool
    ) -> None:
        if split:
            self._check_first_batch(state, batch)
        if "present" in events and not split:
            raise DataError(
                f"a batch of {weights.shape[0]} rows, which {self.placed.exchange.worker_count} "
                "workers do not divide, "
                "while not all count.",
                fix="a loss with one value per example and no batch statistics, which can leave "
                "padding out; or drop the batch.",
            )

    @LEAKS
    def scan_steps(
        self, state: State, data: Tree, rows: jax.Array, weights: jax.Array, events: Tree
    ) -> tuple[State, jax.Array]:
        """`rows.shape[0]` updates in one call on resident data; metrics are float32[steps, 2,
        names].
        """
        self._check_first_batch(state, data, rows)
        return self._run(("scan_steps", weights.shape[1], True), state, data, rows, weights, events)

    @LEAKS
    def evaluate(self, state: State, batch: Tree, weights: jax.Array) -> jax.Array:
        """Sums and counts of loss and metrics, float32[2, columns], in evaluation mode."""
        return self._run(("evaluate",), state.variables, batch, weights)

    @LEAKS
    def predict(self, state: State, inputs: Tree) -> Tree:
        """The model's outputs in evaluation mode, replicated over all devices."""
        return self._run(("predict",), state.variables, inputs)

    def check_inputs(self, inputs: Tree) -> None:
        """Trace the model on inputs of these shapes.

        Raises:
          DataError: it fails on them.
        """
        if (kind := batch_signature(inputs)) in self._traced_inputs:
            return
        variables = abstract(self.placed.abstract_state).variables

        def trace(tree: Tree) -> None:
            with LEAKS:
                jax.eval_shape(self._predict, variables, tree)

        try:
            trace(inputs)
        except SpmdError:
            raise
        except Exception as error:
            given, trained = (
                ", ".join(
                    f"{path} {describe(leaf)}".strip() for path, leaf in flatten(tree).items()
                )
                for tree in (inputs, self.placed.sample)
            )
            fix = (
                "what the loss calls the model with; the batches that it was trained on hold "
                f"{trained}"
            )
            for name, entry in inputs.items() if isinstance(inputs, Mapping) else ():
                with contextlib.suppress(Exception):  # whatever the model raises on another entry
                    trace(entry)
                    fix = f"predict(batch[{name!r}]), which the model takes"
                    break
            why = (
                "predict calls the model with its argument as it is, and the model fails on "
                f"{given}: {first_line(error)}"
            )
            raise DataError(why, fix=f"{fix}.") from error
        self._traced_inputs.add(kind)

    def _run(self, key: tuple, *arguments: Any) -> Any:
        if key in self._ready:
            return self._function(key)(*arguments)
        return self._watched(key, arguments, lambda: self._function(key)(*arguments))

    def _watched(self, key: tuple, arguments: tuple, compile_it: Callable[[], Any]) -> Any:
        """`compile_it()`, which compiles a program for these arguments, or loads it from the
        compilation cache.
        """
        short = key[0] in ("step", "watched_step", "scan_steps") and key[1:] != (self.rows, True)
        name, module = PROGRAMS[key[0]]
        name = f"{name} on a short batch" if short else name
        batch = (
            {"resident": arguments[1], "rows": arguments[2]}
            if key[0] == "scan_steps"
            else arguments[1]
        )
        with (
            self.placed.compiling(),
            watch(
                name,
                module,
                lambda: facts_of_program(self.placed, batch, self.compiler_options),
                lambda: text_facts(self._function(key).lower(*arguments).as_text(), name),  # type: ignore[attr-defined]
                records=jax.process_index() == 0,
            ) as watched,
        ):
            result = self._retried(compile_it)
        self._ready.add(key)
        if watched.line:
            self.say(watched.line)
        return result

    def _retried(self, compile_it: Callable[[], Any]) -> Any:
        """`compile_it()`; once more with other options, if XLA fails as `without_buffering` says.
        No argument is donated before.
        """
        try:
            return compile_it()
        except RuntimeError as error:
            layout = self.placed.resolved.layout
            self.compiler_options = without_buffering(
                error, self.compiler_options, layout.compiler, layout.source
            )
            self._compiled.clear()
            self._ready.clear()
        return compile_it()

    def _function(self, key: tuple) -> Callable:
        if key not in self._compiled:
            self._compiled[key] = self._build(key)
        return self._compiled[key]

    def _jit(self, function: Callable, **options: Any) -> Callable:
        return jax.jit(function, compiler_options=self.compiler_options, **options)

    def _build(self, key: tuple) -> Callable:
        placed, replicated = self.placed, NamedSharding(self.placed.mesh, PartitionSpec())
        if key[0] == "step":
            step = functools.partial(train_step, self.make_step(key[1], key[2]))
            return self._jit(
                step,
                donate_argnums=self.donate_argnums,
                out_shardings=(placed.shardings, replicated),
            )
        if key[0] == "watched_step":
            step = self.make_step(key[1], key[2])

            def watched_step(*arguments: Any) -> tuple:
                state, metrics, gradients = step_and_gradients(step, *arguments)
                return state, metrics, self._counts(gradients)

            return self._jit(
                watched_step,
                donate_argnums=self.donate_argnums,
                out_shardings=(placed.shardings, replicated, replicated),
            )
        if key[0] == "parameters":
            return self._jit(self._counts, out_shardings=replicated)
        if key[0] == "scan_steps":
            step = functools.partial(train_step, self.make_step(key[1], key[2]))
            steps = functools.partial(
                scan_steps,
                lambda s, b, w, e: self._constrain_state(step(s, self._constrain_batch(b), w, e)),
                unroll=self._unroll,
            )
            return self._jit(
                steps,
                donate_argnums=self.donate_argnums,
                out_shardings=(placed.shardings, replicated),
            )
        return self._jit(
            self._evaluate if key[0] == "evaluate" else self._predict, out_shardings=replicated
        )

    def _counts(self, params: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Of parameters, or their gradients, as the state keeps them; by the model's paths."""
        packing = self.placed.packing
        return count_tree(
            params if packing is None else packing.unpack(params), self.placed.given.stacks()
        )

    def _constrain_state(self, result: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        """Inside a loop the state keeps its sharding from step to step."""
        return jax.lax.with_sharding_constraint(result[0], self.placed.shardings), result[1]

    def _constrain_batch(self, batch: Tree) -> Tree:
        return map_paths(
            lambda path, x: jax.lax.with_sharding_constraint(
                x, self._sharding(self.placed.resolved.batch_spec(path))
            ),
            batch,
        )

    def _sharding(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.placed.mesh, pspec(spec))

    def _bind_model(self, variables: Variables) -> Any:
        params, frozen = (
            gather_params(self.sync, tree, outside=True)
            for tree in (variables.params, variables.frozen)
        )
        variables = cast_variables(
            dataclasses.replace(variables, params=params, frozen=frozen), self._dtype
        )
        activations = Activations(self.placed.resolved, self.placed.mesh)
        blocks = None
        if self.sync.blocks:
            gather = LayerGather(self.sync, manual=False, stacked=False)
            blocks = GatheredBlocks(gather, chain(*self.sync.blocks), {})
        call = Call(
            training=False,
            dtype=self._dtype,
            output_hook=activations,
            products=self.placed.products,
            blocks=blocks,
        )
        return self.placed.model.bind(variables, call)

    def _eval_forward(self, variables: Variables, batch: Tree, key: Any) -> tuple:
        def forward(variables: Variables) -> tuple:
            return self._eval_objective(self._bind_model(variables), batch, key)

        with parallel_scope(self._outside):
            return fuse_attention(forward)(variables)

    def _evaluate(self, variables: Variables, batch: Tree, weights: jax.Array) -> jax.Array:
        return self.evaluation.sums(self._eval_forward, variables, batch, weights)

    def _predict(self, variables: Variables, inputs: Tree) -> Tree:
        def forward(variables: Variables) -> Tree:
            return self._bind_model(variables)(inputs)

        with parallel_scope(self._outside):
            return fuse_attention(forward)(variables)

    @property
    def arguments(self) -> tuple[State, Tree, jax.ShapeDtypeStruct, Tree]:
        """The arguments of a step on a full batch: state, batch, weights and events, as shapes with
        shardings.
        """
        resolved = self.placed.resolved

        def with_sharding(path: str, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=self._sharding(resolved.batch_spec(path))
            )

        weights = jax.ShapeDtypeStruct(
            (self.rows,), jnp.float32, sharding=self._sharding((resolved.data_axes,))
        )
        return (
            self.placed.abstract_state,
            map_paths(with_sharding, self.sample),
            weights,
            self.abstract_events,
        )

    @functools.cached_property
    def wire(self) -> CommLog:
        """Every collective of a step on a full batch; reads the traced step (`step` then compiles
        that trace).
        """
        return read_collectives(
            self.step_jaxpr,
            self.placed.mesh.shape,
            self.placed.resolved.layout.gradients.start_step,
        )

    @property
    def step_jaxpr(self) -> Any:
        """The jaxpr of a step on a full batch."""
        return self._traced.jaxpr.jaxpr

    @property
    def _traced(self) -> Any:
        return self._function(("step", self.rows, True)).trace(*self.arguments)  # type: ignore[attr-defined]

    def compile(self) -> Any:
        """A step on a full batch, compiled; on several devices, or one that is not a CPU, `step`
        then runs this program.
        """
        return self._watched(
            ("step", self.rows, True), self.arguments, lambda: self._traced.lower().compile()
        )

    def compiled_text(self) -> str:
        """A step on a full batch as XLA has compiled it; "" if none was compiled yet."""
        return (
            self._traced.lower().compile().as_text()
            if ("step", self.rows, True) in self._ready
            else ""
        )

    def text(self) -> str:
        """A step on a full batch as StableHLO; `step` then compiles this lowering."""
        return self._traced.lower().as_text()

    def export(self, platform: str) -> tuple[jax.export.Exported, tuple[int, ...]]:
        """A step on a full batch for a platform, as `export_step` returns it, and which of its flat
        arguments are donated.
        """
        out_shardings = (self.placed.shardings, NamedSharding(self.placed.mesh, PartitionSpec()))
        step = functools.partial(train_step, self.make_step(self.rows, True))
        exported = export_step(step, self.arguments, out_shardings, platform)
        return exported, tuple(
            range(len(jax.tree.leaves(self.arguments[0])) if self.donate_argnums else 0)
        )

    @functools.cached_property
    def static_metrics(self) -> StaticMetrics:
        """What is known about the metrics of each step without measuring."""
        return StaticMetrics(self.placed, lambda: self.wire)

    @property
    def drops_remainder(self) -> bool:
        """Whether a short last batch is dropped."""
        return self.clock is not None and self.clock.declared.drop_remainder

    @property
    def clock(self) -> Events | None:
        """The parameter server's simulated clock; None without one."""
        return self.placed.events

    def events(self, step: int, rows: int, have: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """What the parameter server's clock says about a step on a batch of `rows` rows; the
        compiled step takes it as data.
        """
        clock, workers = self.placed.events, self.placed.exchange.worker_count
        if clock is None:
            return {}
        if have is None and rows < self.rows and self.pad_training:  # the last workers have padding
            have = np.arange(workers) * (self.rows // workers) < rows
        return clock.step_inputs(step, have)

    @property
    def abstract_events(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of `events`, replicated over all devices."""
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(()))
            for name, x in self.events(0, self.rows).items()
        }

    def compilations(self) -> int:
        """How many programs have been compiled so far."""
        return sum(map(compiled_count, self._compiled.values()))


def prepare_program(placed: PlacedModel, sample: Tree) -> Program:
    """The program for full batches like `sample`, which is checked against the layout's axes.

    Its `placed` is another one where the loss is such that XLA must place the collectives.

    Raises:
      SpmdError: the layout does not fit the model, the batch does not fit the layout, or the loss
        fails on it.
    """
    sample = abstract(sample)
    check_leaves(sample, "the batch")
    placed.learn(sample)
    if not isinstance(placed.mesh, AbstractMesh):
        options = xla_options(
            placed.resolved.layout.compiler,
            placed.platform,
            devices=placed.mesh.size,
            layerwise=True,
        )
        check_compiler_options(
            options,
            placed.resolved.layout.source,
            SingleDeviceSharding(placed.mesh.local_devices[0]),
        )
    # after the layout's own problems
    check_batch(sample, placed.resolved.layout, placed.resolved.mesh, placed.config.accumulate)
    check_loss_scale(placed.abstract_state.opt, placed.config.precision)
    try:
        program = Program(placed, sample)
    except FullBatchError as error:
        program = _with_all_rows(placed, sample, error)
    placed = program.placed
    check_products(program._jaxpr.jaxpr, placed.platform)
    check_gradient(program._jaxpr.jaxpr, len(jax.tree.leaves(placed.abstract_state.params)))
    check_idle_axes(placed, sample, lambda: program.step_jaxpr)
    return program


def _with_all_rows(placed: PlacedModel, sample: Tree, error: FullBatchError) -> Program:
    """The program of a loss that workers cannot compute from their rows: XLA sees all of them, and
    places the collectives.

    Raises:
      LossError: the layout's gradients are not exact, or not in one piece, or the state would have
        other shardings.
    """
    layout = placed.resolved.layout
    if layout.gradients.reduction not in (
        "all_reduce",
        "reduce_scatter",
    ) or layout.gradients != Gradients(layout.gradients.reduction):
        raise LossError(error.message, fix=error.fix) from None
    other = placed.with_layout(
        placed.mesh, dataclasses.replace(layout, gradients=Gradients("compiler"))
    )
    other.compiling = placed.compiling
    if placed.shardings != other.shardings:
        raise LossError(error.message, fix=error.fix) from None
    program = Program(other, sample)
    seen = (
        f"XLA sees all rows and places the collectives, as with {BY_COMPILER}, and trainer.wire "
        "cannot list them"
    )
    if not program.own_backward:
        seen += (
            "; a loss that returns (sum, count), or one value per row that depends on no other "
            "row, keeps those of the layout"
        )
    program.notes.append(f"note: {error.message.rstrip('.')}. So {seen}.")
    return program
