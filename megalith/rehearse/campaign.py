"""A campaign: a run with injected faults, and the same run without faults.

The runs are the command that a user would type, as processes of their own. When a fault kills the supervisor itself, the same
command is run again. `rehearse.judge` judges both.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalith import events
from megalith.checkpoint.folder import DamagedCheckpointError, find, read_manifest
from megalith.events import Step, of_kind
from megalith.fleet import injection
from megalith.machine import networks, parent_watch
from megalith.machine.networks import Network
from megalith.rehearse import faults
from megalith.rehearse.faults import KINDS
from megalith.rehearse.supervised_agents import SupervisedAgents
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import DataSpec

POLL_SECONDS = 0.1
REPAIR_SECONDS = 3.0  # until a lost node is back
WHOLE, FAULTED, CHECKPOINTS = "whole", "faulted", "checkpoints"  # folders of a campaign, and of a run
MAX_COPIED = 1 << 30  # bytes of data
MAX_BY_HAND = 3  # unexpected ends after which the campaign gives up
WRITTEN = 2  # steps within which a checkpoint that was due is on the disk


def possible(
    fleet: FleetSpec, *, own_disk: bool, own_data: bool, no_network: str | None, agents: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The kinds of fault that a run with this fleet can survive, and the reasons why others are left out. `own_disk`: its
    checkpoints go to a file system that nothing else needs (`small_disk`); `own_data`: its data is a copy (`data_of`);
    `no_network`: why its nodes cannot have networks of their own (`networks.missing`); `agents`: each node has an agent
    (`rehearse.supervised_agents`)."""
    out: dict[str, str] = {}
    for name, kind in KINDS.items():
        missing = [need for need in kind.needs if not getattr(fleet, need)]
        if missing:
            out[name] = f"fleet.{missing[0]} is off"
        elif name in ("node", "interface") and fleet.nodes == 1:
            out[name] = "fleet.nodes = 1"
        elif name == "agent" and not agents:
            out[name] = "one process keeps all nodes; with --agent-kills each has its own"
        elif name in faults.OF_ONE_MEMORY and agents:
            out[name] = "no process reaches the memory of all nodes: each has an agent of its own, which is killed instead"
        elif name == "interface" and agents:
            out[name] = "agents on one machine share its network"
        elif name == "once" and fleet.verify != "all":
            out[name] = (
                f'fleet.verify = "{fleet.verify}": it recomputes apart from the step, so it cannot detect a one-off error within the step'
            )
        elif name == "full" and not own_disk:
            out[name] = "no checkpoints, or no right to mount a small disk for them"
        elif name == "shard" and not own_data:
            out[name] = f"the data is larger than the {MAX_COPIED >> 30} GiB that a campaign copies in order to damage the copy"
        elif name == "interface" and no_network:
            out[name] = f"a network of the run's own {no_network}"
    return out, [name for name in KINDS if name not in out and name != "supervisor"]


def only_at(fleet: FleetSpec, *, checkpoint_every: int) -> dict[str, int]:
    """Kinds of fault that are only injected at multiples of this many steps."""
    return {"once": fleet.verify_every, "full": checkpoint_every}


def not_before(*, checkpoint_every: int) -> dict[str, int]:
    """Kinds of fault, each with its earliest step: one of two checkpoints may be damaged, but damage to the only one would lose
    the run."""
    return dict.fromkeys(("checkpoint", "altered"), 2 * checkpoint_every + WRITTEN)


def aimed(fleet: FleetSpec, *, checkpoint_every: int, kinds: Collection[str]) -> dict[str, str]:
    """Return the planned kinds that are injected only at chosen steps, each with an explanation."""
    every = fleet.verify_every
    found = {"full": f"when a checkpoint is due, every {ordinal(checkpoint_every)} step"}
    if every == 1:
        found["once"] = "all steps are verified: it is found for certain, whenever it comes"
    elif every:
        found["once"] = (
            f"at steps that are verified, every {ordinal(every)}, where it is found for certain; in another step it is never found, so a "
            f"fault at a random step is found with probability 1/{every}"
        )
    return {kind: why for kind, why in found.items() if kind in kinds}


def ordinal(number: int) -> str:
    """1st, 2nd, 10th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def may_mount() -> bool:
    """True if this process may mount a file system."""
    refused = contextlib.suppress(OSError, subprocess.CalledProcessError)
    with tempfile.TemporaryDirectory() as folder, refused, small_disk(Path(folder), size=1 << 20):
        return True
    return False


@contextlib.contextmanager
def small_disk(folder: Path, *, size: int) -> Iterator[None]:
    """A file system of this many bytes at `folder`, whose files still exist afterwards. Raises OSError or CalledProcessError
    where this process may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size}", "megalith-campaign"]
    subprocess.run(["mount", *options, str(folder)], check=True, capture_output=True)
    kept = folder.with_name(f"{folder.name}.kept")
    try:
        yield
        shutil.copytree(folder, kept)
    finally:
        _unmount(folder)
    folder.rmdir()
    kept.rename(folder)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def may_copy(data: Path) -> bool:
    """True if prepared data is small enough to be copied."""
    return sum(path.stat().st_size for path in data.iterdir()) <= MAX_COPIED


