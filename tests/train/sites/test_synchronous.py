"""Sites that exchange gradients: each step needs all of them."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.fleet.secure.peers import PeerGone
from megalith.parallel.data import local
from megalith.parallel.groups import group_of
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, folder_of
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.sites.meet import build
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.messages import CheckpointOffer, Verdict
from megalith.train.sites.synchronous import AllSitesCouncil, NoCheckpointError, SynchronousSites
from tests.keys import GIVEN
from tests.ranks import everyone, run_ranks
from tests.specs import tiny_run
from tests.train.sites.test_council import MEMBERS, Hub, Wire, _cut, _difference, _listen
from tests.train.sites.test_merge import _other_bytes


def _one(hub: Hub, site: int, *, start: str = "first", patience: float = 20.0, count: int = 3) -> AllSitesCouncil:
    sites = SitesSpec(method="data-parallel", count=count)
    return AllSitesCouncil(sites, site, Wire(hub, site, start), patience=patience, start=0.4, limit=0.4, every=10)


def _all(hub: Hub, **named: Any) -> list[AllSitesCouncil]:
    """Return all sites of a run, started from the first weights. Site 0 is the decider."""
    found = [_one(hub, site, **named) for site in range(3)]
    _listen(found)
    assert [one.begin([], 1.0) for one in found] == [Beginning(None)] * 3
    _listen(found)
    for one in found:
        one.pace.rounds.extend((0.1,) * 16)
    return found


def _late(hub: Hub, councils: list[AllSitesCouncil]) -> Verdict:
    """All sites send their gradients, and those of site 1 are still on their way to site 2 when it knows the verdict."""
    hub.broken.add(frozenset((1, 2)))
    for one in councils:
        one.post(_difference(1))
    hub.broken.clear()
    verdict = councils[0].decide(0, 0, 1, 1, members=MEMBERS)
    assert verdict is not None and councils[2].decide(0, 0, 1, 1, members=MEMBERS) == verdict
    return verdict


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine no grace period is long enough for these tests."""
    monkeypatch.setattr("megalith.train.sites.pace.MIN_GRACE", 0.1)


@pytest.mark.usefixtures("hurry")
def test_gradients_on_a_slow_link_are_waited_for() -> None:
    """The wait is longer than a step, even after the verdict."""
    hub = Hub()
    councils = _all(hub)
    verdict = _late(hub, councils)
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
    verdict = _late(hub, councils)
    with pytest.raises(PeerGone, match="site 1 is away from site 2"):
        councils[2].gather(verdict, 20.0)


def test_nobody_waits_for_gradients_of_a_site_that_was_started_again() -> None:
    hub = Hub()
    councils = _all(hub)
    verdict = _late(hub, councils)
    _one(hub, 1, start="again")
    councils[2].listen()
    with pytest.raises(PeerGone, match="site 1 is away from site 2, and data parallelism"):
        councils[2].gather(verdict, 20.0)


def test_a_site_that_connects_to_another_only_after_they_began_takes_part() -> None:
    """Both have met the decider, which begins, before they have met each other."""
    hub = Hub()
    hub.cut([1], [2])
    councils = _all(hub)
    for one in councils:
        one.post(_difference(1))
    verdict = councils[0].decide(0, 0, 1, 1, members=MEMBERS)
    assert verdict is not None
    for one in councils[1:]:
        assert one.decide(0, 0, 1, 1, members=MEMBERS) == verdict and not one.gather(verdict, 0.05)
    hub.mend()
    for one in councils[1:]:
        one.listen()
    assert all(one.gather(verdict, 1.0) for one in councils)


def _begin(*cuts: Sequence[CheckpointOffer]) -> list[Beginning | type[Exception]]:
    """Return the start of sites with these checkpoints."""
    hub = Hub()
    councils = [_one(hub, site, count=len(cuts)) for site in range(len(cuts))]
    found: dict[int, Beginning | type[Exception]] = {}
    end = time.monotonic() + 20
    while len(found) < len(cuts) and time.monotonic() < end:
        for one in (each for each in councils if each.site not in found):
            try:
                beginning = one.begin(cuts[one.site], 0.05)
            except NoCheckpointError:
                found[one.site] = NoCheckpointError
            else:
                found |= {} if beginning is None else {one.site: beginning}
    return [found[site] for site in range(len(cuts))]


def test_all_begin_from_the_first_weights_where_one_lacks_the_first_checkpoint() -> None:
    """The steps lost are at most those between two checkpoints."""
    three, ten, twenty = (_cut(step, 0, 1) for step in (3, 10, 20))
    first = Beginning(None)
    assert _begin([], []) == [first, first]
    assert _begin([ten], []) == _begin([], [ten]) == _begin([three, ten], []) == [first, first]
    assert _begin([ten], [ten]) == _begin([ten, twenty], [ten]) == [Beginning(10), Beginning(10)]
    assert _begin([_cut(10, 0, 1, 2)], [_cut(10, 0, 1, 2)], []) == [first] * 3
    assert _begin([ten, twenty], []) == _begin([twenty], []) == [Beginning(20), NoCheckpointError]


EXCHANGES = 3


def _exchanged(rank: int, spec: RunSpec, folder: str) -> tuple[int, int, int, float]:
    """Exchange gradients of ones times the site's number as the only rank of a site. Return the number of the model's parameters, the bytes
    that its events name, those that left this site, and the mean of the exchanged gradients."""
    os.environ.update(GIVEN)
    assert spec.sites is not None
    spec = spec.model_copy(update={"sites": spec.sites.model_copy(update={"site": rank})})
    device = torch.device("cpu")
    trainer = assemble(spec, groups=mesh_groups(spec, device, group_of(everyone(), [rank])), device=device)
    own = folder_of(Path(folder), rank)
    own.mkdir(exist_ok=True)
    sites = build(trainer, own, beat=lambda: None)
    assert isinstance(sites, SynchronousSites) and sites._council is not None
    other = _other_bytes(sites)
    sites.state.begin()
    sites.begin([])
    made, mean = [], 0.0
    for step in range(EXCHANGES):
        sites.deal(step)
        given = {name: torch.full_like(local(each), float(rank)) for name, each in trainer.parameters.items()}
        sites.exchange(given, step, 0.0)
        made += sites.after_step(step + 1, stop=False).made
        mean = float(torch.cat([each.flatten() for each in given.values()]).mean())
    sites.close()
    sent = sites._council._wire.sent - sum(other)  # type: ignore[attr-defined]
    return sum(each.numel() for each in trainer.parameters.values()), sum(one.bytes_sent for one in made), sent, mean


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_four_bytes_a_parameter_leave_a_site_for_every_other_site_in_each_step(count: int, tmp_path: Path) -> None:
    """Bytes are counted where frames are sent; headers and the decider's messages are less than a hundredth."""
    spec = tiny_run(sites={"count": count, "method": "data-parallel"}, train={"steps": EXCHANGES, "global_batch": 2 * count})
    for parameters, said, sent, mean in run_ranks(_exchanged, count, spec, str(tmp_path)):
        least = EXCHANGES * (count - 1) * 4 * parameters
        assert said == sent and least < sent < 1.01 * least and mean == pytest.approx((count - 1) / 2)
