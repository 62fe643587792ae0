"""Watches one generation of ranks from their start to the end of the last one, for ranks that end or hang. If a rank fails, the
others are killed within seconds, because they would wait for it forever. Of all errors, only the first cause is reported.
"""

import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from megalith import disk
from megalith.control.outcome import Outcome
from megalith.control.pace import Limits
from megalith.control.stop_response import Request
from megalith.control.stores import unlogged_retry
from megalith.control.times import Times
from megalith.fleet import causes, collective_progress
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.evidence import STACKS
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Beat
from megalith.fleet.job import Job
from megalith.fleet.nodes import Nodes, RankInspection
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import BEGINNING, Source

POLL_SECONDS = 0.02
REPORT_SECONDS = 0.2  # that other ranks have to report their own errors, once a first cause is known
CAUSE_SECONDS = 1.5  # the same while every error known is the consequence of another one
KILL_SECONDS = 30.0  # that the kernel has to end killed ranks; giving up costs a new fork server, and its imports
BOUNCE_SECONDS = 0.25  # a second SIGINT sooner than this is the same key press, delivered by the terminal and by a wrapper
STARVED = 0.5  # of a silence: if a machine's ranks all waited for a processor that long, it is slow and they do not hang
MAX_LIMITS = 10  # times its limit after which a silence is a hang all the same
_PAUSE_SECONDS = 1.0  # what a turn of the loop took beyond this was not spent watching: this process was stopped

Observe = Callable[[list[Observation], list[Beat]], bool]

_WAITS = re.compile(r"torch/distributed/|\bin (wait|wait_\w+|barrier|synchronize|finish)\b")
"""Pattern of the innermost call in the stack of a rank that waits for other ranks."""


@dataclass(frozen=True)
class Hang:
    """A hang: no rank made progress. `rank`: the rank for which the others wait; None: not known. `behind`: the last rank
    according to steps and heartbeats alone."""

    rank: int | None
    behind: int | None
    phase: str
    silence: float
    limit: float
    since: float  # seconds since the epoch: the last sign of life
    inspections: dict[int, RankInspection]


