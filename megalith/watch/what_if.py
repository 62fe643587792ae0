"""Answers to what-if questions about the newest steps: the duration of a step if one rank, node, data rank, stage or kind of computation
took no longer than the median."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megalith.control.times import decode
from megalith.report import units
from megalith.watch.replay import Replay, levelled, medians
from megalith.watch.source import Source
from megalith.watch.window import WINDOW, Window, replay, slow_ranks, steady, window

KINDS = ("forward", "backward", "optimizer")
"""The kinds of computations that make up a rank's work."""

NAMES = {"node": "node", "data": "data rank"}

MINIMUM, NOTHING = (
    0.01,
    0.001,
)  # shares of a step below which an answer is left out of the list, and is that nothing would be saved


@dataclass(frozen=True)
class WhatIfAnswer:
    """The answer to one question. `gain`: the fraction of a step that would be saved."""

    what: str
    which: int | str
    gain: float
    words: str


@dataclass(frozen=True)
class WhatIfAnalysis:
    """The newest steps, prepared for what-if questions. `whole`: the seconds of the median step; 0: not known."""

    source: Source
    seen: Window
    slow: list[tuple[int, float]]
    one: Replay
    usual: NDArray[np.float64]
    whole: float

    @classmethod
    def of(cls, source: Source, seen: Window | None = None) -> "WhatIfAnalysis | None":
        """Prepare the newest steps of a run; None if too few steps or no plan are known."""
        seen = seen or window(source)
        if seen is None:
            return None
        slow = slow_ranks(seen)
        own, usual = steady(seen, slow)
        one = replay(source, own, seen)
        seconds = source.recent(["seconds"], WINDOW)["seconds"]
        return None if one is None else cls(source, seen, slow, one, usual, float(np.nanmedian(seconds)) if len(seconds) else 0.0)

    @property
    def share(self) -> float:
        """Return the fraction of a whole step that the pipeline's computations and bubble take. The rest of the step does not
        depend on the ranks' work."""
        return self._share(self.one.seconds())

    def _share(self, seconds: float) -> float:
        return min(1.0, seconds / self.whole) if self.whole > 0 else 1.0

    def ask(self, what: str, which: int | str) -> WhatIfAnswer | None:
        """Answer one what-if question; None if the run has no such rank, node, data rank, stage or kind."""
        now = self.one.own
        if what == "kind":
            if which not in KINDS:
                return None
            condition, then = f"If {which} were as fast on each rank as on the median rank,", self._level(str(which))
        else:
            at = np.flatnonzero(self._places[what] == which)
            if not len(at):
                return None
            if what == "stage":
                condition, then = (
                    f"If pipeline rank {which} were as fast as the median one,",
                    levelled(now, self.seen.pipeline, int(which)),
                )
            else:  # these ranks are compared with all others, whether or not they are so slow that they are named
                now, usual = steady(self.seen, {**dict.fromkeys(at.tolist(), 1.0), **dict(self.slow)}.items())
                then = now.copy()
                then[at] = usual[at]
                condition = f"If {NAMES.get(what, what)} {which} were as fast as the others,"
        return self._answer(what, which, condition, now, np.minimum(now, then))

    def table(self) -> list[WhatIfAnswer]:
        """Return the answers for the slowest rank, node, data rank and stage, and for each kind of computation, the largest gain
        first. A node or data rank that is slow only because of one slow rank is left out."""
        over = np.nan_to_num(self.one.own / self.usual, nan=1.0)
        asked: list[tuple[str, int | str]] = [("kind", kind) for kind in KINDS]
        for what in ("rank", "node", "data"):
            places = self._places[what]
            means = np.bincount(places, weights=over) / np.maximum(np.bincount(places), 1)
            if means.max() > 1:
                asked.append((what, int(means.argmax())))
        middles = [np.nanmedian(self.one.own[self.seen.pipeline == place]) for place in range(self.seen.pipeline.max() + 1)]
        asked.append(("stage", int(np.argmax(middles))))
        found = [one for what, which in asked if (one := self.ask(what, which)) is not None and one.gain >= MINIMUM]
        alone = max((one.gain for one in found if one.what == "rank"), default=0.0)
        return sorted((one for one in found if one.what not in NAMES or one.gain >= alone + MINIMUM), key=lambda one: -one.gain)

    @property
    def _places(self) -> Mapping[str, NDArray[np.int64]]:
        ranks = np.arange(len(self.usual))
        return {"rank": ranks, "node": self.seen.places["node"], "data": self.seen.data, "stage": self.seen.pipeline}

    def _answer(
        self, what: str, which: int | str, condition: str, now: NDArray[np.float64], then: NDArray[np.float64]
    ) -> WhatIfAnswer:
        """Compare two replays: one with the ranks' seconds of work `now`, and one with `then`, their seconds if the condition
        were true."""
        before = self.one.seconds(now)
        gain = max(0.0, float(self._share(before) * (1 - self.one.seconds(then) / before))) if before > 0 else 0.0
        less = f"{units.percent(gain)} less time" if gain >= NOTHING else "as long as now"
        return WhatIfAnswer(what, which, gain, f"{condition} a step would take {less}.")

    def _level(self, kind: str) -> NDArray[np.float64]:
        """Return the ranks' work. Wherever a rank's work of kind `kind` is more than the median rank's, it is reduced to the
        median rank's."""
        of_kind = self.one.own * self._kinds[kind]
        return self.one.own - np.maximum(0.0, of_kind - np.nanmedian(of_kind))

    @cached_property
    def _kinds(self) -> Mapping[str, NDArray[np.float64]]:
        """Return the fraction of a rank's work that each kind takes. Waits lengthen all kinds alike, so they do not change these
        fractions."""
        first, last = int(self.seen.steps[0]), int(self.seen.steps[-1])
        taken = {}
        for kind in KINDS:
            view, _ = self.source.ranks(kind, first=first, last=last, most=8 * len(self.seen.steps))
            kept = (view.steps == 1) & (view.piece == view.piece[-1])
            taken[kind] = np.nan_to_num(medians(decode(view.low[kept]) * view.bases[kept, :1]))
        whole = np.maximum(sum(taken.values()), np.finfo(np.float64).tiny)
        return {kind: seconds / whole for kind, seconds in taken.items()}
