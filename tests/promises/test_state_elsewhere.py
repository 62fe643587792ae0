"""State in host memory or on disk changes no bit, under any plan, and any plan and place loads the checkpoints of any other."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.shares import as_tensor, shares
from megalith.cost.predicted import predict, workload_of
from megalith.parallel.data import local
from megalith.planner.compared import compare
from megalith.prove.dryrun import count, single_documents
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import RunSpec
from megalith.spec.sizes import model_parameters
from megalith.spec.state import DISK_SLOTS, away_names
from megalith.train.assemble import Trainer
from megalith.train.loop import stepper_of
from megalith.train.offload.slot_file import PAGE
from tests.full import FULL, sampled
from tests.parallel.running import microbatches, trainer_of
from tests.prove.dry import dry
from tests.ranks import run_ranks
from tests.specs import brief_run

DEVICE, HALF = {"optimizer": "device"}, {"optimizer": "host", "share": 0.5}
HOST, DISK, SOME = {"optimizer": "host"}, {"optimizer": "disk"}, {"optimizer": "disk", "share": 0.6}
STEPS = 3

Held = dict[str, Tensor]


def _state(trainer: Trainer) -> Held:
    """Return this rank's shares, wherever they are stored."""
    return {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}


def _train(trainer: Trainer, first: int = 0, steps: int = STEPS) -> list[float]:
    """Return the losses of some steps. The last update is settled."""
    stepper = stepper_of(trainer)
    told = []
    for step in range(first, first + steps):
        told += stepper.step(microbatches(trainer, step), step=step)
    return [each.loss for each in (*told, *stepper.settle())]


def _at(spec: RunSpec, place: dict[str, Any]) -> RunSpec:
    """The run with its state at `place`."""
    plan = spec.plan.model_validate(spec.plan.model_dump() | {"state": place})
    return spec.model_copy(update={"plan": plan})


def _trained(rank: int, spec: RunSpec, places: list[dict[str, Any]]) -> list[tuple[list[float], Held]]:
    """Return losses and state after some steps, for each place."""
    found = []
    for place in places:
        trainer = trainer_of(_at(spec, place))
        found.append((_train(trainer), _state(trainer)))
    return found


def _same(found: list[tuple[list[float], Held]]) -> None:
    (losses, state), *others = found
    assert len(set(losses)) == STEPS
    for other, held in others:
        assert other == losses
        assert held.keys() == state.keys()
        for key in state:
            assert torch.equal(held[key], state[key]), key


def _check(spec: RunSpec, *places: dict[str, Any]) -> None:
    for found in run_ranks(_trained, spec.plan.ranks, spec, [DEVICE, *places]):
        _same(found)


BOTH = ("fp32", "bf16")
KINDS = [(kind, precision) for number, kind in enumerate(OPTIMIZERS) for precision in (BOTH if FULL else BOTH[number % 2 :][:1])]


@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_no_bit_changes_under_any_optimizer(kind: str, precision: str) -> None:
    """Clipping is active: the norm is known before the first part is updated."""
    optimizer = {"kind": kind, "clip": 0.05, "nesterov": False}
    _check(brief_run(plan={}, model={"layers": 2}, train={"precision": precision}, optimizer=optimizer), HOST, DISK, SOME)


PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 2, "zero": 1}, {}),
    ({"data": 2, "zero": 3}, {}),
    ({"data": 2, "zero": 2, "post_validation": True, "pipeline": 2, "schedule": "zb-h2"}, {}),
    ({"data": 2, "expert": 2, "zero": 3}, {"preset": "deepseek-tiny"}),
]
PLANS += [
    ({"data": 2, "zero": 0}, {}),
    ({"data": 4, "replicate": 2, "zero": 1}, {}),
    ({"tensor": 2, "data": 2, "zero": 2}, {}),
    ({"pipeline": 2, "schedule": "interleaved", "chunks": 2}, {"tied": True}),
    ({"pipeline": 2, "data": 2, "expert": 2, "schedule": "dualpipe"}, {"preset": "deepseek-tiny"}),
] * FULL


