"""Time parts of a training step in bf16 on this CPU, forward and backward: plain torch operations and ours, in turn.

python benchmarks/parts.py --threads 2 --json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.multiply import PLAIN
from megalith.kernels.norm import rms_norm
from megalith.kernels.rope import rotate, rotate_plain
from megalith.machine.resident import keep_memory

BATCH, SEQ, HEADS, HEAD_DIM = 4, 1024, 12, 64
DIM, EPS = HEADS * HEAD_DIM, 1e-5


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def norms() -> dict[str, Callable[[], Tensor]]:
    """RMSNorm of the hidden states."""
    x, weight = numbers(BATCH, SEQ, DIM), numbers(DIM)
    return {"theirs": lambda: F.rms_norm(x, (DIM,), weight, EPS), "ours": lambda: rms_norm(x, weight, EPS)}


def rotations() -> dict[str, Callable[[], Tensor]]:
    """Rotation of the queries."""
    x, cos, sin = numbers(BATCH, SEQ, HEADS, HEAD_DIM), *torch.randn(2, SEQ, 1, HEAD_DIM // 2)
    return {"theirs": lambda: rotate_plain(x, cos, sin), "ours": lambda: rotate(x, cos, sin)}


def layers() -> dict[str, Callable[[], Tensor]]:
    """A linear layer on a quarter of the hidden states: all would take seconds on a processor without bf16 instructions."""
    x, weight = numbers(SEQ // 4, DIM), numbers(DIM, DIM)
    return {"theirs": lambda: F.linear(x, weight), "ours": lambda: PLAIN(x, weight)}


def measure(sides: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of both implementations."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):  # the first warms up
        for name, side in sides.items():
            began = time.perf_counter()
            out = side()
            out.backward(torch.ones_like(out))
            taken[name].append(time.perf_counter() - began)
    return {name: round(statistics.median(seconds[1:]) * 1e3, 2) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    keep_memory()
    for name, sides in {"RMSNorm": norms(), "rotation": rotations(), "linear layer": layers()}.items():
        row = measure(sides, a.rounds)
        print(json.dumps({"part": name, **row}) if a.json else f"{name}: theirs {row['theirs']} ms, ours {row['ours']} ms")


if __name__ == "__main__":
    main()
