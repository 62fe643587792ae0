"""Communication equals theory: the bytes of every collective and message in a real step, by axis, for each technique.

Φ is the model's number of parameters; a collective over n ranks sends (1 - 1/n) of its tensor from each of them, an all-reduce twice
that. Nothing else is sent except counts and totals of a few bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch

from megalith.models.stage import Stage
from megalith.spec.run import RunSpec
from megalith.train.step import train_step
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.parallel.traffic import Traffic, bytes_by_axis
from tests.ranks import run_ranks
from tests.specs import TINY, tiny_run

Bytes = dict[tuple[str, str], Fraction]  # (axis, call) -> bytes that a rank sends in a step
LAYERS, SEQ, DIM, VOCAB = 4, TINY["context"] // 2, TINY["dim"], TINY["vocab"]
HEADS, KV_HEADS, CHANNELS = TINY["heads"], TINY["kv_heads"], TINY["head_dim"]
ACTIVE = 2
FLOATS = (torch.float32, torch.bfloat16)
F32, BF16 = 4, 2
NUMBERS = 1024  # bytes: an upper limit for counts and totals

CONTEXTS: dict[str, dict[str, Any]] = {
    "ring": {"context_method": "ring"},
    "gather": {"context_method": "gather"},
    "ulysses": {"ulysses": 4},
    "ulysses x ring": {"ulysses": 2, "context_method": "ring"},
    "ulysses x gather": {"ulysses": 2, "context_method": "gather"},
}
PIPELINES = {  # schedule -> stages of a rank, borders between stages that messages cross on 4 ranks
    "gpipe": (1, 3),
    "1f1b": (1, 3),
    "zb-h1": (1, 3),
    "zb-h2": (1, 3),
    "dualpipe": (1, 3),
    "interleaved": (2, 7),
    "zb-v": (2, 6),
    "dualpipev": (2, 6),
}


MIXTRAL = {"family": "mixtral", "experts": 8, "active": ACTIVE, "ffn": 16}


def _run(*, m: int = 1, precision: str = "fp32", model: dict[str, Any] | None = None, **plan: Any) -> RunSpec:
    """A run with `m` microbatches of one sequence on each data rank."""
    train = {"global_batch": m * plan.get("data", 1), "seq_len": SEQ, "precision": precision}
    return tiny_run(plan=plan, train=train, model=model or {})


RUNS: dict[str, RunSpec] = {
    **{f"zero {zero}, {m}": _run(data=2, zero=zero, m=m) for zero in range(4) for m in (1, 3)},
    "zero 3, bf16": _run(data=2, zero=3, m=3, precision="bf16"),
    **{f"replicas, {m}": _run(data=4, replicate=2, zero=3, m=m) for m in (1, 3)},
    **{f"tensor, {part}": _run(tensor=2, sequence=part == "sequence", m=3) for part in ("sequence", "whole")},
    "tensor, in pieces": _run(tensor=2, overlap_tensor=2, m=3),
    **{name: _run(context=4, zero=0, m=2, precision="bf16", **plan) for name, plan in CONTEXTS.items()},
    **{f"experts, {e}": _run(data=4, expert=e, m=2, model=MIXTRAL) for e in (2, 4)},
    "experts, zero 3": _run(data=4, expert=2, zero=3, m=2, model=MIXTRAL),
    "split experts": _run(data=4, expert=2, expert_tensor=2, m=2, model=MIXTRAL),
    **{name: _run(pipeline=4, schedule=name, chunks=chunks, m=5, model={"layers": 8}) for name, (chunks, _) in PIPELINES.items()},
    "dualpipe, zero 0": _run(pipeline=4, schedule="dualpipe", m=4, zero=0),
    "tied": _run(pipeline=2, m=2, model={"tied": True}),
    "product": _run(pipeline=2, data=2, tensor=2, zero=3, m=2),
}


@dataclass(frozen=True)
class Sent:
    """Messages of one rank in one step."""

    found: Bytes  # bytes of floats: weights, gradients and activations
    rest: Fraction  # bytes of everything else


def _second_step(rank: int, spec: RunSpec) -> Sent:
    """The second step is recorded: the first may prepare what later steps reuse, and work that it leaves undone shows
    in the second."""
    trainer = trainer_of(spec)
    for moe in trainer.routers().values():
        moe.router.spec = moe.router.spec.model_copy(update={"balanced": True})
    train_step(trainer, microbatches(trainer), step=0)
    with Traffic() as traffic:
        train_step(trainer, microbatches(trainer, 1), step=1)
    floats = [call for call in traffic.calls if call.dtype in FLOATS and call.name != "receive"]
    found = bytes_by_axis(floats, trainer.groups.mesh, trainer.groups.rank)
    return Sent(found, sum((call.sent for call in traffic.calls if call.dtype not in FLOATS), Fraction(0)))


@cache
def _world(name: str) -> list[Sent]:
    return run_ranks(_second_step, RUNS[name].plan.ranks, RUNS[name])


def sent(name: str) -> list[Bytes]:
    """Return the messages of each rank in the second step of a run, without counts and totals."""
    assert all(mine.rest < NUMBERS for mine in _world(name))
    return [mine.found for mine in _world(name)]


# --- theory ---


def parameters(spec: RunSpec, *, stages: Iterable[int] | None = None, experts: bool = False) -> int:
    """Return Φ of some stages, for everything but the experts, or for the experts alone."""
    model = spec.model.build()
    bounds = spec.plan.bounds(len(model.blocks))
    with torch.device("meta"):
        held = {}
        for stage in stages if stages is not None else range(len(bounds)):
            held |= Stage(model, *bounds[stage]).parameters_by_name()
    return sum(p.numel() for name, p in held.items() if (".experts." in name) == experts)


def others(n: int) -> Fraction:
    """Return the share of a tensor that the other n - 1 of n ranks have."""
    return 1 - Fraction(1, n)


def zero_bytes(zero: int, m: int, phi: Fraction | int, *, n: int, axis: str, width: int = F32) -> Bytes:
    """Return the bytes by Rajbhandari et al. 2019 (arXiv:1910.02054), section 7, plus those of several microbatches' gradients,
    which are fp32."""
    if zero == 0:
        return {(axis, "all_reduce"): 2 * others(n) * phi * F32}
    gathers, reductions = {1: (1, 1), 2: (1, m), 3: (2 * m, m)}[zero]
    return {
        (axis, "gather"): gathers * others(n) * phi * width,
        (axis, "reduce_scatter"): reductions * others(n) * phi * F32,
    }


# --- data ---


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@sampled(3)
def test_zero_gathers_and_reduces_the_model_as_often_as_its_stage_says(zero, m):
    """ZeRO 0 to 3 have 0, 1, 1 and 2 m gathers, and 1 (of twice the bytes), 1, m and m reductions."""
    spec = RUNS[f"zero {zero}, {m}"]
    assert sent(f"zero {zero}, {m}") == [zero_bytes(zero, m, parameters(spec), n=2, axis="data")] * 2


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_one_microbatch_costs_two_or_three_models(zero, times):
    phi = parameters(RUNS[f"zero {zero}, 1"])
    for found in sent(f"zero {zero}, 1"):
        assert sum(found.values()) / others(2) == times * phi * F32


def test_bf16_halves_what_is_gathered_and_not_what_is_added_up():
    phi = parameters(RUNS["zero 3, bf16"])
    assert sent("zero 3, bf16") == [zero_bytes(3, 3, phi, n=2, axis="data", width=BF16)] * 2


@pytest.mark.parametrize("m", [1, 3])
def test_replicas_of_shards_gather_and_scatter_inside_and_add_up_shares_between(m):
    """HSDP sends only 1 / shards of each gradient over the slow links between the groups."""
    phi, shards, copies = parameters(RUNS[f"replicas, {m}"]), 2, 2
    inside = zero_bytes(3, m, phi, n=shards, axis="state dp_shard")
    between = {("state dp_replicate", "all_reduce"): m * 2 * others(copies) * phi * F32 / shards}
    assert sent(f"replicas, {m}") == [inside | between] * 4


# --- tensor ---


def _norms(layers: int, head: int) -> int:
    """Return the number of elements of the norms' weights, which every tensor rank holds."""
    return (2 * layers + head) * DIM


