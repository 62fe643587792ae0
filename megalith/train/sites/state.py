"""The state that a rank keeps for merges: anchors, velocities, remainders of rounding, and weight differences in flight."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.checkpoint.shares import OffDeviceShare
from megalith.spec.sites import Fragment, SitesSpec
from megalith.spec.state import MASTER
from megalith.train.stability.adaptive_clip import UNKNOWN
from megalith.train.state import State, like

NOT_SENT = -1
_WEIGHTS = f"{MASTER.name}."


class OuterState:
    """This rank's shares of the state for merges, sharded like the weights. In a checkpoint of a run with sites, `weights.NAME` is the
    anchor (the merged weights, which every site holds), so that any reader of weights finds it. The site's own state is under `site.`"""

    def __init__(self, inner: State, fragments: Sequence[Fragment], sites: SitesSpec, *, leads: bool) -> None:
        """`inner`: the state that the site trains. `leads` is True on the site's leading rank."""
        self._inner = inner
        held = {*inner.masters}
        pieces = {piece.name: piece for fragment in fragments for piece in fragment.pieces if piece.name in held}
        self.names = frozenset(pieces)
        """The names of the weights and buffers of which this rank holds a share."""
        self._alike = sites.exchanges_gradients
        place = torch.device("cpu") if sites.place == "host" else None
        self.anchors = {} if self._alike else {name: self.weight(name).to(place, copy=True) for name in pieces}
        """The merged weights, on the device or in host memory (`sites.place`), as are velocities and feedback; empty if sites exchange
        gradients, because all sites then hold the same weights."""
        self._on_host = place is not None
        self.velocities = {
            name: torch.zeros_like(self.anchors[name]) for name in pieces if sites.momentum and self.is_trained(name)
        }
        rounded = [name for name, piece in pieces.items() if piece.loses and sites.feeds_back]
        self._decay = sites.feedback_decay
        self.feedback = {name: torch.zeros_like(self.anchors[name]) for name in rounded}
        self.sent = torch.full((len(fragments),), NOT_SENT, dtype=torch.int64)
        """For each fragment, the step after which its unmerged weight difference was taken."""
        self.late = sites.staleness
        self.flights = {
            fragment.number: torch.zeros((1 + self.late) * fragment.bytes, dtype=torch.uint8)
            for fragment in fragments
            if leads and sites.flies
        }
        """For each fragment, the site's own encoded weight differences that may be in flight; empty except on the leading rank."""
        self.slots = torch.full((len(fragments), 1 + self.late), NOT_SENT, dtype=torch.int64) if self.late else self.sent[:, None]
        """The step after which each weight difference in flight was taken."""

    def weight(self, name: str) -> Tensor:
        """Return this rank's share of the site's own weights, on the device: the tensor that training changes, or a copy if that tensor is
        off the device."""
        return self._inner.master(name)

    def merged(self, name: str) -> Tensor:
        """Return this rank's share of the merged weights; if sites exchange gradients, these are the site's own."""
        return self.anchors[name] if name in self.anchors else self.weight(name)

    def put(self, name: str, values: Tensor) -> None:
        """Set this rank's share of the site's own weights, with which training continues, to `values`."""
        self._inner.put_master(name, values)

    def fly(self, number: int, step: int) -> Tensor | None:
        """Reserve and return a buffer for the weight difference that is taken after `step` steps; None except on the leading rank."""
        free = (self.slots[number] == NOT_SENT) | (self.slots[number] == step)
        slot = int(free.nonzero()[0])
        self.slots[number, slot] = step
        return self.flights[number].view(1 + self.late, -1)[slot] if number in self.flights else None

    def land(self, number: int, step: int) -> None:
        """Forget the weight differences of a fragment that were taken after step `step` or earlier, because they are merged."""
        self.slots[number, self.slots[number] <= step] = NOT_SENT

    @property
    def flying(self) -> list[tuple[int, int, Tensor]]:
        """The site's own weight differences in flight, oldest first, as (step, fragment, bytes); empty except on the leading rank."""
        table = enumerate(self.slots.tolist())
        found = sorted((step, number, slot) for number, steps in table for slot, step in enumerate(steps) if step != NOT_SENT)
        return [
            (step, number, self.flights[number].view(1 + self.late, -1)[slot])
            for step, number, slot in found
            if number in self.flights
        ]

    def is_trained(self, name: str) -> bool:
        """True for a parameter; False for a buffer such as a router's bias, which merges average."""
        return name in self._inner.parameters

    def left_out(self, name: str) -> Tensor | None:
        """Return the remainder of earlier roundings, which is added to a tensor's next weight difference; None if no remainders are
        kept."""
        return self.feedback[name] * self._decay if name in self.feedback else None

    def begin(self) -> None:
        """At a run's first start, set the anchors to the site's own weights."""
        for name, anchor in self.anchors.items():
            anchor.copy_(self.weight(name))

    def laid(self) -> dict[str, Tensor | OffDeviceShare]:
        """Return the content of a checkpoint: shares of weights as sharded tensors of the whole shape or, off the device, as shares; other
        entries as ordinary tensors."""
        own = "site."
        inner = self._inner.laid()
        found: dict[str, Tensor | OffDeviceShare] = {
            at: _renamed(tensor, at)
            for key, tensor in inner.items()
            for at in [key if self._alike and key.startswith(_WEIGHTS) else f"{own}{key}"]
        }
        for prefix, kept in (
            (_WEIGHTS, self.anchors),
            ("outer.velocity.", self.velocities),
            (f"{own}outer.feedback.", self.feedback),
        ):
            found |= {f"{prefix}{name}": self._laid(f"{prefix}{name}", name, share) for name, share in kept.items()}
        found |= {f"{own}outer.flight.{number}": message for number, message in self.flights.items()}
        found |= {f"{own}outer.slots": self.slots} if self.late else {}
        return found | {"outer.sent": self.sent}

    def begin_anew(self) -> None:
        """When this site joins, set its own weights to the merged weights, and reset its optimizer state and its remainders of rounding."""
        for name, anchor in self.anchors.items():
            self.put(name, anchor)
        self._inner.forget_moments()
        for share in self.feedback.values():
            share.zero_()
        for usual in self._inner.usual.values():
            usual.fill_(UNKNOWN)
        self._inner.updates = 0
        if self.late:
            self.slots.fill_(NOT_SENT)

    def _laid(self, key: str, name: str, share: Tensor) -> Tensor | OffDeviceShare:
        """Return a share that is cut like the weight `name`, for the entry `key` of a checkpoint."""
        if not self._on_host or not self.is_trained(name):  # a buffer is whole on every rank
            return like(MASTER, share, self._inner.parameters.get(name, share))
        return OffDeviceShare.of(key, like(MASTER, share.to("meta"), self._inner.parameters[name]), share)

    @property
    def kept(self) -> list[Tensor]:
        """This rank's anchors, velocities and rounding errors, which only merges change."""
        return [share for each in (self.anchors, self.velocities, self.feedback) for share in each.values()]

    def added_to(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of a rank's state by category and by tier (`State.bytes`) together with those of `kept`."""
        where = "host" if self._on_host else "optimizer"
        return {**sizes, where: sizes.get(where, 0) + sum(share.nbytes for share in self.kept)}

    def swap(self) -> None:
        """Exchange the site's own weights and the anchors. A second call restores both."""
        for name, anchor in self.anchors.items():
            before = self.weight(name).clone()
            self.put(name, anchor)
            anchor.copy_(before)


def _renamed(share: Tensor | OffDeviceShare, key: str) -> Tensor | OffDeviceShare:
    return share if isinstance(share, Tensor) else replace(share, held=replace(share.held, key=key))
