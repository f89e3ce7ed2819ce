"""What every process of a group is told, wherever it is started: by its environment."""

import dataclasses

from spmd.distributed.timeouts import StallTimeouts
from spmd.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Settings:
    """How processes are started, watched, and started again.

    Args:
      simulate: CPU devices that each process is to see; None: what there is.
      max_restarts: how often the group is started again after a failure.
      grace: seconds to save and leave when it is asked to end.
      stall: seconds without progress by phase, such as "step=120" (`spmd.distributed.timeouts.Limits`).
      memory_fraction: of a GPU's memory that each process takes; None: as JAX does.
      preallocate: whether it takes it at once.

    Example:
      >>> Settings(simulate=4, stall="step=120").environment()
      {'SPMD_STALL': 'step=120', 'SPMD_SIMULATE': '4', 'JAX_PLATFORMS': 'cpu'}
    """

    simulate: int | None = None
    max_restarts: int = 0
    grace: float = 30.0
    stall: str = ""
    memory_fraction: float | None = None
    preallocate: bool = True

    def __post_init__(self):
        whole_number("simulate", self.simulate, 4096)
        whole_number("max_restarts", self.max_restarts, 10**6, least=0)
        StallTimeouts.parse(self.stall)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise OptionError(f"memory_fraction={self.memory_fraction}.", fix="more than 0, at most 1.")
        if not self.grace > 0:
            raise OptionError(f"grace={self.grace}.", fix="seconds, more than none.")
        for name, given in (("memory_fraction", self.memory_fraction is not None), ("preallocate", not self.preallocate)):
            if given:
                self.no_simulation(name)

    def no_simulation(self, name: str) -> None:
        """Refuse an option that says something of GPUs where CPU devices take their place."""
        if self.simulate is not None:
            raise OptionError(f"{name} is for GPUs, and simulate={self.simulate} for where there is none.", fix="give one of them.")

    def environment(self) -> dict[str, str]:
        """The variables that say it."""
        found = {"SPMD_STALL": self.stall} if self.stall else {}
        found |= {"SPMD_SIMULATE": str(self.simulate), "JAX_PLATFORMS": "cpu"} if self.simulate else {}
        found |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(self.memory_fraction)} if self.memory_fraction is not None else {}
        return found | ({} if self.preallocate else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def whole_number(name: str, value: int | None, most: int, *, least: int = 1) -> None:
    """Refuse what is no number of processes, devices, hosts and the like; None is one that was not given."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise OptionError(f"{name}={value!r}.", fix=f"from {least} to {most}.")
