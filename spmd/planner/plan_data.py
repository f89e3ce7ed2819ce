"""The data of a plan, and how it is computed. Reports, drawings and suggestions are functions over
it, in modules that import this one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from spmd.base.tree import Tree, flatten
from spmd.errors import OptionError, did_you_mean
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.nn.schedule import Schedule
from spmd.planner.cluster import Cluster
from spmd.planner.compile import Compiled, compile_step, widened_dtype
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
from spmd.planner.notes import plan_notes
from spmd.planner.sync_period import StepTimes, SyncPeriod, sync_period
from spmd.planner.timeline import Timeline, timeline_of
from spmd.planner.traffic import Traffic, Transfer, traffic_of
from spmd.train.compiled_step import TrainingProgram, prepare_program
from spmd.train.model_setup import PlacedModel
from spmd.wire.server.declaration import ParameterServer

SHOWN = 3  # costs at the end of a report
MULTIPLYING = {
    "products": "matrix products",
    "convolutions": "convolutions",
    "attention": "fused attention",
}
EXPOSED = "exposed"
RECOMPUTATION = "recomputation"
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
    """Return the costs of a step, largest first; they add up to it.

    Products beyond the model's are costs of their own, in proportion to their FLOPs: those of the
    model are what is left.
    """
    seconds: dict[tuple[str, str, str], float] = {}
    shares = []  # of products beyond the model's
    for kind, causes in BEYOND.items():
        beyond = sum(max(flops.beyond.get(cause, 0.0), 0.0) for cause in causes)
        share = 0.0
        if flops.executed:
            share = beyond / flops.executed
        seconds[kind, TITLES[kind], ""] = timeline.multiplying * share
        shares.append(share)
    seconds[RECOMPUTATION, TITLES[RECOMPUTATION], ""] += timeline.repeated_memory
    of_model = max(1 - sum(shares), 0.0)
    for kind, title in MULTIPLYING.items():
        if took := getattr(timeline, kind):
            what = f"{title}, at {timeline.at_peak.get(kind, 0.0) / took:.0%} of peak"
            seconds[kind, what, ""] = took * of_model
    moving = timeline.memory - timeline.repeated_memory
    seconds["memory", "element-wise work and other operations, at memory bandwidth", ""] = moving
    seconds["launches", "launch overhead", ""] = timeline.launches
    for wait in timeline.waits:
        transfer = wait.transfer
        what = f"exposed communication: {transfer.kind} of {transfer.purpose}{_between(transfer)}"
        key = (EXPOSED, what, transfer.purpose)
        seconds[key] = seconds.get(key, 0.0) + wait.exposed
    hosts = timeline.exposed - sum(wait.exposed for wait in timeline.waits)
    seconds[EXPOSED, "exposed communication: copies between device and host", "host"] = hosts
    costs = []
    for (kind, what, purpose), took in sorted(seconds.items(), key=lambda item: -item[1]):
        # costs that are left of a difference of sums
        if took > 1e-9 * timeline.seconds:  # rounding
            costs.append(StepCost(kind, what, took, took / timeline.seconds, purpose))
    return tuple(costs)


def _between(transfer: Transfer) -> str:
    """Name the links that a collective crosses; "" for those inside of a node."""
    _, nodes, sites = transfer.counts
    if sites > 1 or transfer.leaving:
        return " between sites"
    if nodes > 1:
        return " between nodes"
    return ""


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
    program: TrainingProgram = dataclasses.field(repr=False)
    period: SyncPeriod

    @property
    def fits(self) -> bool:
        """True if the step fits in the target's memory."""
        return self.memory.fits

    @property
    def layout(self) -> Layout:
        """The layout of this plan."""
        return self.program.placed.resolved.layout

    @property
    def costs(self) -> tuple[StepCost, ...]:
        """The costs of the step, largest first; together they are the step."""
        return step_costs(self.timeline, self.flops)

    @property
    def requested_bytes(self) -> int | None:
        """Bytes that the step's own collectives send from each device, as `trainer.wire` lists
        them; None where XLA places all of them.
        """
        if not self.program.placed.exchange.reduction.manual and not self.schedules:
            return None
        with gpu_of(self.cluster.target):
            return self.program.wire.bytes()

    @property
    def rows_per_second(self) -> float:
        """Predicted throughput of all devices together, in rows of the batch per second, on average
        over a period.
        """
        if self.period.seconds:
            return self.rows / self.period.seconds
        return 0.0

    @property
    def step_times(self) -> StepTimes:
        """The times of a step, called with `due` as `timeline_of` is."""
        return step_times(
            parse(self.compiled.hlo), self.program.placed, self.compiled, self.cluster
        )

    def least_memory(self, accumulate: int) -> float:
        """Return a lower bound on a device's bytes with more microbatches: all temporaries except
        gradients shrink in proportion.
        """
        divisible = max(self.memory.temporaries - self.memory.gradients, 0)
        left = self.program.placed.config.accumulate / accumulate
        return self.memory.expected - divisible * (1 - left)

    def parameter(self, path: str) -> Any:
        """Return a parameter's shape and sharding.

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
    """Return a plan, of class `kind`, for a model placed on a mesh with as many devices as the
    cluster.

    Raises:
      SpmdError: as `spmd.plan`.
    """
    # tracing asks for the compute capability of a GPU (gpu_kernels.py)
    with gpu_of(cluster.target):
        program = prepare_program(placed, batch)
        model = trace_model(program)
    placed = program.placed
    mesh = MeshSpec.parse(placed.mesh)
    # the only call that compiles: everything below is read from its program
    compiled = compile_step(program, cluster, timeout=timeout, say=say)
    module = parse(compiled.hlo)
    traffic = traffic_of(module, mesh, cluster, placed.resolved.data_axes)
    memory = memory_of(program, compiled, module, cluster)
    # the model is traced for one device, and its work is the same however it is sharded
    flops = model_flops(model) / cluster.count
    times = step_times(module, placed, compiled, cluster, flops)
    timeline, server = times(), synced_by(placed)
    period = sync_period(server, times, traffic)
    shares = flop_shares(
        module,
        mesh,
        tuple(program.schedules.values()),
        executed=timeline.flops,
        model=flops,
        empty=empty_places(model) / cluster.count,
    )
    notes = plan_notes(
        program,
        cluster,
        compiled,
        module,
        large_products(program, model),
        memory=memory,
        traffic=traffic,
        timeline=timeline,
        server=server,
        period=period,
    )
    return kind(
        cluster=cluster,
        mesh=mesh,
        rows=program.rows,
        memory=memory,
        traffic=traffic,
        timeline=timeline,
        flops=shares,
        schedules=program.schedules,
        compiled=compiled,
        notes=tuple(notes),
        program=program,
        period=period,
    )


def step_times(
    module: Module,
    placed: PlacedModel,
    compiled: Compiled,
    cluster: Cluster,
    model_flops: float = math.inf,
) -> StepTimes:
    """Return the times of a step of a compiled program; see `PlanData.step_times`."""
    return functools.partial(
        timeline_of,
        module,
        MeshSpec.parse(placed.mesh),
        cluster,
        placed.resolved.data_axes,
        model_flops=model_flops,
        widened=widened_dtype(placed.config.precision, compiled),
        temporaries=compiled.sizes["temp"],
    )


def synced_by(placed: PlacedModel) -> ParameterServer | None:
    """Return how workers synchronize, if they train separately; None if they do not."""
    if placed.exchange.local:
        return placed.resolved.layout.parameter_server
    return None
