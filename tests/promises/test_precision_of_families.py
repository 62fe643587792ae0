"""Every family of models trains in every precision, or `check` says why not."""

import pytest
import torch

from megalith.check import check
from megalith.parallel.data import local
from megalith.prove.axes import LAYERS
from megalith.prove.parity import clearly_routed, small_choices
from megalith.spec.families import read
from megalith.spec.numbers import TRAINED, is_narrow
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from megalith.train.step import accumulate
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks

LEAST = {"bf16": 0.99, "fp16": 0.999, "fp8": 0.9, "mxfp8": 0.9, "nvfp4": 0.5, "mxfp4": 0.5}
"""The least cosine between a gradient and that in fp32 at the same weights."""
FAMILIES = {type(read(preset.values)).__name__: name for name, preset in presets().items()}
"""A preset of each family."""


def spec_of(preset: str, precision: str) -> RunSpec:
    """A run of a small model of the preset's family, whose routers choose the same experts in each precision."""
    model = clearly_routed(read(presets()[preset].values).small(layers=LAYERS, unit=4, heads_unit=4), "fp8")
    return RunSpec.model_validate(
        {
            "model": model.model_dump(),
            "data": {"path": "none"},
            "precision": small_choices(precision, LAYERS) if is_narrow(precision) else {},
            "loss_scale": {"initial": 1024},
            "train": {"steps": 1, "global_batch": 2, "seq_len": 32, "precision": precision},
        }
    )


def gradient_in(spec: RunSpec) -> torch.Tensor:
    trainer = trainer_of(spec)
    accumulate(trainer, microbatches(trainer))
    return torch.cat([local(each.grad).flatten().double() for each in trainer.parameters.values() if each.grad is not None])


def cosines(rank: int, preset: str, precisions: list[str]) -> dict[str, float]:
    wide = gradient_in(spec_of(preset, "fp32"))
    found = {precision: gradient_in(spec_of(preset, precision)) for precision in precisions}
    return {name: float(torch.nn.functional.cosine_similarity(wide, each, dim=0)) for name, each in found.items()}


@pytest.mark.slow
@sampled(3)
@pytest.mark.parametrize("preset", FAMILIES.values(), ids=FAMILIES)
def test_a_family_trains_in_every_precision_that_check_allows(preset: str) -> None:
    refused = {
        precision: [each.reason for each in check(spec_of(preset, precision), files=False) if each.severity == "error"]
        for precision in LEAST
    }
    assert all(all(reasons) for reasons in refused.values())
    allowed = [precision for precision, reasons in refused.items() if not reasons]
    assert {"bf16", "fp16", "fp8"} <= {*allowed}
    (found,) = run_ranks(cosines, 1, preset, allowed)
    assert all(cosine > LEAST[precision] for precision, cosine in found.items()), found


def test_all_precisions_are_tried() -> None:
    assert {*LEAST} == {*TRAINED} - {"fp32"}
