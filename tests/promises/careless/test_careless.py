"""Whatever a careless user or a neighbour does, a run ends as if undisturbed, or names the cause that stopped it and
ends so once it is removed.

make test-full                                       an hour of it, with seeds that are printed
MEGALITH_SEED=7 pytest tests/promises/careless       three runs of another seed
MEGALITH_ACTS='agents | data:3:99 | key:1:5' ...     one run, with these acts
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.full import FULL
from tests.patience import PATIENCE
from tests.promises.careless.kinds import KINDS, Done, Kind
from tests.promises.careless.play import Act, Hurt, Play, Reference, draw, play, shares, shrink, unproven
from tests.runs import prepare_text

SECONDS = 3000.0 if FULL else 0.0
"""Seconds after which no further run is begun."""

RUNS, ACTS = (False, True, False), 10
"""The runs of a seed, True for a run with agents; and the acts in each."""

SHRINKING = 900.0
"""Seconds spent on minimising a failure."""


def _agents(agents: bool) -> str:
    return "agents" if agents else "one machine"


def _asked() -> tuple[bool, list[Act]] | None:
    """Return the run described by MEGALITH_ACTS."""
    text = os.environ.get("MEGALITH_ACTS", "")
    if not text:
        return None
    where, *acts = (part.strip() for part in text.split("|"))
    return where == _agents(True), [Act.parse(act) for act in acts]


@pytest.mark.slow
@pytest.mark.timeout(4500 + 3 * PATIENCE if FULL else 6 * PATIENCE)
def test_whatever_is_done_to_a_run_it_ends_as_it_would_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, hurts = prepare_text(tmp_path), list[Hurt]()
    reference = Reference(tmp_path / "unhurt", data)

    def done(acts: Sequence[Act], *, agents: bool) -> str:
        mine, broken = play(acts, tmp_path / "hurt", data, reference, agents=agents)
        hurts.extend(mine)
        return broken

    def tell(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    asked, began = _asked(), time.monotonic()
    if asked is not None:
        assert not (broken := done(asked[1], agents=asked[0])), broken
        return
    seed = int(os.environ.get("MEGALITH_SEED") or (secrets.randbelow(1 << 20) if FULL else 1))
    while True:
        tell(f"\nwhat is done to runs is drawn from MEGALITH_SEED={seed}")
        for agents, acts in zip(RUNS, draw(seed, RUNS, acts=ACTS), strict=True):
            if broken := done(acts, agents=agents):
                tell(f"{broken}\nlooking for up to {SHRINKING:.0f} s which of the acts suffice")
                pytest.fail(_smallest(acts, agents, broken, done), pytrace=False)
        tell("\n".join(shares(hurts)))
        seed += 1
        if time.monotonic() - began > SECONDS:
            break
    assert not unproven(hurts)


def _smallest(acts: Sequence[Act], agents: bool, broken: str, done: Callable[..., str]) -> str:
    """Describe a failure, with the acts that suffice to cause it."""
    last, until = broken, time.monotonic() + SHRINKING

    def breaks(some: Sequence[Act]) -> bool:
        nonlocal last
        found = done(some, agents=agents) if time.monotonic() < until else ""
        last = found or last
        return bool(found)

    left = shrink(acts, breaks)
    words = " | ".join(map(str, (_agents(agents), *left)))
    return f"{last}\n\n{len(left)} of {len(acts)} acts suffice:\nMEGALITH_ACTS='{words}' pytest {Path(__file__).name}"


def test_acts_follow_from_the_seed_and_every_kind_comes_before_one_comes_again() -> None:
    runs = (False, True, False)
    drawn = draw(5, runs, acts=10)
    assert drawn == draw(5, runs, acts=10) != draw(6, runs, acts=10)
    kinds = [act.kind for acts in drawn for act in acts]
    assert set(kinds) == KINDS.keys()
    assert len(kinds) == 30 and max(map(kinds.count, kinds)) == 2
    assert [Act.parse(str(act)) for acts in drawn for act in acts] == [act for acts in drawn for act in acts]


@pytest.mark.parametrize("steps", [True, False])
def test_an_act_is_proven_only_by_steps_after_it(steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the run stops because of another act, before it did a step after this one."""
    monkeypatch.setitem(KINDS, "key", Kind("may stop", lambda scene, random: Done("the key cut", ("ranks/key",))))
    monkeypatch.setitem(KINDS, "event log", Kind("goes on", lambda scene, random: Done("strange lines")))
    goes_on = iter([True, True, steps, True])  # before each act, and at the end
    scene: Any = SimpleNamespace(
        type=lambda: None, goes_on=lambda steps: next(goes_on), end=lambda: 1, output=lambda: "ranks/key is cut"
    )
    one = Play(scene, cast(Reference, None))
    monkeypatch.setattr(one, "_finish", lambda: None)
    one.play([Act("key", 1, 1), Act("event log", 1, 1)])
    assert [(hurt.act.kind, hurt.went_on) for hurt in one.hurts] == [("key", steps), ("event log", steps)]
    assert unproven(one.hurts) == (set() if steps else {"event log"})


@pytest.mark.parametrize("needed", [(0,), (3,), (2, 7), (0, 4, 9)])
def test_a_failure_is_shrunk_to_the_acts_that_suffice(needed: tuple[int, ...]) -> None:
    acts, tried = [Act("data", 1, number) for number in range(10)], list[int]()

    def breaks(some: Sequence[Act]) -> bool:
        tried.append(len(some))
        return {acts[number] for number in needed} <= set(some)

    assert shrink(acts, breaks) == [acts[number] for number in needed]
    assert len(tried) < 50
