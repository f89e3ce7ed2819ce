"""What the steps of a trace spent their time on, by kind and by layer, beside what the plan of the
same program predicts.
"""

import dataclasses
import functools
import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spmd.errors import OptionError, option, quoted
from spmd.mesh import MeshSpec
from spmd.planner.cluster import Cluster, cluster_of
from spmd.planner.device_trace import Event, layer_of, measure, module_number, read_trace
from spmd.planner.hlo import Instruction, Module, collective_kind, parse
from spmd.planner.target import load
from spmd.planner.text_report import KERNELS, seconds
from spmd.planner.timeline import LIMITS, Timeline, timeline_of
from spmd.render.html import Html, aligned, filled, framed, table
from spmd.train.model_setup import PlacedModel

PROGRAMS = ("jit_train_step", "jit_scan_steps")  # JAX's names of the programs that train
LIMITS_BY_FIELD = {field: limit for limit, field in LIMITS.items()}  # the plan's words
STEP, HIDDEN, BETWEEN, OTHER = "step", "hidden communication", "between steps", "other programs"
CLEARED, UNNAMED = "clearing temporaries", "operations that the trace does not name"
ROUNDING = 1e-12  # seconds
SHOWN = 40  # lines of layers
HEADER = ("predicted", "measured", "share", "predicted / measured")


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of a step on one device: measured, mean over steps and devices; and predicted, None
    where the plan has no such line.
    """

    name: str
    measured: float
    predicted: float | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction of the program: seconds of a step for which it is charged, and the kind and
    the layer to which they count.
    """

    name: str
    kind: str
    layer: str
    measured: float
    predicted: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class StepProfile:
    """The time of traced steps. Printed, two tables: by kind, with the words of a plan, and by
    layer.

    At each moment a device is charged for the operation that began last of those that run.
    Communication is charged where nothing else runs, which is *exposed*; elsewhere it is *hidden*.
    A moment of a step in which nothing runs is launch overhead.

    Attributes:
      first, last: numbers of the traced steps, of those whose numbers are shown.
      devices: how many of this process's devices the trace has.
      kinds: lines by kind. They add up to the line "step"; those below it are not part of it.
      layers: lines by the path of a layer, forward and backward, largest first. With launch
        overhead they add up to the step.
      operations: instructions of the program, largest first; what is predicted of launches and of
        `CLEARED` is not among them.
      target: for what was predicted; "" if nothing was.
      folder: where the trace is.
      notes: remarks.

    Example:
      >>> profile = StepProfile(
      ...     11,
      ...     15,
      ...     8,
      ...     (Line("memory", 0.75, 0.5), Line("step", 1.0, 0.5)),
      ...     (),
      ...     (),
      ...     "8xcpu",
      ...     Path("trace"),
      ...     (),
      ... )
      >>> profile["memory"].measured, profile
      (0.75, StepProfile of steps 11 to 15: 1 s per step, 500 ms predicted)
    """

    first: int
    last: int
    devices: int
    kinds: tuple[Line, ...]
    layers: tuple[Line, ...]
    operations: tuple[Operation, ...]
    target: str
    folder: Path
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Line:
        """The line of a kind, or of a layer.

        Raises:
          KeyError: there is none.
        """
        lines = {line.name: line for line in (*self.layers, *self.kinds)}
        if name not in lines:
            raise KeyError(f'no line "{name}"; there are {", ".join(lines)}')
        return lines[name]

    @property
    def _steps(self) -> str:
        return (
            f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"
        )

    @property
    def title(self) -> str:
        """What was traced."""
        beside = f", beside the plan for {self.target}" if self.target else ""
        many = f"{self.devices} device{'s' * (self.devices > 1)}"
        return f"{self._steps} on {many}{beside}: time of a step, mean over steps and devices"

    def grouped_layers(self, most: int = SHOWN) -> tuple[Line, ...]:
        """The layers with those below the same module added up, at the greatest depth at which
        there are at most `most` lines.
        """
        deepest = max((line.name.count("/") for line in self.layers), default=0) + 1
        for depth in range(deepest, 0, -1):
            groups: dict[str, list[Line]] = defaultdict(list)
            for line in self.layers:
                groups["/".join(line.name.split("/")[:depth])].append(line)
            if len(groups) <= most:
                break
        lines = [
            Line(name, sum(one.measured for one in group), _sum(one.predicted for one in group))
            for name, group in groups.items()
        ]
        ordered = sorted(lines, key=lambda line: -line.measured)
        rest = ordered[most:]
        more = (
            [
                Line(
                    f"{len(rest)} more",
                    sum(one.measured for one in rest),
                    _sum(one.predicted for one in rest),
                )
            ]
            if rest
            else []
        )
        return (*ordered[:most], *more)

    def _rows(self, lines: Sequence[Line]) -> list[tuple[str, ...]]:
        step = self[STEP].measured
        return [
            (
                line.name,
                "" if line.predicted is None else seconds(line.predicted),
                seconds(line.measured),
                f"{line.measured / step:.1%}" if step else "",
                f"{line.predicted / line.measured:.2f}"
                if line.predicted is not None and line.measured
                else "",
            )
            for line in lines
        ]

    def _tables(self) -> tuple[tuple[str, list[tuple[str, ...]]], ...]:
        return ("by kind", self._rows(self.kinds)), ("by layer", self._rows(self.grouped_layers()))

    def __str__(self) -> str:
        lines = [f"PROFILE of {self.title}"]
        for name, rows in self._tables():
            lines += ["", *aligned([(name, *HEADER), *rows], ruled=True)]
        return filled("\n".join([*lines, "", *self.notes, f"trace: {self.folder}"]))

    def __repr__(self) -> str:
        step = self[STEP]
        predicted = "" if step.predicted is None else f", {seconds(step.predicted)} predicted"
        return f"StepProfile of {self._steps}: {seconds(step.measured)} per step{predicted}"

    def _repr_html_(self) -> Html:
        tables = "".join(
            f'<div class="wide">{table((name, *HEADER), rows)}</div>'
            for name, rows in self._tables()
        )
        notes = "".join(
            f"<p>{html.escape(note)}</p>" for note in (*self.notes, f"trace: {self.folder}")
        )
        return framed(f"<p>{html.escape(self.title)}</p>{tables}{notes}")


