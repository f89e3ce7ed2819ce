"""A model, an optimizer and a layout, checked against each other: what the model is made of, and
where each array lives.

Nothing is allocated before `init`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from spmd.base.tree import Tree, flatten
from spmd.errors import ModelError, OptionError, option, short_repr
from spmd.layout.check import fit_layout
from spmd.layout.resolve import Resolved
from spmd.layout.schema import Layout
from spmd.layout.unused_axes import unused_axes, without_axes
from spmd.mesh import MeshSpec
from spmd.models.base import Model, Variables
from spmd.models.flax_linen import LinenModel
from spmd.models.frozen import Frozen, FrozenModel, join
from spmd.models.wrap import wrap
from spmd.nn.attention_kernels import IN_PLACE, PREFERRED
from spmd.nn.layer_order import StageOrder, StageOrderedModel, make_stage_order
from spmd.nn.parallel_context import UNSHARDED, ParallelConfig, parallel_scope
from spmd.nn.unchanged_models import with_calls
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import MeshAxes
from spmd.sync.notes import server_bytes
from spmd.sync.packed_model import PackedModel, place_packed, place_unpacked, unpacked_for
from spmd.train.choose_frozen import choose_frozen, with_adapters
from spmd.train.device_memory import memory_limit, tree_on_device
from spmd.train.host_memory import check_memory, to_device
from spmd.train.loss_scale import with_loss_scale
from spmd.train.matrix_owners import update_by_owners
from spmd.train.objective import Objective
from spmd.train.packing_check import check_packed
from spmd.train.precision import compute_dtype
from spmd.train.products import Products
from spmd.train.state import (
    Opening,
    State,
    check_optimizer,
    checksums,
    copied,
    copy_state,
    donate_to_state,
    make_state,
    make_state_builder,
    opening_per_worker,
    place_copy,
    state_shardings,
    take,
)
from spmd.train.weight_average import average_of
from spmd.wire.server.events import Events
from spmd.wire.server.packing import Storage


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What is trained and how, on any mesh and under any layout; the arguments of `fit` with these
    names.
    """

    model: Any
    loss: Callable[..., Any]
    optimizer: Any
    metrics: Mapping[str, Callable[..., Any]] | None = None
    precision: str = "float32"
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self):
        if self.metrics is not None and not isinstance(self.metrics, Mapping):
            raise OptionError(
                f"metrics={short_repr(self.metrics)} is not a dict.",
                fix="{name: function(model, batch)}.",
            )
        check_numbers(self.precision, self.accumulate, self.seed)


