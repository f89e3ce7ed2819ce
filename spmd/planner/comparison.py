"""Plans side by side."""

import dataclasses
from collections.abc import Callable

from spmd.errors import OptionError, a_kind
from spmd.planner.planning import Plan
from spmd.planner.text_report import seconds
from spmd.planner.traffic import PURPOSES
from spmd.render.html import aligned
from spmd.tree import format_bytes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures of several plans; printed, a table with a plan to a column, each figure as a share of the first plan's behind it.

    Attributes:
      names: what tells the plans apart.
      figures: of every plan, by name; bytes on or from one device, seconds of a step, rows per second of all devices.
    """

    names: tuple[str, ...]
    figures: dict[str, tuple[float, ...]]

    def __str__(self) -> str:
        rows = [("", *self.names)]
        for name, values in self.figures.items():
            shares = [f" ({value / values[0]:.2f})" if values[0] and at else "" for at, value in enumerate(values)]
            rows.append((name, *(_shown(name)(value) + share for value, share in zip(values, shares, strict=True))))
        return "\n".join(aligned(rows))

    __repr__ = __str__


def compare(*plans: Plan) -> Comparison:
    """Plans side by side, the first one being what the others are measured by.

    Raises:
      OptionError: fewer than two, or something else than plans.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((32, 64), "float32"), "y": jax.ShapeDtypeStruct((32, 8), "float32")}
      >>> options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.adam(0.1), "target": "4xcpu"}
      >>> found = compare(spmd.plan(model, batch, **options), spmd.plan(model, batch, layout="fsdp", **options))
      >>> found.names, found.figures["optimizer"]
      (('data_parallel', 'fsdp'), (4100, 1028))
    """
    if len(plans) < 2 or not all(isinstance(plan, Plan) for plan in plans):
        given = ", ".join(map(a_kind, plans)) or "nothing"
        raise OptionError(f"compare({given}).", fix="two plans or more, each of spmd.plan.")
    figures = {
        "rows of a batch": [plan.rows for plan in plans],
        "peak memory": [plan.memory.peak for plan in plans],
        "parameters": [plan.memory.parameters for plan in plans],
        "optimizer": [plan.memory.optimizer for plan in plans],
        "temporaries": [plan.memory.temporaries for plan in plans],
        "sent": [plan.traffic.bytes() for plan in plans],
        **{f"  {purpose}": [plan.traffic.bytes(purpose) for plan in plans] for purpose in PURPOSES},
        "  to other nodes": [plan.traffic.between for plan in plans],
        "step": [plan.timeline.seconds for plan in plans],
        "  matrix products": [plan.timeline.products for plan in plans],
        "  memory": [plan.timeline.memory for plan in plans],
        "  beginning operations": [plan.timeline.launches for plan in plans],
        "  waiting for what travels": [plan.timeline.exposed for plan in plans],
        "rows/s": [plan.rows_per_second for plan in plans],
    }
    return Comparison(_names(plans), {name: tuple(values) for name, values in figures.items() if any(values)})


def _names(plans: tuple[Plan, ...]) -> tuple[str, ...]:
    """As few of the parts in which the plans differ as tell them apart: layout, mesh, target, precision, microbatches, reduction, codec."""
    parts = []
    for plan in plans:
        options, gradients = plan.program.placed.config, plan.layout.gradients
        how = (options.precision, f"{options.accumulate} microbatches", gradients.reduction, gradients.codec)
        parts.append((plan.layout.name, f"mesh {plan.mesh}", str(plan.cluster), *how))
    differ = [at for at, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1] or [0]
    named = lambda count: tuple(", ".join(part[at] for at in differ[:count]) for part in parts)
    return next((named(count) for count in range(1, len(differ)) if len(set(named(count))) == len(plans)), named(len(differ)))


def _shown(name: str) -> Callable[[float], str]:
    """How a figure is written."""
    if name.startswith("rows"):
        return lambda value: f"{value:,.0f}"
    timed = name.strip() in ("step", "matrix products", "memory", "beginning operations", "waiting for what travels")
    return seconds if timed else format_bytes
