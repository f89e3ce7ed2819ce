"""The rank of a worker of Ray Train, the address of the first, and whether Ray has started them
before.
"""

import importlib
import logging
import os
import secrets
import sys
from typing import Any

from spmd.distributed.host_gpus import share_gpus, visible_gpus
from spmd.distributed.world import FIRST_PORT, World, free_port, join_address
from spmd.errors import ClusterError

# in Ray's folder of a run
MARK = "spmd-has-begun"
_log = logging.getLogger("spmd")


def detect_ray() -> World | None:
    """Ask Ray Train for the place of this process; None outside of its workers.

    All workers must call it: the first chooses an address and a token, and Ray sends them to the
    others, for which it waits without limit. A process that has not imported Ray is no worker, so
    nothing is imported here.

    Raises:
      ClusterError: this version of Ray Train sends nothing.
    """
    train = sys.modules.get("ray.train")
    if train is None or os.environ.get("SPMD_PROCESSES") == "1":
        return None
    try:
        context = train.get_context()
    # of Ray, outside of its workers
    except RuntimeError:
        return None
    size = context.get_world_size()
    # The only worker is not one of the processes that have started Ray, either.
    if size == 1:
        address = join_address("127.0.0.1", FIRST_PORT)
        return World(0, 1, address, "Ray Train", restarted=_has_begun_before(context))
    rank = context.get_world_rank()
    offer = None
    if rank == 0:
        host = importlib.import_module("ray.util").get_node_ip_address()
        address = os.environ.get("SPMD_COORDINATOR") or join_address(host, free_port(host))
        token = os.environ.get("SPMD_TOKEN") or secrets.token_hex(16)
        offer = address, token, _has_begun_before(context)
    address, token, restarted = _send_to_all(offer)
    local_rank, local_size = context.get_local_rank(), context.get_local_world_size()
    return World(
        rank=rank,
        size=size,
        address=address,
        source="Ray Train",
        local_rank=local_rank,
        local_size=local_size,
        local_devices=_local_devices(local_rank, local_size),
        token=token,
        restarted=restarted,
    )


def _has_begun_before(context: Any) -> bool:
    """Return whether Ray has started this run before, and leave a mark, so that the next call says
    so.

    A run has been started before after a failure, and where another program has used its name and
    storage, by which Ray, too, continues a run.
    """
    try:
        storage = context.get_storage()
        files, mark = storage.storage_filesystem, f"{storage.experiment_fs_path}/{MARK}"
        begun = files.get_file_info(mark).is_file
        if not begun:
            with files.open_output_stream(mark):
                pass
    # of Ray, without processes of its own: it starts nothing again
    except NotImplementedError:
        return False
    # Ray may change this interface with any version.
    except (AttributeError, OSError) as error:
        text = "Ray's folder does not say whether it has started this run before (%s).\n    fix: %s"
        _log.warning(text, error, "fit(resume=True).")
        return False
    return begun


def _send_to_all(offer: tuple[str, str, bool] | None) -> tuple[str, str, bool]:
    """Return what the first worker offers."""
    try:
        # not among the packages that the checks install
        collective: Any = importlib.import_module("ray.train.collective")
        return collective.broadcast_from_rank_zero(offer)
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"Ray Train: the first worker's address cannot be sent to the others: {error}.",
            fix="RAY_TRAIN_V2_ENABLED=1, with a version of Ray that has ray.train.collective.",
        ) from None


def _local_devices(local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """The GPUs of this worker among those that it sees; None if it sees no others.

    Raises:
      ClusterError: it does not see the GPUs that Ray has assigned to it.
    """
    ray: Any = importlib.import_module("ray")
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not assigned:
        return share_gpus(os.environ, local_rank, local_size)
    visible = visible_gpus()
    if unseen := sorted(set(assigned) - set(visible)):
        raise ClusterError(
            f"Ray Train: worker {local_rank} of this host has GPU {unseen[0]}, which is not among "
            f"the visible ones ({', '.join(visible)}).",
            fix="JaxTrainer(jax_config=JaxConfig()), which leaves each worker its own GPUs; and "
            "CUDA_VISIBLE_DEVICES with the names that Ray uses, or without it.",
        )
    if len(visible) == len(assigned):
        return None
    return tuple(visible.index(name) for name in assigned)
