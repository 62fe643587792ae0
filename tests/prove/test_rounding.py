"""The limits in a rounded precision: a plan may differ from fp32 as much as one process does, and no more."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from megalith.prove.compare import Recording, StepRouting
from megalith.prove.rounding import compare
from megalith.spec.numbers import PRECISIONS, Rounded
from tests.specs import tiny_run

LIMITS = cast(Rounded, PRECISIONS["bf16"].parity)
SPEC = tiny_run(train={"steps": 1, "precision": "bf16"})
SIZE, EXPERTS = 4096, 512
RANDOM = torch.Generator().manual_seed(0)
PARTS = [torch.randn(SIZE, generator=RANDOM), torch.randn(SIZE, generator=RANDOM)]
"""Return gradients of two microbatches."""
TRUE = PARTS[0] + PARTS[1]
EXPERT = torch.arange(SIZE) < EXPERTS
NEAR, CLEAR = 2.0**-9, 2.0**-7  # margins in a token's choice of experts
MOVED = 4 * torch.eye(SIZE)[TRUE[:EXPERTS].abs().argmin()]  # the change of a gradient if a token goes to another expert


def split(gradient: Tensor) -> dict[str, Tensor]:
    return {"expert": gradient[:EXPERTS], "others": gradient[EXPERTS:]}


def recording(
    gradient: Tensor,
    *,
    loss: float = 4.0,
    choices: tuple[int, int] = (0, 1),
    norm: float = 1.0,
    moved: float = 0.0,
    load: float = 8.0,
) -> Recording:
    """Return one step of a model with two weights and two tokens, one with nearly tied scores and one with a clear choice.
    `norm`: factor on the norm; `moved`: change of all weights, in learning rates."""
    routed = StepRouting(torch.tensor(choices).view(1, 2, 1), torch.tensor([[NEAR, CLEAR]]))
    weights = split(torch.full((SIZE,), moved * SPEC.optimizer.lr)) | {"router.load": torch.full((4,), load)}
    return Recording([loss], [norm * float(gradient.norm())], [split(gradient)], [{"router": routed}], weights)


def rounded(seed: int, gradient: Tensor = TRUE) -> Tensor:
    """Return a gradient with an error of two hundredths, like a sum of many roundings."""
    return gradient * (1 + 0.02 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)))


ALONE = replace(recording(rounded(10, PARTS[0]) + rounded(11, PARTS[1])), microbatches=[*map(split, PARTS)])
EXACT = recording(TRUE)
NAMES = {
    "routing": "routing",
    "loss": "loss",
    "gradients' distance": "distance",
    "gradients' length": "scale",
    "weight of a microbatch": "microbatch",
    "gradient norm": "norm",
    "routers'": "router",
    "weights after 1 steps": "weights",
}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        (recording(rounded(1)), ""),
        (recording(TRUE), ""),
        (recording(rounded(1) + MOVED, choices=(3, 1), load=9.0, moved=1.0), ""),  # the token's expert changed: that explains all
        (recording(rounded(1) + MOVED), "distance"),
        (recording(rounded(1), choices=(0, 3)), "routing"),
        (recording(rounded(1), loss=4.01), "loss"),
        (recording(rounded(1) * 7 / 8), "distance scale microbatch norm"),
        (recording(TRUE * 0.0), "distance scale microbatch norm"),
        (recording(rounded(1) + 0.2), "distance"),
        (recording(rounded(1) * torch.where(EXPERT, 1.02, 1.0)), "scale"),
        (recording(rounded(1) + 0.02 * PARTS[0] - 0.02 * PARTS[1]), "microbatch"),
        (recording(rounded(1), norm=1.02), "norm"),
        (recording(rounded(1), load=9.0), "router"),
        (recording(rounded(1), moved=0.5), "weights"),
        (recording(TRUE * torch.nan, loss=float("nan"), moved=float("nan")), "loss distance scale microbatch norm weights"),
    ],
)
def test_a_plan_may_round_elsewhere_and_not_be_wrong(found: Recording, wrong: str) -> None:
    rows = compare(EXACT, ALONE, found, spec=SPEC, limits=LIMITS)
    said = [next(NAMES[name] for name in NAMES if row.quantity.startswith(name)) for row in rows if not row.equal]
    assert said == wrong.split(), rows


def test_where_one_process_rounds_nothing_a_plan_may_round_once() -> None:
    exact = replace(EXACT, microbatches=ALONE.microbatches)

    def distance(found: Tensor) -> bool:
        return compare(EXACT, exact, recording(found), spec=SPEC, limits=LIMITS)[2].equal

    assert distance(TRUE * (1 + 2.0**-9))
    assert not distance(TRUE * (1 + 2.0**-6))


def test_how_long_a_gradient_of_rounding_is_means_nothing() -> None:
    """The terms of a gradient may cancel out, so that only rounding errors are left. Here these are a third of the gradient."""
    wild = torch.randn(EXPERTS, generator=RANDOM)
    wild *= TRUE[:EXPERTS].norm() / wild.norm() / 3
    alone, found = (replace(one, gradients=[dict(one.gradients[0])]) for one in (ALONE, recording(rounded(1))))
    alone.gradients[0]["expert"] = TRUE[:EXPERTS] + wild
    found.gradients[0]["expert"] = TRUE[:EXPERTS] - wild + 0.02 * TRUE[:EXPERTS]
    scale = compare(EXACT, alone, found, spec=SPEC, limits=LIMITS)[3]
    assert scale.equal and scale.where.startswith("others"), scale


def test_a_model_without_routers_has_no_routing() -> None:
    exact, alone = (
        replace(one, routing=[{}], weights={name: w for name, w in one.weights.items() if name != "router.load"})
        for one in (EXACT, ALONE)
    )
    rows = compare(exact, alone, alone, spec=SPEC, limits=LIMITS)
    assert not [row for row in rows if "rout" in row.quantity]
    assert len(rows) == 6


def test_a_weight_whose_gradients_cancel_out_may_move_by_rounding() -> None:
    """Adafactor divides such a gradient by its own size, as of a bias of keys."""
    found = recording(rounded(1))
    found.weights["expert"] = found.weights["expert"] + 0.5 * SPEC.optimizer.lr
    assert not compare(EXACT, ALONE, found, spec=SPEC, limits=LIMITS)[-1].equal
    cancelling = recording(TRUE * torch.where(EXPERT, 1e-9, 1.0))
    last = compare(cancelling, ALONE, found, spec=SPEC, limits=LIMITS)[-1]
    assert last.quantity.startswith("weights") and last.equal, last
