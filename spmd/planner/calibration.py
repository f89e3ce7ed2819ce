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

from spmd.base.user_paths import output_path, write_text
from spmd.errors import OptionError, did_you_mean, first_line, option, quoted
from spmd.planner.cluster import Cluster, of_device
from spmd.planner.probes import AXIS, CompiledProbe, Observation, probes_of
from spmd.planner.target import Achieved, Link, Spread, Target, load, shipped, target_text
from spmd.planner.text_report import seconds as duration
from spmd.render.html import aligned, filled

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
PLATFORMS = {"gpu": "cuda", "cuda": "cuda", "tpu": "tpu", "cpu": "cpu"}  # by JAX's names
SHARES = tuple(
    f"achieved.{name}"
    for name in ("matmul", "memory", "link", "convolution", "attention", "attention_backward")
)
ROUNDS = 15  # at most
FEWEST = 5  # rounds, however long they take


def figure_of(target: Target, path: str) -> float:
    """Return a figure by its key.

    >>> figure_of(load("h100"), "achieved.launch"), figure_of(load("h100"), "flops.bfloat16")
    (4e-06, 989000000000000.0)
    """
    name, _, key = path.partition(".")
    value = getattr(target, name)
    if not key:
        return value
    if isinstance(value, Mapping):
        return value[key]
    return getattr(value, key)


def with_figure(target: Target, path: str, number: float) -> Target:
    """Return the target with another figure.

    >>> figure_of(with_figure(load("h100"), "inside.latency", 1e-6), "inside.latency")
    1e-06
    """
    name, _, key = path.partition(".")
    value = getattr(target, name)
    changed: Any = number
    if isinstance(value, Mapping):
        changed = {**value, key: number}
    elif key:
        changed = dataclasses.replace(value, **{key: number})
    return dataclasses.replace(target, **{name: changed})


def fit(
    target: Target, observations: Sequence[Observation], *, most_share: float = 1.0
) -> tuple[Target, tuple[str, ...]]:
    """Return a target that predicts what was observed, and the figures that could not be fitted
    because no program depends on them.

    For each figure the geometric mean of predicted / measured of its programs becomes 1, in the
    order of the observations.

    Args:
      target: the figures to start with; those that no observation shows stay.
      most_share: the largest share in `[achieved]`.
    """
    by_figure: dict[str, list[Observation]] = {}
    for observation in observations:
        by_figure.setdefault(observation.figure, []).append(observation)
    unknown = []
    for path, group in by_figure.items():
        if not any(_shows(target, observation) for observation in group):
            unknown.append(path)
    for path in unknown:
        del by_figure[path]
    # a program's time depends on several figures, so fitting one moves the others
    for _ in range(PASSES):
        for path, group in by_figure.items():
            is_share = path.startswith("achieved.") and path != "achieved.launch"
            # A share above 1 would be faster than the data sheet.
            target = _solve(target, path, group, most_share if is_share else math.inf)
    return target, tuple(unknown)


def spread_of(target: Target, observations: Sequence[Observation]) -> Spread:
    """Return how far off the figures may be: the errors of each kind's programs, and the noise of
    their times, added as squares.
    """
    squares: dict[str, list[float]] = {}
    for observation in observations:
        name, _, key = observation.figure.partition(".")
        kind = SPREADS.get(name, SPREADS.get(key, key))
        error = math.log(observation.predict(target) / observation.seconds)
        squares.setdefault(kind, []).append(error**2 + observation.noise**2)
    shares = {}
    for kind, values in squares.items():
        share = math.sqrt(sum(values) / len(values))
        shares[kind] = round(min(max(share, 0.01), 1.0), 3)
    return dataclasses.replace(target.spread, **shares)


def _shows(target: Target, observation: Observation) -> bool:
    """Return True if a program's time depends on its figure."""
    path = observation.figure
    doubled = with_figure(target, path, 2 * figure_of(target, path))
    return not 1 / SHOWS < observation.predict(doubled) / observation.predict(target) < SHOWS


def _solve(target: Target, path: str, group: Sequence[Observation], most: float) -> Target:
    """Return the target with the figure for which the mean logarithm of predicted / measured is 0;
    otherwise with the nearest that it may have.
    """

    def error(logarithm: float) -> float:
        changed = with_figure(target, path, math.exp(logarithm))
        return sum(math.log(one.predict(changed) / one.seconds) for one in group) / len(group)

    start = math.log(figure_of(target, path))
    low, high = start - math.log(WIDEST), min(start + math.log(WIDEST), math.log(most))
    return with_figure(target, path, math.exp(_root(error, low, min(start, high), high)))


