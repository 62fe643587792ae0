"""A campaign: a run with faults on purpose beside the same run without, and the judgement of both.

The runs are the command that a user would type, as processes of their own; when a fault kills the supervisor itself, the same command
is typed again. What is judged is read from their event logs, from the marks that the faults left, and from their last checkpoints.

What is told apart rather than counted as the best case:
- a fault whose incident is another's (`Fate.hidden`): the run went on, but nobody was seen to find this one. Nobody is credited for blame
- the right node named together with others (`Fate.among`)
- incidents that no fault explains (`FalseAlarm`), one by one, with what each cost
- hangs that were found late (`rehearse.hangs`)
- starts of the supervisor itself, which are no recovery of the run's own
"""

import contextlib
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from megalith import events
from megalith.control.pace import percentile
from megalith.fleet import injection
from megalith.fleet.agent import BEAT_SECONDS
from megalith.fleet.injection import Injection
from megalith.machine import lifeline, networks
from megalith.machine.networks import Network
from megalith.rehearse import faults, hangs
from megalith.rehearse.crew import Crew
from megalith.rehearse.faults import KINDS
from megalith.rehearse.hangs import Hangs
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import DataSpec

POLL_SECONDS = 0.1
REPAIR_SECONDS = 3.0  # until a lost node is back
WHOLE, FAULTED, CHECKPOINTS = "whole", "faulted", "checkpoints"  # folders of a campaign, and of a run
MOST_COPIED = 1 << 30  # bytes of data
MOST_BY_HAND = 3  # unexpected ends after which the campaign gives up
WRITTEN = 2  # steps within which a checkpoint that was due is on the disk
BLAMED = 0.98  # share of the faults for which the right rank must be blamed

