"""Limits are derived from the durations of a run's own phases."""

from megalith.control.pace import Limits, Pace
from megalith.fleet.heartbeat import Beat
from megalith.fleet.tiers import BEGINNING, Source, Tier
from megalith.spec.fleet import FleetSpec

FLEET = FleetSpec(hang_floor=1.0, hang_factor=3.0)


def _steps(
    pace: Pace, *, first: int, count: int, seconds: float, start: float = 0.0, source: Source = BEGINNING, ready: float = 2.0
) -> float:
    """Let two ranks become ready and do steps; return the time at which the next step begins."""
    pace.begin(source)
    number, at = 1, start
    pace.note([Beat(number, at, -1, False, "building")] * 2)
    at += ready
    number += 1
    pace.note([Beat(number, at, -1, True, "ready")] * 2)
    for step in range(first, first + count + 1):
        number += 1
        at += 0.5 if step == first else seconds
        pace.note([Beat(number, at, step, True, "step")] * 2)
    return at


def _asked(pace: Limits, step: int, phase: str = "step") -> float | None:
    return pace.of_silence([Beat(9, 0.0, step, True, phase)] * 2)


def test_until_enough_is_known_the_fixed_limits_hold():
    pace = Pace(120.0, 600.0, FLEET)
    pace.begin(BEGINNING)
    assert pace.of_start() == 120.0
    assert _asked(pace, 3) == 600.0


def test_a_hang_is_thrice_the_slowest_percent_of_steps_and_never_less_than_the_floor():
    pace = Pace(120.0, 600.0, FLEET)
    _steps(pace, first=0, count=20, seconds=2.0)
    assert _asked(pace, 20) == 6.0
    fast = Pace(120.0, 600.0, FLEET)
    _steps(fast, first=0, count=20, seconds=0.05)
    assert _asked(fast, 20) == 1.0


def test_a_rank_that_waits_within_a_step_and_says_so_does_not_make_the_limit_shorter():
    """Sites that exchange gradients wait within the step, and their ranks repeat their heartbeat meanwhile."""
    pace = Pace(120.0, 600.0, FLEET)
    pace.begin(BEGINNING)
    number, at = 1, 0.0
    pace.note([Beat(number, at, -1, True, "ready")] * 2)
    for step in range(12):
        for waited in [2.0, *[0.25] * 108]:  # the last step's gradients, or another heartbeat
            number += 1
            pace.note([Beat(number, at, step, True, "step")] * 2)
            at += waited
    assert _asked(pace, 12) == 6.0


def test_a_phase_that_was_never_seen_keeps_the_fixed_limit():
    pace = Pace(120.0, 600.0, FLEET)
    _steps(pace, first=0, count=20, seconds=0.05)
    assert _asked(pace, 20, "validation") == 600.0


def test_the_first_step_of_a_start_has_a_limit_of_its_own():
    pace = Pace(120.0, 600.0, FLEET)
    end = _steps(pace, first=0, count=1, seconds=40.0)  # this step compiles
    _steps(pace, first=1, count=9, seconds=1.0, start=end)
    assert _asked(pace, 10) == 3.0
    assert _asked(pace, 1) == 120.0


def test_a_start_may_take_thrice_the_longest_one_so_far():
    pace = Pace(120.0, 600.0, FLEET)
    _steps(pace, first=0, count=3, seconds=0.1)
    assert pace.of_start() == 6.0  # 3 x 2 s, more than 5 floors
    assert pace.usual_start() == 2.0


def test_a_start_is_measured_by_those_that_read_from_as_slow_a_tier():
    """Restore times from memory do not predict those from a store, so its first start has only the fixed limit."""
    pace = Pace(120.0, 600.0, FLEET)
    memory, mixed = Source(3, Tier.MEMORY), Source(3, Tier.MEMORY, elsewhere=((1, Tier.STORE),))
    _steps(pace, first=3, count=3, seconds=0.1, source=memory, ready=4.0)
    assert pace.of_start() == 12.0
    for source in (mixed, Source(3, Tier.STORE)):
        pace.begin(source)
        assert pace.of_start() == 120.0
    _steps(pace, first=3, count=3, seconds=0.1, source=mixed, ready=30.0)
    pace.begin(Source(3, Tier.STORE))
    assert pace.of_start() == 90.0
    pace.begin(memory)
    assert pace.of_start() == 12.0
