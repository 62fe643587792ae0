"""Train in less memory than the training state takes: a fresh process in a memory cgroup of its own (Linux, cgroup v1 or v2, as root).

    python benchmarks/within_memory.py --limit 900 --folder /mnt/nvme --json
    python benchmarks/within_memory.py --limit 900 --folder /mnt/nvme --place streamed --layers 18
    python benchmarks/within_memory.py --limit 900 --folder /mnt/nvme --steps 6 --kills 3

The cgroup counts all memory of the process: Python, torch, weights, gradients, activations, buffers, and the page cache of files that it
writes. It has no swap. The kernel kills a process that needs more. If no such cgroup can be made, use `--inside`, which only trains, under
any other limit: `systemd-run --scope -p MemoryMax=900M -p MemorySwapMax=0 python benchmarks/within_memory.py --inside`.

With `--kills`, a second run is killed (kill -9) at random moments of its steps. Each new process of this run resumes in the same cgroup
from the newest checkpoint. The script fails unless this run ends with the same bits as the first.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

MODEL = {"dim": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 3072, "vocab": 4096, "context": 128}
"""The largest tensor is 16 MiB in fp32. 6 blocks are 90M parameters, 18 are 254M. A larger vocabulary needs `--vocab-tile`: otherwise
embedding and head are the largest tensors."""

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"state": {"optimizer": "host"}},
    "disk": {"state": {"optimizer": "disk"}},
    "streamed": {"zero": 3, "state": {"optimizer": "disk", "weights": "disk", "release": True}},
}
"""Places of the training state. `streamed`: on disk, with weights made from it at each gather, and gradients released."""

FREED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Setting with which glibc returns freed tensors to the system. A rank needs more memory while it builds the model than later."""

MIB = 1 << 20
LOOK = 0.05
"""Seconds between two looks at a group's memory."""
A_PARAMETER = 16
"""Bytes of training state: weight 2, gradient 2, master weight 4, moments 8."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=900, help="MiB of the group")
    parser.add_argument("--place", default="disk", choices=tuple(PLACES), help="of the training state")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=MODEL["vocab"])
    parser.add_argument("--vocab-tile", type=int, default=0, help="rows of the vocabulary that are in memory at once; 0: all")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file of the state goes")
    parser.add_argument(
        "--kills", type=int, default=0, help="how often a second run is killed, to compare its bits with the first run's"
    )
    parser.add_argument("--inside", action="store_true", help="make no group")
    parser.add_argument("--checkpoints", default="", help="save each step here, and resume from the newest checkpoint")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = inside(given) if given.inside else within(given, sys.argv[1:])
    if given.json:
        print(json.dumps(found))
        return
    sizes = {key: f"{found[key] / 2**20:,.0f} MiB" for key in ("state", "disk", "peak")}
    print(f"{found['parameters'] / 1e6:.0f}M parameters in bf16, AdamW, {given.steps} steps")
    print(f"training state {sizes['state']}, of these {sizes['disk']} in two slots on disk")
    print(f"peak memory    {sizes['peak']}{'' if given.inside else f' of {given.limit:,} MiB, as the group counts'}")
    if given.kills:
        print(f"kill -9        {given.kills} times in another run, which ended with the same bits")


def within(given: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Run this script again in a cgroup of `given.limit` MiB; with `given.kills`, once more with kills. Raises SystemExit if no cgroup can
    be made, if a process ends that was not killed here, or if kills change a bit."""
    with group(given.limit) as cgroup:
        asked = [sys.executable, __file__, *arguments, "--inside", "--json"]
        found = Process(asked, cgroup).finish()
        if given.kills:
            with tempfile.TemporaryDirectory(dir=given.folder) as checkpoints:
                again = killed([*asked, "--checkpoints", checkpoints], cgroup, steps=given.steps, kills=given.kills)
            if again["digest"] != found["digest"] or again["losses"] != found["losses"][given.steps - len(again["losses"]) :]:
                raise SystemExit(f"the run that was killed {given.kills} times has other bits: {again} instead of {found}")
        return found | {"peak": cgroup.peak, "kills": given.kills}


