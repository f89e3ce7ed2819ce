"""A plan as text: the report, one parameter explained, the placement of every array, and JSON."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from spmd.fields import as_toml
from spmd.layout.compiler import CPU_DEFAULTS
from spmd.layout.resolve import num_shards
from spmd.mesh import MeshSpec
from spmd.planner.flop_shares import NOTHING_BEYOND
from spmd.planner.plan_data import SHOWN, PlanData
from spmd.planner.timeline import LIMITS, SyncPeriod, Timeline
from spmd.render.html import Text, filled
from spmd.specs import spec_axes, spec_text
from spmd.train.device_memory import in_host_memory, on_device
from spmd.train.state import owner_of
from spmd.tree import describe, flatten, format_bytes

KERNELS = ("convolutions", "attention")  # parts of a step that only some programs have
CHANGES = "what known changes would bring: plan.changes(), or `spmd plan --changes`."
FIXES = (
    "what would make it fit: plan.fixes(), or `spmd plan --fixes`; another layout: spmd.search, or "
    "`spmd search`."
)


def text(plan: PlanData) -> str:
    """The full report as plain text."""
    sections = (
        ("memory on each device", str(plan.memory) + ("" if plan.fits else f"\n{FIXES}")),
        ("communication", "\n".join(filter(None, [str(plan.traffic), _requested(plan)]))),
        ("time of a step (predicted)", timeline_text(plan)),
        (
            "pipelines",
            "\n".join(
                f"{name}: {str(schedule).splitlines()[0]}."
                for name, schedule in plan.schedules.items()
            ),
        ),
        ("notes", "\n".join(plan.notes)),
        ("largest costs", costs_text(plan)),
    )
    return filled(
        "\n\n".join(
            [headline(plan), *(f"{title.upper()}\n{body}" for title, body in sections if body)]
        )
    )


def with_sections(report: str, more: Mapping[str, str]) -> str:
    """A report, and further sections by their titles."""
    return "\n\n".join([report, *(f"{title.upper()}\n{body}" for title, body in more.items())])


def _requested(plan: PlanData) -> str:
    """The bytes of the step's own collectives, compared with the compiled program's."""
    requested, sent = plan.requested_bytes, plan.traffic.bytes()
    if requested is None:
        return ""
    if requested == sent:
        return "The step's own collectives (`trainer.wire`) send exactly this."
    added = (
        f"adds {format_bytes(sent - requested)}"
        if sent > requested
        else f"leaves out {format_bytes(requested - sent)} of it"
    )
    again = any(
        transfer.purpose == "parameters" and transfer.kind == "all_gather"
        for transfer in plan.traffic.transfers
    )
    added += (
        ", such as second gathers of parameters, which it keeps for the backward pass"
        if again and sent < requested
        else ""
    )
    return f"The step's own collectives (`trainer.wire`) ask for {requested:,} bytes; XLA {added}."


def headline(plan: PlanData) -> str:
    """What was planned, by which compiler, and whether it fits."""
    layout, target = plan.layout, plan.cluster.target
    nodes = (
        f"{plan.cluster.nodes} node{'s' * (plan.cluster.nodes != 1)} of {plan.cluster.devices} x "
        f"{target.title}"
    )
    nodes += f" on {plan.cluster.sites} sites" if plan.cluster.sites > 1 else ""
    sent, step = format_bytes(plan.traffic.bytes()), step_time(plan)
    lines = [
        f"compiled by {plan.compiled.compiler}" if plan.compiled.exact else plan.compiled.compiler,
        f"{layout.source} on mesh {plan.mesh}, {nodes}; batch of {plan.rows}",
        model_size(plan),
        f"{plan.memory.verdict.rstrip('.')}; {sent} sent by each device per step; {step}, "
        f"{plan.rows_per_second:,.0f} rows/s.",
    ]
    if options := {
        name: value
        for name, value in plan.compiled.options.items()
        if CPU_DEFAULTS.get(name) != value
    }:
        lines.insert(
            1,
            "compiler options: "
            f"{', '.join(f'{name}={as_toml(value)}' for name, value in options.items())}",
        )
    return "\n".join(lines)


def model_size(plan: PlanData) -> str:
    """How many numbers the parameters are, in how many arrays, and their bytes before training and
    before they are sharded.
    """
    leaves = plan.program.placed.abstract_params.values()
    count, size = (
        sum(math.prod(leaf.shape) for leaf in leaves),
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
    )
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1e9, " B"), (1e6, " M")) if count >= scale), (1, "")
    )
    shown = f"{count / scale:.3g}{unit}" if unit else f"{count:,}"
    return (
        f"{shown} parameters in {len(leaves)} array{'s' * (len(leaves) != 1)}, {format_bytes(size)}"
    )


def timeline_text(plan: PlanData) -> str:
    """What the time is spent on, and what was assumed."""
    times, target = plan.timeline, plan.cluster.target
    parts = {
        name: value for name, value in times.parts.items() if value or LIMITS[name] not in KERNELS
    }
    lines = [
        f"{name:<26}{seconds(value):>12}{value / times.seconds if times.seconds else 0:>8.1%}"
        for name, value in parts.items()
    ]
    lines.append(
        f"{'step':<26}{seconds(times.seconds):>12}  from {time_range(times)}, as far as the "
        "figures below are known"
    )
    lines.append(f"{'hidden communication':<26}{seconds(times.hidden):>12}")
    lines += period_lines(plan)
    if times.host_bytes:
        link = (
            f"{target.host_bandwidth / 1e9:,.4g} GB/s"
            if target.host_bandwidth
            else "a link that the target does not describe: not timed"
        )
        moved = (
            f"{format_bytes(int(times.host_bytes))} between device and host, "
            f"{target.achieved.link:.0%} of {link}"
        )
        lines.append(
            f"{'copies with the host':<26}{seconds(times.host_seconds):>12}  {moved}; a part of "
            "communication"
        )
    peak = f"HFU {times.hfu:.1%}, MFU {times.mfu:.1%} of a peak of {times.peak / 1e12:,.4g} TFLOP/s"
    of_model = (
        f"{times.flops / 1e12:.3g} TFLOP on each device, {times.model_flops / 1e12:.3g} of them "
        "the model's"
    )
    lines.append(f"{of_model}: {peak}; the largest part of the time is {times.limit}.")
    lines += [line for line in (str(plan.flops), assumptions(plan)) if line != NOTHING_BEYOND]
    return "\n".join(lines)


def costs_text(plan: PlanData) -> str:
    """The largest costs of a step, each with its seconds and its share."""
    lines = [
        f"{cost.what:<62}{seconds(cost.seconds):>10}{cost.share:>8.1%}"
        for cost in plan.costs[:SHOWN]
    ]
    if plan.period.steps > 1:  # the timeline's
        lines.insert(
            0, f"of a step with everything that a period of {plan.period.steps} steps synchronizes:"
        )
    return "\n".join([*lines, CHANGES]) if lines else ""


def assumptions(plan: PlanData) -> str:
    """The shares of the target's figures that a plan assumes, each with how far off it may be."""
    target, times = plan.cluster.target, plan.timeline
    reached, spread, inside, between = (
        target.achieved,
        target.spread,
        target.inside.bandwidth / 1e9,
        target.between.bandwidth / 1e9,
    )
    products = [
        f"{reached.matmul:.0%} of peak (+- {spread.matmul:.0%}) in products that fill the device"
    ]
    products += (
        [f"{reached.convolution:.0%} (+- {spread.convolution:.0%}) in convolutions"]
        if times.convolutions
        else []
    )
    attention = (
        f"{reached.attention:.0%} forward and {reached.attention_backward:.0%} backward (+- "
        f"{spread.attention:.0%})"
    )
    products += [f"{attention} in fused attention"] if times.attention else []
    return (
        f"assumed: {', '.join(products)}, "
        f"{reached.memory:.0%} (+- {spread.memory:.0%}) of {target.memory_bandwidth / 1e9:,.0f} "
        "GB/s of memory, "
        f"{reached.link:.0%} (+- {spread.link:.0%}) of {inside:,.4g} GB/s inside and "
        f"{between:,.4g} GB/s between nodes, {_site_link(plan)}"
        f"{reached.launch * 1e6:.0f} us (+- {spread.launch:.0%}) to launch an operation; data "
        "loading is not included."
    )


