"""A plan in words: what fits, what travels, what takes the time, and on which assumptions."""

from spmd.planner.planning import Plan
from spmd.render.html import filled
from spmd.tree import format_bytes

FIXES = "what would make it fit: plan.fixes(), or `spmd plan --fixes`; another layout: spmd.search, or `spmd search`."


def text(plan: Plan) -> str:
    """The whole report as plain text."""
    sections = (
        ("memory on each device", str(plan.memory) + ("" if plan.fits else f"\n{FIXES}")),
        ("what travels", "\n".join(filter(None, [str(plan.traffic), _asked(plan)]))),
        ("time of a step (predicted)", timeline_text(plan)),
        ("pipelines", "\n".join(f"{name}: {str(found).splitlines()[0]}." for name, found in plan.schedules.items())),
        ("notes", "\n".join(plan.notes)),
    )
    return filled("\n\n".join([headline(plan), *(f"{title.upper()}\n{body}" for title, body in sections if body)]))


def _asked(plan: Plan) -> str:
    """The step's own log against the compiled program."""
    asked, sent = plan.asked, plan.traffic.bytes()
    if asked is None:
        return ""
    if asked == sent:
        return "The step's own collectives (`trainer.wire`) send just this."
    more = (
        f"{format_bytes(sent - asked)} more are XLA's" if sent > asked else f"XLA leaves out or narrows {format_bytes(asked - sent)} of it"
    )
    return f"The step's own collectives (`trainer.wire`) ask for {asked:,} bytes; {more}."


def headline(plan: Plan) -> str:
    """What was planned, by which compiler, and whether it fits."""
    layout, target = plan.layout, plan.cluster.target
    nodes = f"{plan.cluster.nodes} node{'s' * (plan.cluster.nodes != 1)} of {plan.cluster.devices} x {target.title}"
    return "\n".join(
        [
            f"compiled by {plan.compiled.compiler}" if plan.compiled.exact else plan.compiled.compiler,
            f"{layout.source} on mesh {plan.mesh}, {nodes}; batch of {plan.rows}",
            short(plan),
        ]
    )


def short(plan: Plan) -> str:
    """One line: memory, traffic and time."""
    return (
        f"{plan.memory.verdict.rstrip('.')}; {format_bytes(plan.traffic.bytes())} sent by each device per step; "
        f"{seconds(plan.timeline.seconds)} per step, {plan.rows_per_second:,.0f} rows/s."
    )


def timeline_text(plan: Plan) -> str:
    """Where the time goes, and what was assumed."""
    times, target = plan.timeline, plan.cluster.target
    rows = [
        ("matrix products", times.products),
        ("memory", times.memory),
        ("beginning operations", times.launches),
        ("waiting for what travels", times.exposed),
    ]
    lines = [f"{name:<26}{seconds(value):>12}{value / times.seconds if times.seconds else 0:>8.1%}" for name, value in rows]
    lines.append(f"{'step':<26}{seconds(times.seconds):>12}")
    lines.append(f"{'travels, hidden':<26}{seconds(times.hidden):>12}")
    peak = f"{times.mfu:.1%} of its peak of {times.peak / 1e12:,.4g} TFLOP/s"
    lines.append(f"{times.flops / 1e12:.3g} TFLOP on each device, {peak}; most goes to {times.limit}.")
    reached, inside, between = target.achieved, target.inside.bandwidth / 1e9, target.between.bandwidth / 1e9
    lines.append(
        f"assumed: {reached.matmul:.0%} of peak in products, {reached.memory:.0%} of {target.memory_bandwidth / 1e9:,.0f} GB/s of memory, "
        f"{reached.link:.0%} of {inside:,.4g} GB/s inside and {between:,.4g} GB/s between nodes, "
        f"{reached.launch * 1e6:.0f} us to begin an operation; loading of data is not in it."
    )
    return "\n".join(lines)


def seconds(value: float) -> str:
    """A time in the unit that suits it.

    >>> seconds(0.0123), seconds(4e-6)
    ('12.3 ms', '4 us')
    """
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