def check_numbers(precision: str = "float32", accumulate: int = 1, seed: int = 0) -> None:
    """Refuse an unknown precision, and numbers out of range.

    Raises:
      OptionError: names the argument, its value and the range.
    """
    compute_dtype(precision)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(
            f"{option('accumulate', short_repr(accumulate))}.",
            fix="a number of microbatches, from 1.",
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise OptionError(
            f"{option('seed', short_repr(seed))}.", fix="a whole number from 0 to 2**32 - 1."
        )


class PlacedModel:
    """A model on a mesh: what it is made of and where each array lives.

    On a mesh without devices, `platform` says what they would be ("cpu", "cuda"), and
    `device_memory` how many bytes programs may use on each (None: it is not known); then everything
    works except `init`. `kernels` is the platform whose kernels are called, if the step is compiled
    for another one, as an estimate.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Any,
        layout: Layout,
        platform: str | None = None,
        kernels: str | None = None,
        device_memory: int | None = None,
    ):
        self._as_passed, self.config = wrap(config.model), config
        self.mesh: Mesh = mesh  # or an AbstractMesh, of which jax asks the same
        self.platform = (
            jax.default_backend()
            if platform is None or not isinstance(mesh, AbstractMesh)
            else platform
        )
        self.kernels, self._device_memory = kernels or self.platform, device_memory
        self.objective, self.given_optimizer = (
            Objective(config.loss, dict(config.metrics or {})),
            self.scaled(config.optimizer),
        )
        self._layout = layout
        self._sample: Tree = None
        # entered while programs are compiled
        self.compiling: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def with_layout(
        self,
        mesh: Any,
        layout: Layout,
        *,
        accumulate: int | None = None,
        precision: str | None = None,
    ) -> "PlacedModel":
        """The same under another layout or mesh, which may be one without devices; the model is not
        traced again.
        """
        changed = {
            name: value
            for name, value in (("accumulate", accumulate), ("precision", precision))
            if value is not None
        }
        config = dataclasses.replace(self.config, model=self._as_passed, **changed)
        other = PlacedModel(config, mesh, layout, self.platform, self.kernels, self._device_memory)
        other.learn(self._sample)
        if layout.adapters == self._layout.adapters:
            # as traced here
            other._adapted, other._traced, other.axis_names = (
                self._adapted,
                self._traced,
                self.axis_names,
            )  # type: ignore[misc]
        return other

    def scaled(self, optimizer: Any) -> optax.GradientTransformationExtraArgs:
        """An optimizer as training uses it: for float16 it keeps a scale of the loss.

        Raises:
          OptimizerError: it is no gradient transformation.
        """
        return with_loss_scale(check_optimizer(optimizer), self.config.precision)

    def learn(self, sample: Tree) -> None:
        """Remember the shapes of a batch; a linen model cannot be initialised without."""
        self._sample = sample if self._sample is None else self._sample

    @property
    def sample(self) -> Tree:
        """The shapes of the first batch; None before it."""
        return self._sample

    @functools.cached_property
    def _adapted(self) -> Model:
        """The model as it was passed, with the layout's adapters."""
        return with_adapters(self._as_passed, self._layout, self.config.seed)

    @functools.cached_property
    def given(self) -> Model:
        """The model with its adapters, whose parameters are packed in no way; those that are not
        trained have a tree of their own.
        """
        return FrozenModel(self._adapted, self.frozen) if self.frozen.paths else self._adapted

    @functools.cached_property
    def frozen(self) -> Frozen:
        """Which parameters are not trained, and how they are kept."""
        return choose_frozen(self._layout, self._adapted, flatten(self._traced.params))

    @property
    def device_memory(self) -> int | None:
        """Bytes that a program may use on each device; None if it is not known, as on CPUs."""
        return (
            self._device_memory if isinstance(self.mesh, AbstractMesh) else memory_limit(self.mesh)
        )

    @property
    def memory_left(self) -> int | None:
        """Bytes of each device's memory that the state leaves; None if it is not known, as on
        CPUs.
        """
        return (
            None
            if (limit := self.device_memory) is None
            else limit - tree_on_device(self.abstract_state)
        )

    def _run(self, model: Any) -> None:
        """Call the loss on zeros, for a model that shows its shapes only when it is called."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._sample)
        with parallel_scope(UNSHARDED):
            self.objective.for_training().call(model, zeros, jax.random.key(0))

    @functools.cached_property
    def model(self) -> Model:
        """The model as training sees it: what it is made of is what is kept and updated."""
        if self.order is not None:
            return StageOrderedModel(self.given, self.order)
        return self.given if self.storage is None else PackedModel(self.given, self.storage)

    @functools.cached_property
    def order(self) -> StageOrder | None:
        """The order in which a circular pipeline keeps the layers of stacks; None where they stay
        as they are.
        """
        layout, mesh = self._fitted.layout, self._fitted.mesh
        if layout.stage_axis is None:
            return None
        return make_stage_order(
            self.given.stacks(),
            join(self._own.params, self._own.frozen),
            mesh.sizes[layout.stage_axis],
            layout.pipeline.groups,
        )

    @functools.cached_property
    def storage(self) -> Storage | None:
        """How servers keep the parameters; None without servers."""
        layout, workers = self._fitted.layout, self._fitted.workers
        if layout.gradients.reduction != "parameter_server":
            return None
        server = layout.parameter_server
        found = Storage(
            self._own.params,
            server.placement,
            workers,
            server.servers or workers,
            unpacks=layout.optimizer.owners,
        )
        if not found.unpacks:
            check_packed(self.given_optimizer, found)  # before it is given anything packed
        return found

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer as a step calls it, on global arrays of what the state keeps."""
        if not self._fitted.layout.optimizer.owners:
            return self.given_optimizer
        by_owners = update_by_owners(self.given_optimizer, self.optimized, self.mesh)
        return by_owners if self.storage is None else unpacked_for(by_owners, self.storage)

    @functools.cached_property
    def optimized(self) -> Resolved:
        """The placement of every parameter as the optimizer sees it: rows of servers are unpacked
        for one whose matrices have owners.
        """
        if self.storage is None or not self.storage.unpacks:
            return self.resolved
        return place_unpacked(self.storage, self._fitted.layout, self._fitted.mesh)

    def optimizer_params(self, params: Tree) -> Tree:
        """The parameters of a state as the optimizer sees them, under a trace."""
        return (
            self.storage.unpack(params)
            if self.storage is not None and self.storage.unpacks
            else params
        )

    @property
    def packing(self) -> Storage | StageOrder | None:
        """How the state keeps parameters, where it is not as the model has them."""
        return self.order if self.order is not None else self.storage

    def unpacked(self, params: Tree) -> Tree:
        """The parameters of a state as the model itself has them."""
        return params if self.packing is None else jax.jit(self.packing.unpack)(params)

    def averaged(self, state: State) -> State:
        """A state with the average of the weights in place of the weights, in their dtypes and
        shardings.
        """
        return dataclasses.replace(state, params=self._place_average(state.opt, state.params))

    @functools.cached_property
    def _place_average(self) -> Callable[[Any, Tree], Tree]:
        def place(opt: Any, params: Tree) -> Tree:
            seen = self.optimizer_params(params)
            average = jax.tree.map(
                lambda leaf, like: leaf.astype(like.dtype), average_of(to_device(opt), seen), seen
            )
            return average if self.storage is None or seen is params else self.storage.pack(average)

        return jax.jit(place, out_shardings=self.shardings.params)

    def variables(self, state: State) -> Variables:
        """The arrays of a state, as `given` has them."""
        frozen = state.frozen if self.order is None else jax.jit(self.order.unpack)(state.frozen)
        return Variables(self.unpacked(state.params), state.stats, state.rngs, frozen)

    @functools.cached_property
    def _variables(self) -> Variables:
        if self.storage is None:
            return self._own
        return dataclasses.replace(
            self._own, params=jax.eval_shape(self.storage.pack, self._own.params)
        )

    @property
    def abstract_variables(self) -> Variables:
        """Shapes and dtypes of the arrays of the model as it was given, packed in no way."""
        return self._own

    @property
    def abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of all parameters by path, those that are not trained too, packed and
        quantized in no way.
        """
        return flatten(self._traced.params)

    @functools.cached_property
    def _traced(self) -> Variables:
        """Shapes and dtypes of all parameters, in place of those that are trained."""
        if isinstance(self._as_passed, LinenModel) and self._sample is None:
            raise ModelError(
                "a linen module shows its shapes only on data.",
                fix="trainer.init(batch), with a batch or its shapes.",
            )
        return self._adapted.shapes(self._run)

    @functools.cached_property
    def _own(self) -> Variables:
        params, frozen = (
            jax.eval_shape(self.frozen.split, self._traced.params)
            if self.frozen.paths
            else (self._traced.params, {})
        )
        variables = dataclasses.replace(self._traced, params=params, frozen=frozen)
        counted = [
            path
            for path, leaf in flatten(variables.params).items()
            if not jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        if counted:
            raise ModelError(
                f"parameters that have no gradient: {', '.join(counted[:5])} "
                f"({flatten(variables.params)[counted[0]].dtype}).",
                fix="an nnx.Variable instead of an nnx.Param, a floating-point dtype, or a "
                "constant in the model.",
            )
        return variables

    @functools.cached_property
    def axis_names(self) -> dict[str, tuple]:
        """The logical axis names of parameters that carry any, by path."""
        # flax takes PartitionSpec.UNCONSTRAINED among them
        named = self._adapted.names(jax.random.key(0), self._run)
        return {
            path: tuple(name if isinstance(name, str | tuple) else None for name in names)
            for path, names in named.items()
        }

    @functools.cached_property
    def _fitted(self) -> Resolved:
        params, mesh = flatten(self._traced.params), MeshSpec.parse(self.mesh)
        layout, kept = (
            without_axes(self._layout, unused_axes(self._layout, mesh)),
            self.frozen.arrays(self._traced.params),
        )
        return fit_layout(layout, params, self.axis_names, mesh, self._adapted.stacks(), kept)

    @functools.cached_property
    def resolved(self) -> Resolved:
        """The placement of every parameter, or of what the servers keep in their stead."""
        if self.storage is None:
            return self._fitted
        return dataclasses.replace(
            place_packed(self.storage, self._fitted.layout, self._fitted.mesh),
            frozen=self._fitted.frozen,
        )

    @functools.cached_property
    def exchange(self) -> GradientSync:
        """How gradients are reduced."""
        return GradientSync(self.resolved, MeshAxes(self.mesh, self.resolved.data_axes))

    @functools.cached_property
    def products(self) -> Products:
        """How the products of weights are computed."""
        return Products(self._fitted.layout.precision)

    @functools.cached_property
    def parallel(self) -> ParallelConfig:
        """How the forward pass is sharded."""
        layout = self._fitted.layout
        data = self._fitted.data_axes
        estimated = self.platform in PREFERRED and self.kernels not in PREFERRED
        kernels = IN_PLACE + self.platform if estimated else self.kernels
        parallel = ParallelConfig(
            self.mesh,
            data,
            layout.pipeline,
            layout.sequence,
            layout.experts,
            attention=layout.attention.implementation,
            platform=kernels,
            in_stage_order=self.order is not None,
        )
        return with_calls(parallel)

    @functools.cached_property
    def _abstract(self) -> State:
        return jax.eval_shape(
            lambda v: make_state(v, self.opening, 0, self.exchange.init), self._variables
        )

    @property
    def opening(self) -> Opening:
        """The optimizer's state at step 0: one, or each worker's own."""
        exchange, first = self.exchange, self.optimizer.init
        return opening_per_worker(first, exchange.worker_count) if exchange.local else first

    @property
    def optimizer_at_start(self) -> tuple[Opening, Tree]:
        """The function that makes the optimizer's state at step 0, of one worker, and the shapes of
        what it is called with.
        """
        return self.optimizer.init, self._variables.params

    @functools.cached_property
    def shardings(self) -> State:
        """The sharding of every leaf of the state."""
        check_memory(
            self.resolved.layout,
            self.mesh,
            per_worker=self.exchange.local or self.exchange.asynchronous,
        )
        memory = self.exchange.specs(self._abstract.exchange)
        return state_shardings(
            self._abstract,
            self.resolved,
            self.optimized,
            self.mesh,
            memory,
            local=self.exchange.local,
        )

    @property
    def abstract_state(self) -> State:
        """Shape, dtype and sharding of every leaf of the state; nothing is allocated."""
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at),
            self._abstract,
            self.shardings,
        )

    @functools.cached_property
    def events(self) -> Events | None:
        """The parameter server's clock; None without one."""
        if self.storage is None:
            return None
        return Events(
            self.resolved.layout.parameter_server,
            self.exchange.worker_count,
            server_bytes(self.exchange),
        )

    def init_memory(self, params: Tree) -> Tree:
        """What the exchange of gradients remembers of these parameters at step 0, made in place on
        the mesh.
        """
        key = jax.random.key(self.config.seed, impl="threefry2x32")
        return jax.jit(self.exchange.init, out_shardings=self.shardings.exchange)(key, params)

    def init_optimizer(self, params: Tree, paths: Collection[str]) -> dict[str, jax.Array]:
        """Some arrays of the optimizer's state at step 0 of these parameters, by their paths in a
        `State`, made in place on the mesh.
        """

        def select(opt: Any) -> dict[str, Any]:
            return {
                path: leaf
                for name, leaf in flatten(opt).items()
                if (path := f"opt/{name}") in paths
            }

        return jax.jit(
            lambda params: copied(select(self.opening(params))),
            out_shardings=select(self.shardings.opt),
        )(params)

    def init(self) -> State:
        """A new state, made in place on the mesh."""
        given = self.model.concrete
        if given is not None:
            place = take if self._as_passed.handed_over else place_copy
            state = copy_state(
                given, self.opening, self.config.seed, self.shardings, self.exchange.init, place
            )
            self.release()
            return state
        with nnx.use_eager_sharding(False):
            return self._opener()

    def release(self) -> None:
        """Free the arrays of a model that was handed over, which are in a state now or are not
        needed.
        """
        self._adapted.release()

    def begin(self, params: Tree, stats: Tree, frozen: Tree) -> State:
        """A new state of these parameters and statistics, which are on the mesh already and are
        consumed.
        """
        given, seed, at = self.model.concrete, self.config.seed, self.shardings
        if given is not None:
            rngs = jax.tree.map(place_copy, given.rngs, at.rngs)
            self.release()
        else:
            with nnx.use_eager_sharding(False):
                rngs = jax.jit(
                    lambda: self.model.init(jax.random.key(seed), self._run).rngs,
                    out_shardings=at.rngs,
                )()
        return donate_to_state(
            Variables(params, stats, rngs, frozen), self.opening, seed, at, self.exchange.init
        )

    def restart(self, state: State) -> State:
        """A state at step 0 with the arrays of the model of `state`, which is consumed."""
        return donate_to_state(
            state.variables, self.opening, self.config.seed, self.shardings, self.exchange.init
        )

    def opened(self, build: Callable[[], Any], optimizer: Any, seed: Any) -> State:
        """A state at step 0 under a trace, of a model and an optimizer like these, and a seed that
        may be traced.
        """
        model = with_adapters(wrap(build), self._layout, seed)
        variables = (
            FrozenModel(model, self.frozen).init(jax.random.key(seed), self._run)
            if self.frozen.paths
            else model.init(jax.random.key(seed), self._run)
        )
        return make_state(variables, optimizer.init, seed, self.exchange.init)

    def init_facts(self) -> tuple[dict[str, str], str]:
        """What decides it: facts by name, and a program's text; either may be empty."""
        given = self._adapted.concrete
        if given is not None:
            return checksums(given), ""
        with nnx.use_eager_sharding(False):
            return {}, self._opener.lower().as_text()  # `init` then compiles this lowering

    @functools.cached_property
    def _opener(self) -> Any:
        return make_state_builder(
            self.model,
            self.opening,
            self.config.seed,
            self._run,
            self.shardings,
            self.exchange.init,
        )
