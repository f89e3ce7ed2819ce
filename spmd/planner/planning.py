"""`spmd.plan`, the `Plan` that it returns, and `spmd.compare`: memory, communication and time of a
training step, before anything runs.
"""

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.base.deprecated import warn
from spmd.base.tree import Tree, format_bytes
from spmd.base.user_paths import output_path, write_text
from spmd.errors import MeshError, OptionError, option, quoted, type_name
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec, abstract_mesh, outside_of_mesh
from spmd.planner.cluster import Cluster
from spmd.planner.compile import check_timeout, compiler_of
from spmd.planner.html_report import array_drawing, fragment, page
from spmd.planner.memory import usable_memory
from spmd.planner.plan_data import PlanData, build_plan
from spmd.planner.run_cost import RunCost, run_cost
from spmd.planner.suggestions import COMPILES, Changes, Fix, changes_of, fixes_of
from spmd.planner.text_report import (
    explanation,
    placements_text,
    seconds,
    text,
    to_json,
    with_sections,
)
from spmd.planner.timeline import LIMITS
from spmd.planner.traffic import PURPOSES
from spmd.render.html import Html, Text, aligned, folded, framed, table
from spmd.render.svg import bars
from spmd.train.model_setup import PlacedModel, TrainConfig

REPORT = "a report", (".html", ".txt")
DRAWN = ("step", "peak memory", "sent")


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """The needs of a step, as `spmd.plan` computes them. Printed, it is a report.

    Attributes:
      cluster, mesh: the hardware, and the mesh of its devices.
      rows: rows in a full batch.
      memory: bytes on each device; `memory.verdict` says whether the step fits.
      traffic: every collective of the compiled step.
      timeline: predicted times of a step; where workers train separately, of one in which all
        parameters are synchronized.
      period: the steps between two synchronizations, their average time, and the share of it in
        which devices compute.
      flops: the model's operations, those of the compiled program, and why these are more.
      schedules: of pipelines, by stack.
      compiled: the compiled program and its statistics; `compiled.compiler` names the compiler.
      notes: warnings and remarks.
      costs: what the step spends its time on, largest first.
      program: the step that was planned.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
      ... )
      >>> batch = {
      ...     "x": jax.ShapeDtypeStruct((32, 64), "float32"),
      ...     "y": jax.ShapeDtypeStruct((32, 8), "float32"),
      ... }
      >>> plan = spmd.plan(
      ...     model,
      ...     batch,
      ...     loss=spmd.losses.mean_squared_error,
      ...     optimizer=optax.sgd(0.1),
      ...     target="4xcpu",
      ... )
      >>> print(plan.explain("w"))
      w  float32[64, 8], 2.0 KiB
        replicated, chosen by default replicate
        on each device [64, 8], 2.0 KiB; copies of each: 4
        its gradient is reduced by all_reduce
    """

    @outside_of_mesh()
    def fixes(
        self, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None
    ) -> "tuple[Fix[Plan], ...]":
        """Plan changes that would make the step fit, in the order of
        `spmd.planner.suggestions.fixes_of`; () if it fits.

        Args:
          timeout: seconds for the compiler, for each change.
          say: is called with a line about each.

        Returns:
          What to change, and the plan with it.
        """
        return fixes_of(self, timeout=timeout, say=say)

    @outside_of_mesh()
    def changes(
        self,
        *,
        tokens: float | None = None,
        rows: float | None = None,
        steps: float | None = None,
        price: float | None = None,
        compiles: int = COMPILES,
        timeout: float = 600.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> "Changes[Plan]":
        """Plan each known change to the three largest costs separately; printed, a table of what
        they would bring.

        Args:
          tokens, rows, steps, price: as for `cost`; with them, the cost of a run of as many rows is
            shown for each change.
          compiles: the most programs to compile.
          timeout: seconds for each.
          say: called with a line for each program.

        Raises:
          OptionError: as `cost`; compiles is less than 1.
        """
        return changes_of(
            self,
            tokens=tokens,
            rows=rows,
            steps=steps,
            price=price,
            compiles=compiles,
            timeout=timeout,
            say=say,
        )

    def cost(
        self,
        *,
        tokens: float | None = None,
        rows: float | None = None,
        steps: float | None = None,
        price: float | None = None,
    ) -> RunCost:
        """Return hours and device-hours of a run, and money if `price` is that of a device-hour;
        each with the range of the step's time.

        Args:
          tokens, rows, steps: one of them, how long the run is. Tokens of a row are those of the
            batch's arrays of integers [rows, tokens].

        Raises:
          OptionError: a number is not positive, not exactly one of the three is given, or the batch
            does not show its tokens.
        """
        return run_cost(self, tokens=tokens, rows=rows, steps=steps, price=price)

    def cures(self, **options: Any) -> "tuple[Fix[Plan], ...]":  # words: the old method
        """The old name of `fixes`."""
        warn("Plan.cures", "Plan.fixes")
        return self.fixes(**options)

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        step = seconds(self.period.seconds)
        return (
            f"Plan of {self.layout.name} on mesh {self.mesh} of {self.cluster}: {step} per step, "
            f"{self.memory.verdict}"
        )

    def _repr_html_(self) -> str:
        return fragment(self)

    def save(self, path: str | Path, more: Mapping[str, str] | None = None) -> Path:
        """Write the report to a file, .html or .txt; its folder is created if needed, and an
        existing report is replaced.

        Args:
          path: of the file.
          more: sections that follow the report, such as `str(plan.changes())`, by their titles.

        Returns:
          The path.

        Raises:
          OptionError: another suffix, or the file cannot be written.
        """
        path, more = output_path(path, *REPORT, overwrite=True), more or {}
        if path.suffix.lower() == ".html":
            return write_text(path, page(self, more))
        return write_text(path, f"{with_sections(str(self), more)}\n")

    def explain(self, path: str) -> Text:
        """Return everything about one parameter: its spec and the rule that chose it, its shards,
        and how it is gathered and reduced.

        Args:
          path: of the parameter, such as "blocks/0/up/kernel".

        Returns:
          A text; printed, some lines.

        Raises:
          OptionError: there is no such parameter.
        """
        return explanation(self, path)

    def drawing(self, path: str) -> Html:
        """Draw one parameter's shards on the mesh, each with the devices that hold it, as HTML for
        a notebook's cell or a page.

        Raises:
          OptionError: there is no such parameter.
        """
        return array_drawing(path, self.parameter(path))

    def placements(self) -> Text:
        """List every array of the state and the devices that hold each shard of it, one line each,
        in the model's order.
        """
        return placements_text(self)

    def to_json(self, **more: Any) -> str:
        """Return all figures, for a script; `more` are added under their names."""
        return to_json(self, **more)


# Under `jax.set_mesh` with explicit axes, traced arrays would carry shardings that the layout
# decides.
@outside_of_mesh()
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
    """Predict what a training step needs and how long it takes, on hardware that you need not have.

    The step that `fit` would run is compiled by the target's own compiler, in a separate process;
    nothing is allocated at the model's size.

    Args:
      model, loss, optimizer, mesh, layout, metrics, precision, accumulate, seed: as for `fit`.
      batch: one full batch, arrays or their shapes [rows, ...].
      target: "8xh100", or "4x8xh100" for 4 nodes of 8; `spmd targets` lists the names; the path of
        a TOML file may replace a name. "2x4x8xh100@1Gb/s,30ms" is two sites of 4 nodes of 8, and
        the link of each site.
      timeout: seconds that the compiler may take.
      say: called once a second with a line on how long the compiler has taken.

    Returns:
      A `Plan`; print it.

    Raises:
      SpmdError: what `fit` would raise, immediately; an unknown target; a mesh with another number
        of devices than the target.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
      ... )
      >>> batch = {
      ...     "x": jax.ShapeDtypeStruct((32, 64), "float32"),
      ...     "y": jax.ShapeDtypeStruct((32, 8), "float32"),
      ... }
      >>> result = plan(
      ...     model,
      ...     batch,
      ...     loss=spmd.losses.mean_squared_error,
      ...     optimizer=optax.adam(0.1),
      ...     target="4xcpu",
      ... )
      >>> (
      ...     result.memory.parameters,
      ...     result.memory.optimizer,
      ...     result.traffic.bytes("gradients"),
      ... )  # XLA sends the loss along
      (2048, 4100, 3084)
    """
    check_timeout(timeout)
    cluster, declared = Cluster.parse(target), Layout.load(layout)
    # a layout may declare its mesh
    if mesh is None:
        mesh = dict(declared.mesh) or {"data": -1}
    compiler, _ = compiler_of(cluster.target, cluster.nodes)
    placed = PlacedModel(
        TrainConfig(model, loss, optimizer, metrics, precision, accumulate, seed),
        abstract_mesh(_mesh(mesh, cluster)),
        declared,
        platform=cluster.target.platform,
        kernels=compiler,
        device_memory=usable_memory(cluster.target),
    )
    return build_plan(Plan, placed, batch, cluster, timeout=timeout, say=say)


def _mesh(mesh: Any, cluster: Cluster) -> MeshSpec:
    """Return the mesh over all devices of the cluster.

    Raises:
      MeshError: its axes have another number of devices.
    """
    spec = MeshSpec.parse(mesh)
    try:
        return spec.resolve(cluster.count)
    except MeshError:
        other = ""
        if -1 not in spec.sizes.values():
            other = f", or {option('target', quoted(f'{spec.size}x{cluster.target.name}'))}"
        raise MeshError(
            f"mesh {spec} does not use the {cluster.count} devices of target {cluster} exactly.",
            fix=f"{option('mesh', quoted(spec.nearest(cluster.count)))}{other}.",
        ) from None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures of several plans; printed, a table with one column per plan, each figure with its
    ratio to the first plan's.

    Attributes:
      names: short names of the plans, from what differs between them.
      figures: one value per plan, by name; bytes on or from one device, seconds of a step, rows per
        second of all devices.
    """

    names: tuple[str, ...]
    figures: dict[str, tuple[float, ...]]

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, values in self.figures.items():
            cells = [_format(name, value) for value in values]
            if values[0]:
                ratios = [f" ({value / values[0]:.2f})" for value in values[1:]]
                cells[1:] = [cell + ratio for cell, ratio in zip(cells[1:], ratios, strict=True)]
            rows.append((name, *cells))
        return rows

    def __str__(self) -> str:
        return "\n".join(aligned([("", *self.names), *self._rows()]))

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        """Bars of what decides between plans, and the table of all figures."""
        drawings = []
        for name in DRAWN:
            if values := self.figures.get(name):
                pairs = zip(self.names, values, strict=True)
                shown = [(plan, value, _format(name, value)) for plan, value in pairs]
                drawings.append(f"<p>{html.escape(name)}</p>{bars(shown, name)}")
        figures = f'<div class="wide">{table(("", *self.names), self._rows())}</div>'
        return framed("".join(drawings) + folded("all figures", figures))


def compare(*plans: Plan | Sequence[Plan]) -> Comparison:
    """Compare plans side by side, relative to the first one.

    Args:
      plans: two or more, as arguments or as one list.

    Returns:
      A table; `figures` has a tuple of numbers for each line, one for each plan.

    Raises:
      OptionError: fewer than two plans, or not plans.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
      ... )
      >>> batch = {
      ...     "x": jax.ShapeDtypeStruct((32, 64), "float32"),
      ...     "y": jax.ShapeDtypeStruct((32, 8), "float32"),
      ... }
      >>> options = {
      ...     "loss": spmd.losses.mean_squared_error,
      ...     "optimizer": optax.adam(0.1),
      ...     "target": "4xcpu",
      ... }
      >>> comparison = compare(
      ...     spmd.plan(model, batch, **options), spmd.plan(model, batch, layout="fsdp", **options)
      ... )
      >>> comparison.names, comparison.figures["optimizer"]
      (('data_parallel', 'fsdp'), (4100, 1028))
    """
    listed = plans
    if len(plans) == 1 and isinstance(plans[0], Sequence):
        listed = tuple(plans[0])
    compared = [plan for plan in listed if isinstance(plan, Plan)]
    if len(compared) < 2 or len(compared) < len(listed):
        kinds = ", ".join(map(type_name, listed)) or "nothing"
        raise OptionError(f"compare({kinds}).", fix="two plans or more, each of spmd.plan.")
    columns = [_figures(plan) for plan in compared]
    figures = {}
    for name in columns[0]:
        values = tuple(column[name] for column in columns)
        if any(values):
            figures[name] = values
    return Comparison(_names(compared), figures)


def _figures(plan: Plan) -> dict[str, float]:
    """Return the figures of a plan, by their names in a comparison."""
    memory, traffic, timeline, period = plan.memory, plan.traffic, plan.timeline, plan.period
    figures: dict[str, float] = {
        "rows of a batch": plan.rows,
        "peak memory": memory.peak,
        "beside the program": memory.expected - memory.peak,
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "temporaries": memory.temporaries,
        "sent": traffic.bytes(),
    }
    figures |= {f"  {purpose}": traffic.bytes(purpose) for purpose in PURPOSES}
    figures["  to other nodes"] = traffic.between
    figures["  to other sites"] = traffic.between_sites
    figures["step"] = timeline.seconds
    figures |= {f"  {limit}": value for limit, value in timeline.parts.items()}
    if period.steps > 1:
        figures["step, on average"] = period.seconds
    else:
        figures["step, on average"] = 0
    figures["rows/s"] = plan.rows_per_second
    return figures


def _names(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return names from as few properties as distinguish the plans: layout, mesh, target,
    precision, microbatches, reduction, codec.
    """
    properties = []
    for plan in plans:
        config, gradients = plan.program.placed.config, plan.layout.gradients
        values = (
            plan.layout.name,
            f"mesh {plan.mesh}",
            str(plan.cluster),
            config.precision,
            f"{config.accumulate} microbatches",
            gradients.reduction,
            gradients.codec,
        )
        properties.append(values)
    differ = []
    for at, values in enumerate(zip(*properties, strict=True)):
        if len(set(values)) > 1:
            differ.append(at)
    names = [values[differ[0] if differ else 0] for values in properties]
    for at in differ[1:]:
        if len(set(names)) == len(plans):
            break
        names = [f"{name}, {values[at]}" for name, values in zip(names, properties, strict=True)]
    return tuple(names)


def _format(name: str, value: float) -> str:
    """Write a figure in its unit."""
    if name.startswith("rows"):
        return f"{value:,.0f}"
    if name.strip() in ("step", "step, on average", *LIMITS):
        return seconds(value)
    return format_bytes(value)
