"""Parts of blocks that keep their tensors in 8 bits: bytes, errors, and the same numbers under every plan."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.kernels.kept import Packed
from megalith.kernels.packed import width_of
from megalith.models.batch import Batch
from megalith.models.block import Attention, Block
from megalith.parallel.compressed import CompressedAttention
from megalith.parallel.recompute import apply_actions
from megalith.prove.axes import ParityCase
from megalith.prove.parity import shrink
from megalith.prove.prove import prove
from megalith.spec.model import AttentionSpec, BlockSpec, MlpSpec, MoeSpec, NormSpec, RouterSpec
from megalith.spec.plan import Action
from megalith.spec.run import RunSpec
from megalith.train.step import train_step
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run

COMPRESS = {"parts": {"attention.core": "compress"}}
ALL = {"parts": {"attend": "compress", "mlp": "compress"}}
BATCH, SEQ, DIM, HEADS, KV_HEADS, CHANNELS = 2, 64, 64, 4, 2, 32
TILE = 16


def _attention(std: float = 0.1) -> Attention:
    torch.manual_seed(0)
    made = Attention(DIM, AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, rope=None))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=std)
    return made.to(torch.bfloat16)


def _gradients(part: nn.Module, segments: Any = None) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return output, gradients, and the bytes that wait between forward and backward, of all memory once, without weights and input."""
    torch.manual_seed(1)
    x, grad = (torch.randn(BATCH, SEQ, DIM, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    others = {tensor.untyped_storage().data_ptr() for tensor in (x, *part.parameters())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in others:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = part(x * 1, Batch(torch.zeros(BATCH, SEQ, dtype=torch.long), segments=segments))
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), {"x": x.grad} | {name: p.grad for name, p in part.named_parameters() if p.grad is not None}, size


def _compressed(std: float = 0.1) -> Attention:
    attention = _attention(std)
    CompressedAttention.replace(attention, Packed(TILE))
    return attention


@pytest.mark.parametrize("segments", [None, ((24, 40), (64,))], ids=["one document", "documents"])
@pytest.mark.parametrize(("std", "limit"), [(0.1, 0.07), (0.2, 0.18)], ids=["scores of 0.6", "scores of 2.6"])
def test_forward_keeps_its_bits_and_gradients_err_as_the_guide_says(std: float, limit: float, segments: Any) -> None:
    """E4M3 has three bits after the first: a number errs by 1/16 at most, 2.6 % on average. The last weight's gradient errs so, whatever
    the scores. Larger scores have larger errors, and the other gradients inherit them."""
    (out, exact, _), (same, found, _) = _gradients(_attention(std), segments), _gradients(_compressed(std), segments)
    assert torch.equal(out, same)
    errors = {name: float((found[name] - exact[name]).float().norm() / exact[name].float().norm()) for name in exact}
    assert errors["out.weight"] == pytest.approx(0.027, abs=0.004)
    assert all(0 < error < limit for error in errors.values()), errors


def test_what_waits_is_a_byte_a_number_and_the_scales() -> None:
    """The output is kept once, for attention and for the weight after it. The projections keep their input."""
    (*_, wide), (*_, packed) = _gradients(_attention()), _gradients(_compressed())
    rows = BATCH * SEQ * (2 * HEADS + 2 * KV_HEADS)
    others = 4 * BATCH * SEQ * HEADS + 2 * BATCH * SEQ * DIM
    assert wide == 2 * CHANNELS * rows + others
    assert packed == width_of(CHANNELS, Packed(TILE).scaling) * rows + others


HIDDEN, ACTIVE, SHARED = 96, 2, 48
TOKENS = BATCH * SEQ
SHORT = 1 + 4 / TILE
"""Bytes of a number in 8 bits, with its part of a scale."""

DENSE = BlockSpec(
    attention=AttentionSpec(heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, rope=None), mlp=MlpSpec(hidden=HIDDEN)
)
EXPERTS = BlockSpec(
    mlp=MoeSpec(experts=4, hidden=HIDDEN, shared=SHARED, router=RouterSpec(active=ACTIVE)), norm=NormSpec(kind="layer")
)
CORE = CHANNELS * (2 * HEADS + 2 * KV_HEADS)
SPARED: dict[str, tuple[BlockSpec, dict[str, Action], float]] = {
    "a norm": (DENSE, {"attention_norm": "compress"}, DIM * (2 - SHORT)),
    "both norms": (DENSE, {"attention_norm": "compress", "mlp_norm": "compress"}, 2 * DIM * (2 - SHORT)),
    "attention": (DENSE, {"attention": "compress"}, (DIM + CORE) * (2 - SHORT)),
    "projections": (DENSE, {"attention": "compress", "attention.core": "keep"}, DIM * (2 - SHORT)),
    "the first half": (DENSE, {"attend": "compress"}, (3 * DIM + CORE) * (2 - SHORT)),
    "an activation": (DENSE, {"mlp.activation": "compress"}, HIDDEN * (8 - 3 * SHORT)),
    "an MLP": (DENSE, {"mlp": "compress"}, DIM * (2 - SHORT) + HIDDEN * (8 - 3 * SHORT)),
    "an MLP but its activation": (DENSE, {"mlp": "compress", "mlp.activation": "keep"}, DIM * (2 - SHORT)),
    "an MLP, its activation again": (DENSE, {"mlp": "compress", "mlp.activation": "recompute"}, DIM * (2 - SHORT) + HIDDEN * 4),
    "experts": (EXPERTS, {"mlp.experts": "compress"}, ACTIVE * (DIM * (2 - SHORT) + HIDDEN * (8 - 3 * SHORT))),
    "experts' activations": (EXPERTS, {"mlp.experts.activation": "compress"}, ACTIVE * HIDDEN * (8 - 3 * SHORT)),
    "experts but activations": (EXPERTS, {"mlp.experts": "compress", "mlp.activation": "keep"}, ACTIVE * DIM * (2 - SHORT)),
    "experts, activations again": (
        EXPERTS,
        {"mlp.experts": "compress", "mlp.experts.activation": "recompute"},
        ACTIVE * (DIM * (2 - SHORT) + HIDDEN * 4),
    ),
    "a shared expert's activation, and a layer norm": (
        EXPERTS,
        {"mlp.activation": "compress", "mlp.experts.activation": "keep", "mlp_norm": "compress"},
        SHARED * (8 - 3 * SHORT) + DIM * (2 - SHORT),
    ),
}


def _block(spec: BlockSpec, actions: dict[str, Action]) -> Block:
    torch.manual_seed(0)
    made = Block(DIM, spec)
    for name, weight in made.named_parameters():
        torch.nn.init.ones_(weight) if "norm" in name else torch.nn.init.normal_(weight, std=0.1)
    made = made.to(torch.bfloat16)
    apply_actions(made, actions, Packed(TILE))
    return made


@pytest.mark.parametrize("name", SPARED)
def test_each_part_keeps_its_forward_and_spares_its_bytes(name: str) -> None:
    """Each number errs by 1/16 at most, so gradients err by a few per cent."""
    spec, actions, spared = SPARED[name]
    (out, exact, wide), (same, found, packed) = _gradients(_block(spec, {})), _gradients(_block(spec, actions))
    assert torch.equal(out, same)
    assert wide - packed == TOKENS * spared
    errors = {each: float((found[each] - exact[each]).float().norm() / exact[each].float().norm()) for each in exact}
    assert 0 < max(errors.values()) < 0.1, errors


def test_without_gradients_nothing_is_held() -> None:
    attention = _compressed()
    with torch.no_grad():
        attention(torch.randn(BATCH, SEQ, DIM, dtype=torch.bfloat16), Batch(torch.zeros(BATCH, SEQ, dtype=torch.long)))
    compressed = attention.forward
    assert isinstance(compressed, CompressedAttention) and not compressed._known and compressed._out is None


# --- under plans ---


def run_of(plan: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> RunSpec:
    plan = plan | {"retain": COMPRESS | plan.get("retain", {})}  # a plan's own parts take the place of these
    return brief_run(plan=plan, model=model or {}, train={"precision": "bf16"} | train)


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor, on the host": ({"tensor": 2, "retain": {"blocks": "host"}}, {}),
    "tensor in pieces": ({"tensor": 2, "sequence": False, "overlap_tensor": 2}, {}),
    "ring, zero 3": ({"context": 2, "zero": 3}, {}),
    "gather": ({"context": 2, "context_method": "gather"}, {}),
    "ulysses": ({"context": 2, "ulysses": 2}, {}),
    "pipeline, backward split in two": ({"pipeline": 2, "schedule": "zb-v", "chunks": 2, "zero": 2}, {}),
    "all, tensor, on the host": ({"tensor": 2, "retain": ALL | {"blocks": "host"}}, {}),
    "all, ring, zero 3, blocks again": ({"context": 2, "zero": 3, "recompute": "every:2", "retain": ALL}, {}),
    "all but parts, pipeline": (
        {"pipeline": 2, "retain": {"parts": {"attend": "compress", "attention.core": "keep", "mlp.activation": "compress"}}},
        {},
    ),
    "all, experts, parts of them": (
        {
            "data": 2,
            "expert": 2,
            "retain": {"parts": {"attend": "compress", "mlp": "compress", "mlp.experts.activation": "recompute"}},
        },
        {"preset": "deepseek-tiny"},
    ),
    "experts, latents, parts again": (
        {"data": 2, "expert": 2, "recompute": "selective", "recompute_parts": ["attention.up", "mlp.experts"]},
        {"preset": "deepseek-tiny"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@sampled(2)
def test_a_plan_trains_like_one_process(name: str) -> None:
    proof = prove(ParityCase((), shrink(run_of(*PLANS[name]), steps=2)), references={})
    assert proof.outcome == "equal", proof


def _weights(rank: int, specs: list[RunSpec]) -> list[dict[str, Tensor]]:
    """Return this rank's weights and moments after two steps of each run."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        for step in range(2):
            train_step(trainer, microbatches(trainer, step), step=step)
        found.append({name: share.clone() for name, share in trainer.state.shares().items()})
    return found


@pytest.mark.slow
def test_where_short_numbers_wait_and_which_blocks_run_again_changes_no_bit() -> None:
    """A block that runs again rounds what the others round."""
    plans = ({}, {"blocks": "host"}, {"recompute": "every:2"}, {"parts": ALL["parts"] | {"mlp.shared": "compress"}})
    runs = [run_of({"retain": ALL | plan} if "recompute" not in plan else plan | {"retain": ALL}) for plan in plans]
    kept, *others = run_ranks(_weights, 1, runs)[0]
    assert all(torch.equal(other[name], kept[name]) for other in others for name in kept)
    (wide,) = run_ranks(_weights, 1, [brief_run(plan={}, train={"precision": "bf16"})])[0]
    assert any(not torch.equal(wide[name], kept[name]) for name in kept)


def _losses(rank: int, specs: list[RunSpec]) -> list[list[float]]:
    """Return the losses of each run, which reads the same few samples again and again."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        found.append([train_step(trainer, microbatches(trainer, step % 4), step=step).loss for step in range(spec.train.steps)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("retain", [COMPRESS, ALL], ids=["attention", "all parts"])
@sampled(1)
def test_the_loss_falls_as_it_does_with_wide_tensors(retain: dict[str, Any]) -> None:
    """The first loss has the same bits, since forward does not change. Later the gap is small beside what the loss has lost."""
    kept = run_of({"retain": retain}, steps=160)
    plain = kept.model_copy(update={"plan": kept.plan.model_copy(update={"retain": type(kept.plan.retain)()})})
    wide, found = run_ranks(_losses, 1, [plain, kept])[0]
    assert found[0] == wide[0] and found[1:] != wide[1:]
    fallen = wide[0] - sum(wide[-8:]) / 8
    assert fallen > 0.3
    assert abs(sum(found[-8:]) - sum(wide[-8:])) / 8 < 0.02 * fallen


def _held(rank: int, specs: list[RunSpec]) -> list[tuple[float, int]]:
    """Return the loss of a step of each run, and the most bytes that wait on the host."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        found.append((train_step(trainer, microbatches(trainer, 0), step=0).loss, trainer.tiers["host"].counted.most))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler
def test_attention_and_norms_of_compiled_blocks_keep_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend="aot_eager"))
    named = {"attention.core": "compress", "attention_norm": "compress", "mlp_norm": "compress"}
    retain = [{"blocks": "host", "parts": parts} for parts in ({}, named)]
    runs = [brief_run(plan={"compile": True, "retain": one}, model={"layers": 1}, train={"precision": "bf16"}) for one in retain]
    (wide, most), (short, less) = run_ranks(_held, 1, runs)[0]
    assert short == pytest.approx(wide, rel=1e-3)
    tokens, dim, vectors, channels = 32, 32, 12, 8  # a scale for each norm, query, key, value and output of a head
    wide_row, short_row = 2 * (2 * dim + vectors * channels), 2 * (dim + 4) + vectors * (channels + 4)
    assert most - less >= tokens * (wide_row - short_row) > 0
