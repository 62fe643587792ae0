"""The interpreter runs the actions of the program's row in order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.models.batch import Batch
from megalith.parallel.data import local
from megalith.parallel.execute import Executor
from megalith.schedule.action import Action, format_row, parts
from megalith.schedule.lower import Program
from megalith.train.assemble import Trainer
from megalith.train.batches import Cut, to_batch
from tests.models.plain import stage
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.parallel.traffic import Traffic
from tests.ranks import run_ranks
from tests.specs import tiny_run

PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"pipeline": 2}),
    "gpipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    "1f1b on four": (4, {"pipeline": 4}),
    "two pipelines": (4, {"pipeline": 2, "data": 2, "zero": 3}),
}


def batches(trainer: Trainer, step: int = 0) -> list[Batch]:
    samples = microbatches(trainer, step)
    return [to_batch(s, Cut(masked=True), device=CPU, loss_scale=1 / 200) for s in samples]


def _order(rank: int, plan: dict[str, Any]) -> tuple[str, str, int, int]:
    """Return the actions that were marked, the actions of the row, and the numbers of messages counted and expected."""
    trainer = trainer_of(tiny_run(plan=plan))
    with Traffic() as traffic:
        marks = trainer.executor.run(batches(trainer)).marks
    row = trainer.executor.program.rows[trainer.groups.coordinates["pipeline"]]
    done = " ".join(name for name, _, _ in marks if name != "WAIT")
    said = sum(action.kind.startswith(("SEND", "RECV")) for slot in row for action in parts(slot))
    times = [moment for _, start, end in marks for moment in (start, end)]
    assert times == sorted(times)
    return done, format_row(row), len(traffic.of("send")) + len(traffic.of("receive")), said


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_what_is_executed_is_the_row_in_its_order(name):
    ranks, plan = PIPELINES[name]
    for done, row, sent, said in run_ranks(_order, ranks, plan):
        assert done == row
        assert sent == said > 0


def _alone(rank: int) -> tuple[Tensor, dict[str, Tensor], int]:
    plan = {"schedule": "interleaved", "chunks": 4}
    trainer = trainer_of(tiny_run(plan=plan, train={"global_batch": 3}))
    assert len(trainer.stages) == 4
    with Traffic() as traffic:
        executed = trainer.executor.run(batches(trainer))
    grads = {name: local(p.grad) for name, p in trainer.parameters.items() if p.grad is not None}
    return executed.nll, grads, len(traffic.calls)


@pytest.mark.slow
def test_stages_on_one_rank_hand_tensors_over_without_messages():
    ((nll, grads, calls),) = run_ranks(_alone, 1)
    assert calls == 0
    spec = tiny_run(train={"global_batch": 3})
    model, total = stage(spec.model), torch.zeros(())
    for batch in run_ranks(_same_batches, 1)[0]:
        loss = model(batch.tokens, batch)
        loss.objective.backward()
        total += loss.nll
    torch.testing.assert_close(nll, total)
    for name, parameter in model.parameters_by_name().items():
        torch.testing.assert_close(grads[name], parameter.grad)


def _same_batches(rank: int) -> list[Batch]:
    return batches(trainer_of(tiny_run(train={"global_batch": 3})))


def _losses(rank: int) -> tuple[float, bool]:
    trainer = trainer_of(tiny_run(plan={"pipeline": 2}))
    nll = float(trainer.executor.run(batches(trainer)).nll)
    return nll, all(p.grad is not None for p in trainer.parameters.values())


@pytest.mark.slow
def test_only_the_last_stage_has_a_loss_and_every_stage_has_gradients():
    (first, all_first), (last, all_last) = run_ranks(_losses, 2)
    assert first == 0.0 < last
    assert all_first and all_last


def executor_of(trainer: Trainer, program: Program) -> Executor:
    executor = trainer.executor
    return Executor(program, trainer.runners, reducer=executor.reducer, groups=trainer.groups, hidden=executor.hidden)


def _freed(trainer: Trainer) -> bool:
    return all(p.untyped_storage().nbytes() == 0 for p in trainer.stages[0].parameters())


def _sharded(rank: int) -> dict[str, list[bool]]:
    """Return for each ZeRO stage whether weights are sharded again after a step, and after forwards alone."""
    found = {}
    for zero in (1, 2, 3):
        trainer = trainer_of(tiny_run(plan={"data": 2, "zero": zero}))
        trainer.executor.run(batches(trainer))
        after_step = _freed(trainer)
        forwards = replace(trainer.executor.program, rows=(tuple(Action("F", 0, i) for i in range(4)),))
        alone = executor_of(trainer, forwards)
        with torch.no_grad():
            alone.run(batches(trainer))
        found[str(zero)] = [after_step, _freed(trainer)]
    return found


@pytest.mark.slow
def test_no_gathered_weight_outlives_a_step_or_forwards_alone():
    for found in run_ranks(_sharded, 2):
        assert all(all(states) for states in found.values()), found


def _wrong(rank: int) -> None:
    trainer = trainer_of(tiny_run(train={"global_batch": 4}))
    with pytest.raises(AssertionError):
        trainer.executor.run(batches(trainer)[:3])
    unknown = replace(trainer.executor.program, rows=((Action("F", 0, 0)._replace(kind="X"),),))  # pyright: ignore
    with pytest.raises((AssertionError, KeyError)):
        executor_of(trainer, unknown)


def test_missing_microbatches_and_unknown_actions_are_refused_before_anything_runs():
    run_ranks(_wrong, 1)
