"""What a rank does, and in which order: actions, rows of them, and the schedule they make. Data only, with a text form.

Stages are global numbers (0 .. stages-1), microbatches are numbers within one step. As text an action is stage, kind, microbatch:
`0F3`, `7W0`, `1RECV_F0`, `2GATHER` (a stage's weights belong to no microbatch), and two computations that share a slot are
`(0F7;7B3)`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias, cast, get_args

Computation: TypeAlias = Literal["F", "B", "I", "W"]
"""F forward; B full backward; I and W its two halves: the gradient of the stage's input, and of its weights."""

Communication: TypeAlias = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "REDUCE"]
"""Activations (F) and gradients (B) between stages; gathering a stage's weights and reducing its gradients among data ranks."""

Kind: TypeAlias = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "REDUCE"]

COMPUTATIONS: frozenset[str] = frozenset(get_args(Computation))
MESSAGES: frozenset[str] = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
COLLECTIVES: frozenset[str] = frozenset({"GATHER", "REDUCE"})

_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|GATHER|REDUCE)(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does. `microbatch` is None for GATHER and REDUCE only: they move what a stage owns.

    SEND_F and RECV_B stand at the upstream end of a border between stages, RECV_F and SEND_B at its downstream end: the message
    `0SEND_F3` is received as `1RECV_F3`, and `1SEND_B3` as `0RECV_B3`.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A slot in which two computations run together, so that one computes while the other communicates."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first};{self.second})"


Slot: TypeAlias = Action | Overlap
Row: TypeAlias = tuple[Slot, ...]


def parse(text: str) -> Slot:
    """The action or overlap a text stands for; the inverse of `str`. Raises ValueError on anything else."""
    if text.startswith("(") and text.endswith(")"):
        halves = [parse(half) for half in text[1:-1].split(";")]
        match halves:
            case [Action() as first, Action() as second] if {first.kind, second.kind} <= COMPUTATIONS:
                return Overlap(first, second)
        raise ValueError(f"{text!r} is not an overlap: write two computations, such as (0F7;7B3)")
    found = _TEXT.fullmatch(text)
    if found is None or (found[2] in COLLECTIVES) != (found[3] == ""):
        raise ValueError(f"{text!r} is not an action: write stage, kind and microbatch, such as 0F3, 1RECV_F0 or 2GATHER")
    return Action(cast(Kind, found[2]), int(found[1]), int(found[3]) if found[3] else None)


def format_row(row: Row) -> str:
    """A row as one line of text."""
    return " ".join(map(str, row))


def parse_row(text: str) -> Row:
    """The row a line of text stands for; the inverse of `format_row`."""
    return tuple(parse(word) for word in text.split())


def parts(slot: Slot) -> tuple[Action, ...]:
    """The actions in a slot: one, or the two that overlap."""
    return (slot.first, slot.second) if isinstance(slot, Overlap) else (slot,)


def computations(row: Row) -> Iterator[Action]:
    """The computations of a row in order."""
    return (action for slot in row for action in parts(slot) if action.kind in COMPUTATIONS)


@dataclass(frozen=True)
class Schedule:
    """Computation and its order on each pipeline rank, and which rank holds which stage. Communication is added by `lower`.

    `rows[r]` is what pipeline rank r computes; `placement[s]` is the rank that holds stage s (any map: loops, V shapes).
    """

    name: str
    rows: tuple[Row, ...]
    stages: int
    microbatches: int
    placement: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.placement) == self.stages, (self.placement, self.stages)
        assert set(self.placement) == set(range(len(self.rows))), (self.placement, len(self.rows))
        kinds = {action.kind for row in self.rows for slot in row for action in parts(slot)}
        assert kinds <= COMPUTATIONS, f"a schedule holds computation only, not {kinds - COMPUTATIONS}"

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rows)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages pipeline rank `rank` holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """The placement that deals stages to ranks in turn, `chunks` times over: stage s on rank s % ranks."""
    return tuple(range(ranks)) * chunks


def steps(kind: Computation, stages: tuple[int, ...], microbatches: range) -> Row:
    """One kind of computation for each stage in turn, over all `microbatches` of it."""
    return tuple(chain.from_iterable((Action(kind, stage, i) for i in microbatches) for stage in stages))
