"""Updates while the next forward computes: once the norm is known, a thread updates the state that is off the device, part by part in the
order in which the next forward needs the parts. The forward waits for a part only when it needs this part.

The update is the same as an update of all parts before the next step, so no bit differs. A part's gradient is freed when the part is
updated. All updates are complete before a step's gradients are added up, and before anything but this forward reads weights or state.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from megalith.parallel.clock import Clock
from megalith.parallel.data import Bucket, Weight
from megalith.train.offload.behind import Behind
from megalith.train.optimizers.rule import Optimizer
from megalith.train.state import State


class _Waits:
    """Waits for single parts of an update. Buckets refer to it, so it does not refer to the state: a state in a cycle of references would
    keep its files until garbage is collected."""

    def __init__(self, behind: Behind, clock: Clock) -> None:
        self.behind, self.clock = behind, clock
        self.first = 0
        """The number of the function in the thread that updates the first part."""
        self.marks: list[tuple[str, object, object]] = []

    def need(self, part: int) -> None:
        """Wait until a part is updated. Raises what its update raised."""
        if self.behind.runs(self.first + part):
            start = self.clock.mark()
            self.behind.wait(self.first + part)
            self.marks.append(("UPDATE_WAIT", start, self.clock.mark()))


class UpdatesAhead:
    """Makes a rank's updates of state that is off the device, of which it may hold none. The update rules must be elementwise."""

    def __init__(
        self, weights: Mapping[str, Weight], buckets: Iterable[Bucket], *, state: State, rule: Optimizer, clock: Clock
    ) -> None:
        """`buckets`: the buckets of this rank, in the order in which a forward needs them."""
        self.state, self.rule, self.clock, self._waits = state, rule, clock, _Waits(state.behind, clock)
        lots = {} if state.home is None else state.home.lots
        names = {weight: name for name, weight in weights.items() if name in lots}
        self._parts: list[list[str]] = []
        for number, bucket in enumerate(dict.fromkeys(buckets)):
            self._parts.append([names[weight] for weight in bucket.weights if weight in names])
            bucket.ready = partial(self._waits.need, number)

    @torch.no_grad()
    def begin(self, *, number: int, lr: float) -> None:
        """Make update `number` of the run from the clipped gradients, and free each gradient once it is used. State on the device is
        updated at once."""
        here = [part for part in self.state.parts() if part.home is None]
        self.rule.update(here, number=number, lr=lr)
        self._free(part.name for part in here)
        behind = self.state.behind
        self._waits.first = behind.started + 1
        for names in self._parts:
            behind.start(partial(self._update, names, number, lr))
        behind.start(self.state.settle)

    @torch.no_grad()
    def _update(self, names: list[str], number: int, lr: float) -> None:
        start = self.clock.mark()
        self.rule.update([self.state.part(name) for name in names], number=number, lr=lr)
        self._free(names)
        self._waits.marks.append(("UPDATE", start, self.clock.mark()))

    def take_marks(self) -> list[tuple[str, object, object]]:
        """Wait until all parts are updated; return when updates ran since the last call, and when the forward waited for them."""
        self._waits.need(len(self._parts))
        marks, self._waits.marks = self._waits.marks, []
        return marks

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self.state.parameters[name].grad = None
