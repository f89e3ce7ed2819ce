"""When does adding a device stop helping? Throughput of data-parallel training of one batch over more and more devices, by codec."""

import dataclasses
from collections.abc import Sequence

from spmd.errors import OptionError, a_kind
from spmd.layout.gradients import Gradients
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.hlo import Array
from spmd.planner.planning import Plan
from spmd.planner.timeline import travel_time
from spmd.planner.traffic import Transfer
from spmd.train.compiled_step import Program
from spmd.wire.notes import exact_bytes

CODECS = ("exact", "bfloat16", "int8")
BACKWARD = 2 / 3  # of computing: while it goes on, gradients that are there travel
HELPS = 1.1  # twice the devices must be so much faster


@dataclasses.dataclass(frozen=True)
class Saturation:
    """Predicted rows per second; printed, a table.

    Attributes:
      devices: how many, each number twice the one before.
      rates: rows per second of all devices together, for every codec.
      shares: bytes that a codec sends, as a share of exact gradients.
      rows: of the batch, which stays the same.
    """

    devices: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    shares: dict[str, float]
    rows: int

    def knee(self, codec: str) -> int:
        """The number of devices from which on twice as many are not 1.1 times as fast."""
        rates = self.rates[codec]
        return next((self.devices[at] for at in range(len(rates) - 1) if rates[at + 1] < HELPS * rates[at]), self.devices[-1])

    def __str__(self) -> str:
        names = list(self.rates)
        lines = [f"{'devices':>8}" + "".join(f"{f'{name} ({self.shares[name]:.2f})':>20}" for name in names)]
        for at, count in enumerate(self.devices):
            cells = [f"{self.rates[name][at]:,.0f}{' <' if self.knee(name) == count else '  '}" for name in names]
            lines.append(f"{count:>8}" + "".join(f"{cell:>20}" for cell in cells))
        lines.append(f"rows/s of all devices, for a batch of {self.rows} rows in all; in brackets what is sent, as a share of exact.")
        lines.append(f"< is where twice the devices are less than {HELPS} times as fast. Assumed: computing shrinks as a worker's rows do,")
        lines.append(f"operations begin as often, and what travels is hidden behind {BACKWARD:.0%} of computing.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from spmd.planner.drawings import saturation_drawing  # the drawing knows what it draws

        return saturation_drawing(self)


def saturation(plan: Plan, *, codecs: Sequence[str] = CODECS, most: int = 1024) -> Saturation:
    """Predict how fast the batch of a plan would be trained by 1, 2, 4 … devices of its kind, data-parallel.

    Args:
      plan: of data-parallel training: every worker holds all weights.
      codecs: what gradients travel as, with their default options.
      most: devices at most; a batch cannot be cut into more parts than it has rows.

    Raises:
      OptionError: a plan whose parameters are cut, or that is no plan.

    Example:
      >>> import jax, optax, spmd
      >>> import jax.numpy as jnp
      >>> model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((512, 512))}, lambda params, x: x @ params["w"])
      >>> batch = {"x": jax.ShapeDtypeStruct((1024, 512), "float32"), "y": jax.ShapeDtypeStruct((1024, 512), "float32")}
      >>> found = saturation(spmd.plan(model, batch, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), target="4xcpu"))
      >>> found.devices[-1], found.knee("int8") >= found.knee("exact")
      (1024, True)
    """
    if not isinstance(plan, Plan):
        raise OptionError(f"saturation({a_kind(plan)}).", fix="what spmd.plan gives.")
    placed = plan.program.placed
    if placed.storage is not None or any(place.copies(plan.mesh) != plan.mesh.size for place in placed.resolved.placements.values()):
        why = f"{plan.layout.source} cuts parameters, and every worker of data parallelism has them all"
        raise OptionError(f"saturation: {why}.", fix='a plan with layout="data_parallel".')
    counts = [1]
    while 2 * counts[-1] <= min(most, plan.rows):
        counts.append(2 * counts[-1])
    gradients, workers, times = plan.memory.parameters, placed.resolved.workers, plan.timeline
    shares = {codec: 1.0 if codec == "exact" else _share(plan, codec) for codec in codecs}
    rates: dict[str, list[float]] = {codec: [] for codec in codecs}
    for count in counts:
        computing = times.launches + (times.products + times.memory) * workers / count
        for codec, share in shares.items():
            travels = _travels(plan, count, gradients * share) if count > 1 else 0.0
            rates[codec].append(plan.rows / (computing + max(travels - BACKWARD * computing, 0.0)))
    return Saturation(tuple(counts), {codec: tuple(found) for codec, found in rates.items()}, shares, plan.rows)


def _travels(plan: Plan, count: int, size: float) -> float:
    """Seconds of an all-reduce of so many bytes over so many devices, as many on a node as a node has."""
    per_node = min(count, plan.cluster.target.devices_per_node)
    array = Array("uint8", (int(size),), 8)
    return travel_time(Transfer("all_reduce", "gradients", ("data",), count, per_node, (array,), 1, "", "", True), plan.cluster)


def _share(plan: Plan, codec: str) -> float:
    """Bytes that a codec sends of this model's gradients, by those of exact ones: read from a step that is traced for two workers."""
    placed = plan.program.placed
    layout = dataclasses.replace(plan.layout, gradients=Gradients("all_reduce", codec=codec), mesh=())
    two = placed.moved(abstract_mesh(MeshSpec((("data", 2),))), layout)
    program = Program(two, plan.program.sample)
    return program.wire.bytes(where="push") / exact_bytes(two.exchange)