def statistics(m: int, t: int) -> Fraction:
    """Return the bytes of the loss over a split vocabulary: each token's maximum, sum and target logit."""
    return m * 2 * others(t) * 3 * SEQ * F32


def test_tensor_ranks_add_up_two_activations_a_layer_in_forward_and_two_in_backward():
    """Shoeybi et al. 2019 (arXiv:1909.08053), section 3. The embedding adds one all-reduce in forward, the output one in
    backward."""
    t, m, activation = 2, 3, SEQ * DIM * F32
    sums = m * (4 * LAYERS + 2) * 2 * others(t) * activation
    assert sent("tensor, whole") == [{("tensor", "all_reduce"): sums + statistics(m, t)}] * 2


def test_sequence_parallelism_sends_the_same_as_gathers_and_scatters():
    """Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2, plus the norms' gradients once a step."""
    t, m, activation = 2, 3, SEQ * DIM * F32
    halves = m * (4 * LAYERS + 2) * others(t) * activation
    norms = 2 * others(t) * _norms(LAYERS, 1) * F32
    expected = {
        ("tensor", "gather"): halves,
        ("tensor", "reduce_scatter"): halves,
        ("tensor", "all_reduce"): norms + statistics(m, t),
    }
    assert sent("tensor, sequence") == sent("tensor, in pieces") == [expected] * 2


