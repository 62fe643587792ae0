"""Faults on purpose: a list of them that a seed reproduces, and the hooks by which ranks carry them out.

Every fault is real: a process is killed, a bit flips, sockets are shut down, a file is cut off. A rank does it to itself at a named
moment of a step, so that it comes at the same place in every run with the same list. Each comes once: a mark on the disk says that
it has, whatever became of its rank. Without a list (`MEGALITH_FAULTS`) the hooks return at once.

The mix is that of a published table (`spec/faults.toml`): MIX says which kind of fault stands for which of its causes.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Literal

from megalith.fleet.seat import Seat, node_folder, ranks_of
from megalith.machine import link, networks
from megalith.spec.faults import FaultTable

VARIABLE = "MEGALITH_FAULTS"
Moment = Literal["joining", "building", "restoring", "step", "reading", "gradients", "resting", "saving"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `moment` is when it comes, `needs` what the run's fleet must have for it to be survived or seen.

    `blames`: whether a rank, or its node, is to be named. `lasts`: steps; `room`: steps until it can have been noticed, in which no other
    fault comes.
    """

    title: str
    moment: Moment
    blames: bool = True
    needs: tuple[str, ...] = ()
    lasts: int = 1
    room: int = 0


KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL", "step"),
    "stop": Kind("SIGSTOP", "step"),
    "stuck": Kind("a call that never returns", "step"),
    "segfault": Kind("SIGSEGV", "step"),
    "exception": Kind("exception", "step"),
    "sockets": Kind("all connections torn", "step"),
    "weight": Kind("bit flip in a weight", "resting", needs=("digest",)),
    "moment": Kind("bit flip in an optimizer moment", "resting", needs=("digest",)),
    "nan": Kind("NaN in a gradient", "gradients", needs=("digest",)),
    "gradient": Kind("wrong gradients from now on", "gradients", needs=("verify_every",), lasts=10_000, room=12),
    "once": Kind("a wrong gradient, once", "gradients", needs=("verify_every",)),
    "slow": Kind("slow rank", "gradients", lasts=14, room=14),
    "preemption": Kind("SIGTERM to a rank", "step"),
    "checkpoint": Kind("newest checkpoint cut off, memory lost", "step"),
    "altered": Kind("newest checkpoint altered, memory lost", "step"),
    "node": Kind("node lost with its memory", "step"),
    "two": Kind("two ranks and their nodes' memory", "step"),
    "copy": Kind("copy in memory altered, then SIGKILL", "step", needs=("memory_every",)),
    "full": Kind("no room for a checkpoint", "saving", blames=False),
    "shard": Kind("flipped data shard", "reading", blames=False),
    "interface": Kind("network interface taken down", "step"),
    "agent": Kind("agent of a node killed", "step"),
    "supervisor": Kind("supervisor killed", "step", blames=False),
}
"""What can be done to a run on one machine."""

MIX: tuple[tuple[str, str, float], ...] = (
    ("faulty GPU", "kill", 74 / 148),
    ("faulty GPU", "stop", 37 / 148),
    ("faulty GPU", "segfault", 37 / 148),
    ("GPU HBM3 memory", "weight", 36 / 72),
    ("GPU HBM3 memory", "nan", 36 / 72),
    ("software bug", "exception", 1.0),
    ("network switch or cable", "sockets", 1.0),
    ("host maintenance", "preemption", 1.0),
    ("GPU SRAM memory", "moment", 1.0),
    ("GPU system processor", "stuck", 1.0),
    ("network card", "interface", 1.0),
    ("NCCL watchdog timeout", "stuck", 1.0),
    ("silent data corruption", "gradient", 1 / 2),
    ("silent data corruption", "once", 1 / 2),
    ("GPU thermal interface or sensor", "slow", 1.0),
    ("SSD", "checkpoint", 2 / 3),
    ("SSD", "altered", 1 / 3),
    ("power supply", "node", 1.0),
    ("server chassis", "two", 1.0),
    ("IO expansion board", "full", 1.0),
    ("dependency", "shard", 1.0),
    ("CPU", "slow", 1.0),
    ("system memory", "copy", 1.0),
)
"""Cause in the table -> kind of fault here, and which share of the cause's count."""

