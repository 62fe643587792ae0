"""The kinds of events. Times are seconds, memory is bytes, rates are per second."""

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all events; `kind` is the `type` written to the log. `extra`: fields of a log that this version does not know."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True)
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Unknown(Event):
    """An event of a kind unknown to this version; all its fields except the time are in `extra`."""

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
    own: dict[str, str] = field(default_factory=dict)
    """The sha256 of the source of each of the user's own parts, by the key of the run file that names it."""


@dataclass(frozen=True)
class Holding(Event):
    """One rank's place on the mesh, its parts, and the bytes of its share on the device and elsewhere."""

    kind: ClassVar[str] = "holding"
    rank: int
    coordinates: dict[str, int]
    parts: list[str]
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True)
class Step(Event):
    """One step with an update; `updates` counts the run's updates, including this one; with sites, the whole batches that they have read.
    `seconds` is wall time on the first rank.

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
    noise: dict[str, float] = field(default_factory=dict)  # estimates of the gradients' noise; empty: the plan does not allow any
    scale: float | None = None  # the loss scale of fp16; None: the run has none
    passes: int = 1  # forwards and backwards that the update took: a second one where released gradients were clipped

    @property
    def left_out(self) -> int:
        """Steps that the run makes beyond `train.steps`: as many as the updates that it has skipped, or that sites have missed."""
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
class Merge(Event):
    """A fragment of the model was merged over all sites after `step` steps, from differences taken after `sent` steps. `losses`: the mean
    loss of each site's last steps, None if the site has just been started. `bytes_sent`, `bytes_received`: the first site's. `waited`:
    seconds that its ranks stood still for the other sites, of `seconds` for the merge. `norm`: of the mean difference; `spread`: root mean
    square distance of the sites' differences to it. `merged`: the sites whose differences these are, `sites` in all; `left`, `joined`:
    those that trained until this merge, or train from it on. `number`: merges before it. `count`: sites that a step's batch is shared out
    among from here on. `samples`: those that the merged weights have seen, of `total` in the run. `mark`: digest of all merges up to this
    one. `decided`: the site that decided about it; None in logs of earlier versions. Where merges are asynchronous, `merged` names a site
    once for each of its differences, and each of these has in `taken` the step after which it was taken, in `ages` the merges of its
    fragment that it has missed, and in `weights` its weight in the mean. `names`: of all sites, in the order of their
    numbers, if the run file gives them."""

    kind: ClassVar[str] = "merge"
    step: int
    sent: int
    fragment: int
    sites: int
    losses: list[float | None]
    bytes_sent: int
    bytes_received: int
    waited: float
    seconds: float
    norm: float
    spread: float
    number: int = -1
    merged: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    count: int = 0
    samples: int = 0
    total: int = 0
    mark: str = ""
    decided: int | None = None
    taken: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def named(self, site: int) -> str:
        """Return the name of a site."""
        return self.names[site] if site < len(self.names) else f"site {site}"


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
class ReleasePaused(Event):
    """Another way to begin steps with released gradients, as `clipped` of the last `window` updates were clipped. `paused`: from the next
    step on a first pass only measures the norm; else steps update inside their first pass again."""

    kind: ClassVar[str] = "release"
    step: int
    clipped: int
    window: int
    paused: bool = False

    @property
    def words(self) -> str:
        """The event in a sentence."""
        what = "only measure the norm in their first pass" if self.paused else "update inside their first pass again"
        return (
            f"{self.clipped} of the last {self.window} updates were clipped: steps after {self.step} {what} (plan.state.release)."
        )


@dataclass(frozen=True)
class Spike(Event):
    """A step with loss or gradient norm outside its band, or one that gave other numbers when it was recomputed. None: not
    finite. `bands` has the limit of each band that was left. `answer`: "none", "repeated", "skipped", "rewound", "lowered".
    `causes` are likely ones
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
        what = left or (
            "numbers that differed when they were recomputed" if self.loss is not None else "numbers that are not finite"
        )
        why = f"; likely cause: {self.cause} ({self.causes[0]['evidence']})" if self.causes else ""
        return f"spike at step {self.step}: {what}{why}"


@dataclass(frozen=True)
class Rewound(Event):
    """The run went back to the state after `to` steps, which undid `undone` updates, and continues after step `step`. Samples
    `first` to `last` are never read again. `tier`: where the copy was; `seconds`: to get it; `replayed`: steps computed once more
    to find the cause.
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
    """From step `step` until update `until`, the learning rate is multiplied by `factor`, or is `at_most` this high where it had
    jumped."""

    kind: ClassVar[str] = "lowered"
    step: int
    factor: float
    until: int
    at_most: float | None = None

    @property
    def words(self) -> str:
        """The event in a sentence."""
        how = f"{self.factor:g} of what it was" if self.at_most is None else f"at most {self.at_most:.3g}, as before it jumped"
        return f"the learning rate is {how}, from step {self.step} until update {self.until}"


@dataclass(frozen=True)
class PrecisionWatched(Event):
    """A microbatch's gradients after `step` steps, compared with those of wide products. `errors`: the relative error of each part's
    gradient; None: not finite. `raised`: the part whose products are wide from now on, since its error was above `limit`
    (`precision.auto`); empty: none. `seconds`: of the comparison, on the first rank. `saturated` and `zeroed`: shares of the numbers that
    products of a part round, of those that are cut off at the format's largest and of those other than 0 that become 0."""

    kind: ClassVar[str] = "precision_watched"
    step: int
    errors: dict[str, float | None]
    seconds: float
    limit: float = 0.0
    raised: str = ""
    saturated: dict[str, float] = field(default_factory=dict)
    zeroed: dict[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The event in a sentence."""
        error = self.errors.get(self.raised)
        found = "not finite" if error is None else f"{error:.3g}"
        return (
            f"all products of {self.raised} are wide from step {self.step + 1} on: the relative error of its gradient was {found}, above "
            f"precision.auto = {self.limit:g}"
        )


Span = tuple[int, str, float, float]
"""(rank, action, start, end) of an action, in seconds from the step's start. In a log that was read it is a list."""


@dataclass(frozen=True)
class Spans(Event):
    """Actions of each pipeline rank in one step, with their times. `collecting`: the most seconds that a rank spent in Python's garbage
    collector during the `since` steps up to this one; both 0 in logs of earlier versions."""

    kind: ClassVar[str] = "spans"
    step: int
    spans: list[Span]
    collecting: float = 0.0
    since: int = 0


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
    """Something went wrong and the policy has decided; `time` is when. `began`: the best known time of the fault (the last sign
    of life; for a slow rank, its first slow step). `evidence` is the observation (`fleet.observations`), `commands` the commands given."""

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
    """An incident is over: the ranks continue at `time`. `restored`: "step 12 in memory"; None if they continued in place."""

    kind: ClassVar[str] = "recovery"
    incident: int
    step: int
    restored: str | None
    lost_steps: int


@dataclass(frozen=True)
class Order(Event):
    """A user's order to the run (`control.orders`), and the decision on it."""

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
