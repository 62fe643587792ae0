"""Measure the time from a run's command to its first loss: ranks forked by `megalith train`, and the same ranks started by torchrun.

    python benchmarks/start_up.py recipes/quickstart.toml --rounds 3

needs the recipe's data. The two ways alternate. Each start has a folder of its own, so that nothing is resumed. The script prints
medians in seconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megalith import events
from megalith.spec.files import load

WAYS = {
    "megalith train": ["-m", "megalith.cli"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}", "-m", "megalith.cli"],
}


def start(way: str, recipe: str, ranks: int, folder: Path) -> dict[str, float]:
    """Seconds from the command until the run's spec is written, until the ranks are ready, and until the first loss."""
    command = [sys.executable, *(word.format(ranks=ranks) for word in WAYS[way]), "train", recipe, "--run-dir", str(folder)]
    began = time.time()
    subprocess.run([*command, "--set", "train.steps=1", "--set", "optimizer.warmup=0"], check=True, capture_output=True)
    happened = list(events.read(folder))
    return {
        "spec": (folder / "spec.json").stat().st_mtime - began,
        "ready": events.of_kind(happened, events.RunStarted)[0].time - began,
        "first loss": events.of_kind(happened, events.Step)[0].time - began,
        "end": time.time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ranks = load(given.recipe).spec.plan.ranks
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="start-up-") as root:
        for turn in range(given.rounds):
            for way, rows in taken.items():
                rows.append(start(way, given.recipe, ranks, Path(root) / f"{way.replace(' ', '-')}-{turn}"))
    medians = {way: {moment: statistics.median(row[moment] for row in rows) for moment in rows[0]} for way, rows in taken.items()}
    if given.json:
        print(json.dumps({"ranks": ranks, "rounds": given.rounds, "seconds": medians}))
        return
    print(f"{ranks} ranks, medians of {given.rounds}, seconds after the command")
    for way, row in medians.items():
        print(f"  {way:15}" + "  ".join(f"{moment} {seconds:.1f}" for moment, seconds in row.items()))


if __name__ == "__main__":
    main()