INSTEAD = {
    "once": "gradient",
    "full": "kill",
    "shard": "exception",
    "interface": "sockets",
    "node": "agent",
    "two": "agent",
    "checkpoint": "kill",
    "altered": "kill",
}
"""Kind -> what stands for its causes in a run that it cannot come to."""

OF_ONE_MEMORY = ("checkpoint", "altered", "node", "two")
"""Kinds that take copies away which other agents keep, where each node has one."""

MOMENTS: tuple[Moment, ...] = ("step", "gradients", "resting")
"""When a process may die: at the start of a step, in its backward pass, after its update."""

AFTERMATH = 4
"""Steps of a campaign after its last fault."""

OWN_DATA = "hurt-by-a-campaign"
"""A file in a folder of data: its shards may be damaged."""

BALLAST = "ballast-"  # and the step: files that fill a disk

RECOVERING: tuple[Moment, ...] = ("joining", "building", "restoring")


@dataclass(frozen=True)
class Injection:
    """One fault: when `step` steps are done, at `moment`, on `ranks`. `after`: only while the ranks start again after that fault.

    `place` in 0..1 picks what is hit (which tensor, which element); `lasts` counts steps in the life of the process that it befell.
    """

    number: int
    kind: str
    step: int
    moment: Moment
    ranks: tuple[int, ...]
    place: float = 0.0
    lasts: int = 1
    after: int | None = None


def counts(total: int, table: FaultTable, kinds: Sequence[str]) -> dict[str, int]:
    """How many of each kind: in proportion to the table, by largest remainders; one of each at least, where so many are asked for."""
    causes = {cause.name: cause.count for cause in table.causes}
    weights: dict[str, float] = {}
    for cause, meant, share in MIX:
        kind = meant if meant in kinds else INSTEAD.get(meant, meant)
        if kind in kinds:
            weights[kind] = weights.get(kind, 0.0) + causes[cause] * share
    whole = sum(weights.values())
    quotas = {kind: weight * total / whole for kind, weight in weights.items()}
    least = 1 if total >= len(quotas) else 0
    found = {kind: max(least, int(quota + 1e-9)) for kind, quota in quotas.items()}
    while sum(found.values()) != total:
        missing = total - sum(found.values())
        gap = {kind: (quotas[kind] - count) * (1 if missing > 0 else -1) for kind, count in found.items()}
        candidates = [kind for kind in found if missing > 0 or found[kind] > least]
        chosen = max(candidates, key=lambda kind: gap[kind])
        found[chosen] += 1 if missing > 0 else -1
    return {kind: count for kind, count in found.items() if count}


def draw(
    amounts: Mapping[str, int],
    *,
    seed: int,
    first: int,
    every: int,
    ranks: int,
    slots: int,
    only_at: Mapping[str, int] = MappingProxyType({}),
    not_before: Mapping[str, int] = MappingProxyType({}),
) -> list[Injection]:
    """A list of faults, about `every` steps apart, from step `first` on. The same arguments give the same list.

    About one in eight crashes comes while the ranks start again after the fault before; about one in eight faults comes in the same
    step as the one before, on another rank. `only_at`: kinds that come at multiples of so many steps; `not_before`: kinds that come at that
    step at the earliest.
    """
    random = Random(seed)
    kinds = [kind for kind, count in sorted(amounts.items()) for _ in range(count)]
    random.shuffle(kinds)
    found: list[Injection] = []
    step = first
    for number, kind in enumerate(kinds):
        before = found[-1] if found else None
        one = _one(number, kind, step, random, ranks, slots)
        if (
            before is not None
            and before.after is None
            and kind in _CRASHES
            and before.kind in _RESTARTING
            and random.random() < 1 / 8
        ):
            one = replace(one, step=before.step, moment=random.choice(RECOVERING), after=before.number)
        elif before is not None and before.after is None and _may_overlap(before, one) and random.random() < 1 / 8:
            one = replace(one, step=before.step)
        else:
            room = KINDS[before.kind].room if before is not None else 0
            step += 1 + room + int(random.expovariate(1 / max(1, every - 1)) + 0.5)
            step = max(step + (_AGAIN if KINDS[kind].room else 0), not_before.get(kind, 0))
            step += -step % only_at.get(kind, 1)
            one = replace(one, step=step)
        found.append(one)
    return found


