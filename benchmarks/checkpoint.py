"""Measure how long training waits for a checkpoint: synchronous and asynchronous saves of the same state, side by side.

    python benchmarks/checkpoint.py --megabytes 500 --ranks 2 --json

The state is weights and two moments in fp32, sharded over the ranks (`--replicated`: held whole by every rank). The two kinds
of save alternate, so that both see the same disk. The script prints medians. It also prints the first asynchronous save by
itself, and the time to reserve memory for it at the start.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megalith.checkpoint.checkpointer import Checkpointer, SaveResult

TENSORS = 96  # per group of the state: 12 blocks of 8
COLUMNS = 1024


def state_of(megabytes: float, *, replicated: bool) -> dict[str, Tensor]:
    """This rank's part of a state of `megabytes` in all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    rows = int(megabytes * 1e6) // (3 * TENSORS * COLUMNS * 4 * (1 if replicated else mesh.size()))
    placement = Replicate() if replicated else Shard(0)
    return {
        f"{group}.blocks.{number // 8}.{number % 8}.weight": DTensor.from_local(
            torch.randn(rows, COLUMNS), mesh, [placement], run_check=False
        )
        for group in ("weights", "moments.first", "moments.second")
        for number in range(TENSORS)
    }


def save(checkpointer: Checkpointer, step: int, state: dict[str, Tensor], *, asynchronous: bool) -> SaveResult:
    """One save, and its outcome."""
    dist.barrier()
    checkpointer.save(step, state, {"step": step}, asynchronous=asynchronous)
    while not (outcomes := checkpointer.poll()):
        time.sleep(0.005)  # training would continue here, so this time does not count as waiting
    (outcome,) = outcomes
    if not isinstance(outcome, SaveResult):
        raise RuntimeError(outcome.error)
    return outcome


def measure(rank: int, ranks: int, folder: Path, megabytes: float, rounds: int, replicated: bool) -> None:
    """Save `rounds` times in each way and load once. Rank 0 writes the times, in seconds, into `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    state = state_of(megabytes, replicated=replicated)
    checkpointer = Checkpointer(folder / "checkpoints", keep=1)
    began = time.perf_counter()
    checkpointer.reserve(state)
    reserve_seconds = time.perf_counter() - began
    first = [save(checkpointer, step, state, asynchronous=bool(step)) for step in (0, 1)]
    saves = [save(checkpointer, step, state, asynchronous=bool(step % 2)) for step in range(2, 2 + 2 * rounds)]
    began = time.perf_counter()
    checkpointer.load(state)
    load_seconds = time.perf_counter() - began
    if rank == 0:
        (folder / "figures.json").write_text(
            json.dumps(figures(first, saves) | {"reserve_seconds": reserve_seconds, "load_seconds": load_seconds})
        )
    dist.barrier()
    dist.destroy_process_group()


def figures(first: list[SaveResult], saves: list[SaveResult]) -> dict[str, Any]:
    """Return medians over the rounds. `share` is the asynchronous wait over the synchronous one."""
    synchronous, asynchronous = saves[0::2], saves[1::2]
    waits = [statistics.median(saved.wait_seconds for saved in kind) for kind in (synchronous, asynchronous)]
    size = saves[0].bytes
    return {
        "bytes": size,
        "synchronous_wait_seconds": waits[0],
        "asynchronous_wait_seconds": waits[1],
        "share": waits[1] / waits[0],
        "first_asynchronous_wait_seconds": first[1].wait_seconds,
        "first_share": first[1].wait_seconds / waits[0],
        "asynchronous_seconds": statistics.median(saved.seconds for saved in asynchronous),
        "synchronous_bytes_per_second": size / waits[0],
        "asynchronous_bytes_per_second": size / statistics.median(saved.seconds for saved in asynchronous),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicated", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=given.folder))
    try:
        arguments = (given.ranks, folder, given.megabytes, given.rounds, given.replicated)
        torch.set_num_threads(1)
        torch.multiprocessing.start_processes(measure, arguments, nprocs=given.ranks, start_method="fork")
        found = {"ranks": given.ranks, "replicated": given.replicated} | json.loads((folder / "figures.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        print(json.dumps(found))
    else:
        print(f"{found['bytes'] / 1e6:.0f} MB on {given.ranks} ranks")
        print(f"synchronous save   waits {found['synchronous_wait_seconds']:.3f} s")
        print(f"asynchronous save  waits {found['asynchronous_wait_seconds']:.3f} s, {found['share']:.1%} of it")
        print(f"written at {found['synchronous_bytes_per_second'] / 1e6:.0f} MB/s")
        print(f"loaded at {found['bytes'] / found['load_seconds'] / 1e6:.0f} MB/s, digests verified")


if __name__ == "__main__":
    main()