def check_target(target: "str | Cluster | None", placed: PlacedModel) -> Cluster | None:
    """The cluster for which a step is to be predicted; None: the devices that are here.

    Raises:
      OptionError: there is no such target, or the mesh has another number of devices.
    """
    if target is None:
        return None
    cluster, count = Cluster.parse(target), placed.mesh.devices.size
    if cluster.count != count:
        kind = (
            re.sub(r"^(\d+x)*", "", target.partition("@")[0])
            if isinstance(target, str)
            else cluster.target.name
        )
        raise OptionError(
            f"Profile: {option('target', quoted(target))} is {cluster.count} devices, and the mesh "
            f"has {count}.",
            fix=f"{option('target', quoted(f'{count}x{kind}'))}.",
        )
    return cluster


def profile_of(
    trace: Path,
    placed: PlacedModel,
    target: Cluster | None = None,
    *,
    rows: int,
    first: int,
    last: int,
    calls: Sequence[int],
    waited: float = 0.0,
) -> StepProfile:
    """The profile of the steps in a trace. Nothing is compiled: the program is the one that this
    process has.

    Args:
      trace: the file `NAME.xplane.pb`.
      target: for which the step is predicted; None: the shipped description of these devices.
      rows: of a full batch.
      first, last: numbers of the traced steps.
      calls: how many steps each traced call made.
      waited: seconds in which devices waited for data.

    Raises:
      ValueError: the trace has no complete step, or its program is not found.
    """
    events = read_trace(trace)
    ran = Counter(event.program for event in events if event.program[0] in PROGRAMS)
    if not ran:
        raise ValueError("it has no operation of a training step")
    program = ran.most_common(1)[0][0]
    module, temporaries = _executable(
        placed, rows, program, {event.operation for event in events if event.program == program}
    )
    steps_per_call = max(calls) if program[0] == PROGRAMS[1] else 1
    instructions = {
        instr.name: (name, instr) for name, lines in module.computations.items() for instr in lines
    }
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    measured = [
        one
        for device in by_device.values()
        if (one := measure(device, program, module, instructions)).executions
    ]
    if not measured:
        raise ValueError("it has no complete step")
    executions = sum(one.executions for one in measured)
    gaps = max(executions - len(measured), 1)
    counts = {
        "windows": executions,
        "launches": executions,
        "hidden": executions,
        "between": gaps,
        "other": gaps,
    }
    mean = {
        name: sum(getattr(one, name) for one in measured) / count / steps_per_call
        for name, count in counts.items()
    }
    charged: dict[str, float] = defaultdict(float)
    for one in measured:
        for name, took in one.charged.items():
            charged[name] += took / executions / steps_per_call
    cluster = target or cluster_of(list(placed.mesh.devices.flat))
    # whose rule says what a fusion with a product counts as
    described = cluster or Cluster(1, placed.mesh.devices.size, load("h100"))
    axes = MeshSpec.parse(placed.mesh), described, placed.resolved.data_axes
    plan = PredictedStep(
        timeline_of(module, *axes, temporaries=temporaries),
        steps_per_call,
        known=cluster is not None,
    )
    operations = _operations(charged, plan, module, instructions)
    traced = executions // len(measured) * steps_per_call
    notes = _notes(
        placed, target, cluster, waited * len(measured) / gaps / steps_per_call, operations
    )
    if steps_per_call > 1:
        count = executions // len(measured)
        many = f"{count} call{'s' * (count > 1)} of {steps_per_call} steps"
        notes.append(f"note: {many}; what a call does beside its steps is a part of them.")
    start_step = placed.resolved.layout.gradients.start_step
    if first <= start_step:
        early = f"{min(last, start_step) - first + 1} of {last - first + 1} steps"
        notes.append(
            f"note: {early} reduce gradients exactly, before start_step={start_step}; predicted is "
            "a step with the codec."
        )
    if len(measured) < placed.mesh.devices.size:
        notes.append(
            f"note: these are {len(measured)} of {placed.mesh.devices.size} devices, those of "
            "process 0."
        )
    shown = [(first, last)]
    if traced < sum(calls):
        notes.append(
            f"note: {traced} of {sum(calls)} steps ran the same program, which are these; the "
            "others count as other programs."
        )
        shown = _steps_of(calls, first, several=program[0] == PROGRAMS[1])
        if sum(end - begin + 1 for begin, end in shown) != traced:
            shown = [(first, last)]  # which of them it was is not known
        elif len(shown) > 1:
            notes.append(
                f"note: these are steps {', '.join(f'{begin} to {end}' for begin, end in shown)}."
            )
    layers, name = _layers(operations, plan), "" if cluster is None else str(cluster)
    steps = shown[0][0], shown[-1][1]
    return StepProfile(
        *steps,
        len(measured),
        _kinds(mean, operations, plan),
        layers,
        operations,
        name,
        trace.parent,
        tuple(notes),
    )


