"""The data of a plan, and how it is computed. Reports, drawings and suggestions are functions over
it, in modules that import this one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from spmd.errors import OptionError, did_you_mean
from spmd.fields import as_toml
from spmd.layout.compiler import TRITON, compiler_notes
from spmd.layout.schema import Layout
from spmd.layout.summary import notes as layout_notes
from spmd.mesh import MeshSpec
from spmd.nn.schedule import Schedule
from spmd.planner.cluster import Cluster
from spmd.planner.compile import Compiled, compile_step
from spmd.planner.cost import uncounted
from spmd.planner.flop_shares import (
    BUBBLES,
    BY_XLA,
    RECOMPUTED,
    REPLICATED,
    FlopShares,
    flop_shares,
)
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.hlo import Module, parse
from spmd.planner.memory import Memory, memory_of
from spmd.planner.model_flops import (
    empty_places,
    large_products,
    model_flops,
    trace_model,
)
from spmd.planner.notes import (
    LARGE,
    _large_arrays,
    _period_notes,
    _rematerialized,
    _waits,
    _warnings,
    crossing_notes,
    gathered_stacks,
    precision_notes,
    repeated_exchanges,
    small_collectives,
)
from spmd.planner.timeline import (
    StepTimes,
    SyncPeriod,
    Timeline,
    sync_period,
    timeline_of,
)
from spmd.planner.traffic import Traffic, traffic_of
from spmd.sync.notes import notes as exchange_notes
from spmd.train.compiled_step import Program, prepare_program
from spmd.train.compiler_options import AT_ONCE
from spmd.train.model_setup import PlacedModel
from spmd.tree import Tree, flatten
from spmd.wire.server.declaration import ParameterServer

SHOWN = 3  # costs at the end of a report
MULTIPLYING = {
    "products": "matrix products",
    "convolutions": "convolutions",
    "attention": "fused attention",
}
EXPOSED, RECOMPUTATION = "exposed", "recomputation"  # kinds that others name, too
BEYOND = {  # kinds of products beyond the model's, with their causes
    RECOMPUTATION: (RECOMPUTED, BY_XLA),
    "bubbles": (BUBBLES,),
    "replicated": (REPLICATED,),
}
TITLES = {
    RECOMPUTATION: "recomputation",
    "bubbles": "pipeline bubbles",
    "replicated": "products replicated on several devices",
}


@dataclasses.dataclass(frozen=True)
class StepCost:
    """A part of a step's time.

    Attributes:
      kind: "products", "convolutions", "attention", "memory", "launches", "exposed",
        "recomputation", "bubbles" or "replicated".
      what: the same in words, with how well the device is used or what is communicated.
      seconds: of a step.
      share: of the step.
      purpose: of exposed communication, what is sent, as `Transfer.purpose`; "" of other costs.
    """

    kind: str
    what: str
    seconds: float
    share: float
    purpose: str = ""


def step_costs(timeline: Timeline, flops: FlopShares) -> tuple[StepCost, ...]:
    """The costs of a step, largest first; they add up to it.

    Products beyond the model's are costs of their own, in proportion to their FLOPs: those of the
    model are what is left.
    """
    seconds: dict[tuple[str, str, str], float] = {}
    shares = {
        kind: sum(max(flops.beyond.get(cause, 0.0), 0.0) for cause in causes) / flops.executed
        if flops.executed
        else 0.0
        for kind, causes in BEYOND.items()
    }
    for kind, share in shares.items():
        seconds[kind, TITLES[kind], ""] = timeline.multiplying * share
    seconds[RECOMPUTATION, TITLES[RECOMPUTATION], ""] += timeline.repeated_memory
    for kind, title in MULTIPLYING.items():
        if took := getattr(timeline, kind):
            of_model = max(1 - sum(shares.values()), 0.0)
            seconds[
                kind, f"{title}, at {timeline.at_peak.get(kind, 0.0) / took:.0%} of peak", ""
            ] = took * of_model
    seconds["memory", "element-wise work and other operations, at memory bandwidth", ""] = (
        timeline.memory - timeline.repeated_memory
    )
    seconds["launches", "launch overhead", ""] = timeline.launches
    for wait in timeline.waits:
        transfer = wait.transfer
        _, nodes, sites = transfer.counts
        where = (
            " between sites"
            if sites > 1 or transfer.leaving
            else " between nodes"
            if nodes > 1
            else ""
        )
        key = (
            EXPOSED,
            f"exposed communication: {transfer.kind} of {transfer.purpose}{where}",
            transfer.purpose,
        )
        seconds[key] = seconds.get(key, 0.0) + wait.exposed
    hosts = timeline.exposed - sum(wait.exposed for wait in timeline.waits)
    seconds[EXPOSED, "exposed communication: copies between device and host", "host"] = hosts
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple(
        StepCost(kind, what, took, took / timeline.seconds, purpose)
        for (kind, what, purpose), took in ordered
        if took > 1e-9 * timeline.seconds  # rounding
    )


@dataclasses.dataclass(frozen=True)
class PlanData:
    """The fields of a plan, which `spmd.planner.planning.Plan` documents, and what follows from
    them.
    """

    cluster: Cluster
    mesh: MeshSpec
    rows: int
    memory: Memory
    traffic: Traffic
    timeline: Timeline
    flops: FlopShares
    schedules: Mapping[str, Schedule]
    compiled: Compiled
    notes: tuple[str, ...]
    program: Program = dataclasses.field(repr=False)
    period: SyncPeriod

    @property
    def fits(self) -> bool:
        """Whether the step fits in the target's memory."""
        return self.memory.fits

    @property
    def layout(self) -> Layout:
        """The layout of this plan."""
        return self.program.placed.resolved.layout

    @property
    def costs(self) -> tuple[StepCost, ...]:
        """What the step spends its time on, largest first; together they are the step."""
        return step_costs(self.timeline, self.flops)

    @property
    def requested_bytes(self) -> int | None:
        """Bytes that the step's own collectives send from each device, as `trainer.wire` lists
        them; None where XLA places all of them.
        """
        placed = self.program.placed
        with gpu_of(self.cluster.target):
            return (
                self.program.wire.bytes()
                if placed.exchange.reduction.manual or self.schedules
                else None
            )

    @property
    def rows_per_second(self) -> float:
        """Predicted throughput of all devices together, in rows of the batch per second, on average
        over a period.
        """
        return self.rows / self.period.seconds if self.period.seconds else 0.0

    @property
    def step_times(self) -> StepTimes:
        """The times of a step, called with `due` as `timeline_of` is."""
        return step_times(
            parse(self.compiled.hlo), self.program.placed, self.compiled, self.cluster
        )

    def least_memory(self, accumulate: int) -> float:
        """A lower bound on a device's bytes with more microbatches: all temporaries except
        gradients shrink in proportion.
        """
        divisible = max(self.memory.temporaries - self.memory.gradients, 0)
        return self.memory.expected - divisible * (
            1 - self.program.placed.config.accumulate / accumulate
        )

    def parameter(self, path: str) -> Any:
        """A parameter's shape and sharding.

        Raises:
          OptionError: there is no such parameter.
        """
        state = self.program.placed.abstract_state
        params = flatten(state.params) | flatten(state.frozen)
        if path not in params:
            raise OptionError(
                f'there is no parameter "{path}".', fix=f"{did_you_mean(path, params)}"
            )
        return params[path]


