"""The head gives logits without targets, the loss with targets, and the losses of multi-token prediction."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.cross_entropy import Loss
from megalith.kernels.deferred import Queue, deferring
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.spec.model import AttentionSpec, ModelSpec, MtpSpec
from megalith.spec.sizes import tied_names
from tests.models.plain import lively, llama, logits, stage, tokens_of

WEIGHT, SCALE, Z_LOSS = 0.3, 1 / 37, 0.01


class Further:
    """A tiny Llama with multi-token prediction."""

    def __init__(self, depth: int = 1, **sizes: Any) -> None:
        self.llama, self.depth = llama(**{"layers": 2} | sizes), depth

    @property
    def vocab(self) -> int:
        return self.llama.vocab

    def build(self) -> ModelSpec:
        model = self.llama.build()
        ahead = MtpSpec(depth=self.depth, block=model.blocks[0], weight=WEIGHT)
        return model.model_copy(update={"head": model.head.model_copy(update={"ahead": ahead})})


def batch_of(spec: Further, *, seq: int = 12, ahead: bool = True) -> Batch:
    """Return a text's tokens and their successors. Some of the last documents' ends have no target."""
    line = torch.randint(spec.vocab, (2, seq + 1 + spec.depth), generator=torch.Generator().manual_seed(7))
    following = [line[:, k : k + seq].contiguous() for k in range(spec.depth + 2)]
    targets = [one.clone() for one in following[1:]]
    targets[0][0, 3], targets[-1][1, -2:] = -100, -100
    return Batch(
        following[0],
        targets=targets[0],
        ahead=torch.stack(following[1:-1]) if ahead else None,
        ahead_targets=torch.stack(targets[1:]) if ahead else None,
        loss_scale=SCALE,
        z_loss=Z_LOSS,
    )


# --- the same, by hand ---


def normal(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotate x [batch, heads, seq, channels], as complex numbers, by position * theta^(-2i/channels)."""
    half = x.shape[-1] // 2
    turn = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * turn
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def block(w: dict[str, Tensor], prefix: str, x: Tensor, attention: AttentionSpec) -> Tensor:
    def heads(name: str) -> Tensor:
        found = (y @ w[f"{prefix}.attention.{name}.weight"].T).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        return found.repeat_interleave(attention.heads // found.shape[1], dim=1)

    y = normal(x, w[f"{prefix}.attention_norm.weight"])
    scores = turned(heads("q")) @ turned(heads("k")).mT * attention.head_dim**-0.5
    scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
    x = x + (scores.softmax(-1) @ heads("v")).transpose(1, 2).flatten(-2) @ w[f"{prefix}.attention.out.weight"].T
    y = normal(x, w[f"{prefix}.mlp_norm.weight"])
    gate, up = (y @ w[f"{prefix}.mlp.{name}.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{prefix}.mlp.down.weight"].T


def by_hand(spec: ModelSpec, w: dict[str, Tensor], batch: Batch) -> Tensor:
    """Compute the objective from its definition: DeepSeek-V3 (arXiv:2412.19437), equations 21 to 25."""
    assert batch.ahead is not None and batch.ahead_targets is not None and batch.targets is not None
    attention = spec.blocks[0].attention
    assert isinstance(attention, AttentionSpec)
    x = w["embedding.weight"][batch.tokens]
    for number in range(len(spec.blocks)):
        x = block(w, f"blocks.{number}", x, attention)
    x = normal(x, w["head.norm.weight"])
    table = w.get("head.output.weight", w["embedding.weight"])

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        rows = (hidden @ table.T).flatten(0, 1)
        z = rows.logsumexp(-1).square() * (targets.flatten() >= 0)
        return (F.cross_entropy(rows, targets.flatten(), reduction="sum") + Z_LOSS * z.sum()) * SCALE

    objective = loss(x, batch.targets)
    for k, (tokens, targets) in enumerate(zip(batch.ahead, batch.ahead_targets, strict=True)):
        name = f"head.ahead.{k}"
        embedded = normal(w["embedding.weight"][tokens], w[f"{name}.norm_embedding.weight"])
        both = torch.cat((embedded, normal(x, w[f"{name}.norm_hidden.weight"])), dim=-1)
        x = normal(block(w, f"{name}.block", both @ w[f"{name}.project.weight"].T, attention), w[f"{name}.norm.weight"])
        objective = objective + WEIGHT / len(batch.ahead) * loss(x, targets)
    return objective


def gradients(model: Stage, batch: Batch) -> tuple[Loss, dict[str, Tensor]]:
    loss = model(batch.tokens, batch)
    loss.objective.backward()
    return loss, {name: p.grad for name, p in model.parameters_by_name().items() if p.grad is not None}


# --- tests ---


def test_the_loss_is_the_cross_entropy_of_the_logits():
    spec = llama()
    model, tokens, targets = lively(spec), tokens_of(spec), tokens_of(spec, seed=1)
    targets[0, :7] = -100
    with torch.no_grad():
        loss = model(tokens, Batch(tokens, targets=targets, loss_scale=0.5, z_loss=0.01))
        rows = logits(model, tokens)
    assert isinstance(loss, Loss)
    nll = torch.nn.functional.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.nll, nll * 0.5)
    z = (rows.logsumexp(-1).square() * (targets >= 0)).sum()
    torch.testing.assert_close(loss.objective, (nll + 0.01 * z) * 0.5)


@pytest.mark.parametrize("finishing", [{"scale": 0.4}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 3.0}], ids=str)
def test_logits_and_loss_are_scaled_and_capped_alike(finishing):
    spec, tokens = llama(), tokens_of(llama())
    plain = lively(spec)
    model = Stage(plain.spec.model_copy(update={"head": plain.spec.head.model_copy(update=finishing)}))
    model.load_state_dict(plain.state_dict())
    targets = tokens_of(spec, seed=1)
    with torch.no_grad():
        rows, found = logits(plain, tokens) * finishing.get("scale", 1.0), logits(model, tokens)
        if cap := finishing.get("softcap"):
            rows = cap * torch.tanh(rows / cap)
        loss = model(tokens, Batch(tokens, targets=targets))
    torch.testing.assert_close(found, rows)
    assert isinstance(loss, Loss)
    torch.testing.assert_close(loss.nll, F.cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="sum"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_losses_of_multi_token_prediction_and_all_gradients_are_those_of_the_equations(depth, tied):
    spec = Further(depth, tied=tied)
    model, batch = lively(spec), batch_of(spec)
    loss, found = gradients(model, batch)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.parameters_by_name().items()}
    objective = by_hand(model.spec, weights, batch)
    objective.backward()
    torch.testing.assert_close(loss.objective, objective, rtol=1e-5, atol=1e-5)
    assert set(found) == set(weights)
    for name, weight in weights.items():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name
        assert (found[name] - weight.grad).abs().max() <= 1e-4 * weight.grad.abs().max(), name