def _steps_of(calls: Sequence[int], first: int, *, several: bool) -> list[tuple[int, int]]:
    """Numbers of the steps that were made by calls of several steps, or one by one: the first and
    the last one of each stretch.
    """
    stretches: list[tuple[int, int]] = []
    for count in calls:
        if (count > 1) == several:
            joins = stretches and stretches[-1][1] == first - 1
            begin = stretches.pop()[0] if joins else first
            stretches.append((begin, first + count - 1))
        first += count
    return stretches


def _notes(
    placed: PlacedModel,
    target: Cluster | None,
    cluster: Cluster | None,
    waited: float,
    operations: Sequence[Operation],
) -> list[str]:
    """Remarks on what was predicted, and on what is in which line; `waited`: seconds of a step, as
    those between steps.
    """
    many, notes = placed.mesh.devices.size, []
    devices = f" --devices {many}" if placed.platform == "cpu" else ""
    how = (
        f"spmd calibrate{devices} --out mine.toml, then "
        f"{option('target', quoted(f'{many}xmine.toml'))}."
    )
    if cluster is None:
        notes.append(
            "note: nothing is predicted, as no description of "
            f"{placed.mesh.devices.flat[0].device_kind} is shipped: {how}"
        )
    elif target is None and placed.platform == "cpu":
        notes.append(
            f"note: predicted with the shipped target {cluster.target.name}, whose figures are "
            f"assumed; to measure them: {how}"
        )
    if any(one.kind == LIMITS_BY_FIELD["exposed"] and one.measured for one in operations):
        notes.append(
            "note: communication includes the time in which a device waits until all others have "
            "begun it."
        )
    if waited:
        notes.append(
            f"note: of the time between steps, devices wait {seconds(waited)} per step for data."
        )
    if placed.exchange.local:
        notes.append(
            "note: predicted is a step that synchronizes all parameters; only some of the traced "
            "ones do."
        )
    if unnamed := sum(one.measured for one in operations if one.name == ""):
        notes.append(
            f"note: the trace does not name {seconds(unnamed)} of a step, as of CUDA graphs; "
            '[compiler] options = { xla_gpu_enable_command_buffer = "" } runs operations one by '
            "one."
        )
    return notes


