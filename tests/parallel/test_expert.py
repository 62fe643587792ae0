"""Experts that are distributed over ranks compute the same as one process with all experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from megalith.mesh import Mesh
from megalith.models.batch import Batch
from megalith.models.moe import Moe
from megalith.models.router import recording
from megalith.parallel.expert import AllToAllTraffic, spans_of, split_experts
from megalith.parallel.groups import Groups
from megalith.spec.model import MoeSpec, RouterSpec
from megalith.spec.plan import Plan
from tests.full import sampled
from tests.models.routed import mixture
from tests.parallel.traffic import Traffic
from tests.ranks import run_ranks

DIM, SEQ, ROWS = 8, 16, 4

SPECS = {
    "switch": MoeSpec(
        experts=4, hidden=8, activation="relu", gated=False, router=RouterSpec(active=1, capacity=0.75, balance_weight=0.3)
    ),
    "mixtral": MoeSpec(
        experts=4,
        hidden=8,
        router=RouterSpec(active=2, normalise=True, balance_weight=0.5, balance_set="batch", z_weight=0.1, capacity=1.0),
    ),
    "v2": MoeSpec(
        experts=8,
        hidden=4,
        shared=8,
        router=RouterSpec(active=3, groups=4, active_groups=2, balance_weight=0.5, balance_set="global"),
    ),
    "v3": MoeSpec(
        experts=8,
        hidden=4,
        shared=8,
        shared_gate=True,
        router=RouterSpec(
            active=3, scores="sigmoid", normalise=True, groups=4, active_groups=2, group_score="top2", scale=2.5, bias_rate=0.01,
            balance_weight=0.2,
        ),
    ),
    "dealt": MoeSpec(experts=4, hidden=8, router=RouterSpec(active=2, balanced=True, balance_weight=0.1)),
    "dealt unevenly": MoeSpec(experts=4, hidden=8, router=RouterSpec(active=3, balanced=True)),
}  # fmt: skip

PLANS = [
    Plan(data=2, expert=2),
    Plan(context=2, expert=2),
    Plan(tensor=2, expert=2),
    Plan(tensor=2, expert=1),
    Plan(tensor=2, expert=2, sequence=False),
    Plan(data=2, expert_tensor=2),
    Plan(data=4, expert=2, replicate=2),
    Plan(data=2, tensor=2, expert=4),
    Plan(context=2, tensor=2, expert=4),
    Plan(context=2, tensor=2, expert=2, expert_tensor=2),
    Plan(data=2, context=2, expert=2, expert_tensor=2),
    Plan(data=2, tensor=2, expert=2, sequence=False),
]


def build(spec: MoeSpec) -> Moe:
    moe = mixture(DIM, spec)
    with torch.no_grad():
        moe.router.load.copy_(torch.arange(spec.experts) + 1.0)
    return moe


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(ROWS, SEQ, DIM), torch.randn(ROWS, SEQ, DIM)


class Share:
    """Return a rank's tokens of the whole batch."""

    def __init__(self, groups: Groups, plan: Plan) -> None:
        here = groups.coordinates
        rows = ROWS // plan.data
        self.rows = slice(here["data"] * rows, (here["data"] + 1) * rows)
        shares = plan.tensor if plan.sequence else 1
        seq = SEQ // plan.context // shares
        spans = spans_of(seq, context=here["context"], contexts=plan.context, share=here["tensor"] % shares, shares=shares)
        self.positions = [position for span in spans for position in span]
        assert len(self.positions) == seq

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.rows][:, self.positions].clone()

    def batch(self) -> Batch:
        rows = self.rows.stop - self.rows.start
        return Batch(torch.zeros(rows, len(self.positions), dtype=torch.long), sequences=ROWS)


def summed(x: Tensor | None, *groups: dist.ProcessGroup) -> Tensor:
    assert x is not None
    total = x.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def equals_one_process(rank: int, plan: Plan) -> None:
    groups = Groups.build(Mesh.of(plan), device="cpu")
    share = Share(groups, plan)
    for name, spec in SPECS.items():
        compare(spec, plan, groups, share, name)


