"""The state of a site that begins anew."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith.checkpoint.shares import HeldShare, OffDeviceShare, as_tensor, shares
from megalith.spec.run import RunSpec
from megalith.spec.sites import fragments
from megalith.train.sites import outer
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


def test_weights_of_a_device_meet_anchors_of_the_host() -> None:
    """Fake tensors of a GPU refuse arithmetic with those of the host, as a GPU does."""
    with FakeTensorMode():
        weight, anchor, early = torch.zeros(4, device="cuda"), torch.zeros(4), torch.zeros(4)
        assert outer.difference(anchor, weight, torch.zeros(4)).device.type == "cpu"
        outer.correct(weight, anchor, early)
        for share in (0.0, 0.5):
            outer.mix(weight, anchor, share)
        assert weight.device.type == "cuda" and anchor.device.type == "cpu"
        with pytest.raises(RuntimeError, match="device"):
            _ = weight + anchor


def _boxes(rank: int, spec: RunSpec) -> dict[str, tuple[HeldShare, bool]]:
    """Return this rank's boxes in a checkpoint, and whether each is off the device."""
    assert spec.sites is not None
    trainer = trainer_of(spec)
    shapes = {name: tuple(p.shape) for name, p in trainer.parameters.items()}
    laid = OuterState(trainer.state, fragments(shapes, spec.sites), spec.sites, leads=rank == 0).laid()
    return {name: (share.held, isinstance(laid[name], OffDeviceShare)) for name, share in shares(laid).items()}


@pytest.mark.slow
def test_a_checkpoint_has_the_same_boxes_wherever_anchors_are() -> None:
    def found(place: str) -> list[dict[str, tuple[HeldShare, bool]]]:
        sites = {"inner_steps": 2, "bits": 4, "overlap": 1, "place": place}
        return run_ranks(_boxes, 2, tiny_run(plan={"data": 2, "zero": 3}, train={"global_batch": 4}, sites=sites))

    near, far = found("device"), found("host")
    assert [{name: held for name, (held, _) in each.items()} for each in near] == [
        {name: held for name, (held, _) in each.items()} for each in far
    ]
    moved = {name for each in far for name, (_, away) in each.items() if away}
    assert {name.partition("blocks")[0].partition("head")[0] for name in moved if "embed" not in name} == {
        "weights.", "outer.velocity.", "site.outer.feedback.",
    }  # fmt: skip
    assert not any(away for each in near for _, away in each.values())
