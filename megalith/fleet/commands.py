"""What the policy can order. Plain values that survive JSON; whoever runs the ranks, or simulates them, obeys them in order."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from megalith.fleet.tiers import Source, Tier


@dataclass(frozen=True)
class RerunStep:
    """Compute this step again in the same processes, from the state they hold. `ask_another`: a replica computes it as well."""

    step: int
    ask_another: bool = True
    kind: Literal["rerun_step"] = "rerun_step"


@dataclass(frozen=True)
class Restart:
    """End all ranks, wait, and start a new generation on `placement` (the node of each slot) from `source`."""

    source: Source
    placement: tuple[str, ...]
    after: float = 0.0
    kind: Literal["restart"] = "restart"


@dataclass(frozen=True)
class Replace:
    """Give a slot to another node; its logical ranks, and so the arithmetic, stay the same."""

    slot: int
    node: str
    spare: str
    kind: Literal["replace"] = "replace"


@dataclass(frozen=True)
class RollBack:
    """Newer copies than `source` are not to be used."""

    source: Source
    because: str
    kind: Literal["roll_back"] = "roll_back"


@dataclass(frozen=True)
class QuarantineNode:
    """Start nothing on a node until it has passed a health check."""

    node: str
    because: str
    kind: Literal["quarantine_node"] = "quarantine_node"


@dataclass(frozen=True)
class CheckHealth:
    """Run the doctor on a node that is outside the mesh, `after` seconds from now."""

    node: str
    after: float = 0.0
    kind: Literal["check_health"] = "check_health"


@dataclass(frozen=True)
class QuarantineCopy:
    """Never restore from a copy; one in memory or on a node's disk is also set aside, for a person to look at. A checkpoint in the store
    lies where it is until that step is saved again. `slot` None: all pieces."""

    tier: Tier
    step: int
    slot: int | None
    kind: Literal["quarantine_copy"] = "quarantine_copy"


@dataclass(frozen=True)
class Wait:
    """End all ranks, keep what memory holds, and wait for a node for at most `seconds`."""

    seconds: float
    slots: tuple[int, ...]
    kind: Literal["wait"] = "wait"


@dataclass(frozen=True)
class Shrink:
    """Go on under the fallback plan on the nodes that are left. The result is no longer that of the plan, bit for bit."""

    source: Source
    nodes: tuple[str, ...]
    kind: Literal["shrink"] = "shrink"


@dataclass(frozen=True)
class Grow:
    """Enough nodes are there again: start a generation under the run's own plan."""

    source: Source
    placement: tuple[str, ...]
    kind: Literal["grow"] = "grow"


@dataclass(frozen=True)
class SaveState:
    """At the end of this step let all ranks agree to stop, and save the state, within `seconds`."""

    seconds: float
    kind: Literal["save_state"] = "save_state"


@dataclass(frozen=True)
class SkipTier:
    """Save nothing to a tier (`skip` False: again), and tell a person."""

    tier: Tier
    skip: bool
    because: str
    kind: Literal["skip_tier"] = "skip_tier"


@dataclass(frozen=True)
class ReadElsewhere:
    """Read a shard of data from another copy."""

    shard: str
    path: str
    kind: Literal["read_elsewhere"] = "read_elsewhere"


@dataclass(frozen=True)
class Stop:
    """End the run with an exit status (`fleet.exit_codes`) and a report for a person: what happened, what was tried, what to do."""

    code: int
    report: str
    kind: Literal["stop"] = "stop"


Command = (
    RerunStep | Restart | Replace | RollBack | QuarantineNode | CheckHealth | QuarantineCopy | Wait | Shrink | Grow | SaveState
    | SkipTier | ReadElsewhere | Stop
)  # fmt: skip

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])


def load(record: dict[str, Any]) -> Command:
    """The command a record holds. Raises pydantic's ValidationError for anything else."""
    return _COMMANDS.validate_python(record)


def dump(command: Command) -> dict[str, Any]:
    """A command as JSON can hold it."""
    return _COMMANDS.dump_python(command, mode="json")