@sampled(4, together=True)
@pytest.mark.parametrize(("plan", "model"), PLANS, ids=str)
def test_no_bit_changes_under_any_plan(plan: dict[str, Any], model: dict[str, Any]) -> None:
    _check(brief_run(plan=plan, model=model, train={"precision": "bf16"}, optimizer={"clip": 0.05}), HALF, DISK)


WEIGHTS = [
    {"optimizer": place, "weights": place, "share": share} for place, share in (("disk", 1.0), ("host", 0.5), ("disk", 0.6))
]

GATHERED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero": 3}, {"tied": True}),
    ({"data": 2, "zero": 3, "recompute": "sqrt"}, {}),
    ({"data": 2, "zero": 3, "post_validation": True, "pipeline": 2, "schedule": "zb-h2"}, {}),
    ({"data": 2, "expert": 2, "zero": 3}, {"preset": "deepseek-tiny"}),
    ({"data": 3, "zero": 3}, {"dim": 32}),  # shares of different sizes: what is on disk on one rank may be kept on another
]
GATHERED += [
    ({"tensor": 2, "data": 2, "zero": 3}, {}),
    ({"data": 4, "replicate": 2, "zero": 3}, {}),
    ({"pipeline": 2, "data": 2, "expert": 2, "zero": 3, "schedule": "dualpipev", "chunks": 2}, {"preset": "deepseek-tiny"}),
] * FULL


@sampled(4, together=True)
@pytest.mark.parametrize(("plan", "model"), GATHERED, ids=str)
def test_weights_that_are_made_at_each_gather_are_the_same_bits(plan: dict[str, Any], model: dict[str, Any]) -> None:
    _check(brief_run(plan=plan, model=model, train={"precision": "bf16"}, optimizer={"clip": 0.05}), *WEIGHTS)


FORMATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"precision": "fp8"}, {"tile": 4, "gather": "fp8"}),
    ({"precision": "bf16", "gradients": "bf16"}, {}),
]


@pytest.mark.parametrize(("train", "precision"), FORMATS, ids=str)
def test_weights_that_are_made_at_each_gather_are_the_same_bits_in_other_formats(
    train: dict[str, Any], precision: dict[str, Any]
) -> None:
    _check(brief_run(plan={"data": 2, "zero": 3}, model={"layers": 3}, train=train, precision=precision), *WEIGHTS[:2])


def test_weights_are_read_in_pieces_and_none_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.train.offload.home.MIB", 1 << 13)
    spec = brief_run(plan={"data": 2, "zero": 3}, model={"vocab": 331}, train={"precision": "bf16", "global_batch": 2})
    place = WEIGHTS[0] | {"release": True, "chunk": 1}
    _check(spec, WEIGHTS[0] | {"chunk": 1}, place)
    assert not any(run_ranks(_kept, 2, _at(spec, place)))


def _kept(rank: int, spec: RunSpec) -> int:
    """Bytes of weights that a rank keeps after a step: shares, those that compute, and master weights."""
    trainer = trainer_of(spec)
    _train(trainer, steps=1)
    weights = {
        weight for runner in trainer.runners.values() for used in runner.buckets for bucket in used for weight in bucket.weights
    }
    kept = (weight.compute.untyped_storage().nbytes() + local(weight.master).untyped_storage().nbytes() for weight in weights)
    return sum(kept) + sum(weight.moved is not None for weight in weights)


TILES = {"vocab_tile": 2048, "precision": "bf16"}
TABLES = {"vocab": 5000}
"""Tables of three tiles, the last one shorter."""

CUT: list[tuple[dict[str, Any], dict[str, Any]]] = [({"zero": 3, "tensor": 2}, {})]
CUT += [({"zero": 3, "pipeline": 2, "schedule": "zb-h1"}, {}), ({"zero": 3}, {"tied": True})] * FULL


