"""The rank of a worker of Ray Train among all workers, and the address of the first."""

import importlib
import os
import secrets
import sys

from spmd.distributed.host_gpus import share_gpus
from spmd.distributed.world import World, free_port, join_address


def detect_ray() -> World | None:
    """Ask Ray Train for the place of this process; None outside of its workers, and if it is the
    only one.

    All workers must call it: the first chooses an address and a token, and Ray sends them to the
    others. A process that has not imported Ray is no worker, so nothing is imported here.
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
    if size == 1:
        return None
    # The package is not among those that are installed for the checks.
    util = importlib.import_module("ray.util")
    collective = importlib.import_module("ray.train.collective")
    rank = context.get_world_rank()
    offer = None
    if rank == 0:
        host = util.get_node_ip_address()
        address = os.environ.get("SPMD_COORDINATOR") or join_address(host, free_port(host))
        offer = address, os.environ.get("SPMD_TOKEN") or secrets.token_hex(16)
    address, token = collective.broadcast_from_rank_zero(offer)
    local_rank, local_size = context.get_local_rank(), context.get_local_world_size()
    return World(
        rank=rank,
        size=size,
        address=address,
        source="Ray Train",
        local_rank=local_rank,
        local_size=local_size,
        local_devices=share_gpus(os.environ, local_rank, local_size),
        token=token,
    )
