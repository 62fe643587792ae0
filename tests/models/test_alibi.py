"""Attention with linear biases."""

import pytest
import torch

from megalith.models.alibi import CHANNELS, Alibi
from megalith.models.batch import Batch
from megalith.models.core import CausalCore

BATCH, SEQ, CHANNELS_OF_HEAD = 2, 600, 8


def inputs(heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, SEQ, count, CHANNELS_OF_HEAD) for count in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, scale: float) -> torch.Tensor:
    """Return softmax(scale q kᵀ - slope * distance) v over the past, in fp64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    here = torch.arange(q.shape[2])
    scores = scale * q @ k.mT - slopes[:, None, None] * (here[:, None] - here)
    return (scores.masked_fill(here > here[:, None], float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_further_channels_are_linear_biases(heads: int, kv_heads: int, dtype: torch.dtype, bound: float):
    """Positions beyond 256, which bf16 cannot hold as one number, are among them."""
    q, k, v = inputs(heads, kv_heads, dtype)
    scale = CHANNELS_OF_HEAD**-0.5
    alibi = Alibi(heads, scale)
    wide_q, wide_k = alibi(q, k, Batch(torch.zeros(BATCH, SEQ, dtype=torch.long)))
    assert wide_q.shape[-1] == wide_k.shape[-1] == CHANNELS_OF_HEAD + CHANNELS
    found = CausalCore(scale=scale)(wide_q, wide_k, v, Batch(torch.zeros(BATCH, SEQ, dtype=torch.long)))
    expected = textbook(q, k, v, alibi.slopes(q.device), scale)
    assert float((found.double() - expected).abs().max()) < bound
    plain = CausalCore(scale=scale)(q, k, v, Batch(torch.zeros(BATCH, SEQ, dtype=torch.long)))
    assert float((plain.double() - expected).abs().max()) > 0.1


def test_slopes_are_the_papers():
    """Section 3 of the paper gives those of 8 and of 16 heads."""
    assert Alibi(8, 1.0).slopes(torch.device("cpu")).tolist() == [2.0**-i for i in range(1, 9)]
    assert Alibi(16, 1.0).slopes(torch.device("cpu")).tolist() == pytest.approx([2.0 ** (-i / 2) for i in range(1, 17)])
