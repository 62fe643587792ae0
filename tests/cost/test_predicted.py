"""Predictions for a rank equal its dry run exactly, except for choices that are left to kernels, and padding of shares."""

from pathlib import Path
from typing import Any

import pytest

from megalith.cost.gathered import packed_bytes
from megalith.cost.predicted import Comparison, held, predict, workload_of
from megalith.planner.compared import compare
from megalith.prove.meter import CATEGORIES
from megalith.schedule import SCHEDULES
from megalith.spec import files
from megalith.spec.run import RunSpec
from tests.full import sampled
from tests.prove.dry import dry
from tests.specs import TINY_EXPERTS, brief_run

pytestmark = pytest.mark.slow

RUNS = {
    "sites": brief_run(plan={"data": 2, "zero": 1}, train={"global_batch": 8}, sites={"bits": 4, "fragments": 2, "overlap": 1}),
    "sites without momentum": brief_run(plan={"data": 2, "zero": 3}, train={"global_batch": 8}, sites={"momentum": 0.0}),
    "sites, state on disk": brief_run(
        plan={"data": 2, "zero": 2, "state": {"optimizer": "disk"}}, train={"precision": "bf16"}, sites={"count": 1, "bits": 4}
    ),
    "hsdp": brief_run(plan={"data": 4, "replicate": 2, "zero": 3}),
    "pipeline": brief_run(plan={"data": 2, "pipeline": 2, "zero": 2}),
    "context": brief_run(plan={"data": 2, "context": 2, "zero": 1, "recompute": "full"}),
    "gather": brief_run(plan={"context": 4, "context_method": "gather", "zero": 1}, train={"precision": "bf16"}),
    "ulysses and gather": brief_run(
        plan={"context": 4, "context_method": "gather", "ulysses": 2, "zero": 0, "recompute": "full"}
    ),
    "ulysses": brief_run(plan={"data": 2, "context": 2, "ulysses": 2, "zero": 1}),
    "ulysses, more ranks than key heads": brief_run(plan={"context": 4, "ulysses": 4, "zero": 0, "recompute": "full"}),
    "segments, zero 3": brief_run(plan={"data": 2, "zero": 3, "recompute": "segments:3"}),
    "nested segments in a pipeline": brief_run(plan={"data": 2, "pipeline": 2, "zero": 2, "recompute": "sqrt"}),
    "ulysses in a ring": brief_run(plan={"context": 4, "ulysses": 2, "zero": 2}),
    "tensor": brief_run(plan={"data": 2, "tensor": 2, "zero": 1}, train={"precision": "bf16"}),
    "chunks": brief_run(
        plan={"data": 2, "pipeline": 2, "chunks": 2, "schedule": "interleaved", "zero": 1}, train={"precision": "bf16"}
    ),
    "embedding and head alone": brief_run(
        plan={"data": 2, "pipeline": 2, "chunks": 2, "schedule": "interleaved", "zero": 2, "layers": (0, 2, 2, 0)}
    ),
}


@pytest.fixture(scope="module", params=RUNS)
def lines(request: pytest.FixtureRequest) -> dict[str, Comparison]:
    spec: RunSpec = RUNS[request.param]
    return {line.name: line for line in compare(predict(workload_of(spec), rank=1), dry(spec, 1))}


@sampled(4, together=True)
def test_products_and_attention_are_the_same_flops(lines: dict[str, Comparison]) -> None:
    assert lines["work.products"].gap == 0
    assert lines["work.attention"].gap == pytest.approx(0)


@sampled(4)
def test_weights_gradients_and_messages_are_the_same_bytes(lines: dict[str, Comparison]) -> None:
    """Bytes on the tensor axis are equal, except for a few numbers per token in the loss."""
    found = {name: line for name, line in lines.items() if name.endswith(".bytes") and line.counted > 4096}
    assert found
    for name, line in found.items():
        assert line.gap == pytest.approx(0, abs=0.005), (name, line)


