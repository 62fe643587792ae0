"""Ownership of a run folder: by a lock on one machine, by a lease if other machines also see the folder."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith import disk, events, pyramid
from megalith.checkpoint import storage
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.folder import committed, locate, of_run
from megalith.control import memory, node_ledger, owner, times
from megalith.control.memory import Memory
from megalith.control.node_ledger import NodeRecord
from megalith.control.owner import InUseError, LeaseError, Owner, TakenError, hold
from megalith.control.policy import State
from megalith.data import tokenizer
from megalith.events import EventLog, Problem
from megalith.events import log as event_log
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import KINDS, Beat
from megalith.fleet.job import Job
from megalith.spec import files
from megalith.spec.fleet import FleetSpec
from megalith.train.sites import meet
from megalith.watch import index
from tests.control.owning import another_process, content
from tests.fleet.conftest import until
from tests.patience import PATIENCE
from tests.specs import tiny_run

torch.set_num_threads(1)


def test_a_second_owner_is_refused_by_the_first_ones_name_and_changes_nothing(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        before = content(tmp_path)
        with pytest.raises(InUseError) as caught, hold(tmp_path):
            pytest.fail("owned twice")
        assert f"is in use by process {process} on {socket.gethostname()} since 20" in str(caught.value)
        assert content(tmp_path) == before
    with hold(tmp_path):
        pass


def test_an_owner_of_an_earlier_version_is_named_too(tmp_path: Path) -> None:
    """The last owner left its process in the lock only, and an earlier owner left a claim."""
    with hold(tmp_path):
        pass
    with another_process(tmp_path):
        (tmp_path / "ranks" / "lock").write_text("12")
        with pytest.raises(InUseError, match=r"is in use by process 12\. Wait"), hold(tmp_path):
            pytest.fail("owned twice")


@pytest.mark.parametrize("text", [b"\xce\x00\xff no text", b"", b"12\n13 lines"])
def test_a_damaged_lock_file_still_keeps_a_second_owner_out(tmp_path: Path, text: bytes) -> None:
    with another_process(tmp_path) as process:
        (tmp_path / "ranks" / "lock").write_bytes(text)
        with pytest.raises(InUseError, match=f"is in use by process {process} on"), hold(tmp_path):
            pytest.fail("owned twice")


def _forked(act: Callable[[], object]) -> int:
    process = os.fork()
    if process == 0:
        try:
            act()
        except LeaseError:
            os._exit(ExitCode.LOST)
        finally:
            os._exit(1)
    return process


def _end_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _die(tmp_path: Path, *, wide: bool = False) -> None:
    """Own a folder, and end without releasing it."""

    def act() -> None:
        with hold(tmp_path, wide=wide):
            os._exit(0)

    assert _end_of(_forked(act)) == 0


def test_a_folder_is_free_once_its_owner_has_died(tmp_path: Path) -> None:
    _die(tmp_path, wide=True)
    with hold(tmp_path) as own:
        assert (own.run_dir, own.epoch) == (tmp_path, 0)


def test_which_file_systems_are_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    mounts = [Mount("/", "ext4"), Mount("/shared", "nfs4"), Mount("/shared/near", "xfs"), Mount("/odd", "fuse.sshfs")]
    monkeypatch.setattr(owner.psutil, "disk_partitions", lambda all: mounts)
    serves = {
        path: owner.flock_serves(Path(path)) for path in ("/home/run", "/shared/run", "/shared/near/run", "/odd", "/sharedness")
    }
    assert serves == {"/home/run": True, "/shared/run": False, "/shared/near/run": True, "/odd": False, "/sharedness": True}


@pytest.fixture
def leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use leases, as on a file system that other machines also see."""
    monkeypatch.setattr(owner, "flock_serves", lambda folder: False)
    monkeypatch.setattr(owner, "POLL_SECONDS", 0.01)


