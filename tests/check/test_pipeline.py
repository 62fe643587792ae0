"""Stages, schedules and bubbles."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.check.case import format_bytes
from megalith.schedule.lower import lower
from megalith.schedule.simulate import simulate
from megalith.schedule.table import build
from megalith.spec.sizes import count_block
from tests.check.runs import advice, errors, found, is_named, spec


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["plan.pipeline=2", "plan.schedule=dualpipe", "plan.data=2", "plan.zero=2"], "plan.zero", "Use zero <= 1"),
        (["plan.pipeline=2", "plan.schedule=zb-v"], "plan.chunks", "Use chunks = 2"),
        (["plan.pipeline=8"], "plan.pipeline", "makes 8 stages, but the model has 4 blocks"),
        (["plan.pipeline=2", "plan.layers=[3,2]"], "plan.layers", "places 5 blocks, but the model has 4. Use [2, 2]"),
        (["plan.pipeline=2", "plan.layers=[4]"], "plan.layers", "names 1 stages"),
        (["plan.pipeline=2", "plan.layers=[1,1]", "plan.retain.blocks=host"], "plan.layers", "places 2 blocks"),
        (
            ["plan.pipeline=2", "plan.layers=[1,1]", "cluster=h100:2", "model.preset=llama3-8b", "model.layers=80"],
            "plan.layers",
            "places 2 blocks",  # also where the way out of too little memory tries to move activations away
        ),
        (
            ["plan.pipeline=4", "plan.layers=[2,0,1,1]"],
            "plan.layers",
            "stage 1 without a block: it would only pass messages on. Use 0",
        ),
        (["plan.pipeline=6"], "plan.pipeline", "or plan.layers = [0, 1, 1, 1, 1, 0]"),
        (["plan.schedule=1f1"], "plan.schedule", "Did you mean '1f1b'?"),
        (["plan.pipeline=2", "plan.chunks=2"], "plan.chunks", "'interleaved'"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["plan.pipeline=4", "plan.microbatch=16"], "plan.pipeline"),
        (["plan.pipeline=2", "model.tied=true"], "model.tied"),
        (["plan.pipeline=2", "plan.schedule=interleaved"], "plan.chunks"),
        (["plan.pipeline=2", "plan.schedule=zb-h2"], "plan.schedule"),
        (["plan.pipeline=2", "plan.schedule=zb-h1", "plan.compile=true"], "plan.compile"),
        (["plan.pipeline=2", "plan.schedule=dualpipe"], "plan.schedule"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["plan.pipeline=2"],
        ["plan.pipeline=2", "plan.chunks=2", "plan.schedule=interleaved"],
        ["plan.pipeline=2", "plan.layers=[1,3]"],
        ["plan.pipeline=6", "plan.layers=[0,1,1,1,1,0]"],
    ],
)
def test_what_is_valid_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []


def test_the_bubble_is_said_as_a_number():
    """The bubble is (p - 1) / m of the useful time: 3 / 4."""
    (problem,) = [p for p in found("plan.pipeline=4", "plan.microbatch=16") if p.key == "plan.pipeline"]
    assert "with 4 microbatches leaves each rank idle for 42.9% of a step (75.0% of its useful time)" in problem.reason


@pytest.mark.parametrize("sites", [(), ("sites.count=2", "sites.inner_steps=5")])
def test_post_validation_is_advised_only_where_it_is_valid(sites: tuple[str, ...]):
    asked = ("plan.pipeline=2", "plan.schedule=zb-h2", *sites)
    (problem,) = [p for p in found(*asked) if p.key == "plan.schedule"]
    assert ("post_validation" in problem.way_out) == (errors(*asked, "plan.post_validation=true") == [])


def test_the_batch_that_makes_the_bubble_small_is_that_of_all_sites():
    settings = ["plan.pipeline=2", "sites.count=2", "train.global_batch=8"]
    [problem] = [each for each in found(*settings) if each.key == "plan.pipeline"]
    [batch] = re.findall(r"train.global_batch >= (\d+)", problem.way_out)
    assert int(batch) == 16
    assert "plan.pipeline" not in advice(*settings[:-1], f"train.global_batch={batch}")


def test_the_batch_that_makes_the_bubble_small_is_larger_than_that_of_the_run():
    """Site 0 reads 12 of 16 samples, in 12 microbatches."""
    settings = ["plan.pipeline=4", "sites.count=2", "sites.each=[{share=3},{share=1}]", "train.global_batch=16"]
    [problem] = [each for each in found(*settings) if each.key == "sites.each.0.plan.pipeline"]
    [batch] = re.findall(r"train.global_batch >= (\d+)", problem.way_out)
    assert int(batch) == 22


def test_the_interleaved_bubble_is_divided_by_the_chunks():
    (problem,) = [
        p
        for p in found("plan.pipeline=2", "plan.chunks=2", "plan.microbatch=16", "plan.schedule=interleaved")
        if p.key == "plan.pipeline"
    ]
    assert "12.5%" in problem.reason


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 10), (4, 9), (8, 16)])
def test_dualpipe_is_priced_against_its_half(ranks: int, microbatches: int):
    """A stage has weights in bf16 and gradients in fp32. Idle times are simulated with F = I = W and without overlap."""
    sizes = (f"plan.pipeline={ranks}", f"model.layers={2 * ranks}", f"train.global_batch={microbatches}")
    asked = ("plan.schedule=dualpipe", *sizes)
    (problem,) = [p for p in found(*asked) if p.key == "plan.schedule"]
    (block,) = set(spec(*asked).model.build().blocks)
    assert f"about {format_bytes(2 * count_block(block, 128).total * (2 + 4))} a rank" in problem.reason
    idle = [
        simulate(lower(build(name, ranks=ranks, microbatches=microbatches, chunks=chunks), 0), dict.fromkeys("FIW", 1) | {"B": 2})
        for name, chunks in (("dualpipe", 1), ("dualpipev", 2))
    ]
    assert [f"{timeline.bubble:.1%}" for timeline in idle] == re.findall(r"idles for (\S+%)", problem.reason)


def test_several_chunks_a_rank_divide_the_bubble_of_gpipe_too():
    (problem,) = [
        p
        for p in found("plan.pipeline=2", "plan.chunks=2", "plan.microbatch=16", "plan.schedule=gpipe")
        if p.key == "plan.pipeline"
    ]
    assert "12.5%" in problem.reason


def test_dualpipe_is_let_be_where_its_half_has_too_few_blocks():
    assert "plan.schedule" not in advice("plan.schedule=dualpipe", "plan.pipeline=4")


@pytest.mark.slow
@given(blocks=st.integers(1, 12), pipeline=st.integers(1, 6), layers=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_the_split_advised_is_valid(blocks: int, pipeline: int, layers: list[int]):
    sizes = [f"model.layers={blocks}", f"plan.pipeline={pipeline}"]
    found = errors(*sizes, f"plan.layers={layers}")
    for problem in found:
        if problem.key == "plan.layers" and pipeline <= blocks:
            advised = re.search(r"\[.*?\]", problem.way_out)
            assert advised
            assert errors(*sizes, f"plan.layers={advised[0]}") == []
