"""The newest steps of all ranks, the slow ranks in them, and a replay of their median step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.control.times import decode
from megalith.report.history import own_batch_of
from megalith.watch.replay import Replay, medians, peers
from megalith.watch.source import Source

WINDOW = 20  # newest steps that are looked at
ENOUGH = 10  # steps from which on anything is said
SLOW = 1.1  # times its peers' work from which on a rank is called slow, in the median step ...
OFTEN = 0.7  # ... and more than half as slow in this share of the steps
STEADY = 4.0  # times the ranks' usual differences that the slowness must be


@dataclass(frozen=True)
class Window:
    """The newest steps of all ranks. `own`: the seconds of work by step and rank, without waits (NaN: not known). `past`: each
    rank's work relative to the median of all other ranks, in the first steps of the present generation and phase; None:
    unknown."""

    own: NDArray[np.float64]
    steps: NDArray[np.int64]
    places: Mapping[str, NDArray[np.int64]]
    past: NDArray[np.float64] | None = None

    @property
    def pipeline(self) -> NDArray[np.int64]:
        return self.places.get("pipeline", np.zeros(self.own.shape[1], dtype=np.int64))

    @property
    def data(self) -> NDArray[np.int64]:
        return self.places.get("data", np.zeros(self.own.shape[1], dtype=np.int64))

    @property
    def alone(self) -> NDArray[np.bool_]:
        """For each rank, True if no other rank has the same part of the model."""
        return np.bincount(self.pipeline)[self.pipeline] == 1


def window(source: Source, last: int = 2**62) -> Window | None:
    """Return the newest steps of the newest generation, up to step `last`; None if fewer than ENOUGH steps are known."""
    span = source.times_span()
    if span is None:
        return None
    last = min(last, span[1])
    view, world = source.ranks("own", first=last - 4 * WINDOW + 1, last=last, most=8 * WINDOW)
    if not len(view) or world != source.world:
        return None
    kept = np.flatnonzero((view.steps == 1) & (view.piece == view.piece[-1]))[-WINDOW:]
    if len(kept) < ENOUGH:
        return None
    seen = Window(decode(view.low[kept]) * view.bases[kept, :1], view.first[kept], source.places())
    return Window(seen.own, seen.steps, seen.places, _past(source, int(seen.steps[0]))) if seen.alone.any() else seen


def _past(source: Source, before: int) -> NDArray[np.float64] | None:
    """Return each rank's work relative to the median of all others, in the first steps of the generation and phase; None if fewer
    than ENOUGH such steps precede the step `before`. Earlier phases are left out, because they may divide the work differently
    among stages."""
    phase = source.phase_at(before)
    begun = phase.step if phase else 0
    whole, _ = source.ranks("own", first=begun, most=WINDOW)
    begun = max(begun, int(whole.first[whole.piece == whole.piece[-1]][0]))
    view, _ = source.ranks("own", first=begun, last=min(before, begun + WINDOW) - 1, most=8 * WINDOW)
    oldest = np.flatnonzero((view.piece == whole.piece[-1]) & (view.first >= begun) & (view.last < before))
    return medians(_over_others(decode(view.low[oldest]))) if view.steps[oldest].sum() >= ENOUGH else None


def _over_others(own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each rank's work relative to the median of all others, step by step."""
    return np.stack([row / peers(row, np.zeros(len(row), dtype=np.int64)) for row in own])


def slow_ranks(seen: Window) -> list[tuple[int, float]]:
    """Return the ranks that work longer than their peers in most steps, and by more than normal differences, each with its
    factor. Peers are ranks with the same part of the model. A rank without peers is compared with its own work in the past,
    relative to all other ranks.
    """
    ratios = np.stack([row / peers(row, seen.pipeline) for row in seen.own])
    if seen.alone.any():
        ratios[:, seen.alone] = 1.0 if seen.past is None else (_over_others(seen.own) / seen.past)[:, seen.alone]
    middle = medians(ratios)
    usual = medians(np.abs(ratios - middle))  # how much a rank differs from itself
    among = np.nanmedian(np.abs(middle - np.nanmedian(middle))) if len(middle) >= 8 else 0.0
    limit = np.maximum(SLOW, 1 + STEADY * np.maximum(np.nanmedian(usual) / np.sqrt(len(ratios)), among))
    often = np.nanmean(ratios > 1 + (middle - 1) / 2, axis=0)
    named = np.flatnonzero((middle > limit) & (often >= OFTEN))
    return [(int(rank), float(middle[rank])) for rank in named[np.argsort(-middle[named])]]


def replay(source: Source, own: NDArray[np.float64], seen: Window) -> Replay | None:
    """Return the replay of a step in which each rank works for the seconds in `own`; None if the plan is not known."""
    plan, phase = source.plan, source.phase_at(int(seen.steps[-1]))
    train = source.spec.get("train", {}) | ({"global_batch": phase.global_batch} if phase else {})
    batch = own_batch_of({**source.spec, "train": train})
    if plan is None or not batch or plan.ranks != len(own):
        return None
    return Replay(plan, max(1, batch // (plan.data * plan.microbatch)), own, seen.pipeline, seen.data, tuple(source.spans))


def steady(seen: Window, slow: Iterable[tuple[int, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each rank's seconds of work in the median step, and the seconds that it would work if no rank were slow. `slow`: the
    slow ranks with their factors. Other ranks differ only by chance, so each is given the median of the ranks with the same part
    of the model. If their measured seconds were used instead, the rank that happens to be the slowest of many could hide the cost
    of a slow rank.
    """
    middle, factors = medians(seen.own), dict(slow)
    named = np.array(sorted(factors), dtype=np.int64)
    calm = np.setdiff1d(np.arange(len(middle)), named)
    usual = middle.copy()
    usual[named] /= [factors[rank] for rank in sorted(factors)]
    for place in np.unique(seen.pipeline[calm]):
        usual[seen.pipeline == place] = np.nanmedian(middle[calm[seen.pipeline[calm] == place]])
    own = usual.copy()
    own[named] = middle[named]
    return own, usual
