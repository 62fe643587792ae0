"""In bf16 with inputs kept in 8 bits, every plan trains like one process, and what else is decided about kept tensors changes no bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.prove.axes import ParityCase
from megalith.prove.parity import shrink
from megalith.prove.prove import prove
from megalith.spec.run import RunSpec
from megalith.train.step import train_step
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run

TILE = 8
KEPT = {"kept": "fp8", "tile": TILE, "wide_first": 0, "wide_last": 0}
HOST = {"retain": {"blocks": "host"}}


def run_of(plan: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> RunSpec:
    return brief_run(plan=plan, model=model or {}, train={"precision": "bf16"} | train, precision=KEPT)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor, on the host": ({"tensor": 2} | HOST, {}),
    "context, zero 3, segments": ({"context": 2, "zero": 3, "recompute": "segments:2"}, {}),
    "pipeline, backward split in two": ({"pipeline": 2, "schedule": "zb-v", "chunks": 2, "zero": 2}, {}),
    "parts of experts": ({"data": 2, "expert_tensor": 2}, {"preset": "mixtral-8x7b"}),
    "experts, parts recomputed": (
        {"data": 2, "expert": 2, "recompute": "selective", "recompute_parts": ["mlp.shared", "mlp.experts"]},
        {"preset": "deepseek-tiny"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@sampled(2)
def test_a_plan_trains_like_one_process(name: str) -> None:
    proof = prove(ParityCase((), shrink(run_of(*PLANS[name]), steps=2)), references={})
    assert proof.outcome == "equal", proof


# --- one process ---


def _weights(rank: int, specs: list[RunSpec]) -> list[dict[str, Tensor]]:
    """Return this rank's weights and moments after two steps of each run."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        for step in range(2):
            train_step(trainer, microbatches(trainer, step), step=step)
        found.append({name: share.clone() for name, share in trainer.state.shares().items()})
    return found


@pytest.mark.slow
def test_where_kept_numbers_wait_and_what_is_recomputed_changes_no_bit() -> None:
    plans = ({}, HOST, {"recompute": "full"}, {"recompute": "segments:2"} | HOST, {"recompute": "selective"})
    kept, *others = run_ranks(_weights, 1, [run_of(plan) for plan in plans])[0]
    assert all(torch.equal(other[name], kept[name]) for other in others for name in kept)


def _losses(rank: int, specs: list[RunSpec]) -> list[list[float]]:
    """Return the losses of each run, which reads the same few samples again and again."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        found.append([train_step(trainer, microbatches(trainer, step % 4), step=step).loss for step in range(spec.train.steps)])
    return found


@pytest.mark.slow
def test_the_loss_falls_as_it_does_with_wide_inputs() -> None:
    """The first loss has the same bits, since forward does not change. Later the gap is small beside what the loss has lost."""
    kept = run_of({}, steps=160)
    wide, found = run_ranks(_losses, 1, [kept.model_copy(update={"precision": type(kept.precision)()}), kept])[0]
    assert found[0] == wide[0] and found[1:] != wide[1:]
    fallen = wide[0] - sum(wide[-8:]) / 8
    assert fallen > 0.3
    assert abs(sum(found[-8:]) - sum(wide[-8:])) / 8 < 0.02 * fallen
