"""A plan as text: the report, one parameter explained, the placement of every array, and JSON."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from spmd.base.fields import as_toml
from spmd.base.specs import spec_axes, spec_text
from spmd.base.tree import describe, flatten, format_bytes
from spmd.layout.compiler import CPU_DEFAULTS
from spmd.layout.resolve import num_shards
from spmd.mesh import MeshSpec
from spmd.planner.flop_shares import NOTHING_BEYOND
from spmd.planner.plan_data import SHOWN, PlanData
from spmd.planner.sync_period import SyncPeriod
from spmd.planner.timeline import LIMITS, Timeline
from spmd.planner.traffic import Transfer
from spmd.render.html import Text, filled
from spmd.train.device_memory import in_host_memory, on_device
from spmd.train.state import owner_of

KERNELS = ("convolutions", "attention")  # parts of a step that only some programs have
# what a plan's JSON has of a transfer and of a period, and leaves out of a timeline
TRANSFER = ("purpose", "kind", "axes", "group", "arrays", "times", "sent", "asynchronous", "where")
PERIOD = ("steps", "seconds", "range", "utilization", "hidden", "site_bytes")
LEFT_OUT = ("spans", "waits", "operations")
CHANGES = "what known changes would bring: plan.changes(), or `spmd plan --changes`."
FIXES = (
    "what would make it fit: plan.fixes(), or `spmd plan --fixes`; another layout: spmd.search, or "
    "`spmd search`."
)


def text(plan: PlanData) -> str:
    """Write the full report as plain text."""
    memory = str(plan.memory)
    if not plan.fits:
        memory += f"\n{FIXES}"
    pipelines = []
    for name, schedule in plan.schedules.items():
        first, *_ = str(schedule).splitlines()
        pipelines.append(f"{name}: {first}.")
    sections = {
        "memory on each device": memory,
        "communication": "\n".join(filter(None, [str(plan.traffic), _requested(plan)])),
        "time of a step (predicted)": timeline_text(plan),
        "pipelines": "\n".join(pipelines),
        "notes": "\n".join(plan.notes),
        "largest costs": costs_text(plan),
    }
    sections = {title: body for title, body in sections.items() if body}
    return filled(with_sections(headline(plan), sections))


def with_sections(report: str, more: Mapping[str, str]) -> str:
    """Add further sections to a report, by their titles."""
    return "\n\n".join([report, *(f"{title.upper()}\n{body}" for title, body in more.items())])


def _requested(plan: PlanData) -> str:
    """Compare the bytes of the step's own collectives with the compiled program's."""
    requested, sent = plan.requested_bytes, plan.traffic.bytes()
    if requested is None:
        return ""
    if requested == sent:
        return "The step's own collectives (`trainer.wire`) send exactly this."
    if sent > requested:
        difference = f"adds {format_bytes(sent - requested)}"
    else:
        difference = f"leaves out {format_bytes(requested - sent)} of it"
        for transfer in plan.traffic.transfers:
            if transfer.purpose == "parameters" and transfer.kind == "all_gather":
                difference += (
                    ", such as second gathers of parameters, which it keeps for the backward pass"
                )
                break
    return (
        f"The step's own collectives (`trainer.wire`) ask for {requested:,} bytes; XLA "
        f"{difference}."
    )


def headline(plan: PlanData) -> str:
    """Write what was planned, by which compiler, and whether it fits."""
    cluster, compiled = plan.cluster, plan.compiled
    nodes = (
        f"{cluster.nodes} node{'s' * (cluster.nodes != 1)} of {cluster.devices} x "
        f"{cluster.target.title}"
    )
    if cluster.sites > 1:
        nodes += f" on {cluster.sites} sites"
    lines = [f"compiled by {compiled.compiler}" if compiled.exact else compiled.compiler]
    options = []
    for name, value in compiled.options.items():
        if CPU_DEFAULTS.get(name) != value:
            options.append(f"{name}={as_toml(value)}")
    if options:
        lines.append(f"compiler options: {', '.join(options)}")
    lines.append(f"{plan.layout.source} on mesh {plan.mesh}, {nodes}; batch of {plan.rows}")
    lines.append(model_size(plan))
    sent = f"{format_bytes(plan.traffic.bytes())} sent by each device per step"
    lines.append(
        f"{plan.memory.verdict.rstrip('.')}; {sent}; {step_time(plan)}, "
        f"{plan.rows_per_second:,.0f} rows/s."
    )
    return "\n".join(lines)


def model_size(plan: PlanData) -> str:
    """Write how many numbers the parameters are, in how many arrays, and their bytes before
    training and before they are sharded.
    """
    leaves = plan.program.placed.spec.params.values()
    count = size = 0
    for leaf in leaves:
        count += math.prod(leaf.shape)
        size += math.prod(leaf.shape) * leaf.dtype.itemsize
    shown = f"{count:,}"
    if count >= 1e9:
        shown = f"{count / 1e9:.3g} B"
    elif count >= 1e6:
        shown = f"{count / 1e6:.3g} M"
    arrays = f"{len(leaves)} array{'s' * (len(leaves) != 1)}"
    return f"{shown} parameters in {arrays}, {format_bytes(size)}"


def timeline_text(plan: PlanData) -> str:
    """Write what the time is spent on, and what was assumed."""
    times = plan.timeline
    lines = []
    for name, value in times.parts.items():
        if value or LIMITS[name] not in KERNELS:
            share = 0
            if times.seconds:
                share = value / times.seconds
            lines.append(_line(name, value, f"{share:>8.1%}"))
    off = f"  from {time_range(times)}, as far as the figures below are known"
    lines.append(_line("step", times.seconds, off))
    lines.append(_line("hidden communication", times.hidden))
    lines += period_lines(plan)
    if times.host_bytes:
        moved = f"  {_host_copies(plan)}; a part of communication"
        lines.append(_line("copies with the host", times.host_seconds, moved))
    lines.append(
        f"{times.flops / 1e12:.3g} TFLOP on each device, {times.model_flops / 1e12:.3g} of them "
        f"the model's: HFU {times.hfu:.1%}, MFU {times.mfu:.1%} of a peak of "
        f"{times.peak / 1e12:,.4g} TFLOP/s; the largest part of the time is {times.limit}."
    )
    if str(plan.flops) != NOTHING_BEYOND:
        lines.append(str(plan.flops))
    return "\n".join([*lines, assumptions(plan)])


def _line(name: str, time: float, more: str = "") -> str:
    """Write a line of the times of a step."""
    return f"{name:<26}{seconds(time):>12}{more}"


def _host_copies(plan: PlanData) -> str:
    """Write the bytes that are copied between device and host, and the link between them."""
    target = plan.cluster.target
    link = "a link that the target does not describe: not timed"
    if target.host_bandwidth:
        link = f"{target.host_bandwidth / 1e9:,.4g} GB/s"
    size = format_bytes(int(plan.timeline.host_bytes))
    return f"{size} between device and host, {target.achieved.link:.0%} of {link}"


def costs_text(plan: PlanData) -> str:
    """Write the largest costs of a step, each with its seconds and its share."""
    lines = []
    if plan.period.steps > 1:  # the timeline's
        synchronizes = f"a period of {plan.period.steps} steps synchronizes"
        lines.append(f"of a step with everything that {synchronizes}:")
    for cost in plan.costs[:SHOWN]:
        lines.append(f"{cost.what:<62}{seconds(cost.seconds):>10}{cost.share:>8.1%}")
    if not lines:
        return ""
    return "\n".join([*lines, CHANGES])


def assumptions(plan: PlanData) -> str:
    """Write the shares of the target's figures that a plan assumes, each with how far off it may
    be.
    """
    target, times = plan.cluster.target, plan.timeline
    shares, spread = target.achieved, target.spread
    products = [
        f"{shares.matmul:.0%} of peak (+- {spread.matmul:.0%}) in products that fill the device"
    ]
    if times.convolutions:
        products.append(f"{shares.convolution:.0%} (+- {spread.convolution:.0%}) in convolutions")
    if times.attention:
        products.append(
            f"{shares.attention:.0%} forward and {shares.attention_backward:.0%} backward (+- "
            f"{spread.attention:.0%}) in fused attention"
        )
    inside, between = target.inside.bandwidth / 1e9, target.between.bandwidth / 1e9
    return (
        f"assumed: {', '.join(products)}, "
        f"{shares.memory:.0%} (+- {spread.memory:.0%}) of {target.memory_bandwidth / 1e9:,.0f} "
        "GB/s of memory, "
        f"{shares.link:.0%} (+- {spread.link:.0%}) of {inside:,.4g} GB/s inside and "
        f"{between:,.4g} GB/s between nodes, {_site_link(plan)}"
        f"{shares.launch * 1e6:.0f} us (+- {spread.launch:.0%}) to launch an operation; data "
        "loading is not included."
    )


def _site_link(plan: PlanData) -> str:
    """Write the speed of the link between sites; "" on one site."""
    if plan.cluster.sites == 1:
        return ""
    link, count = plan.cluster.target.sites, plan.cluster.devices_per_site
    speed = f"{link.bandwidth * 8 / 1e9:,.4g} Gb/s, {link.latency * 1e3:g} ms"
    return f"and as much of {speed}, between sites, shared by the {count} devices of each, "


def period_lines(plan: PlanData) -> list[str]:
    """Write what the steps between two synchronizations take, and the share of the time in which
    devices compute.
    """
    period = plan.period
    share = f"{'utilization':<26}{period.utilization:>12.1%}  of the time is computation"
    if period.site_bytes:
        share += f"; {format_bytes(int(period.site_bytes))} cross each site's link"
    if period.steps == 1:
        if plan.cluster.sites > 1:
            return [share]
        return []
    if period.site_bytes:
        share += " in a period"
    kinds = Counter[tuple[str, bool]]()
    for kind in period.kinds:
        kinds[seconds(kind.seconds), bool(kind.due)] += kind.count
    steps = []
    for (time, due), count in kinds.items():
        steps.append(f"{count} of {time}{', which synchronize' if due else ''}")
    mean = f"  of a period of {period.steps} steps: {'; '.join(steps)}"
    return [_line("step, on average", period.seconds, mean), share]


def step_time(plan: PlanData) -> str:
    """Write a step's predicted time, on average over a period, and its range."""
    period = plan.period
    often = ""
    if period.steps > 1:
        often = f" on average over {period.steps} steps"
    return f"{seconds(period.seconds)} per step{often} ({time_range(period)})"


