"""Predictions for hardware that a plan is not for, without a program for each: throughput by number
of devices (`spmd.saturation`), and utilization by speed of the links between sites
(`spmd.utilization`).
"""

import dataclasses
import functools
import html
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from spmd.base.tree import format_bytes
from spmd.errors import OptionError, short_repr, type_name
from spmd.layout.gradients import Gradients
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.hlo import parse
from spmd.planner.html_report import throughput_chart, utilization_chart
from spmd.planner.plan_data import step_times, synced_by
from spmd.planner.planning import Plan
from spmd.planner.suggestions import plan_with
from spmd.planner.sync_period import SyncPeriod, sync_period
from spmd.planner.target import Link
from spmd.planner.text_report import seconds
from spmd.planner.traffic import reduction_time
from spmd.render.html import Html, filled, framed
from spmd.sync.notes import exact_bytes
from spmd.train.compiled_step import TrainingProgram
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.timing import Network

CODECS = ("exact", "bfloat16", "int8")
BACKWARD = 2 / 3  # the share of computation that can hide the communication of gradients
MIN_GAIN = 1.1  # doubling the devices helps if throughput grows by this factor
SPEEDS = ("100Mb/s", "200Mb/s", "500Mb/s", "1Gb/s", "2Gb/s", "5Gb/s", "10Gb/s")
ENOUGH = 0.9  # a utilization that is worth a mark


@dataclasses.dataclass(frozen=True)
class Saturation:
    """Predicted throughput by number of devices; printed, a table.

    Attributes:
      devices: numbers of devices, each twice the one before.
      rates: rows per second of all devices together, for every codec.
      shares: bytes that a codec sends, as a share of exact gradients.
      rows: rows of the batch, the same for any number of devices.
      planned: the plan's number of devices.
      exposed: the share of communication that the plan waits for.
      limited: whether twice the devices of the last row would not divide the batch evenly.
    """

    devices: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    shares: dict[str, float]
    rows: int
    planned: int
    exposed: float
    limited: bool

    def knee(self, codec: str) -> int:
        """Return the number of devices at which doubling them first gains less than 1.1x; the last
        of the table if there is none.
        """
        pairs = itertools.pairwise(self.rates[codec])
        for devices, (rate, doubled) in zip(self.devices, pairs, strict=False):
            if doubled < MIN_GAIN * rate:
                return devices
        return self.devices[-1]

    def __str__(self) -> str:
        header = f"{'devices':>8}"
        for codec in self.rates:
            column = f"{codec} ({self.shares[codec]:.2f})"
            header += f"{column:>20}"
        lines = [header]
        for at, count in enumerate(self.devices):
            line = f"{count:>8}"
            for codec, rates in self.rates.items():
                mark = "  "
                if self.knee(codec) == count != self.devices[-1]:
                    mark = " <"
                cell = f"{rates[at]:,.0f}{mark}"
                line += f"{cell:>20}"
            lines.append(line)
        lines += [
            f"rows/s of all devices, for a global batch of {self.rows} rows; in brackets, bytes "
            "sent as a share of exact gradients.",
            f"< marks where doubling the devices gains less than {MIN_GAIN}x. Columns are equal "
            "where computation hides all communication.",
        ]
        if self.limited:
            count = 2 * self.devices[-1]
            lines.append(f"The rows cannot be divided evenly over {count} devices.")
        lines += [
            f"Assumed, from the plan for {self.planned}: products scale with a worker's rows, "
            "other operations as they do between two",
            f"compiled batches, and launch overhead is constant; {self.exposed:.0%} of "
            "communication is waited for, as in the plan, and",
            f"of the rest what {BACKWARD:.0%} of computation does not hide.",
        ]
        return filled("\n".join(lines))

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        label = f"rows/s of all devices for a batch of {self.rows} rows, by number of devices"
        knees = {codec: self.knee(codec) for codec in self.rates}
        knees = {codec: knee for codec, knee in knees.items() if knee != self.devices[-1]}
        chart = throughput_chart(self.devices, self.rates, knees, label)
        return framed(
            f"<p>{label}; a circle marks where doubling them gains "
            f"little</p>{chart}<pre>{html.escape(str(self))}</pre>"
        )


