"""The mixture of experts equals slow definitions, and its loads stay balanced."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from megalith.kernels.deferred import Queue, deferring
from megalith.models.batch import Batch
from megalith.models.moe import Moe
from megalith.models.router import EvenRouting, LocalBalanceSets, earlier, recording
from megalith.spec.model import MoeSpec, RouterSpec
from tests.models.routed import mixture

DIM, SEQ, ROWS = 8, 12, 3
build = partial(mixture, DIM)
SWITCH = MoeSpec(
    experts=4, hidden=16, activation="relu", gated=False, router=RouterSpec(active=1, capacity=1.0, balance_weight=0.01)
)
MIXTRAL = MoeSpec(experts=4, hidden=16, router=RouterSpec(active=2, normalise=True, balance_weight=0.02, balance_set="batch"))
V2 = MoeSpec(
    experts=8,
    hidden=8,
    shared=16,
    router=RouterSpec(active=3, groups=4, active_groups=2, scale=2.0, balance_weight=0.003, z_weight=0.001),
)
V3 = MoeSpec(
    experts=8,
    hidden=8,
    shared=8,
    shared_gate=True,
    router=RouterSpec(
        active=3, scores="sigmoid", normalise=True, groups=4, active_groups=2, group_score="top2", scale=2.5, bias_rate=0.001,
        balance_weight=0.0001,
    ),
)  # fmt: skip
ALL = {"switch": SWITCH, "mixtral": MIXTRAL, "v2": V2, "v3": V3}


def batch(sequences: int = ROWS) -> Batch:
    return Batch(torch.zeros(ROWS, SEQ, dtype=torch.long), sequences=sequences)


def tokens() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(ROWS, SEQ, DIM, requires_grad=True)


def definition(moe: Moe, spec: MoeSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute token by token the output, and the auxiliary objective with these rows as the whole global batch."""
    router, experts = spec.router, moe.experts
    logits = x @ moe.router.weight.T
    scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
    rows, counts, out = [], torch.zeros(ROWS, spec.experts), torch.zeros_like(x)
    for row in range(ROWS):
        taken, sums = [0] * spec.experts, []
        for t in range(SEQ):
            wanted = scores[row, t].detach() if moe.router.bias is None else scores[row, t].detach() + moe.router.bias
            groups = wanted.view(router.groups, -1)
            worth = [float(g.max() if router.group_score == "max" else g.topk(2).values.sum()) for g in groups]
            best = sorted(range(router.groups), key=lambda g, worth=worth: -worth[g])[: router.active_groups]
            size = spec.experts // router.groups
            allowed = [e for e in range(spec.experts) if e // size in best]
            chosen = sorted(allowed, key=lambda e, wanted=wanted: -float(wanted[e]))[: router.active]
            weights = scores[row, t, chosen]
            weights = (weights / weights.sum() if router.normalise else weights) * router.scale
            total = torch.zeros(DIM)
            for weight, e in zip(weights, chosen, strict=True):
                counts[row, e] += 1
                if router.capacity is not None and taken[e] >= int(router.capacity * SEQ * router.active / spec.experts):
                    continue
                taken[e] += 1
                up = experts.up[e] @ x[row, t]
                inner = F.relu(up) if experts.gate is None else F.silu(experts.gate[e] @ x[row, t]) * up
                total = total + weight * (experts.down[e] @ inner)
            sums.append(total)
        rows.append(torch.stack(sums))
    out = torch.stack(rows)
    if moe.shared is not None:
        shared_expert = moe.shared(x)
        out = out + (shared_expert if moe.shared_gate is None else shared_expert * (x @ moe.shared_gate.weight.T).sigmoid())
    shares = scores / scores.sum(-1, keepdim=True)
    if router.balance_set == "sequence":
        f = counts * spec.experts / (router.active * SEQ)
        balance = (f * shares.mean(1)).sum(1).mean()
    else:
        f = counts.sum(0) * spec.experts / (router.active * SEQ * ROWS)
        balance = (f * shares.mean((0, 1))).sum()
    z = torch.logsumexp(logits, -1).square().mean()
    return out, router.balance_weight * balance + router.z_weight * z


@pytest.mark.parametrize("name", ALL)
def test_outputs_and_gradients_equal_a_token_by_token_definition(name: str) -> None:
    spec, x = ALL[name], tokens()
    moe = build(spec)
    out = moe(x, batch())
    expected, objective = definition(moe, spec, x)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    inputs = (x, *moe.parameters())
    theirs = torch.autograd.grad((expected * grad).sum() + objective, inputs)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, grad), theirs, rtol=1e-4, atol=1e-5)


