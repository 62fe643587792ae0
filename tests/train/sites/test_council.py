"""Sites agree, over connections in this process that can be cut, on merges and membership, and two separated groups never both
train."""

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from megalith.fleet import causes
from megalith.fleet.secure.peers import News, PeerGone
from megalith.spec.sites import HEAD_BYTES, STEP_BYTES, VERDICT_BYTES, SiteSpec, SitesSpec
from megalith.train.sites import messages
from megalith.train.sites.checkpoint_offers import called
from megalith.train.sites.council import Council
from megalith.train.sites.differences import OutOfStepError, UnequalWeightsError
from megalith.train.sites.meeting import Beginning, UnequalSitesError
from megalith.train.sites.messages import (
    LENGTH_BYTES,
    UNKNOWN,
    CheckpointOffer,
    Difference,
    FragmentValues,
    Hello,
    JoinReply,
    MergeRecord,
    Ready,
    Start,
    Verdict,
)
from megalith.train.sites.synchronous import AllSitesCouncil
from tests.full import only_full
from tests.patience import PATIENCE

LINE = "ab" * 8


class Hub:
    """All connections between sites."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}
        self.broken = set[frozenset[int]]()

    def open(self, one: int, other: int) -> bool:
        return frozenset((one, other)) not in self.broken

    def cut(self, half: Iterable[int], rest: Iterable[int]) -> None:
        self.broken |= {frozenset((one, other)) for one in half for other in rest}

    def mend(self) -> None:
        """Restore the cut connections."""
        pairs, self.broken = self.broken, set()
        for one, other in map(sorted, pairs):
            self.wires[one].meet(self.wires[other])


class Wire:
    """One site's end of the connections, with the interface of `fleet.secure.peers.Peers`."""

    turned_away = 0
    unsent = 0
    """Makes calls of `close` return before everything is sent."""

    def __init__(self, hub: Hub, site: int, start: str) -> None:
        self.hub, self.site, self.start, self.news = hub, site, start.encode(), deque[News]()
        for other in hub.wires.values():
            if other.site != site and hub.open(site, other.site):
                self.meet(other)
        hub.wires[site] = self

    def meet(self, other: "Wire") -> None:
        self.news.append(News(other.site, other.start, None))
        other.news.append(News(self.site, self.start, None))

    def connected(self, site: int) -> bool:
        return site in self.hub.wires and self.hub.open(self.site, site)

    def trouble(self, site: int) -> str:
        return "no route"

    def send(self, message: bytes, to: int | None = None, *, beside: bool = False) -> None:
        for site, wire in self.hub.wires.items():
            if site != self.site and to in (None, site) and self.hub.open(self.site, site):
                wire.news.append(News(self.site, self.start, message))

    def next(self, seconds: float) -> News | None:
        if not self.news and seconds:
            time.sleep(min(seconds, 0.005))
        return self.news.popleft() if self.news else None

    def close(self, *, seconds: float) -> bool:
        time.sleep(0.01)
        self.unsent -= 1
        return self.unsent < 0


def _council(hub: Hub, site: int, *, start: str = "first", patience: float = 0.3, **spec: Any) -> Council:
    terms = spec.pop("terms", {})
    sites = SitesSpec(**{"count": 3, "grace": 0.1} | spec)
    return Council(sites, site, Wire(hub, site, start), patience=patience, start=0.4, limit=0.4, terms=terms)


def _all(hub: Hub, **spec: Any) -> list[Council]:
    """Return all sites of a run, started from the first weights. Site 0 is the decider."""
    found = [_council(hub, site, **spec) for site in range(spec.get("count", 3))]
    _listen(found)
    assert [one.begin([], 1.0) for one in found] == [Beginning(None)] * len(found)
    _listen(found)
    return found


def _listen(councils: Iterable[Council]) -> None:
    for one in [*councils] * 2:  # a reply may follow
        one.listen()


