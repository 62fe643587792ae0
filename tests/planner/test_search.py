from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megalith.check import check
from megalith.cost import released
from megalith.cost.constants import calibration
from megalith.cost.estimate import estimate
from megalith.cost.parts import parts
from megalith.cost.workload import Workload
from megalith.planner.candidates import Space, candidates, finer, is_ring, lighter_states, offloaded, segmented
from megalith.planner.named import NAMED
from megalith.planner.plan_result import short
from megalith.planner.search import Scorer, assumed, search
from megalith.planner.training import training
from megalith.spec import cluster as clusters
from megalith.spec.cluster import USABLE, HostSpec
from megalith.spec.plan import Plan, RetainSpec, StateSpec
from tests.cost.models import DIM, dense, mixture
from tests.specs import tiny_run

SPACE = Space(microbatches=(1, 2), policies=(("none", ("attention.core",)), ("full", ("attention.core",))), most_chunks=2)


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


@pytest.mark.parametrize("model", [dense(), mixture()], ids=["dense", "mixture"])
def test_every_candidate_uses_all_devices_and_deals_the_batch_out_evenly(model):
    cluster = clusters.load("h100:8")
    plans = list(candidates(model, cluster, seq_len=256, global_batch=16))
    assert plans
    for plan in plans:
        assert plan.ranks == 8
        assert 16 % (plan.data * plan.microbatch) == 0
        assert plan.stages <= len(model.blocks) + 2  # the first and the last may have none
        assert plan.bounds(len(model.blocks))[-1][1] == len(model.blocks) + 2


@pytest.mark.parametrize("model", [dense(), mixture(), mixture(hidden=DIM)], ids=["dense", "mixture", "wide experts"])
def test_every_candidate_computes_the_same_model(model):
    """FLOPs are conserved: a layout only decides where they are computed."""
    cluster, scorer = clusters.load("h100:8"), Scorer(calibration())
    space = Space(microbatches=(1, 2), policies=(("none", ()),))
    flops = [
        scorer.estimate(Workload(model, plan, cluster, 256, 16)).flops
        for plan in candidates(model, cluster, seq_len=256, global_batch=16, space=space)
    ]
    assert len(flops) > 10
    assert max(flops) == pytest.approx(min(flops), rel=0.01)


def test_a_search_predicts_a_plan_as_if_it_were_alone():
    """A search computes a figure once for all plans that share it. The batch and ZeRO also change how gradients are added up."""
    model, cluster, scorer = dense(), clusters.load("h100:8"), Scorer(calibration())
    loads = [
        Workload(model, plan, cluster, 256, batch, software_profile=assumed(plan))
        for batch in (8, 16)
        for plan in candidates(model, cluster, seq_len=256, global_batch=batch, space=SPACE)
    ]
    assert {(load.plan.zero, load.microbatches > 1) for load in loads} >= {(1, False), (1, True), (3, False), (3, True)}
    for load in loads[::7]:
        assert scorer.estimate(load) == estimate(load), load.plan


@pytest.mark.parametrize("named", [one for one in NAMED if not one.forward_only], ids=lambda named: named.name)
def test_the_space_has_the_published_layouts(named):
    """Except for settings that the planner always chooses itself: recomputation, the method that sends keys and values, splits along the
    sequence, and ZeRO 1 under a pipeline."""
    work = named.workloads()[0]
    space = Space(policies=(("full", ("attention.core",)),))
    found = candidates(work.model, work.cluster, seq_len=named.seq_len, global_batch=named.global_batch, space=space)
    ignored = {"recompute": "none", "recompute_parts": (), "context_method": "ring", "sequence": True}
    sizes = {plan.model_copy(update=ignored) for plan in found}
    asked = [plan.model_copy(update=ignored | ({"zero": 1} if plan.pipeline > 1 else {})) for plan in named.plans]
    assert any(plan in sizes for plan in asked)