def test_softmax_over_the_chosen_logits_is_the_normalised_softmax() -> None:
    moe, x = build(MIXTRAL), tokens()
    routing = moe.route(x, batch())
    logits = (x @ moe.router.weight.T).gather(-1, routing.choices)
    torch.testing.assert_close(routing.weights, logits.softmax(-1))


def test_a_dropped_token_passes_by_and_gets_no_gradient_from_experts() -> None:
    moe, x = build(SWITCH.model_copy(update={"router": RouterSpec(active=1, capacity=0.5)})), tokens()
    routing = moe.route(x, batch())
    assert routing.kept is not None
    kept = routing.kept[..., 0]
    assert 0 < kept.sum() < kept.numel()
    out = moe(x, batch())
    assert not out[~kept].any()
    assert out[kept].any(-1).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not grad[~kept].any()


def test_an_expert_takes_the_first_tokens_of_each_sequence() -> None:
    moe, x = build(SWITCH), tokens()
    routing = moe.route(x, batch())
    assert routing.kept is not None
    for row, kept in zip(routing.choices[..., 0], routing.kept[..., 0], strict=True):
        for expert in range(4):
            flags = kept[row == expert].tolist()
            assert flags == [place < SEQ // 4 for place in range(len(flags))]


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_even_loads_cost_the_weight_of_the_balance_loss(kind: str) -> None:
    spec = RouterSpec(active=2, balance_weight=0.7, balance_set=kind, balanced=True)  # pyright: ignore[reportArgumentType]
    moe = build(MoeSpec(experts=4, hidden=4, router=spec))
    with torch.no_grad():
        moe.router.weight.zero_()
    scores = torch.full((ROWS, SEQ, 4), 0.25)
    choices = moe.router._balanced_choices(scores, LocalBalanceSets())
    objective = moe.router._objective(scores.log(), scores, choices, batch(), LocalBalanceSets())
    assert objective is not None
    assert math.isclose(float(objective), 0.7, rel_tol=1e-6)


def test_losses_of_microbatches_add_up_to_that_of_the_global_batch() -> None:
    moe, x = build(V3), tokens()
    whole = torch.autograd.grad(moe(x, batch()).sum() * 0, moe.router.weight)[0]
    parts = [moe(x[row : row + 1], Batch(torch.zeros(1, SEQ), sequences=ROWS)) for row in range(ROWS)]
    torch.testing.assert_close(torch.autograd.grad(sum(p.sum() * 0 for p in parts), moe.router.weight)[0], whole)
    assert whole.any()


def test_the_global_set_uses_the_loads_of_the_step_before() -> None:
    spec = RouterSpec(active=1, balance_weight=1.0, balance_set="global")
    moe, x = build(MoeSpec(experts=4, hidden=4, router=spec)), tokens()
    choices = moe.route(x, batch()).choices
    even = moe.router._loads(choices, LocalBalanceSets())
    assert torch.equal(even, torch.ones(1, 1, 4))
    moe.end_of_step(torch.tensor([1, 2, 3, 10, 0]))
    assert torch.equal(moe.router._loads(choices, LocalBalanceSets()), torch.tensor([[[1, 2, 3, 10]]]) * 4 / 16)


def test_the_bias_rises_where_loads_are_below_the_mean_and_only_chooses() -> None:
    moe, x = build(V3), tokens()
    assert moe.router.bias is not None
    before = moe.router.bias.clone()
    moe.end_of_step(torch.tensor([0, 10, 5, 5, 5, 5, 5, 5, 0]))
    steps = (moe.router.bias - before) / V3.router.bias_rate
    torch.testing.assert_close(steps, torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0, 0]), rtol=0, atol=1e-3)
    with torch.no_grad():
        moe.router.bias += 3.0  # equal for all experts: neither choices nor weights change
    after = moe.route(x, batch())
    with torch.no_grad():
        moe.router.bias -= 3.0
    assert torch.equal(after.weights, moe.route(x, batch()).weights)


