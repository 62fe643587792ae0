"""A block with token dispatch has the same bits as one graph, whatever is recomputed, and keeps few rows."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.mesh import Mesh
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.moe import Moe
from megalith.parallel.expert import AllToAllTraffic, split_experts
from megalith.parallel.groups import Groups
from megalith.parallel.moe_overlap import BlockGraphs, dispatches_tokens, forward
from megalith.parallel.passes import finish
from megalith.parallel.recompute import apply_recompute
from megalith.prove.meter import Meter
from megalith.spec.plan import Plan
from tests.models.deepseek import deepseek
from tests.models.plain import stage
from tests.processor import rest
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

SPEC = deepseek(layers=2, dense_layers=1, dim=128, q_rank=16, shared_experts=1)
BATCH, SEQ = 2, 16
PARTS = {
    "none": (),
    "parts": ("attend", "mlp.experts", "mlp.shared"),
    "norms": ("attention_norm", "attention.core", "mlp_norm", "mlp.experts"),
    "activations": ("mlp.activation",),
    "heads and experts' activations": ("attention_norm", "attention.up", "mlp_norm", "mlp.experts.activation"),
    "mixture": ("mlp",),
    "mixture and attention": ("attention", "mlp"),
}
POLICIES = {name: Plan(recompute="selective", recompute_parts=parts) for name, parts in PARTS.items()} | {
    "full": Plan(recompute="full")
}
AGAIN = ("full", "mixture", "mixture and attention")  # under these, rows are sent again
PLANS = [Plan(data=2, expert=2), Plan(data=2, expert_tensor=2), Plan(tensor=2, expert=2, sequence=False)]


@dataclass(frozen=True)
class Found:
    """Result of one forward and backward of a block."""

    out: Tensor
    grads: dict[str, Tensor]  # gradients of the input and the weights, and the router's counts
    kept: int  # bytes kept between forward and backward
    rows: int  # the part of these bytes that are received rows
    sent: int  # calls that sent rows, or their weights, in backward


def _block(groups: Groups, plan: Plan) -> Block:
    block = stage(SPEC, 2, 3).blocks["1"]
    assert isinstance(block, Block) and isinstance(block.mlp, Moe)
    split_experts(block.mlp, groups, plan)
    return block


def _given(plan: Plan, rank: int) -> tuple[Tensor, Tensor, Batch]:
    generator = torch.Generator().manual_seed(rank if plan.data > 1 else 0)
    x, grad = torch.randn(2, BATCH, SEQ, SPEC.dim, generator=generator)
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return x, grad, stage(SPEC, 2, 3).prepare(Batch(tokens, sequences=BATCH * plan.data))


def _gradients(block: Block, of_x: Tensor | None) -> dict[str, Tensor]:
    assert of_x is not None and isinstance(block.mlp, Moe)
    grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return grads | {"x": of_x, "counts": block.mlp.router.counts}


def _whole(groups: Groups, plan: Plan) -> Found:
    block, (x, grad, batch) = _block(groups, plan), _given(plan, groups.rank)
    out = block(x.requires_grad_(), batch)
    out.backward(grad)
    return Found(out.detach(), _gradients(block, x.grad), 0, 0, 0)


def _travelled(groups: Groups, plan: Plan, policy: Plan) -> Found:
    block, (x, grad, batch) = _block(groups, plan), _given(plan, groups.rank)
    apply_recompute(block, 1, blocks=2, plan=policy)
    assert dispatches_tokens(block)
    with Meter() as meter:
        x = x.clone()
        out, graph = finish(forward(block, x, batch))
        del x
        rest(0.05)  # gloo's thread releases sent tensors shortly after arrival
    assert isinstance(graph, BlockGraphs) and isinstance(graph.computations.destinations.traffic, AllToAllTraffic)
    with Meter() as back:
        of_x = finish(graph.backward(grad, None))
    calls = sum(t.calls for t in back.traffic() if t.kind == "all-to-all")
    rows = sum(graph.computations.destinations.traffic.receive) * SPEC.dim * 4
    return Found(out, _gradients(block, of_x), sum(meter.memory().between.values()), rows, calls)


def _all(rank: int) -> list[tuple[Found, dict[str, Found]]]:
    found = []
    for plan in PLANS:
        groups = Groups.build(Mesh.of(plan), device="cpu")
        found.append((_whole(groups, plan), {name: _travelled(groups, plan, policy) for name, policy in POLICIES.items()}))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found() -> list[tuple[Found, dict[str, Found]]]:
    """Return for each plan, on both ranks, the block as one graph, and with token dispatch under each policy."""
    return [each for mine in run_ranks(_all, 2) for each in mine]


def test_pieces_give_the_bits_of_one_graph_whatever_runs_again(found: list[tuple[Found, dict[str, Found]]]) -> None:
    for whole, policies in found:
        for name, pieces in policies.items():
            assert torch.equal(pieces.out, whole.out), name
            assert pieces.grads.keys() == whole.grads.keys()
            for weight, grad in whole.grads.items():
                assert torch.equal(pieces.grads[weight], grad), (name, weight)


def test_what_a_microbatch_in_flight_keeps(found: list[tuple[Found, dict[str, Found]]]) -> None:
    """If everything is recomputed, the block's input is kept. If rows are not sent again, received rows are kept once."""
    for _, policies in found:
        kept = {name: each.kept for name, each in policies.items()}
        assert kept["full"] < kept["parts"] < kept["norms"] < kept["none"]
        assert kept["heads and experts' activations"] < kept["activations"] < kept["none"]
        assert kept["parts"] - kept["full"] == policies["full"].rows > 0
        assert kept["full"] < kept["mixture and attention"] < kept["mixture"] < kept["none"]
        activation = BATCH * SEQ * SPEC.dim * 4
        assert kept["full"] < 3 * activation  # x, the block's output, and less than as much again for the routing


def test_only_where_the_mixture_is_recomputed_are_its_rows_sent_again(found: list[tuple[Found, dict[str, Found]]]) -> None:
    """Gradients are sent in both directions, with weights beside them, and rows a second time if they were not kept. Split
    experts send more."""
    for _, policies in found[::3] + found[2::3]:
        assert {name: each.sent for name, each in policies.items()} == dict.fromkeys(POLICIES, 4) | dict.fromkeys(AGAIN, 5)
