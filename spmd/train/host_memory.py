"""Memory of the host that devices copy from and to: who may use it, and moving arrays there inside
a step.

*Unmeasured*: no GPU has timed the copies. The bytes that stay on a device are in the compiled
program.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh

from spmd.base.tree import Tree
from spmd.errors import LayoutError, Problem, raise_problems
from spmd.layout.schema import Layout

HOST = "pinned_host"


def without_host_memory(mesh: Any) -> str:
    """The device of this process that cannot reach pinned memory of its host; "" if all can, and
    where devices are only planned.
    """
    if isinstance(mesh, AbstractMesh):
        return ""
    for device in mesh.local_devices:
        if HOST not in _memory_kinds(device):
            return str(device)
    return ""


def _memory_kinds(device: Any) -> set[str]:
    return {memory.kind for memory in device.addressable_memories()}


def check_memory(layout: Layout, mesh: Any, *, per_worker: bool) -> None:
    """Check a layout's `[memory]`.

    Args:
      per_worker: workers or servers run the optimizer themselves.

    Raises:
      LayoutError: a device cannot reach pinned memory of its host, or the optimizer's state is not
        moved under this reduction.
    """
    if layout.memory.optimizer == "device":
        return
    problems, where = [], '[memory] optimizer = "host"'
    if device := without_host_memory(mesh):
        why = f"{device} has no memory of kind {HOST}."
        problems.append(
            Problem(
                where,
                [why],
                'optimizer = "device", and [optimizer] shard, which shards its state.',
                kind="conflict",
            )
        )
    if per_worker:
        why = (
            "workers or servers update parameters on their own, with optimizer state on the device."
        )
        problems.append(
            Problem(
                where,
                [why],
                'optimizer = "device", or another [gradients] reduction.',
                kind="conflict",
            )
        )
    raise_problems(LayoutError, f"{layout.source} cannot be applied", problems)


def memory_notes(layout: Layout, platform: str) -> list[str]:
    """Return lines that a person should read about offloading on this platform."""
    keys = []
    if layout.memory.optimizer == "host":
        keys.append("[memory] optimizer")
    if layout.remat.offloads:
        keys.append("[remat] offload")
    if not keys or platform != "cpu":
        return []
    return [
        f"note: {', '.join(keys)}: on cpu, devices and host have one memory, so nothing is moved."
    ]


def on_host(leaf: Any) -> bool:
    """Return whether an array under a trace lies in the host's memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Under a trace: arrays in the host's memory are copied to the device."""

    def copy_to_device(leaf: Any) -> Any:
        if not on_host(leaf):
            return leaf
        return jax.device_put(leaf, jax.memory.Space.Device)

    return jax.tree.map(copy_to_device, tree)


def back_to_host(tree: Tree, before: Tree) -> Tree:
    """Under a trace: arrays of `tree` are copied to the host where those of `before` lie there."""

    def copy_to_host(leaf: Any, old: Any) -> Any:
        if not on_host(old):
            return leaf
        return jax.device_put(leaf, jax.memory.Space.Host)

    return jax.tree.map(copy_to_host, tree, before)
