"""Time collectives of CPU tensors: gloo's rings and one round of messages (parallel/one_round.py), in turn in the same ranks.

python benchmarks/collectives.py [--ranks 2 4 8] [--times 40] [--json]
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from megalith.parallel import one_round
from megalith.prove.worlds import run_ranks

SIZES = (64, 4 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of the whole tensor: the output of a gather, the input of a reduce-scatter."""


def measure(rank: int, ranks: int, times: int) -> list[dict[str, Any]]:
    """Return the median milliseconds over `times` calls, for each collective, size and implementation."""
    found = []
    for size in SIZES:
        whole = torch.ones(size // 4)
        mine = torch.ones(size // 4 // ranks)
        calls = {
            "all-gather": lambda whole=whole, mine=mine: dist.all_gather_into_tensor(whole, mine),
            "reduce-scatter": lambda whole=whole, mine=mine: dist.reduce_scatter_tensor(mine, whole),
            "all-reduce": lambda whole=whole: dist.all_reduce(whole),
        }
        for name, call in calls.items():
            took: dict[int, list[float]] = {0: [], 1 << 40: []}
            for turn in range(2 * times + 4):
                most = list(took)[turn % 2]
                one_round.MAXIMUM.update(dict.fromkeys(one_round.MAXIMUM, most))
                dist.barrier()
                began = time.perf_counter()
                call()
                took[most].append(time.perf_counter() - began)
            ring, round_ = (1e3 * sorted(each[2:])[times // 2] for each in took.values())
            found.append({"what": name, "ranks": ranks, "bytes": size, "ring": ring, "one round": round_})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = [row for ranks in asked.ranks for row in run_ranks(measure, ranks, ranks, asked.times, timeout=600)[0]]
    if asked.json:
        print(json.dumps(found))
        return
    print("| | ranks | bytes | ring, ms | one round, ms | |\n|---|---|---|---|---|---|")
    for row in found:
        ratio = row["ring"] / row["one round"]
        print(
            f"| {row['what']} | {row['ranks']} | {row['bytes']:,} | {row['ring']:.2f} | {row['one round']:.2f} | {ratio:.1f} x |"
        )


if __name__ == "__main__":
    main()
