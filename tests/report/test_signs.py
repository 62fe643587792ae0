"""Signs of trouble are reported where they occur, and only there."""

from dataclasses import replace
from typing import Any

import pytest

from megalith import events
from megalith.report.history import History, gather
from megalith.report.signs import dispatch_seconds, signs
from megalith.schedule import build, lower, simulate
from megalith.spec.plan import Plan
from tests.report.run_folder import start, step


def told(*happened: events.Event) -> History:
    return gather(happened)


def generation(plan: Plan, first: int, rate: float) -> list[events.Event]:
    begun = 1000.0 + 100 * first
    steps = [step(first + i, tokens_per_second=rate * plan.ranks, time=begun + i) for i in range(1, 8)]
    return [replace(start(first, plan=plan), time=begun), *steps]


@pytest.mark.parametrize(("rate", "seen"), [(500.0, True), (980.0, False), (1200.0, False)])
def test_throughput_that_falls_as_tensor_grows(rate: float, seen: bool):
    run = told(*generation(Plan(data=4), 0, 1000.0), *generation(Plan(tensor=4), 7, rate))
    found = [sign for sign in signs(run) if "as tensor grows" in sign]
    assert bool(found) == seen
    if seen:
        assert "with tensor 1, 500 with 4 (-50.0 %)" in found[0]


def test_more_tensor_ranks_on_more_ranks_may_be_slower_each():
    """A run on four ranks is faster than on one, also at half of the tokens a rank: another start on four ranks would have to be faster."""
    run = told(*generation(Plan(), 0, 1000.0), *generation(Plan(tensor=4), 7, 500.0))
    assert not [sign for sign in signs(run) if "as tensor grows" in sign]


def spans_of(plan: Plan, microbatches: int) -> list[tuple[int, str, float, float]]:
    program = lower(build(plan.schedule, ranks=plan.pipeline, microbatches=microbatches), plan.zero)
    timeline = simulate(program, {"F": 1.0, "B": 2.0})
    return [(span.rank, str(span.action), span.start, span.end) for span in timeline.spans]


@pytest.mark.parametrize(("microbatches", "seen"), [(1, True), (2, False), (8, False)])
def test_ranks_that_take_turns(microbatches: int, seen: bool):
    plan = Plan(pipeline=4)
    run = told(start(plan=plan), step(1), events.Spans(step=1, spans=spans_of(plan, microbatches)))
    assert any("about 1/4" in sign for sign in signs(run)) == seen


def mixture(wait: float) -> list[tuple[int, str, float, float]]:
    """One computation in three pieces with waits in between, and a wait for a message before it."""
    ends = [("WAIT", 9.0), ("0F0", 1.0), ("WAIT", wait), ("0F0", 1.0), ("WAIT", wait), ("0F0", 1.0), ("WAIT", 9.0)]
    found, now = [], 0.0
    for name, seconds in ends:
        found.append((0, name, now, now + seconds))
        now += seconds
    return found


def test_dispatch_seconds_are_waits_amid_a_computation():
    assert dispatch_seconds(mixture(2.0)) == pytest.approx((4.0, 3.0))
    assert dispatch_seconds([(0, "0F0", 0.0, 1.0), (0, "WAIT", 1.0, 5.0), (0, "0F1", 5.0, 6.0)]) == (0.0, 0.0)


@pytest.mark.parametrize(("wait", "seen"), [(2.0, True), (1.0, False)])
def test_waiting_that_dominates_the_experts(wait: float, seen: bool):
    def run(plan: Plan) -> list[str]:
        return signs(told(start(plan=plan), step(1), events.Spans(step=1, spans=mixture(wait))))

    assert any("Waiting for tokens dominates" in sign for sign in run(Plan(data=4, expert=4))) == seen
    assert run(Plan(data=4)) == []


def test_a_run_without_events_has_no_signs():
    assert signs(History()) == []


def test_the_report_says_them(tmp_path: Any):
    from megalith.events import EventLog
    from megalith.report import page

    plan = Plan(pipeline=4)
    log = EventLog(tmp_path)
    for event in (start(plan=plan), step(1), events.Spans(step=1, spans=spans_of(plan, 1))):
        log.write(event)
    log.close()
    assert "about 1/4" in page.write(tmp_path).read_text(encoding="utf-8")