_AGAIN = 2  # steps in which the fault before may still end all ranks, and with them what was to be noticed
_CRASHES = ("kill", "segfault", "exception")
_HANGS = ("stop", "stuck")
_RESTARTING = (*_CRASHES, *_HANGS, "sockets", "weight", "moment", "node", "two", "copy", "interface", "agent")


def _may_overlap(before: Injection, one: Injection) -> bool:
    """Whether both can be told apart when they come in one step: on other ranks, both ends of a process."""
    return not set(before.ranks) & set(one.ranks) and before.kind in _CRASHES and one.kind in (*_CRASHES, *_HANGS)


def _one(number: int, kind: str, step: int, random: Random, ranks: int, slots: int) -> Injection:
    rank, what = random.randrange(ranks), KINDS[kind]
    hit: tuple[int, ...] = (rank,)
    if kind in ("node", "interface"):
        hit = tuple(ranks_of(random.randrange(slots), world=ranks, slots=slots))
    if kind == "two":
        hit = tuple(sorted(random.sample(range(ranks), min(2, ranks))))
    moment = random.choice(MOMENTS) if kind in (*_CRASHES, *_HANGS) else what.moment
    return Injection(number, kind, step, moment, hit, place=random.random(), lasts=what.lasts)


# Files


def save(path: Path, injections: Sequence[Injection]) -> None:
    """Write a list for the ranks to find, and forget what came of an older one."""
    shutil.rmtree(_marks(path), ignore_errors=True)
    _marks(path).mkdir(parents=True)
    path.write_text(json.dumps([asdict(one) for one in injections], indent=1), encoding="utf-8")


