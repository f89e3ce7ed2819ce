"""The GPUs of a host, and their division between its processes."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping

from spmd.errors import ClusterError, printable


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process of this host sees, as CUDA_VISIBLE_DEVICES names them.

    Raises:
      ClusterError: nvidia-smi exists but fails.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = map(str.strip, environ["CUDA_VISIBLE_DEVICES"].split(","))
        # for CUDA, -1 ends the list
        listed = itertools.takewhile(lambda name: not name.startswith("-"), names)
        return list(filter(None, listed))
    if environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        return [str(number) for number in range(int(environ["SLURM_GPUS_ON_NODE"]))]
    tool = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if tool is None:
        return []
    try:
        output = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stdout", None) or getattr(error, "stderr", None) or error
        raise ClusterError(
            f"nvidia-smi -L fails: {printable(str(output).strip(), 300)}",
            fix="set CUDA_VISIBLE_DEVICES to the GPUs to use.",
        ) from None
    count = sum(line.startswith("GPU ") for line in output.splitlines())
    return [str(number) for number in range(count)]


def share_gpus(
    environ: Mapping[str, str], local_rank: int, local_size: int
) -> tuple[int, ...] | None:
    """This process's equal share of the GPUs that all processes of a host see; None if each sees
    only its own, or none are visible.
    """
    if local_size == 1 or environ.get("JAX_PLATFORMS") == "cpu":
        return None
    visible = len(visible_gpus(environ))
    if visible < local_size:
        return None
    if visible % local_size:
        raise ClusterError(
            f"{visible} GPUs cannot be shared equally by {local_size} processes of a host.",
            fix="as many processes as GPUs; or CUDA_VISIBLE_DEVICES with a multiple of the "
            "processes.",
        )
    share = visible // local_size
    return tuple(range(local_rank * share, (local_rank + 1) * share))
