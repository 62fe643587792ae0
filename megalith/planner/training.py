"""Cost of a whole training with a plan: days, device hours, dollars and energy."""

from dataclasses import dataclass

from megalith.planner.search import Candidate
from megalith.spec.cluster import ClusterSpec

IDLE_POWER = 1.35
"""Power of a data centre, including hosts, network and cooling, divided by the power of its devices alone."""


@dataclass(frozen=True)
class Training:
    """Cost of a whole training."""

    tokens: float
    steps: int
    days: float
    device_hours: float
    dollars: float | None
    """None if no price is known."""
    megawatt_hours: float | None
    flops: float
    """Model FLOPs of the training, with attention in full."""


def training(choice: Candidate, cluster: ClusterSpec, *, tokens: float) -> Training:
    """Return the cost of a training on this number of tokens."""
    steps = -(-int(tokens) // choice.estimate.tokens)
    seconds = steps * choice.estimate.time.step
    hours = seconds / 3600 * cluster.count
    price, power = cluster.price_per_hour, cluster.accelerator.power
    return Training(
        tokens=tokens,
        steps=steps,
        days=seconds / 86_400,
        device_hours=hours,
        dollars=None if price is None else hours * price,
        megawatt_hours=None if power is None else hours * power * IDLE_POWER / 1e6,
        flops=steps * choice.estimate.flops,
    )
