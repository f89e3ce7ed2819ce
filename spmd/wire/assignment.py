"""The server that stores each parameter. Pure: sizes in, owners out.

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
            rows = [-(-size // self.servers) for size in self.sizes.values()]
            return (sum(rows),) * self.servers
        load = [0] * self.servers
        for path, size in self.sizes.items():
            load[self.owner[path]] += size
        return tuple(load)

    @property
    def imbalance(self) -> float:
        """The fullest server's load over the mean load: how much longer the busiest link takes than
        with equal loads.
        """
        total = sum(self.load)
        if not total:
            return 1.0
        return max(self.load) * self.servers / total

    @property
    def padding(self) -> float:
        """The share of the storage that is padding: every server's row is as long as the fullest
        one's.
        """
        # The rows of all servers are one array, so they have one length.
        stored = max(self.load) * self.servers
        if not stored:
            return 0.0
        return 1 - sum(self.sizes.values()) / stored

    def start(self, path: str) -> int:
        """Return where in its server's row a parameter begins."""
        before = 0
        for other, size in self.sizes.items():
            if other == path:
                break
            if self.owner[other] == self.owner[path]:
                before += size
        return before


def _round_robin(sizes: Sequence[int], servers: int) -> list[int]:
    return [number % servers for number in range(len(sizes))]


def _least_loaded(sizes: Sequence[int], servers: int) -> list[int]:
    load = [0] * servers
    owners = []
    for size in sizes:
        # Of equally loaded servers the first, as in TensorFlow, which takes `np.argmin` of the
        # loads.
        server = load.index(min(load))
        load[server] += size
        owners.append(server)
    return owners


def _largest_first(sizes: Sequence[int], servers: int) -> list[int]:
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    owners = [0] * len(sizes)
    assigned = _least_loaded([sizes[number] for number in order], servers)
    for number, server in zip(order, assigned, strict=True):
        owners[number] = server
    return owners


STRATEGIES: dict[str, Callable[[Sequence[int], int], list[int]]] = {
    "round_robin": _round_robin,
    "greedy_bytes": _least_loaded,
    "largest_first": _largest_first,
}


def assign(placement: str, sizes: Mapping[str, int], servers: int) -> Assignment:
    """Assign parameters of these sizes (elements) to `servers` servers, in the order given."""
    owner: dict[str, int] = {}
    if placement != "sliced":
        owners = STRATEGIES[placement](list(sizes.values()), servers)
        owner = dict(zip(sizes, owners, strict=True))
    return Assignment(placement, servers, dict(sizes), owner)