class Watch:
    """Loop that watches one generation of ranks, which restores `source`. `observe` is called with new observations and
    heartbeats in every iteration, and returns True if the generation must end. `stop_response` is called once, after a request to
    stop was passed on to the ranks. `epoch`: the number in the file names of the run folder's owner."""

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        requests: list[Request],
        *,
        source: Source = BEGINNING,
        limits: Limits | None = None,
        observe: Observe = lambda observed, beats: False,
        stop_response: Callable[[], None] = lambda: None,
        epoch: int = 0,
    ) -> None:
        self._job, self._nodes, self._requests, self._observe = job, nodes, requests, observe
        self._stop_response, self._responded = stop_response, False
        self._limits = limits or Limits(job.start_timeout, job.silence_timeout)
        self._limits.begin(source)
        self._watched = 0.0  # seconds spent watching: time in which this process was stopped does not count against the ranks
        self._beats = [Beat()] * job.ranks
        self._times = Times(job.run_dir, job.ranks, epoch=epoch)
        self._folder, self._retry_told = disk.Place(job.run_dir, existed=True), False
        self._beat_at = 0.0
        self._first_beat_at: float | None = None
        self._ready_at: float | None = None
        self._queued: tuple[float, dict[str, float]] | None = None  # seconds watched, and waited for a processor until then
        self._stopping = False
        self._exits: dict[int, Exit] = {}
        self._failures: list[Failure] = []
        self._failed_at: float | None = None
        self._ended: list[int] = []
        self.hang: Hang | None = None
        self.late_observations: list[Observation] = []  # that came while the ranks were being ended

    @property
    def stopping(self) -> bool:
        """True if the ranks were ordered to stop."""
        return self._stopping

    @property
    def failures(self) -> list[Failure]:
        """All failed ranks so far."""
        return list(self._failures)

    def until_all_ended(self, tick: Callable[[], None]) -> Outcome:
        """Watch the ranks until all have ended or were killed; return the outcome. `tick` is called in each iteration."""
        turn = time.monotonic()
        while len(self._exits) < self._job.ranks:
            observed = self._collect_events()
            now = time.monotonic()
            self._watched, turn = self._watched + min(now - turn, _PAUSE_SECONDS), now
            tick()
            self._look_at_beats()
            if self._observe(observed, self._beats) or self._must_end():
                self._end_all()
                break
        self._times.close()
        return self._outcome()

    def _collect_events(self) -> list[Observation]:
        observed: list[Observation] = []
        for what in self._nodes.wait(POLL_SECONDS):
            if isinstance(what, Exit | Failure):
                self._note(what)
            else:
                observed.append(what)
        return observed

    def _note(self, what: Exit | Failure) -> None:
        if isinstance(what, Exit):
            self._exits[what.rank] = what
            return
        if what.rank is not None:
            self._exits[what.rank] = Exit(what.rank, what.status, what.time)
            if self._is_request(self._exits[what.rank]):
                return
        elif any(failure.rank is None for failure in self._failures):
            return  # a server that reported a problem leaves; that is not a second one
        self._failures.append(what)
        if self._failed_at is None:
            self._failed_at = self._watched

    def _is_request(self, end: Exit) -> bool:
        """True if the order to stop killed a rank that had no signal handler yet, and therefore no state to save."""
        return self._stopping and end.code == -signal.SIGTERM

    def _look_at_beats(self) -> None:
        beats = self._nodes.beats()
        if beats != self._beats:
            self._limits.note(beats)
            self._times.note(beats)
            self._beats, self._beat_at = beats, self._watched
            if not self._retry_told and (words := unlogged_retry(beats, self._folder)):
                print(words, file=sys.stderr, flush=True)
                self._retry_told = True
        if self._first_beat_at is None and any(beat.count for beat in beats):
            self._first_beat_at = self._watched
        if self._ready_at is None and all(beat.ready or rank in self._exits for rank, beat in enumerate(beats)):
            self._ready_at = self._beat_at = self._watched

    def _must_end(self) -> bool:
        if self._pass_on_requests():
            return True
        if self._failed_at is not None:
            server_lost = any(failure.rank is None for failure in self._failures)
            wait = 0.0 if server_lost else REPORT_SECONDS if causes.conclusive(self._failures) else CAUSE_SECONDS
            return self._watched - self._failed_at >= wait
        if any(self._is_request(end) for end in self._exits.values()):
            return True
        late, limit = self._late()
        if late:
            self._failures += self._hangs(late, limit)
        return bool(late)

    def _pass_on_requests(self) -> bool:
        """Pass the first request to stop on to the ranks. Return True if the ranks must be killed, because none has started yet
        or a second request arrived."""
        if self._requests and not self._responded:
            self._responded = True
            if not self._stopping:
                self.stop()
            self._stop_response()
            if not self._nodes.running() and not self._exits:
                return True
        return self._interrupted()

    def stop(self) -> None:
        """Order the ranks to save and stop together."""
        self._stopping = True
        self._nodes.send(signal.SIGTERM, self._nodes.running())

    def _interrupted(self) -> bool:
        if not self._requests:
            return False
        begun = self._requests[0][1]
        return any(number == signal.SIGINT and at - begun > BOUNCE_SECONDS for number, at in self._requests[1:])

    def _late(self) -> tuple[list[int], float]:
        running = [rank for rank in range(self._job.ranks) if rank not in self._exits]
        if self._ready_at is None:
            unready = [rank for rank in running if not self._beats[rank].ready]
            limit, begun = self._limits.of_start(), self._first_beat_at
            if self._watched >= self._job.start_timeout:
                return unready, self._job.start_timeout
            return (unready if begun is not None and self._is_over(limit, self._watched - begun) else []), limit
        limit = self._limits.of_silence(self._beats)
        if limit is None:
            return [], 0.0
        return (running if self._is_over(limit, self._watched - self._beat_at) else []), limit

    def _is_over(self, limit: float, silence: float) -> bool:
        """True if the silence exceeds `limit` and a lack of processors does not explain it: ranks that were ready to run, but had
        no processor, for most of the last `limit` / 2 seconds are not hung."""
        if silence < limit / 2:
            self._queued = None
            return False
        since, before = self._queued = self._queued or (self._watched, self._nodes.queued())
        passed = self._watched - since
        if silence < limit or (passed < limit / 2 and silence < MAX_LIMITS * limit):
            return False
        queued = self._nodes.queued()
        longest = max((seconds - before.get(node, seconds) for node, seconds in queued.items()), default=0.0)
        if longest < STARVED * passed or silence >= MAX_LIMITS * limit:
            return True
        self._queued = self._watched, queued
        return False

    def _hangs(self, late: list[int], limit: float) -> list[Failure]:
        """Return a failure for each late rank, with its stack. Only the failure of the rank for which the others wait is not
        secondary."""
        processes = self._nodes.running()
        if not processes:
            return [self._nodes.unstarted()]
        inspections = self._nodes.inspect(processes)
        starting = self._ready_at is None
        silence = self._watched - self._beat_at

        def progress(rank: int) -> tuple[int, int]:
            return self._beats[rank].step, self._beats[rank].count if starting else 0

        numbers = collective_progress.behind(
            {rank: inspection.begun for rank, inspection in inspections.items() if inspection.begun and not inspection.stopped}
        )

        def place(rank: int) -> tuple[int, ...]:
            """Sort key of ranks, the hanging one first: ranks that do not answer, then ranks whose innermost call is not a wait,
            then ranks for which others wait in a collective."""
            inspection = inspections.get(rank, RankInspection(""))
            if inspection.stopped or not inspection.stack:
                return (0, 0, 0, *progress(rank))
            return (1, int(bool(_WAITS.search(inspection.where))), int(rank not in numbers), *progress(rank))

        behind = min(place(rank) for rank in late)
        first = [rank for rank in late if place(rank) == behind]
        slowest = [rank for rank in late if progress(rank) == min(progress(other) for other in late)]
        rank = first[0] if len(first) < len(late) or len(late) == 1 else None
        self.hang = Hang(
            rank=rank,
            behind=slowest[0] if len(slowest) < len(late) else None,
            phase=self._beats[first[0]].phase,
            silence=silence,
            limit=limit,
            since=max(beat.time for beat in self._beats) or time.time() - silence,
            inspections=inspections,
        )
        return [
            Failure(
                rank=rank,
                reason=self._standing(rank, limit, inspections.get(rank, RankInspection("")), numbers.get(rank, "")),
                error="",
                traceback=inspections.get(rank, RankInspection("")).stack,
                log=self._nodes.log(rank),
                time=self._beats[rank].time,  # its last sign of life
                code=ExitCode.LOST,
                secondary=place(rank) != behind,
            )
            for rank in late
        ]

    def _standing(self, rank: int, limit: float, inspection: RankInspection, behind: str) -> str:
        missed = (
            f"was not ready within {limit:g} s"
            if self._ready_at is None
            else f"hangs: neither this rank nor another has sent a heartbeat for the last {limit:g} s"
        )
        beat = self._beats[rank]
        where = f"the rank's last phase is `{beat.phase}`" if beat.phase else "the rank has sent no heartbeat"
        step = f" of step {beat.step}" if beat.step >= 0 else ""
        stopped = "the process is stopped (SIGSTOP)" if inspection.stopped else ""
        return "; ".join(part for part in (missed, where + step, stopped, behind) if part)

    def _end_all(self) -> None:
        killed = self._nodes.running()
        self._nodes.send(signal.SIGKILL, killed)
        until = time.monotonic() + KILL_SECONDS
        while self._nodes.running() and time.monotonic() < until:
            for what in self._nodes.wait(POLL_SECONDS):
                if isinstance(what, Exit):
                    self._exits[what.rank] = what
                elif not isinstance(what, Failure):
                    self.late_observations.append(what)
                elif what.rank is not None:  # else the server: its reports no longer change the cause
                    end = self._exits[what.rank] = Exit(what.rank, what.status, what.time)
                    ours = what.status in (-signal.SIGKILL, -STACKS) or self._is_request(end)
                    self._failures += [what] if what.error or not ours else []
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