def compare(spec: MoeSpec, plan: Plan, groups: Groups, share: Share, name: str) -> None:
    x, grad = tokens()
    whole, ours = build(spec), build(spec)
    x.requires_grad_()
    everything = Batch(torch.zeros(ROWS, SEQ, dtype=torch.long), sequences=ROWS)
    with recording(whole) as expected_routing:
        expected = whole(x, everything)
    expected.backward(grad)
    places = split_experts(ours, groups, plan)

    mine = share.of(x.detach()).requires_grad_()
    with recording(ours) as routing:
        out = checkpoint(ours, mine, share.batch(), use_reentrant=False)
    assert isinstance(out, Tensor)
    out.backward(share.of(grad))
    assert mine.grad is not None and x.grad is not None

    def same(one: Tensor, other: Tensor, what: str) -> None:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}, {plan}: {what}\n{m}")

    if not spec.router.balanced:
        assert torch.equal(routing["router"][0].choices, share.of(expected_routing["router"][0].choices)), name
    same(out, share.of(expected), "output")
    same(mine.grad, share.of(x.grad), "gradient of x")
    counts = summed(ours.router.counts, groups.tokens)
    assert torch.equal(counts, whole.router.counts), (name, plan, counts, whole.router.counts)
    for (path, parameter), other in zip(ours.named_parameters(), whole.parameters(), strict=True):
        assert other.grad is not None
        if path in places:
            place = places[path]
            total = summed(parameter.grad, place.mesh.get_group(0), place.mesh.get_group(1))
            there = DTensor.from_local(total, place.mesh, [*[Replicate()] * 2, *place.split], run_check=False)
            same(there.full_tensor(), other.grad, path)
        else:
            same(summed(parameter.grad, groups.tokens if plan.sequence else groups.data), other.grad, path)
    for moe, seen in ((ours, counts), (whole, whole.router.counts.clone())):
        moe.end_of_step(seen)
    assert torch.equal(ours.router.load, whole.router.load)
    if whole.router.bias is not None:
        assert torch.equal(ours.router.bias, whole.router.bias)  # pyright: ignore[reportArgumentType]
    assert ours.metrics() == whole.metrics()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: ",".join(f"{k}={v}" for k, v in plan.model_dump(exclude_defaults=True).items())
)
@sampled(6)
def test_any_layout_of_experts_equals_one_process(plan: Plan) -> None:
    run_ranks(equals_one_process, plan.ranks, plan)