@pytest.mark.slow
def test_a_wider_space_is_never_worse():
    narrow = Space(microbatches=(1,), policies=SPACE.policies, most_chunks=1, schedules=(), copies=False, zero=(1,))
    wider = [
        replace(narrow, schedules=("zb-h1", "zb-v")),
        replace(narrow, most_chunks=2),
        replace(narrow, zero=(1, 3)),
        SPACE,
        Space(),
    ]
    for model in (dense(), mixture()):
        ask = partial(search, model, clusters.load("h100:8"), seq_len=256, global_batch=16, top=1)
        least = ask(space=narrow).best.estimate.time.step
        for space in wider:
            assert ask(space=space).best.estimate.time.step <= least


@pytest.mark.slow
def test_what_need_not_be_simulated_would_not_have_been_among_the_best(monkeypatch):
    ask = partial(search, mixture(8), clusters.load("h100:8"), seq_len=256, global_batch=32, top=3)
    some = ask()
    for cheap in ("busy", "bound"):
        monkeypatch.setattr(Scorer, cheap, lambda self, workload: 0.0)
    assert ask().choices == some.choices


@pytest.mark.slow
@pytest.mark.parametrize("model", [dense(8), mixture(8, 2)], ids=["dense", "mixture"])
def test_bounds_are_bounds(model):
    scorer, cluster = Scorer(calibration()), clusters.load("h100:8")
    plans = list(candidates(model, cluster, seq_len=256, global_batch=32))
    assert len({plan.schedule for plan in plans}) > 3
    for plan in plans:
        work = Workload(model, plan, cluster, 256, 32, software_profile=assumed(plan))
        assert scorer.busy(work) <= scorer.estimate(work).time.step


@pytest.mark.slow
@pytest.mark.parametrize("model", [dense(8), mixture(8, 2)], ids=["dense", "mixture"])
def test_what_is_too_large_for_a_microbatch_is_for_a_larger_one(model):
    """Plans are dropped by this bound without being evaluated."""
    whole, space, scorer = clusters.load("h100:8"), Space(again=(), offload=()), Scorer(calibration())
    plans = list(candidates(model, whole, seq_len=2048, global_batch=32, space=space))
    works = [Workload(model, plan, whole, 2048, 32, software_profile=assumed(plan)) for plan in plans]
    totals = [scorer.memory(work).total for work in works]
    for share in (0.1, 0.3, 0.5, 0.8):
        limit = sorted(totals)[int(share * len(totals))] * 1.1
        small = whole.model_copy(update={"accelerator": whole.accelerator.model_copy(update={"memory": limit})})
        found = search(model, small, seq_len=2048, global_batch=32, space=space)
        fits = [scorer.fits(replace(work, cluster=small), scorer.memory(work)) for work in works]
        assert 0 < sum(fits) < len(fits)
        assert (found.looked_at, found.too_large) == (len(plans), fits.count(False))


def test_layouts_that_shard_nothing_of_experts_count_as_unsharded():
    found = list(candidates(mixture(), clusters.load("h100:8"), seq_len=1024, global_batch=8, space=Space(sharded=False)))
    assert all(plan.dp_size == 1 or plan.expert * plan.expert_tensor == plan.dp_size * plan.tensor for plan in found)
    assert any(plan.dp_size > 1 for plan in found)


def test_schedules_that_hide_the_exchange_of_experts_are_predicted_so():
    assert assumed(Plan(schedule="dualpipev", chunks=2)).overlap_expert
    assert not assumed(Plan(schedule="zb-v", chunks=2)).overlap_expert


def test_a_cluster_of_three_times_a_power_of_two_has_layouts_that_split_three_ways():
    plans = list(candidates(dense(6), clusters.load("h100:24"), seq_len=256, global_batch=16))
    assert {plan.pipeline for plan in plans} >= {3, 6}
    assert all(plan.ranks == 24 for plan in plans)


