"""Observations of faults and recoveries: the policy's evidence, as plain values that can be stored as JSON.

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
    """The supervisor has started, for the first time or after its own failure; no rank runs yet."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True, kw_only=True)
class Progressed(Observation):
    """The ranks have finished a step in this generation; `step` steps are now done."""

    kind: ClassVar[str] = "progressed"


@dataclass(frozen=True, kw_only=True)
class RankFailed(Observation):
    """A rank's process failed. `signature` is equal for similar failures. `hardware`: the machine itself reported a fault. `blamed`:
    True if this node is held responsible, as for signals and machine reports; False for a program's own exception.
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
    """No rank makes progress. `slot` None: no single rank is furthest behind, so no node can be blamed. `limit`, `silence`: seconds.
    `hardware`: the blamed machine is known to be broken (to the simulator only: a real run does not query the machine after a hang).
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
    """Machines that no longer answer; several at once if they share a rack, a switch or a power supply."""

    kind: ClassVar[str] = "nodes_lost"
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Nonfinite(Observation):
    """NaN or Inf in a gradient. `elsewhere`: another replica's result for the same microbatch, once that replica has computed it."""

    kind: ClassVar[str] = "nonfinite"
    slot: int
    node: str
    rank: int | None
    name: str
    elsewhere: Literal["not asked", "reproduced", "clean", "nobody to ask"] = "not asked"


NUMERICS = "Lower optimizer.lr, lengthen optimizer.warmup, or set train.z_loss."
"""Advice if the numbers are not finite on any replica."""


@dataclass(frozen=True, kw_only=True)
class StateCorrupt(Observation):
    """A rank's live state has a wrong digest: it changed between updates, or differs from an intact replica's or from the recomputed
    update."""

    kind: ClassVar[str] = "state_corrupt"
    slot: int
    node: str
    rank: int | None
    where: Literal["at rest", "replica", "update"] = "at rest"


@dataclass(frozen=True, kw_only=True)
class CopyCorrupt(Observation):
    """A copy to restore has a wrong digest, or is missing. `slot` None: the whole copy."""

    kind: ClassVar[str] = "copy_corrupt"
    tier: Tier
    copy_step: int
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CopyAway(Observation):
    """A copy to restore is temporarily unreadable, but may be intact. `slot` None: the whole copy."""

    kind: ClassVar[str] = "copy_away"
    tier: Tier
    copy_step: int
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class GradientWrong(Observation):
    """Two replicas got different gradients from the same microbatch. States up to `good_step` are known to be right. With one suspect,
    a third computation identified it. With two suspects, it is unknown which of the two computed wrongly.
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
    """The scheduler takes a node away in `grace` seconds. `rank`: the rank that got the signal; None: the node's agent got it."""

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
    """A copy could not be written: the disk is full, or the store unreachable."""

    kind: ClassVar[str] = "save_failed"
    tier: Tier
    error: str


@dataclass(frozen=True, kw_only=True)
class SaveWorks(Observation):
    """A tier that failed can be written again."""

    kind: ClassVar[str] = "save_works"
    tier: Tier


@dataclass(frozen=True, kw_only=True)
class DataDamaged(Observation):
    """A shard of the training data is missing or altered. `other_copy`: the folder from which the shard was read instead; None: no copy
    is intact."""

    kind: ClassVar[str] = "data_damaged"
    shard: str
    error: str
    other_copy: str | None = None


@dataclass(frozen=True, kw_only=True)
class NotThisRun(Observation):
    """A rank was to resume from a file that does not belong to this run: the file changed since the command began, or is another run's
    checkpoint."""

    kind: ClassVar[str] = "not_this_run"
    error: str


@dataclass(frozen=True, kw_only=True)
class StoreAway(Observation):
    """A folder or file that the run has used is unreachable: its file system is unavailable, or it was moved. It may be intact."""

    kind: ClassVar[str] = "store_away"
    path: str
    error: str


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Observation):
    """A node asks to join: a new one, or one that is back from repair. A quarantined node must pass a health check first."""

    kind: ClassVar[str] = "node_joined"
    node: str


@dataclass(frozen=True, kw_only=True)
class HealthChecked(Observation):
    """Result of `megalith doctor` on a node; `text`: the failed checks. `there` False: the node no longer answers."""

    kind: ClassVar[str] = "health_checked"
    node: str
    passed: bool
    there: bool = True
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Ordered(Observation):
    """A person gives the run an order: to save now, to stop after this step, or to remove a `node`."""

    kind: ClassVar[str] = "ordered"
    what: Literal["save", "stop", "quarantine"]
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Waited(Observation):
    """The time given by a `Wait` is over, and no node has joined."""

    kind: ClassVar[str] = "waited"


OBSERVATIONS = Family(Observation, place=2)
load, dump = OBSERVATIONS.load, OBSERVATIONS.dump


_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?|/[^\s'\"]+")


def signature(text: str) -> str:
    """Return the common part of similar failures: the text without numbers, addresses and paths."""
    return _VARYING.sub("#", text.strip().partition("\n")[0])[:200]


def of_failure(failure: Failure, *, time: float, step: int, slot: int, node: str) -> RankFailed:
    """Classify a rank's end as an observation. A rank's own Python error is blamed on the program, unless the error reports a device
    fault. Any other end is blamed on the node until there is more evidence."""
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
