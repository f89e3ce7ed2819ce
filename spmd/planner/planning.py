"""The plan of a training step: where everything lives, what it needs, what travels and how long it takes, before anything runs."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd.deprecated import warn
from spmd.errors import MeshError, OptionError, did_you_mean
from spmd.layout.schema import Layout, spec_axes, spec_text
from spmd.layout.summary import notes as layout_notes
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.nn.schedule import Schedule
from spmd.planner.compile import Compiled, check_timeout, compile_step
from spmd.planner.cost import uncounted
from spmd.planner.hlo import parse
from spmd.planner.memory import PREALLOCATED, Memory, memory_of, on_device
from spmd.planner.target import Cluster
from spmd.planner.timeline import Timeline, timeline_of
from spmd.planner.traffic import Traffic, traffic_of
from spmd.render.html import Html, Text
from spmd.train.compiled_step import Program, prepared
from spmd.train.model_setup import Placed, TrainConfig
from spmd.train.state import owner_of
from spmd.tree import Tree, describe, flatten, format_bytes
from spmd.user_paths import as_path, write_text
from spmd.wire.notes import notes as exchange_notes

if TYPE_CHECKING:
    from spmd.planner.suggest_fixes import Fix


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will happen in a step, as `plan` finds it; printed, a report.

    Attributes:
      cluster, mesh: the hardware, and how its devices are named.
      rows: of a full batch.
      memory: bytes on each device; `memory.verdict` says whether it fits.
      traffic: every collective of the compiled step.
      timeline: predicted times of a step.
      schedules: of pipelines, by stack.
      compiled: the program and what the compiler says of it; `compiled.compiler` is which.
      notes: what should be known beside.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((32, 64), "float32"), "y": jax.ShapeDtypeStruct((32, 8), "float32")}
      >>> found = spmd.plan(model, batch, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), target="4xcpu")
      >>> print(found.explain("w"))
      w  float32[64, 8], 2.0 KiB
        spec whole, chosen by default replicate
        on each device [64, 8], 2.0 KiB; copies of each part: 4
        its gradient meets by all_reduce
    """

    cluster: Cluster
    mesh: MeshSpec
    rows: int
    memory: Memory
    traffic: Traffic
    timeline: Timeline
    schedules: Mapping[str, Schedule]
    compiled: Compiled
    notes: tuple[str, ...]
    program: Program = dataclasses.field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the target's memory holds it."""
        return self.memory.fits

    @property
    def layout(self) -> Layout:
        """What was planned."""
        return self.program.placed.resolved.layout

    @property
    def asked(self) -> int | None:
        """Bytes that the step's own collectives send from each device, as `trainer.wire` lists them; None where XLA places all of them."""
        placed = self.program.placed
        return self.program.wire.bytes() if placed.exchange.reduction.manual or self.schedules else None

    @property
    def rows_per_second(self) -> float:
        """Predicted rows of the batch per second, of all devices together."""
        return self.rows / self.timeline.seconds if self.timeline.seconds else 0.0

    def at_least(self, accumulate: int) -> float:
        """Bytes of a device, were more microbatches to divide all temporaries but gradients."""
        divided = max(self.memory.temporaries - self.memory.gradients, 0)
        return self.memory.peak - divided * (1 - self.program.placed.config.accumulate / accumulate)

    def fixes(self, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None) -> "tuple[Fix, ...]":
        """What would make it fit, each planned, in the order of `spmd.planner.suggest_fixes.fixes_of`; () where it fits."""
        from spmd.planner.suggest_fixes import fixes_of  # fixes are plans

        return fixes_of(self, timeout=timeout, say=say)

    def cures(self, **options: Any) -> "tuple[Fix, ...]":
        """The old name of `fixes`."""
        warn("Plan.cures", "Plan.fixes")
        return self.fixes(**options)

    def __str__(self) -> str:
        from spmd.planner.text_report import text  # the report knows the plan

        return text(self)

    def __repr__(self) -> str:
        from spmd.planner.text_report import seconds

        step = seconds(self.timeline.seconds)
        return f"Plan of {self.layout.name} on mesh {self.mesh} of {self.cluster}: {step} per step, {self.memory.verdict}"

    def _repr_html_(self) -> str:
        from spmd.planner.html_report import fragment  # the page knows the plan

        return fragment(self)

    def save(self, path: str | Path) -> Path:
        """The report as one file, .html or .txt; its folder is made if it is not there.

        Raises:
          OptionError: a suffix that says nothing, or the file cannot be written.
        """
        from spmd.planner.html_report import page  # the page knows the plan

        path = as_path(path, "path")
        if path.suffix.lower() not in (".html", ".txt"):
            raise OptionError(f'"{path}": its suffix does not say what kind of report it is.', fix=".html or .txt.")
        return write_text(path, page(self) if path.suffix.lower() == ".html" else f"{self}\n")

    def explain(self, path: str) -> Text:
        """Everything about one parameter: its spec, what chose it, which devices hold which part, and what gathers it.

        Raises:
          OptionError: there is no such parameter.
        """
        leaf, state = self._parameter(path), self.program.placed.abstract_state
        place = self.program.placed.resolved.placements[path]
        spec, ways = place.spec, place.copies(self.mesh)
        piece = leaf.sharding.shard_shape(leaf.shape)
        resolved = self.program.placed.resolved
        moments = [(name, found) for name, found in flatten(state.opt).items() if owner_of(name, found, resolved) is place]
        lines = [
            f"{path}  {describe(leaf)}, {format_bytes(place.nbytes)}",
            f"  spec {spec_text(spec) if any(spec) else 'whole'}, chosen by {place.chosen_by}",
            f"  on each device [{', '.join(map(str, piece))}], {format_bytes(on_device(leaf))}; copies of each part: {ways}",
        ]
        lines += [f"  {name}: {format_bytes(on_device(found))} on each device" for name, found in moments]
        placed, reduction = self.program.placed, self.layout.gradients.reduction
        workers = placed.resolved.data_axes
        data = [axis for axis in spec_axes(spec) if axis in workers]
        if placed.storage is not None:
            lines.append("  as the parameter server keeps it, rows over the workers")
        elif data:
            lines.append(f"  gathered over {', '.join(data)} where it is used: {format_bytes(on_device(leaf) * _ways(data, self.mesh))}")
        if reduction == "reduce_scatter" and not set(spec_axes(placed.exchange.reduction.mean_spec(place))) & set(workers):
            reduction = "all_reduce, for it is not cut over the workers"
        lines.append(f"  its gradient meets by {reduction}")
        return Text("\n".join(lines))

    def drawing(self, path: str) -> Html:
        """One parameter cut over the mesh, as HTML for a notebook's cell or a page: every piece with the devices that hold it.

        Raises:
          OptionError: there is no such parameter.
        """
        from spmd.planner.drawings import array_drawing  # drawings know plans

        return array_drawing(path, self._parameter(path))

    def _parameter(self, path: str) -> Any:
        leaves = flatten(self.program.placed.abstract_state.params)
        if path not in leaves:
            raise OptionError(f'there is no parameter "{path}".', fix=f"{did_you_mean(path, leaves)}")
        return leaves[path]

    def placements(self) -> Text:
        """Every array of the state and the devices that hold each part of it, a line each, in the model's order."""
        state, batch, weights, _ = self.program.arguments
        lines = []
        for kind, tree in (("params", state.params), ("optimizer", state.opt), ("exchange", state.exchange), ("batch", batch)):
            lines += [f"{kind}/{path}  {describe(leaf)}  {_where(leaf)}" for path, leaf in flatten(tree).items()]
        return Text("\n".join([*lines, f"weights  {describe(weights)}  {_where(weights)}"]))

    def to_json(self) -> str:
        """All figures, for a script."""
        times = {field.name: getattr(self.timeline, field.name) for field in dataclasses.fields(Timeline) if field.name != "spans"}
        transfers = [
            {
                "purpose": one.purpose,
                "kind": one.kind,
                "axes": one.axes,
                "group": one.group,
                "arrays": [str(array) for array in one.arrays],
                "times": one.times,
                "sent": one.sent,
                "asynchronous": one.asynchronous,
                "where": one.where,
            }
            for one in self.traffic.transfers
        ]
        found = {
            "target": str(self.cluster),
            "compiler": self.compiled.compiler,
            "exact": self.compiled.exact,
            "mesh": self.mesh.sizes,
            "layout": self.layout.source,
            "rows": self.rows,
            "fits": self.fits,
            "memory": self.memory.per_device,
            "traffic": transfers,
            "timeline": times | {"mfu": self.timeline.mfu, "limit": self.timeline.limit},
            "notes": list(self.notes),
        }
        return json.dumps(found, indent=1)


