"""A run continues after faults and ends as it would without them: real processes, without torch."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalith import disk, events, sealed
from megalith.control import controller as controller_module
from megalith.control.controller import Controller, run_here
from megalith.control.node_ledger import NodeRecord, note, read_nodes, standings
from megalith.control.observed import TimedObservation
from megalith.control.outcome import Outcome
from megalith.control.stop_response import Store
from megalith.events import Incident, Problem, Recovery, RunFinished
from megalith.fleet import injection
from megalith.fleet.causes import Failure
from megalith.fleet.commands import Restart
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Beat
from megalith.fleet.injection import Injection
from megalith.fleet.job import Job
from megalith.fleet.nodes import Generation
from megalith.fleet.observations import (
    DataDamaged,
    HealthChecked,
    NodeJoined,
    Preempted,
    SaveFailed,
    SaveWorks,
    Started,
    Straggler,
)
from megalith.fleet.tiers import Copy, Tier, roots
from megalith.spec.fleet import FleetSpec
from tests.control.walk import checkpoints
from tests.patience import PATIENCE

STEPS, RANKS = 12, 4
FLEET = FleetSpec(nodes=2, spares=1, hang_floor=4.0, hang_factor=20.0)  # far longer than a busy machine takes


def _walk(folder: Path, *injections: Injection, store: Store | None = None) -> Outcome:
    folder.mkdir(exist_ok=True)
    injection.save(folder / "faults.json", injections)
    return _run(folder, store)


def _run(folder: Path, store: Store | None = None) -> Outcome:
    job = Job(
        entry="tests.control.walk:walk",
        arguments={"steps": STEPS},
        ranks=RANKS,
        run_dir=folder,
        preload=("tests.control.walk",),
        start_timeout=PATIENCE,
        silence_timeout=PATIENCE,
        threads=1,
        environment={injection.VARIABLE: str(folder / "faults.json")},
    )
    return run_here(job, fleet=FLEET, identity="walk", store=store or (lambda: checkpoints(folder)))


def _state(folder: Path) -> list[Any]:
    return [json.loads((folder / f"state-{STEPS}-{rank}").read_text()) for rank in range(RANKS)]


def _incidents(folder: Path) -> list[Incident]:
    return events.of_kind(events.read(folder), Incident)


def _restored(folder: Path) -> list[str | None]:
    return [recovery.restored for recovery in events.of_kind(events.read(folder), Recovery)]


def _told(folder: Path) -> list[str]:
    return [problem.message for problem in events.of_kind(events.read(folder), Problem)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert _walk(folder).code == ExitCode.FINISHED
    assert not _incidents(folder)
    return _state(folder)


CASES: dict[str, tuple[str, Callable[[Incident], bool]]] = {
    "kill": ("rank_failed", lambda found: found.rank == 2 and found.evidence["exits"]["2"] == -signal.SIGKILL),
    "segfault": ("rank_failed", lambda found: found.rank == 2 and "SIGSEGV" in found.reason),
    "exception": ("rank_failed", lambda found: found.rank == 2 and found.node is None and "Injected" in found.reason),
    "stop": ("hang", lambda found: found.rank == 2 and found.evidence["limit"] < PATIENCE),
    "stuck": ("hang", lambda found: found.rank == 2 and "_never_return" in found.evidence["stacks"]["2"]),
    "preemption": ("preempted", lambda found: found.node is None and found.evidence["node"] == "1"),
    "node": ("nodes_lost", lambda found: found.node == "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_end_is_that_of_a_run_without_faults(kind: str, whole: list[Any], tmp_path: Path) -> None:
    cause, named = CASES[kind]
    outcome = _walk(tmp_path / "run", Injection(0, kind, 7, "step", (2, 3) if kind == "node" else (2,)))
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert _state(tmp_path / "run") == whole
    (found,) = _incidents(tmp_path / "run")
    assert found.cause == cause, found
    assert named(found), found
    (recovery,) = events.of_kind(events.read(tmp_path / "run"), Recovery)
    assert recovery.incident == found.incident
    assert recovery.restored == ("step 10 in store" if kind == "preemption" else "step 6 in store")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_a_fault_during_recovery_is_recovered_from_as_well(kind: str, whole: list[Any], tmp_path: Path) -> None:
    """The second rank dies during the restart after the first rank's death."""
    outcome = _walk(
        tmp_path / "run",
        Injection(0, "kill", 7, "step", (2,)),
        Injection(1, kind, 7, "building", (1,), after=0),
    )
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert _state(tmp_path / "run") == whole
    found = _incidents(tmp_path / "run")
    assert [one.rank for one in found] == [2, 1]
    assert ("building" if kind == "kill" else "Injected") in found[1].reason
    over = [recovery.incident for recovery in events.of_kind(events.read(tmp_path / "run"), Recovery)]
    assert over == [1, 2], "both are over once the ranks go on"


