"""Faults of sites: the list that a seed draws, membership read from logs, and the judgement, without processes of a run."""

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from megalith.commands.sites.campaign import campaign as campaign_of
from megalith.events import EventLog, Merge
from megalith.machine.wire import Wire
from megalith.rehearse import campaign
from megalith.rehearse.site_campaign import SiteCampaign, SiteFate, SiteProcess, SitesRun, membership
from megalith.rehearse.site_faults import KINDS, LOSS, SiteFault, draw, merges_of
from megalith.rehearse.site_judge import Evidence, judge
from megalith.spec import files
from megalith.spec.sites import SitesSpec, folder_of
from tests.fleet.conftest import is_alive, until


def test_a_seed_gives_its_list_with_as_many_of_each_kind() -> None:
    lists = [draw(20, seed=seed, sites=3, grace=4.0) for seed in (1, 1, 2)]
    assert lists[0] == lists[1] != lists[2]
    for found in lists:
        assert Counter(one.kind for one in found) == dict.fromkeys(KINDS, 4) and {one.site for one in found} == {0, 1, 2}
        cuts = [one.seconds for one in found if one.kind == "cut"]
        assert [seconds > 4.0 for seconds in cuts] == [True, False, True, False], "sites that are left, and sites that stay"
        assert merges_of(found) > sum(one.after + KINDS[one.kind].merges for one in found)
    assert {one.kind for one in draw(5, seed=1, sites=2, grace=4.0, kinds=("torn", "loss"))} == {"torn", "loss"}


def test_a_run_file_for_two_datacenters_is_rehearsed_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses, its certificates and the site that it names belong to other machines."""
    path, asked = tmp_path / "run.toml", list[SitesSpec | None]()
    tls = "".join(f'{name} = "{name}.pem"\n' for name in ("certificate", "key", "authority"))
    addresses = 'addresses = ["10.0.0.1:29400", "10.8.0.1:29400"]'
    sites = f"[sites]\ncount = 2\nsite = 0\n{addresses}\n[sites.tls]\n{tls}"
    train = "[train]\nsteps = 10\nglobal_batch = 8\nseq_len = 16\n"
    path.write_text(f'model.preset = "tiny"\ndata.path = "none"\n{train}{sites}')

    def run(command: list[str], folder: Path) -> NoReturn:
        asked.append(files.load(Path(command[4])).spec.sites)
        raise InterruptedError

    monkeypatch.setattr(campaign, "run", run)
    with pytest.raises(InterruptedError):
        campaign_of(files.load(path), tmp_path / "out", count=1, seed=1, kinds=(), minutes=1.0)
    (found,) = asked
    assert found is not None and (found.site, found.addresses, found.tls, found.count) == (None, (), None, 2)


def _merge(number: int, merged: list[int], *, left: tuple[int, ...] = (), joined: tuple[int, ...] = (), time: float) -> Merge:
    zero = dict.fromkeys(("bytes_sent", "bytes_received", "waited", "seconds", "norm", "spread"), 0)
    return Merge(
        step=2 * number, sent=2 * number, fragment=0, sites=3, losses=[], number=number, merged=merged, left=[*left],
        joined=[*joined], time=time, **zero,
    )  # fmt: skip


def _log(run_dir: Path, site: int, *merges: Merge) -> None:
    folder_of(run_dir, site).mkdir(parents=True, exist_ok=True)
    log = EventLog(folder_of(run_dir, site))
    for one in merges:
        log.write(one)
    log.close()


def test_membership_is_that_of_the_newest_merges(tmp_path: Path) -> None:
    assert membership(tmp_path, 3).members == {0, 1, 2}
    first, second = _merge(0, [0, 1, 2], time=1.0), _merge(1, [0, 1], left=(2,), time=2.0)
    _log(tmp_path, 0, first, second)
    _log(tmp_path, 2, first)
    found = membership(tmp_path, 3)
    assert (found.merges, found.members, found.times, found.left) == (2, {0, 1}, (2.0, 0.0, 1.0), (0.0, 0.0, 2.0))
    _log(tmp_path, 2, _merge(2, [0, 1], time=3.0))
    assert membership(tmp_path, 3).members == {0, 1}, "its own log lacks the merge at which it left"
    _log(tmp_path, 0, _merge(3, [0, 1], joined=(2,), time=4.0))
    assert membership(tmp_path, 3).members == {0, 1, 2}
    _log(tmp_path, 2, _merge(3, [0, 1, 2], joined=(2,), time=4.0))
    assert membership(tmp_path, 3).times[2] == 0.0, "a merge that it missed had what it did before it was lost"
    _log(tmp_path, 1, _merge(1, [0, 1, 2], time=5.0))
    found = membership(tmp_path, 3)
    assert (found.merges, found.members) == (2, {0, 1, 2}), "resumed before the site left"


_PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
_WORK = "n = 0\nwhile True: n += 1"


def test_a_site_is_killed_with_all_of_its_processes_and_its_ranks_run_at_half_speed() -> None:
    """Ranks are the children of a child of the site's command."""
    code = _PARENT.format(child=_PARENT.format(child=_WORK))
    process = subprocess.Popen([sys.executable, "-c", code])
    site = SiteProcess(lambda: process, process)
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 2, seconds=60)
    server, rank = psutil.Process(process.pid).children(recursive=True)
    site.find_ranks()
    site.run(False)
    until(lambda: rank.status() == psutil.STATUS_STOPPED, seconds=10)
    assert server.status() != psutil.STATUS_STOPPED
    site.run(True)
    until(lambda: rank.status() != psutil.STATUS_STOPPED, seconds=10)
    site.run(False)
    site.kill()
    assert process.returncode == -9 and not is_alive(server.pid) and not is_alive(rank.pid)