@pytest.mark.parametrize(
    ("device", "unit", "kv_heads", "largest"),
    [
        ("gb200", 64, 8, 64),
        ("gb200", 72, 8, 72),
        ("gb200", 72, 16, 8),
        ("gb200", 60, 60, 12),
        ("h100", 72, 8, 8),
        ("tpu-v4", 64, 8, 64),
    ],
)
def test_tensor_ranks_may_be_all_of_a_domain_of_72(device, unit, kv_heads, largest):
    """`megalith check` accepts them where a model's heads allow it. 72 ranks can neither share 16 heads of keys nor divide them."""
    run = tiny_run(
        model={"dim": 64, "heads": unit, "kv_heads": kv_heads, "ffn": 2 * unit, "vocab": 4 * unit},
        train={"seq_len": 16 * unit, "global_batch": 576},
    )
    plans = list(candidates(run.model.build(), clusters.load(f"{device}:576"), seq_len=16 * unit, global_batch=576, space=SPACE))
    sizes = {plan.tensor for plan in plans}
    assert max(sizes) == largest
    for size in sizes:
        plan = next(plan for plan in plans if plan.tensor == size)
        found = check(run.model_copy(update={"plan": plan, "cluster": f"{device}:576"}), files=False)
        assert not [one for one in found if one.severity == "error" and one.key == "plan.tensor"]


def _of_heads(heads, kv_heads):
    model = dense(1)
    size = {"heads": heads, "kv_heads": kv_heads}
    block = model.blocks[0].model_copy(update={"attention": model.blocks[0].attention.model_copy(update=size)})
    return model.model_copy(update={"blocks": (block,)})


def _sent(model, plan):
    """Return the bytes that a context rank sends in a block's forward."""
    size = plan.context // plan.ulysses
    share = {"ring": size - 1, "gather": (size - 1) / size, "all_to_all": (plan.ulysses - 1) / plan.ulysses}
    cluster = clusters.load(f"h100:{plan.ranks}")
    block = parts(Workload(model, plan, cluster, 4096 * plan.context, plan.data, software_profile=assumed(plan))).blocks[0]
    return sum(share[one.kind] * one.size * one.times for one in block.exchanges if (one.phase, one.axis) == ("F", "context"))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_context_ranks_exchange_heads_where_they_send_less(kv_heads):
    """The search has Ulysses' ranks inside a node exactly where a trace says that a ring sends more."""
    model = _of_heads(16, kv_heads)
    found = set(candidates(model, clusters.load("h100:16"), seq_len=65_536, global_batch=16, space=SPACE))
    for context in (2, 4, 8, 16):
        ring = Plan(context=context)
        for ulysses in (2, 4, 8):
            if ulysses <= context:
                less = _sent(model, Plan(context=context, ulysses=ulysses)) < _sent(model, ring)
                largest = ulysses == min(context, 8)
                tried = any((plan.tensor, plan.context, plan.ulysses) == (1, context, ulysses) for plan in found)
                assert tried == (less and largest), (context, ulysses)
    assert {plan.ulysses for plan in found} > {1}


