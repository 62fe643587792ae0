"""One step: its reports, errors that stop it, and bf16 compared with fp32."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.models.init import seed_of
from megalith.parallel.gradients import local
from megalith.prove.parity import shrink
from megalith.spec.families import FAMILIES, family_of
from megalith.spec.presets import presets
from megalith.train.step import StepResult, compute, seed_step, train_step, update
from tests.full import sampled
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

BREAKDOWN = {"data", "forward", "backward", "bubble", "communication", "optimizer"}


def test_a_step_s_random_numbers_are_those_of_the_run_s_seed_and_the_step() -> None:
    """Random numbers follow from torch.manual_seed, and are the same if the step is repeated."""
    trainer: Any = SimpleNamespace(spec=tiny_run(train={"seed": 3}), device=CPU)
    drawn = []
    for step in (5, 6, 5):
        seed_step(trainer, step)
        drawn.append(torch.rand(4))
    torch.manual_seed(seed_of(3, "step 5"))
    assert torch.equal(drawn[0], torch.rand(4))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def _steps(rank: int, run: dict[str, Any], steps: int, stops: int | None = None) -> list[StepResult]:
    trainer = trainer_of(tiny_run(**run))
    return [train_step(trainer, microbatches(trainer, step), step=step, stop=stops == rank) for step in range(steps)]


PRESETS = {family_of(preset.values): name for name, preset in presets().items()}
"""A preset of each family"""


def _losses(rank: int, preset: str) -> dict[str, list[float]]:
    """Return the losses of two steps of a small model of the preset's family, by precision."""
    found = dict[str, list[float]]()
    for precision in ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "mxfp4"):
        run = tiny_run(model={"preset": preset}, train={"global_batch": 4, "precision": precision})
        trainer = trainer_of(shrink(run, steps=2))
        found[precision] = [train_step(trainer, microbatches(trainer, step), step=step).loss for step in range(2)]
    return found


@pytest.mark.slow
@sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_in_every_precision(family: str) -> None:
    (found,) = run_ranks(_losses, 1, PRESETS[family])
    wide = found["bf16"]
    for precision, losses in found.items():
        assert all(abs(loss / expected - 1) < 0.05 for loss, expected in zip(losses, wide, strict=True)), (precision, found)
    assert all(losses[0] != wide[0] for precision, losses in found.items() if precision != "bf16"), "each rounds in its own way"


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"data": 2}, {"pipeline": 2}, {"tensor": 2}], ids=str)
def test_a_rank_that_is_asked_to_stop_stops_all(plan):
    assert [[done.stop for done in steps] for steps in run_ranks(_steps, 2, {"plan": plan}, 1, 1)] == [[True], [True]]
    assert [[done.stop for done in steps] for steps in run_ranks(_steps, 2, {"plan": plan}, 1)] == [[False], [False]]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"data": 2, "zero": 3}, {"pipeline": 2}, {"tensor": 2}], ids=str)
def test_all_ranks_report_the_same_loss_and_norm_to_the_bit(plan):
    first, second = run_ranks(_steps, 2, {"plan": plan}, 2)
    for one, other in zip(first, second, strict=True):
        assert (one.loss, one.grad_norm, one.lr, one.tokens) == (other.loss, other.grad_norm, other.lr, other.tokens)
    assert first[0].loss != first[1].loss


@pytest.mark.slow
def test_a_step_run_again_gives_the_same_bits():
    first, again = (run_ranks(_steps, 2, {"plan": {"data": 2, "zero": 3, "microbatch": 2}}, 3)[0] for _ in range(2))
    assert [(s.loss, s.grad_norm) for s in first] == [(s.loss, s.grad_norm) for s in again]


@pytest.mark.slow
def test_time_is_split_without_a_second_counted_twice():
    for steps in run_ranks(_steps, 2, {"plan": {"pipeline": 2}}, 3):
        for done in steps:
            assert done.breakdown.keys() == BREAKDOWN
            assert all(seconds >= 0 for seconds in done.breakdown.values())
            assert done.breakdown["forward"] > 0 and done.breakdown["backward"] > 0 and done.breakdown["optimizer"] > 0
            assert sum(done.breakdown.values()) <= done.seconds
            assert all(0 <= start <= end <= done.seconds for _, start, end in done.spans)


@pytest.mark.slow
def test_tokens_are_those_of_the_whole_global_batch():
    spec = tiny_run(plan={"data": 2})
    assert {done.tokens for steps in run_ranks(_steps, 2, {"plan": {"data": 2}}, 1) for done in steps} == {8 * spec.train.seq_len}


