"""Division of a model into the fragments that sites merge: each fragment's tensors, its bytes, and the steps after which it is
sent. No torch. A fragment has whole tensors, never a rank's share, so its bytes do not depend on the plan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megalith.spec.sites.table import CHUNK, FULL, SitesSpec
from megalith.spec.state import Slot

BLOCK = 128
"""Number of successive sent elements of a tensor that share a scale."""
HEAD_BYTES = 48
"""Bytes of the header of a message with a fragment: kind, fragment number, step, request to stop, the site's mean loss, name of
the line of merges, digest of the merged weights, and length."""
VERDICT_BYTES, STEP_BYTES = 76, 8
"""Bytes of the message that names the merged sites, and further bytes for each site's step, if merges are asynchronous."""
FRAME_BYTES, FRAME_PAYLOAD = 44, 1 << 20
"""Bytes that authentication adds to each frame of a connection, and the largest payload of a frame."""


class Piece(NamedTuple):
    """Format in which one unsharded tensor of a fragment is sent."""

    name: str
    shape: tuple[int, ...]
    bits: int
    top_k: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the sent elements: their positions (with top_k), scales and codes."""
        if self.top_k is None:
            return encoded_bytes(self.numel, self.bits)
        count = chosen(self.numel, self.top_k)
        return places_bytes(self.numel, count) + encoded_bytes(count, self.bits)

    @property
    def loses(self) -> bool:
        """True if rounding or top_k changes the sent tensor."""
        return self.bits < FULL or self.top_k is not None


@dataclass(frozen=True)
class Fragment:
    """Whole tensors that are merged at the same time."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one site's tensors for a merge of the fragment, without HEAD_BYTES."""
        return sum(piece.bytes for piece in self.pieces)


def encoded_bytes(numel: int, bits: int) -> int:
    """Return the bytes of an encoded tensor: one fp32 scale for each BLOCK of elements, then all codes, padded to a whole
    byte."""
    if bits == FULL:
        return 4 * numel
    return 4 * -(-numel // BLOCK) + -(-numel * bits // 8)


def chosen(numel: int, top_k: int) -> int:
    """Return how many elements of a tensor are sent: `top_k` from each CHUNK, and the same share, rounded up, from the last chunk
    if it is shorter."""
    return numel // CHUNK * top_k + -(-(numel % CHUNK) * top_k // CHUNK)


def low_bits(numel: int, count: int) -> int:
    """Return how many low bits of each position the Elias-Fano code (Elias 1974, Fano 1971) stores unchanged, for `count`
    positions among `numel`. The code stores the higher bits in unary."""
    return max(0, (numel // count).bit_length() - 1) if count else 0


def places_bits(numel: int, count: int) -> int:
    """Return the size in bits of the Elias-Fano code of `count` different positions among `numel`."""
    low = low_bits(numel, count)
    return count * (low + 1) + (max(0, numel - 1) >> low)


def places_bytes(numel: int, count: int) -> int:
    """Return the size in bytes of the Elias-Fano code of `count` different positions among `numel`."""
    return -(-places_bits(numel, count) // 8)


def fragments(shapes: Mapping[str, tuple[int, ...]], sites: SitesSpec) -> tuple[Fragment, ...]:
    """Cut a model into fragments of whole parts (embedding, block, head): parts are sorted by size, the largest first, and each
    one is added to the fragment that is then the smallest. So blocks of equal size are assigned to the fragments in turn, like
    Streaming DiLoCo's strided fragments (section 3.2). `shapes`: the shape of every merged tensor, by its name in the whole
    model; a tied tensor has one name."""
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
    """Return the bytes that one site sends to another one in a merge of a fragment, without TCP/IP headers."""
    message = HEAD_BYTES + fragment.bytes
    return message + FRAME_BYTES * -(-message // FRAME_PAYLOAD)


def outer_slots(sites: SitesSpec | None, *, on_device: bool = False) -> tuple[Slot, ...]:
    """Return the slots of the tensors that merges keep for each weight (`on_device`: only those in device memory), sharded like the
    weights: the anchor (the weights of the newest merge), the velocity (with outer momentum), and the unsent rest (with error feedback).
    Vectors and router biases have fewer of these tensors, but are counted like other weights."""
    if sites is None or sites.exchanges_gradients or (on_device and sites.place != "device"):
        return ()
    names = {"anchor": True, "velocity": sites.momentum > 0, "feedback": sites.feeds_back}
    return tuple(Slot(name, place=sites.place) for name, kept in names.items() if kept)


def verdict_bytes(steps: int = 0) -> int:
    """Return the bytes of the message by which the deciding site names the sites of a merge. `steps`: the number of sites whose
    step is in the message, if merges are asynchronous."""
    return VERDICT_BYTES + STEP_BYTES * steps + FRAME_BYTES


def part_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to, by its name in the whole model."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def _order(part: str) -> tuple[str, int]:
    name, _, number = part.partition(".")
    return name, int(number or 0)


def sent_after(step: int, sites: SitesSpec) -> Iterator[int]:
    """Yield the fragments that sites send after `step` steps. With P fragments and H inner steps, fragment p is first sent after
    (p + 1) H / P steps, rounded down, and then every H steps."""
    for number in range(sites.fragments):
        first = (number + 1) * sites.inner_steps // sites.fragments
        if step >= first and (step - first) % sites.inner_steps == 0:
            yield number
