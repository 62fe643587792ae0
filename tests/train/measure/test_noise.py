"""Norms before the reduction equal those of each part's gradient, under any plan in which parts exist, and cost no message."""

from typing import Any

import pytest
import torch

from megalith.prove.parity import RandomText, reference
from megalith.spec.noise import parts
from megalith.spec.run import RunSpec
from megalith.train.batches import indices
from megalith.train.step import train_step
from tests.full import sampled
from tests.parallel.running import trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

pytestmark = pytest.mark.slow

PLANS: list[dict[str, Any]] = [
    {"zero": 2},
    {"data": 2, "zero": 3},
    {"data": 2, "replicate": 2, "zero": 2},
    {"data": 4},
    {"data": 2, "tensor": 2, "zero": 2},
    {"data": 2, "pipeline": 2, "zero": 2},
    {"pipeline": 2, "data": 2, "zero": 1, "schedule": "zb-h2", "post_validation": True},
]


def run(plan: dict[str, Any], **more: Any) -> RunSpec:
    return tiny_run(plan=plan, train={"global_batch": 8, "steps": 1}, **more)


def _measured(rank: int, spec: RunSpec) -> tuple[float, float, frozenset[str]]:
    trainer, text = trainer_of(spec), RandomText(spec)
    mine = indices(spec, first=0, data_rank=trainer.groups.coordinates["data"])
    done = train_step(trainer, [text.batch(numbers) for numbers in mine], step=0)
    assert done.noise is not None
    names: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, trainer.noise.names)
    return done.noise.signal, done.noise.noise, frozenset().union(*names)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@sampled(3)
def test_it_is_that_of_the_gradients_of_single_sequences(plan: dict[str, Any]):
    spec = run(plan)
    alone = reference(run({}), device=torch.device("cpu")).microbatches
    count = parts(spec.plan, spec.microbatches)
    rows = [indices(spec, first=0, data_rank=rank) for rank in range(spec.plan.data)]
    sets = (
        [list(numbers) for each in rows for numbers in each]
        if count == 8
        else [[n for part in each for n in part] for each in rows]
    )
    for signal, noise, names in run_ranks(_measured, spec.plan.ranks, spec):
        assert names <= alone[0].keys() and (plan.get("tensor") or names == alone[0].keys())
        whole = {name: sum(each[name] for each in alone) for name in names}
        large = float(sum(grad.double().square().sum() for grad in whole.values()))
        each = [sum(float(sum(alone[n][name] for n in part).double().square().sum()) for name in names) for part in sets]  # type: ignore[union-attr]
        small = count * sum(each)
        b, batch = 8 / count, 8
        assert signal == pytest.approx((batch * large - b * small) / (batch - b), rel=1e-4)
        assert noise == pytest.approx((small - large) / (1 / b - 1 / batch), rel=1e-4)


def _absent(rank: int, spec: RunSpec) -> Any:
    trainer, text = trainer_of(spec), RandomText(spec)
    mine = indices(spec, first=0, data_rank=trainer.groups.coordinates["data"])
    return train_step(trainer, [text.batch(numbers) for numbers in mine], step=0).noise


@pytest.mark.parametrize("plan", [{}, {"context": 2, "data": 2}], ids=str)
def test_a_plan_that_does_not_show_it_has_none(plan: dict[str, Any]):
    spec = run(plan)
    assert run_ranks(_absent, spec.plan.ranks, spec) == [None] * spec.plan.ranks


def test_experts_are_left_out():
    spec = run(
        {"data": 2, "expert": 2},
        model={
            "preset": "mixtral-8x7b",
            "layers": 1,
            "dim": 32,
            "heads": 2,
            "kv_heads": 2,
            "ffn": 16,
            "vocab": 96,
            "head_dim": 16,
        },
    )
    for signal, noise, names in run_ranks(_measured, 2, spec):
        assert names and not any(".experts." in name for name in names)
        assert noise > 0 and signal == signal
