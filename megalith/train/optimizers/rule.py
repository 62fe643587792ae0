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
    """The home of its slots, if they are not on the device: `opened` yields the part with them."""
    first: int = 0
    """The first number of the share, if this is a flat piece of it."""
    small: "Few | None" = None
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


class Few(Protocol):
    """Moments and master weights of one part that are kept in few bits (`train.optimizers.small`)."""

    @property
    def masters(self) -> bool:
        """True if the master weights are kept in few bits."""
        ...

    def opened(self, part: Part, *, weights_alone: bool = False) -> Iterator[Part]:
        """Yield the part, or flat pieces of it, with its moments and master weights in fp32. Changes are stored at the next
        iteration. `weights_alone`: the moments are not needed."""
        ...


def opened(parts: Iterable[Part], *, weights_alone: bool = False) -> Iterator[Part]:
    """Yield the parts one by one, with all that an update changes on the device. A part whose rule's unit is one element may come
    in pieces. `weights_alone`: the slots are not needed."""

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
    """Yield the parts in lists for one update each: all whose state is on the device, and then each of the others."""
    at_hand = [part for part in parts if part.home is None and part.small is None]
    if at_hand:
        yield at_hand
    for part in opened(part for part in parts if part.home is not None or part.small is not None):
        yield [part]


class Rule(Protocol):
    """Updates weights. It keeps nothing between two updates: all its state is in slots."""

    def __init__(self, spec: OptimizerSpec, whole: Whole) -> None:
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
