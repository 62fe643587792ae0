"""Uncertainty of predictions: 80 % intervals of times and bytes, their evidence, and the effect of the user's measurements. No
torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, sqrt
from typing import Any

from megalith.cost import doubt
from megalith.cost.constants import calibration
from megalith.cost.doubt import Interval, LearnedSpread, Spread
from megalith.cost.software import SOFTWARE
from megalith.planner.measured import Own
from megalith.planner.published.shapes import Beyond, beyond
from megalith.planner.request import ResolvedRequest
from megalith.spec.cluster import ClusterSpec
from megalith.spec.model import ModelSpec, MoeSpec
from megalith.spec.sizes import count_model


@dataclass(frozen=True)
class Confidence:
    """80 % intervals, as factors on predicted values."""

    time: Interval
    memory: Interval
    apart: float
    """Two layouts of one search may be equally fast if their predicted step times differ by less than this factor."""
    words: str
    """Text with the evidence for the interval of step time."""
    factor: float = 1.0
    """Factor by which predicted times are multiplied because of the user's measurements; intervals apply to the multiplied times."""

    def to_json(self) -> dict[str, Any]:
        intervals = {"time": self.time._asdict(), "memory": self.memory._asdict()}
        return intervals | {"apart": self.apart, "factor": self.factor, "rests_on": self.words}


@dataclass(frozen=True)
class Expected:
    """Expected errors of predictions for one model on one cluster, without the user's own measurements."""

    kind: str
    """The kind of prediction for step times: for dense models, or for models with experts."""
    time: Spread
    memory: Spread
    known: bool
    """True if step times on this kind of device were measured."""
    outside: Sequence[Beyond]
    """Sizes of the request that are below the smallest or above the largest size for which times were measured."""


def expected(model: ModelSpec, cluster: ClusterSpec, seq_len: int) -> Expected:
    """Return the errors to expect: the errors on published rows, increased for devices and sizes outside of the published rows."""
    kind = "time.expert" if any(isinstance(block.mlp, MoeSpec) for block in set(model.blocks)) else "time.dense"
    sizes = {
        "parameters": float(count_model(model).total), "tokens a sequence": float(seq_len), "devices": float(cluster.count),
    }  # fmt: skip
    outside = {name: beyond(name, sizes) for name in (kind, "memory")}
    known = calibration().families.get(cluster.accelerator.name) in calibration().fitted["devices"]
    time = _wider(doubt.bundled()[kind], outside[kind], also=0.0 if known else 1.0)
    memory = _wider(doubt.bundled()["memory"], outside["memory"])
    return Expected(kind, time, memory, known, outside[kind])


def confidence_of(request: ResolvedRequest, own: Sequence[Own] = ()) -> Confidence:
    """Return the uncertainty of predictions for a request. Measured rows (`own`) of the same software reduce it: for memory on any machine,
    for time only on the same machine and for the same kind of model."""
    errors = expected(request.model, request.cluster, request.run.train.seq_len)
    kind, time, memory = errors.kind, errors.time, errors.memory
    lacking = [] if errors.known else [f"a device like {request.cluster.accelerator.name}"]
    far = " or ".join(lacking + [_amount(one) for one in errors.outside[:1]])
    far = far and f"no measured row has {far}"
    peaks = [one.memory for one in own if one.memory is not None and one.software == request.software]
    held = memory.interval(memory.learn(peaks) if peaks else None)
    stack = request.software, request.cluster.machine, kind
    timed = [one for one in own if one.time is not None]
    mine = [one for one in timed if (one.software, one.machine, one.kind) == stack]
    learnt = time.learn([one.time or 0.0 for one in mine]) if mine else None
    factor = exp(learnt.mean) if learnt else 1.0
    around = Interval(*(end / factor for end in time.interval(learnt)))
    within = learnt.within if learnt else time.within
    words = _words(request, mine, learnt, far) + _apart([one for one in timed if one not in mine]) + _rates(request.cluster)
    return Confidence(around, held, exp(time.reach_known * within * sqrt(2)), words, factor)


def _wider(spread: Spread, outside: Sequence[Beyond], *, also: float = 0.0) -> Spread:
    """Return the spread of predictions for a shape outside of the measured shapes. An unmeasured device (`also` = 1) adds the variance
    between stacks once more, and so, by assumption, does each doubling beyond the measured sizes."""
    more = also + max((one.doublings for one in outside), default=0.0)
    return replace(spread, between=spread.between * sqrt(1 + more))


def _amount(one: Beyond) -> str:
    few, end = ("so few", "fewest") if one.size < one.edge else ("as many", "most")
    return f"{few} {one.name} as {_count(one.size)} (the {end} in a measured row: {_count(one.edge)})"


def _count(number: float) -> str:
    """Return a number as people write it: 671B, 4.2M, 8,192."""
    return next((f"{number / unit:.3g}{letter}" for letter, unit in (("B", 1e9), ("M", 1e6)) if number >= unit), f"{number:,.0f}")


def _words(request: ResolvedRequest, mine: Sequence[Own], learnt: LearnedSpread | None, far: str) -> str:
    """Return the evidence for an interval as text. The text names the measured rows of the same software and machines that were ignored as
    outliers."""
    where = f"{SOFTWARE[request.software].title} on {request.cluster.accelerator.name}"
    if learnt is None:
        said = f"--measured gives no row of such a model by {where}, so the interval is as wide as for any unmeasured software"
        return f"{said}{f'; {far}' * bool(far)}"
    wrong = [mine[place] for place in learnt.wrong]
    followed = len(mine) - len(wrong)
    said = f"{followed} measured row{'s' * (followed != 1)} of {where}: predicted times are multiplied by {exp(learnt.mean):.2f}"
    for one in wrong:
        said += (
            f"; row {one.name} is ignored: its time is {one.ratio:.2f} times the predicted time, which is very unlikely given the "
            "other rows"
        )
    return said


def _apart(others: Sequence[Own]) -> str:
    """Describe the rows that do not change predicted times, because their software, machine or kind of model differs."""
    kinds = {"time.dense": "a dense model", "time.expert": "experts"}
    counts = Counter(f"{kinds[one.kind]} by {SOFTWARE[one.software].title} on {one.machine}" for one in others)
    return "".join(
        f"; {number} measured row{'s' * (number != 1)} of {what}: no effect on times predicted here"
        for what, number in counts.items()
    )


def _rates(cluster: ClusterSpec) -> str:
    """Return the source of rates that `megalith doctor --calibrate` measured; empty for fitted rates."""
    found = cluster.measured
    if found is None:
        return ""
    beside = found.processor if cluster.accelerator.is_processor else f"{found.device} beside {found.processor}"
    threads = f" of {found.threads} thread{'s' * (found.threads != 1)}" * found.in_turn
    ranks = f"{found.ranks} rank{'s' * (found.ranks != 1)}{threads}"
    return f"; rates of the cluster were measured on {beside} at {found.at} UTC with {ranks} and torch {found.torch}"
