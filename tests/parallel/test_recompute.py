"""Recomputation runs the policy's blocks again, changes no bit, and saves bytes."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalith import check
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.parallel.recompute import apply_recompute
from megalith.spec.plan import Plan, recomputed
from tests.models.plain import llama, stage, tokens_of

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


def under(plan: Plan) -> Stage:
    model = stage(SPEC)
    for number, block in model.blocks.items():
        apply_recompute(block, int(number), blocks=LAYERS, plan=plan)
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


def saved_bytes(plan: Plan) -> int:
    """Return the bytes that forward keeps for backward, each piece of memory once, without weights."""
    model, given = under(plan), batch()
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


def test_a_part_that_is_not_there_is_an_error_naming_it():
    with pytest.raises(AttributeError, match="kernel"):
        under(Plan(recompute="selective", recompute_parts=("attention.kernel",)))
