"""AdamW equals torch's, on any share of a parameter that a rank holds."""

import pytest
import torch
from torch import nn

from megalith.spec.run import OptimizerSpec
from megalith.spec.treatment import Treatment
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Optimizer
from megalith.train.state import State

LR = 3e-3
SHAPES = {"matrix": (6, 4), "norm": (6,), "table": (10, 3), "cube": (2, 3, 2), "scalar": ()}


class Trained:
    """Return parameters with AdamW's state, and its rule."""

    def __init__(self, held: dict[str, nn.Parameter], spec: OptimizerSpec) -> None:
        decays = {name: spec.weight_decay if parameter.dim() >= 2 else 0.0 for name, parameter in held.items()}
        treated = {name: Treatment("adamw", weight_decay=decay) for name, decay in decays.items()}
        self.state = State(held, {}, {name: each.slots for name, each in treated.items()})
        self.rule = Optimizer(spec, treated, GlobalTensors.alone(held))

    def step(self, number: int, *, lr: float) -> None:
        with torch.no_grad():
            self.rule.update(self.state.parts(), number=number, lr=lr)
        self.state.drop_gradients()

    def slot(self, slot: str, name: str) -> torch.Tensor:
        return self.state.shares("optimizer")[f"{slot}.{name}"]


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
    optimizer = Trained(ours, spec)
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
        torch.testing.assert_close(
            optimizer.slot("moments.first", name), expected.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-7
        )
        torch.testing.assert_close(
            optimizer.slot("moments.second", name), expected.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=1e-7
        )


def test_weight_decay_shrinks_matrices_and_leaves_vectors():
    held = parameters()
    before = {name: p.detach().clone() for name, p in held.items()}
    for parameter in held.values():
        parameter.grad = torch.zeros_like(parameter)
    Trained(held, OptimizerSpec(weight_decay=0.5)).step(0, lr=0.1)
    for name, parameter in held.items():
        factor = 0.95 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_shares_that_are_empty_on_this_rank_are_passed_over():
    held = parameters()
    empty = {"nothing": nn.Parameter(torch.empty(0, 4)), "none": nn.Parameter(torch.empty(0))}
    both, alone = Trained(held | empty, OptimizerSpec()), parameters()
    set_gradients(held, 0)
    set_gradients(alone, 0)
    both.step(0, lr=LR)  # an empty share may or may not have a gradient
    Trained(alone, OptimizerSpec()).step(0, lr=LR)
    assert all(torch.equal(held[name], alone[name]) for name in alone)
    assert both.slot("moments.first", "nothing").shape == (0, 4)
    only_empty = Trained(empty, OptimizerSpec())
    only_empty.step(0, lr=LR)


def test_gradients_are_dropped_after_the_step():
    held = parameters()
    set_gradients(held, 0)
    Trained(held, OptimizerSpec()).step(0, lr=LR)
    assert all(parameter.grad is None for parameter in held.values())


def test_a_parameter_without_gradient_is_a_fault():
    held = parameters()
    set_gradients(held, 0)
    held["table"].grad = None
    with pytest.raises(AssertionError, match="without a gradient"):
        Trained(held, OptimizerSpec()).step(0, lr=LR)


def test_moments_have_the_names_and_shapes_of_their_weights_in_fp32():
    held = parameters()
    state = Trained(held, OptimizerSpec()).state.tensors("optimizer")
    assert {name: tuple(moment.shape) for name, moment in state.items()} == {
        f"moments.{kind}.{name}": shape for kind in ("first", "second") for name, shape in SHAPES.items()
    }
    assert {moment.dtype for moment in state.values()} == {torch.float32}


def test_a_step_goes_on_from_restored_moments_bit_for_bit():
    whole, first = parameters(), parameters()
    straight, before = Trained(whole, OptimizerSpec()), Trained(first, OptimizerSpec())
    for step in range(4):
        set_gradients(whole, step)
        straight.step(step, lr=LR)
    for step in range(2):
        set_gradients(first, step)
        before.step(step, lr=LR)
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    after = Trained(resumed, OptimizerSpec())
    for key, moment in after.state.tensors("optimizer").items():
        moment.copy_(before.state.tensors("optimizer")[key])
    for step in (2, 3):
        set_gradients(resumed, step)
        after.step(step, lr=LR)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
