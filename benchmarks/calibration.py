"""Compare the planner's predictions with short training runs on this machine, with and without this machine's measured figures.

    python benchmarks/calibration.py [--ranks 1 2] [--seconds 0.5] [--steps 5] [--json]

For each number of ranks the machine is measured as by `megalith doctor --calibrate`. Then small models, drawn by a fixed seed, train for
some steps on the CPU: dense models and mixtures of experts, under plans with that number of ranks. The script prints the median step and
two predictions of it: one with the file's [measured] table, and one without. The latter keeps the device's measured rates, but takes
efficiencies from the nearest fitted generation. Run the script on an idle machine: other work slows down the steps or the calibration.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from megalith.cost.estimate import estimate
from megalith.cost.predicted import workload_of
from megalith.prove import calibrate, worlds
from megalith.prove.dryrun import single_documents
from megalith.spec.cluster import load
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.step import train_step

WARM = 2
"""The number of first steps that are not timed."""


@dataclass(frozen=True)
class Compared:
    """One run's median step in seconds, and its predictions with and without the machine's own figures."""

    name: str
    measured: float
    calibrated: float
    uncalibrated: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of both predictions: predicted over measured, minus 1."""
        return self.calibrated / self.measured - 1, self.uncalibrated / self.measured - 1


def cases(ranks: int, count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and tables of runs. Every second run is a mixture of experts."""
    random_ = random.Random(f"{seed} {ranks}")
    for number in range(count):
        dim, layers = random_.choice((128, 256, 384)), random_.choice((2, 4, 6))
        length, microbatches = random_.choice((128, 256, 512)), random_.choice((1, 2))
        model = {"layers": layers, "dim": dim, "heads": dim // 32, "ffn": 2 * dim, "vocab": 1024, "context": length}
        plan: dict[str, Any] = {"data": ranks, "zero": random_.choice((1, 3))}
        if number % 2:
            model |= {"family": "mixtral", "experts": 4, "active": 2, "kv_heads": dim // 32}
            plan |= {"expert": ranks}
        elif ranks > 1 and random_.random() < 0.5:
            plan = {"tensor": ranks}
        name = f"{'experts' if number % 2 else 'dense'} {layers} x {dim}, {length} tokens, {plan}"
        train = {"steps": 100, "global_batch": ranks * microbatches, "seq_len": length, "precision": "fp32", "device": "cpu"}
        yield name, {"model": model, "plan": plan, "data": {"path": "random tokens"}, "train": train, "optimizer": {"warmup": 0}}


def seconds_of_step(rank: int, tables: dict[str, Any], steps: int, threads: int) -> float:
    """Train on one of the ranks with this number of threads, and return its median step in seconds."""
    torch.set_num_threads(threads)
    spec = RunSpec.model_validate(tables)
    device = torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    batches, seconds = [single_documents(spec)] * spec.microbatches, list[float]()
    for step in range(WARM + steps):
        began = time.perf_counter()
        train_step(trainer, batches, step=step)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM:])


def compared(ranks: int, folder: Path, *, seconds: float, steps: int, count: int, seed: int) -> list[Compared]:
    """Measure the machine with this many ranks, and compare runs with their predictions."""
    own, plain = folder / f"own-{ranks}.toml", folder / f"plain-{ranks}.toml"
    own.write_text(calibrate.text(calibrate.calibrate(ranks, seconds=seconds, wanted="cpu"), host="this machine"))
    measured = load(str(own)).measured
    assert measured is not None
    plain.write_text(own.read_text().partition("[measured]")[0])
    found = list[Compared]()
    for name, tables in cases(ranks, count, seed):
        took = max(worlds.run_ranks(seconds_of_step, ranks, tables, steps, measured.threads, timeout=600.0))
        predicted = [
            estimate(workload_of(RunSpec.model_validate(tables | {"cluster": str(file)}))).time.step for file in (own, plain)
        ]
        found.append(Compared(name, took, *predicted))
        print(
            f"{name:<60} {took * 1e3:8.0f} ms {found[-1].errors[0]:+8.0%} {found[-1].errors[1]:+8.0%}",
            file=sys.stderr,
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each measurement of the calibration repeats")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--count", type=int, default=4, help="runs for each number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are forked from this process
    with tempfile.TemporaryDirectory() as name:
        found = [
            one
            for ranks in asked.ranks
            for one in compared(ranks, Path(name), seconds=asked.seconds, steps=asked.steps, count=asked.count, seed=asked.seed)
        ]
    medians = [statistics.median(abs(one.errors[side]) for one in found) for side in (0, 1)]
    if asked.json:
        errors = dict(zip(("calibrated", "uncalibrated"), medians, strict=True))
        print(json.dumps({"runs": [asdict(one) for one in found], "median_errors": errors}))
    else:
        print(f"median error of the step: {medians[0]:.0%} with this machine's figures, {medians[1]:.0%} without")


if __name__ == "__main__":
    main()
