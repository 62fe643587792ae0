"""Blocks and their scales: the definition block by block, the fast path to its numbers, and shards cut along borders of blocks."""

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from megalith.kernels.elements import E2M1, E4M3, E5M2, Element, rounded
from megalith.kernels.quantise import ALL, QuantisedTensor, Scale, Scaling, narrowed, quantise

BLOCKS = [(1, 16), (16, 1), (16, 16), (1, ALL), (ALL, 1), (ALL, ALL), (7, 5)]
FORMATS = [E4M3, E5M2, E2M1]


def lively(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers whose blocks have very different magnitudes."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random) * torch.exp2(torch.randint(-20, 20, shape, generator=random).float())


def blocks(shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield the blocks of a matrix of this shape: place, rows, columns."""
    rows, columns = block[0] or shape[-2], block[1] or shape[-1]
    for i, j in product(range(-(-shape[-2] // rows)), range(-(-shape[-1] // columns))):
        yield i, j, slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)


def plain(x: Tensor, element: Element, scale: Scale, whole: float) -> tuple[Tensor, float, float]:
    """Return one block in float64 by the papers' formulas: the numbers of its codes, its scale, and the whole tensor's scale."""
    amax = float(x.abs().max())
    if scale == "fp32":
        by = torch.tensor(element.largest) / torch.tensor(amax) if amax else torch.tensor(1.0)
        return rounded(x * by, element), float(1 / by), 1.0
    if scale == "e4m3":
        by_all = torch.tensor(element.largest * 448) / torch.tensor(whole)
        inner = rounded(torch.tensor(amax) / element.largest * by_all, E4M3)
        return rounded(x * (by_all / inner if inner else 0.0), element), float(inner), float(1 / by_all)
    ratio = amax / element.largest if scale == "up" else 2.0 ** math.floor(math.log2(amax)) / 2.0**element.top
    k = math.ceil(math.log2(ratio))
    return rounded(x * 2.0**-k, element), 2.0**k, 1.0


@pytest.mark.parametrize("scale", ["up", "down", "fp32", "e4m3"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("element", FORMATS, ids=lambda element: element.name)
def test_each_block_has_the_scale_of_its_largest_number(element: Element, block: tuple[int, int], scale: Scale) -> None:
    x = lively(33, 40)
    found = quantise(x, Scaling(element, block, scale))
    numbers = found.decoded()
    for i, j, rows, columns in blocks((33, 40), block):
        codes, inner, outer = plain(x[rows, columns], element, scale, float(x.abs().max()))
        assert float(found.scales[i, j]) == inner
        assert (1.0 if found.whole is None else float(found.whole)) == outer
        assert torch.equal(numbers[rows, columns], codes * inner * outer)


def test_matrices_are_apart() -> None:
    x = lively(3, 8, 32)
    for scale in ("up", "e4m3"):
        whole = quantise(x, Scaling(E4M3, (1, 16), scale))
        for number, one in enumerate(x):
            assert torch.equal(whole.codes[number], quantise(one, Scaling(E4M3, (1, 16), scale)).codes)


@pytest.mark.parametrize("scale", ["up", "down", "fp32", "e4m3"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("element", FORMATS, ids=lambda element: element.name)
def test_the_quick_way_draws_alike(element: Element, block: tuple[int, int], scale: Scale) -> None:
    x, draws, scaling = (
        lively(2, 33, 40),
        torch.rand(2, 33, 40, generator=torch.Generator().manual_seed(1)),
        Scaling(element, block, scale),
    )
    found = quantise(x, scaling, draws=draws).decoded()
    assert torch.equal(narrowed(x, scaling, draws=draws), found)
    assert not torch.equal(narrowed(x, scaling), found)


@pytest.mark.parametrize("scale", ["fp32", "e4m3"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("element", FORMATS, ids=lambda element: element.name)
def test_the_quick_way_has_scales_that_are_no_powers_of_two(element: Element, block: tuple[int, int], scale: Scale) -> None:
    x = lively(3, 33, 40)
    x[0, 3, 4], x[1, 7], x[2, 20:] = math.nan, 0.0, x[2, 20:] * 2.0**-60
    scaling = Scaling(element, block, scale)
    found, numbers = quantise(x.bfloat16(), scaling).decoded(), narrowed(x.bfloat16(), scaling)
    assert numbers.dtype == torch.float32, "bf16 has not all of them"
    assert torch.equal(numbers.isnan(), found.isnan()) and torch.equal(numbers.nan_to_num(), found.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", ["up", "down"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("element", FORMATS, ids=lambda element: element.name)
def test_the_quick_way_gives_the_same_numbers(element: Element, block: tuple[int, int], scale: Scale, dtype: torch.dtype) -> None:
    """This holds in bf16 too, which can represent all of these numbers."""
    x = lively(2, 33, 40).to(dtype)
    x[0, 3, 4], x[1, 5, 6], x[0, 7], x[1, 20:] = math.nan, math.inf, 0.0, x[1, 20:] * 2.0**-60
    scaling = Scaling(element, block, scale)
    found, numbers = quantise(x, scaling), narrowed(x, scaling)
    assert numbers.dtype == dtype
    assert torch.equal(numbers.isnan(), found.decoded().isnan())
    assert torch.equal(numbers.nan_to_num().float(), found.decoded().nan_to_num())


@pytest.mark.parametrize("scale", ["up", "down", "fp32", "e4m3"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan(bad: float, scale: Scale) -> None:
    """A cast alone would turn an infinity into an ordinary number."""
    x = lively(4, 32)
    x[1, 20] = bad
    numbers = quantise(x, Scaling(E4M3, (1, 16), scale)).decoded()
    assert numbers[1, 16:].isnan().all()
    assert scale == "e4m3" or numbers.isnan().sum() == 16


@pytest.mark.parametrize("scale", ["up", "down", "fp32", "e4m3"])
def test_nothing_stays_nothing(scale: Scale) -> None:
    for shape in ((4, 32), (0, 32), (32, 0)):
        found = quantise(torch.zeros(shape), Scaling(E2M1, (1, 16), scale))
        assert torch.equal(found.decoded(), torch.zeros(shape))


def test_scales_of_nvfp4_reach_from_the_smallest_block_to_the_largest() -> None:
    """A block 2^17 times smaller than the largest has scale 0, but one 2^12 times smaller has a usable scale."""
    x = torch.ones(3, 16) * torch.tensor([[1.0], [2.0**-12], [2.0**-20]])
    numbers = quantise(x, Scaling(E2M1, (1, 16), "e4m3")).decoded()
    torch.testing.assert_close(numbers[:2], x[:2], rtol=2**-3, atol=0)
    assert not numbers[2].any()


# --- cuts ---


def cut(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    return [part.contiguous() for part in x.chunk(parts, dim)]


def joined(parts: list[QuantisedTensor], dim: int) -> tuple[Tensor, Tensor]:
    return torch.cat([part.codes for part in parts], dim), torch.cat([part.scales for part in parts], dim)


@pytest.mark.parametrize("scale", ["up", "down", "fp32"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)], ids=str)
def test_a_cut_along_borders_of_blocks_changes_no_bit(block: tuple[int, int], dim: int, scale: Scale) -> None:
    x = lively(64, 96)
    whole = quantise(x, Scaling(E4M3, block, scale))
    codes, scales = joined([quantise(part, Scaling(E4M3, block, scale)) for part in cut(x, dim, 2)], dim)
    assert torch.equal(codes, whole.codes) and torch.equal(scales, whole.scales)


@pytest.mark.parametrize("scale", ["up", "fp32", "e4m3"])
@pytest.mark.parametrize(("block", "dim"), [((ALL, ALL), 0), ((ALL, ALL), 1), ((1, ALL), 1), ((ALL, 1), 0)], ids=str)
def test_through_a_block_the_maximum_must_be_that_of_all(block: tuple[int, int], dim: int, scale: Scale) -> None:
    """With the shared maximum no bit changes; without it the scale of a share differs."""
    x, block = lively(64, 96), (1, 16) if scale == "e4m3" else block
    x.narrow(dim, 0, x.shape[dim] // 2).mul_(0.003)
    scaling = Scaling(E4M3, block, scale)
    parts, seen = cut(x, dim, 2), list[Tensor]()
    for part in parts:
        quantise(part, scaling, share=lambda amax: seen.append(amax.clone()) or amax)
    whole = quantise(x, scaling)
    together = [quantise(part, scaling, share=lambda _: torch.maximum(*seen)) for part in parts]
    assert torch.equal(joined(together, dim)[0], whole.codes)
    apart = [quantise(part, scaling) for part in parts]
    assert not torch.equal(torch.cat([one.decoded() for one in apart], dim), whole.decoded())
