"""Checks one rank's state for silent corruption: computes digests of the state between updates, compares them with those of replicas,
repeats steps with non-finite gradients, and copies the state. If a check fails, the guard reports an observation
(`megalith.fleet.observations`) and ends the rank; the fleet's policy decides on the response. A step whose gradients are not finite is
first computed again, without a restart. (Google's Gemini report and Meta's studies of silent corruption motivate the checks.
`megalith.fleet.tiers.copies` explains the choice of checksums.)
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megalith.checkpoint.memory import WORDS, ChecksumInPlace, Memory, checksum
from megalith.fleet import report as reports
from megalith.fleet.observations import GradientWrong, Nonfinite, Observation, SaveFailed, SaveWorks, StateCorrupt
from megalith.fleet.rank_info import REPORTS, RankInfo
from megalith.fleet.report import Reported
from megalith.fleet.tiers import Tier
from megalith.parallel.data import local
from megalith.parallel.gradients import NotFinite
from megalith.spec.model import MoeSpec
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.treatment import kinds
from megalith.train.assemble import Trainer
from megalith.train.measure.aside import buckets_of
from megalith.train.reexecution import GradientProbe, GradientVerifier, Read, UpdateVerifier, table
from megalith.train.step import seed_step

Report = Callable[[Observation], None]


class StateGuard:
    """Per-rank state checker, a `StepHook`. Construction and every method are collective.

    `read` returns the samples of any data rank. `memory` holds copies of the state; None: no copies are made.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        rank_info: RankInfo,
        read: Read,
        memory: Memory | None = None,
        report: Report = reports.report,
        merged: Sequence[torch.Tensor] = (),
    ) -> None:
        """`merged`: tensors that only merges with other sites change. `merged` is checked
        before merges and saves, not in each step."""
        self.trainer, self.fleet, self.rank_info, self.memory, self.report = (
            trainer,
            trainer.spec.fleet,
            rank_info,
            memory,
            report,
        )
        self.probe = GradientProbe(buckets_of(trainer))
        self.replicas = Replicas(trainer) if self.fleet.digest else None
        self._in_memory = ChecksumInPlace(trainer.state.shares().values())
        self._merged_in_memory, self._merged = ChecksumInPlace(merged), 0
        self._digests: dict[int, int] = {}  # of the state after so many steps, without the loss scale
        self._coming: tuple[int, Callable[[], int]] | None = None  # steps, and their digest once it is known
        self._unsent: int | None = None  # the newest digest, until it is compared with those of replicas
        self._good = 0  # states up to this step are known, or must be taken, to be right
        self._disk_failed = False
        every = self.fleet.verify_every
        self.gradient_verifier = GradientVerifier(
            trainer, self.probe, read=read, microbatches=self.fleet.verify if every else "all"
        )
        used = kinds(trainer.spec.optimizer)
        # a copy holds one rank's share of a tensor, and not where it lies, which rounding to few bits depends on
        spec = trainer.spec
        wide = spec.optimizer.moments == spec.optimizer.master == spec.train.gradients == "fp32"
        repeatable = wide and all(OPTIMIZERS[kind].unit == "element" for kind in used)
        self.update_verifier = UpdateVerifier(trainer, memory) if every and memory and repeatable else None

    def begin(self, step: int, samples: int) -> None:
        """Start to check the current state, which is the state after `step` steps. Call this after the state is restored."""
        self._good = step
        if self.memory and (pinned := self.memory.pinned_step()) is not None and pinned <= step:
            self._good = pinned
        if self.fleet.verify_every:  # a node that has just come holds no copy that was verified
            self._good = min(good for (good,) in table([self._good], self.trainer))
        if self.fleet.digest:
            self._digests = {step: self._without_scale(self._digest())}
            self._merged = self._merged_in_memory()
        if self.memory:  # by all ranks, also those that have this very copy: their buddies may be new
            self.copy(step, samples)

    # --- the moments of a step ---

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Discard what was recorded about the previous step's gradients."""
        self.probe.next()
        self.probe.digests = self._verifies(step) and self.fleet.verify == "all"

    def after_reduction(self, trainer: Trainer, step: int, nll: torch.Tensor) -> None:
        """Check that replicas had the same state and computed the same gradients."""
        self._take_digest()
        if self.replicas:
            self._judge_replicas(step, self.replicas.wait())
        if self._verifies(step):
            self._verify(step)

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Check that the state has not changed since the newest update."""
        if step + 1 not in self._digests:  # else that update was undone: routers have taken in their loads meanwhile
            self.check_state(step)
        if self.update_verifier and self._verifies(step):
            self.update_verifier.begin(step)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Verify the update, and record the digest that the state must still have before the next update."""
        if self.update_verifier and self._verifies(step) and (rank := self.update_verifier.check(step)) is not None:
            text = f"rank {rank}'s update in step {step + 1} differs from the same update, recomputed from a copy of the state"
            self._accuse(StateCorrupt(**self._here(step, rank), where="update"), text)
        if self.fleet.digest:
            ahead = trainer.ahead is not None
            self._coming = step + 1, trainer.state.behind.result(self._digest) if ahead else self._digest
            if not ahead:
                self._take_digest()

    def _take_digest(self, *, send: bool = True) -> None:
        """Record the digest of the newest update. If the next forward hid this update, its thread computed the digest. `send`: True to
        begin to compare it with those of replicas, which all ranks do at the same place."""
        coming, self._coming = self._coming, None
        if coming is not None:
            step, known = coming[0], self._without_scale(coming[1]())
            self._digests = {at: digest for at, digest in self._digests.items() if at >= step - 1} | {step: known}
            self._unsent = known
        if send and self._unsent is not None:
            known, self._unsent = self._unsent, None
            if self.replicas:
                self.replicas.start(self._whole(known))

    def update_skipped(self, trainer: Trainer, step: int) -> None:
        """Check that the skipped step left the state unchanged, and record the same digest for the next step."""
        if self.fleet.digest and (known := self._digests.get(step)) is not None:
            self.check_state(step)
            self._digests = {step: known, step + 1: known}
            if self.replicas:
                self.replicas.start(self._whole(known))

    def after_step(self, trainer: Trainer, step: int) -> None:
        """No-op."""

    def check_state(self, step: int) -> None:
        """Check that the state after `step` steps is still the result of the newest update. If the state has changed, report this and raise
        Reported.

        Also call this before a checkpoint is saved, because a checkpoint of an altered state would match its own checksums.
        """
        self._take_digest(send=False)  # a save calls this, which may end on one rank before it comes here
        known = self._digests.get(step)
        if known is not None and (found := self._digest()) != (known := self._whole(known)):
            self._altered(step, "the state", known, found)

    def check_all(self, step: int) -> None:
        """Check the state as `check_state` does, and also the tensors that only merges change."""
        self.check_state(step)
        if self.fleet.digest and (found := self._merged_in_memory()) != self._merged:
            self._altered(step, "the state kept for merges", self._merged, found)

    def _altered(self, step: int, what: str, known: int, found: int) -> None:
        text = (
            f"{what} after {step} steps had the digest {known:016x} when it was last updated, but now has the digest {found:016x}"
        )
        self._accuse(StateCorrupt(**self._here(step, self.rank_info.rank), where="at rest"), text)

    def _digest(self) -> int:
        """Return the digest of the state. For tensors on disk, the digest of the written bytes is used, because each read verifies the
        bytes."""
        return (self._in_memory() + self.trainer.state.sum) % WORDS

    def _of_scale(self) -> int:
        """Return the loss scale's part of the digest. The loss scale is handled separately, because only it may change in a skipped step.
        The digest of the scale is computed from its Python copy in `State`, so that an altered tensor is detected."""
        scale = self.trainer.state.scale
        return 0 if scale is None else checksum([torch.tensor(scale, dtype=torch.float32)])

    def _without_scale(self, whole: int) -> int:
        return (whole - self._of_scale()) % WORDS

    def _whole(self, known: int) -> int:
        return (known + self._of_scale()) % WORDS

    def _verifies(self, step: int) -> bool:
        return self.fleet.verify_every > 0 and step % self.fleet.verify_every == 0

    # --- gradients ---

    def _verify(self, step: int) -> None:
        found = self.gradient_verifier.compare(step)
        if found is None:
            self._good = step
            if self.memory:
                self.memory.pin()
        if found is None or not found.suspects:
            return
        nodes = tuple(dict.fromkeys(self.rank_info.node_of(rank) for rank in found.suspects))
        ranks = ", ".join(map(str, found.suspects))
        observation = GradientWrong(time=time.time(), step=step, good_step=self._good, suspects=nodes)
        reporter = min(set(range(self.rank_info.world)) - set(found.suspects), default=0)
        self._together(observation, f"step {step + 1}: ranks {ranks} {found.text}", reporter=reporter)

    def rerun(self, step: int) -> None:
        """Report that a gradient of the step is not finite, and restore the state from the start of the step. If the error was transient,
        the repeated step then computes the right bits."""
        origin = self._origin()
        if self.rank_info.rank == (origin or 0):
            self.report(self._nonfinite(step, origin, "not asked"))
        self.put_back(step)

    def put_back(self, step: int) -> None:
        """Drop the gradients, counters and digests of a step, and seed it again, so that it can be recomputed."""
        self.trainer.drop()
        seed_step(self.trainer, step)
        self.probe.clear()
        self.before_step(self.trainer, step)

    def before_merge(self, step: int) -> None:
        """Check the state after `step` steps before other sites get it."""
        self._take_digest()
        if self.replicas:
            self._judge_replicas(step, self.replicas.wait())
        self.check_all(step)

    def adopt(self, step: int) -> None:
        """Start to guard a state after `step` steps that no update made: the state of a copy to which the run rewound, or of a merge."""
        self.trainer.state.complete()
        self._coming = self._unsent = None
        if self.fleet.digest:
            self._digests = {step: self._without_scale(self._digest())}
            self._merged = self._merged_in_memory()
            if self.replicas:
                self.replicas.start((self._whole(self._digests[step]) + self._merged) % WORDS)

    def _origin(self) -> int | None:
        """Return the rank whose own gradients were not finite before the reduction; of several ranks, the first in the order of backward.
        None if all ranks' gradients were finite, so that the sum or the norm overflowed.
        """
        bad = [rank for rank, (flag,) in enumerate(table([int(not self.probe.finite())], self.trainer)) if flag]
        mesh = self.trainer.groups.mesh
        return max(bad, key=lambda rank: (mesh.coordinates(rank)["pipeline"], -rank), default=None)

    def _nonfinite(self, step: int, rank: int | None, elsewhere: Any) -> Nonfinite:
        here: dict[str, Any] = {**self._here(step, 0 if rank is None else rank), "rank": rank}
        parameters, release = self.trainer.parameters.items(), self.trainer.release
        bad = [name for name, p in parameters if p.grad is not None and not bool(local(p.grad).isfinite().all())]
        bad += [] if release is None else release.not_finite()
        return Nonfinite(**here, name=bad[0] if bad else "no single parameter", elsewhere=elsewhere)

    def blame(self, error: NotFinite, step: int) -> None:
        """Report a gradient that was not finite in two computations, and whether it is not finite on another replica too. Raises Reported
        if there is a supervisor."""
        origin = self._origin()
        observation = self._nonfinite(step, origin, "reproduced" if origin is None else self._elsewhere(step, origin))
        self._together(observation, str(error), reporter=origin or 0)

    def _elsewhere(self, step: int, origin: int) -> str:
        """Recompute the gradients of rank `origin`'s samples on another replica; return "clean" if they are finite,
        else "reproduced"; "nobody to ask" without another replica."""
        shift, mesh = self.gradient_verifier.shift, self.trainer.groups.mesh
        if not shift:
            return "nobody to ask"
        _, finite = self.gradient_verifier.again(step, shift=shift)
        here = mesh.coordinates(origin)
        asked = mesh.rank(here | {"data": (here["data"] - shift) % mesh.data})
        return "clean" if table([int(finite)], self.trainer)[asked][0] else "reproduced"

    # --- replicas ---

    def _judge_replicas(self, step: int, wrong: list["Split"]) -> None:
        for split in wrong:
            text = f"after {step} steps ranks {split.ranks} must hold the same state, but ranks {split.odd} differ"
            if len(split.odd) == 1:
                self._together(StateCorrupt(**self._here(step, split.odd[0]), where="replica"), text, reporter=split.witness)
            nodes = tuple(dict.fromkeys(self.rank_info.node_of(rank) for rank in split.odd))
            observation = GradientWrong(time=time.time(), step=step, good_step=max(0, step - 1), suspects=nodes)
            self._together(observation, text, reporter=split.witness)

    # --- reports ---

    def _here(self, step: int, rank: int) -> dict[str, Any]:
        return {
            "time": time.time(),
            "step": step,
            "slot": self.rank_info.slot_of(rank),
            "node": self.rank_info.node_of(rank),
            "rank": rank,
        }

    def _accuse(self, observation: Observation, text: str) -> None:
        self.report(observation)
        raise Reported(text)

    def _together(self, observation: Observation, text: str, *, reporter: int) -> None:
        """Report an observation of which all ranks know: rank `reporter` reports it, and no rank ends before the report."""
        if self.rank_info.rank == reporter:
            self.report(observation)
        dist.barrier(group=self.trainer.groups.world)
        if isinstance(observation, Nonfinite) and REPORTS not in os.environ:
            return  # nobody listens, and the caller's own error is clearer
        raise Reported(text)

    # --- copies ---

    def due(self, step: int) -> bool:
        """Return True if a copy is due after `step` steps."""
        if self.memory is None:
            return False
        return step % self.fleet.memory_every == 0 or self._due_on_disk(step) or self._due_as_good(step)

    def _due_as_good(self, step: int) -> bool:
        """Return True if a copy for later rewinds is due. During a spike, no copy for rewinds is made."""
        stability, history = self.trainer.spec.stability, self.trainer.state.history
        return "rewind" in stability.answers and step % stability.keep_every == 0 and history.began < 0

    def _due_on_disk(self, step: int) -> bool:
        return self.fleet.disk_every > 0 and step % self.fleet.disk_every == 0

    def copy(self, step: int, samples: int) -> None:
        """Copy the state after `step` steps."""
        assert self.memory is not None
        self._take_digest()
        updates = self.trainer.state.updates
        history, callbacks = self.trainer.state.history, self.trainer.callbacks
        text = callbacks.add_to(history.dump()) if self.memory.room else ""
        digested, to_disk = self._digests.get(step), self._due_on_disk(step)
        known = None if digested is None else self._whole(digested)
        self.memory.copy(step, samples, updates=updates, known=known, to_disk=to_disk, text=text, good=self._due_as_good(step))
        failed = self.memory.disk_error
        if bool(failed) != self._disk_failed:
            self._disk_failed = bool(failed)
            told = {"time": time.time(), "step": step, "tier": Tier.DISK}
            self.report(SaveFailed(**told, error=failed) if failed else SaveWorks(**told))

    def close(self) -> None:
        """Wait until copies in progress are complete."""
        if self.memory:
            self.memory.settle()


