"""Models with latent attention equal transformers' DeepSeek, and a share of the heads runs the same code."""

import pytest
import torch
from torch import Tensor, nn

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.generate import generate
from megalith.models.latent import LatentAttention
from megalith.models.rope import tables
from megalith.spec.model import LatentAttentionSpec, RopeSpec
from tests.kernels.largest import Largest
from tests.models.deepseek import V2, YARN, deepseek, drafting, in_pairs, twin
from tests.models.plain import lively, logits, tokens_of
from tests.models.twin import same_loss

DENSE = {
    "queries straight from x": deepseek(dense_layers=3),
    "queries from a latent": deepseek(dense_layers=3, q_rank=12),
    "yarn": deepseek(dense_layers=3, q_rank=12, rope_scaling=YARN),
    "tied": deepseek(dense_layers=3, tied=True),
    "one channel more for values": deepseek(dense_layers=3, v_dim=13),
    "v2": deepseek(dense_layers=3, **V2, q_rank=12),
    "v2 with yarn": deepseek(dense_layers=3, **V2, rope_scaling=YARN),
}
ROUTED = {
    "v2, one group": deepseek(**V2),
    "v2, groups": deepseek(**V2, q_rank=12, groups=4, active_groups=2, routed_scale=16.0, rope_scaling=YARN),
    "v3, groups": deepseek(q_rank=12, groups=4, active_groups=2, bias_rate=0.001, routed_scale=2.5),
    "v3, weights as they are": deepseek(normalise=False, dense_layers=0),
}


@pytest.mark.parametrize("spec", (DENSE | ROUTED).values(), ids=DENSE | ROUTED)
def test_logits_are_those_of_transformers(spec):
    ours, tokens = lively(spec), tokens_of(spec, seq=48)
    for name, bias in ours.named_buffers():
        if name.endswith("router.bias"):
            nn.init.normal_(bias, std=0.3, generator=torch.Generator().manual_seed(1))  # the bias changes the choice of experts
    with torch.no_grad():
        expected, found = twin(spec, ours)(tokens).logits, logits(ours, tokens)
    assert expected.std() > 0.1  # logits must differ, or equality would prove little
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["queries from a latent", "v2 with yarn"])
def test_loss_and_gradients_are_those_of_transformers(name):
    spec = DENSE[name]
    ours, tokens = lively(spec), tokens_of(spec)
    theirs = twin(spec, ours)
    same_loss(ours, theirs, tokens)
    grads = {name: p.grad for name, p in ours.parameters_by_name().items() if p.grad is not None}
    assert len(grads) == len(ours.parameters_by_name())
    for ours_name, theirs_name in (
        ("kv_down", "kv_a_proj_with_mqa"),
        ("kv_norm", "kv_a_layernorm"),
        ("kv_up", "kv_b_proj"),
        ("out", "o_proj"),
        *([("q_down", "q_a_proj"), ("q_norm", "q_a_layernorm"), ("q_up", "q_b_proj")] if spec.q_rank else [("q", "q_proj")]),
    ):
        grad = in_pairs(f"attention.{ours_name}.weight", grads[f"blocks.1.attention.{ours_name}.weight"], spec)
        wanted = theirs.get_parameter(f"model.layers.1.self_attn.{theirs_name}.weight").grad
        assert (grad - wanted).abs().max() <= 1e-4 * wanted.abs().max(), ours_name


@pytest.mark.parametrize(
    "spec", [deepseek(q_rank=12, ahead=1), deepseek(ahead=1, tied=True, rope_scaling=YARN)], ids=["v3", "yarn"]
)
def test_the_mtp_token_is_predicted_as_transformers_does(spec):
    """transformers' module drafts the token after the next from the model's last hidden states and the next tokens."""
    ours, tokens = lively(spec), tokens_of(spec, seq=20)
    theirs = twin(spec, ours)
    drafts = drafting(spec, ours, theirs)
    here, following, targets = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    with torch.no_grad():
        hidden = theirs.model(here).last_hidden_state
        hidden = drafts.forward_layer(0, hidden, torch.arange(18)[None], None, input_ids=following)
        expected = nn.functional.cross_entropy(theirs.lm_head(hidden).flatten(0, 1), targets.flatten())
        batch = Batch(here, targets=following, ahead=following[None], ahead_targets=targets[None], loss_scale=1 / targets.numel())
        loss = ours(here, batch)
    assert isinstance(loss, Loss)
    torch.testing.assert_close((loss.objective - loss.nll) / spec.ahead_weight, expected, rtol=1e-4, atol=1e-5)