@sampled(4)
def test_state_is_near_what_is_counted(lines: dict[str, Comparison]) -> None:
    assert lines["memory.optimizer"].gap == pytest.approx(0, abs=0.02)
    assert lines["memory.weights"].gap == pytest.approx(0, abs=0.3)  # the moment of the peak determines which parts are gathered


@sampled(4, together=True)
def test_anchors_on_the_host_take_there_what_they_took_on_the_device() -> None:
    """Anchors, velocities and rounding errors are 12 bytes a weight, and nothing else moves."""

    def found(place: str) -> dict[str, Comparison]:
        sites = {"bits": 4, "fragments": 2, "overlap": 1, "place": place}
        spec = brief_run(plan={"data": 2, "zero": 1}, train={"global_batch": 8}, sites=sites)
        return {line.name: line for line in compare(predict(workload_of(spec), rank=1), dry(spec, 1))}

    near, far = found("device"), found("host")
    for which in ("predicted", "counted"):
        before, after, moved = (
            getattr(line, which) for line in (near["memory.optimizer"], far["memory.optimizer"], far["memory.host"])
        )
        assert moved and before - after == moved
        assert getattr(far["memory.activations"], which) == getattr(near["memory.activations"], which)
    assert far["memory.host"].gap == pytest.approx(0, abs=0.01), "vectors have no rounding errors"


@sampled(4)
def test_gradients_are_those_of_the_stages_that_are_in_backward(lines: dict[str, Comparison]) -> None:
    """Equal to within a block, because the peak may come at any point of a block's backward."""
    line = lines["memory.gradients"]
    block = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)
    assert line.predicted is not None
    assert line.counted <= line.predicted <= line.counted + block


@sampled(4, together=True)
def test_weights_of_blocks_of_mtp_modules_are_kept_and_sent() -> None:
    spec = brief_run(plan={"data": 2, "pipeline": 2, "zero": 3}, model={"preset": "deepseek-tiny"})
    found = {line.name: line.gap for line in compare(predict(workload_of(spec), rank=3), dry(spec, 3))}
    assert found["memory.optimizer"] == pytest.approx(0, abs=0.001)
    for axis in ("dp_shard", "expert dp_shard"):
        for kind in ("all-gather", "reduce-scatter"):
            assert found[f"traffic.{axis}.{kind}.calls"] == found[f"traffic.{axis}.{kind}.bytes"] == 0


def test_a_gap_is_a_share_of_what_was_counted() -> None:
    assert Comparison("memory.weights", 110.0, 100.0).gap == pytest.approx(0.1)
    assert Comparison("memory.weights", None, 100.0).gap is None
    assert Comparison("traffic.pipeline.send.bytes", 5.0, 0).gap is None


@pytest.mark.parametrize("message", ["dispatch", "combine_gradients"])
@sampled(4, together=True)
def test_messages_of_experts_in_8_bits_are_52_percent_of_the_bytes(message: str) -> None:
    """Two of four blocks send tokens, or the gradients of results, in 8 bits. All other messages, of four in a block, are in bf16."""
    model = {"family": "mixtral", "dim": 128, "ffn": 128, "experts": 4, "active": 2}
    train = {"precision": "fp8", "seq_len": 128}
    runs = (
        brief_run(plan={"data": 4, "expert": 2, "zero": 1}, model=model, train=train, precision={message: how})
        for how in ("wide", "fp8")
    )
    found = [{line.name: line for line in compare(predict(workload_of(spec), rank=1), dry(spec, 1))} for spec in runs]
    wide, packed = (lines["traffic.expert.all-to-all.bytes"] for lines in found)
    assert wide.predicted is not None and packed.predicted is not None
    rows = wide.predicted / 4 / 2  # one of four messages, in half of the blocks
    assert wide.counted - packed.counted == wide.predicted - packed.predicted == rows * (1 - 132 / 256) > 0


