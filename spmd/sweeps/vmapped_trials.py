"""Trials of one shape as one compiled program: their states are stacked and sharded over the mesh's
`net` axis.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import spec_axes
from spmd.base.tree import Tree, abstract, describe, flatten
from spmd.base.xla import compiled_count, replicate, shard_map
from spmd.data.device_dataset import replicate_arrays
from spmd.errors import LayoutError, ModelError, OptimizerError, SpmdError, first_line
from spmd.sweeps.config import SweepConfig, Trial
from spmd.sweeps.search_space import SEED
from spmd.train.compiled_step import prepare_program
from spmd.train.evaluation import naming_differences
from spmd.train.model_setup import PlacedModel
from spmd.train.state import State
from spmd.train.step import Step, already_in_shard_map, scan_steps, train_step
from spmd.train.update_rules import Synchronous

NET, DATA = "net", "data"


class VmappedTrials:
    """The compiled functions for trials that differ only in what is traced.

    `values` are the traced hyper-parameters, float32[slots] each; `states` have leaves [slots,
    ...]. Slots are sharded over `net`; those of one device run one after the other or vmapped, each
    trial over the devices along `data`. `data()` returns the examples, replicated on every device;
    it is called at the first step.
    """

    def __init__(self, study: SweepConfig, first: Trial, mesh: Mesh, data: Callable[[], Tree]):
        self.study = study
        self.first = first
        self.mesh = mesh
        self._data = data
        # Since jax 0.11 an AbstractMesh is Explicit by default, and models that say nothing of
        # sharding fail on one.
        inner = AbstractMesh((mesh.shape.get(DATA, 1),), (DATA,), axis_types=(AxisType.Auto,))
        placed = PlacedModel(study.train_config(first), inner, study.layout)
        self.program = prepare_program(placed, study.data.sample())
        self.placed = self.program.placed
        self._check()
        self._compiled: dict[tuple, Any] = {}

    def _check(self) -> None:
        placed = self.placed
        layout = placed.resolved.layout
        does = ""
        if placed.storage is not None:
            does = "keeps parameters on servers"
        for path, place in placed.resolved.all_placements.items():
            if not does and (spec_axes(place.spec) or spec_axes(place.state_spec)):
                does = f"shards {path}"
        if does:
            fix = 'a layout that replicates them, such as "data_parallel".'
            raise LayoutError(
                f"{layout.source} {does}, and each trial of a sweep replicates its parameters.",
                fix=fix,
            )
        if layout.memory.optimizer != "device":
            why = (
                f"{layout.source}: [memory] keeps moments in the host's memory; a sweep keeps "
                "those of a chunk on the devices."
            )
            raise LayoutError(why, fix='[memory] optimizer = "device".')
        if layout.optimizer.matrices != "compiler":
            why = (
                f"{layout.source}: [optimizer] matrices gives each matrix to a device; in a sweep "
                "each updates all matrices of a trial."
            )
            raise LayoutError(why, fix="leave it out.")
        if jax.tree.leaves(placed.abstract_state.exchange):
            why = (
                f"{layout.source} has codecs with a residual for each worker, and a sweep keeps "
                "one state for each trial."
            )
            raise LayoutError(
                why, fix="[gradients] error_feedback = false, or a codec without state."
            )
        if placed.resolved.workers > 1 and not placed.exchange.reduction.manual:
            why = (
                f'{layout.source}: reduction "{layout.gradients.reduction}" leaves gradients to '
                "XLA, which a sweep does not support."
            )
            raise LayoutError(why, fix='[gradients] reduction = "all_reduce".')
        params = abstract(placed.abstract_state.params)

        def initial_moments(values: Tree, params: Tree) -> Tree:
            return self._optimizer(values).init(params)

        try:
            jax.eval_shape(initial_moments, self._abstract_values(), params)
        except SpmdError:
            raise
        except Exception as error:
            fix = "no float() of such a value, which is an argument of the program."
            raise OptimizerError(
                f"the optimizer's init fails on traced values: {first_line(error)}", fix=fix
            ) from error

    def _abstract_values(
        self, *slots: int, sharding: NamedSharding | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(slots, jnp.float32, sharding=sharding)
            for name in self.study.traced(self.first)
        }

    def _optimizer(self, values: Tree) -> Any:
        return self.placed.scaled(self.study.optimizer_of({**self.first.all_values, **values}))

    # states ---------------------------------------------------------------------------------------

    def initial_state(self, trial: Trial) -> State:
        """The host state of a trial at step 0."""
        values = {name: jnp.float32(value) for name, value in self.study.traced(trial).items()}
        # else flax (0.12) places annotated variables on a mesh as it makes them, and there is none
        with nnx.use_eager_sharding(False):
            if self.study.builds_from_seed:  # in Python: flax takes no traced seed
                try:
                    state = jax.device_get(self._open(trial.seed, trial.seed, values))
                except SpmdError as error:
                    error.add_note(f"of trial {trial.number}: seed={trial.seed}")
                    raise
                self._check_shapes(trial, state)
                return state
            return jax.device_get(self._compiled_open(jnp.uint32(trial.seed), values))

    def _check_shapes(self, trial: Trial, state: State) -> None:
        shapes = _described(state.params)
        first_shapes = _described(self.placed.abstract_state.params)
        for path in dict.fromkeys([*first_shapes, *shapes]):
            shape = shapes.get(path)
            first_shape = first_shapes.get(path)
            if shape != first_shape:
                raise ModelError(
                    f"with seed={trial.seed} (trial {trial.number}) make_model gives {path} "
                    f"{shape}, and {first_shape} with "
                    f"seed={self.first.seed} (trial {self.first.number}).",
                    fix="shapes that do not depend on the seed; what decides them as a "
                    "hyper-parameter of its own.",
                )

    def _open(self, seed: Any, built_from: int, values: Tree) -> State:
        build = self.study.model({**self.first.all_values, SEED: built_from})
        return self.placed.states.open_in_trace(build, self._optimizer(values), seed)

    @functools.cached_property
    def _compiled_open(self) -> Any:
        return jax.jit(lambda seed, values: self._open(seed, self.first.seed, values))

    def stack(self, slots: int, state_of: Callable[[int], Any]) -> Any:
        """The host trees of all slots, stacked on the mesh; `state_of` is called with the slots of
        this process.
        """

        def stacked(*leaves: Any) -> jax.Array:
            return jax.make_array_from_process_local_data(
                self._slot_sharding, np.stack(leaves), (slots, *np.shape(leaves[0]))
            )

        return jax.tree.map(stacked, *map(state_of, self._local_slots(slots)))

    def host_states(self, states: Any, slots: Sequence[int]) -> list[Any]:
        """The states in these slots, on the host of every process; all processes call this."""
        if not slots:
            return []
        local = jax.device_get(
            multihost_utils.global_array_to_host_local_array(states, self.mesh, PartitionSpec(NET))
        )
        local_slots = self._local_slots(jax.tree.leaves(states)[0].shape[0])
        positions = {slot: at for at, slot in enumerate(local_slots)}
        host_states = []
        for slot in slots:
            state = jax.tree.map(operator.itemgetter(positions.get(slot, 0)), local)
            if jax.process_count() > 1:
                state = _broadcast(state, is_source=slot in positions)
            host_states.append(state)
        return host_states

    def _local_slots(self, slots: int) -> list[int]:
        places = self._slot_sharding.addressable_devices_indices_map((slots,)).values()
        # Devices along `data` hold the same slots.
        return np.unique(np.concatenate([np.arange(slots)[place] for place in places])).tolist()

    def abstract(self, slots: int) -> State:
        """Shapes and shardings of the states of `slots` slots."""
        state = self.placed.abstract_state
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (slots, *leaf.shape), leaf.dtype, sharding=self._slot_sharding
            ),
            state,
        )

    def values(self, trials: Sequence[Trial]) -> dict[str, jax.Array]:
        """The traced hyper-parameters of the trials in the slots."""
        traced = [self.study.traced(trial) for trial in trials]
        columns = {}
        for name in traced[0]:
            column = np.array([values[name] for values in traced], np.float32)
            columns[name] = _put(column, self._slot_sharding)
        return columns

    @property
    def _slot_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(NET))

    # programs -------------------------------------------------------------------------------------

    def steps(
        self, states: State, values: Tree, rows: np.ndarray, weights: np.ndarray
    ) -> tuple[State, jax.Array]:
        """`weights.shape[0]` updates of every slot; `states` are donated.

        Args:
          rows: int32[slots, steps, rows], the rows of each batch; or [1, steps, rows], where all
            slots share them.
          weights: float32[steps, rows], 0 for padding.

        Returns:
          The states, and metrics float32[slots, steps, 2, names], sums and counts, which every
          process can read.
        """
        shared = rows.shape[0] == 1
        function, (rows_sharding, weights_sharding) = self._steps(rows.shape, shared=shared)
        placed = _put(rows.astype(np.int32), rows_sharding), _put(weights, weights_sharding)
        states, measured = function(states, values, self._data(), *placed)
        return states, _readable(measured)

    def lowered(self, slots: int, count: int, rows: int, *, shared: bool) -> Any:
        """Lower `count` updates of `slots` slots from shapes; `steps` then runs that program.
        `shared`: all slots have the same rows.
        """
        orders = slots
        if shared:
            orders = 1
        shape = (orders, count, rows)
        function, (rows_sharding, weights_sharding) = self._steps(shape, shared=shared)
        values = self._abstract_values(slots, sharding=self._slot_sharding)
        row_numbers = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows_sharding)
        weights = jax.ShapeDtypeStruct(shape[1:], jnp.float32, sharding=weights_sharding)
        return function.trace(
            self.abstract(slots), values, self.abstract_data, row_numbers, weights
        ).lower()

    @property
    def abstract_data(self) -> Tree:
        """Shapes and shardings of the examples."""
        return abstract(self.study.data.arrays, NamedSharding(self.mesh, PartitionSpec()))

    def _steps(
        self, shape: tuple[int, ...], *, shared: bool
    ) -> tuple[Any, tuple[NamedSharding, NamedSharding]]:
        """The function of `steps` for rows of this shape, and the shardings of rows and weights."""
        slots = NET
        if shared:
            slots = None
        rows_spec = PartitionSpec(slots)
        batch = PartitionSpec()
        if DATA in self.mesh.shape:
            rows_spec = PartitionSpec(slots, None, DATA)
            batch = PartitionSpec(None, DATA)

        def local(
            states: State, values: Tree, data: Tree, rows: jax.Array, weights: jax.Array
        ) -> tuple[State, jax.Array]:
            def steps_of_trial(
                state: State, values: Tree, rows: jax.Array
            ) -> tuple[State, jax.Array]:
                return self._scan_steps(self._optimizer(values), state, data, rows, weights)

            if shared:
                return self._map_trials(
                    lambda state, values: steps_of_trial(state, values, rows[0]), states, values
                )
            return self._map_trials(steps_of_trial, states, values, rows)

        specs = (PartitionSpec(NET), PartitionSpec(NET), PartitionSpec(), rows_spec, batch)
        function = self._function(
            ("steps", *shape, shared), local, specs, 2, self.program.donate_argnums
        )
        return function, (NamedSharding(self.mesh, rows_spec), NamedSharding(self.mesh, batch))

    def evaluate(self, states: State, batch: Tree, weights: np.ndarray) -> np.ndarray:
        """float64[slots, 2, names] over one batch, sums and counts, in evaluation mode; every
        device of a trial computes it.
        """
        batch, placed_weights = replicate_arrays((batch, weights), self.mesh)
        sums = self._evaluation(weights.shape[0])(states, batch, placed_weights)
        return np.asarray(jax.device_get(_readable(sums)), np.float64)

    def _evaluation(self, rows: int) -> Any:
        evaluation = self.program.evaluation

        def local(states: State, batch: Tree, weights: jax.Array) -> jax.Array:
            return self._map_trials(
                lambda state: evaluation.sum_batch(state.variables, batch, weights), states
            )

        replicated = PartitionSpec()
        return self._function(
            ("evaluate", rows), local, (PartitionSpec(NET), replicated, replicated), 1
        )

    def check_evaluation(self) -> None:
        """Trace the evaluation before anything is trained.

        Raises:
          DataError: it fails on the evaluation data, which differ from the training data.
        """
        if self.study.eval_data is None:
            return
        sample = self.study.eval_data.sample()
        rows = jax.tree.leaves(sample)[0].shape[0]
        batch = abstract(
            (sample, np.zeros(rows, np.float32)), NamedSharding(self.mesh, PartitionSpec())
        )
        with naming_differences(sample, self.placed.spec.sample):
            self._evaluation(rows).trace(self.abstract(self.mesh.shape[NET]), *batch)

    def _map_trials(self, each: Any, *trees: Tree) -> Any:
        """Return the results of `each` on each entry along dim 0 of trees.

        One after the other for a study that is exact, since larger operations sum in another order,
        and where there are convolutions, which would become grouped ones.
        """
        loss = self.program.loss
        if not self.study.exact and not loss.has_convolutions:
            return jax.vmap(each)(*trees)
        if not loss.unrolls:
            return jax.lax.map(lambda entries: each(*entries), trees)
        results = []
        for at in range(jax.tree.leaves(trees)[0].shape[0]):
            results.append(each(*jax.tree.map(operator.itemgetter(at), trees)))
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

    def _scan_steps(
        self, optimizer: Any, state: State, data: Tree, rows: jax.Array, weights: jax.Array
    ) -> tuple[State, jax.Array]:
        """Return the state after `rows.shape[0]` updates of a trial, and their metrics, inside a
        `jax.shard_map` over all axes: `data` is replicated, `rows` and `weights` are this worker's,
        [steps, rows].
        """
        program = self.program
        step = program.make_step(rows.shape[1] * self.placed.resolved.workers, True)
        step = Step(step.worker, Synchronous(program.sync, optimizer), already_in_shard_map)
        update = functools.partial(train_step, step)
        return scan_steps(update, state, data, rows, weights, {}, unroll=program.loss.unrolls)

    def _function(
        self, key: tuple, local: Any, specs: tuple, outputs: int, donated: tuple[int, ...] = ()
    ) -> Any:
        if key not in self._compiled:
            out_specs: Any = PartitionSpec(NET)
            if outputs > 1:
                out_specs = (out_specs,) * outputs
            mapped = shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs)
            self._compiled[key] = jax.jit(
                mapped, donate_argnums=donated, compiler_options=self.program.functions.options
            )
        return self._compiled[key]

    def compilations(self) -> int:
        """Return the number of programs of steps that have been compiled."""
        steps = [function for key, function in self._compiled.items() if key[0] == "steps"]
        return sum(map(compiled_count, steps))


def _described(params: Tree) -> dict[str, str]:
    """Dtype and shape of every parameter, by path."""
    return {path: describe(leaf) for path, leaf in flatten(params).items()}


def _put(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array, the same in all processes, on the mesh."""
    # `Chunk.train` forbids transfers, and this one is intended
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])


def _readable(x: jax.Array) -> jax.Array:
    """The array, replicated if other processes have parts of it."""
    if x.is_fully_addressable:
        return x
    return replicate(x)


def _broadcast(tree: Any, *, is_source: bool) -> Any:
    """The host tree of the one process that is the source, in all processes: as bytes, since a sum
    of numbers would lose the sign of -0.
    """
    raw = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), tree)
    raw = multihost_utils.broadcast_one_to_all(raw, is_source)
    return jax.tree.map(
        lambda leaf, data: np.asarray(data).view(leaf.dtype).reshape(leaf.shape), tree, raw
    )
