"""The time of the steps of a trace, by kind and by layer, beside what the plan of the same program
predicts.
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
from spmd.planner.device_trace import Event, Measured, layer_of, measure, module_number, read_trace
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
        """Return the line of a kind, or of a layer.

        Raises:
          KeyError: there is none.
        """
        lines = {line.name: line for line in (*self.layers, *self.kinds)}
        if name not in lines:
            raise KeyError(f'no line "{name}"; there are {", ".join(lines)}')
        return lines[name]

    @property
    def _steps(self) -> str:
        if self.first == self.last:
            return f"step {self.last}"
        return f"steps {self.first} to {self.last}"

    @property
    def title(self) -> str:
        """The steps and devices that were traced."""
        beside = ""
        if self.target:
            beside = f", beside the plan for {self.target}"
        many = f"{self.devices} device{'s' * (self.devices > 1)}"
        return f"{self._steps} on {many}{beside}: time of a step, mean over steps and devices"

    def grouped_layers(self, most: int = SHOWN) -> tuple[Line, ...]:
        """Return the layers with those below the same module added up, at the greatest depth at
        which there are at most `most` lines.
        """
        groups: dict[str, list[Line]] = {}
        deepest = max((line.name.count("/") for line in self.layers), default=0) + 1
        for depth in range(deepest, 0, -1):
            groups = defaultdict(list)
            for line in self.layers:
                module = line.name.split("/")[:depth]
                groups["/".join(module)].append(line)
            if len(groups) <= most:
                break
        lines = [_total(name, group) for name, group in groups.items()]
        lines.sort(key=lambda line: -line.measured)
        if len(lines) > most:
            smallest = lines[most:]
            lines[most:] = [_total(f"{len(smallest)} more", smallest)]
        return tuple(lines)

    def _rows(self, lines: Sequence[Line]) -> list[tuple[str, ...]]:
        step = self[STEP].measured
        rows = []
        for line in lines:
            predicted = ratio = ""
            if line.predicted is not None:
                predicted = seconds(line.predicted)
                if line.measured:
                    ratio = f"{line.predicted / line.measured:.2f}"
            share = ""
            if step:
                share = f"{line.measured / step:.1%}"
            rows.append((line.name, predicted, seconds(line.measured), share, ratio))
        return rows

    def _tables(self) -> tuple[tuple[str, list[tuple[str, ...]]], ...]:
        return ("by kind", self._rows(self.kinds)), ("by layer", self._rows(self.grouped_layers()))

    def __str__(self) -> str:
        lines = [f"PROFILE of {self.title}"]
        for name, rows in self._tables():
            lines += ["", *aligned([(name, *HEADER), *rows], ruled=True)]
        return filled("\n".join([*lines, "", *self.notes, f"trace: {self.folder}"]))

    def __repr__(self) -> str:
        step = self[STEP]
        predicted = ""
        if step.predicted is not None:
            predicted = f", {seconds(step.predicted)} predicted"
        return f"StepProfile of {self._steps}: {seconds(step.measured)} per step{predicted}"

    def _repr_html_(self) -> Html:
        parts = [f"<p>{html.escape(self.title)}</p>"]
        for name, rows in self._tables():
            parts.append(f'<div class="wide">{table((name, *HEADER), rows)}</div>')
        for note in (*self.notes, f"trace: {self.folder}"):
            parts.append(f"<p>{html.escape(note)}</p>")
        return framed("".join(parts))


def check_target(target: "str | Cluster | None", placed: PlacedModel) -> Cluster | None:
    """Return the cluster for which a step is to be predicted; None: the devices that are here.

    Raises:
      OptionError: there is no such target, or the mesh has another number of devices.
    """
    if target is None:
        return None
    cluster, count = Cluster.parse(target), placed.mesh.devices.size
    if cluster.count != count:
        kind = cluster.target.name
        if isinstance(target, str):  # its kind may be the path of a file
            kind = re.sub(r"^(\d+x)*", "", target.partition("@")[0])
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
    """Return the profile of the steps in a trace. Nothing is compiled: the program is the one that
    this process has.

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
    programs = Counter(event.program for event in events if event.program[0] in PROGRAMS)
    if not programs:
        raise ValueError("it has no operation of a training step")
    program = max(programs, key=lambda program: programs[program])
    ran = {event.operation for event in events if event.program == program}
    module, temporaries = _executable(placed, rows, program, ran)
    instructions = {instr.name: (name, instr) for name, instr in module.instructions}
    several = program[0] == PROGRAMS[1]
    steps_per_call = 1
    if several:
        steps_per_call = max(calls)
    measured = _measure_devices(events, program, module, instructions)
    if not measured:
        raise ValueError("it has no complete step")
    # between n executions of a device are n - 1 gaps
    executions = sum(device.executions for device in measured)
    gaps = max(executions - len(measured), 1)
    mean, charged = _means(measured, executions, gaps, steps_per_call)
    cluster = target or cluster_of(list(placed.mesh.devices.flat))
    # whose rule says what a fusion with a product counts as
    described = cluster or Cluster(1, placed.mesh.devices.size, load("h100"))
    timeline = timeline_of(
        module,
        MeshSpec.parse(placed.mesh),
        described,
        placed.resolved.data_axes,
        temporaries=temporaries,
    )
    plan = PredictedStep(timeline, steps_per_call, is_of_devices=cluster is not None)
    operations = _operations(charged, plan, module, instructions)
    waiting = waited * len(measured) / gaps / steps_per_call
    notes = _notes(placed, target, cluster, waiting, operations)
    traced = executions // len(measured)  # calls
    if steps_per_call > 1:
        many = f"{traced} call{'s' * (traced > 1)} of {steps_per_call} steps"
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
    stretches, remarks = _traced_steps(calls, first, last, traced * steps_per_call, several)
    return StepProfile(
        first=stretches[0][0],
        last=stretches[-1][1],
        devices=len(measured),
        kinds=_kinds(mean, operations, plan),
        layers=_layers(operations, plan),
        operations=operations,
        target="" if cluster is None else str(cluster),
        folder=trace.parent,
        notes=(*notes, *remarks),
    )


