"""Rule of an optimizer: a function over the slots of each parameter's share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from megalith.spec.run import OptimizerSpec
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
    first: int = 0
    """The first number of the share, where this is a flat piece of it."""
    small: "Few | None" = None
    """The way to its moments and master weights, if they are kept in few bits: `opened` yields the part with them in fp32."""


class Home(Protocol):
    """A place of state that is not on the device (`train.offload.home`)."""

    @property
    def masters(self) -> bool:
        """True if the master weights are there too."""
        ...

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield the parts with their state at hand, each whole or in flat pieces. Changes are kept once the next is asked for."""
        ...


class Few(Protocol):
    """Moments and master weights of one part that are kept in few bits (`train.optimizers.small`)."""

    @property
    def masters(self) -> bool:
        """True if the master weights are kept so."""
        ...

    def opened(self, part: Part, *, weights_alone: bool = False) -> Iterator[Part]:
        """Yield the part, or flat pieces of it, with its moments and master weights in fp32. Changes are kept once the next is asked
        for. `weights_alone`: the moments are not looked at."""
        ...


def opened(parts: Iterable[Part], *, weights_alone: bool = False) -> Iterator[Part]:
    """Yield the parts one by one with all that an update changes at hand. A part whose rule's unit is one element may come in pieces.
    `weights_alone`: the slots are not looked at."""

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
    """Yield the parts in lists that an update may take at once: all that are at hand, and then each of the others."""
    at_hand = [part for part in parts if part.home is None and part.small is None]
    if at_hand:
        yield at_hand
    for part in opened(part for part in parts if part.home is not None or part.small is not None):
        yield [part]


class Rule(Protocol):
    """Updates weights. It keeps nothing between two updates: all that lasts is in slots."""

    def __init__(self, spec: OptimizerSpec, whole: Whole) -> None:
        """`whole`: what a rule sees of the tensors whose shares other ranks hold."""
        ...

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> Callable[[], None] | None:
        """Update all parts from their gradients. `number` counts the updates before this one.

        A rule that waits for other ranks may return the rest of its work as a function, which is called after the other rules.
        All ranks of a pipeline place call it together, with shares of the same parameters in the same order. A rule whose unit is
        one element gets no share that is empty on this rank; any other gets them all. Weights and slots are read and changed
        within `opened` alone.
        """
        ...


def alike(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts that share a factor of the learning rate, a weight decay and a factor of epsilon."""

    def settings(part: Part) -> tuple[float, float, float]:
        return part.lr, part.weight_decay, part.eps

    for _, group in groupby(sorted(parts, key=settings), settings):
        yield list(group)
