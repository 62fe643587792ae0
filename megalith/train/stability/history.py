"""A run's history of its watched numbers: their values in the last updates, the current spike, and responses to earlier spikes. The
history is equal on every rank and, like the run's position, part of copies and checkpoints, so all ranks make the same decisions, even
after the run was killed. A band is computed from the median of the newest numbers' logarithms, and from their median change from one number
to the next. Neither a falling loss nor a few outliers widen such a band. (OLMo-core uses the mean and standard deviation of a window; a
falling loss and outliers widen these.)

One step outside a band is not yet a spike, because a single batch of unusual text has a high loss too. An unstable run stays outside its
band, or leaves the band by far.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from megalith.spec.run import StabilitySpec

NORMAL = 1.0484  # standard deviations of independent normal numbers in the median magnitude of the change from one to the next
MINIMUM = {"loss": math.log(1.2), "norm": math.log(10.0)}
"""The minimum distance from the median to the upper end of a band, in logarithms. Without this minimum, numbers that vary little would
leave their band by chance: of 5,000 clean losses of single batches of a small Llama, two were 12 % and 15 % above their median. Gradient
norms of a few times the usual are common in the first hundred updates, and clipping handles them."""
JUDGED_FROM = 32  # numbers that make a band; a shorter window needs half of its own
LEVEL = 16  # the newest numbers, whose median is a band's base
GROSS = 2.0
"""A number at this many times the distance from the median to the end of its band, in logarithms, is a spike by itself. If the tail of
the noise is exponential, such a number is as rare as two steps in a row at the end of the band."""
AFTER = 0.5
"""In the step after one outside a band, the band ends at this part of its usual distance from the median. A learning rate that was too
high for ten steps raised the loss in all of them, but not above the whole band twice in a row."""
CALM = 8  # steps inside all bands that end a spike
TINY = 1e-300  # for the logarithm of a number that is 0
RECENT = 8  # steps before a spike in which a change of the learning rate may be its cause
JUMP = 1.5  # times that a learning rate differs from the update before's, beyond all schedules once a band is known
RATES = 16  # learning rates that a history keeps: those shortly before a spike, and of its own updates


@dataclass(frozen=True)
class Departure:
    """A watched number that lies outside its band."""

    name: str
    value: float
    middle: float
    """The median of the newest values of this number."""
    end: float
    """The upper end of the band."""

    @property
    def gross(self) -> bool:
        """True if the value is a spike by itself."""
        middle = math.log(max(self.middle, TINY))
        return math.log(self.value) - middle >= GROSS * (math.log(self.end) - middle)

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} above {self.end:.4g} (median {self.middle:.4g})"


@dataclass(frozen=True)
class LearningRateJump:
    """A change of the learning rate from one update to the next."""

    step: int
    before: float
    after: float

    @property
    def size(self) -> float:
        """The logarithm of the ratio of the two rates."""
        return math.log(self.after / self.before)


@dataclass(frozen=True)
class PastUpdate:
    """An update, and the numbers that its step had."""

    step: int
    loss: float
    norm: float


@dataclass(frozen=True)
class History:
    """Watched numbers of the last updates, oldest first, and the record of spikes. Steps are numbered from 0."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    began: int = -1
    """The first step of the current spike, or the newest step if it is suspected; -1: neither."""
    outside: int = 0
    """The number of steps of the current spike with a number outside its band; 0: no spike, or only a suspected step."""
    calm: int = 0
    """The number of consecutive steps inside all bands since the last step outside a band."""
    rewinds: tuple[tuple[int, int], ...] = ()
    """For each rewind, the number of steps tried before it, and the step of the restored copy."""
    left_out: int = 0
    """Number of updates skipped or undone because of spikes."""
    lowered: int = -1
    """The first update whose learning rate is no longer lowered; -1: the rate was never lowered."""
    lowerings: int = 0
    most_lr: float = 0.0
    """The maximum learning rate of updates before update `held`: the rate before the jump that caused a rewind."""
    held: int = -1
    """The first update whose learning rate `most_lr` no longer limits; -1: no limit was set."""
    raised: tuple[tuple[int, int], ...] = ()
    """The blocks that `precision.auto` has switched to high precision, each with the number of steps tried before that."""
    rates: tuple[tuple[int, float], ...] = ()
    """The steps and learning rates of the newest updates."""
    text: int = 0
    """The kind of text to which the watched numbers belong, as the number of the first phase with this kind of text (`Phases.texts`)."""

    @classmethod
    def load(cls, record: Mapping[str, Any]) -> "History":
        """Return the history that `dump` wrote, or that dataclasses.asdict returned."""
        lists = {name: tuple(record[name]) for name in ("losses", "norms")}
        pairs = {name: tuple((one, other) for one, other in record.get(name, ())) for name in ("rewinds", "raised", "rates")}
        return cls(**{**record, **lists, **pairs})

    def dump(self) -> str:
        """Return the history as text, of at most `room` bytes."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def departures(self, loss: float, norm: float, spec: StabilitySpec) -> tuple[Departure, ...]:
        """Return the watched numbers of a step that lie outside their bands; empty while too few earlier numbers are known. After a
        suspected step the bands are narrower."""
        if not spec.watch or len(self.losses) < min(JUDGED_FROM, spec.window // 2):
            return ()
        found, part = [], AFTER if self.suspects else 1.0
        for name, value, past in (("loss", loss, self.losses), ("norm", norm, self.norms)):
            middle, end = band(past, width=spec.width, least=MINIMUM[name], part=part)
            if value > end:
                found.append(Departure(name, value, middle, end))
        return tuple(found)

    @property
    def suspects(self) -> bool:
        """True if the newest step was outside a band, and it is not known yet whether that is a spike."""
        return self.began >= 0 and self.outside == 0

    def spikes(self, found: Sequence[Departure]) -> bool:
        """Return True if a step with these departures is part of a spike: the step before was outside too, or there is a spike already,
        or both the loss and the norm are outside, or one of them is far outside."""
        return bool(found) and (self.began >= 0 or len(found) > 1 or any(one.gross for one in found))

    def nearby(self, step: int, spec: StabilitySpec) -> int | None:
        """Return the step of the copy that an earlier rewind for a spike near `step` restored; None if there was no such rewind."""
        if self.rewinds and step - self.rewinds[-1][0] < spec.window:
            return self.rewinds[-1][1]
        return None

    def may_go_back_to(self, step: int) -> bool:
        """True unless a later rewind has undone the state after step `step`, so that a copy of it must not be restored."""
        return not any(to < step < at for at, to in self.rewinds)

    def rate(self, scheduled: float, *, updates: int, spec: StabilitySpec) -> float:
        """Return the learning rate after `updates` updates, when the schedule's rate is `scheduled`."""
        rate = scheduled * spec.lower_by if updates < self.lowered else scheduled
        return min(rate, self.most_lr) if updates < self.held else rate

    def of_text(self, text: int) -> "History":
        """Return the history for a step with kind of text `text`, without numbers from another kind of text."""
        return self if text == self.text else replace(self, losses=(), norms=(), text=text)

    def jump(self, step: int, lr: float) -> LearningRateJump | None:
        """Return the largest change of the learning rate shortly before the current spike or in it; None if it was below a
        factor of JUMP. `step`, `lr`: the current step and its learning rate."""
        began = self.began if self.began >= 0 else step
        changes = pairwise((*self.rates, (step, lr)))
        found = [
            LearningRateJump(at, before, after)
            for (_, before), (at, after) in changes
            if began - RECENT <= at and before > 0 and after > 0
        ]
        largest = max(found, key=lambda one: abs(one.size), default=None)
        return largest if largest and abs(largest.size) >= math.log(JUMP) else None

    def before(self, step: int) -> "PastUpdate | None":
        """Return the newest update before the current spike, or before `step` if there is no spike; None: it is not known."""
        began = self.began if self.began >= 0 else step
        known = zip(reversed(self.rates), reversed(self.losses), reversed(self.norms), strict=False)
        return next((PastUpdate(at, loss, norm) for (at, _), loss, norm in known if at < began), None)

    def updated(self, step: int, lr: float) -> "History":
        """Return the history with the learning rate of an update added."""
        return replace(self, rates=(*self.rates, (step, lr))[-RATES:])

    def accepted(self, loss: float, norm: float, spec: StabilitySpec) -> "History":
        """Return the history with the loss and norm of an update added."""
        return replace(self, losses=(*self.losses, loss)[-spec.window :], norms=(*self.norms, norm)[-spec.window :])

    def suspected(self, step: int) -> "History":
        """Return the history after a suspected step: a step outside a band that is no spike by itself."""
        return replace(self, began=step)

    def strayed(self, step: int) -> "History":
        """Return the history after a step of a spike."""
        return replace(self, began=step if self.began < 0 else self.began, outside=self.outside + 1, calm=0)

    def stayed(self) -> "History":
        """Return the history after a step with all numbers inside their bands."""
        if self.began < 0:
            return self
        return replace(self, calm=self.calm + 1) if self.outside and self.calm + 1 < CALM else self.over()

    def over(self) -> "History":
        """Return this history without its current spike, but with all its losses and norms."""
        return replace(self, began=-1, outside=0, calm=0)

    def rewound(self, copy: "History", *, step: int, to: int, undone: int) -> "History":
        """Return the history after a rewind in step `step`, which undid `undone` updates. `copy`: the history in the restored copy; `to`:
        the step of this copy."""
        done = (*self.rewinds, (step + 1, to))
        left_out = self.left_out + 1 + undone
        known = replace(copy, rewinds=done, left_out=left_out, raised=self.raised)
        known = replace(known, lowered=self.lowered, lowerings=self.lowerings, most_lr=self.most_lr, held=self.held)
        return known.over()


def band(values: Sequence[float], *, width: float, least: float, part: float = 1.0) -> tuple[float, float]:
    """Return the median of the newest `values`, and the upper end of their band, or the point at `part` of the distance to this end.
    `values`: two or more positive numbers."""
    logs = [math.log(max(value, TINY)) for value in values]
    middle = median(logs[-LEVEL:])
    deviation = NORMAL * median(abs(after - before) for before, after in pairwise(logs))
    return math.exp(middle), math.exp(min(700.0, middle + part * max(width * deviation, least)))


def room(spec: StabilitySpec, *, blocks: int = 0) -> int:
    """Return the maximum size of a history as text, in bytes. `blocks`: the number of blocks that may be switched to high precision."""
    numbers = 2 * (spec.window + RATES)
    return 4096 * math.ceil(
        (1024 + 26 * numbers + 48 * (spec.rewinds + blocks)) / 4096
    )  # 26: a number of 17 digits with its exponent