def _root(error: Callable[[float], float], low: float, start: float, high: float) -> float:
    """Return where a monotone function is 0 in an interval, or the end where it is nearest to 0: by
    secants that keep a bracket (Illinois).
    """
    rises = error(high) > error(low)
    here = start
    there = high
    if (error(start) > 0) == rises:
        there = low
    at_here = error(here)
    at_there = error(there)
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
            # Illinois: where the same end stays twice, its value is halved. Plain false position
            # would keep that end, and approach from one side only.
            at_there /= 2
        here, at_here = new, at_new
    return here


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
    """The measurement of `spmd.calibrate`. Printed, a table.

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
        programs = [("PROGRAM", "SHOWS", "MEDIAN", "QUARTILES", "PREDICTED / MEDIAN")]
        for one in self.measured:
            quartiles = " to ".join(map(duration, one.quartiles))
            ratio = f"{one.predicted / one.seconds:.2f}"
            programs.append((one.name, one.figure, duration(one.seconds), quartiles, ratio))
        figures = [("FIGURE", "VALUE", "MAY BE OFF BY"), *figure_rows(self.target)]
        lines = [f"{self.target.title}: {self.rounds} rounds", ""]
        return filled("\n".join([*lines, *aligned(programs), "", *aligned(figures), *self.notes]))

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

    def measure(self) -> None:
        """Execute every program once more."""
        for program in self.programs:
            program.measure()

    def calibration(self) -> Calibration:
        """Return the target with which predictions are closest to the medians."""
        nothing, *programs = self.programs
        begin = statistics.median(nothing.times)
        rounds = len(nothing.times)
        cpu = self.base.platform == "cpu"
        notes = list(self.notes)
        observed = []
        for program in programs:
            if statistics.median(program.times) > begin:
                observed.append((program, program.observation(begin)))
            else:
                name = program.probe.name
                notes.append(f"note: {name} took no longer than a program without it.")
        start = self.base
        most = 1.0
        if cpu:
            # A CPU has no data sheet: shares above 1 are found, and `_absolute` makes peak figures
            # of them.
            start = _without_shares(self.base)
            most = 1e3
        target, unknown = fit(start, [one for _, one in observed], most_share=most)
        shown = [(program, one) for program, one in observed if one.figure not in unknown]
        target = dataclasses.replace(target, spread=spread_of(target, [one for _, one in shown]))
        if cpu:
            # XLA:CPU multiplies narrower floats in float32.
            stays = "as float32 is"
        else:
            stays = f"as in {self.base.name}"
        for path in unknown:
            notes.append(f"note: no compiled program depends on {path}: planned {stays}.")
        figures = {one.figure for _, one in shown}
        if cpu:
            target = self._described_cpu(_absolute(target, figures), rounds, figures)
        else:
            for path in sorted(figures):
                if path in SHARES and figure_of(target, path) > 0.999:
                    notes.append(
                        f"note: {path} = 1: programs were faster than the peak figures of "
                        f"{self.base.name} allow."
                    )
            target = self._described(target, rounds, figures)
        measured = []
        for program, one in shown:
            quartiles, predicted = program.quartiles(begin), one.predict(target)
            name = program.probe.name
            measured.append(Measured(name, one.figure, one.seconds, quartiles, predicted))
        return Calibration(target, len(self.devices), tuple(measured), rounds, tuple(notes))

    def _how(self, kind: str, rounds: int) -> str:
        """Return the source of a figure that was measured."""
        return (
            f"measured on {datetime.date.today()} by spmd calibrate on {kind}, "
            f"{len(self.devices)} at once, medians of {rounds} rounds, jax {jax.__version__}"
        )

    def _sources(self, achieved: str) -> dict[str, str]:
        """Return the sources of figures that were not measured, and of the shares that were."""
        base = self.base
        sources = dict(base.sources)
        for name in ("flops", "inside", "between"):
            sources[name] = f"as in {base.name}: {base.sources.get(name, 'assumed')}"
        sources["achieved"] = achieved
        sources["spread"] = (
            "the errors of the programs measured, and the noise of their times; others as in "
            f"{base.name}"
        )
        return sources

    def _described(self, target: Target, rounds: int, figures: Collection[str]) -> Target:
        """Return the target of a GPU or a TPU with its title and the sources of its figures; those
        in `figures` were measured.
        """
        kind = self.devices[0].device_kind
        how = self._how(kind, rounds)
        sources = self._sources(how)
        if others := [path for path in SHARES if path not in figures]:
            names = ", ".join(path.removeprefix("achieved.") for path in others)
            sources["achieved"] += f"; as in {self.base.name}: {names}"
        for path in sorted(figures):
            if path.startswith("flops."):
                sources["flops"] += f"; {path} {how}"
        if "inside.latency" in figures:
            sources["inside"] += f"; latency {how}"
        return dataclasses.replace(
            target,
            title=f"{kind}, calibrated",
            devices_per_node=len(self.devices),
            sources=sources,
        )

    def _described_cpu(self, target: Target, rounds: int, figures: Collection[str]) -> Target:
        """Return the target of a simulated device with its title, its part of this machine's
        memory, and the sources of its figures; those in `figures` were measured.
        """
        kind, count = processor(), len(self.devices)
        how = self._how(kind, rounds)
        sources = self._sources(how)
        sources["memory"] = f"this machine's memory, divided by {count}; bandwidth {how}"
        sources["flops"] = f"{how}; vector assumed"
        sources["first_touch"] = how
        if "achieved.link" in figures:
            sources["inside"] = how
        return dataclasses.replace(
            target,
            title=f"one of {count} devices simulated on {os.cpu_count()} cores of {kind}",
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count,
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
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < float("inf"):
        raise OptionError(
            f"{option('seconds', repr(seconds))}.", fix="a number of seconds, such as 60."
        )
    devices = list(jax.devices() if devices is None else devices)
    measurement = Measurement(devices, base_target(devices, like), say=say)
    measurement.measure()  # the first is slower, and is not counted
    for program in measurement.programs:
        program.times.clear()
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        say(f"round {number + 1} of at most {ROUNDS}")
        measurement.measure()
    say("")
    return measurement.calibration()


def base_target(devices: Sequence[Any], like: str | None = None) -> Target:
    """Return the target that has what is not measured.

    Args:
      devices: their `platform`, `device_kind` and `process_index` are read.

    Raises:
      OptionError: as `calibrate`.
    """
    kinds = dict.fromkeys((device.platform, device.device_kind) for device in devices)
    if len(kinds) != 1 or len({device.process_index for device in devices}) != 1:
        what = ", ".join(f"{kind} ({name})" for name, kind in kinds) or "none"
        raise OptionError(f"devices: {what}.", fix="devices of one kind, of one process.")
    ((name, kind),) = kinds
    here = PLATFORMS.get(name, name)
    same = [key for key in shipped() if load(key).platform == here]
    if like is not None:
        base = load(like)
        if base.platform != here:
            why = f'describes a device of platform "{base.platform}", and here is "{here}"'
            raise OptionError(
                f"{option('like', quoted(like))} {why}.", fix=did_you_mean(like, same)
            )
        return base
    if here == "cpu":
        base = load("cpu")
    else:
        base = of_device(kind)
    if base is None:
        raise OptionError(
            f"no shipped target describes {kind}.",
            fix=f"{option('like')} and the target of a similar device, whose peak figures are "
            f"taken: {', '.join(same)}; or a file of your own.",
        )
    return base


def _without_shares(base: Target) -> Target:
    """Return a CPU's target to start with: nothing stays of what the shipped one assumes."""
    return dataclasses.replace(base, first_touch=1e9, achieved=Achieved(1.0, 1.0, 1.0, 5e-6, 1.0))


