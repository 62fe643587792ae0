"""Adaptive clipping (AdaGC) and QK-clip are equal under every plan and every kind of step."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalith.check import check
from megalith.check.resume import check_branch
from megalith.prove.compare import Recording
from megalith.prove.parity import record, reference, shrink
from megalith.prove.spikes import RunEnd
from megalith.prove.verdict import judge
from megalith.spec.run import BranchSpec, RunSpec
from megalith.spec.treatment import heads_of
from megalith.train.stability.adaptive_clip import UNKNOWN, AdaptiveClip
from megalith.train.stability.attention import HeadClip
from megalith.train.state import USUAL
from megalith.train.step import accumulate, compute, update
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run
from tests.train.prepared import small_data
from tests.train.spiking import spike, spiky_run

CLIP: dict[str, Any] = {"adaptive_clip": 1.01, "adaptive_clip_after": 1, "qk_clip": 1e-3}
ALONE = {"kv_heads": 4}
"""A model with as many key heads as query heads, so that both are scaled."""


def spec_of(plan: dict[str, Any], *, model: dict[str, Any] | None = None, **optimizer: Any) -> RunSpec:
    batch = 4 * plan.get("data", 1) * plan.get("pipeline", 1)
    run = tiny_run(model=model or {}, plan=plan, optimizer=CLIP | optimizer, train={"steps": 3, "global_batch": batch})
    return shrink(run, steps=3)


def _recorded(rank: int, spec: RunSpec) -> Recording:
    return record(trainer_of(spec))


def recorded(spec: RunSpec) -> Recording:
    return run_ranks(_recorded, spec.plan.ranks, spec)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({}, {"tensor": 4}),
        (ALONE, {"tensor": 2, "pipeline": 2, "post_validation": True}),
        (ALONE, {"data": 2, "context": 2, "zero": 3}),
        ({"preset": "gpt3-175b"}, {"data": 2, "state": {"optimizer": "disk", "chunk": 1}}),
        ({"preset": "deepseek-tiny"}, {"data": 2, "tensor": 2, "expert": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_any_plan_clips_as_one_process_does(model: dict[str, Any], plan: dict[str, Any]) -> None:
    """The reference works on whole tensors, head by head (`megalith.prove.clipping`)."""
    spec = spec_of(plan, model=model)
    verdict = judge(recorded(spec), spec=spec, alone=partial(reference, device=CPU))
    assert verdict.equal, verdict


def _shares_alone(*_: Any, **__: Any) -> None:
    """Plant: a rank treats its own part as the whole."""


def _faulty(rank: int, spec: RunSpec, where: str) -> Recording:
    one, method = (AdaptiveClip, "_norms") if where == "norms" else (HeadClip, "gather")
    right = getattr(one, method)

    def alone(self: Any) -> Any:
        with mock.patch.object(dist, "all_reduce", _shares_alone):
            return right(self)

    trainer = trainer_of(spec)
    with mock.patch.object(one, method, alone):
        return record(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["norms", "maxima"])
def test_a_missing_reduction_is_found(where: str) -> None:
    spec = spec_of({"data": 2, "zero": 2}, model=ALONE, lr=1e-2)
    found = run_ranks(_faulty, 2, spec, where)[0]
    assert not judge(found, spec=spec, alone=partial(reference, device=CPU)).equal


def _twice(rank: int, spec: RunSpec) -> list[dict[str, torch.Tensor]]:
    """Compare a late check that undoes an update, because the norm is above `clip` while `clip` still applies, with a
    synchronous step."""
    found = []
    for late in (False, True):
        trainer = trainer_of(spec.model_copy(update={"plan": spec.plan.model_copy(update={"post_validation": late})}))
        recording = record(trainer)
        found.append(recording.weights | trainer.state.usual)
    return found


@pytest.mark.slow
def test_an_update_that_is_undone_leaves_no_trace() -> None:
    spec = spec_of({"pipeline": 2}, model=ALONE, clip=0.1)
    for known, late in run_ranks(_twice, 2, spec):
        assert all(torch.equal(late[name], tensor) for name, tensor in known.items())


def _logits(rank: int, spec: RunSpec) -> tuple[float, float, bool, bool]:
    """Return the largest bound of a logit before and after an update that only scales heads."""
    trainer = trainer_of(spec)
    assert trainer.heads is not None
    batches = microbatches(trainer)
    update(trainer, compute(trainer, batches, step=0), step=0)
    before, acted = float((1 / trainer.heads.factors).max()), trainer.heads.acts
    accumulate(trainer, batches)
    return before, float((1 / trainer.heads.factors).max()), acted, trainer.heads.acts


@pytest.mark.slow
def test_logits_end_at_the_limit() -> None:
    spec = tiny_run(model=ALONE | {"layers": 1}, optimizer=CLIP | {"lr": 1e-12, "weight_decay": 0.0})
    ((before, after, acted, _),) = run_ranks(_logits, 1, spec)
    assert acted and before > 1.5 and after == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("preset", ["tiny", "deepseek-tiny"])
def test_every_layer_of_attention_has_rows(preset: str) -> None:
    model = tiny_run(model={"preset": preset}).model.build()
    layers = heads_of(model)
    ahead = model.head.ahead.depth if model.head.ahead else 0
    assert len(layers) == len(model.blocks) + ahead and all(layer.rows for layer in layers)


# --- adaptive clipping by itself ---


def _norms(rank: int, spec: RunSpec, factors: list[float]) -> list[tuple[float, float]]:
    """Return the norm of a gradient after clipping, and the usual norm. Each step's gradient is the first one times a factor."""
    trainer = trainer_of(spec)
    assert trainer.adaptive is not None
    parameter = next(iter(trainer.parameters.values()))
    found = []
    for step, factor in enumerate(factors):
        for other in trainer.parameters.values():
            other.grad = torch.full_like(other, factor)
        trainer.clip(1.0, number=step)
        assert parameter.grad is not None
        trainer.adaptive.commit()
        found.append((float(parameter.grad.to_local().norm()), float(trainer.state.usual[USUAL][0])))  # pyright: ignore[reportAttributeAccessIssue]
    return found


