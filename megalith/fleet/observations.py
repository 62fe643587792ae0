"""Observations of faults and recoveries: the evidence that the policy decides on. Plain values that survive JSON.

Every observation has `time` (seconds since the epoch, or of the simulation) and `step` (the step being run, which is the number of steps
done). A `slot` is a place in the mesh that one node fills with its ranks; a `node` is the machine that fills it now.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from megalith.fleet.causes import Failure
from megalith.fleet.tiers import Tier
from megalith.tagged import Family


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Base of all observations. `kind` names the class in JSON."""

    kind: ClassVar[str] = ""
    time: float = 0.0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Started(Observation):
    """The supervisor has begun, for the first time or after its own end: nothing runs yet."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True, kw_only=True)
class Progressed(Observation):
    """The ranks have done a step of this generation: `step` steps are done now."""

    kind: ClassVar[str] = "progressed"


@dataclass(frozen=True, kw_only=True)
class RankFailed(Observation):
    """A rank's process ended wrongly. `signature` is equal for similar failures; `hardware`: the machine itself reported a fault.
    `blamed`: True if this node was at fault: True for signals and machine reports, False for a program's own exception.
    """

    kind: ClassVar[str] = "rank_failed"
    slot: int
    node: str
    rank: int | None
    signature: str
    text: str = ""
    hardware: bool = False
    blamed: bool = True


@dataclass(frozen=True, kw_only=True)
class Hang(Observation):
    """No rank makes progress. `slot` None: no rank is furthest behind, so no node can be blamed. `limit` and `silence` in
    seconds. `hardware`: the blamed node's machine is known to be broken. For a hang only the simulator knows this, because a run
    does not query the machine then.
    """

    kind: ClassVar[str] = "hang"
    slot: int | None
    node: str | None
    rank: int | None
    phase: str
    silence: float
    limit: float
    hardware: bool = False


@dataclass(frozen=True, kw_only=True)
class NodesLost(Observation):
    """Machines that no longer answer; several at once when they shared a rack, a switch or a power supply."""

    kind: ClassVar[str] = "nodes_lost"
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Nonfinite(Observation):
    """NaN or Inf in a gradient. `elsewhere`: the result of another replica for the same microbatch, once it was asked."""

    kind: ClassVar[str] = "nonfinite"
    slot: int
    node: str
    rank: int | None
    name: str
    elsewhere: Literal["not asked", "reproduced", "clean", "nobody to ask"] = "not asked"


NUMERICS = "Lower optimizer.lr, lengthen optimizer.warmup, or set train.z_loss."
"""Advice against numbers that are not finite on any replica."""


@dataclass(frozen=True, kw_only=True)
class StateCorrupt(Observation):
    """A rank's live state has a wrong digest: it changed at rest, or differs from its true replica or from its recomputed
    update."""

    kind: ClassVar[str] = "state_corrupt"
    slot: int
    node: str
    rank: int | None
    where: Literal["at rest", "replica", "update"] = "at rest"


@dataclass(frozen=True, kw_only=True)
class CopyCorrupt(Observation):
    """A copy that was to be restored failed its digest, or is not there. `slot` None: all of it."""

    kind: ClassVar[str] = "copy_corrupt"
    tier: Tier
    copy_step: int
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CopyAway(Observation):
    """A copy that was to be restored cannot be read just now, but may be intact. `slot` None: all of it."""

    kind: ClassVar[str] = "copy_away"
    tier: Tier
    copy_step: int
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class GradientWrong(Observation):
    """Two replicas got different gradients from the same microbatch. States up to `good_step` are known to be right.

    One suspect: a third computation named it. If there are two suspects, it is unknown which of them erred.
    """

    kind: ClassVar[str] = "gradient_wrong"
    good_step: int
    suspects: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Straggler(Observation):
    """A node whose ranks take `ratio` times as long to compute as the median. `lost`: seconds lost so far; `replacing`: seconds
    that a replacement takes."""

    kind: ClassVar[str] = "straggler"
    slot: int
    node: str
    rank: int | None
    ratio: float
    lost: float
    replacing: float


@dataclass(frozen=True, kw_only=True)
class Preempted(Observation):
    """The scheduler takes a node away, in `grace` seconds. `rank`: the rank that got the signal; None: the node itself."""

    kind: ClassVar[str] = "preempted"
    node: str
    rank: int | None = None
    grace: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Saved(Observation):
    """The ranks stopped together at the end of a step, as `SaveState` ordered, and their state is among the copies."""

    kind: ClassVar[str] = "saved"


@dataclass(frozen=True, kw_only=True)
class StopRequested(Observation):
    """A person or a scheduler asked the whole run to stop."""

    kind: ClassVar[str] = "stop_requested"


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Observation):
    """A copy could not be written: disk full, store away."""

    kind: ClassVar[str] = "save_failed"
    tier: Tier
    error: str


@dataclass(frozen=True, kw_only=True)
class SaveWorks(Observation):
    """A tier that failed takes copies again."""

    kind: ClassVar[str] = "save_works"
    tier: Tier


@dataclass(frozen=True, kw_only=True)
class DataDamaged(Observation):
    """A shard of the training data is missing or altered. `other_copy`: the folder it was read from instead; None: no copy is right."""

    kind: ClassVar[str] = "data_damaged"
    shard: str
    error: str
    other_copy: str | None = None


@dataclass(frozen=True, kw_only=True)
class NotThisRun(Observation):
    """A rank should have resumed from a file that is not this run's: the file changed since the command began, or is another run's
    checkpoint."""

    kind: ClassVar[str] = "not_this_run"
    error: str


@dataclass(frozen=True, kw_only=True)
class StoreAway(Observation):
    """A folder or file that the run has used cannot be reached: its file system is away, or it was moved. It may be intact."""

    kind: ClassVar[str] = "store_away"
    path: str
    error: str


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Observation):
    """A node offers itself: new, or back from repair. A quarantined one must pass a health check first."""

    kind: ClassVar[str] = "node_joined"
    node: str


@dataclass(frozen=True, kw_only=True)
class HealthChecked(Observation):
    """Result of `megalith doctor` on a node; `text`: the failed checks. `there` False: the node is gone."""

    kind: ClassVar[str] = "health_checked"
    node: str
    passed: bool
    there: bool = True
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Ordered(Observation):
    """A person orders something of the run: to save now, to stop after this step, to take out a `node`."""

    kind: ClassVar[str] = "ordered"
    what: Literal["save", "stop", "quarantine"]
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Waited(Observation):
    """The time given by a `Wait` is over and no node has come."""

    kind: ClassVar[str] = "waited"


OBSERVATIONS = Family(Observation, place=2)
load, dump = OBSERVATIONS.load, OBSERVATIONS.dump


_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?|/[^\s'\"]+")


def signature(text: str) -> str:
    """Return the common part of similar failures: the text without numbers, addresses and paths."""
    return _VARYING.sub("#", text.strip().partition("\n")[0])[:200]


def of_failure(failure: Failure, *, time: float, step: int, slot: int, node: str) -> RankFailed:
    """Classify a rank's end as an observation. A rank's own Python error counts as the program's, unless it reports a device fault.
    Anything else counts as the node's until there is more evidence."""
    what = failure.error or failure.reason
    return RankFailed(
        time=time,
        step=step,
        slot=slot,
        node=node,
        rank=failure.rank,
        signature=signature(failure.error or failure.reason.partition(" (")[0]),
        text=what,
        hardware=failure.hardware,
        blamed=failure.hardware or not failure.error,
    )
