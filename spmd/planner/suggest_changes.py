"""Known changes that may lower the largest costs of a plan, each one planned separately and
compared with the plan.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic

import jax

from spmd.errors import CompileError, OptionError, SpmdError, option, short_repr
from spmd.layout.remat import Remat
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.nn.schedule import MICROBATCHES
from spmd.planner.candidates import microbatches, remat_level, remats, update_differences
from spmd.planner.compiler_search import trials, why_not_tuned
from spmd.planner.plan_data import PlanData, PlanT
from spmd.planner.run_cost import RunCost, amount, check_run, run_cost
from spmd.planner.step_costs import EXPOSED, RECOMPUTATION, SHOWN, StepCost
from spmd.planner.suggest_fixes import (
    Fix,
    fuse_attention,
    plan_with,
    remat_text,
    shard_optimizer,
    shard_parameters,
)
from spmd.planner.text_report import seconds
from spmd.render.html import aligned, filled
from spmd.tree import format_bytes

COMPILES = 8  # programs for all changes of a plan
ANOTHER_BATCH = "another batch size: half as many updates for as many rows"


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


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A change to plan: its name, what it changes as `plan_with` takes it, how training differs,
    and the trial that must not fit before.
    """

    name: str
    changes: Mapping[str, Any]
    to_use: str = ""
    differs: str = ""
    unless: str = ""


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


def layout_difference(before: Layout, after: Layout) -> str:
    """The tables of a layout file that differ, as the file should have them.

    >>> print(layout_difference(Layout(remat=Remat("nothing")), Layout(remat=Remat("dots"))))
    [remat]
    save = "dots"
    """
    old, new = (layout.to_toml().strip().split("\n\n") for layout in (before, after))
    changed = [block for block in new if block not in old and block]
    kept = {block.partition("\n")[0] for block in new}
    gone = dict.fromkeys(
        block.partition("\n")[0] for block in old if block.partition("\n")[0] not in kept
    )
    return "\n".join([*changed, *(f"# without {header}" for header in gone)])


def _trials(plan: PlanData) -> Iterator[tuple[StepCost, _Trial]]:
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


def _gradients(plan: PlanData, **keys: Any) -> Layout:
    return dataclasses.replace(
        plan.layout, gradients=dataclasses.replace(plan.layout.gradients, **keys)
    )


def _own_reduction(plan: PlanData) -> dict[str, str]:
    """The key that a layout needs for collectives of its own, where XLA chooses them."""
    sharded = plan.layout.default.params != "replicate"
    return (
        {"reduction": "reduce_scatter" if sharded else "all_reduce"}
        if plan.layout.gradients.reduction == "compiler"
        else {}
    )


