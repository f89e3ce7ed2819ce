"""Which process writes which shard of a state to its host's memory, which shards another host gets
as well, and which step is complete.

Functions of what all processes know, so that all come to the same result without asking each other.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.run.piece_file import Bounds, Key, shard_bytes

Hosts = Sequence[Sequence[int]]  # the ranks on each host


def shard_bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """A shard's index as numbers.

    >>> shard_bounds((slice(4, 8), slice(None)), (8, 3))
    ((4, 8), (0, 3))
    """
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def shard_holders(arrays: Mapping[str, Any]) -> dict[Key, set[int]]:
    """The processes whose devices hold each shard, in the same order everywhere.

    Args:
      arrays: with shape and sharding, by path.
    """
    holders: dict[Key, set[int]] = {}
    for path, leaf in arrays.items():
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            holders.setdefault((path, shard_bounds(index, leaf.shape)), set()).add(
                device.process_index
            )
    return dict(sorted(holders.items()))


def group_hosts(texts: Sequence[str]) -> list[list[int]]:
    """The ranks on each host, from what identifies the host of each rank; hosts are in the order of
    their first ranks.

    >>> group_hosts(["a", "b", "a"])
    [[0, 2], [1]]
    """
    hosts = collections.defaultdict(list)
    for rank, text in enumerate(texts):
        hosts[text].append(rank)
    return list(hosts.values())


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """What one process does for each checkpoint in memory.

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
    """Each host writes each shard that its devices hold once, and all of its processes write about
    as much.

    Args:
      holders: the processes that hold each shard.
      described: dtype and shape of each array.
      hosts: the ranks on each host.
      rank: whose plan.
    """
    of = {each: number for number, ranks in enumerate(hosts) for each in ranks}
    writes: dict[int, list[Key]] = {each: [] for each in of}
    load, sends, received = (
        collections.Counter(),
        collections.defaultdict(list),
        collections.Counter(),
    )
    for key, ranks in holders.items():
        size, on = shard_bytes(described[key[0]], key[1]), sorted({of[each] for each in ranks})
        for host in on:
            writer = min(
                (each for each in hosts[host] if each in ranks), key=lambda each: (load[each], each)
            )
            load[writer] += size
            writes[writer].append(key)
            if len(on) == 1 and len(hosts) > 1:
                sends[writer].append(key)
                received[(host + 1) % len(hosts)] += size
    mine = of[rank]
    next_ranks = hosts[(mine + 1) % len(hosts)]
    receiver = next_ranks[hosts[mine].index(rank) % len(next_ranks)] if len(hosts) > 1 else None
    total = sum(load[each] for each in hosts[mine]) + received[mine]
    return WritePlan(tuple(writes[rank]), tuple(sends[rank]), receiver, total)


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


def complete_steps(found: Sequence[FoundPiece], needed: set[Key]) -> list[tuple[int, str]]:
    """Steps of which the pieces hold every shard and process 0's metadata, each with the start of
    the run that wrote it; newest first.
    """
    groups: dict[tuple[int, str], list[FoundPiece]] = collections.defaultdict(list)
    for piece in found:
        groups[piece.step, piece.start].append(piece)
    complete = [
        key
        for key, pieces in groups.items()
        if needed <= set().union(*(piece.keys for piece in pieces)) and _first(pieces)
    ]
    return sorted(complete, reverse=True)


def _first(pieces: Sequence[FoundPiece]) -> bool:
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


def plan_shipments(found: Sequence[FoundPiece], needs: Sequence[set[Key]]) -> list[Shipment]:
    """What is sent so that every host has the shards that its devices need, and the metadata of
    process 0.

    Args:
      found: the pieces of one step and start.
      needs: the shards that each host needs.
    """
    shipments = []
    for target, needed in enumerate(needs):
        local = [piece for piece in found if piece.host == target]
        missing = needed.difference(*(piece.keys for piece in local))
        lacks_meta = not _first(local)
        for piece in sorted(
            (piece for piece in found if piece.host != target),
            key=lambda piece: (piece.rank != 0, piece.host, piece.name),
        ):
            keys = sorted(missing & piece.keys)
            if keys or (lacks_meta and piece.rank == 0):
                shipments.append(Shipment(piece.host, target, piece.name, tuple(keys)))
                lacks_meta = lacks_meta and piece.rank != 0
                missing -= piece.keys
    return shipments
