"""The nodes of a run on one machine: the machine itself, or several rehearsed nodes, each of which is a folder and a group of
ranks. A rehearsed node is lost when its folder is removed: its copies in memory are then gone, and its ranks are killed.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from megalith import disk, epochs
from megalith.fleet import causes, evidence, report
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.fork_server import ForkServer
from megalith.fleet.heartbeat import Beat, Heartbeats
from megalith.fleet.job import Job
from megalith.fleet.nodes import Generation, RankInspection
from megalith.fleet.observations import HealthChecked, NodeJoined, NodesLost, Observation
from megalith.fleet.processes import FreshProcesses, Processes, method
from megalith.fleet.rank import Assignment
from megalith.fleet.rank_info import DISK, node_folder
from megalith.fleet.secure import key, private
from megalith.fleet.secure.key import Key
from megalith.fleet.tiers import Copy, Tier, copies, roots
from megalith.fleet.tiers.roots import OWNER
from megalith.machine import admission, link, networks
from megalith.spec.fleet import FleetSpec

WARM_SECONDS = 0.1  # between looks whether imports are done
LOOK_SECONDS = 2.0  # that ranks have to write their stacks
HEARTBEATS = "heartbeats"
STARTS: dict[str, Callable[..., Processes]] = {"fork": ForkServer, "spawn": FreshProcesses}


def node_names(fleet: FleetSpec) -> tuple[str, ...]:
    """Names of a run's nodes on this machine, spares last."""
    return tuple(str(number) for number in range(fleet.nodes + fleet.spares))


def _unreachable(node: str) -> str:
    """Return why ranks on a node cannot communicate; empty if they can. A node that has no network of its own uses the
    machine's."""
    network, name = networks.find(), link.named()
    if network is not None:
        return "" if network.is_connected(node) else "its interface is down"
    return "" if name is None or link.is_up(name) else f"its interface {name} is down"


