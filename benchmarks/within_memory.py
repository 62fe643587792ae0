"""Train in less memory than the training state takes: a fresh process in a memory cgroup of its own (Linux, cgroup v1, as root).

    python benchmarks/within_memory.py --limit 900 --folder /mnt/nvme --json
    python benchmarks/within_memory.py --limit 900 --folder /mnt/nvme --place streamed --layers 18

The cgroup counts all memory of the process: Python, torch, weights, gradients, activations, buffers, and the page cache of files that it
writes. The kernel kills a process that needs more. If no such cgroup can be made, use `--inside`, which only trains, under any other
limit: `systemd-run --scope -p MemoryMax=900M python benchmarks/within_memory.py --inside`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

MODEL = {"dim": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 3072, "vocab": 4096, "context": 128}
"""The largest tensor is 16 MiB in fp32. 6 blocks are 90M parameters, 18 are 254M."""

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"state": {"optimizer": "host"}},
    "disk": {"state": {"optimizer": "disk"}},
    "streamed": {"zero": 3, "state": {"optimizer": "disk", "weights": "disk", "release": True}},
}
"""Places of the training state. `streamed`: on disk, with weights made from it at each gather, and gradients released."""

FREED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Setting with which glibc returns freed tensors to the system. A rank needs more memory while it builds the model than later."""

A_PARAMETER = 16
"""Bytes of training state: weight 2, gradient 2, master weight 4, moments 8."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=900, help="MiB of the group")
    parser.add_argument("--place", default="disk", choices=tuple(PLACES), help="of the training state")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file of the state goes")
    parser.add_argument("--inside", action="store_true", help="make no group")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = inside(given) if given.inside else within(given.limit, sys.argv[1:])
    if given.json:
        print(json.dumps(found))
        return
    sizes = {key: f"{found[key] / 2**20:,.0f} MiB" for key in ("state", "disk", "peak")}
    print(f"{found['parameters'] / 1e6:.0f}M parameters in bf16, AdamW, {given.steps} steps")
    print(f"training state {sizes['state']}, of these {sizes['disk']} in two slots on disk")
    print(f"peak memory    {sizes['peak']}{'' if given.inside else f' of {given.limit:,} MiB, as the group counts'}")


def within(limit: int, arguments: list[str]) -> dict[str, Any]:
    """Run this script again in a cgroup of `limit` MiB. Raises SystemExit if no cgroup can be made, or if that process is
    killed."""
    with group(limit) as folder:
        asked = [sys.executable, __file__, *arguments, "--inside", "--json"]

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(asked, preexec_fn=enter, stdout=subprocess.PIPE, text=True, env=os.environ | FREED)
        if done.returncode:
            raise SystemExit(f"the process in a group of {limit} MiB ended with {done.returncode}; -9: it needed more")
        return json.loads(done.stdout) | {"peak": int((folder / "memory.max_usage_in_bytes").read_text())}


@contextmanager
def group(limit: int) -> Iterator[Path]:
    """Make a memory cgroup of `limit` MiB inside that of this process. Raises SystemExit if none can be made."""
    rows = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, kind, path in rows if kind == "memory"), None)
    folder = Path(f"/sys/fs/cgroup/memory/{own}/megalith-{os.getpid()}")
    try:
        if own is None:
            raise OSError("cgroup v1 has no memory controller here")
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit * 2**20))
    except OSError as error:
        raise SystemExit(f"no memory control group can be made: {error}. Use --inside under another limit.") from error
    try:
        yield folder
    finally:
        folder.rmdir()


def inside(given: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, as the only rank."""
    import torch
    import torch.distributed as dist

    from megalith.spec.run import RunSpec

    torch.set_num_threads(1)
    place = PLACES[given.place]
    state = place["state"] | {"chunk": 4, "folder": given.folder} if place else {}
    spec = RunSpec.model_validate(
        {
            "model": MODEL | {"layers": given.layers},
            "data": {"path": "none"},
            "plan": {"recompute": "full", **place, "state": state},
            "train": {"steps": given.steps, "global_batch": 1, "seq_len": 128, "precision": "bf16", "gradients": "bf16"},
            "optimizer": {"warmup": 0, "lr": 1e-4},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = train(spec)
        dist.destroy_process_group()
    return found


def on_disk() -> int:
    """Return the disk space of the unnamed files that this process has open, in bytes."""
    opened = (number for number in Path("/proc/self/fd").iterdir() if str(number.resolve()).endswith("(deleted)"))
    return sum(number.stat().st_blocks * 512 for number in opened)


def train(spec: Any) -> dict[str, Any]:
    """Train a few steps on random text."""
    import torch

    from megalith.prove.parity import RandomText
    from megalith.train.assemble import assemble, mesh_groups
    from megalith.train.batches import indices
    from megalith.train.step import train_step

    device = torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    text, losses, began = RandomText(spec), list[float](), time.monotonic()
    for step in range(spec.train.steps):
        losses.append(train_step(trainer, [text.batch(part) for part in indices(spec, first=step, data_rank=0)], step=step).loss)
    numbers = sum(parameter.numel() for parameter in trainer.parameters.values())
    (most,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {
        "parameters": numbers,
        "state": numbers * A_PARAMETER,
        "disk": on_disk(),
        "peak": int(most.split()[1]) * 1024,
        "seconds": (time.monotonic() - began) / spec.train.steps,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