def _absolute(target: Target, figures: Collection[str]) -> Target:
    """Return a target whose peak figures are the fastest that was measured, for devices without a
    data sheet.
    """
    shares = target.achieved
    most = max(shares.matmul, shares.convolution)
    flops = {}
    for dtype, rate in target.flops.items():
        # others are multiplied in float32
        if dtype == "float32" or f"flops.{dtype}" in figures:
            flops[dtype] = rate * most
    flops["vector"] = min(target.flops["vector"], flops["float32"])
    return dataclasses.replace(
        target,
        flops=flops,
        achieved=Achieved(shares.matmul / most, 1.0, 1.0, shares.launch, shares.convolution / most),
        inside=Link(target.inside.bandwidth * shares.link, target.inside.latency),
        memory_bandwidth=target.memory_bandwidth * shares.memory,
    )


def figure_rows(target: Target) -> list[tuple[str, str, str]]:
    """Return what programs reach on a target, and how far off that may be.

    >>> figure_rows(load("h100"))[0]
    ('matrix products, bfloat16', '534 TFLOP/s', '12 %')
    """
    achieved, spread = target.achieved, target.spread
    rows: list[tuple[str, str, str]] = []

    def add(name: str, value: str, share: float) -> None:
        rows.append((name, value, f"{share:.0%}".replace("%", " %")))

    for dtype in target.flops:
        if dtype != "vector":
            rate = target.rate(dtype) * achieved.matmul
            add(f"matrix products, {dtype}", _per_second(rate), spread.matmul)
    peak_dtype = "bfloat16"
    if target.platform == "cpu":
        peak_dtype = "float32"
    peak = target.rate(peak_dtype)
    add("convolution", _per_second(peak * achieved.convolution), spread.convolution)
    if target.platform == "cuda":
        add("attention", _per_second(peak * achieved.attention), spread.attention)
        backward = _per_second(peak * achieved.attention_backward)
        add("attention, backward", backward, spread.attention)
    bandwidths = {
        "memory": (target.memory_bandwidth * achieved.memory, spread.memory),
        "first touch of memory": (target.first_touch, spread.memory),
        "what a device sends": (target.inside.bandwidth * achieved.link, spread.link),
    }
    for name, (rate, share) in bandwidths.items():
        if rate:
            add(name, f"{rate / 1e9:,.3g} GB/s", share)
    add("launch overhead", duration(achieved.launch), spread.launch)
    add("latency of a round of a collective", duration(target.inside.latency), spread.link)
    return rows


def _per_second(flops: float) -> str:
    """Write FLOPs per second in a readable unit."""
    if flops >= 1e12:
        return f"{flops / 1e12:,.3g} TFLOP/s"
    return f"{flops / 1e9:,.3g} GFLOP/s"


def processor() -> str:
    """Return the name of this machine's processor, as Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, name = line.partition(":")
        if key.startswith("model name"):
            return name.strip()
    # On many Linux systems `platform.processor()` is empty.
    return platform.processor() or platform.machine()
