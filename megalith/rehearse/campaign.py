"""A campaign: a run with injected faults, and the same run without faults. Each run is a separate process with the command that a user
would type. When a fault kills the supervisor itself, the same command is run again. `rehearse.judge` judges both runs.
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
from megalith.spec.numbers import PRECISIONS
from megalith.spec.run import DataSpec, RunSpec
from megalith.spec.state import MASTER

POLL_SECONDS = 0.1
REPAIR_SECONDS = 3.0  # until a lost node is back
WHOLE, FAULTED, CHECKPOINTS = "whole", "faulted", "checkpoints"  # folders of a campaign, and of a run
LISTED = "faults.json"  # the faults of a campaign on one machine
MARKS = LISTED, f"{WHOLE}.log"  # what a campaign writes first; with sites it has no such list
MAX_COPIED = 1 << 30  # bytes of data
MAX_BY_HAND = 3  # unexpected ends after which the campaign gives up
WRITTEN = 2  # steps within which a checkpoint that was due is on the disk


def possible(
    fleet: FleetSpec,
    *,
    own_disk: bool,
    own_data: bool,
    no_network: str | None,
    agents: bool = False,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, str], list[str]]:
    """Return the kinds of fault that are left out, each with the reason, and the kinds that a run with these fleet settings can
    survive. `own_disk`: the run's checkpoints have a file system of their own (`small_disk`); `own_data`: its data is a copy
    (`data_of`); `no_network`: why nodes cannot have their own networks (`networks.missing`); `agents`: each node has an agent
    (`rehearse.supervised_agents`); `elsewhere`: the kinds that the place of the state rules out (`ruled_out`)."""
    out: dict[str, str] = {}
    for name, kind in KINDS.items():
        missing = [need for need in kind.needs if not getattr(fleet, need)]
        if name in elsewhere:
            out[name] = elsewhere[name]
        elif missing:
            out[name] = f"fleet.{missing[0]} is off"
        elif name in ("node", "interface") and fleet.nodes == 1:
            out[name] = "fleet.nodes = 1"
        elif name == "agent" and not agents:
            out[name] = "one process runs all nodes; with --agent-kills each node has an agent"
        elif name in faults.OF_ONE_MEMORY and agents:
            out[name] = (
                "no process reaches the memory of all nodes: each node has its own agent, and the campaign kills agents instead"
            )
        elif name == "interface" and agents:
            out[name] = "agents on one machine share the machine's network"
        elif name == "once" and fleet.verify != "all":
            out[name] = (
                f'fleet.verify = "{fleet.verify}": verification computes the step again, so it misses a one-off error in the first pass'
            )
        elif name == "full" and not own_disk:
            out[name] = "the run makes no checkpoints, or the user may not mount a small disk for them"
        elif name == "shard" and not own_data:
            out[name] = f"the data is larger than the {MAX_COPIED >> 30} GiB that a campaign copies in order to damage the copy"
        elif name == "interface" and no_network:
            out[name] = f"the run cannot have its own network: {no_network}"
    return out, [name for name in KINDS if name not in out and name != "supervisor"]


def ruled_out(spec: RunSpec) -> dict[str, str]:
    """Return the kinds of fault of state that a run cannot have where it keeps its state, each with the reason. A bit is flipped only in
    an fp32 tensor in memory, and a chunk is altered only in a file."""
    state, narrow = spec.plan.state, PRECISIONS[spec.train.precision].compute.name != MASTER.number
    out = dict[str, str]()
    if narrow and spec.optimizer.master != MASTER.number:
        out["weight"] = f'optimizer.master = "{spec.optimizer.master}" keeps no fp32 weights in memory'
    if state.optimizer != "disk":
        return out | dict.fromkeys(faults.ON_DISK, f'plan.state.optimizer = "{state.optimizer}": no state is on disk')
    out["copy"] = "state on disk has no copies in memory"
    if state.away == 1:
        out["moment"] = "all moments are on disk"
    if state.away == 1 and narrow:
        out["weight"] = "all fp32 weights are on disk"
    return out


def only_at(fleet: FleetSpec, *, checkpoint_every: int) -> dict[str, int]:
    """Return the kinds of fault that are injected only at multiples of a number of steps, with this number."""
    return {"once": fleet.verify_every, "full": checkpoint_every}


def not_before(*, checkpoint_every: int) -> dict[str, int]:
    """Return the earliest step at which a fault may damage a checkpoint. Before the returned step, the run has only one checkpoint, and
    damage to that checkpoint would lose the run. A file with state may be a checkpoint's too."""
    return dict.fromkeys(("checkpoint", "altered", "torn-chunk", "altered-chunk"), 2 * checkpoint_every + WRITTEN)


