"""The trainer of one rank."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megalith.train import assemble as module
from megalith.train.assemble import assemble, mesh_groups
from tests.models.plain import stage
from tests.parallel.running import CPU, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run


def _holding(rank: int, plan: dict[str, Any]) -> dict[str, int]:
    trainer = trainer_of(tiny_run(plan=plan))
    return trainer.state.bytes()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_bytes_of_all_ranks_together_are_those_of_the_model(plan):
    elements = sum(p.numel() for p in stage(tiny_run().model).parameters())
    norms = sum(p.numel() for name, p in stage(tiny_run().model).named_parameters() if "norm" in name)
    twice = norms if "tensor" in plan else 0  # every tensor rank has the norms whole
    held = run_ranks(_holding, 2, plan)
    assert sum(one["weights"] for one in held) == sum(one["gradients"] for one in held) == 4 * (elements + twice)
    assert sum(one["optimizer"] for one in held) == 8 * (elements + twice)


def _state(rank: int) -> tuple[dict[str, tuple[int, ...]], bool]:
    trainer = trainer_of(tiny_run(plan={"data": 2, "zero": 3}))
    state = trainer.state.tensors()
    return {key: tuple(value.shape) for key, value in state.items()}, all(isinstance(v, DTensor) for v in state.values())


@pytest.mark.slow
def test_the_state_is_weights_and_moments_by_their_names_with_global_shapes():
    whole = {name: tuple(p.shape) for name, p in stage(tiny_run().model).parameters_by_name().items()}
    for shapes, sharded in run_ranks(_state, 2):
        kinds = ("weights", "moments.first", "moments.second")
        assert shapes == {f"{kind}.{name}": shape for kind in kinds for name, shape in whole.items()}
        assert sharded


def _moves(rank: int) -> bool:
    """`state` returns the training state's own tensors, so loading into them is enough."""
    trainer = trainer_of(tiny_run())
    for tensor in trainer.state.tensors().values():
        tensor.fill_(0.25)
    held = [p.detach() for p in trainer.parameters.values()]
    return all(bool((t == 0.25).all()) for t in (*held, *trainer.state.shares("optimizer").values()))


@pytest.mark.slow
def test_the_state_shares_memory_with_what_trains():
    assert run_ranks(_moves, 1) == [True]


def _faulty(rank: int) -> str:
    module.problems = lambda program: ["rank 0: 0SEND_F0 is missing"]  # this process ends with the function
    with pytest.raises(RuntimeError) as found:
        assemble(tiny_run(), groups=mesh_groups(tiny_run(), CPU), device=CPU)
    return str(found.value)


def test_a_program_with_a_fault_is_refused_with_all_of_it():
    assert run_ranks(_faulty, 1) == ["the pipeline program is wrong:\nrank 0: 0SEND_F0 is missing"]


def _parts(rank: int) -> list[tuple[str, ...]]:
    plan = {"pipeline": 2, "schedule": "interleaved", "chunks": 2}
    return [stage.part_names for stage in trainer_of(tiny_run(plan=plan)).stages.values()]


@pytest.mark.slow
def test_a_rank_of_an_interleaved_pipeline_holds_every_other_stage():
    first, second = run_ranks(_parts, 2)
    assert first == [("embedding", "blocks.0"), ("blocks.2",)]
    assert second == [("blocks.1",), ("blocks.3", "head")]


def _unset(rank: int) -> bool:
    spec = tiny_run()
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU, load=True)
    return all(p.device == CPU and p.dtype == torch.float32 for p in trainer.parameters.values())


def test_weights_that_will_be_loaded_are_there_without_first_values():
    assert run_ranks(_unset, 1) == [True]


def _wide_steps(rank: int) -> list[tuple[bool, bool]]:
    optimizer = {"schedule": "wsd", "decay": 0.2, "warmup": 0, "lr": 1e-3}
    spec = tiny_run(
        train={"precision": "nvfp4", "steps": 10, "global_batch": 4}, precision={"wide_decay": True}, optimizer=optimizer
    )
    trainer, found = trainer_of(spec), list[tuple[bool, bool]]()
    for updates, schedule in ((0, 9), (9, 3)):
        trainer.state.updates, trainer.schedule = updates, schedule
        found.append((trainer.wide, trainer.scheduled_lr < 1e-3))
    return found


@pytest.mark.slow
def test_products_turn_wide_where_the_learning_rate_decays_not_where_a_sites_updates_end():
    assert run_ranks(_wide_steps, 1) == [[(True, True), (False, False)]]
