"""Sends and receives messages on a site's leading rank, and keeps records of the received messages."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megalith.fleet.secure.peers import News, PeerGone
from megalith.spec.sites import SitesSpec
from megalith.spec.sites.terms import unequal
from megalith.train.sites import messages
from megalith.train.sites.differences import Differences
from megalith.train.sites.joining import Joining
from megalith.train.sites.leaving import Leaving
from megalith.train.sites.meeting import Meeting, UnequalSitesError
from megalith.train.sites.messages import (
    CheckpointOffer,
    Difference,
    End,
    FragmentValues,
    Hello,
    JoinReply,
    MergePoint,
    MergeRecord,
    Message,
    Ready,
    Start,
    Verdict,
)
from megalith.train.sites.pace import Pace
from megalith.train.sites.roster import SiteRoster
from megalith.train.sites.verdicts import Verdicts
from megalith.train.sites.wire import Wire

KEEPALIVE_SECONDS = 0.5  # between words of a site to the one that decides
FAREWELL_SECONDS = 5.0  # that a site which is refused waits until the others have its last messages


class SiteMessenger:
    """Sends and receives the messages of site `site`, and holds the line of merges in which the site takes part."""

    def __init__(
        self,
        spec: SitesSpec,
        site: int,
        wire: Wire | None,
        *,
        patience: float,
        start: float,
        limit: float,
        beat: Callable[[], object] = lambda: None,
        terms: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`wire` is None if the run has only one site. `patience`: seconds for which a merge waits for a site that the quorum needs, and
        for which a finished site stays at most until the others have received its messages. `start`: seconds that a site may take for its
        first round; a quorum that has met waits a quarter of this for further sites. `limit`: seconds to wait for a quorum. `beat` is
        called several times a second. `terms`: what must be equal on all sites (`spec.sites.terms`)."""
        self.spec, self.site, self._wire = spec, site, wire
        self._patience, self._start_seconds, self._limit, self._beat = patience, start, limit, beat
        self._terms, self._has_begun = dict(terms), False
        self._since: float | None = None  # when this site began to wait for the others
        self.line, self.decider = "", site
        self._known: tuple[str, ...] = ()  # marks of merges that this site's log has
        self._cuts: Sequence[CheckpointOffer] = ()
        self._roll = SiteRoster(site)
        self._meeting = Meeting(spec, site, self._roll)
        self._stand: MergePoint | None = (
            None  # the merge at which the line began; without a line, the merge at which this site waits
        )
        self._gone: tuple[str, PeerGone] | None = None  # the line that this site left to stand there, and why
        self._start: tuple[int, Start] | None = None
        kept = 2 if spec.exchanges_gradients else 1 + spec.staleness  # who decides may be a step ahead
        self._differences = Differences(site, kept=kept, late=spec.staleness, named=spec.named)
        self._waiting: Mapping[int, Sequence[int]] = {}  # of the newest merge with a verdict, as in `Pending`
        self._verdicts = Verdicts(kept=(2 + spec.staleness) * spec.fragments + 2, named=spec.named)
        self._joining, self._leaving = Joining(spec.fragments), Leaving(site)
        self._due: int | None = None  # the number of the merge that waits for its verdict
        self._due_at = 0.0  # when it became due here
        self._due_since = 0.0  # the same, or when the line was entered in which it is decided
        self._decided_at = 0.0  # when the newest verdict was there
        self._said = 0.0  # when this site last sent a sign of life
        self.pace = Pace(start, spec.grace)
        self._lost_since: float | None = None  # the connection to the site that decides

    @property
    def decides(self) -> bool:
        """True if this site is the decider."""
        return self.decider == self.site

    def _follow(self, line: str, decider: int, stand: MergePoint | None = None) -> None:
        self.line, self.decider, self._stand, self._has_begun = line, decider, stand, True
        self._start, self._lost_since = None, None
        self._verdicts.given.clear()
        self._meeting.clear()
        self._differences.enter(line)

    def ask(self) -> None:
        """Ask the decider for the merged weights."""
        self._joining.asks = Hello(self.line, self.decider, asks=True, known=self._known)
        self._post(self._joining.asks, to=self.decider)

    def asking(self, members: Collection[int]) -> list[int]:
        """If this site is the decider, return the sites that ask for the weights and are not among `members`, and forget their requests."""
        return self._joining.take(members) if self.decides else []

    def known_by(self, site: int) -> tuple[str, ...]:
        """Return the marks of merges that the log of a site has, as it said when it asked for the weights."""
        return self._joining.known.get(site, ())

    def send(self, sites: Sequence[int], message: MergeRecord | JoinReply | FragmentValues) -> None:
        """Send the record of merges, a reply or weights to the joining sites `sites`."""
        for site in sites:
            self._post(message, to=site)

    def fragment_values(self, fragment: int) -> FragmentValues:
        """Return the received weights of a fragment."""
        return self._joining.fragment_values(fragment)

    def take_record(self) -> MergeRecord | None:
        """Return the record of the merges that this joining site lacks, and forget it."""
        return self._joining.take_record()

    def send_ready(self) -> None:
        """Announce that this site has the weights of all merges so far, and can train."""
        self._joining.asks = Ready(self.line)
        if self.decides:
            self._joining.ready.add(self.site)
        else:
            self._post(self._joining.asks, to=self.decider)

    @property
    def turned_away(self) -> int:
        """The number of connections refused because they did not prove possession of the run's key."""
        return self._wire.turned_away if self._wire is not None else 0

    def close(self, seconds: float) -> bool:
        """Close the connections. Return True once the others have received all messages, or when `patience` is over; False if `seconds`
        were not enough, so that the caller must call again."""
        if self._wire is None:
            return True
        return self._leaving.close(self._wire, seconds, patience=self._patience, beat=self._beat)

    def listen(self) -> None:
        """Process the received messages and answer newly connected sites, without waiting."""
        self._receive(0.0)

    # --- received messages ---

    def _post(self, message: Message, to: int | None = None) -> None:
        if self._wire is not None:
            self._wire.send(message.pack(), to, beside=isinstance(message, MergeRecord))

    def _receive(self, seconds: float) -> None:
        self._beat()
        if self._wire is None:
            return
        self._send_keepalive()
        news = self._wire.next(seconds)
        while news is not None:
            self._take(news)
            news = self._wire.next(0.0)

    def _send_keepalive(self) -> None:
        """At intervals, tell the decider that this site is alive and takes part in its line of merges. A site that is the decider tells all
        sites."""
        now = time.monotonic()
        if self.line and now - self._said >= KEEPALIVE_SECONDS:
            self._said = now
            self._post(Hello(self.line, self.decider, stand=self._stand), to=None if self.decides else self.decider)

    def _take(self, news: News) -> None:
        site, start, data = news
        if data is None:
            if self._roll.came(site, start):
                self._meeting.forget(site)
                self._start = None if self._start is not None and self._start[0] == site else self._start
                self._joining.forget(site)
            self._greet(site)
        elif self._roll.is_newest(site, start):
            message = messages.unpack(data)
            self._note(site, message)
            if self.line and getattr(message, "line", "") == self.line:
                self._roll.spoke(site)

    def _greet(self, site: int) -> None:
        """Send this site's state to a newly connected site, and send again the messages that a broken connection may have lost."""
        decides, cuts = self.decider if self.line else -1, tuple(self._cuts)
        self._post(Hello(self.line, decides, cuts=cuts, stand=self._stand, terms=self._terms), to=site)
        for difference in self._differences.own:
            self._post(difference, to=site)
        for verdict in self._verdicts.given:
            self._post(verdict, to=site)
        if self._leaving.own is not None:
            self._post(self._leaving.own, to=site)
        if self._joining.asks is not None and site == self.decider:
            self._post(self._joining.asks, to=site)

    def _note(self, site: int, message: Message) -> None:
        match message:
            case Hello() if self._is_of_another_run(site, message):
                pass
            case Hello():
                self._meeting.note(site, message)
                if self._meeting.has_left(self.line, self._stand, site, message):
                    self._roll.leave(site)
                if message.asks and message.line == self.line:
                    self._joining.asking.add(site)
                    self._joining.known[site] = message.known
                    self._roll.leave(site)  # until it has all merges, nobody waits for it
            case Start() if not self.line:
                self._start = self._start or (site, message)
            case Difference():
                self._differences.note(site, message)
            case Verdict():
                self._verdicts.note(message)
            case MergeRecord() | JoinReply() if message.line == self.line and site == self.decider:
                self._joining.note(message)
            case FragmentValues() if site == self.decider:
                self._joining.note(message)
            case Ready() if message.line == self.line:
                self._joining.ready.add(site)
                self._roll.join(site)
            case End():
                self._leaving.note(site, message)
            case _:  # of a line that is over
                pass

    def _is_of_another_run(self, site: int, hello: Hello) -> bool:
        """Return True if a site trains another run than this one, so that its message does not count: it gets this site's terms too, and
        ends. Raises UnequalSitesError if this site has not begun either, because then nobody knows which of the two is wrong."""
        if hello.terms is None or not (text := unequal(self._terms, hello.terms, *map(self.spec.named, (self.site, site)))):
            return False
        if not self._has_begun and self._meeting.under_way() is None:
            assert self._wire is not None
            self._wire.close(seconds=FAREWELL_SECONDS)  # the other site must get this site's terms before this rank ends
            raise UnequalSitesError(text)
        return True