EXPECTED: dict[str, tuple[str, ...]] = {
    "kill": ("rank_failed",),
    "stop": ("hang",),
    "stuck": ("hang",),
    "segfault": ("rank_failed",),
    "exception": ("rank_failed",),
    "sockets": ("rank_failed",),
    "weight": ("state_corrupt",),
    "moment": ("state_corrupt",),
    "nan": ("nonfinite",),
    "gradient": ("gradient_wrong", "state_corrupt"),
    "once": ("gradient_wrong",),
    "slow": ("straggler",),
    "preemption": ("preempted",),
    "checkpoint": ("rank_failed",),
    "altered": ("rank_failed",),
    "node": ("nodes_lost",),
    "two": ("rank_failed",),
    "copy": ("rank_failed",),
    "full": ("save_failed",),
    "shard": ("data_damaged",),
    "interface": ("rank_failed",),
    "agent": ("nodes_lost",),
    "supervisor": (),
}
"""As what each kind is to be seen."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Fate:
    """What became of one fault. Seconds; None: not known. `blamed` None: nobody is to be blamed.

    `interrupted`: the supervisor was killed before the run went on, which the next one's start is counted for.
    `among`: its node was named, and others with it. `hidden`: the incident is another fault's: it has another cause than this kind is
    seen as, or came for several faults at once and names another. The run went on from both; only that is known of this one.
    """

    injection: Injection
    came: float | None
    seen_as: str | None = None
    blamed: bool | None = None
    detection: float | None = None
    recovery: float | None = None
    incident: int | None = None
    among: bool = False
    hidden: bool = False
    interrupted: bool = False

    @property
    def own_recovery(self) -> float | None:
        """Seconds that the run itself took to go on."""
        return None if self.interrupted else self.recovery

    @property
    def handled(self) -> bool:
        """It came, was seen, and the run went on."""
        return self.came is not None and self.recovery is not None

    @property
    def judged(self) -> bool | None:
        """Whether the right rank was blamed; None: nobody is to be, or it was for another fault of the same incident."""
        return None if self.hidden and self.blamed else self.blamed


@dataclass(frozen=True)
class FalseAlarm:
    """An incident that no fault explains. `seconds` until the run went on, None: it did not; `lost_steps` were done again."""

    incident: int
    cause: str
    step: int
    node: str | None
    rank: int | None
    reason: str
    seconds: float | None
    lost_steps: int


@dataclass(frozen=True)
class Aims:
    """Speeds that are asked of a campaign, None: not asked, since they are about the machine as well. Seconds of recovery, in the median
    and at the 99th percentile; minutes that both runs take together; silence of a hang as a multiple of its limit."""

    median: float | None = None
    most: float | None = None
    minutes: float | None = None
    silence: float | None = None


@dataclass(frozen=True)
class Asked:
    """One of them: what was found (None: nothing to measure) and what at most was asked."""

    title: str
    unit: str
    found: float | None
    most: float

    @property
    def met(self) -> bool:
        """Also where nothing was there to measure."""
        return self.found is None or self.found <= self.most


@dataclass(frozen=True)
class Row:
    """All faults of a kind."""

    kind: str
    title: str
    injected: int
    handled: int
    seen_as: str
    blamed: tuple[int, int]  # right, of so many
    detection: float | None
    recovery: float | None
    slowest: float | None
    among: int = 0
    hidden: int = 0


@dataclass(frozen=True)
class Judgement:
    """Everything a campaign shows. `problems` is empty when it was passed.

    `same_end`: weights, moments, position, random numbers and every step's loss are those of the run without faults. `blamed`: right, of
    those that are not `hidden`, `among` of them with other nodes. `recovery_*` are the run's own, without `supervisor_restarts`.
    """

    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    injected: int
    handled: int
    blamed: tuple[int, int]
    recovery_median: float | None
    recovery_p99: float | None
    false_alarms: tuple[FalseAlarm, ...]
    generations: int
    lost_steps: int
    steps: int
    seconds: float
    seconds_without: float
    same_end: bool
    among: int
    hidden: int
    hangs: Hangs
    supervisor_restarts: tuple[float, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    aimed: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[Asked, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"ok": self.passed} | asdict(self)


def possible(
    fleet: FleetSpec, *, own_disk: bool, own_data: bool, no_network: str | None, agents: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The kinds of fault that a run with this fleet can stand, and why the others are left out. `own_disk`: its checkpoints go to a file
    system that nobody else needs (`small_disk`); `own_data`: so does its data (`data_of`); `no_network`: why its nodes cannot have
    one of their own (`networks.missing`); `agents`: each node has one (`rehearse.crew`)."""
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
                f'fleet.verify = "{fleet.verify}": a computation apart from the step cannot see an error that came once in it'
            )
        elif name == "full" and not own_disk:
            out[name] = "no checkpoints, or no right to mount a small disk for them"
        elif name == "shard" and not own_data:
            out[name] = f"the data is larger than the {MOST_COPIED >> 30} GiB that a campaign copies, to hurt the copy"
        elif name == "interface" and no_network:
            out[name] = f"a network of the run's own {no_network}"
    return out, [name for name in KINDS if name not in out and name != "supervisor"]


def only_at(fleet: FleetSpec, *, checkpoint_every: int) -> dict[str, int]:
    """Kinds of fault that come at multiples of so many steps alone."""
    return {"once": fleet.verify_every, "full": checkpoint_every}


def not_before(*, checkpoint_every: int) -> dict[str, int]:
    """Kinds of fault that come at that step at the earliest: of two checkpoints one may be damaged, while the only one is the whole run."""
    return dict.fromkeys(("checkpoint", "altered"), 2 * checkpoint_every + WRITTEN)


def aimed(fleet: FleetSpec, *, checkpoint_every: int, kinds: Collection[str]) -> dict[str, str]:
    """Of the kinds that come, those that come at chosen steps alone, and what that means for the others."""
    every = fleet.verify_every
    found = {"full": f"when a checkpoint is due, every {ordinal(checkpoint_every)} step"}
    if every == 1:
        found["once"] = "all steps are verified: it is found for certain, whenever it comes"
    elif every:
        found["once"] = (
            f"at steps that are verified, every {ordinal(every)}, where it is found for certain; in another step it never is, so that one "
            f"that comes at any time is found with probability 1/{every}"
        )
    return {kind: why for kind, why in found.items() if kind in kinds}


