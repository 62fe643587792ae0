"""The global norm counts each element once, clipping uses it, and every rank names parameters that are not finite."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.models.stage import Stage
from megalith.parallel.gradients import LARGE, ROW, NotFinite, counted, local, scale, sum_of_squares
from megalith.train.assemble import Trainer
from megalith.train.stability.refusal import refusal
from megalith.train.step import compute, train_step
from tests.full import sampled
from tests.models.plain import stage
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

PLANS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence": False},
    *({"data": 2, "zero": zero} for zero in (0, 1, 3)),
    {"pipeline": 2},
    {"data": 4, "replicate": 2, "zero": 2},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "data": 2, "zero": 0},
    {"tensor": 2, "data": 2, "zero": 3},
]


def _counted(rank: int, plans: list[dict[str, Any]], tied: bool) -> list[int]:
    """Return the number of elements that this rank counts under each plan."""
    found = []
    for plan in plans:
        trainer = trainer_of(tiny_run(plan=plan, model={"layers": 2, "tied": tied}))
        names = counted(trainer.parameters, trainer.shared, trainer.groups)
        found.append(sum(local(trainer.parameters[name].detach()).numel() for name in names))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@sampled(1)
def test_every_element_of_the_model_is_counted_by_exactly_one_rank(ranks, tied):
    spec = tiny_run(model={"layers": 2, "tied": tied})
    plans = [plan for plan in PLANS if tiny_run(plan=plan).plan.ranks == ranks]
    elements = sum(p.numel() for p in stage(spec.model).parameters_by_name().values())
    for plan, *by_rank in zip(plans, *run_ranks(_counted, ranks, plans, tied), strict=True):
        assert sum(by_rank) == elements, plan


def _ones(rank: int, plans: list[dict[str, Any]]) -> list[float]:
    """Return the global norm under each plan if every element of every gradient is 1."""
    found = []
    for plan in plans:
        trainer = trainer_of(tiny_run(plan=plan))
        for parameter in trainer.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        names = counted(trainer.parameters, trainer.shared, trainer.groups)
        total = sum_of_squares(g for name in names if (g := trainer.parameters[name].grad) is not None)
        torch.distributed.all_reduce(total)
        found.append(float(total))
    return found


@pytest.mark.slow
def test_gradients_of_ones_have_the_norm_of_the_number_of_elements():
    elements = sum(p.numel() for p in stage(tiny_run().model).parameters_by_name().values())
    plans = [plan for plan in PLANS if tiny_run(plan=plan).plan.ranks == 2]
    for found in run_ranks(_ones, 2, plans):
        assert found == pytest.approx([elements] * len(plans))


def test_no_gradients_have_no_norm():
    assert float(sum_of_squares([])) == 0.0


def test_squares_are_summed_across_tensors_in_fp64():
    large, small = torch.full((1,), 1e4), torch.full((1,), 0.5)
    assert float(sum_of_squares([large, *[small] * 8])) == pytest.approx(1e8 + 2.0, rel=1e-12)


def test_squares_of_a_large_tensor_are_summed_as_exactly_as_those_of_a_small_one():
    """A CPU's fp32 sum of four million squares is off by 1e-4."""
    random = torch.Generator().manual_seed(0)
    for sizes in ([4 << 20], [4 << 20, 3, 0, LARGE, LARGE + 1, LARGE + ROW], [LARGE - 1]):
        grads = [torch.randn(size, generator=random) for size in sizes]
        exact = sum(float(grad.double().square().sum()) for grad in grads)
        assert float(sum_of_squares(grads)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("factor", [0.2, 1.0])
def test_all_gradients_are_multiplied_by_the_factor(factor):
    grads = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    scale(grads, factor)
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), torch.tensor([3.0, 0.0, 4.0]) * factor)


def _clipped(rank: int) -> tuple[float, float, bool]:
    """Return the norms before and after clipping a real step's gradients, and whether the gradients are shares."""
    trainer = trainer_of(tiny_run(plan={"data": 2, "zero": 3}))
    before = compute(trainer, microbatches(trainer), step=0).grad_norm
    grads = [p.grad for p in trainer.parameters.values() if p.grad is not None]
    scale(grads, 1 / 3)
    total = sum_of_squares(grads)
    torch.distributed.all_reduce(total)
    return before, float(total.sqrt()), all(isinstance(g, DTensor) for g in grads)


@pytest.mark.slow
def test_shares_are_clipped_to_the_limit_of_the_whole():
    for before, after, shares in run_ranks(_clipped, 2):
        assert shares and after == pytest.approx(before / 3, rel=1e-5)


