"""Detect this process's place among several, or refuse to train alone by mistake."""

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping

from spmd.distributed.launchers import READERS
from spmd.distributed.world import World
from spmd.errors import ClusterError

JOINING = "SPMD_PROCESSES, SPMD_PROCESS and SPMD_COORDINATOR=HOST:PORT in each process"
ALONE = "SPMD_PROCESSES=1 where each process is to train alone"


@dataclasses.dataclass(frozen=True)
class Sign:
    """A variable that says that a launcher has started several processes.

    Attributes:
      variable: its name.
      launcher: that sets it.
      is_size: its value is the number of processes, and 1 says that this is the only one.
      needs: variables of this launcher that `launchers.py` reads.
    """

    variable: str
    launcher: str
    is_size: bool
    needs: tuple[str, ...] = ()


SIGNS = (
    Sign("WORLD_SIZE", "a launcher of PyTorch", True, ("MASTER_ADDR", "MASTER_PORT", "RANK")),
    Sign("JAX_NUM_PROCESSES", "JAX", True, ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID")),
    Sign("PMI_SIZE", "an MPI launcher (PMI)", True, ("MPI_LOCALNRANKS",)),
    Sign("PMI_RANK", "an MPI launcher (PMI)", False, ("MPI_LOCALNRANKS",)),
    Sign("PMIX_RANK", "an MPI launcher (PMIx)", False, ("OMPI_COMM_WORLD_SIZE",)),
    Sign("MV2_COMM_WORLD_SIZE", "MVAPICH2", True),
    Sign("PALS_RANKID", "Cray PALS", False),
    Sign("JSM_NAMESPACE_SIZE", "jsrun", True),
    # An Indexed Job and each Job of a JobSet set it, without the number of pods.
    Sign("JOB_COMPLETION_INDEX", "Kubernetes", False, ("SPMD_PROCESSES", "SPMD_COORDINATOR")),
)


def detect(environ: Mapping[str, str] = os.environ) -> World | None:
    """Read the environment that launchers set; None: this is the only process.

    Each launcher has a reader in `launchers.py`, of which the first that finds its variables
    decides. SPMD_PROCESSES=1 says that this process trains alone.

    Raises:
      ClusterError: variables are missing, are not numbers, or contradict each other; or a launcher
        has started several processes in a way that no reader knows.

    Example:
      >>> world = detect(
      ...     {"SPMD_PROCESSES": "2", "SPMD_PROCESS": "1", "SPMD_COORDINATOR": "127.0.0.1:4000"}
      ... )
      >>> print(world)
      process 1 of 2 (spmd launch), process 0 at 127.0.0.1:4000
    """
    if environ.get("SPMD_PROCESSES") == "1":
        return None
    world = next((world for read in READERS if (world := read(environ)) is not None), None)
    if world is None:
        _refuse_signs(environ)
        _warn_outside_of_steps(
            environ.get("SLURM_JOB_ID", ""),
            environ.get("SLURM_NTASKS", "1"),
            environ.get("SLURM_JOB_NUM_NODES", "1"),
        )
        return None
    if world.size == 1:
        return None
    return dataclasses.replace(world, token=environ.get("SPMD_TOKEN", world.token))


def _refuse_signs(environ: Mapping[str, str]) -> None:
    """Raise if a launcher has started several processes, which would each train alone."""
    for sign in SIGNS:
        value = environ.get(sign.variable)
        if value is None or (sign.is_size and value == "1"):
            continue
        missing = [name for name in sign.needs if name not in environ]
        reason = f" ({', '.join(missing)} not set)" if missing else ""
        raise ClusterError(
            f"{sign.variable}={value}: {sign.launcher} has started this process as one of several, "
            f"and spmd does not know where the others are{reason}: each would train alone.",
            fix=f"{JOINING}; or {ALONE}.",
        )


@functools.cache
def _warn_outside_of_steps(job: str, tasks: str, nodes: str) -> None:
    """Warn of tasks and nodes of a SLURM job that do nothing, since this process is in no step of
    `srun`.
    """
    if not job or tasks == nodes == "1":
        return
    logging.getLogger("spmd").warning(
        "SLURM job %s has %s tasks on %s nodes, and this process is in no step of srun: it trains "
        "alone, on one node. To train on all: srun python train.py.",
        job,
        tasks,
        nodes,
    )
