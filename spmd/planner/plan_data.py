"""The data of a plan, and how it is computed. Reports, drawings and fixes are functions over it, in
modules that import this one.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from spmd.errors import OptionError, did_you_mean
from spmd.fields import as_toml
from spmd.layout.compiler import TRITON, compiler_notes
from spmd.layout.schema import Layout
from spmd.layout.summary import notes as layout_notes
from spmd.mesh import MeshSpec
from spmd.nn.attention_kernels import PREFERRED, may_replace
from spmd.nn.parallel_context import STORED
from spmd.nn.schedule import Schedule
from spmd.planner.communication_notes import (
    crossing_notes,
    gathered_stacks,
    repeated_exchanges,
    small_collectives,
)
from spmd.planner.compile import Compiled, compile_step
from spmd.planner.cost import uncounted
from spmd.planner.flop_shares import FlopShares, flop_shares
from spmd.planner.gpu_kernels import gpu_of
from spmd.planner.hlo import Module, parse
from spmd.planner.low_precision import precision_notes
from spmd.planner.memory import Memory, memory_of
from spmd.planner.model_flops import (
    LargeProducts,
    empty_places,
    large_products,
    model_flops,
    trace_model,
)
from spmd.planner.step_costs import StepCost, step_costs
from spmd.planner.sync_period import StepTimes, SyncPeriod, sync_period, unmarked_parts
from spmd.planner.target import Cluster
from spmd.planner.timeline import Timeline, Wait, timeline_of
from spmd.planner.traffic import Traffic, traffic_of
from spmd.sync.notes import notes as exchange_notes
from spmd.train.compiled_step import Program, prepare_program
from spmd.train.compiler_options import AT_ONCE
from spmd.train.model_setup import PlacedModel
from spmd.tree import Tree, flatten, format_bytes
from spmd.wire.server.declaration import ParameterServer

WORTH_A_NOTE, SHOWN_WAITS = 0.02, 3  # of a step's time; and of its collectives
LARGE = 0.1  # of a step's peak memory: an array that is worth a note


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


def _period_notes(server: ParameterServer | None, period: SyncPeriod, module: Module) -> list[str]:
    """Notes on synchronizations that the compiled program runs in another way than the layout
    says.
    """
    if server is None:
        return []
    notes = []
    if unmarked := unmarked_parts(server, module):
        notes.append(
            f"note: XLA has merged the branches of {', '.join(unmarked)} with others, so every "
            "step is timed as if it took them."
        )
    waits = sum(kind.count * kind.exposed for kind in period.kinds if kind.due)
    if server.overlap and period.hidden < waits:
        ran = f"hides {period.hidden:.3g} s of them behind computation, and waits {waits:.3g} s"
        later = f"{server.overlap} step{'s' * (server.overlap > 1)} after it was sent"
        notes.append(
            f"note: overlap = {server.overlap} applies a synchronization {later}, but the compiled "
            "step ends when its own collectives "
            f"have: in a period of {period.steps} steps it {ran}."
        )
    return notes


def in_parts(placed: PlacedModel) -> str:
    """The implementation of attention that stores no array of all scores where the layout's own
    does.
    """
    written = placed.resolved.layout.attention.implementation == "as_written"
    return "auto" if written and placed.platform in PREFERRED else "chunked"


def stored_scores(
    memory: Memory, placed: PlacedModel, products: LargeProducts
) -> list[tuple[int, str, str]]:
    """The largest temporaries that hold all scores of an attention: bytes, the array, and where in
    the model it is.
    """
    # a gradient may have a length's sides
    weights = [leaf.shape for leaf in flatten(placed.abstract_state.params).values()]

    def are_scores(sizes: list[int]) -> bool:
        return any(
            _has(sizes, pair)
            and not any(_has(w, pair) and math.prod(sizes) <= math.prod(w) for w in weights)
            for pair in products.scores
        )

    parallel = placed.parallel
    if parallel.attention != "as_written" and may_replace(parallel) and STORED not in parallel.used:
        return []
    return [
        (size, array, where) for size, array, where in memory.largest if are_scores(_sizes(array))
    ]


def _sizes(array: str) -> list[int]:
    """The shape of an array in text.

    >>> _sizes("float32[8,4,64,64] x 2")
    [8, 4, 64, 64]
    """
    return [int(size) for size in re.findall(r"\d+", array.partition("[")[2].partition("]")[0])]


def _large_arrays(memory: Memory, placed: PlacedModel, products: LargeProducts) -> list[str]:
    """Notes on scores of attention, and on logits, that are among the largest temporaries, with
    what computes them in parts.
    """
    large = [
        (size, array, where, _sizes(array))
        for size, array, where in memory.largest
        if size >= LARGE * memory.peak
    ]
    scores = [
        found
        for found in stored_scores(memory, placed, products)
        if found[0] >= LARGE * memory.peak
    ]
    logits = [
        found
        for found in large
        if any(v in found[3] and math.prod(found[3]) > width * v for width, v in products.logits)
    ]
    return [
        f"note: {what} are stored: {array}, {format_bytes(size)} of "
        f"{format_bytes(memory.peak)}{f', in {where}' if where else ''}; {fix}."
        for what, found, fix in (
            (
                "all scores of attention",
                scores,
                f'[attention] implementation = "{in_parts(placed)}" computes them in parts',
            ),
            (
                "the logits of all tokens",
                logits,
                "spmd.losses.cross_entropy_from_features computes them in parts",
            ),
        )
        for size, array, where, *_ in found[:1]
    ]


def _has(dims: Sequence[int], pair: Sequence[int]) -> bool:
    return not Counter(pair) - Counter(dims)


def _waits(timeline: Timeline) -> list[str]:
    """Notes on the collectives that take the most of a step because nothing hides them, each with
    the reason.
    """
    groups: dict[tuple, list[Wait]] = {}
    for wait in timeline.waits:
        groups.setdefault(
            (
                wait.transfer.kind,
                wait.transfer.purpose,
                wait.transfer.where,
                wait.transfer.asynchronous,
            ),
            [],
        ).append(wait)
    lines = []
    for (kind, purpose, where, asynchronous), waits in groups.items():
        exposed, times = sum(wait.exposed for wait in waits), sum(wait.times for wait in waits)
        if exposed < WORTH_A_NOTE * timeline.seconds or len(lines) == SHOWN_WAITS:
            continue
        beside = sum(wait.beside * wait.times for wait in waits) / times
        reason = "XLA runs it synchronously" if not asynchronous else "the next operation needs it"
        if asynchronous and beside:
            needed = beside + exposed / times
            reason = (
                f"{_milliseconds(beside)} of computation are scheduled beside it, and it takes "
                f"{_milliseconds(needed)}"
            )
        often = f"{times} times, " if times > 1 else ""
        lines.append(
            f"note: {kind} of {purpose} ({where}) is waited for: {often}{_milliseconds(exposed)} "
            f"of a step; {reason}."
        )
    return lines


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value * 1e3:,.0f} ms"


def _rematerialized(timeline: Timeline) -> list[str]:
    """A note on operations that XLA repeats to save memory."""
    if timeline.rematerialized < WORTH_A_NOTE * timeline.seconds:
        return []
    took = f"{timeline.rematerialized * 1e3:,.3g} ms of a step"
    off = '[compiler] options = { xla_disable_hlo_passes = "rematerialization" }'
    return [
        f"note: XLA computes some results twice to save memory, which takes {took}; {off} forbids "
        "it, and [remat] says what to keep."
    ]


def _warnings(program: Program, traffic: Traffic, memory: Memory, cluster: Cluster) -> list[str]:
    """Notes on what the layout does not ask for: low-precision reductions, moved activations; and
    on memory that JAX does not use.
    """
    lines = []
    placed = program.placed
    exact = placed.resolved.layout.gradients.codec == "exact"
    low = traffic.dtypes("gradients") & {"bfloat16", "float16"}
    if (
        exact
        and low
        and any(leaf.dtype == "float32" for leaf in flatten(placed.abstract_state.params).values())
    ):
        fix = 'reduction = "all_reduce" or "reduce_scatter" reduces them in float32'
        lines.append(
            f"note: XLA reduces gradients in {', '.join(sorted(low))}, which the layout does not "
            f"ask for; {fix}."
        )
    data_axes = set(placed.resolved.data_axes)
    moved = sum(
        t.sent * t.times
        for t in traffic.transfers
        if t.purpose == "activations" and set(t.axes) & data_axes
    )
    if moved > traffic.bytes("parameters") + traffic.bytes("gradients"):
        lines.append(
            f"note: {format_bytes(moved)} of activations are sent over "
            f"{', '.join(sorted(data_axes))}, more than parameters and gradients: "
            "the layout moves activations to the parameters instead of parameters to the batch."
        )
    sometimes = sum(
        transfer.sent * transfer.times for transfer in traffic.transfers if transfer.conditional
    )
    if sometimes:
        lines.append(
            f"note: {format_bytes(sometimes)} are sent only in steps that synchronize workers; "
            "traffic and time are those of such a step, "
            "in which all parameters are sent and received."
        )
    if memory.pool is not None and memory.fraction is not None:
        reserved = f"JAX uses {memory.pool / memory.capacity:.0%} of a GPU's memory"
        lines.append(
            f"note: {reserved}; this step needs "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={memory.fraction:.2f}."
        )
    return lines
