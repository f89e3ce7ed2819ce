"""What published runs say beside each other: which layout was faster, and how throughput scaled
with the number of devices.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.published.entries import Published, Run, Times

WASTED = 2.5  # times the devices' seconds of the same step on more devices
TIE = 0.05  # measured times that differ by less were measured once each: the order is chance


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs that differ in layout alone, the faster one first, as measured."""

    runs: tuple[Run, Run]
    planned: tuple[Times, Times]

    @property
    def unstable(self) -> bool:
        """Whether the source contradicts one of them."""
        return any(run.unstable for run in self.runs)

    @property
    def tie(self) -> bool:
        fast, slow = (run.seconds or 0.0 for run in self.runs)
        return slow < fast * (1 + TIE)

    @property
    def right(self) -> bool:
        """Whether the plans are in the same order."""
        return self.planned[0].seconds < self.planned[1].seconds

    @property
    def overlap(self) -> bool:
        """Whether each plan's range contains the other's time, so that plans do not claim an
        order.
        """
        first, second = self.planned
        return (
            first.low <= second.seconds <= first.high and second.low <= first.seconds <= second.high
        )


def pairs(published: Published, planned: Mapping[str, Times]) -> Iterator[Pair]:
    """All pairs of runs with the same source, model, devices and rows in a step, whose measured
    times and plans are there.
    """
    timed = [run for run in published.runs if run.id in planned and run.seconds]
    for first, second in itertools.combinations(timed, 2):
        if (
            _question(published, first) == _question(published, second)
            and first.target == second.target
            and _layout(first) != _layout(second)
        ):
            fast, slow = sorted((first, second), key=lambda run: run.seconds or 0.0)
            yield Pair((fast, slow), (planned[fast.id], planned[slow.id]))


def contradicted(published: Published) -> Iterator[tuple[Run, Run]]:
    """Unstable runs and what contradicts them: the same step took less time on fewer devices, or
    far less of the devices' time on more.
    """
    timed = [run for run in published.runs if run.seconds and run.target]
    for run, other in itertools.permutations(timed, 2):
        (count, seconds), (others, less) = (
            (published.devices(one), one.seconds or 0.0) for one in (run, other)
        )
        same = _question(published, run) == _question(published, other)
        if (
            same
            and less < seconds
            and (others < count or (others > count and WASTED * others * less < count * seconds))
        ):
            yield run, other


def series(published: Published, planned: Mapping[str, Times]) -> Iterator[Sequence[Run]]:
    """Runs of the same program, with the same rows on each device, by number of devices."""
    found: dict[tuple, list[Run]] = {}
    for run in published.runs:
        if run.id in planned and run.counted:
            sizes = (
                run.mesh,
                run.rows,
                run.accumulate,
                run.remat,
                run.attention,
                run.logits,
                run.kernel,
                run.differs,
            )
            found.setdefault((run.source, run.model, run.layout, _kind(run), sizes), []).append(run)
    yield from (
        sorted(runs, key=published.devices)
        for runs in found.values()
        if len({published.devices(run) for run in runs}) > 1
    )


def rankings_report(published: Published, planned: Mapping[str, Times]) -> list[str]:
    """A table of pairs, and how many of them plans have in the measured order."""
    found = list(pairs(published, planned))
    lines = [
        "| devices | faster | slower | measured | planned | order |",
        "|---|---|---|---|---|---|",
    ]
    for pair in found:
        (fast, slow), (one, two) = pair.runs, pair.planned
        order = "right" if pair.right else "wrong"
        order += (
            "; not counted: measured within 5 %"
            if pair.tie
            else "; not counted: unstable"
            if pair.unstable
            else ""
        )
        order += "; inside of both ranges" if pair.overlap else ""
        times = (
            f"{fast.seconds:.4g} and {slow.seconds:.4g} s | {one.seconds:.4g} and "
            f"{two.seconds:.4g} s"
        )
        lines.append(f"| {fast.target} | {_named(fast)} | {_named(slow)} | {times} | {order} |")
    counted = [pair for pair in found if not pair.tie and not pair.unstable]
    decided = [pair for pair in found if not pair.tie]
    right = f"{sum(pair.right for pair in counted)} of {len(counted)} pairs ordered right"
    return [
        *lines,
        "",
        f"- {right}; with unstable runs, {sum(pair.right for pair in decided)} of {len(decided)}.",
    ]


def scaling_report(published: Published, planned: Mapping[str, Times]) -> list[str]:
    """A table of throughput per device relative to the smallest run of a series, and the largest
    error.
    """
    lines = [
        "| run | devices | throughput of each, measured | planned | error |",
        "|---|---|---|---|---|",
    ]
    errors: dict[str, float] = {}
    for runs in (found := list(series(published, planned))):
        first = runs[0]
        for run in runs:
            measured = (first.seconds or 0.0) / (run.seconds or 1.0)
            shape = planned[first.id].seconds / planned[run.id].seconds
            cells = run.id, str(published.devices(run)), f"{measured:.3f}", f"{shape:.3f}"
            lines.append(
                "| " + " | ".join(cells) + f" | {shape / measured - 1:+.1%} |"
                if run != first
                else f"| {' | '.join(cells)} | |"
            )
            errors |= {run.id: abs(shape / measured - 1)} if run != first else {}
    worst = max(errors, key=lambda name: errors[name], default="")
    largest = f", largest error {errors[worst]:.1%} ({worst})" if errors else ""
    return [
        *lines,
        "",
        f"- {len(found)} series, {len(errors)} throughputs relative to the smallest run{largest}.",
    ]


def _question(published: Published, run: Run) -> tuple:
    """What runs have in common that differ in layout and number of devices alone."""
    return run.source, run.model, _kind(run), published.step_rows(run)


def _kind(run: Run) -> str:
    return run.target.rpartition("x")[2]


def _layout(run: Run) -> tuple:
    return run.layout, run.mesh, run.rows, run.accumulate, run.remat


def _named(run: Run) -> str:
    return f"{run.id} ({run.mesh or run.layout}, {run.rows} x {run.accumulate})"
