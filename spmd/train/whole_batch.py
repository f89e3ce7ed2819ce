"""Whether a step that sees rows in parts trains as one that sees all rows of a batch at once.

Workers, accumulation and 1f1b pipelines call the loss on parts of a batch and take a mean over parts. That is the loss of the batch only
if it is a mean over rows. It is proved from the traced loss where possible (`spmd.train.row_proof`); elsewhere both ways are run on the
first batch, and what cannot be rounding is refused.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from spmd.errors import LossError
from spmd.jaxpr import equations
from spmd.layout.gradients import Gradients
from spmd.layout.schema import Attention
from spmd.models.base import Call, Variables
from spmd.nn.layer_stack import split_microbatches
from spmd.nn.parallel_context import MIXTURE, UNSHARDED, parallel_scope
from spmd.train.activations import Seen
from spmd.train.losses import check_masks, check_targets
from spmd.train.model_setup import PlacedModel
from spmd.train.objective import Objective
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.remat import module_policies
from spmd.train.row_proof import proved
from spmd.train.row_values import KEY, Fixed, PerRow
from spmd.train.state import State
from spmd.train.step import Step, mean_loss, reduced_gradients
from spmd.tree import Tree, abstract
from spmd.wire.server.declaration import ParameterServer

COARSE = (jnp.bfloat16, jnp.float16)
RELATIVE = 1e-4  # of loss and gradients, below which nothing is a difference
NOISE = 100.0  # times the effect of rounding the weights in another way is more than rounding
RELATIVE_COARSE, NOISE_COARSE = 1e-2, 4.0  # the same where something is computed in fewer bits than float32 has
SPREAD = 4.0  # times the effect of other random numbers is more than these
JITTER = 0.02  # standard deviation of what replaces the entries of arrays that are constant, such as heads that begin at zero


@dataclasses.dataclass(frozen=True)
class Parts:
    """Into how many parts a step splits a batch before the loss sees them.

    `workers` at positions of their own; at each position `simulated` workers one after the other; of each `microbatches`; and of these the
    microbatches of a 1f1b pipeline (`ticks`: there are any).
    """

    workers: int
    simulated: int
    microbatches: int
    ticks: bool

    @property
    def several(self) -> bool:
        """Whether there is more than one part."""
        return self.ticks or self.count > 1

    @property
    def count(self) -> int:
        """How many parts a batch has, before a 1f1b pipeline splits them."""
        return self.workers * self.simulated * self.microbatches

    @property
    def of_position(self) -> bool:
        """Whether one position sees its rows in parts: statistics and random numbers are then those of parts too."""
        return self.simulated * self.microbatches > 1

    def __str__(self) -> str:
        count, inner = self.workers * self.simulated, self.microbatches
        said = [f"by {count} workers"] if count > 1 else []
        said += [f"in {inner} microbatches"] if inner > 1 else []
        return ", ".join(said + (["in the microbatches of a 1f1b pipeline"] if self.ticks else []))


def parts_of(placed: PlacedModel, step: Step) -> Parts:
    """The parts of a step of this model under its layout."""
    exchange, positions = placed.exchange, placed.resolved.workers
    workers = positions if exchange.reduction.manual else 1
    return Parts(workers, exchange.worker_count // positions, step.worker.microbatches, placed.parallel.manual_backward)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the traced loss proves: `mean`: it is a mean over rows; `draws`: parts draw for their rows what the whole batch does."""

    mean: bool
    draws: bool


