"""The measure of equality between two runs."""

from pathlib import Path

import pytest
import torch

from megalith.parallel import gradients
from megalith.prove import large
from megalith.prove.axes import AXES, valid_run
from megalith.prove.compare import compare
from megalith.prove.parity import joined, reference, shrink
from megalith.prove.prove import CPU
from megalith.schedule.file import dump
from megalith.schedule.one_f_one_b import one_f_one_b
from megalith.schedule.table import build
from tests.specs import tiny_run

torch.set_num_threads(1)


def test_a_long_sum_is_compared_on_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert large.norm_of_large_tensor(CPU).gap < 1e-6
    with monkeypatch.context() as naive:
        naive.setattr(gradients, "LARGE", 1 << 40)  # squares of a whole tensor are added up in fp32
        assert not large.norm_of_large_tensor(CPU).equal
    running = lambda grads: grads[0].square().numpy().cumsum()[-1]  # noqa: E731  # in one fp32 number
    monkeypatch.setattr(large, "sum_of_squares", running)
    assert not large.norm_of_large_tensor(CPU).equal


@pytest.mark.slow
def test_rounding_stays_rounding_from_step_to_step() -> None:
    """The same run with samples one at a time and four at a time: sums differ, and neither optimizer nor step amplifies the
    difference."""
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    drawn = valid_run(tuple((plain | {"model": "latent attention, experts, MTP"}).items()))
    assert drawn is not None
    one, four = (drawn.model_copy(update={"plan": drawn.plan.model_copy(update={"microbatch": many})}) for many in (1, 4))
    gaps = {
        row.quantity.split()[0]: row.gap for row in compare(reference(one, device=CPU), reference(four, device=CPU), spec=one)
    }
    assert 0 < gaps["gradients,"] < 5e-6, gaps
    assert 0 < gaps["weights"] < 1e-3, gaps


def test_a_schedule_from_a_file_keeps_its_microbatches(tmp_path: Path) -> None:
    """Other schedules need fewer microbatches, once every rank has reached its steady state."""
    path = tmp_path / "own.schedule"
    path.write_text(dump(one_f_one_b(2, 6)))
    plan = {"pipeline": 2, "schedule": f"file:{path}"}
    small = shrink(tiny_run(plan=plan, train={"global_batch": 6}), steps=1)
    assert build(small.plan.schedule, ranks=2, microbatches=small.microbatches, chunks=1).microbatches == 6
    assert shrink(tiny_run(plan=plan | {"schedule": "1f1b"}, train={"global_batch": 6}), steps=1).microbatches == 4


def test_a_share_that_one_of_three_replicas_has_otherwise_is_unknown() -> None:
    """Also if the replicas before and after that one agree."""
    agreed, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    for replicas in ([agreed, other, agreed], [other, agreed, agreed], [agreed, agreed, other], [agreed, other, other]):
        whole = joined([*(("weight", (4,), (0,), one) for one in replicas), ("weight", (4,), (2,), torch.tensor([3.0, 4.0]))])
        assert whole["weight"].isnan().tolist() == [True, True, False, False]
    whole = joined([("weight", (3,), (0,), agreed)] * 3)["weight"]
    assert whole[:2].tolist() == [1.0, 2.0] and whole[2].isnan()