def _sum(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _executable(
    placed: PlacedModel, rows: int, program: tuple[str, int], ran: set[str]
) -> tuple[Module, float]:
    """The compiled program that ran, and the bytes of its temporaries.

    Several programs may have this name, such as those of other batches: it is the one with the
    operations that ran and with the number in the trace. One that was loaded has another number
    here; then it is one for full batches, and the newest of these.
    """
    found = []
    for executable in placed.mesh.local_devices[0].client.live_executables():  # the newest first
        for compiled in executable.hlo_modules()[:1]:
            if compiled.name == program[0]:
                module, number = (
                    parse(compiled.to_string()),
                    module_number(compiled.as_serialized_hlo_module_proto()),
                )
                names = {instr.name for lines in module.computations.values() for instr in lines}
                inputs = [
                    instr
                    for instr in module.computations[module.entry]
                    if instr.op == "parameter" and instr.scope.startswith("batch")
                ]
                full = any(
                    instr.arrays[0].shape[:1] == (rows // placed.resolved.workers,)
                    for instr in inputs
                )
                found.append((len(ran & names), number == program[1], full, module, executable))
    if not found:
        raise ValueError(f"this process has no program {program[0]}")
    *_, module, executable = max(found, key=lambda entry: entry[:3])
    return module, float(executable.get_compiled_memory_stats().temp_size_in_bytes)


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """The timeline of a program that makes `steps` steps; `known`: whether it is that of these
    devices, and not only a way to count.
    """

    timeline: Timeline
    steps: int
    known: bool

    def seconds(self, field: str) -> float | None:
        """A field of the timeline, of one step."""
        return getattr(self.timeline, field) / self.steps if self.known else None

    def part(self, operation: str) -> str:
        """The field to which an operation's own work counts."""
        return self._parts.get(operation, "memory")

    def of(self, operation: str) -> float | None:
        """Seconds of an operation, of one step."""
        return self._operations.get(operation, 0.0) / self.steps if self.known else None

    @functools.cached_property
    def _parts(self) -> dict[str, str]:
        return {name: part for name, part in self.timeline.operations if part != "exposed"}

    @functools.cached_property
    def _operations(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for (name, _), took in self.timeline.operations.items():
            total[name] += took
        return total

    @property
    def cleared(self) -> float:
        """Seconds of clearing temporaries, which are part of memory and of no operation."""
        memory = sum(
            took for (_, part), took in self.timeline.operations.items() if part == "memory"
        )
        return max(self.timeline.memory - memory, 0.0) / self.steps if self.known else 0.0


def _operations(
    charged: Mapping[str, float],
    plan: PredictedStep,
    module: Module,
    instructions: Mapping[str, tuple[str, Instruction]],
) -> tuple[Operation, ...]:
    """Every operation that ran or is predicted, in the words of the plan."""
    listed = []
    for name in dict.fromkeys(
        [*charged, *(operation for operation, _ in plan.timeline.operations)]
    ):
        computation, instr = instructions.get(name, ("", None))
        kind = LIMITS_BY_FIELD[
            "exposed" if instr is not None and collective_kind(instr.op) else plan.part(name)
        ]
        layer = UNNAMED if instr is None else layer_of(module.scopes(computation, instr)[0])
        listed.append(Operation(name, kind, layer, charged.get(name, 0.0), plan.of(name)))
    return tuple(sorted(listed, key=lambda operation: (-operation.measured, operation.name)))


def _kinds(
    mean: Mapping[str, float], operations: Sequence[Operation], plan: PredictedStep
) -> tuple[Line, ...]:
    """Lines by kind."""
    lines = []
    for limit, field in LIMITS.items():
        took, planned = (
            sum(one.measured for one in operations if one.kind == limit),
            plan.seconds(field),
        )
        took += mean["launches"] if field == "launches" else 0.0
        if took or planned or field not in KERNELS:
            lines.append(Line(limit, took, planned))
    lines += [
        Line(STEP, mean["windows"], plan.seconds("seconds")),
        Line(HIDDEN, mean["hidden"], plan.seconds("hidden")),
    ]
    lines.append(Line(BETWEEN, mean["between"]))
    return (*lines, *([Line(OTHER, mean["other"])] if mean["other"] else []))


def _layers(operations: Sequence[Operation], plan: PredictedStep) -> tuple[Line, ...]:
    """Lines by layer."""
    groups: dict[str, list[Operation]] = defaultdict(list)
    for one in operations:
        groups[one.layer].append(one)
    lines = [
        Line(name, sum(one.measured for one in group), _sum(one.predicted for one in group))
        for name, group in groups.items()
    ]
    lines += [Line(CLEARED, 0.0, plan.cleared)] if plan.cleared > ROUNDING else []
    return tuple(sorted(lines, key=lambda line: (-line.measured, line.name)))
