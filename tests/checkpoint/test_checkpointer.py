"""Asynchronous saves equal synchronous ones, never overlap, and do not end the run if they fail. A checkpoint is complete or
absent."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.checkpoint import checkpointer as checkpointer_module
from megalith.checkpoint import folder as files
from megalith.checkpoint import tensors
from megalith.checkpoint.checkpointer import Checkpointer, SaveFailure, SaveResult
from megalith.checkpoint.folder import AwayError
from megalith.checkpoint.read import read_full
from megalith.checkpoint.staging import Staging
from megalith.fleet.causes import status
from megalith.fleet.exit_codes import ExitCode
from tests.checkpoint.states import differing, laid_out, values, zeros
from tests.patience import PATIENCE
from tests.ranks import run_ranks

_write = tensors.write


def full_disk(path, content):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def slowly(path, content):
    time.sleep(0.2)
    return _write(path, content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_reported_once_with_its_size_and_times(tmp_path, asynchronous):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(120, values(), {"step": 120}, asynchronous=asynchronous)
    (saved,) = checkpointer.wait()
    assert isinstance(saved, SaveResult)
    assert (saved.step, saved.path) == (120, tmp_path / "step-00000120")
    assert saved.bytes == files.read_manifest(saved.path).bytes
    assert saved.seconds > 0
    assert saved.wait_seconds > 0
    assert checkpointer.wait() == checkpointer.poll() == []
    assert checkpointer.holds(120)
    assert not checkpointer.holds(12)


def test_values_changed_after_an_asynchronous_save_are_not_in_it(tmp_path, monkeypatch):
    """The copy is made before save() returns, and the buffers are reused only when their save is over."""
    monkeypatch.setattr(tensors, "write", slowly)
    checkpointer = Checkpointer(tmp_path, keep=3)
    state = values()
    for step in (1, 2, 3):
        for key, value in values(seed=step).items():
            state[key].copy_(value)
        checkpointer.save(step, state, {})
        for value in state.values():
            value.zero_()
    outcomes = checkpointer.wait()
    assert [outcome.step for outcome in outcomes] == [1, 2, 3]
    for step in (1, 2, 3):
        assert differing(read_full(tmp_path / files.name(step)), values(seed=step)) == []


def test_asynchronous_and_synchronous_saves_write_the_same_bytes(tmp_path):
    for kind in ("asynchronous", "synchronous"):
        checkpointer = Checkpointer(tmp_path / kind)
        checkpointer.save(1, values(), {"a": 1}, asynchronous=kind == "asynchronous")
        checkpointer.wait()
    for file in ("manifest.json", "index.json", "rank-00000.safetensors"):
        assert (tmp_path / "asynchronous/step-00000001" / file).read_bytes() == (
            tmp_path / "synchronous/step-00000001" / file
        ).read_bytes()


def test_two_saves_never_overlap_and_the_wait_is_counted(tmp_path, monkeypatch):
    running, most, clock, waits = [0], [0], SimpleNamespace(now=0.0), threading.Event()
    join = Checkpointer._join

    def joining(self):
        if self._job is not None:
            waits.set()
        join(self)

    def counted(path, content):
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert waits.wait(PATIENCE)  # the caller is in its second save
        clock.now += 0.2
        running[0] -= 1
        return _write(path, content)

    monkeypatch.setattr(tensors, "write", counted)
    monkeypatch.setattr(Checkpointer, "_join", joining)
    monkeypatch.setattr(checkpointer_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, values(), {})
    assert checkpointer.poll() == []
    checkpointer.save(2, values(), {})
    first, second = checkpointer.wait()
    assert most == [1]
    assert first.wait_seconds == 0.0
    assert second.wait_seconds >= 0.2


@pytest.mark.parametrize(("patience", "signs"), [(PATIENCE, True), (0.0, False)])
def test_a_rank_that_waits_for_a_slow_disk_shows_that_it_is_alive(tmp_path, monkeypatch, patience, signs):
    """A supervisor that hears nothing takes the rank to hang. Once its patience is over, the rank gives no more signs."""
    go, seen = threading.Event(), list[float]()

    def waits(path, content):
        assert go.wait(PATIENCE)
        return _write(path, content)

    def alive():
        seen.append(time.monotonic())
        if len(seen) == 3:
            go.set()

    monkeypatch.setattr(tensors, "write", waits)
    monkeypatch.setattr(checkpointer_module, "ALIVE_SECONDS", 0.01)
    checkpointer = Checkpointer(tmp_path, alive=alive, patience=patience)
    checkpointer.save(1, values(), {})
    if not signs:
        threading.Timer(0.1, go.set).start()
    checkpointer.save(2, values(), {})
    assert [type(outcome) for outcome in checkpointer.wait()] == [SaveResult, SaveResult]
    assert bool(seen) == signs


def test_the_caller_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(tensors, "write", lambda *args: gate.wait(PATIENCE) and _write(*args))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, values(), {})  # would wait for ever if it tried to write
    assert checkpointer.poll() == []
    assert files.committed(tmp_path) == []
    gate.set()
    assert [outcome.step for outcome in checkpointer.wait()] == [1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_reported_and_the_next_save_tried(tmp_path, monkeypatch, asynchronous):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, values(), {}, asynchronous=asynchronous)
    (first,) = checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "write", full_disk)
        checkpointer.save(2, values(), {}, asynchronous=asynchronous)
        (failed,) = checkpointer.wait()
    assert isinstance(first, SaveResult)
    assert isinstance(failed, SaveFailure)
    assert "No space left on device" in failed.error
    assert names(tmp_path) == ["step-00000001"]
    checkpointer.save(3, values(), {}, asynchronous=asynchronous)
    assert [type(outcome) for outcome in checkpointer.wait()] == [SaveResult]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints")
    checkpointer.save(1, values(), {})
    (failed,) = checkpointer.wait()
    assert isinstance(failed, SaveFailure)
    assert "NotADirectoryError" in failed.error


def test_a_run_folder_that_is_away_is_neither_made_anew_nor_taken_to_hold_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    checkpointer = Checkpointer(run / "checkpoints")
    checkpointer.save(1, values(), {})
    assert isinstance(checkpointer.wait()[0], SaveResult)
    run.rename(tmp_path / "elsewhere")
    checkpointer.save(2, values(), {})
    (failed,) = checkpointer.wait()
    assert isinstance(failed, SaveFailure) and "No such file or directory" in failed.error
    with pytest.raises(AwayError, match="may be intact") as caught:
        checkpointer.load(values(), step=1)
    assert status(caught.value) == ExitCode.LOST, "an engine starts it again"
    assert not run.exists()
    (tmp_path / "elsewhere").rename(run)
    checkpointer.save(2, values(), {})
    assert isinstance(checkpointer.wait()[0], SaveResult)


def test_checkpoints_behind_a_link_that_leads_nowhere_are_away_and_not_absent(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    checkpointer = Checkpointer(tmp_path / "checkpoints", existed=True)
    with pytest.raises(AwayError, match="leads to no folder now"):
        checkpointer.load(values())
    (tmp_path / "unmounted").mkdir()
    assert checkpointer.load(values()) is None


def test_a_run_folder_that_went_away_before_its_checkpointer_was_made_is_not_made_again(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", existed=True)
    checkpointer.save(1, values(), {})
    assert isinstance(checkpointer.wait()[0], SaveFailure) and not (tmp_path / "run").exists()


def test_a_state_or_a_meta_that_cannot_be_saved_is_reported(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": torch.zeros(1, dtype=torch.complex64)}, {})
    checkpointer.save(2, values(), {"when": object()})
    checkpointer.save(3, values(), {"loss": float("nan")})
    checkpointer.save(4, {}, {})
    errors = [outcome.error for outcome in checkpointer.wait() if isinstance(outcome, SaveFailure)]
    for error, text in zip(errors, ("complex64", "object is not JSON serializable", "not JSON compliant", "empty"), strict=True):
        assert text in error
    assert not tmp_path.exists() or names(tmp_path) == []


def test_what_a_dead_run_left_is_cleaned_at_the_next_save(tmp_path):
    (tmp_path / files.temporary(9)).mkdir(parents=True)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(10, values(), {})
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000010"]


def test_the_last_n_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, values(), {})
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_memory_and_plan_can_be_got_before_the_first_save(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.reserve(values())
    checkpointer.save(1, values(), {})
    checkpointer.wait()
    assert differing(read_full(tmp_path), values()) == []
    with pytest.raises(ValueError, match="complex64"):
        checkpointer.reserve({"x": torch.zeros(1, dtype=torch.complex64)})


def test_the_state_may_change_its_shape_between_saves(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for size in (3, 5):
        checkpointer.save(size, {"x": torch.arange(size)}, {})
        checkpointer.wait()
        assert read_full(tmp_path)["x"].tolist() == list(range(size))


# --- several ranks -----------------------------------------------------------------------------------------------------------


def _asynchronous_saves(rank, folder):
    """Two saves while training sends messages on its own group all the time."""
    checkpointer = Checkpointer(folder)
    for step in (1, 2):
        state = laid_out(values(seed=step), {"dp_shard": 2})
        checkpointer.save(step, state, {})
        for tensor in state.values():
            tensor.detach().zero_()
        for _ in range(200):
            torch.distributed.all_reduce(torch.ones(1))
    return checkpointer.wait()


@pytest.mark.slow
def test_ranks_train_on_while_they_save(tmp_path):
    first, second = run_ranks(_asynchronous_saves, 2, tmp_path)
    assert [(s.step, s.path, s.bytes) for s in first] == [(s.step, s.path, s.bytes) for s in second]
    for step in (1, 2):
        assert differing(read_full(tmp_path / files.name(step)), values(seed=step)) == []


def _one_fails(rank, folder, how):
    checkpointer = Checkpointer(folder)
    state, meta = {f"x{number}": torch.arange(100) for number in range(4)}, {}
    if rank == 1 and how == "full disk":
        tensors.write = full_disk
    elif rank == 1 and how == "state":
        state["x0"] = torch.zeros(1, dtype=torch.complex64)
    elif rank == 1 and how == "disagreement":
        state["x0"] = torch.arange(99)
    elif rank == 1:
        checkpointer._staging.__dict__["copy"] = lambda shares: 1 / 0
    checkpointer.save(1, state, meta)
    failed = checkpointer.wait()
    tensors.write = _write
    checkpointer._staging = Staging()
    checkpointer.save(2, {"x": torch.arange(100)}, {})
    return failed + checkpointer.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("full disk", "rank 1: OSError: [Errno 28] No space left"),
        ("state", "rank 1: ValueError: state that a checkpoint cannot hold"),
        ("disagreement", "x0: rank 1 holds it as"),
        ("copy", "rank 1: ZeroDivisionError"),
    ],
)
def test_one_rank_in_trouble_fails_the_save_on_all_and_the_next_one_succeeds(tmp_path, how, text):
    for failed, saved in run_ranks(_one_fails, 2, tmp_path, how):
        assert text in failed.error
        assert not failed.peer_lost
        assert isinstance(saved, SaveResult)
    assert names(tmp_path) == ["step-00000002"]


def _left_alone(rank, folder, when):
    checkpointer = Checkpointer(folder)

    def closed(*_, **__):
        raise RuntimeError("Connection closed by peer")

    if when == "writing":
        checkpointer_module.save_together = closed
    else:
        object.__setattr__(checkpointer._ranks, "any", closed)
    checkpointer.save(1, {"x": torch.arange(100)}, {})
    return checkpointer.wait()


@pytest.mark.parametrize("when", ["planning", "writing"])
def test_a_save_in_which_a_rank_goes_missing_says_nothing_against_the_folder(tmp_path, when):
    for (failed,) in run_ranks(_left_alone, 2, tmp_path, when):
        assert failed.peer_lost
        assert "Connection closed" in failed.error


def _killed(rank, folder):
    checkpointer = Checkpointer(folder)
    state = laid_out(values(seed=1), {"dp_shard": 2})
    checkpointer.save(1, state, {}, asynchronous=False)

    def die(path, content):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        tensors.write = die
    checkpointer.save(2, state, {})
    checkpointer.wait()
    time.sleep(PATIENCE)


@pytest.mark.slow
def test_a_rank_killed_in_mid_save_leaves_the_older_checkpoint(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed first"):
        run_ranks(_killed, 2, tmp_path)
    assert [path.name for path in files.committed(tmp_path)] == ["step-00000001"]
    state = zeros()
    checkpointer = Checkpointer(tmp_path)
    loaded = checkpointer.load(state)
    assert loaded
    assert loaded.step == 1
    assert differing(state, values(seed=1)) == []
    checkpointer.save(2, state, {})
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
