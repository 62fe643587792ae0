"""What happened in a run: an append-only JSON-lines file of typed events, the only thing reports read about it.

Every line is `{"type": ..., "time": seconds since the epoch, ...fields}`. Times are seconds, memory is bytes, rates are per second.

Logs of other versions can be read. A field that a log lacks gets its default, else the neutral value of its type: None, NaN, 0, "",
an empty list or dict. A field that this version does not know is kept in `Event.extra`, and an event of an unknown kind is an `Unknown`.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from megalith import disk, epochs
from megalith.tagged import Family

FILE = "events.jsonl"
MOST_WAITING = 10_000  # events that wait for a disk with room, or a store; the oldest are lost beyond that


@dataclass(frozen=True)
class Event:
    """Base of all events; `kind` is the `type` written to the log. `extra`: fields of a log that this version does not know."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True)
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)


Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Unknown(Event):
    """An event of a kind that this version does not know; all its fields but the time are in `extra`."""

    type: str


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
    """One step whose update was made; `updates` counts those of the run, this one among them. `seconds` is wall time on the first rank.

    `breakdown` splits it: data, forward, backward, bubble (waiting for a neighbour in the pipeline), communication, optimizer, other.
    `memory` is the first rank's; `resident` the largest of all ranks. `experts`: of the layer where it is worst, the largest load over the
    mean ("max_load"), the entropy of the loads (1: even), and the share of choices "dropped"; empty without experts. `noise`: estimates of
    the gradient's squared norm ("signal") and of the variance of one sequence's gradient ("noise"), and the gradient noise scale, which is
    the ratio of their averages over recent steps, in sequences ("scale") and in "tokens"; empty where the plan shows none.
    """

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
    updates: int | None = None  # None in logs of earlier versions: as many as steps
    noise: dict[str, float] = field(
        default_factory=dict
    )  # what the gradients say of their noise; empty: the plan does not show it
    scale: float | None = None  # the loss scale of fp16; None: the run has none

    @property
    def left_out(self) -> int:
        """Updates that the run has left out so far."""
        return 0 if self.updates is None else self.step - self.updates


@dataclass(frozen=True)
class PhaseBegan(Event):
    """A phase of the run began: from sample `samples` on, with step `step`, batches and sequences are of these sizes, and domains have
    these `weights` (empty: in proportion to their tokens). `number` counts a run's phases from 0."""

    kind: ClassVar[str] = "phase"
    step: int
    samples: int
    number: int
    seq_len: int
    global_batch: int
    weights: dict[str, float]

    @property
    def words(self) -> str:
        """The event in a sentence."""
        mixture = ", ".join(f"{name} {share:g}" for name, share in self.weights.items())
        what = f"{self.global_batch:,} sequences of {self.seq_len:,} tokens a step{f', weights {mixture}' if mixture else ''}"
        return f"phase {self.number + 1} begins with step {self.step}, at sample {self.samples:,}: {what}"


@dataclass(frozen=True)
class Skipped(Event):
    """A step whose update was left out; its samples are consumed. `left`: updates that the run may still leave out. Where gradients
    overflowed in fp16, `part` and `tensor` name the first one in the order of backward; such a step does not count against `left`."""

    kind: ClassVar[str] = "skipped"
    step: int
    reason: str
    tokens: int
    seconds: float
    left: int
    spike: bool = False  # its numbers were finite, and far outside what they were
    part: str = ""
    tensor: str = ""
    scale_before: float | None = None
    scale_after: float | None = None

    @property
    def words(self) -> str:
        """The event in a sentence."""
        if self.spike:
            return f"the update of step {self.step} was left out: {self.reason}"
        if self.scale_before is not None:
            return f"the update of step {self.step} was left out: {self.reason}."
        return f"the update of step {self.step} was left out: {self.reason}. The run may leave out {self.left} more (stability.skips)."