def test_keys_are_gathered_where_several_ranks_of_a_node_send_to_others():
    """A gather then takes less time than a ring. Between the ranks of a node, or with one rank a node, a ring hides behind attention."""
    model, scorer = _of_heads(16, 16), Scorer(calibration())
    tried = {
        (plan.tensor, plan.context)
        for plan in candidates(model, clusters.load("h100:16"), seq_len=65_536, global_batch=16, space=SPACE)
        if plan.context_method == "gather"
    }
    assert tried == {(1, 16), (2, 8), (4, 4)}

    def waits(tensor, context, method):
        plan = Plan(tensor=tensor, context=context, context_method=method, data=16 // tensor // context)
        load = Workload(model, plan, clusters.load("h100:16"), 65_536, 16, software_profile=assumed(plan))
        return scorer.estimate(load).time.context

    for tensor, context in ((1, 16), (2, 8), (1, 8), (8, 2)):
        faster = waits(tensor, context, "gather") < waits(tensor, context, "ring")
        assert faster == ((tensor, context) in tried), (tensor, context)


@pytest.mark.slow
def test_exchanges_of_context_ranks_are_priced_where_they_may_be_among_the_best(monkeypatch):
    """Their answers are those of a search that prices all of them, from fewer estimates."""
    model = _of_heads(16, 16)
    deep = model.model_copy(update={"blocks": model.blocks * 4})
    space = Space(microbatches=(1,), policies=SPACE.policies, schedules=(), most_chunks=1, zero=(1,), copies=False)
    ask = partial(search, deep, clusters.load("h100:16"), seq_len=131_072, global_batch=2, space=space, top=1)
    priced, estimate = [], Scorer.estimate

    def counted(self, workload, held=None):
        priced.append(workload.plan)
        return estimate(self, workload, held)

    monkeypatch.setattr(Scorer, "estimate", counted)
    some, few = ask(), len(priced)
    assert not is_ring(some.best.plan)
    monkeypatch.setattr(Scorer, "busy", lambda self, workload: 0.0)
    assert ask().choices == some.choices
    assert few < len(priced) - few


def test_a_layout_names_how_its_context_ranks_exchange():
    assert short(Plan(context=16, context_method="gather")) == "c16 gather d1 z1 m1"
    assert short(Plan(context=16, ulysses=8)) == "c16u8 d1 z1 m1"
    assert short(Plan(context=16, ulysses=8, context_method="gather")) == "c16u8 gather d1 z1 m1"
    assert short(Plan(context=8, ulysses=8, context_method="gather")) == "c8u8 d1 z1 m1"


def test_candidates_differ():
    plans = list(candidates(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16))
    assert len(plans) == len(set(plans))


@pytest.mark.slow
def test_choices_come_fastest_first_and_fit():
    found = search(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16, space=SPACE)
    steps = [choice.estimate.time.step for choice in found.choices]
    assert steps == sorted(steps)
    assert all(choice.estimate.fits for choice in found.choices)


def test_no_pareto_choice_is_slower_and_larger_than_another():
    found = search(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16, space=SPACE)
    sizes = [choice.estimate.memory.total for choice in found.pareto]
    assert sizes == sorted(sizes, reverse=True)
    assert found.pareto[0] == found.best


def test_where_nothing_fits_the_closest_is_named():
    found = search(
        dense(512),
        clusters.load("h100:1"),
        seq_len=131_072,
        global_batch=64,
        space=Space(microbatches=(64,), policies=(("none", ()),)),
    )
    assert found.choices == ()
    assert found.closest is not None
    assert not found.closest.estimate.fits


def test_where_plans_fit_and_all_are_refused_nothing_is_said_to_need_more_memory():
    found = search(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16, space=SPACE, valid=lambda plan: False)
    assert (found.choices, found.closest) == ((), None)
    assert found.refused > 0


SLACK = calibration().overheads["fused"].slack


def _tight(model=None, host=None, **space):
    """Return the best plan, and the result on devices with three fifths less memory than its optimizer needs."""
    cluster, ask = clusters.load("h100:8"), partial(search, model or dense(), seq_len=4096, global_batch=16)
    best = ask(cluster, space=SPACE).best
    assert best is not None
    need = best.estimate.memory.total - 0.6 * best.estimate.memory.optimizer
    device = cluster.accelerator.model_copy(update={"memory": int(need * (1 + SLACK))})
    small = cluster.model_copy(update={"accelerator": device, "host": host or cluster.host})
    return best, ask(small, space=replace(SPACE, **space), top=100)


@pytest.mark.slow
@pytest.mark.parametrize("model", [dense(), mixture()], ids=["dense", "mixture"])
def test_what_the_host_holds_lets_a_plan_fit_that_did_not(model):
    best, found = _tight(model)
    away = [choice for choice in found.choices if choice.offload]
    assert found.offloaded > 0
    assert [choice.offload for choice in away if offloaded(choice.plan, 0.0) == best.plan] == [0.75]
    for choice in away:
        assert choice.estimate.fits
        assert choice.estimate.memory.host > 0
    assert found.runnable == next(choice for choice in found.choices if not choice.moves)


@pytest.mark.slow
def test_without_offloading_the_rest_is_found_as_it_was():
    _, some = _tight(offload=())
    _, all_ = _tight()
    assert some.offloaded == 0
    assert some.too_large == all_.too_large + all_.offloaded
    kept = tuple(choice for choice in all_.choices if not choice.moves)
    assert kept == some.choices[: len(kept)]
    assert some.best == all_.runnable


@pytest.mark.slow
def test_a_host_that_is_full_leaves_the_state_to_its_disk():
    """The device has room only for the buffers through which state on disk passes."""
    model, devices, room = dense(16), 8, 5e6
    small = HostSpec(memory=int(devices * room / USABLE))
    found = _tight(model, host=small)[1]
    away = [choice for choice in found.choices if choice.offload]
    assert found.offloaded > 0 and away
    assert {(choice.plan.state.optimizer, choice.offload) for choice in away} == {("disk", 1.0)}
    assert {choice.plan.retain.blocks for choice in found.choices} <= {"device", "disk"}
    assert all(choice.estimate.memory.disk > room >= choice.estimate.memory.host > 0 for choice in away)
    assert not any(choice.offload for choice in _tight(model, host=small.model_copy(update={"disk": 1}))[1].choices)
    assert not any(choice.offload for choice in _tight(model, host=HostSpec(memory=1))[1].choices)


def test_gradients_are_released_where_state_on_disk_is_not_enough():
    """One device, with one microbatch a step, lacks half of the memory for gradients. With two microbatches nothing can be released."""
    model, scorer, share = dense(16), Scorer(calibration()), Space().offload[-1:]
    plan = Plan(zero=0, recompute="full", state=StateSpec(optimizer="disk"))
    full = Workload(model, plan, clusters.load("h100:1"), 4096, 1, software_profile=assumed(plan))
    held = scorer.memory(full)
    device = full.cluster.accelerator.model_copy(update={"memory": int((held.total - held.gradients / 2) * (1 + SLACK))})
    small = full.cluster.model_copy(update={"accelerator": device})
    ask = partial(search, model, small, seq_len=4096, space=replace(SPACE, microbatches=(1,), again=(), offload=share))
    best = ask(global_batch=1).best
    assert best is not None and best.plan.state == StateSpec(optimizer="disk", release=True) and best.estimate.fits
    assert best.estimate.memory.gradients < held.gradients / 2
    assert short(best.plan).endswith("disk100 released")
    for others in ({"global_batch": 2}, {"global_batch": 1, "format": "fp32"}, {"global_batch": 1, "optimizer": "muon"}):
        other = ask(**others).best
        assert other is None or not other.plan.state.release


def test_a_layout_that_releases_gradients_says_so():
    assert short(Plan(zero=0, state=StateSpec(release=True))) == "d1 z0 m1 released"
    held = "d1 z3 m1 o100 weights released"
    assert short(Plan(zero=3, state=StateSpec(optimizer="host", weights="host", release=True))) == held


def test_state_in_memory_is_released_last():
    """Each step is then computed twice, so everything else is tried before."""
    order = [state for group in lighter_states((0.5, 1.0)) for state in group]
    twice = [state.release and state.optimizer != "disk" for state in order]
    assert twice == sorted(twice) and any(twice) and lighter_states(()) == []


@pytest.mark.parametrize("format", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb", "sgd"])
@pytest.mark.parametrize(("master", "batch"), [("fp32", 1), ("fp32", 2), ("split16", 1)])
def test_the_search_releases_what_check_allows(format: str, optimizer: str, master: str, batch: int):
    plan = Plan(state=StateSpec(optimizer="disk", release=True))
    how = {"software_profile": assumed(plan), "optimizer": optimizer, "master": master}
    load = Workload(dense(), plan, clusters.load("h100:1"), 4096, batch, format, **how)
    settings = {"precision": format, "global_batch": batch}
    run = tiny_run(plan=plan.model_dump(), train=settings, optimizer={"kind": optimizer, "master": master})
    refused = [one for one in check(run, files=False) if one.severity == "error" and one.key == "plan.state.release"]
    assert released.can_be(load) == (not refused)


def test_weights_are_made_from_the_state_where_it_is_not_enough_to_keep_that_elsewhere():
    """One device that lacks half of what the weights take, of a host with memory for buffers alone."""
    model, scorer = dense(16), Scorer(calibration())
    plan = Plan(recompute="full", zero=0, state=StateSpec(optimizer="disk", release=True))
    full = Workload(model, plan, clusters.load("h100:1"), 4096, 1, software_profile=assumed(plan))
    held = scorer.memory(full)
    device = full.cluster.accelerator.model_copy(update={"memory": int((held.total - held.weights / 2) * (1 + SLACK))})
    small = full.cluster.model_copy(update={"accelerator": device, "host": HostSpec(memory=int(8 * 16e6 / USABLE))})
    space = replace(SPACE, microbatches=(1,), again=(), offload=Space().offload[-1:])
    best = search(model, small, seq_len=4096, global_batch=1, space=space).best
    assert best is not None and best.plan.state == StateSpec(optimizer="disk", weights="disk", release=True)
    assert short(best.plan) == "d1 z3 m1 disk100 weights released"
    assert best.estimate.fits and best.estimate.memory.weights < held.weights / 2
    assert search(model, small, seq_len=4096, global_batch=1, space=space, format="fp32").best is None


def _crowded(lacks: str, share: float, host: HostSpec | None = None, valid=None, **given):
    """Return the best plan of 32 blocks on a device that lacks some of the memory for their activations, for its state, or for both.
    `lacks`: the kinds of memory; `share`: how much of them."""
    plan = Plan(zero=0)
    load = Workload(dense(32), plan, clusters.load("h100:1"), 4096, 1, software_profile=assumed(plan))
    held = Scorer(calibration()).memory(load)
    need = held.total - share * sum(getattr(held, kind) for kind in lacks.split())
    device = load.cluster.accelerator.model_copy(update={"memory": int(need * (1 + SLACK))})
    small = load.cluster.model_copy(update={"accelerator": device, "host": host or HostSpec(link=1e15)})
    space = replace(SPACE, **({"microbatches": (1,), "policies": SPACE.policies[:1]} | given))
    return search(load.model, small, seq_len=4096, global_batch=1, space=space, valid=valid).best


def test_a_larger_share_leaves_where_the_least_is_refused():
    """The count of memory by which plans are refused is nearer to the trainer than the search's own."""
    best = _crowded("activations", 0.2, valid=lambda plan: plan.retain.share > 0.25)
    assert best is not None and best.plan.retain == RetainSpec(blocks="host", share=0.5)


@pytest.mark.parametrize(("share", "away"), [(0.2, 0.25), (0.6, 0.75), (0.8, 1.0)])
def test_the_least_share_of_the_activations_that_fits_leaves_the_device(share, away):
    assert _crowded("activations", share, offload=()) is None
    best = _crowded("activations", share)
    assert best is not None and best.plan.retain == RetainSpec(blocks="host", share=away) and best.plan.state == StateSpec()
    assert best.moves and best.estimate.fits and best.estimate.memory.host > 0
    assert short(best.plan) == f"d1 z0 m1 a{100 * away:.0f}"


def test_activations_wait_on_disk_where_the_host_is_full():
    best = _crowded("activations", 0.8, HostSpec(memory=1))
    assert best is not None and best.plan.retain == RetainSpec(blocks="disk") and best.estimate.memory.disk > 0
    assert short(best.plan) == "d1 z0 m1 a-disk100"
    assert _crowded("activations", 0.8, HostSpec(memory=1, disk=1)) is None


def test_activations_and_state_leave_where_one_of_them_is_not_enough():
    best = _crowded("activations optimizer", 0.9)
    assert best is not None and best.plan.retain.away and best.plan.state.away and best.estimate.fits
    assert _crowded("activations optimizer", 0.9, offload=()) is None


@pytest.mark.parametrize(("link", "leaves"), [(1e15, True), (1e6, False)])
def test_activations_leave_where_that_is_faster_than_to_compute_them_again(link, leaves):
    best = _crowded("activations", 0.6, HostSpec(link=link), policies=SPACE.policies)
    assert best is not None and (best.plan.recompute == "none") == bool(best.plan.retain.away) == leaves


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [(Plan(pipeline=4), [2, 3]), (Plan(), [2, 3, 4, 6, 8, 12]), (Plan(pipeline=2, layers=(4, 8)), [2, 3, 4, 6, 8])],
)
def test_segments_are_no_longer_than_the_longest_stage_of_twelve_blocks(plan: Plan, sizes: list[int]):
    """Embedding and head are no blocks."""
    assert [one.recompute for one in segmented(plan, 12)] == [f"segments:{size}" for size in sizes]


@pytest.mark.parametrize(("share", "policy"), [(0.8, "segments"), (0.3, "sqrt")])
def test_what_does_not_fit_with_single_blocks_recomputed_may_in_segments(share, policy):
    """64 blocks are on one device that lacks some of the memory for full recomputation. The chosen length of segments needs the
    least memory."""
    model, scorer = dense(64), Scorer(calibration())
    space, ask = replace(SPACE, microbatches=(1,), offload=()), partial(search, model, seq_len=4096, global_batch=1)
    full = Workload(model, Plan(zero=0, recompute="full"), clusters.load("h100:1"), 4096, 1, software_profile=assumed(Plan()))
    held = scorer.memory(full)
    need = held.total - (1 - share) * held.activations
    device = full.cluster.accelerator.model_copy(update={"memory": int(need * (1 + SLACK))})
    small = full.cluster.model_copy(update={"accelerator": device})
    assert ask(small, space=replace(space, again=())).best is None
    found = ask(small, space=space)
    assert found.best is not None and found.best == found.runnable
    assert found.best.plan.recompute.partition(":")[0] == policy
    assert (found.recomputed, found.too_large) == (1, found.looked_at - 1)
    least = min(scorer.memory(replace(full, plan=plan)).total for plan in segmented(full.plan, 64))
    assert (least == found.best.estimate.memory.total) == (least <= need) == (policy == "segments")


def test_offloading_needs_no_more_traces(monkeypatch):
    seen = []
    monkeypatch.setattr("megalith.planner.search.parts", lambda load: seen.append(load) or parts(load))
    counts = []
    for shares in ((), SPACE.offload):
        seen.clear()
        _tight(offload=shares)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0


def test_a_training_costs_its_hours():
    cluster = clusters.load("h100:8")
    best = search(dense(), cluster, seq_len=256, global_batch=16, space=SPACE).best
    assert best is not None
    whole = training(best, cluster, tokens=1e9)
    assert whole.device_hours == pytest.approx(whole.days * 24 * 8)
    assert whole.dollars == pytest.approx(whole.device_hours * cluster.price_per_hour)


@pytest.mark.parametrize(("share", "parts"), [(0.2, ("mlp.activation",)), (0.6, ("attend", "mlp.activation"))])
def test_where_memory_is_short_a_smaller_part_is_recomputed_if_that_fits(
    share: float, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """The parts that are recomputed instead of an MLP or a whole block take less time, and no more memory than there is."""
    ask = partial(_crowded, "activations", share, policies=Space().policies, offload=())
    best = ask()
    monkeypatch.setattr("megalith.planner.search.finer", lambda *_: [])
    coarse = ask()
    assert best is not None and coarse is not None and coarse.plan.recompute_parts != best.plan.recompute_parts
    assert (best.plan.recompute, best.plan.recompute_parts) == ("selective", parts)
    assert best.estimate.fits and best.estimate.time.step < coarse.estimate.time.step


def test_only_a_half_of_each_block_leaves_if_that_is_enough():
    """The link is so slow that moving decides."""
    given = {
        "policies": Space().policies,
        "offload": (1.0,),
        "valid": lambda plan: plan.recompute == "none" and not plan.state.away,
    }
    best = _crowded("activations", 0.2, HostSpec(link=1e9), **given)
    assert best is not None and best.estimate.fits
    assert best.plan.retain == RetainSpec(parts={"attend": "host"}) and short(best.plan) == "d1 z0 m1 a attend"


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-tiny", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "plan", [{"recompute": "full"}, {"recompute": "sqrt"}, {"retain": {"blocks": "host", "share": 0.5}}], ids=str
)
def test_forms_with_smaller_parts_pass_check(plan: dict[str, Any], model: str):
    run = tiny_run(model={"preset": model}, plan=plan, train={"precision": "bf16"})
    forms = finer(run.plan, run.model.build())
    assert len(set(forms)) == len(forms) > 2
    for form in forms:
        found = check(run.model_copy(update={"plan": form}), files=False)
        assert not [one for one in found if one.key.startswith(("plan.re", "plan.recompute"))]
