"""What happened in a run: an append-only JSON-lines file of typed events, the only thing reports read about it.

Every line is `{"type": ..., "time": seconds since the epoch, ...fields}`. Times are seconds, memory is bytes, rates are per second.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megalith import disk

FILE = "events.jsonl"
MOST_WAITING = 10_000  # events that wait for a disk with room, or a store; the oldest are lost beyond that


@dataclass(frozen=True)
class Event:
    """Base of all events; `kind` is the `type` written to the log."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True)
class RunStarted(Event):
    """A generation of ranks begins; a resumed run has several. `spec` is the resolved RunSpec."""

    kind: ClassVar[str] = "run_started"
    spec: dict[str, Any]
    device: str
    world: int
    resumed_step: int
    versions: dict[str, str]
    peak_flops: float | None
    peak_source: str
    flops_per_token: float
    flops_convention: str
    parameters: int


@dataclass(frozen=True)
class Holding(Event):
    """Who holds what: one rank's place on the mesh, its parts, and the bytes of its share."""

    kind: ClassVar[str] = "holding"
    rank: int
    coordinates: dict[str, int]
    parts: list[str]
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Step(Event):
    """One optimizer step. `seconds` is wall time on the first rank; `breakdown` splits it: data, forward, backward, bubble (waiting for a
    neighbour in the pipeline), communication, optimizer, other. `memory` is the first rank's; `resident` the largest of all ranks.
    `experts`: of the layer where it is worst, the largest load over the mean ("max_load"), the entropy of the loads (1: even), and the
    share of choices "dropped"; empty without experts."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_seen: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    breakdown: dict[str, float]
    memory: dict[str, int]
    experts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Spans(Event):
    """What each pipeline rank did when, in one step: `[rank, action, start, end]` in seconds from the step's start."""

    kind: ClassVar[str] = "spans"
    step: int
    spans: list[tuple[int, str, float, float]]


@dataclass(frozen=True)
class Validation(Event):
    """Held-out loss, over all domains and by domain."""

    kind: ClassVar[str] = "validation"
    step: int
    loss: float
    domains: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint was committed. `wait_seconds` is how long training stood still for it."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    bytes: int
    seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class Sample(Event):
    """Text the model wrote."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Problem(Event):
    """Something a person should know; `severity` is "warning" or "error"."""

    kind: ClassVar[str] = "problem"
    severity: str
    message: str
    rank: int | None = None


@dataclass(frozen=True)
class Incident(Event):
    """Something went wrong and the policy has decided; `time` is when. `began`: when it happened, as far as can be known (the last sign
    of life; for a slow rank, its first slow step). `evidence` is the sign (`fleet.signs`), `commands` what was ordered."""

    kind: ClassVar[str] = "incident"
    incident: int
    began: float
    step: int
    cause: str
    reason: str
    node: str | None
    rank: int | None
    evidence: dict[str, Any]
    commands: list[dict[str, Any]]


@dataclass(frozen=True)
class Recovery(Event):
    """An incident is over: the ranks go on, `time` is when. `restored`: "step 12 in memory"; None when they went on in place."""

    kind: ClassVar[str] = "recovery"
    incident: int
    step: int
    restored: str | None
    lost_steps: int


@dataclass(frozen=True)
class RunFinished(Event):
    """The ranks stopped. `reason`: "finished", "stopped" (a signal asked, state saved), "lost" (a rank, most often: the same
    command gets further) or "failed"."""

    kind: ClassVar[str] = "run_finished"
    reason: str
    step: int


class EventLog:
    """Appends events to a run folder's log. Each event is one write, so a reader never sees half a line for long, and the ranks and who
    watches them may write to one log. What a full disk has no room for, or a store that is away cannot take, waits."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)

    def write(self, event: Event) -> None:
        """Append one event, now or with a later one."""
        line = json.dumps({"type": event.kind} | asdict(event), separators=(",", ":"))
        self._waiting.append(line.encode() + b"\n")
        self._append()

    def _append(self) -> None:
        """Write what waits, as far as it can be written."""
        while self._waiting and disk.append(self._file, self._waiting[0]):
            self._waiting.popleft()

    def close(self) -> None:
        """Write what still waits, and say so if it cannot be written to the last."""
        self._append()
        if self._waiting:
            print(f"the last {len(self._waiting)} events of {self._path} could not be written", file=sys.stderr, flush=True)
        os.close(self._file)


def read(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The events of a run, oldest first. Torn lines (the writer died in one, or the disk was full) are left out."""
    return disk.lines(run_dir / FILE)
