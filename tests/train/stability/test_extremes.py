"""Extremes of outputs and logits are equal under every plan, cost nothing if off, and are evidence for the cause of damage."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalith.events import Rewound, Spike, of_kind, read
from megalith.prove.parity import record
from megalith.prove.spikes import train
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.loop import Loop
from megalith.train.stability.extremes import LOGITS, FirstRise, StepExtremes
from megalith.train.stability.findings import Findings
from megalith.train.step import accumulate
from megalith.train.step_hooks import StepHook
from tests.keys import KEY
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run
from tests.train.prepared import small_data
from tests.train.spiking import spiky_run


def _looked(rank: int, spec: RunSpec) -> dict[str, float]:
    trainer = trainer_of(spec)
    trainer.extremes.demand()
    accumulate(trainer, microbatches(trainer))
    return trainer.extremes.last.largest


def looked(plan: dict[str, Any], model: dict[str, Any]) -> list[dict[str, float]]:
    spec = tiny_run(plan=plan, model=model, train={"global_batch": 8})
    return run_ranks(_looked, spec.plan.ranks, spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ({"tensor": 2, "microbatch": 8}, {}),
        ({"data": 2, "context": 2, "microbatch": 4, "zero": 3}, {}),
        ({"data": 2, "context": 2, "ulysses": 2, "microbatch": 4}, {}),
        ({"pipeline": 2, "microbatch": 4, "recompute": "full"}, {}),
        ({"pipeline": 2, "schedule": "dualpipev", "chunks": 2, "microbatch": 2}, {}),
        ({"data": 2, "expert": 2, "tensor": 2, "microbatch": 4}, {"preset": "deepseek-tiny"}),
        ({"data": 2, "microbatch": 4, "recompute": "full"}, {"preset": "nemotron-h-tiny"}),
    ],
    ids=str,
)
def test_every_rank_knows_what_one_process_sees(plan: dict[str, Any], model: dict[str, Any]) -> None:
    """The first microbatch of the single process contains the first microbatches of all data ranks. Blocks that dispatch tokens have
    no output extremes."""
    (alone,) = looked({"microbatch": plan["microbatch"] * plan.get("data", 1)}, model)
    assert any(name.startswith(LOGITS) for name in alone) and "blocks.1" in alone and "head" not in alone
    found = looked(plan, model)
    hidden = alone.keys() - found[0].keys()
    assert all(name.startswith("blocks.") for name in hidden) and bool(hidden) == ("expert" in plan), hidden
    same = {name: pytest.approx(value, rel=1e-5) for name, value in alone.items() if name not in hidden}
    assert all(each == same and each == found[0] for each in found)


def _messages(rank: int, spec: RunSpec) -> list[int]:
    """Return the number of all-reduces in each of four steps. No module keeps a hook."""
    trainer, counts = trainer_of(spec), list[int]()
    modules = [module for stage in trainer.stages.values() for module in stage.modules()]
    before = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
    for step in range(4):
        trainer.state.updates = step
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
            accumulate(trainer, microbatches(trainer))
        trainer.drop()
        counts.append(sent.call_count)
        assert before == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in modules]
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("stability", [{"extremes_every": 0}, {"watch": False}, {"extremes_every": 2}], ids=str)
def test_a_step_without_a_look_costs_nothing(stability: dict[str, Any]) -> None:
    """A measurement costs one message, and hooks exist during measurements only."""
    ((none, first, between, second),) = run_ranks(_messages, 1, tiny_run(stability=stability))
    measurements = stability.get("extremes_every") == 2
    assert none == between == first - measurements == second - measurements


def _damaged(rank: int, spec: RunSpec) -> tuple[list[int], FirstRise | None, FirstRise | None]:
    """Measure some steps, and then one whose second block is damaged."""
    trainer = trainer_of(spec)
    for step in range(12):
        trainer.state.updates = step
        accumulate(trainer, microbatches(trainer))
        trainer.drop()
    calm = trainer.extremes.risen()
    with torch.no_grad():
        trainer.parameters["blocks.1.mlp.down.weight"].mul_(1000.0)
    trainer.extremes.demand()
    trainer.state.updates += 1
    accumulate(trainer, microbatches(trainer))
    return [measured.step for measured in trainer.extremes.measurements], calm, trainer.extremes.risen()


@pytest.mark.slow
def test_the_first_part_that_rose_is_named() -> None:
    ((measurements, calm, risen),) = run_ranks(_damaged, 1, tiny_run(stability={"extremes_every": 2}))
    assert measurements == [1, 3, 5, 7, 9, 11] and calm is None
    assert risen is not None and risen.name == "blocks.1" and risen.now > 10 * risen.was


def _spoilt(rank: int, spec: RunSpec) -> dict[str, float]:
    trainer = trainer_of(spec)
    if rank == 1:
        torch.nn.init.constant_(trainer.parameters["blocks.2.attention.q.weight"], torch.nan)
    trainer.extremes.demand()
    accumulate(trainer, microbatches(trainer))
    return trainer.extremes.last.largest


@pytest.mark.slow
def test_nan_on_one_rank_is_infinite_on_all() -> None:
    for found in run_ranks(_spoilt, 2, tiny_run(plan={"pipeline": 2, "microbatch": 4})):
        assert found[LOGITS + "blocks.2.attention"] == found["blocks.2"] == float("inf") > found["blocks.1"]


def _trained(rank: int, spec: RunSpec) -> list[StepExtremes]:
    trainer = trainer_of(spec)
    record(trainer)
    return list(trainer.extremes.measurements)


@pytest.mark.slow
def test_a_look_is_at_forwards_that_count() -> None:
    """With post-validation the forwards of each step run twice here; those before the clipping are discarded."""
    clip, stability = {"clip": 0.01}, {"extremes_every": 1}
    plan: dict[str, Any] = {"pipeline": 2, "microbatch": 2}
    ahead, late = (
        run_ranks(_trained, 2, tiny_run(plan=plan | more, optimizer=clip, stability=stability))[0]
        for more in ({}, {"post_validation": True})
    )
    assert [measured.step for measured in ahead] == [0, 1, 2] and ahead == late


def test_samples_alone_are_no_reason_to_blame_weights() -> None:
    """If nothing was recomputed, only extremes that rose in a measurement before the spike count."""
    risen = FirstRise("logits of blocks.0.attention", 39, 3.0, 300.0)
    assert Findings(risen=risen).causes[0][0] == "numerics"
    assert "step 40 logits of blocks.0.attention rose to 300" in Findings(risen=risen).causes[0][1]
    assert Findings(sound=True, risen=risen).causes[0][0] == "data" and len(Findings(sound=True, risen=risen).causes) == 1


def _of_looks(rank: int, spec: RunSpec) -> list[FirstRise | None]:
    extremes = trainer_of(spec).extremes
    extremes.measurements.extend(StepExtremes(step, {"blocks.0": 1.0}) for step in range(0, 50, 10))
    extremes.measurements.append(StepExtremes(50, {"blocks.0": 9.0}))
    extremes.last = extremes.measurements[-1]
    found = [extremes.risen(before=50), extremes.risen(before=51)]
    extremes.forget(30)
    return [*found, extremes.risen()]


def test_measurements_before_a_spike_are_distinguished_from_the_spike() -> None:
    """After a rewind too few measurements are left for a comparison."""
    ((before, after, rewound),) = run_ranks(_of_looks, 1, tiny_run())
    assert before is None and after == FirstRise("blocks.0", 50, 1.0, 9.0) and rewound is None


class Damaged(StepHook):
    """A step hook that fills the first MLP with large random numbers after step 40."""

    @torch.no_grad()
    def after_step(self, trainer: Trainer, step: int) -> None:
        if step == 40:
            for name in ("gate", "up", "down"):
                share = trainer.state.shares("weights")[f"weights.blocks.0.mlp.{name}.weight"]
                share.copy_(torch.randn(share.shape, generator=torch.Generator().manual_seed(0)))


def _train(rank: int, spec: RunSpec, folder: Path) -> list[int]:
    """Return the steps of the remaining measurements."""
    found = list[int]()

    def keep(loop: Loop, step: int) -> None:
        found[:] = [measured.step for measured in loop.trainer.extremes.measurements]

    train(rank, spec, folder, (), key=KEY, step_hooks=[Damaged()], after=keep)
    return found


@pytest.mark.slow
def test_numerics_rest_on_what_rose(tmp_path: Path) -> None:
    """Nothing is rewound, so only the measurements show where the damage is."""
    (tmp_path / "run").mkdir()
    spec = spiky_run(small_data(tmp_path), steps=44, answers=("lower",), extremes_every=2)
    run_ranks(_train, 1, spec, tmp_path / "run")
    first = of_kind(list(read(tmp_path / "run")), Spike)[0]
    assert first.cause == "numerics" and "the largest output of blocks.0 rose" in first.causes[0]["evidence"], first


@pytest.mark.slow
def test_a_rewind_forgets_the_looks_that_it_undoes(tmp_path: Path) -> None:
    """Steps that are recomputed to find the cause do not count as measurements either."""
    (tmp_path / "run").mkdir()
    spec = spiky_run(small_data(tmp_path), steps=46, answers=("rewind",), extremes_every=1)
    (steps,) = run_ranks(_train, 1, spec, tmp_path / "run")
    rewound = of_kind(list(read(tmp_path / "run")), Rewound)[0]
    assert steps == sorted(set(steps)) and steps[0] < rewound.to and steps[-1] > rewound.step
    assert not [step for step in steps if rewound.to <= step < rewound.step], (steps, rewound)
