"""Copies of the ranks' state in memory are exact under any plan, from a node's own memory or its buddy's, whenever a rank is killed."""

import os
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.checkpoint import memory as memory_module
from megalith.checkpoint.memory import ChecksumInPlace, CopyError, Memory, checksum
from megalith.commands.shared.runs import checkpoints
from megalith.control.controller import run_here
from megalith.events import Recovery, of_kind, read
from megalith.fleet import injection
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.injection import Injection
from megalith.fleet.job import Job
from megalith.fleet.rank_info import MEMORY, PLACEMENT, RankInfo, node_folder
from megalith.fleet.tiers import Copy, Source, Tier, copies, newest
from megalith.train.assemble import Trainer
from megalith.train.step import train_step
from tests.full import sampled
from tests.keys import GIVEN, KEY
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.runs import assert_same_bits, final_state, finish, position, prepare_text, signal_yourself, start, train, when
from tests.specs import tiny_run

EXPERTS: dict[str, Any] = {"preset": "deepseek-tiny"}
PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 2, "zero": 0}, {}),
    ({"data": 2, "zero": 3}, {}),
    ({"data": 2, "zero": 1, "tensor": 2}, {}),
    ({"pipeline": 2, "zero": 1}, {"model": {"tied": True}}),
    ({"data": 2, "expert": 2, "zero": 1}, {"model": EXPERTS}),
]


def rank_info(rank: int, root: Path, *, world: int, slots: int = 2) -> RankInfo:
    return RankInfo(rank, world, tuple(f"n{slot}" for slot in range(slots)), root, key=KEY)


def memory_of(trainer: Trainer, root: Path, *, distance: int = 1) -> Memory:
    here = rank_info(trainer.groups.rank, root, world=trainer.spec.plan.ranks)
    memory, group = Memory(trainer.state.shares(), rank_info=here), dist.group.WORLD
    assert group is not None
    memory.join(distance, group=group)
    return memory


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: share.clone() for name, share in trainer.state.shares().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _round_trip(rank: int, run: dict[str, Any], root: Path) -> list[bool]:
    """Return whether each tier restores the state of step 1, and whether the next step gives the same bits."""
    trainer = trainer_of(tiny_run(**run))
    memory = memory_of(trainer, root)
    train_step(trainer, microbatches(trainer, 0), step=0)
    memory.copy(1, 8)
    one, drawn = bits(trainer), torch.rand(3)
    train_step(trainer, microbatches(trainer, 1), step=1)
    memory.copy(2, 16)
    two = bits(trainer)
    memory.finish()
    dist.barrier()
    placement, found = ("n0", "n1"), []
    surveyed = copies.survey(root, placement=placement, world=dist.get_world_size(), key=KEY)
    assert surveyed == tuple(Copy(tier, step) for tier in (Tier.MEMORY, Tier.BUDDY) for step in (2, 1)), surveyed
    dist.barrier()
    for source in (Source(1, Tier.BUDDY), Source(1, Tier.MEMORY, ((1, Tier.BUDDY),))):
        fresh = trainer_of(tiny_run(**run))
        again = memory_of(fresh, root)
        label = again.restore(source)
        assert label is not None
        fresh.state.updates = label.updates
        found += [
            (label.step, label.samples, label.updates) == (1, 8, 1),
            same(bits(fresh), one),
            torch.equal(torch.rand(3), drawn),
        ]
        train_step(fresh, microbatches(fresh, 1), step=1)
        found.append(same(bits(fresh), two))
    found.append(
        copies.survey(root, placement=placement, world=dist.get_world_size(), key=KEY)[0].step == 1
    )  # the newer copy was discarded
    dist.barrier()
    return found


@sampled(2, together=True)
@pytest.mark.parametrize(("plan", "parts"), PLANS, ids=str)
def test_the_state_comes_back_bit_for_bit(plan: dict[str, Any], parts: dict[str, Any], tmp_path: Path) -> None:
    run = {"plan": plan} | parts
    for found in run_ranks(_round_trip, tiny_run(**run).plan.ranks, run, tmp_path):
        assert all(found), found