@pytest.mark.parametrize(("plan", "model"), CUT, ids=str)
def test_tables_that_are_read_in_tiles_are_the_same_bits(plan: dict[str, Any], model: dict[str, Any]) -> None:
    _check(brief_run(plan=plan, model=TABLES | model, train=TILES, optimizer={"clip": 0.05}), *WEIGHTS)


@pytest.mark.parametrize(
    ("gradients", "moments", "place"), [("fp32", "fp32", "disk"), ("bf16", "fp32", "host"), ("fp32", "fp8", "host")]
)
def test_tables_that_are_updated_in_tiles_are_the_same_bits(
    gradients: str, moments: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clip bites, so the norm that is added up over tiles has the bits of the whole gradient's."""
    monkeypatch.setattr("megalith.train.offload.home.MIB", 1 << 16)
    train = TILES | {"global_batch": 1, "gradients": gradients}
    optimizer = {"clip": 0.05, "moments": moments, "moment_block": 32}
    spec = brief_run(plan={"zero": 3}, model=TABLES | {"layers": 2}, train=train, optimizer=optimizer)
    _check(spec, {"optimizer": place, "weights": place, "release": True, "chunk": 1})


def test_no_table_is_whole_in_a_step() -> None:
    spec = brief_run(plan={"zero": 3}, model=TABLES, train=TILES | {"global_batch": 1}, optimizer={"clip": 0.0})
    one_more = 1  # for the gradients of tokens outside the tile
    assert run_ranks(_largest, 1, _at(spec, WEIGHTS[0] | {"release": True})) == [(2048 + one_more) * 32]


def _largest(rank: int, spec: RunSpec) -> int:
    """The elements of the largest tensor in memory in a step, apart from the bytes of chunks."""
    trainer = trainer_of(spec)
    with _Largest() as largest:
        _train(trainer, steps=1)
    return largest.elements


class _Largest(TorchDispatchMode):
    """Records the elements of the largest floating-point result. A weight whose memory was freed has none."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not isinstance(tensor, DTensor):
                self.elements = max(
                    self.elements, min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
                )
        return out


def test_large_tensors_are_updated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.train.offload.home.MIB", 1 << 13)
    for kind in ("adamw", "sgd", "lion"):
        spec = brief_run(plan={"state": {"chunk": 1}}, optimizer={"kind": kind, "clip": 0.05}, model={"vocab": 331})
        _check(spec, {"optimizer": "disk", "chunk": 1})


def _saved(rank: int, spec: RunSpec, folder: Path) -> tuple[Held, Held]:
    """Return the state after two steps, which are saved, and after two more."""
    trainer = trainer_of(spec)
    _train(trainer, steps=2)
    Checkpointer(folder).save(2, trainer.state.laid(), {}, asynchronous=True)
    before = _state(trainer)
    _train(trainer, first=2, steps=2)
    return before, _state(trainer)


def _resumed(rank: int, spec: RunSpec, folder: Path) -> tuple[Held, Held]:
    """Return the state as loaded, and after two more steps."""
    trainer = trainer_of(spec)
    assert Checkpointer(folder).load(trainer.state.laid()) is not None
    trainer.state.updates = 2
    trainer.state.loaded()
    before = _state(trainer)
    _train(trainer, first=2, steps=2)
    return before, _state(trainer)


PAIRS = [(DISK, DEVICE), (DEVICE, DISK), (DISK, SOME), (HOST, DISK), (DEVICE, WEIGHTS[0]), (WEIGHTS[0], WEIGHTS[1])]


@sampled(4, together=True)
@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=str)
def test_any_place_goes_on_from_what_another_one_saved(saver: dict[str, Any], loader: dict[str, Any], tmp_path: Path) -> None:
    for precision in ("fp32", "bf16") if FULL and "weights" not in loader else ("bf16",):
        first, second = (
            brief_run(plan={"zero": 3 if "weights" in place else 1, "state": place}, train={"precision": precision})
            for place in (saver, loader)
        )
        ((before, after),) = run_ranks(_saved, 1, first, tmp_path / precision)
        ((loaded, trained),) = run_ranks(_resumed, 1, second, tmp_path / precision)
        for one, other in ((before, loaded), (after, trained)):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("place", [DISK, WEIGHTS[0]], ids=str)
def test_any_plan_loads_what_is_on_disk(place: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint is of whole tensors: two ranks load what one saved, box by box."""
    one = brief_run(plan={"zero": 3, "state": place}, train={"precision": "bf16"})
    two = brief_run(plan={"data": 2, "zero": 3, "state": place}, train={"precision": "bf16"})
    ((before, _),) = run_ranks(_saved, 1, one, tmp_path)
    for loaded, _ in run_ranks(_resumed, 2, two, tmp_path):
        for key, share in loaded.items():
            whole = before[key]
            if whole.shape == share.shape:
                assert torch.equal(whole, share)
            else:
                assert any(torch.equal(half, share) for half in whole.chunk(2)), key


def test_the_largest_parameters_that_fit_a_share_are_elsewhere() -> None:
    sizes = {"embedding": 100, "norm": 4, "up": 60, "down": 60, "nothing": 0}
    assert away_names(sizes, 1.0) == ["embedding", "norm", "up", "down"]
    assert away_names(sizes, 0.5) == ["embedding", "norm"]
    assert away_names(sizes, 0.3) == ["norm", "up"]
    assert away_names(sizes, 0.0) == []


def _bytes(rank: int, spec: RunSpec) -> dict[str, int]:
    return trainer_of(spec).state.bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_on_each_tier_are_those_of_the_slots(precision: str) -> None:
    sizes = {"dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 1024}
    near, host, disk = (
        run_ranks(_bytes, 1, brief_run(plan={"state": place}, model=sizes, train={"precision": precision}))[0]
        for place in (DEVICE, HOST, DISK)
    )
    moved = near["optimizer"] + (near["weights"] if precision == "bf16" else 0)
    assert host["host"] == moved and host["optimizer"] == disk["optimizer"] == 0
    assert host["weights"] == disk["weights"] == (0 if precision == "bf16" else near["weights"])
    assert disk["disk"] == pytest.approx(DISK_SLOTS * moved, rel=0.03)


def test_a_real_run_holds_what_a_dry_one_counts() -> None:
    spec = brief_run(plan={"data": 2, "zero": 1, "state": SOME}, train={"precision": "bf16"})
    for real, fake in run_ranks(_both, 2, spec):
        assert real == fake


def _both(rank: int, spec: RunSpec) -> list[dict[str, int]]:
    made = [single_documents(spec)] * spec.microbatches
    return [count(spec, made, fake_tensors=fake).state for fake in (False, True)]


@pytest.mark.parametrize(
    ("kind", "place"),
    [("adamw", {"optimizer": "host", "share": 0.5}), ("muon", DISK), ("lion", {"optimizer": "disk", "share": 0.7})],
)
def test_bytes_on_each_tier_equal_the_prediction(kind: str, place: dict[str, Any]) -> None:
    sizes = {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 1024}
    spec = brief_run(
        plan={"data": 2, "zero": 1, "state": place}, model=sizes, train={"precision": "bf16"}, optimizer={"kind": kind}
    )
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=1), dry(spec, 1))}
    assert lines[f"memory.{place['optimizer']}"].gap == pytest.approx(0, abs=0.03)
    assert lines["memory.weights"].gap == pytest.approx(0, abs=0.03)
    left = lines["memory.optimizer"]
    assert left.gap == pytest.approx(0, abs=0.03) if left.counted else not left.predicted


