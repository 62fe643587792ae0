from dataclasses import replace
from typing import Any

import pytest

from megalith.cost.constants import calibration
from megalith.cost.parts import parts
from megalith.cost.profile import Core, Product
from megalith.cost.time import Setting, SpentSeconds, _started, core_seconds, product_seconds, spend
from megalith.cost.workload import SoftwareProfile
from megalith.spec import cluster as clusters
from megalith.spec.plan import Plan
from tests.cost.models import dense, mixture, workload

FIGURES = calibration()


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


def host(model, **software_profile) -> float:
    """Return the seconds that the host adds to the forward of a block."""
    load = workload(model, Plan(), software_profile=SoftwareProfile(**software_profile))
    block = parts(load).blocks[0]
    return spend(block, ("F",), Setting.of(load, FIGURES), format="bf16").host


def test_recorded_graphs_take_work_from_the_host():
    none, router, some, whole = (host(mixture(), graphs=graphs) for graphs in ("none", "router", "parts", "whole"))
    assert none > router > some > whole == 0


def test_the_host_waits_for_tokens_only_where_their_number_is_not_fixed():
    assert host(mixture()) - host(mixture(), waits=False) == pytest.approx(FIGURES.overheads["fused"].routing)
    assert host(dense()) == host(dense(), waits=False)


def test_what_ran_before_the_host_knew_the_numbers_does_not_hide_the_start_of_the_experts():
    """Attention over long sequences keeps the device busy, but the experts' kernels are launched after it."""
    load = workload(mixture(), Plan(), seq_len=65536, software_profile=SoftwareProfile(graphs="parts"))
    block, setting = parts(load).blocks[0], Setting.of(load, FIGURES)
    short = replace(block, products=tuple(replace(p, rows=1) if p.expert else p for p in block.products), apart_moved={"F": 0.0})
    waiting, fixed = (
        spend(short, ("F",), replace(setting, workload=replace(load, software_profile=software_profile)), format="bf16").host
        for software_profile in (SoftwareProfile(graphs="parts"), SoftwareProfile(graphs="parts", waits=False))
    )
    assert fixed == 0
    assert waiting > FIGURES.overheads["fused"].routing


def started(model, phases=("F", "I", "W"), *, format="bf16", operation=1.0, launch=0.0, **software_profile) -> float:
    """Return the launches of a block: operations, or, with other weights, the kernels launched within them."""
    load = workload(model, Plan(), software_profile=SoftwareProfile(**software_profile))
    setting = Setting.of(load, FIGURES)
    counting = replace(setting, overheads=replace(setting.overheads, host=operation, launch=launch))
    return sum(_started(parts(load).blocks[0], phases, counting, format))


def test_narrow_formats_are_more_for_the_host_to_start():
    """Forward rounds each size of input once (the width of the model and of the MLP), backward the gradient of each product."""
    products = parts(workload(dense(), Plan())).blocks[0].products
    more = started(dense(), format="fp8") - started(dense())
    assert more == 2 + sum(p.times for p in products if p.phase == "I" and p.weight)


def test_scales_in_blocks_are_further_kernels_where_nothing_fuses_them():
    launches = {"operation": 0.0, "launch": 1.0, "format": "mxfp8"}
    tensors = started(dense(), format="mxfp8") - started(dense())
    assert started(dense(), **launches) == 0
    assert started(dense(), quantise_kernels=4, **launches) == 4 * tensors


def test_a_loop_over_experts_is_one_operation_whose_kernels_are_launched():
    """Seven of eight experts are launched within each operation: two products in forward, four in backward."""
    assert started(mixture(experts=8)) == started(mixture(experts=2))
    assert started(mixture(experts=8), operation=0.0, launch=1.0) == 6 * 7
    assert started(mixture(experts=8), operation=0.0, launch=1.0, grouped=True) == 0
    assert host(mixture(), grouped=True) < host(mixture())


