"""The whole model equals Hugging Face's Llama, and stages are slices of the model."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.huggingface import to_theirs
from megalith.models.batch import Batch
from megalith.models.embedding import Embedding
from megalith.models.head import Head
from megalith.models.stage import Stage
from megalith.spec.model import ModelSpec, RopeScaling, RopeSpec
from tests.models.plain import lively, llama, logits, stage, tokens_of
from tests.models.twin import same_loss, twin

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
SPECS = {
    "grouped queries": llama(),
    "multi-head": llama(kv_heads=4),
    "multi-query": llama(kv_heads=1),
    "tied": llama(tied=True),
    "llama 3.1 positions": llama(rope_theta=500_000.0, rope_scaling=SCALING),
    "norm eps 1e-6": llama(norm_eps=1e-6),
    "large norm eps": llama(norm_eps=0.3),
    "heads wider than dim": llama(head_dim=12),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@every_spec
def test_logits_are_those_of_transformers(spec):
    ours = lively(spec)
    tokens = tokens_of(spec, seq=48)
    with torch.no_grad():
        expected, found = twin(spec, ours)(tokens).logits, logits(ours, tokens)
    assert expected.std() > 0.1  # logits must differ, or equality would prove little
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["grouped queries", "tied", "llama 3.1 positions"])
def test_loss_and_gradients_are_those_of_transformers(name):
    spec = SPECS[name]
    ours, tokens = lively(spec), tokens_of(spec)
    theirs = twin(spec, ours)
    same_loss(ours, theirs, tokens)
    found = to_theirs(spec, {name: parameter.grad for name, parameter in ours.parameters_by_name().items()})
    for name, parameter in theirs.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), name


def test_the_scaling_of_positions_matters_in_these_tests():
    plain, scaled = (lively(llama(rope_theta=500_000.0, rope_scaling=scaling)) for scaling in (None, SCALING))
    tokens = tokens_of(llama(), seq=48)
    assert (logits(plain, tokens) - logits(scaled, tokens)).abs().max() > 1e-2


def test_packed_documents_give_what_each_gives_alone():
    spec = llama()
    model, segments = lively(spec), ((10, 1, 13), (10, 1, 13), (24,), (7, 17))
    tokens = tokens_of(spec, batch=4)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in segments])
    with torch.no_grad():
        packed = logits(model, tokens, positions=positions, segments=segments)
        for row, lengths in enumerate(segments):
            alone = [logits(model, piece[None])[0] for piece in tokens[row].split(lengths)]
            torch.testing.assert_close(packed[row], torch.cat(alone), rtol=1e-4, atol=1e-5)
        assert (packed[0] - logits(model, tokens)[0]).abs().max() > 1e-2  # without document borders this is another text


def test_packed_documents_give_the_gradients_of_each_alone():
    spec = llama(layers=2)
    model, segments = lively(spec), ((9, 15), (4, 20), (9, 15))
    tokens, targets = tokens_of(spec, batch=3), tokens_of(spec, batch=3, seed=1)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in segments])
    model(tokens, Batch(tokens, targets=targets, positions=positions, segments=segments)).objective.backward()
    packed = {name: p.grad.clone() for name, p in model.parameters_by_name().items() if p.grad is not None}
    model.zero_grad()
    for row, lengths in enumerate(segments):
        for piece, its_targets in zip(tokens[row].split(lengths), targets[row].split(lengths), strict=True):
            model(piece[None], Batch(piece[None], targets=its_targets[None])).objective.backward()
    for name, parameter in model.parameters_by_name().items():
        assert (parameter.grad - packed[name]).abs().max() <= 1e-5 * packed[name].abs().max(), name


def test_a_token_sees_none_that_follows():
    spec = llama()
    model, tokens = lively(spec), tokens_of(spec)
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % spec.vocab
    with torch.no_grad():
        before, after = logits(model, tokens), logits(model, changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert (before[:, 15:] - after[:, 15:]).abs().amax(-1).min() > 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bounds", [[0, 1, 3, 6], [0, 2, 6], [0, 5, 6], [0, 1, 2, 3, 4, 5, 6]], ids=str)
def test_stages_one_after_the_other_are_the_whole_model(bounds, tied):
    spec = llama(tied=tied)
    whole, tokens = stage(spec), tokens_of(spec)
    stages = [stage(spec, first, last) for first, last in pairwise(bounds)]
    batch = Batch(tokens, targets=tokens_of(spec, seed=1))
    x = tokens
    with torch.no_grad():
        for part in stages:
            x = part(x, batch)
        assert torch.equal(torch.stack(list(x)), torch.stack(list(whole(tokens, batch))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bounds", [[0, 1, 3, 6], [0, 2, 6], [0, 1, 2, 3, 4, 5, 6]], ids=str)
def test_parameters_have_their_names_of_the_whole_model_on_any_stage(bounds, tied):
    spec = llama(tied=tied)
    whole = {name: p.detach() for name, p in stage(spec).parameters_by_name().items()}
    found = [stage(spec, first, last).parameters_by_name() for first, last in pairwise(bounds)]
    assert {name for part in found for name in part} == set(whole)
    assert all(torch.equal(p, whole[name]) for part in found for name, p in part.items())
    times = [sum(name in part for part in found) for name in whole]
    assert times == [2 if tied and name == "embedding.weight" else 1 for name in whole]  # both end stages hold the tied table


def test_a_tied_table_is_counted_once():
    untied, tied = (sum(p.numel() for p in stage(llama(tied=tied)).parameters_by_name().values()) for tied in (False, True))
    assert untied - tied == 96 * 32
    assert sum(p.numel() for p in stage(llama(tied=True)).parameters()) == tied


def test_a_tied_table_gets_the_gradients_of_both_its_uses():
    spec = llama(tied=True, layers=1)
    model, untied = lively(spec), lively(llama(layers=1))
    with torch.no_grad():
        for name, parameter in untied.parameters_by_name().items():
            parameter.copy_(model.parameters_by_name().get(name, model.embedding.weight))
    tokens, targets = tokens_of(spec), tokens_of(spec, seed=1)
    for one in (model, untied):
        one(tokens, Batch(tokens, targets=targets)).objective.backward()
    both = untied.embedding.weight.grad + untied.head.output.weight.grad
    torch.testing.assert_close(model.embedding.weight.grad, both)


def test_blocks_with_other_rotations_each_use_their_own():
    spec = llama(layers=2).build()
    turning = spec.blocks[1].attention.model_copy(update={"rope": RopeSpec(theta=50.0)})
    other = spec.blocks[1].model_copy(update={"attention": turning})
    mixed, all_other = (spec.model_copy(update={"blocks": blocks}) for blocks in ((spec.blocks[0], other), (other, other)))
    weights, x, batch = lively(llama(layers=2)).state_dict(), torch.randn(1, 20, 32), Batch(tokens_of(llama(), batch=1, seq=20))
    with torch.no_grad():
        plain, slow, both = ([_part(one, part, weights)(x, batch) for part in (1, 2)] for one in (spec, all_other, mixed))
    assert torch.equal(both[0], plain[0]) and torch.equal(both[1], slow[1])
    assert not torch.equal(plain[0], slow[0]) and not torch.equal(plain[1], slow[1])


def _part(spec: ModelSpec, part: int, weights: dict[str, Tensor]) -> Stage:
    made = Stage(spec, part, part + 1)
    made.load_state_dict({name: weights[name] for name in made.state_dict()})
    return made


def test_a_stage_holds_no_module_it_does_not_run():
    assert [name for name, _ in stage(llama(), 2, 4).parts()] == ["blocks.1", "blocks.2"]
    assert not [module for module in stage(llama(), 2, 4).modules() if isinstance(module, Embedding | Head)]
