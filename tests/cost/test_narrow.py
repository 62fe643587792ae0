"""Predictions of products in few bits: what this project's trainer does on a device, and whether it pays."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.cost.constants import calibration
from megalith.cost.estimate import estimate, part_times
from megalith.cost.narrow.pays import gained, losers, pays
from megalith.cost.narrow.ways import DRAWN, ROTATED, ROUNDED, ROUNDING, rounding_bytes
from megalith.cost.other_software import PACKING, UNPACKING
from megalith.cost.parts import parts
from megalith.cost.software import OURS, software_profile_of
from megalith.cost.time import Setting
from megalith.cost.workload import Workload, computed
from megalith.kernels.draws import key_of, uniform
from megalith.kernels.elements import E2M1, E4M3
from megalith.kernels.hadamard import rotated
from megalith.kernels.packed import pack, unpack
from megalith.kernels.quantise import Scaling, narrowed
from megalith.spec import cluster as clusters
from megalith.spec.model import ModelSpec
from megalith.spec.numbers import PrecisionSpec
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from tests.cost.models import mixture

ALL_NARROW = {"wide_first": 0, "wide_last": 0}
COMPILED = Plan(compile=True, zero=0)


def llama(**sizes: int) -> Any:
    """Return Llama 3.1 8B with a few of its blocks, as a run file writes it."""
    preset = presets()["llama3.1-8b"]
    return replace(preset, values=preset.values | {"layers": 4} | sizes).build()


def load(
    precision: str,
    plan: Plan = COMPILED,
    *,
    model: ModelSpec | None = None,
    cluster: str = "h100",
    batch: int = 2,
    **choices: Any,
) -> Workload:
    """Return a step in a precision, all of whose blocks are narrow."""
    format, narrow = computed(precision, PrecisionSpec(**ALL_NARROW, **choices))
    there = clusters.load(f"{cluster}:{plan.ranks}")
    return Workload(model or llama().build(), plan, there, 8192, batch, format, software_profile_of(OURS, plan), narrow=narrow)


# --- what the roundings move ---


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write, and the operations; a broadcast dim is read once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not any(one.alias_info is not None for one in func._schema.returns):
            self.kernels += 1
            self.bytes += sum(map(size, (*tensors((args, kwargs or {})), *tensors(out))))
        return out


def tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def size(x: Tensor) -> int:
    found = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        found *= length if stride else 1
    return found


KINDS = {
    "up": Scaling(E4M3, (1, 128)), "ocp": Scaling(E4M3, (1, 128), "down"), "fp32": Scaling(E4M3, (1, 128), "fp32"),
    "e4m3": Scaling(E2M1, (1, 16), "e4m3"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_rounding_moves_the_bytes_of_its_operations(kind: str) -> None:
    x, moved = torch.randn(256, 512).bfloat16(), Moved()
    with moved:
        narrowed(x, KINDS[kind])
    assert moved.bytes / x.numel() == pytest.approx(ROUNDED[kind], rel=0.02)
    assert ROUNDING <= moved.kernels < 2 * ROUNDING


def test_draws_and_rotations_move_theirs_in_addition() -> None:
    x, plain, drawn = torch.randn(256, 512).bfloat16(), Moved(), Moved()
    with plain:
        narrowed(x, KINDS["up"])
    with drawn:
        narrowed(x, KINDS["up"], draws=uniform(key_of("a"), torch.arange(256), range(512)))
    assert (drawn.bytes - plain.bytes) / x.numel() == pytest.approx(DRAWN, rel=0.02)
    for tile in (16, 32):
        turned = Moved()
        with turned:
            rotated(x, tile)
        assert turned.bytes / x.numel() == pytest.approx(ROTATED * tile.bit_length(), rel=0.03)


def test_numbers_that_are_kept_in_8_bits_move_the_bytes_of_their_operations() -> None:
    x, packing, unpacking = torch.randn(64, 1024).bfloat16(), Moved(), Moved()
    with packing:
        packed = pack(x, KINDS["up"])
    with unpacking:
        unpack(packed, x.shape[1], KINDS["up"], x.dtype)
    for moved, (each, kernels) in ((packing, PACKING), (unpacking, UNPACKING)):
        assert moved.bytes / x.numel() == pytest.approx(each, rel=0.1)
        assert moved.kernels == pytest.approx(kernels, rel=0.2)


def test_a_block_that_keeps_inputs_in_8_bits_holds_half_as_much_and_takes_longer() -> None:
    wide, kept = (load("bf16", Plan(zero=0), kept=how) for how in ("wide", "fp8"))
    sizes = [parts(one).blocks[1].saved for one in (wide, kept)]
    dim, ffn = 4096, 14336
    assert sizes[0] - sizes[1] == 8192 * (2 * (2 * dim + 4 * ffn) - (2 * dim + 3 * ffn) * 132 / 128)
    assert 0.4 < 1 - sizes[1] / sizes[0] < 0.5
    assert estimate(kept).time.step > estimate(wide).time.step


def test_a_wide_forward_rounds_no_factor_but_the_inputs_that_it_keeps() -> None:
    wide, narrow, kept, both = (
        estimate(load("fp8", Plan(zero=0), **choices)).time.compute
        for choices in ({"forward": "wide"}, {}, {"forward": "wide", "kept": "fp8"}, {"kept": "fp8"})
    )
    assert wide < kept < narrow == both
    codes, less = (load("fp8", multiply="codes", granularity="tensor", forward=how) for how in ("narrow", "wide"))
    bf16 = estimate(load("bf16")).time.compute
    assert estimate(codes).time.compute < estimate(less).time.compute < bf16
    assert parts(load("fp8", forward="wide", kept="fp8")).blocks[1].saved == parts(load("fp8", kept="fp8")).blocks[1].saved


def test_narrow_weight_gradients_of_experts_are_rounded_too() -> None:
    """Two factors, each as large as one of the products in forward, for each of the three matrices of an expert."""
    experts = mixture(hidden=1024)
    wide, narrow, dense = (
        estimate(load("fp8", Plan(zero=0), model=model, expert_weight_gradient=how)).time.compute
        for model, how in ((experts, "wide"), (experts, "narrow"), (llama().build(), "narrow"))
    )
    assert wide < narrow < 3 * wide and dense == estimate(load("fp8", Plan(zero=0))).time.compute


def test_each_product_is_rounded_at_the_cost_of_its_format() -> None:
    """Draws and rotations count only where a product in 4 bits needs them."""

    def computing(precision: str, **choices: Any) -> float:
        return estimate(load(precision, Plan(zero=0), **choices)).time.compute

    named = dict.fromkeys(("forward", "input_gradient", "weight_gradient"), "fp8")
    assert computing("mxfp4", **named) == computing("fp8")
    back, turned = (computing("fp8", **{product: "mxfp4"}) for product in ("input_gradient", "weight_gradient"))
    assert computing("fp8") == computing("fp8", forward="mxfp4") < back < turned < computing("mxfp4")


# --- a step ---


@pytest.mark.parametrize(("granularity", "measured"), [("tile", 27_412), ("tensor", 30_161)])
def test_products_of_codes_gain_what_was_measured(granularity: str, measured: int) -> None:
    """docs/performance.md, "Products in 8 bits": one H200, eight blocks of Llama 3.1 8B, 26,236 tokens a second in bf16."""
    eight, plan = llama(layers=8).build(), Plan(compile=True, zero=0, microbatch=2)
    wide = estimate(load("bf16", plan, model=eight, cluster="h200"))
    narrow = estimate(load("fp8", plan, model=eight, cluster="h200", multiply="codes", granularity=granularity))
    assert wide.tokens_per_second == pytest.approx(26_236, rel=0.05)
    assert narrow.tokens_per_second / wide.tokens_per_second == pytest.approx(measured / 26_236, rel=0.005)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("cluster", ["h100", "a100", "b200"])
def test_a_rehearsal_is_slower_than_bf16_on_every_device(cluster: str, precision: str) -> None:
    """Only products of codes have the speed of few bits; no other format of ours may be predicted to gain."""
    plain, model = Plan(zero=0), llama(vocab=1024).build()  # else the logits' memory, which comes before, is more
    wide, rehearsed = (estimate(load(name, plain, cluster=cluster, model=model)) for name in ("bf16", precision))
    assert rehearsed.time.step > 1.3 * wide.time.step
    assert rehearsed.memory.working > wide.memory.working  # copies of the largest factor in fp32


def test_what_a_device_does_not_multiply_in_8_bits_is_rehearsed() -> None:
    """An A100 has no such products; a B200 has none for tiles; experts have none anywhere."""
    for cluster, choices in (("a100", {}), ("b200", {}), ("h100", {"tile": 64}), ("h100", {"rounding": "stochastic"})):
        asked, rehearsed = (load("fp8", cluster=cluster, multiply=how, **choices) for how in ("codes", "wide"))
        assert estimate(asked).time.step == estimate(rehearsed).time.step
    assert (
        estimate(load("fp8", cluster="b200", multiply="codes", granularity="tensor")).time.step
        < estimate(load("bf16", cluster="b200")).time.step
    )
    experts = mixture(hidden=1024)
    bf16, codes = (estimate(load(name, model=experts, multiply="codes", wide=("*.attention.*",))) for name in ("bf16", "fp8"))
    assert codes.time.compute > bf16.time.compute


def test_layers_that_stay_wide_cost_what_they_cost_in_bf16() -> None:
    bf16, none, all_, some = (
        estimate(load(*words, multiply="codes", granularity="tensor", wide=wide)).time.step
        for *words, wide in (("bf16", ()), ("fp8", ("*",)), ("fp8", ()), ("fp8", ("*.mlp.*",)))
    )
    assert none == bf16
    assert all_ < some < bf16


def test_blocks_of_one_kind_are_narrow_or_wide_by_their_number() -> None:
    """The first and the last of four blocks alike are wide by default: the narrow ones gain half of what all four would."""
    found = {
        name: estimate(load("fp8", multiply="codes", granularity="tensor") if name == "all" else _ends(name)).time.compute
        for name in ("all", "bf16", "fp8")
    }
    assert found["bf16"] - found["fp8"] == pytest.approx((found["bf16"] - found["all"]) / 2)


def _ends(precision: str) -> Workload:
    """Return a step whose first and last blocks are wide."""
    made = load(precision)
    format, narrow = computed(precision, PrecisionSpec(multiply="codes", granularity="tensor"))
    return replace(made, format=format, narrow=narrow)


# --- does it pay? ---


def run_of(plan: Plan, **model: int) -> RunSpec:
    """Return a run of two sequences a step."""
    train = {"steps": 10, "seq_len": 8192, "global_batch": 2, "precision": "fp8"}
    values = {
        "name": "x",
        "model": llama(**model).model_dump(),
        "data": {"path": "d"},
        "train": train,
        "optimizer": {"warmup": 1},
    }
    return RunSpec.model_validate(values | {"plan": plan.model_dump()})


@pytest.mark.parametrize("granularity", ["tile", "tensor"])
@pytest.mark.parametrize(
    "plan",
    [COMPILED, Plan(compile=True, tensor=2, zero=0), Plan(compile=True, context=2, zero=0)],
    ids=["one", "tensor", "context"],
)
def test_what_the_layers_gain_is_what_the_blocks_gain(plan: Plan, granularity: str) -> None:
    """The table is made of shapes alone, a step's prediction of traced blocks."""
    choices = PrecisionSpec(**ALL_NARROW, multiply="codes", granularity=granularity)
    layers = pays(run_of(plan), clusters.load(f"h100:{plan.ranks}"), choices)
    assert {one.name for one in layers} == {
        *(f"attention.{name}" for name in ("q", "k", "v", "out")), *(f"mlp.{name}" for name in ("gate", "up", "down"))
    }  # fmt: skip
    seconds = []
    for precision in ("bf16", "fp8"):
        workload = load(precision, plan, multiply="codes", granularity=granularity)
        times = part_times(parts(workload), Setting.of(workload, calibration()))
        both = [one.products + one.memory for block in times.blocks for one in block]
        seconds.append(sum(both))
    assert gained(layers) == pytest.approx(seconds[0] - seconds[1], rel=1e-6, abs=1e-9)