@pytest.mark.slow
def test_memory_counts_shares_and_what_the_process_holds():
    memory = run_ranks(_steps, 2, {"plan": {"data": 2, "zero": 3}}, 1)[0][0].memory
    assert memory["optimizer"] == 2 * memory["weights"] == 2 * memory["gradients"]
    assert memory["resident"] > memory["weights"] and memory["peak"] > memory["weights"]


def _clipped(rank: int) -> tuple[float, float, list[float]]:
    """Return the norm that a step reports, its limit, and the norms of the gradients that the optimizer gets with and without
    clipping."""
    seen = []
    for limit in (0.05, 0.0):
        trainer = trainer_of(tiny_run(optimizer={"clip": limit}))
        computed = compute(trainer, microbatches(trainer), step=0)
        trainer.rule.update = lambda parts, number, lr, trainer=trainer: seen.append(  # pyright: ignore[reportAttributeAccessIssue]
            float(torch.stack([p.grad.norm() for p in trainer.parameters.values() if p.grad is not None]).norm())
        )
        update(trainer, computed, step=0)
    return computed.grad_norm, 0.05, seen


@pytest.mark.slow
def test_the_reported_norm_is_before_clipping_and_clip_0_switches_it_off():
    norm, limit, (clipped, whole) = run_ranks(_clipped, 1)[0]
    assert norm > limit
    assert clipped == pytest.approx(limit, rel=1e-3)
    assert whole == pytest.approx(norm, rel=1e-5)


BF16 = {"plan": {"microbatch": 2}, "train": {"precision": "bf16", "steps": 8}, "optimizer": {"lr": 3e-3}}
FP32 = BF16 | {"train": {"precision": "fp32", "steps": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 1}, {"data": 2, "zero": 3}, {"pipeline": 2}, {"tensor": 2}], ids=str)
@sampled(2)
def test_bf16_losses_stay_within_a_hundredth_of_fp32(plan):
    spec = tiny_run(plan=plan)
    expected = [done.loss for done in run_ranks(_steps, 1, FP32, 8)[0]]
    found = [done.loss for done in run_ranks(_steps, spec.plan.ranks, BF16 | {"plan": {"microbatch": 2} | plan}, 8)[0]]
    assert found != expected
    assert all(abs(low - high) < 0.01 for low, high in zip(found, expected, strict=True)), (found, expected)


def _dtypes(rank: int, plan: dict[str, Any]) -> dict[str, set[torch.dtype]]:
    trainer = trainer_of(tiny_run(plan=plan, train={"precision": "bf16"}))
    seen: set[torch.dtype] = set()
    for stage in trainer.stages.values():
        for block in stage.blocks.values():
            block.mlp.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    compute(trainer, microbatches(trainer), step=0)
    return {
        "weights": {local(p.detach()).dtype for p in trainer.parameters.values()},
        "gradients": {local(p.grad).dtype for p in trainer.parameters.values() if p.grad is not None},
        "moments": {m.dtype for m in trainer.state.shares("optimizer").values()},
        "activations": seen | {trainer.executor.hidden.dtype},
    }


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 3}, {"pipeline": 2, "recompute": "full"}, {"tensor": 2}], ids=str)
def test_bf16_computes_in_bf16_and_keeps_weights_gradients_and_moments_in_fp32(plan):
    for found in run_ranks(_dtypes, tiny_run(plan=plan).plan.ranks, plan):
        assert found.pop("activations") == {torch.bfloat16}
        assert found == {"weights": {torch.float32}, "gradients": {torch.float32}, "moments": {torch.float32}}


def _tiny_steps(rank: int) -> tuple[bool, bool]:
    """Return whether updates far below bf16's spacing changed the master weights, and left their bf16 values unchanged."""
    trainer = trainer_of(tiny_run(train={"precision": "bf16", "steps": 3}, optimizer={"lr": 1e-6, "weight_decay": 0.0}))
    before = {name: local(p.detach()).clone() for name, p in trainer.parameters.items()}
    for step in range(3):
        train_step(trainer, microbatches(trainer, step), step=step)
    norms = [name for name in before if "norm" in name]
    moved = all((local(trainer.parameters[name].detach()) != before[name]).any() for name in norms)
    unseen = all(torch.equal(local(trainer.parameters[name].detach()).bfloat16(), before[name].bfloat16()) for name in norms)
    return moved, unseen


@pytest.mark.slow
def test_updates_too_small_for_bf16_are_kept_in_the_master_weights():
    assert run_ranks(_tiny_steps, 1) == [(True, True)]
