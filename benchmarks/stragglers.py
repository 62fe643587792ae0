"""Compare the slowdown by stragglers in our replay of published traces with the authors' figures.

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    python benchmarks/stragglers.py StragglerAnalysis/data
    python benchmarks/stragglers.py StragglerAnalysis/data --keep tests/watch/traces --json

The traces are those of three jobs of Lin et al. 2025 (arXiv:2505.05713), all with 1F1B: `AR` with one slow worker, `ST` with a last stage
that is too long, `SE` with sequences of uneven length. A job's slowdown is the mean measured step over the mean step in which every
computation takes the mean of its kind (their equation 1). For the slowdown of a stage or a data rank, only its own computations keep their
measured seconds (their equation 2). Their replay includes transfers and the optimizer; ours has computations only. `--keep` writes the
seconds of all computations and the published slowdowns, for the test.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.schedule import Program, build, lower
from megalith.schedule.action import Action
from megalith.watch.replay import pipeline_seconds

TRACES = ("AR", "ST", "SE")
KINDS = {"F": "forward-compute", "B": "backward-compute"}
TICK = 1e-4  # seconds: the resolution to which kept seconds are rounded


def read(path: Path) -> NDArray[np.float64]:
    """Return the seconds of the computations of a trace: by kind, step, data rank, stage and microbatch."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    column = lambda name: table.column(name).to_numpy(zero_copy_only=False)  # noqa: E731
    kinds, data, stages = np.array(table.column("optype").to_pylist(), dtype=str), column("dp_rank"), column("stage")
    numbers, steps = np.unique(column("step"), return_inverse=True)
    computes = np.isin(kinds, list(KINDS.values()))
    microbatches = column("mb_id").astype(np.float64)
    shape = (len(KINDS), len(numbers), data.max() + 1, stages.max() + 1, int(microbatches[computes].max()) + 1)
    seconds = np.zeros(shape)
    for at, kind in enumerate(KINDS.values()):
        of = kinds == kind
        seconds[at, steps[of], data[of], stages[of], microbatches[of].astype(np.int64)] = column("duration")[of]
    if not (seconds > 0).all():
        raise ValueError(f"{path}: some computations have no seconds")
    return seconds


def published(path: Path) -> dict[str, float]:
    """Return the authors' slowdowns: of the job, of each stage and of each data rank."""
    found = json.loads(path.read_text(encoding="utf-8"))
    by = {name: found[f"blocking_decompose_by_{key}"] for name, key in (("stage", "stage"), ("data", "dp_rank"))}
    parts = {f"{name} {at}": value for name, values in by.items() for at, value in values.items()}
    return {"job": found["blocking_slowdown"], **parts}


def replayed(seconds: NDArray[np.float64]) -> Iterator[tuple[str, float]]:
    """Yield the slowdowns in our replay, with the published names."""
    _, _, replicas, stages, microbatches = seconds.shape
    program = lower(build("1f1b", ranks=stages, microbatches=microbatches, chunks=1), zero=0)
    usual = np.broadcast_to(seconds.mean(axis=(1, 2, 3, 4), keepdims=True), seconds.shape)
    ideal = _pipeline(program, usual[:, 0, 0])
    yield "job", _step(program, seconds) / ideal
    for name, axis, number in (("stage", 3, stages), ("data", 2, replicas)):
        for at in range(number):
            kept = np.moveaxis(usual.copy(), axis, 0)
            kept[at] = np.moveaxis(seconds, axis, 0)[at]
            yield f"{name} {at}", _step(program, np.moveaxis(kept, 0, axis)) / ideal


def _step(program: Program, seconds: NDArray[np.float64]) -> float:
    """Return the mean step. Each step ends with its slowest pipeline."""
    _, steps, replicas, _, _ = seconds.shape
    known: dict[bytes, float] = {}  # pipelines that take their usual time are equal

    def one(work: NDArray[np.float64]) -> float:
        key = work.tobytes()
        if key not in known:
            known[key] = _pipeline(program, work)
        return known[key]

    return float(np.mean([max(one(seconds[:, step, data]) for data in range(replicas)) for step in range(steps)]))


def _pipeline(program: Program, work: NDArray[np.float64]) -> float:
    kinds = list(KINDS)

    def of(action: Action) -> float:
        assert action.microbatch is not None, action
        return float(work[kinds.index(action.kind), action.stage, action.microbatch])

    return pipeline_seconds(program, of)


def kept(folder: Path, name: str) -> tuple[NDArray[np.float64], dict[str, float]]:
    """Return the seconds and the published slowdowns of a trace that `--keep` wrote."""
    with np.load(folder / f"{name}.npz") as found:
        return found["ticks"] * TICK, dict(zip(found["names"].tolist(), found["slowdowns"].tolist(), strict=True))


def keep(folder: Path, name: str, seconds: NDArray[np.float64], slowdowns: dict[str, float]) -> None:
    """Write a trace for `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    ticks = np.rint(seconds / TICK).astype(np.uint16)
    np.savez_compressed(
        folder / f"{name}.npz", ticks=ticks, names=np.array(list(slowdowns)), slowdowns=np.array(list(slowdowns.values()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder with trace-NAME.parquet and result-NAME.json")
    parser.add_argument("--keep", type=Path, help="folder for the seconds of the computations")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in TRACES:
        seconds, theirs = read(given.traces / f"trace-{name}.parquet"), published(given.traces / f"result-{name}.json")
        if given.keep:
            keep(given.keep, name, seconds, theirs)
        ours = dict(replayed(seconds))
        found[name] = {key: {"published": theirs[key], "replayed": ours[key]} for key in ours}
    if given.json:
        print(json.dumps(found))
        return
    for name, rows in found.items():
        off = {key: row["replayed"] / row["published"] - 1 for key, row in rows.items()}
        job, worst = rows["job"], max(off, key=lambda key: abs(off[key]))
        print(
            f"{name}: published {job['published']:.3f}, replayed {job['replayed']:.3f} ({off['job']:+.1%}); "
            f"of {len(rows) - 1} stages and data ranks the farthest off is {worst}: {off[worst]:+.1%}"
        )


if __name__ == "__main__":
    main()
