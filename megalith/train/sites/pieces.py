"""Encodes whole tensors for messages: all elements, or only the largest elements of each chunk, with their indices.

The sorted indices are encoded in Elias-Fano code: the low bits of each index, and then the high bits of all indices in unary code, with a
one for each index and a zero for each increase of the high bits by one. The size of the encoded indices depends only on the number of
indices and of elements. If the indices are sparse, each takes less than one bit more than in the shortest possible code.
"""

import torch
from torch import Tensor

from megalith.spec.sites import CHUNK, Piece, chosen, low_bits, places_bits, places_bytes
from megalith.train.sites import codes


def encode(values: Tensor, piece: Piece) -> Tensor:
    """Encode the fp32 values of a piece, on the CPU, as uint8 [piece.bytes]. Values must be finite."""
    values = values.flatten()
    if piece.top_k is None:
        return codes.encode(values, piece.bits)
    places = largest(values, piece.top_k)
    return torch.cat((_pack(places, len(values)), codes.encode(values[places], piece.bits)))


def decode(encoded: Tensor, piece: Piece) -> Tensor:
    """Decode `encoded` (uint8, on the CPU) to the whole fp32 tensor. Raises ValueError if the bytes do not encode this piece."""
    if piece.top_k is None:
        return codes.decode(encoded, piece.numel, piece.bits).view(piece.shape)
    count = chosen(piece.numel, piece.top_k)
    head = places_bytes(piece.numel, count)
    whole = torch.zeros(piece.numel)
    whole[_unpack(encoded[:head], piece.numel, count)] = codes.decode(encoded[head:], count, piece.bits)
    return whole.view(piece.shape)


def largest(values: Tensor, top_k: int) -> Tensor:
    """Return the sorted indices of the elements with the largest magnitudes in each chunk of `values`. Of equal magnitudes, the first are
    chosen."""
    sizes = values.abs()
    cut = len(values) // CHUNK * CHUNK
    found = [_largest(sizes[:cut].view(-1, CHUNK), top_k).flatten()] if cut else []
    if cut < len(values):
        found.append(_largest(sizes[None, cut:], chosen(len(values) - cut, top_k))[0])
    return torch.cat(found).nonzero()[:, 0]


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return a mask, bool [chunks, n], of the `count` largest elements in each row of `sizes` [chunks, n]."""
    # The values that `topk` returns are certain, its places among equal values are not.
    least = sizes.topk(count, dim=1).values[:, -1:]
    above, equal = sizes > least, sizes == least
    room = count - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= room))


def _pack(places: Tensor, numel: int) -> Tensor:
    count, low = len(places), low_bits(numel, len(places))
    bits = torch.zeros(places_bits(numel, count), dtype=torch.uint8)
    bits[: count * low] = (places[:, None] >> torch.arange(low) & 1).flatten().to(torch.uint8)
    bits[count * low + (places >> low) + torch.arange(count)] = 1
    return codes.packed(bits, 1)


def _unpack(packed: Tensor, numel: int, count: int) -> Tensor:
    """The inverse of `_pack`. Raises ValueError if the bytes are not `count` indices below `numel`."""
    low = low_bits(numel, count)
    bits = codes.unpacked(packed, 1)[: places_bits(numel, count)].long()
    high = bits[count * low :].nonzero()[:, 0]
    if len(high) != count:
        raise ValueError(f"{len(high)} indices arrived, but {count} were expected")
    places = (high - torch.arange(count) << low) + (bits[: count * low].view(count, low) << torch.arange(low)).sum(dim=1)
    if count and int(places[-1]) >= numel:
        raise ValueError(f"an index is {int(places[-1])}, but the tensor has {numel} elements")
    return places
