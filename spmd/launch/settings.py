"""Options of every launched process, passed through its environment."""

import dataclasses

from spmd.distributed.timeouts import StallTimeouts
from spmd.errors import OptionError, option


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options for starting, watching and restarting processes.

    Args:
      simulate: number of CPU devices to simulate in each process; None: use the real devices.
      max_restarts: how often the processes are restarted after a failure.
      grace: seconds to save and exit after SIGTERM.
      stall: seconds without progress by phase, such as "step=120"
        (`spmd.distributed.timeouts.StallTimeouts`).
      memory_fraction: fraction of a GPU's memory for each process; None: JAX's default.
      preallocate: whether each process allocates that memory at its start.

    Example:
      >>> Settings(simulate=4, stall="step=120").environment()
      {'SPMD_GRACE': '30', 'SPMD_STALL': 'step=120', 'SPMD_SIMULATE': '4', 'JAX_PLATFORMS': 'cpu'}
    """

    simulate: int | None = None
    max_restarts: int = 0
    grace: float = 30.0
    stall: str = ""
    memory_fraction: float | None = None
    preallocate: bool = True

    def __post_init__(self):
        check_integer("simulate", self.simulate, 4096)
        check_integer("max_restarts", self.max_restarts, 10**6, least=0)
        StallTimeouts.parse(self.stall)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise OptionError(
                f"{option('memory_fraction', self.memory_fraction)}.", fix="more than 0, at most 1."
            )
        if not self.grace > 0:
            raise OptionError(
                f"{option('grace', self.grace)}.", fix="a positive number of seconds."
            )
        for name, is_given in (
            ("memory_fraction", self.memory_fraction is not None),
            ("preallocate", not self.preallocate),
        ):
            if is_given:
                self.refuse_with_simulate(name)

    def refuse_with_simulate(self, name: str) -> None:
        """Refuse an option for GPUs if CPU devices are simulated."""
        if self.simulate is not None:
            raise OptionError(
                f"{option(name)} is for GPUs, but {option('simulate', self.simulate)} simulates "
                "CPU devices.",
                fix="give one of the two.",
            )

    def environment(self) -> dict[str, str]:
        """The environment variables."""
        variables = {"SPMD_GRACE": f"{self.grace:g}"}
        if self.stall:
            variables["SPMD_STALL"] = self.stall
        if self.simulate:
            variables["SPMD_SIMULATE"] = str(self.simulate)
            # else JAX would choose the GPUs of the machine
            variables["JAX_PLATFORMS"] = "cpu"
        # JAX reads both when it first uses a GPU
        if self.memory_fraction is not None:
            variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(self.memory_fraction)
        if not self.preallocate:
            variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return variables


def check_integer(name: str, value: int | None, most: int, *, least: int = 1) -> None:
    """Refuse a value that is not an integer in the range; None means not given."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most
    ):
        raise OptionError(f"{option(name, repr(value))}.", fix=f"from {least} to {most}.")