def test_a_layer_that_loses_is_named_by_its_pattern_or_by_its_blocks() -> None:
    choices = PrecisionSpec(**ALL_NARROW, multiply="codes")
    layers = pays(run_of(COMPILED, ffn=8192), clusters.load("h100:1"), choices)
    small = [one for one in layers if one.seconds >= one.wide]
    assert {f"*.{one.name}" for one in small} == set(losers(layers)) == {"*.attention.k", "*.attention.v"}
    assert gained(layers, losers(layers)) > gained(layers)
    up = next(one for one in layers if one.name == "mlp.up")
    assert up.gain > 1
    apart = replace(up, blocks=(0, 1)), replace(up, blocks=(2, 3), wide=0.9 * up.seconds)
    assert losers(apart) == ("blocks.2.mlp.up", "blocks.3.mlp.up")


def test_sizes_without_a_product_and_experts_are_said_to_be_rehearsed() -> None:
    choices = PrecisionSpec(**ALL_NARROW, multiply="codes")
    layers = {one.name: one for one in pays(run_of(COMPILED, ffn=8200), clusters.load("h100:1"), choices)}
    assert not layers["mlp.up"].codes and layers["attention.q"].codes
    assert layers["mlp.up"].gain < 0.7
    preset = presets()["mixtral-8x7b"]
    run = run_of(COMPILED).model_copy(update={"model": replace(preset, values=preset.values | {"layers": 2}).build()})
    layers = pays(run, clusters.load("h100:1"), choices)
    assert [one.codes for one in layers if one.experts] == [False] * 3
    assert "*.mlp.experts" in losers(layers)


def test_a_processor_rounds_few_numbers_at_a_time() -> None:
    found = load("fp8", Plan(zero=0))
    here = replace(found, cluster=clusters.load("cpu:1"))
    assert rounding_bytes(found, parts(found)) == 14 * 8192 * 14336 > rounding_bytes(here, parts(here)) == 0
    codes = load("fp8", multiply="codes")
    assert rounding_bytes(codes, parts(codes)) == 8192 * 14336
