"""Recipes for products, assigned to the modules of a part."""

import hashlib
from collections import Counter, defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megalith.kernels import narrow, packed
from megalith.kernels.draws import Tokens, working_on
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import INPUTS, OUTPUTS, TOKENS, Narrow
from megalith.kernels.quantise import Scaling
from megalith.kernels.recipes import Blockwise
from megalith.models import moe as moes
from megalith.models.head import Output
from megalith.models.linear import Linear
from megalith.models.moe import Experts
from megalith.parallel import parcel
from megalith.parallel.precision import RECIPES, apply_precision, with_own_narrow
from megalith.prove.compare import Recording
from megalith.prove.parity import record, reference, shrink
from megalith.spec.numbers import PRECISIONS, TRAINED, PrecisionSpec, is_narrow, settled
from megalith.spec.run import RunSpec
from megalith.train.measure.aside import buckets_of
from megalith.train.step import accumulate
from tests.full import sampled
from tests.models.deepseek import deepseek
from tests.models.plain import stage
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import TINY_EXPERTS, tiny_run


class Other(Multiply):
    pass


def _recipes(model: nn.Module) -> set[type[Any]]:
    """Return the recipes of all modules that multiply by a weight."""
    return {type(module.multiply) for module in model.modules() if isinstance(module, Linear | Experts | Output)}


def test_every_module_with_the_seam_gets_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "other", Other)
    model = stage(deepseek(ahead=1))
    assert _recipes(model) == {Multiply}
    apply_precision(model, "other")
    assert _recipes(model) == {Other}
    apply_precision(model, "plain")
    assert _recipes(model) == {Multiply}


def test_the_seam_adds_nothing_to_a_checkpoint() -> None:
    assert not any("multiply" in name for name in stage(deepseek()).state_dict())


def test_an_unknown_recipe_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'plian'; use one of: plain"):
        apply_precision(nn.Module(), "plian")


def shares_of(rank: int, specs: list[RunSpec]) -> list[dict[str, dict[str, float]]]:
    """Return for each run, by layer and factor, the largest rank with which this one shares the maximum of the whole tensor."""
    found = list[dict[str, dict[str, float]]]()
    for spec in specs:
        trainer = trainer_of(spec)
        modules = [module for runner in trainer.stages.values() for module in runner.modules()]
        recipes = [recipe for module in modules if isinstance(recipe := getattr(module, "multiply", None), Narrow)]
        found.append(
            {
                recipe.layer.removeprefix("blocks.1."): {
                    "inputs": largest(recipe, recipe.along, TOKENS, INPUTS, rank),
                    "weight": largest(recipe, recipe.weight_along, OUTPUTS, INPUTS, rank),
                    "gradients": largest(recipe, recipe.gradient_down, TOKENS, OUTPUTS, rank),
                }
                for recipe in recipes
                if recipe.layer.startswith("blocks.1.")
            }
        )
    return found


def largest(recipe: Narrow, scaling: Scaling, rows: str, columns: str, rank: int) -> float:
    share = recipe._share(scaling, rows, columns, whole=True)
    here = torch.tensor([float(rank)])
    return float(here if share is None else share(here))


WHOLE_TENSORS: dict[str, dict[str, Any]] = {
    "current scales": {"train": {"precision": "fp8"}, "precision": {"granularity": "tensor"}},
    "delayed scales": {"train": {"precision": "fp8"}, "precision": {"granularity": "tensor", "history": 2}},
    "the fp32 scale of nvfp4": {"train": {"precision": "nvfp4"}, "precision": {"tile": 4}},
}


@pytest.mark.slow
def test_exactly_the_ranks_that_cut_a_tensor_share_its_maximum() -> None:
    """Tensor ranks are neighbours, then context ranks, then data ranks, which share nothing."""
    plan = {"data": 2, "context": 2, "tensor": 2}
    specs = [tiny_run(plan=plan, **each) for each in WHOLE_TENSORS.values()]
    for rank, each in enumerate(run_ranks(shares_of, 8, specs)):
        tokens, channels, both = rank | 2, rank | 1, rank | 3
        for name, found in zip(WHOLE_TENSORS, each, strict=True):
            cut_outputs = {"inputs": tokens, "weight": channels, "gradients": both}
            cut_inputs = {"inputs": both, "weight": channels, "gradients": tokens}
            assert found["attention.q"] == found["mlp.up"] == cut_outputs, name
            assert found["attention.out"] == found["mlp.down"] == cut_inputs, name