ROOT = Path(__file__).parents[2]
ZERO_BUBBLE = ["plan.recompute=full", "train.precision=bf16", "model.layers=8"]
"""Between the halves of a backward more waits than a recomputed forward left."""
EXPERTS_APART = [
    "model.preset=deepseek-tiny", "model.layers=8", "plan.data=2", "plan.expert=2", "plan.recompute=selective",
    "plan.recompute_parts=['attend', 'mlp.experts', 'mlp.shared']", "train.precision=bf16",
]  # fmt: skip
"""The rows that come back from experts of other ranks are not kept."""
CUT: dict[str, tuple[str, int, list[str]]] = {
    "zero 3 in bf16": ("llama3.1-8b-h100", 0, ["model.layers=2", "train.global_batch=24"]),
    "one gpu, small state": ("llama3.1-8b-one-gpu", 0, ["model.layers=2", "train.global_batch=2"]),
    "gpipe's last stage": ("cpu-gpipe", 3, ["train.precision=bf16"]),
    "tensor ranks": ("cpu-small-state", 1, []),
    "weights elsewhere": ("cpu-offload-weights", 1, []),
    "weights elsewhere, one shard": ("cpu-offload-weights", 0, ["plan.data=1", "model.layers=4", "train.global_batch=4"]),
    "experts": ("cpu-expert", 0, []),
    "weight gradients put off, first rank": ("cpu-zb-h1", 0, ZERO_BUBBLE),
    "weight gradients put off, last rank": ("cpu-zb-h1", 3, ZERO_BUBBLE),
    "weight gradients of experts put off": ("cpu-zb-h1", 6, EXPERTS_APART),
}


@pytest.mark.parametrize("run", CUT.values(), ids=CUT)
@sampled(4, together=True)
def test_the_memory_of_a_recipe_is_predicted_within_5_percent(run: tuple[str, int, list[str]]) -> None:
    """The larger models have fewer layers here."""
    name, rank, settings = run
    spec = files.load(ROOT / "recipes" / f"{name}.toml", overrides=settings).spec
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=rank), dry(spec, rank))}
    assert lines["memory.all"].gap == pytest.approx(0, abs=0.05), [lines[f"memory.{one}"] for one in CATEGORIES]


WIDER = {"dim": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 896, "vocab": 1024, "context": 512}
ONCE: dict[str, dict[str, Any]] = {
    "nothing recomputed": {"zero": 1, "recompute": "none"},
    "all recomputed, zero 3": {"zero": 3, "recompute": "full"},
    "both halves recomputed": {"zero": 1, "recompute": "selective", "recompute_parts": ("attend", "mlp")},
    "segments, zero 3": {"zero": 3, "recompute": "segments:2"},
}


@pytest.mark.parametrize("plan", ONCE.values(), ids=ONCE)
@sampled(2)
def test_a_backward_that_is_not_split_is_predicted_within_3_percent(plan: dict[str, Any]) -> None:
    """Each weight gradient is computed at once and its factors are freed, and at the peak only some of a block's gradients exist."""
    spec = brief_run(plan={"data": 2} | plan, model=WIDER, train={"precision": "bf16", "seq_len": 512})
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=0), dry(spec, 0))}
    assert lines["memory.gradients"].gap == 0
    assert lines["memory.activations"].gap == pytest.approx(0, abs=0.03)
    assert lines["memory.all"].gap == pytest.approx(0, abs=0.015)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if not kind.needs_post_validation])
def test_the_worst_rank_is_found(name: str, recompute: str) -> None:
    """With recomputation, the ranks that defer the most weight gradients may hold the most, not those with the most in flight."""
    plan = {"pipeline": 8, "schedule": name, "chunks": SCHEDULES[name].chunks.usual, "recompute": recompute}
    spec = brief_run(plan=plan, train={"global_batch": 32}, model={"layers": 16})
    most = held(load := workload_of(spec))
    ranks = [sum(predict(load, rank=rank).memory.values()) for rank in range(8)]
    assert ranks[most.rank] == pytest.approx(max(ranks), rel=0.01), (most.rank, ranks)
    assert most.total - most.non_torch == pytest.approx(max(ranks), rel=0.05), ranks


