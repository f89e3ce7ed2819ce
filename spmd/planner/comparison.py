"""Plans side by side."""

import dataclasses
import html
from collections.abc import Sequence

from spmd.errors import OptionError, type_name
from spmd.planner.planning import Plan
from spmd.planner.text_report import seconds
from spmd.planner.timeline import LIMITS
from spmd.planner.traffic import PURPOSES
from spmd.render.html import Html, aligned, folded, framed, table
from spmd.render.svg import bars
from spmd.tree import format_bytes

DRAWN = ("step", "peak memory", "sent")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures of several plans; printed, a table with one column per plan, each figure with its
    ratio to the first plan's.

    Attributes:
      names: short names of the plans, from what differs between them.
      figures: one value per plan, by name; bytes on or from one device, seconds of a step, rows per
        second of all devices.
    """

    names: tuple[str, ...]
    figures: dict[str, tuple[float, ...]]

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, values in self.figures.items():
            ratios = [
                f" ({value / values[0]:.2f})" if values[0] and at else ""
                for at, value in enumerate(values)
            ]
            rows.append(
                (
                    name,
                    *(
                        _format(name, value) + ratio
                        for value, ratio in zip(values, ratios, strict=True)
                    ),
                )
            )
        return rows

    def __str__(self) -> str:
        return "\n".join(aligned([("", *self.names), *self._rows()]))

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        """Bars of what decides between plans, and the table of all figures."""
        drawn = []
        for name in DRAWN:
            if values := self.figures.get(name):
                shown = [
                    (plan, value, _format(name, value))
                    for plan, value in zip(self.names, values, strict=True)
                ]
                drawn.append(f"<p>{html.escape(name)}</p>{bars(shown, name)}")
        listed = folded(
            "all figures", f'<div class="wide">{table(("", *self.names), self._rows())}</div>'
        )
        return framed("".join(drawn) + listed)


def compare(*plans: Plan | Sequence[Plan]) -> Comparison:
    """Compare plans side by side, relative to the first one.

    Args:
      plans: two or more, as arguments or as one list.

    Returns:
      A table; `figures` has a tuple of numbers for each line, one for each plan.

    Raises:
      OptionError: fewer than two plans, or not plans.

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
      ...     "optimizer": optax.adam(0.1),
      ...     "target": "4xcpu",
      ... }
      >>> comparison = compare(
      ...     spmd.plan(model, batch, **options), spmd.plan(model, batch, layout="fsdp", **options)
      ... )
      >>> comparison.names, comparison.figures["optimizer"]
      (('data_parallel', 'fsdp'), (4100, 1028))
    """
    listed = tuple(plans[0]) if len(plans) == 1 and isinstance(plans[0], Sequence) else plans
    compared = tuple(plan for plan in listed if isinstance(plan, Plan))
    if len(compared) < 2 or len(compared) < len(listed):
        kinds = ", ".join(map(type_name, listed)) or "nothing"
        raise OptionError(f"compare({kinds}).", fix="two plans or more, each of spmd.plan.")
    figures = {
        "rows of a batch": [plan.rows for plan in compared],
        "peak memory": [plan.memory.peak for plan in compared],
        "beside the program": [plan.memory.expected - plan.memory.peak for plan in compared],
        "parameters": [plan.memory.parameters for plan in compared],
        "optimizer": [plan.memory.optimizer for plan in compared],
        "temporaries": [plan.memory.temporaries for plan in compared],
        "sent": [plan.traffic.bytes() for plan in compared],
        **{
            f"  {purpose}": [plan.traffic.bytes(purpose) for plan in compared]
            for purpose in PURPOSES
        },
        "  to other nodes": [plan.traffic.between for plan in compared],
        "  to other sites": [plan.traffic.between_sites for plan in compared],
        "step": [plan.timeline.seconds for plan in compared],
        **{f"  {limit}": [plan.timeline.parts[limit] for plan in compared] for limit in LIMITS},
        "step, on average": [
            plan.period.seconds if plan.period.steps > 1 else 0 for plan in compared
        ],
        "rows/s": [plan.rows_per_second for plan in compared],
    }
    return Comparison(
        _names(compared), {name: tuple(values) for name, values in figures.items() if any(values)}
    )


def _names(plans: tuple[Plan, ...]) -> tuple[str, ...]:
    """Names from as few properties as distinguish the plans: layout, mesh, target, precision,
    microbatches, reduction, codec.
    """
    properties = []
    for plan in plans:
        config, gradients = plan.program.placed.config, plan.layout.gradients
        how = (
            config.precision,
            f"{config.accumulate} microbatches",
            gradients.reduction,
            gradients.codec,
        )
        properties.append((plan.layout.name, f"mesh {plan.mesh}", str(plan.cluster), *how))
    differ = [
        at for at, values in enumerate(zip(*properties, strict=True)) if len(set(values)) > 1
    ] or [0]
    names = [
        tuple(", ".join(values[at] for at in differ[:count]) for values in properties)
        for count in range(1, len(differ) + 1)
    ]
    return next((few for few in names if len(set(few)) == len(plans)), names[-1])


def _format(name: str, value: float) -> str:
    if name.startswith("rows"):
        return f"{value:,.0f}"
    return (
        seconds(value)
        if name.strip() in ("step", "step, on average", *LIMITS)
        else format_bytes(value)
    )
