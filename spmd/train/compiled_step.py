"""The compiled functions of a placed model: from the shapes of a batch, what the loss returns and the programs that are run.

Nothing is compiled before the first step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd.data.batches import batch_signature, check_batch, check_leaves
from spmd.errors import DataError, LayoutError, ModelError, SpmdError, first_line
from spmd.layout.resolve import pspec
from spmd.layout.schema import Spec, keep_axes
from spmd.models.base import Call, Variables
from spmd.nn.parallel_context import parallel_scope
from spmd.nn.schedule import Schedule
from spmd.train.accumulate import equations, has_convolution
from spmd.train.activations import Activations, Seen
from spmd.train.async_step import AsyncStep
from spmd.train.gradient import check_gradient
from spmd.train.local_sgd_step import LocalSGDStep
from spmd.train.losses import suspects
from spmd.train.metric_rows import MetricRows
from spmd.train.metrics import pack
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import LEAKS, LOSS, Objective, check_loss, naming_in_trace
from spmd.train.packing_check import check_update
from spmd.train.precision import cast, compute_dtype
from spmd.train.state import State
from spmd.train.step import Step, batch_spec, scan_steps
from spmd.train.whole_batch import Comparison, parts_of
from spmd.tree import Tree, abstract, describe, flatten, map_paths
from spmd.wire.comm_log import CommLog, read
from spmd.wire.notes import exact_bytes
from spmd.wire.param_server.events import Events
from spmd.wire.strategies import constrain

KERNELS = ("cu_threefry2x32", "cu_threefry2x32_ffi")  # of jax itself, which `jax.export` would not promise to know in years to come


class Program:
    """The compiled functions of a `PlacedModel` model for batches of one shape."""

    def __init__(self, placed: PlacedModel, sample: Tree):
        placed.learn(sample)
        self.placed, self.sample = placed, sample
        self.rows = jax.tree.leaves(sample)[0].shape[0]
        self._train, self._eval = placed.objective.for_training(), placed.objective
        self._dtype = compute_dtype(placed.config.precision)
        stats = bool(jax.tree.leaves(placed.abstract_state.stats))
        seen = Seen(placed.resolved)
        self.schedules: dict[str, Schedule] = {}  # of a step on a full batch, by stack
        (value, extra), self._jaxpr = self._trace(self._train, seen, training=True)
        self.suspects = suspects(self._train.loss, self._train.outputs)  # what in a batch makes the loss NaN, to end a sentence with
        check_update(placed.optimizer, abstract(placed.abstract_state.params))
        placed.parallel.check_used(placed.resolved.layout.source)
        self._check_pipeline(stats=stats)
        placed.exchange.check_rounding()
        if placed.exchange.reduction.manual and not (placed.exchange.asynchronous or placed.exchange.local):
            placed.given.check_workers()
        placed.model.check_remat(placed.resolved.layout.remat.modules)
        seen.check(self.rows, placed.exchange.worker_count * placed.config.accumulate)
        self._packed = (LOSS, *extra)
        self.names = (*self._packed, *placed.exchange.metric_names, *(placed.events.metric_names if placed.events else ()))
        self._rowwise = check_loss(value, extra, self.rows)
        self.pad_training = self._rowwise and all(x.shape == (self.rows,) for x in jax.tree.leaves(extra)) and not stats
        # XLA:CPU runs a convolution inside a loop an order of magnitude slower, and begins a step by copying the donated
        # kernels of convolutions and of the layers behind them: there loops are unrolled, and the state is not donated
        self.convolutions = has_convolution(equations(self._jaxpr.jaxpr))
        self._unroll = self.convolutions and placed.platform == "cpu"
        self.donated = () if self._unroll else (0,)  # of a step's arguments
        self._parallel = dataclasses.replace(placed.parallel, unroll=self._unroll, schedules={})
        self._compiled: dict[tuple, Callable] = {}
        self._fitting: set[Any] = set()  # kinds of inputs that the model was traced on

    def _trace(self, objective: Objective, seen: Seen, *, training: bool, rows: int | None = None) -> tuple[tuple, Any]:
        """What an objective returns on so many rows, those of a full batch unless they are given, as shapes, and its jaxpr."""
        placed = self.placed
        shares = placed.config.accumulate * placed.exchange.worker_count // placed.resolved.workers
        parallel = dataclasses.replace(placed.parallel, row_splits=shares, schedules=self.schedules if training else {})

        def call(variables: Variables, batch: Tree, key: Any) -> tuple:
            variables = dataclasses.replace(variables, params=cast(variables.params, self._dtype))
            remat = placed.resolved.layout.remat.modules if training else ()
            with parallel_scope(parallel):
                asked = Call(training, key if training else None, remat_modules=remat, dtype=self._dtype, output_hook=seen)
                return objective(placed.model.bind(variables, asked), batch, key)

        variables = abstract(placed.abstract_state.variables)
        sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows or self.rows, *x.shape[1:]), x.dtype), self.sample)
        with naming_in_trace("the loss", sample):
            jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(variables, sample, jax.eval_shape(lambda: jax.random.key(0)))
        return shapes, jaxpr

    def _check_pipeline(self, *, stats: bool) -> None:
        """A pipeline that nothing runs through, or that cannot run what there is."""
        parallel, source = self.placed.parallel, self.placed.resolved.layout.source
        if parallel.pipeline.axis is not None and "pipeline" not in parallel.used:
            raise LayoutError(
                f'{source}: [pipeline] cuts stacks of layers over "{parallel.pipeline.axis}", and the loss calls none.\n'
                "    fix: spmd.nn.LayerStack or spmd.nn.RNNStack in the model, or a layout without [pipeline]."
            )
        pipeline, leave = parallel.pipeline, "leave it out."
        for key, given, part, kind, fix in (
            ("microbatches", pipeline.microbatches, "microbatches", "LayerStack", leave),
            ("groups", pipeline.groups > 1, "microbatches", "LayerStack", 'leave it out; schedule = "gpipe".'),
            ("time_chunk", pipeline.time_chunk, "time_chunk", "RNNStack", leave),
        ):
            if given and part not in parallel.used:
                raise LayoutError(f"{source}: [pipeline] {key} is for spmd.nn.{kind}, and the loss calls none.", fix=fix)
        if parallel.manual_backward and stats:
            raise ModelError(
                (
                    f'{source}: [pipeline] schedule = "1f1b" runs the loss microbatch by microbatch, in an order that keeps no batch '
                    "statistics."
                ),
                fix='LayerNorm or GroupNorm in place of BatchNorm, or  schedule = "gpipe".',
            )

    @functools.cached_property
    def eval_names(self) -> tuple[str, ...]:
        """Names of everything that evaluation measures."""
        return (LOSS, *self._eval_outputs[1])

    @functools.cached_property
    def _eval_outputs(self) -> tuple:
        return self._trace(self._eval, Seen(self.placed.resolved), training=False)[0]

    @functools.cached_property
    def pad_eval(self) -> bool:
        """Whether padding can be left out of everything that evaluation measures."""
        return all(leaf.shape == (self.rows,) for leaf in jax.tree.leaves(self._eval_outputs))

    def _step(self, rows: int, split: bool) -> Step:
        placed = self.placed
        simulated = placed.exchange.worker_count // placed.resolved.workers if split else 1
        own = rows // placed.exchange.worker_count if split else rows  # rows of each worker
        parts = max(count for count in range(1, placed.config.accumulate + 1) if own % count == 0)
        model, optimizer, resolved, exchange = placed.model, placed.optimizer, placed.resolved, placed.exchange
        more = {"workers_per_position": simulated, "unroll": self._unroll, "dtype": self._dtype, "rowwise": self._rowwise, "split": split}
        more["parallel"] = self._parallel
        kind = AsyncStep if exchange.asynchronous else LocalSGDStep if exchange.local else Step
        return kind(model, self._train, optimizer, resolved, exchange, self._packed, parts, **more)

    def several(self, each: Callable, *trees: Tree, abreast: bool) -> Tree:
        """`each` over dim 0 of trees, for members of one program: `abreast`, as larger operations that sum in an order of their own; or
        one after the other, as convolutions are in any case, which would become grouped ones."""
        if abreast and not self.convolutions:
            return jax.vmap(each)(*trees)
        if not self._unroll:
            return jax.lax.map(lambda inputs: each(*inputs), trees)
        count = jax.tree.leaves(trees)[0].shape[0]
        found = [each(*jax.tree.map(lambda x, at=at: x[at], trees)) for at in range(count)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def steps_here(self, optimizer: Any, state: State, data: Tree, rows: jax.Array, weights: jax.Array) -> tuple[State, jax.Array]:
        """`rows.shape[0]` updates with another optimizer, inside a `jax.shard_map` over all axes (`Step.update_in_shard_map`): `data` is
        replicated, `rows` and `weights` are this worker's, [steps, rows]."""
        step = dataclasses.replace(self._step(rows.shape[1] * self.placed.resolved.workers, True), optimizer=optimizer)
        return scan_steps(step.update_in_shard_map, state, data, rows, weights, {}, unroll=self._unroll)

    def measures(self, state: State, batch: Tree, weights: jax.Array) -> jax.Array:
        """What `evaluate` gives, under a trace."""
        return self._measure(state.params, state.stats, state.rngs, batch, weights)

    @functools.cached_property
    def comparison(self) -> Comparison:
        """Of the first batch seen in parts, as by this step, with the same batch seen at once."""
        step = lambda placed, rows: Program(placed, self.sample)._step(rows, True)
        return Comparison(self.placed, self._train, self.sample, parts_of(self.placed, self._step(self.rows, True)), step, self._jaxpr)

    @functools.cached_property
    def metric_rows(self) -> MetricRows:
        """Whether metrics are means over rows."""
        trace = functools.partial(self._trace, self._eval, Seen(self.placed.resolved), training=False)
        return MetricRows(self.placed, self._eval, lambda: self.eval_names, self.rows, trace, self.evaluate)

    def _look(self, state: State, batch: Tree, weights: jax.Array, rows: jax.Array | None = None) -> None:
        """At the loss and the metrics of the first batch; `rows` as of `Comparison.once`."""
        if not self.comparison.made:
            self.comparison.once(state, batch, weights, rows)
            if self.comparison.parts.several and len(self._packed) > 1:
                self.metric_rows.once(state, batch, weights, self._packed[1:], f"parts of a batch, {self.comparison.parts},", rows)

    @LEAKS
    def step(self, state: State, batch: Tree, weights: jax.Array, events: Tree, *, split: bool = True) -> tuple[State, jax.Array]:
        """One update; `state` is donated (but for convolutions on a CPU). Metrics are float32[2, names], sums over counts."""
        if split:
            self._look(state, batch, weights)
        if "present" in events and not split:
            raise DataError(
                f"a batch of {weights.shape[0]} rows, which {self.placed.exchange.worker_count} workers do not divide, "
                "while not all count.\n"
                "    fix: a loss with one value per example and no batch statistics, which can leave padding out; or drop the batch."
            )
        return self._function(("step", weights.shape[0], split))(state, batch, weights, events)

    @LEAKS
    def many(self, state: State, data: Tree, rows: jax.Array, weights: jax.Array, events: Tree) -> tuple[State, jax.Array]:
        """`rows.shape[0]` updates in one call on resident data; metrics are float32[steps, 2, names]."""
        self._look(state, data, weights, rows)
        return self._function(("many", weights.shape[1], True))(state, data, rows, weights, events)

    @LEAKS
    def evaluate(self, state: State, batch: Tree, weights: jax.Array) -> jax.Array:
        """Sums and counts of loss and metrics, float32[2, eval_names], in evaluation mode."""
        return self._function(("evaluate",))(state.params, state.stats, state.rngs, batch, weights)

    @LEAKS
    def predict(self, state: State, inputs: Tree) -> Tree:
        """The model's outputs in evaluation mode, whole on every device."""
        return self._function(("predict",))(state.params, state.stats, state.rngs, inputs)

    def check_inputs(self, inputs: Tree) -> None:
        """Trace the model on inputs of these shapes.

        Raises:
          DataError: it fails on them.
        """
        if (kind := batch_signature(inputs)) in self._fitting:
            return
        state = abstract(self.placed.abstract_state)
        try:
            with LEAKS:
                jax.eval_shape(self._outputs, state.params, state.stats, state.rngs, inputs)
        except SpmdError:
            raise
        except Exception as error:
            spelled = lambda tree: ", ".join(f"{path} {describe(leaf)}".strip() for path, leaf in flatten(tree).items())
            raise DataError(
                f"predict: the model fails on {spelled(inputs)}: {first_line(error)}\n"
                f"    fix: what the loss calls the model with; the batches that it was trained on hold {spelled(self.placed.sample)}."
            ) from error
        self._fitting.add(kind)

    def _function(self, key: tuple) -> Callable:
        if key not in self._compiled:
            self._compiled[key] = self._build(key)
        return self._compiled[key]

    def _build(self, key: tuple) -> Callable:
        placed, whole = self.placed, NamedSharding(self.placed.mesh, PartitionSpec())
        if key[0] == "step":
            return jax.jit(self._step(key[1], key[2]).update, donate_argnums=self.donated, out_shardings=(placed.shardings, whole))
        if key[0] == "many":
            step = self._step(key[1], key[2])
            steps = functools.partial(
                scan_steps, lambda s, b, w, e: self._kept(step.update(s, self._as_batch(b), w, e)), unroll=self._unroll
            )
            return jax.jit(steps, donate_argnums=self.donated, out_shardings=(placed.shardings, whole))
        return jax.jit(self._measure if key[0] == "evaluate" else self._outputs, out_shardings=whole)

    def _kept(self, result: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        """Inside a loop the state keeps its place from step to step."""
        return jax.lax.with_sharding_constraint(result[0], self.placed.shardings), result[1]

    def _as_batch(self, batch: Tree) -> Tree:
        return map_paths(lambda path, x: jax.lax.with_sharding_constraint(x, self._at(batch_spec(self.placed.resolved, path))), batch)

    def _at(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.placed.mesh, pspec(spec))

    def _bound(self, params: Tree, stats: Tree, rngs: Tree) -> Any:
        variables = Variables(cast(self._gather(params), self._dtype), stats, rngs)
        activations = Activations(self.placed.resolved, self.placed.mesh)
        return self.placed.model.bind(variables, Call(training=False, dtype=self._dtype, output_hook=activations))

    def _gather(self, params: Tree) -> Tree:
        step = self._step(self.rows, True)
        return step.map_params(lambda place, p: constrain(step.mesh_axes, keep_axes(place.spec, step.mesh_axes.model_axes), p), params)

    def _measure(self, params: Tree, stats: Tree, rngs: Tree, batch: Tree, weights: jax.Array) -> jax.Array:
        with parallel_scope(self._parallel):
            value, extra = self._eval(self._bound(params, stats, rngs), batch, jax.random.key(0))
        return pack(self._eval.sums(value, extra, weights), self.eval_names)

    def _outputs(self, params: Tree, stats: Tree, rngs: Tree, inputs: Tree) -> Tree:
        with parallel_scope(self._parallel):
            return self._bound(params, stats, rngs)(inputs)

    @property
    def arguments(self) -> tuple[State, Tree, jax.ShapeDtypeStruct, Tree]:
        """What a step on a full batch takes: state, batch, weights and events, as shapes with shardings."""
        resolved = self.placed.resolved
        place = lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._at(batch_spec(resolved, path)))
        weights = jax.ShapeDtypeStruct((self.rows,), jnp.float32, sharding=self._at((resolved.data_axes,)))
        return self.placed.abstract_state, map_paths(place, self.sample), weights, self.abstract_events

    @functools.cached_property
    def wire(self) -> CommLog:
        """Every collective of a step on a full batch; reads the traced step (`step` then compiles that trace)."""
        return read(self._traced.jaxpr.jaxpr, self.placed.mesh.shape, self.placed.resolved.layout.gradients.start_step)

    @property
    def _traced(self) -> Any:
        return self._function(("step", self.rows, True)).trace(*self.arguments)  # type: ignore[attr-defined]

    def compiled(self) -> Any:
        """A step on a full batch, compiled; on several devices, or one that is no CPU, `step` then runs this program."""
        return self._traced.lower().compile()

    def text(self) -> str:
        """A step on a full batch as StableHLO; `step` then compiles this lowering."""
        return self._traced.lower().as_text()

    def exported(self, platform: str) -> tuple[jax.export.Exported, tuple[int, ...]]:
        """A step on a full batch as StableHLO for a platform that need not be here, on flat arguments, and which of these it donates."""
        leaves, tree = jax.tree.flatten(self.arguments)
        state, update = jax.tree.leaves(self.arguments[0]), self._step(self.rows, True).update
        places = jax.tree.leaves((self.placed.shardings, NamedSharding(self.placed.mesh, PartitionSpec())))
        flat = jax.jit(lambda *leaves: jax.tree.leaves(update(*jax.tree.unflatten(tree, leaves))), out_shardings=places)
        unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
        export = jax.export.export(flat, platforms=(platform,), disabled_checks=unchecked)
        frames = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
        jax.config.update("jax_traceback_in_locations_limit", 1)  # the same step is the same text, whoever asks for it
        try:
            return export(*leaves), tuple(range(len(state) if self.donated else 0))
        finally:
            jax.config.update("jax_traceback_in_locations_limit", frames)

    @property
    def constant_names(self) -> tuple[str, ...]:
        """Names of what is known of a step without measuring."""
        exchange, clock = self.placed.exchange, self.placed.events
        sent = (("wire_bytes", "compression_ratio") if exchange.metric_names else ("wire_bytes",)) if exchange.reduction.manual else ()
        return (*sent, *(clock.metrics(0) if clock else ()))

    @property
    def drops_remainder(self) -> bool:
        """Whether a short last batch is left out."""
        return self.clock is not None and self.clock.declared.drop_remainder

    @property
    def clock(self) -> Events | None:
        """The parameter server's simulated clock; None without one."""
        return self.placed.events

    def events(self, step: int, rows: int, have: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """What the compiled step has to be told of the parameter server's clock, for a batch of so many rows."""
        clock, workers = self.placed.events, self.placed.exchange.worker_count
        if clock is None:
            return {}
        if have is None and rows < self.rows and self.pad_training:  # the last workers have padding
            have = np.arange(workers) * (self.rows // workers) < rows
        return clock.step_inputs(step, have)

    @property
    def abstract_events(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of `events`, whole on every device."""
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._at(())) for name, x in self.events(0, self.rows).items()}

    def constants(self, step: int) -> dict[str, float]:
        """What is known of a step without measuring: bytes that each device sends, how many times fewer than exactly, and what the
        simulated clock says."""
        clock, early = self.clock, step < self.placed.resolved.layout.gradients.start_step
        sent = self._constants[early]
        if clock is None:
            return sent
        if self.placed.exchange.local:
            sent = {**sent, "wire_bytes": sent["wire_bytes"] - sum(self._at_meeting(early, where) for where in clock.skipped_scopes(step))}
        return {**sent, **clock.metrics(step)}

    @functools.cached_property
    def _at_meeting(self) -> Callable[[bool, str], int]:
        """Bytes that each device sends where some parameters are synchronised, by whether that is before `start_step`, and where."""
        start = self.placed.resolved.layout.gradients.start_step
        return functools.cache(lambda early, where: self.wire.bytes(0 if early else start, where))

    @functools.cached_property
    def _constants(self) -> tuple[dict[str, float], dict[str, float]]:
        """After `start_step`, and before it."""
        exchange, start = self.placed.exchange, self.placed.resolved.layout.gradients.start_step
        if not exchange.reduction.manual:
            return {}, {}  # XLA places the collectives
        found = []
        for step in (start, 0):
            pushed, sent = self.wire.bytes(step, "reduce_gradients"), self.wire.bytes(step)
            values = (sent, exact_bytes(exchange) / pushed if pushed else 1.0)
            found.append(dict(zip(("wire_bytes", "compression_ratio")[: 1 + bool(exchange.metric_names)], values, strict=False)))
        return found[0], found[1]

    def compilations(self) -> int:
        """How many programs have been compiled so far."""
        return sum(function._cache_size() for function in self._compiled.values())  # type: ignore[attr-defined]


def prepared(placed: PlacedModel, sample: Tree) -> Program:
    """The functions for full batches like `sample`, which is checked against the layout's axes.

    Raises:
      SpmdError: the layout does not fit the model, the batch does not fit the layout, or the loss fails on it.
    """
    sample = abstract(sample)
    check_leaves(sample, "the batch")
    placed.learn(sample)
    check_batch(sample, placed.resolved.layout, placed.resolved.mesh, placed.config.accumulate)  # after the layout's own problems
    program = Program(placed, sample)
    check_gradient(program._jaxpr.jaxpr, len(jax.tree.leaves(placed.abstract_state.params)))
    return program
