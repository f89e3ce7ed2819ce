"""`spmd.calibrate`: measures the devices that are here, and describes them as a target for plans.

The figures are those with which the planner's own model of time (`timeline.py`) predicts the times
of small programs (`probes.py`).
"""

import dataclasses
import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from spmd.errors import OptionError, did_you_mean, first_line, option, quoted
from spmd.planner.cluster import Cluster, of_device
from spmd.planner.probes import AXIS, CompiledProbe, Observation, probes_of
from spmd.planner.target import Achieved, Link, Spread, Target, load, shipped, target_text
from spmd.planner.text_report import seconds as duration
from spmd.render.html import aligned, filled
from spmd.user_paths import output_path, write_text

PASSES = 3  # over all figures, because a program's time depends on several
WIDEST = 1e3  # the largest factor between a figure before and after
EXACT = 1e-4  # of the logarithm of predicted / measured
SHOWS = 1.02  # a program whose time changes less when a figure is doubled says nothing about it
SPREADS = {
    "flops": "matmul",
    "first_touch": "memory",
    "inside": "link",
    "attention_backward": "attention",
}  # of [spread], if named otherwise


def figure_of(target: Target, path: str) -> float:
    """A figure by its key.

    >>> from spmd.planner.target import load
    >>> figure_of(load("h100"), "achieved.launch"), figure_of(load("h100"), "flops.bfloat16")
    (4e-06, 989000000000000.0)
    """
    name, _, key = path.partition(".")
    value = getattr(target, name)
    return value if not key else value[key] if isinstance(value, Mapping) else getattr(value, key)


def with_figure(target: Target, path: str, number: float) -> Target:
    """The target with another figure.

    >>> from spmd.planner.target import load
    >>> figure_of(with_figure(load("h100"), "inside.latency", 1e-6), "inside.latency")
    1e-06
    """
    name, _, key = path.partition(".")
    value = getattr(target, name)
    changed = (
        number
        if not key
        else {**value, key: number}
        if isinstance(value, Mapping)
        else dataclasses.replace(value, **{key: number})
    )
    return dataclasses.replace(target, **{name: changed})


def fit(
    target: Target, observations: Sequence[Observation], *, most_share: float = 1.0
) -> tuple[Target, tuple[str, ...]]:
    """A target that predicts what was observed, and the figures that could not be fitted because no
    program depends on them.

    For each figure the geometric mean of predicted / measured of its programs becomes 1, in the
    order of the observations.

    Args:
      target: the figures to start with; those that no observation shows stay.
      most_share: the largest share in `[achieved]`.
    """
    by_figure: dict[str, list[Observation]] = {}
    for one in observations:
        by_figure.setdefault(one.figure, []).append(one)
    unknown = [
        path for path, group in by_figure.items() if not any(_shows(target, one) for one in group)
    ]
    for _ in range(PASSES):
        for path, group in by_figure.items():
            if path not in unknown:
                most = (
                    most_share
                    if path.startswith("achieved.") and path != "achieved.launch"
                    else math.inf
                )
                target = _solve(target, path, group, most)
    return target, tuple(unknown)


def spread_of(target: Target, observations: Sequence[Observation]) -> Spread:
    """How far off the figures may be: the errors of each kind's programs, and the noise of their
    times, added as squares.
    """
    squares: dict[str, list[float]] = {}
    for one in observations:
        name, _, key = one.figure.partition(".")
        kind = SPREADS.get(name, SPREADS.get(key, key))
        squares.setdefault(kind, []).append(
            math.log(one.predict(target) / one.seconds) ** 2 + one.noise**2
        )
    shares = {
        kind: round(min(max(math.sqrt(sum(values) / len(values)), 0.01), 1.0), 3)
        for kind, values in squares.items()
    }
    return dataclasses.replace(target.spread, **shares)


def _shows(target: Target, one: Observation) -> bool:
    doubled = with_figure(target, one.figure, 2 * figure_of(target, one.figure))
    return not 1 / SHOWS < one.predict(doubled) / one.predict(target) < SHOWS


def _solve(target: Target, path: str, group: Sequence[Observation], most: float) -> Target:
    """The target with the figure for which the mean logarithm of predicted / measured is 0;
    otherwise with the nearest that it may have.
    """

    def error(logarithm: float) -> float:
        changed = with_figure(target, path, math.exp(logarithm))
        return sum(math.log(one.predict(changed) / one.seconds) for one in group) / len(group)

    start = math.log(figure_of(target, path))
    low, high = start - math.log(WIDEST), min(start + math.log(WIDEST), math.log(most))
    return with_figure(target, path, math.exp(_root(error, low, min(start, high), high)))


