"""Sites that exchange gradients: each step needs all of them."""

import time
from typing import Any

import pytest

from megalith.fleet.secure.peers import PeerGone
from megalith.spec.sites import SitesSpec
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.together import All
from tests.train.sites.test_council import MEMBERS, Hub, Wire, _difference, _listen


def _one(hub: Hub, site: int, *, start: str = "first", patience: float = 20.0, count: int = 3, **named: Any) -> All:
    sites = SitesSpec(method="data-parallel", count=count)
    return All(sites, site, Wire(hub, site, start), patience=patience, start=0.4, limit=0.4, **named)


def _all(hub: Hub, **named: Any) -> list[All]:
    """Return all sites of a run, which have begun from the first weights; the first decides."""
    found = [_one(hub, site, **named) for site in range(3)]
    _listen(found)
    assert [one.begin([], 1.0) for one in found] == [Beginning(None)] * 3
    _listen(found)
    for one in found:
        one.pace.rounds.extend((0.1,) * 16)
    return found


def _late(hub: Hub, councils: list[All]) -> None:
    """All sites send their gradients, and those of site 1 are still on their way to site 2."""
    hub.broken.add(frozenset((1, 2)))
    for one in councils:
        one.post(_difference(1))
    hub.broken.clear()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grace is as long as the tests are slow."""
    monkeypatch.setattr("megalith.train.sites.pace.LEAST_GRACE", 0.1)


@pytest.mark.usefixtures("hurry")
def test_gradients_on_a_slow_link_are_waited_for() -> None:
    """For longer than a step takes, also after the verdict."""
    hub = Hub()
    councils = _all(hub)
    _late(hub, councils)
    verdict = councils[0].decide(0, 0, 1, 1, members=MEMBERS)
    assert verdict is not None and councils[2].decide(0, 0, 1, 1, members=MEMBERS) == verdict
    assert not councils[2].gather(verdict, 1.0)
    councils[1].post(_difference(1))
    assert councils[2].gather(verdict, 1.0) and len(councils[2].differences(verdict, bytes_each=7)) == 3


@pytest.mark.usefixtures("hurry")
def test_a_site_that_decides_and_is_cut_off_is_waited_for() -> None:
    hub = Hub()
    councils = _all(hub)
    for one in councils:
        one.post(_difference(1))
    hub.cut([0], [1, 2])
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert councils[1].decide(0, 0, 1, 1, members=MEMBERS, seconds=0.05) is None
    hub.mend()
    verdict = councils[0].decide(0, 0, 1, 1, members=MEMBERS)
    assert verdict is not None and councils[1].decide(0, 0, 1, 1, members=MEMBERS) == verdict


def test_they_are_waited_for_no_longer_than_the_patience() -> None:
    hub = Hub()
    councils = _all(hub, patience=0.5)
    _late(hub, councils)
    verdict = councils[0].decide(0, 0, 1, 1, members=MEMBERS)
    assert verdict is not None and councils[2].decide(0, 0, 1, 1, members=MEMBERS) == verdict
    with pytest.raises(PeerGone, match="site 1 is away from site 2"):
        councils[2].gather(verdict, 20.0)


def test_nobody_waits_for_gradients_of_a_site_that_was_started_again() -> None:
    hub = Hub()
    councils = _all(hub)
    _late(hub, councils)
    verdict = councils[0].decide(0, 0, 1, 1, members=MEMBERS)
    assert verdict is not None and councils[2].decide(0, 0, 1, 1, members=MEMBERS) == verdict
    _one(hub, 1, start="again")
    councils[2].listen()
    with pytest.raises(PeerGone, match="site 1 is away from site 2, and data parallelism"):
        councils[2].gather(verdict, 20.0)
