"""The state of a run: made sharded on the mesh, replicated only where the layout says so."""

import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import pspec
from spmd.base.tree import Tree, describe, flatten, path_of
from spmd.errors import OptimizerError, OptionError, short_repr, type_name
from spmd.layout.resolve import Placement, Resolved
from spmd.models.base import Model, Variables
from spmd.train.adapt_optimizer import adapt_optimizer
from spmd.train.host_memory import HOST
from spmd.train.matrix_owners import param_within
from spmd.train.owned_matrices import border_spec

# from a key and the parameters to what the exchange remembers at step 0
Memory = Callable[[Any, Tree], Tree]
Opening = Callable[[Tree], Any]  # from the parameters to the optimizer's state at step 0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt", "stats", "rngs", "key", "exchange", "frozen"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Everything that changes during training, and all that is needed to resume: it is what a
    checkpoint holds.

    Attributes:
      step: int32 scalar, updates made so far; on every device.
      params: the model's parameters that are trained, laid out by the layout, in their own dtype;
        None in place of all others.
      opt: the optax state, each leaf laid out like its parameter or sharded further; where every
        worker has its own, [workers, ...] each.
      stats: other arrays of the model that change (BatchNorm averages); on every device, equal.
      rngs: the model's own random streams, as key data; on every device.
      key: uint32 key data of the run's seed; on every device. With `step` it gives each step's
        random numbers.
      exchange: what gradient communication keeps, by path: "residual", what each worker's codec has
        lost, [workers, ...], sharded over workers; "codec", a codec's own arrays; and what the
        workers and servers of a parameter server keep. Empty if nothing is kept.
      frozen: the model's parameters that are not trained, laid out by the layout, in the dtype or
        the codes in which they are kept; None in place of all others. Empty if all are trained.
        They never change: they are here so that a checkpoint holds all of a model.

    Example:
      >>> import spmd
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.ones((4, 1))}, lambda params, x: x @ params["w"]
      ... )
      >>> state = spmd.Trainer(
      ...     model, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1)
      ... ).init()
      >>> int(state.step), state.params["w"].shape
      (0, (4, 1))
    """

    step: Any
    params: Tree
    opt: Any
    stats: Tree
    rngs: Tree
    key: Any
    exchange: Tree
    frozen: Tree = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> Variables:
        """The model's part."""
        return Variables(self.params, self.stats, self.rngs, self.frozen)


def check_optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with extra arguments allowed.

    Raises:
      OptimizerError: not an optax gradient transformation.
    """
    methods = (getattr(optimizer, "init", None), getattr(optimizer, "update", None))
    has_methods = all(callable(method) for method in methods)
    if not has_methods or isinstance(optimizer, nnx.Optimizer | type):
        shown = getattr(optimizer, "__name__", None)
        if not shown and isinstance(optimizer, str | int | float | None):
            shown = repr(optimizer)
        why = f"optimizer={shown or '...'} is {type_name(optimizer)}, not an optax gradient "
        why += "transformation."
        fix = "such as optax.adamw(1e-3); a function that makes one must be called."
        raise OptimizerError(why, fix=fix)
    return adapt_optimizer(optimizer)


def make_state(variables: Variables, opening: Opening, seed: int, memory: Memory) -> State:
    """A state at step 0, under a trace; `opening` makes the optimizer's, and `memory` what the
    exchange of gradients remembers.
    """
    # Whatever jax_default_prng_impl is: with threefry, a draw depends on its key and its index
    # alone, and so not on the mesh.
    key = jax.random.key(seed, impl="threefry2x32")
    opt = opening(variables.params)
    data = seed_data(seed)
    exchange = memory(key, variables.params)
    return State(
        jnp.int32(0),
        variables.params,
        opt,
        variables.stats,
        variables.rngs,
        data,
        exchange,
        variables.frozen,
    )


def seed_data(seed: Any) -> jax.Array:
    """A run's `State.key`, uint32[2], from its seed."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def opening_per_worker(opening: Opening, workers: int) -> Opening:
    """An optimizer's state for every worker, leaves [workers, ...]."""

    def open_for_workers(params: Tree) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape)), opening(params)
        )

    return open_for_workers


