"""Which server stores which parameter. Pure: sizes in, owners out.

The first two strategies for unsplit parameters are those of TF 1.x's `replica_device_setter`: round
robin over `ps_tasks`, and `GreedyLoadBalancingStrategy` by bytes. The third sorts by size first
(longest processing time first, Graham 1969); TF could not do that, since it placed variables in the
order of their creation.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Parameters on servers.

    `sizes` are elements by path. `owner` is the server of each parameter; empty if every parameter
    is split over all servers.

    Example:
      >>> assign("round_robin", {"kernel": 600, "bias": 10, "out": 90}, 2).load
      (690, 10)
      >>> assign("sliced", {"kernel": 600, "bias": 11}, 2).load
      (306, 306)
    """

    placement: str
    servers: int
    sizes: Mapping[str, int]
    owner: Mapping[str, int]

    @property
    def load(self) -> tuple[int, ...]:
        """Elements that each server stores, including padding for `sliced`."""
        if not self.owner:
            return (sum(-(-size // self.servers) for size in self.sizes.values()),) * self.servers
        load = [0] * self.servers
        for path, size in self.sizes.items():
            load[self.owner[path]] += size
        return tuple(load)

    @property
    def imbalance(self) -> float:
        """The fullest server's load over the mean load: how much longer the busiest link takes than
        with equal loads.
        """
        return max(self.load) * self.servers / sum(self.load) if sum(self.load) else 1.0

    @property
    def padding(self) -> float:
        """The share of the storage that is padding: every server's row is as long as the fullest
        one's.
        """
        stored = max(self.load) * self.servers
        return 1 - sum(self.sizes.values()) / stored if stored else 0.0

    def start(self, path: str) -> int:
        """Return where in its server's row a parameter begins."""
        before = 0
        for other, size in self.sizes.items():
            if other == path:
                break
            before += size if self.owner[other] == self.owner[path] else 0
        return before


def _round_robin(sizes: Sequence[int], servers: int) -> list[int]:
    return [number % servers for number in range(len(sizes))]


def _least_loaded(sizes: Sequence[int], servers: int) -> list[int]:
    load, owner = [0] * servers, []
    for size in sizes:
        owner.append(load.index(min(load)))
        load[owner[-1]] += size
    return owner


def _largest_first(sizes: Sequence[int], servers: int) -> list[int]:
    order = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    assigned = zip(order, _least_loaded([sizes[n] for n in order], servers), strict=True)
    return [server for _, server in sorted(assigned)]


STRATEGIES: dict[str, Callable[[Sequence[int], int], list[int]]] = {
    "round_robin": _round_robin,
    "greedy_bytes": _least_loaded,
    "largest_first": _largest_first,
}


def assign(placement: str, sizes: Mapping[str, int], servers: int) -> Assignment:
    """Assign parameters of these sizes (elements) to `servers` servers, in the order given."""
    owner = (
        {}
        if placement == "sliced"
        else dict(zip(sizes, STRATEGIES[placement](list(sizes.values()), servers), strict=True))
    )
    return Assignment(placement, servers, dict(sizes), owner)
