"""The start of a run: at its first step, at its newest checkpoint, or with another run's weights."""

import errno
import hashlib
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from megalith import sealed
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.folder import MANIFEST
from megalith.data.errors import DataError
from megalith.fleet.observations import CopyAway, Observation
from megalith.fleet.report import Reported
from megalith.fleet.tiers import Source, Tier
from megalith.parallel.gradients import local
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.restore import OtherRunError, Position, meta, restore
from megalith.train.step import seed_step, train_step
from megalith.train.stream import open_stream
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_data(tmp_path_factory.mktemp("data"))


def run_of(data: str, **parts: dict[str, Any]) -> RunSpec:
    small = {"model": {"layers": 2, "vocab": VOCAB} | parts.get("model", {}), "data": {"path": data} | parts.get("data", {})}
    return tiny_run(**(parts | small))


def start(spec: RunSpec, folder: Path) -> tuple[Trainer, Checkpointer, Position, list[str]]:
    """Return a trainer restored from `folder`, its position, and the warnings."""
    warnings: list[str] = []
    trainer, checkpointer = trainer_of(spec), Checkpointer(folder / "checkpoints")
    position = restore(trainer, checkpointer, open_stream(spec, "train"), group=None, warn=warnings.append)
    return trainer, checkpointer, position, warnings


def save(trainer: Trainer, checkpointer: Checkpointer, position: Position) -> None:
    described = meta(position, spec=trainer.spec, stream=open_stream(trainer.spec, "train"))
    checkpointer.save(position.step, trainer.state.tensors(), described, asynchronous=False)
    checkpointer.wait()