def aimed(fleet: FleetSpec, *, checkpoint_every: int, kinds: Collection[str]) -> dict[str, str]:
    """Return the planned kinds that are injected only at chosen steps, each with an explanation."""
    every = fleet.verify_every
    found = {"full": f"when a checkpoint is due, every {ordinal(checkpoint_every)} step"}
    if every == 1:
        found["once"] = "all steps are verified, so the fault is detected at whichever step it comes"
    elif every:
        found["once"] = (
            f"only every {ordinal(every)} step is verified: a one-off fault is detected only in a verified step, so at a "
            f"random step it would be detected with probability 1/{every}"
        )
    return {kind: why for kind, why in found.items() if kind in kinds}


def ordinal(number: int) -> str:
    """Return a number as an ordinal: 1st, 2nd, 10th."""
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
    """Mount a file system of `size` bytes at `folder`. Files written to the file system stay in `folder` after it is unmounted. Raises
    OSError or CalledProcessError if this process may not mount a file system."""
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
    """Return the data of the run with faults: a copy in `folder`, whose shards may be damaged, with the original data as its fallback."""
    shutil.copytree(spec.path, folder)
    (folder / injection.OWN_DATA).touch()
    return spec.model_copy(update={"path": str(folder), "copies": (str(Path(spec.path).resolve()), *spec.copies)})


def clear(folder: Path) -> None:
    """Empty a campaign's folder, and unmount the small disk that a killed campaign left. Raises FileExistsError for a folder with files
    that is not a campaign's, such as a project's or a run's."""
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).exists() for name in MARKS):
        raise FileExistsError(
            f"--out {folder} has files, but no campaign ({' or '.join(MARKS)}), and a campaign removes what is in its folder. Give a new "
            "folder, or empty this one first."
        )
    disk = folder / FAULTED / CHECKPOINTS
    if disk.is_mount():
        _unmount(disk)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def disk_of(run: Path, *, like: Path, small: bool) -> contextlib.AbstractContextManager[None]:
    """Choose the disk of a run's checkpoints: the usual one, or a `small` disk with room for three times the checkpoints of the run
    `like`."""
    held = sum(path.stat().st_size for path in (like / CHECKPOINTS).rglob("*") if path.is_file())
    return small_disk(run / CHECKPOINTS, size=3 * held + (1 << 20)) if small else contextlib.nullcontext()


def mender(injections: Path, network: Network | None) -> Callable[[], None]:
    """Return a function that brings network interfaces up again, some time after a fault took them down."""
    left = {one.number for one in injection.load(injections) if one.kind == "interface"}

    def mend() -> None:
        for number, (at, node) in injection.fired(injections).items() if left else ():
            if number in left and network is not None and time.time() - at > REPAIR_SECONDS:
                network.plug(node, connected=True)
                left.remove(number)

    return mend


def end_state(folder: Path) -> dict[str, Any] | None:
    """Return the end state of a run in a comparable form: digests of the files with weights and moments, the position, data and random
    numbers.

    Steps share no random state: the order of data and the first weights are functions of the seed, and each step seeds torch's generator
    from the seed and its own number before it draws (`train.step.seed_step`). `rng` is the digest of the generator's bytes on rank 0 when
    the checkpoint was made: it differs if a step was seeded differently, or drew different numbers.
    """
    try:
        manifest = read_manifest(find(folder))
    except (FileNotFoundError, DamagedCheckpointError):
        return None
    return {"files": manifest.files, "step": manifest.step, **{key: manifest.meta[key] for key in ("position", "rng", "data")}}


@dataclass(frozen=True)
class CampaignRun:
    """Outcome of one of a campaign's two runs. `by_hand`: the number of unexpected ends of commands. `supervisor_restarts`: for
    each killed supervisor, the seconds until the first step after it."""

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
    """Run a command to its end, and start it again each time a fault has killed its supervisor. While the command runs, lost
    `nodes` (given by their folders) and lost interfaces of `network` are restored. `agents`: the machines of the run have these
    agents; the command starts the first agent, and this function starts the others."""
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
    before = len(of_kind(events.read(folder), Step))
    while process.poll() is None:
        steps = of_kind(events.read(folder), Step)
        if len(steps) > before:
            return steps[before].time
        tick()
        time.sleep(POLL_SECONDS)
    return time.time()
