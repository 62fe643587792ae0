"""Measure the cost of guards when nothing breaks: steps of the quickstart model without guards, and with copies and digests, in
turn.

    python benchmarks/fleet_overhead.py --rounds 12 --json

Every round runs four steps in each mode on the same ranks, in changing order, so that all modes see the same load. The cost of a mode is
the median over the rounds of its time over that of `off` in the same round. `off` is `fleet.recover = false`. `digests` checks digests
between steps and watches gradients. The other modes also copy the state; `buddy` copies it to the second of two nodes, too. `verified`
recomputes one microbatch and every update once in the four steps. On a loaded machine wall time is unreliable, so the script also prints
processor time, and the guards' share of it.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from megalith.checkpoint.memory import Memory
from megalith.data.stream import Batch as Samples
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.secure.key import Key
from megalith.prove.parity import RandomText
from megalith.prove.worlds import run_ranks
from megalith.spec.files import load
from megalith.spec.fleet import FleetSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.guard import StateGuard
from megalith.train.step import train_step
from megalith.train.step_hooks import Attendants


class Taken(NamedTuple):
    """Cost of a block of steps: seconds on the slowest rank, processor seconds on all ranks, and processor seconds in guards."""

    seconds: float
    work: float
    guarding: float


BLOCK = 4  # steps of one mode at a time
WAYS: dict[str, dict[str, Any]] = {
    "off": {"recover": False},
    "digests": {"memory_every": 0},
    "every step": {"memory_every": 1},
    "every fourth": {"memory_every": BLOCK},
    "buddy": {"memory_every": 1, "nodes": 2},
    "buddy every fourth": {"memory_every": BLOCK, "nodes": 2},
    "verified": {"memory_every": 1, "verify_every": BLOCK},
}


class Clocked:
    """A guard that measures the processor time which this thread spends in it."""

    def __init__(self, guard: StateGuard) -> None:
        self.guard, self.seconds = guard, 0.0

    def __getattr__(self, name: str) -> Any:
        return self.clock(getattr(self.guard, name))

    def clock(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Run `call` and add its processor time."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            found = call(*args, **kwargs)
            self.seconds += time.thread_time() - began
            return found

        return timed


class Way:
    """The same ranks in one of the modes."""

    def __init__(self, trainer: Trainer, text: RandomText, fleet: FleetSpec, root: Path) -> None:
        self.trainer = replace(trainer, spec=trainer.spec.model_copy(update={"fleet": fleet}))
        self.text, self.guard = text, None
        if not fleet.recover:
            return
        rank_info = RankInfo(
            dist.get_rank(),
            dist.get_world_size(),
            tuple(f"n{slot}" for slot in range(fleet.nodes)),
            root,
            key=Key("benchmark" * 8),
        )
        memory = (
            Memory(trainer.state.shares(), rank_info=rank_info, pinned=fleet.verify_every > 0) if fleet.memory_every else None
        )
        if memory and fleet.buddy_distance(fleet.nodes):
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            memory.join(fleet.buddy_distance(fleet.nodes), group=group)
        self.guard = StateGuard(self.trainer, rank_info=rank_info, read=self.read, memory=memory)

    def read(self, step: int, data_rank: int) -> list[Samples]:
        spec = self.trainer.spec
        return [self.text.batch(part) for part in indices(spec, first=step * spec.train.global_batch, data_rank=data_rank)]

    def run(self, first: int) -> Taken:
        """Run a block of steps. The current state is accepted as it is, since other modes have trained on it meanwhile."""
        guard, trainer = self.guard, self.trainer
        clocked = Clocked(guard) if guard else None
        for runner in trainer.runners.values():
            for bucket in (bucket for used in runner.buckets for bucket in used):
                bucket.probe = clocked.clock(clocked.guard.probe) if clocked else None
        if guard:
            guard.begin(first, 0)
        samples = [self.read(step, trainer.groups.coordinates["data"]) for step in range(first, first + BLOCK)]
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for step, microbatches in enumerate(samples, start=first):
            step_hooks: list[Any] = [clocked] if clocked else []
            Attendants(step_hooks).notify("before_step", trainer, step)
            train_step(trainer, microbatches, step=step, attendants=Attendants(step_hooks))
            if clocked and clocked.guard.due(step + 1):
                clocked.copy(step + 1, 0)
        seconds, inside = torch.tensor(time.perf_counter() - began), clocked.seconds if clocked else 0.0
        work = torch.tensor([time.process_time() - worked, inside])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(work)
        if guard:
            guard.close()
            if guard.memory:
                guard.memory.forget_after(-1)
        return Taken(float(seconds), *work.tolist())


def measure(rank: int, recipe: str, rounds: int, chosen: list[str], root: Path) -> tuple[dict[str, list[Taken]], int]:
    """Return the costs of each mode's blocks by round, without the first round, and the bytes of this rank's state."""
    spec = load(recipe, overrides=["train.device=cpu"]).spec
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 10**6})})
    text = RandomText(spec)
    trainer = assemble(spec, groups=mesh_groups(spec, torch.device("cpu")), device=torch.device("cpu"))
    ways = {
        name: Way(trainer, text, FleetSpec(**fleet), root / name.replace(" ", "-"))
        for name, fleet in WAYS.items()
        if name in chosen
    }
    found: dict[str, list[Taken]] = {name: [] for name in ways}
    names, step = list(ways), 0
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = ways[name].run(step)
            step += BLOCK
            if turn:
                found[name].append(taken)
            if rank == 0:
                print(f"round {turn} {name}: {taken}", file=sys.stderr, flush=True)
    return found, sum(share.numel() * share.element_size() for share in trainer.state.shares().values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.toml")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ways", default=",".join(WAYS), help="which of them, besides `off`")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ranks = load(given.recipe).spec.plan.ranks
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="fleet-overhead-", dir=memory if memory.is_dir() else None))
    try:
        results = run_ranks(measure, ranks, given.recipe, given.rounds, ["off", *given.ways.split(",")], root, timeout=1800.0)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    taken = results[0][0]
    costs = {name: _cost(found, taken["off"]) for name, found in taken.items()}
    step = statistics.median(block.seconds for block in taken["off"]) / BLOCK
    size = sum(held for _, held in results)
    if given.json:
        print(json.dumps({"step_seconds": step, "state_bytes": size, "load": os.getloadavg()[0], "cost": costs, "blocks": taken}))
        return
    print(
        f"{ranks} ranks, {step * 1e3:.0f} ms a step with everything off; {size / 1e6:.0f} MB of state; load {os.getloadavg()[0]:.0f}"
    )
    print(f"{'':14s}" + "".join(f"{name:>22s}" for name in costs["off"]))
    for name, cost in costs.items():
        print(f"{name:14s}" + "".join(f"{share:+22.1%}" for share in cost.values()))


def _cost(found: list[Taken], off: list[Taken]) -> dict[str, float]:
    """Return the extra time over `off` in the same round, and the guard's part of its processor time: medians over the rounds."""
    pairs = list(zip(found, off, strict=True))
    return {
        "time": statistics.median(mine.seconds / base.seconds - 1 for mine, base in pairs),
        "processor time": statistics.median(mine.work / base.work - 1 for mine, base in pairs),
        "counted in the guard": statistics.median(mine.guarding / (mine.work - mine.guarding) for mine in found),
    }


if __name__ == "__main__":
    main()