def _less_remat(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    remat = plan.layout.remat
    if remat_level(remat) == 2:
        less = dataclasses.replace(remat, save="dots")
        yield _Trial(remat_text(less), {"layout": dataclasses.replace(plan.layout, remat=less)})
    if remat != Remat():
        yield _Trial("no [remat]", {"layout": dataclasses.replace(plan.layout, remat=Remat())})


def _microbatches(plan: PlanData, count: int, **more: Any) -> _Trial:
    name = ", ".join([*([f"batch_size={more['rows']}"] if more else []), f"accumulate={count}"])
    batch = (
        f"batch_size={more['rows']}, " if more else "",
        f" --batch-size {more['rows']}" if more else "",
    )
    to_use = (
        f"fit(..., {batch[0]}accumulate={count}), or `spmd plan{batch[1]} --accumulate {count}`"
    )
    stats = (
        "statistics of a batch, as BatchNorm's, are those of other microbatches"
        if jax.tree.leaves(plan.program.placed.abstract_state.stats)
        else ""
    )
    return _Trial(name, {"accumulate": count, **more}, to_use, ANOTHER_BATCH if more else stats)


def _fewer_microbatches(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    placed = plan.program.placed
    counts = [
        1,
        *microbatches(
            plan.rows, placed.exchange.worker_count * (plan.layout.pipeline.microbatches or 1)
        ),
    ]
    fewer = [count for count in counts if count < placed.config.accumulate]
    if fewer:
        yield _microbatches(plan, fewer[-1])


def _larger_batch(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    """Twice the rows; where they do not fit, with the next level of rematerialization."""
    rows = 2 * plan.rows
    name, to_use = (
        f"batch_size={rows}",
        f"fit(..., batch_size={rows}), or `spmd plan --batch-size {rows}`",
    )
    yield _Trial(name, {"rows": rows}, to_use, ANOTHER_BATCH)
    more = next(
        (
            remat
            for remat in remats(plan.program.placed)
            if remat_level(remat) > remat_level(plan.layout.remat)
        ),
        None,
    )
    if more is not None:
        layout = dataclasses.replace(plan.layout, remat=more)
        both = f"{to_use}; in the layout:\n{layout_difference(plan.layout, layout)}"
        yield _Trial(
            f"{name}, {remat_text(more)}",
            {"rows": rows, "layout": layout},
            both,
            ANOTHER_BATCH,
            unless=name,
        )


def _more_microbatches(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    """Twice the rows in twice the microbatches: gradients are reduced once for both."""
    yield _microbatches(plan, 2 * plan.program.placed.config.accumulate, rows=2 * plan.rows)


def _bfloat16(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    if plan.program.placed.config.precision == "float32":
        to_use = 'fit(..., precision="bfloat16"), or `spmd plan --precision bfloat16`'
        yield _Trial(
            'precision="bfloat16"', {"precision": "bfloat16"}, to_use, "computed in bfloat16"
        )


def _fused_attention(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    for text, changes in fuse_attention(plan):
        yield _Trial(text, changes)


def _gather(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    """Weights of stacks gathered layer by layer; and their gradients added up before they are
    reduced.
    """
    gradients, placed = plan.layout.gradients, plan.program.placed
    if (
        plan.layout.default.params != "replicate"
        and placed.model.stacks()
        and not plan.program.sync.layerwise
    ):
        yield _Trial(
            '[gradients] gather = "layer"',
            {"layout": _gradients(plan, **_own_reduction(plan), gather="layer")},
        )
    if plan.program.accumulated == "reduced":
        yield _Trial(
            '[gradients] accumulate = "local"', {"layout": _gradients(plan, accumulate="local")}
        )
    narrow = placed.config.precision == "bfloat16"  # XLA then sends them in bfloat16 anyway
    if cost.purpose == "parameters" and gradients.weights == "exact" and not narrow:
        layout = _gradients(plan, **_own_reduction(plan), weights="bfloat16")
        yield _Trial('[gradients] weights = "bfloat16"', {"layout": layout})


def _codec(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    if (
        cost.purpose == "gradients"
        and not plan.layout.gradients.compressed
        and plan.layout.gradients.reduction != "parameter_server"
    ):
        yield _Trial(
            '[gradients] codec = "bfloat16"',
            {"layout": _gradients(plan, **_own_reduction(plan), codec="bfloat16")},
        )


def _layouts(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    """Parameters and optimizer state sharded over more or fewer devices."""
    layout, axes = plan.layout, plan.layout.data_axes()
    if layout.default.params == "replicate":
        for text, changes in (*shard_optimizer(plan), *shard_parameters(plan)):
            yield _Trial(text, changes)
        return
    axis = layout.default.params.removeprefix("shard:")
    size, nodes = plan.mesh.sizes.get(axis, 1), plan.cluster.nodes
    if axes == (axis,) and 1 < nodes < size and size % nodes == 0 and "node" not in plan.mesh.sizes:
        hybrid = _hybrid(plan, axis)
        to_use = (
            f'{layout_difference(layout, hybrid["layout"])}\n# and mesh="{hybrid["mesh"]}" where '
            "fit has one"
        )
        yield _Trial("parameters sharded inside nodes, replicated between them", hybrid, to_use)
    if axis in axes:
        default = dataclasses.replace(layout.default, params="replicate", max_replicated=None)
        gradients = dataclasses.replace(
            layout.gradients, reduction="reduce_scatter", gather="auto", accumulate="auto"
        )
        changed = dataclasses.replace(
            layout,
            default=default,
            optimizer=dataclasses.replace(layout.optimizer, shard=axis),
            gradients=gradients,
        )
        yield _Trial(
            f'[default] params = "replicate", [optimizer] shard = "{axis}"', {"layout": changed}
        )


def _hybrid(plan: PlanData, axis: str) -> dict[str, Any]:
    """One data axis as two: `node`, over which parameters are replicated, and what is left of
    it.
    """
    layout, nodes, split = plan.layout, plan.cluster.nodes, ("node", axis)
    sizes = [
        ("node", nodes),
        *((name, size // nodes if name == axis else size) for name, size in plan.mesh.axes),
    ]

    def changed(spec: tuple) -> tuple:
        return tuple(split if entry == axis else entry for entry in spec)

    rules = tuple(dataclasses.replace(rule, spec=changed(rule.spec)) for rule in layout.batch.rules)
    batch = dataclasses.replace(layout.batch, spec=changed(layout.batch.spec), rules=rules)
    mesh = MeshSpec(tuple(sizes))
    # by layer only what is sharded over all data axes
    gradients = dataclasses.replace(layout.gradients, gather="auto", accumulate="auto")
    return {
        "mesh": mesh,
        "layout": dataclasses.replace(layout, batch=batch, mesh=mesh.axes, gradients=gradients),
    }


def _pipeline(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    for schedule in [
        schedule for schedule in plan.schedules.values() if schedule.unit == MICROBATCHES
    ][:1]:
        pipeline = dataclasses.replace(plan.layout.pipeline, microbatches=2 * schedule.microbatches)
        yield _Trial(
            f"[pipeline] microbatches = {pipeline.microbatches}",
            {"layout": dataclasses.replace(plan.layout, pipeline=pipeline)},
        )


def _compiler(plan: PlanData, cost: StepCost) -> Iterator[_Trial]:
    for key, value in trials(plan) if why_not_tuned(plan) is None else ():
        compiler = dataclasses.replace(plan.layout.compiler, **{key: value})
        shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
        yield _Trial(
            f"[compiler] {key} = {shown}",
            {"layout": dataclasses.replace(plan.layout, compiler=compiler)},
        )


KNOWN: dict[str, Iterable[Callable[[PlanData, StepCost], Iterator[_Trial]]]] = {
    "products": (_bfloat16, _larger_batch),
    "convolutions": (_bfloat16, _larger_batch),
    "attention": (_bfloat16, _larger_batch),
    "memory": (_fused_attention, _bfloat16, _larger_batch, _fewer_microbatches),
    "launches": (_fewer_microbatches, _larger_batch),
    EXPOSED: (_gather, _fewer_microbatches, _layouts, _more_microbatches, _codec, _compiler),
    RECOMPUTATION: (_less_remat,),
    "bubbles": (_pipeline, _larger_batch),
    "replicated": (_layouts,),
}
