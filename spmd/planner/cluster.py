"""Clusters of one kind of device: from a text such as "8x8xh100", or the devices that are here."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, option, type_name
from spmd.planner.target import MOST, Link, Target, load, shipped

SLOWEST = 3600  # seconds to another site
LARGEST = 1024  # devices of the largest cluster that is tried if nothing fits
# of the memory before; if doubling the devices saves less, more devices will not help
MIN_SAVING = 0.95
_CLUSTER = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?(?:(\d+)x)?(.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A number of nodes with a number of devices each, on one site or divided evenly over several.

    >>> str(Cluster.parse("2x8xh100")), Cluster.parse("2x8xh100").count
    ('2x8xh100', 16)
    >>> far = Cluster.parse(
    ...     "4x2x8xh100@500Mb/s,80ms"
    ... )  # sites x nodes x devices, and the link of each site
    >>> str(far), far.sites, far.nodes, far.count
    ('4x2x8xh100@0.5Gb/s,80ms', 4, 8, 64)

    Attributes:
      nodes: of all sites together.
      devices: of a node.
    """

    nodes: int
    devices: int
    target: Target
    sites: int = 1

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.nodes * self.devices

    @property
    def devices_per_site(self) -> int:
        """The number of devices of a site, which share its link."""
        return self.count // self.sites

    def __str__(self) -> str:
        kind = f"{self.devices}x{self.target.name}"
        if self.sites > 1:
            return f"{self.sites}x{self.nodes // self.sites}x{kind}@{self.target.sites}"
        return f"{self.nodes}x{kind}"

    def doubled(self) -> "Cluster":
        """Return twice the devices: on the same nodes if they have room, otherwise on twice the
        nodes.

        >>> str(Cluster.parse("4xh100").doubled()), str(Cluster.parse("8xh100").doubled())
        ('1x8xh100', '2x8xh100')
        """
        if 2 * self.devices <= self.target.devices_per_node:
            return dataclasses.replace(self, devices=2 * self.devices)
        return dataclasses.replace(self, nodes=2 * self.nodes)

    @staticmethod
    def parse(value: "str | Cluster") -> "Cluster":
        """Read `"8x8xh100"` (nodes x devices x kind), `"8xh100"` (one node) or `"h100"` (one
        device); a kind may be a TOML file's path.

        `"4x8x8xh100"` is sites x nodes x devices x kind, and `"4x8x8xh100@1Gb/s,30ms"` says what
        links the sites.

        Raises:
          OptionError: an unknown target, an invalid file, no devices, or a link that is none.
        """
        if isinstance(value, Cluster):
            return value
        fix = 'such as "8xh100", or "4x8xh100" for 4 nodes of 8.'
        if not isinstance(value, str):
            raise OptionError(
                f"{option('target', repr(value))} is {type_name(value)}.",
                fix=fix,
            )
        match = _CLUSTER.fullmatch(value.strip())
        if match is None:
            raise OptionError("the target is empty.", fix=fix)
        *numbers, name = match.groups()
        name, link = _split_link(name)
        _check_kind(value, name)
        counts = [int(number) for number in numbers if number]
        sites, nodes, devices = [1, 1, 1, *counts][-3:]
        if min(sites, nodes, devices) < 1:
            sizes = (sites, nodes, devices)[-max(len(counts), 2) :]
            raise OptionError(
                f'target "{value}": {" x ".join(map(str, sizes))} devices are none.',
                fix=f'at least one, such as "{name}".',
            )
        if link and sites == 1:
            fix = (
                f'sites x nodes x devices, such as "2x{nodes}x{devices}x{name}@{link}", or leave '
                f'out "@{link}".'
            )
            raise OptionError(f'target "{value}": a link between sites, but one site.', fix=fix)
        target = load(name)
        if link:
            target = dataclasses.replace(target, sites=_site_link(value, link))
        most = target.devices_per_node
        if len(counts) < 2 and target.platform == "cuda" and devices > most:
            why = f"a node has only {most} devices, and links between nodes are slower"
            raise OptionError(
                f'target "{value}": {why}.',
                fix=f'nodes x devices, such as "{devices // most}x{most}x{name}".',
            )
        return Cluster(sites * nodes, devices, target, sites)