@pytest.mark.slow
def test_a_wild_gradient_is_cut_to_its_usual_norm() -> None:
    spec = tiny_run(optimizer={"adaptive_clip": 1.05, "adaptive_clip_after": 2, "adaptive_clip_decay": 0.98})
    ((first, usual), (_, least), (wild, after), (none, kept), *_) = run_ranks(_norms, 1, spec, [1.0, 2.0, 100.0, 0.0])[0]
    assert usual == least == pytest.approx(first)
    assert wild == pytest.approx(1.05 * first) and after == pytest.approx((0.98 + 0.02 * 1.05) * first)
    assert none == 0 and kept == after, "a step without gradient says nothing about the usual norm"


@pytest.mark.slow
def test_without_a_usual_norm_nothing_is_cut() -> None:
    spec = tiny_run(optimizer={"adaptive_clip": 1.05, "adaptive_clip_after": 0})
    ((first, usual),) = run_ranks(_norms, 1, spec, [5.0])[0]
    assert usual == pytest.approx(first) and usual != UNKNOWN


# --- resuming, and checks of the state ---


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_data(tmp_path_factory.mktemp("data"))


def _run(rank: int, spec: RunSpec, folder: Path) -> RunEnd:
    folder.mkdir(exist_ok=True)
    return spike(rank, spec, folder, ())


@pytest.mark.slow
def test_a_run_goes_on_with_its_usual_norms(data: str, tmp_path: Path) -> None:
    """All checks of the state and all re-execution are on, and would end the run if it were wrong."""
    plan = {"data": 2, "zero": 2}
    optimizer = CLIP | {"lr": 3e-3, "schedule": "constant", "warmup": 4}
    run = spiky_run(data, plan=plan, steps=4).model_copy(
        update={"optimizer": tiny_run(optimizer=optimizer).optimizer, "fleet": tiny_run(fleet={"verify_every": 1}).fleet}
    )
    whole = run_ranks(_run, 2, run, tmp_path / "whole")[0]
    half = run.model_copy(update={"train": run.train.model_copy(update={"steps": 2})})
    run_ranks(_run, 2, half, tmp_path / "halves")
    resumed = run_ranks(_run, 2, run, tmp_path / "halves")[0]
    assert USUAL in whole.state and whole.state[USUAL].isfinite().all()
    assert all(torch.equal(resumed.state[name], tensor) for name, tensor in whole.state.items())


def test_a_branch_cannot_begin_to_clip() -> None:
    before = tiny_run()
    branch = BranchSpec(checkpoint="c", updates=4, samples=16, steps=8)
    asked = before.model_copy(update={"optimizer": tiny_run(optimizer=CLIP).optimizer, "branch": branch})
    meta = {"position": {"updates": 4, "samples": 16}, "spec": before.model_dump(mode="json")}
    assert [problem.key for problem in check_branch(meta, asked)] == ["optimizer.adaptive_clip"]


@pytest.mark.parametrize(
    ("model", "optimizer", "key", "severity"),
    [
        ({}, {"adaptive_clip": 0.9}, "optimizer.adaptive_clip", "error"),
        ({}, {"adaptive_clip": 1.1, "adaptive_clip_after": 100}, "optimizer.adaptive_clip_after", "advice"),
        ({"preset": "qwen3-0.6b"}, {"qk_clip": 100.0}, "optimizer.qk_clip", "error"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(model: dict[str, Any], optimizer: dict[str, Any], key: str, severity: str) -> None:
    found = check(tiny_run(model=model, optimizer=optimizer, train={"steps": 50}), files=False)
    assert [problem.severity for problem in found if problem.key == key] == [severity]