def test_a_router_of_plain_operations_has_the_kernels_its_source_counts():
    """72 instead of 31 in forward; a dense block has none."""
    kernels = {"operation": 0.0, "launch": 1.0, "grouped": True, "router": "plain"}
    assert started(mixture(), ("F",), **kernels) == 72 - 31
    assert started(dense(), **kernels) == 0
    assert started(mixture(), graphs="router", **kernels) == 0


def test_a_slower_host_takes_longer_for_the_same_operations():
    x86, grace = (replace(workload(mixture(), Plan()), cluster=clusters.load(f"{name}:1")) for name in ("b200", "gb200-nvl72"))
    block = parts(x86).blocks[0]
    fast, slow = (_lag_alone(load, block) for load in (x86, grace))
    assert FIGURES.hosts["grace"].slower > 1
    assert slow == pytest.approx(FIGURES.hosts["grace"].slower * fast)


def _lag_alone(load, block) -> float:
    """Return the seconds that the host takes for a block's backward if the device hides none of them."""
    setting = Setting.of(load, FIGURES)
    nothing = replace(
        block, products=(), cores=(), exchanges=(), moved=dict.fromkeys(block.moved, 0.0), kernels={"F": 0, "I": 100, "W": 0}
    )
    setting = replace(setting, device=replace(setting.device, gap=0.0))
    return spend(nothing, ("I",), setting, format="bf16").host


def test_rows_that_come_by_sender_are_put_in_order_once_more():
    """In each direction their bytes are read and written once more; a token that is sent only once arrives in order."""
    plain, ordered = (
        replace(workload(mixture(), Plan(data=4, expert=4)), software_profile=SoftwareProfile(deduplicated=deduplicated))
        for deduplicated in (False, True)
    )
    block = parts(plain).blocks[0]
    sent = sum(e.size * e.times for e in block.exchanges if e.phase == "F" and e.axis == "expert")
    by_sender, by_expert = (spend(block, ("F",), Setting.of(load, FIGURES), format="bf16").memory for load in (plain, ordered))
    setting = Setting.of(plain, FIGURES)
    assert sent > 0
    assert by_sender - by_expert == pytest.approx(setting.overheads.passes * 2 * sent / setting.bandwidth)


def test_a_short_inner_size_costs_a_faster_format_more():
    setting = Setting.of(workload(dense(), Plan()), FIGURES)

    def gain(inner: int) -> float:
        product = Product("F", rows=8192, inner=inner, columns=8192)
        return product_seconds(product, setting, "bf16") / product_seconds(product, setting, "fp8")

    assert gain(1024) < gain(16384)


def test_each_rank_sending_its_share_alone_takes_a_start_for_each():
    from megalith.cost.estimate import estimate

    load = workload(dense(), Plan(data=64, zero=1), global_batch=64)
    alone = replace(load, software_profile=SoftwareProfile(gathers="rank"))
    assert estimate(alone).time.data > estimate(load).time.data


def test_ulysses_sends_its_own_parts_and_a_ring_everyone_s():
    """Jacobs et al. 2023: with equally long parts, the bytes that a rank sends stay constant, but grow with the ranks in a ring.
    Attention has the same FLOPs."""
    from megalith.cost.estimate import estimate

    def found(ranks: int, ulysses: int):
        return estimate(workload(dense(), Plan(context=ranks, ulysses=ulysses), seq_len=2048 * ranks))

    assert 1 < found(4, 4).time.context / found(2, 2).time.context < 2  # three quarters of a part are sent, not half
    assert found(4, 4).flops == found(4, 2).flops == found(4, 1).flops
    assert found(4, 2).time.context > 0


@pytest.mark.parametrize(("seq_len", "longer"), [(65_536, "gather"), (2048, "ring")])
def test_keys_and_values_that_are_gathered_hide_behind_nothing(seq_len: int, longer: str):
    """A ring hides behind attention, unless parts are so short that its messages are all starts."""
    from megalith.cost.estimate import estimate

    ring, gather = (
        estimate(workload(dense(), Plan(context=8, context_method=method), seq_len=seq_len)).time.context
        for method in ("ring", "gather")
    )
    assert ("gather" if gather > ring else "ring") == longer


