"""The tensors that a rank keeps, according to the table of slots."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.spec.state import Slot
from megalith.train.state import State
from tests.parallel.running import trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

FACTORED = (Slot("moments.row", shape="row"), Slot("moments.column", shape="column"), Slot("moments.first", number="bf16"))


def _factored(rank: int, plan: dict[str, int]) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Return for each slot of a matrix its whole shape, the shape that its cut gives this rank, and its dtype."""
    trainer = trainer_of(tiny_run(plan=plan))
    state = State(trainer.parameters, {}, dict.fromkeys(trainer.parameters, FACTORED))
    found = {}
    for key, whole in state.tensors("optimizer").items():
        assert isinstance(whole, DTensor)
        marked = torch.ones_like(whole).full_tensor()  # gathers by the placements, and raises if they contradict the shares
        assert tuple(marked.shape) == tuple(whole.shape) and bool((marked == 1).all())
        found[key] = tuple(whole.shape), tuple(state.shares("optimizer")[key].shape), whole.dtype
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 3}, {"tensor": 2}, {"data": 2, "tensor": 2, "zero": 1}], ids=str)
def test_a_row_and_a_column_are_cut_as_their_matrix_is(plan: dict[str, int]) -> None:
    spec = tiny_run(plan=plan)
    whole = {"blocks.0.mlp.up.weight": (48, 32), "blocks.0.mlp.down.weight": (32, 48), "blocks.0.mlp_norm.weight": (32,)}
    for found in run_ranks(_factored, spec.plan.ranks, plan):
        for name, shape in whole.items():
            row, column, first = (found[f"moments.{kind}.{name}"] for kind in ("row", "column", "first"))
            assert first[0] == shape and first[2] == torch.bfloat16
            assert row[0] == (shape[:1] if len(shape) == 2 else shape)
            assert column[0] == (shape[1:] if len(shape) == 2 else shape)
            if len(shape) == 2:
                assert row[1] == first[1][:1] and column[1] == first[1][1:]


def _plain() -> tuple[State, Tensor]:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    return State({"w": weight}, {"load": torch.zeros(4)}, {"w": (Slot("moments.first"),)}), weight


def test_a_category_is_chosen_by_name_and_buffers_are_among_the_weights() -> None:
    state, _ = _plain()
    assert [*state.shares()] == [*state.tensors()] == ["weights.w", "weights.load", "moments.first.w"]
    assert [*state.shares("weights")] == ["weights.w", "weights.load"]
    assert [*state.shares("optimizer")] == ["moments.first.w"]


def test_bytes_are_those_of_shares_without_buffers() -> None:
    state, _ = _plain()
    assert state.bytes() == {"weights": 24, "gradients": 24, "optimizer": 24}


def test_shares_are_the_memory_that_trains() -> None:
    state, weight = _plain()
    state.shares()["weights.w"].zero_()
    assert not bool(weight.any())
    weight.grad = torch.ones(2, 3)
    (part,) = state.parts()
    part.weight.add_(1)
    assert bool((weight == 1).all())
    assert [tensor.data_ptr() for tensor in state.changed()] == [weight.data_ptr(), part.slots["moments.first"].data_ptr()]
