"""Phases of a run: its mixture, sequence length and global batch as a pure function of the consumed samples.

`train.batch_ramp` and `data.phases` are lists of points. A point sets some values from a given sample on, until a later point
sets them again. All samples of a step have the same values, so a phase begins with the first step at or after its point. Phases
are computed from the run file alone, so they are the same under any plan and in any resumed run. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from megalith.spec.quantity import Amount
from megalith.spec.run import RunSpec

RAMP, DATA = "train.batch_ramp", "data.phases"
"""Keys of the two lists of points in the run file."""


@dataclass(frozen=True)
class Point:
    """Changes of values. `begin`: the amount of training, or number of samples, after which the changes apply."""

    key: str
    begin: int | Amount
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """Steps with the same mixture, sequence length and global batch."""

    number: int
    first: int
    """Samples before the phase."""
    step: int
    """Steps before the phase, if the run skips no samples."""
    tokens: int
    """Tokens before the phase."""
    seq_len: int
    global_batch: int
    weights: dict[str, float] | None
    keys: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the points in the run file at which the phase begins."""
    set_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """For each value that a point set: the key of that value in the run file."""

    @property
    def values(self) -> tuple[int, int, int, dict[str, float] | None]:
        """The phase's first sample, sequence length, global batch and mixture."""
        return self.first, self.seq_len, self.global_batch, self.weights

    @property
    def words(self) -> str:
        """Describe the batches of the phase's steps."""
        mixture = "" if self.weights is None else ", " + ", ".join(f"{name} {share:g}" for name, share in self.weights.items())
        return f"{self.global_batch:,} sequences of {self.seq_len:,} tokens a step{mixture}"


@dataclass(frozen=True)
class Phases:
    """All phases of a run, in their order."""

    all: tuple[Phase, ...]

    @classmethod
    def of(cls, spec: RunSpec) -> "Phases":
        """The phases of a run."""
        train, data = spec.train, spec.data
        points = [
            Point(f"{RAMP}[{i}]", each.begin, {"global_batch": each.global_batch}) for i, each in enumerate(train.batch_ramp)
        ]
        for i, each in enumerate(data.phases):
            named = {name: value for name in ("seq_len", "global_batch", "weights") if (value := getattr(each, name)) is not None}
            points.append(Point(f"{DATA}[{i}]", each.begin, named))
        return cls.walk(Phase(0, 0, 0, 0, train.seq_len, train.global_batch, data.weights), points)

    @classmethod
    def walk(cls, start: Phase, points: Sequence[Point]) -> "Phases":
        """The phases of a run with the initial values of `start` and these points."""
        found, left = [start], list(points)
        while left:
            now = found[-1]
            sample, which = min((_sample(point.begin, now), number) for number, point in enumerate(left))
            point = left.pop(which)
            steps = max(0, -(-(sample - now.first) // now.global_batch))
            named = {name: f"{point.key}.{name}" for name in point.changes}
            changes = {**point.changes, "keys": (point.key,), "set_by": {**now.set_by, **named}}
            if steps == 0:
                found[-1] = replace(now, **changes | {"keys": (*now.keys, point.key)})
            else:
                found.append(replace(_after(now, steps), number=len(found), **changes))
        return cls(tuple(found))

    def at(self, samples: int) -> Phase:
        """The phase of the step that begins after `samples` consumed samples."""
        return next(phase for phase in reversed(self.all) if phase.first <= samples)

    @cached_property
    def shapes(self) -> tuple[Phase, ...]:
        """The first phase of each combination of sequence length and batch."""
        return tuple({(phase.seq_len, phase.global_batch): phase for phase in reversed(self.all)}.values())[::-1]

    @cached_property
    def texts(self) -> tuple[int, ...]:
        """For each phase, the number of the earliest phase with comparable losses: from that phase to this one, mixture and
        sequence length do not change, and the batch never shrinks."""
        found = [0]
        for before, now in pairwise(self.all):
            alike = (before.seq_len, before.weights) == (now.seq_len, now.weights) and before.global_batch <= now.global_batch
            found.append(found[-1] if alike else now.number)
        return tuple(found)

    def begun(self, samples: int) -> tuple[Phase, ...]:
        """The phases that have begun once `samples` samples are consumed."""
        return tuple(phase for phase in self.all if phase.number == 0 or phase.first < samples)

    def after(self, samples: int, steps: int) -> int:
        """Return the samples consumed after `steps` steps that begin at `samples` consumed samples."""
        while steps > 0:
            phase = self.at(samples)
            following = self._next(phase)
            room = steps if following is None else min(steps, -(-(following.first - samples) // phase.global_batch))
            samples, steps = samples + room * phase.global_batch, steps - room
        return samples

    def before(self, samples: int, steps: int) -> int:
        """Return the number of samples consumed `steps` steps earlier than the moment at which `samples` samples are consumed, if
        each step has the batch of its phase; at least 0."""
        while steps > 0 < samples:
            samples, steps = max(0, samples - self.at(samples - 1).global_batch), steps - 1
        return samples

    def steps_in(self, samples: int) -> int:
        """Return the number of whole steps in the first `samples` samples."""
        phase = self.at(samples)
        return phase.step + (samples - phase.first) // phase.global_batch

    def tokens(self, samples: int) -> int:
        """Return the tokens in the first `samples` samples."""
        phase = self.at(samples)
        return phase.tokens + (samples - phase.first) * phase.seq_len

    def steps_to(self, amount: Amount) -> int:
        """Return the number of steps, at least 1, after which `amount` is consumed."""
        phase = next(
            each
            for each in self.all
            if (following := self._next(each)) is None or _measure(following, amount.unit) >= amount.number
        )
        each = {"steps": 1, "samples": phase.global_batch, "tokens": phase.global_batch * phase.seq_len}[amount.unit]
        return max(1, phase.step - (-(amount.number - _measure(phase, amount.unit)) // each))

    def spans(self, steps: int) -> Iterator[tuple[Phase, int]]:
        """Yield each phase that a run of `steps` steps reaches, with the run's number of steps in that phase."""
        for phase in self.all:
            following = self._next(phase)
            end = steps if following is None else min(steps, following.step)
            if end > phase.step:
                yield phase, end - phase.step

    def _next(self, phase: Phase) -> Phase | None:
        return self.all[phase.number + 1] if phase.number + 1 < len(self.all) else None


def during(spec: RunSpec, phase: Phase) -> RunSpec:
    """Return the run with the mixture, sequence length and batch of one phase throughout."""
    train = spec.train.model_copy(update={"seq_len": phase.seq_len, "global_batch": phase.global_batch, "batch_ramp": ()})
    data = spec.data.model_copy(update={"weights": phase.weights, "phases": ()})
    return spec.model_copy(update={"train": train, "data": data})


def _after(phase: Phase, steps: int) -> Phase:
    samples = steps * phase.global_batch
    return replace(
        phase, first=phase.first + samples, step=phase.step + steps, tokens=phase.tokens + samples * phase.seq_len, keys=()
    )


def _sample(begin: int | Amount, phase: Phase) -> int:
    if isinstance(begin, int):
        return begin
    gap = begin.number - _measure(phase, begin.unit)
    if begin.unit == "steps":
        return phase.first + gap * phase.global_batch
    return phase.first + (gap if begin.unit == "samples" else -(-gap // phase.seq_len))


def _measure(phase: Phase, unit: str) -> int:
    return {"steps": phase.step, "samples": phase.first, "tokens": phase.tokens}[unit]