def proof_of(placed: PlacedModel, loss: Objective, sample: Tree, parts: Parts, traced: Any = None) -> Proof:
    """What can be proved from the traced loss; statistics that workers synchronise may join rows.

    `traced`: the jaxpr of a call like the one below on `sample`, if there is one: then only one more is made.
    """
    variables, rows = abstract(placed.abstract_variables), jax.tree.leaves(sample)[0].shape[0]
    sizes = {axis: placed.mesh.shape[axis] for axis in placed.exchange.mesh_axes.data_axes}
    synchronised = jax.tree.leaves(variables.stats) and not parts.of_position and not parts.ticks
    dtype, outputs, remat = compute_dtype(placed.config.precision), [], module_policies(placed.resolved.layout.remat)

    def call(variables: Variables, batch: Tree, key: Any) -> Any:
        variables = cast_variables(variables, dtype)
        sync = tuple(sizes) if synchronised else ()
        with parallel_scope(dataclasses.replace(UNSHARDED, used=set(), schedules={})):
            asked = Call(True, key, sync_axes=sync, remat=remat, dtype=dtype, output_hook=Seen(placed.resolved))
            value, extra = loss(placed.given.bind(variables, asked), batch, key)
        outputs.append(len(value) if isinstance(value, tuple) else 1)
        return value, extra

    def trace(rows: int) -> Any:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), sample)
        return jax.make_jaxpr(call, axis_env=[*sizes.items()])(variables, batch, jax.eval_shape(lambda: jax.random.key(0)))

    given = [*map(lambda _: Fixed(), jax.tree.leaves((variables.params, variables.frozen, variables.stats)))]
    given += [*map(lambda _: KEY, jax.tree.leaves(variables.rngs)), *map(lambda _: PerRow(0), jax.tree.leaves(sample)), KEY]
    try:
        fewest = rows // parts.count
        fewest = split_microbatches(placed.parallel, jax.ShapeDtypeStruct((fewest,), jnp.float32)).rows if parts.ticks else fewest
        fewest = max(fewest, 2)  # what is written for dims of size 1 says too little
        others = fewest if fewest < rows else 2 * rows
        second = trace(others)
        usable = traced is not None and not synchronised and len(traced.jaxpr.invars) == len(given)
        if usable and proved(traced, second, given, rows, others, outputs[0]):
            return Proof(mean=True, draws=True)
        first, draws = trace(rows), {}
        mean = proved(first, second, given, rows, others, outputs[0], draws)
        split = parts.microbatches > 1 or parts.ticks or placed.resolved.layout.stage_axis is not None  # into parts with keys of their own
        return Proof(mean, not split and all(draws.get(id(found), False) for found in _random(first)))
    except Exception:  # another number of rows does not suit it, or it wants the mesh: then it is measured
        return Proof(mean=False, draws=False)


