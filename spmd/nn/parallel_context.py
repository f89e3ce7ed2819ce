"""The sharding of the forward pass in the current step. The step sets it around the call of the
loss, at trace time.

A module of `spmd.nn` calls `current()`. Outside of a step nothing is sharded, and the module runs
as ordinary model code.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from spmd.base.specs import spec_axes
from spmd.base.xla import shard_map
from spmd.errors import LayoutError
from spmd.layout.model_parallel import Experts, Pipeline, Sequence
from spmd.layout.schema import Recurrence
from spmd.nn.model_calls import constraints_on, manual_axes, replaced_calls
from spmd.nn.schedule import Schedule

ATTENTIONS = (
    "spmd.nn.attention, jax.nn.dot_product_attention, flax's attention, or two products and a "
    "softmax in a form that is recognised"
)
# In `ParallelConfig.used`: attention that has a first derivative only.
FUSED = "fused attention"
# In `ParallelConfig.used`: attention that no kernel takes.
STORED = "stored scores"
# in `ParallelConfig.used`: tokens are routed in groups, wherever the experts are
MIXTURE = "mixture"


# The name by which `train/batch_rows` finds a function in a loss that is only read.
LAYERS = "layers_of_a_stack"


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The declarations of a layout that modules read, and the mesh.

    Attributes:
      data: the mesh axes over which rows are sharded. In the manual step they are already manual,
        and a module sees one worker's rows.
      attention: the implementation of attention, of the layout's `[attention]`.
      recurrence: the layout's `[recurrence]`, how loops over time are computed.
      platform: of the devices, "cpu", "cuda" ...; None: this process's.
      in_stage_order: a circular pipeline finds the layers of stacks in the order of its stages
        (`spmd.nn.layer_order`).
      unroll: whether loops are unrolled (for a convolution in a loop's body, on a CPU).
      row_splits: the number of parts into which the step will split the rows that a module now
        sees: accumulation, workers.
      gather_layer: `spmd.sync.layer_gather.LayerGather`, how a stack gathers the parameters of a
        layer. None: it has full ones.
      residuals: trees of what the gradients that `gather_layer` reduces carry from microbatch to
        microbatch, [layers, ...] by path.
      reading: axes that stand for the workers while a loss is only read (`spmd.train.batch_rows`).
      tap: called in place of a stack of layers (`spmd.nn.pipeline_1f1b`).
      calls: functions in place of those of JAX and flax (`spmd.nn.model_calls`).
      used: what the modules have used, for the step to check: "pipeline", its "microbatches" and
        "time_chunk", "sequence", "experts", "hoisted" where a part of a loop over time is
        computed outside of it, and "cudnn" where it is an LSTM of cuDNN.
      loop_lengths: the steps of each loop over time that may be computed in parts.
      schedules: the schedule of every stack that was called, by a name for each.
      notes: lines on what modules have chosen, to be shown before a run, as keys.
    """

    mesh: Mesh | None = None
    data: tuple[str, ...] = ()
    pipeline: Pipeline = Pipeline()  # noqa: RUF009
    sequence: Sequence = Sequence()  # noqa: RUF009
    experts: Experts = Experts()  # noqa: RUF009
    attention: str = "auto"
    recurrence: Recurrence = Recurrence()  # noqa: RUF009
    platform: str | None = None
    in_stage_order: bool = False
    unroll: bool = False
    row_splits: int = 1
    reading: tuple[str, ...] = ()
    gather_layer: Any = dataclasses.field(default=None, compare=False)
    residuals: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    tap: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)
    calls: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict, compare=False)
    used: set[str] = dataclasses.field(default_factory=set, compare=False)
    loop_lengths: set[int] = dataclasses.field(default_factory=set, compare=False)
    schedules: dict[str, Schedule] = dataclasses.field(default_factory=dict, compare=False)
    notes: dict[str, None] = dataclasses.field(default_factory=dict, compare=False)

    def check_used(self, source: str, notes: Iterable[str] = ()) -> None:
        """Check, once the loss was traced, that it uses every axis that the layout `source` names
        for a part of the model.

        Args:
          notes: what was said while it was traced, such as why attention is left as it is.

        Raises:
          LayoutError: the devices of an axis would all do the same work.
        """
        for table, axis, function in (
            ("sequence", self.sequence.axis, "spmd.nn.attention"),
            ("experts", self.experts.axis, "spmd.nn.MixtureOfExperts"),
        ):
            if axis is not None and table not in self.used:
                why = (
                    f'[{table}] axis = "{axis}", but the loss never calls {function}, so nothing '
                    f'is sharded over "{axis}".'
                )
                raise LayoutError(
                    f"{source}: {why}",
                    fix=f"{function} in the model, or a layout without [{table}].",
                )
        if self.attention not in ("auto", "as_written") and "attention" not in self.used:
            why = (
                f'{source}: [attention] implementation = "{self.attention}", but the loss has no '
                "attention that it applies to."
            )
            why += "".join(
                f"\n    {note.removeprefix('note: ')}"
                for note in notes
                if note.startswith("note: attention in ")
            )
            raise LayoutError(
                why, fix=f"a model with {ATTENTIONS}; or a layout without [attention]."
            )

        self._check_loops(source)

    def _check_loops(self, source: str) -> None:
        """Check that `[recurrence]` applies to a loop over time.

        Raises:
          LayoutError: it does not.
        """
        if self.recurrence.implementation == "cudnn" and "cudnn" not in self.used:
            raise LayoutError(
                f'{source}: [recurrence] implementation = "cudnn", but the loss calls no '
                "spmd.nn.RNNStack and no spmd.nn.Bidirectional, to which it applies.",
                fix='implementation = "hoisted", which takes recurrent layers of flax, too.',
            )
        if not self.loop_lengths and self.recurrence.implementation == "hoisted":
            raise LayoutError(
                f'{source}: [recurrence] implementation = "hoisted", but the loss has no loop over '
                "time with a product of a weight and what it carries. Convolutions do not count, "
                "nor products inside of a cell's jax.checkpoint, of jax.shard_map, or with a "
                "gradient of their own, as those of [[precision]].",
                fix="a recurrent layer in the model, such as nnx.RNN or linen.RNN; or a layout "
                "without [recurrence].",
            )
        chunk = self.recurrence.time_chunk
        if chunk is None:
            return
        if not self.loop_lengths:
            raise LayoutError(
                f"{source}: [recurrence] time_chunk = {chunk}, but the loss calls no "
                "spmd.nn.RNNStack and no spmd.nn.Bidirectional, to which it applies.",
                fix='a layout without it; or implementation = "hoisted", if the model has '
                "recurrent layers of flax or its own.",
            )
        longest = self.longest_loop
        if chunk < longest:
            return
        where = ""
        if self.stages > 1:
            where = " ([pipeline] divides time into chunks of its own)"
        steps = "1 step"
        fix = "leave it out."
        if longest > 1:
            steps = f"{longest} steps"
            fix = f"at most {longest // 2}, or leave it out."
        raise LayoutError(
            f"{source}: [recurrence] time_chunk = {chunk}, but the longest loop over time to which "
            f"it applies has {steps}{where}.",
            fix=fix,
        )

    def axis_size(self, axis: str | None) -> int:
        """Return the number of devices along a mesh axis; 1 for None."""
        if axis is None or self.mesh is None:
            return 1
        return self.mesh.shape[axis]

    @property
    def branchless(self) -> bool:
        """Return whether all stages must run the same code and discard the results they do not
        need: where the devices of a stage communicate, explicitly or because the partitioner has
        sharded a layer over another axis.
        """
        # A convolution in a branch is as slow on a CPU as one in a loop, which is why loops are
        # unrolled.
        if self.unroll or self.mesh is None:
            return self.unroll
        # In a branch that only some stages take, XLA:CPU (jax 0.10.2) gives a `ppermute` wrong
        # numbers, or hangs.
        pipeline_axes = (self.pipeline.axis, *self.data)
        return any(size > 1 for axis, size in self.mesh.shape.items() if axis not in pipeline_axes)

    @property
    def longest_loop(self) -> int:
        """The steps of the longest loop over time that may be computed in parts; 0 without one."""
        return max(self.loop_lengths, default=0)

    @property
    def stages(self) -> int:
        """The number of devices along the pipeline's axis."""
        return self.axis_size(self.pipeline.axis)

    @property
    def manual_backward(self) -> bool:
        """Return whether the step runs the backward pass tick by tick, without reverse-mode
        differentiation of the entire loss.
        """
        return self.stages > 1 and self.pipeline.schedule == "1f1b"

    @property
    def auto_data_axes(self) -> tuple[str, ...]:
        """The data axes along which a module sees all rows: no manual region around it shards over
        them.
        """
        return tuple(
            axis for axis in self.data if axis not in manual_axes() and self.axis_size(axis) > 1
        )

    def auto_row_axes(self, rows: int) -> tuple[str, ...]:
        """Return `auto_data_axes` if their devices divide `rows`; else none, and the rows are
        replicated.
        """
        if rows % math.prod(map(self.axis_size, self.auto_data_axes)) == 0:
            return self.auto_data_axes
        return ()

    def shard_map(
        self, axes: tuple[str, ...], function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return `function` on each device's shard along `axes`; all other axes stay as they are.

        Specs name these axes only. Gradients of inputs that are replicated along an axis are summed
        over it.
        """
        # Inside a manual region JAX takes the mesh of that region only.
        mesh = None
        if not manual_axes():
            mesh = self.mesh

        def widened(tree: Any, spec: Any) -> Any:
            # An array that is sharded over all axes has a gradient on each device, with no sum.
            if isinstance(spec, PartitionSpec) and set(spec_axes(tuple(spec))) >= set(axes):
                return tree
            return jax.tree.map(_widened, tree)

        def call_mapped(*inputs: Any) -> Any:
            dtypes = jax.tree.map(lambda leaf: leaf.dtype, inputs)

            def restore_dtypes(*widened: Any) -> Any:
                return function(
                    *jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), widened, dtypes)
                )

            mapped = shard_map(
                restore_dtypes, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes
            )
            specs = in_specs
            if isinstance(in_specs, PartitionSpec):
                specs = [in_specs] * len(inputs)
            pairs = zip(inputs, specs, strict=True)
            return mapped(*(widened(tree, spec) for tree, spec in pairs))

        return call_mapped


def _widened(leaf: jax.Array) -> jax.Array:
    """Return a bfloat16 array as float32, since its gradient is summed over devices: see
    `collectives.all_reduce`.
    """
    if leaf.dtype == "bfloat16":
        return leaf.astype("float32")
    return leaf


UNSHARDED = ParallelConfig(attention="as_written")
_CURRENT: contextvars.ContextVar[ParallelConfig] = contextvars.ContextVar(
    "parallel", default=UNSHARDED
)


def current() -> ParallelConfig:
    """Return the configuration of the forward pass that is being traced."""
    return _CURRENT.get()


def named_layers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which calls layers that a layout may compute in ways of its own, by a name
    with which a reader of the loss finds it.
    """
    if not current().reading:
        return function

    def call_layers(*inputs: Any) -> Any:
        return function(*inputs)

    # An equation of a jit has the name of its function.
    call_layers.__name__ = LAYERS
    return jax.jit(call_layers)


@contextlib.contextmanager
def parallel_scope(parallel: ParallelConfig) -> Iterator[ParallelConfig]:
    """Shard calls of a model inside as `parallel` says."""
    token = _CURRENT.set(parallel)
    try:
        with constraints_on(parallel.mesh), replaced_calls(parallel.calls):
            yield parallel
    finally:
        _CURRENT.reset(token)


def row_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of an array whose dim 0 is sharded over these axes."""
    if axes:
        return PartitionSpec(axes)
    return PartitionSpec()