def load(path: Path) -> list[Injection]:
    """The list in a file."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Injection(**row | {"ranks": tuple(row["ranks"])}) for row in rows]


def fired(path: Path) -> dict[int, tuple[float, str]]:
    """When each fault came (seconds since the epoch), and to which node; those that have not come are left out."""
    found: dict[int, tuple[float, str]] = {}
    for mark in _marks(path).glob("*-*"):
        at, node, _ = mark.read_text().split(" ")
        number = int(mark.name.partition("-")[0])
        found[number] = min((float(at), node), found.get(number, (float(at), node)))
    return found


def _marks(path: Path) -> Path:
    return path.with_suffix(".came")


# What ranks do


class Faults:
    """The faults of one rank. `due` marks what it gives: nothing comes twice."""

    def __init__(self, path: Path, seat: Seat, generation: str = "") -> None:
        self.seat, self._generation = seat, generation
        self._path = path
        listed = load(path)
        self.fill_disks = any(one.kind == "full" for one in listed)
        self._mine = [one for one in listed if seat.rank in one.ranks]
        self._befallen: dict[int, int] = {}  # lasting ones that befell this process: since which step

    def due(self, moment: Moment, step: int | None) -> Iterator[Injection]:
        """The faults that come now."""
        for one in self._mine:
            if one.moment == moment and self._is_time(one, step) and self._mark(one, step):
                yield one

    def _is_time(self, one: Injection, step: int | None) -> bool:
        if one.after is not None:
            return one.after in fired(self._path)
        if step is None or one.lasts == 1:
            return step == one.step
        since = self._befallen.get(one.number, one.step)
        return since <= step < since + one.lasts

    def _mark(self, one: Injection, step: int | None) -> bool:
        """Write down that it came; False if it did before, to another process, or to other ranks that were started again since."""
        if one.number in self._befallen:
            return True
        if any(self._is_older(mark) for mark in _marks(self._path).glob(f"{one.number}-*")):
            return False
        mark = _marks(self._path) / f"{one.number}-{self.seat.rank}"
        written = self._path.with_suffix(f".{self.seat.rank}")
        written.unlink(missing_ok=True)  # it is the last mark by another name
        written.write_text(f"{time.time():.6f} {self.seat.node} {self._generation}")
        try:
            os.link(written, mark)  # whole or not at all: a rank may be ended here, for the fault before this one
        except FileExistsError:
            return False
        if one.lasts > 1:
            self._befallen[one.number] = step or 0
        return True

    def _is_older(self, mark: Path) -> bool:
        return mark.read_text().rpartition(" ")[2] != self._generation


@cache
def _find(path: str) -> Faults:
    return Faults(Path(path), Seat.find(), os.environ.get("MEGALITH_GENERATION", ""))


def find(environment: Mapping[str, str] = os.environ) -> Faults | None:
    """The faults of this rank; None where none are to come."""
    path = environment.get(VARIABLE)
    return _find(path) if path else None


def at(moment: Moment, step: int | None = None) -> None:
    """A named moment: what is due happens to this process. Faults of tensors are `train.inject`'s."""
    faults = find()
    if faults is None:
        return
    if moment == "saving" and faults.fill_disks:
        _make_room(but=step)
    for one in faults.due(moment, step):
        happen(one, faults.seat)


def happen(one: Injection, seat: Seat) -> None:
    """Let a fault of processes, files or connections come."""
    print(f"fault {one.number}: {KINDS[one.kind].title} at step {one.step} ({one.moment})", flush=True)
    ACTIONS[one.kind](one, seat)


class Injected(RuntimeError):  # noqa: N818  # it is what happened
    """The software bug of a campaign."""


def _raise(one: Injection, seat: Seat) -> None:
    raise Injected(f"fault {one.number} of the campaign")


def _send(number: int) -> Callable[[Injection, Seat], None]:
    def send(one: Injection, seat: Seat) -> None:
        os.kill(os.getpid(), number)

    return send


def _never_return(one: Injection, seat: Seat) -> None:
    """As a kernel that never ends: the process lives, its other threads answer, and it is in no collective that others are not in too."""
    while True:
        time.sleep(3600)  # a handled signal cuts a sleep short for its handler alone


def _segfault(one: Injection, seat: Seat) -> None:
    ctypes.string_at(0)


def _tear_connections(one: Injection, seat: Seat) -> None:
    """Shut down every TCP connection of this process, under whatever library holds it."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                copy.shutdown(socket.SHUT_RDWR)
            copy.close()
        except OSError:
            continue


def _unplug(one: Injection, seat: Seat) -> None:
    """Take this node's interface down: nothing comes or goes any more, and nobody is told so."""
    assert networks.find() is not None, "the interface is one that others need"
    link.take_down(networks.INTERFACE)


def _lose_memory(seat: Seat, nodes: Sequence[str]) -> None:
    """What nodes held in memory is gone; the nodes are there (again), empty."""
    if seat.memory is None:
        return
    for node in dict.fromkeys(nodes):
        folder = node_folder(seat.memory, node)
        for path in folder.glob("*") if folder.is_dir() else ():
            path.unlink(missing_ok=True)


def _lose_disk(seat: Seat, node: str) -> None:
    """What a node held on its disk is gone."""
    if seat.disk is not None:
        shutil.rmtree(node_folder(seat.disk, node), ignore_errors=True)


def _checkpoints() -> Path:
    return Path(os.environ["MEGALITH_RUN_DIR"]) / "checkpoints"


