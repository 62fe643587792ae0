"""The chunked loss equals the plain one, with a fraction of its memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megalith.kernels import chunks
from megalith.kernels import cross_entropy as kernel
from megalith.kernels.cross_entropy import IGNORE, Loss, cross_entropy, cross_entropy_plain
from tests.kernels.largest import Largest

TOKENS, DIM, VOCAB = 17, 8, 40
SCALE = 1 / 13
FINISHINGS: list[dict[str, float]] = [{"logit_scale": 0.25}, {"softcap": 2.0}, {"logit_scale": 3.0, "softcap": 5.0}]


class Found(NamedTuple):
    loss: Loss
    hidden: Tensor
    weight: Tensor


def inputs(tokens: int = TOKENS, dim: int = DIM, vocab: int = VOCAB, *, ignored: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, dim, generator=generator) for size in (tokens, vocab))
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return hidden, weight, targets.where(torch.rand(tokens, generator=generator) >= ignored, torch.tensor(IGNORE))


def differentiate(
    function: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *, upstream: float = 1.0, **options: Any
) -> Found:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, targets, scale=SCALE, **options)
    loss.objective.backward(torch.tensor(upstream))
    assert hidden.grad is not None and weight.grad is not None
    return Found(loss, hidden.grad, weight.grad)


def assert_same(found: Found, expected: Found, **bounds: float) -> None:
    torch.testing.assert_close(found.loss.objective, expected.loss.objective, **bounds)
    torch.testing.assert_close(found.loss.nll, expected.loss.nll, **bounds)
    torch.testing.assert_close(found.hidden, expected.hidden, **bounds)
    torch.testing.assert_close(found.weight, expected.weight, **bounds)


@pytest.mark.parametrize("finishing", FINISHINGS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, TOKENS, None])
def test_scaled_and_capped_logits_give_the_plain_losses_and_both_gradients(chunk, finishing):
    expected = differentiate(cross_entropy_plain, *inputs(), z_loss=0.3, **finishing)
    assert_same(differentiate(cross_entropy, *inputs(), z_loss=0.3, chunk=chunk, **finishing), expected, rtol=1e-5, atol=1e-6)
    other = differentiate(cross_entropy_plain, *inputs(), z_loss=0.3)
    assert (other.hidden - expected.hidden).abs().max() > 0.1 * expected.hidden.abs().max()  # the z-loss makes a difference here


def test_the_plain_finish_is_its_definition_and_stays_within_the_cap():
    products = torch.linspace(-50, 50, 101)
    assert torch.equal(kernel.finish(products), products)
    found = kernel.finish(products, logit_scale=0.5, softcap=4.0)
    torch.testing.assert_close(found, 4.0 * torch.tanh(0.5 * products / 4.0))
    assert found.abs().max() <= 4.0


def test_a_weight_used_several_times_gets_the_sum_of_its_gradients():
    """Multi-token prediction uses the loss in this way: one output, several losses with different factors."""
    hidden, weight, targets = inputs()
    shared, single = weight.clone().requires_grad_(), torch.zeros_like(weight)
    total = torch.zeros(())
    for factor, rows in ((1.0, slice(0, 9)), (0.3, slice(9, 12)), (0.15, slice(12, TOKENS))):
        total = total + factor * cross_entropy(hidden[rows], shared, targets[rows], scale=SCALE, chunk=2).objective
        single += factor * differentiate(cross_entropy_plain, hidden[rows], weight, targets[rows]).weight
    total.backward()
    torch.testing.assert_close(shared.grad, single)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [1, 2, 5, TOKENS - 1, TOKENS, TOKENS + 1, None])
def test_any_chunk_gives_the_plain_losses_and_both_gradients(chunk, z_loss):
    expected = differentiate(cross_entropy_plain, *inputs(), z_loss=z_loss)
    assert_same(differentiate(cross_entropy, *inputs(), z_loss=z_loss, chunk=chunk), expected, rtol=1e-5, atol=1e-6)
    assert bool(expected.loss.objective.detach() - expected.loss.nll > 0.1) == (z_loss > 0)


def test_losses_and_gradients_without_a_valid_target_are_zero_and_finite():
    hidden, weight, _ = inputs()
    found = differentiate(cross_entropy, hidden, weight, torch.full((TOKENS,), IGNORE), z_loss=0.3, chunk=5)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (*found.loss, found.hidden, found.weight))


def test_an_ignored_row_changes_nothing():
    hidden, weight, targets = inputs(ignored=0.0)
    alone = differentiate(cross_entropy, hidden[:5], weight, targets[:5], z_loss=0.3)
    more = differentiate(cross_entropy, hidden, weight, targets.where(torch.arange(TOKENS) < 5, torch.tensor(IGNORE)), z_loss=0.3)
    assert_same(Found(more.loss, more.hidden[:5], more.weight), alone, rtol=1e-6, atol=1e-7)
    assert not more.hidden[5:].any()


def test_huge_logits_do_not_overflow():
    hidden, weight, targets = inputs(ignored=0.0)
    found = differentiate(cross_entropy, hidden * 1e3, weight * 1e3, targets, chunk=5)
    assert_same(found, differentiate(cross_entropy_plain, hidden * 1e3, weight * 1e3, targets), rtol=1e-5, atol=1e-5)
    assert found.loss.nll.isfinite() and found.weight.isfinite().all()


def test_gradients_are_scaled_by_what_comes_from_above():
    once, thrice = (differentiate(cross_entropy, *inputs(), upstream=upstream, chunk=5) for upstream in (1.0, 3.0))
    torch.testing.assert_close(thrice.hidden, 3 * once.hidden)
    torch.testing.assert_close(thrice.weight, 3 * once.weight)


def test_bf16_stays_within_its_rounding_of_the_fp32_definition():
    hidden, weight, targets = inputs(tokens=64, dim=32, vocab=200)
    low = (hidden * 0.5).bfloat16(), (weight * 0.5).bfloat16()  # logits as large as in training
    expected = differentiate(cross_entropy_plain, *(x.float() for x in low), targets, z_loss=0.01)
    found = differentiate(cross_entropy, *low, targets, z_loss=0.01, chunk=20)
    assert found.loss.objective.dtype == torch.float32
    assert found.hidden.dtype == found.weight.dtype == torch.bfloat16
    assert (found.loss.objective / expected.loss.objective - 1).detach().abs() < 2e-3
    for low_grad, grad in zip(found[1:], expected[1:], strict=True):
        assert (low_grad.float() - grad).abs().max() < 2**-6 * grad.abs().max()


def test_bf16_sums_the_weight_gradients_of_the_chunks_in_fp32():
    """In bf16 the sum of 512 equal chunks would stop growing at about 256 times the first."""
    hidden, weight, targets = inputs(tokens=2, ignored=0.0)
    hidden, targets = hidden.repeat(512, 1), targets.repeat(512)
    expected = differentiate(cross_entropy_plain, hidden.bfloat16().float(), weight.bfloat16().float(), targets)
    found = differentiate(cross_entropy, hidden.bfloat16(), weight.bfloat16(), targets, chunk=1)
    assert (found.weight.float() - expected.weight).abs().max() < 2**-6 * expected.weight.abs().max()


def test_the_plain_loss_is_the_same_where_no_gradient_is_wanted():
    hidden, weight, targets = inputs()
    expected = cross_entropy_plain(hidden, weight, targets, scale=SCALE, z_loss=0.3)
    with Largest() as largest:
        found = cross_entropy(hidden, weight, targets, scale=SCALE, z_loss=0.3, chunk=5)
    torch.testing.assert_close(found, expected)
    assert not found.objective.requires_grad
    assert (TOKENS, DIM) not in largest.shapes and (VOCAB, DIM) not in largest.shapes  # no tensor as large as a gradient


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_a_gradient_is_formed_only_for_what_wants_one(wanted):
    hidden, weight, targets = inputs()
    expected = differentiate(cross_entropy_plain, hidden, weight, targets)
    tensors = {"hidden": hidden, "weight": weight}
    tensors[wanted].requires_grad_()
    cross_entropy(**tensors, targets=targets, scale=SCALE, chunk=5).objective.backward()
    torch.testing.assert_close(tensors[wanted].grad, getattr(expected, wanted))
    assert all(x.grad is None for name, x in tensors.items() if name != wanted)


def test_only_the_objective_is_differentiated():
    hidden, weight, targets = inputs()
    loss = cross_entropy(hidden.requires_grad_(), weight, targets, scale=SCALE)
    assert loss.objective.requires_grad and not loss.nll.requires_grad


def test_no_tensor_is_ever_as_large_as_all_logits():
    tokens, dim, vocab, chunk = 512, 16, 1024, 32
    with Largest() as plain:
        differentiate(cross_entropy_plain, *inputs(tokens, dim, vocab))
    with Largest() as chunked:
        differentiate(cross_entropy, *inputs(tokens, dim, vocab), chunk=chunk)
    assert plain.most == tokens * vocab  # the measurement would see one
    assert chunked.most == chunk * vocab


@pytest.mark.parametrize(("softcap", "held"), [(None, 1), (30.0, 2)])
def test_the_default_chunk_keeps_fp32_logits_within_their_bytes(monkeypatch, softcap, held):
    """With a cap, the slope at each logit is kept too."""
    tokens, dim, vocab = 512, 4, 1024
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100_000)
    with Largest() as largest:
        differentiate(cross_entropy, *inputs(tokens, dim, vocab), softcap=softcap)
    assert 50_000 < 4 * largest.elements[torch.float32] * held <= 100_000


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("finishing", [{}, FINISHINGS[-1]], ids=str)
def test_shares_of_the_vocabulary_give_the_whole_loss(ranks, z_loss, finishing):
    """Each thread holds some rows of the weight, and threads exchange row statistics only."""
    hidden, weight, targets = inputs()
    options = {"z_loss": z_loss, **finishing}
    expected = differentiate(cross_entropy_plain, hidden, weight, targets, **options)
    barrier, shown = threading.Barrier(ranks), [torch.empty(0)] * ranks

    def share(rank: int) -> Found:
        def reduce(values: Tensor, operation: str) -> Tensor:
            shown[rank] = values.clone()
            barrier.wait(20)
            total = torch.stack(shown)
            total = total.sum(0) if operation == "sum" else total.amax(0)
            barrier.wait(20)
            return total

        rows = weight.chunk(ranks)[rank]
        return differentiate(cross_entropy, hidden, rows, targets, chunk=5, offset=rank * len(rows), reduce=reduce, **options)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(share, range(ranks)))
    for one in found:
        torch.testing.assert_close(tuple(one.loss), tuple(expected.loss))
    torch.testing.assert_close(torch.cat([one.weight for one in found]), expected.weight)
    torch.testing.assert_close(torch.stack([one.hidden for one in found]).sum(0), expected.hidden)