@pytest.mark.slow
@pytest.mark.parametrize("second", ["kill", "segfault", "stop", "exception"])
def test_faults_that_overlap_are_recovered_from_together(second: str, whole: list[Any], tmp_path: Path) -> None:
    """Two ranks on two nodes fail in one step. Both are reported, in either order, and nothing else is blamed."""
    faulted = (Injection(0, "kill", 7, "step", (2,)), Injection(1, second, 7, "step", (0,)))
    outcome = _walk(tmp_path / "run", *faulted)
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert _state(tmp_path / "run") == whole
    assert set(injection.fired(tmp_path / "run" / "faults.json")) == {0, 1}
    found = _incidents(tmp_path / "run")
    assert 1 <= len(found) <= 2
    assert {one.rank for one in found} <= {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 3])
def test_the_same_failure_at_one_step_falls_back_a_tier_and_the_third_time_stops(
    times: int, whole: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def on_disk_and_in_the_store() -> tuple[Copy, ...]:
        return (*[Copy(Tier.DISK, copy.step) for copy in checkpoints(folder)], *checkpoints(folder))

    alike = [Injection(number, "exception", 10, "step", (2,)) for number in range(times)]
    outcome = _walk(folder, *alike, store=on_disk_and_in_the_store)
    assert len(_incidents(folder)) == times
    assert _restored(folder) == ["step 9 in disk", "step 6 in store"]
    if times == 2:
        assert outcome.code == ExitCode.FINISHED, outcome.message()
        assert _state(folder) == whole
    else:
        assert outcome.code == ExitCode.FAILED
        assert "this is the third time at step 10, the last time after restoring step 6 in store" in outcome.report


@pytest.mark.slow
def test_a_like_failure_at_another_step_that_is_done_again_is_another_failure(whole: list[Any], tmp_path: Path) -> None:
    outcome = _walk(tmp_path / "run", Injection(0, "kill", 8, "step", (2,)), Injection(1, "kill", 0, "step", (2,), after=0))
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert _state(tmp_path / "run") == whole
    found = _incidents(tmp_path / "run")
    assert [one.step for one in found] == [8, 6]
    assert not any("again at step" in one.reason for one in found)


@pytest.mark.slow
def test_a_copy_that_fails_its_digest_is_set_aside_and_not_used_again(whole: list[Any], tmp_path: Path) -> None:
    """This also holds if another failure comes before that step is finished again."""
    folder = tmp_path / "run"
    kills = [Injection(0, "kill", 7, "step", (2,)), Injection(1, "kill", 0, "step", (2,), after=0)]

    def damaged() -> tuple[Copy, ...]:
        if (folder / "state-6-2").exists() and not (folder / "state-9-2").exists():
            (folder / "state-6-2").write_text("[6, ")
        return checkpoints(folder)

    outcome = _walk(folder, *kills, store=damaged)
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert _state(folder) == whole
    assert [found.cause for found in _incidents(folder)] == ["rank_failed", "copy_corrupt", "rank_failed"]
    assert _restored(folder) == ["step 3 in store"] * 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc and the fork server are Linux's")
def test_the_same_command_goes_on_when_the_supervisor_itself_was_killed(whole: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    injection.save(folder / "faults.json", [Injection(0, "supervisor", 7, "step", (1,))])
    command = [sys.executable, "-m", "tests.control.test_controller", str(folder)]
    root = Path(__file__).resolve().parents[2]
    codes = [subprocess.run(command, check=False, timeout=PATIENCE, cwd=root).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, ExitCode.FINISHED]
    assert _state(folder) == whole
    assert not _incidents(folder), "nobody was there to see it"


def test_a_straggler_is_replaced_from_what_is_there_once_all_have_ended(tmp_path: Path) -> None:
    """After the report the ranks continue, and overwrite the copies from then before they end."""
    newest = [92]
    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), survey=lambda placement: (Copy(Tier.STORE, newest[0]),), check=str)
    (tmp_path / "ranks").mkdir()
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    observation = Straggler(time=1.0, step=98, slot=0, node="a", rank=0, ratio=9.0, lost=9.0, replacing=1.0)
    controller._take_now_or_later(TimedObservation(observation, 1.0, {}))
    assert controller._next is None
    newest[0] = 98
    for seen in controller._seen:
        controller._take(seen)
    assert controller._next is not None
    assert (controller._next.source.step, controller._next.placement) == (98, ("c", "b"))


