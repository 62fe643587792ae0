"""Formats that a GPU computes without units for them: the same bits as on a CPU."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.draws import key_of, uniform
from megalith.kernels.elements import E2M1, E4M3, E5M2
from megalith.kernels.hadamard import rotated
from megalith.kernels.moments import pack, unpack, words
from megalith.kernels.quantise import ALL, Scaling, narrowed, quantise

pytestmark = [pytest.mark.gpu, pytest.mark.any_device]

FORMATS = {
    "fp8, tiles": Scaling(E4M3, (1, 128)),
    "fp8, tiles of weights": Scaling(E4M3, (128, 128)),
    "fp8, scales in fp32": Scaling(E4M3, (1, 128), "fp32"),
    "fp8, row": Scaling(E4M3, (1, ALL), "fp32"),
    "fp8, tensor": Scaling(E5M2, (ALL, ALL)),
    "mxfp8": Scaling(E4M3, (1, 32)),
    "mxfp8, ocp": Scaling(E4M3, (1, 32), "down"),
    "mxfp4": Scaling(E2M1, (1, 32), "down"),
    "nvfp4": Scaling(E2M1, (1, 16), "e4m3"),
    "nvfp4, weights": Scaling(E2M1, (16, 16), "e4m3"),
}


def numbers(*, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers [256, 384] of very different sizes, with zeros, and subnormals of the narrow formats."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, 384, generator=random) * 2.0 ** torch.randint(-20, 8, (256, 384), generator=random)
    x[3], x[:, 5] = 0.0, 0.0
    return x.to(dtype)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_in_few_bits_are_those_of_a_cpu(name: str, stochastic: bool, gpu: torch.device) -> None:
    scaling, found = FORMATS[name], list[Tensor]()
    for device in (torch.device("cpu"), gpu):
        x = numbers().to(device)
        draws = uniform(key_of("gradient"), torch.arange(256, device=device), range(384)) if stochastic else None
        codes = quantise(x, scaling, draws=draws)
        found += [narrowed(x, scaling, draws=draws).cpu(), codes.codes.cpu(), codes.scales.cpu()]
    half = len(found) // 2
    assert all(torch.equal(one, other) for one, other in zip(found[:half], found[half:], strict=True))


def test_random_draws_are_those_of_a_cpu(gpu: torch.device) -> None:
    rows = torch.arange(1 << 40, (1 << 40) + 300)
    keys = torch.randint(-(1 << 62), 1 << 62, (300,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(keys, rows, range(77, 400)), uniform(keys.to(gpu), rows.to(gpu), range(77, 400)).cpu())


@pytest.mark.parametrize("size", [16, 32])
def test_a_hadamard_transform_is_that_of_a_cpu(size: int, gpu: torch.device) -> None:
    x = numbers()
    assert torch.equal(rotated(x, size), rotated(x.to(gpu), size).cpu())


@pytest.mark.parametrize("root", [False, True])
def test_moments_in_few_bits_are_those_of_a_cpu(root: bool, gpu: torch.device) -> None:
    found = list[Tensor]()
    for device in (torch.device("cpu"), gpu):
        x = numbers(dtype=torch.float32).to(device)
        x = x.square() if root else x
        packed = torch.empty(256, 384 + 3, dtype=torch.uint8, device=device)
        pack(x, packed, 128, words(7, torch.arange(256, device=device), 0, 384), root=root)
        found += [packed.cpu(), unpack(packed, 128, 384, root=root).cpu()]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
