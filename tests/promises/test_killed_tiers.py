"""A run whose state or activations are off the device ends with the same bits if a rank is killed at a random moment."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.events import RunStarted, Step, of_kind, read
from tests.full import sampled
from tests.runs import assert_same_bits, final_state, finish, prepare_text, start, train
from tests.train.offload.killed import TIERS, Kill, drawn, killed, two_ranks

KILLS = drawn(50, seed=23)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the folder of a run with all of its state on the device, by its ZeRO stage."""
    folders = dict[int, Path]()

    def of(zero: int) -> Path:
        if zero not in folders:
            folders[zero] = tmp_path_factory.mktemp("undisturbed") / "run"
            train(two_ranks(data, {"zero": zero}), folders[zero])
        return folders[zero]

    return of


def test_kills_are_drawn_from_every_tier_and_moment() -> None:
    assert {(one.tier, one.moment) for one in KILLS} == {(tier, each) for tier, (_, moments) in TIERS.items() for each in moments}


@pytest.mark.slow
@sampled(4)
@pytest.mark.parametrize("kill", KILLS, ids=map(str, KILLS))
def test_kill_9_at_a_random_moment_changes_no_bit(
    kill: Kill, data: Path, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    plan, _ = TIERS[kill.tier]
    spec, folder = two_ranks(data, plan), tmp_path / "killed"
    with killed(kill, folder):
        codes = finish(start(spec, folder))
    assert codes[1] == -signal.SIGKILL
    train(spec, folder)
    assert_same_bits(final_state(undisturbed(spec.plan.zero)), final_state(folder))
    first, second = (one.resumed_step for one in of_kind(read(folder), RunStarted))
    assert first == 0 < second
    if kill.tier == "release":
        assert {1, 2} == {one.passes for one in of_kind(read(folder), Step)}, "some steps are clipped"
