"""Mamba-2 in chunks equals the plain recurrence and transformers' layer, and documents of one row do not influence each other."""

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from megalith.models.batch import Batch
from megalith.models.mamba import CausalConv, Mamba, MambaCore, Rates, documents_of, ssd
from megalith.models.stage import Stage
from megalith.spec.model import BlockSpec, MambaSpec, MlpSpec
from megalith.spec.presets import presets
from tests.models.plain import lively, logits, stage, tokens_of

SPEC = MambaSpec(heads=4, head_dim=3, state=5, groups=2, chunk=4)
PIECES = ((7, 1, 11), (19,))


def draws(seq: int = 19, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, decay, b and c of two rows, four heads in two groups, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, seq, 4, 3), (2, seq, 4), (2, seq, 2, 5), (2, seq, 2, 5))
    x, decay, b, c = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, -decay.exp(), b, c


def recurrence(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, documents: Tensor | None = None) -> Tensor:
    """Compute the definition, one token after the other."""
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (b, c))
    h, out = x.new_zeros(*x[:, 0].shape, b.shape[-1]), []
    for t in range(x.shape[1]):
        if documents is not None and t:
            h = h * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        h = h * decay[:, t].exp()[..., None, None] + x[:, t, :, :, None] * b[:, t, :, None]
        out.append((h * c[:, t, :, None]).sum(-1))
    return torch.stack(out, dim=1)


def mamba(*, seed: int = 0, dtype: torch.dtype = torch.float64, spec: MambaSpec = SPEC, dim: int = 6) -> Mamba:
    made = Mamba(dim, spec).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5)
    return made


def inputs(rows: int = 2, seq: int = 19, dim: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, seq, dim, generator=torch.Generator().manual_seed(7), dtype=dtype), torch.zeros(rows, seq).long()


@pytest.mark.parametrize("chunk", [1, 3, 4, 19, 64])
@pytest.mark.parametrize("segments", [None, PIECES, ((4, 4, 4, 4, 3), (1,) * 19)], ids=["one document", "some", "at every chunk"])
def test_chunks_are_the_recurrence(chunk: int, segments: tuple | None) -> None:
    documents = None if segments is None else documents_of(segments, torch.device("cpu"))
    found = ssd(*draws(), chunk=chunk, documents=documents)
    expected = recurrence(*draws(), documents)
    assert expected.std() > 0.3
    assert (found - expected).abs().max() <= 1e-10


def test_strong_decay_neither_overflows_nor_gives_nan() -> None:
    x, decay, b, c = (each.requires_grad_() for each in draws())
    out = ssd(x.float(), decay.float() * 1e4, b.float(), c.float(), chunk=8)
    out.sum().backward()
    for each in (out, x.grad, decay.grad, b.grad, c.grad):
        assert each is not None and each.isfinite().all()


@pytest.mark.parametrize("segments", [None, ((2, 3), (5,))], ids=["one document", "some"])
def test_gradients_are_those_of_finite_differences(segments: tuple | None) -> None:
    layer, (x, tokens) = mamba(spec=SPEC.model_copy(update={"chunk": 2})), inputs(seq=5)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, Batch(tokens, segments=segments)))  # pyright: ignore[reportReturnType]

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *layer.parameters()), fast_mode=True)


def test_no_token_sees_a_later_one() -> None:
    layer, (x, tokens) = mamba(), inputs()
    changed = x.clone()
    changed[:, 11:] += 1
    before, after = layer(x, Batch(tokens)), layer(changed, Batch(tokens))
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.equal(before[:, 11:], after[:, 11:])


def test_documents_of_a_row_are_as_if_alone() -> None:
    layer, (x, tokens) = mamba(), inputs()
    together = layer(x, Batch(tokens, segments=PIECES))
    starts = [0, 7, 8]
    for start, length in zip(starts, PIECES[0], strict=True):
        part = slice(start, start + length)
        alone = layer(x[:1, part], Batch(tokens[:1, part]))
        assert (together[:1, part] - alone).abs().max() <= 1e-12
    assert (together[1] - layer(x, Batch(tokens))[1]).abs().max() <= 1e-12
    assert not torch.allclose(together[0], layer(x, Batch(tokens))[0])


