"""The state of a site that begins anew."""

from typing import Any

import pytest
import torch

from megalith.checkpoint.shares import as_tensor
from megalith.spec.run import RunSpec
from megalith.spec.sites import fragments
from megalith.train.sites.state import OuterState
from megalith.train.step import train_step
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run


def _moments(rank: int, spec: RunSpec) -> tuple[bool, bool, bool]:
    """Train a step and begin anew. Return whether there were moments before and after, and whether the weights are the anchors."""
    assert spec.sites is not None
    trainer = trainer_of(spec)
    shapes = {name: tuple(p.shape) for name, p in trainer.parameters.items()}
    outer = OuterState(trainer.state, fragments(shapes, spec.sites), spec.sites, leads=True)

    def any_moment() -> bool:
        return any(bool(as_tensor(each).count_nonzero()) for each in trainer.state.laid("optimizer").values())

    train_step(trainer, microbatches(trainer), step=0)
    before = any_moment()
    outer.begin_anew()
    return before, any_moment(), all(torch.equal(outer.weight(name), anchor) for name, anchor in outer.anchors.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "place"),
    [
        ("fp32", {}),
        ("fp32", {"optimizer": "disk"}),
        ("bf16", {"optimizer": "host", "share": 0.5}),
        ("bf16", {"optimizer": "disk"}),
    ],
)
def test_a_site_that_begins_anew_has_merged_weights_and_no_moments_wherever_they_are(
    precision: str, place: dict[str, Any]
) -> None:
    spec = tiny_run(
        plan={"state": place}, train={"precision": precision, "global_batch": 4}, sites={"count": 1, "inner_steps": 2}
    )
    assert run_ranks(_moments, 1, spec) == [(True, False, True)]
