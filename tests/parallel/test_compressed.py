"""Attention whose tensors are kept in 8 bits: bytes, errors, and the same numbers under every plan."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.kept import Packed
from megalith.kernels.packed import width_of
from megalith.models.batch import Batch
from megalith.models.block import Attention
from megalith.parallel.compressed import Compressed
from megalith.prove.axes import ParityCase
from megalith.prove.parity import shrink
from megalith.prove.prove import prove
from megalith.spec.model import AttentionSpec
from megalith.spec.run import RunSpec
from megalith.train.step import train_step
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run

COMPRESS = {"parts": {"attention.core": "compress"}}
BATCH, SEQ, DIM, HEADS, KV_HEADS, CHANNELS = 2, 64, 64, 4, 2, 32
TILE = 16


def _attention(std: float = 0.1) -> Attention:
    torch.manual_seed(0)
    made = Attention(DIM, AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, rope=None))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=std)
    return made.to(torch.bfloat16)


def _gradients(attention: Attention, segments: Any = None) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return output, gradients, and the bytes that wait between forward and backward, of all memory once, without weights and input."""
    torch.manual_seed(1)
    x, grad = (torch.randn(BATCH, SEQ, DIM, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    others = {tensor.untyped_storage().data_ptr() for tensor in (x, *attention.parameters())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in others:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attention(x, Batch(torch.zeros(BATCH, SEQ, dtype=torch.long), segments=segments))
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), {"x": x.grad} | {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}, size


def _compressed(std: float = 0.1) -> Attention:
    attention = _attention(std)
    Compressed.replace(attention, Packed(TILE))
    return attention


@pytest.mark.parametrize("segments", [None, ((24, 40), (64,))], ids=["one document", "documents"])
@pytest.mark.parametrize(("std", "limit"), [(0.1, 0.07), (0.2, 0.18)], ids=["scores of 0.6", "scores of 2.6"])
def test_forward_keeps_its_bits_and_gradients_err_as_the_guide_says(std: float, limit: float, segments: Any) -> None:
    """E4M3 has three bits after the first: a number errs by 1/16 at most, 2.6 % on average. The last weight's gradient errs so, whatever
    the scores. Larger scores have larger errors, and the other gradients inherit them."""
    (out, exact, _), (same, found, _) = _gradients(_attention(std), segments), _gradients(_compressed(std), segments)
    assert torch.equal(out, same)
    errors = {name: float((found[name] - exact[name]).float().norm() / exact[name].float().norm()) for name in exact}
    assert errors["out.weight"] == pytest.approx(0.027, abs=0.004)
    assert all(0 < error < limit for error in errors.values()), errors


def test_what_waits_is_a_byte_a_number_and_the_scales() -> None:
    """The output is kept once, for attention and for the weight after it."""
    (*_, wide), (*_, packed) = _gradients(_attention()), _gradients(_compressed())
    rows = BATCH * SEQ * (2 * HEADS + 2 * KV_HEADS)
    sums = 4 * BATCH * SEQ * HEADS
    assert wide == 2 * CHANNELS * rows + sums
    assert packed == width_of(CHANNELS, Packed(TILE).scaling) * rows + sums


def test_without_gradients_nothing_is_held() -> None:
    attention = _compressed()
    with torch.no_grad():
        attention(torch.randn(BATCH, SEQ, DIM, dtype=torch.bfloat16), Batch(torch.zeros(BATCH, SEQ, dtype=torch.long)))
    compressed = attention.forward
    assert isinstance(compressed, Compressed) and not compressed._known and compressed._out is None


# --- under plans ---


def run_of(plan: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> RunSpec:
    plan = plan | {"retain": COMPRESS | plan.get("retain", {})}
    return brief_run(plan=plan, model=model or {}, train={"precision": "bf16"} | train)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor, on the host": ({"tensor": 2, "retain": {"blocks": "host"}}, {}),
    "tensor in pieces": ({"tensor": 2, "sequence": False, "overlap_tensor": 2}, {}),
    "ring, zero 3": ({"context": 2, "zero": 3}, {}),
    "gather": ({"context": 2, "context_method": "gather"}, {}),
    "ulysses": ({"context": 2, "ulysses": 2}, {}),
    "pipeline, backward split in two": ({"pipeline": 2, "schedule": "zb-v", "chunks": 2, "zero": 2}, {}),
    "experts, latents, parts again": (
        {"data": 2, "expert": 2, "recompute": "selective", "recompute_parts": ["attention.up", "mlp.experts"]},
        {"preset": "deepseek-tiny"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@sampled(2)
def test_a_plan_trains_like_one_process(name: str) -> None:
    proof = prove(ParityCase((), shrink(run_of(*PLANS[name]), steps=2)), references={})
    assert proof.outcome == "equal", proof


def _losses(rank: int, specs: list[RunSpec]) -> list[list[float]]:
    """Return the losses of each run, which reads the same few samples again and again."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        found.append([train_step(trainer, microbatches(trainer, step % 4), step=step).loss for step in range(spec.train.steps)])
    return found


@pytest.mark.slow
def test_the_loss_falls_as_it_does_with_wide_tensors() -> None:
    """The first loss has the same bits, since forward does not change. Later the gap is small beside what the loss has lost."""
    kept = run_of({}, steps=160)
    plain = kept.model_copy(update={"plan": kept.plan.model_copy(update={"retain": type(kept.plan.retain)()})})
    wide, found = run_ranks(_losses, 1, [plain, kept])[0]
    assert found[0] == wide[0] and found[1:] != wide[1:]
    fallen = wide[0] - sum(wide[-8:]) / 8
    assert fallen > 0.3
    assert abs(sum(found[-8:]) - sum(wide[-8:])) / 8 < 0.02 * fallen
