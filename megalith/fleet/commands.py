"""Commands and notes of which the recovery policy's decisions consist: plain values that can be stored as JSON."""

from dataclasses import dataclass
from typing import ClassVar

from megalith.fleet.tiers import Source, Tier
from megalith.tagged import Family


@dataclass(frozen=True)
class Command:
    """Base of the commands in a decision. The process that runs or simulates the ranks carries them out in order."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Note:
    """Base of the notes in a decision. A note requires no action; the placement and source of the next start already reflect
    it."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class RerunStep(Command):
    """Compute the same step again in the running processes, from their current state. `ask_another`: a replica computes the step
    too. In a live run, the ranks have repeated the step before the controller learns of it."""

    step: int
    ask_another: bool = True
    kind: ClassVar[str] = "rerun_step"


@dataclass(frozen=True)
class Restart(Command):
    """End all ranks, wait `after` seconds, and start all ranks again on `placement` (the node of each slot) from the copy `source`."""

    source: Source
    placement: tuple[str, ...]
    after: float = 0.0
    kind: ClassVar[str] = "restart"


@dataclass(frozen=True)
class Replace(Note):
    """Assign a slot to another node. The slot keeps its ranks, so results do not change."""

    slot: int
    node: str
    spare: str
    kind: ClassVar[str] = "replace"


@dataclass(frozen=True)
class RollBack(Note):
    """Never restore copies of the state that are newer than `source`."""

    source: Source
    because: str
    kind: ClassVar[str] = "roll_back"


@dataclass(frozen=True)
class QuarantineNode(Note):
    """Start no ranks on a node until the node has passed a health check."""

    node: str
    because: str
    kind: ClassVar[str] = "quarantine_node"


@dataclass(frozen=True)
class CheckHealth(Command):
    """Run the doctor on a node that is outside the mesh, `after` seconds from now."""

    node: str
    after: float = 0.0
    kind: ClassVar[str] = "check_health"


@dataclass(frozen=True)
class QuarantineCopy(Command):
    """Mark a copy of the state as unusable, so that it is never restored. A copy in memory or on a node's disk is also renamed,
    for inspection. A checkpoint in the store is not renamed: it stays, unused, until a checkpoint of that step is saved again.
    `slot` None: all pieces."""

    tier: Tier
    step: int
    slot: int | None
    kind: ClassVar[str] = "quarantine_copy"


@dataclass(frozen=True)
class Wait(Command):
    """End all ranks, keep the copies of the state in memory, and wait at most `seconds` for a node to join."""

    seconds: float
    slots: tuple[int, ...]
    kind: ClassVar[str] = "wait"


@dataclass(frozen=True)
class Shrink(Command):
    """Continue under the fallback plan on the remaining nodes. The results are no longer bitwise equal to those of the run's own
    plan."""

    source: Source
    nodes: tuple[str, ...]
    kind: ClassVar[str] = "shrink"


@dataclass(frozen=True)
class Grow(Command):
    """Continue under the run's own plan, because enough nodes are available again."""

    source: Source
    placement: tuple[str, ...]
    kind: ClassVar[str] = "grow"


@dataclass(frozen=True)
class SaveState(Command):
    """Order all ranks to save the state at the end of this step and to exit, within `seconds`."""

    seconds: float
    kind: ClassVar[str] = "save_state"


@dataclass(frozen=True)
class EndInOrder(Command):
    """End the run as on SIGTERM: all ranks finish this step, save the state, and exit."""

    kind: ClassVar[str] = "end_in_order"


@dataclass(frozen=True)
class SkipTier(Command):
    """Stop saving copies to a tier (`skip` False: resume saving), and notify a person."""

    tier: Tier
    skip: bool
    because: str
    kind: ClassVar[str] = "skip_tier"


@dataclass(frozen=True)
class ReadElsewhere(Command):
    """Read a shard from another copy of the training data."""

    shard: str
    path: str
    kind: ClassVar[str] = "read_elsewhere"


@dataclass(frozen=True)
class Stop(Command):
    """End the run with an exit status (`fleet.exit_codes`) and a report for the user: the cause, the attempts, and the way
    out."""

    code: int
    report: str
    kind: ClassVar[str] = "stop"


Order = Command | Note
"""One entry of a decision."""

ORDERS: Family[Order] = Family(Command, Note)
load, dump = ORDERS.load, ORDERS.dump