def test_a_head_takes_as_long_as_the_next_larger_one_that_kernels_are_compiled_for():
    """On other devices it takes as long as its FLOPs."""

    def seconds(channels: int, device: str = "h100", values: int | None = None, **software_profile: Any) -> float:
        load = workload(dense(), Plan(), software_profile=SoftwareProfile(**software_profile))
        setting = Setting.of(replace(load, cluster=clusters.load(f"{device}:1")), FIGURES)
        return core_seconds(Core("F", 1, 8, 8, 4096, 4096, channels, values or channels), setting)

    assert seconds(80) == seconds(96) < seconds(128)
    assert seconds(129) == seconds(160) == seconds(192) == pytest.approx(1.5 * seconds(128))
    assert seconds(16) == seconds(32) == pytest.approx(seconds(64) / 2)
    assert seconds(80, "tpu-v4") == pytest.approx(80 / 96 * seconds(96, "tpu-v4"))
    assert seconds(192, values=128) == pytest.approx(320 / 384 * seconds(192))
    assert seconds(192, values=128, loss="chunked") == seconds(192, loss="chunked")  # this project's trainer pads values


def added(
    model, plan: Plan | None = None, *, microbatches: int = 2, format: str = "bf16", **software_profile: Any
) -> SpentSeconds:
    """Return what adding the gradients of a microbatch to the sums takes in a block's backward."""
    asked = {"overheads": "eager", "loss": "whole"} | software_profile
    plan = plan or Plan()

    def backward(adds: bool) -> SpentSeconds:
        load = workload(model, plan, global_batch=microbatches * plan.data, format=format,
                        software_profile=SoftwareProfile(**asked, adds_gradients=adds))  # fmt: skip
        kind = "bf16" if format == "bf16" else "fp32"
        setting = replace(Setting.of(load, FIGURES), slower=0.0)
        return spend(parts(load).blocks[0], ("I", "W"), setting, format=kind)

    return backward(True) + backward(False) * -1


def test_gradients_are_added_to_the_sums_once_for_each_weight_and_microbatch():
    """The gradient of each number is read, and its sum is read and written: 2 + 4 + 4 bytes, however many tokens there are."""
    block = parts(workload(dense(), Plan())).blocks[0]
    figures, device = FIGURES.overheads["eager"], FIGURES.devices["hopper"]
    assert block.tensors == 9  # q, k, v, out, gate, up, down, two norms
    setting = Setting.of(workload(dense(), Plan()), FIGURES)
    moved = figures.passes * 10 * block.weights / setting.bandwidth
    expected = pytest.approx(moved + 0.5 * 9 * device.gap)
    assert added(dense()).memory == expected
    assert added(dense(), Plan(microbatch=2), microbatches=4).memory == expected
    assert added(dense(), microbatches=1).memory == pytest.approx(0.6 * moved + 0.5 * 9 * device.gap), "a copy in fp32"
    assert added(mixture()).memory > added(dense()).memory, "all experts have gradients"


def test_gradients_in_the_format_of_their_sums_are_only_added_to_earlier_ones():
    assert added(dense(), microbatches=1, format="fp32") == SpentSeconds()
    assert added(dense(), microbatches=2, format="fp32").memory > 0


def test_shards_of_gradients_are_small_and_megalith_copies_whole_ones_before_it_reduces_them():
    assert added(dense(), Plan(data=4, zero=2)) == SpentSeconds()
    ours, sums = added(dense(), Plan(data=4, zero=2), loss="chunked").memory, added(dense(), Plan(data=4, zero=1)).memory
    assert 0 < ours < sums


def test_the_host_starts_a_kernel_for_each_gradient_that_is_added():
    assert started(dense(), ("W",), adds_gradients=True) - started(dense(), ("W",)) == 9
    assert started(dense(), ("F", "I"), adds_gradients=True) == started(dense(), ("F", "I"))
    assert started(dense(), adds_gradients=True, graphs="whole") == 0
