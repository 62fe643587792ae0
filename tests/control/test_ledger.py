"""Every second is assigned to one cause, and every incident is recorded."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith import events
from megalith.control.ledger import Cause, Interval, goodput, partition, post_mortems
from megalith.events import Checkpoint, Event, EventLog, Incident, Merge, Recovery, RunFinished, RunStarted, Step, Validation

INTERVALS = st.lists(
    st.builds(lambda a, b, cause: Interval(min(a, b), max(a, b), cause), *[st.floats(0, 100)] * 2, st.sampled_from(Cause)),
    max_size=20,
)


@given(INTERVALS)
def test_cutting_gives_each_moment_to_the_highest_claim(intervals: list[Interval]) -> None:
    whole = [Interval(0, 100, Cause.OTHER), *intervals]
    pieces = partition(whole, 0, 100)
    assert sum(piece.end - piece.start for piece in pieces) == pytest.approx(100)
    order = list(Cause)
    for piece in pieces:
        middle = (piece.start + piece.end) / 2
        if piece.start < middle < piece.end:
            claims = [interval.cause for interval in whole if interval.start <= middle < interval.end]
            assert piece.cause == max(claims, key=order.index)


def _start(time: float, resumed: int = 0) -> RunStarted:
    return RunStarted({}, "cpu", 4, resumed, {}, None, "", 1.0, "", 1, time=time)


def _step(number: int, time: float, seconds: float = 1.0, data: float = 0.0) -> Step:
    return Step(number, 1.0, 1.0, 1e-3, 10, 10, seconds, 10.0, None, {"data": data}, {}, time=time)


def _incident(number: int, began: float, time: float, cause: str = "rank_failed", **rest: Any) -> Incident:
    fields: dict[str, Any] = {
        "step": 3, "reason": "killed", "node": "n1", "rank": 2, "evidence": {"kind": cause, "signature": "SIGKILL"}, "commands": [],
    }  # fmt: skip
    return Incident(number, began, cause=cause, time=time, **fields | rest)


FAULT = (
    _start(100.0),
    _step(1, 103.0),  # start-up 2 s
    _step(2, 104.0, data=0.25),
    _step(3, 105.0),
    _incident(0, began=105.5, time=106.0),  # half a step lost, half a second until detection
    _start(106.5, resumed=2),
    Recovery(0, 2, "step 2 in memory", 1, time=106.8),
    _step(3, 108.0),  # recovery until 107.0; the first step 3 was lost
    _step(4, 109.0),
    RunFinished("finished", 4, time=109.5),
)


def test_a_fault_is_accounted_for_by_cause() -> None:
    account = goodput(FAULT)
    expected = {
        Cause.START: 2.0, Cause.USEFUL: 3.75, Cause.DATA: 0.25, Cause.LOST: 1.5, Cause.DETECTION: 0.5, Cause.RECOVERY: 1.0,
        Cause.OTHER: 0.5,
    }  # fmt: skip
    assert {cause: seconds for cause, seconds in account.seconds.items() if seconds > 1e-9} == pytest.approx(expected)
    assert (account.steps, account.lost_steps, account.incidents) == (4, 1, 1)
    assert account.share == pytest.approx(3.75 / 9.5)


@given(st.lists(st.tuples(st.sampled_from("sfvc"), st.floats(0.01, 3)), max_size=30))
def test_causes_add_up_to_the_wall_time(script: list[tuple[str, float]]) -> None:
    happened: list[Event] = [_start(0.0)]
    now, step, kept = 0.0, 0, 0
    for what, seconds in script:
        began, now = now, now + seconds
        match what:
            case "s":
                step += 1
                happened.append(_step(step, now, seconds * 0.9, data=seconds * 0.1))
            case "f":
                number = len(happened)
                happened += [
                    _incident(number, began, began + seconds / 2, step=step),
                    _start(now, kept),
                    Recovery(number, kept, None, step - kept, time=now),
                ]
                step = kept
            case "v":
                happened.append(Validation(step, 1.0, {}, seconds, time=now))
            case "c":
                kept = step
                happened.append(Checkpoint(step, "", 1, seconds, seconds * 0.5, time=now))
    account = goodput(happened)
    assert account.wall == pytest.approx(now)
    assert all(seconds >= 0 for seconds in account.seconds.values())
    assert account.steps == step


def test_a_run_that_was_away_is_not_blamed_for_it() -> None:
    log = [_start(0.0), _step(1, 2.0), RunFinished("stopped", 1, time=2.0), _start(1002.0, 1), _step(2, 1004.0), _step(3, 1005.0)]
    account = goodput(log)
    assert account.seconds[Cause.AWAY] == pytest.approx(1000.0)
    assert account.share == pytest.approx(3.0 / 5.0)


def test_a_run_is_away_only_until_its_next_start() -> None:
    stopped = [_start(0.0), _step(1, 2.0), RunFinished("stopped", 1, time=2.0)]
    log = [
        *stopped,
        _start(1002.0, 1),
        _step(2, 1004.0),
        _start(1010.0, 2),
        _step(3, 1012.0),
    ]  # the second start ended without an event
    account = goodput(log)
    assert account.seconds[Cause.AWAY] == pytest.approx(1000.0)
    assert account.seconds[Cause.USEFUL] == pytest.approx(3.0)


STOP = {"kind": "stop", "code": 1, "report": ""}
STOPPED = (
    _start(0.0),
    _step(1, 2.0),
    RunFinished("failed", -1, time=2.5),
    _incident(1, 2.4, 2.6, commands=[STOP]),
    _start(1002.6, 1),
    _step(2, 1004.6),
    RunFinished("stopped", 2, time=1005.0),
    _start(2005.0, 2),
    _step(3, 2007.0),
)


def test_a_run_that_a_fault_stopped_is_away_until_it_is_started_again() -> None:
    account = goodput(STOPPED)
    assert account.seconds[Cause.USEFUL] == pytest.approx(3.0)
    assert account.seconds[Cause.AWAY] == pytest.approx(2000.0)
    assert account.seconds[Cause.RECOVERY] == 0
    (told,) = post_mortems(STOPPED)
    assert told.recovery is None and "the run stopped" in told.text()
    assert told.timeline[-1] == (1002.6, "ranks are ready, from step 1"), "a timeline ends with the next start"


def test_recovery_that_failed_ends_with_the_run() -> None:
    log = [*STOPPED[:3], _incident(0, 2.4, 2.5), *STOPPED[3:]]  # the restart that it ordered failed
    seconds = goodput(log).seconds
    assert seconds[Cause.RECOVERY] == pytest.approx(0) and seconds[Cause.AWAY] == pytest.approx(2000.0)


def test_recovery_that_a_kill_left_unlogged_ends_at_the_first_start() -> None:
    killed = [one for one in FAULT if not isinstance(one, Recovery)]
    log = [*killed, _start(1109.5, 4), _step(5, 1111.5), _step(6, 1112.5)]
    account = goodput(log)
    assert account.seconds[Cause.RECOVERY] == pytest.approx(1.0)
    assert account.seconds[Cause.AWAY] == pytest.approx(1000.0)
    (told,) = post_mortems(log)
    assert (told.recovery, told.lost_steps, told.restored) == (pytest.approx(0.5), 1, "step 2")


def test_what_slow_steps_cost_beyond_the_usual_is_straggling() -> None:
    slow = [_step(i, 10.0 + 3 * (i - 10), 3.0) for i in range(11, 13)]
    log = [
        _start(0.0), *(_step(i, float(i)) for i in range(1, 11)), *slow,
        _incident(0, began=10.0, time=16.0, cause="straggler"), Recovery(0, 12, None, 0, time=16.5), _step(13, 17.5),
    ]  # fmt: skip
    account = goodput(log)
    assert account.seconds[Cause.STRAGGLING] == pytest.approx(4.0)
    assert account.seconds[Cause.USEFUL] == pytest.approx(13.0)


def test_merges_made_before_a_site_was_there_are_no_time_of_it() -> None:
    """A new site, or one that lost its folder, logs the merges that it missed with the times at which the others made them."""
    missed = [Merge(4, 4, 0, 2, [], 0, 0, 0.0, 0.0, 1.0, 1.0, number=number, time=10.0 + number) for number in range(2)]
    account = goodput([_start(100.0), *missed, _step(1, 103.0)])
    assert account.wall == pytest.approx(3.0) and account.seconds[Cause.OTHER] == 0.0
    assert goodput(missed).wall == pytest.approx(1.0)


def test_an_empty_log_has_no_goodput() -> None:
    account = goodput([])
    assert account.share is None
    assert account.wall == 0


def test_a_post_mortem_tells_when_who_what_and_what_it_cost() -> None:
    order = {"kind": "restart", "after": 0.0}
    log = [*FAULT]
    log[4] = _incident(0, began=105.5, time=106.0, commands=[order])
    (told,) = post_mortems(log)
    assert (told.detection, told.recovery) == pytest.approx((0.5, 0.8))
    assert told.lost_steps == 1
    times = [time for time, _ in told.timeline]
    assert times == sorted(times)
    assert times[0] == told.began
    text = told.text()
    for words in ("rank 2", "n1", "restart", "step 2 in memory", "1 step repeated", "signature = SIGKILL"):
        assert words in text


def test_an_incident_that_is_not_over_says_so() -> None:
    (told,) = post_mortems(FAULT[:5])
    assert told.recovery is None
    assert "not over" in told.text()


def test_incidents_survive_the_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for event in FAULT:
        log.write(event)
    log.close()
    assert goodput(events.read(tmp_path)) == goodput(FAULT)
