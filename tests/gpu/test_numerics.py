"""A GPU computes the same as the CPU."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.cross_entropy import cross_entropy, cross_entropy_plain
from megalith.kernels.rope import rotate, rotate_plain
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.generate import generate
from megalith.models.rope import tables
from megalith.models.stage import Stage
from megalith.spec.families.llama import Llama
from megalith.spec.model import RopeScaling, RopeSpec
from tests.models.plain import lively, llama, logits, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::UserWarning")]  # a driver may print warnings

WIDE = {"dim": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 192, "vocab": 512, "context": 512}
SPECS = {
    "grouped queries": llama(**WIDE),
    "tied, multi-head": llama(**WIDE | {"kv_heads": 4, "tied": True}),
    "llama 3.1 positions": llama(**WIDE, rope_scaling=RopeScaling(original_context=32)),
}
PIECES = ((100, 28), (128,), (1, 60, 67))


def batch_of(spec: Llama, device: torch.device, *, packed: bool = False) -> Batch:
    tokens, targets = (tokens_of(spec, batch=3, seq=128, seed=seed).to(device) for seed in (0, 1))
    targets[0, :9] = -100
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in PIECES]).to(device)
    scale = 1 / int((targets >= 0).sum())
    return Batch(tokens, targets, positions if packed else None, PIECES if packed else None, loss_scale=scale, z_loss=1e-3)


def gradients(model: Stage, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    loss = model(batch.tokens, batch)
    loss.objective.backward()
    grads = {name: p.grad.cpu().float() for name, p in model.parameters_by_name().items() if p.grad is not None}
    return float(loss.nll), grads


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_logits_loss_and_gradients_in_fp32_are_those_of_the_cpu(spec, packed, gpu):
    here, there = (lively(spec, spread=0.05).to(device) for device in ("cpu", gpu))
    batches = [batch_of(spec, torch.device(device), packed=packed) for device in ("cpu", gpu)]
    with torch.no_grad():
        expected, found = (
            logits(model, b.tokens, positions=b.positions, segments=b.segments).cpu()
            for model, b in zip((here, there), batches, strict=True)
        )
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-4
    (loss, grads), (gpu_loss, gpu_grads) = (gradients(model, b) for model, b in zip((here, there), batches, strict=True))
    assert abs(loss - gpu_loss) <= 1e-5
    for name, grad in grads.items():
        assert (gpu_grads[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.parametrize("packed", [False, True])
def test_bf16_stays_within_its_rounding_of_fp32(packed, gpu):
    spec = SPECS["grouped queries"]
    here, there = lively(spec, spread=0.05), lively(spec, spread=0.05).to(gpu, torch.bfloat16)
    loss, grads = gradients(here, batch_of(spec, torch.device("cpu"), packed=packed))
    gpu_loss, gpu_grads = gradients(there, batch_of(spec, gpu, packed=packed))
    assert abs(loss - gpu_loss) <= 0.02
    for name, grad in grads.items():
        assert torch.cosine_similarity(gpu_grads[name].flatten(), grad.flatten(), dim=0) > 0.995, name
        assert abs(float(gpu_grads[name].norm() / grad.norm()) - 1) < 0.05, name


def test_packed_documents_give_what_each_gives_alone(gpu):
    spec = SPECS["grouped queries"]
    model, batch = lively(spec, spread=0.05).to(gpu), batch_of(spec, gpu, packed=True)
    with torch.no_grad():
        packed = logits(model, batch.tokens, positions=batch.positions, segments=batch.segments)
        for row, lengths in enumerate(PIECES):
            alone = torch.cat([logits(model, piece[None])[0] for piece in batch.tokens[row].split(lengths)])
            torch.testing.assert_close(packed[row], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_the_chunked_loss_is_the_plain_one(chunk, gpu):
    found = []
    for function, options in ((cross_entropy_plain, {}), (cross_entropy, {"chunk": chunk})):
        generator = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(n, 32, generator=generator).to(gpu).requires_grad_() for n in (64, 300))
        targets = torch.randint(-1, 300, (64,), generator=generator).to(gpu)
        targets[targets < 0] = -100
        loss = function(hidden, weight, targets, scale=1 / 60, z_loss=0.01, **options)
        loss.objective.backward()
        found.append((loss.objective.detach(), loss.nll, hidden.grad, weight.grad))
    for plain, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


def test_all_logits_never_lie_in_the_gpus_memory_at_once(gpu):
    tokens, dim, vocab = 8192, 64, 64_000
    hidden = torch.randn(tokens, dim, device=gpu, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, dim, device=gpu, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    cross_entropy(hidden, weight, targets, scale=1 / tokens).objective.backward()
    assert torch.cuda.max_memory_allocated(gpu) - before < 4 * tokens * vocab / 3


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("segments", [None, ((5000, 3192),)], ids=str)
def test_attention_in_bf16_holds_no_matrix_of_all_pairs_of_tokens(segments, kv_heads, gpu):
    seq, heads = 8192, 8
    q, k, v = (torch.randn(1, seq, n, 64, device=gpu, dtype=torch.bfloat16).requires_grad_() for n in (heads, kv_heads, kv_heads))
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    CausalCore()(q, k, v, Batch(torch.zeros(1, seq, dtype=torch.long), segments=segments)).sum().backward()
    assert torch.cuda.max_memory_allocated(gpu) - before < 2 * heads * seq**2 / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient_are_the_plain_ones(dtype, gpu):
    found = []
    for function in (rotate, rotate_plain):
        x = torch.randn(2, 50, 3, 16, generator=torch.Generator().manual_seed(0)).to(gpu, dtype).requires_grad_()
        out = function(x, *tables(RopeSpec(), 16, torch.arange(50, device=gpu)))
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    for fast, plain in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_greedy_text_is_that_of_the_cpu(gpu):
    spec = SPECS["grouped queries"]
    here, there = (lively(spec, spread=0.2).to(device) for device in ("cpu", gpu))
    assert list(generate(there, [1, 2, 3], tokens=40, temperature=0)) == list(generate(here, [1, 2, 3], tokens=40, temperature=0))
    first, again = (list(generate(there, [1, 2, 3], tokens=40, seed=5)) for _ in range(2))
    assert first == again
