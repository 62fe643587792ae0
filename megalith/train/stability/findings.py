"""Findings about a spike, and their form in the log: the likely causes with their evidence, strongest evidence first. All functions are
pure. The strongest evidence is a recomputed step that gives different numbers from the same state and samples, because one of the two
computations must have been wrong. The second strongest evidence is a recent jump of the learning rate; the third is the loss of the
previous batch, computed again. If the previous batch's loss is unchanged, the weights are good, and the samples are the cause. If the
previous batch's loss has changed, the weights are damaged, and recomputed steps show whether a computing error or training itself damaged
them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megalith.events import Lowered, Spike
from megalith.spec.run import StabilitySpec
from megalith.train.decide import Decision, Rewind, Skip, Stop, Update, Vitals
from megalith.train.stability.extremes import LOGITS, FirstRise
from megalith.train.stability.history import Departure, LearningRateJump

Reason = Literal["not finite", "spike"]
MOVED = 1.5  # factor by which the largest output of a part must grow for the part to count as moved
NAMED = 5  # largest number of samples that the evidence lists


class SpikeError(ArithmeticError):
    """A spike ends the run, because `stability.answers` requires this. The message contains the spike's numbers and likely causes."""


@dataclass(frozen=True)
class SampleLoss:
    """A sample of a step and its loss. `place`: the sample's domain, and the file in which its tokens begin."""

    number: int
    loss: float
    place: str


@dataclass(frozen=True)
class RecomputedWindow:
    """A window of recomputed steps. `step`: the first step that gave different numbers; None: all steps gave the same numbers. `was`,
    `now`: the loss of step `step` in the run and in the recomputation."""

    steps: int
    step: int | None = None
    was: float = 0.0
    now: float = 0.0


@dataclass(frozen=True)
class OutputGrowth:
    """The first part of the model whose largest output is much larger with the damaged weights than with those of the restored copy."""

    part: str
    was: float
    now: float


def first_moved(was: Mapping[str, float], now: Mapping[str, float], order: Sequence[str]) -> OutputGrowth | None:
    """Return the first part, in the `order` of the model, whose largest output grew by more than half or became non-finite; None if there
    is none."""
    for part in order:
        if part in was and part in now and math.isfinite(was[part]) and not now[part] <= MOVED * was[part]:
            return OutputGrowth(part, was[part], now[part])
    return None


@dataclass(frozen=True)
class Findings:
    """Facts about a spike, equal on all ranks."""

    departures: tuple[Departure, ...] = ()
    to_log: bool = False
    """True if an event for the spike must be logged."""
    repeated: bool | None = None
    """True if the recomputed step gave the same numbers; None if the step was not recomputed."""
    first: str = ""
    """The numbers of the step's first computation, as text."""
    sound: bool | None = None
    """True if the previous step's batch, computed again, shows less than half of the spike's rise in loss or norm; None if it was not
    computed again."""
    batch_before: str = ""
    """Text with the loss of the previous step's batch in that step, and its loss now."""
    jump: LearningRateJump | None = None
    samples: tuple[SampleLoss, ...] = ()
    """The step's samples with the largest losses, largest first."""
    typical: float = 0.0
    """The median loss of the step's samples."""
    read: tuple[range, ...] = ()
    """The step's samples, in ranges; several if a site read samples that another one returned."""
    replayed: RecomputedWindow | None = None
    moved: OutputGrowth | None = None
    risen: FirstRise | None = None
    """The first extreme that rose in the spike; if no step was recomputed, the first one that rose before the spike."""
    compared: bool = False
    """True if the largest outputs of the parts with the damaged weights were compared with those of the restored copy's weights."""
    reported: bool = False
    """True if non-finite numbers were reported to the fleet, which logs its own event."""

    @property
    def accident(self) -> bool:
        """True if the recomputed step gave different numbers, and this was not reported to the fleet."""
        return self.repeated is False and not self.reported

    @property
    def causes(self) -> list[tuple[str, str]]:
        """The likely causes with their evidence, the likeliest first; empty if there is no evidence."""
        found = list[tuple[str, str]]()
        if self.accident:
            found.append(("hardware", f"the recomputed step gave different numbers; {self.first}"))
        if self.replayed is not None and self.replayed.step is not None:
            one = self.replayed
            words = f"step {one.step} had loss {one.was:.6g} in the run, but {one.now:.6g} when it was recomputed"
            found.append(("hardware", f"{words}; {self._part()}" if self.compared else words))
        if self.jump is not None:
            words = f"the learning rate went from {self.jump.before:.3g} to {self.jump.after:.3g} in step {self.jump.step + 1}"
            found.append(("schedule", words))
        if self.sound:
            found.append(("data", f"{self.batch_before}, so the weights are sound; {self._samples()}"))
        if self.sound is False:
            same = self.replayed is not None and self.replayed.step is None
            again = f"; {self.replayed.steps} recomputed steps gave the same numbers" if self.replayed and same else ""
            again += f"; {self._part()}" if self.compared else f"; {self._risen()}" if self.risen else ""
            found.append(("numerics", f"{self.batch_before}, so the weights are damaged{again}"))
        elif self.sound is None and self.risen is not None:
            found.append(("numerics", f"{self._risen()}, before the spike"))
        return found

    def _risen(self) -> str:
        assert self.risen is not None
        one = self.risen
        what = one.name if one.name.startswith(LOGITS) else f"the largest output of {one.name}"
        return f"in step {one.step + 1} {what} rose to {one.now:.3g}, from at most {one.was:.3g} in earlier measurements"

    def _part(self) -> str:
        if self.moved is None:
            return "no part's output is much larger with the damaged weights than with the good ones, so the damage shows first in the head"
        one = self.moved
        return (
            f"{one.part} is the first part whose output is much larger with the damaged weights ({one.now:.3g}) than with the good ones "
            f"({one.was:.3g})"
        )

    def _samples(self) -> str:
        words = "samples " + ", ".join(f"{each.start} to {each.stop - 1}" for each in self.read)
        if self.samples:
            each = ", ".join(f"{one.number} ({one.loss:.3g}, {one.place})" for one in self.samples[:NAMED])
            words += f" have median loss {self.typical:.3g}; the samples with the largest losses: {each}"
        return words

    @property
    def words(self) -> str:
        """The likeliest cause with its evidence, as a sentence."""
        if not self.causes:
            return "No evidence points to a cause."
        cause, evidence = self.causes[0]
        return f"Likely cause: {cause} ({evidence})."


def spike_event(vitals: Vitals, decision: Decision, found: Findings) -> Spike:
    """Return the event for a step that is part of a spike or had a computing error."""
    return Spike(
        step=vitals.step + 1,
        loss=vitals.loss if vitals.finite else None,
        grad_norm=vitals.norm if vitals.finite else None,
        bands={one.name: one.end for one in found.departures},
        answer=_answer(decision, found),
        causes=[{"cause": cause, "evidence": evidence} for cause, evidence in found.causes],
    )


def _answer(decision: Decision, found: Findings) -> str:
    match decision:
        case Update(_, lowered):
            return "lowered" if lowered else "repeated" if found.accident and not found.departures else "none"
        case Skip():
            return "skipped"
        case Rewind():
            return "rewound"
        case Stop():
            return "stopped"
        case _:
            return "repeated"


def lowered_event(stability: StabilitySpec, vitals: Vitals) -> Lowered:
    """Return the event for a learning rate that is lowered for this and later updates."""
    until = vitals.updates + stability.lower_for
    return Lowered(step=vitals.step + 1, factor=stability.lower_by, until=until)
