"""A laid out stage is the plain stage by its names, global shapes and first values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.parallel.apply import build_stage
from megalith.parallel.gradients import local
from megalith.train.assemble import mesh_groups
from tests.models.plain import stage
from tests.parallel.running import CPU
from tests.ranks import run_ranks
from tests.specs import tiny_run

PLANS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"data": 2, "zero": 3},
    {"data": 2, "zero": 0},
    {"pipeline": 2},
    {"data": 2, "tensor": 2, "zero": 2},
    {"data": 2, "pipeline": 2, "zero": 1},
]


def _whole(rank: int, plan: dict[str, Any], tied: bool) -> dict[str, Tensor]:
    spec = tiny_run(plan=plan, model={"tied": tied}, train={"seed": 5})
    groups = mesh_groups(spec, CPU)
    first, last = spec.plan.bounds(4)[groups.coordinates["pipeline"]]
    made = build_stage(spec.model.build(), first, last, plan=spec.plan, groups=groups, precision="fp32", device=CPU, seed=5)
    dist.barrier()  # a rank that ends while another still connects to it would fail that one
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in made.parameters_by_name().items()}


@pytest.mark.parametrize(("plan", "tied"), [*((plan, False) for plan in PLANS), *((PLANS[i], True) for i in (1, 3, 4))], ids=str)
def test_names_shapes_and_first_values_are_those_of_the_plain_model(plan, tied):
    spec = tiny_run(plan=plan, model={"tied": tied})
    expected = stage(spec.model, seed=5).parameters_by_name()
    found: dict[str, Tensor] = {}
    for part in run_ranks(_whole, spec.plan.ranks, plan, tied):
        for name, weight in part.items():
            assert torch.equal(weight, expected[name]), name
            found[name] = weight
    assert found.keys() == expected.keys()


def _most_held(rank: int) -> tuple[int, int, int]:
    """The most elements of weights on this rank while its stage was built; those of the whole model; those of its largest part."""
    spec = tiny_run(plan={"data": 2, "zero": 3}, model={"layers": 12})
    groups, parts, held, sizes = mesh_groups(spec, CPU), list[nn.Module](), list[int](), list[int]()
    empty = nn.Module.to_empty

    def watched(self: nn.Module, **options: Any) -> nn.Module:
        earlier = sum(local(p).numel() for part in parts for p in part.parameters())
        parts.append(empty(self, **options))
        sizes.append(sum(p.numel() for p in self.parameters()))
        held.append(earlier + sizes[-1])
        return self

    nn.Module.to_empty = watched  # pyright: ignore[reportAttributeAccessIssue]  # this process ends with the function
    build_stage(spec.model.build(), 0, 14, plan=spec.plan, groups=groups, precision="fp32", device=CPU, seed=None)
    dist.barrier()
    return max(held), sum(sizes), max(sizes)


def test_a_rank_never_holds_more_than_its_share_and_one_whole_part():
    for most, whole, part in run_ranks(_most_held, 2):
        assert part < whole / 8
        assert most <= whole / 2 + part
