"""A sharded stage has the names, global shapes and first values of the plain stage."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.parallel.apply import Builder
from megalith.parallel.data import Weight, local
from megalith.prove.meter import Meter
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
    builder = Builder(spec.model.build(), plan=spec.plan, groups=groups, precision="fp32", device=CPU, seed=5)
    builder.build(first, last)
    dist.barrier()  # a rank that ended now would break another rank's connection to it
    return {name: w.master.full_tensor().detach() for name, w in builder.by_name.items() if isinstance(w.master, DTensor)}


@pytest.mark.slow
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


EXPERTS: list[dict[str, Any]] = [{"data": 2, "expert": 2}, {"tensor": 2, "expert_tensor": 2}]
MIXTURE = {"family": "mixtral", "experts": 8, "active": 2, "ffn": 64}


def _drawn(rank: int) -> list[tuple[dict[str, Tensor], int, int]]:
    """Return for each plan the whole weights, the most elements held while building, and the elements of this rank's share."""
    found = []
    for plan in EXPERTS:
        spec = tiny_run(plan=plan, model=MIXTURE)
        builder = Builder(spec.model.build(), plan=spec.plan, groups=mesh_groups(spec, CPU), precision="fp32", device=CPU, seed=5)
        with Meter() as meter:
            builder.build(2, 3)
        held = {name: w for name, w in builder.by_name.items() if ".experts." in name}
        whole = {name: full(w) for name, w in held.items()}
        found.append((whole, meter.memory().building, sum(w.compute.numel() for w in held.values()) * 4))
        dist.barrier()
    return found


def full(weight: Weight) -> Tensor:
    assert isinstance(weight.master, DTensor)
    return weight.master.full_tensor().detach()


@pytest.mark.slow
def test_experts_start_as_in_the_plain_model_and_no_rank_draws_those_of_others():
    expected = stage(tiny_run(model=MIXTURE).model, 2, 3, seed=5).parameters_by_name()
    for plans in run_ranks(_drawn, 2):
        for whole, most, share in plans:
            assert all(torch.equal(weight, expected[name]) for name, weight in whole.items()) and whole
            assert most < 1.6 * share  # the rest is small; the other rank's experts would be as large again


def _most_held(rank: int) -> tuple[int, int, int]:
    """Return the most weight elements on this rank while its stage was built, those of the whole model, and those of its largest
    part."""
    spec = tiny_run(plan={"data": 2, "zero": 3}, model={"layers": 12})
    groups, held, sizes = mesh_groups(spec, CPU), list[int](), list[int]()
    builder = Builder(spec.model.build(), plan=spec.plan, groups=groups, precision="fp32", device=CPU, seed=None)
    empty = nn.Module.to_empty

    def watched(self: nn.Module, **options: Any) -> nn.Module:
        faces = [t for w in builder.by_name.values() for t in (local(w.master.detach()), w.compute)]
        earlier = sum(face.untyped_storage().nbytes() // face.element_size() for face in faces)
        empty(self, **options)
        sizes.append(sum(p.numel() for p in self.parameters()))
        held.append(earlier + sizes[-1])
        return self

    nn.Module.to_empty = watched  # pyright: ignore[reportAttributeAccessIssue]  # this process ends with the function
    builder.build(0, 14)
    dist.barrier()
    return max(held), sum(sizes), max(sizes)


@pytest.mark.slow
def test_a_rank_never_holds_more_than_its_share_and_one_whole_part():
    for most, whole, part in run_ranks(_most_held, 2):
        assert part < whole / 8
        assert most <= whole / 2 + part
