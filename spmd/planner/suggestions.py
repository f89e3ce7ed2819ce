"""The results of `plan.fixes()`, of `plan.changes()` and of a search's compiler options: known
changes, each one planned before it is reported.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import jax

from spmd.base.tree import format_bytes
from spmd.errors import CompileError, OptionError, SpmdError, option, short_repr
from spmd.layout.schema import Layout
from spmd.mesh import abstract_mesh
from spmd.planner.candidates import Candidate, update_differences
from spmd.planner.cluster import MIN_SAVING
from spmd.planner.known_changes import (
    KNOWN,
    Trial,
    fuse_attention,
    layout_difference,
    more_devices,
    more_microbatches,
    more_remat,
    recompute_time,
    reduce_each_microbatch,
    shard_optimizer,
    shard_parameters,
    trials,
    why_not_tuned,
)
from spmd.planner.plan_data import (
    EXPOSED,
    SHOWN,
    PlanData,
    PlanT,
    StepCost,
    build_plan,
)
from spmd.planner.run_cost import RunCost, amount, check_run, run_cost
from spmd.planner.text_report import seconds
from spmd.render.html import aligned, filled

COMPILES = 8  # programs for all changes of a plan
TUNED = 2  # layouts on which options are tried: the fastest ones


@dataclasses.dataclass(frozen=True)
class Fix(Generic[PlanT]):
    """A change, and the plan with it and with all changes before it that helped; printed, one line.

    Attributes:
      change: the change, as a layout or an option spells it.
      plan: the plan with the change; None if it cannot be made.
      why: in that case, the reason.
    """

    change: str
    plan: PlanT | None
    why: str = ""

    @property
    def fits(self) -> bool:
        """True if the step fits with the change."""
        return self.plan is not None and self.plan.fits

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.change}: {self.why}"
        memory, step = self.plan.memory, f"{seconds(self.plan.timeline.seconds)} per step"
        verdict = "does not fit"
        if self.fits:
            verdict = "fits"
        return (
            f"{self.change}: {verdict}, {format_bytes(memory.expected)} of "
            f"{format_bytes(memory.capacity)}, {step}"
        )


def fixes_of(
    plan: PlanT, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None
) -> tuple[Fix[PlanT], ...]:
    """Plan one change after the other, each on top of the earlier ones that helped, until the step
    fits.

    In this order: attention in parts, where its scores are stored; chunks of time that are computed
    again; rematerialization that saves matrix products, then nothing; gradients reduced in every
    microbatch; more microbatches; optimizer state sharded over the workers; parameters too; twice
    the devices, and twice again.

    Returns:
      All changes that were tried; the last one fits if any does. () for a plan that fits.
    """
    fixes: list[Fix[PlanT]] = []
    best = plan
    for edits in (
        fuse_attention,
        recompute_time,
        more_remat,
        reduce_each_microbatch,
        more_microbatches,
        shard_optimizer,
        shard_parameters,
        more_devices,
    ):
        before = best
        saving = 1.0
        # More devices that save little will not help.
        if edits is more_devices:
            saving = MIN_SAVING
        for change, changes in edits(before):
            if best.fits:
                break
            say(f"planning with {change}")
            try:
                planned = plan_with(before, changes, timeout=timeout)
            except SpmdError as error:
                fixes.append(Fix(change, None, error.summary))
                break  # more of the same would be rejected too
            fixes.append(Fix(change, planned))
            if planned.memory.peak < best.memory.peak * saving:
                best = planned
            elif edits is more_devices:
                break
    return tuple(fixes)


def plan_with(plan: PlanT, changes: Mapping[str, Any], *, timeout: float = 600.0) -> PlanT:
    """Return the plan of the same step with changes.

    Args:
      changes: some of `layout`, `mesh`, `cluster`, `accumulate`, `precision`, and `rows` of the
        batch.

    Raises:
      SpmdError: as `spmd.plan`.
    """
    rows = changes.get("rows", plan.rows)
    placed = plan.program.placed.with_layout(
        abstract_mesh(changes.get("mesh", plan.mesh)),
        changes.get("layout", plan.layout),
        accumulate=changes.get("accumulate"),
        precision=changes.get("precision"),
    )
    sample = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype),
        plan.program.sample,
    )
    cluster = changes.get("cluster", plan.cluster)
    return build_plan(type(plan), placed, sample, cluster, timeout=timeout)


@dataclasses.dataclass(frozen=True)
class Change(Fix[PlanT]):
    """A change, and the plan with it alone.

    Attributes:
      costs: what it may lower, as `StepCost.what`.
      to_use: the change as it is written: tables of a layout file, an argument of `fit` and an
        option of the command.
      differs: how training differs with it, apart from rounding; "" if it does not.
      run: what a run costs with it; None if its length was not given.
    """

    costs: tuple[str, ...] = ()
    to_use: str = ""
    differs: str = ""
    run: RunCost | None = None


@dataclasses.dataclass(frozen=True)
class Changes(Generic[PlanT]):
    """The results of known changes; printed, a table.

    Attributes:
      plan: without them.
      tried: every change; those that fit first, the one with the most rows per second at the head,
        and those that alter training after those that do not.
      left_out: changes that were not planned, because of the limit, and options that the target's
        compiler does not have.
      run: what a run costs as planned; None if its length was not given.
    """

    plan: PlanT
    tried: tuple[Change[PlanT], ...]
    left_out: tuple[str, ...]
    run: RunCost | None

    def __str__(self) -> str:
        if not self.tried and not self.left_out:
            return filled("no known change lowers these costs.")
        header = ["", "change", "step", "rows/s", "memory", "training"]
        if self.run is not None:
            header.insert(5, "device-hours")
            if self.run.price is not None:
                header.insert(6, "money")
        rows = [header, ["", "as planned", *self._cells(self.plan, self.run), ""]]
        # numbers of the changes that may lower a cost
        numbers: dict[str, list[str]] = {cost.what: [] for cost in self.plan.costs[:SHOWN]}
        uses, rejected = [], []
        for change in self.tried:
            if change.plan is None:
                rejected.append(f"rejected: {change.change}: {change.why}")
                continue
            number = str(len(rows) - 1)
            cells = self._cells(change.plan, change.run)
            rows.append([number, change.change, *cells, change.differs or "the same"])
            for what in change.costs:
                numbers[what].append(number)
            indent = " " * len(number)
            uses.append(f"{number}: " + change.to_use.replace("\n", f"\n{indent}  "))
        lines = [f"each planned separately, on {self.plan.cluster}; the costs that they may lower:"]
        for what, changes in numbers.items():
            lines.append(f"  {what}: {', '.join(changes) or 'none'}")
        lines += ["", *aligned(rows, ruled=True), "", *uses, *rejected, *self.left_out]
        return filled("\n".join(lines))

    __repr__ = __str__

    def _cells(self, plan: PlanData, run: RunCost | None) -> list[str]:
        """Return figures of a plan, each with its difference from the plan without changes."""
        base, memory = self.plan, plan.memory
        fits = ""
        if not plan.fits:
            fits = ", does not fit"
        cells = [
            seconds(plan.period.seconds) + _percent(plan.period.seconds, base.period.seconds),
            f"{plan.rows_per_second:,.0f}" + _percent(plan.rows_per_second, base.rows_per_second),
            format_bytes(memory.expected) + _percent(memory.expected, base.memory.expected) + fits,
        ]
        if run is not None:
            cells.append(amount(run.device_hours.expected))
            if run.money is not None:
                cells.append(amount(run.money.expected))
        return cells


def _percent(value: float, base: float) -> str:
    """Write the difference from a base, or nothing where they are equal.

    >>> _percent(90.0, 100.0), _percent(100.0, 100.0)
    (' (-10%)', '')
    """
    if base and value != base:
        return f" ({value / base - 1:+.0%})"
    return ""


def changes_of(
    plan: PlanT,
    *,
    tokens: float | None = None,
    rows: float | None = None,
    steps: float | None = None,
    price: float | None = None,
    compiles: int = COMPILES,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Changes[PlanT]:
    """Plan the changes that are known to lower a plan's largest costs: of each cost the first, then
    of each the second, and so on.

    Raises:
      OptionError: numbers that say nothing about a run, or less than one program.
    """
    check_run(tokens=tokens, rows=rows, steps=steps, price=price, optional=True)
    if isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1:
        raise OptionError(
            f"{option('compiles', short_repr(compiles))}.", fix="a number of programs, from 1."
        )
    run = None
    if tokens or rows or steps:
        run = run_cost(plan, tokens=tokens, rows=rows, steps=steps, price=price)
    tried: dict[str, Change[PlanT]] = {}
    compiled, waiting = 0, dict[str, None]()
    for cost, trial in _trials(plan):
        # a change that may lower several costs is planned once
        if (same := tried.get(trial.name)) is not None:
            tried[trial.name] = dataclasses.replace(same, costs=(*same.costs, cost.what))
            continue
        before = tried.get(trial.unless)
        if trial.unless and (before is None or before.plan is None or before.fits):
            continue
        if compiled == compiles:
            waiting[trial.name] = None
            continue
        say(f"planning change {compiled + 1} of at most {compiles}: {trial.name}")
        try:
            planned = plan_with(plan, trial.changes, timeout=timeout)
        except SpmdError as error:
            # Nearly all other errors come from checks before the compiler runs, and cost no
            # compilation.
            compiled += isinstance(error, CompileError)
            tried[trial.name] = Change(trial.name, None, error.summary, (cost.what,))
            continue
        compiled += 1
        tried[trial.name] = Change(
            trial.name,
            planned,
            "",
            (cost.what,),
            trial.to_use or layout_difference(plan.layout, planned.layout),
            trial.differs or _new_differences(plan.layout, planned.layout),
            run and run_cost(planned, rows=run.rows, price=price),
        )
    left_out = []
    if waiting:
        left_out.append(f"not planned, beyond {compiles} programs: {'; '.join(waiting)}")
    why = why_not_tuned(plan)
    if why and any(cost.kind == EXPOSED for cost in plan.costs[:SHOWN]):
        left_out.append(why)
    return Changes(plan, tuple(sorted(tried.values(), key=_order)), tuple(left_out), run)


def _new_differences(before: Layout, after: Layout) -> str:
    """Return how a layout's updates differ from those of one device, if another's do not."""
    differences = update_differences(after)
    if differences and differences != update_differences(before):
        return differences
    return ""


def _order(change: Change) -> tuple:
    """Return the key by which changes are sorted."""
    if change.plan is None:
        return (2, False, 0.0)
    return (0 if change.fits else 1, bool(change.differs), -change.plan.rows_per_second)


def _trials(plan: PlanData) -> Iterator[tuple[StepCost, Trial]]:
    """Yield changes by cost, the first of each cost before the second of any."""
    queues: list[tuple[StepCost, list[Trial]]] = []
    for cost in plan.costs[:SHOWN]:
        queue: list[Trial] = []
        for change in KNOWN.get(cost.kind, ()):
            queue += change(plan, cost)
        queues.append((cost, queue))
    # so that a limit of programs leaves something for each cost
    for turn in range(max((len(queue) for _, queue in queues), default=0)):
        for cost, queue in queues:
            if turn < len(queue):
                yield cost, queue[turn]


def tune(
    candidate: Candidate, plan: PlanT, build: Callable[[Candidate], PlanT]
) -> tuple[dict[Candidate, PlanT], dict[Candidate, str]]:
    """Try one option of the compiler after the other, each on top of those before it that were
    better; at most one program for each.

    An option is better if the step fits, is not slower, and less communication is exposed, or as
    much in less memory. What the layout sets itself is not changed.

    Returns:
      The candidates that were better, and the others with a reason.
    """
    better: dict[Candidate, PlanT] = {}
    rejected: dict[Candidate, str] = {}
    for key, value in trials(plan):
        compiler = dataclasses.replace(candidate.layout.compiler, **{key: value})
        layout = dataclasses.replace(candidate.layout, compiler=compiler)
        other = dataclasses.replace(candidate, layout=layout)
        try:
            changed = build(other)
        except SpmdError as error:
            rejected[other] = error.summary
            continue
        is_fast = changed.fits and changed.timeline.seconds <= plan.timeline.seconds
        if is_fast and _rank(changed) < _rank(plan):
            candidate, plan = other, changed
            better[other] = changed
        else:
            rejected[other] = (
                f"no better than without {key}: {_figures(changed)}; without, {_figures(plan)}"
            )
    return better, rejected


def _rank(plan: PlanData) -> tuple[float, int]:
    return plan.timeline.exposed, plan.memory.peak


def _figures(plan: PlanData) -> str:
    """Write the figures that options of the compiler are to lower."""
    return (
        f"{seconds(plan.timeline.exposed)} exposed of {seconds(plan.timeline.seconds)}, peak "
        f"{format_bytes(plan.memory.peak)}"
    )