def ordinal(number: int) -> str:
    """1st, 2nd, 10th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def may_mount() -> bool:
    """Whether this process may mount a file system."""
    refused = contextlib.suppress(OSError, subprocess.CalledProcessError)
    with tempfile.TemporaryDirectory() as folder, refused, small_disk(Path(folder), size=1 << 20):
        return True
    return False


@contextlib.contextmanager
def small_disk(folder: Path, *, size: int) -> Iterator[None]:
    """A file system of so many bytes at `folder`, whose files are there afterwards as well. Raises OSError or CalledProcessError
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
    """Whether prepared data is small enough to be copied."""
    return sum(path.stat().st_size for path in data.iterdir()) <= MOST_COPIED


def data_of(spec: DataSpec, folder: Path) -> DataSpec:
    """Data of the run that is hurt: a copy in `folder`, whose shards may be damaged, and behind it what the other run reads."""
    shutil.copytree(spec.path, folder)
    (folder / injection.OWN_DATA).touch()
    return spec.model_copy(update={"path": str(folder), "copies": (str(Path(spec.path).resolve()), *spec.copies)})


def clear(folder: Path) -> None:
    """Empty a campaign's folder, also of the small disk of one that was killed."""
    disk = folder / FAULTED / CHECKPOINTS
    if disk.is_mount():
        _unmount(disk)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def disk_of(run: Path, *, like: Path, small: bool) -> contextlib.AbstractContextManager[None]:
    """Where a run's checkpoints go: where they always do, or to a `small` disk that has room for three times those of the run `like`."""
    held = sum(path.stat().st_size for path in (like / CHECKPOINTS).rglob("*") if path.is_file())
    return small_disk(run / CHECKPOINTS, size=3 * held + (1 << 20)) if small else contextlib.nullcontext()


def mender(injections: Path, network: Network | None) -> Callable[[], None]:
    """What brings interfaces up again, a while after they were taken down."""
    left = {one.number for one in injection.load(injections) if one.kind == "interface"}

    def mend() -> None:
        for number, (at, node) in injection.fired(injections).items() if left else ():
            if number in left and network is not None and time.time() - at > REPAIR_SECONDS:
                network.plug(node, connected=True)
                left.remove(number)

    return mend


@dataclass(frozen=True)
class Ran:
    """How one of the two runs went."""

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
    crew: Crew | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Ran:
    """Run a command to its end, again and again where its supervisor was killed; lost `nodes` (their folders) come back meanwhile, and
    so do interfaces of their `network`. `crew`: the command is an agent's, and the run is that of all of them."""
    environment = os.environ | ({injection.VARIABLE: str(injections.resolve())} if injections else {})
    environment |= {networks.VARIABLE: network.family} if network else {}
    mend = mender(injections, network) if injections else lambda: None

    def begin(arguments: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType({})) -> "subprocess.Popen[bytes]":
        with_this = partial(lifeline.die_with_parent, os.getpid())
        whole = [*command, "--run-dir", str(folder), *arguments]
        return subprocess.Popen(whole, stdout=log, stderr=log, env=environment | dict(variables), preexec_fn=with_this)

    def turn() -> None:
        mend()
        tick()
        if crew is not None:
            crew.tend(begin)

    begun, restarts, by_hand = time.monotonic(), list[float](), 0
    with (folder.parent / f"{folder.name}.log").open("ab") as log, crew or contextlib.nullcontext():
        while by_hand <= MOST_BY_HAND:
            process = begin(*crew.place(crew.names[0])) if crew is not None else begin()
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
    return Ran(folder, seconds, by_hand + (crew.unexplained if crew is not None else 0), tuple(restarts))


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
    before = sum(record["type"] == "step" for record in events.read(folder))
    while process.poll() is None:
        steps = [record for record in events.read(folder) if record["type"] == "step"]
        if len(steps) > before:
            return float(steps[before]["time"])
        tick()
        time.sleep(POLL_SECONDS)
    return time.time()


