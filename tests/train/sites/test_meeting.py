"""Sites lose the decider, or each other. Sites that wait at a merge continue from there, and two separated groups never both
train."""

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

from megalith.fleet.secure.peers import PeerGone
from megalith.train.sites.council import Council
from megalith.train.sites.meeting import Beginning, caller
from megalith.train.sites.messages import Hello, MergePoint, Verdict
from tests.full import only_full
from tests.train.sites.test_council import MEMBERS, Hub, _all, _council, _difference, _listen, _waiting

TWO = {0: 0, 1: 0}
T = TypeVar("T")


def _together(councils: Sequence[Council], *merge: int, members: dict[int, int], mark: str = "") -> list[Verdict | PeerGone]:
    """Return the verdict that each site gets about a merge, or the reason why it gets none."""
    found = _answers(councils, lambda one: one.decide(*merge, members=members, mark=mark, seconds=0.01))
    assert None not in found
    return [each for each in found if each is not None]


def _answers(
    councils: Sequence[Council], ask: Callable[[Council], T | None], *, seconds: float = 20.0
) -> list[T | PeerGone | None]:
    """Ask sites in turn until each has an answer or has lost its line; None for one that still has neither after so many seconds."""
    found = dict[int, T | PeerGone]()
    end = time.monotonic() + seconds
    while len(found) < len(councils) and time.monotonic() < end:
        for one in councils:
            if one.site in found:
                one.listen()
                continue
            try:
                answer = ask(one)
            except PeerGone as gone:
                answer = gone
            found |= {} if answer is None else {one.site: answer}
    return [found.get(one.site) for one in councils]


def _verdict(found: Sequence[Verdict | PeerGone]) -> Verdict:
    """Return the verdict that all sites got."""
    assert len(set(found)) == 1, found
    (verdict,) = set(found)
    assert isinstance(verdict, Verdict), verdict
    return verdict


def test_without_the_site_that_decides_the_others_go_on_from_the_merge() -> None:
    """No site returns to a checkpoint, and differences that were sent but not merged are sent again."""
    hub = Hub()
    councils = _all(hub, patience=5.0, fragments=2)
    for one in councils:
        one.post(_difference(2, fragment=1))
        one.post(_difference(4))
    old = councils[1].line
    hub.cut([0], [1, 2])
    verdict = _verdict(_together(councils[1:], 0, 0, 4, 4, members=MEMBERS))
    assert (verdict.merged, verdict.left, verdict.line != old) == ((1, 2), (0,), True)
    for one in councils[1:]:
        assert one.decider == 1 and len(one.differences(verdict, bytes_each=7)) == 2
    assert _verdict(_together(councils[1:], 1, 1, 2, 5, members={1: 0, 2: 0})).merged == (1, 2)


def test_a_site_that_decided_and_comes_back_takes_the_weights_of_the_other() -> None:
    """The two sites are a quorum together, and only one of them was killed."""
    hub = Hub()
    councils = _all(hub, count=2, patience=20.0)
    councils[1].post(_difference(4))
    again = _council(hub, 0, start="again", count=2, patience=20.0)
    assert councils[1].decide(0, 0, 4, 4, members=TWO, seconds=0.05) is None
    with _waiting([again]):
        assert councils[1].decide(0, 0, 4, 4, members=TWO, seconds=0.05) is None and councils[1].decides
    assert again.begin([], 5.0) == Beginning(None, anew=True)
    with _waiting([again]):
        verdict = councils[1].decide(0, 0, 4, 4, members=TWO)
    assert verdict is not None and (verdict.merged, verdict.left) == ((1,), (0,))
    councils[1].listen()
    assert councils[1].asking({1: 0}) == [0]
    again.send_ready()
    councils[1].post(_difference(8))
    with _waiting([again]):
        verdict = councils[1].decide(1, 0, 8, 8, members={1: 0})
    assert verdict is not None and verdict.joined == (0,)


def test_the_first_words_of_a_decider_that_comes_back_are_kept() -> None:
    """They come together with its connection, by which the other site learns that it was started again."""
    hub = Hub()
    councils = _all(hub, count=2, patience=20.0)
    councils[1].post(_difference(4))
    again = _council(hub, 0, start="again", count=2, patience=20.0)
    again.listen()
    assert councils[1].decide(0, 0, 4, 4, members=TWO, seconds=0.05) is None and councils[1].decides
    assert again.begin([], 5.0) == Beginning(None, anew=True)