# --- context ---


@pytest.mark.parametrize("method", CONTEXTS)
@sampled(2)
def test_context_ranks_pass_on_keys_or_exchange_heads(method):
    """Keys and values go around the ring once in forward and once in backward, there with their gradients in fp32. Ulysses
    exchanges queries, keys, values and outputs, except each rank's own part, in forward and in backward."""
    spec, n, m = RUNS[method], 4, 2
    inner = CONTEXTS[method].get("ulysses", 1)
    outer = n // inner
    keys, queries = (SEQ // n * heads * 2 * CHANNELS for heads in (KV_HEADS, HEADS))  # with the values; with the outputs
    keys *= max(1, inner // KV_HEADS)
    expected = zero_bytes(0, m, parameters(spec), n=n, axis="context")
    if inner > 1:
        axis = "context" if inner == n else "context by 1"
        expected[axis, "all_to_all"] = m * LAYERS * 2 * others(inner) * (queries + keys) * BF16
    if outer > 1:
        axis = "context" if outer == n else f"context by {inner}"
        keys_and_values, gradients = (m * LAYERS * (outer - 1) * keys * width for width in (2 * BF16, F32))
        if spec.plan.context_method == "ring":
            expected[axis, "send"] = Fraction(keys_and_values + gradients)
        else:
            expected |= {(axis, "gather"): Fraction(keys_and_values), (axis, "reduce_scatter"): Fraction(gradients)}
    assert sent(method) == [expected] * n


# --- experts ---


def rows(m: int, e: int) -> Fraction:
    """Copies of tokens whose expert is on another rank are sent there and back, in forward and in backward. In backward a copy's weight
    is sent with it, and the weight's gradient comes back."""
    return LAYERS * m * SEQ * ACTIVE * (4 * DIM + 2) * F32 * others(e)


@pytest.mark.parametrize(("name", "zero"), [("experts, 2", 1), ("experts, zero 3", 3)])
def test_tokens_are_dispatched_to_their_experts_and_the_copies_of_an_expert_add_up_apart(name, zero):
    """Two of 4 data ranks divide the experts: each expert has 2 copies, each dense weight 4."""
    spec, m, e, n = RUNS[name], 2, 2, 4
    dense = zero_bytes(zero, m, parameters(spec), n=n, axis="data")
    experts = zero_bytes(zero, m, Fraction(parameters(spec, experts=True), e), n=n // e, axis="experts dp_shard")
    assert sent(name) == [dense | experts | {("experts expert", "all_to_all"): rows(m, e)}] * n


def test_experts_without_copies_exchange_tokens_but_no_weights():
    spec, m, n = RUNS["experts, 4"], 2, 4
    dense = zero_bytes(1, m, parameters(spec), n=n, axis="data")
    assert sent("experts, 4") == [dense | {("data", "all_to_all"): rows(m, n)}] * n


def test_ranks_that_split_an_expert_exchange_all_rows_that_arrived():
    """Each rank exchanges all rows and their partial sums with each other part, in forward and in backward."""
    spec, m, e, parts = RUNS["split experts"], 2, 2, 2
    dense = zero_bytes(1, m, parameters(spec), n=4, axis="data")
    arrived = 4 * LAYERS * m * SEQ * ACTIVE * DIM * F32 * Fraction(parts - 1)
    exchanged = {("experts expert", "all_to_all"): rows(m, e), ("experts expert_tensor", "all_to_all"): arrived}
    assert sent("split experts") == [dense | exchanged] * 4


# --- pipeline ---


@pytest.mark.parametrize("schedule", PIPELINES)
@sampled(3)
def test_each_border_between_ranks_is_crossed_twice_by_each_microbatch(schedule):
    """Activations and their gradients cross each border once. The turn of a V is no border."""
    _, borders = PIPELINES[schedule]
    found = sent(schedule)
    assert sum(mine["pipeline", "send"] for mine in found) == 2 * borders * 5 * SEQ * DIM * F32
    if schedule != "dualpipe":
        assert all(set(mine) == {("pipeline", "send")} for mine in found)


@pytest.mark.parametrize(
    ("name", "m", "axis"), [("dualpipe", 5, "state dp_shard"), ("dualpipe, zero 0", 4, "state dp_replicate")]
)
def test_the_two_copies_of_a_stage_add_up_once_a_step_over_their_pair(name, m, axis):
    spec = RUNS[name]
    for rank, found in enumerate(sent(name)):
        pair = zero_bytes(spec.plan.zero, m, parameters(spec, stages=(rank, 3 - rank)), n=2, axis=axis)
        assert found == pair | {("pipeline", "send"): found["pipeline", "send"]}


def test_a_tied_table_is_added_up_once_a_step_by_the_ends_of_the_pipeline():
    table = {("pipeline", "all_reduce"): 2 * others(2) * VOCAB * DIM * F32}
    assert sent("tied") == [table | {("pipeline", "send"): Fraction(2 * SEQ * DIM * F32)}] * 2


# --- together ---


def test_axes_do_not_add_to_each_other_s_traffic():
    """In pipeline 2 x data 2 x tensor 2 with ZeRO 3 each technique sends the same as alone, for its share."""
    spec, m, t = RUNS["product"], 2, 2
    part = SEQ // t * DIM * F32
    for rank, found in enumerate(sent("product")):
        stage, layers = rank // 4, LAYERS // 2
        norms = _norms(layers, stage)
        phi = Fraction(parameters(spec, stages=[stage]) - norms, t) + norms
        halves = m * (4 * layers + 1) * others(t) * SEQ * DIM * F32  # the embedding, or the output, once in each direction
        sums = 2 * others(t) * norms * F32 / 2 + stage * statistics(m, t)
        assert found == zero_bytes(3, m, phi, n=2, axis="data") | {
            ("tensor", "gather"): halves,
            ("tensor", "reduce_scatter"): halves,
            ("tensor", "all_reduce"): sums,
            ("pipeline", "send"): Fraction(m * part),
        }
