"""Check that the trials of a sweep have room on the devices, before anything is put there."""

import dataclasses
from collections.abc import Sequence

from spmd.base.tree import format_bytes
from spmd.errors import DeviceMemoryError
from spmd.sweeps.config import Trial
from spmd.sweeps.train_chunk import Piece, filled
from spmd.sweeps.vmapped_trials import NET, VmappedTrials
from spmd.train.device_memory import memory_limit, tree_on_device


@dataclasses.dataclass(frozen=True)
class _Need:
    """Bytes on each device of a call of steps: what `trials` keep, the data, and what the compiler
    adds (None: it was not asked).
    """

    trials: int
    state: int
    data: int
    temporaries: int | None

    @property
    def peak(self) -> int:
        return self.state + self.data + (self.temporaries or 0)

    def __str__(self) -> str:
        parts = [f"{format_bytes(self.state)} of state", f"{format_bytes(self.data)} of data"]
        if self.temporaries is not None:
            parts.append(f"{format_bytes(self.temporaries)} of temporaries")
        return f"{', '.join(parts[:-1])} and {parts[-1]}"


def check_room(
    packed: VmappedTrials, trials: Sequence[Trial], at_once: int | None, call: Piece
) -> None:
    """Refuse trials of one program that have no room side by side; devices that do not say what
    they have (CPUs do not) are believed.

    The first call's program is compiled for it, once: that call then runs what was compiled.

    Raises:
      DeviceMemoryError: they need more than a device has; how many at once would fit, which was
        tried.
    """
    limit = memory_limit(packed.mesh)
    if limit is None:
        return
    slots = packed.mesh.shape[NET]
    count = min(at_once or len(trials), len(trials))
    need = _need(packed, trials[:count], call, limit)
    if need.peak <= limit:
        return
    each = need.state // need.trials  # bytes of one trial's state
    kind = packed.mesh.local_devices[0].device_kind
    room = 0
    if each:
        room = (limit - need.data) // each
    fewer = min(need.trials - 1, room)
    # Halved, and not reduced by one, because each attempt compiles a program.
    while fewer > 0 and _need(packed, trials[: fewer * slots], call, limit).peak > limit:
        fewer //= 2
    if fewer > 0:
        fix = f"at_once={fewer * slots}, {fewer} on each device; or more devices along {NET}"
    elif need.data > limit:
        fix = (
            "fewer examples; or spmd.fit for one network after the other, which keeps no copy of "
            "the data on the devices"
        )
    elif need.data + each > limit:
        fix = (
            "a smaller model, or an optimizer that keeps less; or spmd.fit, with a layout that "
            "shards them"
        )
    else:
        fix = "a smaller batch; or a trial over several devices, such as net=4,data=2"
    raise DeviceMemoryError(
        f"{count} trials at once need {format_bytes(need.peak)} of {format_bytes(limit)} on each "
        f"{kind} "
        f"({need.peak / limit:.0%}): {need}.\n"
        f"    Each of {packed.mesh.size} devices has {need.trials} of them, {format_bytes(each)} "
        "of state each.",
        fix=f"{fix}. check_memory=False starts all the same.",
    )


def _need(packed: VmappedTrials, trials: Sequence[Trial], call: Piece, limit: int) -> _Need:
    """The bytes that a call needs; the compiler is only asked about trials that would have room
    without temporaries.
    """
    slots = len(filled(trials, packed))
    state = tree_on_device(packed.abstract(slots))
    data = tree_on_device(packed.abstract_data)
    need = _Need(slots // packed.mesh.shape[NET], state, data, None)
    if need.peak > limit:
        return need
    seeds = len({trial.seed for trial in trials})
    lowered = packed.lowered(slots, call.count, call.rows, shared=seeds == 1)
    memory = lowered.compile().memory_analysis()
    # donated arguments are also outputs, and XLA counts them in both
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return dataclasses.replace(need, temporaries=max(0, peak - need.peak))
