"""The panels of the live page. Each panel is a function that returns data of a run that JSON can represent, for the page, for the
panel's JSON address and for `watch --json`. A panel's arguments are text from the address; invalid text is ignored.
"""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.control import times
from megalith.events import Holding, Problem, RunStarted
from megalith.planner import gains
from megalith.report import units
from megalith.report.history import origin_of
from megalith.watch import causes, scaling_law
from megalith.watch.health import run_health
from megalith.watch.index import PARTS
from megalith.watch.source import Source
from megalith.watch.what_if import WhatIfAnalysis
from megalith.watch.window import WINDOW, window

Asked = Mapping[str, str]

POINTS = 700  # about the largest number of points of a curve, unless a request asks for another
COLUMNS, ROWS = 400, 256  # cells of a heatmap, at most
SHOWN = 200  # rows of a table


def whole(asked: Asked, name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
    """Return the whole number that the argument `name` requests, within limits."""
    try:
        return min(max(int(asked[name]), least), most)
    except (KeyError, ValueError):
        return default


def plain(values: NDArray) -> list[float | None]:
    """Return numbers for JSON, rounded to six digits; None for a number that is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _window(asked: Asked) -> dict[str, int]:
    return {
        "first": whole(asked, "from", 0),
        "last": whole(asked, "to", 2**53),
        "most": whole(asked, "points", POINTS, least=2, most=4 * POINTS),
    }


def _curves(source: Source, asked: Asked, *names: str) -> dict[str, Any]:
    """Return the mean, minimum and maximum of some numbers of steps, by step. `piece` changes wherever the run went back to an
    earlier step."""
    view = source.steps(names, **_window(asked))
    found: dict[str, Any] = {"step": view.last.tolist(), "piece": view.piece.tolist(), "steps": view.steps.tolist()}
    fine = bool(len(view)) and int(view.steps.max()) == 1
    for at, name in enumerate(names):
        found[name] = {"mean": plain(view.mean[:, at])}
        if not fine:
            found[name] |= {"low": plain(view.low[:, at]), "high": plain(view.high[:, at])}
    return found


def loss(source: Source, asked: Asked) -> dict[str, Any]:
    """Return training loss, gradient norm and learning rate by step; the validation loss by domain; the tokens per byte of each
    domain; events by step; and the loss that a scaling law expects."""
    found = _curves(source, asked, "loss", "grad_norm", "lr")
    rates = source.tokens_a_byte()
    found["validation"] = [
        {"step": one.step, "loss": one.loss, "domains": one.domains} for one in list(source.validations)[-POINTS:]
    ]
    found["tokens_a_byte"] = rates
    found["marks"] = marks(source)
    found["total"] = source.setting("train", "steps")
    found["law"] = scaling_law.drawn(source)
    return found


def marks(source: Source) -> list[dict[str, Any]]:
    """Return the events that the page marks, by step: restarts, incidents, phases, spikes and the responses to spikes."""
    found = []
    for before, start in zip([None, *source.starts], source.starts, strict=False):
        if before is not None:
            plan = "" if _plan(before) == _plan(start) else ", under another plan"
            found.append(
                {"step": start.resumed_step, "kind": "start", "words": f"started again from step {start.resumed_step}{plan}"}
            )
    found += [{"step": one.step, "kind": "incident", "words": one.reason} for one in source.incidents]
    found += [{"step": one.step, "kind": one.kind, "words": one.words} for one in source.problems if not isinstance(one, Problem)]
    found += [{"step": one.step, "kind": one.kind, "words": one.words} for one in source.phases]
    return sorted(found, key=lambda one: one["step"])[-SHOWN:]


def _plan(start: RunStarted) -> Any:
    return start.spec.get("plan")


def speed(source: Source, asked: Asked) -> dict[str, Any]:
    """Return tokens per second, MFU, and rank 0's seconds of a step by use, measured and predicted. `saving`: pauses of training
    for checkpoints, averaged over all steps and not included in their seconds. `expected`: the predicted tokens per second and
    MFU.
    """
    found = _curves(source, asked, "tokens_per_second", "mfu", "seconds", *PARTS)
    recent = source.recent(["seconds", *PARTS], 50)
    measured = {name: float(np.nanmean(recent[name])) for name in ("seconds", *PARTS)} if len(recent["step"]) else None
    now = measured and terms(measured) | {"saving": source.saving()}
    expected = {name: (source.predicted or {}).get(name) for name in ("tokens_per_second", "mfu")}
    return found | {"now": now, "predicted": predicted_time(source), "expected": expected, "why": _why(source)}


TERMS: Mapping[str, tuple[str, ...]] = {**gains.TERMS, "data": ("data",), "other": ("other",)}
"""Map from each term of a prediction to the parts of a step in the log. Predictions have no terms "data" and "other"."""

HIDDEN = {"data": 0.0, "saving": 0.0}
"""Predicted seconds of terms that predictions assume to be hidden behind computation."""


def terms(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a measured step, divided into the terms of a prediction."""
    return {"step": measured["seconds"], **{name: sum(measured[part] for part in parts) for name, parts in TERMS.items()}}


def predicted_time(source: Source) -> dict[str, float] | None:
    """Return the predicted seconds of each term of a step; None without a prediction."""
    found = (source.predicted or {}).get("time")
    return found and found | HIDDEN


def _why(source: Source) -> str:
    return "the prediction is not ready yet" if source.predicted is None else str(source.predicted.get("why", ""))


def rank_heatmap(source: Source, asked: Asked) -> dict[str, Any]:
    """Return one kind of each rank's seconds, step by step: codes of `control.times` in base 64, with ranks as rows and steps as
    columns.

    Arguments: `row` (a kind of seconds, or "memory"), `sort` (rank, node, stage, data, slowest), `against` (stage: relative to
    the median of ranks with the same stage; all: of all ranks), `from`, `to`, `columns`, `rows`.
    """
    row = asked.get("row", "own")
    row = row if row in times.ROWS else "own"
    columns = whole(asked, "columns", COLUMNS, least=1, most=COLUMNS)
    view, world = source.ranks(row, first=whole(asked, "from", 0), last=whole(asked, "to", 2**53), most=columns)
    if not len(view):
        words = (
            "No rank has reported its seconds for these steps: they are not done yet, an earlier version trained the run, or megalith "
            "did not start its ranks."
        )
        return {"ranks": 0, "why": words}
    places = source.places() if world == source.world else {}
    codes = view.high  # of a record of several steps, the slowest
    if row != "memory" and asked.get("against", "stage") == "stage" and "pipeline" in places:
        codes = _against(codes, places["pipeline"])
    order = _order(asked.get("sort", "rank"), codes, places, world)
    cells, groups = _grouped(codes[:, order].T, whole(asked, "rows", ROWS, least=1, most=ROWS))
    late = _late(codes)[order]
    return {
        "ranks": world,
        "row": row,
        "rows": [
            {"ranks": order[a:b][:8].tolist(), "of": int(b - a), "slowest": int(order[a + late[a:b].argmax()])}
            | _place(order[a:b], places)
            for a, b in groups
        ],
        "step": view.last.tolist(),
        "first": view.first.tolist(),
        "piece": view.piece.tolist(),
        "base": plain(view.bases[:, int(row == "memory")]),
        "codes": base64.b64encode(cells.tobytes()).decode(),
        "octaves": times.OCTAVES,
        "zero": -math.log2(times.MINIMUM),
    }


def _against(codes: NDArray[np.uint8], stage: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the codes of seconds relative to the (lower) median of the ranks with the same stage. Codes are logarithms, so the
    ratio is a difference."""
    one = 1 + round(-math.log2(times.MINIMUM) * times.CODES / times.OCTAVES)  # the code of "as long as the median"
    found = codes.astype(np.int16)
    for place in np.unique(stage):
        at = np.flatnonzero(stage == place)
        mine = found[:, at]
        known = np.sort(np.where(mine > 0, mine, 256), axis=1)
        number = np.maximum((mine > 0).sum(axis=1, keepdims=True), 1)
        middle = np.take_along_axis(known, (number - 1) // 2, axis=1)
        found[:, at] = np.where(mine > 0, np.clip(mine - middle + one, 1, 255), 0)
    return found.astype(np.uint8)


def _order(sort: str, codes: NDArray[np.uint8], places: Mapping[str, NDArray[np.int64]], world: int) -> NDArray[np.int64]:
    ranks = np.arange(world)
    axis = {"node": "node", "stage": "pipeline", "data": "data"}.get(sort, "")
    if axis in places:
        return np.lexsort((ranks, places[axis]))
    if sort == "slowest":
        return np.argsort(-_late(codes), kind="stable")
    return ranks


def _late(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    return codes[-32:].astype(np.int64).mean(axis=0)


def _grouped(cells: NDArray[np.uint8], rows: int) -> tuple[NDArray[np.uint8], list[tuple[int, int]]]:
    """Combine ranks into at most `rows` rows. A row for several ranks shows the slowest of them."""
    size = -(-len(cells) // rows)
    starts = np.arange(0, len(cells), size)
    ends = [*starts[1:].tolist(), len(cells)]
    return np.maximum.reduceat(cells, starts, axis=0), list(zip(starts.tolist(), ends, strict=True))


def _place(ranks: NDArray[np.int64], places: Mapping[str, NDArray[np.int64]]) -> dict[str, int]:
    """Return the mesh coordinates that all ranks of a row share, by axis."""
    return {axis: int(at[ranks[0]]) for axis, at in places.items() if len(ranks) == 1 or (at[ranks] == at[ranks[0]]).all()}


def what_if(source: Source, asked: Asked) -> dict[str, Any]:
    """Explain long steps. `causes`: causes with their cost and remedy, the most expensive first; `plans`: promising changes of
    the plan; `without`: the duration of a step if the slowest rank, node, data rank or stage, or a kind of computation, took no
    longer than the median.

    With one of the arguments `rank`, `node`, `data`, `stage` and `kind`, `without` has only the answer about the given one.
    """
    seconds = source.recent(["seconds"], WINDOW)["seconds"]
    step = float(np.nanmedian(seconds)) if len(seconds) else None
    found = causes.causes(source)
    without, question = found.without, _question(asked)
    if question is not None:
        steps = WhatIfAnalysis.of(source)
        answer = None if steps is None else steps.ask(*question)
        without = () if answer is None else (answer,)
    words = "" if found.causes or window(source) is not None else "too few steps have been reported by all ranks"
    return {
        "step": step, "causes": [asdict(one) | _seconds(one.gain, step) for one in found.causes], "plans": causes.plans(source),
        "without": [asdict(one) | _seconds(one.gain, step) for one in without], "why": words,
    }  # fmt: skip


def _question(asked: Asked) -> tuple[str, int | str] | None:
    if "kind" in asked:
        return "kind", asked["kind"]
    return next(((what, whole(asked, what, -1, least=-1)) for what in ("rank", "node", "data", "stage") if what in asked), None)


def _seconds(gain: float, step: float | None) -> dict[str, float | None]:
    return {"seconds": None if step is None else gain * step}


def memory(source: Source, asked: Asked) -> dict[str, Any]:
    """Return the peak memory of each rank (if there are many ranks, of each stage's worst rank), each rank's state by category,
    and the predicted memory of each stage."""
    stages = source.places().get("pipeline", np.zeros(0, dtype=np.int64))
    peaks, held = _peaks(source), source.holdings
    rows = [
        {
            "rank": rank,
            "stage": int(stages[rank]) if rank < len(stages) else 0,
            "peak": float(peaks[rank]) if rank < len(peaks) and math.isfinite(peaks[rank]) else None,
            "weights": held[rank].weight_bytes if rank in held else 0,
            "gradients": held[rank].gradient_bytes if rank in held else 0,
            "optimizer": held[rank].optimizer_bytes if rank in held else 0,
        }
        for rank in _shown(peaks, held, stages)
    ]
    curves = _curves(source, asked, "resident", "peak")
    predicted = source.predicted or {}
    said = {"predicted": predicted.get("memory") or [], "limit": predicted.get("limit"), "why": _why(source)}
    return {"rows": rows, "device": _device(source)} | said | curves


def _peaks(source: Source) -> NDArray[np.float64]:
    """Peak bytes of each rank in its newest step; NaN if unknown."""
    span = source.times_span()
    if span is not None:
        view, world = source.ranks("memory", first=span[1], most=1)
        if len(view) and world == source.world:
            return times.decode(view.high[-1]) * view.bases[-1, 1]
    return np.zeros(0)


def _shown(peaks: NDArray[np.float64], held: Mapping[int, Holding], stages: NDArray[np.int64]) -> list[int]:
    """Return the ranks whose memory is known; if there are more than SHOWN, only each stage's worst rank."""
    size = np.full(max([len(peaks), *(rank + 1 for rank in held)]), np.nan)
    for rank, one in held.items():
        size[rank] = one.weight_bytes + one.gradient_bytes + one.optimizer_bytes
    size[: len(peaks)] = np.where(np.isfinite(peaks), peaks, size[: len(peaks)])
    known = np.flatnonzero(np.isfinite(size))
    if len(known) <= SHOWN:
        return known.tolist()
    place = np.zeros(len(size), dtype=np.int64)
    place[: len(stages)] = stages[: len(size)]
    by_stage = [known[place[known] == stage] for stage in np.unique(place[known])]
    return [int(ranks[size[ranks].argmax()]) for ranks in by_stage]


def _device(source: Source) -> str:
    return source.start.device if source.start else ""


def experts(source: Source, asked: Asked) -> dict[str, Any]:
    """Return three numbers of the worst layer by step: the busiest expert's load over the mean load, the entropy of the loads (1:
    even), and the share of dropped tokens."""
    return _curves(source, asked, "max_load", "entropy", "dropped")


def precision(source: Source, asked: Asked) -> dict[str, Any]:
    """Return the relative error by step of each part's gradient, compared with products in the wide format (None: not finite). If
    a step was compared several times, its newest comparison counts. The returned parts are those of the newest of all
    comparisons."""
    newest = {one.step: one for one in source.watched}
    looks = [newest[step] for step in sorted(newest)][-POINTS:]
    errors = {part: [one.errors.get(part) for one in looks] for part in (looks[-1].errors if looks else ())}
    return {"step": [one.step for one in looks], "errors": errors, "limit": looks[-1].limit if looks else 0.0}


def sites(source: Source, asked: Asked) -> dict[str, Any]:
    """Return the merges of a run with sites: divergence, the losses of the sites, bytes and waits. `instead`: the bytes that the
    first site would have sent so far if it had sent fp32 gradients to every other site after each step."""
    made, merged = list(source.merges)[-POINTS:], source.merged
    last, start = made[-1] if made else None, source.start
    instead = 4.0 * start.parameters * last.step * (last.all_sites - 1) if last and start else None
    return {
        "merges": [
            {"step": one.step, "sent_after": one.sent, "fragment": one.fragment, "norm": one.norm, "spread": one.spread,
             "losses": one.losses, "waited": one.waited, "seconds": one.seconds,
             "merged": [one.named(site) for site in one.merged], "left": [one.named(site) for site in one.left],
             "joined": [one.named(site) for site in one.joined]}
            for one in made
        ],
        "sites": last.all_sites if last else None,
        "count": merged.merges,
        "sent": merged.sent,
        "waited": merged.waited,
        "instead": instead,
    }  # fmt: skip


def incidents(source: Source, asked: Asked) -> dict[str, Any]:
    """Return incidents with the responses and the cost; warnings and errors; the run's use of time; quarantined nodes and spares."""
    rows = []
    for one in list(source.incidents)[-SHOWN:]:
        end = source.recoveries.get(one.incident)
        rows.append(
            {
                "incident": one.incident, "step": one.step, "time": one.time, "cause": one.cause, "reason": one.reason,
                "node": one.node, "rank": one.rank, "detection": max(0.0, one.time - one.began),
                "recovery": None if end is None else max(0.0, end.time - one.time), "lost_steps": end.lost_steps if end else 0,
                "commands": [str(command.get("kind", "")).replace("_", " ") for command in one.commands],
            }
        )  # fmt: skip
    problems = [
        {"time": one.time, "severity": one.severity, "message": one.message, "rank": one.rank}
        if isinstance(one, Problem)
        else {"time": one.time, "severity": "warning", "message": one.words, "rank": None}
        for one in list(source.problems)[-SHOWN:]
    ]
    account = source.goodput()
    went = (
        [
            {"cause": cause, "seconds": seconds, "share": share, "meaning": words}
            for cause, seconds, share, words in account[0].rows()
        ]
        if account
        else []
    )
    return {"incidents": rows, "problems": problems, "went": went, "of": account and account[1], **source.nodes()}


def samples(source: Source, asked: Asked) -> dict[str, Any]:
    """Text that the model wrote, the newest last."""
    return {"samples": [{"step": one.step, "prompt": one.prompt, "text": one.text[:20_000]} for one in source.samples]}


def run(source: Source, asked: Asked) -> dict[str, Any]:
    """Describe the run: name, folder, origin, model size, devices, plan, versions, and every value of the specification."""
    start, plan = source.start, source.plan
    return {
        "name": source.name,
        "folder": str(source.run_dir.resolve()),
        "origin": origin_of(source.run_dir),
        "parameters": start.parameters if start else None,
        "world": source.world,
        "device": _device(source),
        "plan": plan.model_dump() if plan else None,
        "versions": start.versions if start else {},
        "peak": None
        if start is None
        else {"flops": start.peak_flops, "source": start.peak_source, "convention": start.flops_convention},
        "starts": len(source.starts),
        "said": [units.count(start.parameters) + " parameters", f"{units.counted(start.world, 'rank')} on {start.device}"]
        if start
        else [],
        "spec": source.spec,
    }


PANELS: dict[str, Callable[[Source, Asked], dict[str, Any]]] = {
    "alive": lambda source, asked: asdict(run_health(source)),
    "loss": loss,
    "speed": speed,
    "rank-heatmap": rank_heatmap,
    "what-if": what_if,
    "memory": memory,
    "experts": experts,
    "precision": precision,
    "sites": sites,
    "incidents": incidents,
    "samples": samples,
    "run": run,
}
"""Map from the name of a panel (for `--json` and the page's address) to the function that returns its data."""


def panel(source: Source, name: str, asked: Asked | None = None) -> dict[str, Any]:
    """Return a panel's data, with None for each number that is not finite. Raises KeyError for an unknown name."""
    made = PANELS[name]
    with source.lock:
        return units.finite(made(source, asked or {}))
