from dataclasses import replace

import pytest

from megalith.cost.constants import calibration
from megalith.cost.parts import parts
from megalith.cost.profile import Product
from megalith.cost.time import Setting, _started, product_seconds, spend
from megalith.cost.workload import Practice
from megalith.spec.plan import Plan
from tests.cost.models import dense, mixture, workload

FIGURES = calibration()


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


def host(model, **practice) -> float:
    """Seconds the host adds to the forward of a block."""
    load = workload(model, Plan(), practice=Practice(**practice))
    block = parts(load).blocks[0]
    return spend(block, ("F",), Setting.of(load, FIGURES), format="bf16").host


def test_recorded_graphs_take_work_from_the_host():
    none, router, some, whole = (host(mixture(), graphs=graphs) for graphs in ("none", "router", "parts", "whole"))
    assert none > router > some > whole == 0


def test_the_host_waits_for_tokens_only_where_their_number_is_not_fixed():
    assert host(mixture()) - host(mixture(), waits=False) == pytest.approx(FIGURES.generations["fused"].routing)
    assert host(dense()) == host(dense(), waits=False)


def test_what_ran_before_the_host_knew_the_numbers_does_not_hide_the_start_of_the_experts():
    """Attention of long sequences keeps the device busy, but the experts' kernels are started after it."""
    load = workload(mixture(), Plan(), seq_len=65536, practice=Practice(graphs="parts"))
    block, setting = parts(load).blocks[0], Setting.of(load, FIGURES)
    short = replace(block, products=tuple(replace(p, rows=1) if p.expert else p for p in block.products), apart_moved={"F": 0.0})
    waiting, fixed = (
        spend(short, ("F",), replace(setting, workload=replace(load, practice=practice)), format="bf16").host
        for practice in (Practice(graphs="parts"), Practice(graphs="parts", waits=False))
    )
    assert fixed == 0
    assert waiting > FIGURES.generations["fused"].routing


def test_narrow_formats_are_more_for_the_host_to_start():
    """In forward each size of input once (the model's width and the feed-forward half's), in backward the gradient of each product."""
    block = parts(workload(dense(), Plan())).blocks[0]
    wide, narrow = (sum(_started(block, ("F", "I", "W"), Practice(), format)) for format in ("bf16", "fp8"))
    assert narrow - wide == 2 + sum(p.times for p in block.products if p.phase == "I" and p.weight)


def test_one_kernel_for_all_experts_is_started_once():
    assert host(mixture(), grouped=True) < host(mixture())


def test_a_short_inner_size_costs_a_faster_format_more():
    setting = Setting.of(workload(dense(), Plan()), FIGURES)

    def gain(inner: int) -> float:
        product = Product("F", rows=8192, inner=inner, columns=8192)
        return product_seconds(product, setting, "bf16") / product_seconds(product, setting, "fp8")

    assert gain(1024) < gain(16384)


def test_each_rank_sending_its_share_alone_takes_a_start_for_each():
    from megalith.cost.estimate import estimate

    load = workload(dense(), Plan(data=64, zero=1), global_batch=64)
    alone = replace(load, practice=Practice(gathers="rank"))
    assert estimate(alone).time.data > estimate(load).time.data


def test_keys_and_values_that_are_gathered_hide_behind_nothing():
    from megalith.cost.estimate import estimate

    ring, gather = (
        estimate(workload(dense(), Plan(context=8, context_method=method), seq_len=2048)).time for method in ("ring", "gather")
    )
    assert gather.context > ring.context