# --- without a model ---


def state_at(step: int, rank: int, size: int = 400_000) -> dict[str, torch.Tensor]:
    """Return tensors of odd sizes and dtypes whose values encode step and rank."""
    return {
        "weights.a": torch.full((size,), float(step)),
        "weights.odd": torch.full((7, 3), step + 0.5 + rank, dtype=torch.bfloat16),
        "weights.none": torch.empty(0, 4),
        "moments.first.a": torch.full((size + 1,), float(-step)),
        "count": torch.tensor([step], dtype=torch.int64),
    }


def set_to(live: dict[str, torch.Tensor], step: int, rank: int) -> None:
    for name, tensor in state_at(step, rank, live["weights.a"].numel()).items():
        live[name].copy_(tensor)


def _copy_on_and_on(rank: int, root: Path, first: int) -> None:
    live = state_at(first, rank)
    memory = Memory(live, rank_info=rank_info(rank, root, world=2))
    for step in range(first + 1, first + 10_000):
        set_to(live, step, rank)
        memory.copy(step, 8 * step)
    os._exit(0)


def test_killed_at_any_moment_a_whole_step_is_left(tmp_path: Path) -> None:
    """Two ranks that only copy, each at its own pace, are killed. The copies of both are intact and have the labelled content."""
    last = [0, 0]
    for turn in range(5):
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                _copy_on_and_on(rank, tmp_path, max(last))
            children.append(pid)
        before = list(last)
        while not all(step > old + 1 for step, old in zip(last, before, strict=True)):  # two copies, one of which may be torn
            time.sleep(0.003 * turn + 0.002)
            last = [max((piece.step for piece in pieces_of(tmp_path, rank)), default=0) for rank in range(2)]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for rank in range(2):
            held = pieces_of(tmp_path, rank)
            assert len(held) >= 2 and all(piece.intact for piece in held), "a torn copy claims to be one"
            newest_step = max(piece.step for piece in held)
            live = state_at(0, rank)
            label = Memory(live, rank_info=rank_info(rank, tmp_path, world=2)).restore(Source(newest_step, Tier.MEMORY))
            assert label and label.samples == 8 * newest_step
            assert same(live, state_at(newest_step, rank))


def pieces_of(root: Path, rank: int) -> list[copies.Piece]:
    return copies.pieces(node_folder(root, f"n{rank}"), key=KEY)


def test_a_torn_or_altered_or_foreign_copy_is_refused(tmp_path: Path) -> None:
    here = rank_info(0, tmp_path, world=2)
    live = state_at(3, 0, 100)
    memory = Memory(live, rank_info=here)
    memory.copy(3, 24)
    with pytest.raises(CopyError, match="there is none"):
        memory.restore(Source(4, Tier.MEMORY))
    assert copies.corrupt_piece(node_folder(tmp_path, "n0"), key=KEY, rank=0, bit=64 * 8)
    with pytest.raises(CopyError, match="digest"):
        memory.restore(Source(3, Tier.MEMORY))
    memory.copy(4, 32)
    memory.own.files[memory.own.find(4) or 0].strike_out()  # the progress of a rank that is killed while it copies
    with pytest.raises(CopyError, match="there is none"):
        memory.restore(Source(4, Tier.MEMORY))
    memory.copy(5, 40)
    other = Memory({"weights.b" if name == "weights.a" else name: t for name, t in live.items()}, rank_info=here)
    assert other.own.find(5) is None, "files of the same size with another layout hold nothing of this plan's"


def test_the_ring_keeps_the_newest_and_the_pinned_one(tmp_path: Path) -> None:
    live = state_at(0, 0, 10)
    memory = Memory(live, rank_info=rank_info(0, tmp_path, world=2), keep=2, pinned=True)
    for step in range(1, 9):
        memory.copy(step, step)
        if step in (2, 5):
            memory.pin()
    steps = {piece.step for piece in pieces_of(tmp_path, 0)}
    assert steps == {5, 6, 7, 8}
    set_to(live, 99, 0)
    restored = memory.restore(Source(5, Tier.MEMORY))
    assert restored and restored.step == 5 and same(live, state_at(0, 0, 10))


