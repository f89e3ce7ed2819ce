"""Whether a step fits in the memory of this process's devices, according to the compiler, before
the first step runs.
"""

from spmd.errors import DeviceMemoryError
from spmd.planner.memory import LIKELY, percent
from spmd.planner.overhead import likelihood, program_items, total
from spmd.planner.target import Overhead, of_device
from spmd.train.compiled_step import Program
from spmd.train.device_memory import memory_limit, tree_on_device
from spmd.tree import format_bytes


def check_step_memory(program: Program) -> str | None:
    """The memory of a step on a full batch, as one line; None if devices do not report their limit.

    The step is compiled for this, once: the first step reuses the program.

    Raises:
      DeviceMemoryError: a step needs more than a device has.
    """
    mesh = program.placed.mesh
    limit = memory_limit(mesh)
    if limit is None:
        return None
    analysis = program.compile().memory_analysis()
    state, temporaries = tree_on_device(program.placed.abstract_state), analysis.temp_size_in_bytes
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    peak = max(analysis.argument_size_in_bytes, state) + fresh + temporaries
    kind = mesh.local_devices[0].device_kind
    target = of_device(kind)
    # of its own compiler and device, XLA's figure is exact
    needed = program_items(target.overhead if target else Overhead(), peak, 0)
    chance, expected = likelihood(needed, limit), round(total(needed)[0])
    share = f"{format_bytes(peak)} of {format_bytes(limit)} on each {kind} ({peak / limit:.0%})"
    line = (
        f"a step needs {share}: {format_bytes(state)} of state, {format_bytes(temporaries)} of "
        "temporaries."
    )
    if chance < 0.5:
        lost = (
            f", with {format_bytes(expected - peak)} that the allocator cannot use"
            if expected > peak
            else ""
        )
        raise DeviceMemoryError(
            f"{line}\n    {format_bytes(expected - limit)} too much on each of {mesh.size} "
            f"devices{lost}.\n"
            "    JAX preallocates 75 % of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION "
            "says otherwise.",
            fix="`spmd plan` shows what another layout, microbatches or [remat] would need; "
            "check_memory=False starts anyway.",
        )
    return line if chance >= LIKELY else f"{line[:-1]}; it fits with {percent(chance)} likelihood."
