"""The causes of long steps, in words: slow ranks, their cost, and changes that may help."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.planner.gains import TERMS, tries
from megalith.report import units
from megalith.watch.replay import Replay, levelled
from megalith.watch.source import Source
from megalith.watch.what_if import WhatIfAnalysis, WhatIfAnswer
from megalith.watch.window import ENOUGH, WINDOW, Window

GAIN = 0.02  # share of a step below which nothing is named
UNEVEN = 1.15  # times the median data rank that the slowest one works, in the median step, if samples are unlike
STAGE = 1.08  # times the median stage that a stage works
PART = {"data": 0.05, "saving": 0.03, "communication": 0.25, "other": 0.15, "collecting": 0.02}
"""Fraction of a step above which each of these is reported: waiting for data, saving, communication, unexplained time and garbage
collection."""
COLLECTED = 50  # steps over which garbage collections are counted, at least: a start has many
REST, LONGEST = 500, 120.0  # a result is kept this many times as long as its search took, and for so many seconds at most
FABRIC = 1.3  # times the predicted seconds of communication
PLANNED = ("unbalanced stage", "communication", "slow fabric")
"""Kinds of causes that a change of the plan may remedy."""
SHOWN = 3  # plans to try that are shown


@dataclass(frozen=True)
class Cause:
    """A cause of longer steps. `gain`: the fraction of a step that would be saved without this cause. `who`: the ranks
    responsible for it, if any."""

    kind: str
    words: str
    change: str
    gain: float
    who: tuple[int, ...] = ()
    node: int | None = None


class CauseReport(NamedTuple):
    """Causes of lost time, the most expensive first, and answers to the usual what-if questions. `causes` is empty if there is no
    clear cause; `without` is empty if too few steps are known, or if no answer saves enough."""

    causes: tuple[Cause, ...] = ()
    without: tuple[WhatIfAnswer, ...] = ()


def causes(source: Source) -> CauseReport:
    """Return the causes of lost time. A result is reused for REST times the time that its computation took, but at most LONGEST
    seconds, so that a server takes little of a core from the training."""
    known = source.causes
    if source.served:  # `refresh` looks for them, in the thread that follows the run: a page must not wait
        return known[2] if known else CauseReport()
    return refresh(source)


def refresh(source: Source) -> CauseReport:
    """Return the causes, after a new search for them if the last result is too old."""
    known = source.causes
    if known is not None and (known[0] == source.revision or time.monotonic() < known[1]):
        return known[2]
    began = time.thread_time()
    found = _find(source)
    stands = min(REST * (time.thread_time() - began), LONGEST)
    source.causes = source.revision, time.monotonic() + stands, found
    return found


def _find(source: Source) -> CauseReport:
    steps = WhatIfAnalysis.of(source)
    found = [] if steps is None else [*_of_ranks(steps)]
    found += [*_of_step(source)]
    found = [one for one in found if one.gain >= GAIN]
    if any(one.kind in PLANNED for one in found) and (tried := plans(source)):
        words = f"The planner expects {units.percent(tried[0]['gain'])} shorter steps with {tried[0]['change']}."
        found = [replace(one, change=f"{one.change} {words}") if one.kind in PLANNED else one for one in found]
    return CauseReport(tuple(sorted(found, key=lambda one: -one.gain)), () if steps is None else tuple(steps.table()))


def plans(source: Source) -> list[dict[str, Any]]:
    """Return promising changes of the plan, the largest gain first, each with the time that it should save in a measured step.
    The predicted seconds of a step's terms are scaled to the measured seconds. The result is empty without a prediction by the
    planner."""
    predicted = source.predicted or {}
    here, others = predicted.get("time"), predicted.get("others")
    recent = source.recent(["seconds", *{part for parts in TERMS.values() for part in parts}], WINDOW)
    if not here or not others or len(recent["seconds"]) < ENOUGH:
        return []
    measured = {name: sum(float(np.nanmean(recent[part])) for part in parts) for name, parts in TERMS.items()}
    step = float(np.nanmean(recent["seconds"]))
    return [{"change": one.change, "seconds": one.gain, "gain": one.gain / step} for one in tries(here, measured, others)[:SHOWN]]


def _of_ranks(steps: WhatIfAnalysis) -> Iterator[Cause]:
    slow, seen, one, usual, share = steps.slow, steps.seen, steps.one, steps.usual, steps.share
    nodes = seen.places["node"]
    for node in {int(nodes[rank]) for rank, _ in slow}:
        here = np.flatnonzero(nodes == node)
        blamed = [(rank, times) for rank, times in slow if nodes[rank] == node]
        if len(here) > 1 and len(blamed) == len(here) and len(set(nodes)) > 1:
            least, most = blamed[-1][1], blamed[0][1]
            words = f"All {len(here)} ranks of node {node} are slow: they work {least:.2f} to {most:.2f} times as long as peers"
            change = "Look at the node's power, cooling and clocks (megalith doctor), or quarantine it."
            yield Cause(
                "slow node", words, change, share * one.without([r for r, _ in blamed], usual), tuple(r for r, _ in blamed), node
            )
            continue
        for rank, times in blamed[:8]:
            where = f"rank {rank} (pipeline rank {seen.pipeline[rank]}, data rank {seen.data[rank]}, node {node})"
            words = (
                f"Slow: {where} works {times:.2f} times as long as earlier in this run, relative to the other ranks"
                if seen.alone[rank]
                else f"Slow: {where} works {times:.2f} times as long as ranks with the same part of the model"
            )
            change = (
                f"Check whether the device of rank {rank} is throttled, shared or failing (megalith doctor). A spare node may replace "
                f"node {node}."
            )
            yield Cause("slow rank", words, change, share * one.without([rank], usual), (rank,), node)
    yield from _of_stages(one, usual, seen, share)
    yield from _of_samples(one, seen, share, {rank for rank, _ in slow})


def _of_stages(one: Replay, own: NDArray[np.float64], seen: Window, share: float) -> Iterator[Cause]:
    if one.plan.pipeline < 2:
        return
    middles = np.array([np.nanmedian(own[seen.pipeline == place]) for place in range(one.plan.pipeline)])
    place = int(middles.argmax())
    over = float(middles[place] / np.median(np.delete(middles, place)))
    if over < STAGE:
        return
    whole = one.seconds(own)
    gain = share * (1 - one.seconds(levelled(own, seen.pipeline, place)) / whole) if whole > 0 else 0.0
    words = f"Unbalanced: pipeline rank {place} has {over - 1:.0%} more work than the median of the others, which wait for it"
    change = f"Give pipeline rank {place} fewer blocks (plan.layers); `megalith plan` with the changed run file predicts a step's seconds."
    yield Cause("unbalanced stage", words, change, gain, tuple(map(int, np.flatnonzero(seen.pipeline == place)[:8])))


def _of_samples(one: Replay, seen: Window, share: float, slow: set[int]) -> Iterator[Cause]:
    if one.plan.data < 2:
        return
    others = np.array([rank for rank in range(seen.own.shape[1]) if rank not in slow])
    ratios, who = [], []
    for row in seen.own[:, others]:
        by = np.bincount(seen.data[others], weights=np.nan_to_num(row), minlength=one.plan.data)
        ratios.append(by.max() / np.median(by[by > 0]) if by.any() else 0.0)
        who.append(int(by.argmax()))
    most = np.bincount(who).max() / len(who)
    if np.median(ratios) < UNEVEN or most > 0.6:
        return
    times = f"{np.median(ratios):.2f} times"
    words = f"Uneven samples: in the median step, the slowest data rank works {times} as long as the median one"
    words = f"{words}; which data rank is the slowest changes from step to step"
    change = (
        "Samples with long documents cost more (data.document_mask). With larger microbatches, data ranks' work differs less."
    )
    yield Cause("uneven samples", words, change, share * (1 - 1 / float(np.median(ratios))))


def _of_step(source: Source) -> Iterator[Cause]:
    names = ["seconds", "data", "communication", "bubble", "other"]
    recent = source.recent(names, WINDOW)
    if len(recent["seconds"]) < ENOUGH:
        return
    whole = float(np.nanmean(recent["seconds"]))
    shares = {name: float(np.nanmean(recent[name])) / whole for name in names[1:]}
    if shares["data"] > PART["data"]:
        words = f"Data: ranks wait for samples for {units.percent(shares['data'])} of a step"
        yield Cause("data", words, "Put the data on a faster disk, or on a local disk of each node (data.path).", shares["data"])
    if shares["other"] > PART["other"]:
        share = units.percent(shares["other"])
        words = f"Pauses: {share} of a step is spent outside the model: garbage collection, other programs or the system"
        yield Cause(
            "pauses",
            words,
            "Look for other programs on these machines; a trace of slow steps shows more (--profile).",
            shares["other"],
        )
    predicted = (source.predicted or {}).get("time")
    if predicted and predicted["communication"] > 0:
        over = shares["communication"] * whole / predicted["communication"]
        if over > FABRIC:
            words = f"Slow network: exposed communication takes {over:.1f} times the predicted time"
            gain = shares["communication"] * (1 - 1 / over)
            yield Cause("slow fabric", words, "Check the links (megalith doctor) and the placement of nodes.", gain)
    elif shares["communication"] > PART["communication"]:
        words = f"Exposed communication takes {units.percent(shares['communication'])} of a step"
        yield Cause(
            "communication",
            words,
            "Try a plan that sends less or overlaps more: `megalith plan` lists such plans.",
            shares["communication"] / 2,
        )
    yield from _of_collections(source, whole)
    yield from _of_saving(source, whole)


def _of_collections(source: Source, whole: float) -> Iterator[Cause]:
    counted = [one.collecting / one.since for one in source.spans if one.since >= COLLECTED]
    share = counted[-1] / whole if counted else 0.0
    if share > PART["collecting"]:
        words = f"Garbage collection: a rank spends {units.percent(share)} of a step in Python's collector, while the other ranks wait"
        yield Cause(
            "garbage collection",
            words,
            "Keep fewer objects in callbacks and own parts, or call gc.freeze() once they exist.",
            share,
        )


def _of_saving(source: Source, whole: float) -> Iterator[Cause]:
    share = (source.saving() or 0.0) / whole
    if share > PART["saving"]:
        words = f"Saving: training is paused {units.percent(share)} of the time for checkpoints"
        change = "Save less often (checkpoint.every), or asynchronously, which is the default (checkpoint.asynchronous)."
        yield Cause("saving", words, change, share)
