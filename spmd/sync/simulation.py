"""`simulate`: the simulated clock of a parameter server, without a model."""

import jax

from spmd.errors import OptionError, type_name
from spmd.layout.check import fit_layout
from spmd.layout.gradients import Gradients
from spmd.layout.schema import Layout
from spmd.mesh import MeshSpec
from spmd.wire.server.clock import check_bytes
from spmd.wire.server.declaration import ParameterServer
from spmd.wire.server.events import Events
from spmd.wire.server.statistics import ServerStatistics
from spmd.wire.server.timeline import check_number


def simulate(
    server: ParameterServer,
    *,
    workers: int | None = None,
    steps: int,
    bytes: tuple[float, float] = (0.0, 0.0),
) -> ServerStatistics:
    """Simulate `steps` steps of a parameter server's clock, without a model or a device.

    Args:
      server: as in a layout, with the same checks.
      workers: number of workers; None: as the server says.
      steps: rounds; in synchronous mode, updates.
      bytes: bytes that a worker sends to one server with a gradient, and receives from it: the
        model's size / number of servers.

    Returns:
      The simulated time, waiting, staleness and dropped gradients; printed, a table.

    Raises:
      LayoutError: `server` has an invalid value, or options that conflict.
      OptionError: an invalid number, or a trace of times that ends too early.

    Example:
      >>> for spares in (0, 4):  # the cost of waiting for the slowest four of a hundred
      ...     server = ParameterServer(spares=spares, compute_time="exponential(1)")
      ...     print(f"{simulate(server, workers=100, steps=200).seconds_per_step:.1f}")
      5.1
      3.1
    """
    if not isinstance(server, ParameterServer):
        why = f"simulate: {server!r} is {type_name(server)}."
        raise OptionError(why, fix="an spmd.ParameterServer.")
    if workers is None:
        workers = server.workers
    if workers is None:
        raise OptionError("simulate: the number of workers is missing.", fix="such as  workers=8.")
    check_number("workers", workers)
    if server.workers not in (None, workers):
        raise OptionError(
            f"simulate: workers={workers}, and the server says {server.workers}.",
            fix="give only one of the two, or equal numbers.",
        )
    check_bytes("simulate", bytes)
    source = f"a parameter server of {workers} workers"
    layout = Layout(
        gradients=Gradients("parameter_server"), parameter_server=server, name=source, source=source
    )
    # one array for each fragment, which all workers divide
    shape = jax.ShapeDtypeStruct((workers,), "float32")
    any_model = {str(number): shape for number in range(server.fragments)}
    fit_layout(Layout.load(layout), any_model, {}, MeshSpec.parse({"data": workers}))
    events = Events(server, workers, (float(bytes[0]), float(bytes[1])))
    return ServerStatistics.of(events, steps)