class Split:
    """Ranks that should hold the same bits but do not. `odd`: the ranks that differ from the majority; if there is no majority, all of
    these ranks."""

    def __init__(self, ranks: Sequence[int], digests: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        (common, count), *_ = Counter(digests).most_common()
        majority = 2 * count > len(ranks)
        self.odd = tuple(r for r, d in zip(ranks, digests, strict=True) if d != common) if majority else self.ranks
        self.witness = min(set(ranks) - set(self.odd), default=ranks[0])


class Replicas:
    """Digests of ranks that hold the same state, exchanged while the next step is computed."""

    def __init__(self, trainer: Trainer) -> None:
        mesh, groups = trainer.groups.mesh, dict[tuple[int, ...], list[int]]()
        experts = any(isinstance(block.mlp, MoeSpec) for block in trainer.model.blocks)
        for rank in range(mesh.ranks):
            places = [mesh.state_coordinates(rank), mesh.expert_coordinates(rank) if experts else {}]
            held = [value for place in places for axis, value in place.items() if axis != "dp_replicate"]
            groups.setdefault(tuple(held), []).append(rank)
        self.groups = [ranks for ranks in groups.values() if len(ranks) > 1]
        self.device, self.world = trainer.device, trainer.groups.world
        self._work: Any = None

    def start(self, known: int) -> None:
        """Start to send this rank's digest to all ranks."""
        if self.groups:
            self.wait()
            own = torch.tensor([known - (1 << 64) if known >= 1 << 63 else known], device=self.device)
            self._everyone = own.new_empty(self.world.size())
            self._work = dist.all_gather_into_tensor(self._everyone, own, group=self.world, async_op=True)

    def wait(self) -> list[Split]:
        """Wait for all digests; return the groups of replicas whose states differ."""
        if self._work is None:
            return []
        self._work.wait()
        self._work = None
        found = self._everyone.tolist()
        digests = [[found[rank] for rank in ranks] for ranks in self.groups]
        return [Split(ranks, of) for ranks, of in zip(self.groups, digests, strict=True) if len(set(of)) > 1]
