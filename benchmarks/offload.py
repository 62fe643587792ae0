"""Measure cost and gain of state in host memory and on disk: the same steps with the state in each place, one process after
the other.

    python benchmarks/offload.py --steps 4 --folder /mnt/nvme --json

Memory is the peak resident memory during the steps, minus that before the model was built: weights, gradients, state, activations
and buffers. Bytes read and written are those of the disk, from /proc/self/io. The losses must be bitwise equal for all places;
otherwise the script fails.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.within_memory import on_disk
from megalith.machine.resident import resident_bytes
from megalith.prove.parity import RandomText
from megalith.prove.worlds import run_ranks
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.step import train_step

PLACES: dict[str, dict[str, Any]] = {
    "device": {"optimizer": "device"},
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "released": {"optimizer": "disk", "release": True},
}
"""Name of a row -> place of the state. In the last row, gradients are also freed inside the backward."""
MODEL = {"layers": 4, "dim": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1536, "vocab": 16384, "context": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=4, help="MiB of one tensor in a chunk")
    parser.add_argument("--folder", default="", help="where the file goes; default: with temporary files")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for place, asked in PLACES.items():
        state = asked | {"chunk": given.chunk, "folder": given.folder or tempfile.gettempdir()}
        (found[place],) = run_ranks(measure, 1, run_of(state, given.steps), timeout=3600.0)
    if len({tuple(each["losses"]) for each in found.values()}) != 1:
        raise SystemExit(f"the losses differ: {[each['losses'] for each in found.values()]}")
    if given.json:
        print(json.dumps(found))
        return
    print(f"{found['device']['parameters'] / 1e6:.1f}M parameters in bf16, AdamW; the losses are the same bits")
    print("state     peak memory  on the disk  read a step  written a step  update  passes a step")
    for place, one in found.items():
        sizes = (f"{one[key] / 2**20:,.0f} MiB" for key in ("peak", "disk", "read", "written"))
        rest = f"{one['update']:.2f} s", f"{one['passes']:.2f}"
        print("{:8s}{:>13s}{:>13s}{:>13s}{:>16s}{:>8s}{:>15s}".format(place, *sizes, *rest))


def run_of(state: dict[str, Any], steps: int) -> RunSpec:
    """Return a run of MODEL with few tokens, so that most of its memory is state."""
    return RunSpec.model_validate(
        {
            "model": MODEL,
            "data": {"path": "none"},
            "plan": {"state": state},
            "train": {"steps": steps, "global_batch": 1, "seq_len": 64, "precision": "bf16"},
            "optimizer": {"warmup": 0, "lr": 1e-4},
        }
    )


def measure(rank: int, spec: RunSpec) -> dict[str, Any]:
    """Train and measure: bytes, and seconds of an update."""
    before, device = resident_bytes(), torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    text, losses, updates, passes = RandomText(spec), list[float](), list[float](), 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    read, written = _moved()
    for step in range(spec.train.steps):
        samples = [text.batch(part) for part in indices(spec, first=step, data_rank=0)]
        done = train_step(trainer, samples, step=step)
        losses.append(done.loss)
        updates.append(done.breakdown["optimizer"])
        passes += done.passes
    read_since, written_since = _moved()
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.parameters.values()),
        "peak": _peak() - before,
        "disk": on_disk(),
        "read": (read_since - read) / spec.train.steps,
        "written": (written_since - written) / spec.train.steps,
        "update": statistics.median(updates),
        "passes": passes / spec.train.steps,
        "losses": losses,
    }


def _peak() -> int:
    """Return the peak resident bytes since the last reset."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def _moved() -> tuple[int, int]:
    """Return the bytes that the disk read and wrote for this process."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"]), int(rows["write_bytes"])


if __name__ == "__main__":
    main()
