"""Division of a model into fragments for merges: their tensors, their bytes, and the steps after which each is sent. No torch.

A fragment has whole tensors, never a rank's share, so its bytes follow from the run file alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megalith.spec.sites.table import CHUNK, FULL, SitesSpec
from megalith.spec.state import Slot

BLOCK = 128
"""Neighbouring elements of a tensor that share a scale."""
HEAD_BYTES = 40
"""Bytes of the header of a fragment's differences: a kind, the fragment's number, its step, a request to stop, the site's
mean loss, the name of the common start, and a length."""
VERDICT_BYTES, STEP_BYTES = 76, 8
"""Bytes of the message that names the merged sites, and of each site's step in it, if merges are asynchronous."""
FRAME_BYTES, FRAME_PAYLOAD = 44, 1 << 20
"""Bytes that authentication adds to a frame, and the largest payload of a frame."""


class Piece(NamedTuple):
    """One unsharded tensor of a fragment, as it is sent."""

    name: str
    shape: tuple[int, ...]
    bits: int
    top_k: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the tensor's positions, scales and codes."""
        if self.top_k is None:
            return encoded_bytes(self.numel, self.bits)
        count = chosen(self.numel, self.top_k)
        return places_bytes(self.numel, count) + encoded_bytes(count, self.bits)

    @property
    def loses(self) -> bool:
        """True if the sent values are not exactly the whole difference."""
        return self.bits < FULL or self.top_k is not None


@dataclass(frozen=True)
class Fragment:
    """Whole tensors that are merged at the same time."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """The bytes of one site's difference, without HEAD_BYTES."""
        return sum(piece.bytes for piece in self.pieces)


def encoded_bytes(numel: int, bits: int) -> int:
    """Return the bytes of a tensor's difference: one fp32 scale for each block, then the codes, padded to a whole byte."""
    if bits == FULL:
        return 4 * numel
    return 4 * -(-numel // BLOCK) + -(-numel * bits // 8)


def chosen(numel: int, top_k: int) -> int:
    """Return how many elements of a tensor are sent: `top_k` of each CHUNK, and the same share of the last, shorter chunk,
    rounded up."""
    return numel // CHUNK * top_k + -(-(numel % CHUNK) * top_k // CHUNK)


def low_bits(numel: int, count: int) -> int:
    """Return how many low bits the code of Elias (1974) and Fano (1971) writes unchanged for each of `count` positions in
    `numel`. It writes the higher bits in unary."""
    return max(0, (numel // count).bit_length() - 1) if count else 0


def places_bits(numel: int, count: int) -> int:
    """Return the bits of `count` different positions in `numel`: for each position its low bits and a one, and a zero for
    each step of the high bits."""
    low = low_bits(numel, count)
    return count * (low + 1) + (max(0, numel - 1) >> low)


def places_bytes(numel: int, count: int) -> int:
    """Return the bytes of `count` different positions in `numel`."""
    return -(-places_bits(numel, count) // 8)


def fragments(shapes: Mapping[str, tuple[int, ...]], sites: SitesSpec) -> tuple[Fragment, ...]:
    """Cut a model into fragments of whole parts (embedding, block, head): in order of size, each part is added to the smallest
    fragment so far. `shapes`: the shape of every merged tensor, by its name in the whole model. A tied tensor has one name, and
    therefore one fragment. Equal blocks are assigned in turn, like Streaming DiLoCo's strided fragments (section 3.2)."""
    parts: dict[str, list[str]] = {}
    for name in shapes:
        parts.setdefault(part_of(name), []).append(name)
    sizes = {part: sum(prod(shapes[name]) for name in names) for part, names in parts.items()}
    held: list[list[str]] = [[] for _ in range(sites.fragments)]
    filled = [0] * sites.fragments
    for part in sorted(parts, key=lambda part: (-sizes[part], _order(part))):
        fragment = filled.index(min(filled))
        filled[fragment] += sizes[part]
        held[fragment] += parts[part]
    return tuple(
        Fragment(number, tuple(_piece(name, shapes[name], sites) for name in sorted(names))) for number, names in enumerate(held)
    )


def _piece(name: str, shape: tuple[int, ...], sites: SitesSpec) -> Piece:
    return Piece(name, shape, sites.bits, sites.top_k) if len(shape) > 1 else Piece(name, shape, FULL)


def wire_bytes(fragment: Fragment) -> int:
    """Return the bytes that one site sends to another for a fragment, without the overhead below TCP."""
    message = HEAD_BYTES + fragment.bytes
    return message + FRAME_BYTES * -(-message // FRAME_PAYLOAD)


def outer_slots(sites: SitesSpec | None) -> tuple[Slot, ...]:
    """Return the tensors that merges keep for each weight, sharded like the weights: an anchor; with momentum, a velocity;
    with error feedback, the unsent rest of the differences. Vectors and router biases have fewer tensors, but are counted
    like other weights."""
    if sites is None or sites.exchanges_gradients:
        return ()
    names = {"anchor": True, "velocity": sites.momentum > 0, "feedback": sites.feeds_back}
    return tuple(Slot(name, place=sites.place) for name, kept in names.items() if kept)


def verdict_bytes(steps: int = 0) -> int:
    """Return the bytes that the deciding site sends to each other site in a merge. `steps`: the number of sites whose step
    the message holds, if merges are asynchronous."""
    return VERDICT_BYTES + STEP_BYTES * steps + FRAME_BYTES


def part_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to, by its name in the whole model."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def _order(part: str) -> tuple[str, int]:
    name, _, number = part.partition(".")
    return name, int(number or 0)


def sent_after(step: int, sites: SitesSpec) -> Iterator[int]:
    """Yield the fragments whose differences are taken after `step` steps. Fragment p of P is first taken after (p + 1) H / P
    steps, rounded down, and then every H steps."""
    for number in range(sites.fragments):
        first = (number + 1) * sites.inner_steps // sites.fragments
        if step >= first and (step - first) % sites.inner_steps == 0:
            yield number