@dataclass(frozen=True)
class Spike(Event):
    """A step with loss or gradient norm outside its band, or one that gave other numbers when it was computed again. None: not finite.

    `bands` has where each band ends that was left. `answer`: "none", "repeated", "skipped", "rewound", "lowered". `causes` are likely ones
    with their evidence, likeliest first: "hardware", "schedule", "data", "numerics".
    """

    kind: ClassVar[str] = "spike"
    step: int
    loss: float | None
    grad_norm: float | None
    bands: dict[str, float]
    answer: str
    causes: list[dict[str, str]]

    @property
    def cause(self) -> str:
        """The likeliest one; empty if nothing points to any."""
        return self.causes[0]["cause"] if self.causes else ""

    @property
    def words(self) -> str:
        """The event in a sentence."""
        numbers = {"loss": self.loss, "norm": self.grad_norm}
        left = " and ".join(f"{name} {numbers.get(name) or 0:.4g} above {end:.4g}" for name, end in self.bands.items())
        what = left or ("numbers that did not come again" if self.loss is not None else "numbers that are not finite")
        why = f"; likely cause: {self.cause} ({self.causes[0]['evidence']})" if self.causes else ""
        return f"spike at step {self.step}: {what}{why}"


@dataclass(frozen=True)
class Rewound(Event):
    """The run went back to the state after `to` steps, which undid `undone` updates, and goes on after step `step`. Samples `first` to
    `last` are never read again. `tier`: where the copy was; `seconds`: to get it; `replayed`: steps computed once more to find the cause.
    `left`: times that the run may still rewind."""

    kind: ClassVar[str] = "rewound"
    step: int
    to: int
    undone: int
    first: int
    last: int
    tier: str
    seconds: float
    replayed: int
    left: int

    @property
    def words(self) -> str:
        """The event in a sentence."""
        went = f"went back from step {self.step} to the state after step {self.to} in {self.tier}"
        return f"{went}: samples {self.first} to {self.last} are dropped. The run may rewind {self.left} more times (stability.rewinds)."


@dataclass(frozen=True)
class Lowered(Event):
    """The learning rate is multiplied by `factor` from step `step` until update `until`."""

    kind: ClassVar[str] = "lowered"
    step: int
    factor: float
    until: int

    @property
    def words(self) -> str:
        """The event in a sentence."""
        return f"the learning rate is {self.factor:g} of what it was, from step {self.step} until update {self.until}"


Span = tuple[int, str, float, float]
"""(rank, action, start, end) of an action, in seconds from the step's start. In a log that was read it is a list."""


@dataclass(frozen=True)
class Spans(Event):
    """What each pipeline rank did when, in one step."""

    kind: ClassVar[str] = "spans"
    step: int
    spans: list[Span]


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
class Order(Event):
    """A person ordered something of the run (`control.orders`), and what was decided about it."""

    kind: ClassVar[str] = "order"
    what: str
    node: str
    answer: str


@dataclass(frozen=True)
class RunFinished(Event):
    """The ranks stopped. `reason`: "finished", "stopped" (a signal asked, state saved), "lost" (a rank, most often: the same
    command gets further) or "failed"."""

    kind: ClassVar[str] = "run_finished"
    reason: str
    step: int


_NEUTRAL: dict[Any, Callable[[], object]] = {
    NoneType: lambda: None,
    float: partial(float, "nan"),
    int: int,
    str: str,
    list: list,
    dict: dict,
}
_MISSING = object()
_KINDS = Family(Event, key="type").classes

_Reading = tuple[str, frozenset[type], Callable[[], object]]
"""How a field is read: its name, the types that JSON may have for it, and what makes its value if it is missing."""


def _reading(one: Field[Any], hint: Any) -> _Reading:
    types = [get_origin(each) or each for each in (get_args(hint) if NoneType in get_args(hint) else (hint,))]
    if one.default is not MISSING:
        missing: Callable[[], object] = lambda: one.default  # noqa: E731
    elif one.default_factory is not MISSING:
        missing = one.default_factory
    else:
        missing = _NEUTRAL[NoneType if NoneType in types else types[0]]
    return one.name, frozenset((*types, int) if float in types else types), missing  # JSON may write a whole float as an integer


def _readings(kind: type[Event]) -> tuple[_Reading, ...]:
    hints = get_type_hints(kind)
    return tuple(_reading(one, hints[one.name]) for one in fields(kind) if one.name != "extra")


