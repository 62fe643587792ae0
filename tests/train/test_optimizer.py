"""AdamW is torch's, and the learning rate goes where its schedule says."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizer import AdamW, learning_rate

LR = 3e-3
SCHEDULES = ["cosine", "linear", "wsd", "constant"]
SHAPES = {"matrix": (6, 4), "norm": (6,), "table": (10, 3), "cube": (2, 3, 2), "scalar": ()}


def rates(steps: int, **spec: Any) -> list[float]:
    return [learning_rate(step, spec=OptimizerSpec.model_validate({"lr": LR} | spec), steps=steps) for step in range(steps)]


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 400),
    warmup=st.integers(0, 400),
    decay=st.floats(0, 1),
    min_lr=st.floats(0, 1),
)
def test_rates_climb_in_equal_steps_and_then_never_rise_again(schedule, steps, warmup, decay, min_lr):
    assume(warmup <= steps and (schedule != "wsd" or warmup + round(decay * steps) <= steps))  # others are refused beforehand
    found = rates(steps, schedule=schedule, warmup=warmup, decay=decay, min_lr=min_lr)
    assert found[:warmup] == pytest.approx([LR * (step + 1) / warmup for step in range(warmup)])
    after = found[warmup:]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(after))
    low = LR * min_lr
    assert all(low - 1e-15 <= rate <= LR + 1e-15 for rate in after)


@settings(max_examples=100, deadline=None)
@given(schedule=st.sampled_from(SCHEDULES), steps=st.integers(5, 400), warmup=st.integers(1, 300), min_lr=st.floats(0, 1))
def test_the_end_of_warm_up_is_the_peak_on_both_sides(schedule, steps, warmup, min_lr):
    assume(warmup < steps * 0.7)  # wsd: decay begins later
    found = rates(steps, schedule=schedule, warmup=warmup, min_lr=min_lr)
    assert found[warmup - 1] == pytest.approx(LR)
    assert found[warmup] == pytest.approx(LR)


@settings(max_examples=100, deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    steps=st.integers(2, 400),
    warmup=st.integers(0, 200),
    min_lr=st.floats(0, 1),
)
def test_the_last_step_has_the_lowest_rate(schedule, steps, warmup, min_lr):
    assume(warmup < steps - 1)
    assert rates(steps, schedule=schedule, warmup=warmup, min_lr=min_lr)[-1] == pytest.approx(LR * min_lr, abs=1e-12)


def test_wsd_stays_on_its_plateau_and_then_falls_in_a_line():
    found = rates(100, schedule="wsd", warmup=10, decay=0.2, min_lr=0.1)
    assert found[9:79] == pytest.approx([LR] * 70)
    falls = [a - b for a, b in pairwise(found[80:])]
    assert found[80] < LR and falls == pytest.approx([falls[0]] * len(falls))


def test_cosine_is_half_way_in_the_middle_and_flat_at_its_ends():
    found = rates(101, schedule="cosine", warmup=0, min_lr=0.2)
    assert found[50] == pytest.approx(LR * 0.6)
    assert found[0] - found[1] < (found[50] - found[51]) / 10
    assert found[25] == pytest.approx(LR * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))))


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(held: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for name, shape in SHAPES.items():
        grad = torch.randn(shape, generator=generator)
        if name in held:
            held[name].grad = grad


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weights_after_many_steps_are_those_of_torchs_own(weight_decay):
    spec = OptimizerSpec(lr=LR, weight_decay=weight_decay, beta1=0.8, beta2=0.95, eps=1e-6)
    ours, theirs = parameters(), parameters()
    groups = [
        {"params": [p for p in theirs.values() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in theirs.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False)
    optimizer = AdamW(ours, spec)
    for step in range(20):
        rate = LR * (1 + step % 3)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for group in expected.param_groups:
            group["lr"] = rate
        expected.step()
        optimizer.step(step, lr=rate)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.first[name], expected.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(optimizer.second[name], expected.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=1e-7)


def test_weight_decay_shrinks_matrices_and_leaves_vectors():
    held = parameters()
    before = {name: p.detach().clone() for name, p in held.items()}
    for parameter in held.values():
        parameter.grad = torch.zeros_like(parameter)
    AdamW(held, OptimizerSpec(weight_decay=0.5)).step(0, lr=0.1)
    for name, parameter in held.items():
        factor = 0.95 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_shares_that_are_empty_on_this_rank_are_passed_over():
    held = parameters()
    empty = {"nothing": nn.Parameter(torch.empty(0, 4)), "none": nn.Parameter(torch.empty(0))}
    both, alone = AdamW(held | empty, OptimizerSpec()), parameters()
    set_gradients(held, 0)
    set_gradients(alone, 0)
    both.step(0, lr=LR)  # an empty share may or may not have got a gradient
    AdamW(alone, OptimizerSpec()).step(0, lr=LR)
    assert all(torch.equal(held[name], alone[name]) for name in alone)
    assert both.state()["moments.first.nothing"].shape == (0, 4)
    only_empty = AdamW(empty, OptimizerSpec())
    only_empty.step(0, lr=LR)


def test_gradients_are_dropped_after_the_step():
    held = parameters()
    set_gradients(held, 0)
    AdamW(held, OptimizerSpec()).step(0, lr=LR)
    assert all(parameter.grad is None for parameter in held.values())


def test_a_parameter_without_gradient_is_a_fault():
    held = parameters()
    set_gradients(held, 0)
    held["table"].grad = None
    with pytest.raises(AssertionError, match="without gradient"):
        AdamW(held, OptimizerSpec()).step(0, lr=LR)


def test_moments_have_the_names_and_shapes_of_their_weights_in_fp32():
    held = parameters()
    state = AdamW(held, OptimizerSpec()).state()
    assert {name: tuple(moment.shape) for name, moment in state.items()} == {
        f"moments.{kind}.{name}": shape for kind in ("first", "second") for name, shape in SHAPES.items()
    }
    assert {moment.dtype for moment in state.values()} == {torch.float32}


def test_a_step_goes_on_from_restored_moments_bit_for_bit():
    whole, first = parameters(), parameters()
    straight, before = AdamW(whole, OptimizerSpec()), AdamW(first, OptimizerSpec())
    for step in range(4):
        set_gradients(whole, step)
        straight.step(step, lr=LR)
    for step in range(2):
        set_gradients(first, step)
        before.step(step, lr=LR)
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    after = AdamW(resumed, OptimizerSpec())
    for key, moment in after.state().items():
        moment.copy_(before.state()[key])
    for step in (2, 3):
        set_gradients(resumed, step)
        after.step(step, lr=LR)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