@pytest.mark.slow
def test_uneven_loads_become_even_under_the_bias_alone() -> None:
    """Scores favour two experts; the bias spreads the tokens without changing a routing weight."""
    spec = RouterSpec(active=1, scores="sigmoid", bias_rate=0.02)
    moe = build(MoeSpec(experts=4, hidden=4, router=spec))
    torch.manual_seed(0)
    x = torch.randn(8, 64, DIM) + moe.router.weight[0].detach() * 2
    largest = []
    for _ in range(80):
        moe(x, Batch(torch.zeros(8, 64), sequences=8)).sum().backward()
        moe.end_of_step(moe.router.counts.clone())
        largest.append(moe.metrics()["max_load"])
    assert largest[0] > 2.5
    assert largest[-1] < 1.25


def test_counting_happens_once_under_recomputation_and_never_in_validation() -> None:
    for spec in ALL.values():
        moe, x = build(spec), tokens()
        with torch.no_grad():
            moe(x, batch())
        assert not moe.router.counts.any()
        checkpoint(moe, x, batch(), use_reentrant=False).sum().backward()
        assert int(moe.router.counts[:-1].sum()) == ROWS * SEQ * spec.router.active
        plain = build(spec)
        plain(x, batch()).sum().backward()
        assert torch.equal(moe.router.counts, plain.router.counts)
        torch.testing.assert_close([p.grad for p in moe.parameters()], [p.grad for p in plain.parameters()], rtol=0, atol=0)


