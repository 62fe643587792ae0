"""Rule of an optimizer: a function over the slots of each parameter's share. The update of a rank's parameters: each by its rule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.spec.treatment import Treatment
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.small import PackedState


class Part(NamedTuple):
    """One parameter's share on this rank. A rule changes `weight` and `slots` in place."""

    name: str
    weight: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    """The optimizer's tensors, by the names of its slots."""
    lr: float = 1.0
    """Factor of the learning rate."""
    weight_decay: float = 0.0
    eps: float = 1.0
    """Factor of the epsilon, for rules that have one."""
    home: "Home | None" = None
    """The home of its slots, if they are not on the device: `opened` yields the part with them."""
    first: int = 0
    """The first number of the share, if this is a flat piece of it."""
    small: PackedState | None = None
    """Access to its moments and master weights, if they are kept in few bits: `opened` yields the part with them in fp32."""


class Home(Protocol):
    """A place of state that is not on the device (`train.offload.home`)."""

    @property
    def masters(self) -> bool:
        """True if the master weights are also there."""
        ...

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield the parts with their state on the device, each whole or in flat pieces. Changes are stored at the next
        iteration."""
        ...


def opened(parts: Iterable[Part], *, weights_alone: bool = False) -> Iterator[Part]:
    """Yield the parts one by one, with all that an update changes on the device. A part whose rule works on single elements may
    be passed in pieces. `weights_alone`: the slots are not needed."""

    def home(part: Part) -> "Home | None":
        return None if part.home is None or (weights_alone and not part.home.masters) else part.home

    for where, group in groupby(parts, home):
        some = list(group)
        for part in some if where is None else where.stream(some):
            if part.small is None or (weights_alone and not part.small.masters):
                yield part
            else:
                yield from part.small.opened(part, weights_alone=weights_alone)


def together(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts in lists for one update each: first all parts whose state is on the device, then each other part
    by itself."""
    at_hand = [part for part in parts if part.home is None and part.small is None]
    if at_hand:
        yield at_hand
    for part in opened(part for part in parts if part.home is not None or part.small is not None):
        yield [part]


class Rule(Protocol):
    """Updates weights. It keeps nothing between two updates: all its state is in slots."""

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        """`whole`: a rule's view of the tensors whose shares other ranks hold."""
        ...

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> Callable[[], None] | None:
        """Update all parts from their gradients. `number` counts the updates before this one.

        A rule that waits for other ranks may return the rest of its work as a function, which is called after the other rules.
        All ranks of a pipeline place call it together, with shares of the same parameters in the same order. A rule whose unit is
        one element gets no share that is empty on this rank; any other rule gets all. Weights and slots may be read and changed
        only within `opened`.
        """
        ...


def alike(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that share a factor of the learning rate, a weight decay and a factor of epsilon."""

    def settings(part: Part) -> tuple[float, float, float]:
        return part.lr, part.weight_decay, part.eps

    for _, group in groupby(sorted(parts, key=settings), settings):
        yield list(group)


class Optimizer:
    """The rule of each parameter, which its row in `spec.optimizers` names. Ranks of one pipeline place hold shares of the same
    parameters, so they use the same rules."""

    def __init__(
        self, spec: OptimizerSpec, treated: Mapping[str, Treatment], whole: GlobalTensors, *, target: str | None = None
    ) -> None:
        """`treated`: how each parameter of the whole model is updated. A rank may repeat the update of another one, of another stage.
        `target`: the kind of device that a dry run is for; None: the tensors' own."""
        self.treated, self.whole, self.target = treated, whole, target
        kinds = dict.fromkeys(treatment.kind for treatment in treated.values())
        first = sorted(
            kinds, key=lambda kind: OPTIMIZERS[kind].unit != "matrix"
        )  # its messages are on their way while others compute
        self.rules: dict[str, Rule] = {kind: rule_of(kind)(spec, whole) for kind in first}

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update all parts by their rules."""
        left = []
        for kind, rule in self.rules.items():
            alone = OPTIMIZERS[kind].unit == "element"
            mine = [
                self._treated(part, treatment, number)
                for part in parts
                if (treatment := self.treated[part.name]).kind == kind and (part.weight.numel() or not alone)
            ]
            if mine and (rest := rule.update(mine, number=number, lr=lr)) is not None:
                left.append(rest)
        for rest in left:
            rest()

    def prepared(self, parts: Iterable[Part], *, number: int) -> list[Part]:
        """Return the parts in the form for their rules, for a change of weights after an update: `opened` yields their master
        weights in fp32. `number`: the seed of stochastic rounding."""
        return [self._treated(part, self.treated[part.name], number) for part in parts]

    def _treated(self, part: Part, treatment: Treatment, number: int) -> Part:
        """Return the part in the form for its rule."""
        small = None
        narrow = part.gradient.dtype != torch.float32
        if narrow or treatment.moments.number != "fp32" or treatment.master != "fp32":
            alone, cut = OPTIMIZERS[treatment.kind].unit == "element", self.whole.cuts[part.name]
            target = self.target if part.home is None else None  # state elsewhere is updated there
            small = PackedState.of(part.name, treatment.slots, number, cut, alone=alone, narrow=narrow, target=target)
        return part._replace(lr=treatment.lr, weight_decay=treatment.weight_decay, eps=treatment.eps, small=small)


def rule_of(kind: str) -> type[Rule]:
    """Import the rule of an optimizer."""
    module, _, name = OPTIMIZERS[kind].rule.partition(":")
    return getattr(import_module(module), name)