@pytest.mark.parametrize("precision", [name for name in TRAINED if is_narrow(name)])
@pytest.mark.parametrize("asked", [{}, {"rounding": "stochastic", "hadamard": False}], ids=str)
def test_a_recipe_rounds_and_rotates_as_the_check_believes(precision: str, asked: dict[str, Any]) -> None:
    choices = PrecisionSpec(**asked)
    recipe, believed = RECIPES[PRECISIONS[precision].products].of(choices), settled(choices, precision)
    assert isinstance(recipe, Narrow)
    assert (recipe.draws, recipe.rotation > 0) == (believed.rounding == "stochastic", believed.hadamard)


@pytest.mark.parametrize("named", [{}, {"forward": "fp8"}], ids=str)
def test_products_in_one_format_have_one_recipe(named: dict[str, Any]) -> None:
    model = nn.ModuleDict({"up": Linear(32, 48)})
    choices = with_own_narrow(PrecisionSpec(wide_first=0, wide_last=0, **named), "fp8")
    (recipes,) = apply_precision(model, "blockwise", name="blocks.0", blocks=1, choices=choices).values()
    assert recipes == (model["up"].multiply,) and type(recipes[0]) is Blockwise


def test_each_product_has_the_format_that_a_run_names() -> None:
    """Its result is, to the bit, that of a layer with this format in all its products."""
    names = {"forward": "nvfp4", "input_gradient": "mxfp8", "weight_gradient": "mxfp4"}
    mixed = products_of("blockwise", **names)
    of_all = {name: products_of(PRECISIONS[name].products) for name in (*names.values(), "fp8")}
    for product, (name, found) in enumerate(zip(names.values(), mixed, strict=True)):
        assert torch.equal(found, of_all[name][product]), name
        assert not torch.equal(found, of_all["fp8"][product]), name
    wide = products_of("blockwise", forward="wide", input_gradient="mxfp4", weight_gradient="narrow")
    assert torch.equal(wide[0], products_of("plain")[0])
    assert torch.equal(wide[1], of_all["mxfp4"][1]) and torch.equal(wide[2], of_all["fp8"][2])


