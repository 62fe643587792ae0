"""Blocks as the formulas count them and as torch makes them."""

import pytest
import torch

from megalith.check.sizes import block_parameters
from megalith.models.stage import Stage
from megalith.spec.presets import presets


@pytest.mark.parametrize("name", presets())
def test_blocks_have_the_parameters_that_the_rules_count(name: str):
    model = presets()[name].build().build()
    for block, number in {block: number for number, block in enumerate(model.blocks)}.items():
        with torch.device("meta"):
            made = Stage(model, number + 1, number + 2)
        assert block_parameters(block, model.dim) == sum(parameter.numel() for parameter in made.parameters())
