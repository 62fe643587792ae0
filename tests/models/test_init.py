"""First weights are a function of the seed and the parameter's name."""

import math

import pytest
import torch

from megalith.models.batch import Batch
from megalith.models.init import HeldExperts, initialise, seed_of
from megalith.models.stage import Stage
from tests.models.deepseek import deepseek
from tests.models.families import DENSE
from tests.models.plain import llama, stage


@pytest.mark.parametrize("tied", [False, True])
def test_every_slice_of_the_model_starts_with_the_weights_of_the_whole(tied):
    spec = llama(tied=tied)
    whole = stage(spec, seed=3).parameters_by_name()
    for part in range(6):
        for name, parameter in stage(spec, part, part + 1, seed=3).parameters_by_name().items():
            assert torch.equal(parameter, whole[name]), name


def test_another_seed_gives_other_weights_and_the_same_seed_the_same():
    first, again, other = (stage(llama(), seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


@pytest.mark.parametrize("parts", [1, 2])
def test_who_holds_some_experts_draws_what_whoever_holds_all_draws_for_them(parts):
    spec = deepseek(layers=2, dense_layers=1)
    whole = stage(spec, 2, 3, seed=3).blocks["1"].mlp.experts
    made = Stage(spec.build(), 2, 3)
    experts = made.blocks["1"].mlp.experts
    held, expected = {}, []
    for name, weight in whole.named_parameters():
        dim = 1 if name == "down" else 0
        share = weight.detach()[4:6].chunk(parts, dim + 1)[-1]
        experts.register_parameter(name, torch.nn.Parameter(torch.empty_like(share)))
        held[experts.get_parameter(name)] = HeldExperts(4, dim, parts - 1, parts)
        expected.append(share)
    initialise(made.blocks["1"], name="blocks.1", spec=made.spec, seed=3, held=held)
    assert all(torch.equal(*pair) for pair in zip(experts.parameters(), expected, strict=True))
    assert not torch.equal(whole.up[4], whole.up[5])


def test_no_two_matrices_start_alike():
    shapes: dict[torch.Size, list[torch.Tensor]] = {}
    for name, weight in stage(llama()).state_dict().items():
        if "norm" not in name:
            shapes.setdefault(weight.shape, []).append(weight)
    for alike in shapes.values():
        assert not any(torch.equal(a, b) for i, a in enumerate(alike) for b in alike[:i])


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = stage(llama()).state_dict()
    made_by_linear = torch.get_rng_state()  # nn.Linear draws when it is built; `initialise` must not
    torch.manual_seed(6)
    second = stage(llama()).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    built = Stage(llama().build())
    state = torch.get_rng_state()
    for name, part in built.parts():
        initialise(part, name=name, spec=built.spec, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(before, made_by_linear)


def test_spreads_are_as_documented():
    spec = llama(dim=256, ffn=512, vocab=512, layers=8, head_dim=64, init_std=0.05)
    for name, weight in stage(spec).parameters_by_name().items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        std = 0.05 / math.sqrt(16) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.05
        assert abs(float(weight.detach().std()) / std - 1) < 0.02, name
        assert abs(float(weight.detach().mean())) < 4 * std / math.sqrt(weight.numel()), name


def test_biases_start_at_zero_and_norms_multiply_by_one():
    for family, neutral in (("gpt", 1.0), ("gemma2", 0.0), ("palm", 1.0), ("qwen3", 1.0), ("bloom", 1.0), ("nemotron", 0.0)):
        for name, weight in stage(DENSE[family]).parameters_by_name().items():
            if name.endswith("bias"):
                assert torch.equal(weight, torch.zeros_like(weight)), name
            elif "norm" in name:
                assert torch.equal(weight, torch.full_like(weight, neutral)), name
            else:
                assert weight.abs().max() > 0, name


def test_palm_starts_with_embeddings_of_unit_variance():
    """In section 5 no norm follows these parameters, and the logits are scaled instead."""
    weights = stage(DENSE["palm"]).parameters_by_name()
    assert abs(float(weights["embedding.weight"].detach().std()) - 1) < 0.05
    assert float(weights["blocks.0.mlp.up.weight"].detach().std()) < 0.03
    positions = stage(DENSE["gpt"]).parameters_by_name()["embedding.positions"]
    assert abs(float(positions.detach().std()) / 0.02 - 1) < 0.05


def test_the_residual_stream_does_not_grow_with_depth():
    def spread(layers: int) -> float:
        spec = llama(dim=64, ffn=128, head_dim=16, layers=layers)
        model = stage(spec)
        with torch.no_grad():
            x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0))
            body = Stage(model.spec, 1, layers + 1)
            body.load_state_dict({k: v for k, v in model.state_dict().items() if k.startswith("blocks")})
            return float((body(x, Batch(torch.zeros(1, 32, dtype=torch.long))) - x).std())

    assert spread(16) < 2 * spread(2)


def test_seeds_of_named_things_fit_a_generator_and_differ():
    seeds = {seed_of(seed, name) for seed in range(50) for name in ("a", "b", "step 1", "step 11", "1/step 1")}
    assert len(seeds) == 250
    assert all(0 <= seed < 2**63 for seed in seeds)