class LocalNodes:
    """The nodes of this machine. One fork server starts the ranks of all generations. `names`: the nodes, spares last. `memory`:
    folder that contains the nodes' copies of the state in memory (None: one node without copies). `disk`: folder that contains
    the nodes' copies on disk (None: no copies on disk). If the run also has nodes on other machines, `meeting` is the store for
    the rendezvous of all ranks ("megalith://HOST:PORT"), and `folder` (RUN_DIR/ranks by default) is a folder to which only this
    machine writes. The run's key is read, or made, if copies or messages must be authenticated.
    """

    def __init__(
        self,
        job: Job,
        *,
        names: Sequence[str] = ("0",),
        memory: Path | None = None,
        disk: Path | None = None,
        folder: Path | None = None,
        meeting: str = "",
    ) -> None:
        self._job, self._memory, self._disk = job, memory, disk
        self._now = job  # or its fallback: what the ranks of this generation do
        self._names, self._meeting = tuple(names), meeting
        self._found: SimpleQueue[Observation] = SimpleQueue()
        self._processes: Processes | None = None
        self._assignment: Assignment | None = None
        self._heartbeats: Heartbeats | None = None
        self._failed: list[Exit | Failure] = []  # while this node was warmed
        self._oom_kills = 0
        # Only this process holds the writing end: when it ends, in whatever way, every rank sees the end of the pipe.
        self._parent_watch, self._held = os.pipe()
        self._folder = (folder or job.run_dir / "ranks").resolve()
        (self._folder / "reports").mkdir(parents=True, exist_ok=True)
        self._claimed: list[IO[str]] = []
        self._owner = roots.owner_text(job.run_dir) if memory is not None else ""
        self._key = key.of_run(job.run_dir) if job.keyed or memory is not None or disk is not None else None
        if disk is not None:
            with contextlib.suppress(OSError):  # a rank that cannot write there says so
                self._claimed.append(roots.claim(disk, roots.owner_text(job.run_dir)))
        if memory is not None:
            self._make_memory(memory, self._names)
        self._there = self._names
        self._there = self.there()

    @property
    def memory(self) -> Path | None:
        """Folder of the copies in memory, which changes if another user owns the old folder."""
        return self._memory

    def _make_memory(self, memory: Path, names: Sequence[str]) -> None:
        if not self._claimed or not disk.leads_to(memory / OWNER, os.fstat(self._claimed[-1].fileno()).st_ino):
            self._claimed.append(roots.claim(memory, self._owner))
        for name in names:
            with private.opened_below(node_folder(memory, name), create=True):
                pass

    def _make_memory_anew(self) -> None:
        """Make the folders of copies again if another process removed them, so that the running ranks can write copies again. The
        folder of one of several rehearsed nodes is not made again, because its absence means that the node is lost."""
        if self._memory is None:
            return
        only = node_folder(self._memory, self._names[0]) if len(self._names) == 1 else self._memory
        if not only.is_dir() or not disk.leads_to(self._memory / OWNER, os.fstat(self._claimed[-1].fileno()).st_ino):
            with disk.if_available(self._memory):
                self._make_memory(self._memory, self._there)
                print(
                    f"{self._memory} was removed by another process: megalith restores its folders, and ranks will write new "
                    f"copies of the state there",
                    file=sys.stderr,
                    flush=True,
                )

    def there(self) -> tuple[str, ...]:
        if self._memory is None or len(self._names) == 1:  # this very machine, whatever became of its folder
            return self._names
        if roots.taken(self._memory):  # another user's folder tells nothing about these nodes
            return self._there
        return tuple(name for name in self._names if node_folder(self._memory, name).is_dir())

    def start(self, generation: Generation) -> None:
        self._forget_last()
        self._move_memory()
        self._now = self._job.now(shrunk=generation.shrunk)
        if generation.shrunk:
            self.forget()
        self._heartbeats = self._new_heartbeats()
        assignment = self._assignment = self._assign(generation)
        file = self._folder / "job.json"
        assignment.save(file)
        self._oom_kills = evidence.oom_kills()
        if self._processes is not None and not self._processes.fit:
            self._processes.close()
            self._processes = None
        if self._processes is None:
            self._processes = STARTS[method()](assignment, preload=self._job.preload, secret=self._secret())
        self._processes.start(assignment, file)

    def _move_memory(self) -> None:
        """Use a new folder for copies if another user owns the old one, because that user may have written its content."""
        if self._memory is not None and (why := roots.taken(self._memory)):
            with disk.if_available(self._memory):
                self._memory = roots.elsewhere(self._memory, why)
                self._make_memory(self._memory, self._there)

    def warm(self) -> None:
        """Start the fork server and wait until it has imported the ranks' modules; `wait` reports a failure."""
        assignment = self._assign(Generation("warm", self._names))
        processes = self._processes = STARTS[method()](assignment, preload=self._job.preload, secret=self._secret())
        end = time.monotonic() + self._job.start_timeout
        while not (processes.fit or self._failed or time.monotonic() > end):
            self._failed = processes.wait(WARM_SECONDS)

    def _forget_last(self) -> None:
        for old in (*self._folder.glob("rank-*.error.json"), *self._folder.glob("store-*"), *self._folder.glob("reports/*")):
            old.unlink()
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None  # should there be no room for the next ones

    def _new_heartbeats(self) -> Heartbeats:
        """Create the file of heartbeats, in shared memory if the run has a folder there, because a rank hangs or dies when it
        writes to a mapped file on unavailable storage."""
        if self._memory is not None and not roots.taken(self._memory):
            with contextlib.suppress(OSError):  # no room there
                return Heartbeats.create(self._memory / HEARTBEATS, self._now.ranks)
        return Heartbeats.create(self._folder / HEARTBEATS, self._now.ranks)

    def _secret(self) -> dict[str, str]:
        """Return the environment variables with the run's key, which must not be in the job file, because other users can read
        that file."""
        return self._key.variables if self._key is not None else {}

    def _roots(self) -> list[tuple[Path, Key]]:
        return [(root, self._key) for root in (self._memory, self._disk) if root is not None and self._key is not None]

    def forget(self) -> None:
        """Invalidate the copies of the state of all nodes on this machine, including lost nodes."""
        for root, secret in self._roots():
            for name in self._names:
                copies.forget(node_folder(root, name), key=secret)

    def _assign(self, generation: Generation) -> Assignment:
        job = self._now
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        source, slots = generation.source, len(generation.placement)
        mine = [slot for slot, node in enumerate(generation.placement) if node in self._names]
        here = [rank for slot in mine for rank in report.ranks_of(slot, world=job.ranks, slots=slots)]
        disk = "" if generation.shrunk else str(self._disk or "")
        return Assignment(
            entry=job.entry,
            arguments=job.arguments
            | ({"sealed": job.sealed} if job.sealed else {})
            | ({"source": source.as_json()} if source is not None else {}),
            ranks=job.ranks,
            threads=job.threads or max(1, cores // max(1, len(here))),
            environment=job.environment | {DISK: disk, epochs.VARIABLE: str(generation.epoch)},
            run_dir=str(job.run_dir.resolve()),
            generation=generation.name,
            path=[entry or str(Path.cwd()) for entry in sys.path],
            parent_watch=self._parent_watch,
            placement=list(generation.placement),
            memory="" if generation.shrunk else str(self._memory or ""),
            own=str(self._folder),
            heartbeats=str(self._heartbeats.path) if self._heartbeats is not None else "",
            agent=os.getpid(),
            here=here,
            meeting=self._meeting,
        )

    def wait(self, seconds: float) -> list[Exit | Failure | Observation]:
        happened: list[Exit | Failure | Observation] = []
        if self._processes is None:
            time.sleep(seconds)
        else:
            failed, self._failed = self._failed, []
            happened += [self._describe(what) for what in (*failed, *self._processes.wait(0 if failed else seconds))]
        happened += report.collect(self._folder / "reports")
        happened += self._came_and_went()
        with contextlib.suppress(Empty):
            while True:
                happened.append(self._found.get_nowait())
        return happened

    def _describe(self, what: Exit | Failure) -> Exit | Failure:
        if isinstance(what, Failure) or what.code in ORDERLY:
            return what
        assert self._assignment is not None
        log = self.log(what.rank)
        return causes.describe(
            what,
            error=causes.read_error(self._assignment.error(what.rank)),
            log=log,
            output=evidence.output(log, self._assignment.generation),
            phase=self.beats()[what.rank].phase or "start",
            oom_kills=evidence.oom_kills() - self._oom_kills,
        )

    def _came_and_went(self) -> list[Observation]:
        self._make_memory_anew()
        before, self._there = self._there, self.there()
        lost = tuple(name for name in before if name not in self._there)
        observed: list[Observation] = [NodesLost(time=time.time(), nodes=lost)] if lost else []
        return [*observed, *(NodeJoined(time=time.time(), node=name) for name in self._there if name not in before)]

    def running(self) -> frozenset[int]:
        return frozenset(self._processes.running()) if self._processes is not None else frozenset()

    def beats(self) -> list[Beat]:
        return self._heartbeats.read() if self._heartbeats is not None else [Beat()] * self._now.ranks

    def send(self, number: int, ranks: Collection[int]) -> None:
        if self._processes is not None:
            self._processes.send(number, ranks)

    def inspect(self, ranks: Collection[int]) -> dict[int, RankInspection]:
        assert self._processes is not None
        processes = self._processes
        known = {rank: process for rank, process in processes.running().items() if rank in ranks}
        stopped = {rank for rank, process in known.items() if evidence.is_stopped(process)}
        dumps = evidence.dumps(
            {rank: self.log(rank) for rank in known},
            ask=lambda: processes.send(evidence.STACKS, known),
            able=set(known) - stopped,
            seconds=LOOK_SECONDS,
            waited=lambda: {rank: evidence.queued(process) for rank, process in known.items() if rank not in stopped},
        )
        return {rank: RankInspection.of(dumps.get(rank, ""), stopped=rank in stopped) for rank in ranks}

    def queued(self) -> dict[str, float]:
        running = self._processes.running() if self._processes is not None else {}
        return {"": sum(map(evidence.queued, running.values()))}

    def unstarted(self) -> Failure:
        assert self._assignment is not None and self._processes is not None
        log = self._assignment.server_log
        dumps = evidence.dumps({0: log}, ask=self._processes.show_stack, able=[0], seconds=LOOK_SECONDS)
        modules = ", ".join(self._job.preload) or "nothing"
        reason = f"did not start the ranks within {self._job.start_timeout:g} s, which include the time for importing {modules}"
        return Failure(None, reason, "", evidence.main_stack(dumps[0]), log, time.time(), ExitCode.LOST)

    def log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def survey(self, placement: Sequence[str]) -> tuple[Copy, ...]:
        found = tuple[Copy, ...]()
        for root, secret in self._roots():
            own = Tier.DISK if root == self._disk else Tier.MEMORY
            found += copies.survey(root, placement=placement, world=self._job.ranks, key=secret, own=own)
        return found

    def set_aside(self, order: QuarantineCopy) -> None:
        wanted = self._disk if order.tier is Tier.DISK else self._memory
        for root, secret in self._roots():
            if root == wanted and self._assignment is not None:
                copies.set_aside(root, order, placement=self._assignment.placement, world=self._job.ranks, key=secret)

    def check(self, node: str) -> None:
        """Check a node's health in a separate thread, because the check takes seconds. Every local node is this machine, so the
        check is of this machine."""

        def judge() -> None:
            there = node in self.there()
            try:
                wrong = self._measure(node) if there else ""
            except Exception as error:  # a check without a verdict would leave the node out for good
                wrong = f"the health check failed with an error: {type(error).__name__}: {error}"
            self._found.put(HealthChecked(time=time.time(), node=node, passed=there and not wrong, there=there, text=wrong))

        threading.Thread(target=judge, name=f"check-{node}", daemon=True).start()

    def _measure(self, node: str) -> str:
        """Return the problems of a node; empty if the node may return. Rehearsed nodes have no burn-in, because it would slow the
        ranks on the same processors."""
        if wrong := _unreachable(node):
            return wrong
        burn_in = self._job.burn_in if len(self._names) == 1 else ()
        return admission.failures(admission.before_return(self._job.run_dir, burn_in=burn_in, seconds=self._job.burn_in_timeout))

    def close(self, *, forget: bool) -> None:
        if self._processes is not None:
            self._processes.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._assignment is not None:
            with disk.if_available():
                self._assignment.store.unlink(missing_ok=True)
        os.close(self._held)
        os.close(self._parent_watch)
        for file in self._claimed:
            file.close()
        for root in (self._memory, self._disk):
            if forget and root is not None and not roots.taken(root):
                shutil.rmtree(root, ignore_errors=True)