def _site_link(plan: PlanData) -> str:
    if plan.cluster.sites == 1:
        return ""
    link, count = plan.cluster.target.sites, plan.cluster.devices_per_site
    speed = f"{link.bandwidth * 8 / 1e9:,.4g} Gb/s, {link.latency * 1e3:g} ms"
    return f"and as much of {speed}, between sites, shared by the {count} devices of each, "


def period_lines(plan: PlanData) -> list[str]:
    """What the steps between two synchronizations take, and the share of the time in which devices
    compute.
    """
    period = plan.period
    share = f"{'utilization':<26}{period.utilization:>12.1%}  of the time is computation"
    crossing = (
        f"; {format_bytes(int(period.site_bytes))} cross each site's link"
        if period.site_bytes
        else ""
    )
    if period.steps == 1:
        return [share + crossing] if plan.cluster.sites > 1 else []
    kinds = Counter[tuple[str, bool]]()
    for kind in period.kinds:
        kinds[seconds(kind.seconds), bool(kind.due)] += kind.count
    steps = [
        f"{count} of {time}{', which synchronize' if due else ''}"
        for (time, due), count in kinds.items()
    ]
    mean = (
        f"{'step, on average':<26}{seconds(period.seconds):>12}  of a period of {period.steps} "
        f"steps: {'; '.join(steps)}"
    )
    return [mean, share + (f"{crossing} in a period" if crossing else "")]