def _root(error: Callable[[float], float], low: float, start: float, high: float) -> float:
    """Where a monotone function is 0 in an interval, or the end where it is nearest to 0: by
    secants that keep a bracket (Illinois).
    """
    rises = error(high) > error(low)
    here, there = start, low if (error(start) > 0) == rises else high
    at_here, at_there = error(here), error(there)
    if at_here * at_there > 0:
        return there
    for _ in range(40):
        if abs(at_here) < EXACT:
            break
        new = here - at_here * (there - here) / (at_there - at_here)
        at_new = error(new)
        if at_new * at_here < 0:
            there, at_there = here, at_here
        else:
            at_there /= 2
        here, at_here = new, at_new
    return here


PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "tpu": "tpu", "cpu": "cpu"}  # by JAX's names
SHARES = tuple(
    f"achieved.{name}"
    for name in ("matmul", "memory", "link", "convolution", "attention", "attention_backward")
)
ROUNDS = 15  # at most
FEWEST = 5  # rounds, however long they take


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program: what it computes, the figure that it shows, its median time and quartiles in
    seconds, and what the target predicts.
    """

    name: str
    figure: str
    seconds: float
    quartiles: tuple[float, float]
    predicted: float


@dataclasses.dataclass(frozen=True, repr=False)
class Calibration:
    """What `spmd.calibrate` has measured. Printed, a table.

    Attributes:
      target: the description of one of the devices.
      devices: how many of them ran at once.
      measured: every program.
      rounds: how often each ran.
      notes: what could not be measured, and what was assumed instead.

    Example:
      >>> calibration = Calibration(load("h100"), devices=8, measured=(), rounds=15, notes=())
      >>> str(calibration.cluster)
      '1x8xh100'
    """

    target: Target
    devices: int
    measured: tuple[Measured, ...]
    rounds: int
    notes: tuple[str, ...]

    @property
    def cluster(self) -> Cluster:
        """The devices that were measured, for `spmd.plan(..., target=calibration.cluster)`."""
        return Cluster(1, self.devices, self.target)

    def __str__(self) -> str:
        rows = [
            (
                one.name,
                one.figure,
                duration(one.seconds),
                " to ".join(map(duration, one.quartiles)),
                f"{one.predicted / one.seconds:.2f}",
            )
            for one in self.measured
        ]
        table = aligned([("PROGRAM", "SHOWS", "MEDIAN", "QUARTILES", "PREDICTED / MEDIAN"), *rows])
        figures = aligned([("FIGURE", "VALUE", "MAY BE OFF BY"), *figure_rows(self.target)])
        return filled(
            "\n".join(
                [
                    f"{self.target.title}: {self.rounds} rounds",
                    "",
                    *table,
                    "",
                    *figures,
                    *self.notes,
                ]
            )
        )

    __repr__ = __str__

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the target's file; `spmd plan --target 8xPATH` reads it.

        Raises:
          OptionError: another suffix than .toml, the file exists, or it cannot be written.
        """
        return write_text(
            output_path(path, "a target's file", (".toml",), overwrite=overwrite),
            target_text(self.target),
        )