# Judging


def judge(
    whole: Ran,
    faulted: Ran,
    *,
    injections: Path,
    states: tuple[Any, Any],
    left_out: Mapping[str, str],
    aimed: Mapping[str, str],
    fleet: FleetSpec,
    timeout: float,
    aims: Aims = Aims(),
) -> Judgement:
    """Compare a run with its faults with the run without. `states`: all that each ended with, comparable; `timeout`: `launch.timeout`."""
    records = list(events.read(faulted.folder))
    fates = fates_of(injection.load(injections), injection.fired(injections), records, restarts=faulted.supervisor_restarts)
    blamed = [fate.judged for fate in fates if fate.judged is not None]
    recoveries = sorted(
        fate.own_recovery for fate in fates if fate.own_recovery is not None and fate.injection.kind != "supervisor"
    )
    late = BEAT_SECONDS if _any(fates, "agent") else 0.0
    found = hangs.hangs_of(records, fleet=fleet, timeout=timeout, seen_late=late)
    others = _other_end(states, list(events.read(whole.folder)), records)
    judged = Judgement(
        rows=tuple(_row(kind, [fate for fate in fates if fate.injection.kind == kind]) for kind in KINDS if _any(fates, kind)),
        problems=(*others, *_problems(fates, faulted), *hangs.problems(found, fleet=fleet)),
        injected=len(fates),
        handled=sum(fate.handled for fate in fates),
        blamed=(sum(blamed), len(blamed)),
        recovery_median=median(recoveries) if recoveries else None,
        recovery_p99=percentile(recoveries, 0.99) if recoveries else None,
        false_alarms=tuple(_false_alarms(fates, records)),
        generations=sum(record["type"] == "run_started" for record in records),
        lost_steps=sum(record["lost_steps"] for record in records if record["type"] == "recovery"),
        steps=max((record["step"] for record in records if record["type"] == "step"), default=0),
        seconds=faulted.seconds,
        seconds_without=whole.seconds,
        same_end=not others,
        among=sum(fate.among and fate.judged is True for fate in fates),
        hidden=sum(fate.hidden for fate in fates),
        hangs=hangs.summary(found),
        supervisor_restarts=faulted.supervisor_restarts,
        left_out=left_out,
        aimed=aimed,
    )
    asked = _asked(aims, judged)
    missed = [f"{one.title} {one.found:.2f}{one.unit}, {one.most:g}{one.unit} at most was asked" for one in asked if not one.met]
    return replace(judged, asked=asked, problems=(*judged.problems, *missed))


def _asked(aims: Aims, found: Judgement) -> tuple[Asked, ...]:
    """The aims that were given, beside what was found."""
    table = (
        ("recovery in the median", " s", found.recovery_median, aims.median),
        ("recovery at the 99th percentile", " s", found.recovery_p99, aims.most),
        ("both runs", " min", (found.seconds + found.seconds_without) / 60, aims.minutes),
        ("silence of a hang", " of its limit", found.hangs.most, aims.silence),
    )
    return tuple(Asked(title, unit, value, most) for title, unit, value, most in table if most is not None)


def _any(fates: Sequence[Fate], kind: str) -> bool:
    return any(fate.injection.kind == kind for fate in fates)


