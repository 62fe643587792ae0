"""State that the policy keeps between decisions, and the type of a decision."""

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
    """The whole memory of the policy. The caller refreshes `copies` before each decision; all other fields change only through
    `decide`. `placement`: the node of each slot. `bad`: pieces with a wrong digest, as (tier, step, slot or None for all), which no
    refresh of `copies` brings back. By node: `faults`: the times of faults blamed on it; `quarantined`: the time since which it is
    excluded; `failed_checks`: its failed health checks in a row. `repeats`: counts of failures by "signature @ step". `reruns`: counts
    of a step's repetitions in place. `restored`: the copy from which this generation began. `fruitless`: the number of starts since the
    last finished step. `leaving`: nodes to exclude once the state is saved. `damaged`: the known damage of the data. `least`: the
    number of nodes that the fallback plan needs. `away`: since when the copy to restore is unreadable.
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
    """Commands in order of execution, and their reason. `blamed`: the node at fault; None if no node is at fault, or it is unknown."""

    commands: tuple[Order, ...]
    state: State
    reason: str
    blamed: str | None = None
    blamed_rank: int | None = None


_STATES: TypeAdapter[State] = TypeAdapter(State)


def dump(state: State) -> dict[str, Any]:
    """Return a state as JSON, so that a restarted supervisor can continue its counts."""
    return _STATES.dump_python(state, mode="json")


def load(record: dict[str, Any]) -> State:
    """Read a state that `dump` wrote. Raises pydantic's ValidationError for any other text."""
    return _STATES.validate_python(record)
