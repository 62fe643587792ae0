"""Find the best learning rate at each width, in the standard parametrization and under muP.

    python benchmarks/transfer.py
    python benchmarks/transfer.py --widths 64,128 --steps 50 --seeds 1      # quick

trains small Llamas of several widths on the bundled text (bytes), in one process and in fp32. It tries every learning rate of a grid with
factors of two, and prints the loss over the last fifth of the steps. Under muP the best rate should not depend on the width. The file
keeps finished cases, as benchmarks/cases.py says. About fifteen minutes on two idle cores.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import cases
from megalith.data import bundled
from megalith.models.batch import Batch
from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.prove.coordcheck import sized
from megalith.prove.updates import update_of
from megalith.spec.families.llama import Llama
from megalith.spec.run import OptimizerSpec

HEAD_DIM, SEQUENCES, LENGTH = 16, 8, 64
KINDS = ("standard", "mup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--rates", default="-11,-4", help="logarithms of the least and the largest rate, to the base 2")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("runs/transfer.jsonl"))
    cases.add_arguments(parser)
    asked = parser.parse_args()
    widths = [int(word) for word in asked.widths.split(",")]
    least, most = (int(word) for word in asked.rates.split(","))
    rates = [2.0**power for power in range(least, most + 1)]
    wanted = [
        {"kind": kind, "width": width, "rate": rate, "steps": asked.steps, "seed": seed}
        for kind in KINDS
        for width in widths
        for rate in rates
        for seed in range(asked.seeds)
    ]
    text = np.frombuffer(bundled.austen().encode(), dtype=np.uint8)
    rows = cases.finish(asked.keep, wanted, partial(measured, text, widths[0]), workers=asked.workers)
    known = {json.dumps(row["case"]): row["loss"] for row in rows}
    for kind in KINDS:
        for width in widths:
            mine = [case for case in wanted if (case["kind"], case["width"]) == (kind, width)]
            losses = {rate: statistics.fmean(known[json.dumps(case)] for case in mine if case["rate"] == rate) for rate in rates}
            best = min(losses, key=lambda rate: losses[rate])
            told = "  ".join(f"2^{int(np.log2(rate))}: {loss:.3f}{'*' if rate == best else ' '}" for rate, loss in losses.items())
            print(f"{kind:9} {width:5}  {told}")


def measured(text: np.ndarray, base: int, case: dict[str, Any]) -> dict[str, float]:
    """Train a case; return the row's result."""
    return {"loss": train(text, base=base, **case)}


def train(text: np.ndarray, *, base: int, kind: Any, width: int, rate: float, steps: int, seed: int) -> float:
    """Return the mean loss over the last fifth of the steps, or 10 if it is not finite."""
    small = Llama(layers=2, dim=base, heads=base // HEAD_DIM, ffn=base * 8 // 3, vocab=256, context=LENGTH)
    model = sized(small, "width", width, base, kind)
    parts, stage = model.build(), Stage(model.build())
    for name, part in stage.parts():
        initialise(part, name=name, spec=parts, seed=seed)
    parameters = stage.parameters_by_name()
    optimizer = OptimizerSpec(lr=rate, weight_decay=0.0)
    advance = update_of(parameters, optimizer, parts)
    random, losses = np.random.default_rng(seed), []
    for step in range(steps):
        starts = random.integers(0, len(text) - LENGTH - 1, SEQUENCES)
        rows = torch.from_numpy(np.stack([text[at : at + LENGTH + 1] for at in starts]).astype(np.int64))
        loss = stage(rows[:, :-1], Batch(tokens=rows[:, :-1], targets=rows[:, 1:], loss_scale=1 / (SEQUENCES * LENGTH)))
        loss.objective.backward()
        losses.append(float(loss.nll))
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        advance(step, rate * min(1.0, (step + 1) / 20))
        for parameter in parameters.values():
            parameter.grad = None
    late = statistics.fmean(losses[-steps // 5 :])
    return late if np.isfinite(late) else 10.0


if __name__ == "__main__":
    main()