def fates_of(
    injections: Sequence[Injection],
    came: Mapping[int, tuple[float, str]],
    records: Sequence[Record],
    *,
    restarts: Sequence[float] = (),
) -> list[Fate]:
    """What became of each fault: the first incident after it that it can have been; else the first at all, by which it was hidden, but for
    faults that had the run to themselves. `restarts`: seconds that each start of a killed supervisor took, in their order."""
    incidents = [record for record in records if record["type"] == "incident"]
    ends = {record["incident"]: record["time"] for record in records if record["type"] == "recovery"}
    finished = max((record["time"] for record in records if record["type"] == "run_finished"), default=None)
    pairs: list[tuple[Injection, Record | None]] = []
    for one in injections:
        at = came.get(one.number, (math.inf, ""))[0]
        after = [record for record in incidents if record["time"] >= at]
        like = [record for record in after if record["cause"] in EXPECTED[one.kind]]
        hidden = () if one.kind == "supervisor" or KINDS[one.kind].room else after[:1]
        pairs.append((one, _nearest(like, after) or next(iter(hidden), None)))
    kills = sorted(came[one.number][0] for one in injections if one.kind == "supervisor" and one.number in came)
    started = dict(zip(kills, restarts, strict=False))  # of other lengths: a problem, told as such
    fates = []
    for one, record in pairs:
        at, _ = came.get(one.number, (None, ""))
        if record is None or at is None:
            fates.append(Fate(one, at, recovery=None if at is None else started.get(at)))
            continue
        together = [other for other, theirs in pairs if theirs is record]
        over, interrupted = ends.get(record["incident"]), False
        if over is None:
            over = _went_on(records, after=record["time"]) or finished
            interrupted = over is not None and any(record["time"] < kill < over for kill in kills)
        blames = KINDS[one.kind].blames
        fates.append(
            Fate(
                one,
                at,
                seen_as=record["cause"],
                incident=record["incident"],
                blamed=_is_right(record, together, came) if blames else None,
                detection=max(0.0, record["time"] - at),
                recovery=None if over is None else max(0.0, over - record["time"]),
                among=blames and _is_right(record, together, came) and bool(_named(record) - _nodes(together, came)),
                hidden=_is_hidden(record, one, together, came),
                interrupted=interrupted,
            )
        )
    return fates


def _went_on(records: Sequence[Record], *, after: float) -> float | None:
    """When the first step of the next start was done."""
    later = iter([record for record in records if record["time"] > after])
    started = any(record["type"] == "run_started" for record in later)  # and leaves the rest
    return next((record["time"] for record in later if record["type"] == "step"), None) if started else None


def _nearest(like: Sequence[Record], after: Sequence[Record]) -> Record | None:
    """Of the incidents after a fault, the first of its kind, unless others came long before it."""
    return like[0] if like and after.index(like[0]) <= 2 else None