def products_of(recipe: str, **formats: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output of a layer, and the gradients of its input and weight, in bf16."""
    model = nn.ModuleDict({"up": Linear(32, 48)})
    choices = PrecisionSpec(wide_first=0, wide_last=0, tile=16, **formats)
    apply_precision(model, recipe, name="blocks.0", blocks=1, choices=choices)
    generator = torch.Generator().manual_seed(0)
    shapes = (64, 32), (48, 32), (64, 48)
    far_apart = (
        torch.randn(*shape, generator=generator).mul(4).exp2() * torch.randn(*shape, generator=generator) for shape in shapes
    )
    x, weight, grad = (each.bfloat16() for each in far_apart)
    model["up"].weight = nn.Parameter(weight)
    x.requires_grad_()
    with working_on(Tokens(torch.arange(1), torch.arange(64))):
        out = model["up"](x)
        out.backward(grad)
    assert x.grad is not None and model["up"].weight.grad is not None
    return out.detach(), x.grad, model["up"].weight.grad


Drawn = dict[int, set[tuple[int, int]]]
"""Return for each key the tokens and outputs for which numbers were drawn."""


def drawn(rank: int, spec: RunSpec) -> Drawn:
    """Return everything for which this rank draws numbers in one step; it draws for nothing twice."""
    trainer, found, uniform = trainer_of(spec), defaultdict[int, set[tuple[int, int]]](set), narrow.uniform

    def noted(key: int | torch.Tensor, rows: torch.Tensor, columns: range) -> torch.Tensor:
        keys = key.tolist() if isinstance(key, torch.Tensor) else [key] * rows.numel()
        for one, row in zip(keys, rows.flatten().tolist(), strict=True):
            places = {(row, column) for column in columns}
            assert not places & found[one], "weights, experts and tokens have draws of their own"
            found[one] |= places
        return uniform(key, rows, columns)

    with mock.patch.object(narrow, "uniform", noted):
        accumulate(trainer, microbatches(trainer))
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("tiny", {"tensor": 2, "context": 2}),
        ("deepseek-tiny", {"data": 2, "tensor": 2, "expert": 2}),
        ("deepseek-tiny", {"tensor": 2, "sequence": False, "expert": 2}),
    ],
    ids=str,
)
def test_ranks_draw_together_for_exactly_the_numbers_of_one_process(preset: str, plan: dict[str, Any]) -> None:
    """Keys, tokens by sample, and outputs are equal, even if tokens were sent to experts on other ranks."""
    run = tiny_run(plan=plan, model={"preset": preset}, train={"global_batch": 4, "precision": "nvfp4"})
    spec = shrink(run, steps=1)
    alone = spec.model_copy(update={"plan": spec.plan.model_copy(update=dict.fromkeys(plan, 1) | {"sequence": True})})
    (expected,) = run_ranks(drawn, 1, alone)
    found: Drawn = defaultdict(set)
    for one in run_ranks(drawn, spec.plan.ranks, spec):
        for key, places in one.items():
            found[key] |= places
    assert len(expected) >= 12 and found == expected


def recorded(rank: int, spec: RunSpec) -> Recording:
    return record(trainer_of(spec))


@pytest.mark.slow
def test_where_no_sum_is_reordered_draws_are_the_same_bits() -> None:
    """The pipeline recomputes blocks before their backward, defers weight gradients and shards weights."""
    plan = {"pipeline": 2, "schedule": "zb-h1", "recompute": "full"}
    spec = shrink(tiny_run(plan=plan, train={"global_batch": 4, "precision": "nvfp4"}), steps=1)
    found, alone = run_ranks(recorded, 2, spec)[0], reference(spec, device=CPU)
    assert found.gradients[0].keys() == alone.gradients[0].keys()
    narrowed = [name for name in found.gradients[0] if name.startswith("blocks.1.mlp")]
    assert narrowed and all(torch.equal(found.gradients[0][name], alone.gradients[0][name]) for name in narrowed)


Operands = Counter[tuple[str, str, str]]
"""How often each rounded operand occurs: the layer, the factor with its block, and a hash of the numbers."""


def operands(rank: int, specs: dict[str, RunSpec]) -> dict[str, Operands]:
    """Return every operand that this rank rounds in the first step of each run."""
    found = dict[str, Operands]()
    of_tokens, of_weight = Narrow._tokens, Narrow._weight

    def noted(here: Narrow, factor: str, rounded: torch.Tensor) -> torch.Tensor:
        numbers = hashlib.sha256(rounded.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        seen[here.layer, factor, numbers] += 1
        return rounded

    def tokens(here: Narrow, x: torch.Tensor, scaling: Scaling, channels: str, **how: Any) -> torch.Tensor:
        return noted(here, f"{channels}, {scaling.block}", of_tokens(here, x, scaling, channels, **how))

    def weight(here: Narrow, x: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        return noted(here, f"weight, {scaling.block}", of_weight(here, x, scaling))

    with mock.patch.multiple(Narrow, _tokens=tokens, _weight=weight):
        for name, spec in specs.items():
            trainer, found[name] = trainer_of(spec), (seen := Operands())
            accumulate(trainer, microbatches(trainer))
    return found


@pytest.mark.slow
def test_where_no_sum_is_reordered_operands_are_the_same_bits() -> None:
    """In the first step pipeline ranks and shards of data change no bit of what products multiply: of seven layers in each of two narrow
    blocks, in three products of two operands, for each of four microbatches."""
    choices: dict[str, Any] = {name: {"tile": 16} for name in ("fp8", "mxfp8", "nvfp4", "mxfp4")}
    choices["fp8, tensor"] = {"granularity": "tensor"}
    choices["nvfp4, backward in 8 bits"] = {"tile": 16, "input_gradient": "mxfp8", "weight_gradient": "fp8"}

    def runs(plan: dict[str, Any]) -> dict[str, RunSpec]:
        train = {"global_batch": 4, "steps": 1}
        return {
            name: tiny_run(plan=plan, precision=chosen, train=train | {"precision": name.split(",")[0]})
            for name, chosen in choices.items()
        }

    (alone,) = run_ranks(operands, 1, runs({}))
    for plan in ({"pipeline": 2}, {"data": 2, "zero": 3}):
        ranks = run_ranks(operands, 2, runs(plan))
        for name, expected in alone.items():
            assert expected.total() == 2 * 7 * 3 * 2 * 4, name
            assert sum((found[name] for found in ranks), Operands()) == expected, (name, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "alike"), [("wsd", True), ("constant", False)])
def test_products_are_wide_while_the_rate_decays_if_a_run_chooses_so(schedule: str, alike: bool) -> None:
    """Every update of this run is in the decay, so it equals a run in bf16."""
    tables = {"optimizer": {"schedule": schedule, "decay": 1.0}, "plan": {}}
    narrow, wide = (
        tiny_run(train={"global_batch": 4, "precision": name, "steps": 2}, precision={"wide_decay": name != "bf16"}, **tables)
        for name in ("nvfp4", "bf16")
    )
    found, expected = (run_ranks(recorded, 1, spec)[0] for spec in (narrow, wide))
    assert (found.losses == expected.losses) == alike
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights) == alike


@pytest.mark.slow
def test_a_wide_forward_has_the_loss_of_bf16_and_narrow_gradients() -> None:
    train = {"global_batch": 4, "steps": 1}
    wide, bf16, narrow = (
        run_ranks(recorded, 1, tiny_run(train=train | {"precision": precision}, precision=choices))[0]
        for precision, choices in (("fp8", {"forward": "wide", "tile": 4}), ("bf16", {}), ("fp8", {"tile": 4}))
    )
    assert wide.losses == bf16.losses != narrow.losses
    moved = {name for name, grad in bf16.gradients[0].items() if not torch.equal(wide.gradients[0][name], grad)}
    assert {f"blocks.{block}.mlp.up.weight" for block in (1, 2)} <= moved and "blocks.3.mlp.up.weight" not in moved


def dispatched(rank: int, spec: RunSpec) -> None:
    """Compare rows that are sent to experts in 8 bits with rows that are rounded once they have arrived."""
    trainer = trainer_of(spec)
    (moe,) = (moe for name, moe in trainer.routers().items() if name.startswith("blocks.1."))
    scaling, exchange = moe.experts.multiply.dispatched_as, moe.dispatcher
    assert scaling is not None and scaling.block == (1, 4)
    counts = torch.arange(len(moe.router.weight)) + rank
    traffic = exchange.plan(counts, None, None)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(int(counts.sum()), 32, generator=generator).bfloat16().requires_grad_()
    arrived, wide = moe.dispatch(x, traffic), exchange.dispatch(x, traffic)
    assert torch.equal(arrived, narrow.in_slabs(wide.detach(), scaling)) and not torch.equal(arrived, wide)
    assert torch.equal(moe.start_dispatch(x.detach(), traffic).wait(), arrived)
    grad = torch.randn(wide.shape, generator=generator).bfloat16()
    (of_x,), (expected,) = (torch.autograd.grad(each, x, grad) for each in (arrived, wide))
    assert torch.equal(of_x, expected)
    with working_on(Tokens(torch.arange(1), torch.arange(8), wide=True)):
        assert torch.equal(moe.dispatch(x, traffic), wide), "a comparison of gradients sends them wide"


def sends(dispatch: str, **plan: Any) -> RunSpec:
    train = {"global_batch": 4, "precision": "fp8", "steps": 1}
    return tiny_run(model=TINY_EXPERTS, plan=plan, precision={"tile": 4, "dispatch": dispatch}, train=train)


@pytest.mark.slow
@pytest.mark.parametrize("expert", [1, 2])
def test_tokens_sent_in_8_bits_are_those_that_are_rounded_on_arrival(expert: int) -> None:
    run_ranks(dispatched, 2, sends("fp8", data=2, expert=expert))


@pytest.mark.slow
def test_experts_compute_the_same_whether_tokens_are_sent_wide_or_in_8_bits() -> None:
    """Only the experts' weight gradients are wide products, and these see rounded tokens."""
    wide, found = (run_ranks(recorded, 2, sends(dispatch, data=2, expert=2))[0] for dispatch in ("wide", "fp8"))
    assert found.losses == wide.losses
    moved = {name for name, grad in wide.gradients[0].items() if not torch.equal(found.gradients[0][name], grad)}
    assert moved == {f"blocks.{block}.mlp.experts.{name}" for block in (1, 2) for name in ("gate", "up")}


def returned(rank: int, spec: RunSpec) -> None:
    """Compare gradients that are sent to experts in 8 bits with gradients that are rounded once they have arrived."""
    trainer = trainer_of(spec)
    (moe,) = (moe for name, moe in trainer.routers().items() if name.startswith("blocks.1."))
    scaling, exchange = moe.experts.multiply.gradients_dispatched_as, moe.dispatcher
    assert scaling is not None and scaling.block == (1, 4)
    counts = torch.arange(len(moe.router.weight)) + rank
    traffic = exchange.plan(counts, None, None)
    grads = torch.randn(int(counts.sum()), 32, generator=torch.Generator().manual_seed(rank)).bfloat16()
    arrived, wide = moe.start_combine_backward(grads, traffic).wait(), exchange.start_dispatch(grads, traffic).wait()
    assert torch.equal(arrived, narrow.in_slabs(wide, scaling)) and not torch.equal(arrived, wide)
    with working_on(Tokens(torch.arange(1), torch.arange(8), wide=True)):
        assert torch.equal(moe.start_combine_backward(grads, traffic).wait(), wide)


def returns(combine: str, plan: dict[str, Any], **precision: Any) -> RunSpec:
    train = {"global_batch": 4, "precision": "fp8", "steps": 1}
    choices = {"tile": 4, "combine_gradients": combine} | precision
    return tiny_run(model=TINY_EXPERTS, plan=plan, precision=choices, train=train)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_gradients_of_results_sent_in_8_bits_are_those_that_are_rounded_on_arrival(gradients: str) -> None:
    run_ranks(returned, 2, returns("fp8", {"data": 2, "expert": 2}, gradients=gradients))


@pytest.mark.slow
def test_gradients_of_results_in_8_bits_move_gradients_alone() -> None:
    """The last narrow block's own head and norm see no experts' gradient, so they keep their bits."""
    wide, found = (run_ranks(recorded, 2, returns(combine, {"data": 2, "expert": 2}))[0] for combine in ("wide", "fp8"))
    assert found.losses == wide.losses
    moved = {name for name, grad in wide.gradients[0].items() if not torch.equal(found.gradients[0][name], grad)}
    assert {f"blocks.2.mlp.{name}" for name in ("experts.down", "experts.up", "router.weight")} <= moved
    assert not moved & {"head.output.weight", "head.norm.weight", "blocks.3.mlp.experts.down", "blocks.3.attention.q.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"pipeline": 2, "schedule": "1f1b"}, {"data": 2, "expert": 2}, {"data": 2}], ids=str)
def test_gradients_of_results_are_rounded_alike_on_one_process_and_on_experts_ranks(plan: dict[str, Any]) -> None:
    """The rows that experts receive in backward have the same numbers, whether they were sent or not."""
    spec = returns("fp8", plan)
    alone = spec.model_copy(update={"plan": spec.plan.model_copy(update=dict.fromkeys(plan, 1) | {"schedule": "1f1b"})})
    found, (expected,) = run_ranks(rounded_gradients, spec.plan.ranks, spec), run_ranks(rounded_gradients, 1, alone)
    assert len(expected) > 50 and set().union(*found) == expected


def rounded_gradients(rank: int, spec: RunSpec) -> set[tuple[float, ...]]:
    """Return the gradients that the experts of the narrow blocks receive, before they are weighted, as packed rows of tokens."""
    trainer, rows = trainer_of(spec), set[tuple[float, ...]]()

    def noted(x: torch.Tensor, scaling: Any) -> torch.Tensor:
        made = packed.pack(x, scaling)
        rows.update(tuple(row) for row in packed.unpack(made, x.shape[1], scaling, x.dtype).float().tolist())
        return made

    with mock.patch.object(moes, "pack", noted):
        accumulate(trainer, microbatches(trainer))
    return rows


GATHERS: dict[str, dict[str, Any]] = {
    "zero 1": {"data": 2, "zero": 1},
    "zero 2, shares of tensor ranks": {"data": 2, "tensor": 2, "zero": 2},
    "zero 3, shorter last shares": {"data": 3, "zero": 3},
    "zero 3, experts apart": {"data": 4, "expert": 2, "zero": 3},
    "zero 3, a pipeline": {"data": 2, "pipeline": 2, "zero": 3, "schedule": "zb-h1"},
}


def gathers(gather: str, plan: dict[str, Any], **precision: Any) -> RunSpec:
    """The first and the last block stay wide. Three ranks have 12, 12 and 10 of 34 rows. Of 32 rows they have 11, which are gathered
    wide."""
    train = {"global_batch": 12, "precision": "fp8", "steps": 2, "seq_len": 16}
    model = TINY_EXPERTS | ({"dim": 34} if plan["data"] == 3 else {})
    return tiny_run(model=model, plan=plan, precision={"tile": 4, "gather": gather} | precision, train=train)


SCALES = [("up", name) for name in GATHERS] + [("ocp", "zero 2, shares of tensor ranks"), ("fp32", "zero 1")]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "plan"), SCALES)
@sampled(2)
def test_weights_gathered_in_8_bits_train_as_those_that_are_gathered_wide(scale: str, plan: str) -> None:
    """Losses, gradients and weights are bitwise equal, since a product rounds a gathered weight to the numbers it already has."""
    made = [gathers(gather, GATHERS[plan], scale=scale) for gather in ("wide", "fp8")]
    wide, found = (run_ranks(recorded, spec.plan.ranks, spec)[0] for spec in made)
    assert found.losses == wide.losses
    for step, expected in enumerate(wide.gradients):
        assert all(torch.equal(found.gradients[step][name], grad) for name, grad in expected.items())
    assert all(torch.equal(found.weights[name], weight) for name, weight in wide.weights.items())


