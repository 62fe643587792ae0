"""Sites that leave, at the run's end or because they are asked to stop: none ends with other weights, and none waits for long."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint.folder import find, read_manifest
from megalith.events import Merge, RunStarted, of_kind, read
from megalith.fleet.secure.peers import Peers
from megalith.spec.sites import folder_of
from megalith.train.sites import messages
from megalith.train.sites.council import Council
from megalith.train.sites.messages import Verdict
from megalith.train.sites.pending import Pending
from megalith.train.sites.synchronous import AllSitesCouncil
from tests.fleet.conftest import until
from tests.full import sampled
from tests.keys import GIVEN
from tests.patience import PATIENCE
from tests.promises.test_sites import STREAMING, TOGETHER, _ledger, _spec, _train, _weights
from tests.runs import (
    assert_same_bits,
    die_once_saved,
    final_state,
    finish,
    newest_step,
    position,
    prepare_text,
    start,
    start_site,
    when,
)

AT_ONCE = PATIENCE
"""Seconds: far below `fleet.wait_limit`, for which a site would wait."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _lose_the_verdict(number: int) -> Callable[..., None]:
    """Return a `Peers.send` that loses all connections of site 0 just before it sends the verdict about a merge."""
    send, lost = Peers.send, list[bool]()

    def lossy(self: Peers, message: bytes, to: int | None = None, *, beside: bool = False) -> None:
        if self.own == 0 and not lost and message[:1] == Verdict.kind:
            verdict = messages.unpack(message)
            assert isinstance(verdict, Verdict)
            if verdict.number == number:
                lost.append(True)
                for peer in list(self._peers.values()):
                    self._lose(peer)
        send(self, message, to, beside=beside)

    return lossy


def test_no_site_ends_with_other_weights_if_the_last_verdict_is_lost(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other two are a quorum, and would merge without the site that decides."""
    spec = _spec(data, STREAMING | {"count": 3, "grace": 3.0})
    monkeypatch.setattr(Peers, "send", _lose_the_verdict(5))
    ended = _weights(_train(spec, tmp_path))
    for site in range(3):
        folder = folder_of(tmp_path, site)
        assert_same_bits(_weights(final_state(folder)), ended)
        (last,) = [one for one in of_kind(read(folder), Merge) if one.number == 5]
        assert last.merged == [0, 1, 2] and last.samples == 10 * 12


def _stopped(pids: dict[int, int], folder: Path, step: int) -> list[int]:
    """Ask ranks to stop, once the log in a folder has a step, and return their statuses."""
    until(lambda: newest_step(folder) >= step, seconds=PATIENCE)
    time.sleep(1.0)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    asked = time.monotonic()
    found = finish(pids)
    assert time.monotonic() - asked < AT_ONCE
    return found


def _stands(folder: Path, *, least: int) -> int:
    """Return the newest step of a log, at least `least`, once none has come for two seconds."""
    known, since = 0, time.monotonic()

    def unchanged() -> bool:
        nonlocal known, since
        newest = newest_step(folder)
        if newest != known:
            known, since = newest, time.monotonic()
        return known >= least and time.monotonic() - since >= 2.0

    until(unchanged, seconds=PATIENCE)
    return known


@sampled(2, together=True)
def test_a_site_that_waits_for_a_lost_one_saves_and_stops(data: Path, tmp_path: Path) -> None:
    spec = _spec(data, STREAMING)
    whole = _train(spec, tmp_path / "whole")
    folder = tmp_path / "run"
    with when("step", 4, site=1, act=partial(die_once_saved, folder_of(folder, 1), 3)):
        first, second = start_site(spec, folder, 0, environment=GIVEN), start_site(spec, folder, 1, environment=GIVEN)
        assert finish(second) == [-signal.SIGKILL]
    # it waits at the merge due after step 7, or at that due after step 9 if the last difference of the lost one still left
    last = _stands(folder, least=7)
    assert last in (7, 9) and _stopped(first, folder, last) == [75]
    assert position(folder)["step"] == last and read_manifest(find(folder)).meta["sites"]["midway"] == {
        "taken": [],
        "ends": False,
    }
    assert_same_bits(_train(spec, folder), whole)


def test_a_site_that_waits_for_the_others_to_start_stops(data: Path, tmp_path: Path) -> None:
    alone = start_site(_spec(data, STREAMING), tmp_path, 0, environment=GIVEN)
    until(lambda: (tmp_path / "site.address").exists(), seconds=PATIENCE)
    time.sleep(1.0)
    asked = time.monotonic()
    os.kill(next(iter(alone)), signal.SIGTERM)
    assert finish(alone) == [75] and time.monotonic() - asked < AT_ONCE


def _undecided(kind: type[Council], number: int) -> Callable[[Council, Pending], Verdict | None]:
    """Return a `_judged` that never decides a merge."""
    judged = kind._judged
    return lambda self, merge: None if merge.number == number else judged(self, merge)


CASES: dict[str, tuple[dict[str, Any], int, int, list[int]]] = {
    "a fragment in flight": (STREAMING, 2, 9, []),
    "the last merges": (STREAMING, 5, 10, [0, 1]),
    "no overlap": ({"inner_steps": 4, "fragments": 2, "bits": 2}, 1, 4, []),
    "gradients": (TOGETHER, 6, 6, []),
}
"""Each `[sites]`, the merge at which both sites wait, the last step that is done by then, and the fragments taken there."""


@sampled(2, together=True)
@pytest.mark.parametrize("case", CASES)
def test_sites_that_stop_at_a_merge_go_on_with_the_same_bits(
    case: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They save the state before it, and their next start makes the merge."""
    sites, number, step, taken = CASES[case]
    spec = _spec(data, sites, plan={"data": 2} if case == "no overlap" else {})
    whole = _train(spec, tmp_path / "whole")
    folder = tmp_path / "run"
    kind = AllSitesCouncil if sites is TOGETHER else Council
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_judged", _undecided(kind, number))
        assert set(_stopped(start(spec, folder, environment=GIVEN), folder, step)) == {75}
    for site in range(2):
        meta = read_manifest(find(folder_of(folder, site))).meta
        assert meta["position"]["step"] == step and meta["sites"]["merges"] == number
        assert meta["sites"].get("midway", {"taken": []})["taken"] == taken
    assert_same_bits(_train(spec, folder), whole)
    assert [one.resumed_step for one in of_kind(read(folder), RunStarted)] == [0, step]
    assert _ledger(spec, folder) == list(range(10 * 12))
    made = {one.number: json.dumps([one.fragment, one.sent, one.step, one.mark]) for one in of_kind(read(folder), Merge)}
    undisturbed = of_kind(read(tmp_path / "whole"), Merge)
    assert made == {one.number: json.dumps([one.fragment, one.sent, one.step, one.mark]) for one in undisturbed}