def test_weight_gradients_can_be_put_off() -> None:
    for spec in ALL.values():
        moe, plain, x = build(spec), build(spec), tokens()
        queue = Queue()
        with deferring(queue):
            moe(x, batch()).sum().backward()
        assert all(p.grad is None for p in moe.parameters())
        queue.run_all()
        plain(x, batch()).sum().backward()
        for (name, one), other in zip(moe.named_parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and torch.equal(one.grad, other.grad), name  # pyright: ignore[reportArgumentType]


def test_loads_and_bias_enter_checkpoints_and_counts_do_not() -> None:
    buffers = {name for name in build(V3).state_dict() if name.startswith("router.")}
    assert buffers == {"router.weight", "router.bias", "router.load"}


def test_metrics_say_how_even_the_last_step_was() -> None:
    moe = build(SWITCH)
    assert moe.metrics() == {}
    moe.end_of_step(torch.tensor([10, 10, 10, 10, 4]))
    assert moe.metrics() == pytest.approx({"max_load": 1.0, "entropy": 1.0, "dropped": 0.1})
    moe.end_of_step(torch.tensor([40, 0, 0, 0, 0]))
    assert moe.metrics() == pytest.approx({"max_load": 4.0, "entropy": 0.0, "dropped": 0.0})


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    moe = build(MIXTRAL)
    with torch.no_grad():
        moe.router.weight.zero_()
    assert torch.equal(moe.route(tokens(), batch()).choices, torch.tensor([0, 1]).expand(ROWS, SEQ, 2))


def test_recording_keeps_choices_and_margins_of_each_microbatch_once() -> None:
    moe, x = build(MIXTRAL), tokens()
    first, second = batch(), batch()
    with recording(moe) as found:
        checkpoint(moe, x, first, use_reentrant=False).sum().backward()
        moe(x * 2, second)
    moe(x, batch())
    (records,) = found.values()
    assert list(found) == ["router"]
    assert [record.batch for record in records] == [first, second]
    ordered = (x @ moe.router.weight.T).softmax(-1).sort(-1, descending=True)
    assert torch.equal(records[0].choices, ordered.indices[..., :2].sort(-1).values)
    torch.testing.assert_close(records[0].margins, ordered.values[..., 1] - ordered.values[..., 2])


def test_margins_see_the_choice_of_groups_too() -> None:
    moe, x = build(V2), tokens()
    with recording(moe) as found:
        moe(x, batch())
    worth = (x @ moe.router.weight.T).softmax(-1).unflatten(-1, (4, 2)).amax(-1).sort(-1, descending=True).values
    assert (found["router"][0].margins <= worth[..., 1] - worth[..., 2] + 1e-7).all()


@pytest.mark.parametrize("experts", [4, 6, 7])
def test_balanced_choices_are_even_and_their_counts_known(experts: int) -> None:
    spec = RouterSpec(active=2, balanced=True)
    moe = build(MoeSpec(experts=experts, hidden=4, router=spec))
    routing = moe.route(tokens(), batch())
    counts = routing.choices.flatten().bincount(minlength=experts)
    assert counts.tolist() == list(EvenRouting(ROWS, SEQ, 2, experts).counts((range(SEQ),)))
    assert counts.max() - counts.min() <= ROWS
    assert (routing.choices[..., 0] != routing.choices[..., 1]).all()
    with recording(moe) as found:
        moe(tokens(), batch())
    (record,) = found["router"]
    assert torch.equal(record.choices, routing.choices.sort(-1).values)
    assert record.margins.isposinf().all(), "no score is asked"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_without_data_tokens_are_balanced_and_no_scores_are_used(name: str) -> None:
    """Reading a value of a fake tensor raises, so neither forward nor backward may read one."""
    with FakeTensorMode():
        moe = Moe(DIM, ALL[name])
        x = torch.randn(ROWS, SEQ, DIM, requires_grad=True)
        out = moe(x, Batch(torch.zeros(ROWS, SEQ, dtype=torch.long)))
        out.sum().backward()
    assert out.shape == x.shape
    with torch.device("meta"):
        moe = Moe(DIM, ALL[name])
        out = moe(torch.randn(ROWS, SEQ, DIM), Batch(torch.zeros(ROWS, SEQ, dtype=torch.long)))
    assert out.is_meta


def test_steps_run_as_graphs_of_their_own_give_the_same_gradients() -> None:
    """An executor runs the steps in this way: tensors are detached at each step, and gradients passed by hand."""
    moe, plain, x = build(V3), build(V3), tokens()
    grad = torch.randn(ROWS, SEQ, DIM)
    plain(x, batch()).backward(grad)
    expected, x.grad = x.grad, None

    rows, destinations = moe.prepare_dispatch(x, moe.route(x, batch()))
    arrived = moe.dispatcher.start_dispatch(rows.detach(), destinations.traffic).wait().detach().requires_grad_()
    done = moe.run(arrived, destinations)
    weights = destinations.weights.detach().requires_grad_()
    returned = moe.dispatcher.start_combine(done.detach(), destinations.traffic).wait().detach().requires_grad_()
    out = moe.finish_combine(returned, type(destinations)(destinations.order, weights, destinations.batch, destinations.traffic))
    shared_expert = moe.shared_expert(x)
    assert shared_expert is not None
    shared_expert.backward(grad)
    out.backward(grad)
    assert returned.grad is not None
    done.backward(moe.dispatcher.start_dispatch(returned.grad, destinations.traffic).wait())
    assert arrived.grad is not None
    torch.autograd.backward(
        (rows, destinations.weights), (moe.dispatcher.start_combine(arrived.grad, destinations.traffic).wait(), weights.grad)
    )
    torch.testing.assert_close(x.grad, expected)
    for one, other in zip(moe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert torch.equal(moe.router.counts, plain.router.counts)


def test_earlier_counts_choices_of_the_same_expert() -> None:
    choices = torch.tensor([[[0, 1], [1, 2], [0, 1]], [[2, 0], [2, 1], [2, 0]]])
    assert earlier(choices).tolist() == [[[0, 0], [1, 0], [1, 2]], [[0, 0], [1, 0], [2, 1]]]


def test_bf16_routes_as_fp32_does_from_the_same_numbers() -> None:
    moe, x = build(V3).bfloat16(), tokens().detach().bfloat16()
    wide = build(V3).bfloat16().float()
    assert torch.equal(moe.router.bias, wide.router.bias.bfloat16())  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
    one, other = moe.route(x, batch()), wide.route(x.float(), batch())
    assert one.weights.dtype == torch.float32
    assert torch.equal(one.choices, other.choices)
    out = moe(x, batch())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide(x.float(), batch()), rtol=0.05, atol=0.3)