def _is_right(record: Record, together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> bool:
    """Whether an incident names one of the ranks that its faults befell, or the node of one."""
    rank = _rank(record)
    if rank is not None:
        return rank in {rank for one in together for rank in one.ranks}
    return bool(_named(record) & _nodes(together, came))


def _is_hidden(record: Record, one: Injection, together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> bool:
    """Whether an incident is that of another fault: of another cause, or one that it names where several share it."""
    if record["cause"] not in EXPECTED[one.kind]:
        return True
    others = [other for other in together if other is not one and record["cause"] in EXPECTED[other.kind]]
    return _is_right(record, others, came) and not _is_right(record, [one], came)


def _rank(record: Record) -> int | None:
    """The rank that an incident names; None: a node at most."""
    return record["rank"] if record["rank"] is not None else record["evidence"].get("rank")


def _named(record: Record) -> set[str]:
    """The nodes that an incident names, where it names no rank."""
    evidence = record["evidence"]
    if _rank(record) is not None:
        return set()
    return {record["node"], evidence.get("node"), *evidence.get("nodes", ()), *evidence.get("suspects", ())} - {None}


def _nodes(together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> set[str]:
    return {came[one.number][1] for one in together if one.number in came}


def _false_alarms(fates: Sequence[Fate], records: Sequence[Record]) -> Iterator[FalseAlarm]:
    """Incidents that no fault explains."""
    over = {record["incident"]: record for record in records if record["type"] == "recovery"}
    for record in records:
        if record["type"] == "incident" and not _is_explained(record, fates):
            end = over.get(record["incident"])
            yield FalseAlarm(
                incident=record["incident"],
                cause=record["cause"],
                step=record["step"],
                node=record["node"],
                rank=_rank(record),
                reason=record["reason"],
                seconds=None if end is None else max(0.0, end["time"] - record["time"]),
                lost_steps=0 if end is None else end["lost_steps"],
            )


def _is_explained(record: Record, fates: Sequence[Fate]) -> bool:
    """Whether an incident is what a fault was seen as, or follows from one: a damaged copy is met later, a slow rank told of twice."""
    if any(fate.incident == record["incident"] for fate in fates):
        return True
    kinds = {"copy_corrupt": ("checkpoint", "altered", "copy"), "straggler": ("slow",), "save_failed": ("full",)}
    before = [fate.injection for fate in fates if fate.came is not None and fate.came <= record["time"]]
    return any(one.kind in kinds.get(record["cause"], ()) and record["rank"] in (None, *one.ranks) for one in before)


def _row(kind: str, fates: Sequence[Fate]) -> Row:
    detections = [fate.detection for fate in fates if fate.detection is not None]
    recoveries = [fate.own_recovery for fate in fates if fate.own_recovery is not None]
    seen = sorted({fate.seen_as for fate in fates if fate.seen_as})
    judged = [fate.judged for fate in fates if fate.judged is not None]
    return Row(
        kind=kind,
        title=KINDS[kind].title,
        injected=len(fates),
        handled=sum(fate.handled for fate in fates),
        seen_as=", ".join(seen),
        blamed=(sum(judged), len(judged)),
        detection=median(detections) if detections else None,
        recovery=median(recoveries) if recoveries else None,
        slowest=max(recoveries, default=None),
        among=sum(fate.among and fate.judged is True for fate in fates),
        hidden=sum(fate.hidden for fate in fates),
    )


def _other_end(states: tuple[Any, Any], whole: Sequence[Record], faulted: Sequence[Record]) -> list[str]:
    """In what a run is not what it is without faults."""
    other = states[0] is None or states[0] != states[1]
    found = ["the end state differs from that of the run without faults"] if other else []
    return [*found, *_other_steps(_steps(whole), _steps(faulted))]


def _problems(fates: Sequence[Fate], ran: Ran) -> list[str]:
    """Why a campaign is not passed, besides its end and its hangs."""
    found = []
    if ran.by_hand:
        found.append(f"the command ended {ran.by_hand} times in a way that no fault explains")
    for fate in fates:
        one = fate.injection
        if fate.came is None:
            found.append(f"fault {one.number} ({one.kind} at step {one.step}) never came")
        elif not fate.handled:
            found.append(f"fault {one.number} ({one.kind} at step {one.step}) was not seen, or not recovered from")
    kills = sum(fate.injection.kind == "supervisor" and fate.came is not None for fate in fates)
    if kills != len(ran.supervisor_restarts):
        found.append(f"the supervisor was killed {len(ran.supervisor_restarts)} times, {kills} of them by a fault")
    judged = [fate.judged for fate in fates if fate.judged is not None]
    if judged and sum(judged) < BLAMED * len(judged):
        found.append(
            f"the right rank was blamed for {sum(judged)} of {len(judged)} faults, fewer than {BLAMED:.0%}".replace("%", " %")
        )
    return found


def _steps(records: Sequence[Record]) -> dict[int, tuple[float, float, int]]:
    """What each step that counts computed: loss, norm of the gradients, tokens seen. A start goes back to where it resumed."""
    counted: dict[int, tuple[float, float, int]] = {}
    for record in records:
        if record["type"] == "run_started":
            counted = {step: value for step, value in counted.items() if step <= record["resumed_step"]}
        elif record["type"] == "step":
            counted[record["step"]] = (record["loss"], record["grad_norm"], record["tokens_seen"])
    return counted


def _other_steps(whole: dict[int, tuple[float, float, int]], faulted: dict[int, tuple[float, float, int]]) -> list[str]:
    """Steps that saw other samples: their loss, to the last bit, is a function of samples and weights."""
    missing = sorted(set(whole) - set(faulted))
    other = [step for step in sorted(set(whole) & set(faulted)) if whole[step] != faulted[step]]
    found = [f"steps that are not in the log: {len(missing)}, first {missing[0]}"] if missing else []
    return [*found, f"steps with other losses: {len(other)}, first {other[0]}"] if other else found
