"""Merges: when a fragment is due, its difference is sent to the other sites, and new weights are made from the
differences of all."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.party import Party
from megalith.events import Merge
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.spec.sites import Fragment, sent_after, verdict_bytes, wire_bytes
from megalith.spec.sites.deal import Deal, Share
from megalith.train.sites import outer, pieces
from megalith.train.sites.council import Council
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.messages import Cut, Difference, Held, Told, Verdict
from megalith.train.sites.state import NOT_SENT, OuterState
from megalith.train.sites.whole import Wholes
from megalith.train.watchers import Watcher

T = TypeVar("T")
WAIT_SECONDS = 10.0  # after which a site's ranks learn that they still wait for other sites
REMEMBERED = 1024  # steps whose samples are known


@dataclass
class Progress:
    """How far a run across sites is. It is equal, except for `anew`, on all sites that have made the same merges."""

    deal: Deal
    merges: int = 0
    mark: str = ""
    """The digest of all merges so far."""

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"merges": self.merges, "mark": self.mark, "deal": self.deal.record()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Progress":
        """Return what `record` returned."""
        return cls(Deal.of(record["deal"]), record["merges"], record["mark"])


@dataclass(frozen=True)
class Round:
    """The outcome of the merges after a step: those that were made, on the rank that leads; True if the site is to stop here; and how many
    connections have not proved the run's key since the last time."""

    made: tuple[Merge, ...] = ()
    stop: bool = False
    refused: int = 0


@dataclass(frozen=True)
class Turn:
    """A step as it is dealt out: what this site reads in it (None: nothing), how many samples all read, and how many steps came before it
    in the schedule of learning rates, which follows the samples dealt out."""

    share: Share | None
    samples: int
    schedule: int


class Made(NamedTuple):
    """A merge: as it was decided, and on the rank that leads, its event."""

    verdict: Verdict
    event: Merge | None