def copies(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in trainer.state.tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _resume(rank: int, data: str, folder: Path) -> None:
    spec = run_of(data)
    trainer, checkpointer, position, _ = start(spec, folder)
    assert position == Position(0, 0)
    train_step(trainer, microbatches(trainer), step=0)
    save(trainer, checkpointer, Position(1, 8))
    saved = copies(trainer)
    again, _, position, warnings = start(spec, folder)
    assert position == Position(1, 8) and not warnings
    assert same(copies(again), saved)
    (folder / "checkpoints" / sorted(p.name for p in (folder / "checkpoints").iterdir())[-1]).rename(folder / "elsewhere")
    fresh, _, position, _ = start(spec, folder)
    assert position == Position(0, 0) and not same(copies(fresh), saved)


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_checkpoint_bit_for_bit(data, tmp_path):
    run_ranks(_resume, 1, data, tmp_path)


def _away(rank: int, data: str, folder: Path) -> list[Observation]:
    spec, told = run_of(data), list[Observation]()
    trainer, checkpointer, _, _ = start(spec, folder)
    save(trainer, checkpointer, Position(1, 8))

    def stale(*_: Any) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    stream, source = open_stream(spec, "train"), Source(1, Tier.STORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "file_digest", stale)
        patch.setattr("megalith.train.restore.report", told.append)
        with pytest.raises(Reported, match="Stale file handle"):
            restore(trainer, checkpointer, stream, group=None, warn=print, source=source)
    assert restore(trainer, checkpointer, stream, group=None, warn=print, source=source) == Position(1, 8)
    return told


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_told_as_away_and_can_be_restored_later(data, tmp_path):
    ((observation,),) = run_ranks(_away, 1, data, tmp_path)
    assert isinstance(observation, CopyAway) and (observation.tier, observation.copy_step) == (Tier.STORE, 1)


def _init_from(rank: int, data: str, folder: Path) -> None:
    first, checkpointer, _, _ = start(run_of(data), folder / "first")
    train_step(first, microbatches(first), step=0)
    save(first, checkpointer, Position(1, 8))
    spec = run_of(data, train={"init_from": str(folder / "first" / "checkpoints"), "seed": 9, "precision": "bf16"})
    second, checkpointer, position, warned = start(spec, folder / "second")
    assert position == Position(0, 0)
    assert len(warned) == 1 and "(moments.first, moments.second) is not carried over: adamw starts with an empty" in warned[0]
    assert same(second.state.shares("weights"), first.state.shares("weights"))
    assert not any(m.any() for m in second.state.shares("optimizer").values())
    train_step(second, microbatches(second), step=0)
    save(second, checkpointer, Position(1, 8))
    third, _, position, warned = start(spec, folder / "second")
    assert not warned
    assert position == Position(1, 8)  # its own checkpoint, not the one that it began with
    assert same(copies(third), copies(second))


@pytest.mark.slow
def test_init_from_takes_weights_alone_and_only_at_the_first_start(data, tmp_path):
    run_ranks(_init_from, 1, data, tmp_path)


def _init_from_nothing(rank: int, data: str, folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start(run_of(data, train={"init_from": str(folder / "missing")}), folder)


def test_init_from_a_folder_without_a_checkpoint_is_an_error(data, tmp_path):
    run_ranks(_init_from_nothing, 1, data, tmp_path)


def _init_from_another_later(rank: int, data: str, folder: Path) -> None:
    """The checkpoint of the first weights is replaced, away, and removed."""
    first, checkpointer, _, _ = start(run_of(data), folder / "first")
    save(first, checkpointer, Position(1, 8))
    path = folder / "first" / "checkpoints" / "step-00000001"
    seals = sealed.seal([path / MANIFEST])
    spec = run_of(data, train={"init_from": str(path), "seed": 9})

    def begin() -> Position:
        trainer, own = trainer_of(spec), Checkpointer(folder / "second")
        return restore(trainer, own, open_stream(spec, "train"), group=None, warn=lambda text: None, first=seals)

    assert begin() == Position(0, 0)
    save(first, checkpointer, Position(1, 9))
    with pytest.raises(sealed.AlteredError, match=MANIFEST):
        begin()
    (folder / "first").rename(folder / "away")
    with pytest.raises(FileNotFoundError) as gone:
        begin()
    assert gone.value.filename == str(path), "so that it is waited for"
    (folder / "away").rename(folder / "first")
    path.rename(path.with_name("step-00000002"))
    with pytest.raises(OtherRunError, match=rf"train.init_from = {path}: this checkpoint was removed"):
        begin()


@pytest.mark.slow
def test_first_weights_are_those_with_which_the_run_began_or_none(data, tmp_path):
    run_ranks(_init_from_another_later, 1, data, tmp_path)


def _more_rows(rank: int, data: str, folder: Path, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a run with 64 more tokens and one block fewer than the checkpoint in `first`, which is made if it does
    not exist."""
    if not (folder / "first").exists():
        first, checkpointer, _, _ = start(run_of(data), folder / "first")
        train_step(first, microbatches(first), step=0)
        save(first, checkpointer, Position(1, 8))
        return copies(first)
    train = {"init_from": str(folder / "first"), "init_from_changes": ("layers", "vocab")}
    spec = run_of(data, model={"vocab": VOCAB + 64, "layers": 1}, train=train, plan=plan)
    trainer, _, position, _ = start(spec, folder / "second")
    assert position == Position(0, 0)
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in trainer.state.tensors("weights").items()}  # pyright: ignore


@pytest.mark.slow
def test_a_larger_vocabulary_has_the_checkpoints_rows_and_first_ones_below_them_under_any_plan(data, tmp_path):
    (before,) = run_ranks(_more_rows, 1, data, tmp_path, {})
    (after,) = run_ranks(_more_rows, 1, data, tmp_path, {})
    split, _ = run_ranks(_more_rows, 2, data, tmp_path, {"data": 2, "zero": 3})
    assert same(split, after)
    for name, weight in after.items():
        rows = before[name].shape[0]
        assert torch.equal(weight[:rows], before[name])
        assert len(weight) == rows + (64 if name in ("weights.embedding.weight", "weights.head.output.weight") else 0)
        assert weight[rows:].numel() == 0 or weight[rows:].std() > 0.01, "further rows have first values"
    assert any("blocks.1." in name for name in before) and not any("blocks.1." in name for name in after)


def _other_data(rank: int, data: str, other: str, folder: Path) -> str:
    trainer, checkpointer, _, _ = start(run_of(data), folder)
    save(trainer, checkpointer, Position(1, 8))
    with pytest.raises(DataError) as found:
        start(run_of(other), folder)
    with pytest.raises(OtherRunError, match=r"train\.seed = 1: checkpoints/step-00000001 was saved by a run with 0"):
        start(run_of(data, train={"seed": 1}), folder)
    return str(found.value)


@pytest.mark.slow
def test_other_data_or_another_seed_refuses_to_resume(data, tmp_path):
    (tmp_path / "other").mkdir()
    other = small_data(tmp_path / "other", seed=1)
    assert "manifest was" in run_ranks(_other_data, 1, data, other, tmp_path)[0]


OTHERS: list[dict[str, dict[str, Any]]] = [
    {"optimizer": {"warmup": 0, "lr": 2e-3, "schedule": "constant"}},
    {"optimizer": {"warmup": 0, "lr": 1e-3, "schedule": "constant", "weight_decay": 0.2}},
    {"model": {"init_std": 0.5}},
    {"model": {"heads": 2, "kv_heads": 1, "head_dim": 16}},
    {"model": {"rope_theta": 500.0}},
]
"""Return runs whose tensors have the shapes of `run_of`'s."""


def _of_another(rank: int, data: str, folder: Path) -> None:
    trainer, checkpointer, _, _ = start(run_of(data), folder)
    save(trainer, checkpointer, Position(1, 8))
    for parts in OTHERS:
        parts = {table: dict(values) for table, values in parts.items()}
        sizes = parts.pop("model", {})
        other = tiny_run(model={"layers": 2, "vocab": VOCAB} | sizes, data={"path": data}, **parts)
        with pytest.raises(OtherRunError, match="checkpoints/step-00000001 was saved by a run with") as found:
            start(other, folder)
        (name,) = [*sizes, *set(parts.get("optimizer", {})) - {"warmup", "schedule", "lr"}][:1] or ["lr"]
        assert f".{name} = " in str(found.value)
    longer = run_of(data, train={"steps": 9}, plan={"microbatch": 2}, checkpoint={"every": 2})
    assert start(longer, folder)[2] == Position(1, 8)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_with_what_differs_although_its_shapes_fit(data, tmp_path):
    run_ranks(_of_another, 1, data, tmp_path)


def _resplit(rank: int, data: str, folder: Path, plan: dict[str, Any], saves: bool) -> dict[str, torch.Tensor]:
    spec = run_of(data, plan=plan)
    trainer, checkpointer, position, _ = start(spec, folder)
    if saves:
        train_step(trainer, microbatches(trainer), step=0)
        save(trainer, checkpointer, Position(1, 8))
    else:
        assert position == Position(1, 8)
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in trainer.state.tensors().items()}  # pyright: ignore


@pytest.mark.slow
def test_another_plan_goes_on_from_the_same_state(data, tmp_path):
    saved = run_ranks(_resplit, 2, data, tmp_path, {"data": 2, "zero": 3}, True)[0]
    whole = run_ranks(_resplit, 1, data, tmp_path, {}, False)[0]
    first, last = run_ranks(_resplit, 2, data, tmp_path, {"pipeline": 2}, False)
    assert same(whole, saved) and same(first | last, saved)


def _random_state(rank: int, data: str) -> None:
    trainer, stream = trainer_of(run_of(data)), open_stream(run_of(data), "train")

    def state() -> str:
        return meta(Position(), spec=trainer.spec, stream=stream)["rng"]["state"]

    train_step(trainer, microbatches(trainer), step=0)
    seed_step(trainer, 1)
    first = state()
    train_step(trainer, microbatches(trainer), step=1)
    assert state() == first, "nothing draws in a step: the seed of each is its whole state"
    torch.rand(1)
    assert state() != first
    seed_step(trainer, 2)
    assert state() != first
    seed_step(trainer, 1)
    assert state() == first


@pytest.mark.slow
def test_a_checkpoint_says_what_state_random_numbers_had_which_is_a_function_of_seed_and_step(data: str) -> None:
    run_ranks(_random_state, 1, data)
