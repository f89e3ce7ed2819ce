"""What `plan.fixes()`, `plan.changes()` and a search's compiler options return: known changes, each
one planned before it is reported.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import jax

from spmd.errors import CompileError, OptionError, SpmdError, option, short_repr
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
from spmd.tree import format_bytes


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
        """Whether the step fits with the change."""
        return self.plan is not None and self.plan.fits

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.change}: {self.why}"
        memory, step = self.plan.memory, f"{seconds(self.plan.timeline.seconds)} per step"
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{self.change}: {verdict}, {format_bytes(memory.expected)} of "
            f"{format_bytes(memory.capacity)}, {step}"
        )


def fixes_of(
    plan: PlanT, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None
) -> tuple[Fix[PlanT], ...]:
    """Plan one change after the other, each on top of the earlier ones that helped, until the step
    fits.

    In this order: attention in parts, where its scores are stored; rematerialization that saves
    matrix products, then nothing; gradients reduced in every microbatch; more microbatches;
    optimizer state sharded over the workers; parameters too; twice the devices, and twice again.

    Returns:
      All changes that were tried; the last one fits if any does. () for a plan that fits.
    """
    fixes: list[Fix[PlanT]] = []
    best = plan
    for step in (
        fuse_attention,
        more_remat,
        reduce_each_microbatch,
        more_microbatches,
        shard_optimizer,
        shard_parameters,
        more_devices,
    ):
        before = best
        for change, changes in step(before):
            if best.fits:
                break
            say(f"planning with {change}")
            try:
                planned = plan_with(before, changes, timeout=timeout)
            except SpmdError as error:
                fixes.append(Fix(change, None, error.summary))
                break  # more of the same would be rejected too
            fixes.append(Fix(change, planned))
            if planned.memory.peak < best.memory.peak * (
                MIN_SAVING if step is more_devices else 1.0
            ):
                best = planned
            elif step is more_devices:
                break
    return tuple(fixes)


def plan_with(plan: PlanT, changes: Mapping[str, Any], *, timeout: float = 600.0) -> PlanT:
    """The plan of the same step with changes.

    Args:
      changes: some of `layout`, `mesh`, `cluster`, `accumulate`, `precision`, and `rows` of the
        batch.

    Raises:
      SpmdError: as `spmd.plan`.
    """
    variant = {
        "layout": plan.layout,
        "mesh": plan.mesh,
        "cluster": plan.cluster,
        "rows": plan.rows,
    } | dict(changes)
    options = {name: variant.get(name) for name in ("accumulate", "precision")}
    placed = plan.program.placed.with_layout(
        abstract_mesh(variant["mesh"]), variant["layout"], **options
    )
    sample = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((variant["rows"], *leaf.shape[1:]), leaf.dtype),
        plan.program.sample,
    )
    return build_plan(type(plan), placed, sample, variant["cluster"], timeout=timeout)


COMPILES = 8  # programs for all changes of a plan


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
    """What known changes bring; printed, a table.

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
        planned = [change for change in self.tried if change.plan is not None]
        header = ["", "change", "step", "rows/s", "memory", "training"]
        if self.run is not None:
            header[5:5] = (
                ["device-hours", "money"] if self.run.price is not None else ["device-hours"]
            )
        rows = [header, ["", "as planned", *self._cells(self.plan, self.run), ""]]
        for number, change in enumerate(planned, 1):
            rows.append(
                [
                    str(number),
                    change.change,
                    *self._cells(change.plan or self.plan, change.run),
                    change.differs or "the same",
                ]
            )
        lines = [f"each planned separately, on {self.plan.cluster}; the costs that they may lower:"]
        lines += [
            f"  {what}: {', '.join(numbers)}" for what, numbers in self._by_cost(planned).items()
        ]
        lines += ["", *aligned(rows, ruled=True), ""]
        for number, change in enumerate(planned, 1):
            first, *rest = change.to_use.split("\n")
            lines += [f"{number}: {first}", *(f"{'':{len(str(number))}}  {line}" for line in rest)]
        lines += [
            f"rejected: {change.change}: {change.why}"
            for change in self.tried
            if change.plan is None
        ]
        return filled(
            "\n".join([*lines, *self.left_out])
            if self.tried or self.left_out
            else "no known change lowers these costs."
        )

    __repr__ = __str__

    def _cells(self, plan: PlanData, run: RunCost | None) -> list[str]:
        """Figures of a plan, each with its difference from the plan without changes."""
        base, memory = self.plan, plan.memory
        fits = "" if plan.fits else ", does not fit"
        cells = [
            seconds(plan.period.seconds) + _percent(plan.period.seconds, base.period.seconds),
            f"{plan.rows_per_second:,.0f}" + _percent(plan.rows_per_second, base.rows_per_second),
            format_bytes(memory.expected) + _percent(memory.expected, base.memory.expected) + fits,
        ]
        cells += [amount(run.device_hours.expected)] if run is not None else []
        return cells + (
            [amount(run.money.expected)] if run is not None and run.money is not None else []
        )

    def _by_cost(self, planned: list[Change[PlanT]]) -> dict[str, list[str]]:
        numbers: dict[str, list[str]] = {cost.what: [] for cost in self.plan.costs[:SHOWN]}
        for number, change in enumerate(planned, 1):
            for what in change.costs:
                numbers[what].append(str(number))
        return {what: found or ["none"] for what, found in numbers.items()}


