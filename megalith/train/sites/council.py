"""How the leading ranks of sites agree on merges: which merges are made, which site decides them, and which sites take part.

One site is the decider. At a merge, the decider waits for the weight differences of all sites that train, but no longer than a grace
period, and sends its verdict to all sites. With asynchronous merges, the decider waits only for the differences of a quorum, and for sites
whose differences have missed the allowed number of merges. A verdict needs a quorum: more than half of the run's sites, or a group that
includes the site named in the run file. The quorum counts the decider, the sites whose differences arrived, and the sites that only follow
the decider's merges. A site that only follows is counted if it has sent a message since the merge was due, because a cut connection looks
intact for a while. The merges under one decider form a sequence, called a line. A site takes part in only one line at a time. If a network
failure splits the sites, at most one half makes merges, because no site takes part in two lines at once and two quorums always share a
site. If a line has no quorum or loses its decider, the sites whose differences are due wait at the merge for the other sites (`meeting`).
Sites whose differences are not due exit; when restarted, they join with the others' weights, or begin from a checkpoint (`Council.begin`).
"""

import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import TypeVar

from megalith.fleet.secure.peers import PeerGone
from megalith.train.sites.checkpoint_offers import called
from megalith.train.sites.leaving import TURN_SECONDS
from megalith.train.sites.meeting import Beginning, caller, no_quorum
from megalith.train.sites.messages import (
    LINE_BYTES,
    CheckpointOffer,
    Difference,
    End,
    Hello,
    JoinReply,
    MergePoint,
    Start,
    Verdict,
)
from megalith.train.sites.messenger import SiteMessenger
from megalith.train.sites.pending import Pending, are

T = TypeVar("T")
JOINING = -1  # in place of a merge's number: a site waits for the weights of the others


