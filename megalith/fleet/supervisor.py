"""Starts the ranks of a run on this machine, watches them, and says why they ended.

One thread and one loop over three things: ends of processes, heartbeats in shared memory, and signals to this process. A rank
that fails takes the others down within seconds (they would only wait for it), and of all the errors that follow the first cause
is named. Nothing here imports torch.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megalith.fleet import causes, evidence
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Beat, Heartbeats
from megalith.fleet.outcome import Outcome
from megalith.fleet.processes import STARTS, Processes, method
from megalith.fleet.rank import REQUESTS, Assignment

POLL_SECONDS = 0.02
REPORT_SECONDS = 0.2  # that other ranks have to report their own errors, once a first cause is known
CAUSE_SECONDS = 1.5  # the same while every error known is the consequence of another one
EVIDENCE_SECONDS = 2.0  # that ranks have to write their stacks
KILL_SECONDS = 5.0  # that the kernel has to end killed ranks
BOUNCE_SECONDS = 0.25  # a second SIGINT sooner than this is the same key press, delivered by the terminal and by a wrapper
_PAUSE_SECONDS = 1.0  # what a turn of the loop took beyond this was not spent watching: this process was stopped


@dataclass(frozen=True)
class Job:
    """What to run on the ranks of this machine.

    `entry` is "module:function", called on each rank as `function(**arguments)`; `arguments` must survive JSON. `preload` are
    modules imported once, before the ranks are forked. Every rank must beat phase `ready`
    (`heartbeat.Heartbeat.find().beat("ready")`) within `start_timeout` seconds; from then on the ranks may all be without a beat
    for `silence_timeout` seconds at most (None: for ever). `threads` a rank computes with; 0: cores / ranks. `environment` is
    added to what the ranks inherit, and is there when their interpreter starts.
    """

    entry: str
    arguments: dict[str, object]
    ranks: int
    run_dir: Path
    preload: tuple[str, ...] = ()
    start_timeout: float = 120.0
    silence_timeout: float | None = 600.0
    threads: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What is wrong with it; empty when it can be started."""
        found = []
        if not re.fullmatch(r"[\w.]+:\w+", self.entry):
            found.append(f'entry {self.entry!r} does not name a function. Write "module:function"')
        if self.ranks < 1:
            found.append(f"ranks = {self.ranks} starts nothing. Use 1 or more")
        if self.threads < 0:
            found.append(f"threads = {self.threads} is no number of threads. Use 1 or more, or 0 for cores / ranks")
        for name in ("start_timeout", "silence_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{name} = {value} leaves no time. Use a number of seconds above 0")
        try:
            json.dumps(self.arguments)
        except (TypeError, ValueError) as error:
            found.append(f"arguments cannot be handed to the ranks: {error}. Use numbers, text, lists and dictionaries")
        return found


def run(job: Job, *, tick: Callable[[], None] | None = None) -> Outcome:
    """Start the job's ranks and stay until all have ended; `tick` is called about every 20 ms meanwhile.

    SIGTERM, SIGUSR1 and the first SIGINT to this process are passed on to every rank, once, as SIGTERM; a later SIGINT ends all
    at once. Raises ValueError for a job that cannot be started, with all its problems, and RuntimeError when its run folder is in
    use.
    """
    problems = job.problems()
    if problems:
        raise ValueError("this job cannot be started:\n" + "\n".join(f"- {problem}" for problem in problems))
    start = STARTS[method()]
    folder = job.run_dir.resolve() / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder), _requests() as requests, contextlib.ExitStack() as leave:
        for old in (*folder.glob("rank-*.error.json"), *folder.glob("store-*")):
            old.unlink()
        # Only this process holds the writing end: when it ends, in whatever way, every rank sees the end of the pipe.
        lifeline, held = os.pipe()
        leave.callback(os.close, held)
        leave.callback(os.close, lifeline)
        assignment = _assign(job, lifeline)
        leave.callback(assignment.store.unlink, missing_ok=True)
        file = folder / "job.json"
        assignment.save(file)
        heartbeats = Heartbeats.create(assignment.heartbeats, job.ranks)
        leave.callback(heartbeats.close)
        processes = start(assignment, file, preload=job.preload)
        leave.callback(processes.close)
        return _Watch(job, assignment, processes, heartbeats, requests).until_all_ended(tick or (lambda: None))


