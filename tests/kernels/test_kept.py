"""Products that keep their inputs in 8 bits compute what they did, and their weights' gradients are products with the kept numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.kept import Packed
from megalith.kernels.multiply import Multiply
from megalith.kernels.packed import pack, unpack, width_of
from megalith.models.mlp import ACTIVATIONS

TILE = 8
PACKED, PLAIN = Packed(TILE), Multiply()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers whose tiles have different scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.randint(-8, 8, shape, generator=generator).float().exp2()
    return x.bfloat16()


def rounded(x: Tensor) -> Tensor:
    """Return x as it is kept."""
    rows = x.reshape(-1, x.shape[-1])
    return unpack(pack(rows, PACKED.scaling), x.shape[-1], PACKED.scaling, x.dtype).view(x.shape)


def gradients(multiply: Multiply, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of input and weight."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = multiply(x, weight)
    out.backward(numbers(*out.shape, seed=2))
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


def test_forward_and_the_inputs_gradient_keep_their_bits_and_the_weights_is_of_the_kept_numbers() -> None:
    x, weight = numbers(2, 5, 24), numbers(16, 24, seed=1)
    plain, found = gradients(PLAIN, x, weight), gradients(PACKED, x, weight)
    assert all(torch.equal(*each) for each in zip(found[:2], plain[:2], strict=True))
    assert torch.equal(found[2], gradients(PLAIN, rounded(x), weight)[2]) and not torch.equal(found[2], plain[2])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_its_output_and_the_gradients_at_the_kept_numbers(name: str, gated: bool) -> None:
    def run(multiply: Multiply, *factors: Tensor) -> list[Tensor]:
        gate, up = factors if gated else (None, *factors)
        out = multiply.activated(ACTIVATIONS[name], gate, up)
        out.backward(numbers(*out.shape, seed=2))
        return [out.detach(), *(x.grad for x in factors if x.grad is not None)]

    factors = [numbers(2, 3, 24, seed=seed) for seed in range(1 + gated)]
    plain, kept, found = (
        run(multiply, *(x.clone().requires_grad_() for x in given))
        for multiply, given in ((PLAIN, factors), (PLAIN, map(rounded, factors)), (PACKED, factors))
    )
    assert torch.equal(found[0], plain[0]) and len(found) == 2 + gated
    assert all(torch.equal(*each) for each in zip(found[1:], kept[1:], strict=True))


def test_a_tensor_is_kept_once_in_a_byte_and_a_share_of_a_scale_for_each_number() -> None:
    saved: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x, weights = numbers(6, 64).requires_grad_(), [numbers(64, 64, seed=seed).requires_grad_() for seed in (1, 2)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        gate, up = (PACKED(x, weight) for weight in weights)
        PACKED(PACKED.activated(ACTIVATIONS["silu"], gate, up), weights[0]).sum()
    assert sum(saved.values()) == 4 * 6 * width_of(64, PACKED.scaling), "the input, two factors, and their product"


def test_a_rank_that_has_whole_tiles_of_the_channels_keeps_the_same_numbers() -> None:
    x, weight = numbers(5, 4 * TILE), numbers(3, 4 * TILE, seed=1)
    whole = gradients(PACKED, x, weight)[2]
    parts = [gradients(PACKED, x[:, part], weight[:, part])[2] for part in (slice(0, TILE), slice(TILE, 4 * TILE))]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_experts_without_tokens_have_gradients_too() -> None:
    rows, weight = torch.zeros(0, 16).bfloat16().requires_grad_(), numbers(8, 16, seed=1).requires_grad_()
    out: Any = PACKED(PACKED.activated(ACTIVATIONS["silu"], rows, rows), weight)
    out.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_without_a_backward_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packed, "packed", None)
    x, weight = numbers(5, 24), numbers(16, 24, seed=1)
    with torch.no_grad():
        assert torch.equal(PACKED(PACKED.activated(ACTIVATIONS["silu"], x, x), weight), PLAIN(ACTIVATIONS["silu"](x) * x, weight))