@pytest.mark.parametrize(("groups", "chunk"), [(1, 256), (2, 8), (4, 8)])
def test_the_layer_is_that_of_transformers(groups: int, chunk: int) -> None:
    spec = MambaSpec(heads=4, head_dim=8, state=16, groups=groups, chunk=chunk)
    ours, (x, tokens) = mamba(spec=spec, dim=16, dtype=torch.float32), inputs(seq=24, dim=16, dtype=torch.float32)
    config = Mamba2Config(
        num_heads=4, head_dim=8, hidden_size=16, state_size=16, expand=2, n_groups=groups, chunk_size=chunk, num_hidden_layers=1,
        layer_norm_epsilon=1e-5, use_bias=False, time_step_limit=(0.0, float("inf")),
    )  # fmt: skip
    theirs = Mamba2Mixer(config, 0)
    core = ours.core
    assert isinstance(core, MambaCore)
    convs = (core.conv_x, core.conv_b, core.conv_c)
    weights = {
        "in_proj.weight": torch.cat([layer.weight for layer in (ours.gate, ours.x, ours.b, ours.c, ours.step)]),
        "conv1d.weight": torch.cat([conv.weight for conv in convs]).unsqueeze(1),
        "conv1d.bias": torch.cat([conv.bias for conv in convs]),
        "A_log": core.rates.decay, "dt_bias": core.rates.step, "D": core.rates.skip, "norm.weight": core.norm.weight,
        "out_proj.weight": ours.out.weight,
    }  # fmt: skip
    theirs.load_state_dict(weights)
    expected = theirs(x)
    assert expected.std() > 0.1
    assert (ours(x, Batch(tokens)) - expected).abs().max() <= 2e-5


def test_the_norm_is_of_each_group_alone() -> None:
    """So tensor ranks with some of the groups compute the same as one rank."""
    whole, (x, tokens) = mamba(), inputs()
    half = SPEC.model_copy(update={"heads": 2, "groups": 1})
    halves = [mamba(spec=half), mamba(spec=half)]
    for rank, part in enumerate(halves):
        for name, parameter in part.named_parameters():
            theirs = whole.get_parameter(name)
            dim = next((d for d in range(theirs.dim()) if theirs.shape[d] != parameter.shape[d]), None)
            assert dim is not None, name
            parameter.data.copy_(theirs.chunk(2, dim)[rank])
    total = sum(part(x, Batch(tokens)) for part in halves)
    assert (total - whole(x, Batch(tokens))).abs().max() <= 1e-12


def test_first_weights_are_those_of_its_own_code() -> None:
    made = stage(presets()["nemotron-h-tiny"].build())
    rates = [module for module in made.modules() if isinstance(module, Rates)]
    decay, step = (torch.cat([getattr(each, name) for each in rates]) for name in ("decay", "step"))
    assert 0 <= decay.min() < decay.max() <= torch.tensor(16.0).log()
    sizes = torch.nn.functional.softplus(step)
    assert sizes.min() * 1.001 >= 0.001 and sizes.max() <= 0.1 * 1.001
    assert all(each.skip.eq(1).all() for each in rates)
    for conv in (module for module in made.modules() if isinstance(module, CausalConv)):
        assert 0.3 < conv.weight.abs().max() <= 0.5 and conv.weight.std() > 0.2


def test_a_hybrid_is_made_of_halves() -> None:
    model = presets()["nemotron-h-tiny"].build().build()
    halves = [[name for name in ("attention", "mamba", "mlp") if getattr(block, name)] for block in model.blocks]
    assert halves == [["mamba"], ["mlp"], ["mamba"], ["attention"], ["mlp"], ["mlp"]]


@pytest.mark.parametrize(("given", "told"), [
    ({"mamba": SPEC, "attention": {"kind": "attention", "heads": 1, "kv_heads": 1, "head_dim": 8}}, "a block has one mixer"),
    ({}, "the block is empty"),
    ({"mamba": SPEC, "mlp": MlpSpec(hidden=8), "parallel": True}, "parallel and post_norms need a block"),
])  # fmt: skip
def test_what_makes_no_block_is_refused(given: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        BlockSpec.model_validate(given)


def test_documents_of_a_whole_hybrid_are_as_if_alone() -> None:
    spec = presets()["nemotron-h-tiny"].build().small(6, 1, 1)
    model: Stage = lively(spec, spread=0.1)
    tokens = tokens_of(spec, batch=1, seq=19)
    with torch.no_grad():
        together = logits(model, tokens, segments=((7, 12),))
        assert (together[:, 7:] - logits(model, tokens[:, 7:])).abs().max() <= 1e-4
        assert (together[:, 7:] - logits(model, tokens)[:, 7:]).abs().max() > 1e-2
