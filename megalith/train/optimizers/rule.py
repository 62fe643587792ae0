"""What an optimizer's rule is: a function over the slots of each parameter's share, found by its row in `spec.optimizers`."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from torch import Tensor

from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec


class Part(NamedTuple):
    """One parameter's share on this rank. A rule changes `weight` and `slots` in place."""

    name: str
    weight: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    """The optimizer's tensors, by the names of its slots."""


class Rule(Protocol):
    """Updates weights. It keeps nothing between two updates: all that lasts is in slots."""

    def __init__(self, spec: OptimizerSpec) -> None: ...

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update all parts from their gradients. `number` counts the updates before this one."""
        ...


def rule_of(spec: OptimizerSpec) -> Rule:
    """The rule of `optimizer.kind`."""
    module, _, name = OPTIMIZERS[spec.kind].rule.partition(":")
    return getattr(import_module(module), name)(spec)
