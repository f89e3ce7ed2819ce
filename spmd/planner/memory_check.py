"""Whether a step fits in the memory of this process's devices, according to the compiler, before the first step runs."""

import dataclasses

from jax.sharding import Mesh

from spmd.errors import DeviceMemoryError
from spmd.planner.memory import tree_on_device
from spmd.train.compiled_step import Program
from spmd.tree import format_bytes


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes that a compiled step needs on each device, and the device's limit."""

    state: int
    temporaries: int
    peak: int
    limit: int
    kind: str

    def __str__(self) -> str:
        share = f"{format_bytes(self.peak)} of {format_bytes(self.limit)} on each {self.kind} ({self.peak / self.limit:.0%})"
        return f"a step needs {share}: {format_bytes(self.state)} of state, {format_bytes(self.temporaries)} of temporaries."


def memory_limit(mesh: Mesh) -> int | None:
    """Bytes that a program can use on each local device of a mesh, the smallest limit; None if devices do not report it (CPUs do not)."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in mesh.local_devices]
    return min(limits, default=0) or None


def step_memory(program: Program) -> StepMemory | None:
    """The memory of a step on a full batch; None if devices do not report their limit.

    The step is compiled for this, once: the first step reuses the program.
    """
    mesh = program.placed.mesh
    limit = memory_limit(mesh)
    if limit is None:
        return None
    analysis = program.compile().memory_analysis()
    state = tree_on_device(program.placed.abstract_state)
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    peak = max(analysis.argument_size_in_bytes, state) + fresh + analysis.temp_size_in_bytes
    return StepMemory(state, analysis.temp_size_in_bytes, peak, limit, mesh.local_devices[0].device_kind)


def check_step_memory(program: Program) -> str | None:
    """The memory of a step, as one line; None if it is not known.

    Raises:
      DeviceMemoryError: a step needs more than a device has.
    """
    memory = step_memory(program)
    if memory is not None and memory.peak > memory.limit:
        raise DeviceMemoryError(
            f"{memory}\n    {format_bytes(memory.peak - memory.limit)} too much on each of {program.placed.mesh.size} devices.\n"
            "    JAX preallocates 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.",
            fix="`spmd plan` shows what another layout, microbatches or [remat] would need; check_memory=False starts anyway.",
        )
    return None if memory is None else str(memory)
