"""A campaign's conclusions from two event logs, without processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith import events
from megalith.commands.campaign import sentences
from megalith.fleet import injection, observations
from megalith.fleet.injection import Injection
from megalith.fleet.observations import GradientWrong, Hang, Observation, RankFailed
from megalith.rehearse.campaign import CampaignRun
from megalith.rehearse.fates import false_alarms, fates_of
from megalith.rehearse.hangs import hangs_of
from megalith.rehearse.judge import Aims, Judgement, judge
from megalith.spec.fleet import FleetSpec

KILL, STOP = Injection(0, "kill", 3, "step", (1,)), Injection(1, "stop", 6, "step", (2,))
STATE = {"weights": "abc", "samples": 80}


def _incident(
    number: int, at: float, observation: Observation, *, node: str | None = "0", rank: int | None = None
) -> events.Incident:
    return events.Incident(
        incident=number, began=at - 0.1, step=observation.step, cause=observation.kind, reason="because", node=node, rank=rank,
        evidence=observations.dump(observation), commands=[], time=at,
    )  # fmt: skip


def _failed(number: int, at: float, rank: int) -> events.Incident:
    return _incident(number, at, RankFailed(step=3, slot=0, node="0", rank=rank, signature="SIGKILL"), rank=rank)


def _recovered(number: int, at: float) -> events.Recovery:
    return events.Recovery(incident=number, step=3, restored=None, lost_steps=0, time=at)


def _step(number: int, at: float, loss: float | None = None) -> events.Step:
    return events.Step(
        step=number, loss=loss or 1 / number, grad_norm=1.0, lr=1.0, tokens=8, tokens_seen=8 * number, seconds=0.5,
        tokens_per_second=16.0, mfu=None, breakdown={}, memory={}, time=at,
    )  # fmt: skip


def _log(folder: Path, *records: events.Event) -> Path:
    log = events.EventLog(folder)
    for record in records:
        log.write(record)
    log.close()
    return folder


def _started(at: int, time: float = 0.0) -> events.RunStarted:
    return events.RunStarted(
        spec={}, device="cpu", world=4, resumed_step=at, versions={}, peak_flops=None, peak_source="", flops_per_token=1.0,
        flops_convention="", parameters=1, time=time,
    )  # fmt: skip


def _hang(number: int, at: float, rank: int, *, step: int = 6, silence: float = 3.05, limit: float = 3.0) -> events.Incident:
    hang = Hang(step=step, slot=0, node="0", rank=rank, phase="step", silence=silence, limit=limit)
    return _incident(number, at, hang, rank=rank)


def _runs(
    folder: Path, *, blamed: int = 1, loss: float | None = None, silence: float = 3.05, limit: float = 3.0
) -> tuple[CampaignRun, CampaignRun, Path]:
    """Return a run of ten steps of a second each, and the same with a kill and a hang, after which steps 4 and 7 were
    repeated."""
    whole = _log(folder / "whole", _started(0), *(_step(i, 100.0 + i) for i in range(1, 11)))
    hurt = _log(
        folder / "faulted",
        _started(0),
        *(_step(i, 200.0 + i) for i in range(1, 4)),
        _failed(1, 204.5, blamed),
        _started(3),
        events.Recovery(incident=1, step=3, restored="step 3 in memory", lost_steps=0, time=205.0),
        *(_step(i, 202.0 + i) for i in range(4, 7)),
        _hang(2, 210.0, 2, silence=silence, limit=limit),
        _started(5),
        events.Recovery(incident=2, step=5, restored="step 5 in memory", lost_steps=1, time=211.0),
        *(_step(i, 206.0 + i, loss if i == 8 else None) for i in range(6, 11)),
    )
    file = folder / "faults.json"
    injection.save(file, [KILL, STOP])
    for number, rank, at in ((0, 1, 204.2), (1, 2, 208.5)):
        (folder / "faults.came" / f"{number}-{rank}").write_text(f"{at} 0 ")
    return CampaignRun(whole, 10.0, 0, ()), CampaignRun(hurt, 20.0, 0, ()), file


def _judged(folder: Path, **changes: Any) -> Judgement:
    aims = changes.pop("aims", Aims())
    whole, faulted, file = _runs(folder, **changes)
    return _of(whole, faulted, file, aims=aims)


def _of(
    whole: CampaignRun, faulted: CampaignRun, file: Path, *, states: tuple[Any, Any] = (STATE, dict(STATE)), **parts: Any
) -> Judgement:
    given = {"left_out": {}, "aimed": {}, "fleet": FleetSpec(), "timeout": 600.0} | parts
    return judge(whole, faulted, injections=file, states=states, **given)


def test_a_run_that_ended_like_the_other_has_passed(tmp_path: Path):
    found = _judged(tmp_path)
    assert found.passed, found.problems
    assert (found.injected, found.handled, found.blamed, found.lost_steps, found.false_alarms) == (2, 2, (2, 2), 1, ())
    assert (found.hidden, found.among, found.same_end) == (0, 0, True)
    kill, stop = found.rows
    assert (kill.seen_as, round(kill.detection or 0, 3), kill.recovery) == ("rank_failed", 0.3, 0.5)
    assert (stop.seen_as, stop.detection, stop.recovery) == ("hang", 1.5, 1.0)


def test_another_end_state_is_not_passed(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    found = _of(whole, faulted, file, states=(STATE, STATE | {"weights": "abd"}))
    assert found.problems == ("the end state differs from that of the run without faults",)
    assert not found.same_end
    assert not _of(whole, faulted, file, states=(None, None)).passed, "nothing was compared"


def test_another_loss_in_one_step_is_not_passed(tmp_path: Path):
    assert _judged(tmp_path, loss=0.5).problems == ("steps whose loss, gradient norm or tokens differ: 1, first 8",)


def test_the_wrong_rank_blamed_is_not_passed(tmp_path: Path):
    found = _judged(tmp_path, blamed=3)
    assert found.blamed == (1, 2)
    assert "fewer than 98 %" in found.problems[0]


def test_a_fault_that_never_came_is_not_passed(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    next((tmp_path / "faults.came").glob("1-*")).unlink()
    found = _of(whole, faulted, file)
    assert found.problems == ("fault 1 (stop at step 6) was never injected",)
    (alarm,) = found.false_alarms  # an incident that no fault explains
    assert (alarm.cause, alarm.step, alarm.rank, alarm.seconds, alarm.lost_steps) == ("hang", 6, 2, 1.0, 1)
    said = list(sentences(found))
    assert "false alarm: hang at step 6, rank 2 on 0 (because): 1.00 s, 1 step repeated" in said
    assert "1 false alarm, none of which changed the result: the end state is the same as without faults" in said
    other = list(sentences(_of(whole, faulted, file, states=(STATE, {}))))
    assert not any("none of which changed" in line for line in other), "only what the comparison shows is said"


def test_an_unexpected_end_is_not_passed(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    assert not _of(whole, replace(faulted, by_hand=1), file).passed


# --- hangs ---


def test_hangs_are_held_against_their_limits_and_those_against_the_pace(tmp_path: Path):
    found = _judged(tmp_path)
    hangs = found.hangs
    assert (hangs.found, hangs.late, hangs.limits, hangs.elsewhere) == (1, 0, (3.0, 3.0), 0)
    assert hangs.of_pace == 1.0, "steps of a second, three times"
    late = hangs_of(list(events.read(tmp_path / "faulted")), fleet=FleetSpec(), timeout=600.0, seen_late=0.5)
    assert [hang.pace for hang in late] == [4.5], "seen through agents"
    assert hangs.most is not None
    assert hangs.most == pytest.approx(3.05 / 3.0)
    assert "hangs: 1, the longest silence was 1.02 times its detection limit (limits 3.00 to 3.00 s)" in list(sentences(found))
    assert found.as_json()["hangs"]["most"] == hangs.most


def test_a_silence_beyond_its_limit_is_told_and_beyond_what_starved_ranks_may_take_not_passed(tmp_path: Path):
    late = _judged(tmp_path / "late", silence=4.6)
    assert late.passed, "ranks without a processor are given more"
    assert late.hangs.late == 1
    assert any("1 of the hangs found late" in line for line in sentences(late))
    never = _judged(tmp_path / "never", silence=33.0)
    assert never.problems == ("hang (incident 2): silent for 33.00 s, more than 10 times its limit of 3.00 s",)


@pytest.mark.parametrize(
    ("limit", "why"), [(0.9, "below fleet.hang_floor = 1 s"), (5.0, "larger than rank 0's steps justify, 3.00 s")]
)
def test_a_limit_that_the_pace_does_not_give_is_not_passed(tmp_path: Path, limit: float, why: str):
    (problem,) = _judged(tmp_path, limit=limit, silence=limit).problems
    assert why in problem


def test_limits_of_first_steps_and_of_phases_not_seen_before_are_not_those_of_the_pace(tmp_path: Path):
    found = _judged(tmp_path, limit=600.0, silence=600.0)
    assert found.passed, found.problems
    assert (found.hangs.limits, found.hangs.elsewhere, found.hangs.elsewhere_limit) == (None, 1, 600.0)


# --- aims ---


def test_speeds_are_asked_only_where_they_are_given_and_missing_them_is_not_passed(tmp_path: Path):
    none = _judged(tmp_path / "none")
    assert none.asked == ()
    assert list(sentences(none))[-1].endswith("no time limit was set")
    met = _judged(tmp_path / "met", aims=Aims(median=0.75, most=1.0, minutes=0.5, silence=1.5))
    assert met.passed, met.problems
    missed = _judged(tmp_path / "missed", aims=Aims(median=0.7, most=0.9, minutes=0.4, silence=1.01))
    assert missed.problems == (
        "recovery in the median 0.75 s, above the allowed 0.7 s",
        "recovery at the 99th percentile 1.00 s, above the allowed 0.9 s",
        "both runs 0.50 min, above the allowed 0.4 min",
        "silence of a hang 1.02 times its limit, above the allowed 1.01 times its limit",
    )
    assert "limit: recovery in the median 0.7 s; found: 0.75 s" in list(sentences(missed))


# --- blame ---


def test_the_right_node_among_several_is_right_and_distinguished():
    wrong = Injection(0, "once", 4, "gradients", (1,))
    (both, alone, other) = (
        fates_of([wrong], {0: (4.0, "1")}, [_incident(1, 5.0, GradientWrong(good_step=3, suspects=suspects), node=None)])[0]
        for suspects in (("0", "1"), ("1",), ("0", "2"))
    )
    assert [(fate.blamed, fate.among) for fate in (both, alone, other)] == [(True, True), (True, False), (False, False)]


def test_a_fault_within_another_ones_incident_is_hidden_and_nobody_is_credited_for_its_blame():
    flip = Injection(1, "weight", 3, "resting", (2,))
    kill, hidden = fates_of([KILL, flip], {0: (4.0, "0"), 1: (4.1, "0")}, [_failed(1, 5.0, rank=1), _recovered(1, 6.0)])
    assert (kill.hidden, kill.judged) == (False, True)
    assert (hidden.handled, hidden.hidden, hidden.judged) == (True, True, None)


# --- the supervisor ---


def test_starts_of_a_killed_supervisor_are_a_row_of_their_own_and_in_no_median(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    killed = Injection(2, "supervisor", 9, "step", (0,))
    (tmp_path / "faults.came" / "2-0").write_text("214.5 0 ")
    came = {mark.name: mark.read_text() for mark in (tmp_path / "faults.came").iterdir()}
    injection.save(file, [KILL, STOP, killed])
    for name, text in came.items():
        (tmp_path / "faults.came" / name).write_text(text)
    found = _of(whole, replace(faulted, supervisor_restarts=(7.5,)), file)
    assert found.passed, found.problems
    row = found.rows[-1]
    assert (row.kind, row.handled, row.recovery, row.slowest) == ("supervisor", 1, 7.5, 7.5)
    assert found.recovery_p99 == 1.0
    never = _of(whole, faulted, file)
    assert "the supervisor was restarted 0 times, but faults killed it 1 times" in never.problems
    assert (never.handled, never.injected) == (2, 3), "it was not started again"


def test_a_slow_disk_needs_no_incident_but_a_next_step():
    slow = Injection(0, "slow-disk", 2, "resting", (1,))
    log = [_started(0), *(_step(i, 200.0 + i) for i in range(1, 5)), _failed(1, 204.5, 1), _recovered(1, 206.0)]
    (fate,) = fates_of([slow], {0: (202.5, "0")}, log)
    assert (fate.handled, fate.recovery, fate.incident, fate.judged) == (True, 0.5, None, None)
    (stuck,) = fates_of([slow], {0: (204.2, "0")}, log)
    assert not stuck.handled


def test_faults_that_overlap_share_an_incident_which_may_name_either(tmp_path: Path):
    both = [KILL, replace(STOP, kind="segfault", step=3)]
    fates = fates_of(both, {0: (4.0, "0"), 1: (4.1, "0")}, [_failed(1, 5.0, rank=2), _recovered(1, 6.0)])
    assert [fate.blamed for fate in fates] == [True, True]
    assert all(fate.handled for fate in fates)
    assert [fate.hidden for fate in fates] == [True, False], "it names the second"


def test_what_the_supervisor_did_not_live_to_recover_from_is_no_recovery_of_the_runs_own():
    both = [KILL, replace(STOP, kind="supervisor", step=4)]
    log = [
        _started(0, 0.0),
        _failed(1, 4.5, rank=1),
        _step(4, 4.6),
        _started(3, 20.0),
        _step(4, 21.0),
        events.RunFinished("finished", 4, time=90.0),
    ]
    kill, supervisor = fates_of(both, {0: (4.0, "0"), 1: (5.0, "0")}, log, restarts=[16.0])
    assert (kill.handled, kill.recovery, kill.own_recovery, kill.interrupted) == (True, 16.5, None, True)
    assert (supervisor.handled, supervisor.own_recovery) == (True, 16.0)


def test_two_faults_in_a_row_are_matched_with_the_incidents_of_their_ranks() -> None:
    """The second fault came before the incident of the first one was logged. Once, both were matched with that incident, and the second
    incident was a false alarm."""
    first, second = Injection(0, "kill", 3, "step", (1,)), Injection(1, "kill", 4, "step", (2,))
    log = [_failed(1, 5.0, rank=1), _recovered(1, 5.5), _failed(2, 5.6, rank=2), _recovered(2, 6.0)]
    fates = fates_of([first, second], {0: (4.8, "0"), 1: (4.9, "0")}, log)
    assert [(fate.incident, fate.blamed, fate.hidden) for fate in fates] == [(1, True, False), (2, True, False)]
    assert not list(false_alarms(fates, log))


def test_a_wrong_rank_is_blamed_wrongly_even_if_the_right_one_follows() -> None:
    fault, log = Injection(0, "kill", 3, "step", (1,)), [_failed(1, 5.0, rank=3), _recovered(1, 5.5), _failed(2, 5.6, rank=1)]
    (fate,) = fates_of([fault], {0: (4.8, "0")}, log)
    assert (fate.incident, fate.blamed) == (1, False)