def _check_kind(value: str, name: str) -> None:
    """Refuse what follows the counts of a target if it is more counts, or nothing.

    Raises:
      OptionError: says which.
    """
    counted = re.match(r"([\d.]+)\s*([x×*])", name)
    if re.fullmatch(r"\d*x?", name):
        why = "it names no kind of device"
    elif counted is None or Path(name).is_file():
        return
    elif counted[2] != "x":
        why = f'"{counted[2]}" is not the letter x'
    elif not counted[1].isdigit():
        why = f"{counted[1]} is not a number of devices"
    else:
        why = "it has more counts than sites x nodes x devices"
    raise OptionError(
        f'target "{value}": {why}.',
        fix='such as "8xh100", "4x8xh100" or "2x4x8xh100"; `spmd targets` lists kinds.',
    )


def _split_link(name: str) -> tuple[str, str]:
    """Split a kind from the link between sites that follows it; the link is "" if none does."""
    kind, at, link = name.rpartition("@")
    # a file's path may have an @
    if at and not link.endswith(".toml"):
        return kind, link
    return name, ""


def _site_link(target: str, link: str) -> Link:
    """Read the link between sites of a target's text, such as "1Gb/s,30ms".

    Raises:
      OptionError: no such bandwidth or latency.
    """
    from spmd.wire.server.timing import Network  # it needs jax, which takes a second to import

    bandwidth, _, latency = link.partition(",")
    try:
        network = Network.parse({"bandwidth": bandwidth.strip(), "latency": latency.strip()})
    except ValueError as error:
        raise OptionError(
            f'target "{target}": of the link between sites, {error}', fix='such as "@1Gb/s,30ms".'
        ) from None
    if network.bandwidth > MOST or network.latency > SLOWEST:
        why = (
            f"of the link between sites, {link} is more than {MOST:g} bytes per second, or takes "
            f"longer than {SLOWEST} s"
        )
        raise OptionError(f'target "{target}": {why}.', fix='such as "@1Gb/s,30ms".')
    return Link(network.bandwidth, network.latency)


def of_device(kind: str) -> Target | None:
    """Return the shipped target of a GPU, by the name that it reports; None for other devices.

    >>> target = of_device("NVIDIA H100 80GB HBM3")
    >>> target.name if target else "", of_device("cpu")
    ('h100', None)
    """
    return _gpus().get(kind)


@functools.cache
def _gpus() -> dict[str, Target]:
    """Return the shipped GPUs by the names that they report; read once, since every `fit` asks."""
    targets = [load(name) for name in shipped()]
    # The name that a GPU's driver reports is also the one in its description for XLA.
    return {target.compiler["name"]: target for target in targets if target.platform == "cuda"}


def cluster_of(devices: Sequence[Any]) -> Cluster | None:
    """Describe JAX's devices as a cluster of a shipped target; None if no target describes them.
    The devices of one process are one node.

    >>> from types import SimpleNamespace
    >>> devices = [
    ...     SimpleNamespace(
    ...         platform="gpu", device_kind="NVIDIA H100 80GB HBM3", process_index=n // 4
    ...     )
    ...     for n in range(16)
    ... ]
    >>> str(cluster_of(devices))
    '2x8xh100'
    """
    if devices[0].platform == "cpu":
        return _as_cluster(devices, load("cpu"))
    target = of_device(devices[0].device_kind)
    if target is None:
        return None
    return _as_cluster(devices, target)


def nearest_cluster(devices: Sequence[Any]) -> Cluster | None:
    """Describe JAX's devices as a cluster of the shipped target with the most similar name; None if
    no target is of their platform.

    >>> from types import SimpleNamespace
    >>> device = SimpleNamespace(
    ...     platform="gpu", device_kind="NVIDIA A100-PCIE-40GB", process_index=0
    ... )
    >>> str(nearest_cluster([device] * 4))
    '1x4xa100_40'
    """
    kind = devices[0].device_kind
    platform = devices[0].platform
    if platform == "gpu":
        platform = "cuda"  # of JAX's names, the one that targets use
    near = [target for target in map(load, shipped()) if target.platform == platform]

    def similarity(target: Target) -> float:
        return difflib.SequenceMatcher(None, kind, target.title).ratio()

    if near:
        return _as_cluster(devices, max(near, key=similarity))
    return None


def _as_cluster(devices: Sequence[Any], target: Target) -> Cluster:
    """Divide devices into nodes of the target's size, or one node if one process has all."""
    nodes = 1
    if len({device.process_index for device in devices}) > 1:
        nodes = max(len(devices) // target.devices_per_node, 1)
    return Cluster(nodes, len(devices) // nodes, target)