def _ways(axes: list[str], mesh: MeshSpec) -> int:
    total = 1
    for axis in axes:
        total *= mesh.sizes[axis]
    return total


def _where(leaf: Any) -> str:
    """Which devices, numbered along the mesh, hold which part."""
    mesh, spec = MeshSpec.parse(leaf.sharding.mesh), tuple(leaf.sharding.spec)
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    if not axes:
        return f"whole on all {mesh.size} devices"
    parts = _ways(axes, mesh)
    return f"spec {spec_text(spec)}: {parts} parts, each on {mesh.size // parts} of {mesh.size} devices"


def plan(
    model: Any,
    batch: Tree,
    *,
    loss: Callable[..., Any],
    optimizer: Any,
    target: "str | Cluster" = "cpu",
    mesh: Any = None,
    layout: str | Path | Layout = "data_parallel",
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    precision: str = "float32",
    accumulate: int = 1,
    seed: int = 0,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """What a training step will need and how long it will take on hardware that need not be there.

    The step that `fit` would run is compiled by the target's own compiler, in a process of its own; nothing is allocated at the model's
    size.

    Args:
      model, loss, optimizer, mesh, layout, metrics, precision, accumulate, seed: as for `fit`.
      batch: one full batch, arrays or their shapes [rows, ...].
      target: "8xh100", or "4x8xh100" for 4 nodes of 8; `spmd targets` lists them; a TOML file of your own in a name's place.
      timeout: seconds that the compiler may take.
      say: is told once a second how long the compiler has taken.

    Returns:
      A `Plan`; print it.

    Raises:
      SpmdError: what `fit` would raise, at once; an unknown target; a mesh of another number of devices than the target has.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((32, 64), "float32"), "y": jax.ShapeDtypeStruct((32, 8), "float32")}
      >>> found = plan(model, batch, loss=spmd.losses.mean_squared_error, optimizer=optax.adam(0.1), target="4xcpu")
      >>> found.memory.parameters, found.memory.optimizer, found.traffic.bytes("gradients")  # XLA sends the loss along
      (2048, 4100, 3084)
    """
    check_timeout(timeout)
    cluster, declared = Cluster.parse(target), Layout.load(layout)
    spec = _mesh(mesh if mesh is not None else dict(declared.mesh) or {"data": -1}, cluster)
    config = TrainConfig(model, loss, optimizer, metrics, precision, accumulate, seed)
    placed = Placed(config, abstract_mesh(spec), declared, platform=cluster.target.platform)
    return planned(placed, batch, cluster, timeout=timeout, say=say)


def planned(
    placed: Placed, batch: Tree, cluster: Cluster, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None
) -> Plan:
    """The plan of a placed model on its mesh, which is of as many devices as the cluster has.

    Raises:
      SpmdError: as `plan`.
    """
    program = prepared(placed, batch)
    spec, data, precision = MeshSpec.parse(placed.mesh), placed.resolved.data_axes, placed.config.precision
    compiled = compile_step(program, cluster, timeout=timeout, say=say)
    module = parse(compiled.hlo)
    traffic = traffic_of(module, spec, cluster, data)
    memory = memory_of(program, compiled, module, cluster.target)
    widened = precision if precision != "float32" and not compiled.exact else ""
    timeline = timeline_of(module, spec, cluster, data, widened)
    told = _warnings(program, traffic, memory, cluster)
    if widened:
        told.append(
            f"note: XLA:CPU computes in float32 what is {precision} on the target: an estimate needs more memory, and reads more of it."
        )
    if unknown := uncounted(module):
        told.append(f"note: operations of {', '.join(unknown[:3])} are not counted; of their time only memory is.")
    if module.endless:
        told.append(f"note: XLA does not know how often {', '.join(module.endless[:3])} run: counted as once each.")
    notes = (*layout_notes(placed.resolved)[1:], *exchange_notes(placed.exchange), *told)
    return Plan(cluster, spec, program.rows, memory, traffic, timeline, program.schedules, compiled, notes, program)


def _mesh(given: Any, cluster: Cluster) -> MeshSpec:
    """The mesh on the cluster's devices, all of them."""
    spec = MeshSpec.parse(given)
    try:
        return spec.resolve(cluster.count)
    except MeshError as error:
        count, name = abs(spec.size), cluster.target.name
        other = "" if -1 in spec.sizes.values() else f', or target="{count}x{name}"'
        first = str(error).split("\n")[0].split(": ")[0]
        fix = str(error).partition("fix: ")[2].split(";")[0].split(", or ")[0].rstrip(".")
        raise MeshError(f"{first} does not use the {cluster.count} devices of target {cluster} exactly.", fix=f"{fix}{other}.") from None


def _warnings(program: Program, traffic: Traffic, memory: Memory, cluster: Cluster) -> list[str]:
    """What a user would not expect: precision and places that the layout does not say, and memory that JAX leaves alone."""
    lines = []
    placed = program.placed
    asked = "float32" if placed.resolved.layout.gradients.codec == "exact" else None
    low = {array.dtype for one in traffic.transfers if one.purpose == "gradients" for array in one.arrays} & {"bfloat16", "float16"}
    if asked and low and any(leaf.dtype == "float32" for leaf in flatten(placed.abstract_state.params).values()):
        fix = 'reduction = "all_reduce" or "reduce_scatter" reduces them in float32'
        lines.append(f"note: XLA reduces gradients in {', '.join(sorted(low))}, which the layout does not ask for; {fix}.")
    data = set(placed.resolved.data_axes)
    moved = sum(one.sent * one.times for one in traffic.transfers if one.purpose == "activations" and set(one.axes) & data)
    if moved > traffic.bytes("parameters") + traffic.bytes("gradients"):
        lines.append(
            f"note: {format_bytes(moved)} of activations travel over {', '.join(sorted(data))}, more than weights and gradients do: "
            "the layout moves activations to where weights are, not weights to where the batch is."
        )
    sometimes = sum(one.sent * one.times for one in traffic.transfers if one.conditional)
    if sometimes:
        lines.append(
            f"note: {format_bytes(sometimes)} travel only in steps in which workers meet; traffic and time are those of such a step."
        )
    if cluster.target.platform == "cuda" and PREALLOCATED * memory.capacity < memory.peak <= memory.capacity:
        lines.append(f"note: JAX takes {PREALLOCATED:.0%} of a GPU's memory at its start; this needs XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.")
    return lines