def sent_by(spec: MoeSpec, plan: Plan, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Return dtype and bytes to other ranks for every all-to-all in one forward and backward of this rank."""
    groups = Groups.build(Mesh.of(plan), device="cpu")
    moe = build(spec).to(dtype)
    split_experts(moe, groups, plan)
    found: list[tuple[str, int]] = []
    original = dist.all_to_all_single

    def watched(out: Tensor, rows: Tensor, receive: Any = None, send: Any = None, **options: Any) -> Any:
        group = options["group"]
        parts = rows.split(send or [rows.shape[0] // group.size()] * group.size())
        leaving = sum(p.numel() * p.element_size() for rank, p in enumerate(parts) if rank != group.rank())
        found.append((str(rows.dtype), leaving))
        return original(out, rows, receive, send, **options)

    dist.all_to_all_single = watched
    share = Share(groups, plan)
    x = share.of(tokens()[0]).to(dtype).requires_grad_()
    with Traffic() as traffic:
        moe(x, share.batch()).sum().backward()
    dist.all_to_all_single = original
    others = {call.name for call in traffic.calls} - {"all_to_all"}
    assert others <= {"all_reduce"}, others  # counts of the sets of experts
    return found


def dealt_bytes(rank: int, plan: Plan, dtype: torch.dtype) -> list[tuple[str, int]]:
    return sent_by(SPECS["dealt"], plan, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", [Plan(data=2, expert=2), Plan(data=2, context=2, expert=4)], ids=["2", "4"])
def test_each_way_moves_the_rows_whose_experts_are_elsewhere_and_nothing_more(plan: Plan, dtype: torch.dtype) -> None:
    """Dispatch and combine each send tokens * active * dim * width * (1 - 1 / e) in forward and in backward. Balanced
    routing needs no counts."""
    here = ROWS * SEQ // plan.ranks
    theory = here * 2 * DIM * dtype.itemsize * (plan.expert - 1) // plan.expert
    for found in run_ranks(dealt_bytes, plan.ranks, plan, dtype):
        assert found == [(str(dtype), theory)] * 4


def routed_bytes(rank: int, plan: Plan) -> list[tuple[str, int]]:
    return sent_by(SPECS["v2"], plan, torch.float32)


@pytest.mark.slow
def test_routed_tokens_send_their_counts_first() -> None:
    plan = Plan(data=2, expert=2)
    found = run_ranks(routed_bytes, 2, plan)
    for mine in found:
        counts, *rows = mine
        assert counts == ("torch.int64", 4 * 8)  # the four experts of the other rank
        assert [kind for kind, _ in rows] == ["torch.float32"] * 4
    for step in range(1, 5):
        pairs = ROWS * SEQ * 3
        assert 0 < sum(mine[step][1] for mine in found) < pairs * DIM * 4
    for mine, other in (found, found[::-1]):
        assert mine[1] == mine[3] == other[2] == other[4]  # dispatch and the gradients of combine; then the other rank's replies


def steps_by_hand(rank: int, plan: Plan) -> None:
    """Rows of two microbatches are in flight at the same time; each step has an autograd graph of its own."""
    groups = Groups.build(Mesh.of(plan), device="cpu")
    share = Share(groups, plan)
    moe, plain = build(SPECS["v3"]), build(SPECS["v3"])
    split_experts(moe, groups, plan)
    split_experts(plain, groups, plan)
    inputs = [share.of(tokens()[0] * factor) for factor in (1.0, -0.5)]
    grad = share.of(tokens()[1])
    expected = []
    for x in inputs:
        x = x.clone().requires_grad_()
        plain(x, share.batch()).backward(grad)
        expected.append(x.grad)

    leaves = [x.requires_grad_() for x in inputs]
    sent = [moe.prepare_dispatch(x, moe.route(x, share.batch())) for x in leaves]
    moving = [moe.dispatcher.start_dispatch(rows.detach(), destinations.traffic) for rows, destinations in sent]
    arrived = [pending.wait().requires_grad_() for pending in moving]
    done = [moe.run(rows, destinations) for rows, (_, destinations) in zip(arrived, sent, strict=True)]
    moving = [
        moe.dispatcher.start_combine(rows.detach(), destinations.traffic)
        for rows, (_, destinations) in zip(done, sent, strict=True)
    ]
    returned = [pending.wait().requires_grad_() for pending in moving]
    weights = [destinations.weights.detach().requires_grad_() for _, destinations in sent]
    for x, rows, weight, (_, destinations) in zip(leaves, returned, weights, sent, strict=True):
        shared_expert = moe.shared_expert(x)
        assert shared_expert is not None
        torch.autograd.backward((moe.finish_combine(rows, replace(destinations, weights=weight)), shared_expert), (grad, grad))
    moving = [
        moe.dispatcher.start_dispatch(_grad(rows), destinations.traffic)
        for rows, (_, destinations) in zip(returned, sent, strict=True)
    ]
    for rows, pending in zip(done, moving, strict=True):
        rows.backward(pending.wait())
    moving = [
        moe.dispatcher.start_combine(_grad(rows), destinations.traffic)
        for rows, (_, destinations) in zip(arrived, sent, strict=True)
    ]
    for (rows, destinations), weight, pending in zip(sent, weights, moving, strict=True):
        torch.autograd.backward((rows, destinations.weights), (pending.wait(), _grad(weight)))
    torch.testing.assert_close([_grad(x) for x in leaves], expected)
    for one, other in zip(moe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert torch.equal(moe.router.counts, plain.router.counts)


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.slow
def test_rows_of_two_microbatches_are_sent_at_once_and_give_the_same_gradients() -> None:
    run_ranks(steps_by_hand, 2, Plan(data=2, expert=2))


def refusal(rank: int) -> str:
    plan = Plan(data=3, expert=3, expert_tensor=1)
    groups = Groups.build(Mesh.of(plan), device="cpu")
    with pytest.raises(ValueError) as refused:
        split_experts(build(SPECS["v3"]), groups, plan.model_copy(update={"expert_tensor": 3}))
    return str(refused.value)


@pytest.mark.slow
def test_experts_and_widths_that_do_not_divide_are_refused_together() -> None:
    assert run_ranks(refusal, 3)[0] == (
        "plan.expert=3 does not divide 8 experts; use a divisor; plan.expert_tensor=3 does not divide the experts' width 4; use a divisor"
    )


@pytest.mark.parametrize(("contexts", "shares"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 2)])
def test_spans_of_all_ranks_are_each_position_once(contexts: int, shares: int) -> None:
    seq = 48 // contexts // shares
    found = [
        position
        for context in range(contexts)
        for share in range(shares)
        for span in spans_of(seq, context=context, contexts=contexts, share=share, shares=shares)
        for position in span
    ]
    assert sorted(found) == list(range(48))
    if contexts > 1:
        first = [
            p
            for share in range(shares)
            for s in spans_of(seq, context=0, contexts=contexts, share=share, shares=shares)
            for p in s
        ]
        assert first == [*range(48 // (2 * contexts)), *range(48 - 48 // (2 * contexts), 48)]


def dry(rank: int) -> tuple[list[int], list[int]]:
    """Return the expert weights of rank 37 of 64, and the rows that it sends, without running any of them."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=37, world_size=64, store=FakeStore())
    plan = Plan(data=8, context=2, tensor=4, expert=16, expert_tensor=2)
    groups = Groups.build(Mesh.of(plan), device="cpu")
    spec = SPECS["v3"].model_copy(update={"experts": 32})
    with FakeTensorMode():
        moe = Moe(DIM, spec)
        split_experts(moe, groups, plan)
        x = torch.randn(2, 32, DIM, requires_grad=True)
        routing = moe.route(x, Batch(torch.zeros(2, 32, dtype=torch.long), sequences=16))
        rows, destinations = moe.prepare_dispatch(x, routing)
        assert isinstance(destinations.traffic, AllToAllTraffic)
        moe(x, Batch(torch.zeros(2, 32, dtype=torch.long), sequences=16)).sum().backward()
    return list(moe.experts.down.shape), [rows.shape[0], sum(destinations.traffic.receive), sum(destinations.traffic.gathered)]


@pytest.mark.slow
def test_a_rank_of_a_large_run_computes_on_fake_tensors_and_asks_nothing() -> None:
    experts, rows = run_ranks(dry, 1)[0]
    assert experts == [2, DIM, 2]
    pairs = 2 * 32 * 3
    assert rows[0] == pairs
    assert rows[1] == pairs
    assert rows[2] == 2 * pairs