def _percent(value: float, base: float) -> str:
    """The difference from a base, or nothing where they are equal.

    >>> _percent(90.0, 100.0), _percent(100.0, 100.0)
    (' (-10%)', '')
    """
    return f" ({value / base - 1:+.0%})" if base and value != base else ""


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
    """
    check_run(tokens=tokens, rows=rows, steps=steps, price=price, optional=True)
    if isinstance(compiles, bool) or not isinstance(compiles, int) or compiles < 1:
        raise OptionError(
            f"{option('compiles', short_repr(compiles))}.", fix="a number of programs, from 1."
        )
    length = {"tokens": tokens, "rows": rows, "steps": steps}
    run = run_cost(plan, **length, price=price) if any(length.values()) else None
    tried: dict[str, Change[PlanT]] = {}
    compiled, waiting = 0, dict[str, None]()
    for cost, trial in _trials(plan):
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
            compiled += isinstance(error, CompileError)
            tried[trial.name] = Change(trial.name, None, error.summary, (cost.what,))
            continue
        compiled += 1
        lossy = update_differences(planned.layout)
        differs = trial.differs or (
            lossy if lossy and lossy != update_differences(plan.layout) else ""
        )
        cost_of_run = run_cost(planned, rows=run.rows, price=price) if run is not None else None
        to_use = trial.to_use or layout_difference(plan.layout, planned.layout)
        tried[trial.name] = Change(
            trial.name, planned, "", (cost.what,), to_use, differs, cost_of_run
        )
    left_out = [f"not planned, beyond {compiles} programs: {'; '.join(waiting)}"] if waiting else []
    if any(cost.kind == EXPOSED for cost in plan.costs[:SHOWN]) and (why := why_not_tuned(plan)):
        left_out.append(why)
    return Changes(plan, tuple(sorted(tried.values(), key=_order)), tuple(left_out), run)


def _order(change: Change) -> tuple:
    if change.plan is None:
        return (2, False, 0.0)
    return (0 if change.fits else 1, bool(change.differs), -change.plan.rows_per_second)


def _trials(plan: PlanData) -> Iterator[tuple[StepCost, Trial]]:
    """Changes by cost, the first of each cost before the second of any."""
    costs = plan.costs[:SHOWN]
    queues = [
        (cost, iter([trial for known in KNOWN.get(cost.kind, ()) for trial in known(plan, cost)]))
        for cost in costs
    ]
    while queues:
        for cost, queue in list(queues):
            if (trial := next(queue, None)) is None:
                queues.remove((cost, queue))
            else:
                yield cost, trial


TUNED = 2  # layouts on which options are tried: the fastest ones


def tune(
    candidate: Candidate, plan: PlanT, build: Callable[[Candidate], PlanT]
) -> tuple[dict[Candidate, PlanT], dict[Candidate, str]]:
    """Try one option after the other, each on top of those before it that were kept; at most one
    program for each.

    An option is kept if the step fits, is not slower, and less communication is exposed, or as much
    in less memory. What the layout sets itself is not changed.

    Returns:
      The candidates that were kept, and the others with a reason.
    """
    kept: dict[Candidate, PlanT] = {}
    rejected: dict[Candidate, str] = {}
    for key, value in trials(plan):
        compiler = dataclasses.replace(candidate.layout.compiler, **{key: value})
        other = dataclasses.replace(
            candidate, layout=dataclasses.replace(candidate.layout, compiler=compiler)
        )
        try:
            changed = build(other)
        except SpmdError as error:
            rejected[other] = error.summary
            continue
        if (
            changed.fits
            and changed.timeline.seconds <= plan.timeline.seconds
            and _rank(changed) < _rank(plan)
        ):
            candidate, plan, kept[other] = other, changed, changed
        else:
            rejected[other] = (
                f"no better than without {key}: {_figures(changed)}; without, {_figures(plan)}"
            )
    return kept, rejected


def _rank(plan: PlanData) -> tuple[float, int]:
    return plan.timeline.exposed, plan.memory.peak


def _figures(plan: PlanData) -> str:
    return (
        f"{seconds(plan.timeline.exposed)} exposed of {seconds(plan.timeline.seconds)}, peak "
        f"{format_bytes(plan.memory.peak)}"
    )