def data_of(spec: DataSpec, folder: Path) -> DataSpec:
    """Data of the run with faults: a copy in `folder`, whose shards may be damaged, and as its fallback the data of the other
    run."""
    shutil.copytree(spec.path, folder)
    (folder / injection.OWN_DATA).touch()
    return spec.model_copy(update={"path": str(folder), "copies": (str(Path(spec.path).resolve()), *spec.copies)})


def clear(folder: Path) -> None:
    """Empty a campaign's folder, and unmount the small disk of a killed campaign."""
    disk = folder / FAULTED / CHECKPOINTS
    if disk.is_mount():
        _unmount(disk)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def disk_of(run: Path, *, like: Path, small: bool) -> contextlib.AbstractContextManager[None]:
    """Choose the disk of a run's checkpoints: the usual one, or a `small` disk that has room for three times those of the run `like`."""
    held = sum(path.stat().st_size for path in (like / CHECKPOINTS).rglob("*") if path.is_file())
    return small_disk(run / CHECKPOINTS, size=3 * held + (1 << 20)) if small else contextlib.nullcontext()


def mender(injections: Path, network: Network | None) -> Callable[[], None]:
    """Return a function that brings interfaces up again, some time after they were taken down."""
    left = {one.number for one in injection.load(injections) if one.kind == "interface"}

    def mend() -> None:
        for number, (at, node) in injection.fired(injections).items() if left else ():
            if number in left and network is not None and time.time() - at > REPAIR_SECONDS:
                network.plug(node, connected=True)
                left.remove(number)

    return mend


def end_state(folder: Path) -> dict[str, Any] | None:
    """Return the end state of a run, in a form that can be compared: digests of the files with weights and moments, position, data, and
    random numbers.

    No random state passes from one step to the next: the order of data and the first weights are functions of the
    seed, and a step seeds torch's generator from the seed and its own number before it draws (`train.step.seed_step`). The digest in
    `rng` is that of the generator's bytes on rank 0 when the checkpoint was made: it differs if a step was seeded, or drew, in
    another way.
    """
    try:
        manifest = read_manifest(find(folder))
    except (FileNotFoundError, DamagedCheckpointError):
        return None
    return {"files": manifest.files, "step": manifest.step, **{key: manifest.meta[key] for key in ("position", "rng", "data")}}


@dataclass(frozen=True)
class CampaignRun:
    """Outcome of one of the two runs."""

    folder: Path
    seconds: float
    by_hand: int
    supervisor_restarts: tuple[float, ...]


def run(
    command: Sequence[str],
    folder: Path,
    *,
    injections: Path | None = None,
    nodes: Sequence[Path] = (),
    network: Network | None = None,
    agents: SupervisedAgents | None = None,
    tick: Callable[[], None] = lambda: None,
) -> CampaignRun:
    """Run a command to its end, starting it again each time its supervisor was killed. Meanwhile lost `nodes` (their folders) come
    back, and so do interfaces of their `network`. `agents`: the command starts one of them, and the run is that of all."""
    environment = os.environ | ({injection.VARIABLE: str(injections.resolve())} if injections else {})
    environment |= {networks.VARIABLE: network.family} if network else {}
    mend = mender(injections, network) if injections else lambda: None

    def begin(arguments: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType({})) -> "subprocess.Popen[bytes]":
        with_this = partial(parent_watch.die_with_parent, os.getpid())
        whole = [*command, "--run-dir", str(folder), *arguments]
        return subprocess.Popen(whole, stdout=log, stderr=log, env=environment | dict(variables), preexec_fn=with_this)

    def turn() -> None:
        mend()
        tick()
        if agents is not None:
            agents.tend(begin)

    begun, restarts, by_hand = time.monotonic(), list[float](), 0
    with (folder.parent / f"{folder.name}.log").open("ab") as log, agents or contextlib.nullcontext():
        while by_hand <= MAX_BY_HAND:
            process = begin(*agents.place(agents.names[0])) if agents is not None else begin()
            if restarts and restarts[-1] < 0:
                restarts[-1] += _first_step(folder, process, turn)
            code = _stay(process, nodes, turn)
            if code == 0:
                break
            if code == -9 and injections:  # one of the faults
                restarts.append(-time.time())
                continue
            by_hand += 1
        seconds = time.monotonic() - begun
    return CampaignRun(folder, seconds, by_hand + (agents.unexplained if agents is not None else 0), tuple(restarts))


def _stay(process: "subprocess.Popen[bytes]", nodes: Sequence[Path], tick: Callable[[], None]) -> int:
    """Wait for a process, and repair nodes that were lost."""
    gone: dict[Path, float] = {}
    try:
        while (code := process.poll()) is None:
            for node in nodes:
                if node.parent.is_dir() and not node.is_dir():
                    if time.monotonic() - gone.setdefault(node, time.monotonic()) > REPAIR_SECONDS:
                        node.mkdir(exist_ok=True)
                        del gone[node]
                else:
                    gone.pop(node, None)
            tick()
            time.sleep(POLL_SECONDS)
        return code
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _first_step(folder: Path, process: "subprocess.Popen[bytes]", tick: Callable[[], None]) -> float:
    """Wait for the next step in a run's log; seconds since the epoch."""
    before = len(of_kind(events.read(folder), Step))
    while process.poll() is None:
        steps = of_kind(events.read(folder), Step)
        if len(steps) > before:
            return steps[before].time
        tick()
        time.sleep(POLL_SECONDS)
    return time.time()