def test_a_copy_of_the_same_step_takes_the_place_of_the_other_and_its_pin(tmp_path: Path) -> None:
    memory = Memory(state_at(0, 0, 10), rank_info=rank_info(0, tmp_path, world=2), pinned=True)
    for step in (1, 2, 2):
        memory.copy(step, step)
        memory.pin()
    memory.copy(2, 2)
    assert sorted(piece.step for piece in pieces_of(tmp_path, 0)) == [1, 2]
    assert memory.pinned_step() == 2


def test_the_disk_holds_the_same_file_and_is_read_like_it(tmp_path: Path) -> None:
    live = state_at(6, 0, 100)
    memory = Memory(live, rank_info=rank_info(0, tmp_path / "memory", world=2), disk=tmp_path / "disk")
    memory.copy(6, 48, to_disk=True)
    memory.settle()
    shutil.rmtree(tmp_path / "memory")  # like a node that was switched off and on again
    (found,) = copies.survey(tmp_path / "disk", placement=("n0", "n1"), world=2, key=KEY, own=Tier.DISK)
    assert found == Copy(Tier.DISK, 6, frozenset({1}))
    set_to(live, 0, 0)
    again = Memory(live, rank_info=rank_info(0, tmp_path / "memory", world=2), disk=tmp_path / "disk")
    restored = again.restore(Source(6, Tier.DISK))
    assert restored and restored.samples == 48
    assert same(live, state_at(6, 0, 100))


def test_a_disk_keeps_three_copies_and_none_of_later_steps_than_was_restored(tmp_path: Path) -> None:
    live = state_at(6, 0, 100)
    memory = Memory(live, rank_info=rank_info(0, tmp_path / "memory", world=2), keep=1, disk=tmp_path / "disk")

    def steps() -> list[int]:
        return sorted(piece.step for piece in copies.pieces(node_folder(tmp_path / "disk", "n0"), key=KEY, own=Tier.DISK))

    for step in (0, 4, 8, 12, 12):
        memory.copy(step, step, to_disk=True)
    memory.settle()
    assert steps() == [4, 8, 12]
    memory.restore(Source(8, Tier.DISK))
    assert steps() == [4, 8]
    (path,) = node_folder(tmp_path / "disk", "n0").glob("own-0.8")
    assert copies.corrupt_piece(path.parent, key=KEY, rank=0, step=8)
    with pytest.raises(CopyError, match="step 8 in disk, slot 0: the digest of the loaded state"):
        memory.restore(Source(8, Tier.DISK))
    path.unlink()
    with pytest.raises(CopyError, match="step 8 in disk, slot 0"):
        memory.restore(Source(8, Tier.DISK))
    elsewhere = replace(rank_info(1, tmp_path / "memory", world=2), placement=("n1", "n0"))
    Memory(live, rank_info=elsewhere, disk=tmp_path / "disk")
    assert steps() == [], "of the slot that the node once filled"


def test_a_disk_that_is_full_costs_a_copy_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("no folder")
    memory = Memory(state_at(6, 0, 100), rank_info=rank_info(0, tmp_path / "memory", world=2), disk=tmp_path / "disk")
    memory.copy(6, 48, to_disk=True)
    memory.settle()
    assert memory.disk_error


# --- a whole run ---