def rounded_weights(rank: int, spec: RunSpec) -> tuple[int, bool]:
    """Count the weights that a step of several microbatches rounds for its gathers, and whether a gather for wide products returns
    rounded ones."""
    trainer = trainer_of(spec)
    with mock.patch.object(parcel, "pack_tiles", wraps=parcel.pack_tiles) as rounds:
        accumulate(trainer, microbatches(trainer))
    bucket, weight = next((b, w) for b in buckets_of(trainer) for w in b.weights if w.gathered_as is not None)
    with working_on(Tokens(torch.arange(1), torch.arange(8), wide=True)):
        bucket.gather()
    assert isinstance(weight.recipe, Narrow)
    whole = weight.compute.detach()
    return rounds.call_count, torch.equal(narrow.in_slabs(whole, weight.recipe.weight_along), whole)


@pytest.mark.slow
def test_a_share_is_rounded_once_a_step_and_not_at_all_for_wide_products() -> None:
    """Two of four blocks have three tensors of experts; their attention stays wide."""
    spec = gathers("fp8", {"data": 2, "zero": 3}, wide=("*.attention.*",))
    assert spec.microbatches > 1
    assert run_ranks(rounded_weights, 2, spec) == [(6, False)] * 2


def keeps(kept: str, model: dict[str, Any], **precision: Any) -> RunSpec:
    choices = {"tile": 4, "kept": kept} | precision
    return tiny_run(model=model, precision=choices, train={"global_batch": 4, "precision": "fp8", "steps": 1, "seq_len": 16})


