"""Segments: blocks that keep one input together train to the same bits, and use the memory given by the formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.cost.predicted import workload_of
from megalith.cost.segments import decided
from megalith.prove.dryrun import dryrun
from megalith.spec.plan import AUTO, recomputed, segment_size, segments
from megalith.spec.run import RunSpec
from megalith.train.step import train_step
from tests.full import only_full, sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run, tiny_run

PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank, microbatches": (1, {}, {}),
    "zero 3": (2, {"data": 2, "zero": 3}, {}),
    "tensor, interleaved": (4, {"tensor": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2}, {}),
    "context, backward split in two": (4, {"context": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2, "zero": 2}, {}),
    "experts, both ways": (4, {"pipeline": 2, "data": 2, "expert": 2, "schedule": "dualpipe"}, {"preset": "deepseek-tiny"}),
    "experts, MTP, zero 3": (2, {"data": 2, "expert": 2, "zero": 3}, {"preset": "deepseek-tiny"}),
}


def _trained(rank: int, plan: dict[str, Any], model: dict[str, Any], policies: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Return this rank's weights and moments after two steps, for each policy."""
    found = []
    for policy in policies:
        trainer = trainer_of(brief_run(plan=plan | {"recompute": policy}, model=model))
        for step in range(2):
            train_step(trainer, microbatches(trainer, step), step=step)
        found.append({name: share.clone() for name, share in trainer.state.shares().items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@sampled(1, together=True)
def test_segments_change_no_bit(name: str) -> None:
    ranks, plan, model = PLANS[name]
    for plain, *others in run_ranks(_trained, ranks, plan, model, ("none", "segments:2", "segments:3", "sqrt")):
        for other in others:
            assert other.keys() == plain.keys()
            assert all(torch.equal(other[key], plain[key]) for key in plain)


def _deep_run(layers: int, policy: str) -> RunSpec:
    train = {"global_batch": 1, "seq_len": 256}
    return tiny_run(model={"layers": layers}, plan={"recompute": policy}, train=train, optimizer={"kind": "sgd"})


def _step(layers: int, policy: str) -> tuple[int, float]:
    """Return the peak bytes of activations in a step, and the FLOPs of its products."""
    counted = dryrun(_deep_run(layers, policy), rank=0).counted
    return max(moment["activations"] for moment in counted.memory_timeline), counted.work.products


@sampled(1, together=True)
@pytest.mark.slow
def test_a_segment_holds_its_blocks_while_they_run_again_and_inputs_otherwise() -> None:
    """Chen et al. 2016, section 4.3: memory holds the inputs of all segments, and one whole segment. Terms that do not depend on the depth
    cancel."""
    few, many, x = 4, 16, 256 * 32 * 4
    policies = ("none", "full", "segments:2", "segments:4", "sqrt")
    held, work = ({}, {}), ({}, {})
    for at, layers in enumerate((few, many)):
        for policy in policies:
            held[at][policy], work[at][policy] = _step(layers, policy)
    more = {policy: held[1][policy] - held[0][policy] for policy in policies}
    block = more["none"] / (many - few)
    assert more["full"] == pytest.approx((many - few) * x, rel=0.02)
    assert more["segments:2"] == pytest.approx((many - few) / 2 * x, rel=0.02)
    assert more["segments:4"] == pytest.approx((many - few) / 4 * x, rel=0.02)
    assert more["sqrt"] == pytest.approx(2 * (math.sqrt(many) - math.sqrt(few)) * x, rel=0.05)
    assert held[1]["segments:4"] - held[1]["segments:2"] == pytest.approx(2 * block - (many / 2 - many / 4) * x, rel=0.05)
    assert held[1]["sqrt"] < min(held[1][policy] for policy in policies if policy != "sqrt")
    forward = work[1]["full"] - work[1]["none"]
    assert work[1]["segments:4"] == work[1]["full"] and work[1]["sqrt"] == work[1]["full"] + forward


@only_full
@pytest.mark.slow
def test_nested_segments_grow_with_the_root_of_the_depth_up_to_256_blocks() -> None:
    """The peak of a step, backward included, is a + b sqrt(L) with nested segments. Segments of the chosen size never need more than
    `full`, and take the same FLOPs: 4/3 of the blocks' forward and backward. Nested segments take 5/3."""
    depths = (16, 64, 256)
    auto = {layers: decided(workload_of(_deep_run(layers, AUTO))).plan.recompute for layers in depths}
    steps = {
        policy: [_step(layers, auto[layers] if policy == AUTO else policy) for layers in depths]
        for policy in ("none", "full", AUTO, "sqrt")
    }
    held = {policy: [peak for peak, _ in found] for policy, found in steps.items()}
    work = {policy: found[-1][1] - found[0][1] for policy, found in steps.items()}  # of 240 blocks, without the head
    low, middle, high = held["sqrt"]
    slope = (high - low) / (math.sqrt(depths[2]) - math.sqrt(depths[0]))
    assert middle == pytest.approx(low + slope * (math.sqrt(depths[1]) - math.sqrt(depths[0])), rel=0.05)
    assert all(nested < segments <= full for nested, segments, full in zip(held["sqrt"], held[AUTO], held["full"], strict=True))
    assert work[AUTO] == work["full"] == pytest.approx(work["none"] * 4 / 3, rel=1e-3)
    assert work["sqrt"] == pytest.approx(work["none"] * 5 / 3, rel=1e-3)


def test_segments_cut_the_blocks_of_a_stage_and_nothing_else() -> None:
    assert segments([False, True, True, True, True, True, False], 2) == (range(1, 3), range(3, 5), range(5, 6))
    assert segments([True, True], 4) == (range(2),)
    assert segments([False, True], 0) == ()
    assert [segment_size(policy, blocks=10) for policy in ("none", "full", "segments:3", "sqrt")] == [0, 0, 3, 4]
    with pytest.raises(ValueError, match="segments:auto"):
        segment_size("segments:auto", blocks=10)


def test_blocks_of_mtp_modules_are_in_no_segment() -> None:
    assert [recomputed(number, blocks=3, policy="segments:2") for number in range(4)] == [False, False, False, True]
