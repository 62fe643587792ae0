"""Observations of faults and recoveries: the policy's evidence, as plain values that can be stored as JSON.

Every observation has `time` (seconds since the epoch, or in the simulation) and `step` (the number of finished steps). A `slot`
is a set of ranks in the mesh that always run on one node; a `node` is the machine on which they run now.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from megalith.fleet.causes import Failure
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.tiers import Tier
from megalith.tagged import Family


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Base of all observations. `kind` is the name of the class in JSON."""

    kind: ClassVar[str] = ""
    time: float = 0.0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Started(Observation):
    """The supervisor has started, for the first time or after a failure of its own, and no rank runs yet."""

    kind: ClassVar[str] = "started"


@dataclass(frozen=True, kw_only=True)
class Progressed(Observation):
    """The ranks have finished a step in this generation. `step` is the number of finished steps, including this one."""

    kind: ClassVar[str] = "progressed"


@dataclass(frozen=True, kw_only=True)
class RankFailed(Observation):
    """A rank's process failed. `signature`: text that is equal for similar failures. `hardware`: the machine reported a fault of
    its own. `blamed`: whether the node counts as the cause, as it does for fatal signals and faults reported by the machine, but
    not for an exception of the program.
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
    """No rank makes progress. `slot` None: no single rank is the last one, so no node can be blamed. `limit`, `silence`: seconds.
    `hardware`: the blamed machine is broken; only the simulator knows this, because a real run does not query the machine after a
    hang.
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
    """Machines no longer answer. Several machines are lost at once if they share a rack, a switch or a power supply."""

    kind: ClassVar[str] = "nodes_lost"
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Nonfinite(Observation):
    """NaN or Inf in a gradient. `elsewhere`: what another replica computed from the same microbatch, if it was asked."""

    kind: ClassVar[str] = "nonfinite"
    slot: int
    node: str
    rank: int | None
    name: str
    elsewhere: Literal["not asked", "reproduced", "clean", "nobody to ask"] = "not asked"


NUMERICS = "Lower optimizer.lr, lengthen optimizer.warmup, or set train.z_loss."
"""Advice for the user if a gradient is not finite, and no replica computes a finite one."""


@dataclass(frozen=True, kw_only=True)
class StateCorrupt(Observation):
    """The state in a rank's memory has a wrong digest: it changed between two updates, or it differs from an intact replica's
    state or from a recomputed update."""

    kind: ClassVar[str] = "state_corrupt"
    slot: int
    node: str
    rank: int | None
    where: Literal["at rest", "replica", "update"] = "at rest"


@dataclass(frozen=True, kw_only=True)
class CopyCorrupt(Observation):
    """A copy of the state that was to be restored has a wrong digest or is missing. `slot`: the damaged part; None: the whole
    copy."""

    kind: ClassVar[str] = "copy_corrupt"
    tier: Tier
    copy_step: int
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CopyAway(Observation):
    """A copy of the state that was to be restored is temporarily unreadable, but may be intact. `slot`: the unreadable part;
    None: the whole copy."""

    kind: ClassVar[str] = "copy_away"
    tier: Tier
    copy_step: int
    slot: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class GradientWrong(Observation):
    """Two replicas computed different gradients from the same microbatch. States up to `good_step` were verified. If there is one
    suspect, a third computation has identified it. If there are two suspects, it is not known which of them is wrong.
    """

    kind: ClassVar[str] = "gradient_wrong"
    good_step: int
    suspects: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Straggler(Observation):
    """A node's ranks compute `ratio` times as long as the median rank. `lost`: seconds that the run has lost through this node so
    far; `replacing`: seconds that its replacement would take."""

    kind: ClassVar[str] = "straggler"
    slot: int
    node: str
    rank: int | None
    ratio: float
    lost: float
    replacing: float


@dataclass(frozen=True, kw_only=True)
class Preempted(Observation):
    """The scheduler takes a node away in `grace` seconds. `rank`: the rank that received the scheduler's signal; None: the node's
    agent received it."""

    kind: ClassVar[str] = "preempted"
    node: str
    rank: int | None = None
    grace: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Saved(Observation):
    """The ranks stopped together at the end of a step, as `SaveState` ordered, and a copy of their state exists."""

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
    """A tier to which copies could not be written can be written again."""

    kind: ClassVar[str] = "save_works"
    tier: Tier


@dataclass(frozen=True, kw_only=True)
class DataDamaged(Observation):
    """A shard of the training data is missing or altered. `other_copy`: the folder from which the shard was read in its place;
    None: no copy of the data has an intact shard."""

    kind: ClassVar[str] = "data_damaged"
    shard: str
    error: str
    other_copy: str | None = None


@dataclass(frozen=True, kw_only=True)
class NotThisRun(Observation):
    """A rank found a file that does not belong to this run: the file changed after the command had begun, or it is another run's
    checkpoint; or a site found that another site trains another run. `code`: exit status that the run should have."""

    kind: ClassVar[str] = "not_this_run"
    error: str
    code: int = ExitCode.FAILED.value


@dataclass(frozen=True, kw_only=True)
class StoreAway(Observation):
    """A folder or file that the run has used cannot be accessed: its file system is unavailable, or it was moved. It may be
    intact."""

    kind: ClassVar[str] = "store_away"
    path: str
    error: str


@dataclass(frozen=True, kw_only=True)
class NodeJoined(Observation):
    """A node asks to join: a new node, or one that is back from repair. If the node is quarantined, it must first pass a health
    check."""

    kind: ClassVar[str] = "node_joined"
    node: str


@dataclass(frozen=True, kw_only=True)
class HealthChecked(Observation):
    """Result of a health check of a node. `text`: the failed checks. `there`: whether the node still answers."""

    kind: ClassVar[str] = "health_checked"
    node: str
    passed: bool
    there: bool = True
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Ordered(Observation):
    """A person gives the run an order: to save now, to stop after this step, or to remove a `node`. A callback can order a stop."""

    kind: ClassVar[str] = "ordered"
    what: Literal["save", "stop", "quarantine"]
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class Waited(Observation):
    """The time limit of a `Wait` is over, and no node has joined."""

    kind: ClassVar[str] = "waited"


OBSERVATIONS = Family(Observation, place=2)
load, dump = OBSERVATIONS.load, OBSERVATIONS.dump


_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?|/[^\s'\"]+")


def signature(text: str) -> str:
    """Return a failure's text with `#` in place of numbers, addresses and paths, which is equal for similar failures."""
    return _VARYING.sub("#", text.strip().partition("\n")[0])[:200]


def of_failure(failure: Failure, *, time: float, step: int, slot: int, node: str) -> RankFailed:
    """Convert a rank's failure to an observation. A Python error is blamed on the program, unless it reports a device fault. Any
    other failure is blamed on the node."""
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