@contextlib.contextmanager
def _waiting(councils: Iterable[Council]) -> Iterator[None]:
    """While the block runs, these sites wait for something."""
    over, every = threading.Event(), list(councils)

    def wait() -> None:
        while not over.is_set():
            _listen(every)
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _difference(step: int, *, fragment: int = 0, stop: bool = False) -> Difference:
    return Difference(fragment, step, stop, 2.5, torch.arange(7, dtype=torch.uint8))


MEMBERS = dict.fromkeys(range(3), 0)


def test_a_merge_of_all() -> None:
    councils = _all(Hub())
    for one in councils:
        one.post(_difference(4))
    verdicts = [one.decide(0, 0, 4, 4, members=MEMBERS) for one in councils]
    assert len(set(verdicts)) == 1 and verdicts[0].merged == (0, 1, 2) and not verdicts[0].left and not verdicts[0].stop
    for one in councils:
        assert [each.step for each in one.differences(verdicts[0], bytes_each=7)] == [4, 4, 4]


def test_the_only_site_left_joins_although_none_of_those_that_trained_is_there() -> None:
    """It was not back yet when its checkpoint was saved, and the run is resumed with it alone."""
    council = Council(SitesSpec(count=1), 0, None, patience=0.3, start=0.4, limit=0.4)
    council.begin([CheckpointOffer(3, "m", 36, (1, 2))], 1.0)
    council.send_ready()
    verdict = council.decide(1, 0, 4, 4, members={1: 0, 2: 0})
    assert (verdict.merged, verdict.left, verdict.joined, verdict.count) == ((), (1, 2), (0,), 1)


def test_a_site_that_is_late_is_left_out_after_the_grace() -> None:
    councils = _all(Hub())
    for one in councils[:2]:
        one.post(_difference(4))
    began = time.monotonic()
    verdict = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    assert time.monotonic() - began >= 0.1
    assert (verdict.merged, verdict.left, verdict.joined) == ((0, 1), (2,), ())
    councils[2].post(_difference(4))  # its difference comes too late, and it is told so
    assert councils[2].decide(0, 0, 4, 4, members=MEMBERS) == verdict
    councils[2].send_ready()
    rest = {0: 0, 1: 0}
    for one in councils[:2]:
        one.post(_difference(8))
    assert councils[0].decide(1, 0, 8, 8, members=rest).joined == (2,)


def test_sites_with_other_merged_weights_are_named() -> None:
    named = tuple(SiteSpec(name=name) for name in ("oslo", "bergen", None))
    councils = _all(Hub(), each=named)
    for one, anchor in zip(councils, (10, 11, 10), strict=True):
        one.post(replace(_difference(4), anchor=anchor))
    verdicts = [one.decide(0, 0, 4, 4, members=MEMBERS) for one in councils]
    said = "at merge 0, the merged weights of fragment 0 .* step 4 differ: .*000a on oslo, site 2; .*000b on bergen"
    for one in councils:
        with pytest.raises(UnequalWeightsError, match=said):
            one.differences(verdicts[0], bytes_each=7)


def test_a_late_difference_is_from_the_weights_of_its_own_step() -> None:
    """Sites compare it with their own difference of that step, and none with an unknown digest."""
    councils = _all(Hub(), staleness=1, grace=5.0)
    for one, anchor in zip(councils, (10, 10, 11), strict=True):
        one.post(replace(_difference(4), anchor=anchor))
    for one, anchor in zip(councils, (12, 12, UNKNOWN), strict=True):
        one.post(replace(_difference(8), anchor=anchor))
    waiting = {0: (8,), 1: (8,), 2: (4, 8)}
    verdict = councils[0].decide(1, 0, 8, 8, members=MEMBERS, waiting=waiting, staleness=1)
    assert verdict.newest == {0: 8, 1: 8, 2: 8}
    with pytest.raises(UnequalWeightsError, match=r"at merge 1, .* to step 4 differ: .*000a on site 0; .*000b on site 2"):
        councils[0].differences(verdict, bytes_each=7)


def test_a_difference_is_sent_once_to_a_site_that_connects_just_before_it() -> None:
    hub = Hub()
    councils = _all(hub)
    hub.cut([0], [2])
    hub.mend()
    sent = [message for message in _sent(councils[0], lambda: councils[0].post(_difference(4))) if message[0] in (None, 2)]
    assert [kind for _, kind in sent if kind == b"d"] == [b"d"]


