"""Each optimizer in one process equals an independent implementation: torch's own, or the paper's formula in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.prove.updates import INDEPENDENT, Update, update_of
from megalith.spec.run import OptimizerSpec
from megalith.spec.sizes import Parameter, model_parameters
from megalith.spec.treatment import Treatment, is_matrix, treatments, true_matrices
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.orthogonal import orthogonal, steps_of
from megalith.train.optimizers.rule import Optimizer
from megalith.train.state import State
from tests.specs import tiny_run

LR = 3e-3


def spec_of(kind: str, **rest: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"kind": kind, "lr": LR, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6} | rest)


def gradient(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_of(preset: str) -> tuple[Any, dict[str, nn.Parameter]]:
    """Return a small model and its first weights."""
    model = tiny_run(model={"preset": preset} if preset else {}).model.build()
    stage = Stage(model)
    for name, part in stage.parts():
        initialise(part, name=name, spec=model, seed=0)
    return model, {name: nn.Parameter(p.detach().clone()) for name, p in stage.parameters_by_name().items()}


def train(parameters: dict[str, nn.Parameter], advance: Update, steps: int = 6) -> None:
    for step in range(steps):
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = gradient(parameter.shape, 1000 * step + number)
        advance(step, LR * (1 + step % 3))


def rule_of(parameters: dict[str, nn.Parameter], spec: OptimizerSpec, model: Any) -> Update:
    """Run the trainer's rules on whole tensors."""
    treated = treatments(model, spec)
    state = State(parameters, {}, {name: each.slots for name, each in treated.items()})
    rule = Optimizer(spec, treated, GlobalTensors.alone(parameters, model_parameters(model)))

    @torch.no_grad()
    def update(number: int, lr: float) -> None:
        rule.update(state.parts(), number=number, lr=lr)

    return update


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["", "deepseek-tiny"])
@pytest.mark.parametrize(
    "spec",
    [
        spec_of("sgd"),
        spec_of("sgd", nesterov=False, momentum=0.5),
        spec_of("sgd", momentum=0.0),
        spec_of("lion"),
        spec_of("lamb"),
        spec_of("adafactor"),
        spec_of("adafactor", relative_step=True),
        spec_of("muon", iteration="fp32"),
        spec_of("muon", iteration="fp32", split_heads=True, coefficients="polar-express", nesterov=False),
        spec_of("lamb", groups=[{"pattern": "*.mlp.*", "lr": 0.3}, {"pattern": "*norm*", "weight_decay": 0.5}]),
    ],
    ids=str,
)
def test_weights_after_many_updates_are_those_of_an_independent_implementation(spec: OptimizerSpec, preset: str) -> None:
    model, ours = model_of(preset)
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    assert spec.kind in INDEPENDENT
    train(ours, rule_of(ours, spec, model))
    train(theirs, update_of(theirs, spec, model))
    for name, expected in theirs.items():
        limit = 1e-5 if spec.kind == "muon" else 1e-6  # five steps in fp32 beside five in fp64
        torch.testing.assert_close(ours[name], expected, rtol=limit, atol=limit, msg=lambda m, name=name: f"{name}: {m}")


def test_sgd_is_torchs_to_the_bit() -> None:
    model, ours = model_of("")
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    spec = spec_of("sgd", weight_decay=0.1)
    train(ours, rule_of(ours, spec, model))
    train(theirs, update_of(theirs, spec, model))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def alone(shape: tuple[int, ...], spec: OptimizerSpec, **described: Any) -> tuple[nn.Parameter, Update]:
    """Return one parameter and its rule."""
    parameter = nn.Parameter(gradient(torch.Size(shape), 7) * 0.1)
    treated = {"w": Treatment(spec.kind, weight_decay=spec.weight_decay)}
    role = "experts" if len(shape) == 3 else "matrix"
    whole = GlobalTensors.alone({"w": parameter}, {"w": Parameter("w", shape, role, **described)})
    state, rule = State({"w": parameter}, {}, {"w": treated["w"].slots}), Optimizer(spec, treated, whole)

    @torch.no_grad()
    def update(number: int, lr: float) -> None:
        rule.update(state.parts(), number=number, lr=lr)

    return parameter, update


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(24, 16), (16, 40), (10,)], ids=str)
def test_adafactor_with_relative_steps_is_torchs(shape: tuple[int, ...], weight_decay: float) -> None:
    """torch has only the relative step, and no epsilon that matters here."""
    spec = spec_of("adafactor", relative_step=True, weight_decay=weight_decay)
    ours, advance = alone(shape, spec)
    theirs = nn.Parameter(ours.detach().clone())
    expected = torch.optim.Adafactor([theirs], lr=LR, eps=(1e-30, 1e-3), weight_decay=weight_decay, foreach=False)
    for step in range(5):
        ours.grad = theirs.grad = gradient(ours.shape, step)
        advance(step, LR)
        expected.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (64, 64), (7, 130)], ids=str)
