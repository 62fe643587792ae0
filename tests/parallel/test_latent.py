"""A model with latent attention and two tokens of multi-token prediction. The head looks tokens up in the embedding's table, which
tensor ranks split and which may also be the head's output matrix."""

from typing import Any

import pytest

from megalith.prove.compare import Recording, compare
from megalith.prove.parity import OPTIMIZER, record, reference
from megalith.spec.run import RunSpec
from tests.full import sampled
from tests.parallel.running import CPU, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

PLANS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3},
    {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2},
]
TABLES = {"head.output.weight", *(f"head.ahead.{depth}.embedding.weight" for depth in range(2))}


def _spec(plan: dict[str, Any], *, tied: bool) -> RunSpec:
    train = {"global_batch": 4, "steps": 2, "seq_len": 16}
    run = tiny_run(model={"preset": "deepseek-tiny", "ahead": 2, "tied": tied}, plan=plan, train=train, optimizer=OPTIMIZER)
    return run.model_copy(update={"model": run.model.small(layers=4, unit=4, heads_unit=2)})


def _train(rank: int, spec: RunSpec) -> tuple[Recording, list[set[str]]]:
    """Return the recording of the run and, for each stage here, the names of the head that are one parameter with the embedding."""
    trainer, same = trainer_of(spec), []
    for stage in trainer.stages.values():
        names = dict(stage.named_parameters(remove_duplicate=False))
        table = names.get("embedding.weight", names.get("head.ahead.0.embedding.weight"))
        same.append({name for name in names if names[name] is table} - {"embedding.weight"})
    return record(trainer), same


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@sampled(2)
def test_one_table_is_used_in_four_places_and_learns_like_one_process(plan: dict[str, Any], tied: bool) -> None:
    spec = _spec(plan, tied=tied)
    ranks = run_ranks(_train, spec.plan.ranks, spec)
    shared = TABLES if tied else TABLES - {"head.output.weight"}
    assert {name for _, stages in ranks for same in stages for name in same} == shared
    rows = compare(reference(spec, device=CPU), ranks[0][0], spec=spec)
    assert all(row.equal for row in rows), "\n".join(map(str, rows))
