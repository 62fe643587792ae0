"""Signs of trouble in a run, in words, each with its likely cause, for the live page and for alerts."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from megalith.control import times
from megalith.events import Skipped, Spike
from megalith.planner.gains import TERMS
from megalith.report import units
from megalith.spec.alerts import Sign
from megalith.watch import causes
from megalith.watch.source import Source

if TYPE_CHECKING:
    from megalith.watch.health import RunHealth

SPIKE = 6.0  # times the usual difference of the loss from its recent median
LATER = 30  # steps after a start in which slowness means nothing
MINIMUM = 0.01  # share of a step below which a part of it has not grown
NOW = 10  # newest steps whose speed is compared with the usual one
STANDING = 20  # steps over which experts' loads are looked at

Health = Literal["good", "warn", "bad"]
Recent = dict[str, Any]
"""The numbers of the newest steps of the current generation, by name."""


class HealthMessage(NamedTuple):
    """A sentence about a run. `sign`: the name under which alerts are sent for this sentence; empty: no alert is sent for it.
    `cause`: the likely cause, if known."""

    level: Health
    words: str
    sign: Sign | Literal[""] = ""
    cause: str = ""


ENDED = {
    "running": "The run is well.",
    "finished": "The run has finished.",
    "stopped": "The run was stopped and has saved its state; the same command resumes it.",
}


def judge(found: "RunHealth", source: Source, recent: Recent) -> list[HealthMessage]:
    """Return all sentences about a run; at least one."""
    says = [*_of_the_end(found, source), *_of_silence(found, source)]
    if found.step is not None:
        says += [*_of_loss(found, source, recent), *_of_pace(found, source, recent), *_of_experts(found, source, recent)]
        says += [*_of_memory(found, source), *_of_disk(source)]
        late = [one for one in source.problems if isinstance(one, Skipped) and one.step > found.step - 100]
        if late:
            words = f"updates were skipped in the last 100 steps: {len(late)}; the newest reason: {late[-1].reason}"
            says.append(HealthMessage("warn", words))
    return says or [HealthMessage("good", ENDED.get(found.state, found.state), "finished" if found.state == "finished" else "")]


def _of_the_end(found: "RunHealth", source: Source) -> Iterator[HealthMessage]:
    if found.state in ("failed", "lost"):
        last = next((one for one in reversed(source.problems) if getattr(one, "severity", "") == "error"), None)
        cause = getattr(last, "message", "").partition("\n")[0]
        words = f"The run has ended: {found.state}." + (f" {cause}" if cause else "")
        yield HealthMessage("bad", words, "ended", cause or "no error was logged")
    if found.phase == "recovering":
        one = source.incidents[-1]
        yield HealthMessage("warn", f"Recovering from incident {one.incident}: {one.reason.partition(chr(10))[0]}")


def _of_silence(found: "RunHealth", source: Source) -> Iterator[HealthMessage]:
    if found.state != "running" or found.age is None or found.limit is None or found.age <= found.limit:
        return
    words = f"Silent for {units.duration(found.age)}: nothing was logged for longer than this run's limit of {units.duration(found.limit)}."
    cause = f"last seen {found.phase}"
    if found.phase == "recovering":
        cause += f" from incident {source.incidents[-1].incident}: {source.incidents[-1].reason.partition(chr(10))[0]}"
    yield HealthMessage("bad", words, "silent", cause)


def _of_loss(found: "RunHealth", source: Source, recent: Recent) -> Iterator[HealthMessage]:
    """Compare the newest loss with earlier losses of the current generation. If the run itself has logged a spike, the message
    names the causes from the log."""
    loss, number = recent["loss"], len(recent["loss"])
    spike = next((one for one in reversed(source.problems) if isinstance(one, Spike)), None)
    near = spike is not None and found.step is not None and spike.step > found.step - 10
    cause = (
        spike.words if spike is not None and near else "the run's own spike detection has logged no spike in the last 10 steps"
    )
    if number and not math.isfinite(loss[-1]):
        yield HealthMessage("bad", f"The loss of step {found.step} is not finite.", "loss", cause)
    elif number > LATER:
        middle = float(np.nanmedian(loss[-100:-1]))
        spread = 1.4826 * float(np.nanmedian(np.abs(loss[-100:-1] - middle)))
        if loss[-1] > middle + max(SPIKE * spread, 0.05 * abs(middle)):
            yield HealthMessage("warn", f"The loss spikes: {loss[-1]:.4f}, but {middle:.4f} is usual.", "loss", cause)


def _of_pace(found: "RunHealth", source: Source, recent: Recent) -> Iterator[HealthMessage]:
    if found.state != "running":
        return
    known = causes.causes(source).causes
    cause = f"{known[0].words}. {known[0].change}" if known else ""
    rate, number = recent["tokens_per_second"], len(recent["tokens_per_second"])
    newest = _terms(recent, slice(-NOW, None))
    if number > 2 * LATER:
        usual, now = float(np.nanmedian(rate[LATER:])), float(np.nanmedian(rate[-NOW:]))
        if now < source.alerts.slower * usual:
            words = f"Slower than usual: {units.count(now)} tokens/s, but {units.count(usual)} is usual."
            yield HealthMessage("warn", words, "slow", cause or _grown(newest, _terms(recent, slice(LATER, -NOW)), "is usual"))
    if found.predicted and found.seconds and number > LATER and found.seconds > source.alerts.predicted * found.predicted:
        times_longer = f"{found.seconds / found.predicted:.2f} times the predicted time"
        grown = _grown(newest, (source.predicted or {})["time"], "was predicted")
        yield HealthMessage("warn", f"A step takes {units.duration(found.seconds)}, {times_longer}.", "slow", cause or grown)
    for one in known:
        if one.kind in ("slow rank", "slow node"):
            words = f"{one.words}. Without this delay, a step would take {units.percent(one.gain)} less time."
            yield HealthMessage("warn", words, "slow", one.change)


def _terms(recent: Recent, at: slice) -> dict[str, float]:
    return {name: sum(float(np.nanmedian(recent[part][at])) for part in parts) for name, parts in TERMS.items()}


def _grown(now: Mapping[str, float], before: Mapping[str, float], is_usual_or_predicted: str) -> str:
    term = max(now, key=lambda name: now[name] - before.get(name, 0.0))
    if now[term] - before.get(term, 0.0) < MINIMUM * sum(now.values()):
        return "no part of a step has grown"
    seconds = units.duration(before[term]) if before.get(term) else "none"
    return f"{term} takes {units.duration(now[term])} of a step, but {seconds} {is_usual_or_predicted}"


def _of_experts(found: "RunHealth", source: Source, recent: Recent) -> Iterator[HealthMessage]:
    even = recent["entropy"][-STANDING:]
    if found.state != "running" or len(even) < STANDING or not np.isfinite(even).all():
        return
    middle = float(np.median(even))
    if middle < source.alerts.experts:
        load = float(np.median(recent["max_load"][-STANDING:]))
        words = f"The experts collapse: the evenness of their load is {middle:.2f} in the worst layer (1: even)."
        yield HealthMessage("bad", words, "experts", f"the busiest expert has {load:.1f} times the mean load")


def _of_memory(found: "RunHealth", source: Source) -> Iterator[HealthMessage]:
    limit = (source.predicted or {}).get("limit")
    span = source.times_span()
    if found.state != "running" or not limit or span is None:
        return
    view, world = source.ranks("memory", first=span[1], most=1)
    if not len(view) or world != source.world:
        return
    peaks = times.decode(view.high[-1]) * float(view.bases[-1, 1])
    if not np.isfinite(peaks).any():
        return
    rank = int(np.nanargmax(peaks))
    if peaks[rank] > source.alerts.memory * limit:
        words = f"Memory is nearly full: rank {rank} peaked at {units.memory(peaks[rank])} of {units.memory(limit)}."
        usual = float(np.nanmedian(peaks))
        yield HealthMessage("warn", words, "memory", f"the median rank peaked at {units.memory(usual)}")


def _of_disk(source: Source) -> Iterator[HealthMessage]:
    free = source.free()
    if free is None or not source.checkpoints or free >= source.alerts.disk * source.checkpoints[-1].bytes:
        return
    size = units.memory(source.checkpoints[-1].bytes)
    words = f"The disk has {units.memory(free)} left, less than {source.alerts.disk:g} checkpoints need."
    yield HealthMessage("bad", words, "disk", f"a checkpoint takes {size}")
