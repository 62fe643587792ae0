"""Recomputation runs the policy's blocks again, changes no bit, and saves bytes."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import check
from megalith.kernels.deferred import Queue, deferring
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.parallel.recompute import FORMED, apply_recompute
from megalith.prove.dryrun import dryrun
from megalith.spec.families.deepseek import DeepSeek
from megalith.spec.families.llama import Llama
from megalith.spec.plan import Plan, recomputed
from tests.models.deepseek import deepseek
from tests.models.plain import llama, stage, tokens_of
from tests.specs import tiny_run

LAYERS = 9
SPEC = llama(layers=LAYERS)
PLANS = {
    "none": Plan(),
    "selective": Plan(recompute="selective"),
    "selective mlp": Plan(recompute="selective", recompute_parts=("attention.core", "mlp")),
    "selective activation": Plan(recompute="selective", recompute_parts=("attention.core", "mlp.activation")),
    "full": Plan(recompute="full"),
    "every:2": Plan(recompute="every:2"),
    "every:4": Plan(recompute="every:4"),
}


def under(plan: Plan, spec: Llama | DeepSeek = SPEC) -> Stage:
    model = stage(spec)
    for number, block in model.blocks.items():
        apply_recompute(block, int(number), blocks=spec.layers, plan=plan)
    return model


def batch(*, packed: bool = False) -> Batch:
    tokens = tokens_of(SPEC, seq=32)
    segments = ((10, 22), (32,)) if packed else None
    return Batch(tokens, targets=tokens_of(SPEC, seq=32, seed=1), segments=segments)


def gradients(model: Stage, given: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(given.tokens, given)
    loss.objective.backward()
    return loss.nll, {name: p.grad for name, p in model.parameters_by_name().items() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name in PLANS if name != "none"])
def test_losses_and_gradients_are_the_same_bits(name, packed):
    loss, grads = gradients(under(PLANS[name]), batch(packed=packed))
    expected_loss, expected = gradients(under(PLANS["none"]), batch(packed=packed))
    assert torch.equal(loss, expected_loss)
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def saved_bytes(plan: Plan, spec: Llama | DeepSeek = SPEC) -> int:
    """Return the bytes that forward keeps for backward, each piece of memory once, without weights."""
    model, given = under(plan, spec), batch()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
            alive.append(tensor)  # otherwise another tensor could later have the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(given.tokens, given)
    return sum(kept.values())


def test_the_more_is_recomputed_the_fewer_bytes_wait_for_backward():
    found = {name: saved_bytes(plan) for name, plan in PLANS.items()}
    order = ["full", "every:2", "every:4", "none"]
    assert all(found[less] < found[more] for less, more in pairwise(order)), found
    order = ["full", "selective mlp", "selective activation", "selective", "none"]
    assert all(found[less] < found[more] for less, more in pairwise(order)), found

    inputs = LAYERS * 2 * 32 * SPEC.dim * 4
    assert found["full"] < 3 * inputs  # inputs of the blocks, and the tensors kept by embedding and head


def test_of_a_gated_mlp_two_of_four_tensors_wait_for_backward():
    """The activation's result, and its product with the other factor, are formed again."""
    given, ffn = batch(), SPEC.ffn
    saved = saved_bytes(PLANS["none"]) - saved_bytes(Plan(recompute="selective", recompute_parts=("mlp.activation",)))
    assert saved == LAYERS * 2 * given.tokens.numel() * ffn * 4


@pytest.mark.parametrize("name", PLANS)
def test_only_the_named_blocks_run_their_mlp_again(name):
    model, runs = under(PLANS[name]), [0] * LAYERS
    for number, block in model.blocks.items():
        block.mlp.gate.register_forward_pre_hook(lambda *_, number=int(number): runs.__setitem__(number, runs[number] + 1))
    gradients(model, batch())
    again = range(LAYERS) if name == "selective mlp" else [n for n in range(LAYERS) if recomputed(n, blocks=LAYERS, policy=name)]
    assert runs == [2 if number in again else 1 for number in range(LAYERS)]


@pytest.mark.parametrize("part", check.PARTS)
def test_every_part_that_check_knows_can_run_again(part):
    """In a block without experts, all tokens share the MLP."""
    plan = Plan(recompute="selective", recompute_parts=(part,))
    loss, grads = gradients(under(plan), batch())
    expected_loss, expected = gradients(under(PLANS["none"]), batch())
    assert torch.equal(loss, expected_loss) and all(torch.equal(grads[name], expected[name]) for name in expected)
    kept = {name: saved_bytes(Plan(recompute="selective", recompute_parts=(name,))) for name in (part, "mlp")}
    assert kept[part] <= saved_bytes(PLANS["none"])
    assert (kept[part] == kept["mlp"]) == (part in ("mlp", "mlp.shared"))


Q_RANK = 24
LATENT = deepseek(q_rank=Q_RANK)
HEADS = {
    "the latents": ("attention.up",),
    "the core, too": ("attention.up", "attention.core"),
    "experts' activations": ("attention.up", "mlp.experts.activation"),
    "inside what runs again": ("attend", "attention.up"),
}


