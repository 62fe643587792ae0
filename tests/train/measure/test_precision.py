"""Precision watch: no plan changes the errors, comparisons do not change steps, and blocks that become wide stay so."""

from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.cost.predicted import predict, workload_of
from megalith.events import PrecisionWatched, of_kind, read
from megalith.spec.run import RunSpec
from megalith.train.measure.precision import PrecisionWatch, worst
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.prove.dry import dry
from tests.ranks import run_ranks
from tests.runs import final_state, prepare_text, train
from tests.specs import brief_run, tiny_run

TRAIN = {"global_batch": 8, "seq_len": 32, "precision": "fp8", "steps": 6}
DELAYED = {"granularity": "tensor", "history": 2}


def watched(precision: dict[str, Any] | None = None, **parts: dict[str, Any]) -> RunSpec:
    return tiny_run(**{"train": TRAIN} | parts, precision={"watch_every": 2} | (precision or {"tile": 4}))


def compared(rank: int, spec: RunSpec) -> PrecisionWatched:
    trainer = trainer_of(spec)
    return PrecisionWatch(trainer, lambda step: microbatches(trainer, step)).compare(2)


def errors(plan: dict[str, Any], **rest: Any) -> dict[str, float | None]:
    everyone = run_ranks(compared, watched(plan=plan, **rest).ranks, watched(plan=plan, **rest))
    (first, *_) = everyone
    assert all((one.errors, one.raised, one.zeroed) == (first.errors, first.raised, first.zeroed) for one in everyone)
    assert first.zeroed.keys() == {"blocks.1", "blocks.2"} and all(0 <= share < 0.1 for share in first.zeroed.values())
    assert set(first.saturated.values()) == {0.0}, "scales are those at which nothing saturates"
    return everyone[0].errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ({"tensor": 2, "microbatch": 8}, {}),
        ({"data": 2, "context": 2, "microbatch": 4, "zero": 3}, {}),
        ({"pipeline": 2, "microbatch": 4, "recompute": "full"}, {}),
        ({"pipeline": 2, "schedule": "dualpipe", "microbatch": 2, "zero": 1}, {}),
        ({"data": 2, "expert": 2, "microbatch": 4}, {"preset": "deepseek-tiny"}),
    ],
    ids=str,
)
@sampled(2)
def test_every_rank_knows_the_errors_of_one_process(plan: dict[str, Any], model: dict[str, Any]) -> None:
    """One process computes the microbatches of all ranks as one, while ranks round each microbatch's gradient to bf16."""
    both = 4 if plan.get("schedule") == "dualpipe" else 1  # this schedule needs that many microbatches
    alone = errors({"microbatch": plan["microbatch"] * plan.get("data", 1) * both}, model=model)
    assert alone.keys() >= {"embedding", "blocks.0", "blocks.1", "head"} and all(
        0 < (error or 0) < 0.5 for error in alone.values()
    )
    assert errors(plan, model=model) == pytest.approx(alone, rel=0.2)


def test_an_overflow_is_infinite_and_its_block_the_worst() -> None:
    candidates = frozenset(("blocks.1", "blocks.2"))
    found = {"embedding": inf, "blocks.0": 0.3, "blocks.1": 0.2, "blocks.2": 0.1, "head": 0.0}
    assert worst(found, candidates, 0.15) == "blocks.1" and worst(found, candidates, 0.25) == worst(found, candidates, 0.0) == ""
    assert worst(dict.fromkeys(found, inf), candidates, 0.1) == "blocks.2", "in backward it comes first"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model", "precision"),
    [
        ({"data": 2, "zero": 3}, {"preset": "deepseek-tiny", "vocab": 264}, {"tile": 4}),
        ({"pipeline": 2, "post_validation": True}, {"vocab": 264}, DELAYED),
    ],
    ids=str,
)
@sampled(1, together=True)
def test_a_comparison_leaves_a_run_as_it_is(
    tmp_path: Path, plan: dict[str, Any], model: dict[str, Any], precision: dict[str, Any]
) -> None:
    parts: dict[str, Any] = {"plan": plan, "model": model, "data": {"path": str(prepare_text(tmp_path))}}
    for every in (0, 2):
        train(watched(precision | {"watch_every": every}, **parts), tmp_path / str(every))
    without, found = (final_state(tmp_path / str(every)) for every in (0, 2))
    assert found.keys() == without.keys() and all(torch.equal(found[name], tensor) for name, tensor in without.items())
    assert [one.step for one in of_kind(read(tmp_path / "2"), PrecisionWatched)] == [2, 4]


def looks(folder: Path) -> list[tuple[int, str]]:
    return [(one.step, one.raised) for one in of_kind(read(folder), PrecisionWatched)]


@sampled(1, together=True)
@pytest.mark.slow
def test_blocks_stay_wide_in_a_run_that_resumes_and_under_another_plan(tmp_path: Path) -> None:
    """After two blocks became wide none is narrow."""
    choices = {"tile": 4, "auto": 1e-6}
    parts: dict[str, Any] = {
        "plan": {"data": 2, "zero": 3},
        "model": {"vocab": 264},
        "data": {"path": str(prepare_text(tmp_path))},
    }
    spec = watched(choices, **parts, checkpoint={"every": 3})
    whole, resumed, other = (tmp_path / name for name in ("whole", "resumed", "other"))
    train(spec, whole)
    (two, first), (four, second) = looks(whole)
    assert (two, four) == (2, 4) and {first, second} == {"blocks.1", "blocks.2"}
    for folder in (resumed, other):
        train(spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 3})}), folder)
        assert looks(folder) == [(2, first)]
    train(spec, resumed)
    assert looks(resumed) == looks(whole)
    expected, found = final_state(whole), final_state(resumed)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    longer = spec.train.model_copy(update={"steps": 7})
    train(spec.model_copy(update={"plan": spec.plan.model_copy(update={"data": 1, "pipeline": 2}), "train": longer}), other)
    assert looks(other) == [*looks(whole), (6, "")]
    last = of_kind(read(other), PrecisionWatched)[-1]
    assert set(last.errors.values()) == {0.0} and last.zeroed == last.saturated == {}, "nothing is narrow any longer"


@sampled(1, together=True)
def test_a_dry_run_has_the_second_copy_of_the_gradients() -> None:
    """With one microbatch, a step with a comparison differs from one without only by the comparison."""
    parts: dict[str, Any] = {"plan": {"data": 2, "zero": 2}, "model": {"layers": 4, "ffn": 256}}
    train = {"precision": "fp8", "global_batch": 2}
    watching, without = (brief_run(**parts, train=train, precision={"tile": 4, "watch_every": every}) for every in (2, 0))
    counted, before = (dry(spec, 0) for spec in (watching, without))
    assert counted.traffic == before.traffic and counted.work == before.work
    share = before.memory.most["gradients"]
    predicted, old = (predict(workload_of(spec), rank=0).memory for spec in (watching, without))
    more = counted.memory.most["gradients"] - share
    assert predicted["gradients"] - old["gradients"] == pytest.approx(more, rel=0.01) and more > share / 3
