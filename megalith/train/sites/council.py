"""The agreement of the ranks that lead sites: which merges are made, by whom and with whom.

One site is the decider. At a merge it waits for the differences of all sites that train, but no longer than a grace, and sends its verdict
to all. A verdict needs a quorum: more than half of the run's sites, or those with the site that the run file names. The sites that count
are the decider, those whose differences came, and those that only follow its merges. A follower must have sent a message since the merge
was due, because a connection seems whole for a while after it was cut. Each start of a site's ranks takes part in a single line, and tells
its decider so. So of two halves that cannot see each other, at most one makes merges: no site takes part in both, and two quorums always
share a site. If a line has no quorum or loses its decider, the sites whose differences are due wait at the merge and meet the others
there (`meeting`). Other sites end; started again, they join with the others' weights, or begin from a checkpoint (`Council.begin`).
"""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from megalith.fleet.secure.peers import News, PeerGone
from megalith.spec.sites import SitesSpec
from megalith.train.sites import messages
from megalith.train.sites.cuts import called
from megalith.train.sites.differences import SAME, Differences, OutOfStepError
from megalith.train.sites.meeting import Beginning, Meeting, caller, no_quorum
from megalith.train.sites.messages import LINE_BYTES, Cut, Difference, Held, Hello, Message, Ready, Stand, Start, Told, Verdict
from megalith.train.sites.pace import Pace
from megalith.train.sites.pending import Pending, are
from megalith.train.sites.roll import Roll
from megalith.train.sites.wire import Wire

TURN_SECONDS = 0.25  # between looks at the clock while no message comes
SPEAK_SECONDS = 0.5  # between words of a site to the one that decides
JOINING = -1  # in place of a merge's number: a site waits for the weights of the others


