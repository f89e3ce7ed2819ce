"""When does adding devices stop helping? Predicted throughput of data-parallel training on one batch, by number of devices and codec."""

import dataclasses
import html
from collections.abc import Sequence

from spmd.errors import OptionError, type_name
from spmd.layout.gradients import Gradients
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.drawings import throughput_chart
from spmd.planner.planning import Plan
from spmd.planner.timeline import reduction_time
from spmd.render.html import Html, framed
from spmd.sync.notes import exact_bytes
from spmd.train.compiled_step import Program

CODECS = ("exact", "bfloat16", "int8")
BACKWARD = 2 / 3  # the share of computation that can hide the communication of gradients
MIN_GAIN = 1.1  # doubling the devices helps if throughput grows by this factor


@dataclasses.dataclass(frozen=True)
class Saturation:
    """Predicted throughput by number of devices; printed, a table.

    Attributes:
      devices: numbers of devices, each twice the one before.
      rates: rows per second of all devices together, for every codec.
      shares: bytes that a codec sends, as a share of exact gradients.
      rows: rows of the batch, the same for any number of devices.
    """

    devices: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    shares: dict[str, float]
    rows: int

    def knee(self, codec: str) -> int:
        """The number of devices at which doubling them first gains less than 1.1x."""
        rates = self.rates[codec]
        return next((self.devices[at] for at in range(len(rates) - 1) if rates[at + 1] < MIN_GAIN * rates[at]), self.devices[-1])

    def __str__(self) -> str:
        names = list(self.rates)
        lines = [f"{'devices':>8}" + "".join(f"{f'{name} ({self.shares[name]:.2f})':>20}" for name in names)]
        for at, count in enumerate(self.devices):
            cells = [f"{self.rates[name][at]:,.0f}{' <' if self.knee(name) == count else '  '}" for name in names]
            lines.append(f"{count:>8}" + "".join(f"{cell:>20}" for cell in cells))
        lines.append(
            f"rows/s of all devices, for a global batch of {self.rows} rows; in brackets, bytes sent as a share of exact gradients."
        )
        lines.append(f"< marks where doubling the devices gains less than {MIN_GAIN}x. Assumed: computation scales with a worker's rows,")
        lines.append(f"launch overhead is constant, and {BACKWARD:.0%} of computation hides communication.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        label = f"rows/s of all devices for a batch of {self.rows} rows, by number of devices"
        chart = throughput_chart(self.devices, self.rates, {codec: self.knee(codec) for codec in self.rates}, label)
        return framed(f"<p>{label}; a circle marks where doubling them gains little</p>{chart}<pre>{html.escape(str(self))}</pre>")


def saturation(plan: Plan, *, codecs: Sequence[str] = CODECS, most: int = 1024) -> Saturation:
    """Predict how fast 1, 2, 4 … devices of a plan's kind would train its batch, data-parallel.

    Args:
      plan: of data-parallel training: every worker holds all parameters.
      codecs: codecs for the gradients, with their default options.
      most: the largest number of devices; a batch cannot be split over more devices than it has rows.

    Raises:
      OptionError: a plan whose parameters are sharded, or not a plan.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((512, 512))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((1024, 512), "float32"), "y": jax.ShapeDtypeStruct((1024, 512), "float32")}
      >>> result = saturation(spmd.plan(model, batch, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), target="4xcpu"))
      >>> result.devices[-1], result.knee("int8") >= result.knee("exact")
      (1024, True)
    """
    if not isinstance(plan, Plan):
        raise OptionError(f"saturation({type_name(plan)}).", fix="what spmd.plan returns.")
    placed = plan.program.placed
    if placed.storage is not None or any(place.copies(plan.mesh) != plan.mesh.size for place in placed.resolved.all_placements.values()):
        why = f"{plan.layout.source} shards parameters, but data parallelism replicates them on every worker"
        raise OptionError(f"saturation: {why}.", fix='a plan with layout="data_parallel".')
    counts = [1]
    while 2 * counts[-1] <= min(most, plan.rows):
        counts.append(2 * counts[-1])
    gradients, workers, times = plan.memory.parameters, placed.resolved.workers, plan.timeline
    shares = {codec: 1.0 if codec == "exact" else _share(plan, codec) for codec in codecs}
    rates: dict[str, list[float]] = {codec: [] for codec in codecs}
    for count in counts:
        computation = times.launches + (times.multiplying + times.memory) * workers / count
        per_node = min(count, plan.cluster.target.devices_per_node)
        for codec, share in shares.items():
            communication = reduction_time("all_reduce", int(gradients * share), count, per_node, plan.cluster) if count > 1 else 0.0
            rates[codec].append(plan.rows / (computation + max(communication - BACKWARD * computation, 0.0)))
    return Saturation(tuple(counts), {codec: tuple(line) for codec, line in rates.items()}, shares, plan.rows)


def _share(plan: Plan, codec: str) -> float:
    """Bytes that a codec sends of this model's gradients relative to exact ones, read from a step that is traced for two workers."""
    placed = plan.program.placed
    layout = dataclasses.replace(plan.layout, gradients=Gradients("all_reduce", codec=codec), mesh=())
    two = placed.with_layout(abstract_mesh(MeshSpec((("data", 2),))), layout)
    program = Program(two, plan.program.sample)
    return program.wire.bytes(where="reduce_gradients") / exact_bytes(two.exchange)
