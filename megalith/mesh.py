"""Rank <-> axes. Pure arithmetic, no torch: the trainer, the checker and the planner place ranks by the same rule.

Axes from slowest to fastest varying: `pipeline`, `copies`, `shards`, `tensor`. Neighbouring ranks share the fastest links, and
tensor parallelism needs them most; pipeline stages exchange least, so they sit furthest apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megalith.spec.plan import Plan

AXES = ("pipeline", "copies", "shards", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, in AXES order. `copies * shards` are the data ranks."""

    pipeline: int = 1
    copies: int = 1
    shards: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, plan: Plan) -> "Mesh":
        """The mesh a plan asks for."""
        return cls(plan.pipeline, plan.copies, plan.shards, plan.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        return prod(self.shape)

    @property
    def data(self) -> int:
        return self.copies * self.shards

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis, and `data`, its place among the data ranks."""
        assert 0 <= rank < self.ranks, (rank, self)
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES} | {"data": found["copies"] * self.shards + found["shards"]}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank that stands at `coordinates` (axes not named are 0)."""
        number = 0
        for axis, size in zip(AXES, self.shape, strict=True):
            number = number * size + coordinates.get(axis, 0)
        return number