def moved_by_keeping(model: dict[str, Any], **precision: Any) -> set[str]:
    """Return the parameters whose gradients change in the first step if inputs are kept in 8 bits."""
    wide, found = (run_ranks(recorded, 1, keeps(kept, model, **precision))[0] for kept in ("wide", "fp8"))
    assert found.losses == wide.losses
    return {name for name, grad in wide.gradients[0].items() if not torch.equal(found.gradients[0][name], grad)}


@pytest.mark.slow
def test_inputs_kept_in_8_bits_move_weight_gradients_alone_and_none_where_the_recipe_rounds_them_alike() -> None:
    assert not moved_by_keeping({}, granularity="tensor")
    layers = [f"attention.{name}" for name in ("q", "k", "v", "out")] + [f"mlp.{name}" for name in ("gate", "up", "down")]
    moved = moved_by_keeping({}, scale="ocp")  # this scale saturates the largest number of a tile, in both directions
    assert moved and moved <= {f"blocks.{block}.{layer}.weight" for block in (1, 2) for layer in layers}


@pytest.mark.slow
def test_experts_keep_what_was_sent_to_them_in_8_bits() -> None:
    """Tokens arrive rounded, so the weight gradients of the first products have the same bits. Those of the second product
    see rounded inputs."""
    moved = moved_by_keeping(TINY_EXPERTS, dispatch="fp8", wide=("*.attention.*",))
    assert moved == {f"blocks.{block}.mlp.experts.down" for block in (1, 2)}
