"""Warning signs in a run's log that its plan does not suit the machine. Each sign consists of an observation and a remedy."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from megalith.events import RunStarted, Span, Step
from megalith.report.history import History, plan_of
from megalith.report.timeline import bubble, measured
from megalith.report.units import count, percent
from megalith.schedule.action import COMPUTATIONS

FALLS = 0.05
"""The fraction of throughput that must be lost for a sign."""

ALONE = 1.1
"""N ranks count as working one after another if they are busy for at most this many times 1/N of the time."""

MAXIMUM = 0.5
"""Waiting is a sign if it takes more than this fraction of the time in the layers of experts."""


def signs(run: History) -> list[str]:
    """Return the signs that a user should look at; empty if there are none."""
    return [*_tensor(run), *_taking_turns(run), *_experts(run)]


def _tensor(run: History) -> Iterator[str]:
    """Yield a sign if starts of this run with a larger `plan.tensor` had a lower throughput on equally many ranks."""
    rates: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for start, steps in _by_start(run):
        plan = plan_of(start)
        warm = [step.tokens_per_second / start.world for step in steps[2:]]
        if plan and warm:
            rates[start.world, plan.tensor].append(median(warm))
    known = sorted((*place, median(values)) for place, values in rates.items())
    for (world, less, fast), (same, more, slow) in pairwise(known):
        if world == same and slow < (1 - FALLS) * fast:
            yield (
                f"Throughput falls as tensor grows: {count(fast)} tokens/s a rank with tensor {less}, {count(slow)} with {more} "
                f"({percent(slow / fast - 1)}). Tensor parallelism's collectives cost more time than the split saves: keep tensor ranks "
                f"on the fastest links, and split further along data or pipeline."
            )


def _by_start(run: History) -> Iterator[tuple[RunStarted, list[Step]]]:
    steps = sorted((*run.steps, *run.repeated), key=lambda step: step.time)
    starts = sorted(run.starts, key=lambda start: start.time)
    ends = [*(one.time for one in starts), float("inf")][1:]
    for start, end in zip(starts, ends, strict=False):
        yield start, [step for step in steps if start.time <= step.time < end]


def _taking_turns(run: History) -> Iterator[str]:
    if run.plan is None or not run.spans or run.plan.pipeline == 1:
        return
    ranks = run.plan.pipeline
    bars = measured(run.spans[-1].spans, ranks)
    if not any(bar.kind in COMPUTATIONS for bar in bars):
        return
    busy = 1 / (1 + bubble(bars, ranks))
    if busy <= ALONE / ranks:
        yield (
            f"Each of {ranks} pipeline ranks is busy for {percent(busy)} of the time, about 1/{ranks}: they work one after another. "
            f"{run.microbatches} microbatch{'es' * (run.microbatches != 1)} a step are too few. Use a smaller plan.microbatch, a larger "
            f"batch, or fewer stages."
        )


def _experts(run: History) -> Iterator[str]:
    """Yield a sign if waiting for tokens dominates the time of stages with experts. In the log, a wait for tokens interrupts a
    computation."""
    if run.plan is None or not run.spans or run.plan.expert == 1:
        return
    waiting, computing = dispatch_seconds(run.spans[-1].spans)
    if waiting and waiting > MAXIMUM * (waiting + computing):
        share = percent(waiting / (waiting + computing))
        yield (
            f"Waiting for tokens dominates the stages with experts: ranks spend {share} of their forwards and backwards waiting for "
            f"tokens from {run.plan.expert} expert ranks. Keep expert ranks on fast links, or use larger microbatches or a schedule that "
            f"computes another microbatch while tokens are sent (dualpipe, dualpipev)."
        )


def dispatch_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the seconds in which ranks waited in the middle of a computation, and the seconds that these interrupted
    computations took without the waits."""
    lines: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    for rank, name, start, end in sorted(spans, key=lambda span: (span[0], span[2])):
        lines[rank].append((name, end - start))
    waiting = computing = 0.0
    for line in lines.values():
        turns: defaultdict[str, list[int]] = defaultdict(list)
        for at, (name, _) in enumerate(line):
            if name != "WAIT":
                turns[name].append(at)
        interrupted = {name: places for name, places in turns.items() if len(places) > 1}
        computing += sum(line[at][1] for places in interrupted.values() for at in places)
        inside = {at for places in interrupted.values() for at in range(places[0], places[-1])}
        waiting += sum(line[at][1] for at in inside if line[at][0] == "WAIT")
    return waiting, computing