def test_reports_while_ranks_end_hides_no_failure(tmp_path: Path) -> None:
    """A node comes back at the moment when a rank is killed. The killed rank is still the reason for the generation's end,
    and the run continues. Ranks report that they were asked to stop; this is ignored, because the controller asked them."""
    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), survey=lambda placement: (Copy(Tier.STORE, 7),), check=str, beats=list)
    (tmp_path / "ranks").mkdir()
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    failure = Failure(1, "killed by SIGKILL in phase `step`", "", "", tmp_path / "ranks/rank-1.log", 1.0, ExitCode.LOST)
    outcome = Outcome(ExitCode.LOST, False, failure, (), (), (), None)
    late = [
        NodeJoined(time=1.0, node="c"),
        HealthChecked(time=1.0, node="c", passed=True),
        DataDamaged(time=1.0, shard="a.bin", error="byte 5", other_copy="/copy"),
    ]
    asked = Preempted(time=1.0, node="b", rank=1)
    watch = SimpleNamespace(hang=None, late_observations=[*late, asked], stopping=True)
    seen = controller._after(cast(Any, watch), outcome)
    assert [one.observation.kind for one in seen] == ["node_joined", "health_checked", "data_damaged", "rank_failed"]
    for one in seen:
        controller._take(one)
    assert controller._next is not None


@pytest.mark.parametrize(("begun", "finished"), [(7, False), (8, True)])
def test_a_step_that_was_finished_between_two_polls_counts(begun: int, finished: bool, tmp_path: Path) -> None:
    """The ranks restored the state after step 7. When they are first seen, they are in a later step. Once, only a step that was seen to
    begin and to end counted, so that a slow supervisor stopped a run for ten starts without a finished step."""
    nodes = SimpleNamespace(there=lambda: ("a", "b"), survey=lambda placement: (Copy(Tier.STORE, 7),))
    (tmp_path / "ranks").mkdir()
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    controller._state, controller._restored = replace(controller._state, fruitless=3), 7
    controller._progress([Beat(count=5, step=begun, ready=True)] * 2)
    assert controller._state.fruitless == (0 if finished else 3)


def test_a_node_told_to_go_while_the_ranks_save_for_another_leaves_too(tmp_path: Path) -> None:
    """The node's agent reports once. Its ranks then report only that the controller asked them to stop."""
    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), survey=lambda placement: (Copy(Tier.STORE, 7),), check=str, beats=list)
    (tmp_path / "ranks").mkdir()
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    controller._watch = cast(Any, SimpleNamespace(stopping=True, stop=lambda: None))
    for observation in (Preempted(time=1.0, node="a"), Preempted(time=1.0, node="b", rank=1)):
        controller._handle(observation)
    assert controller._state.leaving == ("a",)
    controller._handle(Preempted(time=2.0, node="b"))
    assert controller._state.leaving == ("a", "b")