def _assign(job: Job, lifeline: int) -> Assignment:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Assignment(
        entry=job.entry,
        arguments=job.arguments,
        ranks=job.ranks,
        threads=job.threads or max(1, cores // job.ranks),
        environment=job.environment,
        run_dir=str(job.run_dir.resolve()),
        generation=secrets.token_hex(4),
        path=[entry or str(Path.cwd()) for entry in sys.path],
        lifeline=lifeline,
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a run folder: two supervisors in it would mix up logs and checkpoints. The lock goes with the process."""
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "(unknown)"
            raise RuntimeError(
                f"{folder.parent} is in use by process {holder}. Wait for it, stop it, or use another run folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def _requests() -> Iterator[list[tuple[int, float]]]:
    """The signals that ask to stop, as they come: (number, monotonic seconds). Outside the main thread none can be caught."""
    received: list[tuple[int, float]] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append((number, time.monotonic()))

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in REQUESTS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """One generation of ranks, from their start to the last one's end."""

    def __init__(
        self, job: Job, assignment: Assignment, processes: Processes, heartbeats: Heartbeats, requests: list[tuple[int, float]]
    ) -> None:
        self._job = job
        self._assignment = assignment
        self._processes = processes
        self._heartbeats = heartbeats
        self._requests = requests
        self._watched = 0.0  # seconds spent watching: time in which this process was stopped does not count against the ranks
        self._beats = [Beat()] * job.ranks
        self._beat_at = 0.0
        self._ready_at: float | None = None
        self._stopping = False
        self._exits: dict[int, Exit] = {}
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._ended: list[int] = []
        self._oom_kills = evidence.oom_kills()

    def until_all_ended(self, tick: Callable[[], None]) -> Outcome:
        """The loop."""
        turn = time.monotonic()
        while len(self._exits) < self._job.ranks:
            for what in self._processes.wait(POLL_SECONDS):
                self._note(what)
            now = time.monotonic()
            self._watched, turn = self._watched + min(now - turn, _PAUSE_SECONDS), now
            tick()
            self._look_at_beats()
            if self._must_end():
                self._end_all()
                break
        return self._outcome()

    def _note(self, what: Exit | Failure) -> None:
        if isinstance(what, Exit):
            self._exits[what.rank] = what
            if what.orderly or self._is_request(what):
                return
            what = self._describe(what)
        if what.rank is None and any(failure.rank is None for failure in self._failures):
            return  # a server that reported a problem leaves; that is not a second one
        self._failures.append(what)
        if self._failed_at is None:
            self._failed_at = self._watched

    def _is_request(self, end: Exit) -> bool:
        """Whether a rank was ended by our request to stop: it had not set a handler yet, so there was nothing to save."""
        return self._stopping and end.code == -signal.SIGTERM

    def _describe(self, end: Exit) -> Failure:
        rank, log = end.rank, self._assignment.log(end.rank)
        return causes.describe(
            end,
            error=causes.read_error(self._assignment.error(rank)),
            log=log,
            output=evidence.output(log, self._assignment.generation),
            phase=self._heartbeats.read()[rank].phase or "start",
            oom_kills=evidence.oom_kills() - self._oom_kills,
        )

    def _look_at_beats(self) -> None:
        beats = self._heartbeats.read()
        if beats != self._beats:
            self._beats, self._beat_at = beats, self._watched
        if self._ready_at is None and all(beat.ready or rank in self._exits for rank, beat in enumerate(beats)):
            self._ready_at = self._beat_at = self._watched

    def _must_end(self) -> bool:
        """Whether what still runs must be ended now."""
        if self._pass_on_requests():
            return True
        if self._failed_at is not None:
            server_lost = any(failure.rank is None for failure in self._failures)
            wait = 0.0 if server_lost else REPORT_SECONDS if causes.conclusive(self._failures) else CAUSE_SECONDS
            return self._watched - self._failed_at >= wait
        if any(self._is_request(end) for end in self._exits.values()):
            return True
        late = self._late()
        self._failures += self._hangs(late)
        return bool(late)

    def _pass_on_requests(self) -> bool:
        """Pass the first request on to the ranks. True when there is nobody to wait for: no rank yet, or a person insists."""
        if self._requests and not self._stopping:
            self._stopping = True
            self._processes.send(signal.SIGTERM, self._processes.running())
            if not self._processes.running() and not self._exits:
                return True
        return self._interrupted()

    def _interrupted(self) -> bool:
        if not self._requests:
            return False
        begun = self._requests[0][1]
        return any(number == signal.SIGINT and at - begun > BOUNCE_SECONDS for number, at in self._requests[1:])

    def _late(self) -> list[int]:
        """Ranks for which the run stands still beyond its limits; empty while time is left."""
        running = [rank for rank in range(self._job.ranks) if rank not in self._exits]
        if self._ready_at is None:
            return [rank for rank in running if not self._beats[rank].ready and self._watched >= self._job.start_timeout]
        limit = self._job.silence_timeout
        return running if limit is not None and self._watched - self._beat_at >= limit else []

    def _hangs(self, late: list[int]) -> list[Failure]:
        """A failure for each late rank, with its stack. All wait for whoever is furthest behind: the others are secondary."""
        if not late:
            return []
        processes = self._processes.running()
        if not processes:
            return [self._slow_server()]
        stopped = {rank for rank in processes if evidence.is_stopped(processes[rank])}
        stacks = evidence.stacks(
            {rank: self._assignment.log(rank) for rank in processes},
            ask=lambda: self._processes.send(evidence.STACKS, processes),
            able=set(processes) - stopped,
            seconds=EVIDENCE_SECONDS,
        )

        def place(rank: int) -> tuple[bool, int, int]:
            beat = self._beats[rank]
            return (rank not in stopped, beat.step, beat.count if self._ready_at is None else 0)

        behind = min(place(rank) for rank in late)
        return [
            Failure(
                rank=rank,
                reason=self._standing(rank, is_stopped=rank in stopped),
                error="",
                traceback=stacks.get(rank, ""),
                log=self._assignment.log(rank),
                time=self._beats[rank].time,  # its last sign of life
                code=ExitCode.LOST,
                secondary=place(rank) != behind,
            )
            for rank in late
        ]

    def _slow_server(self) -> Failure:
        """No rank was started in time."""
        log = self._assignment.server_log
        stacks = evidence.stacks({0: log}, ask=self._processes.show_stack, able=[0], seconds=EVIDENCE_SECONDS)
        modules = ", ".join(self._job.preload) or "nothing"
        reason = f"had not started the ranks within {self._job.start_timeout:g} s; it was importing {modules}"
        return Failure(None, reason, "", stacks[0], log, time.time(), ExitCode.LOST)

    def _standing(self, rank: int, *, is_stopped: bool) -> str:
        """What a late rank failed to do, and where it stands."""
        if self._ready_at is None:
            missed = f"was not ready within {self._job.start_timeout:g} s"
        else:
            missed = f"stands still: no rank gave a sign of life for {self._job.silence_timeout:g} s"
        beat = self._beats[rank]
        where = f"its last phase is `{beat.phase}`" if beat.phase else "it has not said anything"
        step = f" of step {beat.step}" if beat.step >= 0 else ""
        return f"{missed}; {where}{step}{'; the process is stopped (SIGSTOP)' if is_stopped else ''}"

    def _end_all(self) -> None:
        """Kill what still runs, and hear how it ended."""
        killed = set(self._processes.running())
        self._processes.send(signal.SIGKILL, killed)
        end = time.monotonic() + KILL_SECONDS
        while self._processes.running() and time.monotonic() < end:
            for what in self._processes.wait(POLL_SECONDS):
                if isinstance(what, Failure):
                    continue  # the server: what it had to say no longer changes the cause
                self._exits[what.rank] = what
                ours = what.code in (-signal.SIGKILL, -evidence.STACKS) and not self._assignment.error(what.rank).exists()
                if not ours and not what.orderly and not self._is_request(what):
                    self._failures.append(self._describe(what))
        self._ended = [rank for rank in sorted(killed) if rank not in self._exits or not self._exits[rank].orderly]

    def _outcome(self) -> Outcome:
        cause = causes.first(self._failures)
        rest = sorted((failure for failure in self._failures if failure is not cause), key=lambda failure: failure.time)
        shown = {failure.rank for failure in self._failures}
        return Outcome(
            code=cause.code if cause else self._peaceful_code(),
            stopped=self._stopping or any(end.code == ExitCode.STOPPED for end in self._exits.values()),
            first_cause=cause,
            consequences=tuple(rest),
            exits=tuple(self._exits[rank] for rank in sorted(self._exits)),
            ended=tuple(rank for rank in self._ended if rank not in shown),
            ready_seconds=self._ready_at,
        )

    def _peaceful_code(self) -> ExitCode:
        codes = {end.code for end in self._exits.values()}
        if self._ended and self._interrupted():
            return ExitCode.INTERRUPTED
        if self._ended or -signal.SIGTERM in codes or not codes:
            return ExitCode.TERMINATED
        return ExitCode.STOPPED if ExitCode.STOPPED in codes else ExitCode.FINISHED