def _measure_devices(
    events: Sequence[Event],
    program: tuple[str, int],
    module: Module,
    instructions: Mapping[str, tuple[str, Instruction]],
) -> list[Measured]:
    """Charge the time of each device that has executed the program to its operations."""
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    devices = [measure(device, program, module, instructions) for device in by_device.values()]
    return [device for device in devices if device.executions]


def _means(
    devices: Sequence[Measured], executions: int, gaps: int, steps_per_call: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the means of a step over devices: by what was measured, and by operation that was
    charged.
    """
    counts = {
        "windows": executions,
        "launches": executions,
        "hidden": executions,
        "between": gaps,
        "other": gaps,
    }
    mean = {}
    for name, count in counts.items():
        total = sum(getattr(device, name) for device in devices)
        mean[name] = total / count / steps_per_call
    charged: dict[str, float] = defaultdict(float)
    for device in devices:
        for name, took in device.charged.items():
            charged[name] += took / executions / steps_per_call
    return mean, charged


def _traced_steps(
    calls: Sequence[int], first: int, last: int, traced: int, several: bool
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the numbers of the steps that a profile is of, as stretches, and notes on others.

    Args:
      traced: how many steps ran the program of the profile.
      several: whether that is the program of several steps.
    """
    if traced >= sum(calls):
        return [(first, last)], []
    notes = [
        f"note: {traced} of {sum(calls)} steps ran the same program, which are these; the "
        "others count as other programs."
    ]
    stretches = _steps_of(calls, first, several=several)
    if sum(end - begin + 1 for begin, end in stretches) != traced:
        return [(first, last)], notes  # which of them it was is not known
    if len(stretches) > 1:
        steps = ", ".join(f"{begin} to {end}" for begin, end in stretches)
        notes.append(f"note: these are steps {steps}.")
    return stretches, notes


def _steps_of(calls: Sequence[int], first: int, *, several: bool) -> list[tuple[int, int]]:
    """Return numbers of the steps that were made by calls of several steps, or one by one: the
    first and the last one of each stretch.
    """
    stretches: list[tuple[int, int]] = []
    for count in calls:
        last = first + count - 1
        if (count > 1) == several:
            if stretches and stretches[-1][1] == first - 1:
                stretches[-1] = (stretches[-1][0], last)
            else:
                stretches.append((first, last))
        first = last + 1
    return stretches


def _notes(
    placed: PlacedModel,
    target: Cluster | None,
    cluster: Cluster | None,
    waited: float,
    operations: Sequence[Operation],
) -> list[str]:
    """Remark on what was predicted, and on what is in which line; `waited`: seconds of a step, as
    those between steps.
    """
    many, notes = placed.mesh.devices.size, []
    devices = ""
    if placed.platform == "cpu":
        devices = f" --devices {many}"
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


def _total(name: str, lines: Iterable[Line | Operation]) -> Line:
    """Add up the seconds of lines, or of operations; predicted ones where any are."""
    lines = tuple(lines)
    predicted = [line.predicted for line in lines if line.predicted is not None]
    measured = sum(line.measured for line in lines)
    return Line(name, measured, sum(predicted) if predicted else None)


def _executable(
    placed: PlacedModel, rows: int, program: tuple[str, int], ran: set[str]
) -> tuple[Module, float]:
    """Return the compiled program that ran, and the bytes of its temporaries.

    Several programs may have this name, such as those of other batches: it is the one with the
    operations that ran and with the number in the trace. One that was loaded has another number
    here; then it is one for full batches, and the newest of these.

    Raises:
      ValueError: this process has no program of this name.
    """
    rows_per_worker = rows // placed.resolved.workers
    candidates = []
    # Only XLA's client lists the programs of a process; `jax.jit` does not show those that it has
    # made.
    for executable in placed.mesh.local_devices[0].client.live_executables():  # the newest first
        # one module is the program of all devices
        for compiled in executable.hlo_modules()[:1]:
            if compiled.name != program[0]:
                continue
            module = parse(compiled.to_string())
            number = module_number(compiled.as_serialized_hlo_module_proto())
            common = ran & {instr.name for _, instr in module.instructions}
            is_full = rows_per_worker in _batch_rows(module)
            key = (len(common), number == program[1], is_full)
            candidates.append((key, module, executable))
    if not candidates:
        raise ValueError(f"this process has no program {program[0]}")
    _, module, executable = max(candidates, key=lambda candidate: candidate[0])
    return module, float(executable.get_compiled_memory_stats().temp_size_in_bytes)


def _batch_rows(module: Module) -> set[int]:
    """Return the numbers of rows that a program's arguments of a batch have."""
    rows: set[int] = set()
    for instr in module.computations[module.entry]:
        if instr.op == "parameter" and instr.scope.startswith("batch"):
            rows.update(instr.arrays[0].shape[:1])
    return rows


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """The timeline of a program that makes `steps` steps; `is_of_devices`: it is that of these
    devices, and not only a way to count.
    """

    timeline: Timeline
    steps: int
    is_of_devices: bool

    def seconds(self, field: str) -> float | None:
        """Return a field of the timeline, of one step."""
        if self.is_of_devices:
            return getattr(self.timeline, field) / self.steps
        return None

    def part(self, operation: str) -> str:
        """Return the field to which an operation's own work counts."""
        return self._parts.get(operation, "memory")

    def of(self, operation: str) -> float | None:
        """Return the seconds of an operation, of one step."""
        if self.is_of_devices:
            return self._operations.get(operation, 0.0) / self.steps
        return None

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
        if not self.is_of_devices:
            return 0.0
        operations = self.timeline.operations.items()
        memory = sum(took for (_, part), took in operations if part == "memory")
        return max(self.timeline.memory - memory, 0.0) / self.steps


def _operations(
    charged: Mapping[str, float],
    plan: PredictedStep,
    module: Module,
    instructions: Mapping[str, tuple[str, Instruction]],
) -> tuple[Operation, ...]:
    """Return every operation that ran or is predicted, in the words of the plan."""
    names = dict.fromkeys(charged)
    names |= dict.fromkeys(operation for operation, _ in plan.timeline.operations)
    operations = []
    for name in names:
        computation, instr = instructions.get(name, ("", None))
        field, layer = plan.part(name), UNNAMED
        if instr is not None:
            layer = layer_of(module.scopes(computation, instr)[0])
            if collective_kind(instr.op):
                field = "exposed"
        took = charged.get(name, 0.0)
        operations.append(Operation(name, LIMITS_BY_FIELD[field], layer, took, plan.of(name)))
    return tuple(sorted(operations, key=lambda operation: (-operation.measured, operation.name)))


def _kinds(
    mean: Mapping[str, float], operations: Sequence[Operation], plan: PredictedStep
) -> tuple[Line, ...]:
    """Return lines by kind."""
    lines = []
    for limit, field in LIMITS.items():
        took = sum(one.measured for one in operations if one.kind == limit)
        if field == "launches":
            took += mean["launches"]
        planned = plan.seconds(field)
        if took or planned or field not in KERNELS:
            lines.append(Line(limit, took, planned))
    lines.append(Line(STEP, mean["windows"], plan.seconds("seconds")))
    lines.append(Line(HIDDEN, mean["hidden"], plan.seconds("hidden")))
    lines.append(Line(BETWEEN, mean["between"]))
    if mean["other"]:
        lines.append(Line(OTHER, mean["other"]))
    return tuple(lines)


def _layers(operations: Sequence[Operation], plan: PredictedStep) -> tuple[Line, ...]:
    """Return lines by layer."""
    groups: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        groups[operation.layer].append(operation)
    lines = [_total(name, group) for name, group in groups.items()]
    if plan.cleared > ROUNDING:
        lines.append(Line(CLEARED, 0.0, plan.cleared))
    return tuple(sorted(lines, key=lambda line: (-line.measured, line.name)))
