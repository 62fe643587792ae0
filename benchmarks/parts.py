"""Time parts of a training step in bf16 on this CPU, forward and backward: plain torch operations and ours, in turn.

python benchmarks/parts.py --threads 2 --json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels import narrow
from megalith.kernels.draws import Tokens, working_on
from megalith.kernels.multiply import PLAIN
from megalith.kernels.norm import rms_norm
from megalith.kernels.rope import rotate, rotate_plain
from megalith.machine.resident import keep_memory
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.parallel.precision import apply_precision
from megalith.spec.families.llama import Llama
from megalith.spec.numbers import PrecisionSpec

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


def steps() -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of a Llama in NVFP4: "theirs" sums each product in any order, "ours" by the definition of the format."""
    model = Stage(Llama(layers=4, dim=256, heads=4, ffn=1024, vocab=256, context=256).build()).bfloat16()
    for name, part in model.parts():
        apply_precision(part, "nvfp4", name=name, blocks=4, choices=PrecisionSpec())
    tokens = torch.randint(256, (2, 256))

    def step(product: Callable[..., Tensor]) -> Tensor:
        with mock.patch.object(narrow, "defined_product", product), working_on(Tokens(torch.arange(2), torch.arange(256))):
            out = model(tokens, Batch(tokens))
            assert isinstance(out, Tensor)
            out.sum().backward()
        return torch.zeros((), requires_grad=True)

    return {"theirs": lambda: step(torch.matmul), "ours": lambda: step(narrow.defined_product)}


PARTS: dict[str, Callable[[], dict[str, Callable[[], Tensor]]]] = {
    "RMSNorm": norms,
    "rotation": rotations,
    "linear layer": layers,
    "step in nvfp4": steps,
}


def measure(sides: dict[str, Callable[[], Tensor]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median milliseconds of both implementations."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):  # the first warms up
        for name, side in sides.items():
            began = clock()
            out = side()
            out.backward(torch.ones_like(out))
            taken[name].append(clock() - began)
    return {name: round(statistics.median(seconds[1:]) * 1e3, 2) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--processor", action="store_true", help="processor time, for a machine with other work")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    keep_memory()
    for name in a.parts:
        row = measure(PARTS[name](), a.rounds, time.process_time if a.processor else time.perf_counter)
        print(json.dumps({"part": name, **row}) if a.json else f"{name}: theirs {row['theirs']} ms, ours {row['ours']} ms")


if __name__ == "__main__":
    main()
