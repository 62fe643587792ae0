"""Sites end together: none ends before a quorum has saved the final merge, so none is left to merge otherwise."""

import time
from collections.abc import Mapping, Sequence

import pytest

from megalith.fleet.secure.peers import PeerGone
from megalith.train.sites.council import Council
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.messages import CheckpointOffer, FragmentValues, JoinReply, Verdict
from tests.patience import PATIENCE
from tests.train.sites.test_council import MEMBERS, Hub, _all, _council, _difference, _listen, _waiting
from tests.train.sites.test_meeting import TWO, _answers, _together, _verdict
from tests.train.sites.test_synchronous import _all as _exchanging
from tests.train.sites.test_synchronous import _one

Ending = bool | PeerGone | None


def _ends(councils: Sequence[Council], verdict: Verdict, *, members: Mapping[int, int], seconds: float = 20.0) -> list[Ending]:
    """Return how each site ends after the final merge: it may (True), it is asked for its weights (False), its line is lost, or it still
    waits after so many seconds (None)."""
    known = verdict.number + 1, verdict.step, verdict.mark(""), members
    return _answers(councils, lambda one: one.end(*known, seconds=0.01), seconds=seconds)


def test_sites_that_have_saved_the_last_merge_end() -> None:
    councils = _all(Hub(), grace=2 * PATIENCE, patience=2 * PATIENCE)
    for one in councils:
        one.post(_difference(4))
    verdict = _verdict(_together(councils, 0, 0, 4, 4, members=MEMBERS))
    assert _ends(councils[:1], verdict, members=MEMBERS, seconds=0.3) == [None], "no other has saved it"
    ends = _ends(councils, verdict, members=MEMBERS, seconds=PATIENCE)
    assert ends == [True] * 3, "at once, not after the grace"


def test_the_others_get_the_last_verdict_from_a_site_that_has_made_it_alone() -> None:
    """The connection breaks just then. They do not merge otherwise."""
    hub = Hub()
    councils = _all(hub, grace=60.0, patience=20.0)
    for one in councils:
        one.post(_difference(4))
    hub.cut([0], [1, 2])
    first = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    assert first is not None and _ends(councils[:1], first, members=MEMBERS, seconds=0.3) == [None]
    hub.mend()
    councils[0].listen()
    assert _verdict(_together(councils[1:], 0, 0, 4, 4, members=MEMBERS)) == first
    assert _ends(councils, first, members=MEMBERS) == [True] * 3


@pytest.mark.slow
def test_a_last_merge_that_was_made_alone_is_undone() -> None:
    """The site that made it does not end with it: it takes the weights of the others, which are a quorum."""
    hub = Hub()
    councils = _all(hub, patience=5.0)
    for one in councils:
        one._limit = 20.0
        one.post(_difference(4))
    hub.cut([0], [1, 2])
    alone = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    others = _verdict(_together(councils[1:], 0, 0, 4, 4, members=MEMBERS))
    assert alone is not None and (alone.merged, others.merged) == ((0, 1, 2), (1, 2))
    assert _ends(councils[:1], alone, members=MEMBERS, seconds=0.3) == [None]
    hub.mend()
    with _waiting(councils[1:]):
        (gone,) = _ends(councils[:1], alone, members=MEMBERS)
    assert isinstance(gone, PeerGone)
    again = _council(hub, 0, start="again", patience=5.0)
    ended = CheckpointOffer(4, alone.mark(""), 48, (0, 1, 2), 1, ended=True)
    with _waiting(councils[1:]):
        assert again.begin([ended], 5.0) == Beginning(None, anew=True)


@pytest.mark.parametrize("stands", [False, True])
def test_the_runs_end_is_further_than_any_merge(stands: bool) -> None:
    """Site 0 has saved it and was started again. Site 1 was started again from an older checkpoint, or still waits at the final merge,
    which lost its decider. It gets the weights of site 0."""
    hub = Hub()
    councils = _all(hub, count=2, patience=20.0)
    for one in councils:
        one._limit = 20.0
        one.post(_difference(4))
    hub.cut([0], [1])
    last = councils[0].decide(0, 0, 4, 4, members=TWO)
    assert last is not None
    older, ended = CheckpointOffer(2, "", 24, (0, 1)), CheckpointOffer(4, last.mark(""), 48, (0, 1), 1, ended=True)
    hub.broken.clear()
    holder = _council(hub, 0, start="again", count=2, patience=20.0)
    other = councils[1] if stands else _council(hub, 1, start="again", count=2, patience=20.0)
    holder._limit = other._limit = 20.0
    began, joined, end = None, None, time.monotonic() + 20.0
    while (began is None or joined is None) and time.monotonic() < end:
        began = began or holder.begin([older, ended], 0.05)
        holder.listen()
        if other is councils[1]:
            try:
                assert other.decide(0, 0, 4, 4, members=TWO, seconds=0.05) is None
            except PeerGone:
                other = _council(hub, 1, start="third", count=2, patience=20.0)
        else:
            joined = joined or other.begin([older], 0.05)
    assert (began, joined) == (Beginning(4), Beginning(None, anew=True)) and holder.decides
    assert _ends([holder], last, members=TWO) == [False] and holder.asking(()) == [1]
    holder.send([1], JoinReply(holder.line, 4, 1, last.mark(""), (-1,), {}))
    holder.send([1], FragmentValues(0, _difference(4).encoded.float()))
    assert other.join_reply(5.0) is not None
    other.send_ready()
    assert _ends([holder, other], last, members=TWO) == [True, True]


def test_sites_that_all_hold_the_runs_end_end_again() -> None:
    hub, ended = Hub(), CheckpointOffer(4, "m", 48, (0, 1, 2), 1, ended=True)
    councils = [_council(hub, site) for site in range(3)]
    found, end = dict[int, Beginning](), time.monotonic() + 10.0
    while len(found) < 3 and time.monotonic() < end:
        for one in councils:
            begins = None if one.site in found else one.begin([ended], 0.01)
            found |= {} if begins is None else {one.site: begins}
            one.listen()
    assert found == dict.fromkeys(range(3), Beginning(4)) and len({one.line for one in councils}) == 1


def test_a_site_that_does_not_come_is_not_waited_for_beyond_the_grace() -> None:
    hub = Hub()
    councils = _all(hub, grace=0.3)
    for one in councils:
        one.post(_difference(4))
    verdict = _verdict(_together(councils, 0, 0, 4, 4, members=MEMBERS))
    hub.cut([2], [0, 1])
    assert _ends(councils[:2], verdict, members=MEMBERS) == [True, True]


def test_the_other_sites_that_lose_the_one_that_decides_end_once_a_quorum_has_saved() -> None:
    hub = Hub()
    councils = _all(hub, patience=20.0)
    for one in councils:
        one._limit = 20.0
        one.post(_difference(4))
    verdict = _verdict(_together(councils, 0, 0, 4, 4, members=MEMBERS))
    hub.cut([0], [1, 2])
    assert _ends(councils[1:], verdict, members=MEMBERS) == [True, True]


def test_a_site_that_lost_the_last_exchanged_step_is_not_left_behind() -> None:
    hub = Hub()
    councils = _exchanging(hub)
    for one in councils:
        one.post(_difference(1))
    verdict = _verdict(_together(councils, 0, 0, 1, 1, members=MEMBERS))
    assert _ends(councils[:2], verdict, members=MEMBERS, seconds=0.3) == [None, None]
    _one(hub, 2, start="again")
    _listen(councils[:2])
    assert all(isinstance(gone, PeerGone) for gone in _ends(councils[:2], verdict, members=MEMBERS, seconds=5.0))
