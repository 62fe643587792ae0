"""The GPU's fused kernel equals plain attention, as a whole and in parts."""

import pytest
import torch

from megalith.kernels.attention import attention, chunked, flash_cuda, kernel_for
from megalith.kernels.mask import mask_rows
from megalith.models.core import attend, attend_segments

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::UserWarning")]  # a driver may print warnings

SHAPES = {"multi-head": (4, 4, 64, 64), "grouped": (8, 2, 64, 64), "latent": (4, 4, 192, 128), "odd channels": (4, 1, 20, 20)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_flash_gives_plain_attention(gpu, shape, causal):
    heads, kv_heads, channels, of_v = shape
    sizes = ((heads, channels), (kv_heads, channels), (kv_heads, of_v), (heads, of_v))
    q, k, v, grad = (torch.randn(2, 200, *size, device=gpu, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
    assert kernel_for(q, v) is flash_cuda
    out, lse = flash_cuda.forward(q, k, v, causal, 0.1)
    plain, sums = chunked().forward(*(x.float() for x in (q, k, v)), causal, 0.1)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), plain, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, sums, rtol=1e-3, atol=1e-3)
    grads = flash_cuda.backward(grad, q, k, v, out, lse, causal, 0.1)
    expected = chunked().backward(*(x.float() for x in (grad, q, k, v)), plain, sums, causal, 0.1)
    for found, wanted in zip(grads, expected, strict=True):
        assert (found.float() - wanted).abs().max() < 2e-2 * wanted.abs().max()


@pytest.mark.parametrize(("window", "segments"), [(40, None), (None, ((60, 140), (200,))), (40, ((60, 140), (200,)))], ids=str)
def test_parts_on_the_gpu_are_those_on_the_cpu(gpu, window, segments):
    q, k, v = (torch.randn(2, heads, 200, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    rows = mask_rows(((0, 200),), ((0, 200),), batch=2, window=window, segments=segments)
    results = []
    for device, dtype in ((gpu, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, rows=rows, kernel=kernel_for(*leaves[1:]), scale=0.2)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append([x.detach().cpu().float() for x in (out, *grads)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() < 3e-2 * wanted.abs().max()


def expected_of(leaves: list[torch.Tensor], segments: tuple[tuple[int, ...], ...], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients of plain attention in fp32, one document after the other."""
    wide = [x.detach().float().requires_grad_() for x in leaves]
    rows = []
    for row, lengths in enumerate(segments):
        split = [x[row : row + 1].split(lengths, dim=2) for x in wide]
        rows.append(torch.cat([plain(*some) for some in zip(*split, strict=True)], dim=2))
    out = torch.cat(rows)
    return [out, *torch.autograd.grad(out, wide, upstream.float())]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_documents_of_any_lengths_one_after_the_other(gpu, shape):
    """This includes short documents, and those of earlier calls in another batch: a kernel of torch's once returned old
    memory contents."""
    heads, kv_heads, channels, of_v = shape
    random = torch.Generator().manual_seed(0)
    for turn in range(16):
        batch, seq = 1 + turn % 3, (32, 128, 200)[turn % 3]
        cuts = [sorted(set(torch.randint(1, seq, (turn % 7,), generator=random).tolist())) for _ in range(batch)]
        segments = tuple(tuple(b - a for a, b in zip([0, *row], [*row, seq], strict=True)) for row in cuts)
        sizes = ((heads, channels), (kv_heads, channels), (kv_heads, of_v), (heads, of_v))
        *leaves, upstream = (torch.randn(batch, seq, *size, device=gpu, dtype=torch.bfloat16).transpose(1, 2) for size in sizes)
        expected = expected_of(leaves, segments, upstream)
        given = [x.requires_grad_() for x in leaves]
        functions = [lambda *x, cut=segments: attend_segments(*x, cut)]
        if all(len(row) == 1 for row in segments):
            functions.append(attend)
        for function in functions:
            out = function(*given)
            for found, wanted in zip((out, *torch.autograd.grad(out, given, upstream)), expected, strict=True):
                assert (found.float() - wanted).abs().max() <= 3e-2 * wanted.abs().max(), (turn, segments)
