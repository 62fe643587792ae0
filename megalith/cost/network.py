"""Seconds of a collective, from the distance of its ranks, the links that it crosses, and its bytes. No torch."""

from dataclasses import dataclass
from math import log2

from megalith.cost.constants import Device
from megalith.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class Line:
    """The ranks of one axis: `size` ranks whose device numbers are `stride` apart (the order in `mesh.py`, from nearest to furthest:
    tensor, context, data, pipeline)."""

    size: int
    stride: int = 1

    def inside(self, domain: int) -> int:
        """Return how many ranks of the axis share one domain of fast links, or one pod of the network."""
        return min(self.size, max(1, domain // self.stride))


def domain_of(cluster: ClusterSpec) -> int:
    """Return the number of devices that fast links join: the devices of a node, or of a larger domain."""
    return max(cluster.per_node, cluster.accelerator.scale_up_domain)


@dataclass(frozen=True)
class Wires:
    """Links between devices, with the rates that collectives achieve (bytes/s out of a device)."""

    domain: int
    fast: float
    slow: float
    latency: float
    hop: float
    pod: int | None = None
    """Number of devices that reach each other at the rate of their network cards; None: all devices."""
    thin: float = float("inf")
    """A device's share of the rate at which data leaves its pod."""
    torus: int = 0
    """Dimensions of the torus that the fast links form; 0: links join all devices directly."""

    @classmethod
    def of(cls, cluster: ClusterSpec, device: Device) -> "Wires":
        """Return the wires of a cluster. A network of unpublished rate counts as fast as the fast links. Fast links of unpublished rate
        count as 1 MB/s, which is nearly unusable."""
        accelerator = cluster.accelerator
        slow = (cluster.scale_out or accelerator.scale_up or 1e6) * device.slow
        return cls(
            domain=domain_of(cluster),
            fast=(accelerator.scale_up or 1e6) * device.fast,
            slow=slow,
            latency=device.latency,
            hop=device.hop,
            pod=cluster.pod,
            thin=slow / cluster.oversubscription,
            torus=accelerator.torus,
        )

    def together(self, line: Line) -> int:
        """Return how many ranks of an axis share one pod."""
        return line.size if self.pod is None else line.inside(self.pod)

    def sends(self, line: Line, cards: int) -> float:
        """Return the bytes/s between two domains, if `cards` ranks of the axis in each domain send. Between pods, all ranks of the axis
        in a pod share the pod's outgoing rate."""
        below = self.together(line)
        near = min(self.fast, cards * self.slow)
        return near if below == line.size else min(near, below * self.thin)

    def hops(self, line: Line) -> float:
        """Return the mean number of links between two ranks of an axis in one domain. On a torus, this is the sum over its dimensions of
        a quarter of the side of the block of devices that the axis occupies."""
        block = min(self.domain, line.size * line.stride)
        return max(1.0, self.torus * block ** (1 / self.torus) / 4) if self.torus else 1.0


def rate(line: Line, wires: Wires) -> float:
    """Bytes/s through a rank in a ring over the ranks of an axis.

    A ring enters and leaves each domain once. NCCL builds one ring for each of the k ranks in a domain, so k network cards
    carry the traffic, up to the rate of the fast links.
    """
    inside = line.inside(wires.domain)
    return wires.fast if inside == line.size else wires.sends(line, inside)


def ring(line: Line, wires: Wires) -> float:
    """Latency of a ring in seconds: the start of a collective, a hundredth of this start for each rank in a domain, and a hop for each
    further domain."""
    inside = line.inside(wires.domain)
    return wires.latency * (1 + 0.01 * inside) + wires.hop * (line.size / inside - 1)


def gather(size: float, line: Line, wires: Wires, *, calls: float = 1) -> float:
    """Seconds of a ring all-gather whose result has `size` bytes, or of a reduce-scatter of `size` bytes, in `calls` calls. (n-1)/n of
    the bytes pass through each rank."""
    if line.size == 1 or size == 0:
        return 0.0
    return calls * ring(line, wires) + size * (line.size - 1) / line.size / rate(line, wires)


def reduce(size: float, line: Line, wires: Wires, *, calls: float = 1) -> float:
    """Seconds of an all-reduce of `size` bytes, which takes as long as a reduce-scatter and an all-gather. With many ranks, trees need
    fewer hops."""
    if line.size == 1 or size == 0:
        return 0.0
    domains = line.size / line.inside(wires.domain)
    start = min(2 * ring(line, wires), 2 * wires.latency + 2 * wires.hop * log2(max(1.0, domains)))
    return calls * start + 2 * size * (line.size - 1) / line.size / rate(line, wires)


def all_to_all(size: float, line: Line, wires: Wires, *, copies: int = 1, reach: int | None = None) -> float:
    """Seconds of an all-to-all in which each rank sends `size` bytes evenly to all ranks. With `copies` > 1, `size` counts
    each token `copies` times, once for each of its experts, but each rank gets a token only once, and each domain gets it
    only once over the network (DeepEP). The router limits a token to `reach` domains. On a torus, each byte occupies one link
    for each hop."""
    if line.size == 1 or size == 0:
        return 0.0
    domains, pods = line.size / line.inside(wires.domain), line.size / wires.together(line)
    near, far, beyond = (size / copies * _others(places, copies) for places in (line.size, domains, pods))
    if reach is not None:
        limits = (size / copies * reach * (1 - 1 / places) for places in (domains, pods))
        far, beyond = map(min, (far, beyond), limits)
    if copies == 1:
        near, far = near - size * (line.size - line.size / domains) / line.size, size * (1 - 1 / domains)
    seconds = max(near * wires.hops(line) / wires.fast, far / wires.slow, beyond / wires.thin)
    return wires.latency + wires.hop * domains**0.5 + seconds


def _others(places: float, copies: int) -> float:
    """Mean number of places, other than the token's own, that get a token if its copies are distributed at random."""
    return (places - 1) * (1 - (1 - 1 / places) ** copies)


def message(size: float, line: Line, wires: Wires) -> float:
    """Seconds of a message from one rank of the axis to the next. On a torus, a message uses one of the two links of one dimension."""
    near = line.inside(wires.domain) == line.size
    return wires.latency + size / (wires.fast / max(1, 2 * wires.torus) if near else wires.sends(line, 1))
