"""The coordinate check distinguishes a model whose activations keep their scale from one whose do not."""

import pytest
import torch

from megalith.prove.coordcheck import QUANTITIES, CoordinateCheck, check, sized
from megalith.spec.families import parametrization
from tests.specs import tiny_run

torch.set_num_threads(1)
SPEC = tiny_run(model={"preset": "tiny", "layers": 2}, optimizer={"lr": 1e-3, "weight_decay": 0.0})


def _width(kind: parametrization.Parametrization) -> CoordinateCheck:
    return check(SPEC, axis="width", sizes=(32, 64, 128, 256), parametrization=kind, steps=3, seeds=(0,))


@pytest.mark.slow
def test_widths_are_flat_under_mup_alone():
    assert abs(_width("mup").worst.slope) < 0.25
    assert _width("standard").worst.slope > 0.5


@pytest.mark.slow
def test_depths_are_flat_under_completep_alone():
    found = {
        kind: check(SPEC, axis="depth", sizes=(2, 4, 8), parametrization=kind, steps=3, seeds=(0,))
        for kind in ("standard", "completep")
    }
    assert abs(found["completep"].worst.slope) < 0.25
    assert found["standard"].worst.slope > 0.4


@pytest.mark.slow
def test_a_rate_that_does_not_follow_the_width_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megalith.spec.treatment.is_hidden", lambda parameter: False)
    assert _width("mup").worst.slope > 0.25


@pytest.mark.slow
def test_muon_has_a_rule_of_its_own():
    """Muon's updates have equal singular values. With Adam's exponent it would learn too slowly as the model widens."""
    muon = SPEC.model_copy(
        update={"optimizer": SPEC.optimizer.model_copy(update={"kind": "muon", "lr": 1e-2, "iteration": "fp32"})}
    )
    found = check(muon, axis="width", sizes=(32, 64, 128, 256), parametrization="mup", steps=3, seeds=(0,))
    assert all(abs(found.steepest(name).slope) < 0.25 for name in QUANTITIES)


def test_sizes_that_are_not_to_be_had():
    model = SPEC.model
    wide = sized(model, "width", 4 * model.dim, model.dim, "mup")
    assert (wide.heads, wide.ffn, wide.base_dim) == (4 * model.heads, 4 * model.ffn, model.dim)
    with pytest.raises(ValueError, match="whole number of heads of size 16: use multiples of 16"):
        sized(model, "width", 72, 64, "mup")
