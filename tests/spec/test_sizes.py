"""Parameters computed without torch equal those of the real modules: names, shapes, order and counts, for every family and for
unusual blocks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megalith.models.block import Block
from megalith.models.mamba import CausalConv
from megalith.models.moe import Experts
from megalith.models.stage import Stage
from megalith.spec import sizes
from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RouterSpec,
)
from megalith.spec.presets import presets

Shapes = list[tuple[str, tuple[int, ...]]]


def stated(parameters: Any) -> Shapes:
    """Return names and shapes according to `spec.sizes`."""
    return [(each.name, each.shape) for each in parameters]


def made(module: nn.Module) -> Shapes:
    """Return the names and shapes of a module's parameters, including tied ones."""
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters(remove_duplicate=False)]


def agree(model: ModelSpec) -> None:
    """Assert that a model's sizes equal those of its modules, part by part and as a whole."""
    with torch.device("meta"):
        stage = Stage(model)
    for name, part in stage.parts():
        assert stated(sizes.part_parameters(model, name)) == made(part)
    whole = {name: tuple(parameter.shape) for name, parameter in stage.parameters_by_name().items()}
    assert dict(stated(sizes.model_parameters(model).values())) == whole
    assert sizes.count_model(model) == sizes.count(sizes.model_parameters(model).values())
    assert sizes.count_model(model).total == sum(parameter.numel() for parameter in stage.parameters_by_name().values())
    experts = [module for module in stage.modules() if isinstance(module, Experts)]
    assert sizes.count_model(model).experts == sum(p.numel() for module in experts for p in module.parameters())


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_the_parameters_that_its_sizes_state(name: str):
    """Each distinct block is built once, so that the largest models take a second."""
    model = presets()[name].build().build()
    blocks = tuple(dict.fromkeys(model.blocks))
    agree(model.model_copy(update={"blocks": blocks}))
    per_block = [sizes.count_block(block, model.dim).total for block in model.blocks]
    assert sizes.count_blocks(model).total == sum(per_block)


@pytest.mark.parametrize("name", presets())
def test_a_shrunk_preset_has_the_parameters_that_its_sizes_state(name: str):
    agree(presets()[name].build().small(3, 2, 2).build())


odd = st.integers(1, 9)
norms = st.builds(NormSpec, kind=st.sampled_from(["rms", "layer"]), bias=st.booleans(), offset=st.booleans())
attentions = st.builds(
    AttentionSpec, heads=odd, kv_heads=odd, head_dim=odd, bias=st.booleans(), qk_norm=st.sampled_from([None, 1e-6])
)
latents = st.builds(LatentAttentionSpec, heads=odd, q_rank=st.none() | odd, kv_rank=odd, nope_dim=odd, rope_dim=odd, v_dim=odd)
mambas = st.builds(
    lambda heads, groups, **rest: MambaSpec(heads=heads * groups, groups=groups, **rest),
    heads=odd, groups=odd, head_dim=odd, state=odd, conv=odd,
)  # fmt: skip
mlps = st.builds(MlpSpec, hidden=odd, gated=st.booleans(), bias=st.booleans())
moes = st.builds(
    lambda experts, active, **rest: MoeSpec(experts=experts + active, router=RouterSpec(active=active), **rest),
    experts=odd, active=odd, hidden=odd, shared=st.integers(0, 9), shared_gate=st.booleans(), gated=st.booleans(),
)  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn) -> BlockSpec:
    """Draw any valid block of odd sizes."""
    attention, mamba, mlp = draw(
        st.one_of(
            st.tuples(attentions | latents, st.none(), st.none() | mlps | moes),
            st.tuples(st.none(), mambas, st.none() | mlps | moes),
            st.tuples(st.none(), st.none(), mlps | moes),
        )
    )
    whole = bool(attention and mlp)
    return BlockSpec(
        attention=attention,
        mamba=mamba,
        mlp=mlp,
        norm=draw(norms),
        parallel=whole and draw(st.booleans()),
        post_norms=whole and draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Draw any valid model of up to three unusual blocks, with or without learned positions, tying and multi-token prediction."""
    vocab = draw(odd)
    ahead = draw(st.none() | st.builds(MtpSpec, depth=st.integers(1, 2), block=blocks()))
    return ModelSpec(
        name="odd",
        dim=draw(odd),
        context=8,
        embedding=EmbeddingSpec(vocab=vocab, positions=draw(st.none() | odd)),
        blocks=tuple(draw(st.lists(blocks(), min_size=1, max_size=3))),
        head=HeadSpec(vocab=vocab, tied=draw(st.booleans()), norm=draw(norms), ahead=ahead),
    )


@pytest.mark.slow
@given(models())
@settings(deadline=None, max_examples=100)
def test_any_model_has_the_parameters_that_its_sizes_state(model: ModelSpec):
    agree(model)


@pytest.mark.slow
@given(blocks(), odd)
@settings(deadline=None, max_examples=60)
def test_a_role_is_that_of_the_module(block: BlockSpec, dim: int):
    """Matrices are the weights of linear layers and routers, experts and filters have modules of their own, and the rest is flat."""
    with torch.device("meta"):
        built = Block(dim, block)
    for each in sizes.block_parameters(block, dim):
        path, _, _ = each.name.rpartition(".")
        module = built.get_submodule(path)
        expected = {1: "vector", 2: "filter" if isinstance(module, CausalConv) else "matrix", 3: "experts"}
        assert each.role == expected[len(each.shape)]
        assert (each.role == "experts") == isinstance(module, Experts)


@given(blocks(), odd)
@settings(deadline=None, max_examples=60)
def test_a_token_meets_all_but_the_experts_that_it_is_not_sent_to(block: BlockSpec, dim: int):
    found = sizes.count_active(block, dim)
    one = None if not isinstance(block.mlp, MoeSpec) else block.mlp.model_copy(update={"experts": block.mlp.router.active})
    if one is None:
        assert found == sizes.count_block(block, dim).total
    else:
        met = sizes.count_block(block.model_copy(update={"mlp": one}), dim)
        router = dim * (block.mlp.experts - one.experts) if isinstance(block.mlp, MoeSpec) else 0
        assert found == met.total + router


def test_of_what_is_tied_the_embedding_alone_is_counted():
    tied, free = (presets()["tiny"].build().model_copy(update={"tied": tied}).build() for tied in (True, False))
    assert sizes.count_model(free).total - sizes.count_model(tied).total == free.dim * free.head.vocab