@pytest.mark.parametrize("spec", [LATENT, deepseek()], ids=["latent queries", "plain queries"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("parts", HEADS.values(), ids=HEADS)
def test_heads_made_again_of_latents_change_no_bit(parts, packed, spec):
    loss, grads = gradients(under(Plan(recompute="selective", recompute_parts=parts), spec), batch(packed=packed))
    expected_loss, expected = gradients(under(Plan(), spec), batch(packed=packed))
    assert torch.equal(loss, expected_loss) and grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_of_latent_attention_the_latents_wait_for_backward():
    """Queries and keys are freed, and so are both norms' results, inputs of products, and tables of the rotation. Values are padded for the
    kernel of a CPU, and stay."""
    given, heads = batch(), LATENT.heads
    saved = saved_bytes(Plan(), LATENT) - saved_bytes(Plan(recompute="selective", recompute_parts=("attention.up",)), LATENT)
    made = 2 * heads * (LATENT.nope_dim + LATENT.rope_dim)
    normalised = 2 * (Q_RANK + LATENT.kv_rank) + 2  # before and after the weights, and one number of each norm
    tables = given.tokens.shape[1] * LATENT.rope_dim
    assert saved == (LATENT.layers * given.tokens.numel() * (made + normalised) + tables) * 4


def test_heads_are_made_again_once_and_attention_runs_once():
    model, runs = under(Plan(recompute="selective", recompute_parts=("attention.up",)), LATENT), Counter[str]()
    for name in ("attention.q_up", "attention.kv_up", "attention.core"):
        model.blocks["1"].get_submodule(name).register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    gradients(model, batch())
    assert runs == {"attention.q_up": 2, "attention.kv_up": 2, "attention.core": 1}


def test_of_experts_alone_the_activation_is_formed_again():
    """The first block has no experts, and the others have a shared one: `mlp.activation` is of these, too."""
    kept = {part: saved_bytes(Plan(recompute="selective", recompute_parts=(part,)), LATENT) for part in FORMED}
    tokens, experts = batch().tokens.numel(), LATENT.layers - LATENT.dense_layers
    dense = LATENT.dense_layers * LATENT.ffn + experts * LATENT.expert_ffn * LATENT.shared_experts
    routed = experts * LATENT.active * LATENT.expert_ffn
    everything = saved_bytes(Plan(), LATENT)
    assert everything - kept["mlp.experts.activation"] == 2 * tokens * routed * 4
    assert kept["mlp.experts.activation"] - kept["mlp.activation"] == 2 * tokens * dense * 4


def test_a_part_that_is_not_there_is_an_error_naming_it():
    with pytest.raises(AttributeError, match="kernel"):
        under(Plan(recompute="selective", recompute_parts=("attention.kernel",)))


@pytest.mark.parametrize(
    ("parts", "waiting"),
    [
        (("attend", "mlp"), 0),
        (("mlp",), 4),  # an attention's four products
        (("attend",), 3),
        ((), 7),
    ],
)
def test_weight_gradients_of_what_runs_again_are_not_put_off(parts: tuple[str, ...], waiting: int) -> None:
    """They would keep the tensors that recomputation frees."""
    plan = Plan(recompute="selective", recompute_parts=parts) if parts else Plan()
    found = {}
    for recomputed_too in (False, True):
        model, given, queue = under(plan), batch(), Queue(recomputed=recomputed_too)
        with deferring(queue):
            model(given.tokens, given).objective.backward()
        found[recomputed_too] = len(queue.waiting)
        queue.run_all()
        plain = gradients(under(Plan()), given)[1]
        assert all(torch.equal(p.grad, plain[name]) for name, p in model.parameters_by_name().items() if p.grad is not None)
    others = found[True] - 7 * LAYERS
    assert found[False] == waiting * LAYERS + others


MLA = {"preset": "deepseek-tiny"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "plan", "model"),
    [
        ("full", {}, {}),
        ("segments:2", {}, {}),
        ("selective", {"recompute_parts": ("attend", "mlp.experts", "mlp.shared")}, MLA),
        ("selective", {"recompute_parts": ("", "mlp.experts")}, MLA),
        ("full", {"data": 2, "expert": 2, "zero": 1}, MLA),
        ("segments:2", {"data": 2, "expert": 2, "zero": 1}, MLA),
    ],
)
def test_a_schedule_that_puts_off_weight_gradients_keeps_no_more_of_what_runs_again(
    policy: str, plan: dict[str, Any], model: dict[str, Any]
) -> None:
    """ZB-H1 has as many microbatches in flight as 1F1B."""

    def most(schedule: str, recompute: str) -> int:
        given = {"pipeline": 2, "schedule": schedule, "recompute": recompute, **plan}
        if recompute != "selective":
            given.pop("recompute_parts", None)
        spec = tiny_run(model={"layers": 4, **model}, plan=given, train={"global_batch": 16, "seq_len": 128})
        return max(moment["activations"] for moment in dryrun(spec, rank=0).counted.memory_timeline)

    put_off, plain = most("zb-h1", policy), most("1f1b", policy)
    assert put_off < 1.25 * plain, (put_off, plain)
