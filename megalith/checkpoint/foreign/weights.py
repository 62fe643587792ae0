"""The mapping between transformers' tensors and Megalith's: which tensors hold the same numbers, and in which layout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Piece:
    """Some of Megalith's tensors, transformers' tensors with the same numbers, and the conversion in both directions."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Convert
    to_ours: Convert
    copied: bool = False
    """True if all of transformers' tensors hold the same numbers: the first tensor is read, and the others are compared with it.
    """

    def under(self, ours: str, theirs: str) -> "Piece":
        """Return the same piece with a prefix before each tensor name, one prefix for Megalith's names and one for transformers'."""
        return replace(self, ours=tuple(ours + name for name in self.ours), theirs=tuple(theirs + name for name in self.theirs))


def same(ours: str, theirs: str) -> Piece:
    """Return the `Piece` for a tensor that differs only in its name."""
    return Piece((ours,), (theirs,), list, list)


def transposed(ours: str, theirs: str) -> Piece:
    """Return the `Piece` for a matrix that transformers stores transposed, as [in, out]."""
    return Piece((ours,), (theirs,), lambda found: [found[0].T], lambda found: [found[0].T])


def joined(ours: Sequence[str], theirs: str, *, transpose: bool = False) -> Piece:
    """Return the `Piece` for tensors with equally many rows, which transformers concatenates by rows. `transpose`: transformers
    stores the result as [in, out]."""

    def to_theirs(found: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(tuple(found))
        return [whole.T if transpose else whole]

    def to_ours(found: Sequence[Tensor]) -> list[Tensor]:
        return list((found[0].T if transpose else found[0]).chunk(len(ours)))

    return Piece(tuple(ours), (theirs,), to_theirs, to_ours)


def interleaved(ours: Sequence[str], theirs: str, *, heads: int) -> Piece:
    """Return the `Piece` for tensors that each have the rows of `heads` heads. transformers stores them as one tensor: the rows
    of the first head from each tensor, then the rows of the second head, and so on."""

    def to_theirs(found: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack([one.unflatten(0, (heads, -1)) for one in found], dim=1).flatten(0, 2)]

    def to_ours(found: Sequence[Tensor]) -> list[Tensor]:
        return [one.flatten(0, 1) for one in found[0].unflatten(0, (heads, len(ours), -1)).unbind(1)]

    return Piece(tuple(ours), (theirs,), to_theirs, to_ours)


def turned_last(ours: str, theirs: str, *, heads: int, channels: int) -> Piece:
    """Return the `Piece` for a matrix with the rows of `heads` heads. Megalith rotates the last `channels` rows of each head,
    transformers the first."""

    def to_theirs(found: Sequence[Tensor]) -> list[Tensor]:
        return [found[0].unflatten(0, (heads, -1)).roll(channels, 1).flatten(0, 1)]

    def to_ours(found: Sequence[Tensor]) -> list[Tensor]:
        return [found[0].unflatten(0, (heads, -1)).roll(-channels, 1).flatten(0, 1)]

    return Piece((ours,), (theirs,), to_theirs, to_ours)


def stacked(ours: str, theirs: str, count: int) -> Piece:
    """Return the `Piece` for `count` experts. Megalith stores all experts as one tensor [experts, ...], transformers as one
    tensor each, with the expert's number at "{e}" in `theirs`."""
    names = tuple(theirs.replace("{e}", str(expert)) for expert in range(count))
    return Piece((ours,), names, lambda found: found[0].unbind(), lambda found: [torch.stack(tuple(found))])


def layers(pieces: Iterable[Piece], numbers: Iterable[int], theirs: str = "model.layers.") -> list[Piece]:
    """Return the pieces of a block once for each layer in `numbers`, with the layer's tensor names."""
    pieces = list(pieces)
    return [piece.under(f"blocks.{i}.", f"{theirs}{i}.") for i in numbers for piece in pieces]


def convert_to_theirs(pieces: Iterable[Piece], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert Megalith's weights to transformers'."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        found |= zip(piece.theirs, piece.to_theirs([weights[name] for name in piece.ours]), strict=True)
    return found


def convert_to_ours(pieces: Iterable[Piece], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert transformers' weights to Megalith's; tensors that no piece names are left out."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        found |= zip(piece.ours, piece.to_ours([weights[name] for name in piece.theirs]), strict=True)
    return found


EMBEDDING = same("embedding.weight", "model.embed_tokens.weight")
FINAL_NORM = same("head.norm.weight", "model.norm.weight")
OUTPUT = same("head.output.weight", "lm_head.weight")
"""Pieces of a model's embedding, final norm and output layer. transformers uses these tensor names in most families."""

ATTENTION = [same(f"attention.{ours}.weight", f"self_attn.{ours[0]}_proj.weight") for ours in ("q", "k", "v", "out")]
GATED_MLP = [same(f"mlp.{part}.weight", f"mlp.{part}_proj.weight") for part in ("gate", "up", "down")]
NORMS = [
    same("attention_norm.weight", "input_layernorm.weight"),
    same("mlp_norm.weight", "post_attention_layernorm.weight"),
]
"""Pieces of a block's attention, gated MLP and norms. transformers uses these tensor names in most families."""


def ends(tied: bool) -> list[Piece]:
    """Return the pieces of embedding, final norm and, unless tied, output."""
    return [EMBEDDING, FINAL_NORM] if tied else [EMBEDDING, FINAL_NORM, OUTPUT]
