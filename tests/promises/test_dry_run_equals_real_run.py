"""A dry run of one rank gives the same counts as that rank in a real run: messages, state and order exactly, activations within 3 %."""

from itertools import groupby
from typing import Any

import pytest

from megalith.prove.dryrun import RankCounts
from megalith.schedule.lower import lower
from megalith.schedule.table import build
from megalith.spec.run import RunSpec
from tests.full import sampled
from tests.prove.dry import dry, real
from tests.specs import TINY_EXPERTS, brief_run

MIXTRAL = TINY_EXPERTS | {"layers": 2}
SHORT = {"layers": 2}
LONG = {"layers": 8, "ffn": 512}  # large compared with the messages between stages, as are wider experts
PLANS: dict[str, dict[str, Any]] = {
    "zero 0": {"plan": {"data": 4, "zero": 0}},
    "zero 1": {"plan": {"data": 4, "zero": 1}},
    "zero 2": {"plan": {"data": 4, "zero": 2}, "train": {"precision": "bf16"}},
    "zero 3": {"plan": {"data": 4, "zero": 3}, "train": {"precision": "bf16"}},
    "weights on disk": {
        "plan": {"data": 4, "zero": 3, "state": {"optimizer": "disk", "weights": "disk", "share": 0.6}},
        "train": {"precision": "bf16"},
    },
    "copies": {"plan": {"data": 4, "zero": 3, "replicate": 2}},
    "tensor": {"plan": {"data": 2, "tensor": 2, "zero": 1}},
    "recomputed": {"plan": {"data": 2, "tensor": 2, "recompute": "full"}, "train": {"precision": "bf16"}},
    "fp16": {"plan": {"data": 2, "tensor": 2, "zero": 2}, "train": {"precision": "fp16"}},
    "ring": {"plan": {"data": 2, "context": 2}},
    "gather": {"plan": {"context": 4, "context_method": "gather"}},
    "ulysses": {"plan": {"context": 2, "ulysses": 2, "data": 2, "zero": 3}},
    "1f1b": {"plan": {"pipeline": 2, "data": 2, "zero": 2}, "model": LONG},
    "interleaved": {
        "plan": {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "data": 2, "tensor": 2, "zero": 3},
        "model": LONG,
    },
    "embedding and head alone": {
        "plan": {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "layers": (0, 4, 4, 0), "data": 2, "zero": 2},
        "model": LONG,
    },
    "zero bubble": {"plan": {"pipeline": 2, "schedule": "zb-h1", "data": 2, "tensor": 2}, "model": LONG},
    "experts": {"plan": {"data": 4, "expert": 4, "zero": 2}, "model": MIXTRAL},
    "tokens sent in 8 bits": {
        "plan": {"data": 4, "expert": 4, "zero": 2},
        "model": MIXTRAL | {"layers": 3},
        "train": {"precision": "fp8"},
        "precision": {"tile": 4, "dispatch": "fp8", "combine_gradients": "fp8"},
    },
    "inputs kept in 8 bits": {
        "plan": {"data": 2, "expert": 2, "zero": 1},
        "model": MIXTRAL | {"layers": 3},
        "train": {"precision": "fp8"},
        "precision": {"tile": 4, "kept": "fp8", "dispatch": "fp8"},
    },
    "weights gathered in 8 bits": {
        "plan": {"data": 4, "zero": 3, "expert": 2},
        "model": MIXTRAL | {"layers": 3},
        "train": {"precision": "fp8"},
        "precision": {"tile": 4, "gather": "fp8"},
    },
    "mxfp8, kept in 8 bits": {
        "plan": {"data": 2, "tensor": 2, "zero": 2},
        "model": SHORT | {"layers": 3},
        "train": {"precision": "mxfp8"},
        "precision": {"tile": 4, "kept": "fp8"},
    },
    "nvfp4": {
        "plan": {"data": 2, "tensor": 2, "zero": 1},
        "model": SHORT | {"layers": 3},
        "train": {"precision": "nvfp4"},
        "precision": {"tile": 4},
    },
    "mxfp4 with experts": {
        "plan": {"data": 2, "expert": 2, "zero": 1},
        "model": MIXTRAL | {"layers": 3},
        "train": {"precision": "mxfp4"},
        "precision": {"tile": 4},
    },
    "forward in 4 bits, backward in 8": {
        "plan": {"data": 2, "context": 2, "zero": 3},
        "model": SHORT | {"layers": 3},
        "train": {"precision": "mxfp4"},
        "precision": {"tile": 4, "input_gradient": "fp8", "weight_gradient": "mxfp8"},
    },
    "experts in a pipeline": {
        "plan": {"pipeline": 2, "data": 2, "tensor": 2, "expert": 2, "zero": 1},
        "model": MIXTRAL | {"layers": 4, "ffn": 128},
    },
}


@pytest.fixture(scope="module", params=PLANS)
def both(request: pytest.FixtureRequest) -> tuple[RunSpec, list[tuple[RankCounts, RankCounts]]]:
    """Return the run, and the counts of its first and last rank, both when all ranks ran and in dry runs."""
    spec = brief_run(**{"model": SHORT} | PLANS[request.param])
    together = real(spec)
    return spec, [(together[rank], dry(spec, rank)) for rank in (0, spec.plan.ranks - 1)]


Both = tuple[RunSpec, list[tuple[RankCounts, RankCounts]]]


@sampled(3)
def test_messages_are_the_same_calls_and_bytes(both: Both) -> None:
    for run, alone in both[1]:
        assert alone.traffic == run.traffic
        assert sum(row.bytes for row in alone.traffic) > 0


@sampled(6)
def test_state_is_the_same_bytes(both: Both) -> None:
    spec, pairs = both
    totals = 6 * 8 * (1 + spec.plan.ranks)  # gathered weights of the step: gloo's thread may release them shortly after it
    for run, alone in pairs:
        assert (alone.parameters, alone.state, alone.parts) == (run.parameters, run.state, run.parts)
        for category in ("weights", "optimizer"):
            assert alone.memory.most[category] == run.memory.most[category] > 0
        left = {name: size - alone.memory.between[name] for name, size in run.memory.between.items()}
        assert 0 <= left.pop("buffers") <= totals
        assert not any(left.values())
        assert alone.memory.building == run.memory.building


@sampled(6)
def test_activations_differ_at_most_by_messages_under_way(both: Both) -> None:
    """A message is held until it is sent, which takes no time in a dry run."""
    spec, pairs = both
    for run, alone in pairs:
        ours, theirs = alone.memory.most["activations"], run.memory.most["activations"]
        assert theirs * 0.97 <= ours <= theirs
        if spec.plan.pipeline == 1:
            assert ours == theirs


@sampled(6)
def test_products_and_attention_are_the_same_flops(both: Both) -> None:
    for run, alone in both[1]:
        assert alone.work.products == run.work.products > 0
        assert alone.work.attention == run.work.attention > 0


@sampled(6)
def test_actions_run_in_the_order_of_the_program(both: Both) -> None:
    spec, pairs = both
    plan = spec.plan
    program = lower(build(plan.schedule, ranks=plan.pipeline, microbatches=spec.microbatches, chunks=plan.chunks), plan.zero)
    for run, alone in pairs:
        row = [str(action) for action in program.rows[run.coordinates["pipeline"]]]
        assert _once(alone.actions) == _once(run.actions) == _once(row)


def _once(actions: list[str]) -> list[str]:
    """A computation that waits for a transfer continues later, under the same name."""
    return [name for name, _ in groupby(actions)]