def killed(asked: list[str], cgroup: "Group", *, steps: int, kills: int, seed: int = 0) -> dict[str, Any]:
    """Run a process that is killed this many times, each time at a random moment of a later step. Return the result of the last start.
    Raises SystemExit if there are too few steps."""
    random = Random(seed)
    if kills > steps - 2:
        raise SystemExit(
            f"--kills {kills} needs at least {kills + 2} steps, because each kill comes in another step: use --steps {kills + 2}"
        )
    for step in sorted(random.sample(range(1, steps - 1), kills)):
        process = Process(asked, cgroup)
        process.wait_for(step)
        time.sleep(random.random() * process.seconds)
        process.kill()
    return Process(asked, cgroup).finish()


class Process:
    """This script in a cgroup."""

    def __init__(self, asked: list[str], cgroup: "Group") -> None:
        self.cgroup = cgroup
        self.seconds = 0.0  # of the newest step
        how: dict[str, Any] = {"preexec_fn": cgroup.enter, "stdout": subprocess.PIPE, "text": True, "env": os.environ | FREED}
        self._process = subprocess.Popen(asked, **how)
        self._looking = Thread(target=self._look, daemon=True)
        self._looking.start()

    def _look(self) -> None:
        while self._process.poll() is None:
            self.cgroup.look()
            time.sleep(LOOK)

    def wait_for(self, step: int) -> None:
        """Wait until the checkpoint of this step, or of a later one, is complete. Raises SystemExit if the process ends first."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            kind, *numbers = line.split()
            if kind == "step":
                self.seconds = float(numbers[1])
                if int(numbers[0]) >= step:
                    return
        self._ended()

    def kill(self) -> None:
        """Kill the process with signal 9, and wait for its end. Raises SystemExit if it has ended by itself."""
        self._process.kill()
        self._process.communicate()
        if self._process.returncode != -signal.SIGKILL:
            self._ended()

    def finish(self) -> dict[str, Any]:
        """Return the result of the process. Raises SystemExit if it fails."""
        said, _ = self._process.communicate()
        if self._process.returncode:
            self._ended()
        return json.loads(said.splitlines()[-1])

    def _ended(self) -> NoReturn:
        code = self._process.wait()
        raise SystemExit(f"the process in a group of {self.cgroup.limit} MiB ended with {code}; -9: it needed more")


@dataclass
class Group:
    """A memory cgroup without swap, of `limit` MiB."""

    folder: Path
    limit: int
    names: "Names"
    most: int = 0
    """The largest number of bytes that `look` has seen."""

    def enter(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def look(self) -> None:
        """Read the bytes that the group has now. Kernels before 5.19 do not keep the peak of a group of v2."""
        with suppress(OSError, ValueError):
            self.most = max(self.most, int((self.folder / self.names.now).read_text()))

    @property
    def peak(self) -> int:
        """The largest number of bytes that the group had, as the kernel or `look` has seen it."""
        with suppress(OSError, ValueError):
            return int((self.folder / self.names.peak).read_text())
        return self.most


class Names(NamedTuple):
    """The names of a cgroup's files."""

    limit: str
    swap: str
    now: str
    peak: str


V1 = Names("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")
V2 = Names("memory.max", "memory.swap.max", "memory.current", "memory.peak")
"""The file `swap` has the limit of swap alone; in v1, that of memory and swap together."""


@contextmanager
def group(limit: int, *, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Iterator[Group]:
    """Make a memory cgroup of `limit` MiB without swap: in v1 inside that of this process, in v2 inside the nearest group that may have
    such groups. Raises SystemExit if none can be made."""
    reasons = list[str]()
    for parent, names in _parents(cgroups, proc):
        made = Group(parent / f"megalith-{os.getpid()}", limit, names)
        try:
            _make(made, proc)
            break
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror or error}")
    else:
        why = "; ".join(reasons) or "no cgroup has a memory controller here"
        raise SystemExit(f"no memory control group can be made ({why}). Use --inside under another limit.")
    try:
        yield made
    finally:
        made.folder.rmdir()