def step_time(plan: PlanData) -> str:
    """A step's predicted time, on average over a period, and its range."""
    period = plan.period
    often = f" on average over {period.steps} steps" if period.steps > 1 else ""
    return f"{seconds(period.seconds)} per step{often} ({time_range(period)})"


def time_range(times: Timeline | SyncPeriod) -> str:
    """The range of a step's time, in the unit of the predicted time.

    >>> from types import SimpleNamespace
    >>> (
    ...     time_range(SimpleNamespace(seconds=0.0024, range=(0.0021, 0.0027))),
    ...     time_range(SimpleNamespace(seconds=1.1, range=(0.98, 1.22))),
    ... )
    ('2.1 to 2.7 ms', '0.98 to 1.22 s')
    """
    (low, high), unit = times.range, seconds(times.seconds).split()[1]
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    shown = [
        f"{value * scale:.3g}" if value * scale < 100 else f"{value * scale:,.0f}"
        for value in (low, high)
    ]
    return f"{' to '.join(shown)} {unit}"


def seconds(value: float) -> str:
    """A time in a readable unit.

    >>> seconds(0.0123), seconds(4e-6), seconds(0.9996e-3)  # rounding may reach the next unit
    ('12.3 ms', '4 us', '1 ms')
    """
    shown = float(f"{value:.3g}")
    if shown >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if shown >= 1e-3 else f"{value * 1e6:.3g} us"


