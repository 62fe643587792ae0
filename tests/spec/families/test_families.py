"""The families of models that `[model]` can describe."""

import pytest
from pydantic import ValidationError

from megalith.spec import families
from megalith.spec.families import FAMILIES, Model, family_of
from megalith.spec.families.common import few_heads
from megalith.spec.families.llama import Llama
from megalith.spec.model import AttentionSpec, MlpSpec, ModelSpec, MoeSpec
from megalith.spec.presets import presets

COMMON = {"family", "name", "layers", "dim", "vocab", "context", "tied", "init_std"}
ONE_EACH = {preset.values["family"]: name for name, preset in reversed(presets().items())}
every_family = pytest.mark.parametrize("model", [presets()[name].build() for name in ONE_EACH.values()], ids=ONE_EACH)


def test_every_family_has_a_preset_and_the_common_sizes():
    assert set(ONE_EACH) == set(FAMILIES)
    for name, spec in FAMILIES.items():
        assert spec.model_fields.keys() >= COMMON, name
        assert spec.model_fields["family"].default == name


def test_a_model_that_does_not_say_is_a_llama():
    sizes = {"layers": 1, "dim": 8, "heads": 1, "ffn": 8, "vocab": 8}
    assert families.read(sizes) == Llama(**sizes)
    assert family_of(sizes) == family_of(Llama(**sizes)) == family_of(3) == "llama"


def test_an_unknown_family_is_refused():
    with pytest.raises(ValidationError, match="tag 'lama'"):
        families.read({"family": "lama"})


@every_family
def test_a_model_is_read_back_from_its_plain_values(model: Model):
    assert families.read(model.model_dump(mode="json")) == model


@every_family
def test_a_model_is_as_deep_and_wide_as_its_sizes_say(model: Model):
    built = model.build()
    assert (len(built.blocks), built.dim, built.context, built.name) == (model.layers, model.dim, model.context, model.name)
    assert (built.embedding.vocab, built.head.vocab, built.head.tied) == (model.vocab, model.vocab, model.tied)


@every_family
@pytest.mark.parametrize(("layers", "unit", "heads_unit"), [(2, 1, 1), (5, 24, 3), (8, 4, 4)])
def test_a_shrunk_model_divides_evenly(model: Model, layers: int, unit: int, heads_unit: int):
    small = model.small(layers, unit, heads_unit)
    built = small.build()
    assert type(small) is type(model)
    assert len(built.blocks) == layers
    assert (small.dim % unit, small.vocab % unit) == (0, 0)
    for block in built.blocks:
        assert block.attention is None or block.attention.heads % heads_unit == 0
        assert block.mamba is None or block.mamba.groups % heads_unit == block.mamba.heads % block.mamba.groups == 0
        if isinstance(block.attention, AttentionSpec):
            kv_heads = block.attention.kv_heads
            assert kv_heads % heads_unit == 0 or heads_unit % kv_heads == 0
            assert block.attention.heads % block.attention.kv_heads == 0
        if isinstance(block.mlp, MlpSpec):
            assert block.mlp.hidden % unit == 0
        elif block.mlp is not None:
            assert block.mlp.experts % 4 == 0
            assert block.mlp.hidden % unit == block.mlp.shared % unit == 0


def structure(model: ModelSpec) -> set[tuple]:
    """Return everything about a model except its sizes: the set of its kinds of blocks, and the functions of its ends."""
    kinds = set()
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        of_attention: tuple = (attention and attention.kind, block.mamba is not None)
        if isinstance(attention, AttentionSpec):
            switches = (
                attention.rope,
                attention.rope_dim,
                attention.qk_norm,
                attention.window,
                attention.softcap,
                attention.alibi or None,
            )
            grouped = "one" if attention.kv_heads == 1 else attention.kv_heads < attention.heads
            of_attention = (attention.kind, attention.bias, grouped, *(switch is not None for switch in switches))
        of_mlp: tuple = () if mlp is None else (mlp.kind, mlp.activation, mlp.gated)
        if isinstance(mlp, MoeSpec):
            router = mlp.router
            of_mlp += (mlp.shared > 0, mlp.shared_gate, router.scores, router.normalise, router.groups > 1, router.bias_rate > 0)
            of_mlp += (router.capacity is not None, router.balance_set, router.balance_weight > 0)
        kinds.add((of_attention, of_mlp, block.norm, block.parallel, block.post_norms))
    embedding, head = model.embedding, model.head
    scaled = (embedding.scale != 1, head.scale != 1, head.softcap is not None)
    return kinds | {(embedding.positions is not None, embedding.norm, *scaled, head.tied, head.norm, head.ahead is not None)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "small"), [(8, 2, 4, 2), (8, 4, 4, 4), (8, 8, 4, 4), (8, 1, 4, 1), (8, 4, 2, 2), (12, 6, 4, 4)]
)
def test_a_shrunk_model_has_ranks_share_heads_of_keys_where_the_model_has(heads: int, kv_heads: int, ranks: int, small: int):
    sizes = few_heads(heads, kv_heads, unit=ranks)
    assert (sizes["kv_heads"], sizes["heads"] % ranks, sizes["heads"] > sizes["kv_heads"]) == (small, 0, heads > kv_heads)


@every_family
def test_a_shrunk_model_keeps_what_makes_the_family(model: Model):
    assert structure(model.small(4, 1, 2).build()) == structure(model.build())


@every_family
def test_tokens_can_be_dealt_out_evenly_wherever_there_are_experts(model: Model):
    """For benchmarks, `model.balanced = true` in a run file reaches every router, also those of multi-token prediction."""
    built = model.build()
    routed = any(isinstance(block.mlp, MoeSpec) for block in built.blocks)
    assert ("balanced" in type(model).model_fields) == routed
    if routed:
        dealt = families.read(model.model_dump() | {"balanced": True}).build()
        blocks = [*dealt.blocks, *([dealt.head.ahead.block] if dealt.head.ahead else [])]
        assert all(block.mlp.router.balanced for block in blocks if isinstance(block.mlp, MoeSpec))
        assert dealt != built