def saturation(plan: Plan, *, codecs: Sequence[str] = CODECS, most: int = 1024) -> Saturation:
    """Predict how fast 1, 2, 4 … devices of a plan's kind would train its batch, data-parallel.

    The plan's number of devices is one of them, and has the plan's rate. The step is compiled once
    more, for another number of rows, to see what of a step does not depend on them, such as the
    optimizer's update.

    Args:
      plan: of data-parallel training: every worker holds all parameters.
      codecs: codecs for the gradients, with their default options.
      most: the largest number of devices, if the plan has not more; the table ends before it where
        it cannot divide the rows evenly.

    Returns:
      A table: devices, and rows per second for each codec; `knee(codec)` is where more devices stop
        to pay.

    Raises:
      OptionError: a plan whose parameters are sharded, or not a plan.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((512, 512))}, lambda params, x: x @ params["w"]
      ... )
      >>> batch = {
      ...     "x": jax.ShapeDtypeStruct((1024, 512), "float32"),
      ...     "y": jax.ShapeDtypeStruct((1024, 512), "float32"),
      ... }
      >>> result = saturation(
      ...     spmd.plan(
      ...         model,
      ...         batch,
      ...         loss=spmd.losses.mean_squared_error,
      ...         optimizer=optax.sgd(0.1),
      ...         target="4xcpu",
      ...     )
      ... )
      >>> result.devices[-1], result.knee("int8") >= result.knee("exact")
      (1024, True)
    """
    _check_replicated(plan)
    placed = plan.program.placed
    workers, times = placed.resolved.workers, plan.timeline
    # its odd factor, so that doubling it reaches the plan's number
    counts = [workers // (workers & -workers)]
    while divides := plan.rows % (2 * counts[-1] * placed.config.accumulate) == 0:
        if 2 * counts[-1] > max(most, workers):
            break
        counts.append(2 * counts[-1])
    codec = plan.layout.gradients.codec
    shares = {name: _share(plan, name) for name in {*codecs, codec}}
    communicated = times.exposed + times.hidden
    exposed = 0.0
    if communicated:
        exposed = times.exposed / communicated
    # the plan's communication, relative to what a formula says of it
    scale = 1.0
    if workers > 1:
        scale = communicated / _reduction(plan, shares[codec], workers)
    hidden = max(BACKWARD, times.hidden / (times.seconds - times.exposed))  # of computation
    fixed = _fixed_memory(plan)
    rates: dict[str, list[float]] = {name: [] for name in codecs}
    for count in counts:
        divided = (times.multiplying + times.memory - fixed) * workers / count
        computation = times.launches + fixed + divided
        for name, line in rates.items():
            communication = _reduction(plan, shares[name], count) * scale
            late = max((1 - exposed) * communication - hidden * computation, 0.0)
            line.append(plan.rows / (computation + exposed * communication + late))
    return Saturation(
        tuple(counts),
        {name: tuple(line) for name, line in rates.items()},
        {name: shares[name] for name in codecs},
        plan.rows,
        workers,
        exposed,
        not divides,
    )


def _check_replicated(plan: Plan) -> None:
    """Refuse what is no plan of data-parallel training.

    Raises:
      OptionError: parameters are sharded, or it is no plan.
    """
    if not isinstance(plan, Plan):
        raise OptionError(f"saturation({type_name(plan)}).", fix="what spmd.plan returns.")
    placed = plan.program.placed
    copies = [place.copies(plan.mesh) for place in placed.resolved.all_placements.values()]
    if placed.storage is not None or any(count != plan.mesh.size for count in copies):
        why = (
            f"{plan.layout.source} shards parameters, but data parallelism replicates them on "
            "every worker"
        )
        raise OptionError(f"saturation: {why}.", fix='a plan with layout="data_parallel".')


def _reduction(plan: Plan, share: float, count: int) -> float:
    """Return the seconds to average gradients over so many devices, of which a codec sends a share
    of the bytes.
    """
    if count == 1:
        return 0.0
    cluster = plan.cluster
    most = cluster.target.devices_per_node
    if cluster.nodes > 1:
        most = cluster.devices
    # Data parallelism replicates parameters, so gradients have their bytes.
    size = int(plan.memory.parameters * share)
    return reduction_time("all_reduce", size, count, min(count, most), cluster)


def _fixed_memory(plan: Plan) -> float:
    """Return the seconds of operations at memory bandwidth that do not depend on the rows: those
    that half or twice as many would leave.
    """
    placed, times = plan.program.placed, plan.timeline
    halves = plan.rows % (2 * placed.resolved.workers * placed.config.accumulate) == 0
    if halves:
        rows = plan.rows // 2
    else:
        rows = 2 * plan.rows
    other = plan_with(plan, {"rows": rows}).timeline.memory
    proportional = (times.memory - other) / (1 - rows / plan.rows)
    return min(max(times.memory - proportional, 0.0), times.memory)


def _share(plan: Plan, codec: str) -> float:
    """Return the bytes that a codec sends of this model's gradients relative to exact ones, read
    from a step that is traced for two workers.
    """
    if codec == "exact":
        return 1.0
    placed = plan.program.placed
    layout = dataclasses.replace(
        plan.layout, gradients=Gradients("all_reduce", codec=codec), mesh=()
    )
    # the model's own code may name each axis
    sizes = dict.fromkeys(placed.mesh.axis_names, 1) | {layout.data_axes()[-1]: 2}
    # Two workers: with one, nothing is sent and a codec is not used.
    two = placed.with_layout(abstract_mesh(MeshSpec(tuple(sizes.items()))), layout)
    program = TrainingProgram(two, plan.program.sample)
    return program.wire.bytes(where="reduce_gradients") / exact_bytes(two.exchange)


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Predicted utilization by the speed of the sites' links; printed, a table.

    Attributes:
      bandwidths: of each site's link, as they were given.
      periods: by steps between two synchronizations, the period at each bandwidth; under 1 if
        workers synchronize in every step.
      latency: of the links, in seconds.
      devices: of a site, which share its link.
    """

    bandwidths: tuple[str, ...]
    periods: dict[int, tuple[SyncPeriod, ...]]
    latency: float
    devices: int

    @property
    def shares(self) -> dict[int, tuple[float, ...]]:
        """The share of the time in which devices compute, by steps of a period, at each
        bandwidth.
        """
        shares = {}
        for steps, line in self.periods.items():
            shares[steps] = tuple(period.utilization for period in line)
        return shares

    def __str__(self) -> str:
        header, sent = f"{'link':>10}", []
        for steps, line in self.periods.items():
            name = "every step"
            if steps > 1:
                name = f"{steps} steps"
            header += f"{name:>14}{'step':>10}"
            sent.append(f"{format_bytes(int(line[0].site_bytes))} in {name}")
        lines = [header]
        for at, bandwidth in enumerate(self.bandwidths):
            text = f"{bandwidth:>10}"
            for line in self.periods.values():
                text += f"{line[at].utilization:>14.1%}{seconds(line[at].seconds):>10}"
            lines.append(text)
        lines.append(
            "share of the time in which devices compute, and a step on average, by the steps "
            "between two synchronizations."
        )
        lines.append(
            f"Each site's link carries {', '.join(sent)}, shared by {self.devices} devices; "
            f"latency {self.latency * 1e3:g} ms."
        )
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        label = (
            "utilization, by the speed of each site's link and the steps between two "
            "synchronizations"
        )
        chart = utilization_chart(self.bandwidths, self.shares, ENOUGH, label)
        return framed(
            f"<p>{label}; a circle marks where it reaches "
            f"{ENOUGH:.0%}</p>{chart}<pre>{html.escape(str(self))}</pre>"
        )


def utilization(
    plan: Plan, *, bandwidths: Sequence[str] = SPEEDS, periods: Sequence[int] = ()
) -> Utilization:
    """Predict in which share of the time devices compute, by the speed of the links between sites.

    Nothing is compiled: neither the speed of links nor the number of steps between synchronizations
    changes the program.

    Args:
      plan: on several sites.
      bandwidths: of each site's link, such as "500Mb/s". The latency is the plan's.
      periods: steps between two synchronizations, for a layout whose workers train separately; ()
        is the layout's own number.

    Returns:
      A table: `shares[period]` has the share of time in which devices compute, for each bandwidth.

    Raises:
      OptionError: a plan on one site, or not a plan; a bandwidth or a period that is none.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(
      ...     lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"]
      ... )
      >>> batch = {
      ...     "x": jax.ShapeDtypeStruct((32, 64), "float32"),
      ...     "y": jax.ShapeDtypeStruct((32, 8), "float32"),
      ... }
      >>> options = {
      ...     "loss": spmd.losses.mean_squared_error,
      ...     "optimizer": optax.sgd(0.1),
      ...     "layout": "diloco",
      ... }
      >>> curve = utilization(
      ...     spmd.plan(model, batch, **options, target="2x1x2xcpu"), periods=(10, 100)
      ... )
      >>> curve.shares[10] < curve.shares[100]  # tuples, a share for each bandwidth
      True
    """
    if not isinstance(plan, Plan):
        raise OptionError(f"utilization({type_name(plan)}).", fix="what spmd.plan returns.")
    if plan.cluster.sites == 1:
        fix = f'sites x nodes x devices, such as target="2x{plan.cluster}".'
        raise OptionError(
            f"utilization: target {plan.cluster} has one site, so there are no links between "
            "sites.",
            fix=fix,
        )
    if not _is_list(bandwidths) or not [*bandwidths]:
        raise OptionError(
            f"utilization: bandwidths={short_repr(bandwidths)} is not a list of bandwidths.",
            fix='such as bandwidths=("500Mb/s", "1Gb/s").',
        )
    if not _is_list(periods):
        raise OptionError(
            f"utilization: periods={short_repr(periods)} is not a list of periods.",
            fix="such as periods=(50, 500).",
        )
    module, placed, link = parse(plan.compiled.hlo), plan.program.placed, plan.cluster.target.sites
    servers = _servers(synced_by(placed), periods)
    lines: dict[int, list[SyncPeriod]] = {steps: [] for steps in servers}
    for speed in _speeds(bandwidths):
        target = dataclasses.replace(plan.cluster.target, sites=Link(speed, link.latency))
        cluster = dataclasses.replace(plan.cluster, target=target)
        # layouts that differ in their period alone share the times of their steps
        times = functools.cache(step_times(module, placed, plan.compiled, cluster))
        for steps, server in servers.items():
            lines[steps].append(sync_period(server, times, plan.traffic))
    return Utilization(
        tuple(bandwidths),
        {steps: tuple(line) for steps, line in lines.items()},
        link.latency,
        plan.cluster.devices_per_site,
    )


def _is_list(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str)


def _speeds(bandwidths: Sequence[str]) -> list[float]:
    """Return these bandwidths in bytes per second.

    Raises:
      OptionError: one of them is none.
    """
    try:
        return [Network.parse({"bandwidth": bandwidth}).bandwidth for bandwidth in bandwidths]
    except ValueError as error:
        raise OptionError(
            f"utilization: {error}", fix='such as bandwidths=("500Mb/s", "1Gb/s").'
        ) from None


def _servers(
    server: ParameterServer | None, periods: Sequence[int]
) -> dict[int, ParameterServer | None]:
    """Return how workers synchronize, by the number of steps between two synchronizations.

    Raises:
      OptionError: periods of workers that synchronize in every step, or too short ones.
    """
    if server is None:
        if periods:
            why = f"periods={tuple(periods)}, but the layout's workers synchronize in every step"
            raise OptionError(
                f"utilization: {why}.", fix='leave them out, or a plan with layout="diloco".'
            )
        return {1: None}
    least = max(server.fragments, server.overlap + 1)
    for steps in periods:
        if type(steps) is not int or steps < least:
            why = f"the layout has fragments = {server.fragments} and overlap = {server.overlap}"
            raise OptionError(
                f"utilization: a period of {steps} steps, but {why}.",
                fix=f"whole numbers from {least}.",
            )
    counts = periods or (server.every or 1,)
    return {steps: dataclasses.replace(server, every=steps) for steps in counts}
