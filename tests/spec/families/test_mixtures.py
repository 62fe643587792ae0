"""Presets of mixtures of experts have the published sizes."""

import pytest
import torch

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.init import initialise
from megalith.models.moe import Moe
from megalith.models.stage import Stage
from megalith.spec.presets import presets

PUBLISHED = {  # billions: all parameters, and those that a token uses if they are published
    "mixtral-8x7b": (46.7, 12.9),  # mistral.ai, "Mixtral of experts"; arXiv:2401.04088 rounds both
    "mixtral-8x22b": (141, 39),  # mistral.ai, "Cheaper, better, faster, stronger"
    "qwen3-30b-a3b": (30.5, 3.3),  # model card
    "qwen3-235b-a22b": (235, 22),  # arXiv:2505.09388
    "nemotron3-nano-30b-a3b": (31.6, 3.6),  # arXiv:2512.20848, which counts embeddings as active
    "grok-1": (314, None),  # x.ai; it publishes only "25 % of the weights are active"
    "switch-base-128": (7.4, None),  # arXiv:2101.03961, table 9 and the released checkpoints; encoder and decoder, with 5 % more
    "switch-base-256": (14.7, None),  # attention in the smallest model, for which this is no test
    "switch-large-128": (26.3, None),
    "switch-xxl-128": (395, None),
    "switch-c-2048": (1571, None),
}


def billions(name: str) -> tuple[float, float]:
    """Return the number of all parameters, and of those that a token uses."""
    spec = presets()[name].build().build()
    ends = spec.embedding.vocab * spec.dim * (1 if spec.head.tied else 2) + spec.dim
    total = active = ends
    for block in set(spec.blocks):
        number, count = 1 + spec.blocks.index(block), spec.blocks.count(block)
        with torch.device("meta"):
            stage = Stage(spec, number, number + 1)
        every = sum(p.numel() for p in stage.parameters())
        idle = 0
        for moe in (m for m in stage.modules() if isinstance(m, Moe)):
            held = sum(p.numel() for p in moe.experts.parameters())
            experts = moe.experts.up.shape[0]
            idle += held * (experts - moe.router.spec.active) // experts
        total, active = total + count * every, active + count * (every - idle)
    return total / 1e9, active / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active = billions(name)
    all_of_them, used = PUBLISHED[name]
    assert total == pytest.approx(all_of_them, rel=0.01)
    if used is not None:
        digit = 10.0 ** -len(str(used).partition(".")[2])
        assert active == pytest.approx(used, abs=max(0.01 * used, 0.6 * digit))  # to one unit of the last digit printed


@pytest.mark.parametrize("name", [*PUBLISHED, "switch-base-8", "switch-base-16", "switch-base-32", "switch-base-64"])
def test_every_family_has_a_small_form_that_splits_divide(name: str) -> None:
    for unit in (2, 4, 6):
        spec = presets()[name].build().small(4, unit, unit).build()
        assert len(spec.blocks) == 4
        mlps = [block.mlp for block in spec.blocks if block.mlp]
        assert any(mlp.kind == "moe" for mlp in mlps)
        assert all(block.attention.heads % unit == 0 for block in spec.blocks if block.attention)
        assert all(mlp.hidden % unit == 0 for mlp in mlps)
        assert all(mlp.kind == "mlp" or mlp.experts % unit == 0 for mlp in mlps)


def test_switch_has_experts_in_every_second_block_and_drops_beyond_capacity() -> None:
    blocks = presets()["switch-base-8"].build().build().blocks
    assert [block.mlp.kind for block in blocks] == ["mlp", "moe"] * 12
    assert blocks[1].mlp.router.capacity == 1.25
    assert {block.mlp.kind for block in presets()["switch-c-2048"].build().build().blocks} == {"moe"}


@pytest.mark.parametrize(("name", "change", "told"), [
    ("mixtral-8x7b", {"active": 9}, "active = 9, but a layer has only 8 experts"),
    ("qwen3-30b-a3b", {"active": 200}, "active = 200, but a layer has only 128 experts"),
    ("grok-1", {"experts": 1}, "active = 2, but a layer has only 1 experts"),
    ("switch-base-8", {"every": 25}, "every = 25, but the model has only 24 layers"),
])  # fmt: skip
def test_sizes_that_contradict_each_other_are_refused(name: str, change: dict[str, int], told: str) -> None:
    sizes = presets()[name].build()
    with pytest.raises(ValueError, match=told):
        type(sizes).model_validate(sizes.model_dump() | change)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "grok-1", "switch-base-8", "nemotron-h-tiny"])
def test_every_weight_of_a_small_form_learns(name: str) -> None:
    spec = presets()[name].build().small(4, 2, 2).build()
    torch.manual_seed(0)
    stage = Stage(spec)
    for part_name, part in stage.parts():
        initialise(part, name=part_name, spec=spec, seed=0)
    tokens = torch.randint(spec.embedding.vocab, (4, 32))
    loss = stage(tokens, Batch(tokens, targets=tokens.roll(-1, 1), loss_scale=1 / tokens.numel(), sequences=4))
    assert isinstance(loss, Loss)
    loss.objective.backward()
    assert float(loss.nll) > 1
    for path, parameter in stage.parameters_by_name().items():
        assert parameter.grad is not None and parameter.grad.any(), path


def test_grok_caps_scores_and_scales_both_ends() -> None:
    spec = presets()["grok-1"].build().build()
    assert spec.embedding.scale == pytest.approx(spec.dim**0.5)
    assert spec.head.scale == pytest.approx(3**-0.5)
    (block,) = set(spec.blocks)
    assert (block.attention.softcap, block.post_norms, block.mlp.activation) == (30.0, True, "gelu_tanh")