def test_the_scaling_of_positions_matters_in_these_tests():
    plain, scaled = (lively(deepseek(dense_layers=3, rope_scaling=scaling)) for scaling in (None, YARN))
    tokens = tokens_of(deepseek(), seq=48)
    assert (logits(plain, tokens) - logits(scaled, tokens)).abs().max() > 1e-2


def test_packed_documents_give_what_each_gives_alone():
    spec = DENSE["yarn"]
    model, segments = lively(spec), ((10, 1, 13), (24,))
    tokens = tokens_of(spec)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in segments])
    with torch.no_grad():
        packed = logits(model, tokens, positions=positions, segments=segments)
        for row, lengths in enumerate(segments):
            alone = [logits(model, piece[None])[0] for piece in tokens[row].split(lengths)]
            torch.testing.assert_close(packed[row], torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [[5], [3, 1, 4, 1, 5, 9, 2, 6]], ids=len)
def test_greedy_text_is_that_of_reading_everything_again_for_each_token(prompt):
    model = lively(DENSE["yarn"], spread=0.6)
    line = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            line.append(int(logits(model, torch.tensor([line]))[0, -1].argmax()))
    found = list(generate(model, prompt, tokens=20, temperature=0))
    assert found == line[len(prompt) :]
    assert len(set(found)) > 3  # not always the same token, which any cache would give


SPEC = LatentAttentionSpec(heads=4, q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6, rope=RopeSpec(scaling=YARN))


def filled(q_rank: int | None) -> LatentAttention:
    attention = LatentAttention(32, SPEC.model_copy(update={"q_rank": q_rank}))
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return attention


def batch_of(seq: int) -> Batch:
    return Batch(torch.zeros(2, seq, dtype=torch.long), rotary=(tables(SPEC.rope, SPEC.rope_dim, torch.arange(seq)),))


def share_of(attention: LatentAttention, heads: slice) -> LatentAttention:
    """Return a copy with a share of the heads."""
    some = filled(attention.spec.q_rank)

    def cut(weight: Tensor, dim: int) -> nn.Parameter:
        parts = weight.detach().unflatten(dim, (SPEC.heads, -1))
        return nn.Parameter(parts.narrow(dim, heads.start, heads.stop - heads.start).flatten(dim, dim + 1).clone())

    for name, dim in (("q", 0), ("q_up", 0), ("kv_up", 0), ("out", 1)):
        if linear := getattr(some, name, None):
            linear.weight = cut(getattr(attention, name).weight, dim)
    return some


@pytest.mark.parametrize("q_rank", [None, 12])
def test_shares_of_the_heads_add_up_and_so_do_the_gradients_of_what_each_holds_whole(q_rank):
    attention, batch, x = filled(q_rank), batch_of(10), torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    whole = attention(x, batch)
    whole.square().sum().backward()
    shares = [share_of(attention, heads) for heads in (slice(0, 1), slice(1, 4))]
    outs = [share(x, batch) for share in shares]
    torch.testing.assert_close(outs[0] + outs[1], whole)
    for out in outs:
        out.backward(2 * whole.detach())
    for name in ("q_down", "q_norm", "kv_down", "kv_norm"):
        if module := getattr(attention, name, None):
            total = sum(getattr(share, name).weight.grad for share in shares)
            torch.testing.assert_close(total, module.weight.grad, msg=name)


def test_no_tensor_is_as_large_as_all_scores():
    """Values with fewer channels than keys still use the fused kernel."""
    attention, seq = filled(12), 256
    x = torch.randn(2, seq, 32)
    with Largest() as seen:
        attention(x, batch_of(seq)).sum().backward()
    assert seen.most < 2 * SPEC.heads * seq * seq / 4
