"""How sites begin a line (a sequence of merges under one decider): from a checkpoint, or from the merge at which some of the sites wait.

A line ends when its decider is lost, or when its remaining sites form no quorum. When a line ends, the sites whose weight differences are
due keep all of their state and wait at the merge. Once a quorum has met, the lowest-numbered of the
sites that wait at the latest merge becomes the decider of a new line of merges. The sites that wait at the latest merge continue from it;
all other sites join with these sites' weights.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.secure.peers import PeerGone
from megalith.spec.sites import SitesSpec
from megalith.train.sites.messages import LINE_BYTES, Hello, MergePoint
from megalith.train.sites.roster import SiteRoster
from megalith.train.sites.wire import Wire


class UnequalSitesError(RuntimeError):
    """The commands of two sites do not train the same run."""

    exit_code = ExitCode.BAD_SPECIFICATION


@dataclass(frozen=True)
class Beginning:
    """How a site begins: from its checkpoint of step `step`, from the initial weights (`step` None), or, if `anew`, with the other sites'
    weights."""

    step: int | None
    anew: bool = False


class Line(NamedTuple):
    """A sequence of merges under one decider: its name, and the decider."""

    name: str
    decider: int


class Meeting:
    """The other sites' messages about their state, received since site `site` last joined a line of merges."""

    def __init__(self, spec: SitesSpec, site: int, roll: SiteRoster) -> None:
        self._spec, self._site, self._roll = spec, site, roll
        self._hellos: dict[int, Hello] = {}

    def note(self, site: int, hello: Hello) -> None:
        """Record the state of a site."""
        self._hellos[site] = hello

    def forget(self, site: int) -> None:
        """Forget a site's state, because the site was restarted or is lost."""
        self._hellos.pop(site, None)

    def clear(self) -> None:
        """Forget all states, because this site now takes part in a line of merges."""
        self._hellos.clear()

    def under_way(self) -> Line | None:
        """Return a line of merges that a site may join, one whose decider takes part in it; None if there is no such line."""
        if self._spec.exchanges_gradients:  # it would lack the optimizer's state
            return None
        for hello in self._hellos.values():
            decider = self._hellos.get(hello.decides)
            if hello.line and hello.decides in self._roll and decider is not None and decider.line == hello.line:
                return Line(hello.line, hello.decides)
        return None

    def line_from(self, stand: MergePoint, connected: Callable[[int], bool], *, patient: bool) -> Line | None:
        """Return a line of merges that continues from the merge where this site waits: one that another site has begun there, or a new one
        if this site must begin it and a quorum has met; else None. `patient`: wait until all connected sites have met."""
        for site, hello in self._hellos.items():
            if hello.line and hello.decides == site and hello.stand == stand:
                return Line(hello.line, site)
        offers = self.offers(Hello(stand=stand), connected, patient=patient)
        late = any(connected(site) for site in set(range(self._spec.count)) - offers.keys())
        calls = self._spec.quorum(offers) and caller(offers) == self._site and not (patient and late)
        return Line(secrets.token_hex(LINE_BYTES), self._site) if calls else None

    def elsewhere(self, left: str, *, patient: bool) -> bool:
        """True if other sites continue in a line of merges without those that wait at this site's merge. `left`: the line that this site
        has left. If `patient`, the line `left` does not count, because it may end once its sites learn that this site has left."""
        line = self.under_way()
        return line is not None and (line.name != left or not patient)

    def has_left(self, line: str, stand: MergePoint | None, site: int, hello: Hello) -> bool:
        """True if a site waits at a merge and no longer takes part in this site's line of merges, which began at `stand`. A site that waits
        at `stand` and has sent no message in the line yet will still join it."""
        if not line or hello.line or hello.stand is None:
            return False
        return hello.stand != stand or self._roll.last_word(site) > -math.inf

    def coming(self, connected: Callable[[int], bool]) -> set[int]:
        """Return the sites that will soon wait at a merge, because this site was their decider and was restarted."""
        return {site for site, one in self._hellos.items() if one.line and one.decides == self._site and connected(site)}

    def offers(self, own: Hello, connected: Callable[[int], bool], *, patient: bool) -> dict[int, Hello]:
        """Return the states from which sites that take part in no line of merges offer to begin. `own`: this site's offer. `patient`:
        disconnected sites count too, because they may reconnect soon."""
        found = {site: hello for site, hello in self._hellos.items() if not hello.line and (patient or connected(site))}
        return found | {self._site: own}


def caller(offers: dict[int, Hello]) -> int | None:
    """Return the site that begins a new line of merges: the first of those that wait at the latest merge. None if no site waits at a
    merge."""
    stands = {site: hello.stand for site, hello in offers.items() if hello.stand is not None}
    return min((site for site, stand in stands.items() if stand == max(stands.values())), default=None)


def no_quorum(spec: SitesSpec, site: int, wire: Wire, limit: float) -> PeerGone:
    """Return the error that ends a site if it is connected to too few other sites after `limit` seconds."""
    need = f"more than half of the {spec.count} sites" if spec.decides is None else spec.named(spec.decides)
    away = [other for other in range(spec.count) if other != site and not wire.connected(other)]
    why = "; ".join(f"{spec.named(other)}: {wire.trouble(other)}" for other in away)
    refused = f". {wire.turned_away} connections without the run's key were refused" if wire.turned_away else ""
    return PeerGone(f"no quorum within {limit:.0f} s: {spec.named(site)} needs {need}, and is not connected to {why}{refused}")