class Sites:
    """One rank's part in the merges of its site with the others. All ranks of a site call its methods together, and all sites at the same
    steps. A site that does not train goes through the steps and merges all the same."""

    def __init__(
        self,
        spec: RunSpec,
        fragments: Sequence[Fragment],
        state: OuterState,
        wholes: Wholes,
        *,
        site: int,
        council: Council | None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """`council`: on the rank that leads its site; None on others. `beat` is called now and then while other sites are waited for."""
        assert spec.sites is not None
        self.spec, self.fragments, self.state, self.site = spec.sites, tuple(fragments), state, site
        self.progress = Progress(Deal.first(spec.sites.count, spec.sites.shares))
        self._phases = Phases.of(spec)
        self._total = self._phases.after(0, spec.train.steps)
        self._wholes, self._council, self._party, self._beat = wholes, council, Party(wholes.group), beat
        self._stop = False
        self._trains = True
        self.enters = False
        """True if `enter` must be called before the first step."""
        self._losses = deque[float](maxlen=self.spec.inner_steps)
        self._shares: dict[int, Share] = {}
        self._refused = 0
        self.watchers: tuple[Watcher, ...] = ()
        """Watchers of the trainer's steps that these merges need."""

    @property
    def leads(self) -> bool:
        """True on the rank that sends and receives for its site."""
        return self._wholes.rank == 0

    @property
    def trains(self) -> bool:
        """True if this site reads samples; False while it only follows the merges of the others."""
        return self._trains

    @property
    def left(self) -> int:
        """Samples that are still to be dealt out."""
        return self.progress.deal.left(self._total)

    def note(self, loss: float) -> None:
        """Take note of the loss of a step of this site."""
        self._losses.append(loss)

    def agree(self, flag: bool) -> bool:
        """True if the flag is set on any rank of this site."""
        return self._party.any(flag)

    # --- beginning ---

    def begin(self, cuts: Sequence[Cut]) -> Beginning:
        """Agree with the other sites where to begin. `cuts`: the site's checkpoints, on the rank that leads it."""
        beginning = self._wait_for(lambda council: council.begin(cuts, WAIT_SECONDS))
        self.enters = beginning.anew
        return beginning

    def resume(self) -> None:
        """Take part with the state that was loaded: send again the differences that were in flight when it was saved."""
        deal = self.progress.deal
        self._trains = self.site in deal.members
        sent = self.state.sent.tolist()
        for step, number in sorted((step, number) for number, step in enumerate(sent) if step != NOT_SENT):
            if self._council is not None and self.site in deal.due(step):
                self._council.post(Difference(number, step, False, math.nan, self.state.flights[number].clone()))
        self._say_ready()

    def enter(self) -> int:
        """Join the others: wait for their merged weights, and return the steps that they have done."""
        told = self._wait_for(lambda council: council.told(WAIT_SECONDS))
        for fragment in self.fragments:
            size = sum(piece.numel for piece in fragment.pieces)
            values = torch.empty(2 * size) if self._council is None else self._council.held(fragment.number).values
            self._wholes.tell(values)
            for kept, flat in zip((self.state.anchors, self.state.velocities), values.split(size), strict=True):
                for piece, whole in zip(fragment.pieces, flat.split([piece.numel for piece in fragment.pieces]), strict=True):
                    if piece.name in kept:
                        kept[piece.name].copy_(self._wholes.share(piece.name, whole.view(piece.shape)))
        self.enters = False
        self.state.begin_anew()
        self.state.sent.copy_(torch.tensor(told.sent))
        self.progress = Progress(Deal.of(told.deal), told.number, told.mark)
        self._trains = False
        self._say_ready()
        return told.step

    def _say_ready(self) -> None:
        """Say that this site could train, if it does not."""
        if not self._trains and self._council is not None:
            self._council.say_ready()

    def _wait_for(self, ask: Callable[[Council], T | None]) -> T:
        """Return the answer of the council on every rank of the site. `ask` is called again as long as it returns None, and each time all
        ranks learn that the leading one still waits, so none of them times out, however long the other sites take."""
        while (found := self._tell(ask(self._council) if self._council is not None else None)) is None:
            self._beat()
        return found

    def _tell(self, value: T) -> T:
        """The leading rank's value, on every rank of the site."""
        return self._party.tell(value) if self._wholes.size > 1 else value

    # --- steps ---

    def deal(self, step: int) -> Turn:
        """Deal out the samples of the step that `step` steps were done before."""
        deal = self.progress.deal
        schedule = self._phases.steps_in(deal.dealt)
        shares = deal.deal(step, self._phases, self._total)
        turn = Turn(shares.get(self.site), sum(share.size for share in shares.values()), schedule)
        if turn.share is not None:
            self._shares[step] = turn.share
        self._shares.pop(step - REMEMBERED, None)
        return turn

    def share(self, step: int) -> Share:
        """Return the samples of this site in a step that was dealt lately."""
        return self._shares[step]

    def due(self, step: int) -> bool:
        """True if something is sent or merged after `step` steps."""
        return self.left == 0 or bool(self._arriving(step)) or any(True for _ in sent_after(step, self.spec))

    def after_step(self, step: int, *, stop: bool) -> Round:
        """Send and merge what is due after `step` steps of the run; everything, if no samples are left. `stop`: this site was asked to
        stop, and tells the others with its next message. Without it the others may go on; if they do not, all stop with the same
        merge."""
        self._stop |= stop
        if self._council is not None:
            self._council.listen()
        trained, merges = self._trains, self.progress.merges
        made = [self._merge(number, step) for number in self._arriving(step)]
        fresh = list(sent_after(step, self.spec))
        for number in fresh:
            self._send(number, step)
            if not self.spec.overlap:
                made.append(self._merge(number, step))
        if self.left == 0:
            made += self._merge_all(step, fresh)
        if any(self.site in verdict.joined for verdict, _ in made):
            self.state.begin_anew()
            self._losses.clear()
            self._trains = True
        elif trained and not self._trains:
            self._say_ready()
        if self.progress.merges > merges:
            self._serve(step)
        return self._outcome(made)

    def _outcome(self, made: Sequence[Made]) -> Round:
        """Return the outcome of merges."""
        stopping = any(verdict.stop for verdict, _ in made) or (self._stop and not self._trains)
        before, self._refused = self._refused, self._council.turned_away if self._council is not None else 0
        return Round(tuple(event for _, event in made if event is not None), stopping, self._refused - before)

    def close(self) -> None:
        """End the connections to the other sites, once they have what this one has sent. All ranks of a site call it together."""
        self._wait_for(lambda council: council.close(WAIT_SECONDS) or None)

    def _arriving(self, step: int) -> list[int]:
        """The fragments that are merged after `step` steps, among those that were sent before."""
        return [
            number
            for number, sent in enumerate(self.state.sent.tolist())
            if sent != NOT_SENT and sent + self.spec.overlap == step
        ]

    def _merge_all(self, step: int, fresh: Collection[int]) -> list[Made]:
        """Merge the fragments in flight, in the order in which they were sent; then send and merge those that this step did not send.
        All sites end with the merged weights."""
        under_way = sorted((sent, number) for number, sent in enumerate(self.state.sent.tolist()) if sent != NOT_SENT)
        made = [self._merge(number, step) for _, number in under_way]
        for fragment in self.fragments:
            if fragment.number not in fresh:
                self._send(fragment.number, step)
                made.append(self._merge(fragment.number, step))
        for name, anchor in self.state.anchors.items():
            self.state.weights[name].copy_(anchor)
        return made

    # --- one fragment ---

    @torch.no_grad()
    def _send(self, number: int, step: int) -> None:
        """Take the difference of a fragment and let it leave. A site that does not train only takes note of what the others send."""
        fragment, state, wholes = self.fragments[number], self.state, self._wholes
        state.sent[number], deal = step, self.progress.deal
        deal.counted[number] = deal.count_in(number)
        if self.site not in self.progress.deal.due(step):
            return
        values = self._difference(fragment)
        whole = wholes.gather(fragment, values)
        message = torch.empty(fragment.bytes, dtype=torch.uint8)
        if self.leads:
            torch.cat([pieces.encode(whole[piece.name], piece) for piece in fragment.pieces], out=message)
        loses = any(piece.loses for piece in fragment.pieces)
        if loses and (self.spec.feeds_back or self.spec.eager):
            told = self._decoded(fragment, wholes.tell(message))
            told = {name: each.to(values[name].device) for name, each in told.items()}
        else:
            told = values
        for name in values.keys() & state.feedback.keys():
            state.feedback[name].copy_(values[name] - told[name])
        if self.spec.eager:
            for name in filter(state.is_trained, values):
                state.weights[name].copy_(self._eager(name, told[name], deal.counted[number]))
        if self._council is not None:
            if number in state.flights:
                state.flights[number].copy_(message)
            loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
            self._council.post(Difference(number, step, self._stop, loss, message))

    def _difference(self, fragment: Fragment) -> dict[str, Tensor]:
        """Return this rank's shares of the site's differences."""
        state = self.state
        return {
            piece.name: outer.difference(state.anchors[piece.name], state.weights[piece.name], state.left_out(piece.name))
            for piece in fragment.pieces
            if piece.name in state.anchors
        }

    @torch.no_grad()
    def _merge(self, number: int, step: int) -> Made:
        """Wait for the verdict about a fragment and for what it merges, and update the merged weights and the site's own."""
        fragment, state, progress = self.fragments[number], self.state, self.progress
        began, sent = time.perf_counter(), int(state.sent[number])
        due = (progress.merges, number, sent, step)
        known = {"members": progress.deal.members, "mark": progress.mark}
        verdict = self._wait_for(lambda council: council.decide(*due, **known, seconds=WAIT_SECONDS))
        self._wait_for(lambda council: council.gather(verdict, WAIT_SECONDS) or None)
        messages = [] if self._council is None else self._council.differences(verdict, bytes_each=fragment.bytes)
        waited = time.perf_counter() - began
        table = torch.zeros(len(verdict.merged), fragment.bytes, dtype=torch.uint8)
        for row, message in zip(table, messages, strict=False):
            row.copy_(message.encoded)
        theirs = [self._decoded(fragment, row) for row in self._wholes.tell(table)]
        counted = progress.deal.count_in(number)
        spread = torch.zeros(2, dtype=torch.float64)
        for piece in fragment.pieces:
            if piece.name in state.anchors and theirs:
                self._update(
                    piece.name, dict(zip(verdict.merged, (each[piece.name] for each in theirs), strict=True)), counted, spread
                )
        if self._wholes.size > 1:
            dist.all_reduce(spread, group=self._wholes.group)
        state.sent[number] = NOT_SENT
        deal = progress.deal
        deal.counted.pop(number, None)
        deal.merge(sent=sent, step=step, merged=verdict.merged, left=verdict.left, joined=verdict.joined)
        deal.count, deal.shares = verdict.count, self.spec.shares
        progress.merges, progress.mark = progress.merges + 1, verdict.mark(progress.mark)
        self._trains &= self.site not in verdict.left
        if self._council is None:
            return Made(verdict, None)
        norm, apart = (float(value) ** 0.5 for value in spread)
        others = len(set(verdict.merged) - {self.site})
        telling = others * verdict_bytes() if self._council.decides else 0
        event = Merge(
            step=step,
            sent=sent,
            fragment=number,
            sites=len(verdict.merged),
            losses=[None if math.isnan(message.loss) else message.loss for message in messages],
            bytes_sent=others * wire_bytes(fragment) + telling if self.site in verdict.merged else 0,
            bytes_received=others * wire_bytes(fragment) + (0 if self._council.decides else verdict_bytes()),
            waited=waited,
            seconds=time.perf_counter() - began,
            norm=norm,
            spread=apart,
            number=verdict.number,
            merged=list(verdict.merged),
            left=list(verdict.left),
            joined=list(verdict.joined),
            count=verdict.count,
            samples=deal.merged,
            total=self._total,
            mark=progress.mark,
            decided=self._council.decider,
        )
        return Made(verdict, event)

    def _serve(self, step: int) -> None:
        """Send the merged weights to sites that ask for them. All ranks of the site that decides gather them."""
        asking = self._tell(self._council.asking(self.progress.deal.members) if self._council is not None else [])
        if not asking:
            return
        progress, state = self.progress, self.state
        if self._council is not None:
            told = Told(
                self._council.line, step, progress.merges, progress.mark, tuple(state.sent.tolist()), progress.deal.record()
            )
            self._council.tell(asking, told)
        for fragment in self.fragments:
            mine = [piece.name for piece in fragment.pieces if piece.name in state.anchors]
            still = {name: state.velocities.get(name, torch.zeros_like(state.anchors[name])) for name in mine}
            parts = [self._wholes.gather(fragment, kept) for kept in (state.anchors, still)]
            if self._council is not None:
                values = torch.cat([whole[piece.name].flatten() for whole in parts for piece in fragment.pieces])
                self._council.tell(asking, Held(fragment.number, values))

    def _decoded(self, fragment: Fragment, encoded: Tensor) -> dict[str, Tensor]:
        """This rank's boxes of the values that `encoded` stands for, fp32 on the CPU."""
        found, at = {}, 0
        for piece in fragment.pieces:
            if piece.name in self.state.anchors:
                whole = pieces.decode(encoded[at : at + piece.bytes], piece)
                share = self._wholes.share(piece.name, whole)
                found[piece.name] = share if share.numel() == whole.numel() else share.clone()  # the whole is freed
            at += piece.bytes
        return found

    def _eager(self, name: str, own: Tensor | None, counted: Sequence[int]) -> Tensor:
        """Return what this rank's share of an anchor would be if a merge had the site's own difference alone, counted as it will be; the
        anchor itself where the site sent none."""
        anchor, velocity = self.state.anchors[name].clone(), self.state.velocities.get(name)
        if own is not None:
            own = own.to(anchor.device) * (counted[self.site] / sum(counted))
            outer.outer_step(anchor, None if velocity is None else velocity.clone(), own, self.spec)
        return anchor

    def _mean(self, name: str, theirs: Mapping[int, Tensor], counted: Sequence[int], spread: Tensor) -> Tensor:
        """Return this rank's share of the mean over sites of one tensor. `theirs`: differences by site. `counted`: how much each site
        counts. `spread` [2]: squares of the mean, and of the distance to it, are added there."""
        shares = [counted[site] for site in theirs]
        gradient = outer.mean([*theirs.values()], shares)
        if name in self._wholes.owned:
            spread[0] += gradient.double().square().sum()
            apart = [
                share * (each - gradient).double().square().sum() for share, each in zip(shares, theirs.values(), strict=True)
            ]
            spread[1] += sum(apart) / sum(shares)
        return gradient.to(self.state.anchors[name].device)

    def _update(self, name: str, theirs: Mapping[int, Tensor], counted: Sequence[int], spread: Tensor) -> None:
        """Merge this rank's share of one tensor. Arguments are those of `_mean`."""
        state = self.state
        gradient = self._mean(name, theirs, counted, spread)
        trained = state.is_trained(name)
        early = self._eager(name, theirs.get(self.site), counted) if self.spec.eager and trained else None
        if trained:
            outer.outer_step(state.anchors[name], state.velocities.get(name), gradient, self.spec)
        else:
            outer.average(state.anchors[name], gradient)
        if early is not None:
            outer.correct(state.weights[name], state.anchors[name], early)
        else:
            outer.mix(state.weights[name], state.anchors[name], self.spec.own_share if trained else 0.0)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The merged weights are the model's while the block runs."""
        self.state.swap()
        try:
            yield
        finally:
            self.state.swap()
