"""The interface of update rules, which update a parameter's share and its slots; and `Optimizer`, which updates each parameter of a rank by
the parameter's rule."""

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
    """This rank's share of one parameter, as a rule gets it. The rule changes `weight` and `slots` in place."""

    name: str
    weight: Tensor
    gradient: Tensor
    slots: Mapping[str, Tensor]
    """The optimizer's tensors for this share, by the names of the slots."""
    lr: float = 1.0
    """The factor by which this parameter's learning rate is multiplied."""
    weight_decay: float = 0.0
    eps: float = 1.0
    """The factor by which epsilon is multiplied, in rules that have an epsilon."""
    home: "Home | None" = None
    """The home of the slots, if they are not on the device; `opened` then yields the part with its slots."""
    first: int = 0
    """If this part is a flat piece of a share: the index of the piece's first element in the share."""
    small: PackedState | None = None
    """Converts moments and master weights in few bits to fp32 and back; `opened` yields the part with both in fp32."""


class Home(Protocol):
    """A place for state that is not on the device (`train.offload.home`)."""

    @property
    def masters(self) -> bool:
        """True if this home also holds the master weights."""
        ...

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield the parts with their state, each whole or in flat pieces. Changes to a part are stored when the next part is requested."""
        ...


def opened(parts: Iterable[Part], *, weights_alone: bool = False) -> Iterator[Part]:
    """Yield the parts one by one, with all tensors that an update changes in memory. A part with an elementwise rule may be yielded in
    pieces. `weights_alone`: the caller does not need the slots."""

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
    """Yield lists of parts that are updated together: first all parts whose state is on the device, with state and gradient in fp32, then
    each other part, or each piece of it, by itself."""
    at_hand = [part for part in parts if part.home is None and part.small is None]
    if at_hand:
        yield at_hand
    for part in opened(part for part in parts if part.home is not None or part.small is not None):
        yield [part]


class Rule(Protocol):
    """Updates weights from gradients. A rule keeps no state of its own between updates: all state is in slots."""

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        """`whole` computes sums over whole tensors that are sharded over ranks."""
        ...

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> Callable[[], None] | None:
        """Update all parts from their gradients. `number`: the number of updates made before this one.

        A rule that must wait for other ranks may return a function with the rest of its work; this function is called after the other
        rules. All ranks of a pipeline place call `update` together, with shares of the same parameters in the same order. An elementwise
        rule gets only shares that are not empty on this rank; any other rule gets all shares. A rule may read and change weights and slots
        only within `opened`.
        """
        ...


def alike(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield groups of parts that have the same learning-rate factor, weight decay and epsilon factor."""

    def settings(part: Part) -> tuple[float, float, float]:
        return part.lr, part.weight_decay, part.eps

    for _, group in groupby(sorted(parts, key=settings), settings):
        yield list(group)


class Optimizer:
    """The update rules of a rank. A parameter's optimizer is a row of `spec.optimizers`, which names the rule. Ranks of one pipeline place
    hold shares of the same parameters, so they use the same rules."""

    def __init__(
        self, spec: OptimizerSpec, treated: Mapping[str, Treatment], whole: GlobalTensors, *, target: str | None = None
    ) -> None:
        """`treated`: how each parameter of the whole model is updated. All parameters are needed, because a rank may repeat the update of a
        rank with another stage. `target`: the kind of device that a dry run simulates; None: the kind on which the tensors are."""
        self.treated, self.whole, self.target = treated, whole, target
        kinds = dict.fromkeys(treatment.kind for treatment in treated.values())
        first = sorted(
            kinds, key=lambda kind: OPTIMIZERS[kind].unit != "matrix"
        )  # its messages are on their way while others compute
        self.rules: dict[str, Rule] = {kind: rule_of(kind)(spec, whole) for kind in first}

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update each part by its rule."""
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
        """Return the parts in the form that their rules get, so that code outside the rules can change master weights in fp32 after an
        update. `number`: the seed of stochastic rounding."""
        return [self._treated(part, self.treated[part.name], number) for part in parts]

    def _treated(self, part: Part, treatment: Treatment, number: int) -> Part:
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