def test_muon_in_bf16_is_torchs_to_the_bit(shape: tuple[int, int], nesterov: bool) -> None:
    spec = spec_of("muon", nesterov=nesterov, weight_decay=0.1)
    ours, advance = alone(shape, spec)
    theirs = nn.Parameter(ours.detach().clone())
    settings: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    expected = torch.optim.Muon([theirs], lr=LR, **settings)
    for step in range(5):
        ours.grad = theirs.grad = gradient(ours.shape, step)
        advance(step, LR)
        expected.step()
        assert torch.equal(ours, theirs), step


# --- the iteration ---


@pytest.mark.parametrize(
    ("coefficients", "iterations", "least", "most"), [("newton-schulz", 5, 0.6, 1.3), ("polar-express", 8, 0.98, 1.02)]
)
@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (32, 32)], ids=str)
def test_singular_values_come_near_1(
    shape: tuple[int, int], coefficients: str, iterations: int, least: float, most: float
) -> None:
    """Singular values go from 1 down to 0.01 of the largest. Directions do not change: U^T X V is diagonal."""
    generator = torch.Generator().manual_seed(0)
    rank = min(shape)
    u, _ = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(shape[1], rank, generator=generator))
    matrix = u @ torch.diag(torch.logspace(0, -2, rank)) @ v.T
    found = u.T @ orthogonal(matrix, steps_of(coefficients, iterations)) @ v
    values = found.diagonal()
    assert float(values.min()) > least and float(values.max()) < most
    torch.testing.assert_close(found, torch.diag(values), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_a_matrix_of_nothing_stays_small_and_finite(size: float, dtype: torch.dtype) -> None:
    found = orthogonal(torch.full((8, 12), size, dtype=dtype), steps_of("newton-schulz", 5))
    assert bool(found.isfinite().all()) and float(found.abs().max()) < 1e-3


def _muon(shape: tuple[int, ...], **rest: Any) -> tuple[Tensor, Tensor]:
    """Return a parameter's first gradient, and its first update divided by the learning rate."""
    described = {key: rest.pop(key) for key in ("heads", "stacked") if key in rest}
    parameter, advance = alone(shape, spec_of("muon", weight_decay=0.0, iteration="fp32", nesterov=False, **rest), **described)
    before = parameter.detach().clone()
    parameter.grad = gradient(parameter.shape, 3)
    advance(0, 1.0)
    return parameter.grad, parameter.detach() - before


def _update(matrix: Tensor) -> Tensor:
    """Return the change of a matrix that is updated alone."""
    return -0.2 * max(matrix.shape) ** 0.5 * orthogonal(matrix * 0.05, steps_of("newton-schulz", 5))


@pytest.mark.parametrize("iteration", ["bf16", "fp32"])
def test_each_expert_is_a_matrix_of_its_own_with_the_bits_of_one(iteration: str) -> None:
    spec = spec_of("muon", iteration=iteration)
    experts, advance = alone((3, 24, 40), spec)
    singles = [alone((24, 40), spec) for _ in range(3)]
    for number, (single, _) in enumerate(singles):
        single.data.copy_(experts[number].detach())
    for step in range(3):
        experts.grad = gradient(experts.shape, step)
        advance(step, LR)
        for number, (single, advance_one) in enumerate(singles):
            single.grad = experts.grad[number].clone()
            advance_one(step, LR)
            assert torch.equal(single, experts[number])


def test_heads_and_stacked_matrices_are_split() -> None:
    """Two heads, each with three rows of one matrix and five of another."""
    g, moved = _muon((16, 12), heads=2, stacked=(3, 5))
    first, second = [0, 1, 2, 8, 9, 10], [3, 4, 5, 6, 7, 11, 12, 13, 14, 15]
    for rows in (first, second):
        torch.testing.assert_close(moved[rows], _update(g[rows]), rtol=1e-5, atol=1e-6)
    g, moved = _muon((16, 12), heads=2, stacked=(3, 5), split_heads=True)
    for start, stop in ((0, 3), (3, 8), (8, 11), (11, 16)):
        torch.testing.assert_close(moved[start:stop], _update(g[start:stop]), rtol=1e-5, atol=1e-6)


def test_muon_updates_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = tiny_run(model={"preset": "deepseek-tiny"}).model.build()
    treated, described = treatments(model, spec_of("muon")), model_parameters(model)
    others = {name for name, each in treated.items() if each.kind == "adamw"}
    assert {"embedding.weight", "head.output.weight", "head.norm.weight", "blocks.1.mlp.router.weight"} <= others
    assert all(is_matrix(described[name]) == (name not in others) for name in described)
    assert treated["blocks.1.mlp.experts.up"].kind == treated["blocks.0.attention.kv_up.weight"].kind == "muon"
    kv_down, kv_up = (described[f"blocks.0.attention.{name}.weight"] for name in ("kv_down", "kv_up"))
    assert len(true_matrices(kv_down, split_heads=False)) == len(true_matrices(kv_up, split_heads=False)) == 2
    assert len(true_matrices(kv_up, split_heads=True)) == 2 * kv_up.heads
    for each in described.values():
        runs = sorted(run for matrix in true_matrices(each, split_heads=True) for run in matrix) if len(each.shape) > 1 else []
        assert not runs or [first for first, _ in runs] == [sum(size for _, size in runs[:n]) for n in range(len(runs))]
        assert not runs or sum(size for _, size in runs) == list(each.shape)[-2]
