"""Merges: when a fragment is due, its difference leaves for the other sites, and what they sent becomes new weights."""

import math
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.events import Merge
from megalith.spec.sites import FULL, HEAD_BYTES, Fragment, SitesSpec, sent_after, wire_bytes
from megalith.train.sites import codes, outer
from megalith.train.sites.state import NOT_SENT, OuterState
from megalith.train.sites.whole import Wholes

_HEAD = struct.Struct(">IQB3xd")  # fragment, step, a request to stop, mean loss; the transport puts 8 bytes of length in front
assert _HEAD.size + 8 == HEAD_BYTES


class Wire(Protocol):
    """How the rank that leads a site reaches the others (`fleet.secure.peers.Peers`)."""

    def send(self, message: bytes) -> None:
        """Send to all other sites, without waiting."""
        ...

    def receive(self, number: int, *, seconds: float) -> bytes:
        """Wait for the next message of a site."""
        ...


class OutOfStepError(RuntimeError):
    """Another site sent something else than is due: the sites do not run the same program."""


@dataclass(frozen=True)
class _Message:
    """A fragment as one site sends it."""

    fragment: int
    step: int
    stop: bool
    loss: float
    encoded: Tensor
    """Scales and codes: uint8 on the CPU."""

    def pack(self) -> bytes:
        return _HEAD.pack(self.fragment, self.step, self.stop, self.loss) + self.encoded.numpy().tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> "_Message":
        fragment, step, stop, loss = _HEAD.unpack_from(data)
        return cls(fragment, step, bool(stop), loss, torch.frombuffer(bytearray(data[_HEAD.size :]), dtype=torch.uint8))


