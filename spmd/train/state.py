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

from spmd.base.specs import Spec, pspec
from spmd.base.tree import Tree, describe, flatten, path_of
from spmd.errors import OptimizerError, OptionError, short_repr, type_name
from spmd.layout.resolve import Resolved
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
    if not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ) or isinstance(optimizer, nnx.Optimizer | type):
        shown = getattr(optimizer, "__name__", None) or (
            repr(optimizer) if isinstance(optimizer, str | int | float | None) else "..."
        )
        raise OptimizerError(
            f"optimizer={shown} is {type_name(optimizer)}, not an optax gradient transformation.",
            fix="such as optax.adamw(1e-3); a function that makes one must be called.",
        )
    return adapt_optimizer(optimizer)


def make_state(variables: Variables, opening: Opening, seed: int, memory: Memory) -> State:
    """A state at step 0, under a trace; `opening` makes the optimizer's, and `memory` what the
    exchange of gradients remembers.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    opt, data = opening(variables.params), seed_data(seed)
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
    return lambda params: jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape)), opening(params)
    )


def state_shardings(
    abstract: State,
    resolved: Resolved,
    optimized: Resolved,
    mesh: Mesh,
    memory: Tree,
    *,
    local: bool = False,
) -> State:
    """Where every leaf of the state lives: parameters by their spec, moments by their parameter's,
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
        place = owner_of(path_of(keys), leaf, optimized)
        if place is None:
            return (
                replicated
                if not resolved.layout.optimizer.owners
                else NamedSharding(mesh, pspec(spec_of(keys, leaf)))
            )
        sharding = NamedSharding(mesh, pspec(place.state_spec))
        return (
            sharding.with_memory_kind(HOST)
            if resolved.layout.memory.optimizer == "host"
            else sharding
        )

    def spec_of(keys: tuple, leaf: Any) -> Spec:
        """Of an array of another shape than its parameter's, which belongs to a matrix or to a part
        of it.
        """
        path = param_within(path_of(keys), optimized.placements)
        return () if path is None else border_spec(leaf.shape, optimized.placements[path], mesh)

    rest = jax.tree.map(lambda _: replicated, abstract)
    return dataclasses.replace(
        rest,
        params=jax.tree_util.tree_map_with_path(param, abstract.params),
        frozen=jax.tree_util.tree_map_with_path(param, abstract.frozen),
        opt=jax.tree_util.tree_map_with_path(moment, abstract.opt),
        exchange=jax.tree.map(
            lambda spec: NamedSharding(mesh, pspec(spec)),
            memory,
            is_leaf=lambda x: isinstance(x, tuple),
        ),
    )


def owner_of(path: str, leaf: Any, resolved: Resolved):
    """The parameter an optimizer leaf belongs to: its path ends with the parameter's, and the
    shapes are equal.

    Of several the one with the longest path: Adam's `mu/w` is of `mu/w`, if there is such a
    parameter of its shape, and else of `w`.
    """
    parts = path.split("/")
    found = (resolved.placements.get("/".join(parts[start:])) for start in range(len(parts)))
    return next((place for place in found if place is not None and place.shape == leaf.shape), None)


def replicated_moments(abstract: State, resolved: Resolved) -> list[str]:
    """Optimizer leaves larger than a scalar that belong to no parameter's shape and so stay
    replicated (factored moments).
    """
    replicated = {
        path: leaf
        for path, leaf in flatten(abstract.opt).items()
        if leaf.ndim and leaf.sharding.is_fully_replicated
    }
    return [path for path, leaf in replicated.items() if owner_of(path, leaf, resolved) is None]


def copy_state(
    given: Variables,
    opening: Opening,
    seed: int,
    shardings: State,
    memory: Memory,
    place: Callable[..., jax.Array],
) -> State:
    """The state at step 0 of a model that was given with its arrays: copied by `place_copy`, or
    used by `take`.
    """
    return donate_to_state(
        jax.tree.map(place, given, shardings.variables), opening, seed, shardings, memory
    )


def take(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the caller's that is given up: itself if it lies so already, or else a copy."""
    placed = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return leaf if placed else place_copy(leaf, sharding)


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


def checksums(given: Variables) -> dict[str, str]:
    """Facts that decide the state at step 0 of a model that was given with its arrays."""
    facts = {}
    for path, leaf in flatten(given).items():
        if _spread(leaf):
            # no process has all of it; it is one array for all
            facts[f"initial {path}"] = f"{describe(leaf)} over all processes"
        else:
            facts[f"initial {path}"] = (
                "of checksum "
                f"{zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data):08x}"
            )
    return facts


def _spread(leaf: Any) -> bool:
    """Whether parts of an array are only in other processes."""
    return isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    )


def check_placed(state: State, like: State) -> None:
    """Check that a state has the arrays of another one, in the same places.

    Raises:
      OptionError: names the first that differs.
    """
    have, want = flatten(state), flatten(like)
    for path in dict.fromkeys([*want, *have]):
        leaf, wanted = have.get(path), want.get(path)
        described = [
            "nothing" if each is None else f"{describe(each)} as {each.sharding}"
            for each in (leaf, wanted)
        ]
        placed = (
            leaf is not None
            and wanted is not None
            and leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        )
        if not placed or describe(leaf) != describe(wanted):
            why = (
                f"this state is not of this trainer: {path} is {described[0]}, not {described[1]}."
            )
            raise OptionError(
                why,
                fix="a state of trainer.init, trainer.restore or trainer.step of the same trainer.",
            )


def copied(opt: Tree) -> Tree:
    """Distinct buffers: an optimizer may keep a parameter itself in its state, and one buffer
    cannot be donated twice.
    """
    return jax.tree.map(jnp.copy, opt)


def place_copy(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of `leaf` on the mesh; no buffer of the caller's is shared, so donating it is safe."""
    if _spread(leaf):
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: np.array(host[index], copy=True)
    )


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
        return number if state is newest() else int(state.step)


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
