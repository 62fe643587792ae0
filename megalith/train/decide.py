"""Decision about a step's update: a pure function of numbers that are equal on all ranks, so all ranks make the same decision. The plain
step and post-validation both call `decide` and carry out its decision. An `Update` multiplies the gradients by its factor, the clip factor.
A step with non-finite numbers is repeated or skipped, or the run rewinds or ends. A spike triggers the responses in `stability.answers`,
always in the order skip, rewind, lower, stop. Functions for one kind of problem return a decision, or None if the step has no such problem.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megalith.events import EarlyUpdatesPaused
from megalith.spec.run import LossScaleSpec, OptimizerSpec, StabilitySpec
from megalith.train.stability.history import Departure, History
from megalith.train.stability.loss_scale import Scale

UNUSED = LossScaleSpec()
"""The settings for a run without a loss scale."""
WINDOW = 10
"""Number of recent updates that determine whether the next update is early."""
MAXIMUM = 5
"""Updates are early if at most this many of the last WINDOW updates were clipped. If more of these were clipped, undone updates would cost
more time than early updates save."""
_TINY = 1e-6  # keeps the clipped norm below its limit in spite of rounding, as torch.nn.utils.clip_grad_norm_ does


@dataclass(frozen=True)
class Vitals:
    """Numbers of a step that all ranks know before its update."""

    loss: float
    norm: float
    """The global norm of the gradients."""
    step: int = 0
    updates: int = 0
    """Number of updates made before this step."""
    skipped: int = 0
    """Number of updates that the run has skipped so far because of non-finite numbers."""
    tries: int = 0
    """Number of earlier computations of this step, whose numbers were not finite or outside their bands."""
    repeatable: bool = False
    """True if the step can be computed again from the state in which it began."""
    attended: bool = False
    """True if a healer is present, which can examine a spike and rewind."""
    sound: bool | None = None
    """In a spike, True if the previous batch, computed again, shows less than half of the spike's rise in loss or norm; None if this was
    not examined."""
    scale: Scale | None = None
    """The loss scale of the step; None: the run has none."""
    lr: float = 0.0
    """The learning rate of the update."""

    @property
    def finite(self) -> bool:
        """True if loss and norm are finite."""
        return math.isfinite(self.norm) and math.isfinite(self.loss)

    @property
    def gradient_scale(self) -> float:
        """The loss scale, by which the gradients were multiplied; 1 if the run has none."""
        return 1.0 if self.scale is None else self.scale.value

    @property
    def overflowed(self) -> bool:
        """True if the loss is finite but the scaled gradients are not, so that a smaller loss scale may help."""
        return self.scale is not None and math.isfinite(self.loss) and not math.isfinite(self.norm)


@dataclass(frozen=True)
class Update:
    """Multiply the gradients by `factor` and update the weights. `lowered`: the learning rate is lowered for this and later updates."""

    factor: float = 1.0
    lowered: bool = False


@dataclass(frozen=True)
class Rerun:
    """Compute the step again, because a transient hardware error may have caused the unusual numbers."""

    reason: Literal["not finite", "spike"] = "not finite"


@dataclass(frozen=True)
class Skip:
    """Skip the update. The step's samples are consumed; weights, moments, bias correction and learning rate do not change."""

    reason: str
    spike: bool = False
    scale: Scale | None = None
    """The loss scale of the next step, if the update is skipped because gradients overflowed. A skip because of an overflow does not count
    against `stability.skips`."""


@dataclass(frozen=True)
class Rewind:
    """Restore the newest copy of step `at_most` or earlier, and skip the updates made since that copy. The samples of these updates stay
    consumed, and the step count continues, as if each of the updates had been skipped. `otherwise`: the decision if no such copy exists."""

    reason: str
    at_most: int
    otherwise: "Update | Skip | Stop"


@dataclass(frozen=True)
class Stop:
    """End the run; no weight has changed."""

    reason: str
    spike: bool = False


Decision = Update | Rerun | Skip | Rewind | Stop


def decide(
    vitals: Vitals,
    *,
    optimizer: OptimizerSpec,
    stability: StabilitySpec,
    history: History | None = None,
    loss_scale: LossScaleSpec = UNUSED,
) -> Decision:
    """Return the decision about a step's update."""
    known = history or History()
    if not vitals.finite:
        return _overflow(vitals, loss_scale) or _not_finite(vitals, stability, known)
    adaptive = optimizer.adaptive_clip > 0 and vitals.updates >= optimizer.adaptive_clip_after
    clipped = 0 < optimizer.clip < vitals.norm and not adaptive
    update = Update(optimizer.clip / (vitals.norm + _TINY) if clipped else 1.0)
    return _spike(vitals, departures(vitals, stability, known), stability, known, update) or update


def departures(vitals: Vitals, stability: StabilitySpec, history: History) -> tuple[Departure, ...]:
    """Return the watched numbers of a step that lie outside their usual bands."""
    return history.departures(vitals.loss, vitals.norm, stability) if vitals.finite else ()


def known_after(decision: Decision, vitals: Vitals, *, stability: StabilitySpec, history: History) -> History:
    """Return the run's history after the decision. After a rewind, the caller combines the result with the history in the restored copy
    (`History.rewound`)."""
    if isinstance(decision, Skip) and decision.scale is not None:
        return history  # an overflow is the scale's affair, no spike
    found = departures(vitals, stability, history)
    if not vitals.finite or history.spikes(found):
        known = history.strayed(vitals.step)
    else:
        known = history.suspected(vitals.step) if found else history.stayed()
    match decision:
        case Update(_, lowered):
            until = vitals.updates + stability.lower_for
            known = replace(known, lowered=until, lowerings=known.lowerings + 1) if lowered else known
            return known.accepted(vitals.loss, vitals.norm, stability).updated(vitals.step, vitals.lr)
        case Skip(spike=True):
            return replace(known, left_out=known.left_out + 1)
        case _:
            return known


