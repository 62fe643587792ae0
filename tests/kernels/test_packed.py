"""Rows in 8 bits are the numbers to which products round them, in 51.6 % of the bytes."""

from math import prod

import pytest
import torch

from megalith.kernels.elements import E4M3, E5M2
from megalith.kernels.narrow import in_slabs
from megalith.kernels.packed import pack, pack_tiles, scales_of, unpack, unpack_tiles, width_of
from megalith.kernels.quantise import ALL, Scale, Scaling

TILES = Scaling(E4M3, (1, 128))


def rows(count: int, columns: int) -> torch.Tensor:
    """Return rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(-60, 60, (count, columns), generator=generator).float().exp2()
    return (torch.randn(count, columns, generator=generator) * sizes).bfloat16()


@pytest.mark.parametrize("scaling", [TILES, Scaling(E5M2, (1, 32)), Scaling(E4M3, (1, ALL)), Scaling(E4M3, (1, 48))], ids=str)
@pytest.mark.parametrize("shape", [(700, 256), (5, 128), (1, 100), (0, 64), (1, 130), (505, 130)])
def test_what_arrives_are_the_numbers_that_a_product_rounds_rows_to(scaling: Scaling, shape: tuple[int, int]) -> None:
    """Rounding them again changes nothing, so experts compute with the same factors."""
    x = rows(*shape)
    packed = pack(x, scaling)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], width_of(shape[1], scaling))
    found = unpack(packed, shape[1], scaling, x.dtype)
    expected = in_slabs(x, scaling)
    assert torch.equal(found, expected) and torch.equal(in_slabs(found, scaling), expected)


def test_a_row_has_a_scale_in_fp32_for_each_128_numbers() -> None:
    assert width_of(7168, TILES) / (2 * 7168) == 132 / 256
    assert width_of(100, Scaling(E4M3, (1, ALL))) == 104


def test_a_number_that_is_not_finite_makes_its_tile_nan() -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    x[0, 3], x[1, 200] = torch.inf, torch.nan
    found = unpack(pack(x, TILES), 256, TILES, x.dtype)
    assert (
        found[0, :128].isnan().all()
        and found[1, 128:].isnan().all()
        and (found[0, 128:] == 1).all()
        and (found[1, :128] == 1).all()
    )


def tiles_of(x: torch.Tensor, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(scales_of(x.shape, scaling))
    pack_tiles(x, codes, scales, scaling)
    return codes, scales


@pytest.mark.parametrize("shape", [(512, 300), (5, 128), (3, 64, 48), (0, 64), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("scale", ["up", "down", "fp32"])
def test_tiles_of_a_weight_are_the_numbers_that_a_product_rounds_it_to(shape: tuple[int, ...], tile: int, scale: Scale) -> None:
    """Rounding them again changes nothing, and a shard of whole tiles has the codes and scales of the whole weight. With scales in fp32
    they are rounded to bf16 on arrival, and products round these to the same codes and scales: a tile's largest number is one of bf16's."""
    scaling = Scaling(E4M3, (tile, tile), scale)
    x = rows(shape[0], prod(shape[1:])).view(shape)
    codes, scales = tiles_of(x, scaling)
    found = torch.empty_like(x)
    unpack_tiles(codes, scales, found, scaling)
    expected = in_slabs(x, scaling)
    assert torch.equal(found, expected.bfloat16()) and torch.equal(in_slabs(found, scaling), expected)
    again = tiles_of(found, scaling)  # products of codes have the same factors, too
    assert torch.equal(again[1], scales) or scale == "up"  # the smallest power of two may be smaller for rounded numbers
    assert torch.equal(again[0], codes) or scale == "up"
    for first in range(0, shape[-2], tile):
        part = tiles_of(x[..., first : first + tile, :], scaling)
        assert torch.equal(part[0], codes[..., first : first + tile, :])
        assert torch.equal(part[1], scales[..., first // tile : first // tile + 1, :])