def test_a_run_without_a_checkpoint_that_lost_a_node_ends_with_the_same_bits(tmp_path: Path) -> None:
    """All ranks are killed and one node's memory is gone, but the other node holds the copy of its state."""
    spec = tiny_run(
        model={"vocab": 264},
        plan={"data": 2, "zero": 3},
        data={"path": str(prepare_text(tmp_path))},
        train={"steps": 6, "global_batch": 4, "seq_len": 32, "precision": "fp32"},
        fleet={"nodes": 2, "verify_every": 2},
    )
    memory = tmp_path / "memory"
    environment = GIVEN | {MEMORY: str(memory), PLACEMENT: "0,1"}
    train(spec, tmp_path / "whole")

    folder = tmp_path / "killed"
    with when("step", 3, rank=1, act=lambda: signal_yourself(signal.SIGKILL)):
        finish(start(spec, folder, environment=environment))
    shutil.rmtree(node_folder(memory, "0"))
    source = newest(copies.survey(memory, placement=("0", "1"), world=2, key=KEY))
    assert source is not None and source.step >= 2 and Tier.BUDDY in (source.tier, *dict(source.elsewhere).values())
    assert finish(start(spec, folder, source=asdict(source), environment=environment)) == [0, 0]
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert position(folder) == position(tmp_path / "whole")


@sampled(2, together=True)
@pytest.mark.slow
def test_a_run_whose_memory_is_all_gone_goes_on_from_its_disks(tmp_path: Path) -> None:
    """Ranks of both nodes are killed and no copy in memory is left. Copies on disk are newer than the last checkpoint."""
    spec = tiny_run(
        model={"vocab": 264},
        plan={"data": 2, "zero": 3},
        data={"path": str(prepare_text(tmp_path))},
        train={"steps": 8, "global_batch": 4, "seq_len": 32, "precision": "fp32"},
        checkpoint={"every": 3, "asynchronous": False},
        fleet={"nodes": 2, "disk_every": 1, "disk": str(tmp_path / "scratch"), "hang_floor": 60.0},
    )
    train(spec, tmp_path / "whole")
    folder, listed = tmp_path / "run", tmp_path / "faults.json"
    folder.mkdir()
    (folder / "spec.json").write_text(spec.model_dump_json())
    injection.save(listed, [Injection(0, "two", 5, "step", (0, 1))])
    job = Job(
        entry="megalith.train.run:main", arguments={"run_dir": str(folder)}, ranks=2, run_dir=folder,
        preload=("torch", "megalith.train.run"), start_timeout=250.0, silence_timeout=120.0, threads=1,
        environment={injection.VARIABLE: str(listed)},
    )  # fmt: skip
    outcome = run_here(job, fleet=spec.fleet, identity="disk", store=lambda: checkpoints(folder))
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    recoveries = of_kind(read(folder), Recovery)
    (recovery,) = [event for event in recoveries if event.restored]  # a copy that was being written to disk may fail as well
    assert recovery.restored in ("step 4 in disk", "step 5 in disk"), "the newest checkpoint was of step 3"
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert position(folder) == position(tmp_path / "whole")
    assert not list((tmp_path / "scratch").glob("megalith-*")), "a run that has ended needs none"


def test_a_digest_that_is_taken_again_and_again_is_that_of_the_tensors_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have any shape, are changed in place, or moved. Checksums of tensors on a device are computed on that device."""
    odd, turned = torch.randn(7), torch.randn(6, 4).t()
    holder = torch.nn.Parameter(torch.randn(8, 3))
    tensors = [holder, odd, turned, torch.randn(0), torch.randn(5)[1:], torch.arange(6)]
    again = ChecksumInPlace(tensors)
    assert again() == checksum(tensors) == again()
    with torch.no_grad():
        for tensor in (odd, turned, holder):
            tensor.view(-1)[-1:].add_(1.0) if tensor.is_contiguous() else tensor[-1, -1].add_(1.0)
            assert again() == checksum(tensors)
    before = again()
    holder.data = holder.data + 1.0
    assert again() == checksum(tensors) != before
    monkeypatch.setattr(memory_module, "checksum_words", lambda others: pytest.fail(f"asked for {others}"))
    assert ChecksumInPlace([holder])() == int(holder.detach().view(-1).view(torch.int64).sum()) % (1 << 64)
    assert ChecksumInPlace([])() == 0
