"""Reads the recorded merges of a run, and repeats them with a council that takes its verdicts from the record.

A run without faults is bitwise reproducible without a record. If sites came and went, only the verdicts (which sites were merged, left, or
joined) depended on clocks, so the same run file with the same verdicts computes the same bits.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalith.checkpoint.folder import find, read_manifest
from megalith.events import Event, Merge, RunStarted, of_kind, read
from megalith.fleet.secure.peers import PeerGone
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec, folder_of
from megalith.spec.sites.deal import RULE, Deal
from megalith.spec.sites.terms import DECIDE_BITS, DECIDE_NONE
from megalith.train.sites.council import Council
from megalith.train.sites.differences import SAME, OutOfStepError
from megalith.train.sites.messages import Verdict
from megalith.train.sites.pace import Pace
from megalith.train.sites.pending import Pending


class RecordError(ValueError):
    """The recorded merges of a run cannot be repeated."""


def recorded(folders: Sequence[Path]) -> dict[int, Verdict]:
    """Return the verdicts of all merges up to the newest checkpoint of a run, by the merges' numbers. `folders`: the run's folder or that
    of one of its sites, and further sites' folders, which are needed only if its log lacks merges. Raises RecordError if the merges
    cannot be repeated or if there are none, and FileNotFoundError if the first folder has no checkpoint."""
    logs = [place for folder in folders for place in _sites_in(folder) if place.is_dir()]
    events = [event for place in logs for event in read(place)]
    merges = list(of_kind(events, Merge))
    _refuse_changes(events, merges)
    last = read_manifest(find(folders[0])).meta.get("sites")
    if last is None:
        raise RecordError(f"{folders[0]} is not a run across sites. Without sites, the run file alone reproduces the same bits")
    if not last["merges"]:
        raise RecordError(
            f"the newest checkpoint of {folders[0]} was saved before the run's first merge, so there is no merge to repeat. Resume the run "
            "until it has saved a checkpoint after a merge"
        )
    return _chained(merges, last["merges"], last["mark"], named=", ".join(map(str, folders)))


def _sites_in(folder: Path) -> list[Path]:
    return [folder_of(folder, site) for site in range(64)]


def _refuse_changes(events: Iterable[Event], merges: Sequence[Merge]) -> None:
    for table in DECIDE_BITS:
        if len({_text(event.spec, table) for event in of_kind(events, RunStarted)}) > 1:
            raise RecordError(
                f"[{table}] was changed when the run was resumed, but a replay uses the same run file from beginning to end"
            )
    for key, values in (("sites.count", {one.count for one in merges}), ("train", {one.total for one in merges})):
        if len(values) > 1:
            raise RecordError(
                f"{key} was changed when the run was resumed, but a replay uses the same run file from beginning to end"
            )

    changed = min((one.number for one in merges if one.left or one.joined), default=sys.maxsize)
    if others := sorted({one.rule for one in merges if one.number >= changed and one.rule != RULE}):
        raise RecordError(
            "sites left or joined while a version of Megalith trained that divides returned samples in another way "
            f"(rule {others[0]}, here {RULE}), so this version would read other samples. Use the version that trained the run"
        )


def _text(spec: Mapping[str, Any], table: str) -> str:
    found = spec.get(table)
    each = (spec.get("sites") or {}).get("each") or ()
    if table == "plan" and any(one.get("plan") for one in each):  # that of one site; `sites.each` has all of them
        return ""
    if table != "sites" or not found:
        return repr({key: found[key] for key in sorted(found)} if found else found)
    set_ = [{key: one[key] for key in sorted(one) if key != "name" and one[key] is not None} for one in each]
    return repr({key: found[key] for key in sorted(found) if key not in (*DECIDE_NONE, "each")} | {"each": [*filter(None, set_)]})


def _chained(merges: Sequence[Merge], count: int, mark: str, *, named: str) -> dict[int, Verdict]:
    """Return the verdicts of the `count` consecutive merges whose digest is `mark`."""
    found = {verdict.number: verdict for _, verdict in chain(merges, count, mark)}
    lost = count - 1 - len(found)
    if lost >= 0:
        known = any(one.number == lost for one in merges)
        reason = f"does not follow any merge in the logs of {named}" if known else f"is in no log of {named}"
        raise RecordError(f"merge {lost} {reason}. Also name the folders of the other sites")
    return found


def chain(merges: Iterable[Merge], count: int, mark: str) -> Iterator[tuple[Merge, Verdict]]:
    """Yield the `count` consecutive merges whose digest is `mark`, newest first, each with its verdict, up to one that `merges` lack. Logs
    also contain undone merges, which are no part of the run because it resumed from an earlier checkpoint."""
    known = dict[int, dict[str, Merge]]()
    for one in merges:
        known.setdefault(one.number, {})[one.mark] = one
    for number in reversed(range(count)):
        event = known.get(number, {}).get(mark)
        if event is None:
            return
        verdict = _verdict_of(event)
        before = known.get(number - 1, {}) if number else [""]
        fitting = [one for one in before if verdict.mark(one) == mark]
        if not fitting:
            return
        yield event, verdict
        mark = fitting[0]


def _verdict_of(event: Merge) -> Verdict:
    newest = dict(zip(event.merged, event.taken, strict=False))  # the last of each site
    sets = [tuple(sites) for sites in (newest or event.merged, event.left, event.joined)]
    steps = tuple(newest.values())
    return Verdict(event.number, event.fragment, event.sent, event.step, *sets, count=event.count, steps=steps)


def merged_samples(spec: RunSpec, made: Iterable[Verdict]) -> Iterator[int]:
    """Yield the numbers of the samples whose training recorded merges contain, computed only from the run file and the record. `spec`: a
    result of `at_site`; `made`: the verdicts in order."""
    assert spec.sites is not None
    phases, step = Phases.of(spec), 0
    total = phases.after(0, spec.train.steps)
    deal = Deal.first(spec.sites.count, spec.sites.shares)
    for one in made:
        while step < one.step:
            deal.deal(step, phases, total)
            step += 1
        for site, sent in one.newest.items():
            for after, share in deal.open.get(site, []):
                if after <= sent:
                    yield from range(share.first, share.first + share.size)
        deal.merge(sent=one.sent, step=one.step, merged=one.merged, left=one.left, joined=one.joined, steps=one.steps)


class ReplayedCouncil(Council):
    """A council that takes its verdicts from a record, and waits for all sites."""

    def __init__(self, spec: SitesSpec, *arguments: Any, record: Mapping[int, Verdict], patience: float, **named: Any) -> None:
        """`record`: the verdicts, by the number of the merge. Other arguments are those of `Council`. No site may be left out, so a merge
        waits `patience` seconds for each."""
        super().__init__(spec, *arguments, patience=patience, **named)
        self.pace, self._record = Pace(patience, patience), record

    def quorum(self, sites: Collection[int]) -> bool:
        """True if `sites` are all of the run's sites."""
        return len(set(sites)) == self.spec.count

    def _may_stand(self, merge: Pending) -> bool:
        """False: this site never waits at a merge for a new line, because only the sites that the record names can continue."""
        return False

    def _judged(self, merge: Pending) -> Verdict | None:
        """Return the recorded verdict, once the weight differences that it merges have arrived. The last verdict stops all sites."""
        number, fragment, sent, step = merge[:4]
        verdict = self._record.get(number)
        if verdict is None or (verdict.fragment, verdict.sent, verdict.step) != (fragment, sent, step):
            raise OutOfStepError(
                f"merge {number} (of fragment {fragment}, sent at step {sent}, at step {step}) is not recorded. {SAME}"
            )
        takes = verdict.takes(merge.waiting)
        if missing := {site for site, taken in takes if site not in self._there(fragment, taken)}:
            if merge.waited >= self._patience:
                raise PeerGone(
                    f"the difference of {self.spec.named(min(missing))} did not arrive: waited {merge.waited:.0f} s at step {step}"
                )
            return None
        return replace(verdict, stop=number + 1 == len(self._record))
