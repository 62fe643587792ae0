"""Updates of a whole model on one process, which a plan's updates are compared with."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.rule import rule_of
from megalith.train.state import State

Update: TypeAlias = Callable[[int, float], None]
"""Update all parameters from their gradients: (updates before this one, learning rate)."""


def update_of(parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> Update:
    """The update by `optimizer.kind`: an implementation that is not ours where there is one, else the rule on whole tensors."""
    return INDEPENDENT.get(spec.kind, _by_rule)(parameters, spec)


def _by_rule(parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> Update:
    state, rule = State(parameters, {}, OPTIMIZERS[spec.kind].slots), rule_of(spec)

    @torch.no_grad()
    def update(number: int, lr: float) -> None:
        rule.update(state.parts(), number=number, lr=lr)

    return update


def _torchs_adamw(parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> Update:
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, foreach=False)

    def update(number: int, lr: float) -> None:
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()

    return update


INDEPENDENT: dict[str, Callable[[Mapping[str, nn.Parameter], OptimizerSpec], Update]] = {"adamw": _torchs_adamw}
"""Implementations that are not ours, by kind."""