class Council:
    """The view that the leader of site `site` has of the others."""

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
    ) -> None:
        """`wire`: None where there is one site. `patience`: seconds that a merge waits for a site without which no quorum is left, and that
        a site which has ended stays at most, so that the others get its last messages. `start`: seconds that a site may take for its first
        round; after a quarter of them a quorum begins alone. `limit`: seconds to wait for it. `beat`: called several times a second."""
        self.spec, self.site, self._wire = spec, site, wire
        self._patience, self._start_seconds, self._limit, self._beat = patience, start, limit, beat
        self._since: float | None = None  # when this site began to wait for the others
        self.line, self.decider = "", site
        self._cuts: Sequence[Cut] = ()
        self._roll = Roll(site)
        self._meeting = Meeting(spec, site, self._roll)
        self._stand: Stand | None = None  # the merge at which the line began; without a line, the merge at which this site waits
        self._gone: tuple[str, PeerGone] | None = None  # the line that this site left to stand there, and why
        self._start: tuple[int, Start] | None = None
        self._differences = Differences(site, kept=2 if spec.exchanges_gradients else 1)  # who decides may be a step ahead
        self._verdicts: dict[tuple[str, int], Verdict] = {}
        self._given: deque[Verdict] = deque(maxlen=2 * spec.fragments + 2)  # as the site that decides
        self._told: Told | None = None
        self._held: dict[int, Held] = {}
        self._asks: Hello | Ready | None = None  # what this site asks of the decider
        self._asking: set[int] = set()
        self._ready: set[int] = set()
        self._due: int | None = None  # the number of the merge that waits for its verdict
        self._due_at = 0.0  # when it became due here
        self._due_since = 0.0  # the same, or when the line was entered in which it is decided
        self._decided_at = 0.0  # when the newest verdict was there
        self._said = 0.0  # when this site last sent a sign of life
        self.pace = Pace(start, spec.grace)
        self._leaving_since: float | None = None
        self._lost_since: float | None = None  # the connection to the site that decides

    @property
    def decides(self) -> bool:
        """True if this site decides."""
        return self.decider == self.site

    def quorum(self, sites: Collection[int]) -> bool:
        """True if these sites may merge without the others."""
        return self.spec.quorum(sites)

    # --- beginning ---

    def begin(self, cuts: Sequence[Cut], seconds: float) -> Beginning | None:
        """Meet the others, and agree with them where to begin; None if `seconds` were not enough and the caller must call again. `cuts`:
        this site's checkpoints. Raises PeerGone where too few come for the limit."""
        self._cuts = cuts
        if self._wire is None:
            return self._begun(Start("", max(cuts, default=None)), self.site)
        began, all_here = time.monotonic(), set(range(self.spec.count))
        self._since = began if self._since is None else self._since
        while time.monotonic() - began < seconds:
            self._hear(TURN_SECONDS)
            fresh = self._start is not None and self._start[1].line not in {line for line, _ in self._verdicts}  # no merge yet
            if not fresh and (under_way := self._meeting.under_way()) is not None:
                self._follow(*under_way)
                self.ask()
                return Beginning(None, anew=True)
            if self._start is not None:
                return self._begun(self._start[1], self._start[0])
            # A site that lost the decider of its line comes again once it knows.
            patient = time.monotonic() - self._since < self._start_seconds / 4
            offers = self._meeting.offers(Hello(cuts=tuple(cuts)), self._wire.connected, patient=patient)
            if caller(offers) is not None or self._meeting.coming(self._wire.connected):
                continue  # sites that wait at a merge have newer state than any checkpoint
            if offers.keys() == all_here or (not patient and self.quorum(offers)):
                cut, calls = called({site: hello.cuts for site, hello in offers.items()}, self.spec)
                if calls == self.site:
                    start = Start(secrets.token_hex(LINE_BYTES), cut)
                    self._post(start)
                    return self._begun(start, self.site)
        if time.monotonic() - self._since < self._limit:
            return None
        raise no_quorum(self.spec, self.site, self._wire, self._limit)

    def _begun(self, start: Start, decider: int) -> Beginning:
        self._follow(start.line, decider)
        self._roll.begin()
        if start.cut is None or start.cut in self._cuts:
            return Beginning(None if start.cut is None else start.cut.step)
        self.ask()
        return Beginning(None, anew=True)

    def _follow(self, line: str, decider: int, stand: Stand | None = None) -> None:
        self.line, self.decider, self._stand = line, decider, stand
        self._start, self._lost_since = None, None
        self._given.clear()
        self._meeting.clear()
        self._differences.enter(line)

    def ask(self) -> None:
        """Ask the site that decides for the weights of the others."""
        self._asks = Hello(self.line, self.decider, asks=True)
        self._post(self._asks, to=self.decider)

    # --- a merge ---

    def post(self, difference: Difference) -> None:
        """Send this site's difference to all others."""
        self._post(self._differences.send(difference, self.line))

    def decide(
        self,
        number: int,
        fragment: int,
        sent: int,
        step: int,
        *,
        members: Mapping[int, int],
        mark: str = "",
        seconds: float = math.inf,
    ) -> Verdict | None:
        """Return the verdict about the merge of a fragment after `step` steps, of differences that were taken after `sent` steps: this
        site's own if it is the decider, else the verdict that it receives. None if `seconds` were not enough and the caller must call
        again. `members`: as in a `Deal`. `mark`: the digest of all merges before it. Raises PeerGone, and OutOfStepError."""
        began = time.monotonic()
        if self._due != number:
            self._due, self._due_at, self._due_since = number, began, began
        self._hear(0.0)  # a site connected since the last merge may lack messages of this site
        merge = Pending(number, fragment, sent, step, members, mark)
        while (verdict := self._verdict(merge)) is None:
            if time.monotonic() - began >= seconds:
                return None
            self._hear(TURN_SECONDS)
        self._due, self._decided_at = None, time.monotonic()
        self.pace.merged(fragment, due=self._due_at, now=self._decided_at)
        self._asks = None if self.site in verdict.joined else self._asks
        return verdict

    def _verdict(self, merge: Pending) -> Verdict | None:
        """Return the verdict about a merge; None if there is none yet. If there can be none in this line, meet the others for another."""
        if self._gone is not None:
            self._meet_again(*self._gone)
            return None
        try:
            return self._decided(merge) if self.decides else self._awaited(merge)
        except PeerGone as gone:
            if not self._may_stand(merge):
                raise
            self._leave(Stand(merge.number, merge.step, merge.mark), gone)
            return None

    def _may_stand(self, merge: Pending) -> bool:
        """True if a merge lacks only this site's difference: a site that does not train loses nothing by joining anew."""
        return self.site in merge.due

    def _leave(self, stand: Stand, gone: PeerGone) -> None:
        """Leave the line, and tell the others at which merge this site waits."""
        self._gone, self._since = (self.line, gone), time.monotonic()
        self._meeting.forget(self.decider)  # its messages from here on show that it is there
        self.line, self.decider, self._stand, self._start = "", self.site, stand, None
        self._post(Hello(stand=stand))

    def _meet_again(self, left: str, gone: PeerGone) -> None:
        """Take part in a line that begins at this site's merge: another site's line, or its own once a quorum has met. Raises
        `gone` if the others continue elsewhere, or too few come for the limit."""
        assert self._wire is not None and self._stand is not None and self._since is not None
        waited = time.monotonic() - self._since
        patient = waited < self.pace.grace
        if (line := self._meeting.line_from(self._stand, self._wire.connected, patient=patient)) is not None:
            self._go_on(*line)
        elif waited >= self._limit or self._meeting.elsewhere(left, patient=patient):
            raise gone

    def _go_on(self, line: str, decider: int) -> None:
        """Take part in a line from this site's merge on, and send it the differences that were not merged yet."""
        self._follow(line, decider, self._stand)
        self._roll.begin()
        self._asking.clear()
        self._ready.clear()
        self._gone, self._due_since, self._said = None, time.monotonic(), 0.0
        for difference in self._differences.under_way():
            self.post(difference)

    def _decided(self, merge: Pending) -> Verdict | None:
        """Decide from the messages of the others, and tell them the verdict; None if it is not time for that."""
        got = merge.due & self._there(merge.fragment, merge.sent).keys()
        verdict = self._judged(merge._replace(got=got, waited=time.monotonic() - self._due_since))
        if verdict is None:
            return None
        self._given.append(verdict := replace(verdict, line=self.line))
        self._ready -= set(verdict.joined)
        if len(self._given) == self._given.maxlen:
            self._stand = None  # a site still waiting where the line began would soon no longer get the verdict due there
        self._post(verdict)
        return verdict

    def _judged(self, merge: Pending) -> Verdict | None:
        """Return the verdict, if it is time for one."""
        (number, fragment, sent, step, members, _, got, waited), due = merge, merge.due
        may_come = {site for site in due - got if self._roll.takes_part(site)}
        if may_come and waited < self.pace.grace:
            return None
        here = got | self._roll.present(self._due_since)
        if not self.quorum(here) or (due and not got):
            hoped = here | may_come | {site for site in self._roll.followers() if self._is_near(site, waited)}
            if not self.quorum(hoped) or (due and not got | may_come) or waited >= self._patience:
                away = (set(range(self.spec.count)) - here) | (due - got)
                raise PeerGone(f"{are(away)} away, and the others do not form a quorum: waited {waited:.0f} s at step {step}")
            return None
        left = (due - got) | {site for site in members if site != self.site and not self._roll.takes_part(site)}
        leaving = {site for site, one in self._there(fragment, sent).items() if site in got and one.stop}
        stop = bool(leaving) and (self.site in leaving or not (got - leaving and self.quorum(here - leaving)))
        left |= set() if stop else leaving
        joined = {site for site in self._ready - members.keys() if self._roll.takes_part(site)}
        sets = [tuple(sorted(each)) for each in (got, left, joined)]
        return Verdict(number, fragment, sent, step, *sets, count=self.spec.count, stop=stop)

    def _is_near(self, site: int, waited: float) -> bool:
        """True if a site is connected, or may be again within the grace."""
        assert self._wire is not None
        return waited < self.pace.grace or self._wire.connected(site)

    def _awaited(self, merge: Pending) -> Verdict | None:
        """Return the verdict of the site that decides; None if it has not come."""
        number, fragment, sent, step = merge[:4]
        verdict = self._verdicts.pop((self.line, number), None)
        if verdict is None:
            missed = any(line == self.line and later > number for line, later in self._verdicts)
            self._need_decider(self._due_since, step, missed=missed)
            return None
        if (verdict.fragment, verdict.sent, verdict.step) != (fragment, sent, step):
            raise OutOfStepError(
                f"site {self.decider} merges fragment {verdict.fragment} of step {verdict.sent} at step {verdict.step}, and site "
                f"{self.site} fragment {fragment} of step {sent} at step {step}. {SAME}"
            )
        return verdict

    def _need_decider(self, began: float, step: int, *, missed: bool = False) -> None:
        """Raise PeerGone if the site that decides was started again, has been cut off for a grace, or silent for the patience. It may
        compute or wait for longer than that: it speaks after each step. `missed`: later verdicts came, and the due one did not."""
        assert self._wire is not None
        now = time.monotonic()
        connected = self._wire.connected(self.decider) and not missed
        self._lost_since = None if connected else now if self._lost_since is None else self._lost_since
        lost = self._lost_since is not None and now - self._lost_since >= self.pace.grace
        silent = now - max(began, self._roll.last_word(self.decider))
        if lost or not self._roll.takes_part(self.decider) or silent >= self._patience:
            what = "has made later merges than the one that is due here" if missed else "is away"
            raise PeerGone(f"site {self.decider}, which decides, {what}: waited {now - began:.0f} s at step {step}")

    def gather(self, verdict: Verdict, seconds: float) -> bool:
        """Wait for the differences that a verdict merges; True once they are there, False if `seconds` were not enough and the caller
        must call again. Raises PeerGone if one does not come within the grace."""
        began = time.monotonic()
        while missing := set(verdict.merged) - self._there(verdict.fragment, verdict.sent).keys():
            if time.monotonic() - self._decided_at >= self.pace.grace:
                raise PeerGone(
                    f"{are(missing)} away from site {self.site}, and the others have merged the differences sent after step {verdict.sent}"
                )
            if time.monotonic() - began >= seconds:
                return False
            self._hear(TURN_SECONDS)
        return True

    def differences(self, verdict: Verdict, *, bytes_each: int) -> list[Difference]:
        """Return the differences that a verdict merges, in the order of the sites. Raises as `gather`, and OutOfStepError."""
        self.gather(verdict, math.inf)
        return self._differences.take(verdict, self.line, bytes_each=bytes_each)

    def _there(self, fragment: int, sent: int) -> dict[int, Difference]:
        return self._differences.there(self.line, fragment, sent)

    # --- taking part anew ---

    def asking(self, members: Collection[int]) -> list[int]:
        """Return the sites that ask for the weights, each once; only where this site decides. One of `members` must have left first."""
        found = sorted(self._asking - set(members)) if self.decides else []
        self._asking -= set(found)
        return found

    def tell(self, sites: Sequence[int], message: Told | Held) -> None:
        """Send the requested data."""
        for site in sites:
            self._post(message, to=site)

    def told(self, seconds: float) -> Told | None:
        """Return the data for a joining site, once they have arrived with the weights of all fragments; None if `seconds` were not
        enough and the caller must call again. Raises PeerGone if the decider is lost."""
        began = time.monotonic()
        self._due, self._due_since = JOINING, self._due_since if self._due == JOINING else began
        self._roll.expect(self.decider)
        while self._told is None or len(self._held) < self.spec.fragments:
            if time.monotonic() - began >= seconds:
                return None
            self._hear(TURN_SECONDS)
            self._need_decider(self._due_since, 0)
        found, self._told, self._due = self._told, None, None
        self._verdicts = {key: one for key, one in self._verdicts.items() if key[0] == self.line and key[1] >= found.number}
        return found

    def held(self, fragment: int) -> Held:
        """Return the weights of a fragment that `told` has announced."""
        return self._held.pop(fragment)

    def say_ready(self) -> None:
        """Say that this site has all merges so far, and can train."""
        self._asks = Ready(self.line)
        if self.decides:
            self._ready.add(self.site)
        else:
            self._post(self._asks, to=self.decider)

    @property
    def turned_away(self) -> int:
        """Connections that did not prove the run's key."""
        return self._wire.turned_away if self._wire is not None else 0

    def close(self, seconds: float) -> bool:
        """End the connections; True once the others have what this site has sent, or the patience is over. False if `seconds` were not
        enough, and the call is to be made again."""
        if self._wire is None:
            return True
        began = time.monotonic()
        self._leaving_since = began if self._leaving_since is None else self._leaving_since
        while not self._wire.close(seconds=TURN_SECONDS):
            self._beat()
            now = time.monotonic()
            if now - self._leaving_since >= self._patience:
                return True
            if now - began >= seconds:
                return False
        return True

    def listen(self) -> None:
        """Process the received messages, and answer newly connected sites. Returns at once."""
        self._hear(0.0)

    # --- received messages ---

    def _post(self, message: Message, to: int | None = None) -> None:
        if self._wire is not None:
            self._wire.send(message.pack(), to)

    def _hear(self, seconds: float) -> None:
        """Handle the messages that have come, or the first that comes within `seconds`."""
        self._beat()
        if self._wire is None:
            return
        self._speak()
        news = self._wire.next(seconds)
        while news is not None:
            self._take(news)
            news = self._wire.next(0.0)

    def _speak(self) -> None:
        """From time to time tell the decider that this site is there and takes part in the same line; the decider tells all sites."""
        now = time.monotonic()
        if self.line and now - self._said >= SPEAK_SECONDS:
            self._said = now
            self._post(Hello(self.line, self.decider, stand=self._stand), to=None if self.decides else self.decider)

    def _take(self, news: News) -> None:
        site, start, data = news
        if data is None:
            if self._roll.came(site, start):
                self._meeting.forget(site)
                self._start = None if self._start is not None and self._start[0] == site else self._start
                self._asking.discard(site)
                self._ready.discard(site)
            self._greet(site)
        elif self._roll.is_newest(site, start):
            message = messages.unpack(data)
            self._note(site, message)
            if self.line and getattr(message, "line", "") == self.line:
                self._roll.spoke(site)

    def _greet(self, site: int) -> None:
        """Tell a newly connected site the state of this one, and send again the messages that a broken connection may
        have lost."""
        self._post(Hello(self.line, self.decider if self.line else -1, cuts=tuple(self._cuts), stand=self._stand), to=site)
        for difference in self._differences.own:
            self._post(difference, to=site)
        for verdict in self._given:
            self._post(verdict, to=site)
        if self._asks is not None and site == self.decider:
            self._post(self._asks, to=site)

    def _note(self, site: int, message: Message) -> None:
        match message:
            case Hello():
                self._meeting.note(site, message)
                if self._meeting.has_left(self.line, self._stand, site, message):
                    self._roll.leave(site)
                if message.asks and message.line == self.line:
                    self._asking.add(site)
                    self._roll.leave(site)  # until it has all merges, nobody waits for it
            case Start() if not self.line:
                self._start = self._start or (site, message)
            case Difference():
                self._differences.note(site, message)
            case Verdict():
                self._verdicts[message.line, message.number] = message
            case Told() if message.line == self.line and site == self.decider:
                self._told = message
                self._held.clear()
            case Held() if site == self.decider:
                self._held[message.fragment] = message
            case Ready() if message.line == self.line:
                self._ready.add(site)
                self._roll.join(site)
            case _:  # of a line that is over
                pass
