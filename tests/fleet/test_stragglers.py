"""A rank is slow by its own work, measured by what is usual for it."""

from megalith.fleet.heartbeat import Beat
from megalith.fleet.signs import Straggler
from megalith.fleet.stragglers import Stragglers
from megalith.spec.fleet import FleetSpec

FLEET = FleetSpec(straggler_factor=1.5, straggler_steps=4)


def _run(stragglers: Stragglers, seconds: list[list[float]], *, first: int = 0, replacing: float = 100.0) -> list[Straggler]:
    found = []
    for step, own in enumerate(seconds, start=first):
        beats = [Beat(step + 1, float(step), step, True, "step", compute) for compute in own]
        sign = stragglers.note(beats, nodes=("a", "b"), replacing=replacing)
        found += [sign] if sign else []
    return found


def test_a_rank_that_computes_too_long_for_so_many_steps_is_named_once():
    found = _run(Stragglers(FLEET), [[1.0, 1.0, 1.0, 1.0]] * 3 + [[1.0, 1.0, 1.0, 2.0]] * 10)
    assert [(sign.rank, sign.node, sign.step) for sign in found] == [(3, "b", 6)]
    assert found[0].ratio == 2.0
    assert found[0].lost == 4.0


def test_it_is_told_again_when_it_has_cost_as_much_as_its_replacement():
    found = _run(Stragglers(FLEET), [[1.0, 1.0, 1.0, 2.0]] * 12, replacing=8.0)
    assert [sign.lost >= sign.replacing for sign in found] == [False, True]


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
