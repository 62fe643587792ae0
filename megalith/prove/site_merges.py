"""Merges of sites in one process in numpy, written from the papers' formulas. The trainer's merges must equal the merges in
numpy bit for bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from megalith.spec.sites import Fragment, Piece, SitesSpec

F32 = np.float32
Tensors = dict[str, np.ndarray]


def encode(x: np.ndarray, bits: int) -> bytes:
    """Encode a tensor's difference in the form in which it is sent."""
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
    """Decode the tensor that was sent."""
    count = int(np.prod(shape))
    if bits == 32:
        return np.frombuffer(data, F32).reshape(shape)
    scales = np.frombuffer(data[: 4 * -(-count // 128)], F32)
    packed, each = np.frombuffer(data[scales.nbytes :], np.uint8), 8 // bits
    codes = ((packed[:, None] >> (bits * np.arange(each))) & (2**bits - 1)).ravel()[:count].astype(F32)
    middle = F32(1.5 if bits == 2 else {8: 127, 4: 7}[bits])
    return ((codes - middle) * np.repeat(scales, 128)[:count]).reshape(shape)


def encode_piece(x: np.ndarray, piece: Piece) -> bytes:
    """Encode a tensor in the form in which it is sent: either its largest elements with their positions, or all elements."""
    if piece.top_k is None:
        return encode(x, piece.bits)
    flat, places = x.astype(F32).ravel(), list[int]()
    for begin in range(0, len(flat), 4096):
        chunk = flat[begin : begin + 4096]
        count = math.ceil(piece.top_k * len(chunk) / 4096)
        places += sorted(begin + int(place) for place in np.argsort(-np.abs(chunk), kind="stable")[:count])
    low = int(math.log2(len(flat) / len(places)))
    bits = [place >> digit & 1 for place in places for digit in range(low)]
    for before, place in zip([0, *places], places, strict=False):  # unary: a zero for each step, then a one
        bits += [0] * ((place >> low) - (before >> low)) + [1]
    bits += [0] * ((len(flat) - 1 >> low) - (places[-1] >> low))
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes() + encode(flat[places], piece.bits)


def decode_piece(data: bytes, piece: Piece) -> np.ndarray:
    """Decode the tensor that was sent."""
    if piece.top_k is None:
        return decode(data, piece.shape, piece.bits)
    n = piece.numel
    count = sum(math.ceil(piece.top_k * min(4096, n - begin) / 4096) for begin in range(0, n, 4096))
    low = int(math.log2(n / count))
    length = count * (low + 1) + ((n - 1) >> low)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:length].astype(int)
    found, high, found_at = np.zeros(n, F32), 0, list[int]()
    for bit in bits[count * low :]:
        if bit:
            at = len(found_at)
            found_at.append((high << low) + sum(int(bits[at * low + digit]) << digit for digit in range(low)))
        else:
            high += 1
    found[found_at] = decode(data[-(-length // 8) :], (count,), piece.bits)
    return found.reshape(piece.shape)


@dataclass
class Reference:
    """All sites of a run, with unsharded tensors. `buffers`: names of the tensors that merges average."""

    spec: SitesSpec
    fragments: tuple[Fragment, ...]
    buffers: set[str]
    weights: list[Tensors]
    anchors: Tensors
    velocities: Tensors = field(default_factory=dict)
    feedback: list[Tensors] = field(default_factory=list)
    flying: list[tuple[int, int, list[bytes]]] = field(default_factory=list)  # step, fragment, bytes of each site
    sizes: list[int] = field(default_factory=list)
    late: Callable[[int, int, int], bool] = lambda merge, site, age: False
    """Called with (merge, site, age); returns True if a site's difference is too late for an asynchronous merge."""
    missed: dict[int, list[tuple[int, int, int, bytes]]] = field(default_factory=dict)  # fragment: site, step, age, bytes
    made: list[tuple[int, int, int, list[tuple[int, int, int]]]] = field(default_factory=list)
    """For every merge: the fragment, the step of the merge, the step at which the newest differences were taken, and the site,
    step and age of each difference."""
    used: list[list[int]] = field(default_factory=list)
    """The weights of the differences in every merge."""
    begun: dict[int, list[int]] = field(default_factory=dict)  # fragment: steps after which its differences were taken

    @classmethod
    def begin(cls, spec: SitesSpec, fragments: tuple[Fragment, ...], buffers: set[str], first: Tensors) -> "Reference":
        """Initialise all sites with the same weights."""
        zeros: Any = {name: np.zeros_like(value) for name, value in first.items()}
        copies = [{name: value.copy() for name, value in first.items()} for _ in range(spec.count)]
        kept = [{name: value.copy() for name, value in zeros.items()} for _ in range(spec.count)]
        return cls(spec, fragments, buffers, copies, {n: v.copy() for n, v in first.items()}, zeros, kept)

    def after_step(self, step: int, *, last: bool = False) -> None:
        """Send the fragments that are due after `step` steps, and merge those whose merge is due."""
        h, p = self.spec.inner_steps, self.spec.fragments
        due = [f for f in range(p) if step >= (f + 1) * h // p and (step - (f + 1) * h // p) % h == 0]
        self.now, self.ends = step, last
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
                what, less = self.anchors[piece.name] - weights[piece.name], piece.bits < 32 or piece.top_k
                if self.spec.error_feedback and less:
                    what = what + feedback[piece.name] * F32(self.spec.feedback_decay)
                message += (code := encode_piece(what, piece))
                if self.spec.error_feedback and less:
                    feedback[piece.name] = what - decode_piece(code, piece)
            messages.append(message)
        if self.spec.eager:
            for site, message in enumerate(messages):
                for name, early in self.early(number, site, message).items():
                    self.weights[site][name] = early
        self.flying.append((step, number, messages))
        self.sizes.append(len(messages[0]))

    def early(self, number: int, site: int, message: bytes) -> Tensors:
        """Return the anchors after an outer step with only one site's own difference, weighted by that site's share of the
        samples."""
        found, at, parts = Tensors(), 0, [one.share or 1 for one in self.spec.each] or [1] * self.spec.count
        for piece in self.fragments[number].pieces:
            size = len(encode_piece(np.zeros(piece.shape), piece))
            own = decode_piece(message[at : at + size], piece) * F32(parts[site] / sum(parts))
            at += size
            if piece.name not in self.buffers:
                if self.spec.momentum:
                    velocity = self.velocities[piece.name] * F32(self.spec.momentum) + own
                    own = own + velocity * F32(self.spec.momentum) if self.spec.nesterov else velocity
                found[piece.name] = self.anchors[piece.name] - own * F32(self.spec.lr)
        return found

    def merge(self, flight: tuple[int, int, list[bytes]]) -> None:
        if self.spec.staleness:
            self.merge_some(flight)
            return
        self.flying.remove(flight)
        _, number, messages = flight
        at, spec = 0, self.spec
        early = [self.early(number, site, message) for site, message in enumerate(messages)] if spec.eager else []
        for piece in self.fragments[number].pieces:
            size = len(encode_piece(np.zeros(piece.shape), piece))
            total = np.zeros(piece.shape, F32)
            parts = [one.share or 1 for one in spec.each] or [1] * spec.count
            parts = [part // math.gcd(*parts) for part in parts]
            for message, part in zip(messages, parts, strict=True):
                total = total + decode_piece(message[at : at + size], piece) * F32(part)
            at += size
            mean, rate, share = total / F32(sum(parts)), F32(spec.lr), F32(spec.own_share)
            if piece.name in self.buffers:
                rate, share = F32(1), F32(0)
            elif spec.momentum:
                velocity = self.velocities[piece.name] * F32(spec.momentum) + mean
                self.velocities[piece.name] = velocity
                mean = mean + velocity * F32(spec.momentum) if spec.nesterov else velocity
            self.anchors[piece.name] = self.anchors[piece.name] - mean * rate
            for site, weights in enumerate(self.weights):
                merged = self.anchors[piece.name]
                if spec.eager and piece.name not in self.buffers:
                    weights[piece.name] = weights[piece.name] + (merged - early[site][piece.name])
                    continue
                weights[piece.name] = weights[piece.name] * share + merged * F32(1 - spec.own_share) if share else merged.copy()

    def merge_some(self, flight: tuple[int, int, list[bytes]]) -> None:
        """Merge the differences that are not late. The weight of a difference is its number of steps times its site's share,
        divided by (1 + its age)."""
        self.flying.remove(flight)
        sent, number, messages = flight
        due = [(site, at, age + 1, data) for site, at, age, data in self.missed.get(number, [])]
        due = sorted(due + [(site, sent, 0, data) for site, data in enumerate(messages)], key=lambda one: one[:2])
        is_late = [not self.ends and self.late(len(self.made), one[0], one[2]) for one in due]
        taken = [one for one, late in zip(due, is_late, strict=True) if not late]
        self.missed[number] = [one for one, late in zip(due, is_late, strict=True) if late]
        self.made.append((number, self.now, sent, [one[:3] for one in taken]))
        self.begun.setdefault(number, [0]).append(sent)
        ends = self.begun[number]
        parts = [one.share or 1 for one in self.spec.each] or [1] * self.spec.count
        steps = [at - max(end for end in ends if end < at) for _, at, _, _ in taken]
        weights = [Fraction(step * parts[one[0]], 1 + one[2]) for step, one in zip(steps, taken, strict=True)]
        ratios = [weight / weights[0] for weight in weights]
        self.used.append([int(ratio * math.lcm(*(each.denominator for each in ratios))) for ratio in ratios])
        at = 0
        for piece in self.fragments[number].pieces:
            size, total = len(encode_piece(np.zeros(piece.shape), piece)), np.zeros(piece.shape, F32)
            for (*_, data), weight in zip(taken, self.used[-1], strict=True):
                total = total + decode_piece(data[at : at + size], piece) * F32(weight)
            at += size
            mean, rate, share = total / F32(sum(self.used[-1])), F32(self.spec.lr), F32(self.spec.own_share)
            if piece.name in self.buffers:
                rate, share = F32(1), F32(0)
            elif self.spec.momentum:
                velocity = self.velocities[piece.name] * F32(self.spec.momentum) + mean
                self.velocities[piece.name] = velocity
                mean = mean + velocity * F32(self.spec.momentum) if self.spec.nesterov else velocity
            merged = self.anchors[piece.name] = self.anchors[piece.name] - mean * rate
            for site, weights_there in enumerate(self.weights):
                keeps = share and any(one[:3] == (site, sent, 0) for one in taken)
                own = weights_there[piece.name]
                weights_there[piece.name] = own * share + merged * (F32(1) - share) if keeps else merged.copy()