def test_a_site_that_decides_and_has_no_quorum_stands_until_there_is_one() -> None:
    hub = Hub()
    councils = _all(hub, count=2, patience=0.2)
    councils[0].post(_difference(4))
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert councils[0].decide(0, 0, 4, 4, members=TWO, seconds=0.01) is None
    again = _council(hub, 1, start="again", count=2, patience=20.0)
    councils[0]._limit = 20.0
    again._receive(0.0)
    with _waiting([again]):
        assert councils[0].decide(0, 0, 4, 4, members=TWO, seconds=0.1) is None
    assert again.begin([], 5.0) == Beginning(None, anew=True)
    with _waiting([again]):
        verdict = councils[0].decide(0, 0, 4, 4, members=TWO)
    assert verdict is not None and (verdict.merged, verdict.left) == ((0,), (1,))


def test_two_sites_that_are_cut_apart_meet_again_and_lose_nothing() -> None:
    hub = Hub()
    councils = _all(hub, count=2, patience=0.2)
    hub.cut([0], [1])
    for one in councils:
        one._limit = 20.0
        one.post(_difference(4))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert [one.decide(0, 0, 4, 4, members=TWO, seconds=0.01) for one in councils] == [None, None]
    hub.mend()
    verdict = _verdict(_together(councils, 0, 0, 4, 4, members=TWO))
    assert (verdict.merged, verdict.left) == ((0, 1), ())


def test_the_sites_that_are_furthest_go_on_and_the_others_take_part_anew() -> None:
    """Only one of the sites had received the decider's verdict."""
    hub = Hub()
    councils = _all(hub, count=5, patience=5.0)
    members = dict.fromkeys(range(5), 0)
    for one in councils:
        one.post(_difference(4))
    hub.cut([0], [3, 4])
    first = councils[0].decide(0, 0, 4, 4, members=members)
    assert first is not None and [councils[site].decide(0, 0, 4, 4, members=members) for site in (1, 2)] == [first] * 2
    hub.cut([0], [1, 2])
    for one in councils[1:3]:
        one.differences(first, bytes_each=7)
        one.post(_difference(8))
    mark, found = first.mark(""), dict[int, Verdict | PeerGone]()
    end = time.monotonic() + 20
    while len(found) < 4 and time.monotonic() < end:
        for one in councils[1:]:
            ahead = one.site < 3
            merge, known = ((1, 0, 8, 8), mark) if ahead else ((0, 0, 4, 4), "")
            try:
                verdict = None if one.site in found else one.decide(*merge, members=members, mark=known, seconds=0.01)
                found |= {} if verdict is None else {one.site: verdict}
            except PeerGone as gone:  # the decider's ranks are started again, and follow
                found[one.site] = gone
                again = _council(hub, one.site, start="again", count=5, patience=5.0)
                councils[one.site] = again
            if isinstance(found.get(one.site), PeerGone):
                councils[one.site].begin([], 0.01)
    assert isinstance(found[3], PeerGone) and isinstance(found[4], PeerGone)
    assert found[1] == found[2] and isinstance(found[1], Verdict) and found[1].merged == (1, 2) and found[1].number == 1


HALVES = [half for size in range(1, 5) for half in combinations(range(5), size)]
QUICK = {(0,), (0, 1), (0, 3, 4)}


@pytest.mark.parametrize("half", [half if half in QUICK else pytest.param(half, marks=only_full) for half in HALVES])
def test_of_two_halves_that_stand_at_most_one_goes_on(half: tuple[int, ...]) -> None:
    hub = Hub()
    councils = _all(hub, count=5, patience=1.0)
    members = dict.fromkeys(range(5), 0)
    hub.cut(half, set(range(5)) - set(half))  # before any difference has arrived
    for one in councils:
        one.post(_difference(4))
    found = _together(councils, 0, 0, 4, 4, members=members)
    ended = {one.site for one, verdict in zip(councils, found, strict=True) if isinstance(verdict, PeerGone)}
    bigger = set(half) if len(half) > 2 else set(range(5)) - set(half)
    assert ended == set(range(5)) - bigger
    verdict = _verdict([found[site] for site in sorted(bigger)])
    assert set(verdict.merged) == bigger and set(verdict.left) == ended


def test_words_of_the_line_that_was_left_do_not_count() -> None:
    """Site 2 had sent messages to the decider, and then went to another line with the others."""
    hub = Hub()
    councils = _all(hub, patience=0.5)
    councils[0].post(_difference(4))
    assert councils[0].decide(0, 0, 4, 4, members=MEMBERS, seconds=0.0) is None
    for one in councils[1:]:
        one._said = 0.0
    _listen(councils)
    assert councils[0]._roll.present(0.0) == {0, 1, 2}
    for site in (1, 2):
        councils[0]._note(site, Hello(stand=MergePoint(0, 4, "")))
    assert councils[0]._roll.present(0.0) == {0}
    with pytest.raises(PeerGone, match="do not form a quorum"):
        councils[0].decide(0, 0, 4, 4, members=MEMBERS)


