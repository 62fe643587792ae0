"""State that the recovery policy keeps between decisions, and the type of a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from megalith.fleet.commands import Order
from megalith.fleet.tiers import BEGINNING, Copy, Source, Tier

VACANT = ""
"""Value of `State.placement` for a slot that no node fills."""


@dataclass(frozen=True)
class State:
    """Complete state of the policy. The caller refreshes `copies` before each decision; only `decide` changes other fields.

    `placement`: the node of each slot. `bad`: pieces of copies with a wrong digest, as (tier, step, slot or None for all), which are never
    used even if `copies` still has them. `faults`: the times of faults blamed on each node. `quarantined`: the time at which each excluded
    node was excluded. `failed_checks`: consecutive failed health checks of each node. `repeats`: counts of failures by "signature @ step".
    `reruns`: how often each step was repeated in place. `restored`: the copy that this generation restored. `fruitless`: number of starts
    since the last finished step. `leaving`: nodes to exclude once the state is saved. `damaged`: errors in the data, already reported.
    `least`: number of nodes that the fallback plan needs. `away`: the time since which the copy to restore, or storage, is unavailable.
    """

    placement: tuple[str, ...]
    spares: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()
    bad: tuple[tuple[Tier, int, int | None], ...] = ()
    faults: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    quarantined: Mapping[str, float] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    reruns: Mapping[int, int] = field(default_factory=dict)
    failed_checks: Mapping[str, int] = field(default_factory=dict)
    restored: Source = BEGINNING
    fruitless: int = 0
    waiting: bool = False
    shrunk: bool = False
    skipped: tuple[Tier, ...] = ()
    leaving: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    least: int = 1
    away: float | None = None
    stopped: bool = False

    @property
    def vacant(self) -> tuple[int, ...]:
        """Slots without a node."""
        if VACANT not in self.placement:  # the usual case, a thousand times faster than the loop
            return ()
        return tuple(slot for slot, node in enumerate(self.placement) if node == VACANT)

    def slot(self, node: str) -> int | None:
        """Return the slot that a node fills."""
        return self.placement.index(node) if node in self.placement else None


@dataclass(frozen=True)
class Decision:
    """Commands in order of execution, and their reason. `blamed`: the node at fault; None if none is, or if it is not known."""

    commands: tuple[Order, ...]
    state: State
    reason: str
    blamed: str | None = None
    blamed_rank: int | None = None


_STATES: TypeAdapter[State] = TypeAdapter(State)


def dump(state: State) -> dict[str, Any]:
    """Return a state as JSON, so that a restarted controller can continue from it."""
    return _STATES.dump_python(state, mode="json")


def load(record: dict[str, Any]) -> State:
    """Read a state that `dump` wrote. Raises pydantic's ValidationError for any other record."""
    return _STATES.validate_python(record)
