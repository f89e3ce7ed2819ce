"""Launch processes: the command line, and, from Python, functions that run in several processes of
this machine.

`spmd.launch.run(function, processes=2)` starts processes for one call;
`spmd.launch.local(processes=2)` keeps them for many.

The launchers of `spmd launch` are `local_launcher.py`, `ssh_launcher.py`, `slurm.py`, `srun.py` and
`kubernetes.py`. To add one, add its options and its call to `launch_command.py`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd.launch.notebook import Processes as Processes, local as local, run as run

__all__ = ["Processes", "local", "run"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'spmd.launch' has no attribute {name!r}")
    # Imported late: the command line works without jax, which takes a second to import.
    value = getattr(importlib.import_module("spmd.launch.notebook"), name)
    globals()[name] = value
    return value