def time_range(times: Timeline | SyncPeriod) -> str:
    """Write the range of a step's time, in the unit of the predicted time.

    >>> from types import SimpleNamespace
    >>> (
    ...     time_range(SimpleNamespace(seconds=0.0024, range=(0.0021, 0.0027))),
    ...     time_range(SimpleNamespace(seconds=1.1, range=(0.98, 1.22))),
    ... )
    ('2.1 to 2.7 ms', '0.98 to 1.22 s')
    """
    _, unit = seconds(times.seconds).split()
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    ends = []
    for value in times.range:
        scaled = value * scale
        ends.append(f"{scaled:.3g}" if scaled < 100 else f"{scaled:,.0f}")
    return f"{' to '.join(ends)} {unit}"


def seconds(value: float) -> str:
    """Write a time in a readable unit.

    >>> seconds(0.0123), seconds(4e-6), seconds(0.9996e-3)  # rounding may reach the next unit
    ('12.3 ms', '4 us', '1 ms')
    """
    rounded = float(f"{value:.3g}")
    if rounded >= 1:
        return f"{value:.3g} s"
    if rounded >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def explanation(plan: PlanData, path: str) -> Text:
    """Write everything about one parameter.

    Raises:
      OptionError: there is no such parameter.
    """
    leaf, placed = plan.parameter(path), plan.program.placed
    resolved, workers = placed.resolved, placed.resolved.data_axes
    place = resolved.placement(path)
    shard = leaf.sharding.shard_shape(leaf.shape)
    spec = "replicated"
    if any(place.spec):
        spec = f"spec {spec_text(place.spec)}"
    lines = [
        f"{path}  {describe(leaf)}, {format_bytes(place.nbytes)}",
        f"  {spec}, chosen by {place.chosen_by}",
        f"  on each device [{', '.join(map(str, shard))}], {format_bytes(on_device(leaf))}; copies "
        f"of each: {place.copies(plan.mesh)}",
    ]
    for name, moment in flatten(placed.abstract_state.opt).items():
        if owner_of(name, moment, resolved) is place:
            where = "on each device"
            if in_host_memory(moment):
                where = "in the host's memory, for each device"
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
    gradient_axes = spec_axes(placed.exchange.reduction.mean_spec(place))
    if reduction == "reduce_scatter" and not set(gradient_axes) & set(workers):
        reduction = "all_reduce, because it is not sharded over the workers"
    lines.append(f"  its gradient is reduced by {reduction}")
    return Text("\n".join(lines))


