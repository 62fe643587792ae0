"""Writes a run whose ranks report known seconds of work, and simulates its steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith import events
from megalith.control.times import Times
from megalith.fleet.heartbeat import KINDS, Beat
from megalith.mesh import Mesh
from megalith.schedule import build, lower, simulate
from megalith.schedule.action import Action, RowEntry, parts
from megalith.spec.plan import Plan
from megalith.watch.replay import WEIGHTS
from megalith.watch.source import Source
from tests.report import run_folder

Work = NDArray[np.float64] | Mapping[str, NDArray[np.float64]]
"""The seconds of each rank: of its own work, half of it forward and half backward, or by kind."""


def true_seconds(plan: Plan, work: NDArray[np.float64], microbatches: int = 8) -> float:
    """Simulate a step: `work` seconds of each pipeline rank, divided by WEIGHTS among its computations."""
    program = lower(build(plan.schedule, ranks=plan.pipeline, microbatches=microbatches, chunks=plan.chunks), plan.zero)
    computing = [
        [a for entry in row for a in parts(entry) if isinstance(a, Action) and a.kind in WEIGHTS] for row in program.rows
    ]
    seconds = {}
    for rank, actions in enumerate(computing):
        whole = sum(WEIGHTS[action.kind] for action in actions)
        seconds |= {action: work[rank] * WEIGHTS[action.kind] / whole for action in actions}

    def cost(entry: RowEntry) -> float:
        return sum(seconds.get(action, 0.0) for action in parts(entry))

    return simulate(program, cost).end


def step_seconds(plan: Plan, own: NDArray[np.float64]) -> float:
    """Simulate a step of all ranks: it ends with the slowest pipeline, and each place of it works as long as its slowest rank."""
    mesh, work = Mesh.of(plan), np.zeros((plan.data, plan.pipeline))
    for rank in range(mesh.ranks):
        place = mesh.coordinates(rank)
        work[place["data"], place["pipeline"]] = max(work[place["data"], place["pipeline"]], own[rank])
    return max(true_seconds(plan, one, run_folder.BATCH // plan.data) for one in work)


def write_timed(
    folder: Path, plan: Plan, works: Sequence[Work], *more: events.Event, nodes: int = 1, noise: float = 0.005
) -> Source:
    """Write a run with a step for each of `works`, as its events and heartbeats would, and read it. `more`: further events."""
    begun, random = run_folder.start(plan=plan), np.random.default_rng(0)
    begun.spec["fleet"] = {"nodes": nodes}
    folder.mkdir(parents=True, exist_ok=True)
    log, times = events.EventLog(folder), Times(folder, plan.ranks)
    for event in (begun, *more):
        log.write(event)
    known = dict[bytes, float]()
    for number, work in enumerate(works):
        kinds = work if isinstance(work, Mapping) else {"forward": work / 2, "backward": work / 2}
        own = np.sum([*kinds.values()], axis=0)
        if own.tobytes() not in known:
            known[own.tobytes()] = step_seconds(plan, own)
        rows = {kind: kinds.get(kind, np.zeros(plan.ranks)) for kind in KINDS} | {"own": own}
        shaken = 1 + noise * random.standard_normal(plan.ranks)
        seconds = [tuple(float(rows[kind][rank] * shaken[rank]) for kind in KINDS) for rank in range(plan.ranks)]
        times.note([Beat(number + 2, 1.0, number + 1, True, "step", one[0], number, 2.0**30, one) for one in seconds])
        log.write(run_folder.step(number + 1, seconds=known[own.tobytes()], breakdown={"forward": known[own.tobytes()]}))
    times.close()
    log.close()
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    return source
