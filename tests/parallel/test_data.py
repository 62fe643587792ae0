"""Data parallelism runs the collectives of the Program, equally often. A test in tests/promises counts the bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.kernels.numbers import Dtypes
from megalith.parallel.data import Bucket, Weight, local
from megalith.parallel.parcel import chunks_to_rows, rows_to_chunks
from megalith.parallel.place import Place
from megalith.parallel.reduction import Reducer
from megalith.schedule.action import parts
from megalith.spec.run import RunSpec
from megalith.train.step import compute, update
from tests.parallel.running import microbatches, trainer_of
from tests.parallel.traffic import Call, Traffic
from tests.ranks import run_ranks
from tests.specs import tiny_run

LAYERS = 3
GROUPS = LAYERS + 2  # the embedding, each block and the head are each gathered and reduced as a whole
RUNS: dict[str, dict[str, Any]] = {
    f"zero {zero}, {m} microbatches": {"plan": {"data": 2, "zero": zero}, "train": {"global_batch": 2 * m}}
    for zero in (0, 1, 2, 3)
    for m in (1, 4)
}
RUNS["gpipe"] = {"plan": {"data": 2, "zero": 3, "schedule": "gpipe"}, "train": {"global_batch": 8}}
RUNS["tied"] = {"plan": {"data": 2, "zero": 3}, "train": {"global_batch": 2}, "model": {"tied": True}}


@dataclass(frozen=True)
class Sent:
    """One rank's second step: calls by name, calls according to the Program, and parameters of the model."""

    calls: Mapping[str, list[Call]]
    said: Mapping[str, int]
    parameters: int


def spec_of(**run: Any) -> RunSpec:
    return tiny_run(**(run | {"model": {"layers": LAYERS} | run.get("model", {})}))


def second_step(spec: RunSpec) -> Sent:
    """The second step is recorded: the first may prepare what later ones reuse, and a gather that it leaves undone shows
    in the second."""
    trainer = trainer_of(spec)
    update(trainer, compute(trainer, microbatches(trainer), step=0), step=0)
    with Traffic() as traffic:
        computed = compute(trainer, microbatches(trainer, 1), step=1)
    update(trainer, computed, step=1)
    row = [action.kind for slot in trainer.executor.program.rows[0] for action in parts(slot)]
    return Sent(
        calls={name: traffic.of(name) for name in ("gather", "reduce_scatter", "all_reduce")},
        said={kind: row.count(kind) for kind in ("GATHER", "REDUCE")},
        parameters=sum(p.numel() for p in trainer.parameters.values()),
    )


def _all_runs(rank: int) -> dict[str, Sent]:
    return {name: second_step(spec_of(**run)) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def sent() -> dict[str, Sent]:
    """Return the recordings of every run on two data ranks, from the second rank."""
    first, second = run_ranks(_all_runs, 2)
    assert first == second
    return second


def elements(calls: list[Call]) -> int:
    return sum(call.elements for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 4])