def _overflow(vitals: Vitals, loss_scale: LossScaleSpec) -> Skip | None:
    after = vitals.scale.overflowed(loss_scale) if vitals.overflowed and vitals.scale is not None else None
    return None if after is None else Skip(f"the gradients overflowed at loss scale {vitals.gradient_scale:,.0f}", scale=after)


def _not_finite(vitals: Vitals, stability: StabilitySpec, history: History) -> Decision:
    if vitals.repeatable and vitals.tries == 0:
        return Rerun()
    found = f"loss {vitals.loss}, gradient norm {vitals.norm}"
    if vitals.overflowed:
        found += f"; the loss scale was {vitals.gradient_scale:,.0f}, which is not above its floor (loss_scale.floor)"
    if stability.not_finite == "skip" and vitals.skipped < stability.skips:
        return Skip(found)
    if stability.not_finite == "skip":
        found += f"; the run has already skipped as many updates as stability.skips = {stability.skips} allows"
    return _rewind(vitals, found, stability, history, otherwise=Stop(found)) or Stop(found)


def _spike(
    vitals: Vitals, found: tuple[Departure, ...], stability: StabilitySpec, history: History, update: Update
) -> Decision | None:
    """If there is a healer, return a rerun for the first computation of a spike's first step, even if the spike is only suspected.
    Otherwise return the first response in `stability.answers` that is not used up, or None for a step that is only suspected. A batch is
    not skipped if the weights are known to be damaged. After a jump of the learning rate, which spoils later updates too, a batch is
    skipped only if the run cannot rewind to before the jump."""
    if not found or not stability.answers:
        return None
    reason = ", ".join(map(str, found))
    if vitals.attended and vitals.tries == 0 and history.outside == 0:
        return Rerun("spike")  # also if it is only suspected: its numbers may be a computing error
    if not history.spikes(found):
        return None
    jumped = _jumped(vitals, history) is not None and _may_rewind(vitals, stability, history)
    if "skip" in stability.answers and vitals.sound is not False and not jumped and history.outside < stability.patience:
        return Skip(reason, spike=True)
    last = _last(vitals, reason, stability, history, update)
    return _rewind(vitals, reason, stability, history, otherwise=last) or last


def _jumped(vitals: Vitals, history: History) -> int | None:
    jump = history.jump(vitals.step, vitals.lr)
    return jump.step if jump is not None and jump.size > 0 else None


def _may_rewind(vitals: Vitals, stability: StabilitySpec, history: History) -> bool:
    return "rewind" in stability.answers and vitals.attended and len(history.rewinds) < stability.rewinds


def _rewind(
    vitals: Vitals, reason: str, stability: StabilitySpec, history: History, *, otherwise: Update | Skip | Stop
) -> Rewind | None:
    """Return a rewind to a copy from before the spike. If the learning rate jumped, the copy must be from before the jump; if the run has
    rewound within the last `stability.window` steps, the copy must be older than the copy of that rewind."""
    if not _may_rewind(vitals, stability, history):
        return None
    began, jumped = history.began if history.began >= 0 else vitals.step, _jumped(vitals, history)
    before = history.nearby(vitals.step, stability)
    at_most = began - stability.margin if jumped is None else min(began - stability.margin, jumped)
    return Rewind(reason, at_most if before is None else min(at_most, before - 1), otherwise)


def _last(vitals: Vitals, reason: str, stability: StabilitySpec, history: History, update: Update) -> Update | Stop:
    """Return the decision when no skip or rewind is left: lower the learning rate, or else end the run, if `stability.answers` allows
    this. While the learning rate is already lowered, or if `stability.answers` allows neither lowering nor stopping, update as usual."""
    if vitals.updates < history.lowered:
        return update
    if "lower" in stability.answers and history.lowerings < stability.rewinds:
        return replace(update, lowered=True)
    return Stop(reason, spike=True) if "stop" in stability.answers else update


class EarlyUpdates:
    """Decides whether the next update is early: made before the norm of the gradients is known. It is wrong, and undone, if the gradients
    must be clipped: with `plan.post_validation` in the next step, with `plan.state.release` in a second pass over the step. The decision
    depends only on the last updates, so all ranks agree."""

    def __init__(self, key: str, *, undone: bool = True) -> None:
        """`key`: the key of the run file that asks for early updates. `undone`: False if no update can be undone, so that none is early."""
        self._key, self._undone, self._clipped = key, undone, deque[bool](maxlen=WINDOW)

    @property
    def paused(self) -> bool:
        """True if the next update waits for the norm."""
        return not self._undone or self._often

    @property
    def _often(self) -> bool:
        return sum(self._clipped) > MAXIMUM

    def note(self, clipped: bool, *, step: int) -> Iterator[EarlyUpdatesPaused]:
        """Record the update of step `step` (1 is the first). Yield an event if `paused` changed."""
        before = self.paused
        self._clipped.append(clipped)
        if self.paused != before:
            yield EarlyUpdatesPaused(
                step=step, clipped=sum(self._clipped), window=len(self._clipped), key=self._key, paused=self.paused
            )