def state_shardings(
    abstract: State,
    resolved: Resolved,
    optimized: Resolved,
    mesh: Mesh,
    memory: Tree,
    *,
    local: bool = False,
) -> State:
    """The place of every leaf of the state: parameters by their spec, moments by their parameter's,
    the exchange's by `memory`.

    `optimized`: parameters as the optimizer sees them. `local`: every worker has an optimizer's
    state of its own, and all of it lies over the workers.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def param(keys: tuple, leaf: Any) -> NamedSharding:
        del leaf
        return NamedSharding(mesh, pspec(resolved.placement(path_of(keys)).spec))

    def moment(keys: tuple, leaf: Any) -> NamedSharding:
        if local:
            return NamedSharding(mesh, PartitionSpec(resolved.data_axes))
        path = path_of(keys)
        place = owner_of(path, leaf, optimized)
        if place is not None:
            sharding = NamedSharding(mesh, pspec(place.state_spec))
            if resolved.layout.memory.optimizer == "host":
                return sharding.with_memory_kind(HOST)
            return sharding
        if not resolved.layout.optimizer.owners:
            return replicated
        # an array of another shape than its parameter's, which belongs to a matrix or to a part
        # of it
        matrix = param_within(path, optimized.placements)
        if matrix is None:
            return replicated
        spec = border_spec(leaf.shape, optimized.placements[matrix], mesh)
        return NamedSharding(mesh, pspec(spec))

    map_with_path = jax.tree_util.tree_map_with_path
    return dataclasses.replace(
        jax.tree.map(lambda _: replicated, abstract),
        params=map_with_path(param, abstract.params),
        frozen=map_with_path(param, abstract.frozen),
        opt=map_with_path(moment, abstract.opt),
        exchange=jax.tree.map(
            lambda spec: NamedSharding(mesh, pspec(spec)),
            memory,
            is_leaf=lambda x: isinstance(x, tuple),
        ),
    )


def owner_of(path: str, leaf: Any, resolved: Resolved) -> Placement | None:
    """The parameter an optimizer leaf belongs to: its path ends with the parameter's, and the
    shapes are equal.

    Of several the one with the longest path: Adam's `mu/w` is of `mu/w`, if there is such a
    parameter of its shape, and else of `w`.
    """
    parts = path.split("/")
    for start in range(len(parts)):
        place = resolved.placements.get("/".join(parts[start:]))
        if place is not None and place.shape == leaf.shape:
            return place
    return None


def replicated_moments(abstract: State, resolved: Resolved) -> list[str]:
    """Optimizer leaves larger than a scalar that belong to no parameter's shape and so stay
    replicated (factored moments).
    """
    paths = []
    for path, leaf in flatten(abstract.opt).items():
        if not leaf.ndim or not leaf.sharding.is_fully_replicated:
            continue
        if owner_of(path, leaf, resolved) is None:
            paths.append(path)
    return paths


def copy_state(
    concrete: Variables,
    opening: Opening,
    seed: int,
    shardings: State,
    memory: Memory,
    place: Callable[..., jax.Array],
) -> State:
    """The state at step 0 of a model that was given with its arrays: copied by `place_copy`, or
    used by `use_or_copy`.
    """
    variables = jax.tree.map(place, concrete, shardings.variables)
    return donate_to_state(variables, opening, seed, shardings, memory)


def use_or_copy(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the caller's that is given up: itself if it lies so already, or else a copy."""
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    return place_copy(leaf, sharding)


def donate_to_state(
    variables: Variables, opening: Opening, seed: int, shardings: State, memory: Memory
) -> State:
    """The state at step 0 of arrays that are on the mesh already; they are consumed."""

    def begin(variables: Variables) -> State:
        state = make_state(variables, opening, seed, memory)
        return dataclasses.replace(state, opt=copied(state.opt))

    return jax.jit(begin, out_shardings=shardings, donate_argnums=0)(variables)