def test_gathers_and_reductions_are_those_of_the_program(sent, zero, m):
    """ZeRO 1 gathers and reduces once, ZeRO 2 gathers once and reduces m times, ZeRO 3 gathers 2 m times and reduces m times."""
    found = sent[f"zero {zero}, {m} microbatches"]
    assert found.said == {"GATHER": {1: 1, 2: 1, 3: 2 * m}[zero], "REDUCE": {1: 1, 2: m, 3: m}[zero]}
    assert len(found.calls["reduce_scatter"]) == GROUPS * found.said["REDUCE"]
    assert len(found.calls["gather"]) == GROUPS * found.said["GATHER"]
    assert not found.calls["all_reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 4])
def test_zero_0_only_reduces_one_bucket_a_block_once_a_step(sent, m):
    found = sent[f"zero 0, {m} microbatches"]
    assert found.said == {"GATHER": 0, "REDUCE": 1}
    assert len(found.calls["all_reduce"]) == GROUPS
    assert elements(found.calls["all_reduce"]) == found.parameters
    assert not found.calls["gather"] and not found.calls["reduce_scatter"]


@pytest.mark.slow
def test_all_forwards_before_all_backwards_send_no_more(sent):
    found, other = sent["gpipe"], sent["zero 3, 4 microbatches"]
    assert len(found.calls["gather"]) == len(other.calls["gather"]) == GROUPS * 8
    assert len(found.calls["reduce_scatter"]) == GROUPS * 4


@pytest.mark.slow
def test_a_tied_table_is_gathered_and_reduced_once_for_both_its_ends(sent):
    found = sent["tied"]
    assert elements(found.calls["reduce_scatter"]) == found.parameters
    assert len(found.calls["reduce_scatter"]) == LAYERS + 2  # the table, each block, the final norm


def _replicas(rank: int) -> tuple[Sent, int, int]:
    spec = spec_of(plan={"data": 4, "replicate": 2, "zero": 3}, train={"global_batch": 4})
    trainer = trainer_of(spec)
    whole = sum(p.numel() for p in trainer.parameters.values())
    share = sum(p.to_local().numel() for p in trainer.parameters.values() if isinstance(p, DTensor))
    return second_step(spec), whole, share


@pytest.mark.slow
def test_replicas_of_shards_reduce_inside_a_group_and_then_between_groups():
    """Under HSDP every rank holds half of the state, and half of each gradient is then summed over the two groups."""
    for found, whole, share in run_ranks(_replicas, 4):
        assert share == whole // 2
        assert len(found.calls["reduce_scatter"]) == len(found.calls["all_reduce"]) == GROUPS


def _held(rank: int) -> dict[int, tuple[int, int, int]]:
    """Return for each ZeRO stage the elements of weights, gradients and moments between steps."""
    found = {}
    for zero in (0, 1, 2, 3):
        trainer = trainer_of(spec_of(plan={"data": 2, "zero": zero}, train={"global_batch": 2}))
        whole = sum(p.numel() for p in trainer.parameters.values())
        compute(trainer, microbatches(trainer), step=0)
        shares = [[p.to_local(), p.grad.to_local()] for p in trainer.parameters.values() if isinstance(p, DTensor)]
        weights, grads = (sum(share[i].numel() for share in shares) for i in (0, 1))
        moments = sum(m.numel() for key, m in trainer.state.shares("optimizer").items() if key.startswith("moments.first."))
        found[zero] = (whole // weights, whole // grads, whole // moments)
    return found


@pytest.mark.slow
def test_between_steps_a_rank_holds_its_share_of_weights_gradients_and_moments():
    for held in run_ranks(_held, 2):
        assert held == {0: (1, 1, 1)} | dict.fromkeys((1, 2, 3), (2, 2, 2))


def _alone(rank: int) -> list[tuple[int, bool]]:
    """Return, for one data rank, the calls of a step, and whether master weights and compute weights are the same tensors."""
    found = []
    for precision in ("fp32", "bf16"):
        trainer = trainer_of(spec_of(train={"precision": precision, "global_batch": 2}))
        with Traffic() as traffic:
            compute(trainer, microbatches(trainer), step=0)
        computes = trainer.stages[0].parameters_by_name()
        kept = {name: p.to_local() for name, p in trainer.parameters.items() if isinstance(p, DTensor)}
        calls = [c for name in ("gather", "reduce_scatter") for c in traffic.of(name)]
        found.append((len(calls), all(kept[name].data_ptr() == computes[name].data_ptr() for name in kept)))
    return found


@pytest.mark.slow
def test_one_data_rank_sends_nothing_and_in_fp32_holds_its_weights_once():
    assert run_ranks(_alone, 1) == [[(0, True), (0, False)]]


def _uneven(rank: int) -> bool:
    """Sizes such as 7 rows over 2 tensor x 3 data ranks give shares of different lengths, one of them empty."""
    mesh = DeviceMesh("cpu", torch.arange(6).view(1, 3, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tensor"))
    group = mesh.get_group("tensor")
    part = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) + 1000 * group.rank()
    bias = torch.arange(2, dtype=torch.float32)
    weights = [
        Weight(nn.Parameter(part.clone()), Place(mesh, (Shard(1),)), Dtypes.of("fp32")),
        Weight(nn.Parameter(bias.clone()), Place(mesh, (Replicate(),)), Dtypes.of("fp32")),
        Weight(nn.Parameter(part.T.clone()), Place(mesh, (Replicate(),), dim=1), Dtypes.of("fp32")),
    ]
    bucket = Bucket(weights)
    gone = all(w.compute.untyped_storage().nbytes() == 0 for w in weights)
    bucket.gather()
    back = [torch.equal(w.compute, whole) for w, whole in zip(weights, (part, bias, part.T), strict=True)]
    for weight in weights:
        weight.compute.grad = weight.compute.detach() * (1 + mesh.get_local_rank("dp_shard"))
    reducer = Reducer()
    reducer.add(bucket.reduce())
    reducer.finish()
    sums = [torch.equal(local(w.master.grad), 6 * local(w.master.detach())) for w in weights if w.master.grad is not None]
    dist.barrier()
    return gone and all(back) and len(sums) == 3 and all(sums)


@pytest.mark.slow
def test_shares_of_any_lengths_come_back_whole_and_their_gradients_add_up():
    assert all(run_ranks(_uneven, 6))


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _dealt(rows: int, ranks: int) -> int:
    """Return the operations that distribute rows to ranks and collect them. Shares equal those of torch.chunk, padded
    with zeros."""
    x = torch.arange(1.0, rows * 3 + 1).view(rows, 3)
    chunk = -(-rows // ranks)
    bucket, back = torch.full((ranks, 5 + chunk * 3), torch.nan), torch.full_like(x, torch.nan)
    flat = bucket[:, 5:]  # other weights are stored beside it
    with Operations() as operations:
        rows_to_chunks(flat, x, chunk)
        chunks_to_rows(back, flat, chunk)
    shares = x.chunk(ranks)
    for rank, found in enumerate(flat):
        share = shares[rank].flatten() if rank < len(shares) else x.new_empty(0)
        assert torch.equal(found, torch.cat([share, x.new_zeros(len(found) - len(share))])), (rows, ranks, rank)
    assert torch.equal(back, x), (rows, ranks)
    return operations.count


def test_dealing_rows_to_many_ranks_takes_no_more_operations_than_to_few() -> None:
    few = max(_dealt(rows, 2) for rows in (4, 5))
    assert all(_dealt(rows, ranks) <= 2 * few for rows in range(1, 8) for ranks in (1, 2, 3, 4, 5, 7, 8, 300))


def _gathered_anew(rank: int) -> bool:
    """Gather weights, drop them unused, change them and gather again. True if the compute weights are then the changed ones."""
    trainer = trainer_of(tiny_run(plan={"data": 2, "zero": 1}))
    (runner,) = trainer.runners.values()
    runner.gather(all_parts=True)
    runner.free()
    for parameter in trainer.parameters.values():
        local(parameter.detach()).fill_(3.0)
    runner.gather(all_parts=True)
    for bucket in {bucket for used in runner.buckets for bucket in used}:
        bucket.gather()
    return all(bool((parameter == 3.0).all()) for parameter in runner.stage.parameters())


@pytest.mark.slow
def test_weights_dropped_on_their_way_do_not_arrive_later() -> None:
    assert run_ranks(_gathered_anew, 2) == [True, True]
