"""A run folder written with the event classes. The run is resumed once after a crash, and has everything that a report
can show."""

import math
from pathlib import Path
from typing import Any

from megalith import events
from megalith.mesh import Mesh
from megalith.schedule import build, lower, simulate
from megalith.spec.plan import Plan

PLAN = Plan(data=2, pipeline=2, zero=3)
BATCH, STEPS, TOKENS = 16, 40, 4096


def spec(plan: Plan = PLAN) -> dict[str, Any]:
    return {
        "name": "first light",
        "model": {"name": "llama", "layers": 4, "dim": 64},
        "plan": plan.model_dump(),
        "train": {"steps": STEPS, "global_batch": BATCH, "seq_len": 256},
        "optimizer": {"lr": 3e-3},
    }


def start(resumed_step: int = 0, *, peak: float | None = 2.5e12, plan: Plan = PLAN) -> events.RunStarted:
    return events.RunStarted(
        spec=spec(plan),
        device="cpu",
        world=plan.ranks,
        resumed_step=resumed_step,
        versions={"torch": "2.15"},
        peak_flops=peak,
        peak_source="measured matrix product" if peak else "cpu is not in the catalogue",
        flops_per_token=4.5e7,
        flops_convention="6 N + attention",
        parameters=7_400_000,
        time=1000.0,
    )


def step(number: int, loss: float | None = None, **changes: Any) -> events.Step:
    known: dict[str, Any] = {
        "step": number,
        "loss": 4 + 3 * math.exp(-number / 10) if loss is None else loss,
        "grad_norm": 0.5 + 1 / number,
        "lr": 3e-3 / number,
        "tokens": TOKENS,
        "tokens_seen": number * TOKENS,
        "seconds": 0.5,
        "tokens_per_second": 8192.0,
        "mfu": 0.147,
        "breakdown": {"forward": 0.12, "backward": 0.3, "optimizer": 0.05, "other": 0.03},
        "memory": {"resident": 900 * 2**20},
        "time": 1000.0 + number * 0.5,
    }
    return events.Step(**(known | changes))


def holdings(plan: Plan = PLAN) -> list[events.Holding]:
    mesh = Mesh.of(plan)
    parts = [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]
    place = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    return [
        events.Holding(rank, at, parts[at["pipeline"] % 2], 1_000_000, 4_000_000, 4_000_000, 8_000_000)
        for rank, at in enumerate(place)
    ]


def spans(number: int, plan: Plan = PLAN) -> events.Spans:
    """Return measured spans that are twice as long as the steps' breakdown, with an optimizer at the end."""
    schedule = build(plan.schedule, ranks=plan.pipeline, microbatches=BATCH // plan.data, chunks=plan.chunks)
    timeline = simulate(lower(schedule, plan.zero), {"F": 0.01, "B": 0.02})
    found = [(span.rank, str(span.action), span.start, span.end) for span in timeline.spans]
    return events.Spans(number, [*found, (0, "optimizer", timeline.end, timeline.end + 0.05)])


def write_run(folder: Path) -> Path:
    """Write the log: steps 1 to 25, a kill, a resumption from 20, and the end."""
    log = events.EventLog(folder)
    written: list[events.Event] = [start(), *holdings(), *(step(i, loss=9.0) for i in range(1, 26))]
    written += [events.Validation(25, 9.5, {"austen": 9.4, "python": 9.6}, 0.1)]
    written += [events.Checkpoint(20, "checkpoints/step-20", 123 * 2**20, 0.9, 0.04)]
    written += [events.Problem("error", "rank 3 was killed <9>", 3), events.RunFinished("failed", 25)]
    written += [start(20), *holdings(), *(step(i) for i in range(21, STEPS + 1)), spans(30)]
    written += [events.Validation(i, 5 - i / 40, {"austen": 4.9 - i / 40, "python": 5.1 - i / 40}, 0.1) for i in (20, 30, 40)]
    written += [
        events.Sample(40, "It is a truth", " universally <b>acknowledged</b> & so on"),
        events.RunFinished("finished", STEPS),
    ]
    for event in written:
        log.write(event)
    log.close()
    return folder
