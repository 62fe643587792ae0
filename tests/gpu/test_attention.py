"""The GPU's fused kernel gives what plain attention gives, whole and in parts."""

import pytest
import torch

from megalith.kernels.attention import attention, chunked, flash_cuda, kernel_for
from megalith.kernels.pairs import rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::UserWarning")]  # a driver may warn of its machine

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


@pytest.mark.parametrize(("window", "pieces"), [(40, None), (None, ((60, 140), (200,))), (40, ((60, 140), (200,)))], ids=str)
def test_parts_on_the_gpu_are_those_on_the_cpu(gpu, window, pieces):
    q, k, v = (torch.randn(2, heads, 200, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    rows = rows_of(((0, 200),), ((0, 200),), batch=2, window=window, pieces=pieces)
    results = []
    for device, dtype in ((gpu, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, rows=rows, kernel=kernel_for(*leaves[1:]), scale=0.2)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append([x.detach().cpu().float() for x in (out, *grads)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() < 3e-2 * wanted.abs().max()