def explanation(plan: PlanData, path: str) -> Text:
    """Everything about one parameter.

    Raises:
      OptionError: there is no such parameter.
    """
    leaf, placed = plan.parameter(path), plan.program.placed
    resolved, workers = placed.resolved, placed.resolved.data_axes
    place = resolved.placement(path)
    shard = leaf.sharding.shard_shape(leaf.shape)
    spec = f"spec {spec_text(place.spec)}" if any(place.spec) else "replicated"
    lines = [
        f"{path}  {describe(leaf)}, {format_bytes(place.nbytes)}",
        f"  {spec}, chosen by {place.chosen_by}",
        f"  on each device [{', '.join(map(str, shard))}], {format_bytes(on_device(leaf))}; copies "
        f"of each: {place.copies(plan.mesh)}",
    ]
    for name, moment in flatten(placed.abstract_state.opt).items():
        if owner_of(name, moment, resolved) is place:
            where = (
                "in the host's memory, for each device"
                if in_host_memory(moment)
                else "on each device"
            )
            lines.append(f"  {name}: {format_bytes(on_device(moment))} {where}")
    gathered_over = [axis for axis in spec_axes(place.spec) if axis in workers]
    if placed.storage is not None and path not in resolved.frozen:
        lines.append("  stored by the parameter server, rows sharded over the workers")
    elif gathered_over:
        gathered = format_bytes(on_device(leaf) * num_shards(tuple(gathered_over), plan.mesh))
        lines.append(f"  gathered over {', '.join(gathered_over)} where it is used: {gathered}")
    if path in resolved.frozen:
        return Text("\n".join([*lines, "  it is not trained: it has no gradient and no moments"]))
    reduction = plan.layout.gradients.reduction
    if reduction == "reduce_scatter" and not set(
        spec_axes(placed.exchange.reduction.mean_spec(place))
    ) & set(workers):
        reduction = "all_reduce, because it is not sharded over the workers"
    lines.append(f"  its gradient is reduced by {reduction}")
    return Text("\n".join(lines))


def placements_text(plan: PlanData) -> Text:
    """Every array of the state, the batch and its weights, with the devices that hold its
    shards.
    """
    state, batch, weights, _ = plan.program.arguments
    lines = []
    trees = {
        "params": state.params,
        "frozen": state.frozen,
        "optimizer": state.opt,
        "exchange": state.exchange,
        "batch": batch,
    }
    for kind, tree in trees.items():
        lines += [
            f"{kind}/{path}  {describe(leaf)}  {_where(leaf)}"
            for path, leaf in flatten(tree).items()
        ]
    return Text("\n".join([*lines, f"weights  {describe(weights)}  {_where(weights)}"]))


def _where(leaf: Any) -> str:
    """How many shards an array has, and on how many devices each is."""
    mesh, spec = MeshSpec.parse(leaf.sharding.mesh), tuple(leaf.sharding.spec)
    if not any(spec):
        return f"replicated on all {mesh.size} devices"
    shards = num_shards(spec, mesh)
    return (
        f"spec {spec_text(spec)}: {shards} shards, each on {mesh.size // shards} of {mesh.size} "
        "devices"
    )


def to_json(plan: PlanData, **more: Any) -> str:
    """All figures of a plan, and more, as JSON."""
    left_out = ("spans", "waits", "operations")
    times = {
        field.name: getattr(plan.timeline, field.name)
        for field in dataclasses.fields(Timeline)
        if field.name not in left_out
    }
    names = ("purpose", "kind", "axes", "group", "arrays", "times", "sent", "asynchronous", "where")
    transfers = [
        {name: getattr(transfer, name) for name in names} for transfer in plan.traffic.transfers
    ]
    figures = {
        "target": str(plan.cluster),
        "compiler": plan.compiled.compiler,
        "exact": plan.compiled.exact,
        "compiler_options": plan.compiled.options,
        "mesh": plan.mesh.sizes,
        "layout": plan.layout.source,
        "rows": plan.rows,
        "fits": plan.fits,
        "memory": plan.memory.per_device
        | {"exchange_parts": dict(plan.memory.exchange_parts)}
        | {
            name: [dataclasses.asdict(one) for one in getattr(plan.memory, name)]
            for name in ("items", "sides")
        }
        | {
            name: getattr(plan.memory, name) for name in ("range", "likelihood", "pool", "fraction")
        },
        "traffic": [
            transfer | {"arrays": [str(array) for array in transfer["arrays"]]}
            for transfer in transfers
        ],
        "timeline": times
        | {"waits": [dataclasses.asdict(wait) for wait in plan.timeline.waits]}
        | {name: getattr(plan.timeline, name) for name in ("range", "mfu", "hfu", "limit")},
        "flops": dataclasses.asdict(plan.flops),
        "period": {
            name: getattr(plan.period, name)
            for name in ("steps", "seconds", "range", "utilization", "hidden", "site_bytes")
        },
        "notes": list(plan.notes),
        "costs": [dataclasses.asdict(cost) for cost in plan.costs],
    } | more
    return json.dumps(figures, indent=1)
