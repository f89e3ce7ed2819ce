"""How fast do links between sites have to be? Predicted utilization of a plan, by their speed and
by the steps between synchronizations.
"""

import dataclasses
import functools
import html
from collections.abc import Iterable, Sequence

from spmd.errors import OptionError, short_repr, type_name
from spmd.planner.drawings import utilization_chart
from spmd.planner.hlo import parse
from spmd.planner.plan_data import step_times, synced_by
from spmd.planner.planning import Plan
from spmd.planner.sync_period import SyncPeriod, sync_period
from spmd.planner.target import Link
from spmd.planner.text_report import seconds
from spmd.render.html import Html, framed
from spmd.tree import format_bytes
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.timing import Network

SPEEDS = ("100Mb/s", "200Mb/s", "500Mb/s", "1Gb/s", "2Gb/s", "5Gb/s", "10Gb/s")
ENOUGH = 0.9  # a utilization that is worth a mark


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
        return {
            steps: tuple(period.utilization for period in line)
            for steps, line in self.periods.items()
        }

    def __str__(self) -> str:
        names = [f"{steps} steps" if steps > 1 else "every step" for steps in self.periods]
        lines = [f"{'link':>10}" + "".join(f"{name:>14}{'step':>10}" for name in names)]
        for at, bandwidth in enumerate(self.bandwidths):
            cells = [
                f"{line[at].utilization:>14.1%}{seconds(line[at].seconds):>10}"
                for line in self.periods.values()
            ]
            lines.append(f"{bandwidth:>10}" + "".join(cells))
        sent = [
            f"{format_bytes(int(line[0].site_bytes))} in {name}"
            for name, line in zip(names, self.periods.values(), strict=True)
        ]
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
    for name, values, example in (
        ("bandwidths", bandwidths, '("500Mb/s", "1Gb/s")'),
        ("periods", periods, "(50, 500)"),
    ):
        if (
            isinstance(values, str)
            or not isinstance(values, Iterable)
            or (name == "bandwidths" and not [*values])
        ):
            raise OptionError(
                f"utilization: {name}={short_repr(values)} is not a list of {name}.",
                fix=f"such as {name}={example}.",
            )
    module, placed, link = parse(plan.compiled.hlo), plan.program.placed, plan.cluster.target.sites
    servers = _servers(synced_by(placed), periods)
    lines: dict[int, list[SyncPeriod]] = {steps: [] for steps in servers}
    for speed in _speeds(bandwidths):
        target = dataclasses.replace(plan.cluster.target, sites=Link(speed, link.latency))
        times = functools.cache(
            step_times(
                module, placed, plan.compiled, dataclasses.replace(plan.cluster, target=target)
            )
        )
        for steps, server in servers.items():
            lines[steps].append(sync_period(server, times, plan.traffic))
    found = {steps: tuple(line) for steps, line in lines.items()}
    return Utilization(tuple(bandwidths), found, link.latency, plan.cluster.devices_per_site)


def _speeds(bandwidths: Sequence[str]) -> list[float]:
    """Bytes per second."""
    try:
        return [Network.parse({"bandwidth": bandwidth}).bandwidth for bandwidth in bandwidths]
    except ValueError as error:
        raise OptionError(
            f"utilization: {error}", fix='such as bandwidths=("500Mb/s", "1Gb/s").'
        ) from None


def _servers(
    server: ParameterServer | None, periods: Sequence[int]
) -> dict[int, ParameterServer | None]:
    """How workers synchronize, by the number of steps between two synchronizations."""
    if server is None:
        if periods:
            why = f"periods={tuple(periods)}, but the layout's workers synchronize in every step"
            raise OptionError(
                f"utilization: {why}.", fix='leave them out, or a plan with layout="diloco".'
            )
        return {1: None}
    least = max(server.fragments, server.overlap + 1)
    wrong = [steps for steps in periods if type(steps) is not int or steps < least]
    if wrong:
        why = f"the layout has fragments = {server.fragments} and overlap = {server.overlap}"
        raise OptionError(
            f"utilization: a period of {wrong[0]} steps, but {why}.",
            fix=f"whole numbers from {least}.",
        )
    return {
        steps: dataclasses.replace(server, every=steps)
        for steps in (periods or (server.every or 1,))
    }
