"""Merges of sites in one process and in numpy, from the papers' formulas: what the trainer's must equal bit for bit."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megalith.spec.sites import Fragment, SitesSpec

F32 = np.float32
Tensors = dict[str, np.ndarray]


def encode(x: np.ndarray, bits: int) -> bytes:
    """A tensor's difference as it is sent."""
    x = x.astype(F32).ravel()
    if bits == 32:
        return x.tobytes()
    blocks = np.zeros((-(-len(x) // 128), 128), F32)
    blocks.ravel()[: len(x)] = x
    if bits == 2:
        squares = blocks * blocks
        while squares.shape[1] > 1:
            squares = squares[:, : squares.shape[1] // 2] + squares[:, squares.shape[1] // 2 :]
        counts = np.minimum(128, len(x) - 128 * np.arange(len(blocks))).astype(F32)
        scales = np.sqrt(squares[:, 0] / counts)
        least, most, middle = -2, 1, 2
    else:
        most = {8: 127, 4: 7}[bits]
        scales = np.abs(blocks).max(axis=1) / F32(most)
        least, middle = -most, most
    divided = blocks / np.where(scales > 0, scales, F32(1))[:, None]
    whole = np.floor(divided) if bits == 2 else np.rint(divided)
    codes = (np.clip(whole, least, most).astype(int) + middle).ravel()[: len(x)]
    each = 8 // bits
    codes = np.append(codes, np.zeros(-len(codes) % each, int)).reshape(-1, each)
    packed = (codes << (bits * np.arange(each))).sum(axis=1).astype(np.uint8)
    return scales.astype(F32).tobytes() + packed.tobytes()


def decode(data: bytes, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """The tensor that was sent."""
    count = int(np.prod(shape))
    if bits == 32:
        return np.frombuffer(data, F32).reshape(shape)
    scales = np.frombuffer(data[: 4 * -(-count // 128)], F32)
    packed, each = np.frombuffer(data[scales.nbytes :], np.uint8), 8 // bits
    codes = ((packed[:, None] >> (bits * np.arange(each))) & (2**bits - 1)).ravel()[:count].astype(F32)
    middle = F32(1.5 if bits == 2 else {8: 127, 4: 7}[bits])
    return ((codes - middle) * np.repeat(scales, 128)[:count]).reshape(shape)


@dataclass
class Reference:
    """All sites of a run, on whole tensors. `buffers`: names of tensors that are averaged."""

    spec: SitesSpec
    fragments: tuple[Fragment, ...]
    buffers: set[str]
    weights: list[Tensors]
    anchors: Tensors
    velocities: Tensors = field(default_factory=dict)
    feedback: list[Tensors] = field(default_factory=list)
    flying: list[tuple[int, int, list[bytes]]] = field(default_factory=list)  # step, fragment, each site's bytes
    bytes: list[int] = field(default_factory=list)

    @classmethod
    def begin(cls, spec: SitesSpec, fragments: tuple[Fragment, ...], buffers: set[str], first: Tensors) -> "Reference":
        """All sites begin with the same weights."""
        zeros: Any = {name: np.zeros_like(value) for name, value in first.items()}
        copies = [{name: value.copy() for name, value in first.items()} for _ in range(spec.count)]
        kept = [{name: value.copy() for name, value in zeros.items()} for _ in range(spec.count)]
        return cls(spec, fragments, buffers, copies, {n: v.copy() for n, v in first.items()}, zeros, kept)

    def after_step(self, step: int, *, last: bool = False) -> None:
        """Send and merge what is due after `step` steps."""
        h, p = self.spec.inner_steps, self.spec.fragments
        due = [f for f in range(p) if step >= (f + 1) * h // p and (step - (f + 1) * h // p) % h == 0]
        for flight in [one for one in self.flying if one[0] + self.spec.overlap == step]:
            self.merge(flight)
        for number in due:
            self.send(number, step)
            if not self.spec.overlap:
                self.merge(self.flying[-1])
        if last:
            for flight in sorted(self.flying, key=lambda one: one[:2]):
                self.merge(flight)
            for number in set(range(p)) - set(due):
                self.send(number, step)
                self.merge(self.flying[-1])
            for weights in self.weights:
                weights.update({name: value.copy() for name, value in self.anchors.items()})

    def send(self, number: int, step: int) -> None:
        messages = []
        for weights, feedback in zip(self.weights, self.feedback, strict=True):
            message = b""
            for piece in self.fragments[number].pieces:
                what = self.anchors[piece.name] - weights[piece.name]
                if self.spec.error_feedback and piece.bits < 32:
                    what = what + feedback[piece.name]
                message += (code := encode(what, piece.bits))
                if self.spec.error_feedback and piece.bits < 32:
                    feedback[piece.name] = what - decode(code, piece.shape, piece.bits)
            messages.append(message)
        self.flying.append((step, number, messages))
        self.bytes.append(len(messages[0]))

    def merge(self, flight: tuple[int, int, list[bytes]]) -> None:
        self.flying.remove(flight)
        _, number, messages = flight
        at, spec = 0, self.spec
        for piece in self.fragments[number].pieces:
            size = len(encode(np.zeros(piece.shape), piece.bits))
            total = np.zeros(piece.shape, F32)
            parts = [one.share or 1 for one in spec.each] or [1] * spec.count
            parts = [part // math.gcd(*parts) for part in parts]
            for message, part in zip(messages, parts, strict=True):
                total = total + decode(message[at : at + size], piece.shape, piece.bits) * F32(part)
            at += size
            mean, rate, share = total / F32(sum(parts)), F32(spec.lr), F32(spec.own_share)
            if piece.name in self.buffers:
                rate, share = F32(1), F32(0)
            elif spec.momentum:
                velocity = self.velocities[piece.name] * F32(spec.momentum) + mean
                self.velocities[piece.name] = velocity
                mean = mean + velocity * F32(spec.momentum) if spec.nesterov else velocity
            self.anchors[piece.name] = self.anchors[piece.name] - mean * rate
            for weights in self.weights:
                merged = self.anchors[piece.name]
                weights[piece.name] = weights[piece.name] * share + merged * F32(1 - spec.own_share) if share else merged.copy()
