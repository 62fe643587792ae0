"""Compare the loss with a training state in few bits to that with fp32: the same steps from the same weights on the same samples.

    megalith data prepare bundled:austen --tokenizer bytes --validation 0.03 --out data/austen-bytes
    python benchmarks/moments.py --data data/austen-bytes --steps 2000 --seeds 3 --out moments.jsonl
    python benchmarks/moments.py --quick                     # a fiftieth of its steps, on data of its own

`integers` is a bad format that the comparison must show: 8 bits in even steps up to the largest number of a block, and no root.

A loss is the mean over the last tenth of the steps, each on samples that the run has not seen. `noise` is fp32 with a learning rate that is
larger by a millionth: the gap between two runs that hardly differ. Cases that compute in bf16 are compared with `compute`, which has wide
state. The file keeps finished cases, as benchmarks/cases.py says.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from benchmarks import cases
from megalith.kernels import moments
from megalith.kernels.elements import decode_exponent, encode_exponent, power
from megalith.prove.worlds import run_ranks
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.restore import Position, read_step
from megalith.train.step import train_step
from megalith.train.stream import open_stream

IN_BF16 = {"precision": "bf16"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "noise": ({"lr": 1e-3 * (1 + 1e-6)}, {}),
    "bf16": ({"moments": "bf16"}, {}),
    "fp8": ({"moments": "fp8"}, {}),
    "integers": ({"moments": "fp8"}, {}),
    "compute": ({}, IN_BF16),
    "split8": ({"master": "split8"}, IN_BF16),
    "gradients": ({}, IN_BF16 | {"gradients": "bf16"}),
    "all": ({"moments": "fp8", "master": "split8"}, IN_BF16 | {"gradients": "bf16"}),
}
"""Changes to [optimizer] and [train] in each case. A step has eight microbatches, whose gradients are added up."""
BETA2 = (0.95, 0.999)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="needed, but for --quick")
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the steps, and one seed, on data of its own")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES], help="with fp32 or compute, which others need")
    parser.add_argument("--beta2", nargs="+", type=float, default=[*BETA2])
    parser.add_argument("--out", "--file", type=Path, default=Path("moments.jsonl"), help="where finished cases are kept")
    cases.add_arguments(parser, device=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        given.steps, given.seeds = given.steps // 50, 1
    with cases.data_of(parser, given) as data:
        compare(given, data)


def compare(given: argparse.Namespace, data: str) -> None:
    """Measure the cases that were asked for, and print their tables."""
    wanted = [(name, beta2, seed, given.steps) for seed in range(given.seeds) for beta2 in given.beta2 for name in given.cases]
    measure = partial(measured, data, given.device)
    rows = cases.finish(given.out, wanted, measure, workers=given.workers, device=given.device)
    losses = {tuple(row["case"]): row["loss"] for row in rows}
    for beta2 in given.beta2:
        _show(
            {(name, seed): losses[name, beta2, seed, given.steps] for name in given.cases for seed in range(given.seeds)}, beta2
        )


def _show(losses: dict[tuple[str, int], float], beta2: float) -> None:
    """Print the gap between each case and its reference: the mean over the seeds, and its standard error."""
    print(f"beta2 = {beta2}\ncase       loss    gap")
    seeds = sorted({seed for _, seed in losses})
    for name in dict.fromkeys(name for name, _ in losses):
        wide = "compute" if CASES[name][1] and name != "compute" else "fp32"
        mine = [losses[name, seed] for seed in seeds]
        gap = ""
        if name != wide and all((wide, seed) in losses for seed in seeds):
            gaps = [100 * (losses[name, seed] / losses[wide, seed] - 1) for seed in seeds]
            error = statistics.stdev(gaps) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
            gap = f"{statistics.mean(gaps):+.3f} % (+-{error:.3f}) to {wide}"
        print(f"{name:10s} {statistics.mean(mine):.4f}  {gap}".rstrip())


def run_of(data: str, steps: int, seed: int, optimizer: dict[str, Any], training: dict[str, Any]) -> RunSpec:
    """A run of a small Llama: two blocks of width 128."""
    return RunSpec.model_validate(
        {
            "model": {
                "layers": 2,
                "dim": 128,
                "heads": 4,
                "kv_heads": 2,
                "head_dim": 32,
                "ffn": 384,
                "vocab": 512,
                "context": 64,
            },
            "data": {"path": data},
            "train": {"steps": steps, "global_batch": 8, "seq_len": 64, "precision": "fp32", "seed": seed} | training,
            "optimizer": {"lr": 1e-3, "warmup": 50} | optimizer,
        }
    )


def measured(data: str, device: str, case: tuple[str, float, int, int]) -> dict[str, Any]:
    """Train a case in a process of its own; return the row's result."""
    name, beta2, seed, steps = case
    optimizer, training = CASES[name]
    spec = run_of(data, steps, seed, {"beta2": beta2} | optimizer, training)
    (loss,) = run_ranks(in_integers if name == "integers" else train, 1, spec, torch.device(device), timeout=3600.0)
    return {"loss": loss}


def in_integers(rank: int, spec: RunSpec, device: torch.device) -> float:
    """Train with moments in plain integers of 8 bits, with one scale for each block."""

    def pack(numbers: Tensor, into: Tensor, block: int, drawn: Tensor, *, root: bool) -> None:
        for columns, where in moments._spans(numbers.shape[-1], block):
            blocks, target = moments._cut(numbers[:, columns], block), moments._cut(into[:, where], block + 1)
            k = torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-120) / 127).ceil().int()
            target[..., :-1].copy_((blocks * power(-k)[..., None]).round().to(torch.int8).view(torch.uint8))
            target[..., -1].copy_(encode_exponent(k))

    def unpack(packed: Tensor, block: int, columns: int, *, root: bool) -> Tensor:
        found = torch.empty(packed.shape[0], columns, device=packed.device)
        for here, where in moments._spans(columns, block):
            pieces = moments._cut(packed[:, where], block + 1)
            numbers = pieces[..., :-1].contiguous().view(torch.int8) * decode_exponent(pieces[..., -1])[..., None]
            moments._cut(found[:, here], block).copy_(numbers)
        return found

    with mock.patch.multiple(moments, pack=pack, unpack=unpack):
        return train(rank, spec, device)


def train(rank: int, spec: RunSpec, device: torch.device) -> float:
    """Train; return the mean loss of the last steps."""
    trainer, stream = assemble(spec, groups=mesh_groups(spec, device), device=device), open_stream(spec, "train")
    losses = list[float]()
    for step in range(spec.train.steps):
        losses.append(train_step(trainer, read_step(stream, spec, Position(), step, 0), step=step).loss)
    return statistics.mean(losses[-max(1, spec.train.steps // 10) :])


if __name__ == "__main__":
    main()
