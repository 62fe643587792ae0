"""Kernels agree with each other and with the textbook, also if keys come in parts."""

import pytest
import torch
from torch import Tensor, library

from megalith.kernels import blocked as blocks
from megalith.kernels.attention import (
    Running,
    add_backward,
    add_forward,
    attention,
    blocked,
    chunked,
    flash_cpu,
    kernel_for,
    zeros_for,
)
from megalith.kernels.mask import MaskBlock, MaskRows, mask_rows
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from tests.kernels.largest import Largest

SCALE = 0.4
SHAPES = {  # heads, kv_heads, channels of q and k, channels of v
    "multi-head": (4, 4, 8, 8),
    "grouped": (6, 2, 8, 8),
    "multi-query": (4, 1, 5, 5),
    "latent": (3, 3, 12, 7),
    "wide values": (4, 2, 4, 10),
}


def tensors(shape: tuple[int, int, int, int], *, queries: int = 37, keys: int = 37, dtype: torch.dtype = torch.float64):
    """Return q, k, v and the gradient of the output."""
    heads, kv_heads, channels, of_v = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, queries, channels), (kv_heads, keys, channels), (kv_heads, keys, of_v), (heads, queries, of_v))
    return [torch.randn(2, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def textbook(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with a dense mask."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


KERNELS = {
    "flash": (flash_cpu, None),
    "chunked": (chunked(None, 10), None),
    "capped": (chunked(1.5, 10), 1.5),
    "capped, one chunk": (chunked(1.5), 1.5),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("kernel", "softcap"), KERNELS.values(), ids=KERNELS.keys())
def test_kernels_give_the_textbooks_output_sums_and_gradients(kernel, softcap, shape, causal):
    q, k, v, grad = tensors(shape, keys=37 if causal else 23)
    wanted = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    expected, sums = textbook(*wanted, causal, softcap)
    out, lse = kernel.forward(q, k, v, causal, SCALE)
    torch.testing.assert_close((out, lse), (expected, sums))
    grads = kernel.backward(grad, q, k, v, out, lse, causal, SCALE)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, wanted, grad))


@pytest.mark.parametrize("kernel", [flash_cpu, chunked(None, 8)], ids=["flash", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_exponentials_are_fp32(kernel, dtype):
    q, k, v, grad = tensors((4, 2, 8, 8), dtype=dtype)
    out, lse = kernel.forward(q, k, v, True, SCALE)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert [x.shape for x in kernel.backward(grad, q, k, v, out, lse, True, SCALE)] == [q.shape, k.shape, v.shape]


def test_a_query_whose_keys_come_in_parts_gets_what_it_gets_from_all_at_once():
    q, k, v, grad = tensors((4, 2, 8, 6))
    whole, sums = flash_cpu.forward(q, k, v, False, SCALE)
    rows = (MaskRows(0, 2, (MaskBlock(0, 37, 30, 7, "all"), MaskBlock(0, 20, 0, 30, "all"), MaskBlock(20, 17, 0, 30, "all"))),)
    running = Running.start(q, v)
    add_forward(running, q, k, v, rows=rows, kernel=flash_cpu, scale=SCALE)
    torch.testing.assert_close((running.out, running.lse), (whole, sums))
    totals = tuple(zeros_for(x) for x in (q, k, v))
    add_backward(totals, (grad, q, k, v, running.out, running.lse), rows=rows, kernel=flash_cpu, scale=SCALE)
    torch.testing.assert_close(totals, flash_cpu.backward(grad, q, k, v, whole, sums, False, SCALE))


def test_the_future_is_the_past_read_backwards():
    q, k, v, _ = tensors((4, 2, 8, 8))
    found = attention(q, k, v, rows=(MaskRows(0, 2, (MaskBlock(0, 37, 0, 37, "future"),)),), kernel=flash_cpu, scale=SCALE)
    turned = textbook(*(x.flip(2) for x in (q, k, v)), True, None)[0].flip(2)
    torch.testing.assert_close(found, turned)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    q, k, v, _ = (x[:1, :, :9].requires_grad_() for x in tensors((2, 1, 4, 3)))
    rows = mask_rows(((0, 9),), ((0, 9),), batch=1, segments=((4, 5),), window=3)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, rows=rows, kernel=chunked(2.0, 4), scale=SCALE), (q, k, v))


def test_capped_attention_holds_no_matrix_of_all_pairs_of_tokens():
    seq = 1024
    q, k, v, grad = tensors((2, 1, 4, 4), queries=seq, keys=seq, dtype=torch.float32)
    with Largest() as largest:
        out, lse = chunked(2.0).forward(q, k, v, True, SCALE)
        chunked(2.0).backward(grad, q, k, v, out, lse, True, SCALE)
    assert largest.most == 2 * 2 * 128 * seq  # batch, heads, rows, keys


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_shapes_are_right_where_nothing_is_computed(softcap):
    q, k, v, _ = (x.to("meta").requires_grad_() for x in tensors((4, 2, 8, 6), dtype=torch.bfloat16))
    rows = mask_rows(((0, 37),), ((0, 37),), batch=2, window=9)
    out = attention(q, k, v, rows=rows, kernel=kernel_for(q, v, softcap), scale=SCALE)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == (2, 4, 37, 6)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


BLOCKED = {  # shape, queries, keys, causal
    "multi-head": ((4, 4, 8, 8), 37, 37, True),
    "grouped, several blocks": ((6, 2, 8, 8), 70, 70, True),
    "latent": ((3, 3, 12, 7), 64, 64, True),
    "other keys": ((4, 2, 8, 8), 37, 53, False),
}


@pytest.mark.parametrize(("shape", "queries", "keys", "causal"), BLOCKED.values(), ids=BLOCKED.keys())
@pytest.mark.parametrize("heads_at_once", [1, 100])
def test_blocks_of_products_are_as_right_as_the_fused_kernel(shape, queries, keys, causal, heads_at_once, monkeypatch):
    monkeypatch.setattr(blocks, "ROWS", 32)
    monkeypatch.setattr(blocks, "SCORES", heads_at_once * 32 * keys)
    q, k, v, grad = (x.to(torch.bfloat16) for x in tensors(shape, queries=queries, keys=keys))
    wanted = [x.double().requires_grad_() for x in (q, k, v)]
    expected, sums = textbook(*wanted, causal, None)
    expected = [expected, *torch.autograd.grad(expected, wanted, grad.double())]

    def gaps(kernel) -> tuple[Tensor, list[float]]:
        out, lse = kernel.forward(q, k, v, causal, SCALE)
        found = [out, *kernel.backward(grad, q, k, v, out, lse, causal, SCALE)]
        return lse, [((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]

    lse, ours = gaps(blocked)
    torch.testing.assert_close(lse.double(), sums, rtol=0, atol=1e-4)
    assert all(gap <= max(1.5 * other, 2**-8) for gap, other in zip(ours, gaps(flash_cpu)[1], strict=True)), ours


def test_blocked_attention_is_an_operation_that_compilers_and_fake_tensors_know():
    q, k, v, _ = (x.to(torch.bfloat16).requires_grad_() for x in tensors((4, 2, 8, 6)))
    library.opcheck(blocks.blocked_attention, (q, k, v, True, SCALE), test_utils=("test_schema", "test_faketensor"))
    out, lse = blocks.blocked_attention(q, k, v, True, SCALE)
    library.opcheck(
        blocks.blocked_attention_backward,
        (*(x.detach() for x in (out, q, k, v, out, lse)), True, SCALE),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_products_of_others_stay_exact_after_blocked_attention():
    before = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    q, k, v, _ = (x.to(torch.bfloat16) for x in tensors((4, 2, 8, 8)))
    blocks.blocked_attention(q, k, v, True, SCALE)
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_core_takes_blocks_where_they_pay(kv_heads, monkeypatch):
    monkeypatch.setattr(blocks, "_fast_products", lambda: True)
    shapes = [(1, 300, heads, 8) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    out = CausalCore()(q, k, v, Batch(torch.zeros(1, 300, dtype=torch.long)))
    assert "blocked" in out.grad_fn.next_functions[0][0].name()
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize(("seq", "dtype"), [(100, torch.bfloat16), (300, torch.float32)])
def test_short_sequences_and_other_dtypes_go_to_the_fused_kernel(seq, dtype, monkeypatch):
    monkeypatch.setattr(blocks, "_fast_products", lambda: True)
    q = torch.randn(1, 4, seq, 8, dtype=dtype)
    assert not blocks.pays(q) and kernel_for(q, q) is flash_cpu


@pytest.mark.parametrize("segments", [None, ((30, 7), (37,))], ids=["whole", "documents"])
@pytest.mark.parametrize("shape", [SHAPES["grouped"], SHAPES["latent"]], ids=["grouped", "latent"])
def test_attention_in_fp16_is_rounded_once(shape, segments):
    """Scores are computed in fp32; in fp16 a probability would change by a hundredth. Output and gradients agree with fp64
    within one rounding."""
    q, k, v, grad = (x.transpose(1, 2) for x in tensors(shape, dtype=torch.float16))
    q = q * 20
    core = CausalCore(scale=SCALE)

    def run(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = core(*inputs, Batch(torch.zeros(2, 37), segments=segments))
        out.backward(grad.to(dtype))
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    for found, exact in zip(run(torch.float16), run(torch.float64), strict=True):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), exact, rtol=2**-10, atol=2e-3 * float(exact.abs().max()))
