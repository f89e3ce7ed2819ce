"""Whether a step has room on the devices that are here, asked of the compiler before the first step."""

import dataclasses

import jax
from jax.sharding import Mesh

from spmd.errors import DeviceMemoryError
from spmd.planner.memory import on_device
from spmd.train.compiled_step import Program
from spmd.tree import format_bytes


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes that a compiled step needs on each device, and what a device has."""

    state: int
    temporaries: int
    peak: int
    limit: int
    kind: str

    def __str__(self) -> str:
        share = f"{format_bytes(self.peak)} of {format_bytes(self.limit)} on each {self.kind} ({self.peak / self.limit:.0%})"
        return f"a step needs {share}: {format_bytes(self.state)} of state, {format_bytes(self.temporaries)} of temporaries."


def limit_of(mesh: Mesh) -> int | None:
    """Bytes that a program can have on each device of a mesh, the least of those here; None where devices do not say (CPUs do not)."""
    told = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.local_devices]
    return min(told, default=0) or None


def room_of(program: Program) -> Room | None:
    """What a step on a full batch needs here; None where devices do not say what they have.

    The step is compiled for it, once: the first step then runs what was compiled.
    """
    mesh = program.placed.mesh
    limit = limit_of(mesh)
    if limit is None:
        return None
    found = program.compiled().memory_analysis()
    state = sum(on_device(leaf) for leaf in jax.tree.leaves(program.placed.abstract_state))
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    peak = max(found.argument_size_in_bytes, state) + fresh + found.temp_size_in_bytes
    return Room(state, found.temp_size_in_bytes, peak, limit, mesh.local_devices[0].device_kind)


def check_room(program: Program) -> str | None:
    """The room of a step, in a line; None where it is not known.

    Raises:
      DeviceMemoryError: a step needs more than a device has.
    """
    room = room_of(program)
    if room is not None and room.peak > room.limit:
        raise DeviceMemoryError(
            f"{room}\n    {format_bytes(room.peak - room.limit)} too much on each of {program.placed.mesh.size} devices.\n"
            "    JAX takes 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.\n"
            "    fix: `spmd plan` tells what another layout, microbatches or [remat] would need; check_memory=False starts all the same."
        )
    return None if room is None else str(room)
