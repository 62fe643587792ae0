"""Faults of tensors and computations have their effect on one rank, and no other effect."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.fleet import injection
from megalith.fleet.actions import ACTIONS
from megalith.fleet.hooks import Faults
from megalith.fleet.injection import Injection
from megalith.fleet.rank_info import RankInfo
from megalith.parallel.data import local
from megalith.parallel.tables import StreamedTable
from megalith.rehearse.faults import KINDS, ON_DISK
from megalith.train.assemble import Trainer
from megalith.train.inject import SLOW_SECONDS, Injector
from megalith.train.offload.ahead import UpdatesAhead
from megalith.train.offload.faults import FAULTS
from megalith.train.offload.faults import hurt as hurt_files
from megalith.train.offload.slot_file import StateFileError
from megalith.train.step import accumulate, train_step
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

RUN: dict[str, Any] = {"train": {"global_batch": 1, "seq_len": 8, "precision": "fp32", "steps": 4}}
STATES, GRADIENTS = ("weight", "moment"), ("nan", "gradient", "once", "slow")


def _injector(kind: str, folder: Path) -> Injector:
    """The fault comes at step 1."""
    what, file = KINDS[kind], folder / f"{kind}.json"
    injection.save(file, [Injection(0, kind, 1, what.moment, (0,), place=0.5, lasts=what.lasts)])
    return Injector(
        Faults(file, RankInfo(0, 1, ("0",), None)), lambda step: (folder / "data" / "shard.bin", 10 * step, 10 * step + 6)
    )


def _flipped(kind: str, folder: Path) -> list[dict[str, int]]:
    """Return for steps 0 to 2 how many elements of which tensors changed between steps."""
    trainer, injector, found = trainer_of(tiny_run(**RUN)), _injector(kind, folder), []
    for step in range(3):
        train_step(trainer, microbatches(trainer, step), step=step)
        before = {name: share.clone() for name, share in trainer.state.shares().items()}
        injector.after_step(trainer, step)
        others = {name: int((before[name] != share).sum()) for name, share in trainer.state.shares().items()}
        found.append({name: count for name, count in others.items() if count})
    return found


def _gradients(trainer: Trainer, step: int) -> torch.Tensor:
    trainer.state.drop_gradients()
    accumulate(trainer, microbatches(trainer, step))
    return torch.cat([local(p.grad).flatten() for p in trainer.parameters.values() if p.grad is not None])


def _spoilt(kind: str, folder: Path) -> list[tuple[int, int, float]]:
    """Return for steps 0 to 2 how many elements of the gradients changed, how many when the step is recomputed, and the seconds of work."""
    trainer, injector, found = trainer_of(tiny_run(**RUN)), _injector(kind, folder), []
    whole = [_gradients(trainer, step) for step in range(3)]
    for step in range(3):
        injector.before_step(trainer, step)
        began = time.thread_time()
        first = _gradients(trainer, step)
        seconds = time.thread_time() - began
        found.append((int((first != whole[step]).sum()), int((_gradients(trainer, step) != whole[step]).sum()), seconds))
    return found


def _hurt(rank: int, folder: Path) -> dict[str, Any]:
    return {kind: _flipped(kind, folder) for kind in STATES} | {kind: _spoilt(kind, folder) for kind in GRADIENTS}


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(_hurt, 1, tmp_path_factory.mktemp("faults"))
    return found


def test_every_kind_of_fault_is_done_by_somebody() -> None:
    assert {*ACTIONS, *STATES, *GRADIENTS, *FAULTS, "shard"} == set(KINDS)
    assert {*FAULTS} == {*ON_DISK}


def _on_disk(rank: int, folder: Path) -> dict[str, tuple[int, str]]:
    """Return for each fault of files with state the steps that were trained, and the error of the step after them. Updates are slow, so
    that a step ends before its update reads a chunk."""
    found, update = dict[str, tuple[int, str]](), UpdatesAhead._update

    def later(self: UpdatesAhead, *given: Any) -> None:
        time.sleep(0.02)
        update(self, *given)

    patch = pytest.MonkeyPatch()
    patch.setattr(UpdatesAhead, "_update", later)
    for kind in FAULTS:
        trainer, injector = trainer_of(tiny_run(plan={"state": {"optimizer": "disk"}}, **RUN)), _injector(kind, folder)
        done, told = 0, ""
        try:
            for step in range(4):
                train_step(trainer, microbatches(trainer, step), step=step)
                injector.after_step(trainer, step)
                trainer.state.complete()
                done += 1
        except StateFileError as error:
            told = str(error)
        found[kind] = done, told
    return found


@pytest.mark.slow
def test_a_fault_of_a_file_with_state_ends_the_next_step_and_names_the_chunk(tmp_path: Path) -> None:
    """A slow disk ends none."""
    (found,) = run_ranks(_on_disk, 1, tmp_path)
    assert found.pop("slow-disk") == (4, "")
    said = {
        "torn-chunk": "the disk altered it",
        "altered-chunk": "the disk altered it",
        "state-disk-full": "No space left on device",
    }
    assert found.keys() == said.keys()
    for kind, (done, told) in found.items():
        assert done == 2, kind
        assert told.startswith("[Errno") and "plan.state: chunk " in told and said[kind] in told


def test_a_rank_without_state_on_disk_has_no_fault_there(capsys: pytest.CaptureFixture[str]) -> None:
    state: Any = SimpleNamespace(home=None, complete=lambda: None)
    hurt_files(state, Injection(3, "torn-chunk", 1, KINDS["torn-chunk"].moment, (0,), place=0.5))
    assert capsys.readouterr().out == "fault 3: no torn-chunk after step 1, because this rank has no state on disk\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
def test_one_element_of_the_state_flips_between_steps(kind: str, hurt: dict[str, Any]) -> None:
    before, then, after = hurt[kind]
    assert before == after == {}
    ((name, count),) = then.items()
    assert count == 1 and name.startswith(f"{kind}s.")


@pytest.mark.parametrize(
    ("kind", "others"),
    [("nan", [(0, 0), (1, 0), (0, 0)]), ("once", [(0, 0), (1, 0), (0, 0)]), ("gradient", [(0, 0), (1, 1), (1, 1)])],
)
def test_one_element_of_the_gradient_is_wrong_once_or_from_then_on(
    kind: str, others: list[tuple[int, int]], hurt: dict[str, Any]
) -> None:
    assert [found[:2] for found in hurt[kind]] == others


def test_a_gradient_that_comes_in_tiles_is_wrong_in_one_element(tmp_path: Path) -> None:
    """The only parameter of the stage is a table that is read in tiles: the first stage may have no blocks."""
    taken: list[torch.Tensor] = []
    stage = torch.nn.Linear(4, 8, bias=False)
    weight: Any = SimpleNamespace(compute=stage.weight, sums=torch.float32, add_rows=lambda rows, tile: taken.append(tile))
    bucket: Any = SimpleNamespace(weights=[weight], take_in=lambda looked_at, grads: True)
    table = StreamedTable(weight, bucket, 4)
    trainer: Any = SimpleNamespace(runners={0: SimpleNamespace(stage=stage)}, tables={"embedding.weight": table})
    injector, wrong = _injector("once", tmp_path), []
    for step in range(3):
        injector.before_step(trainer, step)
        for rows in table.tiles:
            table.give(rows, torch.zeros(4, 4))
        wrong.append([int(tile.count_nonzero()) for tile in taken[-2:]])
    assert wrong == [[0, 0], [1, 0], [0, 0]]


def test_a_slow_rank_works_longer_for_the_same_result(hurt: dict[str, Any]) -> None:
    assert [found[:2] for found in hurt["slow"]] == [(0, 0)] * 3
    assert all(seconds >= SLOW_SECONDS for _, _, seconds in hurt["slow"][1:])


def test_a_bit_of_the_data_that_is_read_next_flips_once_and_only_in_data_made_for_it(tmp_path: Path) -> None:
    shard = tmp_path / "data" / "shard.bin"
    shard.parent.mkdir()
    shard.write_bytes(bytes(100))
    trainer: Any = None  # its value is not used
    with pytest.raises(AssertionError, match="not a campaign's own"):
        _injector("shard", tmp_path).before_step(trainer, 1)
    (shard.parent / injection.OWN_DATA).touch()
    injector, found = _injector("shard", tmp_path), []
    for step in range(3):
        injector.before_step(trainer, step)
        found.append([(at, byte) for at, byte in enumerate(shard.read_bytes()) if byte])
    assert found == [[], [(13, 1)], [(13, 1)]]
