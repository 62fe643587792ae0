"""Rule of an optimizer: a function over the slots of each parameter's share, found by its row in `spec.optimizers`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.spec.treatment import Treatment
from megalith.train.optimizers.whole import Whole


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
    """The home of its slots, if they are not at hand: `opened` yields the part with them."""


class Home(Protocol):
    """A place of state that is not on the device (`train.offload.home`)."""

    @property
    def masters(self) -> bool:
        """True if the master weights are there too."""
        ...

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield the parts with their state at hand, each whole or in flat pieces. Changes are kept once the next is asked for."""
        ...


def opened(parts: Iterable[Part], *, weights_alone: bool = False) -> Iterator[Part]:
    """Yield the parts one by one with all that an update changes at hand. A part whose rule's unit is one element may come in pieces.
    `weights_alone`: the slots are not looked at."""

    def home(part: Part) -> "Home | None":
        return None if part.home is None or (weights_alone and not part.home.masters) else part.home

    for where, group in groupby(parts, home):
        some = list(group)
        yield from some if where is None else where.stream(some)


def together(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts in lists that an update may take at once: all that are at hand, and then each of the others."""
    at_hand = [part for part in parts if part.home is None]
    if at_hand:
        yield at_hand
    for part in opened(part for part in parts if part.home is not None):
        yield [part]


class Rule(Protocol):
    """Updates weights. It keeps nothing between two updates: all that lasts is in slots."""

    def __init__(self, spec: OptimizerSpec, whole: Whole) -> None:
        """`whole`: what a rule sees of the tensors whose shares other ranks hold."""
        ...

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> Callable[[], None] | None:
        """Update all parts from their gradients. `number` counts the updates before this one.

        A rule that waits for other ranks may return what is left to do: it is called when the other rules are done. All ranks of a
        pipeline place call it together, with shares of the same parameters in the same order. A rule whose unit is one element gets no
        share that is empty on this rank; any other gets them all. Weights and slots are read and changed within `opened` alone.
        """
        ...


class Optimizer:
    """The rule of each parameter. Ranks of one pipeline place hold shares of the same parameters, so they use the same rules."""

    def __init__(self, spec: OptimizerSpec, treated: Mapping[str, Treatment], whole: Whole) -> None:
        """`treated`: how each parameter of the whole model is updated. A rank may repeat the update of another one, of another stage."""
        self.treated, self.whole = treated, whole
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
                part._replace(lr=treatment.lr, weight_decay=treatment.weight_decay, eps=treatment.eps)
                for part in parts
                if (treatment := self.treated[part.name]).kind == kind and (part.weight.numel() or not alone)
            ]
            if mine and (rest := rule.update(mine, number=number, lr=lr)) is not None:
                left.append(rest)
        for rest in left:
            rest()


def rule_of(kind: str) -> type[Rule]:
    """Import the rule of an optimizer."""
    module, _, name = OPTIMIZERS[kind].rule.partition(":")
    return getattr(import_module(module), name)


def alike(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that share a factor of the learning rate, a weight decay and a factor of epsilon."""

    def settings(part: Part) -> tuple[float, float, float]:
        return part.lr, part.weight_decay, part.eps

    for _, group in groupby(sorted(parts, key=settings), settings):
        yield list(group)