PlanT = TypeVar("PlanT", bound=PlanData)


def build_plan(
    kind: type[PlanT],
    placed: PlacedModel,
    batch: Tree,
    cluster: Cluster,
    *,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> PlanT:
    """A plan, of class `kind`, for a model placed on a mesh with as many devices as the cluster.

    Raises:
      SpmdError: as `spmd.plan`.
    """
    with gpu_of(cluster.target):
        program = prepare_program(placed, batch)
        placed = program.placed
        model = trace_model(program)
    mesh, data_axes, precision = (
        MeshSpec.parse(placed.mesh),
        placed.resolved.data_axes,
        placed.config.precision,
    )
    compiled = compile_step(program, cluster, timeout=timeout, say=say)
    module = parse(compiled.hlo)
    traffic = traffic_of(module, mesh, cluster, data_axes)
    memory = memory_of(program, compiled, module, cluster)
    of_model = model_flops(model) / cluster.count
    times = step_times(module, placed, compiled, cluster, of_model)
    timeline, server = times(), synced_by(placed)
    period = sync_period(server, times, traffic)
    empty, pipelines = empty_places(model) / cluster.count, tuple(program.schedules.values())
    work = flop_shares(
        module, mesh, pipelines, executed=timeline.flops, model=of_model, empty=empty
    )
    notes = [*layout_notes(placed.resolved)[1:], *exchange_notes(placed.exchange), *program.notes]
    notes += [
        *compiler_notes(placed.resolved.layout.compiler, placed.platform),
        *_warnings(program, traffic, memory, cluster),
    ]
    if compiled.retried:
        changed = {
            name: value
            for name, value in compiled.options.items()
            if program.compiler_options.get(name) != value
        }
        with_ = ", ".join(f"{name}={as_toml(value)}" for name, value in changed.items())
        fix = (
            "XLA tunes nothing without a GPU"
            if TRITON in changed
            else f"fit does the same; {AT_ONCE}"
        )
        notes.append(f"note: compiled with {with_}, because XLA failed: {compiled.retried}; {fix}.")
    # XLA:CPU runs every collective synchronously
    overlaps = compiled.exact and placed.platform != "cpu"
    notes += [*(_waits(timeline) if overlaps else []), *_rematerialized(timeline)]
    notes += precision_notes(module, placed.products.layers)
    notes += _large_arrays(memory, placed, large_products(program, model))
    notes += [
        *small_collectives(program, traffic, timeline, cluster),
        *gathered_stacks(program, traffic, cluster, LARGE * memory.peak),
    ]
    notes += [
        *crossing_notes(traffic, mesh, cluster, data_axes, period),
        *repeated_exchanges(traffic),
    ]
    notes += _period_notes(server, period, module)
    if widened_dtype(placed, compiled):
        notes.append(
            f"note: XLA:CPU computes {precision} in float32, so this estimate needs and reads more "
            "memory than the target would."
        )
    if cluster.target.simulated not in (0, cluster.count):
        which = f"those of {cluster.target.simulated} devices that share this machine's cores"
        notes.append(
            f"note: the figures are {which}, and {cluster.count} share them otherwise; spmd "
            f"calibrate --devices {cluster.count}."
        )
    if unknown := uncounted(module):
        notes.append(
            f"note: the FLOPs of {', '.join(unknown[:3])} are not counted, only their memory "
            "traffic."
        )
    if loops := module.unbounded_loops:
        notes.append(
            f"note: XLA does not know the trip count of {', '.join(loops[:3])}: counted once each."
        )
    return kind(
        cluster,
        mesh,
        program.rows,
        memory,
        traffic,
        timeline,
        work,
        program.schedules,
        compiled,
        tuple(notes),
        program,
        period,
    )


def step_times(
    module: Module,
    placed: PlacedModel,
    compiled: Compiled,
    cluster: Cluster,
    model_flops: float = math.inf,
) -> StepTimes:
    """The times of a step of a compiled program; see `PlanData.step_times`."""
    mesh, data_axes = MeshSpec.parse(placed.mesh), placed.resolved.data_axes
    widened = widened_dtype(placed, compiled)
    options = {
        "model_flops": model_flops,
        "widened": widened,
        "temporaries": compiled.sizes["temp"],
    }
    return functools.partial(timeline_of, module, mesh, cluster, data_axes, **options)


def widened_dtype(placed: PlacedModel, compiled: Compiled) -> str:
    """The dtype whose products XLA:CPU computes in float32, in an estimate; "" if there is none."""
    precision = placed.config.precision
    return precision if precision != "float32" and not compiled.exact else ""


def synced_by(placed: PlacedModel) -> ParameterServer | None:
    """How workers synchronize, if they train separately."""
    server = placed.resolved.layout.parameter_server
    return server if placed.exchange.local else None
