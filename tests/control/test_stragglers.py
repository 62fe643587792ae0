"""A rank is slow if its own work takes longer than is usual for that rank."""

from megalith.control.stragglers import Stragglers
from megalith.fleet.heartbeat import Beat
from megalith.fleet.observations import Straggler
from megalith.spec.fleet import FleetSpec

FLEET = FleetSpec(straggler_factor=1.5, straggler_steps=4)


POLLS = 3  # a supervisor reads the same heartbeats many times in a step


def _run(stragglers: Stragglers, seconds: list[list[float]], *, first: int = 0, replacing: float = 100.0) -> list[Straggler]:
    found = []
    for step, own in enumerate(seconds, start=first):
        beats = [Beat(step + 1, float(step), step, True, "step", compute) for compute in own]
        observed = [stragglers.note(beats, nodes=("a", "b"), replacing=replacing) for _ in range(POLLS)]
        found += [observation for observation in observed if observation]
    return found


def test_a_rank_that_computes_too_long_for_so_many_steps_is_named_once():
    found = _run(Stragglers(FLEET), [[1.0, 1.0, 1.0, 1.0]] * 3 + [[1.0, 1.0, 1.0, 2.0]] * 10)
    assert [(observation.rank, observation.node, observation.step) for observation in found] == [(3, "b", 6)]
    assert found[0].ratio == 2.0
    assert found[0].lost == 4.0


def test_it_is_told_again_when_it_has_cost_as_much_as_its_replacement():
    found = _run(Stragglers(FLEET), [[1.0, 1.0, 1.0, 2.0]] * 12, replacing=8.0)
    assert [observation.lost >= observation.replacing for observation in found] == [False, True]


def test_a_step_counts_once_however_often_it_is_looked_at_and_whoever_tells_of_it_first():
    stragglers = Stragglers(FLEET)
    assert not _run(stragglers, [[1.0] * 4] * 9 + [[1.0, 1.0, 1.0, 9.0]])
    assert not _run(stragglers, [[1.0, 1.0, 1.0, 9.0]] * 2, first=10), "three slow steps are not four"
    apart = [Beat(13, 13.0, 13, True, "step", 9.0), *[Beat(12, 12.0, 12, True, "step", 1.0)] * 3]
    assert not [observation for _ in range(20) if (observation := stragglers.note(apart, nodes=("a", "b"), replacing=1.0))]


def test_steps_that_are_done_again_after_a_start_count_again():
    stragglers = Stragglers(FLEET)
    assert not _run(stragglers, [[1.0, 1.0, 1.0, 2.0]] * 3, first=20)
    stragglers.begin()
    assert [observation.step for observation in _run(stragglers, [[1.0, 1.0, 1.0, 2.0]] * 4, first=10)] == [13]


def test_a_slow_step_now_and_then_is_nobodys_fault():
    assert not _run(Stragglers(FLEET), ([[1.0, 1.0, 1.0, 2.0]] * 3 + [[1.0] * 4]) * 5)


def test_a_stage_that_always_takes_longer_is_not_slow():
    usual = Stragglers(FleetSpec(straggler_factor=1.5, straggler_steps=40))
    assert not _run(usual, [[1.0, 1.0, 1.0, 1.4]] * 30)
    usual._fleet = FLEET
    assert not _run(usual, [[1.0, 1.0, 1.0, 1.9]] * 10, first=30), "1.9 is 1.36 times its usual 1.4"
    assert _run(usual, [[1.0, 1.0, 1.0, 2.2]] * 10, first=40)


def test_differences_of_milliseconds_are_noise():
    assert not _run(Stragglers(FLEET), [[0.01, 0.01, 0.01, 0.04]] * 20)