def _make(group: Group, proc: Path) -> None:
    """Make the group. Raises OSError, and then leaves no group."""
    if group.names == V2:
        _give_memory(group.folder.parent)
    group.folder.mkdir()
    try:
        (group.folder / group.names.limit).write_text(str(group.limit * MIB))
        _without_swap(group, proc)
    except OSError:
        group.folder.rmdir()
        raise


def _parents(cgroups: Path, proc: Path) -> Iterator[tuple[Path, Names]]:
    """Yield the groups in which a group of this process can be, the nearest first."""
    for _, kinds, path in (line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()):
        own = Path(path.lstrip("/"))
        if "memory" in kinds.split(","):
            yield cgroups / "memory" / own, V1
        if not kinds and (cgroups / "cgroup.controllers").exists():
            yield from ((cgroups / each, V2) for each in (own, *own.parents))


def _give_memory(parent: Path) -> None:
    """Make sure that groups inside a group of v2 have a memory limit. Raises OSError; a group with processes of its own refuses."""
    given = parent / "cgroup.subtree_control"
    if "memory" not in given.read_text().split():
        given.write_text("+memory")


def _without_swap(group: Group, proc: Path) -> None:
    """Forbid swap. Raises OSError if this is impossible and the machine has swap."""
    try:
        (group.folder / group.names.swap).write_text("0" if group.names == V2 else str(group.limit * MIB))
    except OSError:  # a kernel that does not count swap by group
        if len((proc / "swaps").read_text().splitlines()) > 1:
            raise


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
            "model": MODEL | {"layers": given.layers, "vocab": given.vocab},
            "data": {"path": "none"},
            "plan": {"recompute": "full", **place, "state": state},
            "train": {
                "steps": given.steps,
                "global_batch": 1,
                "seq_len": 128,
                "precision": "bf16",
                "gradients": "bf16",
                "vocab_tile": given.vocab_tile,
            },
            "optimizer": {"warmup": 0, "lr": 1e-4},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = train(spec, given.checkpoints)
        dist.destroy_process_group()
    return found


def on_disk() -> int:
    """Return the disk space of the unnamed files that this process has open, in bytes."""
    opened = (number for number in Path("/proc/self/fd").iterdir() if str(number.resolve()).endswith("(deleted)"))
    return sum(number.stat().st_blocks * 512 for number in opened)


def train(spec: Any, checkpoints: str = "") -> dict[str, Any]:
    """Train a few steps on random text. With a folder of `checkpoints`, resume from the newest one, and save and report each step."""
    import torch

    from megalith.checkpoint.checkpointer import Checkpointer
    from megalith.prove.parity import RandomText
    from megalith.train.assemble import assemble, mesh_groups
    from megalith.train.batches import indices
    from megalith.train.step import train_step

    device = torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    saver = Checkpointer(Path(checkpoints)) if checkpoints else None
    loaded = saver.load(trainer.state.laid()) if saver is not None else None
    if loaded is not None:
        trainer.state.updates = loaded.step
        trainer.state.loaded()
    text, losses, began = RandomText(spec), list[float](), time.monotonic()
    for step in range(trainer.state.updates, spec.train.steps):
        start = time.monotonic()
        losses.append(train_step(trainer, [text.batch(part) for part in indices(spec, first=step, data_rank=0)], step=step).loss)
        if saver is not None:
            saver.save(step + 1, trainer.state.laid(), {}, asynchronous=False)
            print("step", step + 1, time.monotonic() - start, flush=True)
    numbers = sum(parameter.numel() for parameter in trainer.parameters.values())
    (most,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {
        "parameters": numbers,
        "state": numbers * A_PARAMETER,
        "disk": on_disk(),
        "peak": int(most.split()[1]) * 1024,
        "seconds": (time.monotonic() - began) / max(1, len(losses)),
        "losses": losses,
        "digest": digest_of(trainer.state),
    }


def digest_of(state: Any) -> str:
    """Return a digest of the whole training state: of the shares in memory, and the sum of the words on disk."""
    import torch

    found = hashlib.sha256(str(state.sum).encode())
    for key, share in sorted(state.shares("weights", "optimizer").items()):
        found.update(key.encode())
        found.update(share.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


if __name__ == "__main__":
    main()