class Measurement:
    """Programs that are compiled for devices, and their times so far."""

    def __init__(
        self,
        devices: Sequence[Any],
        base: Target,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.devices, self.base = devices, base
        self.programs: list[CompiledProbe] = []
        self.notes: list[str] = []
        mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        probes = probes_of(devices[0].platform, len(devices))
        for number, probe in enumerate(probes, 1):
            say(f"compiling {number} of {len(probes)}: {probe.name}")
            try:
                self.programs.append(CompiledProbe(probe, mesh))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # cuDNN is missing, or too old for this GPU
                self.notes.append(
                    f"note: {probe.name} could not be compiled, so {probe.figure} stays that of "
                    f"{base.name}: {first_line(error)}"
                )

    def run(self) -> None:
        """Run every program once."""
        for program in self.programs:
            program.run()

    def calibration(self) -> Calibration:
        """The target with which predictions are closest to the medians."""
        nothing, *programs = self.programs
        begin, rounds = statistics.median(nothing.times), len(nothing.times)
        base, cpu = self.base.name, self.base.platform == "cpu"
        slower = [program for program in programs if statistics.median(program.times) > begin]
        notes = [*self.notes]
        notes += [
            f"note: {one.probe.name} took no longer than a program without it."
            for one in programs
            if one not in slower
        ]
        observed = [program.observation(begin) for program in slower]
        target, unknown = fit(_start(self.base), observed, most_share=1e3 if cpu else 1.0)
        shown = [
            (program, one)
            for program, one in zip(slower, observed, strict=True)
            if one.figure not in unknown
        ]
        figures = {one.figure for _, one in shown}
        target = dataclasses.replace(target, spread=spread_of(target, [one for _, one in shown]))
        # XLA:CPU multiplies narrower floats in float32
        stays = "as float32 is" if cpu else f"as in {base}"
        notes += [
            f"note: no compiled program depends on {path}: planned {stays}." for path in unknown
        ]
        full = [
            path
            for path in sorted(figures)
            if path in SHARES and figure_of(target, path) > 0.999 and not cpu
        ]
        notes += [
            f"note: {path} = 1: programs were faster than the peak figures of {base} allow."
            for path in full
        ]
        target = self._described(_absolute(target, figures) if cpu else target, rounds, figures)
        measured = tuple(
            Measured(
                program.probe.name,
                one.figure,
                one.seconds,
                program.quartiles(begin),
                one.predict(target),
            )
            for program, one in shown
        )
        return Calibration(target, len(self.devices), measured, rounds, tuple(notes))

    def _described(self, target: Target, rounds: int, figures: Collection[str]) -> Target:
        """The target with its title, its memory, and the sources of its figures; those in `figures`
        were measured.
        """
        count, cpu, base = len(self.devices), target.platform == "cpu", self.base
        kind = processor() if cpu else self.devices[0].device_kind
        how = (
            f"measured on {datetime.date.today()} by spmd calibrate on {kind}, {count} at once, "
            f"medians of {rounds} rounds"
        )
        how += f", jax {jax.__version__}"
        kept = {
            name: f"as in {base.name}: {base.sources.get(name, 'assumed')}"
            for name in ("flops", "inside", "between")
        }
        rest = ", ".join(path.partition(".")[2] for path in SHARES if path not in figures)
        sources = {
            **base.sources,
            **kept,
            "achieved": how + (f"; as in {base.name}: {rest}" if rest and not cpu else ""),
        }
        sources["spread"] = (
            "the errors of the programs measured, and the noise of their times; others as in "
            f"{base.name}"
        )
        if not cpu:
            sources["flops"] += "".join(
                f"; {path} {how}" for path in sorted(figures) if path.startswith("flops.")
            )
            sources["inside"] += f"; latency {how}" if "inside.latency" in figures else ""
            return dataclasses.replace(
                target, title=f"{kind}, calibrated", devices_per_node=count, sources=sources
            )
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count
        sources |= {
            "memory": f"this machine's memory, divided by {count}; bandwidth {how}",
            "flops": f"{how}; vector assumed",
            "first_touch": how,
        }
        sources |= {"inside": how} if "achieved.link" in figures else {}
        title = f"one of {count} devices simulated on {os.cpu_count()} cores of {kind}"
        return dataclasses.replace(
            target,
            title=title,
            memory=memory,
            devices_per_node=count,
            simulated=count,
            sources=sources,
        )


def calibrate(
    devices: Sequence[Any] | None = None,
    *,
    like: str | None = None,
    seconds: float = 60.0,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure devices as a training step uses them, all at once, and describe them as a target for
    plans.

    Products, convolutions, attention, memory, collectives and launches are measured with small
    programs. On a CPU first simulate devices (`spmd.simulate_devices`): they share its cores, so
    the target describes one of that many.

    Args:
      devices: all of one kind, of this process; default: all.
      like: the target with the peak figures, and the compiler's description, of this kind of
        device; default: the shipped target of that name. What is not measured stays as it is there.
      seconds: how long programs run, after they are compiled: up to 15 rounds, and at least 5.
      say: called with a line on progress.

    Returns:
      A `Calibration`; `save` writes the target's file.

    Raises:
      OptionError: devices of several kinds or processes; no shipped target is of this kind; an
        invalid option.

    Example:
      >>> calibrate(like="h100")  # on a CPU
      Traceback (most recent call last):
      spmd.errors.OptionError: like="h100" describes a device of platform "cuda", and here is "cpu".
          fix: known: cpu.
    """
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 < seconds < float("inf")
    ):
        raise OptionError(
            f"{option('seconds', repr(seconds))}.", fix="a number of seconds, such as 60."
        )
    devices = list(jax.devices() if devices is None else devices)
    measurement = Measurement(devices, base_target(devices, like), say=say)
    measurement.run()  # the first is slower, and is not counted
    for program in measurement.programs:
        program.times.clear()
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        say(f"round {number + 1} of at most {ROUNDS}")
        measurement.run()
    say("")
    return measurement.calibration()


def base_target(devices: Sequence[Any], like: str | None = None) -> Target:
    """The target that has what is not measured.

    Args:
      devices: their `platform`, `device_kind` and `process_index` are read.

    Raises:
      OptionError: as `calibrate`.
    """
    kinds = {(device.platform, device.device_kind): device for device in devices}
    if len(kinds) != 1 or len({device.process_index for device in devices}) != 1:
        what = ", ".join(f"{kind} ({name})" for name, kind in kinds) or "none"
        raise OptionError(f"devices: {what}.", fix="devices of one kind, of one process.")
    ((name, kind),) = kinds
    here, known = PLATFORMS.get(name, name), {key: load(key) for key in shipped()}
    if like is not None:
        base = load(like)
        if base.platform != here:
            same = [key for key, target in known.items() if target.platform == here]
            why = f'describes a device of platform "{base.platform}", and here is "{here}"'
            raise OptionError(
                f"{option('like', quoted(like))} {why}.", fix=did_you_mean(like, same)
            )
        return base
    found = known["cpu"] if here == "cpu" else of_device(kind)
    if found is None:
        near = ", ".join(key for key, target in known.items() if target.platform == here)
        raise OptionError(
            f"no shipped target describes {kind}.",
            fix=f"{option('like')} and the target of a similar device, whose peak figures are "
            f"taken: {near}; or a file of your own.",
        )
    return found


def _start(base: Target) -> Target:
    """The target to start with: on a CPU nothing is kept of what the shipped one assumes."""
    if base.platform != "cpu":
        return base
    return dataclasses.replace(base, first_touch=1e9, achieved=Achieved(1.0, 1.0, 1.0, 5e-6, 1.0))


def _absolute(target: Target, measured: Collection[str]) -> Target:
    """A target whose peak figures are the fastest that was measured, for devices without a data
    sheet.
    """
    shares = target.achieved
    most = max(shares.matmul, shares.convolution)
    flops = {
        dtype: rate * most
        for dtype, rate in target.flops.items()
        if dtype == "float32" or f"flops.{dtype}" in measured
    }
    # others are multiplied in float32
    flops |= {"vector": min(target.flops["vector"], flops["float32"])}
    achieved = Achieved(shares.matmul / most, 1.0, 1.0, shares.launch, shares.convolution / most)
    inside = Link(target.inside.bandwidth * shares.link, target.inside.latency)
    bandwidth = target.memory_bandwidth * shares.memory
    return dataclasses.replace(
        target, flops=flops, achieved=achieved, inside=inside, memory_bandwidth=bandwidth
    )


def figure_rows(target: Target) -> list[tuple[str, str, str]]:
    """What programs reach on a target, and how far off that may be.

    >>> figure_rows(load("h100"))[0]
    ('matrix products, bfloat16', '534 TFLOP/s', '12 %')
    """
    achieved, spread = target.achieved, target.spread
    rates = [
        (f"matrix products, {dtype}", target.rate(dtype) * achieved.matmul, "matmul")
        for dtype in target.flops
        if dtype != "vector"
    ]
    peak = target.rate("float32" if target.platform == "cpu" else "bfloat16")
    names = (
        ("convolution", "attention", "attention_backward")
        if target.platform == "cuda"
        else ("convolution",)
    )
    rates += [
        (name.replace("_", ", "), peak * getattr(achieved, name), name.partition("_")[0])
        for name in names
    ]
    moved = [
        ("memory", target.memory_bandwidth * achieved.memory, "memory"),
        ("first touch of memory", target.first_touch, "memory"),
    ]
    moved.append(("what a device sends", target.inside.bandwidth * achieved.link, "link"))
    times = [
        ("launch overhead", achieved.launch, "launch"),
        ("latency of a round of a collective", target.inside.latency, "link"),
    ]
    rows = [
        (
            name,
            f"{rate / 1e12:,.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.3g} GFLOP/s",
            kind,
        )
        for name, rate, kind in rates
    ]
    rows += [(name, f"{rate / 1e9:,.3g} GB/s", kind) for name, rate, kind in moved if rate]
    rows += [(name, duration(value), kind) for name, value, kind in times]
    return [
        (name, value, f"{getattr(spread, kind):.0%}".replace("%", " %"))
        for name, value, kind in rows
    ]


def processor() -> str:
    """The name of this machine's processor, as Linux says it."""
    try:
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