def make_state_builder(
    model: Model,
    opening: Opening,
    seed: int,
    run: Callable[[Any], Any],
    shardings: State,
    memory: Memory,
) -> Any:
    """The function that makes the state at step 0 of a model that is yet to be made, each piece on
    the device that keeps it.
    """
    return jax.jit(
        lambda: make_state(model.make_variables(jax.random.key(seed), run), opening, seed, memory),
        out_shardings=shardings,
    )


def checksums(concrete: Variables) -> dict[str, str]:
    """Facts that decide the state at step 0 of a model that was given with its arrays."""
    facts = {}
    for path, leaf in flatten(concrete).items():
        if _spread(leaf):
            # no process has all of it; it is one array for all
            facts[f"initial {path}"] = f"{describe(leaf)} over all processes"
        else:
            # numpy has no view of a scalar, or of strided memory, as bytes.
            data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data
            facts[f"initial {path}"] = f"of checksum {zlib.crc32(data):08x}"
    return facts


def _spread(leaf: Any) -> bool:
    """Return whether parts of an array are only in other processes."""
    if not isinstance(leaf, jax.Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def check_placed(state: State, like: State) -> None:
    """Check that a state has the arrays of another one, in the same places.

    Raises:
      OptionError: names the first that differs.
    """
    leaves = flatten(state)
    expected = flatten(like)
    for path in dict.fromkeys([*expected, *leaves]):
        leaf = leaves.get(path)
        other = expected.get(path)
        if not _lies_as(leaf, other):
            why = f"this state is not of this trainer: {path} is {_described(leaf)}, "
            why += f"not {_described(other)}."
            raise OptionError(
                why,
                fix="a state of trainer.init, trainer.restore or trainer.step of the same trainer.",
            )


def _lies_as(leaf: Any, other: Any) -> bool:
    """Return whether two arrays are of the same shape and dtype, and in the same places."""
    if leaf is None or other is None:
        return False
    # Not `==`: JAX writes one sharding in several ways, such as with or without a last None.
    placed = leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    return placed and describe(leaf) == describe(other)


def _described(leaf: Any) -> str:
    if leaf is None:
        return "nothing"
    return f"{describe(leaf)} as {leaf.sharding}"


def copied(opt: Tree) -> Tree:
    """Distinct buffers: an optimizer may keep a parameter itself in its state, and one buffer
    cannot be donated twice.
    """
    return jax.tree.map(jnp.copy, opt)


def place_copy(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of `leaf` on the mesh; no buffer of the caller's is shared, so donating it is safe."""
    if _spread(leaf):
        # No process has all of the array, so the devices copy it.
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)

    def copy_shard(index: Any) -> np.ndarray:
        # JAX may use the buffer of a numpy array as it is (jax 0.10, CPU devices, aligned buffers).
        return np.array(host[index], copy=True)

    return jax.make_array_from_callback(host.shape, sharding, copy_shard)


class StepNumbers:
    """The number of the newest step, without waiting for the device where that can be known."""

    def __init__(self):
        # the newest state, if it is still there, and its number
        self._newest: tuple[Callable[[], State | None], int] = (lambda: None, 0)

    def record(self, state: State, number: int) -> None:
        """Keep the number of updates of the newest state, and no reference to it."""
        self._newest = weakref.ref(state), number

    def find(self, state: State) -> int:
        """Return the number of updates made to a state so far."""
        newest, number = self._newest
        if state is newest():
            return number
        return int(state.step)


def check_alive(state: State) -> None:
    """A state that a step has consumed must not be used again: it can end the process inside the
    runtime.
    """
    if not isinstance(state, State):
        raise OptionError(
            f"state={short_repr(state)} is {type_name(state)}.",
            fix="what trainer.init() or a step returns.",
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise OptionError(
            "this state was consumed by a step.",
            fix="continue with the one that the step returned: state, metrics = ...",
        )
