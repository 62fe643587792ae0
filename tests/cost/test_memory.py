from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import schedule as schedules
from megalith.cost import host
from megalith.cost.constants import calibration
from megalith.cost.estimate import estimate
from megalith.cost.memory import GROUP, by_rank, fits, memory, non_torch, numbers, shares
from megalith.cost.memory_timeline import OffloadedBytes, Part, moments
from megalith.cost.parts import parts
from megalith.cost.predicted import workload_of
from megalith.cost.workload import SoftwareProfile, Workload
from megalith.mesh import Mesh
from megalith.models.stage import Stage
from megalith.parallel.apply import Builder
from megalith.parallel.data import local
from megalith.parallel.groups import Groups
from megalith.planner.candidates import offloaded
from megalith.prove.fake import groups_of
from megalith.schedule.action import Action
from megalith.spec.cluster import USABLE, HostSpec
from megalith.spec.model import MoeSpec, MtpSpec
from megalith.spec.plan import Plan, StateSpec
from megalith.spec.run import OptimizerSpec
from megalith.spec.state import Moments
from megalith.spec.treatment import treatments
from tests.cost.models import dense, mixture, workload
from tests.specs import brief_run

OVERHEADS = calibration().overheads["fused"]
BF16_GRADIENTS = SoftwareProfile(gradient_bytes=2)


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


@pytest.mark.parametrize(
    ("zero", "whole", "shared"), [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)], ids=["none", "one", "two", "three"]
)
def test_zero_has_its_three_lines(zero, whole, shared):
    """Rajbhandari et al. 2019 give 4Φ + 12Φ/N, 2Φ + 14Φ/N and 16Φ/N with 2-byte gradients."""
    ranks = 8
    load = workload(dense(), Plan(data=ranks, zero=zero), software_profile=BF16_GRADIENTS)
    traced = parts(load)
    found = memory(load, traced, OVERHEADS)
    numbers = traced.embedding.weights + traced.head.weights + sum(block.weights for block in traced.blocks)
    gathered = 2 * 2 * max(block.weights for block in traced.blocks) * 2 if zero == 3 else 0  # of two blocks
    assert found.weights + found.gradients + found.optimizer - gathered == pytest.approx(numbers * (whole + shared / ranks))


STATES = [
    *({"data": 4, "zero": zero} for zero in range(4)),
    {"data": 4, "replicate": 2, "zero": 3},
    {"data": 2, "tensor": 2, "zero": 1},
    {"data": 2, "context": 2, "zero": 2},
    {"data": 4, "tensor": 2, "expert": 4, "zero": 3},
    {"data": 4, "tensor": 2, "expert": 2, "replicate": 2, "zero": 2},
]


@pytest.mark.parametrize("sizes", STATES, ids=str)
@pytest.mark.parametrize("model", [dense(2), mixture(2)], ids=["dense", "experts"])
def test_a_rank_s_share_of_the_state_is_the_one_that_the_trainer_keeps(model, sizes):
    """Compare with `parallel.apply` on a fake world: whole weights below ZeRO 3, and the shares that the optimizer updates."""
    plan = Plan(**{**sizes, "expert": sizes.get("expert", 1) if isinstance(model.blocks[0].mlp, MoeSpec) else 1})
    with groups_of(plan.ranks, rank=0):
        groups, meta = Groups.build(Mesh.of(plan), device="cpu"), torch.device("meta")
        builder = Builder(model, plan=plan, groups=groups, precision="bf16", device=meta, seed=None)
        builder.build(0, len(model.part_names))
        kept = sum(local(weight.master).numel() for weight in builder.by_name.values())
        whole = sum(weight.compute.numel() for weight in builder.by_name.values())
    load = workload(model, plan)
    (found,) = by_rank(load, parts(load), OVERHEADS)
    assert found.optimizer / load.state_bytes == kept
    if plan.zero < 3:
        assert found.weights / load.width == whole


