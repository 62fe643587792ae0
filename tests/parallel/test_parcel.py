"""Shares of weights in one message: all ranks' messages together are the whole weight, rounded if it is sent in 8 bits."""

from typing import NamedTuple

import pytest
import torch

from megalith.kernels.elements import E4M3
from megalith.kernels.narrow import in_slabs
from megalith.kernels.quantise import Scaling
from megalith.parallel.parcel import Item, Parcel

TILES = Scaling(E4M3, (4, 4))


class Given(NamedTuple):
    """A weight: its shape, the dim that shards cut, and its format in the message."""

    shape: tuple[int, ...]
    dim: int = 0
    scaling: Scaling | None = TILES


WEIGHTS = {
    "a matrix between vectors of odd lengths": (Given((7,), 0, None), Given((16, 10)), Given((5,), 0, None)),
    "a last share that is shorter": (Given((20, 6)), Given((18, 5))),
    "ranks without a share": (Given((4, 8)), Given((1,), 0, None), Given((3, 3), 0, None)),
    "experts cut along either dim": (Given((3, 6, 16), 2), Given((3, 16, 6), 1), Given((2, 8, 6), 1, None)),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("given", WEIGHTS.values(), ids=WEIGHTS)
def test_messages_of_all_ranks_are_the_rounded_weights(given: tuple[Given, ...], ranks: int) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(one.shape).bfloat16() * 2.0 ** torch.randint(-9, 9, one.shape) for one in given]
    chunks = [4 * -(-one.shape[one.dim] // (4 * ranks)) if one.scaling else -(-one.shape[one.dim] // ranks) for one in given]
    found = [torch.full_like(weight, torch.nan) for weight in weights]
    parcel = Parcel(Item(out, one.dim, chunk, one.scaling) for out, one, chunk in zip(found, given, chunks, strict=True))
    messages = torch.stack([parcel.message() for _ in range(ranks)])
    for rank, message in enumerate(messages):
        shares = (
            weight.float().movedim(one.dim, 0)[rank * chunk : (rank + 1) * chunk]
            for weight, one, chunk in zip(weights, given, chunks, strict=True)
        )
        parcel.pack(message, shares)
    parcel.unpack(messages)
    for out, weight, one in zip(found, weights, given, strict=True):
        assert torch.equal(out, weight if one.scaling is None else in_slabs(weight, one.scaling))