class Council(SiteMessenger):
    """Agrees with the other sites on merges, on the leading rank of site `site`."""

    def quorum(self, sites: Collection[int]) -> bool:
        """True if these sites may merge without the others."""
        return self.spec.quorum(sites)

    # --- beginning ---

    def begin(self, cuts: Sequence[CheckpointOffer], seconds: float, *, known: tuple[str, ...] = ()) -> Beginning | None:
        """Meet the other sites, and agree with them on the state from which to begin; return None if `seconds` were not enough, so that the
        caller must call again. `cuts`: this site's checkpoints. `known`: marks of merges that its log has (`handover.known_marks`). A site
        that has a checkpoint of the end of the run behaves like a site that waits at a merge. Raises PeerGone if too few sites connect in
        time."""
        self._cuts, self._known, newest = cuts, known, max(cuts, default=None)
        end = newest if newest is not None and newest.ended and not self.spec.exchanges_gradients else None
        if self._wire is None:
            return self._begun(Start("", max(cuts, default=None)), self.site)
        began, all_here = time.monotonic(), set(range(self.spec.count))
        self._since, self._stand = self._since or began, end.merge_point if end is not None else None
        while time.monotonic() - began < seconds:
            self._receive(TURN_SECONDS)
            # A site that lost the decider of its line comes again once it knows.
            patient = time.monotonic() - self._since < self._start_seconds / 4
            if end and (line := self._meeting.line_from(end.merge_point, self._wire.connected, patient=patient)) is not None:
                self._follow(*line, end.merge_point)
                self._roll.begin()
                return Beginning(end.step)
            fresh = self._start is not None and not self._verdicts.has_any(self._start[1].line)
            if not fresh and (under_way := self._meeting.under_way()) is not None:
                self._follow(*under_way)
                self.ask()
                return Beginning(None, anew=True)
            if self._start is not None:
                return self._begun(self._start[1], self._start[0])
            offers = self._meeting.offers(Hello(cuts=tuple(cuts)), self._wire.connected, patient=patient)
            if end or caller(offers) is not None or self._meeting.coming(self._wire.connected):
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

    # --- a merge ---

    def post(self, difference: Difference) -> None:
        """Send this site's weight difference to all other sites."""
        self.listen()  # a site that has just connected would get the difference twice: now, and when it is greeted
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
        waiting: Mapping[int, Sequence[int]] = MappingProxyType({}),
        staleness: int = 0,
        seconds: float = math.inf,
    ) -> Verdict | None:
        """Return the verdict about the merge of a fragment after `step` steps, with weight differences that were taken after `sent` steps.
        The decider makes the verdict, and other sites receive it. Return None if `seconds` were not enough, so that the caller must call
        again. Other arguments are those of `Pending`. Raises PeerGone, and OutOfStepError."""
        merge = Pending(number, fragment, sent, step, members, mark, waiting=waiting, staleness=staleness)
        verdict = self._agreed(merge, self._verdict, seconds)
        if verdict is not None:
            self._due, self._decided_at, self._waiting = None, time.monotonic(), waiting
            self.pace.merged(fragment, due=self._due_at, now=self._decided_at)
            self._joining.asks = None if self.site in verdict.joined else self._joining.asks
        return verdict

    def _agreed(self, merge: Pending, ask: Callable[[Pending], T | None], seconds: float) -> T | None:
        began = time.monotonic()
        if self._due != merge.number:
            self._due, self._due_at, self._due_since = merge.number, began, began
        self._receive(0.0)  # a site connected since the previous merge may lack messages of this site
        while (found := self._in_line(merge, ask)) is None:
            if time.monotonic() - began >= seconds:
                return None
            self._receive(TURN_SECONDS)
        return found

    def _in_line(self, merge: Pending, ask: Callable[[Pending], T | None]) -> T | None:
        """Return the answer of `ask` about a merge. If the sites can no longer agree under the current decider, meet the other sites to
        begin a new line of merges."""
        if self._gone is not None:
            self._meet_again(*self._gone)
            return None
        try:
            return ask(merge)
        except PeerGone as gone:
            if not self._may_stand(merge):
                raise
            self._leave(MergePoint(merge.number, merge.step, merge.mark), gone)
            return None

    def _verdict(self, merge: Pending) -> Verdict | None:
        return self._decided(merge) if self.decides else self._awaited(merge)

    def _may_stand(self, merge: Pending) -> bool:
        """True if this site's weight difference is due at the merge, so that the site may wait there. A site whose difference is not due
        exits instead, because it loses nothing by joining again."""
        return self.site in merge.due

    def _leave(self, stand: MergePoint, gone: PeerGone) -> None:
        """Leave the current line of merges, and tell the other sites at which merge this site waits."""
        self._gone, self._since = (self.line, gone), time.monotonic()
        if self._roll.takes_part(self.decider):  # else it was started again or has left too, and said how it stands
            self._meeting.forget(self.decider)  # its messages from here on show that it is there
        self.line, self.decider, self._stand, self._start = "", self.site, stand, None
        self._post(Hello(stand=stand))

    def _meet_again(self, left: str, gone: PeerGone) -> None:
        """Take part in a line of merges that begins at the merge where this site waits: another site's line, or this site's own once a
        quorum has met. Raises `gone` if the other sites continue without this one, or if too few connect in time."""
        assert self._wire is not None and self._stand is not None and self._since is not None
        waited = time.monotonic() - self._since
        patient = waited < self.pace.grace
        if (line := self._meeting.line_from(self._stand, self._wire.connected, patient=patient)) is not None:
            self._go_on(*line)
        elif waited >= self._limit or self._meeting.elsewhere(left, patient=patient):
            raise gone

    def _go_on(self, line: str, decider: int) -> None:
        """Take part in a line of merges that begins at the merge where this site waits, and send this site's unmerged weight differences
        again."""
        self._follow(line, decider, self._stand)
        self._roll.begin()
        self._joining.clear()
        self._gone, self._due_since, self._said = None, time.monotonic(), 0.0
        for difference in self._differences.under_way():
            self.post(difference)

    def _decided(self, merge: Pending) -> Verdict | None:
        """Decide about a merge, as the decider, from the received messages, and send the verdict to all sites; return None if it is too
        early to decide."""
        got = merge.due & self._there(merge.fragment, merge.sent).keys()
        arrived = {site: self._come(merge, site) for site in merge.due}
        verdict = self._judged(merge._replace(got=got, arrived=arrived, waited=time.monotonic() - self._due_since))
        if verdict is None:
            return None
        self._verdicts.announce(verdict := replace(verdict, line=self.line))
        self._joining.ready -= set(verdict.joined)
        if self._verdicts.full:
            self._stand = None  # a site still waiting where the line began would soon no longer get the verdict due there
        self._post(verdict)
        return verdict

    def _come(self, merge: Pending, site: int) -> int:
        steps = merge.waiting.get(site, (merge.sent,))
        there = (site in self._there(merge.fragment, sent) for sent in steps)
        return sum(1 for _ in takewhile(bool, there))

    def _judged(self, merge: Pending) -> Verdict | None:
        number, fragment, sent, step, members, _, got, waited = merge[:8]
        due = {site for site in merge.due if site < self.spec.count}  # the run may have been resumed with fewer sites
        awaited = merge.stale if self.quorum(got) else due - got
        may_come = {site for site in awaited if self._roll.takes_part(site)}
        if may_come and waited < self.pace.grace:
            return None
        here = got | self._roll.present(self._due_since)
        if not self.quorum(here) or (due and not got):
            hoped = here | may_come | {site for site in self._roll.followers() if self._is_near(site, waited)}
            if not self.quorum(hoped) or (due and not got | may_come) or waited >= self._patience:
                away = (set(range(self.spec.count)) - here) | (due - got)
                raise PeerGone(
                    f"{are(away, self.spec)} away, and the others do not form a quorum: this site waited {waited:.0f} s at step {step}"
                )
            return None
        left = merge.stale | {site for site in members if site != self.site and not self._roll.takes_part(site)}
        leaving = {site for site, one in self._there(fragment, sent).items() if site in got and one.stop}
        stop = bool(leaving) and (self.site in leaving or not (got - leaving and self.quorum(here - leaving)))
        left |= set() if stop else leaving
        joined = {site for site in self._joining.ready - members.keys() if self._roll.takes_part(site)}
        newest = {site: steps[merge.arrived[site] - 1] for site, steps in merge.waiting.items() if merge.arrived.get(site)}
        sets = [tuple(sorted(each)) for each in (newest if self.spec.staleness else got, left, joined)]
        steps = tuple(newest[site] for site in sets[0]) if self.spec.staleness else ()
        return Verdict(number, fragment, sent, step, *sets, count=self.spec.count, stop=stop, steps=steps)

    def _is_near(self, site: int, waited: float) -> bool:
        assert self._wire is not None
        return waited < self.pace.grace or self._wire.connected(site)

    def _awaited(self, merge: Pending) -> Verdict | None:
        verdict = self._verdicts.take(merge, self.line, site=self.site, decider=self.decider)
        if verdict is None:
            self._need_decider(self._due_since, merge.step, missed=self._verdicts.missed(self.line, merge.number))
        return verdict

    def _need_decider(self, began: float, step: int, *, missed: bool = False) -> None:
        """Raise PeerGone if the decider was restarted, has been disconnected for the grace period, or has sent no message for the longer
        time `patience`. (A busy decider still sends a message after each step.) `missed`: verdicts about later merges have arrived, but not
        the one that is due."""
        assert self._wire is not None
        now = time.monotonic()
        connected = self._wire.connected(self.decider) and not missed
        self._lost_since = None if connected else now if self._lost_since is None else self._lost_since
        lost = self._lost_since is not None and now - self._lost_since >= self.pace.grace
        silent = now - max(began, self._roll.last_word(self.decider))
        if lost or not self._roll.takes_part(self.decider) or silent >= self._patience:
            who = f"{self.spec.named(self.decider)}, the decider,"
            text = f"{who} has made later merges than the one that is due on this site" if missed else f"{who} is away"
            raise PeerGone(f"{text}: this site waited {now - began:.0f} s at step {step}")

    def gather(self, verdict: Verdict, seconds: float) -> bool:
        """Wait for the weight differences that a verdict merges; return True once they have arrived, False if `seconds` were not enough, so
        that the caller must call again. Raises PeerGone if a difference does not arrive within the grace period."""
        began = time.monotonic()
        while missing := {site for site, sent in verdict.takes(self._waiting) if site not in self._there(verdict.fragment, sent)}:
            if time.monotonic() - self._decided_at >= self.pace.grace:
                raise PeerGone(
                    f"{are(missing, self.spec)} away from {self.spec.named(self.site)}, but the other sites have merged the "
                    f"differences sent after step {verdict.sent}"
                )
            if time.monotonic() - began >= seconds:
                return False
            self._receive(TURN_SECONDS)
        return True

    def differences(self, verdict: Verdict, *, bytes_each: int) -> list[Difference]:
        """Return the weight differences that a verdict merges, in the order of the sites. Raises the errors of `gather`, and
        OutOfStepError."""
        self.gather(verdict, math.inf)
        return self._differences.take(verdict, self.line, bytes_each=bytes_each, waiting=self._waiting)

    def _there(self, fragment: int, sent: int) -> dict[int, Difference]:
        return self._differences.there(self.line, fragment, sent)

    # --- taking part anew ---

    def join_reply(self, seconds: float) -> JoinReply | None:
        """Return the decider's reply to this joining site, once the weights of all fragments have arrived; None if `seconds` were not
        enough, so that the caller must call again. Raises PeerGone if the decider is lost."""
        began = time.monotonic()
        self._due, self._due_since = JOINING, self._due_since if self._due == JOINING else began
        self._roll.expect(self.decider)
        while (found := self._joining.join_reply) is None:
            if time.monotonic() - began >= seconds:
                return None
            self._receive(TURN_SECONDS)
            self._need_decider(self._due_since, 0)
        self._due = None
        self._verdicts.begin(self.line, found.number)
        return found

    # --- the end ---

    def end(self, number: int, step: int, mark: str, members: Mapping[int, int], *, seconds: float) -> bool | None:
        """Announce that this site has saved all `number` merges of the run. Return True once this site may exit, False if another site asks
        for the weights, and None if `seconds` were not enough, so that the caller must call again. Other arguments are those of `decide`.
        Raises PeerGone."""
        return self._wire is None or self._agreed(Pending(number, 0, step, step, members, mark), self._ended, seconds)

    def _ended(self, merge: Pending) -> bool | None:
        if self._leaving.own is None:
            self._leaving.own = End(self.line, merge.mark)
            self._post(self._leaving.own)
        if self.decides and self._joining.asking:
            return False
        saved, waited = self._leaving.saved(merge.mark), time.monotonic() - self._due_since
        enough = self.quorum(saved)
        if enough and self.decides and (waited >= self._patience or not self._unsaved(merge, saved)):
            self._post(End(self.line, merge.mark, over=True))
            return True
        if enough and not self.decides and (waited >= self.pace.grace or self._leaving.over(merge.mark)):
            return True
        if not enough and not self.decides:
            self._need_decider(self._due_since, merge.step)
        if not enough and self.decides and waited >= self._patience:
            others = set(range(self.spec.count)) - saved
            text = f"{are(others, self.spec)} away, so too few sites for a quorum have saved the run's final merge"
            raise PeerGone(f"{text}: this site waited {waited:.0f} s at step {merge.step}")
        return None

    def _unsaved(self, merge: Pending, saved: Set[int]) -> set[int]:
        """Return the sites that may still save the run's final merge: those that have sent a message within the grace period, and
        are connected or train."""
        assert self._wire is not None
        since = time.monotonic() - self.pace.grace
        spoke = {site for site in set(range(self.spec.count)) - saved if max(self._due_since, self._roll.last_word(site)) > since}
        return {site for site in spoke if self._wire.connected(site) or (site in merge.due and self._roll.takes_part(site))}
