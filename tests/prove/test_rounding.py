"""What is as far from fp32 as bf16 takes one process, and what is farther."""

from dataclasses import replace

import pytest
import torch

from megalith.prove.compare import Recording, Routed
from megalith.prove.rounding import compare

NAMES = ("routing", "loss", "gradients")
TRUE = torch.linspace(0.5, 2.0, 64) * torch.tensor([1.0, -1.0]).repeat(32)
NEAR, CLEAR = 2.0**-9, 2.0**-7  # margins of a token's choice
MOVED = torch.eye(64)[0] / 8  # what another expert's token adds to the gradient of one


def recording(gradient: torch.Tensor, *, loss: float = 4.0, choices: tuple[int, int] = (0, 1)) -> Recording:
    """One step of a model with two weights and two tokens: one with hardly a choice, one whose choice is clear."""
    routed = Routed(torch.tensor(choices).view(1, 2, 1), torch.tensor([[NEAR, CLEAR]]))
    return Recording([loss], [1.0], [{"expert": gradient[:2], "others": gradient[2:]}], [{"router": routed}])


def rounded(seed: int) -> torch.Tensor:
    """Off by a hundredth, as a sum of many roundings is."""
    return TRUE * (1 + 0.01 * torch.randn(64, generator=torch.Generator().manual_seed(seed)))


EXACT, ALONE = recording(TRUE), recording(rounded(0))


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (recording(rounded(1)), ()),
        (recording(TRUE), ()),
        (recording(rounded(1) + MOVED, choices=(3, 1)), ()),
        (recording(rounded(1) + MOVED), ("gradients",)),
        (recording(rounded(1), choices=(0, 3)), ("routing",)),
        (recording(rounded(1), loss=4.01), ("loss",)),
        (recording(rounded(1) * 7 / 8), ("gradients",)),
        (recording(rounded(1) + 0.05), ("gradients",)),
        (recording(TRUE * torch.nan, loss=float("nan")), ("loss", "gradients")),
    ],
)
def test_a_plan_may_round_elsewhere_and_not_be_wrong(found: Recording, wrong: tuple[str, ...]) -> None:
    rows = compare(EXACT, ALONE, found)
    assert [next(name for name in NAMES if row.quantity.startswith(name)) for row in rows if not row.equal] == [*wrong]


def test_where_one_process_rounds_nothing_a_plan_may_round_once() -> None:
    off = recording(TRUE * (1 + 2.0**-9))
    assert all(row.equal for row in compare(EXACT, EXACT, off))
    assert not all(row.equal for row in compare(EXACT, EXACT, recording(TRUE * (1 + 2.0**-7))))


def test_a_model_without_routers_has_no_routing() -> None:
    plain = replace(EXACT, routing=[{}])
    assert len(compare(plain, plain, plain)) == 2
