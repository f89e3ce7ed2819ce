"""Communication between workers and servers in asynchronous modes, as a layout says: see `spmd.wire.server.exchange`."""

import jax

from spmd.sync.gradient_sync import GradientSync
from spmd.wire.reduction import Memory
from spmd.wire.server import exchange
from spmd.wire.server.arrivals import Leaves


def fetch_params(sync: GradientSync, memory: Memory) -> Leaves:
    """The parameters that this position's workers have read, by path [m, D, width]."""
    rounded = sync.resolved.layout.gradients.weights == "bfloat16"
    return exchange.fetch_params(memory, sync.buckets, sync.mesh_axes.data_axes, rounded=rounded)


def send_gradients(sync: GradientSync, grads: Leaves, memory: Memory, present: jax.Array) -> tuple[Leaves, Memory]:
    """What arrived at this server, by path [1, W, width], and the next memory."""
    return exchange.send_gradients(grads, sync.gradient_specs, sync.buckets, memory, present)