@pytest.mark.parametrize("method", ["ring", "gather"])
@sampled(1)
def test_memory_of_context_ranks_is_predicted_within_5_percent(method: str) -> None:
    """In a long sequence the gradients of keys and values that are on their way are most of a small model's memory."""
    model = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 128, "context": 2048}
    plan = {"context": 4, "context_method": method, "recompute": "full"}
    spec = brief_run(plan=plan, train={"seq_len": 2048, "precision": "bf16"}, model=model)
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=1), dry(spec, 1))}
    assert lines["memory.all"].gap == pytest.approx(0, abs=0.05), [lines[f"memory.{one}"] for one in CATEGORIES]


GATHERED: dict[str, dict[str, Any]] = {
    "experts apart": {"plan": {"data": 4, "expert": 2, "zero": 3}, "model": TINY_EXPERTS},
    "tensor ranks, recomputed": {"plan": {"data": 2, "tensor": 2, "zero": 3, "recompute": "segments:2"}, "model": {"ffn": 64}},
    "shards that cut tiles": {"plan": {"data": 8, "zero": 2}},  # 2 rows of keys and of values, 4 of queries
}


@pytest.mark.parametrize("run", GATHERED.values(), ids=GATHERED)
@sampled(4, together=True)
def test_weights_gathered_in_8_bits_are_the_bytes_of_codes_and_scales(run: dict[str, Any]) -> None:
    """The difference is the predicted one, to the byte. The messages that ZeRO 3 keeps until the end of the step count as
    buffers."""

    def found(gather: str) -> dict[str, Comparison]:
        spec = brief_run(**run | {"train": {"precision": "fp8"}, "precision": {"tile": 4, "gather": gather}})
        return {line.name: line for line in compare(predict(workload_of(spec), rank=1), dry(spec, 1))}

    def less(name: str) -> float:
        (predicted, counted), (few, of_them) = ((one[name].predicted or 0.0, one[name].counted) for one in (wide, packed))
        assert predicted - few == counted - of_them, name
        return counted - of_them

    wide, packed = found("wide"), found("fp8")
    sent = [name for name, one in wide.items() if name.endswith("all-gather.bytes") and "dp_shard" in name and one.predicted]
    assert sent and all(less(name) > 0 for name in sent)
    if "recompute" in run["plan"]:  # the other ranks then have their peak at another moment
        assert less("memory.buffers") < 0


def test_a_weight_of_whole_tiles_is_gathered_in_half_of_the_bytes() -> None:
    """A message has one byte for each number, and four bytes for each tile's scale."""
    assert packed_bytes((4096, 1024), 128) / (2 * 4096 * 1024) == 0.5 + 2 / 128**2


@sampled(4, together=True)
def test_inputs_kept_in_8_bits_are_the_bytes_predicted() -> None:
    """Several microbatches are in flight at the peak. With a scale for each 4 numbers, 8 bits take as much as bf16, and the output of
    attention is also kept for its own backward. During backward one input, the largest, is in bf16 again in addition."""

    def found(kept: str) -> Comparison:
        run = {"model": {"layers": 6}, "train": {"precision": "fp8", "seq_len": 64}, "precision": {"tile": 4, "kept": kept}}
        spec = brief_run(plan={"pipeline": 2, "data": 2, "schedule": "gpipe"}, **run)
        return {line.name: line for line in compare(predict(workload_of(spec), rank=0), dry(spec, 0))}["memory.activations"]

    wide, packed = found("wide"), found("fp8")
    assert wide.predicted is not None and packed.predicted is not None
    assert packed.counted - wide.counted == packed.predicted - wide.predicted + 64 * 48 * 2 > 0