def _poison(rank: int, plan: dict[str, Any], name: str, where: str) -> tuple[str, bool]:
    """Return the error of a step in which the last rank's weight or gradient has a NaN, and whether the weights are unchanged."""
    trainer = trainer_of(tiny_run(plan=plan))
    if rank == torch.distributed.get_world_size() - 1:
        if where == "weight":
            local(trainer.parameters[name].detach()).flatten()[0] = torch.nan
        else:
            stage_of(trainer, name).parameters_by_name()[name].register_hook(_first_nan)
    return _failed_step(trainer)


def stage_of(trainer: Trainer, name: str) -> Stage:
    """Return the stage that computes with a parameter."""
    return next(stage for stage in trainer.stages.values() if name in stage.parameters_by_name())


def _failed_step(trainer: Trainer) -> tuple[str, bool]:
    before = {name: local(p.detach()).clone() for name, p in trainer.parameters.items()}
    with pytest.raises(NotFinite) as found:
        train_step(trainer, microbatches(trainer), step=7)
    after = {name: local(p.detach()) for name, p in trainer.parameters.items()}
    return str(found.value), all(torch.equal(after[n].nan_to_num(), before[n].nan_to_num()) for n in before)


def _first_nan(grad: Tensor) -> Tensor:
    grad = grad.clone()
    local(grad).flatten()[0] = torch.nan
    return grad


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"pipeline": 2}, {"tensor": 2}], ids=str)
def test_a_gradient_that_is_not_finite_on_one_rank_is_named_on_all(plan):
    messages = run_ranks(_poison, 2, plan, "blocks.3.mlp.up.weight", "gradient")
    for message, kept in messages:
        assert message.startswith("step 8: loss 4.") and "gradient norm nan" in message
        assert "NaN or Inf in gradients of blocks.3.mlp.up.weight (1 elements). No weight was changed." in message
        assert kept


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"pipeline": 2}, {"tensor": 2}, {"data": 2, "zero": 3}, {"data": 2, "zero": 0}], ids=str)
def test_a_weight_that_is_not_finite_on_one_rank_stops_all_with_the_same_words(plan):
    first, second = run_ranks(_poison, 2, plan, "blocks.3.mlp.up.weight", "weight")
    assert first == second
    message, kept = first
    assert kept
    assert message.startswith("step 8: loss nan, gradient norm nan; NaN or Inf in gradients of head.output.weight (")
    assert "more. No weight was changed." in message and "optimizer.lr" in message


def _poison_activations(rank: int) -> tuple[str, bool]:
    """The second data rank's gradient of one projection's output is NaN."""
    trainer = trainer_of(tiny_run(plan={"data": 2, "zero": 2}))
    if rank == 1:
        hook = lambda module, args, out: out.register_hook(lambda g: g * torch.nan) and None  # noqa: E731
        trainer.stages[0].blocks["0"].attention.q.register_forward_hook(hook)
    return _failed_step(trainer)


@pytest.mark.slow
def test_one_data_ranks_bad_gradient_is_named_on_all_by_what_it_reached():
    first, second = run_ranks(_poison_activations, 2)
    assert first == second
    message, kept = first
    assert kept and message.startswith("step 8: loss 4.")
    assert (
        "gradients of blocks.0.attention.q.weight (1024 elements), blocks.0.attention_norm.weight (32 elements), emb" in message
    )
    assert "attention.k" not in message and "blocks.1" not in message


def _overflow(rank: int) -> str:
    trainer = trainer_of(tiny_run())
    compute(trainer, microbatches(trainer), step=0)
    return str(refusal(trainer, "loss 1.0, gradient norm inf", step=3))


@pytest.mark.slow
def test_finite_gradients_whose_squares_overflow_are_said_to():
    message = run_ranks(_overflow, 1)[0]
    assert "no single gradient (the sum of the gradients' squares overflowed)" in message
    assert message.startswith("step 4: "), "the fourth, as the event log numbers it"


def _partial(rank: int) -> tuple[set[str], set[str]]:
    trainer = trainer_of(tiny_run(plan={"tensor": 2, "pipeline": 2}, model={"tied": True}))
    return set(trainer.shared.partial), set(trainer.shared.tied)


@pytest.mark.slow
def test_norms_are_partial_under_sequence_parallelism_and_a_tied_table_is_on_both_ends():
    first, *_, last = run_ranks(_partial, 4)
    norms = [{f"blocks.{n}.{kind}_norm.weight" for n in blocks for kind in ("attention", "mlp")} for blocks in ((0, 1), (2, 3))]
    assert first == (norms[0], {"embedding.weight"})
    assert last == (norms[1] | {"head.norm.weight"}, {"embedding.weight"})


def test_a_plain_tensor_is_its_own_share():
    parameter = nn.Parameter(torch.ones(3))
    assert local(parameter) is parameter
