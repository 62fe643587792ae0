"""A parametrization equals the standard one at the base sizes, and scales by its rules elsewhere."""

import pytest

from megalith.spec.families import FAMILIES, read
from megalith.spec.families.parametrization import ParametrizedSpec, is_hidden
from megalith.spec.model import ModelSpec
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.presets import presets
from megalith.spec.run import OptimizerSpec
from megalith.spec.sizes import model_parameters
from megalith.spec.treatment import treatments
from tests.specs import tiny_run


def model(preset: str = "tiny", **changes) -> ModelSpec:
    return read(presets()[preset].values | changes).build()


def test_every_family_has_one():
    assert all(issubclass(family, ParametrizedSpec) for family in FAMILIES.values())


@pytest.mark.parametrize("preset", ["tiny", "gemma2-2b", "mixtral-8x7b", "palm-8b"])
def test_at_the_base_it_is_the_standard_one(preset: str):
    usual = model(preset)
    base = {"base_dim": usual.dim, "base_layers": len(usual.blocks)}
    optimizer = OptimizerSpec()
    for kind in ("mup", "completep"):
        found = model(preset, parametrization=kind, **base)
        assert found.head == usual.head and found.blocks == usual.blocks
        assert treatments(found, optimizer) == treatments(usual, optimizer)


def test_multipliers_follow_the_sizes():
    usual, found = model(), model(parametrization="completep", base_dim=32, base_layers=2, base_head_dim=4)
    width, depth = usual.dim / 32, len(usual.blocks) / 2
    assert found.head.scale == usual.head.scale / width and found.scaling.width == width and found.scaling.depth == depth
    (block,) = set(found.blocks)
    assert block.residual == 1 / depth
    assert block.attention is not None and block.attention.kind == "attention"
    assert block.attention.scale == pytest.approx(4**0.5 / block.attention.head_dim)
    assert model(parametrization="mup", base_dim=32).blocks[0].residual == 1.0, "mup knows no depth"


@pytest.mark.parametrize("kind", [kind for kind, row in OPTIMIZERS.items() if row.width is not None])
def test_only_hidden_matrices_learn_more_slowly(kind: str):
    usual, found = model("mixtral-8x7b"), model("mixtral-8x7b", parametrization="completep", base_dim=1024, base_layers=16)
    optimizer = OptimizerSpec(kind=kind, weight_decay=0.1)
    before, after = treatments(usual, optimizer), treatments(found, optimizer)
    hidden = {name for name, each in model_parameters(usual).items() if is_hidden(each)}
    assert {"blocks.3.mlp.experts.up", "blocks.0.attention.q.weight", "blocks.0.mlp.router.weight"} <= hidden
    assert not hidden & {"embedding.weight", "head.output.weight", "head.norm.weight", "blocks.0.mlp_norm.weight"}
    for name, was in before.items():
        now, factor = after[name], 4.0 ** (OPTIMIZERS[was.kind].width or 0) if name in hidden else 1.0
        assert now.lr == was.lr * factor, name
        assert now.weight_decay * now.lr == pytest.approx(was.weight_decay * was.lr), "a decay takes the same share of a weight"
        assert now.eps == (0.125 if name.startswith("blocks.") else 0.25), name


def test_a_run_that_asks_for_none_has_none():
    assert tiny_run().model.build().scaling.width == 1.0