def _newest_checkpoint() -> list[Path]:
    """The parts of the newest checkpoint, largest first."""
    steps = sorted(path for path in _checkpoints().glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted(steps[-1].glob("rank-*"), key=lambda path: -path.stat().st_size) if steps else []


def _lose_copies(seat: Seat) -> None:
    """Only checkpoints are left."""
    _lose_memory(seat, seat.placement)
    for node in seat.placement:
        _lose_disk(seat, node)


def _cut_checkpoint(one: Injection, seat: Seat) -> None:
    for part in _newest_checkpoint()[:1]:
        os.truncate(part, part.stat().st_size // 2)
    _lose_copies(seat)
    os.kill(os.getpid(), signal.SIGKILL)


def _alter_checkpoint(one: Injection, seat: Seat) -> None:
    for part in _newest_checkpoint()[:1]:
        with part.open("r+b") as file:
            middle = part.stat().st_size // 2
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 1]))
    _lose_copies(seat)
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_node(one: Injection, seat: Seat) -> None:
    """The first of the node's ranks takes its folders away; all die."""
    if seat.memory is not None and len(seat.placement) > 1:
        _lose_disk(seat, seat.node)
        shutil.rmtree(node_folder(seat.memory, seat.node), ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_with_memory(one: Injection, seat: Seat) -> None:
    """Also of the other ranks' nodes: they may be killed before it comes to them. Disks outlive it, as they do a node's restart."""
    _lose_memory(seat, [seat.node_of(rank) for rank in one.ranks])
    os.kill(os.getpid(), signal.SIGKILL)


def _alter_copy(one: Injection, seat: Seat) -> None:
    """Flip a bit of each of this rank's own copies in its node's memory, then die: a buddy, or a slower tier, must help."""
    from megalith.fleet import copies  # numpy, which only this needs

    assert seat.folder is not None, "no copies are kept in memory"
    copies.corrupt_piece(seat.folder, rank=seat.rank)
    os.kill(os.getpid(), signal.SIGKILL)


def _fill_disk(one: Injection, seat: Seat) -> None:
    """Leave no room for the checkpoint that is due. Only on a file system that the campaign made for them."""
    folder = _checkpoints()
    assert folder.is_mount(), f"{folder} is not a file system of its own: filling it would hurt others"
    block = bytes(1 << 16)
    with contextlib.suppress(OSError), (folder / f"{BALLAST}{one.step}").open("wb", buffering=0) as file:
        while file.write(block):
            pass


def _make_room(*, but: int | None) -> None:
    """Take away what filled the disk at an earlier checkpoint."""
    for ballast in _checkpoints().glob(f"{BALLAST}*"):
        if ballast.name != f"{BALLAST}{but}":
            ballast.unlink(missing_ok=True)


def _kill_agent(one: Injection, seat: Seat) -> None:
    """Of the process that keeps this node's ranks: they all go with it, and nobody is left to say so."""
    assert seat.agent is not None, "no process keeps this rank"
    os.kill(seat.agent, signal.SIGKILL)
    time.sleep(60)  # it takes this process along


def _kill_supervisor(one: Injection, seat: Seat) -> None:
    os.kill(int((Path(os.environ["MEGALITH_RUN_DIR"]) / "ranks" / "lock").read_text()), signal.SIGKILL)
    time.sleep(60)  # it takes this process along


ACTIONS: dict[str, Callable[[Injection, Seat], None]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "stuck": _never_return,
    "segfault": _segfault,
    "exception": _raise,
    "sockets": _tear_connections,
    "interface": _unplug,
    "preemption": _send(signal.SIGTERM),
    "checkpoint": _cut_checkpoint,
    "altered": _alter_checkpoint,
    "node": _lose_node,
    "two": _lose_with_memory,
    "copy": _alter_copy,
    "full": _fill_disk,
    "agent": _kill_agent,
    "supervisor": _kill_supervisor,
}