ALL: dict[str, dict[str, Any]] = {
    "one rank": {"plan": {"zero": 0, "state": HOST}},
    "zero 1": {"plan": {"data": 2, "zero": 1, "state": HOST}},
    "moments in 8 bits": {
        "plan": {"data": 2, "zero": 1, "state": HOST}, "optimizer": {"moments": "fp8", "moment_block": 8, "moment_least": 64},
    },
    "split16": {"plan": {"zero": 0, "state": HOST}, "optimizer": {"master": "split16"}},
    "split8": {"plan": {"data": 2, "zero": 1, "state": HOST}, "optimizer": {"master": "split8"}},
    "tensor ranks": {"plan": {"tensor": 2, "state": HOST}},
    "disk, weights too": {"plan": {"data": 2, "zero": 3, "state": DISK | {"weights": "disk"}}},
    "disk, pipeline": {"plan": {"data": 2, "pipeline": 2, "zero": 1, "state": DISK}},
}  # fmt: skip


@pytest.mark.parametrize("run", ALL.values(), ids=ALL)
@sampled(2)
def test_all_state_elsewhere_is_predicted_to_the_byte(run: dict[str, Any]) -> None:
    """On disk, each tensor of a parameter fills whole pages of each of three files, which begin with a header."""
    spec = brief_run(train={"precision": "bf16"}, **run)
    rank, place = spec.plan.ranks - 1, spec.plan.state.optimizer
    (tier,) = (one for one in compare(predict(workload_of(spec), rank=rank), dry(spec, rank)) if one.name == f"memory.{place}")
    assert tier.predicted
    tensors = 3 * len(model_parameters(spec.model.build()))  # master weight and two moments
    padding = DISK_SLOTS * PAGE * (tensors + 2) if place == "disk" else 0
    assert tier.predicted <= tier.counted <= tier.predicted + padding


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("place", WEIGHTS, ids=str)
@sampled(2)
def test_weights_elsewhere_are_missing_on_the_device_as_predicted(place: dict[str, Any], shards: int) -> None:
    sizes = {"layers": 4, "dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 1024}
    spec = brief_run(plan={"data": shards, "zero": 3, "state": place}, model=sizes, train={"precision": "bf16"})
    lines = {line.name: line for line in compare(predict(workload_of(spec), rank=shards - 1), dry(spec, shards - 1))}
    assert lines[f"memory.{place['optimizer']}"].gap == pytest.approx(0, abs=0.03)
    assert lines["memory.all"].gap == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("place", "share"), [("host", 1.0), ("host", 0.9), ("disk", 0.9)])
