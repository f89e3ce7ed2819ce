"""Options of XLA that a search tries on its best layouts: each is compiled, and kept if less
communication is exposed.
"""

import dataclasses
from collections.abc import Callable, Iterator

from spmd.errors import SpmdError
from spmd.layout.compiler import GPU, UNROLLING, XLA_NAMES
from spmd.planner.candidates import Candidate
from spmd.planner.compile import COMPILERS
from spmd.planner.plan_data import PlanData, PlanT
from spmd.planner.text_report import seconds
from spmd.tree import format_bytes, parse_bytes

TUNED = 2  # layouts on which options are tried: the fastest ones
SWITCHES = ("double_buffering", "pipelined_collectives")  # of which the opposite is tried
THRESHOLDS = {
    "combine_all_gather": "all_gather",
    "combine_reduce_scatter": "reduce_scatter",
    "combine_all_reduce": "all_reduce",
}
LARGE = "256 MiB"  # up to which collectives are merged; XLA's own threshold is 30 MiB


def why_not_tuned(plan: PlanData) -> str | None:
    """Why no options can be tried on this plan's target; None if they can."""
    target = plan.cluster.target
    if target.platform not in GPU:
        return (
            "options of the compiler were not tried: they are for GPUs, and "
            f"XLA:{COMPILERS[target.platform][3]} has none of them"
        )
    return (
        None
        if plan.compiled.exact
        else f"options of the compiler were not tried: {plan.compiled.compiler}"
    )


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


def trials(plan: PlanData) -> Iterator[tuple[str, bool | str]]:
    """Options that may change a plan's program, and values that it was not compiled with."""
    options, transfers = plan.compiled.options, plan.traffic.transfers
    # elsewhere the switches change nothing
    in_loops = any(transfer.times > 1 for transfer in transfers)
    for key in SWITCHES:
        now = options.get(XLA_NAMES[key][0]) in (True, UNROLLING[True])
        if in_loops and key not in plan.layout.compiler.keys:
            yield key, not now
    for key, kind in THRESHOLDS.items():
        several = sum(transfer.kind == kind for transfer in transfers) > 1
        if (
            key not in plan.layout.compiler.keys
            and several
            and options.get(XLA_NAMES[key][0]) != parse_bytes(LARGE)
        ):
            yield key, LARGE


def _rank(plan: PlanData) -> tuple[float, int]:
    return plan.timeline.exposed, plan.memory.peak


def _figures(plan: PlanData) -> str:
    return (
        f"{seconds(plan.timeline.exposed)} exposed of {seconds(plan.timeline.seconds)}, peak "
        f"{format_bytes(plan.memory.peak)}"
    )
