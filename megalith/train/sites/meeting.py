"""How sites without a line come to one: from a checkpoint, or from the merge at which some of them wait.

A line ends when its decider is lost, or when the sites that are left form no quorum. Sites whose differences are due keep all of their
state and wait at the merge. Of the sites that wait at the latest merge, the first calls the others to a new line once a quorum has met.
The sites that wait at this merge continue from there; all others join with their weights.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megalith.fleet.secure.peers import PeerGone
from megalith.spec.sites import SitesSpec
from megalith.train.sites.messages import LINE_BYTES, Hello, MergePoint
from megalith.train.sites.roster import SiteRoster
from megalith.train.sites.wire import Wire


@dataclass(frozen=True)
class Beginning:
    """How a site takes part: from its checkpoint of a step, from the first weights (None), or anew, with the weights of the others."""

    step: int | None
    anew: bool = False


class Line(NamedTuple):
    """A line, and its decider."""

    name: str
    decider: int


class Meeting:
    """The messages of the other sites about their state, since site `site` last began to take part in a line."""

    def __init__(self, spec: SitesSpec, site: int, roll: SiteRoster) -> None:
        self._spec, self._site, self._roll = spec, site, roll
        self._hellos: dict[int, Hello] = {}

    def note(self, site: int, hello: Hello) -> None:
        """Record the state of a site."""
        self._hellos[site] = hello

    def forget(self, site: int) -> None:
        """Forget a site's messages: it was started again, or is lost."""
        self._hellos.pop(site, None)

    def clear(self) -> None:
        """Forget all messages: this site takes part in a line."""
        self._hellos.clear()

    def under_way(self) -> Line | None:
        """Return a line in which its decider takes part; None if there is no line that a site may join."""
        if self._spec.exchanges_gradients:  # it would lack the optimizer's state
            return None
        for hello in self._hellos.values():
            decider = self._hellos.get(hello.decides)
            if hello.line and hello.decides in self._roll and decider is not None and decider.line == hello.line:
                return Line(hello.line, hello.decides)
        return None

    def line_from(self, stand: MergePoint, connected: Callable[[int], bool], *, patient: bool) -> Line | None:
        """Return a line that continues from this site's merge: one that another site has begun there, or a new one if this site calls
        the others and a quorum has met. None if there is neither. `patient`: wait for all connected sites to come."""
        for site, hello in self._hellos.items():
            if hello.line and hello.decides == site and hello.stand == stand:
                return Line(hello.line, site)
        offers = self.offers(Hello(stand=stand), connected, patient=patient)
        late = any(connected(site) for site in set(range(self._spec.count)) - offers.keys())
        calls = self._spec.quorum(offers) and caller(offers) == self._site and not (patient and late)
        return Line(secrets.token_hex(LINE_BYTES), self._site) if calls else None

    def elsewhere(self, left: str, *, patient: bool) -> bool:
        """True if others continue without the sites that stand with this one. `left`: the line that this site has left, which may learn of
        that and end: as long as this site is `patient`, it does not count."""
        line = self.under_way()
        return line is not None and (line.name != left or not patient)

    def has_left(self, line: str, stand: MergePoint | None, site: int, hello: Hello) -> bool:
        """True if a site waits at a merge and no longer takes part in this site's line, which began at `stand`. A site that waits there
        and never sent a message in the line will follow."""
        if not line or hello.line or hello.stand is None:
            return False
        return hello.stand != stand or self._roll.last_word(site) > -math.inf

    def coming(self, connected: Callable[[int], bool]) -> set[int]:
        """Return the sites that will soon wait at a merge: they take part in a line whose decider was this site before it was started
        again."""
        return {site for site, one in self._hellos.items() if one.line and one.decides == self._site and connected(site)}

    def offers(self, own: Hello, connected: Callable[[int], bool], *, patient: bool) -> dict[int, Hello]:
        """Return what the sites in no line offer to begin from. `own`: this site's offer. `patient`: sites that are cut off count too,
        because they may be back in a moment."""
        found = {site: hello for site, hello in self._hellos.items() if not hello.line and (patient or connected(site))}
        return found | {self._site: own}


def caller(offers: dict[int, Hello]) -> int | None:
    """Return the first of the sites that stand furthest: it calls the others. None if no site waits at a merge."""
    stands = {site: hello.stand for site, hello in offers.items() if hello.stand is not None}
    return min((site for site, stand in stands.items() if stand == max(stands.values())), default=None)


def no_quorum(spec: SitesSpec, site: int, wire: Wire, limit: float) -> PeerGone:
    """Return the error that ends a site which has been connected to too few others for `limit` seconds."""
    need = f"more than half of the {spec.count} sites" if spec.decides is None else spec.named(spec.decides)
    away = [other for other in range(spec.count) if other != site and not wire.connected(other)]
    why = "; ".join(f"{spec.named(other)}: {wire.trouble(other)}" for other in away)
    refused = f". {wire.turned_away} connections did not prove the run's key" if wire.turned_away else ""
    return PeerGone(f"no quorum within {limit:.0f} s: {spec.named(site)} needs {need}, and is not connected to {why}{refused}")
