"""What a step knows of how the forward pass is to be cut, for modules deep inside a model: set around the call of the loss, at trace time.

A module of `spmd.nn` asks `current()`. Outside of a step nothing is cut, and it runs on one device as it stands.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from spmd.errors import LayoutError
from spmd.layout.model_parallel import Experts, Pipeline, Sequence
from spmd.nn.constraints import manual_axes, own_constraints
from spmd.nn.schedule import Schedule
from spmd.xla import shard_map

MIXTURE = "mixture"  # in `Cutting.used`: tokens are routed in groups, wherever the experts are


@dataclasses.dataclass(frozen=True)
class Cutting:
    """What the layout says, and on which mesh.

    Attributes:
      data: the mesh axes over which rows are cut. In the manual step they are cut already, and a module sees one worker's rows.
      ordered: a circular pipeline finds the layers of stacks in the order of its stages (`spmd.nn.layer_order`).
      unroll: loops are to be unrolled (a convolution in a loop's body, on a CPU).
      tap: what stands in the place of a stack of layers (`spmd.nn.pipeline_1f1b`).
      shares: into how many parts the step cuts the rows before a module sees them, where it now sees all: accumulation, workers.
      used: what some module has made use of, for the step to know: "pipeline", its "microbatches" and "time_chunk", "sequence", "experts".
      schedules: what the stacks that were called do when, by a name for each.
    """

    mesh: Mesh | None = None
    data: tuple[str, ...] = ()
    pipeline: Pipeline = Pipeline()  # noqa: RUF009
    sequence: Sequence = Sequence()  # noqa: RUF009
    experts: Experts = Experts()  # noqa: RUF009
    ordered: bool = False
    unroll: bool = False
    shares: int = 1
    tap: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)
    used: set[str] = dataclasses.field(default_factory=set, compare=False)
    schedules: dict[str, Schedule] = dataclasses.field(default_factory=dict, compare=False)

    def check_used(self, source: str) -> None:
        """Once the loss was traced: something in it is cut as the layout `source` asks, along every axis that it names for that.

        Raises:
          LayoutError: the devices of an axis would all do the same work.
        """
        wanted = {
            "sequence": (self.sequence.axis, "spmd.nn.attention"),
            "experts": (self.experts.axis, "spmd.nn.MixtureOfExperts"),
        }
        for section, (axis, calls) in wanted.items():
            if axis is not None and section not in self.used:
                raise LayoutError(
                    f'{source}: [{section}] axis = "{axis}", but the loss never calls {calls}, so nothing is cut over "{axis}" by it.\n'
                    f"    fix: {calls} in the model, or a layout without [{section}]."
                )

    def size(self, axis: str | None) -> int:
        """How many devices lie along a mesh axis; 1 for none."""
        return 1 if axis is None or self.mesh is None else self.mesh.shape[axis]

    @property
    def branchless(self) -> bool:
        """Whether all stages must run the same code, and throw away what they were not to do.

        Where something travels among the devices of a stage, by hand or because the partitioner has cut a layer over another axis: in a
        branch that not all stages take, XLA:CPU (jax 0.10.2) gives a `ppermute` wrong numbers, or waits for ever. And where loops are
        unrolled for the sake of a convolution, which is as slow in a branch.
        """
        own = (self.pipeline.axis, *self.data)
        return self.unroll or any(size > 1 for axis, size in (self.mesh.shape.items() if self.mesh else ()) if axis not in own)

    @property
    def stages(self) -> int:
        """Devices along the pipeline's axis."""
        return self.size(self.pipeline.axis)

    @property
    def by_hand(self) -> bool:
        """Whether a step runs backward by hand, tick by tick."""
        return self.stages > 1 and self.pipeline.schedule == "1f1b"

    @property
    def free_data(self) -> tuple[str, ...]:
        """The data axes over which a module sees all rows: those that no manual region around it has cut."""
        return tuple(axis for axis in self.data if axis not in manual_axes() and self.size(axis) > 1)

    def free_over(self, rows: int) -> tuple[str, ...]:
        """The same, if they divide so many rows; else none, and everybody has them all."""
        return self.free_data if rows % math.prod(map(self.size, self.free_data)) == 0 else ()

    def over(self, axes: tuple[str, ...], function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` on each device's own piece along `axes`; all other axes stay as they are around it.

        Specs name these axes only. Gradients of inputs that are whole along an axis are summed over it.
        """
        mesh = None if manual_axes() else self.mesh  # inside a manual region jax knows the mesh

        def wide(*given: Any) -> Any:
            dtypes = jax.tree.map(lambda leaf: leaf.dtype, given)
            narrowed = lambda *wide: function(*jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), wide, dtypes))
            run = shard_map(narrowed, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)
            specs = [in_specs] * len(given) if isinstance(in_specs, PartitionSpec) else in_specs
            return run(*(tree if _names_all(spec, axes) else jax.tree.map(_widened, tree) for tree, spec in zip(given, specs, strict=True)))

        return wide


def _names_all(spec: Any, axes: tuple[str, ...]) -> bool:
    if not isinstance(spec, PartitionSpec):
        return False  # of several arrays
    return {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)} >= set(axes)


def _widened(leaf: jax.Array) -> jax.Array:
    """As float32 what is bfloat16, for its gradient is summed over devices: see `wire.all_reduce`."""
    return leaf.astype("float32") if leaf.dtype == "bfloat16" else leaf


WHOLE = Cutting()
_CURRENT: contextvars.ContextVar[Cutting] = contextvars.ContextVar("cutting", default=WHOLE)


def current() -> Cutting:
    """How the forward pass that is being traced is to be cut."""
    return _CURRENT.get()


@contextlib.contextmanager
def under(cutting: Cutting) -> Iterator[Cutting]:
    """Calls of a model inside are cut so."""
    token = _CURRENT.set(cutting)
    try:
        with own_constraints(cutting.mesh):
            yield cutting
    finally:
        _CURRENT.reset(token)


def rows_over(axes: tuple[str, ...]) -> PartitionSpec:
    """Dim 0 cut over these axes."""
    return PartitionSpec(axes) if axes else PartitionSpec()