class Sites:
    """One rank's part in the merges of its site with the others. All ranks of all sites call its methods at the same steps."""

    def __init__(
        self,
        spec: SitesSpec,
        fragments: Sequence[Fragment],
        state: OuterState,
        wholes: Wholes,
        *,
        site: int,
        wire: Wire | None,
        patience: float,
    ) -> None:
        """`wire`: on the rank that leads its site; None on others. `patience`: seconds to wait for a site."""
        self.spec, self.fragments, self.state, self.site = spec, tuple(fragments), state, site
        self._wholes, self._wire, self._patience = wholes, wire, patience
        self._stop = False
        self._losses = deque[float](maxlen=spec.inner_steps)
        self._own: dict[int, _Message] = {}  # on the rank that leads, what is under way

    @property
    def leads(self) -> bool:
        """True on the rank that sends and receives for its site."""
        return self._wholes.rank == 0

    def note(self, loss: float) -> None:
        """Take note of the loss of a step of this site."""
        self._losses.append(loss)

    def resume(self) -> None:
        """Send again what was under way when the state that was loaded was saved."""
        sent = self.state.sent.tolist()
        for step, number in sorted((step, number) for number, step in enumerate(sent) if step != NOT_SENT):
            if self.leads:
                self._post(_Message(number, step, False, math.nan, self.state.flights[number].clone()))

    def due(self, step: int, *, last: bool) -> bool:
        """True if something is sent or merged after `step` steps."""
        return last or bool(self._arriving(step)) or any(True for _ in sent_after(step, self.spec))

    def after_step(self, step: int, *, stop: bool, last: bool) -> tuple[list[Merge], bool]:
        """Send and merge what is due after `step` steps of the run. `stop`: this site was asked to stop, and says so with what it sends
        next. `last`: the run ends here, so that everything is merged.

        Returns the merges that were made, on the rank that leads, and True if the sites are to stop here: all of them hear of it with the
        same merge, so at the same step.
        """
        self._stop |= stop
        made, stopping = list[Merge](), False
        for number in self._arriving(step):
            made, stopping = self._merged(number, step, made, stopping)
        for number in sent_after(step, self.spec):
            self._send(number, step)
            if not self.spec.overlap:
                made, stopping = self._merged(number, step, made, stopping)
        if last:
            made, stopping = self._merge_all(step, made, stopping)
        return made, stopping

    def _arriving(self, step: int) -> list[int]:
        """The fragments that are merged after `step` steps, among those that were sent before."""
        return [
            number
            for number, sent in enumerate(self.state.sent.tolist())
            if sent != NOT_SENT and sent + self.spec.overlap == step
        ]

    def _merge_all(self, step: int, made: list[Merge], stopping: bool) -> tuple[list[Merge], bool]:
        """Merge what is under way, in the order in which it was sent, then what was not sent at this step. All sites end with the merged
        weights."""
        fresh = set(sent_after(step, self.spec))
        under_way = sorted((sent, number) for number, sent in enumerate(self.state.sent.tolist()) if sent != NOT_SENT)
        for _, number in under_way:
            made, stopping = self._merged(number, step, made, stopping)
        for fragment in self.fragments:
            if fragment.number not in fresh:
                self._send(fragment.number, step)
                made, stopping = self._merged(fragment.number, step, made, stopping)
        for name, anchor in self.state.anchors.items():
            self.state.weights[name].copy_(anchor)
        return made, stopping

    def _merged(self, number: int, step: int, made: list[Merge], stopping: bool) -> tuple[list[Merge], bool]:
        merge, stop = self._merge(number, step)
        return [*made, *([merge] if merge else [])], stopping or stop

    # --- one fragment ---

    @torch.no_grad()
    def _send(self, number: int, step: int) -> None:
        """Take the difference of a fragment and let it leave."""
        fragment, state, wholes = self.fragments[number], self.state, self._wholes
        mine = [piece for piece in fragment.pieces if piece.name in state.anchors]
        values = {
            piece.name: outer.difference(state.anchors[piece.name], state.weights[piece.name], state.feedback.get(piece.name))
            for piece in mine
        }
        whole = wholes.gather(fragment, values)
        message = torch.empty(fragment.bytes, dtype=torch.uint8)
        if self.leads:
            torch.cat([codes.encode(whole[piece.name].flatten(), piece.bits) for piece in fragment.pieces], out=message)
        if self.spec.feeds_back and any(piece.bits < FULL for piece in fragment.pieces):
            told = self._decoded(fragment, wholes.tell(message))
            for name in values.keys() & state.feedback.keys():
                state.feedback[name].copy_(values[name] - told[name].to(values[name].device))
        state.sent[number] = step
        if self.leads:
            if number in state.flights:
                state.flights[number].copy_(message)
            loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
            self._post(_Message(number, step, self._stop, loss, message))

    def _post(self, message: _Message) -> None:
        self._own[message.fragment] = message
        if self._wire is not None:
            self._wire.send(message.pack())

    @torch.no_grad()
    def _merge(self, number: int, step: int) -> tuple[Merge | None, bool]:
        """Wait for a fragment of all sites, and update the merged weights and the site's own."""
        fragment, state = self.fragments[number], self.state
        began = time.perf_counter()
        messages = self._receive(number) if self.leads else []
        waited = time.perf_counter() - began
        table = torch.zeros(self.spec.count, 1 + fragment.bytes, dtype=torch.uint8)
        for row, message in zip(table, messages, strict=False):
            row[0], row[1:] = int(message.stop), message.encoded
        self._wholes.tell(table)
        theirs = [self._decoded(fragment, row[1:]) for row in table]
        spread = torch.zeros(2, dtype=torch.float64)
        for piece in fragment.pieces:
            if piece.name in state.anchors:
                self._update(piece.name, [each[piece.name] for each in theirs], spread)
        if self._wholes.size > 1:
            dist.all_reduce(spread, group=self._wholes.group)
        sent, state.sent[number] = int(state.sent[number]), NOT_SENT
        stop = bool(table[:, 0].any())
        if not self.leads:
            return None, stop
        others = (self.spec.count - 1) * wire_bytes(fragment)
        norm, apart = (float(value) ** 0.5 for value in spread)
        return Merge(
            step=step,
            sent=sent,
            fragment=number,
            sites=self.spec.count,
            losses=[None if math.isnan(message.loss) else message.loss for message in messages],
            bytes_sent=others,
            bytes_received=others,
            waited=waited,
            seconds=time.perf_counter() - began,
            norm=norm,
            spread=apart,
        ), stop

    def _receive(self, number: int) -> list[_Message]:
        """This fragment's messages of all sites, in the order of their numbers."""
        own = self._own.pop(number)
        found = []
        for site in range(self.spec.count):
            if site == self.site:
                found.append(own)
                continue
            assert self._wire is not None
            message = _Message.unpack(self._wire.receive(site, seconds=self._patience))
            if (message.fragment, message.step, len(message.encoded)) != (number, own.step, self.fragments[number].bytes):
                raise OutOfStepError(
                    f"site {site} sent fragment {message.fragment} of step {message.step} in {len(message.encoded)} bytes, and site "
                    f"{self.site} expects fragment {number} of step {own.step} in {self.fragments[number].bytes}. All sites must run "
                    "the same version and run file"
                )
            found.append(message)
        return found

    def _decoded(self, fragment: Fragment, encoded: Tensor) -> dict[str, Tensor]:
        """This rank's boxes of the values that `encoded` stands for, fp32 on the CPU."""
        found, at = {}, 0
        for piece in fragment.pieces:
            if piece.name in self.state.anchors:
                whole = codes.decode(encoded[at : at + piece.bytes], piece.numel, piece.bits).view(piece.shape)
                found[piece.name] = self._wholes.share(piece.name, whole)
            at += piece.bytes
        return found

    def _update(self, name: str, theirs: Sequence[Tensor], spread: Tensor) -> None:
        """Merge this rank's share of one tensor. `spread` [2]: squares of the mean, and of the distance to it, are added there."""
        state = self.state
        gradient = outer.mean(theirs)
        if name in self._wholes.owned:
            spread[0] += gradient.double().square().sum()
            spread[1] += sum((each - gradient).double().square().sum() for each in theirs) / len(theirs)
        gradient = gradient.to(state.anchors[name].device)
        if state.is_trained(name):
            outer.outer_step(state.anchors[name], state.velocities.get(name), gradient, self.spec)
        else:
            outer.average(state.anchors[name], gradient)
        outer.mix(state.weights[name], state.anchors[name], self.spec.own_share if state.is_trained(name) else 0.0)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The merged weights are the model's while the block runs."""
        self.state.swap()
        try:
            yield
        finally:
            self.state.swap()
