"""The judgement of a campaign across sites, from the merges that both runs have recorded.

The weights at the end of a run are a function of its run file and of its recorded merges, bit for bit. If the faults changed no
merge, the run must end with the bits of the run without faults; otherwise, with the bits of a replay of its own merges. Whether
or not a merge changed, each sample must be in exactly one merge.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from megalith.rehearse.site_campaign import SiteFate, SitesRun
from megalith.rehearse.site_faults import KINDS

ComparedWith = Literal["undisturbed", "replay"]


@dataclass(frozen=True)
class Evidence:
    """The end of the run with faults, compared with another run. `law`: the run with which it was compared; `same_end`: True if
    the bits are equal, None if `error` prevented the comparison. `samples`: the samples in the merges of the run with faults;
    `total`: the number of the run's samples."""

    law: ComparedWith
    same_end: bool | None
    samples: Iterable[int]
    total: int
    merges: int
    error: str = ""


@dataclass(frozen=True)
class SiteRow:
    """The results of all faults of one kind. `without`: the number of faults during which the other sites continued without a
    site; `again`: seconds from the end of a fault until all sites trained again, in the median."""

    kind: str
    title: str
    injected: int
    handled: int
    without: int
    again: float | None


@dataclass(frozen=True)
class SitesJudgement:
    """All results of a campaign across sites. `problems` is empty if the campaign was passed. `lost`: the number of samples that
    are in no merge; `doubled`: those in several merges, or beyond the run's last sample."""

    rows: tuple[SiteRow, ...]
    problems: tuple[str, ...]
    injected: int
    handled: int
    merges: int
    law: ComparedWith
    same_end: bool | None
    lost: int
    doubled: int
    seconds: float
    seconds_without: float

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs, as a JSON object."""
        return {"ok": self.passed} | asdict(self)


def judge(faulted: SitesRun, evidence: Evidence, *, seconds_without: float, minutes: float | None = None) -> SitesJudgement:
    """Judge the run with faults. `seconds_without`: the duration of the run without faults. `minutes`: a limit for the duration
    of both runs together; None: no limit."""
    times = Counter(evidence.samples)
    lost = sum(sample not in times for sample in range(evidence.total))
    doubled = sum(count > 1 or sample >= evidence.total for sample, count in times.items())
    rows = [_row(kind, [fate for fate in faulted.fates if fate.fault.kind == kind]) for kind in KINDS]
    return SitesJudgement(
        rows=tuple(row for row in rows if row.injected),
        problems=(
            *_problems(faulted),
            *_differences(evidence, lost, doubled),
            *_late(faulted.seconds + seconds_without, minutes),
        ),
        injected=len(faulted.fates),
        handled=sum(fate.handled for fate in faulted.fates),
        merges=evidence.merges,
        law=evidence.law,
        same_end=evidence.same_end,
        lost=lost,
        doubled=doubled,
        seconds=faulted.seconds,
        seconds_without=seconds_without,
    )


def _row(kind: str, fates: Sequence[SiteFate]) -> SiteRow:
    again = [fate.again - fate.over for fate in fates if fate.again is not None and fate.over is not None]
    handled, without = sum(fate.handled for fate in fates), sum(bool(fate.left) for fate in fates)
    return SiteRow(kind, KINDS[kind].title, len(fates), handled, without, median(again) if again else None)


def _problems(ran: SitesRun) -> list[str]:
    found = []
    if ran.by_hand:
        found.append(f"commands of sites ended {ran.by_hand} times in a way that no fault explains")
    for fate in ran.fates:
        one = fate.fault
        if fate.came is None:
            found.append(f"fault {one.number} ({one.kind} at site {one.site}) was never injected: the run ended before")
        elif not fate.handled:
            found.append(f"fault {one.number} ({one.kind} at site {one.site}): not all sites trained again")
    return found


def _differences(evidence: Evidence, lost: int, doubled: int) -> list[str]:
    against = "the run without faults" if evidence.law == "undisturbed" else "a replay of the run's own merges"
    found = [evidence.error] if evidence.error else []
    if evidence.same_end is False:
        found.append(f"the end state differs from that of {against}")
    if lost or doubled:
        found.append(
            f"samples: {lost} are in no merge, {doubled} in more than one merge or beyond the run's {evidence.total} samples"
        )
    return found


def _late(seconds: float, minutes: float | None) -> list[str]:
    late = minutes is not None and seconds > 60 * minutes
    return [f"both runs together took {seconds / 60:.2f} min, above the allowed {minutes:g} min"] if late else []
