"""Finds the cause of a spike, in which a run's numbers leave their bands, and restores a good state, on all ranks together. Without a
spike, the healer only records one entry for each step. In the first step of a spike, it makes two recomputations: the loss of the previous
batch, which distinguishes damaged weights from bad samples, and the step itself, which reveals a computing error. A rewind restores the
state from a copy in memory or from a checkpoint, and no rank restarts. After a rewind to a copy in memory, the steps since this copy are
recomputed where possible, to compare their numbers with those of the run. If the run is killed at any point, it restarts from the remaining
copies and makes the same decisions.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.memory import CopyError, Memory
from megalith.data.stream import Batch as Samples
from megalith.events import Event, Lowered, Rewound
from megalith.exchange import ObjectCollectives
from megalith.fleet.observations import CopyCorrupt
from megalith.fleet.tiers import Tier
from megalith.schedule.action import parts
from megalith.spec.phases import Phase
from megalith.train.assemble import Trainer
from megalith.train.decide import Decision, Rewind, Update, Vitals
from megalith.train.guard import StateGuard
from megalith.train.received import receive
from megalith.train.restore import Position, history_in, position_in, report_copy
from megalith.train.stability.findings import NAMED, Findings, RecomputedWindow, SampleLoss, first_moved
from megalith.train.stability.history import LearningRateJump
from megalith.train.stability.samples import SampleLosses
from megalith.train.step import AllGatherTotals, accumulate, seed_step
from megalith.train.step_hooks import FirstComputation
from megalith.train.tally import StepTotals


@dataclass(frozen=True)
class Data:
    """Access to the run's data of each step. `reads` returns whether the samples of a past step can be read again, `read` this rank's
    microbatches of a step, `mine` the numbers of their samples, `numbers` those of all samples of a step, in ranges, and `shape` a step's
    phase and number of samples, as `Trainer.enter` takes them."""

    reads: Callable[[int], bool]
    read: Callable[[int], list[Samples]]
    mine: Callable[[int], Sequence[Sequence[int]]]
    numbers: Callable[[int], tuple[range, ...]]
    shape: Callable[[int], tuple[Phase, int]]
    place: Callable[[int], str]


@dataclass(frozen=True)
class Target:
    """A copy of the state for a rewind."""

    step: int
    tier: Tier


@dataclass(frozen=True)
class _Past:
    """A finished step. `factor`: the factor by which the step's gradients were multiplied; None: there was no update. `how`: the loss
    scale, and True if all products used high precision."""

    step: int
    loss: float
    squares: float
    lr: float
    factor: float | None
    rewound: bool
    how: tuple[float, bool]


class Healer:
    """Examines spikes on one rank, and rewinds its state: a `step_hooks.Healer`. Construction and every method are collective."""

    def __init__(
        self,
        trainer: Trainer,
        data: Data,
        *,
        checkpointer: Checkpointer,
        guard: StateGuard | None,
        beat: Callable[[str, int], object] = lambda phase, step: None,
    ) -> None:
        """`beat` sends a heartbeat with a phase and a step."""
        stability = trainer.spec.stability
        self.trainer, self.data, self.checkpointer, self.guard = trainer, data, checkpointer, guard
        self._beat = beat
        self.memory: Memory | None = guard.memory if guard else None
        self._past = deque[_Past](maxlen=stability.window + 4 * stability.keep_every + stability.patience)
        self._sampled: SampleLosses | None = None
        self._damaged: tuple[int, dict[str, float]] = -1, {}  # a step, and the largest outputs that it had in the spike
        self._found = Findings()  # of the spike that is not over

    def note(self, vitals: Vitals, totals: StepTotals, decision: Decision, *, lr: float) -> None:
        """Record the decision about a step before it is carried out, with the learning rate `lr`."""
        factor = decision.factor if isinstance(decision, Update) else None
        how = vitals.gradient_scale, self.trainer.is_wide(vitals.updates)  # of this step: a later one may be in progress
        self._past.append(_Past(vitals.step, totals.loss, totals.squares, lr, factor, isinstance(decision, Rewind), how))

    # --- causes ---

    def examine(self, before: FirstComputation, step: int) -> Findings:
        """Recompute the loss of the previous batch, and prepare to recompute this step."""
        history, spec = self.trainer.state.history, self.trainer.spec.stability
        found = Findings()
        self._put_back(step)
        self._beat("diagnosis", step)
        last = history.before(step)  # a resumed run has no record of its own, and must make the same decision
        if last is not None and self.data.reads(last.step):
            seed_step(self.trainer, last.step)
            self.trainer.extremes.demand()
            now = self._again(last.step)
            self._damaged = last.step, self.trainer.extremes.last.largest
            rises = {"loss": _rise(last.loss, now.loss), "norm": _rise(last.norm, now.norm)}
            out = history.departures(before.totals.loss, before.totals.norm, spec)
            sound = all(rises[one.name] < _rise(one.middle, one.value) / 2 for one in out)
            words = f"the samples of step {last.step + 1} had loss {last.loss:.4g} in that step, and have {now.loss:.4g} now"
            found = replace(found, sound=sound, batch_before=words)
            self._put_back(step)
            self.trainer.enter(*self.data.shape(step))
        self.trainer.extremes.demand()  # the spike's own step is computed again next
        if self._sampled is not None:
            self._sampled.close()  # of a step that was suspected alone
        if not self.trainer.spec.plan.compile:
            self._sampled = SampleLosses(self.trainer, count=sum(len(run) for run in self.data.mine(step)))
        return found

    def causes(self, step: int, findings: Findings) -> Findings:
        """Add the evidence from the learning rates, from the samples, and from the extremes of layers at the beginning of the spike."""
        extremes, began = self.trainer.extremes, self.trainer.state.history.began
        # where nothing was computed again, extremes of the spike itself may be those of bad samples; earlier ones are the weights'
        risen = extremes.risen(before=began if findings.sound is None else None)
        jump = self.trainer.state.history.jump(step, self._past[-1].lr)
        found = replace(findings, jump=jump, read=self.data.numbers(step), risen=risen)
        if self._sampled is not None:
            found = self._with_samples(found, self._sampled.close(), step)
            self._sampled = None
        if found.sound is None and self.trainer.state.history.outside > 1:
            began = self._found
            found = replace(found, sound=began.sound, batch_before=began.batch_before, jump=found.jump or began.jump)
            found = replace(found, risen=began.risen, samples=began.samples, typical=began.typical, read=began.read)
        self._found = found
        return found

    def _with_samples(self, found: Findings, mine: list[tuple[float, int]], step: int) -> Findings:
        """Add the losses of all samples of the step, gathered from all ranks. Ranks that share a sequence have parts of its loss; different
        data ranks have different samples."""
        numbers = [number for run in self.data.mine(step) for number in run]
        told = len(mine) == len(numbers) and self.trainer.groups.coordinates["tensor"] == 0 and self._in_order()
        pairs = list(zip(numbers, mine, strict=True)) if told else []
        everyone = ObjectCollectives(self.trainer.groups.world).all_gather(pairs, list[tuple[int, tuple[float, int]]])
        sums = dict[int, tuple[float, int]]()
        for number, (loss, targets) in (pair for part in everyone for pair in part):
            before = sums.get(number, (0.0, 0))
            sums[number] = before[0] + loss, before[1] + targets
        losses = {number: loss / max(1, targets) for number, (loss, targets) in sums.items()}
        if not losses:
            return found
        largest = sorted(losses, key=lambda number: -losses[number])[:NAMED]
        named = tuple(SampleLoss(number, losses[number], self.data.place(number)) for number in largest)
        return replace(found, samples=named, typical=median(losses.values()))

    def _in_order(self) -> bool:
        """True if this rank computes the microbatches of the last stage in order. Ranks of bidirectional pipelines compute these
        microbatches in another order."""
        program = self.trainer.executor.program
        slots = (action for slot in program.rows[self.trainer.groups.coordinates["pipeline"]] for action in parts(slot))
        order = [action.microbatch for action in slots if action.kind == "F" and action.stage == program.stages - 1]
        return order == list(range(program.microbatches))

    def _put_back(self, step: int) -> None:
        if self.guard is not None:
            self.guard.put_back(step)
        else:
            self.trainer.drop()
            seed_step(self.trainer, step)

    def _again(self, step: int) -> StepTotals:
        """Compute the totals of a step with the current weights. Keep the step's gradients, and leave the trainer in the step's phase."""
        self.trainer.enter(*self.data.shape(step))
        accumulated = accumulate(self.trainer, self.data.read(step))
        return AllGatherTotals(self.trainer, accumulated.executed, stop=False).wait()

    # --- going back ---

    def target(self, at_most: int) -> Target | None:
        """Return the newest good copy of step `at_most` or earlier: one that all ranks have in memory, or a checkpoint."""
        mine = (self.memory.steps() if self.memory else set[int](), self.checkpointer.steps() if self._leads else set[int]())
        in_memory = ObjectCollectives(self.trainer.groups.world).all_gather(mine, tuple[set[int], set[int]])
        history = self.trainer.state.history
        held = {Tier.MEMORY: set.intersection(*(memory for memory, _ in in_memory)), Tier.STORE: in_memory[0][1]}
        usable = [
            Target(step, tier)
            for tier, steps in held.items()
            for step in steps
            if step <= at_most and history.may_go_back_to(step)
        ]
        return max(usable, key=lambda one: (one.step, -one.tier.depth), default=None)

    @property
    def _leads(self) -> bool:
        return self.trainer.groups.rank == 0

    def rewind(self, target: Target, step: int, findings: Findings, *, late: bool) -> tuple[list[Event], Findings]:
        """In step `step`, restore the copy `target`; return the events to log, and the findings. `late`: microbatches of a step are in
        progress, so nothing can be recomputed.

        If a copy in memory is damaged, report this and raise Reported."""
        state, spec = self.trainer.state, self.trainer.spec.stability
        began, updates, before, drawn = time.perf_counter(), state.updates, state.history, torch.get_rng_state()
        self._beat("rewinding", step)
        scale = state.scale
        position = self._restore(target, step)
        seconds = time.perf_counter() - began
        replayed = 0
        if not late and target.tier is Tier.MEMORY and self._continuous(target.step, step):
            result, sound = self._replay(target.step, step, position.updates)
            replayed = result.steps
            moved = first_moved(sound, self._damaged[1], self.trainer.model.part_names)
            findings = replace(findings, replayed=result, moved=moved, compared=bool(sound and self._damaged[1]))
            self._restore(target, step)
            self.trainer.enter(*self.data.shape(step))
        torch.set_rng_state(drawn)
        if state.scale is not None and scale is not None:  # updates that were left out stay so
            state.scale = state.scale._replace(overflows=scale.overflows)
        undone = updates - position.updates
        state.updates, state.skipped = position.updates, step + 1 - position.updates
        state.history = before.rewound(position.history, step=step, to=target.step, undone=undone)
        if self.guard is not None:
            self.guard.adopt(step + 1)
        self.trainer.extremes.forget(target.step)
        dropped = range(position.samples, self.data.numbers(step)[-1].stop)
        left = spec.rewinds - len(state.history.rewinds)
        said = {"undone": undone, "first": dropped.start, "last": dropped.stop - 1, "tier": target.tier.value}
        rewound = Rewound(step=step + 1, to=target.step, **said, seconds=seconds, replayed=replayed, left=left)
        return [rewound, *self._hold(findings.jump, step)], findings

    def _hold(self, jump: LearningRateJump | None, step: int) -> list[Event]:
        """If the learning rate jumped up and the run may lower it, limit it to its value before the jump, because the higher rate would
        cause the same spike again."""
        state, spec = self.trainer.state, self.trainer.spec.stability
        if jump is None or jump.after < jump.before or "lower" not in spec.answers:
            return []
        until = state.updates + spec.lower_for
        state.history = replace(state.history, most_lr=jump.before, held=until)
        return [Lowered(step=step + 2, factor=1.0, until=until, at_most=jump.before)]

    def _restore(self, target: Target, step: int) -> Position:
        if target.tier is Tier.MEMORY:
            assert self.memory is not None
            try:
                label = self.memory.go_back(target.step, now=step + 1)
            except CopyError as error:
                report_copy(CopyCorrupt, error.tier, error.step, error.slot, str(error))
            self.trainer.state.loaded()
            return Position(label.step, label.samples, label.updates, history_in(self.memory.text))
        loaded = receive(self.trainer, partial(self.checkpointer.load, step=target.step))
        assert loaded is not None
        self.trainer.state.loaded()
        if self.memory is not None:
            self.memory.forget(after=target.step, before=step + 1)
        return position_in(loaded.meta)

    def _continuous(self, first: int, step: int) -> bool:
        """True if all steps from `first` to `step` are recorded, none of them was rewound, and all used the same loss scale, and high
        precision in the same products. Others would give other numbers although the hardware is sound."""
        if any(first < raised <= step for _, raised in self.trainer.state.history.raised):
            return False
        known = {past.step: past for past in self._past}
        window = [known[number] for number in range(first, step + 1) if number in known]
        whole = len(window) == step + 1 - first and not any(past.rewound for past in window[:-1])
        return whole and len({past.how for past in window}) == 1

    def _replay(self, first: int, step: int, updates: int) -> tuple[RecomputedWindow, dict[str, float]]:
        """Recompute the steps from `first` to `step`, until one gives different numbers. Also return the largest outputs, with good
        weights, in the step that was examined in the spike. The state is unusable afterwards."""
        sound = dict[str, float]()
        known = {past.step: past for past in self._past}
        for done, number in enumerate(range(first, step + 1), start=1):
            past = known[number]
            self._beat("replay", step)
            self._put_back(number)
            if number == self._damaged[0]:
                self.trainer.extremes.demand()
            totals = self._again(number)
            sound = self.trainer.extremes.last.largest if number == self._damaged[0] else sound
            same = (totals.loss, totals.squares) == (past.loss, past.squares)
            finite = math.isfinite(past.loss) and math.isfinite(past.squares)
            if not same and (finite or (math.isfinite(totals.loss) and math.isfinite(totals.squares))):
                self.trainer.drop()
                return RecomputedWindow(done, number + 1, past.loss, totals.loss), sound
            if past.factor is not None and number < step:
                updates = self._update(past, updates)
            self.trainer.drop()
        return RecomputedWindow(step + 1 - first), sound

    @torch.no_grad()
    def _update(self, past: _Past, updates: int) -> int:
        trainer = self.trainer
        assert past.factor is not None, f"step {past.step} had no update"
        trainer.clip(past.factor, number=updates)
        trainer.advance(number=updates, lr=past.lr)
        trainer.state.drop_gradients()
        trainer.update_router_biases()
        return updates + 1


def _rise(before: float, after: float) -> float:
    if not math.isfinite(after):
        return math.inf
    return math.log(max(after, 1e-300) / max(before, 1e-300))
