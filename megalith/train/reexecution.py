"""Silent-corruption checks by recomputation: another replica recomputes gradients, and the rank that keeps a copy of the state recomputes
updates. After the reduction, a wrong gradient is the same on every rank, so no comparison of states finds it. Before the reduction, a
gradient can be compared with the gradient that another replica computes from the same samples: the same weights, kernels and order give the
same bits. Persistent faults are found within `verify_every` steps; a one-off error is found only if it hits the compared computation. With
`verify = "all"`, the compared computation is the whole step; with `"one"`, it is an extra computation that training does not use. With only
one data rank, each rank repeats its own computation, which finds transient faults, but no fault that gives the same wrong result each time.
(Silent data corruption in training: arXiv:2502.12340, 2604.00726.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.memory import Memory, checksum, checksum_words
from megalith.data.stream import Batch as Samples
from megalith.fleet.tiers.copies import Entry
from megalith.parallel.data import Bucket, local
from megalith.parallel.groups import wait_for
from megalith.spec.sizes import model_parameters
from megalith.spec.state import away_names
from megalith.train.assemble import Trainer
from megalith.train.batches import count_valid
from megalith.train.measure.aside import smallest, uncounted
from megalith.train.optimizers.rule import Part
from megalith.train.step import to_batches

Read = Callable[[int, int], Sequence[Samples]]
"""A function (step, data rank) that returns the microbatches of this data rank in this step."""


class GradientProbe:
    """Computes a digest of this rank's gradients before their reduction, and whether they are finite."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.digests = False
        self.drops = False
        self._sums: list[Tensor] = []
        self._before: list[Tensor] = []
        self._words: list[Tensor] = []
        for bucket in buckets:
            bucket.probe = self

    def clear(self) -> None:
        """Drop the recorded digests."""
        self._sums, self._before, self._words = [], [], []

    def next(self) -> None:
        """Begin a step. Keep the record whether all gradients of the previous step were finite, because the norm of that step may become
        known only later."""
        self._sums, self._before, self._words = [], self._sums, []

    def __call__(self, grads: Sequence[Tensor]) -> bool:
        self._sums.append(torch.stack([grad.sum() for grad in grads]).sum().float())
        if self.digests:
            self._words.append(checksum_words(grads))
        return not self.drops

    def finite(self) -> bool:
        """Return True if all gradients were finite. (Only the sum of the gradients is checked; the sum of finite gradients overflows only
        if their norm does.)"""
        sums = [*self._before, *self._sums]
        return not sums or bool(torch.stack(sums).isfinite().all())

    def digest(self) -> Tensor:
        """Return the digest of all gradients, int64: the sum of the gradients' words."""
        return torch.stack(self._words).sum() if self._words else torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True)
class Disagreement:
    """Ranks whose gradients another replica did not reproduce. `suspects`: the faulty ranks if a further computation found them, else all
    ranks involved; empty if a non-finite gradient prevented the comparison."""

    suspects: tuple[int, ...]
    text: str