def test_the_first_of_those_that_are_furthest_calls() -> None:
    near, far = Hello(stand=MergePoint(3, 8, "a")), Hello(stand=MergePoint(4, 8, "b"))
    assert caller({0: Hello(), 1: near, 2: far, 3: far}) == 2
    assert caller({0: Hello()}) is None


def _goes_on_without_the_last(hub: Hub, *, merges: int) -> list[Council]:
    """Sites 1 and 2 wait at the first merge and cannot reach each other. Site 1 makes merges with site 0, which was started
    again."""
    councils = _all(hub, patience=5.0)
    for one in councils:
        one._limit = 20.0
        one.post(_difference(4))
    hub.cut([2], [0, 1])
    councils[0] = _council(hub, 0, start="again", patience=5.0)
    end, first = time.monotonic() + 20.0, None
    while first is None and time.monotonic() < end:
        first = councils[1].decide(0, 0, 4, 4, members=MEMBERS, seconds=0.01)
        assert councils[2].decide(0, 0, 4, 4, members=MEMBERS, seconds=0.01) is None
        councils[0].begin([], 0.01)
    assert first is not None and councils[1].decides
    for number in range(1, merges):
        step = 4 + 4 * number
        councils[1].post(_difference(step))
        with _waiting([councils[0]]):
            assert councils[1].decide(number, 0, step, step, members={1: 0}) is not None
    assert councils[2]._gone is not None, "it stands"
    return councils


def _merges(one: Council, seconds: float) -> None:
    verdict = one.decide(0, 0, 4, 4, members=MEMBERS, seconds=seconds)
    assert verdict is not None, "it waits for what cannot come"
    one.differences(verdict, bytes_each=7)


@pytest.mark.slow
@pytest.mark.parametrize("merges", [6, 3])
def test_a_site_that_stands_ends_once_the_others_are_far_ahead(merges: int) -> None:
    """The others no longer have the verdict for the merge at which the site waits, or the difference that was merged there."""
    hub = Hub()
    councils = _goes_on_without_the_last(hub, merges=merges)
    hub.mend()
    with _waiting(councils[:2]), pytest.raises(PeerGone):
        _merges(councils[2], 3.0)


def test_a_verdict_that_later_ones_have_overtaken_is_not_waited_for() -> None:
    """The connection was broken for longer than the decider keeps its verdicts."""
    hub = Hub()
    councils = _all(hub, patience=60.0)
    line = councils[1].line
    councils[1].post(_difference(4))
    councils[1]._note(0, Verdict(1, 0, 8, 8, (0, 2), left=(1,), count=3, line=line))
    with _waiting([councils[0], councils[2]]):
        assert councils[1].decide(0, 0, 4, 4, members=MEMBERS, seconds=0.0) is None and councils[1].line == line
        with pytest.raises(PeerGone, match="later merges than the one that is due"):
            _merges(councils[1], 30.0)  # less than its patience


def test_a_site_that_is_lost_before_it_calls_is_not_waited_for() -> None:
    """Site 1 is the first that waits, but the other waiting site and the restarted site are a quorum."""
    hub = Hub()
    councils = _all(hub, patience=5.0)
    for one in councils[1:]:
        one._limit = 20.0
        one.post(_difference(4))
    again = _council(hub, 0, start="again", patience=5.0)
    for one in councils[1:]:
        while one._gone is None:
            assert one.decide(0, 0, 4, 4, members=MEMBERS, seconds=0.0) is None
    for one in (again, councils[2]):
        one.listen()
    hub.cut([1], [0, 2])
    found, end = None, time.monotonic() + 5.0
    while found is None and time.monotonic() < end:
        found = councils[2].decide(0, 0, 4, 4, members=MEMBERS, seconds=0.01)
        if not again.line:
            assert again.begin([], 0.01) in (None, Beginning(None, anew=True))
        again.listen()
    assert found is not None and (found.merged, found.left) == ((2,), (0, 1))


def test_a_site_that_stood_and_is_lost_keeps_nobody_from_beginning() -> None:
    """The site was connected to only one of the others."""
    hub = Hub()
    councils = [_council(hub, site, count=5) for site in range(3)]
    for one in councils:
        one._limit = 20.0
    gone = _council(hub, 3, count=5)
    gone._post(Hello(stand=MergePoint(7, 28, "m")))
    for one in councils:
        one.listen()
    del hub.wires[3]
    for one in councils[1:]:
        one._meeting.forget(3)
    found, end = dict[int, Beginning](), time.monotonic() + 5.0
    while len(found) < 3 and time.monotonic() < end:
        for one in councils:
            began = None if one.site in found else one.begin([], 0.01)
            found |= {} if began is None else {one.site: began}
    assert found == dict.fromkeys(range(3), Beginning(None))