def _random(traced: Any) -> list[Any]:
    """Every equation that draws an array."""
    return [found for found in equations(traced.jaxpr) if found.primitive.name == "random_bits" and found.outvars[0].aval.shape]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of a batch that is seen in parts, and at once: losses, norms of gradients, the norm of the gradients' difference.

    `noise`: how much loss and gradients of the batch change with the last bits of the weights, which are those of bfloat16 where `coarse`.
    """

    losses: tuple[float, float]
    norms: tuple[float, float]
    gradient_distance: float
    noise: tuple[float, float] = (0.0, 0.0)
    coarse: bool = False

    @property
    def differ(self) -> bool:
        """Whether rounding cannot explain the difference; NaN is no difference."""
        loss = (abs(self.losses[0] - self.losses[1]), max(map(abs, self.losses)), self.noise[0])
        relative, times = (RELATIVE_COARSE, NOISE_COARSE) if self.coarse else (RELATIVE, NOISE)
        return any(
            off > relative * size and off > times * noise
            for off, size, noise in (loss, (self.gradient_distance, max(self.norms), self.noise[1]))
        )

    def beyond(self, other: "Figures") -> bool:
        """Whether losses or gradients are clearly farther from each other than those of `other`."""
        loss, noise = (abs(one.losses[0] - one.losses[1]) for one in (self, other))
        return loss > SPREAD * noise or self.gradient_distance > SPREAD * other.gradient_distance


Way = Callable[[State], tuple[jax.Array, Tree]]  # to the loss and the gradients


@dataclasses.dataclass
class Comparison:
    """Of a batch that is seen in parts with the same batch seen at once.

    Attributes:
      step: of a placed model and a number of rows, the step.
      traced: the loss on `sample`, as a jaxpr.
      say: where a run shows what was found.
    """

    placed: PlacedModel
    loss: Objective
    sample: Tree
    parts: Parts
    step: Callable[[PlacedModel, int], Step]
    traced: Any
    say: Callable[[str], None] = lambda line: None
    made: bool = False

    def once(self, state: State, batch: Tree, weights: Any, rows: jax.Array | None = None) -> None:
        """Look at the first batch: at its targets; and, where the loss sees rows in parts and is not proved a mean over them, at both ways.

        Args:
          rows: int32[steps, rows], which rows of `batch` (then an entire dataset) are those of some steps; `weights` are too.

        Raises:
          LossError: the two are not the same, with what was found to help.
          DataError: targets that are no class, or masks that are not 0 and 1.
        """
        if self.made:
            return
        self.made = True
        with jax.transfer_guard("allow"):
            check_masks((self.loss.loss, *self.loss.metrics.values()), batch)
            for shape in self.loss.outputs:
                check_targets(self.loss.loss, shape[-1], batch)
            if not self.needed:
                return
            if rows is not None:
                batch = jax.jit(lambda data, rows: jax.tree.map(lambda x: x[rows[0]], data))(batch, rows)
                weights = weights[0]
            try:
                line = self.check(state, batch, weights)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                line = "note: the loss is not known to be a mean over rows, and there is no memory to see the batch at once and compare."
            logging.getLogger("spmd").log(logging.WARNING if line.startswith("note:") else logging.INFO, line)
            self.say(line)

    @property
    def needed(self) -> bool:
        """Whether the loss sees rows in parts, is not meant to, and is not proved to be a mean over them."""
        return self.parts.several and not getattr(self.loss.loss, "of_parts", False) and not self.proof.mean

    @functools.cached_property
    def proof(self) -> Proof:
        """What its trace proves about the loss."""
        return proof_of(self.placed, self.loss, self.sample, self.parts, self.traced)

    def check(self, state: State, batch: Tree, weights: jax.Array) -> str:
        """What was found, for the log; raises as `once` does."""
        begun = time.perf_counter()
        if self.groups and self.parts.simulated > 1:
            return "note: tokens are routed in groups of each simulated worker, so the loss was not compared with that of the whole batch."
        params = state.params if self.placed.storage is None else self.placed.unpacked(state.params)
        state = dataclasses.replace(state, params=params, opt=None, exchange={})
        given = {"batch": batch, "weights": weights}
        for training in self.modes(state):
            parts, full = (self.way(parts, given, training=training) for parts in (self.parts, self.full))
            found = [self.figures(parts, full, dataclasses.replace(state, params=p)) for p in (params, _jittered(params))]
            guilty = next((one for one in found if one.differ), None)
            if guilty is None:
                took = time.perf_counter() - begun
                losses = " and ".join(f"{loss:.6g}" for loss in found[0].losses)
                return (
                    f"the loss is not known to be a mean over rows, so it was compared on the first batch, seen {self.parts} and at once: "
                    f"{losses}, equal but for rounding, gradients too ({took:.1f} s, with compiling)."
                )
            if not self.draws or guilty.beyond(self.spread(full, state)):
                raise self.refused(guilty, weights.shape[0])
        return "note: the loss draws other random numbers for parts of a batch, so it could not be compared with that of the whole batch."

    @property
    def draws(self) -> bool:
        """Whether the loss draws random arrays, which may be others for parts."""
        return bool(_random(self.traced)) and not self.proof.draws

    @property
    def groups(self) -> bool:
        """Whether tokens are routed in groups, which are those of a microbatch."""
        return MIXTURE in self.placed.parallel.used

    @property
    def full(self) -> Parts:
        """The whole batch at once; in the same groups of tokens, where there are any."""
        return Parts(1, 1, self.parts.microbatches if self.groups else 1, ticks=False)

    def modes(self, state: State) -> tuple[bool, ...]:
        """Training modes in which parts and the full batch are to agree: statistics and random numbers of parts may be their own."""
        if self.parts.of_position and (self.draws or jax.tree.leaves(state.stats)):
            return (False,)
        return (True, False) if self.draws else (True,)

    def way(self, parts: Parts, given: dict[str, Any], *, training: bool) -> Way:
        """Loss and mean gradients of a batch that is seen in these parts; gradients are exchanged exactly, in float32."""
        layout = self.placed.resolved.layout
        reduction = "compiler" if parts.workers == 1 else layout.gradients.reduction
        reduction = "all_reduce" if reduction == "parameter_server" else reduction
        pipeline = dataclasses.replace(layout.pipeline, schedule="gpipe") if self.parts.ticks and not parts.ticks else layout.pipeline
        layout = dataclasses.replace(layout, gradients=Gradients(reduction), parameter_server=ParameterServer(), pipeline=pipeline)
        if layout.attention.implementation not in ("auto", "as_written"):  # one for bfloat16 may not take float32
            layout = dataclasses.replace(layout, attention=Attention("chunked"))
        placed = self.placed.with_layout(self.placed.mesh, layout, accumulate=1, precision="float32")
        step = self.step(placed, given["weights"].shape[0])
        worker = dataclasses.replace(step.worker, microbatches=parts.microbatches, workers_per_position=parts.simulated, training=training)
        step = dataclasses.replace(step, worker=worker)
        return functools.partial(jax.jit(functools.partial(_loss_and_gradients, step)), **given)

    def figures(self, one: Way, other: Way, state: State) -> Figures:
        """Two ways at these weights; the noise is measured only where it decides."""
        (loss, grads), right = one(state), other(state)
        found = Figures(*_read(_numbers(loss, grads, *right)))
        if not found.differ:
            return found
        coarse = _coarse(other, state)
        moved = dataclasses.replace(state, params=_rounded(state.params, 2.0**-8 if coarse else 2.0**-22))
        near = Figures(*_read(_numbers(*other(moved), *right)))
        return dataclasses.replace(found, noise=(abs(near.losses[0] - near.losses[1]), near.gradient_distance), coarse=coarse)

    def spread(self, full: Way, state: State) -> Figures:
        """The whole batch with other random numbers."""
        return Figures(*_read(_numbers(*full(dataclasses.replace(state, key=state.key + 1)), *full(state))))

    def refused(self, found: Figures, rows: int) -> LossError:
        """The error; its fix is the layout under which the batch was seen at once."""
        parts, full, source = self.parts, self.full, self.placed.resolved.layout.source
        changes = ['[gradients] reduction = "compiler"'] if parts.workers * parts.simulated > 1 else []
        changes += ["accumulate=1"] if full.microbatches < parts.microbatches else []
        changes += ['[pipeline] schedule = "gpipe"'] if parts.ticks else []

        def line(seen: str, at: int) -> str:
            return f"    {seen:<{len(str(parts)) + 6}}  loss {found.losses[at]:.6g}, norm of the gradient {found.norms[at]:.6g}\n"

        return LossError(
            f"the loss is no mean over rows, and a step under {source} sees the {rows} rows of a batch in parts. On the first batch:\n"
            + line(f"seen {parts}:", 0)
            + line("seen at once:", 1)
            + f"    norm of the difference of the gradients: {found.gradient_distance:.6g}\n"
            f"    fix: {' and '.join(changes)}, which was tried and sees them at once; or a loss that returns (sum, count), both "
            "summed over the rows it is given, or one value per row that depends on no other row. Where the loss of a part is what "
            "you want: loss=spmd.losses.of_parts(loss)."
        )


def _coarse(way: Way, state: State) -> bool:
    """Whether the model computes something in fewer bits than float32 has; a way does not, whatever the precision of the run is."""
    made = equations(jax.make_jaxpr(way)(state).jaxpr)
    return any(getattr(var.aval, "dtype", None) in COARSE for found in made for var in found.outvars)


def _loss_and_gradients(step: Step, state: State, *, batch: Tree, weights: jax.Array) -> tuple[jax.Array, Tree]:
    with jax.default_matmul_precision("highest"):
        reduced, _ = reduced_gradients(step, state, batch, weights, {})
        return mean_loss(reduced.metrics), reduced.values


@jax.jit
def _numbers(loss: jax.Array, grads: Tree, other_loss: jax.Array, others: Tree) -> jax.Array:
    """float32[5]: both losses, both norms, and the norm of the difference."""

    def norm(tree: Tree) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))

    difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), grads, others)
    return jnp.stack([loss, other_loss, norm(grads), norm(others), norm(difference)])


def _read(numbers: jax.Array) -> tuple[tuple[float, float], tuple[float, float], float]:
    """On the host; every process takes those of process 0, so that all decide alike."""
    found = np.asarray(numbers) if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(np.asarray(numbers))
    left, right, one, other, distance = map(float, found)
    return (left, right), (one, other), distance


@jax.jit
def _jittered(params: Tree) -> Tree:
    """Arrays whose entries are all alike, with entries that are not: where weights begin at zero all rows may look alike."""
    key = jax.random.key(0)

    def jittered(p: jax.Array) -> jax.Array:
        return p + jnp.where(p.max() == p.min(), JITTER, 0.0).astype(p.dtype) * jax.random.normal(key, p.shape, p.dtype)

    return jax.tree.map(lambda p: jittered(p) if p.size else p, params)


@functools.partial(jax.jit, static_argnums=1)
def _rounded(params: Tree, size: float) -> Tree:
    """Every entry changed by this part of itself, up or down."""
    key = jax.random.key(1)
    return jax.tree.map(lambda p: p * (1 + size * jax.random.rademacher(key, p.shape, p.dtype)), params)