@pytest.mark.parametrize(("leaving", "kinds"), [(("a",), ["saved"]), ((), [])])
def test_ranks_that_were_ended_before_there_was_a_state_to_save_are_started_again_without_the_node(
    leaving: tuple[str, ...], kinds: list[str], tmp_path: Path
) -> None:
    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"))
    (tmp_path / "ranks").mkdir()
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    controller._state = replace(controller._state, leaving=leaving)
    ended = Outcome(ExitCode.TERMINATED, True, None, (), (), (), None)
    watch = SimpleNamespace(hang=None, late_observations=[], stopping=True)
    assert [one.observation.kind for one in controller._after(cast(Any, watch), ended)] == kinds


def _full(path: Path, content: str | bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_that_saves_work_again_is_told_and_is_no_incident_and_a_full_disk_ends_no_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "write_whole", _full)
    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), survey=lambda placement: (Copy(Tier.STORE, 7),))
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    for observation in (
        SaveFailed(time=1.0, step=10, tier=Tier.STORE, error="full"),
        SaveWorks(time=2.0, step=20, tier=Tier.STORE),
    ):
        controller._take(TimedObservation(observation, observation.time, {}))
    assert [found.cause for found in _incidents(tmp_path)] == ["save_failed"]
    told = _told(tmp_path)
    assert told == ["no copy could be written to store: full", "store takes copies again"]


def test_a_start_that_finds_no_room_waits_for_some_unless_somebody_wants_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controller_module, "STORAGE_SECONDS", 0.0)
    (tmp_path / "ranks").mkdir()
    left = [3]

    def start(generation: Generation) -> None:
        left[0] -= 1
        if left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), start=start)
    requests: list[Any] = []
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=requests)
    assert controller._start(Generation("g", ("a", "b")))
    assert left == [0]
    said = f"{tmp_path} cannot be used (No space left on device): waiting until it can, for at most 3600 s (fleet.wait_limit)"
    assert capsys.readouterr().err.count(said) == 1, "it says so once"
    assert _told(tmp_path) == [f"{tmp_path} can be used again, after 0 s"]
    left[0] = 10
    requests.append(object())
    assert not controller._start(Generation("g", ("a", "b")))
    assert left == [9]


def test_a_file_that_changed_while_the_run_is_held_ends_it_before_any_rank_starts(tmp_path: Path) -> None:
    """Otherwise the ranks would compute another run."""
    (tmp_path / "ranks").mkdir()
    kept = tmp_path / "spec.json"
    kept.write_text("{}")
    nodes = SimpleNamespace(
        there=lambda: ("a", "b", "c"), survey=lambda placement: (), start=lambda generation: pytest.fail("started")
    )
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path, sealed=sealed.seal([kept]))
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
    kept.write_text("{ }")
    outcome = controller.run()
    assert outcome.code == ExitCode.FAILED
    assert f"{kept} was changed while this run was in progress" in outcome.message()
    assert f"{kept} was changed" in _told(tmp_path)[-1]
    assert [event.reason for event in events.of_kind(events.read(tmp_path), RunFinished)] == ["failed"]


@pytest.mark.parametrize("code", ExitCode)
def test_copies_in_memory_go_with_a_run_only_once_its_state_is_in_a_checkpoint(
    code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault during a stop ends the ranks before they have saved."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(roots, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(Controller, "run", lambda self: Outcome(code, True, None, (), (), (), None))
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path / "run")
    run_here(job, fleet=FLEET, identity="walk", store=lambda: ())
    assert any((tmp_path / "shm").iterdir()) == (code not in {ExitCode.FINISHED, ExitCode.STOPPED})


def test_a_store_that_is_away_ends_no_run_whose_checkpoints_are_known(tmp_path: Path) -> None:
    """A rank died meanwhile. The run continues from memory, or waits for the store."""
    (tmp_path / "ranks").mkdir()
    away: list[OSError] = []

    def store() -> tuple[Copy, ...]:
        if away:
            raise away[0]
        return (Copy(Tier.STORE, 5),)

    in_memory = [Copy(Tier.MEMORY, 7)]
    nodes = SimpleNamespace(there=lambda: ("a", "b"), survey=lambda placement: tuple(in_memory), check=str)
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=store, requests=[])
    controller._take(TimedObservation(Started(time=1.0), 1.0, {}))
    away.append(OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    assert controller._copies() == (Copy(Tier.MEMORY, 7), Copy(Tier.STORE, 5))
    in_memory.clear()
    assert controller._copies() == (Copy(Tier.STORE, 5),)
    assert "Stale file handle" in _told(tmp_path)[-1]
    again = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=store, requests=[])
    with pytest.raises(OSError, match="Stale"):  # the store may hold the only checkpoints, so the run must not start over
        again._take(TimedObservation(Started(time=1.0), 1.0, {}))


