"""Find the best learning rate at each width, in the standard parametrization and under muP.

    python benchmarks/transfer.py
    python benchmarks/transfer.py --widths 64,128 --steps 50 --seeds 1      # quick

trains small Llamas of several widths on the bundled text (bytes), in one process and in fp32. It tries every learning rate of a grid with
factors of two, and prints the loss over the last fifth of the steps. Under muP the best rate should not depend on the width. Each finished
case is written to the file --keep, with the commit, and is not trained again. About fifteen minutes on two idle cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megalith.data import bundled
from megalith.models.batch import Batch
from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.prove.coordcheck import sized
from megalith.prove.updates import update_of
from megalith.spec.families.llama import Llama
from megalith.spec.run import OptimizerSpec

HEAD_DIM, SEQUENCES, LENGTH = 16, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--rates", default="-11,-4", help="logarithms of the least and the largest rate, to the base 2")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("runs/transfer.jsonl"))
    asked = parser.parse_args()
    widths = [int(word) for word in asked.widths.split(",")]
    least, most = (int(word) for word in asked.rates.split(","))
    rates = [2.0**power for power in range(least, most + 1)]
    known = {json.dumps(one["case"]): one["loss"] for one in map(json.loads, _lines(asked.keep))}
    text = np.frombuffer(bundled.austen().encode(), dtype=np.uint8)
    for kind in ("standard", "mup"):
        for width in widths:
            losses = {}
            for rate in rates:
                cases = [
                    {"kind": kind, "width": width, "rate": rate, "steps": asked.steps, "seed": seed}
                    for seed in range(asked.seeds)
                ]
                losses[rate] = statistics.fmean(_case(one, text, known, asked.keep, widths[0]) for one in cases)
            best = min(losses, key=lambda rate: losses[rate])
            told = "  ".join(f"2^{int(np.log2(rate))}: {loss:.3f}{'*' if rate == best else ' '}" for rate, loss in losses.items())
            print(f"{kind:9} {width:5}  {told}", flush=True)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _case(case: dict[str, Any], text: np.ndarray, known: dict[str, float], keep: Path, base: int) -> float:
    key = json.dumps(case)
    if key not in known:
        began = time.monotonic()
        known[key] = train(text, base=base, **case)
        keep.parent.mkdir(parents=True, exist_ok=True)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        with keep.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"case": case, "loss": known[key], "seconds": time.monotonic() - began, "commit": commit}) + "\n"
            )
    return known[key]


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