def test_faults_of_links_begin_and_end(tmp_path: Path) -> None:
    """The links of the site are affected, and no other. Nothing goes on until all sites have merged again."""
    links = {ends: Wire() for ends in ((0, 1), (0, 2), (1, 2))}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        sites = [SiteProcess(lambda: process, process) for _ in range(3)]
        campaign = SiteCampaign(sites, [*links.items()], tmp_path)
        for kind, changed in (
            ("cut", lambda link: link.is_cut),
            ("loss", lambda link: link.loss == LOSS),
            ("torn", lambda link: link.torn == 1),
        ):
            fate = SiteFate(SiteFault(0, kind, 1, 0, seconds=0.0))
            assert not campaign._goes_on(fate)
            assert [changed(link) for link in links.values()] == [True, False, True]
            campaign.seen = replace(campaign.seen, merges=campaign.seen.merges + KINDS[kind].merges)
            assert not campaign._goes_on(fate) and fate.over is not None
            assert not any(link.is_cut or link.loss for link in links.values())
            assert not campaign._goes_on(fate) and not fate.handled
            campaign.seen = replace(campaign.seen, times=(time.time() + 1,) * 3, left=(0.0, time.time(), 0.0))
            assert campaign._goes_on(fate) and fate.handled and fate.left == (1,)
            campaign.seen = replace(campaign.seen, times=(0.0,) * 3)
        slow = SiteFate(SiteFault(0, "slow", 2, 0))
        campaign._goes_on(slow)
        assert [campaign._turns(site) for site in range(3)] == [1, 1, 2]
        campaign.seen = replace(campaign.seen, members=frozenset({0, 2}))
        assert campaign._turns(0) == campaign._turns(2) > 2 and campaign._turns(1) == 1, "the site that is away catches up"
    finally:
        process.kill()
        process.wait()


FATES = (
    SiteFate(SiteFault(0, "kill", 1, 2, 3.0), came=1.0, over=4.0, again=9.0, left=(1,)),
    SiteFate(SiteFault(1, "torn", 0, 2), came=12.0, over=12.0, again=13.0),
)
PASSED = Evidence("replay", True, range(48), 48, 12)


def test_a_campaign_passes_with_the_bits_of_its_replay_and_every_sample_once(tmp_path: Path) -> None:
    ran = SitesRun(tmp_path, 60.0, 0, FATES)
    found = judge(ran, PASSED, seconds_without=30.0, minutes=2.0)
    assert found.passed and (found.lost, found.doubled, found.handled) == (0, 0, 2)
    assert [(row.kind, row.without, row.again) for row in found.rows] == [("kill", 1, 5.0), ("torn", 0, 1.0)]


@pytest.mark.parametrize(
    ("change", "evidence", "problem"),
    [
        ({}, {"same_end": False}, "the end state differs from that of a replay of the run's own merges"),
        ({}, {"same_end": False, "law": "undisturbed"}, "the end state differs from that of the run without faults"),
        ({}, {"same_end": None, "error": "merge 3 is in no log"}, "merge 3 is in no log"),
        ({}, {"samples": range(47)}, "samples: 1 are in no merge, 0 in more than one merge"),
        ({}, {"samples": [*range(48), 5]}, "samples: 0 are in no merge, 1 in more than one merge"),
        ({}, {"samples": range(49)}, "samples: 0 are in no merge, 1 in more than one merge or beyond the run's 48"),
        ({"by_hand": 1}, {}, "commands of sites ended 1 times in a way that no fault explains"),
        ({"fates": (FATES[0], replace(FATES[1], again=None))}, {}, r"fault 1 \(torn at site 0\): not all sites trained again"),
        ({"fates": (FATES[0], SiteFate(FATES[1].fault))}, {}, "was never injected"),
        ({"seconds": 100.0}, {}, "both runs together took 2.17 min, above the allowed 2 min"),
    ],
)
def test_what_a_campaign_across_sites_does_not_pass_with(
    change: dict[str, object], evidence: dict[str, object], problem: str, tmp_path: Path
) -> None:
    ran = replace(SitesRun(tmp_path, 60.0, 0, FATES), **change)
    found = judge(ran, replace(PASSED, **evidence), seconds_without=30.0, minutes=2.0)
    assert not found.passed
    with pytest.raises(AssertionError, match=problem):
        assert not found.problems, "; ".join(found.problems)
