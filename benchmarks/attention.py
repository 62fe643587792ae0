"""Time attention in bf16 on this CPU: torch's fused kernel and our blocks of matrix products, in turn.

python benchmarks/attention.py --json
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from megalith.kernels.attention import blocked, flash_cpu
from megalith.machine.resident import keep_memory

SHAPES = {  # batch, heads, kv_heads, seq, channels
    "multi-head, 1,024 tokens": (4, 12, 12, 1024, 64),
    "grouped, 700 tokens": (2, 8, 2, 700, 64),
    "wide heads, 4,096 tokens": (1, 4, 4, 4096, 128),
}


def fastest(function: Callable[[], object], rounds: int) -> float:
    """Return the time of a call in milliseconds."""
    taken = []
    for _ in range(rounds + 1):  # the first call warms up
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return min(taken[1:]) * 1e3


def measure(shape: tuple[int, int, int, int, int], rounds: int) -> dict[str, float]:
    """Forward and backward of each, causal, in milliseconds."""
    batch, heads, kv_heads, seq, channels = shape
    q, grad = (torch.randn(batch, seq, heads, channels).bfloat16().transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(batch, seq, kv_heads, channels).bfloat16().transpose(1, 2) for _ in range(2))
    scale, found = channels**-0.5, {}
    for name, kernel in {"fused": flash_cpu, "blocks": blocked}.items():
        out, lse = kernel.forward(q, k, v, True, scale)
        found[f"{name} forward"] = fastest(lambda kernel=kernel: kernel.forward(q, k, v, True, scale), rounds)
        found[f"{name} backward"] = fastest(
            lambda kernel=kernel, out=out, lse=lse: kernel.backward(grad, q, k, v, out, lse, True, scale), rounds
        )
    sides = {name: found[f"{name} forward"] + found[f"{name} backward"] for name in ("fused", "blocks")}
    return {name: round(ms, 1) for name, ms in found.items()} | {"ratio": round(sides["fused"] / sides["blocks"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    keep_memory()
    for name, shape in SHAPES.items():
        row = measure(shape, a.rounds)
        print(json.dumps({"shape": name, **row}) if a.json else f"{name}: " + ", ".join(f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
