"""Measure the cost of watching for spikes: steps of a small model with `stability.watch` off and on, in turn, on the same rank.

    python benchmarks/watching.py --rounds 20 --json

Both modes share weights and take their steps in changing order, so they see the same load. The cost is the median over the rounds of the
ratio of their times. On a loaded machine that is unreliable, so the script also prints the processor time of the watching calls: the
decision, the history, and the text stored in a copy of the state. A step that measures extremes (`stability.extremes_every`) is
compared with one that does not, in processor time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.prove.parity import RandomText
from megalith.prove.worlds import run_ranks
from megalith.spec.files import load
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.stability.findings import Findings
from megalith.train.stability.healer import Data, Healer
from megalith.train.step import decision_of, remember, train_step, vitals_of
from megalith.train.step_hooks import Attendants
from megalith.train.tally import StepTotals

ROOT, BLOCK, WARM = Path(__file__).resolve().parents[1], 2, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan = {"plan": {"data": 1, "microbatch": 1}, "train": {"global_batch": 4, "seq_len": 128}}
    spec = load(ROOT / "recipes/quickstart.toml").spec
    tables = spec.model_dump()
    for table, values in plan.items():
        tables[table] = (tables[table] if table != "plan" else {}) | values
    (found,) = run_ranks(measure, 1, RunSpec.model_validate(tables), given.rounds, timeout=3600.0)
    if given.json:
        print(json.dumps(found))
        return
    print(f"a step {1000 * found['step']:.1f} ms; watched, side by side: {100 * (found['ratio'] - 1):+.2f} %")
    print(f"the watching calls alone: {1e6 * found['calls']:.0f} us a step, {100 * found['calls'] / found['step']:.3f} % of it")
    look, every = 100 * (found["look"] - 1), found["every"]
    print(f"a step that measures extremes: {look:+.2f} %; one in {every:.0f} does, so a step: {look / every:+.3f} %")
    print(f"the text for a copy: {1e6 * found['text']:.0f} us, {100 * found['text'] / found['step']:.3f} % of a step")


def measure(rank: int, spec: RunSpec, rounds: int) -> dict[str, float]:
    """Return the seconds of a step without watching, the ratio with watching, and the seconds of the watching calls."""
    device = torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    trainer.extremes.every = 0  # requested explicitly below, since few steps measure them
    blind = replace(trainer, spec=spec.model_copy(update={"stability": spec.stability.model_copy(update={"watch": False})}))
    text, batch = RandomText(spec), spec.train.global_batch
    (first,) = Phases.of(spec).all
    nothing = Data(
        reads=lambda step: False,
        read=lambda step: [],
        mine=lambda step: [],
        numbers=lambda step: (),
        shape=lambda step: (first, batch),
        place=lambda number: "",
    )
    with tempfile.TemporaryDirectory() as folder:
        healer = Healer(trainer, nothing, checkpointer=Checkpointer(Path(folder)), guard=None)
        step, seconds = 0, dict[str, list[float]](on=[], off=[])
        for turn in range(rounds + WARM // (2 * BLOCK)):
            for way in ("on", "off") if turn % 2 else ("off", "on"):
                began = time.perf_counter()
                for _ in range(BLOCK):
                    data = [text.batch(part) for part in indices(spec, first=step * batch, data_rank=0)]
                    who: dict[str, Any] = {"healer": healer} if way == "on" else {}
                    train_step(trainer if way == "on" else blind, data, step=step, **who)
                    step += 1
                seconds[way].append((time.perf_counter() - began) / BLOCK)
        warm = WARM // (2 * BLOCK)
        pairs = list(zip(seconds["on"][warm:], seconds["off"][warm:], strict=True))
        ratio = statistics.median(on / off for on, off in pairs)
        looks = list[float]()
        for _ in range(rounds):
            taken = dict[bool, float]()
            for demanded in (False, True):
                data = [text.batch(part) for part in indices(spec, first=step * batch, data_rank=0)]
                if demanded:
                    trainer.extremes.demand()
                began = time.process_time()
                train_step(trainer, data, step=step)
                taken[demanded] = time.process_time() - began
                step += 1
            looks.append(taken[True] / taken[False])
        calls, dump = [], []
        known = trainer.state.history
        for _ in range(200):
            trainer.state.history = known
            totals = StepTotals(squares=known.norms[-1] ** 2, loss=known.losses[-1], stop=False, resident=0)
            began = time.thread_time()
            vitals = vitals_of(trainer, totals, None, step=step, attendants=Attendants(healer=healer))
            remember(
                trainer, decision_of(trainer, vitals), vitals, totals=totals, lr=trainer.lr, healer=healer, findings=Findings()
            )
            calls.append(time.thread_time() - began)
            began = time.thread_time()
            known.dump()
            dump.append(time.thread_time() - began)
    return {
        "step": statistics.median(off for _, off in pairs),
        "ratio": ratio,
        "look": statistics.median(looks),
        "every": spec.stability.extremes_every,
        "calls": statistics.median(calls),
        "text": statistics.median(dump),
    }


if __name__ == "__main__":
    main()