_READINGS = {kind: _readings(kind) for kind in (Unknown, *_KINDS.values())}
_NAMES = {kind: frozenset(("type", *(name for name, _, _ in readings))) for kind, readings in _READINGS.items()}


def load(record: dict[str, Any]) -> Event | None:
    """Return the event that a line's JSON object holds; None if it has no type or no time, or a field of another type than the class.

    Types are checked one level deep. A log has a line for every step, so speed matters: pydantic takes five times as long, and the
    `__init__` of a frozen dataclass twice as long.
    """
    tag = record.get("type")
    if not isinstance(tag, str) or "time" not in record:
        return None
    kind = _KINDS.get(tag, Unknown)
    event = object.__new__(kind)
    values = event.__dict__
    for name, types, missing in _READINGS[kind]:
        value = record.get(name, _MISSING)
        if value.__class__ not in types:
            if value is not _MISSING:
                return None
            value = missing()
        values[name] = value
    names = _NAMES[kind]
    values["extra"] = {} if record.keys() <= names else {name: value for name, value in record.items() if name not in names}
    return event


def dump(event: Event) -> dict[str, Any]:
    """Return an event as the JSON object of its line."""
    record = asdict(event)
    extra = record.pop("extra")
    return {"type": event.kind, **record, **extra}  # an Unknown has its own type among its fields


def parse(line: str) -> Event | None:
    """Return the event in a line of a log; None for a torn line, or one that holds no event."""
    record = disk.parse(line)
    return None if record is None else load(record)


class EventLog:
    """Appends events to a run folder's log. Each event is one write, so a reader never sees half a line for long, and the ranks and who
    watches them may write to one log. What a full disk has no room for, or a store that is away cannot take, waits. A log that is deleted
    while it is written begins anew, with a note and the newest `RunStarted`, without which no report could be made of what follows."""

    def __init__(self, run_dir: Path, *, epoch: int | None = None) -> None:
        """`epoch`: its owner's (`megalith.epochs`); None: the newest."""
        run_dir.mkdir(parents=True, exist_ok=True)
        path = epochs.newest(run_dir, FILE) if epoch is None else run_dir / epochs.name(FILE, epoch)
        self._opening: list[Event] = []  # the newest start, and who held what in it
        self._step = 0  # the newest step that was written
        self._journal = disk.Journal(path, most=MOST_WAITING, renewed=self._begin_anew)

    def write(self, event: Event) -> None:
        """Append one event, now or with a later one."""
        match event:
            case RunStarted():
                self._opening, self._step = list[Event]([event]), event.resumed_step
            case Holding():
                self._opening.append(event)
        self._journal.write(_line(event))
        if isinstance(event, Step):
            self._step = event.step

    def _begin_anew(self, made: bool) -> Iterator[bytes]:
        """Lines that a log which lost all it held begins with. One of its writers makes the file, and leaves the note."""
        if made:
            words = f"{FILE} was removed, or emptied, while the run went on: what it held is lost, and it begins anew here"
            yield _line(Problem("warning", words))
        for event in self._opening:
            fresh = replace(event, time=time.time())
            yield _line(replace(fresh, resumed_step=self._step) if isinstance(fresh, RunStarted) else fresh)

    def close(self) -> None:
        """Write what still waits, and say so if it cannot be written to the last."""
        self._journal.close()


def _line(event: Event) -> bytes:
    return json.dumps(dump(event), separators=(",", ":")).encode() + b"\n"


class Reader:
    """The events of a run, oldest first; each iteration reads the log of the newest epoch again.

    Reading raises nothing for a line that is torn (the writer died in it, or the disk was full) or holds no event: the line is skipped.
    `skipped` counts these lines in the newest iteration.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.skipped = 0

    def __iter__(self) -> Iterator[Event]:
        self.skipped = 0
        for line in disk.lines(epochs.newest(self._run_dir, FILE)):
            event = parse(line)
            if event is None:
                self.skipped += 1
            else:
                yield event


def read(run_dir: Path) -> Reader:
    """Return a reader of the events in a run folder; it has none if the folder has no log. Iteration raises OSError if the log is there
    but cannot be read."""
    return Reader(run_dir)


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """Return the events of one class, in their order."""
    return [event for event in events if isinstance(event, kind)]
