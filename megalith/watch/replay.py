"""Replay of a measured step in which slow ranks become as fast as the median rank. The schedule's simulator runs with the
measured work of each rank (the what-if analysis of Lin et al. 2025, arXiv:2505.05713, section 3)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megalith.events import Spans
from megalith.report.timeline import mean_seconds
from megalith.schedule import Program, build, lower, simulate
from megalith.schedule.action import Action, RowEntry, computations, parts
from megalith.spec.plan import Plan

REPLICAS = 6  # pipelines that are replayed: those with the most work; the slowest of them ends the step
WEIGHTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Relative time of each kind of computation of a stage, used if no spans were recorded."""


@dataclass(frozen=True)
class Replay:
    """A measured step. `own`: each rank's seconds of work, without waits. `pipeline`, `data`: each rank's position on these axes.
    Ranks that have the same position on both axes (tensor and context ranks) wait for each other in every computation.
    `recorded`: measured spans, which give the relative times of a stage's computations."""

    plan: Plan
    microbatches: int
    own: NDArray[np.float64]
    pipeline: NDArray[np.int64]
    data: NDArray[np.int64]
    recorded: tuple[Spans, ...] = ()
    _known: dict[tuple[float, ...], float] = field(default_factory=dict)  # work of a pipeline's ranks -> its seconds

    @cached_property
    def _program(self) -> Program:
        plan = self.plan
        schedule = build(plan.schedule, ranks=plan.pipeline, microbatches=self.microbatches, chunks=plan.chunks)
        return lower(schedule, plan.zero)

    @cached_property
    def _dealt(self) -> list[dict[tuple[str, int], float]]:
        """For each pipeline rank, return the fraction of the rank's work that each computation (kind, stage) takes."""
        means = mean_seconds(one.spans for one in self.recorded)
        found = []
        for row in self._program.rows:
            done = list(computations(row))
            weights = [means.get((action.kind, action.stage), 0.0) for action in done]
            if not all(weights):
                weights = [WEIGHTS[action.kind] for action in done]
            whole = sum(weights) or 1.0
            found.append({(action.kind, action.stage): weight / whole for action, weight in zip(done, weights, strict=True)})
        return found

    def seconds(self, own: NDArray[np.float64] | None = None) -> float:
        """Return the seconds of the slowest pipeline, from the start of its first computation to the end of its last. `own`:
        seconds of work that replace the measured ones."""
        work = self._places(self.own if own is None else own)
        heaviest = np.argsort(work.sum(axis=0) + work.shape[0] * work.max(axis=0))[::-1][:REPLICAS]
        return max(self._one(tuple(work[:, replica])) for replica in heaviest)

    def _places(self, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the work of each pipeline rank in each replica, which is the work of its slowest tensor or context rank."""
        work = np.zeros((self.plan.pipeline, int(self.data.max()) + 1))
        np.maximum.at(work, (self.pipeline, self.data), np.nan_to_num(own))
        return work

    def _one(self, work: tuple[float, ...]) -> float:
        if work not in self._known:
            alone = self.plan.pipeline == 1
            self._known[work] = work[0] if alone else pipeline_seconds(self._program, lambda action: self._of(action, work))
        return self._known[work]

    @cached_property
    def _home(self) -> dict[tuple[int, int], int]:
        """Map from (stage, microbatch) to the pipeline rank that computes it. In bidirectional schedules a stage is on two ranks."""
        return {(a.stage, a.microbatch or 0): rank for rank, row in enumerate(self._program.rows) for a in computations(row)}

    def _of(self, action: Action, work: tuple[float, ...]) -> float:
        rank = self._home[action.stage, action.microbatch or 0]
        return work[rank] * self._dealt[rank][action.kind, action.stage]

    def without(self, ranks: Iterable[int], usual: NDArray[np.float64]) -> float:
        """Return the fraction of a step that would be saved if these ranks worked no longer than they do in `usual`."""
        own = self.own.copy()
        at = np.fromiter(ranks, dtype=np.int64)
        own[at] = np.minimum(own[at], usual[at])
        whole = self.seconds()
        return 1 - self.seconds(own) / whole if whole > 0 else 0.0


def pipeline_seconds(program: Program, of: Callable[[Action], float]) -> float:
    """Return the seconds from the start of a pipeline's first computation to the end of its last. `of` returns the seconds of a
    computation."""

    def cost(entry: RowEntry) -> float:
        return sum(of(action) for action in parts(entry) if isinstance(action, Action) and action.kind in WEIGHTS)

    return simulate(program, cost).end


def medians(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each column, ignoring NaN, like `np.nanmedian(rows, axis=0)`, but many times faster for few long rows."""
    ordered = np.sort(rows, axis=0)  # NaN come last
    known = len(rows) - np.isnan(rows).sum(axis=0)
    middle = np.stack([np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(rows) - 1)])
    return np.take_along_axis(ordered, middle, axis=0).mean(axis=0)


def peers(own: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each rank, return the median of the other ranks in its group (if the group has more than 64 ranks: of all its ranks),
    or the rank's own value if it is alone in its group."""
    found = own.copy()
    for group in np.unique(groups):
        at = np.flatnonzero(groups == group)
        if len(at) > 64:  # one among so many does not move their median
            found[at] = np.nanmedian(own[at])
        elif len(at) > 1:
            for one in at:
                found[one] = np.nanmedian(own[at[at != one]])
    return found


def levelled(own: NDArray[np.float64], pipeline: NDArray[np.int64], place: int) -> NDArray[np.float64]:
    """Return the ranks' work, with the work of the ranks at pipeline position `place` scaled so that its median equals the median
    of all positions' median work."""
    middles: Mapping[int, float] = {int(one): float(np.nanmedian(own[pipeline == one])) for one in np.unique(pipeline)}
    found = own.copy()
    found[pipeline == place] *= float(np.median(list(middles.values()))) / middles[place]
    return found
