"""Conversion between ranks and positions on mesh axes. The trainer, the checker and the planner place ranks by this arithmetic,
which needs no torch.

There are three views of the ranks. **Work**: the part of the computation that a rank does: its pipeline stages (`pipeline`),
samples (`data`), part of a sequence (`context`), part of each matrix product (`tensor`). **State**: the part of the dense
weights, gradients and moments that a rank keeps. **Experts**: the part of the experts' weights, gradients and moments that a rank
keeps; their layout differs from the dense one. In rank order, `pipeline` varies slowest and `tensor` fastest. Neighbouring ranks
share the fastest links, and tensor parallelism needs fast links most. Pipeline stages communicate least, so they are furthest
apart.

A bidirectional pipeline (DualPipe) keeps two copies of each stage, on rank p and on its mirror rank P - 1 - p. In the state view,
a rank and its mirror are one place with twice as many data ranks; `side` distinguishes the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

from megalith.spec.plan import Plan

WORK = ("pipeline", "data", "context", "tensor")
STATE = ("place", "dp_replicate", "dp_shard", "tensor")
EXPERTS = ("place", "dp_replicate", "dp_shard", "expert", "expert_tensor")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes. `sides` is 2 for a bidirectional pipeline. `replicate`: the number of whole copies of the state if it is
    `sharded`; if it is not, each data rank has a whole copy."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sides: int = 1
    replicate: int = 1
    sharded: bool = True

    @classmethod
    def of(cls, plan: Plan) -> "Mesh":
        """Return the mesh that a plan describes."""
        return cls(
            plan.pipeline, plan.data, plan.context, plan.tensor, plan.expert, plan.expert_tensor, plan.sides, plan.replicate, plan.zero > 0
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def work(self) -> tuple[int, ...]:
        """Sizes in WORK order."""
        return self.pipeline, self.data, self.context, self.tensor

    @property
    def state(self) -> tuple[int, ...]:
        """Sizes in STATE order."""
        dp_size = self.sides * self.data * self.context
        dp_replicate = self.replicate if self.sharded else dp_size
        return self.pipeline // self.sides, dp_replicate, dp_size // dp_replicate, self.tensor

    @property
    def experts(self) -> tuple[int, ...]:
        """Sizes in EXPERTS order."""
        dp_size = self.sides * self.data * self.context * self.tensor // (self.expert * self.expert_tensor)
        dp_replicate = gcd(self.replicate, dp_size) if self.sharded else max(1, dp_size)  # none hold them: `check` says so
        return self.pipeline // self.sides, dp_replicate, dp_size // dp_replicate, self.expert, self.expert_tensor

    @property
    def replica_shift(self) -> int:
        """The distance, in data ranks, to the next rank that has the same parts of weights and experts; 0 if there is no such
        rank. Data ranks that divide the experts among them count as one replica."""
        line = self.expert * self.expert_tensor
        shift = line // gcd(line, self.context * self.tensor)
        return shift if self.data % shift == 0 and shift < self.data else 0

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on each WORK axis; these determine its computations."""
        assert 0 <= rank < self.ranks, (rank, self)
        return _places(rank, WORK, self.work)

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank with these `coordinates` on the WORK axes; axes that are not named are 0."""
        return _number(coordinates, WORK, self.work)

    def place(self, rank: int) -> int:
        """Return the pipeline place of a rank. Ranks with the same place hold the same stages."""
        return self._place(self.coordinates(rank)["pipeline"])[0]

    def state_coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on each STATE axis; these determine its part of the dense state."""
        here = self.coordinates(rank)
        place, side = self._place(here["pipeline"])
        dp_shard = self.state[2]
        size = self.data // self.replicate if self.sharded else self.data
        group, within = divmod(here["data"], size)
        holder = ((group * self.sides + side) * size + within) * self.context + here["context"]
        return dict(zip(STATE, (place, *divmod(holder, dp_shard), here["tensor"]), strict=True))

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on each EXPERTS axis; these determine its part of the experts' state. The ranks of one
        expert-parallel group are consecutive in the work order, and have the same pipeline rank."""
        here = self.coordinates(rank)
        place, side = self._place(here["pipeline"])
        _, _, dp_shard, expert, expert_tensor = self.experts
        number = ((side * self.data + here["data"]) * self.context + here["context"]) * self.tensor + here["tensor"]
        number, part = divmod(number, expert_tensor)
        holder, owner = divmod(number, expert)
        return dict(zip(EXPERTS, (place, *divmod(holder, dp_shard), owner, part), strict=True))

    def _place(self, pipeline: int) -> tuple[int, int]:
        """Return the place and the side of a pipeline rank. A rank on side 1 has the place of the rank that it mirrors."""
        if self.sides == 1 or pipeline < self.pipeline // 2:
            return pipeline, 0
        return self.pipeline - 1 - pipeline, 1


def _places(number: int, axes: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        number, found[axis] = divmod(number, size)
    return {axis: found[axis] for axis in axes}


def _number(coordinates: Mapping[str, int], axes: tuple[str, ...], sizes: tuple[int, ...]) -> int:
    assert prod(sizes) > 0, sizes
    number = 0
    for axis, size in zip(axes, sizes, strict=True):
        number = number * size + coordinates.get(axis, 0)
    return number