def _sent(council: Council, act: Callable[[], object]) -> list[tuple[int | None, bytes]]:
    """Return the recipient and the kind of every message that a site sends while `act` and its next turn run."""
    wire, found = council._wire, list[tuple[int | None, bytes]]()
    assert isinstance(wire, Wire)
    send = wire.send
    wire.send = lambda message, to=None, **named: (found.append((to, message[:1])), send(message, to, **named))[1]  # type: ignore[method-assign]
    act()
    council.listen()
    return found


def test_a_late_site_is_waited_for_once_it_may_miss_no_merge() -> None:
    """The first merge has a quorum and waits for no one. The second one waits for the difference that has missed the first."""
    councils = _all(Hub(), staleness=1, grace=0.5)
    for step, late in ((4, ()), (8, (4,))):
        for one in councils[:2]:
            one.post(_difference(step))
        waiting = {0: (step,), 1: (step,), 2: (*late, step)}
        began = time.monotonic()
        verdict = councils[0].decide(step // 4 - 1, 0, step, step, members=MEMBERS, waiting=waiting, staleness=1)
        assert (verdict.merged, verdict.steps) == ((0, 1), (step, step))
        assert (verdict.left, time.monotonic() - began >= 0.5) == (((2,), True) if late else ((), False))
        assert [one.step for one in councils[0].differences(verdict, bytes_each=7)] == [step] * 2
        if not late:
            assert Verdict.unpack(verdict.pack()) == verdict
            assert len(verdict.pack()) + LENGTH_BYTES == VERDICT_BYTES + 2 * STEP_BYTES
            assert councils[1].decide(0, 0, 4, 4, members=MEMBERS, waiting=waiting, staleness=1) == verdict


def test_late_differences_are_merged_together() -> None:
    """All that have come of a site are merged, unless an earlier one is missing."""
    councils = _all(Hub(), staleness=3)
    for one in councils[:2]:
        one.post(_difference(12))
    for step in (8, 12):
        councils[2].post(_difference(step))
    waiting = {0: (12,), 1: (12,), 2: (4, 8, 12)}
    first = councils[0].decide(0, 0, 12, 12, members=MEMBERS, waiting=waiting, staleness=3)
    assert (first.merged, first.left) == ((0, 1), ()), "of 4, 8 and 12 the first has not come"
    councils[0].differences(first, bytes_each=7)
    councils[2].post(_difference(4))
    for one in councils:
        one.post(_difference(16))
    waiting = {0: (16,), 1: (16,), 2: (4, 8, 12, 16)}
    verdict = councils[0].decide(1, 0, 16, 16, members=MEMBERS, waiting=waiting, staleness=3)
    assert verdict.newest == {0: 16, 1: 16, 2: 16}
    assert verdict.takes(waiting) == [(0, 16), (1, 16), (2, 4), (2, 8), (2, 12), (2, 16)]
    assert [one.step for one in councils[0].differences(verdict, bytes_each=7)] == [16, 16, 4, 8, 12, 16]


def test_the_last_merges_wait_for_all() -> None:
    """No sample is left, so nothing may be late."""
    councils = _all(Hub(), staleness=2, grace=60.0)
    for one in councils[:2]:
        one.post(_difference(4))
    waiting = dict.fromkeys(range(3), (4,))
    known = {"members": MEMBERS, "waiting": waiting, "staleness": 0}
    assert councils[0].decide(0, 0, 4, 4, **known, seconds=0.2) is None
    councils[2].post(_difference(4))
    assert councils[0].decide(0, 0, 4, 4, **known).merged == (0, 1, 2)


def test_a_site_that_is_started_again_is_not_waited_for() -> None:
    hub = Hub()
    councils = _all(hub, grace=2 * PATIENCE)
    again = _council(hub, 2, start="again", grace=2 * PATIENCE)
    for one in councils[:2]:
        one.post(_difference(4))
    began = time.monotonic()
    verdict = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    assert verdict.left == (2,) and time.monotonic() - began < PATIENCE
    assert again.begin([], 5.0, known=("m",)) == Beginning(None, anew=True)
    councils[0].listen()
    assert councils[0].known_by(2) == ("m",) and councils[0].known_by(1) == ()
    assert councils[0].asking({0: 0, 1: 0}) == [2] and councils[0].asking({0: 0, 1: 0}) == [], "once"
    reply = JoinReply(councils[0].line, 4, 1, verdict.mark(""), (-1,), {"count": 3})
    councils[0].send([2], MergeRecord.of(councils[0].line, [{"number": 0}]))
    councils[0].send([2], reply)
    assert again.join_reply(0.05) is None, "the weights are not there"
    councils[0].send([2], FragmentValues(0, torch.ones(3)))
    assert again.join_reply(5.0) == reply and again.fragment_values(0).values.tolist() == [1, 1, 1]
    record = again.take_record()
    assert record is not None and record.merges == [{"number": 0}] and again.take_record() is None, "no longer in memory"
    again.send_ready()
    for one in councils[:2]:
        one.post(_difference(8))
    verdict = councils[0].decide(1, 0, 8, 8, members={0: 0, 1: 0})
    assert verdict.joined == (2,) and again.decide(1, 0, 8, 8, members={0: 0, 1: 0}) == verdict
    assert again.differences(verdict, bytes_each=7)[1].step == 8


def test_sites_that_would_train_different_runs_do_not_begin() -> None:
    """Each of them ends, also if the other has ended before."""
    hub = Hub()
    both = [_council(hub, site, count=2, terms={"train.seed": site, "sites.lr": 0.7}) for site in range(2)]
    both[0].listen()
    for one, words in zip(both[::-1], ("1 on site 1 and 0 on site 0", "0 on site 0 and 1 on site 1"), strict=True):
        with pytest.raises(UnequalSitesError, match=f"train.seed is {words}. Start all sites") as raised:
            one.begin([], 1.0)
        assert causes.status(raised.value) == 2 and "sites.lr" not in str(raised.value)


def test_a_site_of_another_run_does_not_disturb_those_that_train() -> None:
    hub = Hub()
    councils = _all(hub, grace=60.0, terms={"train.seed": 0})
    other = _council(hub, 2, start="again", grace=60.0, terms={"train.seed": 1})
    _listen(councils[:2])
    with pytest.raises(UnequalSitesError, match=r"site 2 and site . would not train the same run: train.seed is 1 on site 2"):
        other.begin([], 5.0)
    for one in councils[:2]:
        one.post(_difference(4))
    assert councils[0].decide(0, 0, 4, 4, members=MEMBERS).left == (2,) and not councils[0].asking({0: 0, 1: 0})


def test_a_site_that_decides_and_does_not_train_may_join() -> None:
    """The site left, or began from a checkpoint from a time when it did not train."""
    councils = _all(Hub())
    councils[0].send_ready()
    for one in councils[1:]:
        one.post(_difference(4))
    assert councils[0].decide(0, 0, 4, 4, members={1: 0, 2: 0}).joined == (0,)


def test_messages_have_the_names_of_sites() -> None:
    named = tuple(SiteSpec(name=name) for name in ("oslo", "bergen", None))
    councils = _all(Hub(), each=named)
    councils[0].post(_difference(4))
    with pytest.raises(PeerGone, match="bergen, site 2 are away, and the others do not form a quorum"):
        councils[0].decide(0, 0, 4, 4, members=MEMBERS)


def test_without_a_quorum_nobody_merges() -> None:
    councils = _all(Hub())
    councils[0].post(_difference(4))
    with pytest.raises(PeerGone, match="site 1, site 2 are away, and the others do not form a quorum"):
        councils[0].decide(0, 0, 4, 4, members=MEMBERS)


def test_a_site_that_decides_late_is_waited_for() -> None:
    """The decider computes for longer than the timeout, with a message after each step, and then decides."""
    councils = _all(Hub(), patience=0.6)
    for one in councils:
        one.post(_difference(4))
    with _waiting(councils[:1]):
        began = time.monotonic()
        while time.monotonic() - began < 2.0:
            assert councils[1].decide(0, 0, 4, 4, members=MEMBERS, seconds=0.3) is None
    verdict = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    assert councils[1].decide(0, 0, 4, 4, members=MEMBERS) == verdict


def test_a_site_that_decides_and_says_nothing_is_lost() -> None:
    councils = _all(Hub())
    councils[1].post(_difference(4))
    with pytest.raises(PeerGone, match="site 0, the decider, is away"):
        councils[1].decide(0, 0, 4, 4, members=MEMBERS)


def test_without_the_site_that_decides_the_others_end() -> None:
    hub = Hub()
    councils = _all(hub)
    hub.cut([0], [1, 2])
    for one in councils[1:]:
        one.post(_difference(4))
        with pytest.raises(PeerGone, match="site 0, the decider, is away"):
            one.decide(0, 0, 4, 4, members=MEMBERS)


HALVES = [half for size in range(1, 5) for half in combinations(range(5), size)]
QUICK = {(0,), (4,), (0, 1), (0, 3, 4)}


@pytest.mark.parametrize("half", [half if half in QUICK else pytest.param(half, marks=only_full) for half in HALVES])
def test_of_two_halves_that_are_cut_apart_at_most_one_goes_on(half: tuple[int, ...]) -> None:
    """Sites that end are started again, as by their supervisors, and connect to the sites that they can reach."""
    hub = Hub()
    councils = _all(hub, count=5)
    rest = tuple(set(range(5)) - set(half))
    hub.cut(half, rest)
    members = dict.fromkeys(range(5), 0)
    for one in councils:
        one.post(_difference(4))
    bigger = half if len(half) > len(rest) else rest
    if 0 in bigger:
        assert councils[0].decide(0, 0, 4, 4, members=members).left == tuple(sorted(set(range(5)) - set(bigger)))
    else:
        with pytest.raises(PeerGone):
            councils[0].decide(0, 0, 4, 4, members=members)
        again = [_council(hub, site, start="again", count=5) for site in bigger]
        _listen(again)
        assert {one.begin([], 1.0) for one in again} == {Beginning(None)} and len({one.line for one in again}) == 1
    smaller = [_council(hub, site, start="later", count=5) for site in set(range(5)) - set(bigger)]
    _listen(smaller)
    for one in smaller[:1]:
        with pytest.raises(PeerGone, match="needs more than half of the 5 sites"):
            one.begin([], 1.0)


@pytest.mark.parametrize("decides", [None, 1])
@pytest.mark.parametrize("count", range(1, 7))
def test_two_sets_without_a_common_site_are_never_both_a_quorum(count: int, decides: int | None) -> None:
    council = Council(SitesSpec(count=count, decides=decides), 0, None, patience=1, start=1, limit=1)
    for _ in range(200):
        half = {site for site in range(count) if random.random() < 0.5}
        assert not (council.quorum(half) and council.quorum(set(range(count)) - half))
    assert decides is not None or council.quorum(range(count))


def test_the_site_that_the_run_file_names_goes_on_alone() -> None:
    hub = Hub()
    councils = _all(hub, count=2, decides=0)
    councils[0].post(_difference(4))
    verdict = councils[0].decide(0, 0, 4, 4, members={0: 0, 1: 0})
    assert (verdict.merged, verdict.left) == ((0,), (1,))
    hub.cut([0], [1])
    alone = _council(hub, 1, start="again", count=2, decides=0)
    with pytest.raises(PeerGone, match="site 1 needs site 0, and is not connected to site 0: no route"):
        alone.begin([], 1.0)


def test_a_connection_that_breaks_in_between_loses_nothing() -> None:
    hub = Hub()
    councils = _all(hub, grace=5.0)
    for one in councils[1:]:
        one.post(_difference(4))
    hub.cut([0], [1])
    councils[0].post(_difference(4))
    hub.mend()
    verdict = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    assert verdict.merged == (0, 1, 2)
    hub.cut([1], [0])
    hub.mend()
    _listen(councils)
    assert councils[1].decide(0, 0, 4, 4, members=MEMBERS) == verdict
    assert len(councils[1].differences(verdict, bytes_each=7)) == 3


def test_a_site_that_receives_a_beginning_and_of_its_line_at_once_takes_part_from_there() -> None:
    """The site asks to join a line that is already training, unless that line has merged nothing yet."""
    hub = Hub()
    councils = [
        Council(SitesSpec(count=2), site, Wire(hub, site, "first"), patience=2.0, start=0.4, limit=20.0) for site in range(2)
    ]
    _listen(councils)
    assert councils[0].begin([], 5.0) == Beginning(None)
    councils[0]._receive(0.0)  # it also names its line
    assert councils[1].begin([], 5.0) == Beginning(None)


def test_gradients_that_a_broken_connection_lost_are_sent_again() -> None:
    """This includes the gradients of the step before, if the decider has taken one more step meanwhile."""
    hub, two = Hub(), {0: 0, 1: 0}
    spec = SitesSpec(method="data-parallel", count=2, grace=0.1)
    councils = [
        AllSitesCouncil(spec, site, Wire(hub, site, "first"), patience=2.0, start=0.4, limit=20.0, every=10) for site in range(2)
    ]
    _listen(councils)
    assert [one.begin([], 5.0) for one in councils] == [Beginning(None)] * 2
    councils[1].post(_difference(1))
    hub.cut([0], [1])
    councils[0].post(_difference(1))
    first = councils[0].decide(0, 0, 1, 1, members=two)
    assert first is not None and len(councils[0].differences(first, bytes_each=7)) == 2
    councils[0].post(_difference(2))
    hub.mend()
    with _waiting([councils[0]]):
        assert councils[1].decide(0, 0, 1, 1, members=two) == first
        assert len(councils[1].differences(first, bytes_each=7)) == 2
    councils[1].post(_difference(2))
    second = councils[0].decide(1, 0, 2, 2, members=two)
    assert second is not None and second.merged == (0, 1) and councils[1].decide(1, 0, 2, 2, members=two) == second


def test_a_site_that_is_asked_to_stop_leaves_and_the_others_go_on() -> None:
    councils = _all(Hub())
    for one in councils:
        one.post(_difference(4, stop=one.site == 2))
    verdict = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    assert (verdict.merged, verdict.left, verdict.stop) == ((0, 1, 2), (2,), False)
    for one in councils[:2]:
        one.post(_difference(8, stop=one.site == 1))
    verdict = councils[0].decide(1, 0, 8, 8, members={0: 0, 1: 0})
    assert (verdict.merged, verdict.left, verdict.stop) == ((0, 1), (), True), "the rest would be no quorum"


def test_another_program_is_noticed() -> None:
    councils = _all(Hub())
    for one in councils:
        one.post(_difference(4))
    verdict = councils[0].decide(0, 0, 4, 4, members=MEMBERS)
    with pytest.raises(OutOfStepError, match="7 bytes, but site 0 expects 8"):
        councils[0].differences(verdict, bytes_each=8)
    with pytest.raises(OutOfStepError, match="merges fragment 0 of step 4 at step 4"):
        councils[1].decide(0, 1, 4, 4, members=MEMBERS)


def test_the_grace_follows_the_rounds() -> None:
    council = Council(SitesSpec(count=1, inner_steps=2), 0, None, patience=1, start=30, limit=1)
    assert council.pace.grace == 30
    council.pace.rounds.extend((20.0, 21.0, 90.0))
    assert council.pace.grace == 21
    council.pace.rounds.extend((0.1,) * 16)
    assert council.pace.grace == 5


def _cut(step: int, *members: int, mark: str = "") -> CheckpointOffer:
    return CheckpointOffer(step, mark or f"m{step}", 12 * step, members)


def test_sites_begin_from_the_newest_checkpoint_that_all_who_trained_have() -> None:
    old, new, sites = _cut(3, 0, 1, 2), _cut(6, 0, 1, 2), SitesSpec(count=3)
    assert called({0: (old, new), 1: (old, new), 2: (old,)}, sites) == (old, 0)
    assert called({0: (), 1: (old, new)}, sites) == (new, 1), "a site that lost its disk does not set the others back"
    alone = _cut(9, 0, 1)
    assert called({0: (new, alone), 1: (alone,), 2: (new,)}, sites) == (alone, 0), "2 had left"
    assert called({0: (new,), 1: (_cut(7, 0, 1, mark="other"),)}, sites)[0] == _cut(7, 0, 1, mark="other")
    assert called({1: (), 2: ()}, sites) == (None, 1)
    with pytest.raises(ValueError, match=r"sites\.decides = 0, but site 0 has no checkpoint"):
        called({0: (), 1: (old,)}, SitesSpec(count=3, decides=0))


def test_a_site_without_checkpoints_sets_nobody_back() -> None:
    old, new, three = _cut(3, 0, 1, 2), _cut(6, 0, 1, 2), SitesSpec(count=3)
    assert called({0: (old, new), 1: (old,), 2: ()}, three) == (old, 0)
    other = _cut(7, 0, 1, 2, mark="other")
    assert called({0: (old, new), 1: (old, new), 2: (other,)}, three) == (new, 0), (
        "a quorum holds it, and one site alone the newest"
    )
    follows = _cut(9, 1)
    assert called({0: (old,), 1: (old, follows)}, SitesSpec(count=2, decides=0)) == (old, 0), "who decides must hold it"


def test_a_site_that_has_ended_stays_until_all_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's supervisor gets heartbeats meanwhile. The site waits no longer than the timeout, though a link may never
    take the rest."""
    beats = list[int]()
    wire = Wire(Hub(), 0, "first")
    council = Council(SitesSpec(count=3), 0, wire, patience=0.3, start=1, limit=1, beat=lambda: beats.append(1))
    monkeypatch.setattr(Wire, "unsent", 3)
    assert council.close(5.0) and len(beats) == 3
    wire.unsent = 1_000_000
    assert not council.close(0.05) and council.close(5.0)


# --- sites that only follow ---


def _some_enter(hub: Hub, trained: int, **spec: Any) -> list[Council]:
    """Return all sites of a run. Only the first few hold its checkpoint, so the others start fresh."""
    count, cut = spec["count"], _cut(6, *range(trained))
    found = [_council(hub, site, **spec) for site in range(count)]
    for one in found[:trained]:
        one._cuts = [cut]
    _listen(found)
    begun = [one.begin([cut] if one.site < trained else [], 1.0) for one in found]
    assert begun == [Beginning(6)] * trained + [Beginning(None, anew=True)] * (count - trained)
    _listen(found)
    return found


@pytest.mark.parametrize(("trained", "count"), [(1, 2), (2, 4)])
def test_sites_that_enter_anew_count_for_the_quorum(trained: int, count: int) -> None:
    """There are more sites than before, or run folders were lost. The old sites merge, send their weights, and let the
    new ones join."""
    councils = _some_enter(Hub(), trained, count=count, patience=20.0)
    members, entering = dict.fromkeys(range(trained), 0), list(range(trained, count))
    for one in councils[:trained]:
        one.post(_difference(8))
    with _waiting(councils[trained:]):
        verdict = councils[0].decide(0, 0, 8, 8, members=members)
    assert (verdict.merged, verdict.left, verdict.stop) == (tuple(range(trained)), (), False)
    assert councils[0].asking(members) == entering
    for one in councils[trained:]:
        one.send_ready()
    for one in councils[:trained]:
        one.post(_difference(12))
    with _waiting(councils[trained:]):
        assert councils[0].decide(1, 0, 12, 12, members=members).joined == tuple(entering)


def test_one_of_two_sites_may_lose_its_run_folder() -> None:
    """The site trained when the checkpoint was saved, but the others do not wait for a difference that it cannot send."""
    councils = _some_enter(Hub(), 1, count=2, patience=20.0, grace=60.0)
    councils[0].post(_difference(8))
    with _waiting(councils[1:]):
        verdict = councils[0].decide(0, 0, 8, 8, members={0: 0, 1: 0})
    assert (verdict.merged, verdict.left) == ((0,), (1,)) and councils[0].asking({0: 0}) == [1]


def test_a_site_that_has_just_joined_counts_before_its_first_difference_is_due() -> None:
    councils = _all(Hub(), count=2, patience=20.0)
    councils[0].post(_difference(6))
    with _waiting(councils[1:]):
        assert councils[0].decide(0, 0, 6, 8, members={0: 0, 1: 8}).merged == (0,)


@pytest.mark.parametrize("half", [(0, 1), (0, 1, 2)])
def test_a_half_with_followers_goes_on_only_if_it_is_a_quorum(half: tuple[int, ...]) -> None:
    hub = Hub()
    councils = _some_enter(hub, 2, count=4, patience=2.0)
    rest = sorted(set(range(4)) - set(half))
    for one in councils[:2]:
        one.post(_difference(8))
    hub.cut(half, rest)
    with _waiting([councils[site] for site in range(2, 4)]):
        if len(half) > 2:
            assert councils[0].decide(0, 0, 8, 8, members={0: 0, 1: 0}).merged == (0, 1)
        else:
            with pytest.raises(PeerGone, match="site 2, site 3 are away, and the others do not form a quorum"):
                councils[0].decide(0, 0, 8, 8, members={0: 0, 1: 0})
    alone = [_council(hub, site, start="later", count=4) for site in rest]
    _listen(alone)
    with pytest.raises(PeerGone, match="needs more than half of the 4 sites"):
        alone[0].begin([], 1.0)


def test_a_follower_that_is_silent_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's connection may seem intact although it was cut, and the site may now be in another group."""
    hub = Hub()
    councils = _some_enter(hub, 1, count=2)
    hub.cut([0], [1])
    monkeypatch.setattr(Wire, "connected", lambda *_: True)
    councils[0].post(_difference(8))
    with pytest.raises(PeerGone, match="site 1 is away, and the others do not form a quorum"):
        councils[0].decide(0, 0, 8, 8, members={0: 0})


def test_messages_come_back_as_they_were() -> None:
    cut = _cut(3, 0, 1)
    reply = JoinReply(LINE, 4, 1, "m", (-1, 4), {"count": 2})
    every = [Hello(LINE, 1, asks=True, cuts=(cut,)), Hello(), Start(LINE, cut), Start(LINE, None), reply, Ready(LINE)]
    every += [Hello(known=("m", "n")), MergeRecord.of(LINE, [{"number": 0}])]
    every += [Verdict(7, 1, 4, 6, (0, 63), (1,), (2,), 64, True, LINE), Verdict(0, 0, 1, 1, (0,), line=LINE)]
    for message in every:
        assert messages.unpack(message.pack()) == message
    difference = Difference(1, 4, True, 2.5, torch.arange(7, dtype=torch.uint8), LINE, 2**64 - 1)
    found = messages.unpack(difference.pack())
    assert isinstance(found, Difference) and torch.equal(found.encoded, difference.encoded)
    assert (found.fragment, found.step, found.stop, found.loss, found.line) == (1, 4, True, 2.5, LINE)
    assert found.anchor == 2**64 - 1
    held = messages.unpack(FragmentValues(3, torch.tensor([1.0, -0.0])).pack())
    assert isinstance(held, FragmentValues) and held.fragment == 3 and held.values.tolist() == [1.0, 0.0]
    assert len(difference.pack()) - 7 + LENGTH_BYTES == HEAD_BYTES
    assert len(every[-1].pack()) + LENGTH_BYTES == VERDICT_BYTES


def test_the_mark_names_all_merges_so_far() -> None:
    one, other = Verdict(0, 0, 4, 4, (0, 1), line=LINE), Verdict(0, 0, 4, 4, (0,), (1,), line=LINE)
    assert one.mark("") != other.mark("") != one.mark("x")
    assert one.mark("") == Verdict(0, 0, 4, 4, (0, 1), stop=True, line="cd" * 8).mark(""), "neither who started nor who stops"
