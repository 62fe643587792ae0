"""DeepSeek's presets have the published sizes, and contradictory sizes are named."""

import pytest
import torch
from pydantic import ValidationError

from megalith.models.stage import Stage
from megalith.spec.families.deepseek import DeepSeek
from megalith.spec.model import LatentAttentionSpec, MlpSpec, MoeSpec, YarnScaling
from megalith.spec.presets import presets
from tests.models.deepseek import SIZES, deepseek

PUBLISHED = {  # all parameters and those that a token uses, without multi-token prediction; in the printed digits
    "deepseek-v2": (236e9, 21e9),
    "deepseek-v2-lite": (15.7e9, 2.4e9),
    "deepseek-v3": (671e9, 37e9),
    "kimi-k2": (1.026e12, 32.6e9),  # all parameters of the released weights; the paper prints 1.04 T
}
SHARED_TABLES = {"deepseek-v2": 1, "deepseek-v2-lite": 1, "deepseek-v3": 1, "kimi-k2": 0}  # tables that do not count as used


def preset(name: str) -> DeepSeek:
    spec = presets()[name].build()
    assert isinstance(spec, DeepSeek)
    return spec


def counted(spec: DeepSeek) -> tuple[int, int]:
    """Return the number of all parameters of the modules, and of those that a token uses."""
    with torch.device("meta"):
        model = Stage(spec.build())
    total = used = 0
    for name, parameter in model.parameters_by_name().items():
        if not name.startswith("head.ahead."):
            total += parameter.numel()
            used += parameter.numel() * spec.active // spec.experts if ".experts." in name else parameter.numel()
    return total, used


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    spec, (all_printed, used_printed) = preset(name), PUBLISHED[name]
    total, used = counted(spec)
    used -= SHARED_TABLES[name] * spec.vocab * spec.dim  # DeepSeek leaves the embedding's table out
    assert total == pytest.approx(all_printed, rel=0.01)
    digits = 0.05e9 if used_printed < 10e9 else 0.5e9  # the error of rounding to the printed digits
    assert abs(used - used_printed) <= max(0.01 * used_printed, digits) + 0.005e9


def test_the_tiny_preset_has_all_of_v3_s_parts():
    model = preset("deepseek-tiny").build()
    kinds = [type(block.mlp) for block in model.blocks]
    assert kinds == [MlpSpec, MoeSpec, MoeSpec, MoeSpec]
    assert model.head.ahead is not None and isinstance(model.head.ahead.block.mlp, MoeSpec)
    assert all(isinstance(block.attention, LatentAttentionSpec) for block in model.blocks)
    assert counted(preset("deepseek-tiny"))[0] < 2e6


def test_v2_and_v3_choose_experts_in_their_own_ways():
    v2, v3 = (preset(name).build().blocks[-1].mlp for name in ("deepseek-v2", "deepseek-v3"))
    assert isinstance(v2, MoeSpec) and isinstance(v3, MoeSpec)
    assert (v2.router.scores, v2.router.group_score, v2.router.normalise, v2.router.bias_rate) == ("softmax", "max", False, 0.0)
    assert (v3.router.scores, v3.router.group_score, v3.router.normalise, v3.router.bias_rate) == ("sigmoid", "top2", True, 0.001)
    assert (v2.shared, v3.shared) == (2 * 1536, 2048)


def test_a_run_file_may_say_yarn():
    scaling = {"kind": "yarn", "factor": 4.0, "original_context": 16}
    spec = DeepSeek.model_validate(SIZES | {"rope_scaling": scaling})
    assert spec.rope_scaling == YarnScaling(factor=4.0, original_context=16)
    attention = spec.build().blocks[0].attention
    assert isinstance(attention, LatentAttentionSpec) and attention.rope.scaling == spec.rope_scaling


@pytest.mark.parametrize("name", [*PUBLISHED, "deepseek-tiny"])
@pytest.mark.parametrize(("layers", "unit", "heads_unit"), [(1, 1, 1), (4, 8, 2), (6, 6, 3)])
def test_a_small_one_is_valid_and_divides_evenly(name, layers, unit, heads_unit):
    large = preset(name)
    small = large.small(layers, unit, heads_unit)
    DeepSeek.model_validate(small.model_dump())  # `small` copies without checking
    assert small.layers == len(small.build().blocks) == layers
    assert not [size for size in (small.dim, small.ffn, small.expert_ffn, small.vocab, small.experts) if size % unit]
    assert small.heads % heads_unit == 0
    assert small.dense_layers < layers and (small.q_rank is None) == (large.q_rank is None)
    assert (small.scores, small.group_score, small.ahead) == (large.scores, large.group_score, large.ahead)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dense_layers": 4}, "dense_layers = 4, but the model has only 3 layers"),
        ({"rope_dim": 5}, "rope_dim = 5 is odd"),
        ({"groups": 3}, "groups = 3 does not divide experts = 8"),
        ({"groups": 2, "active_groups": 3}, "active_groups = 3, but there are only 2 groups"),
        ({"groups": 4, "active_groups": 1}, "active = 3, but the groups that a token may use have only 2 experts"),
        ({"groups": 8, "active_groups": 8}, "needs two experts in a group"),
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other_are_named(sizes, reason):
    with pytest.raises(ValidationError, match=reason):
        deepseek(**sizes)


def test_all_contradictions_are_named_at_once():
    with pytest.raises(ValidationError, match=r"dense_layers = 4, .*; rope_dim = 5"):
        deepseek(dense_layers=4, rope_dim=5)
