"""Peak memory planned beside measured: the sum that a framework's allocator counts, and everything
that the device needs.
"""

from typing import Any

from spmd.planner.memory import percent
from spmd.planner.overhead import PREFETCHED, total

INTRODUCTION = """## Peak memory

GiB on a device. PyTorch's allocator counts what it hands out, without the CUDA context and NCCL's buffers. The same sum of a plan is the
program, fragmentation and workspaces, which is what the ratio compares. "all" is everything that a plan expects on the device, with the
interval of nine cases in ten; it is about this library's program, which is another one than the measured ("Peaks explained" below).

| run | measured | program | counted by an allocator | ratio | all | interval | of | likelihood |
|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def peak_row(run: Any, planned: Any) -> str:
    """A line of the table, for a run whose peak is published."""
    memory = planned.memory
    counted = total(memory.inside)[0] - PREFETCHED * memory.batch
    sizes = [counted, memory.expected, *memory.range, memory.capacity]
    inside, expected, low, high, capacity = (f"{size / 2**30:.1f}" for size in sizes)
    measured, ratio = (
        (f"{run.peak:.1f}", f"{counted / 2**30 / run.peak:.2f}")
        if run.peak
        else ("out of memory", "")
    )
    cells = [
        run.id,
        measured,
        f"{memory.peak / 2**30:.1f}",
        inside,
        ratio,
        expected,
        f"{low} to {high}",
        capacity,
    ]
    return "| " + " | ".join([*cells, percent(memory.likelihood)]) + " |"
