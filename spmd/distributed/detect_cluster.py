"""Detect the rank of this process among several, or refuse to train alone by mistake."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Mapping

from spmd.distributed.launchers import READERS
from spmd.distributed.world import World
from spmd.errors import ClusterError

JOINING = "SPMD_PROCESSES, SPMD_PROCESS and SPMD_COORDINATOR=HOST:PORT in each process"
# of the token in examples/cluster
PLACEHOLDER = "REPLACE-ME"
ALONE = "SPMD_PROCESSES=1 if this process is to train alone"
# of the shell that salloc starts on the first node, where a site has it so: a step of one task
INTERACTIVE_STEP = "4294967290"


@dataclasses.dataclass(frozen=True)
class Sign:
    """A variable from which it follows that a launcher may have started several processes.

    Attributes:
      variable: its name.
      launcher: the launcher that sets it.
      size: the variable that has the number of processes, if there is one.
      needs: what `launchers.py` reads besides.
    """

    variable: str
    launcher: str
    size: str | None = None
    needs: tuple[str, ...] = ()


MPI = "an MPI launcher"
JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SIGNS = (
    Sign("SPMD_PROCESS", "spmd launch", None, ("SPMD_PROCESSES",)),
    Sign("WORLD_SIZE", "PyTorch's launcher", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT", "RANK")),
    # of Kubeflow and others, for a torchrun that has not been called
    Sign("PET_NNODES", "a launcher of torchrun", "PET_NNODES"),
    Sign("JAX_NUM_PROCESSES", "JAX's launcher", "JAX_NUM_PROCESSES", JAX_VARIABLES),
    Sign("JAX_PROCESS_ID", "JAX's launcher", "JAX_NUM_PROCESSES", JAX_VARIABLES),
    Sign("PMI_SIZE", MPI, "PMI_SIZE"),
    Sign("PMI_RANK", MPI, "PMI_SIZE"),
    Sign("PMI_ID", MPI, "PMI_SIZE"),
    Sign("PMIX_RANK", MPI, "PMI_SIZE"),
    Sign("PALS_RANKID", MPI, "PMI_SIZE"),
    Sign("MV2_COMM_WORLD_SIZE", "MVAPICH2", "MV2_COMM_WORLD_SIZE"),
    Sign("JSM_NAMESPACE_SIZE", "jsrun", "JSM_NAMESPACE_SIZE"),
    # An Indexed Job and each Job of a JobSet set it, without the number of pods.
    Sign("JOB_COMPLETION_INDEX", "Kubernetes", None, ("SPMD_PROCESSES", "SPMD_COORDINATOR")),
)


def detect(environ: Mapping[str, str] = os.environ) -> World | None:
    """Read the environment that launchers set; None: this is the only process.

    Each launcher has a reader in `launchers.py`, of which the first that finds its variables
    decides. SPMD_COORDINATOR replaces the address, and SPMD_TOKEN the secret. SPMD_PROCESSES=1 says
    that this process trains alone. An empty variable counts as unset.

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
    environ = {name: value for name, value in environ.items() if value.strip()}
    if environ.get("SPMD_PROCESSES") == "1":
        _warn_of_others({name: text for name, text in environ.items() if "SPMD_" not in name})
        return None
    world = next((world for read in READERS if (world := read(environ)) is not None), None)
    if world is None:
        _refuse_signs(environ)
    if world is None or world.size == 1:
        if environ.get("SLURM_STEP_ID", INTERACTIVE_STEP) == INTERACTIVE_STEP:
            _warn_of_idle_tasks(
                environ.get("SLURM_JOB_ID", ""),
                environ.get("SLURM_NTASKS", "1"),
                environ.get("SLURM_JOB_NUM_NODES", "1"),
            )
        return None
    if environ.get("SPMD_TOKEN") == PLACEHOLDER:
        raise ClusterError(
            f"SPMD_TOKEN={PLACEHOLDER}, which is no secret: the examples have it in its place.",
            fix="a random text, such as that of: openssl rand -hex 16.",
        )
    return dataclasses.replace(
        world,
        address=environ.get("SPMD_COORDINATOR", world.address),
        token=environ.get("SPMD_TOKEN", world.token),
    )


def _refuse_signs(environ: Mapping[str, str]) -> None:
    """Raise if a launcher has started several processes, all of which would train alone."""
    for sign in SIGNS:
        if sign.variable not in environ or environ.get(sign.size or "") == "1":
            continue
        value = environ[sign.variable]
        missing = [name for name in sign.needs if name not in environ]
        reason = f": {', '.join(missing)} not set" if missing else ""
        raise ClusterError(
            f"{sign.variable}={value}, so {sign.launcher} may have started several processes, and "
            f"spmd cannot connect them{reason}. All would train alone.",
            fix=f"{JOINING}; or {ALONE}.",
        )


def _warn_of_others(environ: Mapping[str, str]) -> None:
    """Warn that this process trains alone, though a launcher has started several."""
    with contextlib.suppress(ClusterError):
        for read in READERS:
            world = read(environ)
            if world is not None and world.size > 1:
                _warn_of_alone(world.size, world.source)
                return


@functools.cache
def _warn_of_alone(size: int, source: str) -> None:
    logging.getLogger("spmd").warning(
        "SPMD_PROCESSES=1: this process trains alone, of %d by %s.", size, source
    )


@functools.cache
def _warn_of_idle_tasks(job: str, tasks: str, nodes: str) -> None:
    """Warn of tasks and nodes of a SLURM job that do nothing, since this process is outside of a
    step of srun.
    """
    if not job or tasks == nodes == "1":
        return
    logging.getLogger("spmd").warning(
        "SLURM job %s has %s task%s on %s node%s, and this process trains alone, outside of srun. "
        "To train in all tasks: srun python train.py. If the tasks were meant as CPUs of one "
        "process: --cpus-per-task instead of --ntasks.",
        *(job, tasks, "s" * (tasks != "1"), nodes, "s" * (nodes != "1")),
    )