def placements_text(plan: PlanData) -> Text:
    """Write every array of the state, the batch and its weights, with the devices that hold its
    shards.
    """
    state, batch, weights, _ = plan.program.arguments
    trees = {
        "params": state.params,
        "frozen": state.frozen,
        "optimizer": state.opt,
        "exchange": state.exchange,
        "batch": batch,
    }
    lines = []
    for kind, tree in trees.items():
        for path, leaf in flatten(tree).items():
            lines.append(f"{kind}/{path}  {describe(leaf)}  {_shards(leaf)}")
    return Text("\n".join([*lines, f"weights  {describe(weights)}  {_shards(weights)}"]))


def _shards(leaf: Any) -> str:
    """Write how many shards an array has, and on how many devices each is."""
    mesh, spec = MeshSpec.parse(leaf.sharding.mesh), tuple(leaf.sharding.spec)
    if not any(spec):
        return f"replicated on all {mesh.size} devices"
    shards = num_shards(spec, mesh)
    return (
        f"spec {spec_text(spec)}: {shards} shards, each on {mesh.size // shards} of {mesh.size} "
        "devices"
    )


def to_json(plan: PlanData, **more: Any) -> str:
    """Write all figures of a plan, and more, as JSON."""
    figures = {
        "target": str(plan.cluster),
        "compiler": plan.compiled.compiler,
        "exact": plan.compiled.exact,
        "compiler_options": plan.compiled.options,
        "mesh": plan.mesh.sizes,
        "layout": plan.layout.source,
        "rows": plan.rows,
        "fits": plan.fits,
        "memory": _memory_figures(plan),
        "traffic": [_transfer_figures(transfer) for transfer in plan.traffic.transfers],
        "timeline": _timeline_figures(plan.timeline),
        "flops": dataclasses.asdict(plan.flops),
        "period": _attributes(plan.period, PERIOD),
        "notes": list(plan.notes),
        "costs": [dataclasses.asdict(cost) for cost in plan.costs],
    }
    return json.dumps(figures | more, indent=1)


def _attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _memory_figures(plan: PlanData) -> dict[str, Any]:
    memory = plan.memory
    return {
        **memory.per_device,
        "exchange_parts": dict(memory.exchange_parts),
        "items": [dataclasses.asdict(item) for item in memory.items],
        "sides": [dataclasses.asdict(side) for side in memory.sides],
        **_attributes(memory, ("range", "likelihood", "pool", "fraction")),
    }


def _transfer_figures(transfer: Transfer) -> dict[str, Any]:
    figures = _attributes(transfer, TRANSFER)
    figures["arrays"] = [str(array) for array in transfer.arrays]
    return figures


def _timeline_figures(timeline: Timeline) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Timeline)]
    figures = _attributes(timeline, [name for name in names if name not in LEFT_OUT])
    figures["waits"] = [dataclasses.asdict(wait) for wait in timeline.waits]
    return figures | _attributes(timeline, ("range", "mfu", "hfu", "limit"))
