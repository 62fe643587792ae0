"""Merges the weights of sites. When a fragment is due, each site sends its weight difference to the other sites, and computes new weights
from the differences of all sites."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.events import Merge
from megalith.exchange import ObjectCollectives
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.spec.sites import Fragment, sent_after
from megalith.spec.sites.deal import Deal, Portion
from megalith.spec.sites.late import Backlog, Taken
from megalith.train.sites import handover, outer, pieces
from megalith.train.sites.council import Council
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.messages import UNKNOWN, CheckpointOffer, Difference, JoinReply, Verdict
from megalith.train.sites.progress import MergeResult, Midway, Progress, Round, StepShare, StopAsked
from megalith.train.sites.reported import membership, merge_event
from megalith.train.sites.state import NOT_SENT, OuterState
from megalith.train.sites.whole_tensors import WholeTensors
from megalith.train.step_hooks import StepHook

T = TypeVar("T")
WAIT_SECONDS = 2.0  # after which a site's ranks learn that they still wait for other sites
LEAVE_SECONDS = 5.0  # that a site which is asked to stop waits for a merge: its own would tell the others in order
REMEMBERED = 1024  # steps whose samples are known


class Sites:
    """One rank's part in the merges of its site with the other sites. All ranks of a site call its methods together, and all sites call
    them at the same steps. A site that does not train also takes part in steps and merges."""

    def __init__(
        self,
        spec: RunSpec,
        fragments: Sequence[Fragment],
        state: OuterState,
        wholes: WholeTensors,
        *,
        site: int,
        folder: Path,
        council: Council | None,
        beat: Callable[[], object] = lambda: None,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`folder`: the site's own folder, with its log. `council` is None except on the site's leading rank. `beat` is called several
        times a second while this site waits for other sites. `asked` returns True once this rank is asked to stop."""
        assert spec.sites is not None
        self.spec, self.fragments, self.state, self.site = spec.sites, tuple(fragments), state, site
        backlog = Backlog.of_fragments(len(fragments)) if spec.sites.staleness else None
        self.progress = Progress(Deal.first(spec.sites.count, spec.sites.shares, backlog))
        self._phases = Phases.of(spec)
        self.total = self._phases.after(0, spec.train.steps)
        """The number of samples of the run."""
        self._wholes, self._council, self._ranks = wholes, council, ObjectCollectives(wholes.group)
        self._folder = folder
        self._beat, self._asked = beat, asked
        self._stop = False
        self._taken = set[int]()  # fragments whose differences were taken after the newest step
        self._trains = True
        self.enters = False
        """True if `enter` must be called before the first step."""
        self._losses = deque[float](maxlen=self.spec.inner_steps)
        self._shares: dict[int, Portion] = {}
        self._refused = 0
        self.step_hooks: tuple[StepHook, ...] = ()
        """The step hooks that these merges need."""

    @property
    def leads(self) -> bool:
        """True on the leading rank, which sends and receives for its site."""
        return self._wholes.rank == 0

    @property
    def left(self) -> int:
        """The number of samples that are not assigned to a step yet."""
        return self.progress.deal.left(self.total)

    @property
    def ended(self) -> bool:
        """True if the merged weights include the training on all samples."""
        return self.progress.ended(self.total)

    def note(self, loss: float) -> None:
        """Record the loss of a step of this site."""
        self._losses.append(loss)

    def agree(self, flag: bool) -> bool:
        """Return True on all ranks of this site if `flag` is true on any of them."""
        return self._ranks.any(flag)

    # --- beginning ---

    def begin(self, cuts: Sequence[CheckpointOffer]) -> Beginning:
        """Agree with the other sites on the state from which to begin. `cuts`: this site's checkpoints, needed only on the leading rank."""
        known = self._in_thread(partial(handover.known_marks, self._folder)) or ()
        beginning = self._wait_for(Beginning, lambda council: council.begin(cuts, WAIT_SECONDS, known=known))
        self.enters = beginning.anew
        return beginning

    def resume(self) -> None:
        """Take part in merges with the loaded state, and send again the weight differences that were in flight when this state was
        saved."""
        deal = self.progress.deal
        self._trains = self.site in deal.members
        # A fragment that was merged since a late difference was taken has another anchor now.
        sent = [(number, step) for number, step in enumerate(self.state.sent.tolist()) if step != NOT_SENT]
        anchors = {(number, step): self._wholes.digest(self.fragments[number], self.state.merged) for number, step in sent}
        for step, number, message in self.state.flying:
            if self._council is not None and self.site in deal.due(step):
                anchor = anchors.get((number, step), UNKNOWN)
                self._council.post(Difference(number, step, False, math.nan, message.clone(), anchor=anchor))
        self._send_ready()

    def enter(self) -> tuple[int, list[Merge]]:
        """Join the other sites: wait for their merged weights. Return the number of steps that they have done and, on the leading rank, the
        merges that this site's log lacks."""
        reply = self._wait_for(JoinReply, lambda council: council.join_reply(WAIT_SECONDS))
        handover.receive_weights(self.fragments, self.state, self._wholes, self._council)
        self.enters = False
        self.state.begin_anew()
        self.state.sent.copy_(torch.tensor(reply.sent))
        self.progress = Progress(Deal.of(reply.deal), reply.number, reply.mark)
        self._trains = False
        self._send_ready()
        record = None if self._council is None else self._council.take_record()
        return reply.step, self._in_thread(partial(handover.merges_missed, self._folder, record)) or []

    def _send_ready(self) -> None:
        if not self._trains and self._council is not None:
            self._council.send_ready()

    def _wait_for(self, kind: Any, ask: Callable[[Council], T | None]) -> T:
        """Return the answer of `ask`, of type `kind`, on every rank of the site. While `ask` returns None, the leading rank calls it again,
        and tells all ranks each time that it still waits, so that no rank times out. Raises StopAsked, on all ranks together, if a rank is
        asked to stop meanwhile."""
        began = time.monotonic()
        while (found := self._tell(ask(self._council) if self._council is not None else None, kind | None)) is None:
            self._beat()
            if self._ranks.any(self._asked() and time.monotonic() - began >= LEAVE_SECONDS):
                raise StopAsked
        return found

    def _tell(self, value: T, kind: Any) -> T:
        return self._ranks.broadcast(value, kind) if self._wholes.size > 1 else value

    # --- steps ---

    def deal(self, step: int) -> StepShare:
        """Assign samples to the sites for the step that follows `step` finished steps."""
        deal = self.progress.deal
        schedule = self._phases.steps_in(deal.dealt)
        shares = deal.deal(step, self._phases, self.total)
        turn = StepShare(shares.get(self.site), sum(share.size for share in shares.values()), schedule)
        if turn.share is not None:
            self._shares[step] = turn.share
        self._shares.pop(step - REMEMBERED, None)
        return turn

    def knows(self, step: int) -> bool:
        """Return True if `share` knows the step."""
        return step in self._shares

    def share(self, step: int) -> Portion:
        """Return the samples that were assigned to this site in a recent step."""
        return self._shares[step]

    def due(self, step: int) -> bool:
        """True if a fragment is sent or merged after `step` steps."""
        return not self.left or bool(self.progress.midway or self._arriving(step) or [*sent_after(step, self.spec)])

    def after_step(self, step: int, *, stop: bool) -> Round:
        """Send and merge the fragments that are due after `step` steps of the run; if no samples are left, all fragments. `stop`: this site
        was asked to stop, and announces this in its next message. If this site stops and the other sites cannot continue without it, all
        stop at the same merge. If this site is asked to stop while the other sites are absent, it stops before a merge (`Progress.midway`),
        and another call makes the remaining merges."""
        self._stop |= stop
        if self._council is not None:
            self._council.listen()
        trained, merges = self._trains, self.progress.merges
        made = list[MergeResult]()
        with suppress(StopAsked):
            for one in self._merges(step):
                made.append(one)  # those before the stop count
        if any(self.site in one.verdict.joined for one in made):
            self.state.begin_anew()
            self._losses.clear()
            self._trains = True
        elif trained and not self._trains:
            self._send_ready()
        if self.progress.merges > merges and self.progress.midway is None:
            self._serve(step, self.progress.deal.members, [one.event for one in made if one.event is not None])
        return self._outcome(made)

    def _outcome(self, made: Sequence[MergeResult]) -> Round:
        alone = self.progress.midway is not None or (self._stop and not self._trains)
        stopping = alone or any(one.verdict.stop for one in made)
        before, self._refused = self._refused, self._council.turned_away if self._council is not None else 0
        events, said = [one.event for one in made if one.event is not None], [text for one in made for text in one.said]
        return Round(events, stopping, self._refused - before, said)

    def end(self, step: int) -> bool:
        """After the run's final step is saved, wait until enough other sites have saved its merges too, so that all end with the same
        weights. Meanwhile, send the weights to sites that rejoin. Return False if a stop was requested. Raises PeerGone."""
        known = (self.progress.merges, step, self.progress.mark, self.progress.deal.members)
        try:
            while not self._wait_for(bool, lambda council: council.end(*known, seconds=WAIT_SECONDS)):
                self._serve(step, ())
        except StopAsked:
            return False
        return True

    def close(self) -> None:
        """Close the connections to the other sites, once they have received all messages. All ranks of a site call this together."""
        with suppress(StopAsked):
            self._wait_for(bool, lambda council: council.close(WAIT_SECONDS) or None)

    def _arriving(self, step: int) -> list[int]:
        return [
            number
            for number, sent in enumerate(self.state.sent.tolist())
            if sent != NOT_SENT and sent + self.spec.overlap == step
        ]

    def _merges(self, step: int) -> Iterator[MergeResult]:
        """Send and merge the fragments that are due after `step` steps. If a stop interrupted an earlier call, make only the remaining
        merges."""
        before, self.progress.midway = self.progress.midway, None
        self._taken = set(before.taken) if before is not None else set()
        ends = before is not None and before.ends
        try:
            if not ends:
                yield from self._some(step)
                ends = self.left == 0
            if ends:
                yield from self._all(step)
        except StopAsked:
            self.progress.midway = Midway(tuple(sorted(self._taken)), ends)
            raise

    def _some(self, step: int) -> Iterator[MergeResult]:
        """Merge the fragments whose sent weight differences are due after this step, and send the fragments whose turn it is."""
        for number in self._arriving(step):
            yield self._merge(number, step)
        for number in sent_after(step, self.spec):
            if number not in self._taken:
                yield from self._take(number, step, wait=not self.spec.overlap)

    def _all(self, step: int) -> Iterator[MergeResult]:
        """Merge the fragments that were sent but not merged yet, in the order in which they were sent; then send and merge those that were
        not sent after this step. All sites end with the merged weights."""
        under_way = sorted((sent, number) for number, sent in enumerate(self.state.sent.tolist()) if sent != NOT_SENT)
        for _, number in under_way:
            yield self._merge(number, step)
        for fragment in self.fragments:
            if fragment.number not in self._taken:
                yield from self._take(fragment.number, step, wait=True)
        for name, anchor in self.state.anchors.items():
            self.state.put(name, anchor)

    # --- one fragment ---

    def _take(self, number: int, step: int, *, wait: bool) -> Iterator[MergeResult]:
        """Send a fragment's weight difference and, if `wait`, merge the fragment. If a stop comes before the merge, the difference counts
        as not sent, unless checkpoints contain differences in flight."""
        left_out = self._send(number, step)
        try:
            if wait:
                yield self._merge(number, step)
        except StopAsked:
            if self.spec.flies:
                self._keep(number, left_out)
            else:
                self.state.sent[number] = NOT_SENT
            raise
        self._keep(number, left_out)

    def _keep(self, number: int, left_out: Mapping[str, Tensor]) -> None:
        self._taken.add(number)
        for name, rest in left_out.items():
            self.state.feedback[name].copy_(rest)

    @torch.no_grad()
    def _send(self, number: int, step: int) -> dict[str, Tensor]:
        """Compute a fragment's weight difference and send it; return the remainder that rounding left out of the message. If this site does
        not train, only record that the other sites send the fragment."""
        fragment, state, wholes = self.fragments[number], self.state, self._wholes
        state.sent[number], deal = step, self.progress.deal
        deal.send(number, step)
        if self.site not in self.progress.deal.due(step):
            return {}
        values, anchor = self._difference(fragment), wholes.digest(fragment, state.merged)
        whole = wholes.gather(fragment, values)
        message = torch.empty(fragment.bytes, dtype=torch.uint8)
        if self.leads:
            torch.cat([pieces.encode(whole[piece.name], piece) for piece in fragment.pieces], out=message)
        loses = any(piece.loses for piece in fragment.pieces)
        if loses and (self.spec.feeds_back or self.spec.eager):
            told = self._decoded(fragment, wholes.broadcast(message))
            told = {name: each.to(values[name].device) for name, each in told.items()}
        else:
            told = values
        if self.spec.eager:
            for name in filter(state.is_trained, values):
                state.put(name, self._eager(name, told[name], deal.counted[number]))
        place = state.fly(number, step) if self.spec.flies else None
        if self._council is not None:
            if place is not None:
                place.copy_(message)
            loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
            self._council.post(Difference(number, step, self._stop, loss, message, anchor=anchor))
        return {name: values[name] - told[name] for name in values.keys() & state.feedback.keys()}

    def _difference(self, fragment: Fragment) -> dict[str, Tensor]:
        state = self.state
        return {
            piece.name: outer.difference(state.anchors[piece.name], state.weight(piece.name), state.left_out(piece.name))
            for piece in fragment.pieces
            if piece.name in state.names
        }

    @torch.no_grad()
    def _merge(self, number: int, step: int) -> MergeResult:
        """Wait for the verdict about a fragment and for the weight differences that it merges; then update the merged weights and the
        site's own weights."""
        fragment, state, progress = self.fragments[number], self.state, self.progress
        began, sent = time.perf_counter(), int(state.sent[number])
        due, deal = (progress.merges, number, sent, step), progress.deal
        staleness = self.spec.staleness if self.left else 0  # the run's final merges contain everything
        known = {"members": deal.members, "mark": progress.mark, "waiting": deal.waiting(number), "staleness": staleness}
        verdict = self._wait_for(Verdict, lambda council: council.decide(*due, **known, seconds=WAIT_SECONDS))
        taken = deal.taken(number, verdict.takes(deal.waiting(number)))
        self._wait_for(bool, lambda council: council.gather(verdict, WAIT_SECONDS) or None)
        messages = [] if self._council is None else self._council.differences(verdict, bytes_each=fragment.bytes)
        waited = time.perf_counter() - began
        table = torch.zeros(len(taken), fragment.bytes, dtype=torch.uint8)
        for row, message in zip(table, messages, strict=False):
            row.copy_(message.encoded)
        theirs = [self._decoded(fragment, row) for row in self._wholes.broadcast(table)]
        spread = torch.zeros(2, dtype=torch.float64)
        for piece in fragment.pieces:
            if piece.name in state.names and theirs:
                self._update(piece.name, [each[piece.name] for each in theirs], taken, deal.count_in(number), spread)
        if self._wholes.size > 1:
            dist.all_reduce(spread, group=self._wholes.group)
        state.sent[number] = NOT_SENT
        state.land(number, verdict.newest.get(self.site, NOT_SENT))
        others = (deal.due(sent) if self.spec.staleness else {*verdict.merged}) - {self.site}
        deal.counted.pop(number, None)
        members = {"merged": verdict.merged, "left": verdict.left, "joined": verdict.joined}
        returned = deal.merge(sent=sent, step=step, **members, fragment=number, steps=verdict.steps)
        deal.count, deal.shares = verdict.count, self.spec.shares
        progress.merges, progress.mark = progress.merges + 1, verdict.mark(progress.mark)
        self._trains &= self.site not in verdict.left
        if self._council is None:
            return MergeResult(verdict, None)
        event = merge_event(
            verdict, fragment, taken, messages, site=self.site, decider=self._council.decider, others=others, deal=deal,
            names=self.spec.names, total=self.total, mark=progress.mark, spread=spread.tolist(), waited=waited,
            seconds=time.perf_counter() - began,
        )  # fmt: skip
        return MergeResult(verdict, event, membership(verdict, returned, self.spec))

    def _serve(self, step: int, members: Collection[int], newest: Sequence[Merge] = ()) -> None:
        """Send the record of merges and the merged weights of all ranks to sites that ask for them and are not among `members`. `newest`:
        merges that the log does not have yet."""
        asking = self._tell(self._council.asking(members) if self._council is not None else [], list[int])
        if not asking:
            return
        council, progress = self._council, self.progress
        line, known = ("", {}) if council is None else (council.line, {site: council.known_by(site) for site in asking})
        sent = tuple(self.state.sent.tolist())
        reply = JoinReply(line, step, progress.merges, progress.mark, sent, progress.deal.record())
        records = self._in_thread(partial(handover.records, self._folder, reply, newest, known))
        handover.send_progress(records or {}, reply, council)
        handover.send_weights(self.fragments, self.state, self._wholes, council, sites=asking, beat=self._beat)

    def _in_thread(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work` on the leading rank, and None on other ranks."""
        return handover.in_thread(work if self._council is not None else None, tell=self._tell, beat=self._beat)

    def _decoded(self, fragment: Fragment, encoded: Tensor) -> dict[str, Tensor]:
        found, at = {}, 0
        for piece in fragment.pieces:
            if piece.name in self.state.names:
                whole = pieces.decode(encoded[at : at + piece.bytes], piece)
                share = self._wholes.share(piece.name, whole)
                found[piece.name] = share if share.numel() == whole.numel() else share.clone()  # the whole is freed
            at += piece.bytes
        return found

    def _eager(self, name: str, own: Tensor | None, counted: Sequence[int]) -> Tensor:
        """Return this rank's share of an anchor after an outer step with the site's own difference `own` alone, which has the same weight
        as in the merge. If `own` is None, the result equals the anchor."""
        anchor, velocity = self.state.anchors[name].clone(), self.state.velocities.get(name)
        if own is not None:
            own = own.to(anchor.device) * (counted[self.site] / sum(counted))
            outer.outer_step(anchor, None if velocity is None else velocity.clone(), own, self.spec)
        return anchor

    def _mean(self, name: str, theirs: Sequence[Tensor], taken: Sequence[Taken], spread: Tensor) -> Tensor:
        """Return this rank's share of a tensor's mean over sites, on the CPU. `theirs`: the values of the differences `taken`. Add to
        `spread` [2] the squared norm of the mean, and the mean squared distance of the differences to it."""
        weights = [one.weight for one in taken]
        gradient = outer.mean(theirs, weights)
        if name in self._wholes.owned:
            spread[0] += gradient.double().square().sum()
            apart = [weight * (each - gradient).double().square().sum() for weight, each in zip(weights, theirs, strict=True)]
            spread[1] += sum(apart) / sum(weights)
        return gradient

    def _update(
        self, name: str, theirs: Sequence[Tensor], taken: Sequence[Taken], counted: Sequence[int], spread: Tensor
    ) -> None:
        """Merge this rank's share of one tensor. `counted`: each site's weight in the mean. Other arguments are those of `_mean`."""
        state = self.state
        gradient = self._mean(name, theirs, taken, spread).to(state.anchors[name].device)
        weight, trained = state.weight(name), state.is_trained(name)
        own = next((values for values, one in zip(theirs, taken, strict=True) if (one.site, one.age) == (self.site, 0)), None)
        early = self._eager(name, own, counted) if self.spec.eager and trained else None
        if trained:
            outer.outer_step(state.anchors[name], state.velocities.get(name), gradient, self.spec)
        else:
            outer.average(state.anchors[name], gradient)
        if early is not None:
            outer.correct(weight, state.anchors[name], early)
        else:  # a site whose difference is late takes the merged weights whole: a later merge will have what it has trained
            keeps = trained and (own is not None or not self.spec.staleness)
            outer.mix(weight, state.anchors[name], self.spec.own_share if keeps else 0.0)
        state.put(name, weight)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside the `with` block, the model uses the merged weights."""
        self.state.swap()
        try:
            yield
        finally:
            self.state.swap()
