"""A model without its multipliers computes the same as before."""

from typing import Any

import pytest
import torch

from megalith.checkpoint.fold import folded
from megalith.models.batch import Batch
from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.spec.families import Model, read
from megalith.spec.presets import presets

SCALED = {"parametrization": "completep", "base_dim": 10, "base_layers": 1, "base_head_dim": 2}


def _logits(spec: Model, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    stage = Stage(spec.build())
    with torch.no_grad():
        for name, parameter in stage.parameters_by_name().items():
            parameter.copy_(weights[name])
        return stage(torch.arange(24).view(2, 12), Batch(tokens=torch.arange(24).view(2, 12), targets=None))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("preset", ["tiny", "gemma2-2b", "qwen3-0.6b", "mixtral-8x7b", "gpt2", "grok-1"])
def test_it_computes_the_same(preset: str, tied: bool) -> None:
    usual = read(presets()[preset].values | {"tied": tied})
    spec = read(usual.small(2, 4, 4).model_dump() | SCALED)
    model, stage = spec.build(), Stage(spec.build())
    for name, part in stage.parts():
        initialise(part, name=name, spec=model, seed=3)
    weights: dict[str, Any] = {name: p.detach() + 0.05 * torch.randn_like(p) for name, p in stage.parameters_by_name().items()}
    plain, changed = folded(spec, weights)
    assert plain.parametrization == "standard" and set(changed) == set(weights)
    assert not torch.allclose(_logits(plain, weights), _logits(spec, weights), rtol=1e-2)
    torch.testing.assert_close(_logits(plain, dict(changed)), _logits(spec, weights), rtol=1e-4, atol=1e-5)


def test_a_model_without_multipliers_stays_as_it_is() -> None:
    spec, weights = read(presets()["tiny"].values), {"a": torch.zeros(1)}
    assert folded(spec, weights) == (spec, weights)
