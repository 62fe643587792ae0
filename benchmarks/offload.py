"""Measure cost and gain of state in host memory and on disk: the same steps with the state in each place, one process after
the other.

    python benchmarks/offload.py --steps 4 --folder /mnt/nvme --json

Memory is the peak resident memory during the steps, minus that before the model was built: weights, gradients, state, activations
and buffers. Bytes read and written are those of the disk, from /proc/self/io. The losses must be bitwise equal for all places;
otherwise the script fails.

    python benchmarks/offload.py --rate --steps 5 --folder /mnt/nvme --json

With `--rate`, only the disk's rate is measured: in turn, an update of the state on disk, and a plain copy of as many bytes between two
other files in the same folder, one chunk after another, with the same block size and the same direct I/O, synced at the end. Each step has
few tokens, and only the time of its update counts.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
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
from megalith.train.offload.home import Disk
from megalith.train.offload.slot_file import SlotFile, memory_of, move_all
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
    parser.add_argument("--rate", action="store_true", help="compare the disk's rate during updates with a plain copy's")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rate:
        print_rates(given)
        return
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


def print_rates(given: argparse.Namespace) -> None:
    """Measure and print the disk's rates."""
    state = {"optimizer": "disk", "chunk": given.chunk, "folder": given.folder or tempfile.gettempdir()}
    (found,) = run_ranks(rates, 1, run_of(state, given.steps + 1), timeout=3600.0)
    if given.json:
        print(json.dumps(found))
        return
    ours, plain = (statistics.median(found[key]) / 2**20 for key in ("update", "copy"))
    share = statistics.median(a / b for a, b in zip(found["update"], found["copy"], strict=True))
    print(f"blocks of {found['block'] / 2**20:,.1f} MiB, {'direct I/O' if found['direct'] else 'through the page cache'}")
    print(f"read and written while updates run  {ours:,.0f} MiB/s")
    print(f"plain copy beside it, in turn       {plain:,.0f} MiB/s")
    print(f"updates reach {share:.0%} of the plain copy (median of {given.steps} pairs)")


def rates(rank: int, spec: RunSpec) -> dict[str, Any]:
    """Return the bytes that the disk moved per second in each update, and in a plain copy after it. The first step is not counted, because
    it writes to new files."""
    trainer = assemble(spec, groups=mesh_groups(spec, torch.device("cpu")), device=torch.device("cpu"))
    home, text, found = trainer.state.home, RandomText(spec), {"update": list[float](), "copy": list[float]()}
    assert isinstance(home, Disk)
    layout = home.slots.layout
    pair = [SlotFile(home.slots.path, layout) for _ in range(2)]
    copy(pair[1], pair[0])  # a file's first writes take longer
    for step in range(spec.train.steps):
        before = sum(_moved())
        done = train_step(trainer, [text.batch(part) for part in indices(spec, first=step, data_rank=0)], step=step)
        if moved := sum(_moved()) - before:
            found["update"].append(moved / done.breakdown["optimizer"])
        start, size = time.perf_counter(), copy(*pair)
        found["copy"].append(size / (time.perf_counter() - start))
        pair.reverse()
    if not found["update"]:
        raise SystemExit(f"{home.slots.path.parent} is not on a disk: /proc/self/io counts no bytes. Use --folder")
    return {key: list(values[1:]) for key, values in found.items()} | {"block": max(layout.rooms), "direct": pair[0].direct}


def copy(source: SlotFile, target: SlotFile) -> int:
    """Copy the chunks of a file, one after another, and sync them. Return the number of bytes that were read and written."""
    layout, buffer = source.layout, memory_of(max(source.layout.rooms)).numpy()
    for start, room in zip(layout.starts, layout.rooms, strict=True):
        move_all(os.preadv, source.descriptor, buffer[:room], start)
        move_all(os.pwritev, target.descriptor, buffer[:room], start)
    target.sync()
    return 2 * sum(layout.rooms)


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
