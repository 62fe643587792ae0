"""The kinds of events. Times are seconds, memory is bytes, rates are per second."""

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all events; `kind` is written to the log as `type`. `extra`: fields of a log that this version does not know."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True)
    extra: dict[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Unknown(Event):
    """An event of a kind unknown to this version; all its fields except the time are in `extra`."""

    type: str


@dataclass(frozen=True)
class RunStarted(Event):
    """A generation of ranks begins; a resumed run logs several of these events. `spec` is the resolved RunSpec."""

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
    """sha256 of the source of each of the user's own parts, by the key of the run file that names the part."""


@dataclass(frozen=True)
class Holding(Event):
    """One rank's coordinates on the mesh, the model's parts that it holds, and the bytes of its state on the device, host and
    disk."""

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
    """One step with an update. `updates`: number of the run's updates, including this one; with sites, the number of whole batches
    that the sites have read. `seconds`: wall time on rank 0. `breakdown` divides `seconds` into data, forward, backward, bubble
    (waiting for a neighbour in the pipeline), communication, optimizer and other. `memory`: bytes of rank 0, but "resident" is the
    maximum over all ranks. `experts`: numbers of the worst layer, which are the largest load divided by the mean load ("max_load"),
    the entropy of the loads (1: all are equal), and the share of token assignments that were "dropped"; empty without experts.
    `noise`: estimates of the gradient's squared norm ("signal") and of the variance of one sequence's gradient ("noise"), and the
    gradient noise scale, the ratio of the averages of "noise" and "signal" over recent steps, in sequences ("scale") and in tokens
    ("tokens"); empty if the plan allows no estimate.
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
    passes: int = 1  # forwards and backwards that the update took: released gradients may need two

    @property
    def left_out(self) -> int:
        """Number of updates that the run has skipped or that sites have missed, and for which it makes further steps after
        `train.steps`."""
        return 0 if self.updates is None else self.step - self.updates


@dataclass(frozen=True)
class PhaseBegan(Event):
    """A phase of the data began with step `step`, whose first sample is `samples`. The event has the phase's batch and sequence
    sizes and its `weights` of the domains (empty: proportional to the domains' tokens). `number` is the phase's number, from
    0."""

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
    """A fragment of the model was merged over all sites after `step` steps, from weight differences that sites sent after `sent`
    steps. `losses`: mean loss of each merged site over its last steps; None if the site has just started. `bytes_sent`,
    `bytes_received`: bytes of the first site. `waited`: seconds of the merge's `seconds` for which the first site's ranks waited
    for other sites. `norm`: norm of the mean weight difference. `spread`: root mean square distance of the sites' differences from their
    mean. `merged`: the sites whose differences were merged. `sites`: number of all sites. `left`: sites that stop training at this
    merge. `joined`: sites that begin to train after this merge. `number`: number of earlier merges. `count`: number of sites among
    which later batches are divided. `samples`: samples that the merged weights were trained on, of the run's `total`. `mark`:
    digest of all merges so far. `decided`: the site that decided the merge; None in logs of earlier versions. If merges are
    asynchronous, `merged` has a site once for each of its differences; `taken`, `ages` and `weights` have each difference's step
    after which it was sent, number of missed merges, and weight in the mean. `names`: the sites' names, if the run file gives
    them. `rule`: the number of the rule by which samples are divided (`spec.sites.deal.RULE`); logs of earlier versions lack it."""

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
    rule: int = 1

    @property
    def all_sites(self) -> int:
        """The number of all sites. In logs of earlier versions `sites` is that of the merged sites."""
        return self.count or self.sites

    def named(self, site: int) -> str:
        """Return the name of a site."""
        return self.names[site] if site < len(self.names) else f"site {site}"


@dataclass(frozen=True)
class Skipped(Event):
    """A step whose update was skipped; its samples are consumed. `left`: updates that the run may still skip. If gradients
    overflowed in fp16, `part` and `tensor` name the tensor that overflowed first in backward; such a step does not reduce
    `left`."""

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
            return f"the update of step {self.step} was skipped: {self.reason}"
        if self.scale_before is not None:
            return f"the update of step {self.step} was skipped: {self.reason}."
        return f"the update of step {self.step} was skipped: {self.reason}. The run may skip {self.left} more updates (stability.skips)."


@dataclass(frozen=True)
class EarlyUpdatesPaused(Event):
    """With `plan.post_validation` or `plan.state.release` (`key`), updates now wait for the gradient norm (`paused`), or no longer do,
    because `clipped` of the last `window` updates were clipped."""

    kind: ClassVar[str] = "release"  # its only key at first
    step: int
    clipped: int
    window: int
    paused: bool = False
    key: str = "plan.state.release"

    @property
    def words(self) -> str:
        """The event in a sentence."""
        released = self.key == "plan.state.release"
        if not self.paused:
            what = "update in their first pass again" if released else "update before the gradient norm is known again"
        elif released:
            what = "only measure the gradient norm in their first pass, and update in a second pass"
        else:
            what = "wait for the gradient norm before they update"
        return f"{self.clipped} of the last {self.window} updates were clipped: steps after {self.step} {what} ({self.key})."


@dataclass(frozen=True)
class Spike(Event):
    """A step's loss or gradient norm (None: not finite) exceeds its band, or its numbers differed when the step was recomputed.
    `bands`: the limit of each exceeded band. `answer`: "none", "repeated", "skipped", "rewound", "lowered". `causes`: possible
    causes with evidence, the most likely first: "hardware", "schedule", "data", "numerics".
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
        """The most likely cause; empty if there is no evidence for a cause."""
        return self.causes[0]["cause"] if self.causes else ""

    @property
    def words(self) -> str:
        """The event in a sentence."""
        numbers = {"loss": self.loss, "norm": self.grad_norm}
        left = " and ".join(f"{name} {numbers.get(name) or 0:.4g} above {end:.4g}" for name, end in self.bands.items())
        what = left or (
            "loss or gradients differed when the step was recomputed"
            if self.loss is not None
            else "loss or gradient norm is not finite"
        )
        why = f"; likely cause: {self.cause} ({self.causes[0]['evidence']})" if self.causes else ""
        return f"spike at step {self.step}: {what}{why}"


@dataclass(frozen=True)
class Rewound(Event):
    """The run restored the state after `to` steps, which undid `undone` updates, and continues after step `step`. The run will
    not read samples `first` to `last` again. `tier`: the tier of the restored copy. `seconds`: time to load that copy.
    `replayed`: number of steps that were recomputed to find the cause. `left`: number of times that the run may still rewind."""

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
        went = f"the run went back from step {self.step} to the state after step {self.to} (copy in {self.tier})"
        return f"{went}: samples {self.first} to {self.last} are skipped. The run may rewind {self.left} more times (stability.rewinds)."


@dataclass(frozen=True)
class Lowered(Event):
    """From step `step` until update `until`, the learning rate is multiplied by `factor`, or limited to `at_most` if a jump of
    its schedule caused the spike."""

    kind: ClassVar[str] = "lowered"
    step: int
    factor: float
    until: int
    at_most: float | None = None

    @property
    def words(self) -> str:
        """The event in a sentence."""
        how = (
            f"the learning rate is multiplied by {self.factor:g}"
            if self.at_most is None
            else f"the learning rate is limited to {self.at_most:.3g}, its value before its schedule jumped"
        )
        return f"{how}, from step {self.step} until update {self.until}"


@dataclass(frozen=True)
class PrecisionWatched(Event):
    """After `step` steps, a microbatch's gradients were compared with those from bf16 products. `errors`: relative error of each
    part's gradient; None: not finite. `raised`: the part whose products are in bf16 after this, because its error was above
    `limit` (`precision.auto`); empty: none. `seconds`: time of the comparison on rank 0. `saturated`, `zeroed`: for each part,
    the share of rounded inputs that saturate at the format's maximum, and the share of nonzero inputs that become 0."""

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
        found = "not finite" if error is None else f"{error:.3g}, above precision.auto = {self.limit:g}"
        return (
            f"all matrix products of {self.raised} are in bf16 from step {self.step + 1} on, because the relative error of "
            f"its gradient was {found}"
        )


Span = tuple[int, str, float, float]
"""(rank, action, start, end), where start and end are seconds from the beginning of the step; a list in events read from a
log."""


@dataclass(frozen=True)
class Spans(Event):
    """Actions of each pipeline rank in one step, with their times. `collecting`: seconds in Python's garbage collector during the
    last `since` steps, the maximum over ranks; `collecting` and `since` are 0 in logs of earlier versions."""

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
    """A checkpoint was committed. `wait_seconds`: time for which saving the checkpoint paused training."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    bytes: int
    seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class Sample(Event):
    """Text that the model generated."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Problem(Event):
    """A message for the user; `severity` is "warning" or "error"."""

    kind: ClassVar[str] = "problem"
    severity: str
    message: str
    rank: int | None = None


@dataclass(frozen=True)
class Incident(Event):
    """A fault was observed, and the policy decided on a response at `time`. `began`: estimated time of the fault (the last
    heartbeat; for a slow rank, its first slow step). `evidence`: the observation (`fleet.observations`); `commands`: the
    response."""

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
    """An incident ended, because the ranks continued at `time`. `restored`: the restored copy, such as "step 12 in memory"; None
    if the ranks continued without a restart."""

    kind: ClassVar[str] = "recovery"
    incident: int
    step: int
    restored: str | None
    lost_steps: int


@dataclass(frozen=True)
class Order(Event):
    """A user gave the run an order (`control.orders`), and the policy decided on it."""

    kind: ClassVar[str] = "order"
    what: str
    node: str
    answer: str


@dataclass(frozen=True)
class RunFinished(Event):
    """The ranks stopped. `reason`: "finished"; "stopped" by a signal, with saved state; "lost", usually through the loss of a
    rank, if the same command can continue the run; or "failed"."""

    kind: ClassVar[str] = "run_finished"
    reason: str
    step: int