def test_a_store_that_cannot_be_listed_is_waited_for_and_later_taken_to_hold_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a run that cannot list its checkpoints would start over."""
    monkeypatch.setattr(controller_module, "STORAGE_SECONDS", 0.0)
    (tmp_path / "ranks").mkdir()
    away = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    answers: list[Any] = [away, away, (Copy(Tier.STORE, 9),), (Copy(Tier.STORE, 9),), away, ()]

    def store() -> tuple[Copy, ...]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), survey=lambda placement: ())
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)
    controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=store, requests=[])
    assert controller._await_store()
    said = capsys.readouterr().err
    assert (
        said.count("the checkpoints cannot be listed ([Errno 116] Stale file handle): waiting until they can, for at most 3600 s")
        == 1
    )
    assert _told(tmp_path) == ["the checkpoints can be listed again, after 0 s"]
    assert [controller._copies() for _ in range(3)] == [(Copy(Tier.STORE, 9),)] * 3
    assert not answers


def test_a_node_that_was_a_lemon_last_time_is_not_used_until_its_check_passes(tmp_path: Path) -> None:
    """The command is repeated on other nodes. The ledger's entry for one of them still counts."""
    ledger_file, now = tmp_path / "nodes.jsonl", time.time()
    for ago in (3, 2, 1):
        note(ledger_file, NodeRecord(now - ago * 3600.0, "b", "fault", "SIGKILL"))
    note(ledger_file, NodeRecord(now - 30 * 86400.0, "c", "fault", "long ago"))
    checked: list[str] = []
    nodes = SimpleNamespace(there=lambda: ("a", "b", "c"), survey=lambda placement: (), check=checked.append)
    (tmp_path / "ranks").mkdir()
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path)

    def started() -> Controller:
        controller = Controller(job, fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[])
        controller._take(TimedObservation(Started(time=now), now, {}))
        controller._turn()
        return controller

    controller = started()
    assert isinstance(controller._next, Restart)
    assert (controller._next.placement, checked) == (("a", "c"), ["b"])
    controller._take(TimedObservation(HealthChecked(time=now, node="b", passed=False), now, {}))
    assert "b" in controller._state.quarantined
    assert standings(read_nodes(ledger_file))["b"].quarantined is not None
    controller._take(TimedObservation(HealthChecked(time=now, node="b", passed=True), now, {}))
    assert controller._state.spares == ("b",)
    (tmp_path / "ranks" / "fleet.json").unlink()
    assert started()._state.placement == ("a", "b"), "it has passed, so its faults are forgotten"


def test_a_check_that_failed_is_made_again_when_its_time_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    nodes = SimpleNamespace(there=lambda: ("a", "b"), survey=lambda placement: (), check=checked.append)
    (tmp_path / "ranks").mkdir()
    controller = Controller(
        Job("nobody:calls", {}, ranks=2, run_dir=tmp_path), fleet=FLEET, nodes=cast(Any, nodes), store=lambda: (), requests=[]
    )
    controller._take(
        TimedObservation(Straggler(time=1.0, step=1, slot=0, node="a", rank=0, ratio=9.0, lost=0.0, replacing=1.0), 1.0, {})
    )
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    controller._take(TimedObservation(HealthChecked(time=1.0, node="c", passed=False), 1.0, {}))
    for passed, expected in ((0.5, []), (1.0, ["c"]), (9.0, ["c"])):
        monkeypatch.setattr(time, "monotonic", lambda passed=passed: clock + passed)
        controller._turn()
        assert checked == expected


if __name__ == "__main__":
    raise SystemExit(_run(Path(sys.argv[1])).code)
