"""Blocks of every family equal transformers' or, if it lacks the family, their formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.checkpoint.huggingface import to_theirs
from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.block import Attention, Block
from megalith.models.norm import LayerNorm
from megalith.models.stage import Stage
from megalith.spec.families import Model
from tests.models.families import DENSE, EXPORTED
from tests.models.plain import logits, stage, tokens_of
from tests.models.twin import twin

every_family = pytest.mark.parametrize("spec", DENSE.values(), ids=DENSE.keys())


def stirred(spec: Model, *, spread: float = 0.3) -> Stage:
    """Return a model in which every parameter, including biases and norms, differs from its neutral value."""
    made, generator = stage(spec), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters_by_name().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return made


def objective(model: Stage, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss."""
    targets = torch.cat((tokens[:, 1:], torch.full((len(tokens), 1), -100)), dim=1)
    loss = model(tokens, Batch(tokens, targets=targets, loss_scale=1 / int((targets >= 0).sum())))
    assert isinstance(loss, Loss)
    return loss.objective


@pytest.mark.parametrize("spec", EXPORTED.values(), ids=EXPORTED.keys())
def test_loss_and_gradients_are_those_of_transformers(spec: Model):
    ours, tokens = stirred(spec), tokens_of(spec)
    theirs = twin(spec, ours).eval()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    found = objective(ours, tokens)
    found.backward()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=1e-5)
    gradients: dict[str, Tensor] = {}
    for name, parameter in ours.parameters_by_name().items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    gradients = to_theirs(spec, gradients)
    for name, parameter in theirs.named_parameters():
        gap = (gradients[name] - parameter.grad).abs().max()
        assert gap <= 1e-4 * parameter.grad.abs().max(), name


def test_a_parallel_block_adds_both_halves_of_one_norm():
    """PaLM's block (arXiv:2204.02311, section 2) written out: one LayerNorm without bias, one key-value head, swish gate."""
    spec = DENSE["palm"]
    model = stirred(spec)
    block = model.blocks["0"]
    assert isinstance(block, Block)
    assert isinstance(block.attention, Attention)
    assert block.mlp_norm is None
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    batch = model.prepare(Batch(torch.zeros(2, 5, dtype=torch.long)))
    with torch.no_grad():
        normal = F.layer_norm(x, (32,), block.attention_norm.weight, None, 1e-6)
        mlp = F.silu(normal @ block.mlp.gate.weight.T) * (normal @ block.mlp.up.weight.T) @ block.mlp.down.weight.T
        torch.testing.assert_close(block(x, batch), x + block.attention(normal, batch) + mlp)


def test_palm_has_no_biases_one_key_head_and_scaled_tied_logits():
    spec = DENSE["palm"]
    model, tokens = stirred(spec), tokens_of(spec)
    names = model.parameters_by_name()
    assert not [name for name in names if "bias" in name or name.startswith("head.output")]
    assert names["blocks.0.attention.k.weight"].shape == (8, 32)
    assert all(isinstance(m.attention_norm, LayerNorm) for m in model.modules() if isinstance(m, Block))
    with torch.no_grad():
        hidden = tokens
        for name, part in model.parts():
            hidden = part.norm(hidden) if name == "head" else part(hidden, model.prepare(Batch(tokens)))
        torch.testing.assert_close(logits(model, tokens), hidden @ names["embedding.weight"].T / math.sqrt(32))


@every_family
def test_every_family_sees_the_past_only(spec: Model):
    model, tokens = stirred(spec), tokens_of(spec)
    other = tokens.clone()
    other[:, 15:] = (other[:, 15:] + 1) % spec.vocab
    with torch.no_grad():
        before, after = logits(model, tokens), logits(model, other)
    torch.testing.assert_close(before[:, :15], after[:, :15])
    assert (before[:, 15:] - after[:, 15:]).abs().max() > 1e-2


@every_family
def test_every_part_of_every_family_starts_from_its_name_alone(spec: Model):
    whole = stage(spec, seed=3).parameters_by_name()
    for part in range(spec.layers + 2):
        for name, parameter in stage(spec, part, part + 1, seed=3).parameters_by_name().items():
            assert torch.equal(parameter, whole[name]), name


@every_family
def test_every_parameter_of_every_family_gets_a_gradient(spec: Model):
    model = stirred(spec)
    objective(model, tokens_of(spec)).backward()
    for name, parameter in model.parameters_by_name().items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@every_family
def test_packed_documents_give_what_each_gives_alone(spec: Model):
    model, tokens = stirred(spec), tokens_of(spec, batch=1, seq=20)
    positions = torch.cat((torch.arange(12), torch.arange(8)))[None]
    with torch.no_grad():
        packed = logits(model, tokens, positions=positions, segments=((12, 8),))
        alone = torch.cat((logits(model, tokens[:, :12]), logits(model, tokens[:, 12:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_only_the_first_of_two_gemma_layers_forgets_what_lies_beyond_its_window():
    """A change 7 tokens back is outside the window of 7 of a windowed layer, but a layer without a window sees it."""
    spec = DENSE["gemma2"]
    model, tokens = stirred(spec), tokens_of(spec)
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[:, 3] += 1
    batch = model.prepare(Batch(tokens[:1]))
    with torch.no_grad():
        gaps = [(model.blocks[layer](x, batch) - model.blocks[layer](other, batch)).abs().amax(-1)[0] for layer in "01"]
    assert gaps[0][9] > 1e-3 > 1e-6 > gaps[0][10:].max()  # position 9 sees 3 as the last of its 7
    assert gaps[1][10:].min() > 1e-4
