"""The plan of checkpoints in memory: the process that writes a shard of a state to its host's
memory, the shards that another host gets as well, and the steps that are complete.

Functions of what all processes know, so that all come to the same result without asking each other.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.run.piece_file import Bounds, Key, shard_bytes

Hosts = Sequence[Sequence[int]]  # the ranks on each host


def shard_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Return a shard's index as numbers.

    >>> shard_bounds((slice(4, 8), slice(None)), (8, 3))
    ((4, 8), (0, 3))
    """
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def shard_holders(arrays: Mapping[str, Any]) -> dict[Key, set[int]]:
    """Return the processes whose devices hold each shard, in the same order everywhere.

    Args:
      arrays: with shape and sharding, by path.
    """
    holders: dict[Key, set[int]] = {}
    for path, leaf in arrays.items():
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            key = (path, shard_bounds(index, leaf.shape))
            holders.setdefault(key, set()).add(device.process_index)
    return dict(sorted(holders.items()))


def group_hosts(texts: Sequence[str]) -> list[list[int]]:
    """Return the ranks on each host, from what identifies the host of each rank; hosts are in the
    order of their first ranks.

    >>> group_hosts(["a", "b", "a"])
    [[0, 2], [1]]
    """
    hosts = collections.defaultdict(list)
    for rank, text in enumerate(texts):
        hosts[text].append(rank)
    return list(hosts.values())


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """The part of one process in each checkpoint in memory.

    Attributes:
      write: shards that it writes to its host.
      send: those of them that no other host has.
      receiver: the process of the next host that gets them; None: there is one host only.
      host_bytes: that all processes of its host write and receive.
    """

    write: tuple[Key, ...]
    send: tuple[Key, ...]
    receiver: int | None
    host_bytes: int


def plan_writes(
    holders: Mapping[Key, set[int]], described: Mapping[str, str], hosts: Hosts, rank: int
) -> WritePlan:
    """Plan that each host writes each shard that its devices hold once, and that all of its
    processes write about as much.

    Args:
      holders: the processes that hold each shard.
      described: dtype and shape of each array.
      hosts: the ranks on each host.
      rank: whose plan.
    """
    host_of: dict[int, int] = {}
    for number, host_ranks in enumerate(hosts):
        host_of |= dict.fromkeys(host_ranks, number)
    writes: dict[int, list[Key]] = {each: [] for each in host_of}
    sends: dict[int, list[Key]] = collections.defaultdict(list)
    written_bytes: collections.Counter[int] = collections.Counter()  # by rank
    received_bytes: collections.Counter[int] = collections.Counter()  # by host
    for key, ranks in holders.items():
        path, bounds = key
        size = shard_bytes(described[path], bounds)
        holding_hosts = sorted({host_of[each] for each in ranks})
        for host in holding_hosts:
            candidates = [each for each in hosts[host] if each in ranks]
            # The rank decides between equals, so that all processes choose the same writer.
            writer = min(candidates, key=lambda each: (written_bytes[each], each))
            written_bytes[writer] += size
            writes[writer].append(key)
            if len(holding_hosts) == 1 and len(hosts) > 1:
                sends[writer].append(key)
                received_bytes[(host + 1) % len(hosts)] += size
    this_host = host_of[rank]
    local_ranks = hosts[this_host]
    receiver = None
    if len(hosts) > 1:
        next_ranks = hosts[(this_host + 1) % len(hosts)]
        receiver = next_ranks[local_ranks.index(rank) % len(next_ranks)]
    host_bytes = sum(written_bytes[each] for each in local_ranks) + received_bytes[this_host]
    return WritePlan(tuple(writes[rank]), tuple(sends[rank]), receiver, host_bytes)


@dataclasses.dataclass(frozen=True)
class FoundPiece:
    """A file on a host, as all processes see it.

    Attributes:
      host: number of the host.
      name: of the file.
      keys: the shards in it.
    """

    host: int
    name: str
    step: int
    start: str
    rank: int
    keys: frozenset[Key]


def complete_steps(pieces: Sequence[FoundPiece], needed: set[Key]) -> list[tuple[int, str]]:
    """Return the steps of which the pieces hold every shard and process 0's metadata, each with the
    start of the run that wrote it; newest first.
    """
    groups: dict[tuple[int, str], list[FoundPiece]] = collections.defaultdict(list)
    for piece in pieces:
        groups[piece.step, piece.start].append(piece)
    complete = []
    for key, group in groups.items():
        present = set().union(*(piece.keys for piece in group))
        if needed <= present and _have_metadata(group):
            complete.append(key)
    return sorted(complete, reverse=True)


def _have_metadata(pieces: Sequence[FoundPiece]) -> bool:
    """Return whether one of the pieces is of process 0, whose metadata a resumed run needs."""
    return any(piece.rank == 0 for piece in pieces)


@dataclasses.dataclass(frozen=True)
class Shipment:
    """Shards that one host lacks, and where they come from.

    Attributes:
      source, target: numbers of hosts.
      name: file on the source.
      keys: its shards that are sent; none where only the metadata is needed.
    """

    source: int
    target: int
    name: str
    keys: tuple[Key, ...]


def plan_shipments(pieces: Sequence[FoundPiece], needs: Sequence[set[Key]]) -> list[Shipment]:
    """Plan what is sent so that every host has the shards that its devices need, and the metadata
    of process 0.

    Args:
      pieces: the pieces of one step and start.
      needs: the shards that each host needs.
    """
    shipments = []
    for target, needed in enumerate(needs):
        local = [piece for piece in pieces if piece.host == target]
        remote = [piece for piece in pieces if piece.host != target]
        # One order, so that all processes plan the same; first the pieces with the metadata.
        remote.sort(key=lambda piece: (piece.rank != 0, piece.host, piece.name))
        missing = needed.difference(*(piece.keys for piece in local))
        lacks_meta = not _have_metadata(local)
        for piece in remote:
            keys = sorted(missing & piece.keys)
            if keys or (lacks_meta and piece.rank == 0):
                shipments.append(Shipment(piece.host, target, piece.name, tuple(keys)))
                lacks_meta = lacks_meta and piece.rank != 0
                missing -= piece.keys
    return shipments
