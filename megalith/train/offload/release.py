"""Updates inside the backward: a part is updated once its gradients are reduced, and these are freed, so no step holds all gradients.

The global norm, which decides whether gradients are clipped, is known only after the last backward. Most steps do not clip. So a pass
over the step updates without clipping, and writes to the unused slots on disk. If the step must clip, these slots are dropped. A second
pass computes the same gradients and updates with the clip factor, known by then. The result is bitwise that of an update after the
backward. Where most steps clip, a first pass only measures the norm, so no useless update is written.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.events import ReleasePaused
from megalith.parallel import gradients
from megalith.parallel.clock import Clock
from megalith.parallel.data import Bucket, Weight
from megalith.parallel.gradients import Norms, SharedParameters
from megalith.train.optimizers.rule import Optimizer
from megalith.train.state import State

WINDOW = 10
"""Number of recent updates that decide how the next step begins."""
MAXIMUM = 5
"""With at most this many clipped updates in the window, a step begins with a pass that updates. If more than half are clipped, updates
written in vain cost more than the saved passes."""


class Pace:
    """Decides how a step begins, from the last updates alone, which all ranks know."""

    def __init__(self) -> None:
        self._clipped = deque[bool](maxlen=WINDOW)

    @property
    def clipped(self) -> int:
        """Number of updates among the last `WINDOW` whose gradients were clipped."""
        return sum(self._clipped)

    @property
    def pauses(self) -> bool:
        """True if a step begins with a pass that only measures the norm."""
        return self.clipped > MAXIMUM

    def note(self, clipped: bool, *, step: int) -> Iterator[ReleasePaused]:
        """Record the update of step `step`. Yield an event if `pauses` changed."""
        before = self.pauses
        self._clipped.append(clipped)
        if self.pauses != before:
            yield ReleasePaused(step=step, clipped=self.clipped, window=WINDOW, paused=self.pauses)


@dataclass(frozen=True)
class UpdateRequest:
    """A request for a pass over the step: the factor for all gradients (None: only measure them), and the update to make."""

    factor: float | None
    number: int
    lr: float


class Release:
    """Per-rank updates inside the backward. All of the optimizer's state must be on disk, and the update rules must be elementwise."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        stages: Iterable[Iterable[Bucket]],
        shared: SharedParameters,
        *,
        state: State,
        rule: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        clock: Clock,
    ) -> None:
        """`stages`: the buckets that each of this rank's stages uses."""
        self.state, self.rule, self.parameters, self.clock = state, rule, parameters, clock
        used = Counter(bucket for buckets in stages for bucket in {*buckets})
        # what other ranks or another stage of this rank add to is complete only after the last backward
        apart = {*shared.partial, *shared.tied}
        apart |= {name for name, weight in weights.items() if any(weight in b.weights for b, times in used.items() if times > 1)}
        self._names = {weight: name for name, weight in weights.items() if name not in apart}
        self._late = [name for name in weights if name in apart]
        self._buckets = tuple(used)
        self.pace = Pace()
        self.norms: dict[str, Norms] = {}
        """Norms of the last pass's gradients, before any clipping, by parameter."""
        self.odd: dict[str, Tensor] = {}
        """The number of these gradients' non-finite elements."""
        self.marks: list[tuple[str, object, object]] = []
        """Start and end times of the last pass's updates."""
        self.asked: UpdateRequest | None = None
        """The last pass; None if it was undone, or its update is already counted."""

    @contextmanager
    def during(self, asked: UpdateRequest, *, loss_scale: float) -> Iterator[None]:
        """In the block, make the update of each reduced gradient, and free it. `loss_scale`: the factor to remove from the
        gradients."""
        self.norms, self.odd, self.marks = {}, {}, []

        def reduced(bucket: Bucket) -> None:
            names = [self._names[weight] for weight in bucket.weights if weight in self._names]
            self._take(names, asked, loss_scale)

        for bucket in self._buckets:
            bucket.done = reduced
        try:
            yield
        finally:
            for bucket in self._buckets:
                bucket.done = None
        self._take(self._late, asked, 1.0)
        self.asked = asked

    @torch.no_grad()
    def _take(self, names: Sequence[str], asked: UpdateRequest, loss_scale: float) -> None:
        start = self.clock.mark()
        there = {name: grad for name in names if (grad := self.parameters[name].grad) is not None}
        if not there:
            return
        gradients.scale(there.values(), 1 / loss_scale)
        self.norms |= zip(there, gradients.norms_of(there.values()), strict=True)
        self.odd |= {name: gradients.odd_elements(grad) for name, grad in there.items()}
        if asked.factor is not None:
            gradients.scale(there.values(), asked.factor)
            self.rule.update([self.state.part(name) for name in there], number=asked.number, lr=asked.lr)
        for name in there:
            self.parameters[name].grad = None
        self.marks.append(("UPDATE", start, self.clock.mark()))

    def take_back(self) -> None:
        """Undo the last pass: drop its update, if the pass made one."""
        if self.asked is not None and self.asked.factor is not None:
            self.state.drop_update()
        self.asked, self.norms = None, {}