class GradientVerifier:
    """Recomputes gradients on another replica. All ranks build this object together, because it creates communicators."""

    def __init__(self, trainer: Trainer, probe: GradientProbe, *, read: Read, microbatches: Literal["one", "all"]) -> None:
        self.trainer, self.probe, self.read, self.whole = trainer, probe, read, microbatches == "all"
        self.shift = trainer.groups.mesh.replica_shift
        self.executor = trainer.executor if self.whole else smallest(trainer)

    # --- gradients ---

    def again(self, step: int, *, shift: int = 0) -> tuple[int, bool]:
        """Compute the gradients of the data rank that is `shift` places further, and drop them; return their digest, and whether they are
        finite."""
        trainer = self.trainer
        here = trainer.groups.coordinates["data"]
        samples = self.read(step, (here + shift) % trainer.groups.mesh.data)
        valid = count_valid(samples, groups=trainer.groups)  # of all together: a rotation changes nothing
        count = self.executor.program.microbatches
        chosen = [samples[(step + i) % len(samples)] for i in range(count)] if count < len(samples) else samples
        if self.executor.hidden != trainer.executor.hidden:  # the run is in another phase
            self.executor.adopt(self.executor.program, trainer.executor.hidden)
        with self._aside():
            self.executor.run(to_batches(trainer, chosen, valid=valid))
            return int(self.probe.digest()), self.probe.finite()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        probe = self.probe
        kept = probe.digests, probe._sums, probe._before, probe._words
        probe.clear()
        probe.digests = probe.drops = True
        try:
            with uncounted(self.trainer):
                yield
        finally:
            probe.drops = False
            probe.digests, probe._sums, probe._before, probe._words = kept

    def compare(self, step: int) -> Disagreement | None:
        """Compare gradients between replicas, right after a step's backwards; all ranks return the same result. With `verify = "all"`,
        `probe.digests` must have been True since the step began."""
        finite = self.probe.finite()
        own = int(self.probe.digest()) if self.whole else self.again(step)[0]
        told = table([own, self.again(step, shift=self.shift)[0], int(finite)], self.trainer)
        if not all(finite for _, _, finite in told):
            return Disagreement((), "gradients are not finite")
        first = [(digest, again) for digest, again, _ in told]
        wrong = self._differing(first)
        if not wrong:
            return None
        second = table([self.again(step)[0], self.again(step, shift=self.shift)[0]], self.trainer)
        return self._judge(wrong, first, [(digest, again) for digest, again in second])

    def _differing(self, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        mesh = self.trainer.groups.mesh
        pairs = []
        for rank, (_, again) in enumerate(found):
            here = mesh.coordinates(rank)
            other = mesh.rank(here | {"data": (here["data"] + self.shift) % mesh.data})
            if found[other][0] != again:
                pairs.append((other, rank))
        return pairs

    def _judge(self, wrong: list[tuple[int, int]], first: list[tuple[int, int]], second: list[tuple[int, int]]) -> Disagreement:
        """Blame the ranks whose second result differs from their first; if there are none, the one rank that is part of every disagreement;
        otherwise all ranks involved."""
        involved = sorted({rank for pair in wrong for rank in pair})
        fickle = tuple(rank for rank in involved if first[rank] != second[rank])
        if fickle:
            return Disagreement(fickle, "did not get the same gradients twice")
        always = tuple(rank for rank in involved if all(rank in pair for pair in wrong))
        told = always if len(wrong) > 1 and len(always) == 1 else tuple(involved)
        return Disagreement(
            told, "got other gradients than another replica from the same samples, although each rank got its own gradients twice"
        )


def table(mine: Sequence[int], trainer: Trainer) -> list[list[int]]:
    """Gather int64 numbers from all ranks, and return them by rank. All ranks call this together."""
    own = torch.tensor([number - (1 << 64) if number >= 1 << 63 else number for number in mine], device=trainer.device)
    everyone = own.new_empty(trainer.groups.world.size() * len(own))
    dist.all_gather_into_tensor(everyone, own, group=trainer.groups.world)
    return everyone.view(-1, len(own)).tolist()


# --- updates ---


class UpdateVerifier:
    """Repeats the update of a shard, from its gradients and a copy of its state before the update. The rank that keeps the copy repeats the
    update; if no other rank keeps a copy, the shard's own rank does."""

    def __init__(self, trainer: Trainer, memory: Memory) -> None:
        self.trainer, self.memory = trainer, memory
        self._works: list[Any] = []
        self._sent: list[Tensor] = []
        self._grads: Tensor | None = None

    def begin(self, step: int) -> None:
        """Right before the update, send the gradients to the rank that repeats the update."""
        self._grads, self._number, self._lr = None, self.trainer.state.updates, self.trainer.lr
        if self.trainer.heads is not None and self.trainer.heads.acts:  # a copy does not know which rows it has of a head
            return
        if self.memory.own.find(step) is None:  # the same on every rank: copies are made at the same steps
            return
        parameters = self.trainer.parameters
        shares = [local(grad).flatten() for name in parameters if (grad := parameters[name].grad) is not None]
        mine = torch.cat([torch.empty(0, device=self.trainer.device), *shares]).cpu()
        if self.memory.kept is None:
            self._grads = mine
            return
        self.memory.finish()
        self._grads = mine.new_empty(sum(entry.size for entry in self._weights()) // 4)
        self._sent = [mine]
        group = self.memory.group
        self._works = [
            dist.isend(mine, group=group, group_dst=self.memory.buddy, tag=3),
            dist.irecv(self._grads, group=group, group_src=self.memory.keeps_for, tag=3),
        ]

    def check(self, step: int) -> int | None:
        """Right after the update, repeat it and compare the results; return the rank whose update is wrong, if this rank found one."""
        if self._grads is None:
            return None
        after = checksum(self.trainer.state.updated())
        if self.memory.kept is not None:
            after = self._exchanged(after)
        buffers = self.memory.kept or self.memory.own
        number = buffers.find(step)
        if number is None:  # a node that joined has none yet
            return None
        label = buffers.files[number].label
        if label is None or buffers.files[number].digest(label) != label.digest:
            return None  # the copy is damaged: a result computed from it would prove nothing
        found = [self._again(buffers.views[number], step) for _ in range(2)]
        return label.rank if found[0] == found[1] != after else None

    def _exchanged(self, after: int) -> int:
        mine = torch.tensor([after - (1 << 64) if after >= 1 << 63 else after])
        theirs = torch.empty_like(mine)
        self._works += [
            dist.isend(mine, group=self.memory.group, group_dst=self.memory.buddy, tag=4),
            dist.irecv(theirs, group=self.memory.group, group_src=self.memory.keeps_for, tag=4),
        ]
        for work in self._works:
            wait_for(work)
        self._works, self._sent = [], []
        return int(theirs) % (1 << 64)

    def _weights(self) -> list[Entry]:
        parameters = {f"weights.{name}" for name in model_parameters(self.trainer.model)}
        return [entry for entry in self.memory.kept_layout.entries if entry.name in parameters]

    def _again(self, state: dict[str, Tensor], step: int) -> int:
        assert self._grads is not None
        parts: list[Part] = []
        entries, offset, place = self._weights(), 0, self.trainer.spec.plan.state
        away = away_names({entry.name: entry.size // 4 for entry in entries}, place.away)
        for entry in entries:
            count = entry.size // 4
            if count:  # copies hold no empty shares
                name = entry.name.removeprefix("weights.")
                device = torch.device("cpu") if entry.name in away else self.trainer.device  # where the update was computed
                slots = {slot.name: state[f"{slot.name}.{name}"] for slot in self.trainer.rule.treated[name].slots}
                weight, *kept = (tensor.to(device, copy=True) for tensor in (state[entry.name], *slots.values()))
                gradient = self._grads[offset : offset + count].view(entry.shape).to(device, copy=True)
                parts.append(Part(name, weight, gradient, dict(zip(slots, kept, strict=True))))
            offset += count
        with torch.no_grad():
            self.trainer.rule.update(parts, number=self._number, lr=self._lr)
        return checksum(tensor for part in parts for tensor in (part.weight, *part.slots.values()))
