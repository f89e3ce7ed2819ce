"""The states of a placed model: how they begin, and their arrays as the model has them."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import nnx

from spmd.base.tree import Tree, flatten
from spmd.models.base import Model, Variables
from spmd.models.frozen import Frozen, FrozenModel
from spmd.nn.layer_order import StageOrder
from spmd.sync.gradient_sync import GradientSync
from spmd.train.host_memory import to_device
from spmd.train.model_spec import ModelSpec
from spmd.train.state import (
    Opening,
    State,
    checksums,
    copied,
    copy_state,
    donate_to_state,
    make_state,
    make_state_builder,
    place_copy,
    use_or_copy,
)
from spmd.train.weight_average import average_of
from spmd.wire.server.packing import Storage


@dataclasses.dataclass(frozen=True, eq=False)
class StateFactory:
    """Makes the states of a placed model, each array in place on the mesh.

    Attributes:
      model: as training sees it.
      frozen: which parameters are not trained.
      packing: how the state keeps parameters, where it is not as the model has them.
      opening: makes the optimizer's state at step 0.
      exchange: makes what the reduction of gradients keeps from step to step.
      shardings: of every leaf of a state.
    """

    spec: ModelSpec
    model: Model
    frozen: Frozen
    packing: Storage | StageOrder | None
    opening: Opening
    exchange: GradientSync
    shardings: State
    seed: int

    # beginnings -----------------------------------------------------------------------------------

    def init(self) -> State:
        """Return a new state."""
        concrete = self.model.concrete
        if concrete is None:
            # else flax (0.12) places annotated variables on a mesh as it makes them
            with nnx.use_eager_sharding(False):
                return self._builder()
        place = place_copy
        if self.spec.as_passed.handed_over:
            place = use_or_copy
        state = copy_state(
            concrete, self.opening, self.seed, self.shardings, self.exchange.init, place
        )
        self.spec.release()
        return state

    def begin(self, params: Tree, stats: Tree, frozen: Tree) -> State:
        """Return a new state of these parameters and statistics, which are on the mesh already and
        are consumed.
        """
        return self._donated(Variables(params, stats, self._begin_rngs(), frozen))

    def restart(self, state: State) -> State:
        """Return a state at step 0 with the arrays of the model of `state`, which is consumed."""
        return self._donated(state.variables)

    def open_in_trace(self, build: Callable[[], Any], optimizer: Any, seed: Any) -> State:
        """Return a state at step 0 under a trace, of a model and an optimizer like these, and a
        seed that may be traced.
        """
        model = self.spec.rebuilt(build, seed)
        if self.frozen.paths:
            model = FrozenModel(model, self.frozen)
        variables = model.make_variables(jax.random.key(seed), self.spec.call_on_zeros)
        return make_state(variables, optimizer.init, seed, self.exchange.init)

    def init_facts(self) -> tuple[dict[str, str], str]:
        """Return the facts by name, and the text of the program, that decide a new state; either
        may be empty.
        """
        concrete = self.spec.adapted.concrete
        if concrete is not None:
            return checksums(concrete), ""
        with nnx.use_eager_sharding(False):
            return {}, self._builder.lower().as_text()  # `init` then compiles this lowering

    def init_memory(self, params: Tree) -> Tree:
        """Return the memory of the exchange of gradients at step 0 of these parameters."""
        key = jax.random.key(self.seed, impl="threefry2x32")
        return jax.jit(self.exchange.init, out_shardings=self.shardings.exchange)(key, params)

    def init_optimizer(self, params: Tree, paths: Collection[str]) -> dict[str, jax.Array]:
        """Return some arrays of the optimizer's state at step 0 of these parameters, by their paths
        in a `State`.
        """

        def select(opt: Any) -> dict[str, Any]:
            leaves = {f"opt/{name}": leaf for name, leaf in flatten(opt).items()}
            return {path: leaf for path, leaf in leaves.items() if path in paths}

        return jax.jit(
            lambda params: copied(select(self.opening(params))),
            out_shardings=select(self.shardings.opt),
        )(params)

    @functools.cached_property
    def _builder(self) -> Any:
        return make_state_builder(
            self.model,
            self.opening,
            self.seed,
            self.spec.call_on_zeros,
            self.shardings,
            self.exchange.init,
        )

    def _begin_rngs(self) -> Tree:
        """Return the model's random streams on the mesh; a concrete model is released then."""
        concrete = self.model.concrete
        if concrete is not None:
            rngs = jax.tree.map(place_copy, concrete.rngs, self.shardings.rngs)
            self.spec.release()
            return rngs

        def make_rngs() -> Tree:
            key = jax.random.key(self.seed)
            return self.model.make_variables(key, self.spec.call_on_zeros).rngs

        with nnx.use_eager_sharding(False):
            return jax.jit(make_rngs, out_shardings=self.shardings.rngs)()

    def _donated(self, variables: Variables) -> State:
        return donate_to_state(
            variables, self.opening, self.seed, self.shardings, self.exchange.init
        )

    # arrays as the model has them -----------------------------------------------------------------

    def unpacked(self, params: Tree) -> Tree:
        """Return the parameters of a state as the model itself has them."""
        if self.packing is None:
            return params
        return jax.jit(self.packing.unpack)(params)

    def variables(self, state: State) -> Variables:
        """Return the arrays of a state as the model itself has them."""
        frozen = state.frozen
        if isinstance(self.packing, StageOrder):
            frozen = jax.jit(self.packing.unpack)(frozen)
        return Variables(self.unpacked(state.params), state.stats, state.rngs, frozen)

    def averaged(self, state: State) -> State:
        """Return a state with the average of the weights in place of the weights, in their dtypes
        and shardings.
        """
        return dataclasses.replace(state, params=self._place_average(state.opt, state.params))

    @functools.cached_property
    def _place_average(self) -> Callable[[Any, Tree], Tree]:
        storage: Storage | None = None
        if isinstance(self.packing, Storage) and self.packing.unpacks:
            storage = self.packing

        def place(opt: Any, params: Tree) -> Tree:
            if storage is not None:
                params = storage.unpack(params)
            average = jax.tree.map(
                lambda leaf, like: leaf.astype(like.dtype),
                average_of(to_device(opt), params),
                params,
            )
            if storage is not None:
                average = storage.pack(average)
            return average

        return jax.jit(place, out_shardings=self.shardings.params)
