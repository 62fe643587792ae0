"""Counts of a simulated run: the outcome of each fault, and the reason of each restart."""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from megalith.fleet import observations
from megalith.fleet.commands import Grow, Order, RerunStep, Restart, Shrink, SkipTier, Stop, Wait
from megalith.fleet.observations import Observation
from megalith.rehearse.arrivals import Fault


class Effect(StrEnum):
    """Effect of a fault. Each fault has one effect, so the counts add up to the number of faults."""

    RESTARTED = "restarted the ranks"
    SHORT = "left the run short of nodes"
    STOPPED = "ended the run"
    TOGETHER = "ended with the restart for another fault"
    IN_PLACE = "were mended in place"
    SLOWED = "slowed it down"
    IDLE = "broke an idle node"
    UNSEEN = "were never noticed"
    OPEN = "were still open when the run ended"


class Why(StrEnum):
    """The reason why the ranks were started again. Each restart has exactly one reason, so the counts add up to the number of
    restarts."""

    FAULT = "for a fault"
    PLANNED = "planned"
    NODE = "when a node came back"
    SHRUNK = "on fewer nodes"
    GROWN = "on all nodes again"
    STARTED = "after a stop for a person"


_WHY: dict[type[Observation], Why] = {
    observations.NodeJoined: Why.NODE,
    observations.HealthChecked: Why.NODE,
    observations.Waited: Why.SHRUNK,
    observations.Started: Why.STARTED,
    observations.NodesLost: Why.STARTED,  # who starts the command again finds them gone
}
"""Map from an observation without a fault to the reason of the restart that follows it. After any observation that is not listed,
the restart was planned."""


class Tally:
    """The counts of one site.

    `stops`: how often the run waited for a person. `ended`: how often the command ended because nodes were missing (exit status
    71); an engine or a loop starts the same command again once there are nodes.
    """

    def __init__(self) -> None:
        self.fates: dict[Fault, Effect] = {}
        self.restarts: Counter[Why] = Counter()
        self.restored: Counter[str] = Counter()
        self.stops = self.ended = 0
        self._leaving: list[Fault] = []

    @property
    def causes(self) -> dict[str, int]:
        """Faults by name."""
        return dict(Counter(fault.name for fault in self.fates))

    @property
    def outcomes(self) -> dict[str, int]:
        """Faults by effect."""
        return dict(Counter(fate.value for fate in self.fates.values()))

    @property
    def reasons(self) -> dict[str, int]:
        """Restarts by reason."""
        return {why.value: number for why, number in self.restarts.items()}

    def count(self, fault: Fault) -> None:
        """Count a fault whose effect is not known yet."""
        self.fates[fault] = Effect.OPEN

    def settle(self, fault: Fault, fate: Effect, *, if_open: bool = False) -> None:
        """Set the effect of a fault. `if_open`: set the effect only if it is not known yet."""
        if not if_open or self.fates[fault] is Effect.OPEN:
            self.fates[fault] = fate

    def leaves(self, fault: Fault) -> None:
        """Record that the fault's node must leave; it leaves once the state is saved, or at an earlier restart."""
        self._leaving.append(fault)

    def left(self) -> Fault | None:
        """Return the fault that caused the save that has just finished; with several, the first."""
        return self._leaving[0] if self._leaving else None

    def decided(self, observation: Observation, orders: Iterable[Order], fault: Fault | None) -> None:
        """Count the restarts in a decision, by reason, and record how the decision deals with `fault` (None: there was no fault)."""
        for order in orders:
            match order:
                case Grow():
                    self.restarts[Why.GROWN] += 1
                    self._over(fault, Effect.TOGETHER)
                case Restart() | Shrink():
                    self.restarts[Why.FAULT if fault else _WHY.get(type(observation), Why.PLANNED)] += 1
                    self._over(fault, Effect.RESTARTED)
                case Wait():
                    self._over(fault, Effect.SHORT)
                case Stop():
                    self._over(fault, Effect.STOPPED)
                case RerunStep() | SkipTier() if fault:
                    self.settle(fault, Effect.IN_PLACE)
                case _:
                    pass

    def _over(self, fault: Fault | None, fate: Effect) -> None:
        for other in self._leaving:
            self.settle(other, Effect.TOGETHER)
        self._leaving.clear()
        if fault:
            self.settle(fault, fate)
