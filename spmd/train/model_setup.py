"""A model, an optimizer and a layout, checked against each other: where each array lives, and how
gradients are communicated.

Nothing is allocated before `PlacedModel.states` makes a state.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from spmd.base.tree import Tree, flatten
from spmd.errors import ModelError, OptionError, option, short_repr
from spmd.layout.check import fit_layout
from spmd.layout.resolve import Resolved
from spmd.layout.schema import Layout
from spmd.layout.unused_axes import unused_axes, without_axes
from spmd.mesh import MeshSpec
from spmd.models.base import Model, Variables
from spmd.models.frozen import Frozen, FrozenModel, join
from spmd.models.wrap import wrap
from spmd.nn.attention_kernels import IN_PLACE, PREFERRED
from spmd.nn.layer_order import StageOrder, StageOrderedModel, make_stage_order
from spmd.nn.parallel_context import ParallelConfig
from spmd.nn.unchanged_models import with_calls
from spmd.sync.gradient_sync import GradientSync
from spmd.sync.mesh_axes import MeshAxes
from spmd.sync.notes import server_bytes
from spmd.sync.packed_model import PackedModel, place_packed, place_unpacked, unpacked_for
from spmd.train.choose_frozen import choose_frozen
from spmd.train.device_memory import memory_limit, tree_on_device
from spmd.train.host_memory import check_memory
from spmd.train.loss_scale import with_loss_scale
from spmd.train.matrix_owners import update_by_owners
from spmd.train.model_spec import ModelSpec
from spmd.train.objective import Objective
from spmd.train.packing_check import check_packed
from spmd.train.precision import compute_dtype
from spmd.train.products import Products
from spmd.train.state import (
    Opening,
    State,
    check_optimizer,
    make_state,
    opening_per_worker,
    state_shardings,
)
from spmd.train.state_factory import StateFactory
from spmd.wire.server.events import Events
from spmd.wire.server.packing import Storage


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The model that is trained and how, on any mesh and under any layout; the arguments of `fit`
    with these names.
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
    """A model on a mesh: the placement of each array, by a layout, and what follows from it.

    `spec` has the model itself, on any mesh, and `states` makes states.

    On a mesh without devices, `platform` says what they would be ("cpu", "cuda"), and
    `device_memory` how many bytes programs may use on each (None: it is not known); then everything
    works except new states. `kernels` is the platform whose kernels are called, if the step is
    compiled for another one, as an estimate.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Any,
        layout: Layout,
        platform: str | None = None,
        kernels: str | None = None,
        device_memory: int | None = None,
        spec: ModelSpec | None = None,
    ):
        if spec is None:
            as_passed = wrap(config.model)
        else:
            as_passed = spec.as_passed
        self.config = config
        self.mesh: Mesh = mesh  # or an AbstractMesh, of which jax asks the same
        # An AbstractMesh, as plans have, has no devices to ask for their platform.
        self.platform = jax.default_backend()
        if platform is not None and isinstance(mesh, AbstractMesh):
            self.platform = platform
        self.kernels = kernels or self.platform
        self._device_memory = device_memory
        self.objective = Objective(config.loss, dict(config.metrics or {}))
        self.given_optimizer = self.scaled(config.optimizer)
        if spec is None:
            spec = ModelSpec(as_passed, self.objective, layout, config.seed)
        self.spec = spec
        self._layout = layout
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
        """Return the same under another layout or mesh, which may be one without devices; the model
        is not traced again.
        """
        config = dataclasses.replace(self.config, model=self.spec.as_passed)
        if accumulate is not None:
            config = dataclasses.replace(config, accumulate=accumulate)
        if precision is not None:
            config = dataclasses.replace(config, precision=precision)
        return PlacedModel(
            config,
            mesh,
            layout,
            self.platform,
            self.kernels,
            self._device_memory,
            self.spec.under(layout),
        )

    def scaled(self, optimizer: Any) -> optax.GradientTransformationExtraArgs:
        """Return an optimizer as training uses it: for float16 it keeps a scale of the loss.

        Raises:
          OptimizerError: it is no gradient transformation.
        """
        return with_loss_scale(check_optimizer(optimizer), self.config.precision)

    @functools.cached_property
    def states(self) -> StateFactory:
        """The factory of its states."""
        return StateFactory(
            self.spec,
            self.model,
            self.frozen,
            self.packing,
            self.opening,
            self.exchange,
            self.shardings,
            self.config.seed,
        )

    @functools.cached_property
    def given(self) -> Model:
        """The model with its adapters, whose parameters are packed in no way; those that are not
        trained have a tree of their own.
        """
        adapted = self.spec.adapted
        if not self.frozen.paths:
            return adapted
        return FrozenModel(adapted, self.frozen)

    @functools.cached_property
    def frozen(self) -> Frozen:
        """The parameters that are not trained, and how they are kept."""
        return choose_frozen(self._layout, self.spec.adapted, self.spec.params)

    @property
    def device_memory(self) -> int | None:
        """Bytes that a program may use on each device; None if it is not known, as on CPUs."""
        if isinstance(self.mesh, AbstractMesh):
            return self._device_memory
        return memory_limit(self.mesh)

    @property
    def memory_left(self) -> int | None:
        """Bytes of each device's memory that the state leaves; None if it is not known, as on
        CPUs.
        """
        limit = self.device_memory
        if limit is None:
            return None
        return limit - tree_on_device(self.abstract_state)

    @functools.cached_property
    def model(self) -> Model:
        """The model as training sees it: its arrays are those that a state keeps and updates."""
        if self.order is not None:
            return StageOrderedModel(self.given, self.order)
        if self.storage is not None:
            return PackedModel(self.given, self.storage)
        return self.given

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
            join(self.abstract_variables.params, self.abstract_variables.frozen),
            mesh.sizes[layout.stage_axis],
            layout.pipeline.groups,
        )

    @functools.cached_property
    def storage(self) -> Storage | None:
        """The rows in which servers keep the parameters; None without servers."""
        layout, workers = self._fitted.layout, self._fitted.workers
        if layout.gradients.reduction != "parameter_server":
            return None
        server = layout.parameter_server
        storage = Storage(
            self.abstract_variables.params,
            server.placement,
            workers,
            server.servers or workers,
            unpacks=layout.optimizer.owners,
        )
        if not storage.unpacks:
            # before the optimizer is given anything packed
            check_packed(self.given_optimizer, storage)
        return storage

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer as a step calls it, on global arrays of what the state keeps."""
        if not self._fitted.layout.optimizer.owners:
            return self.given_optimizer
        by_owners = update_by_owners(self.given_optimizer, self.optimized, self.mesh)
        if self.storage is None:
            return by_owners
        return unpacked_for(by_owners, self.storage)

    @functools.cached_property
    def optimized(self) -> Resolved:
        """The placement of every parameter as the optimizer sees it: rows of servers are unpacked
        for one whose matrices have owners.
        """
        if self.storage is None or not self.storage.unpacks:
            return self.resolved
        return place_unpacked(self.storage, self._fitted.layout, self._fitted.mesh)

    def optimizer_params(self, params: Tree) -> Tree:
        """Return the parameters of a state as the optimizer sees them, under a trace."""
        if self.storage is None or not self.storage.unpacks:
            return params
        return self.storage.unpack(params)

    @property
    def packing(self) -> Storage | StageOrder | None:
        """The form in which a state keeps parameters, where it is not that of the model."""
        if self.order is not None:
            return self.order
        return self.storage

    @functools.cached_property
    def stored_variables(self) -> Variables:
        """Shapes and dtypes of the arrays of `model`, which a state keeps."""
        if self.storage is None:
            return self.abstract_variables
        variables = self.abstract_variables
        packed = jax.eval_shape(self.storage.pack, variables.params)
        return dataclasses.replace(variables, params=packed)

    @functools.cached_property
    def abstract_variables(self) -> Variables:
        """Shapes and dtypes of the arrays of `given`, packed in no way."""
        shapes = self.spec.shapes
        params, frozen = shapes.params, {}
        if self.frozen.paths:
            params, frozen = jax.eval_shape(self.frozen.split, shapes.params)
        dtypes = {path: leaf.dtype for path, leaf in flatten(params).items()}
        counted = [path for path in dtypes if not jnp.issubdtype(dtypes[path], jnp.inexact)]
        if counted:
            raise ModelError(
                f"parameters that have no gradient: {', '.join(counted[:5])} "
                f"({dtypes[counted[0]]}).",
                fix="an nnx.Variable instead of an nnx.Param, a floating-point dtype, or a "
                "constant in the model.",
            )
        return dataclasses.replace(shapes, params=params, frozen=frozen)

    @functools.cached_property
    def _fitted(self) -> Resolved:
        spec, mesh = self.spec, MeshSpec.parse(self.mesh)
        params = spec.params
        layout = without_axes(self._layout, unused_axes(self._layout, mesh))
        frozen = self.frozen.arrays(spec.shapes.params)
        return fit_layout(layout, params, spec.axis_names, mesh, spec.adapted.stacks(), frozen)

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
        """The reduction of gradients."""
        return GradientSync(self.resolved, MeshAxes(self.mesh, self.resolved.data_axes))

    @functools.cached_property
    def products(self) -> Products:
        """The precision in which products of weights are computed."""
        return Products(self._fitted.layout.precision)

    @functools.cached_property
    def parallel(self) -> ParallelConfig:
        """The part of the layout that modules see, which shards the forward pass."""
        layout = self._fitted.layout
        data = self._fitted.data_axes
        estimated = self.platform in PREFERRED and self.kernels not in PREFERRED
        kernels = self.kernels
        if estimated:
            kernels = IN_PLACE + self.platform
        parallel = ParallelConfig(
            self.mesh,
            data,
            layout.pipeline,
            layout.sequence,
            layout.experts,
            attention=layout.attention.implementation,
            recurrence=layout.recurrence,
            platform=kernels,
            in_stage_order=self.order is not None,
        )
        return with_calls(parallel)

    @functools.cached_property
    def _state_shapes(self) -> State:
        return jax.eval_shape(
            lambda v: make_state(v, self.opening, 0, self.exchange.init), self.stored_variables
        )

    @property
    def opening(self) -> Opening:
        """The function that makes the optimizer's state at step 0: one, or one of each worker."""
        exchange = self.exchange
        if exchange.local:
            return opening_per_worker(self.optimizer.init, exchange.worker_count)
        return self.optimizer.init

    @functools.cached_property
    def shardings(self) -> State:
        """The sharding of every leaf of the state."""
        check_memory(
            self.resolved.layout,
            self.mesh,
            per_worker=self.exchange.local or self.exchange.asynchronous,
        )
        memory = self.exchange.specs(self._state_shapes.exchange)
        return state_shardings(
            self._state_shapes,
            self.resolved,
            self.optimized,
            self.mesh,
            memory,
            local=self.exchange.local,
        )

    @functools.cached_property
    def abstract_state(self) -> State:
        """Shape, dtype and sharding of every leaf of the state; nothing is allocated."""
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at),
            self._state_shapes,
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