@pytest.mark.parametrize("sizes", STATES[3:6], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_in_few_bits_take_what_the_trainer_keeps(kind: str, sizes: dict[str, int]):
    """Embeddings, vectors and small matrices, whose moments stay in fp32, are counted too."""
    model, plan, moments = mixture(2), Plan(**{**sizes, "expert": sizes.get("expert", 1)}), Moments("fp8", block=32, least=4096)
    optimizer = OptimizerSpec.model_validate({"kind": kind, "moments": "fp8", "moment_block": 32})
    with groups_of(plan.ranks, rank=0):
        groups, meta = Groups.build(Mesh.of(plan), device="cpu"), torch.device("meta")
        builder = Builder(model, plan=plan, groups=groups, precision="bf16", device=meta, seed=None)
        builder.build(0, len(model.part_names))
        treated = treatments(model, optimizer)
        shapes = {name: tuple(local(weight.master).shape) for name, weight in builder.by_name.items()}
    kept = sum(4 * prod(shape) for shape in shapes.values())
    for name, shape in shapes.items():
        kept += sum((1 if slot.block else 4) * prod(slot.shape_of(shape)) for slot in treated[name].slots)
    load = workload(model, plan, optimizer=kind, moments=moments)
    (found,) = by_rank(load, parts(load), OVERHEADS)
    assert found.optimizer == pytest.approx(kept, rel=1e-2)


def test_the_first_rank_of_a_pipeline_keeps_the_most_microbatches():
    load = workload(dense(), Plan(pipeline=4, zero=0), global_batch=32)
    traced = parts(load)
    held = [rank.activations for rank in by_rank(load, traced, OVERHEADS)]
    assert held == [traced.blocks[0].saved * (4 - rank) for rank in range(4)]


def test_a_rank_of_uneven_chunks_keeps_what_its_schedule_says():
    plan = Plan(pipeline=2, chunks=2, schedule="interleaved", zero=0, layers=(1, 3, 2, 2))
    load = workload(dense(8), plan, global_batch=16)
    traced = parts(load)
    blocks = [(0, 1), (1, 4), (4, 6), (6, 8)]
    saved = [sum(traced.blocks[i].saved for i in range(*bounds)) for bounds in blocks]
    schedule = schedules.build("interleaved", ranks=2, microbatches=16, chunks=2)
    exact = schedules.activations(schedule, saved)
    for rank, found in enumerate(by_rank(load, traced, OVERHEADS)):
        assert 0.85 * exact[rank] <= found.activations <= exact[rank]


ALONE = Plan(pipeline=3, chunks=2, schedule="interleaved", zero=2, data=2, layers=(0, 1, 1, 1, 1, 0))


def test_a_stage_of_the_embedding_or_the_head_alone_keeps_no_block():
    """The rank with the embedding holds one block fewer than its neighbour, and so does the rank with the head."""
    load = workload(dense(4), ALONE, global_batch=24)
    held = shares(load, traced := parts(load)).held
    assert [sum(times for _, times in here.blocks) for here in held] == [1, 2, 1]
    assert [(here.embedding, here.head) for here in held] == [(True, False), (False, False), (False, True)]
    block, ends = traced.blocks[0].weights, (traced.embedding.weights, traced.head.weights)
    assert [numbers(load, traced, here).dense for here in held] == [block + ends[0], 2 * block, block + ends[1]]


def test_gradients_added_up_over_a_run_of_microbatches_are_those_of_one_chunk():
    load = workload(dense(4), ALONE, global_batch=24)
    traced = parts(load)
    late = replace(load, software_profile=replace(load.software_profile, reduces="run"))
    first, second = (by_rank(one, traced, OVERHEADS)[1].gradients for one in (load, late))
    assert second - first == load.gradient_bytes * traced.blocks[0].weights


def test_temporary_tensors_of_an_update_take_the_place_of_activations():
    plain, large = (workload(dense(), Plan(), software_profile=SoftwareProfile(update_bytes=size)) for size in (0, 1e4))
    before, after = (memory(load, traced := parts(load), OVERHEADS) for load in (plain, large))
    held = numbers(large, traced, shares(large, traced).held[0]).dense
    assert after.working + after.activations + after.logits == pytest.approx(1e4 * held)
    assert before.working < after.working


DENSE_FIRST = mixture(14).model_copy(update={"blocks": dense(3).blocks + mixture(11).blocks})
"""Like DeepSeek-V3: the first blocks have no experts, and are smaller."""

SPLIT = [
    Plan(pipeline=8),
    Plan(pipeline=4, chunks=2, schedule="interleaved", zero=1, data=2),
    Plan(pipeline=4, schedule="dualpipe", expert=2, data=2),
    Plan(pipeline=4, chunks=2, schedule="dualpipev"),
    Plan(pipeline=4, chunks=2, schedule="zb-v", recompute="every:2"),
    Plan(pipeline=4, layers=(5, 1, 4, 4)),
    Plan(pipeline=8, schedule="zb-h1", recompute="full"),
    Plan(pipeline=8, layers=(2, 2, 2, 2, 2, 2, 1, 1), schedule="zb-h1"),
]


@pytest.mark.parametrize("plan", SPLIT, ids=lambda plan: f"{plan.schedule} {plan.pipeline}")
def test_the_fullest_rank_is_the_fullest_of_all(plan: Plan):
    """The worst rank is found although not every rank is compared."""
    load = workload(DENSE_FIRST, plan, global_batch=64)
    traced = parts(load)
    most = max(by_rank(load, traced, OVERHEADS), key=lambda rank: rank.total)
    assert memory(load, traced, OVERHEADS) == most
    shared = shares(load, traced)
    assert set(shared.most_in_flight) <= set(shared.worst_ranks)


@pytest.mark.parametrize("plan", SPLIT, ids=lambda plan: f"{plan.schedule} {plan.pipeline}")
def test_ranks_share_the_model_out(plan: Plan):
    """Each block counts once, or twice under a bidirectional schedule, and so do the two ends."""
    load = workload(DENSE_FIRST, plan, global_batch=64)
    held = shares(load, traced := parts(load)).held
    blocks = Counter[int]()
    for here in held:
        for kind, times in here.blocks:
            blocks[kind] += times
    assert blocks == {kind: times * plan.sides for kind, times in Counter(traced.kinds).items()}
    assert sum(here.embedding for here in held) == sum(here.head for here in held) == plan.sides


@pytest.mark.parametrize(
    "head", [{}, {"tied": True}, {"ahead": MtpSpec(block=mixture(1).blocks[0], depth=2, weight=0.1)}], ids=str
)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_rank_holds_the_weights_that_its_stage_has(head: dict[str, Any], pipeline: int):
    model = mixture(2)
    model = model.model_copy(update={"head": model.head.model_copy(update=head)})
    load = workload(model, Plan(pipeline=pipeline))
    held = shares(load, traced := parts(load)).held
    for here, bounds in zip(held, load.plan.bounds(2), strict=True):
        with torch.device("meta"):
            stage = Stage(model, *bounds)
        sizes = {name: parameter.numel() for name, parameter in stage.parameters_by_name().items()}
        expert = sum(size for name, size in sizes.items() if ".experts." in name)
        assert numbers(load, traced, here) == (sum(sizes.values()) - expert, expert)


def test_a_schedule_from_a_file_is_its_own_number_of_microbatches(tmp_path: Path):
    """Such a schedule is neither used nor built for another number of microbatches."""
    written = schedules.build("1f1b", ranks=4, microbatches=13)
    (tmp_path / "mine.txt").write_text(schedules.dump(written))
    plans = [Plan(pipeline=4, schedule=name) for name in (f"file:{tmp_path / 'mine.txt'}", "1f1b")]
    mine, same = (workload(dense(), plan, global_batch=13) for plan in plans)
    assert memory(mine, parts(mine), OVERHEADS) == memory(same, parts(same), OVERHEADS)
    idle = [estimate(load).time.bubble for load in (mine, same)]
    assert idle[0] == pytest.approx(idle[1], rel=0.2)  # simulated with average stages, and in closed form


def test_frozen_weights_have_no_gradients_and_no_moments():
    load = workload(dense(), Plan(), frozen=True)
    found = memory(load, parts(load), OVERHEADS)
    assert found.gradients == found.optimizer == 0


def test_offloaded_state_leaves_the_device():
    here, away = (
        memory(load, parts(load), OVERHEADS) for load in (workload(dense(), offloaded(Plan(), share)) for share in (0.0, 1.0))
    )
    assert here.optimizer > 0
    assert away.optimizer == 0
    assert here.host == 0
    assert away.host == pytest.approx(here.optimizer * (8 + 4 + 4 + 2) / (8 + 4))  # and gradients and weights in flight


def test_what_is_offloaded_is_a_ranks_own_share():
    whole, eighth = (
        memory(load, parts(load), OVERHEADS).host
        for load in (workload(dense(), offloaded(plan, 1.0)) for plan in (Plan(), Plan(data=8, zero=1)))
    )
    assert eighth == pytest.approx(whole / 8)


def _on(load: Workload, **host: float) -> Workload:
    """Return the workload on the hosts of a cluster file. Figures are those of one device."""
    devices = min(load.cluster.per_node, load.cluster.count)
    per_host = {name: value if name == "link" else value * devices for name, value in host.items()}
    return replace(load, cluster=load.cluster.model_copy(update={"host": HostSpec.model_validate(per_host)}))


def test_a_full_host_does_not_fit():
    load = workload(dense(), offloaded(Plan(), 0.5))
    found = memory(load, parts(load), OVERHEADS)
    assert fits(load, found, OVERHEADS)
    for room, enough in ((found.host, True), (found.host - 1, False)):
        assert fits(_on(load, memory=int(room / USABLE)), found, OVERHEADS) == enough


def test_a_full_disk_does_not_fit():
    load = workload(dense(), Plan(state=StateSpec(optimizer="disk")))
    found = memory(load, parts(load), OVERHEADS)
    assert found.disk > 0 and found.host == host.streamed(load) > 0 and fits(load, found, OVERHEADS)
    for room, enough in ((int(found.disk) + 1, True), (int(found.disk) - 1, False)):
        assert fits(_on(load, disk=room), found, OVERHEADS) == enough
    for room, enough in ((found.host, True), (found.host - 1, False)):
        assert fits(_on(load, memory=int(room / USABLE)), found, OVERHEADS) == enough


def test_an_update_elsewhere_takes_what_the_host_of_the_cluster_file_takes():
    in_memory, on_disk = (workload(dense(), Plan(state=StateSpec(optimizer=place))) for place in ("host", "disk"))
    state, carried, numbers = in_memory.state_bytes, 4 + 2, 1e9
    assert host.seconds(_on(in_memory, memory_bandwidth=1e11, link=1e18), numbers) == pytest.approx(
        numbers * 2 * (state + carried) / 0.43e11
    )
    assert host.seconds(_on(in_memory, memory_bandwidth=1e20, link=1e10), numbers) == pytest.approx(numbers * carried / 1e10)
    assert host.seconds(_on(on_disk, disk_bandwidth=1e8), numbers) == pytest.approx(numbers * state / 1e8)


@pytest.mark.parametrize(("graphs", "blocks"), [("none", 0), ("router", 2), ("parts", 2), ("whole", 0)])
def test_recorded_parts_keep_the_gradients_of_their_input_and_output(graphs, blocks):
    """Each graph has static inputs and outputs of its own, for every microbatch in flight, in addition to the tensors
    for backward."""
    model, plan = mixture(), Plan(pipeline=2, zero=0)
    plain, recorded = (
        workload(model, plan, global_batch=8, software_profile=SoftwareProfile(graphs=kind)) for kind in ("none", graphs)
    )
    traced = parts(plain)
    before, after = (by_rank(load, traced, OVERHEADS) for load in (plain, recorded))
    output = 256 * model.dim * 2
    for rank, (one, other) in enumerate(zip(before, after, strict=True)):
        assert other.activations - one.activations == blocks // 2 * 2 * output * (2 - rank)


def test_gradients_of_a_microbatch_stay_beside_their_sums():
    """DeepSpeed's optimizer for bf16 keeps both, over all weights of a rank: ZeRO 1 does not share them out."""
    for model in (dense(), mixture()):
        load = workload(model, Plan(data=4, pipeline=2, zero=1), global_batch=16)
        traced = parts(load)
        both = replace(load, software_profile=replace(load.software_profile, microbatch_gradient_bytes=2))
        for one, other, here in zip(
            *(by_rank(each, traced, OVERHEADS) for each in (load, both)), shares(load, traced).held, strict=True
        ):
            assert other.gradients - one.gradients == 2 * sum(numbers(load, traced, here))
            assert other.total - one.total == other.gradients - one.gradients


@pytest.mark.parametrize("tensor", [1, 2])
def test_outputs_of_stages_stay_for_each_microbatch_in_flight(tensor: int):
    """A stage without blocks sends the embedding's output, which is not counted. Sequence parallelism splits the outputs."""
    load = workload(dense(4), Plan(pipeline=4, tensor=tensor, zero=0, layers=(0, 1, 2, 1)), global_batch=8)
    traced = parts(load)
    kept = replace(load, software_profile=replace(load.software_profile, keeps_outputs=True))
    output = 256 * load.model.dim * 2 / tensor
    one, other = (by_rank(each, traced, OVERHEADS) for each in (load, kept))
    more = [after.activations - before.activations for before, after in zip(one, other, strict=True)]
    assert more == [0, 3 * output, 2 * output, output]


def test_temporary_tensors_of_recorded_attention_are_nobody_else_s():
    model = dense()
    alone = model.model_copy(update={"blocks": tuple(block.model_copy(update={"mlp": None}) for block in model.blocks)})
    load = workload(alone, Plan(), software_profile=SoftwareProfile(graphs="parts"))
    traced = parts(load)
    apart = memory(load, traced, OVERHEADS).non_torch - non_torch(load)
    assert apart == traced.blocks[0].working > 0


def test_what_torch_does_not_count_grows_with_the_axes():
    """Each axis of more than one rank has a communicator. The experts' all-to-all takes the most."""
    alone, split = (non_torch(workload(dense(), plan)) for plan in (Plan(), Plan(tensor=4, data=4)))
    assert 0.3e9 < alone < 1e9
    assert split - alone >= 2 * GROUP
    shared = [
        non_torch(workload(mixture(), Plan(data=8, expert=8), software_profile=SoftwareProfile(deduplicated=kind)))
        for kind in (True, False)
    ]
    assert shared[1] > shared[0] > non_torch(workload(mixture(), Plan(data=8))) + GROUP


def test_torch_s_own_figure_leaves_out_what_it_does_not_count():
    load = workload(dense(), Plan(data=8))
    found = memory(load, parts(load), OVERHEADS)
    assert found.total - found.allocated == non_torch(load) > 0


def test_the_gradient_of_a_head_in_tiles_is_there_after_the_first_half_of_its_backward() -> None:
    state = {"optimizer": "host", "weights": "host"}
    plan = {"pipeline": 2, "schedule": "zb-h1", "zero": 3, "state": state}
    train = {"precision": "bf16", "vocab_tile": 2048}
    run = workload_of(brief_run(plan=plan, model={"vocab": 5000}, train=train))
    traced = parts(run)
    head = Part(None, (traced.head,), traced.output, traced.output, OffloadedBytes(), run.cut)
    halves = Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0)
    for count in (2, 3):
        *_, last = moments(run, traced, halves[:count], {1: (head,)}, {1: ()})
        formed = run.gradient_bytes * sum(head.whole) * (count == 3)
        assert run.cut > 0 and last.gradients == run.gradient_bytes * run.cut + formed
