"""Data parallelism between sites: in every step they exchange gradients in place of weights, so that all make the same update.

The ranks of a site reduce their gradients as without sites. The rank that leads it gathers the whole tensors and sends them, and each rank
takes the mean over all sites for its share: before the norm is known, which is that of the mean. Sites have the same weights and moments
after each step, and none can miss one. So a merge needs all of them, and after a fault all begin from the same checkpoint.
"""

from collections.abc import Mapping, Sequence
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
    """One rank's part in the exchange of gradients."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Arguments are those of `Sites`."""
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._gradients: Mapping[str, Tensor] = {}
        self._made: list[MergeResult] = []
        self._before: dict[str, Any] = {}  # the deal before the step that is under way
        self.step_hooks = (_Exchange(self),)

    def exchange(self, gradients: Mapping[str, Tensor], step: int, loss: float) -> None:
        """Replace, in place, this rank's gradients of the step that follows `step` finished steps by their mean over all sites. `loss`:
        this rank's part of the site's loss, which the others learn with the gradients. Raises StopAsked, after which the step's samples are
        not dealt out."""
        self.note(sum(self._ranks.all_gather(loss)))
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
        """Deal out the samples of a step as `Sites.deal` does, so that `exchange` can take it back."""
        self._before = self.progress.deal.record()
        return super().deal(step)

    def due(self, step: int) -> bool:
        """False: all exchanges are done within the step."""
        return False

    def after_step(self, step: int, *, stop: bool) -> Round:
        """Return the outcome of the step's exchange. `stop`: this site was asked to stop, and says so with its next gradients."""
        self._stop |= stop
        if self._council is not None:
            self._council.listen()
        made, self._made = self._made, []
        return self._outcome(made)

    def _difference(self, fragment: Fragment) -> dict[str, Tensor]:
        """Return this rank's gradients; zeros for a parameter that has none."""
        state, given = self.state, self._gradients
        mine = [piece.name for piece in fragment.pieces if piece.name in state.names]
        return {name: given[name] if name in given else torch.zeros_like(state.weight(name)) for name in mine}

    def _update(
        self, name: str, theirs: Sequence[Tensor], taken: Sequence[Taken], counted: Sequence[int], spread: Tensor
    ) -> None:
        """Take the mean of a gradient. Arguments are those of `Sites`."""
        mean = self._mean(name, theirs, taken, spread)
        if name in self._gradients:
            self._gradients[name].copy_(mean)


class _Exchange(StepHook):
    """Exchanges a step's gradients once they are reduced within the site."""

    def __init__(self, sites: SynchronousSites) -> None:
        self._sites = sites

    def after_reduction(self, trainer: Trainer, step: int, nll: Tensor) -> None:
        loss = 0.0 if trainer.groups.coordinates["tensor"] else float(nll)  # tensor ranks all have the whole loss
        given = {name: parameter.grad for name, parameter in trainer.parameters.items()}
        self._sites.exchange({name: local(grad) for name, grad in given.items() if grad is not None}, step, loss)


class NoCheckpointError(RuntimeError):
    """This site lacks the checkpoint that all must begin from."""


class AllSitesCouncil(Council):
    """A council whose merges all need every site."""

    def __init__(self, *arguments: Any, patience: float, every: int, **named: Any) -> None:
        """`every`: steps between checkpoints. Other arguments are those of `Council`. A merge waits for a site as long as for a quorum:
        without that site there is no quorum."""
        super().__init__(*arguments, patience=patience, **named)
        self.pace, self._every = Pace(patience, patience), every
        self._first = CheckpointOffer(0, "", 0, tuple(range(self.spec.count)))  # the first weights, which all sites have

    def begin(self, cuts: Sequence[CheckpointOffer], seconds: float) -> Beginning | None:
        """Meet the others as `Council.begin` does. A site of at most as many steps as lie between checkpoints also offers the first
        weights: a fault may have kept another from its first checkpoint, and costs no more than any."""
        early = all(cut.step <= self._every for cut in cuts)
        return super().begin([self._first, *cuts] if early else cuts, seconds)

    def gather(self, verdict: Verdict, seconds: float) -> bool:
        """Wait as `Council.gather` does, but not for a site that was started again: it has no gradients of this step."""
        missing = set(verdict.merged) - self._there(verdict.fragment, verdict.sent).keys()
        if lost := {site for site in missing if not self._roll.takes_part(site)}:
            raise PeerGone(
                f"{are(lost, self.spec)} away from {self.spec.named(self.site)}, and data parallelism needs all sites: at step "
                f"{verdict.step}"
            )
        return super().gather(verdict, seconds)

    def _begun(self, start: Start, decider: int) -> Beginning:
        """Begin as `start` says. Raises NoCheckpointError."""
        if start.cut is not None and start.cut not in self._cuts:
            raise NoCheckpointError(
                f"{self.spec.named(self.site)} has no checkpoint of step {start.cut.step}, from which the others begin, and with data "
                "parallelism no site trains without. Copy the checkpoints of another site's run folder to this site's: all hold the same"
            )
        beginning = super()._begun(start, decider)
        return Beginning(None) if start.cut == self._first else beginning

    def _may_stand(self, merge: Pending) -> bool:
        """False: a site that comes back needs a checkpoint of all, since it lacks the optimizer's state."""
        return False

    def _ended(self, merge: Pending) -> bool | None:
        """Return whether this site may end as `Council` does. A site that was started again needs all others for the steps that it lost."""
        if lost := {site for site in merge.due - self._leaving.saved(merge.mark) if not self._roll.takes_part(site)}:
            raise PeerGone(f"{are(lost, self.spec)} away, and had not saved the last step: data parallelism needs all sites")
        return super()._ended(merge)

    def _judged(self, merge: Pending) -> Verdict | None:
        """Return the verdict once all differences have come."""
        number, fragment, sent, step = merge[:4]
        missing = merge.due - merge.got
        if lost := {site for site in missing if merge.waited >= self._patience or not self._roll.takes_part(site)}:
            raise PeerGone(
                f"{are(lost, self.spec)} away, and data parallelism needs all sites: waited {merge.waited:.0f} s at step {step}"
            )
        if missing:
            return None
        stop = any(one.stop for one in self._there(fragment, sent).values())
        return Verdict(number, fragment, sent, step, tuple(sorted(merge.got)), count=self.spec.count, stop=stop)
