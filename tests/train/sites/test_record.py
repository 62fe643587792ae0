"""Merges are found in logs, and replayed exactly."""

import errno
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import disk
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.folder import FOLDER
from megalith.events import EventLog, Merge, RunStarted, read_kind
from megalith.fleet.secure.peers import PeerGone
from megalith.spec.sites import SitesSpec
from megalith.spec.sites.deal import RULE
from megalith.train.sites import messages
from megalith.train.sites.differences import OutOfStepError
from megalith.train.sites.handover import in_thread, known_marks, merges_missed, records
from megalith.train.sites.meeting import Beginning
from megalith.train.sites.messages import JoinReply, MergeRecord, Verdict
from megalith.train.sites.record import RecordError, ReplayedCouncil, _chained, _refuse_changes, recorded
from tests.patience import PATIENCE
from tests.specs import tiny_run
from tests.train.sites.test_council import MEMBERS, Hub, Wire, _difference, _listen

VERDICTS = [
    Verdict(0, 0, 4, 4, (0, 1, 2), count=3),
    Verdict(1, 0, 8, 8, (0, 2), left=(1,), count=3),
    Verdict(2, 0, 12, 12, (0, 2), joined=(1,), count=3),
]


def _events(verdicts: list[Verdict], mark: str = "") -> list[Merge]:
    """Return the merge events of these verdicts. `mark`: the mark of the merge before."""
    found = []
    for one in verdicts:
        mark = one.mark(mark)
        numbers = dict.fromkeys(("bytes_sent", "bytes_received", "waited", "seconds", "norm", "spread"), 0)
        sets = {"merged": [*one.merged], "left": [*one.left], "joined": [*one.joined]}
        told = {"step": one.step, "sent": one.sent, "fragment": one.fragment, "number": one.number, "count": one.count}
        found.append(Merge(**numbers, **sets, **told, sites=3, losses=[], mark=mark, rule=RULE))
    return found


def test_the_chain_is_found_among_merges_that_were_undone() -> None:
    """After the first merge the run was resumed from a checkpoint before the second."""
    made = _events(VERDICTS)
    undone = _events([replace(VERDICTS[1], merged=(0,), left=(1, 2)), replace(VERDICTS[2], merged=(0,), joined=())], made[0].mark)
    for order in (made + undone, undone + made[::-1]):
        assert _chained(order, 3, made[2].mark, named="runs/one") == dict(enumerate(VERDICTS))
    assert _chained(made, 0, "", named="runs/one") == {}


@pytest.mark.parametrize("lost", range(3))
def test_a_merge_that_is_in_no_log_is_named(lost: int) -> None:
    """The log of a site that was away lacks the merges of the others."""
    made = _events(VERDICTS)
    mark = made[2].mark
    del made[lost]
    with pytest.raises(RecordError, match=f"merge {lost} is in no log|merge {lost + 1} does not follow"):
        _chained(made, 3, mark, named="runs/one")


def test_an_altered_event_is_found() -> None:
    made = _events(VERDICTS)
    altered = [replace(made[0], merged=[0, 1]), *made[1:]]
    with pytest.raises(RecordError, match="merge 0 does not follow"):
        _chained(altered, 3, made[2].mark, named="runs/one")


def _written(folder: Path, *events: Merge) -> Path:
    log = EventLog(folder)
    for event in events:
        log.write(event)
    return folder


def _record(folder: Path, newest: Sequence[Merge], known: Collection[str] = ()) -> MergeRecord:
    """Return the record of all merges that the decider with this folder sends."""
    made = _events(VERDICTS)
    sent = records(folder, JoinReply("ab", 12, 3, made[2].mark, (), {}), newest, {1: known})[1]
    found = messages.unpack(sent.pack())
    assert found == sent and isinstance(found, MergeRecord)
    return found


def test_a_site_that_was_away_gets_the_merges_that_its_log_lacks(tmp_path: Path) -> None:
    """Its own merge after the first was undone. The decider's newest merge is not in a log yet."""
    made = _events(VERDICTS)
    undone = _events([replace(VERDICTS[1], merged=(1,), left=(0, 2))], made[0].mark)
    here = _written(tmp_path / "here", *(replace(event, bytes_sent=7, waited=1.5) for event in made[:2]))
    away = _written(tmp_path / "away", made[0], *undone)
    assert [one["number"] for one in _record(here, made[2:]).merges] == [0, 1, 2]
    record = _record(here, made[2:], known_marks(away))
    assert [one["number"] for one in record.merges] == [1, 2], "no more than it lacks"
    missed = merges_missed(away, record)
    assert [(one.number, one.mark, one.time) for one in missed] == [(one.number, one.mark, one.time) for one in made[1:]]
    assert [(one.bytes_sent, one.waited) for one in missed] == [(0, 0.0)] * 2, "it did not send them, nor wait"
    _written(away, *missed)
    assert _chained(read_kind(away, Merge), 3, made[2].mark, named="away") == dict(enumerate(VERDICTS))
    assert merges_missed(away, record) == [] and known_marks(away) == (made[2].mark, made[1].mark)