def test_building_holds_the_master_weights_of_one_part_besides_what_is_predicted(place: str, share: float) -> None:
    sizes = {"layers": 8, "dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 512}
    state = {"optimizer": place, "weights": place, "share": share}
    spec = brief_run(plan={"zero": 3, "state": state}, model=sizes, train={"precision": "bf16"})
    predicted, counted, parts = predict(workload_of(spec), rank=0), dry(spec, 0), Counter[str]()
    for name, parameter in model_parameters(spec.model.build()).items():
        parts[".".join(name.split(".")[:2])] += parameter.numel
    kept = predicted.memory["weights"] + predicted.memory["optimizer"] + predicted.memory["buffers"]
    assert counted.memory.building <= kept + 4 * max(parts.values())


@pytest.mark.parametrize("release", [False, True])
def test_tables_in_tiles_take_the_memory_that_is_predicted(release: bool) -> None:
    """The tables are most of this model; in tiles they take less memory than whole ones."""
    sizes = {"layers": 2, "dim": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "ffn": 192, "vocab": 1 << 14}
    found = []
    for tile in (0, 1024):
        train = {"precision": "bf16", "global_batch": 1, "vocab_tile": tile}
        spec = brief_run(plan={"zero": 3, "state": WEIGHTS[0] | {"release": release, "chunk": 1}}, model=sizes, train=train)
        predicted, counted = predict(workload_of(spec), rank=0), dry(spec, 0)
        assert sum(predicted.memory.values()) == pytest.approx(sum(counted.memory.peak.values()), rel=0.1), (predicted, counted)
        assert predicted.work.products == pytest.approx(counted.work.products, rel=0.01)
        found.append(counted.memory)
    whole, cut = (sum(memory.peak.values()) for memory in found)
    assert cut < (0.4 if release else 0.8) * whole
