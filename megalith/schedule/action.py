"""Actions of ranks, rows of actions, and schedules made of such rows: plain data with a text form.

Stages are global numbers (0 .. stages-1), microbatches are numbers within one step. The text of an action is its stage, its kind
and its microbatch, such as `0F3`, `7W0`, `1RECV_F0` or `0FETCH1`; `2GATHER` has no microbatch, because a stage's weights belong
to none. Two computations that share an entry are written as `(0F7;7B3)`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

Computation: TypeAlias = Literal["F", "B", "I", "W"]
"""F is a forward, B a full backward. I and W are the halves of a backward: I computes the gradient of the stage's input, W those
of its weights."""

Communication: TypeAlias = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "REDUCE"]
"""Messages between stages with activations (F) or gradients (B), and collectives among data ranks: gathers of a stage's weights
and reductions of its gradients."""

Transfer: TypeAlias = Literal["OFFLOAD", "FETCH"]
"""Movement of the tensors that a forward keeps for its backward: away from the device, and back."""

Kind: TypeAlias = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "REDUCE", "OFFLOAD", "FETCH"]

COMPUTATIONS: frozenset[str] = frozenset(get_args(Computation))
MESSAGES: frozenset[str] = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
COLLECTIVES: frozenset[str] = frozenset({"GATHER", "REDUCE"})
TRANSFERS: frozenset[str] = frozenset(get_args(Transfer))

_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|GATHER|REDUCE|OFFLOAD|FETCH)(\d*)")


class Action(NamedTuple):  # a tuple, since large programs make and look up a million of them
    """One action of a rank. Only GATHER and REDUCE have no `microbatch` (None), because they communicate the weights or gradients
    of a stage.

    SEND_F and RECV_B are actions of the earlier of two neighbouring stages, RECV_F and SEND_B of the later one: the message `0SEND_F3` is
    received as `1RECV_F3`, and `1SEND_B3` as `0RECV_B3`.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """An entry with two computations that run at the same time, so that one computes while the other communicates."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first};{self.second})"


RowEntry: TypeAlias = Action | Overlap
Row: TypeAlias = tuple[RowEntry, ...]


def parse(text: str) -> RowEntry:
    """Parse a text as an action or overlap; the inverse of `str`. Raises ValueError on any other text."""
    if text.startswith("(") and text.endswith(")"):
        halves = [parse(half) for half in text[1:-1].split(";")]
        match halves:
            case [Action() as first, Action() as second] if {first.kind, second.kind} <= COMPUTATIONS:
                return Overlap(first, second)
        raise ValueError(f"{text!r} is not an overlap: write it as two computations, such as (0F7;7B3)")
    found = _TEXT.fullmatch(text)
    if found is None or (found[2] in COLLECTIVES) != (found[3] == ""):
        raise ValueError(f"{text!r} is not an action: write it as stage, kind and microbatch, such as 0F3, 1RECV_F0 or 2GATHER")
    return Action(cast(Kind, found[2]), int(found[1]), int(found[3]) if found[3] else None)


def format_row(row: Row) -> str:
    """Return a row as one line of text."""
    return " ".join(map(str, row))


def parse_row(text: str) -> Row:
    """Parse a line of text as a row; the inverse of `format_row`."""
    return tuple(parse(word) for word in text.split())


def parts(entry: RowEntry) -> tuple[Action, ...]:
    """Return the actions of an entry: one, or two that overlap."""
    return (entry.first, entry.second) if isinstance(entry, Overlap) else (entry,)


def number(action: Action) -> int:
    """Return the microbatch of a computation, message or transfer, which always have one."""
    assert action.microbatch is not None, action
    return action.microbatch


def computations(row: Row) -> Iterator[Action]:
    """Return the computations of a row in order."""
    return (action for entry in row for action in parts(entry) if action.kind in COMPUTATIONS)


@dataclass(frozen=True)
class Schedule:
    """The computations of each pipeline rank in order, and the rank of each stage. `lower` adds communication.

    `rows[r]` is what pipeline rank r computes; `placement[s]` is the rank that holds stage s (any map, such as a loop or a V). In
    a bidirectional schedule, the microbatches with the number `mirrored` and above run through the ranks in the other direction.
    For mirrored microbatches, stage s is on rank `ranks - 1 - placement[s]`, so every stage has two copies.
    """

    name: str
    rows: tuple[Row, ...]
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    mirrored: int | None = None

    def __post_init__(self) -> None:
        assert len(self.placement) == self.stages, (self.placement, self.stages)
        holders = {rank for stage in range(self.stages) for rank in self.holders(stage)}
        assert holders == set(range(self.ranks)), (self.placement, self.ranks)
        kinds = {action.kind for row in self.rows for entry in row for action in parts(entry)}
        assert kinds <= COMPUTATIONS, (
            f"a schedule holds computations only, but this one has {kinds - COMPUTATIONS}; `lower` adds communication"
        )

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rows)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that computes this microbatch of a stage."""
        holder = self.placement[stage]
        return holder if self.mirrored is None or microbatch < self.mirrored else self.ranks - 1 - holder

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a copy of a stage: one rank, or two in a bidirectional schedule."""
        holder = self.placement[stage]
        return (holder,) if self.mirrored is None else (holder, self.ranks - 1 - holder)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that pipeline rank `rank` holds, in order."""
        return tuple(stage for stage in range(self.stages) if rank in self.holders(stage))

    @cached_property
    def crossings(self) -> tuple[bool, ...]:
        """For each stage, True if the next stage is on another rank, so that the output must be sent; False for the last stage."""
        return (*(here != there for here, there in zip(self.placement, self.placement[1:], strict=False)), False)

    @cached_property
    def accumulates_in_order(self) -> bool:
        """True if every stage adds up its gradients in the order of the microbatches. All schedules that add up gradients in this order
        give the same bits. I completes the gradients of some weights, and W those of the others, so both I and W must be in order. Full
        backwards and I's, taken together, must be in order too, and so must full backwards and W's. Two copies of a stage have separate
        sums of gradients, which are added at the end in another order.
        """
        if self.mirrored is not None and self.mirrored < self.microbatches:
            return False
        for halves in (("B", "I"), ("B", "W")):
            latest = [-1] * self.stages
            for action in chain.from_iterable(map(computations, self.rows)):
                if action.kind in halves:
                    if number(action) < latest[action.stage]:
                        return False
                    latest[action.stage] = number(action)
        return True


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the placement that deals stages to the ranks in turn, `chunks` times: stage s is on rank s % ranks."""
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int) -> tuple[int, ...]:
    """Return the placement down the ranks and up again. Rank r holds stages r and 2 * ranks - 1 - r, so the first and the last
    stage are on the same rank."""
    return (*range(ranks), *reversed(range(ranks)))


def steps(kind: Computation, stages: tuple[int, ...], microbatches: range) -> Row:
    """Return computations of one kind: for each stage in turn, those of all microbatches."""
    return tuple(chain.from_iterable((Action(kind, stage, i) for i in microbatches) for stage in stages))


def renamed(row: Row, name: Callable[[Action], Action | None]) -> Row:
    """Replace every action of a row by `name` of the action, or remove the action if `name` returns None; if one half of an overlap is
    removed, the other half remains alone. A schedule stays valid when all actions of a microbatch are removed, because no microbatch waits
    for another one.
    """
    found: list[RowEntry] = []
    for entry in row:
        match [action for action in map(name, parts(entry)) if action is not None]:
            case [first, second]:
                found.append(Overlap(first, second))
            case [action]:
                found.append(action)
    return tuple(found)