def test_merges_before_one_that_the_decider_lacks_are_sent_too(tmp_path: Path) -> None:
    made = _events(VERDICTS)
    here = _written(tmp_path, made[0], made[2])
    assert [one["number"] for one in _record(here, ()).merges] == [0, 2]
    assert known_marks(here) == (made[0].mark,), "all later ones are asked for"


def test_a_log_that_is_away_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decider sends the merges that it still has in memory, and the site that was away leaves out what it may have."""
    made = _events(VERDICTS)
    folder = _written(tmp_path, *made[:2])

    def stale(path: Path) -> Iterator[str]:
        raise OSError(errno.ESTALE, "stale file handle", path)

    monkeypatch.setattr(disk, "lines", stale)
    record = _record(folder, made[2:])
    assert [one["number"] for one in record.merges] == [2]
    assert known_marks(folder) == () and merges_missed(folder, record) == []


def test_all_ranks_beat_while_a_thread_reads_the_log() -> None:
    beats, go = list[int](), threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 2:
            go.set()

    def work() -> str:
        assert go.wait(PATIENCE)
        return "read"

    assert in_thread(work, tell=lambda value, kind: value, beat=beat) == "read" and len(beats) >= 2
    assert in_thread(None, tell=lambda value, kind: True, beat=beat) is None


def test_sites_may_be_renamed_but_not_change_their_plans() -> None:
    def starts(*each: dict[str, Any] | None) -> list[RunStarted]:
        told = dict.fromkeys(("device", "peak_source", "flops_convention"), "") | dict.fromkeys(
            ("world", "resumed_step", "parameters"), 0
        )
        specs = [tiny_run(sites={"each": [one, {}]} if one is not None else {}).model_dump() for one in each]
        return [RunStarted(spec=spec, versions={}, peak_flops=None, flops_per_token=0.0, **told) for spec in specs]

    _refuse_changes(starts({"name": "oslo"}, {"name": "bergen"}, None), [])
    with pytest.raises(RecordError, match="was changed"):
        _refuse_changes(starts({"name": "oslo"}, {"name": "oslo", "share": 2}), [])
    here, away = starts(None), starts(None)
    away[0].spec["sites"]["place"] = "host"
    _refuse_changes([*here, *away], [])


def test_a_record_of_another_rule_is_refused_where_samples_were_returned() -> None:
    made = _events(VERDICTS)
    _refuse_changes([], made)
    earlier = [replace(event, rule=1) for event in made]
    _refuse_changes([], [earlier[0], *made[1:]])  # all sites trained until then
    for merges in (earlier, [*made[:2], earlier[2]]):
        with pytest.raises(RecordError, match=r"in another way \(rule 1, here 2\)"):
            _refuse_changes([], merges)


def test_a_run_without_a_merge_is_refused(tmp_path: Path) -> None:
    Checkpointer(tmp_path / FOLDER).save(1, {"x": torch.ones(1)}, {"sites": {"merges": 0, "mark": ""}}, asynchronous=False)
    with pytest.raises(RecordError, match="was saved before the run's first merge"):
        recorded([tmp_path])


def _all(hub: Hub, **named: float) -> list[ReplayedCouncil]:
    spec, record = SitesSpec(count=3, grace=60.0), dict(enumerate(VERDICTS))
    times = {"patience": 0.3, "start": 0.4, "limit": 0.4} | named
    return [ReplayedCouncil(spec, site, Wire(hub, site, "first"), record=record, **times) for site in range(3)]


def _begun(hub: Hub) -> list[ReplayedCouncil]:
    councils = _all(hub)
    _listen(councils)
    assert [one.begin([], 1.0) for one in councils] == [Beginning(None)] * 3
    _listen(councils)
    return councils


def test_verdicts_are_those_of_the_record() -> None:
    """A site that left exists in the replay, but its difference is not merged."""
    councils = _begun(Hub())
    for wanted in VERDICTS:
        for one in councils:
            one.post(_difference(wanted.sent))
        _listen(councils)
        for one in councils:
            found = one.decide(wanted.number, 0, wanted.sent, wanted.step, members=MEMBERS)
            assert replace(found, line="", stop=False) == wanted and found.stop is (wanted.number == 2)
            assert len(one.differences(found, bytes_each=7)) == len(wanted.merged)


def test_a_difference_of_the_record_is_waited_for() -> None:
    councils = _begun(Hub())
    councils[0].post(_difference(4))
    with pytest.raises(PeerGone, match="the difference of site 1 did not arrive"):
        councils[0].decide(0, 0, 4, 4, members=MEMBERS)


def test_another_run_file_is_noticed() -> None:
    councils = _begun(Hub())
    for one in councils:
        one.post(_difference(3))
    with pytest.raises(OutOfStepError, match=r"sent at step 3, at step 3\) is not recorded"):
        councils[0].decide(0, 0, 3, 3, members=MEMBERS)


def test_nobody_begins_before_all_are_there() -> None:
    hub = Hub()
    councils = _all(hub)
    hub.cut([0, 1], [2])
    again = [
        ReplayedCouncil(one.spec, one.site, Wire(hub, one.site, "again"), record={}, patience=0.3, start=0.1, limit=0.2)
        for one in councils[:2]
    ]
    _listen(again)
    with pytest.raises(PeerGone, match="no quorum"):
        again[0].begin([], 1.0)
