"""Bytes of activations in each tier are those of a dry run, and leaving costs what the link takes longer than the computation."""

from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

import pytest

from megalith.cost.constants import calibration
from megalith.cost.estimate import estimate
from megalith.cost.memory import Memory, by_rank
from megalith.cost.memory_timeline import moments
from megalith.cost.parts import parts
from megalith.cost.predicted import _here, held, predict, workload_of
from megalith.cost.workload import Workload
from megalith.planner.compared import compare
from megalith.spec.plan import Plan, RetainSpec
from tests.cost.models import dense, workload
from tests.full import sampled
from tests.prove.dry import dry
from tests.specs import brief_run

HOST = {"blocks": "host"}
PLANS: dict[str, dict[str, Any]] = {
    "half of the blocks": {"retain": HOST | {"share": 0.5}},
    "microbatches in flight": {"pipeline": 2, "retain": {"blocks": "disk"}},
    "parts of blocks": {"retain": {"parts": {"attention": "host", "attention.core": "keep", "mlp.activation": "host"}}},
    "all parts in 8 bits": {"retain": HOST | {"parts": {"attend": "compress", "mlp": "compress"}}},
    "parts in 8 bits": {"retain": HOST | {"parts": {"mlp": "compress", "mlp.activation": "recompute", "mlp_norm": "compress"}}},
    "parts in both places": {
        "pipeline": 2,
        "retain": {
            "blocks": "disk",
            "parts": {"attention": "host", "attention.core": "keep", "mlp": "host", "mlp.activation": "disk"},
        },
    },
    "all but parts, of blocks that do not run again": {
        "recompute": "every:2",
        "retain": HOST | {"parts": {"attention.core": "compress", "mlp": "keep", "mlp_norm": "recompute"}},
    },
    "inputs of recomputed blocks, zero 3": {"data": 2, "zero": 3, "recompute": "full", "retain": HOST},
}


@sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_waits_elsewhere_is_predicted_to_the_byte(plan: dict[str, Any]) -> None:
    """In bf16, as a norm on the CPU keeps in fp32 what one on a GPU does not. Temporary tensors of the conversion from 8 bits are not
    traced."""
    spec = brief_run(plan=plan, model={"layers": 8, "ffn": 256}, train={"precision": "bf16", "seq_len": 64, "global_batch": 8})
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=0), dry(spec, 0))}
    for place in spec.plan.retain.places:
        tier = lines[f"memory.{place}"]
        assert tier.predicted == tier.counted > 0
    assert lines["memory.activations"].gap == pytest.approx(0, abs=0.2)


@pytest.mark.slow
def test_what_is_kept_in_8_bits_is_predicted_to_the_byte() -> None:
    """It leaves as it is kept. The norms' outputs and the activations' factors are a byte and a share of a scale for each number."""
    model, train = {"layers": 8, "ffn": 256}, {"precision": "bf16", "seq_len": 64, "global_batch": 8}
    sizes = []
    for choices in ({}, {"kept": "fp8", "tile": 16, "wide_first": 0, "wide_last": 0}):
        spec = brief_run(plan={"retain": HOST}, model=model, train=train, precision=choices)
        (tier,) = (one for one in compare(predict(workload_of(spec), rank=0), dry(spec, 0)) if one.name == "memory.host")
        assert tier.predicted == tier.counted
        sizes.append(tier.counted)
    tokens, dim, ffn = 8 * 64, spec.model.dim, 256  # of the microbatch in flight, in each layer
    assert sizes[0] - sizes[1] == tokens * (2 * (2 * dim + 4 * ffn) - (2 * dim + 3 * ffn) * (1 + 4 / 16))


def _load(retain: RetainSpec, **plan: Any) -> Workload:
    return workload(dense(8), Plan(retain=retain, **plan), global_batch=8)


def _first(load: Workload) -> Memory:
    return by_rank(load, parts(load), calibration().overheads[load.software_profile.overheads])[0]


def test_a_rank_keeps_two_blocks_and_its_host_the_rest() -> None:
    plain, moved, half = (
        _first(_load(RetainSpec(blocks=blocks, share=share), pipeline=2, zero=0))
        for blocks, share in (("device", 1.0), ("host", 1.0), ("host", 0.5))
    )
    assert plain.host == 0 < half.host == moved.host / 2
    assert plain.activations - moved.activations == pytest.approx(moved.host)
    block = parts(_load(RetainSpec())).blocks[0].leaves
    assert moved.host == 2 * 4 * block, "two microbatches in flight, four blocks"
    assert moved.working + moved.logits - plain.working - plain.logits == pytest.approx(2 * block)
    disk = _first(_load(RetainSpec(blocks="disk"), pipeline=2, zero=0))
    assert (disk.disk, disk.host) == (moved.host, 0)


def test_a_slow_link_makes_a_step_longer_by_what_no_computation_hides() -> None:
    def seconds(link: float, blocks: str) -> float:
        load = _load(RetainSpec.model_validate({"blocks": blocks}))
        cluster = load.cluster.model_copy(update={"host": load.cluster.host.model_copy(update={"link": link})})
        return estimate(replace(load, cluster=cluster)).time.data

    fast, slow, slower = (seconds(link, "host") for link in (1e15, 1e6, 5e5))
    assert seconds(1e6, "device") == 0 < fast < slow
    blocks, size = 8, parts(_load(RetainSpec())).blocks[0].leaves
    moved = 8 * (2 * blocks - 1) * size
    assert slower - slow == pytest.approx(moved / 1e6, rel=0.01), "each byte moves twice; the last block's two moves overlap"


def test_what_left_has_come_back_when_the_step_ends() -> None:
    for schedule, chunks in (("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)):
        load = _load(RetainSpec(blocks="host"), pipeline=2, chunks=chunks, schedule=schedule)
        traced = parts(load)
        here = _here(load, traced, 0)
        first, *_, last = moments(load, traced, here.actions, here.parts, here.segments)
        assert first.activations > 0 == first.elsewhere.size
        assert (last.activations, last.elsewhere.size) == pytest.approx((0, 0), abs=1)


@pytest.mark.parametrize("recompute", ["none", "full", "segments:3"])
def test_each_tensor_is_in_one_place_at_each_moment(recompute: str) -> None:
    """Blocks leave one by one in each forward, and come back one by one: the last before the head's backward, and each other one before
    that of the block or segment after it."""
    plain, moved = (_load(RetainSpec.model_validate({"blocks": blocks}), recompute=recompute) for blocks in ("device", "host"))
    traced = parts(moved)
    stay, leave = (_here(load, traced, 0) for load in (plain, moved))
    whole, timeline = ([*moments(moved, traced, here.actions, here.parts, here.segments)] for here in (stay, leave))
    away = [part.away.size for part in leave.parts[0] if part.away.size]
    most = sum(away)
    step = [*accumulate(away), *(most - size for size in accumulate(reversed(away)))]
    assert [size for size, _ in groupby(moment.elsewhere.size for moment in timeline)] == pytest.approx([0, *step * 8])
    backwards = zip(whole[1:], timeline[len(away) + 2 :], leave.parts[0], strict=False)
    for one, other, _ in backwards:
        assert one.activations == pytest.approx(other.activations + other.elsewhere.size)
    assert most == predict(moved, rank=0).elsewhere["host"] == held(moved).host > held(plain).host == 0
