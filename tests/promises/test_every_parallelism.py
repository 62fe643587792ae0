"""Any combination of parallelisms trains like one process. Every pair of compatible choices is in the sample."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.prove.axes import AXES, BELOW_FP32, ParityCase, axes_with_precisions, valid_run
from megalith.prove.compare import Recording, compare
from megalith.prove.draw import conflict_of, draw, uncovered
from megalith.prove.parity import reference, shrink
from megalith.prove.prove import CPU, prove, recorded
from megalith.spec.numbers import FAST
from tests.full import FULL, sampled
from tests.specs import tiny_run

STREAMED = {choice for choice in BELOW_FP32 if choice[0] == "state"}
"""Weights made at each gather: this needs ZeRO 3, and a precision below fp32."""

QUICK = {
    **axes_with_precisions(*FAST),
    "state": {name: asked for name, asked in AXES["state"].items() if ("state", name) not in STREAMED},
}
"""Axes that `make test` draws from: `test_state_elsewhere.py` covers plans with weights made at each gather, `IN_FEW_BITS` narrow
formats."""

DRAWN = AXES if FULL else QUICK
DRAWS = draw(None, 1, DRAWN) if FULL else draw(48, 0, DRAWN)
"""`make test` draws without the search for pairs that are rarely met, which takes half a minute in each process that collects tests."""

REFUSED: dict[tuple[str, ...], set[str]] = {
    ("model", "expert"): {"plan.expert", "plan.expert_tensor"},  # a dense model has no experts
    ("recompute", "retain"): {"plan.retain.share", "plan.retain.parts"},  # only all of the inputs of segments, and no parts
    ("zero", "pipeline"): {"plan.zero"},  # not with two copies of each stage
    ("optimizer", "precision"): {"optimizer.kind"},  # Lion makes a step of a rounding
    ("model", "sites"): {"sites.method"},  # loads of experts are counted within a site
    ("expert", "sites"): {
        "ranks",
        "plan.expert",
        "plan.expert_tensor",
        "sites.method",
    },  # three sites of four ranks are more than eight
    ("norm", "sites"): {"plan.post_validation", "sites.each.0.plan.post_validation"},  # which other sites may have got by then
    ("sites", "clipping"): {"optimizer.qk_clip"},  # so are the logits of heads
    ("sites", "precision"): {"train.precision"},  # a site would leave out updates that the others make
}
if FULL:
    streamed, released, lion = "plan.state.weights", "plan.state.release", "optimizer.kind"
    REFUSED |= {
        ("expert", "precision"): {
            "plan.expert_tensor",
            "plan.expert",
        },  # no scale spans an expert's ranks; else the model is dense
        ("tensor", "precision"): {"plan.overlap_tensor", "precision.kept", "plan.retain.parts"},  # nor pieces
        ("recompute", "precision"): {"plan.retain.parts"},  # attention in 8 bits is not recomputed
        ("zero", "state"): {streamed},
        ("pipeline", "state"): {streamed, "plan.zero"},
        ("state", "optimizer"): {streamed, lion},
        ("state", "precision"): {streamed, released},
        ("sites", "precision"): {
            "train.precision",
            "precision.history",
            "optimizer.master",
            "sites.each.1.plan.retain.parts",  # its tensor ranks split a row into uneven tiles
            released,
        },
        ("pipeline", "precision"): {released, "plan.microbatch"},  # released gradients are those of one microbatch
        ("norm", "precision"): {released},
        ("phases", "precision"): {released},
        ("clipping", "precision"): {released},
        ("optimizer", "precision"): {released, lion},
    }
"""Axes with pairs that cannot be drawn -> keys of the objections to them that can be left whatever else is chosen. All but that to
Lion are of `check`."""

torch.set_num_threads(1)  # a forked child hangs in OpenMP if its parent has used more than one thread
REFERENCES: dict[Any, Recording] = {}


@sampled(16)
@pytest.mark.parametrize("one", DRAWS, ids=lambda one: one.name)
def test_a_drawn_combination_trains_like_one_process(one: ParityCase) -> None:
    """A tie proves nothing, so draw again with another seed."""
    proof = prove(one, references=REFERENCES)
    assert proof.outcome == "equal", proof.error or "\n".join(map(str, proof.rows))


@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("mixtral-8x7b", {"data": 2, "expert": 2, "zero": 3}),
        ("deepseek-tiny", {"tensor": 2, "expert": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    ],
    ids=lambda value: str(value),
)
def test_rounding_sends_no_token_elsewhere_that_has_a_clear_choice(preset: str, plan: dict[str, Any]) -> None:
    """The drawn combinations in bf16 use balanced routing; here routers choose."""
    exact = shrink(tiny_run(plan=plan, train={"global_batch": 8}, model={"preset": preset}), steps=3)
    one = ParityCase((), exact.model_copy(update={"train": exact.train.model_copy(update={"precision": "bf16"})}))
    proof = prove(one, references=REFERENCES)
    assert proof.rows[0].quantity.startswith("routing")
    assert proof.outcome == "equal", proof


def test_every_pair_of_choices_is_shown_or_refused() -> None:
    """The objections to a pair that no draw has are those of `check`, or of the drawer, whatever else is chosen."""
    refused: dict[tuple[str, ...], set[str]] = {}
    for pair in uncovered(DRAWS if FULL else draw(None, 0, DRAWN), DRAWN):
        keys = {problem.key for problem in conflict_of(pair)}
        assert keys, f"no draw has {sorted(pair)}, and nothing refuses them"
        refused.setdefault(tuple(axis for axis in AXES if axis in dict(pair)), set()).update(keys)
    assert refused.keys() == REFUSED.keys()
    assert all(keys <= REFUSED[axes] for axes, keys in refused.items()), refused


def test_each_value_of_an_axis_makes_a_run_or_is_refused() -> None:
    """This includes values that only `make test-full` and `parity --random` draw: each can be requested alone without an
    error."""
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    refused = {
        (axis, value)
        for axis, values in AXES.items()
        for value in values
        if valid_run(tuple((plain | {axis: value}).items())) is None
    }
    experts = {("expert", value) for value in AXES["expert"] if value != plain["expert"]}
    assert refused == experts | STREAMED, "the first model has no experts, and the first plan is no ZeRO 3"


def test_draws_are_a_function_of_the_seed() -> None:
    assert [one.choices for one in draw(20, seed=5)] == [one.choices for one in draw(20, seed=5)]
    assert [one.choices for one in draw(20, seed=5)] != [one.choices for one in draw(20, seed=6)]
    assert len({one.choices for one in draw(120, 3, QUICK)}) == 120


def test_an_invalid_combination_is_not_drawn() -> None:
    plain = {axis: next(iter(values)) for axis, values in AXES.items()}
    assert valid_run(tuple(plain.items())) is not None
    assert valid_run(tuple((plain | {"expert": "2", "dp_shard": "2"}).items())) is None


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"tensor": 2, "data": 2, "zero": 3}),
    ("gpt2", {"pipeline": 2, "schedule": "zb-v", "chunks": 2, "context": 2}),
    ("palm-8b", {"tensor": 2, "data": 2, "zero": 2}),
    ("palm-8b", {"tensor": 2, "context": 2, "ulysses": 2}),
    ("bloom-560m", {"tensor": 2, "context": 2, "data": 2, "zero": 2}),
    ("bloom-560m", {"context": 4, "ulysses": 2, "context_method": "gather", "pipeline": 2}),
    ("bloom-560m", {"tensor": 2, "sequence": False, "pipeline": 2, "schedule": "zb-v", "chunks": 2, "recompute": "full"}),
    ("nemotron4-15b", {"tensor": 4, "data": 2, "zero": 3}),
    ("nemotron4-15b", {"context": 2, "ulysses": 2, "pipeline": 2, "schedule": "zb-h1"}),
    ("qwen2.5-0.5b", {"data": 2, "tensor": 2, "zero": 2}),
    ("mistral-7b", {"context": 2, "tensor": 2}),
    ("gemma2-2b", {"tensor": 2, "context": 2}),
    ("gemma2-2b", {"pipeline": 2, "schedule": "dualpipe", "recompute": "full"}),
    ("qwen3-0.6b", {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}),
    ("qwen3-30b-a3b", {"data": 2, "tensor": 2, "expert": 4, "zero": 3}),
    ("switch-base-8", {"data": 2, "context": 2, "expert": 2}),
    ("switch-base-8", {"tensor": 2, "pipeline": 2, "expert": 2}),
    ("grok-1", {"data": 2, "expert": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    ("deepseek-v2-lite", {"tensor": 2, "expert": 2, "recompute": "selective"}),
    ("nemotron-h-tiny", {"data": 2, "zero": 0, "recompute": "full"}),
    ("nemotron-h-tiny", {"data": 2, "zero": 1, "tensor": 2, "overlap_tensor": 2}),
    ("nemotron-h-tiny", {"data": 2, "expert": 2, "zero": 2, "recompute": "selective", "recompute_parts": ["mamba.core", "mlp"]}),
    ("nemotron-h-tiny", {"data": 4, "expert": 2, "zero": 3, "recompute": "selective", "recompute_parts": ["attend"]}),
    ("nemotron-h-tiny", {"tensor": 2, "expert": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    ("nemotron-h-tiny", {"pipeline": 2, "data": 2, "expert": 2, "schedule": "dualpipev", "chunks": 2, "zero": 1}),
    ("nemotron3-nano-30b-a3b", {"tensor": 2, "sequence": False, "data": 2, "expert": 4}),
    ("quickstart", {"tensor": 4, "data": 2, "zero": 3}),  # two ranks share a key head
    ("quickstart", {"tensor": 4, "sequence": False, "context": 2, "ulysses": 2}),
    ("tiny", {"context": 4, "ulysses": 2, "pipeline": 2, "zero": 3}),
    ("tiny", {"pipeline": 4, "schedule": "dualpipe", "data": 2, "zero": 1}),
    ("tiny", {"pipeline": 4, "schedule": "dualpipev", "chunks": 2}),
    ("deepseek-tiny", {"pipeline": 4, "schedule": "zb-h2", "data": 2, "expert": 2}),
]


@pytest.mark.parametrize(("preset", "plan"), OTHERS, ids=lambda value: str(value))
@sampled(8)
def test_every_family_trains_like_one_process(preset: str, plan: dict[str, Any]) -> None:
    run = tiny_run(plan=plan, train={"global_batch": 8}, model={"preset": preset})
    spec = shrink(run, steps=2)
    rows = compare(reference(spec, device=CPU), recorded(spec), spec=spec)
    assert all(row.equal for row in rows), "\n".join(map(str, rows))


@pytest.mark.parametrize(
    ("preset", "kind", "plan"),
    [
        ("tiny", "adamw", {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
        ("mixtral-8x7b", "adafactor", {"data": 2, "expert": 2, "zero": 3, "context": 2}),
        ("gemma2-2b", "muon", {"tensor": 2, "data": 2, "zero": 2, "post_validation": True}),
    ],
)
def test_a_scaled_model_trains_like_one_process(preset: str, kind: str, plan: dict[str, Any]) -> None:
    """The multipliers, and the factors of each matrix's learning rate, decay and epsilon, are equal on every rank that holds a
    share."""
    scaled = {"preset": preset, "parametrization": "completep", "base_dim": 16, "base_layers": 1, "base_head_dim": 4}
    run = tiny_run(plan=plan, train={"global_batch": 8}, model=scaled, optimizer={"kind": kind})
    spec = shrink(run, steps=2)
    assert spec.model.build().scaling.width > 1 < spec.model.build().scaling.depth
    rows = compare(reference(spec, device=CPU), recorded(spec), spec=spec)
    assert all(row.equal for row in rows), "\n".join(map(str, rows))


DELAYED, EXPERTS_TOO = {"granularity": "tensor", "history": 2}, {"expert_weight_gradient": "narrow"}
IN_FEW_BITS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("fp8", {}, "tiny", {"tensor": 2, "context": 2, "zero": 3}),
    ("fp8", {}, "deepseek-tiny", {"tensor": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2, "expert": 2}),
    ("fp8", {}, "nemotron-h-tiny", {"data": 2, "tensor": 2, "overlap_tensor": 2}),
    ("fp8", {"granularity": "row"}, "deepseek-tiny", {"data": 2, "tensor": 2, "expert": 2, "overlap_tensor": 2}),
    ("fp8", {"granularity": "tensor"}, "nemotron-h-tiny", {"tensor": 2, "data": 2, "microbatch": 2}),
    ("fp8", {"granularity": "tensor"}, "deepseek-tiny", {"context": 2, "tensor": 2, "recompute": "full"}),
    ("mxfp8", {}, "mixtral-8x7b", {"data": 2, "expert": 2, "recompute": "full"}),
    ("mxfp8", {}, "tiny", {"pipeline": 2, "schedule": "dualpipe", "tensor": 2, "sequence": False}),
    ("nvfp4", {}, "deepseek-tiny", {"data": 2, "tensor": 2, "expert": 2}),
    ("mxfp4", {}, "tiny", {"context": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    ("fp8", {"scale": "fp32"}, "mixtral-8x7b", {"tensor": 2, "context": 2, "expert": 2}),
    ("fp8", DELAYED, "deepseek-tiny", {"tensor": 2, "data": 2, "expert": 2, "recompute": "full"}),
    ("fp8", EXPERTS_TOO, "mixtral-8x7b", {"data": 2, "expert": 2, "recompute": "full"}),
    ("nvfp4", EXPERTS_TOO, "deepseek-tiny", {"expert": 2, "data": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}),
    ("fp8", {**EXPERTS_TOO, "granularity": "tensor", "kept": "fp8"}, "deepseek-tiny", {"tensor": 2, "expert": 2}),
    ("fp8", {"forward": "wide"}, "deepseek-tiny", {"data": 2, "tensor": 2, "expert": 2, "recompute": "full"}),
    ("fp8", {"forward": "wide", "kept": "fp8"}, "tiny", {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}),
    ("fp8", {**DELAYED, "forward": "wide", "input_gradient": "wide"}, "tiny", {"tensor": 2, "context": 2}),
    ("fp8", DELAYED, "tiny", {"pipeline": 2, "schedule": "zb-h2", "post_validation": True, "context": 2}),
]


@pytest.mark.parametrize(("precision", "choices", "preset", "plan"), IN_FEW_BITS, ids=str)
@sampled(5)
def test_a_plan_in_few_bits_trains_like_one_process(
    precision: str, choices: dict[str, Any], preset: str, plan: dict[str, Any]
) -> None:
    """`make test-full` draws more."""
    run = tiny_run(
        plan=plan,
        train={"global_batch": 8, "precision": precision},
        model={"preset": preset},
        precision=choices,
    )
    proof = prove(ParityCase((), shrink(run, steps=2)), references={})
    assert proof.outcome == "equal", proof.error or "\n".join(map(str, proof.rows))


OWN = """
name = each rank has two neighbouring stages, gradients last come first
stages = 4
microbatches = 4
placement = 0 0 1 1
rank 0: 0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3 1B3 0B3 1I2 0I2 1B1 0B1 1W2 0W2 1B0 0B0
rank 1: 2F0 3F0 2F1 3F1 2F2 3F2 2F3 3F3 3B3 2B3 3I2 2I2 3B1 2B1 3W2 2W2 3B0 2B0
"""


def test_a_schedule_from_a_file_trains_like_one_process(tmp_path: Path) -> None:
    """This schedule places stages and orders microbatches like no other."""
    (tmp_path / "own.schedule").write_text(OWN, encoding="utf-8")
    plan = {"pipeline": 2, "chunks": 2, "schedule": f"file:{tmp_path}/own.schedule", "data": 2, "zero": 3}
    proof = prove(ParityCase((), shrink(tiny_run(plan=plan, train={"global_batch": 8}), steps=2)), references={})
    assert proof.outcome == "equal", proof