def test_the_nll_is_the_next_tokens_alone():
    spec = Further()
    model = lively(spec)
    with torch.no_grad():
        far, near = (model(b.tokens, b) for b in (batch_of(spec), batch_of(spec, ahead=False)))
    assert torch.equal(far.nll, near.nll)
    assert far.objective - near.objective > 0.1 * WEIGHT


def test_logits_and_validation_cost_nothing_further(monkeypatch):
    spec = Further()
    model, batch = lively(spec), batch_of(spec, ahead=False)
    monkeypatch.delattr(type(model.head.ahead[0]), "forward")  # fails when called
    model(batch.tokens, batch)
    assert logits(model, batch.tokens).shape == (2, 12, spec.vocab)


def test_a_batch_of_another_depth_is_refused():
    model = lively(Further(depth=2))
    with pytest.raises(AssertionError):
        model(batch_of(Further(depth=1)).tokens, batch_of(Further(depth=1)))


@pytest.mark.parametrize("tied", [False, True])
def test_further_tables_are_the_embedding_and_are_counted_once(tied):
    spec = Further(depth=2, tied=tied)
    model = stage(spec)
    assert all(ahead.embedding.weight is model.embedding.weight for ahead in model.head.ahead)
    assert not [name for name in model.parameters_by_name() if name.endswith(".embedding.weight")]
    assert set(tied_names(model.spec)) == {f"head.ahead.{k}.embedding.weight" for k in (0, 1)} | (
        {"head.output.weight"} if tied else set()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_on_a_stage_of_its_own_the_head_has_one_table_for_all_its_uses(tied):
    spec = Further(depth=2, tied=tied)
    head = stage(spec, 3)
    assert list(head.part_names) == ["head"]
    table = head.parameters_by_name()["embedding.weight"]
    assert all(ahead.embedding.weight is table for ahead in head.head.ahead)
    assert (head.head.output.weight is table) == tied
    assert torch.equal(table, stage(spec).embedding.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_share_the_gradient_of_the_table_between_them(tied):
    spec = Further(depth=2, tied=tied)
    whole, batch = lively(spec), batch_of(spec)
    loss, expected = gradients(whole, batch)
    first, last = Stage(whole.spec, 0, 2), Stage(whole.spec, 2)
    for part in (first, last):
        with torch.no_grad():
            for name, parameter in part.parameters_by_name().items():
                parameter.copy_(whole.parameters_by_name()[name])
    sent = first(batch.tokens, batch)
    assert isinstance(sent, Tensor)
    received = sent.detach().requires_grad_()
    found = last(received, batch)
    assert isinstance(found, Loss)
    found.objective.backward()
    sent.backward(received.grad)
    torch.testing.assert_close(found.objective, loss.objective)
    both = [part.parameters_by_name() for part in (first, last)]
    for name, grad in expected.items():
        total = torch.stack([part[name].grad for part in both if name in part]).sum(0)
        torch.testing.assert_close(total, grad, msg=name)
    assert all("embedding.weight" in part for part in both)


def test_further_blocks_may_turn_otherwise_than_the_model_s():
    spec, batch = Further(), batch_of(Further())
    model = lively(spec)
    ahead = model.spec.head.ahead
    assert ahead is not None
    turning = ahead.block.attention.model_copy(update={"rope": ahead.block.attention.rope.model_copy(update={"theta": 50.0})})
    other_block = ahead.block.model_copy(update={"attention": turning})
    head = model.spec.head.model_copy(update={"ahead": ahead.model_copy(update={"block": other_block})})
    other = Stage(model.spec.model_copy(update={"head": head}))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        found, expected = other(batch.tokens, batch), model(batch.tokens, batch)
    assert torch.equal(found.nll, expected.nll) and not torch.equal(found.objective, expected.objective)


def test_weight_gradients_that_were_put_off_are_the_same_bits():
    spec = Further(depth=2)
    batch, queue = batch_of(spec), Queue()
    _, expected = gradients(lively(spec), batch)
    model = lively(spec)
    with deferring(queue):
        model(batch.tokens, batch).objective.backward()
    assert model.head.ahead[0].get_parameter("project.weight").grad is None
    queue.run_all()
    found = {name: p.grad for name, p in model.parameters_by_name().items()}
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