@pytest.fixture
def elsewhere(leased: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """When called, make this process appear to be on another machine."""
    return lambda: monkeypatch.setattr(owner, "place", lambda: "another machine")


def test_on_one_machine_a_lease_needs_no_waiting(leased: None, tmp_path: Path) -> None:
    """On this machine an owner's processes can be observed. Its ranks on other machines cannot."""
    _die(tmp_path)
    with hold(tmp_path) as own:
        assert own.epoch == 0
        with (
            pytest.raises(InUseError, match=f"is in use by process {os.getpid()} on {socket.gethostname()} since 20"),
            hold(tmp_path),
        ):
            pytest.fail("owned twice")
    _die(tmp_path, wide=True)
    with hold(tmp_path) as own:
        assert own.epoch == 1
    with hold(tmp_path) as own:
        assert own.epoch == 1


def test_an_owner_that_renews_is_believed_in_from_another_machine(
    elsewhere: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LEASE_SECONDS", PATIENCE)
    done = threading.Event()
    with hold(tmp_path) as own:

        def renew() -> None:
            while not done.wait(0.02):
                own._renew()

        thread = threading.Thread(target=renew)
        thread.start()
        elsewhere()
        try:
            with pytest.raises(InUseError, match=f"is in use by process {os.getpid()}"), hold(tmp_path):
                pytest.fail("owned twice")
        finally:
            done.set()
            thread.join()
    with hold(tmp_path) as own:  # the owner left
        assert own.epoch == 0


def test_an_owner_by_a_lock_that_this_machine_cannot_see_is_left_to_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _die(tmp_path)
    monkeypatch.setattr(owner, "flock_serves", lambda folder: False)
    monkeypatch.setattr(owner, "place", lambda: "another machine")
    with pytest.raises(InUseError, match=r"holds a lock that this machine cannot check.*remove .*owners"), hold(tmp_path):
        pytest.fail("owned")


def test_a_lock_that_somebody_removed_lets_nobody_in(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        (tmp_path / "ranks" / "lock").unlink()
        with pytest.raises(InUseError, match=f"is in use by process {process} on"), hold(tmp_path):
            pytest.fail("owned twice")


def test_whoever_removes_the_lock_and_all_claims_lets_nobody_in(tmp_path: Path) -> None:
    with another_process(tmp_path):
        shutil.rmtree(tmp_path / "ranks")
        with pytest.raises(InUseError, match="is in use by process"), hold(tmp_path):
            pytest.fail("owned twice")
    with hold(tmp_path) as own:
        assert own.epoch == 0


def test_an_owner_whose_folder_another_one_has_replaced_stops_and_touches_nothing_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hold(run) as own:
        run.rename(tmp_path / "aside")
        own.check()  # away, perhaps for a while
        (tmp_path / "aside").rename(run)
        own.check()
        shutil.rmtree(run)
        with another_process(run):
            before = content(run)
            with pytest.raises(TakenError, match=rf"^{run} is another folder now: this run's own folder was moved or removed"):
                own.checked(lambda: pytest.fail("went on"))()
            with pytest.raises(TakenError):
                own.regain(seconds=PATIENCE)
            own.leave()
            assert content(run) == before


def test_a_process_whose_folder_another_one_has_replaced_ends_if_nobody_stops_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LEASE_SECONDS", 0.5)
    run = tmp_path / "run"

    def act() -> None:
        with hold(run) as own, own.renewing():
            run.rename(tmp_path / "aside")
            run.mkdir()
            time.sleep(60.0)  # not PATIENCE: the process would outlive a failed test

    assert _end_of(_forked(act)) == ExitCode.LOST


def test_an_owner_of_a_folder_whose_claims_are_gone_writes_what_readers_read(tmp_path: Path) -> None:
    """A copy of the folder may lack `ranks/`."""
    with hold(tmp_path) as own:
        _log(own, "first")
        _describe(own, "first")
    owner.epochs.begin(tmp_path, 2)
    shutil.rmtree(tmp_path / "ranks")
    with hold(tmp_path) as own:
        _log(own, "here")
        _describe(own, "here")
        assert [event.message for event in events.of_kind(events.read(tmp_path), Problem)] == ["first", "here"]
        assert files.read(owner.epochs.newest(tmp_path, files.FILE), saved=True).resolved.spec.name == "here"


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}"])
def test_a_claim_that_was_damaged_keeps_nobody_out_whose_lock_says_that_the_owner_is_dead(damage: str, tmp_path: Path) -> None:
    _die(tmp_path)
    (claim,) = (tmp_path / "ranks" / "owners").glob("*.json")
    claim.write_text(damage)
    with hold(tmp_path) as own:
        assert own.epoch == 0


def test_claims_that_somebody_cleared_away_are_made_again_and_a_new_owner_is_seen_all_the_same(
    leased: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold(tmp_path) as own:
        shutil.rmtree(tmp_path / "ranks" / "owners")
        own._renew()
        assert owner._Claims(tmp_path).newest() == own._claim
        shutil.rmtree(tmp_path / "ranks" / "owners")
        with hold(tmp_path) as other:
            assert other.epoch == 0, "nobody can tell"
            with pytest.raises(TakenError):
                own._renew()


def test_of_two_that_take_over_at_once_one_is_refused(leased: None, tmp_path: Path) -> None:
    with hold(tmp_path) as own:
        claims = owner._Claims(tmp_path)
        assert not claims.make(own._claim), "the number is taken"
        older = replace(own._claim, number=0)
        assert not claims.make(older), "another is newer"
        assert claims.newest() == own._claim


def test_an_owner_that_cannot_renew_stops_its_ranks_before_the_lease_ends_and_goes_on_when_it_can(
    leased: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    passes = {"monotonic": lambda: clock.now, "time": time.time, "sleep": sleep}
    monkeypatch.setattr(owner, "time", SimpleNamespace(**passes))
    with hold(tmp_path) as own:
        own.check()
        (tmp_path / "ranks").rename(tmp_path / "away")
        sleep(owner.STOP * owner.LEASE_SECONDS - 0.01)
        own.check()
        sleep(0.02)
        with pytest.raises(LeaseError, match="could not be renewed"):
            own.checked(lambda: pytest.fail("went on"))()
        with pytest.raises(LeaseError, match="could not be renewed for 30 s"):
            own.regain(seconds=30.0)
        (tmp_path / "away").rename(tmp_path / "ranks")
        own.regain(seconds=PATIENCE)


def test_a_process_whose_ranks_nobody_stops_ends(leased: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's main thread may hang in a call to an unreachable store."""
    monkeypatch.setattr(owner, "LEASE_SECONDS", 0.5)

    def act() -> None:
        with hold(tmp_path) as own, own.renewing():
            (tmp_path / "ranks").rename(tmp_path / "away")
            time.sleep(PATIENCE)

    assert _end_of(_forked(act)) == ExitCode.LOST


# An owner that is stopped past its lease, and wakes up in the middle of a write


def _stop_at(target: Any, name: str, number: int = 1) -> None:
    """Make this process stop (SIGSTOP) before its next call of a function, or before that of this `number`."""
    original, calls = getattr(target, name), [0]

    def stops(*args: Any, **rest: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **rest)

    setattr(target, name, stops)


def _save(own: Owner, step: int, *, stop_at: tuple[Any, str] | None = None) -> None:
    if stop_at is not None:
        _stop_at(*stop_at)
    saver = Checkpointer(own.run_dir / owner.epochs.name("checkpoints", own.epoch), keep=1)
    saver.save(step, {"weights": torch.arange(step)}, {"epoch": own.epoch}, asynchronous=False)
    saver.wait()


def _notes(own: Owner) -> Memory:
    return Memory(Job("nobody:calls", {}, ranks=1, run_dir=own.run_dir), FleetSpec(), own.epoch)


def _keep(own: Owner, node: str, *, stop_at: tuple[Any, str] | None = None) -> None:
    notes = _notes(own)
    if stop_at is not None:
        _stop_at(*stop_at)
    notes.keep(State(placement=(node,)))


def _log(own: Owner, text: str, *, stop_at: tuple[Any, str] | None = None) -> None:
    log = EventLog(own.run_dir, epoch=own.epoch)
    if stop_at is not None:
        _stop_at(*stop_at)
    log.write(Problem("warning", text))


def _ledger(own: Owner, node: str, *, stop_at: tuple[Any, str] | None = None) -> None:
    ledger = _notes(own)._ledger
    if stop_at is not None:
        _stop_at(*stop_at)
    node_ledger.note(ledger, NodeRecord(1.0, node, "fault"))


def _describe(own: Owner, name: str, *, stop_at: tuple[Any, ...] | None = None) -> None:
    if stop_at is not None:
        _stop_at(*stop_at)
    resolved = files.ResolvedRun(tiny_run().model_copy(update={"name": name}), {"name": name})
    files.save(resolved, own.run_dir, epoch=own.epoch)


def _copy_tokenizer(own: Owner, text: str, *, stop_at: tuple[Any, ...] | None = None) -> None:
    source = own.run_dir / f"data of {text}"
    source.mkdir()
    for name in (tokenizer.TOKENIZER_FILE, tokenizer.TOKENIZER_CONFIG_FILE):
        (source / name).write_text(text)
    if stop_at is not None:
        _stop_at(*stop_at)
    tokenizer.copy(source, own.run_dir, epoch=own.epoch)


def _measure(own: Owner, step: int, *, stop_at: tuple[Any, ...] | None = None) -> None:
    measured = times.Times(own.run_dir, 1, epoch=own.epoch)
    if stop_at is not None:
        _stop_at(*stop_at)
    measured.note([Beat(count=1, measured=step, seconds=(1.0,) * len(KINDS), memory=1.0)])


def _index(own: Owner, *, stop_at: tuple[Any, ...] | None = None) -> None:
    if stop_at is not None:
        _stop_at(*stop_at)
    index.Index(own.run_dir, own.run_dir / owner.epochs.name(index.FOLDER, own.epoch)).poll()


def _announce(own: Owner, port: int, *, stop_at: tuple[Any, ...] | None = None) -> None:
    if stop_at is not None:
        _stop_at(*stop_at)
    meet.announce(own.run_dir, ("127.0.0.1", port), epoch=own.epoch)


def _read(run: Path) -> dict[str, Any]:
    """Return all values that readers find in a run folder."""
    newest = lambda file: owner.epochs.newest(run, file)  # noqa: E731
    notes = newest("ranks/fleet.json")
    return {
        "checkpoints": [
            (path.name, found.meta["epoch"]) for path in committed(of_run(run)) if (found := storage.files.read_manifest(path))
        ],
        "best": locate(run)[0].name,
        "events": [event.message for event in events.of_kind(events.read(run), Problem)],
        "notes": notes.read_text(),
        "nodes": [record.node for record in node_ledger.read_nodes(newest("nodes.jsonl"))],
        "described": [
            files.read(newest(files.FILE), saved=True).resolved.spec.name,
            *(json.loads(newest(file).read_text())["name"] for file in (files.SPEC_FILE, files.PROVENANCE_FILE)),
        ],
        "tokenizers": [newest(name).read_text() for name in (tokenizer.TOKENIZER_FILE, tokenizer.TOKENIZER_CONFIG_FILE)],
        "times": pyramid.Reader(newest(times.FOLDER)).span(),
        "indexed": [event.message for _, event in index.notes(newest(index.FOLDER)) if isinstance(event, Problem)],
        "address": meet.announced(run),
    }


POINTS: dict[str, Callable[[Owner], None]] = {
    "event": lambda own: _log(own, "late", stop_at=(disk, "append")),
    "event of a log that is opened late": lambda own: _log(own, "late", stop_at=(event_log.json, "dumps")),
    "tensors": lambda own: _save(own, 20, stop_at=(storage.tensors, "write")),
    "manifest": lambda own: _save(own, 20, stop_at=(storage.files, "write_manifest")),
    "commit": lambda own: _save(own, 20, stop_at=(storage.files, "commit")),
    "the name": lambda own: _save(own, 20, stop_at=(storage.files, "_sync")),
    "pruning": lambda own: _save(own, 20, stop_at=(storage.files, "prune")),
    "removal": lambda own: _save(own, 20, stop_at=(storage.files.shutil, "rmtree")),
    "notes": lambda own: _keep(own, "late", stop_at=(memory.json, "dumps")),
    "notes' name": lambda own: _keep(own, "late", stop_at=(Path, "replace")),
    "ledger": lambda own: _ledger(own, "late", stop_at=(disk, "append")),
    "description": lambda own: _describe(own, "late", stop_at=(files, "spec_text")),
    "spec.json": lambda own: _describe(own, "late", stop_at=(Path, "replace")),
    "provenance.json": lambda own: _describe(own, "late", stop_at=(Path, "replace", 2)),
    "run.toml": lambda own: _describe(own, "late", stop_at=(Path, "replace", 3)),
    "tokenizer.json": lambda own: _copy_tokenizer(own, "late", stop_at=(Path, "replace")),
    "tokenizer_config.json": lambda own: _copy_tokenizer(own, "late", stop_at=(Path, "replace", 2)),
    "times": lambda own: _measure(own, 9, stop_at=(pyramid, "Writer")),
    "index": lambda own: _index(own, stop_at=(index.Index, "_keep")),
    "address": lambda own: _announce(own, 9, stop_at=(Path, "replace")),
}


@pytest.mark.parametrize("point", POINTS)
def test_what_an_owner_writes_that_was_stopped_past_its_lease_and_wakes_is_never_read(
    point: str, elsewhere: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LEASE_SECONDS", 0.3)

    def act() -> None:
        with hold(tmp_path) as own:
            _log(own, "first")
            _save(own, 10)
            _keep(own, "first")
            _ledger(own, "first")
            _describe(own, "first")
            _copy_tokenizer(own, "first")
            _measure(own, 1)
            _announce(own, 1)
            POINTS[point](own)
            with pytest.raises(TakenError, match=f"is now owned by process {os.getppid()}"):
                own._renew()
            own.check()

    process = _forked(act)
    assert os.WIFSTOPPED(os.waitpid(process, os.WUNTRACED)[1])
    elsewhere()
    with hold(tmp_path) as own:
        assert own.epoch == 1
        begun = _read(tmp_path)
        assert begun["events"] == ["first"] and begun["nodes"] == ["first"] and '"first"' in begun["notes"]
        assert begun["best"] == ("step-00000020" if point in ("pruning", "removal") else "step-00000010")
        described = {
            "spec.json": ["first", "first", "first"], "provenance.json": ["first", "late", "first"], "run.toml": ["first", "late", "late"]
        }.get(point, ["first", "first", "first"])  # fmt: skip
        assert begun["described"] == described and begun["tokenizers"][0] == (
            "late" if point == "tokenizer_config.json" else "first"
        )
        _log(own, "second")
        _save(own, 15)
        _describe(own, "second")
        _copy_tokenizer(own, "second")
        _measure(own, 2)
        _index(own)
        _announce(own, 2)
        before = _read(tmp_path)
        assert before["best"] == "step-00000015"
        os.kill(process, signal.SIGCONT)
        assert _end_of(process) == ExitCode.LOST
        assert _read(tmp_path) == before
        assert before["events"] == before["indexed"] == ["first", "second"] and before["described"] == ["second"] * 3
        assert before["tokenizers"] == ["second"] * 2 and before["times"] == (2, 3) and before["address"] == ("127.0.0.1", 2)


def test_an_owner_renews_its_lease_while_its_epoch_begins(
    elsewhere: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long log may take longer to copy than an owner may be silent."""
    monkeypatch.setattr(owner, "LEASE_SECONDS", 0.3)
    _die(tmp_path)
    elsewhere()

    def begin(run_dir: Path, epoch: int) -> None:
        until(lambda: bool((found := claims.newest()) and claims.last_beat(found)), seconds=PATIENCE)

    claims = owner._Claims(tmp_path)
    monkeypatch.setattr(owner.epochs, "begin", begin)
    before = threading.active_count()
    with hold(tmp_path) as own:
        assert own.epoch == 1
        assert threading.active_count() == before, "callers fork"


def test_an_owner_that_wakes_before_anybody_has_taken_over_goes_on(
    leased: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LEASE_SECONDS", 0.3)
    with hold(tmp_path) as own:
        time.sleep(0.31)
        own.regain(seconds=PATIENCE)
        assert own.epoch == 0
        until(lambda: bool(owner._Claims(tmp_path).last_beat(own._claim)), seconds=PATIENCE)
