"""Data parallelism between sites: in every step, sites exchange gradients instead of weights, so that all sites make the same update. The
ranks of a site reduce their gradients as in a run without sites. After a site's reduction, its leading rank gathers the whole gradients and
sends them to the other sites, and each rank computes the mean over all sites for its share. The gradient norm is the norm of the mean
gradient over all sites. All sites have the same weights and moments after each step, and no site can miss a step. Because no site can miss
a step, a merge needs all sites, and after a fault all sites begin from the same checkpoint.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from megalith.fleet.secure.peers import PeerGone
from megalith.parallel.data import local
from megalith.spec.sites import Fragment
from megalith.spec.sites.deal import Deal
from megalith.spec.sites.late import Taken
from megalith.train.assemble import Trainer
from megalith.train.sites.council import Council
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.merge import Sites
from megalith.train.sites.messages import CheckpointOffer, Start, Verdict
from megalith.train.sites.pace import Pace
from megalith.train.sites.pending import Pending, are
from megalith.train.sites.progress import MergeResult, Round, StepShare, StopAsked
from megalith.train.sites.state import NOT_SENT
from megalith.train.step_hooks import StepHook


class SynchronousSites(Sites):
    """One rank's part in the exchange of gradients between sites."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Arguments are those of `Sites`."""
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._gradients: Mapping[str, Tensor] = {}
        self._made: list[MergeResult] = []
        self._before: dict[str, Any] = {}  # the deal before the step that is under way
        self.step_hooks = (_Exchange(self),)

    def exchange(self, gradients: Mapping[str, Tensor], step: int, loss: float) -> None:
        """After `step` finished steps, replace this rank's gradients of the next step, in place, by their mean over all sites. `loss`: this
        rank's part of the site's loss, which is sent with the gradients. If `exchange` raises StopAsked, the step's samples count as
        unread."""
        self.note(sum(self._ranks.all_gather(loss, float)))
        self._gradients = gradients
        try:
            self._send(0, step + 1)
            self._made.append(self._merge(0, step + 1))
        except StopAsked:
            self.progress.deal = Deal.of(self._before)
            self.state.sent.fill_(NOT_SENT)
            raise
        self._gradients = {}

    def deal(self, step: int) -> StepShare:
        """Assign the samples of a step as `Sites.deal` does, in a way that `exchange` can undo."""
        self._before = self.progress.deal.record()
        return super().deal(step)

    def due(self, step: int) -> bool:
        """False, because all exchanges happen within the step."""
        return False

    def after_step(self, step: int, *, stop: bool) -> Round:
        """Return the outcome of the step's exchange. `stop`: this site was asked to stop, and announces this with its next gradients."""
        self._stop |= stop
        if self._council is not None:
            self._council.listen()
        made, self._made = self._made, []
        return self._outcome(made)

    def _difference(self, fragment: Fragment) -> dict[str, Tensor]:
        state, given = self.state, self._gradients
        mine = [piece.name for piece in fragment.pieces if piece.name in state.names]
        return {name: given[name] if name in given else torch.zeros_like(state.weight(name)) for name in mine}

    def _update(
        self, name: str, theirs: Sequence[Tensor], taken: Sequence[Taken], counted: Sequence[int], spread: Tensor
    ) -> None:
        mean = self._mean(name, theirs, taken, spread)
        if name in self._gradients:
            self._gradients[name].copy_(mean)


class _Exchange(StepHook):
    def __init__(self, sites: SynchronousSites) -> None:
        self._sites = sites

    def after_reduction(self, trainer: Trainer, step: int, nll: Tensor) -> None:
        loss = 0.0 if trainer.groups.coordinates["tensor"] else float(nll)  # tensor ranks all have the whole loss
        given = {name: parameter.grad for name, parameter in trainer.parameters.items()}
        self._sites.exchange({name: local(grad) for name, grad in given.items() if grad is not None}, step, loss)


class NoCheckpointError(RuntimeError):
    """This site lacks the checkpoint from which all sites must begin."""


class AllSitesCouncil(Council):
    """A council in which every merge needs all sites."""

    def __init__(self, *arguments: Any, patience: float, every: int, **named: Any) -> None:
        """`every`: the number of steps between checkpoints. Other arguments are those of `Council`. A merge waits `patience` seconds for
        every site, because only all sites together form a quorum."""
        super().__init__(*arguments, patience=patience, **named)
        self.pace, self._every = Pace(patience, patience), every
        self._first = CheckpointOffer(0, "", 0, tuple(range(self.spec.count)))  # the first weights, which all sites have

    def begin(self, cuts: Sequence[CheckpointOffer], seconds: float, *, known: tuple[str, ...] = ()) -> Beginning | None:
        """Meet the other sites as `Council.begin` does. A site whose checkpoints are all of step `every` or earlier, or that has
        none, also offers the initial weights, because a fault may have kept another site from saving its first checkpoint."""
        early = all(cut.step <= self._every for cut in cuts)
        return super().begin([self._first, *cuts] if early else cuts, seconds, known=known)

    def gather(self, verdict: Verdict, seconds: float) -> bool:
        """Wait as `Council.gather` does, but not for a restarted site, which has no gradients of this step."""
        if lost := self._restarted(set(verdict.merged) - self._there(verdict.fragment, verdict.sent).keys()):
            raise PeerGone(
                f"{are(lost, self.spec)} away from {self.spec.named(self.site)}, and data parallelism needs all sites: this site stopped "
                f"at step {verdict.step}"
            )
        return super().gather(verdict, seconds)

    def _begun(self, start: Start, decider: int) -> Beginning:
        if start.cut is not None and start.cut not in self._cuts:
            raise NoCheckpointError(
                f"{self.spec.named(self.site)} has no checkpoint of step {start.cut.step}, from which the other sites begin, but with data "
                "parallelism all sites need it. Copy the checkpoints, which are the same on all sites, from another site's run folder"
            )
        beginning = super()._begun(start, decider)
        return Beginning(None) if start.cut == self._first else beginning

    def _may_stand(self, merge: Pending) -> bool:
        """False, because a restarted site lacks the optimizer's state, so that all sites must begin from a common checkpoint."""
        return False

    def _ended(self, merge: Pending) -> bool | None:
        """Decide as `Council` does whether this site may exit. Raises PeerGone if a site was restarted before it saved the final step,
        because a restarted site can repeat its lost steps only with all other sites."""
        if lost := self._restarted(merge.due - self._leaving.saved(merge.mark)):
            raise PeerGone(f"{are(lost, self.spec)} away and had not saved the final step, but data parallelism needs all sites")
        return super()._ended(merge)

    def _judged(self, merge: Pending) -> Verdict | None:
        number, fragment, sent, step = merge[:4]
        missing = merge.due - merge.got
        if lost := missing if merge.waited >= self._patience else self._restarted(missing):
            raise PeerGone(
                f"{are(lost, self.spec)} away, and data parallelism needs all sites: this site waited {merge.waited:.0f} s at step {step}"
            )
        if missing:
            return None
        stop = any(one.stop for one in self._there(fragment, sent).values())
        return Verdict(number, fragment, sent, step, tuple(sorted(merge.got)), count=self.spec.count, stop=stop)

    def _restarted(self, sites: Set[int]) -> set[int]:
        """Return those of `sites` that were restarted since the sites last began together. A site whose first connection to this one comes
        after that takes part too, because the decider began with all sites."""
        met = {site for site in sites if site in self._roll}
        for site in met:
            self._roll.expect(site)
        return {site for site in met if not self._roll.takes_part(site)}
