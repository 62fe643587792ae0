"""Health of a run: its activity, progress and problems."""

import math
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from megalith.report import pace
from megalith.watch import signs
from megalith.watch.index import PARTS
from megalith.watch.signs import Health, HealthMessage
from megalith.watch.source import Source

RECENT = 200  # steps that define the usual
NUMBERS = ("loss", "seconds", "tokens_per_second", "mfu", "tokens_seen", "entropy", "max_load", *PARTS)
SILENT, QUIET = 20.0, 10.0  # times the usual time from step to step, and seconds: the longer of the two is silence
HEALTHS: tuple[Health, ...] = get_args(Health)


@dataclass
class RunHealth:
    """`says` are the messages, with the worst first; `health` is the level of the worst. Times are in seconds. `age`: the time
    since the newest event; `step_age`: the time since the newest step; `checkpoint`: the number of steps until the next save.
    `dollars`, `kilowatt_hours`: cost and energy of the devices since the first start, from the catalogue's figures; None:
    unknown."""

    state: str
    health: Health
    phase: str
    says: list[HealthMessage]
    step: int | None = None
    total: int | None = None
    age: float | None = None
    step_age: float | None = None
    limit: float | None = None
    left: float | None = None
    loss: float | None = None
    validation: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds: float | None = None
    predicted: float | None = None
    goodput: float | None = None
    goodput_of: float | None = None
    checkpoint: int | None = None
    saved: int | None = None
    saved_age: float | None = None
    elapsed: float | None = None
    starts: int = 0
    incidents: int = 0
    spares: int | None = None
    dollars: float | None = None
    kilowatt_hours: float | None = None
    behind: bool = False
    pulse: list[float | None] = field(default_factory=list)


def run_health(source: Source) -> RunHealth:
    """Return the current health of a run."""
    recent = source.recent(NUMBERS, RECENT)
    found = RunHealth(
        _state(source), "good", "", [], age=source.age(), starts=len(source.starts), incidents=len(source.incidents)
    )
    updates = source.setting("train", "steps")
    found.behind, found.total = source.behind, updates and updates + source.left_out
    step = source.last_step()
    if step is not None and len(recent["step"]):
        _numbers(found, source, recent, step)
    _saving(found, source, step)
    account = source.goodput()
    if account is not None:
        found.goodput, found.goodput_of = account[0].share, account[1]
    _money(found, source)
    found.phase, between = _phase(found, source, recent)
    found.limit = None if found.state != "running" else source.alerts.silent or max(QUIET, SILENT * between)
    found.says = sorted(signs.judge(found, source, recent), key=lambda one: -HEALTHS.index(one.level))
    found.health = found.says[0].level
    return found


def _state(source: Source) -> str:
    if source.finished is not None:
        return source.finished.reason
    return "running" if source.starts or source.last_step() is not None else "not started"


def _numbers(found: RunHealth, source: Source, recent: dict[str, Any], step: int) -> None:
    last = lambda name: _finite(recent[name][-1])  # noqa: E731
    found.step, found.loss, found.tokens = step, last("loss"), last("tokens_seen")
    usual = lambda name: pace.usual(recent[name].tolist())  # noqa: E731
    found.tokens_per_second, found.mfu, found.seconds = usual("tokens_per_second"), usual("mfu"), usual("seconds")
    found.step_age = None if found.age is None else found.age + max(0.0, source.last_time - float(recent["time"][-1]))
    found.pulse = [_finite(value) for value in recent["loss"][-60:]]
    found.validation = source.validations[-1].loss if source.validations else None
    predicted = (source.predicted or {}).get("time")
    found.predicted = predicted["step"] if predicted else None
    if found.total and found.state == "running":
        steps, times = recent["step"].tolist(), recent["time"].tolist()
        found.left = pace.seconds_left(steps, times, last=found.total, seconds=found.seconds or 0.0)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _saving(found: RunHealth, source: Source, step: int | None) -> None:
    every = source.setting("checkpoint", "every")
    if every and step is not None and found.state == "running":
        found.checkpoint = min(every - step % every, max((found.total or 2**53) - step, 0))
    if source.checkpoints:
        found.saved = source.checkpoints[-1].step
        found.saved_age = max(0.0, source.last_time + (found.age or 0.0) - source.checkpoints[-1].time)


def _money(found: RunHealth, source: Source) -> None:
    if not source.starts:
        return
    found.elapsed = max(0.0, source.last_time - source.starts[0].time)
    predicted, hours = source.predicted or {}, found.elapsed / 3600 * source.world
    if predicted.get("price_per_hour") is not None:
        found.dollars = predicted["price_per_hour"] * hours
    if predicted.get("watts") is not None:
        found.kilowatt_hours = predicted["watts"] / 1000 * hours


def _phase(found: RunHealth, source: Source, recent: dict[str, Any]) -> tuple[str, float]:
    """Return what the ranks are doing, according to the log, and the usual seconds between events while they do so."""
    each = np.diff(recent["time"])
    between = float(np.median(each)) if len(each) else 1.0
    if found.state != "running":
        return found.state, between
    last_step = float(recent["time"][-1]) if len(recent["time"]) else 0.0
    if source.incidents and source.incidents[-1].incident not in source.recoveries and source.incidents[-1].time > last_step:
        return "recovering", max(between, 6.0)
    if source.start is not None and source.start.time > last_step:
        return "starting", max(between, 6.0)
    return "training", between
