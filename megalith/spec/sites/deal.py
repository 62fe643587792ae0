"""The samples that each site reads in each step: a pure function of the run file and of the recorded merges. No torch. If no site
leaves, site i of M reads the i-th part of each step's batch. When a site leaves, its samples that are not part of any merge are
returned. Returned samples are assigned to the present sites before new samples are, so that no sample is lost or counted twice. A
site reads its whole part in every step, from as many returned ranges as it takes, while samples of the same phase remain.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalith.spec.phases import Phases
from megalith.spec.sites.late import Backlog, Taken
from megalith.spec.sites.table import part_of_batch

RULE = 2
"""The number of the rule by which samples are divided once a site has left; merges are recorded with it. Versions before rule 2 gave a site
one range a step."""


class Share(NamedTuple):
    """Samples that one site reads in one step: `size` consecutive samples from number `first` on, all in one phase of the data."""

    first: int
    size: int


class Portion(NamedTuple):
    """All samples that one site reads in one step, all in one phase of the data. There are several shares if the site reads returned
    samples."""

    shares: tuple[Share, ...]

    @property
    def first(self) -> int:
        """The number of the first sample."""
        return self.shares[0].first

    @property
    def size(self) -> int:
        """The number of samples."""
        return sum(share.size for share in self.shares)

    @property
    def numbers(self) -> list[int]:
        """The numbers of all samples, in the order in which they are read."""
        return [number for first, size in self.shares for number in range(first, first + size)]


@dataclass
class Deal:
    """State of the assignment of a run's samples to sites. `count`: number of sites among which a step's batch is divided."""

    count: int
    members: dict[int, int]
    """The sites that train -> the number of finished steps when each of them joined."""
    next: int = 0
    """The first sample that was never assigned."""
    returned: list[Share] = field(default_factory=list)
    """Returned shares that are not yet assigned to another site, in the order of their samples."""
    open: dict[int, list[tuple[int, Share]]] = field(default_factory=dict)
    """Shares of each site that are not part of a merge yet, each with the number of steps that are finished once the share is
    trained."""
    shares: tuple[int, ...] = ()
    """Relative sizes of the sites' parts of a step's batch (`SitesSpec.shares`); empty: the parts are equal."""
    counted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each fragment in flight, the weight of each site in the fragment's merge."""
    backlog: Backlog | None = None
    """Weight differences that were sent but not merged; None if merges are synchronous."""

    @classmethod
    def first(cls, count: int, shares: Sequence[int] = (), backlog: Backlog | None = None) -> "Deal":
        """State at the beginning of a run, with all sites present."""
        return cls(count, dict.fromkeys(range(count), 0), shares=tuple(shares), backlog=backlog)

    @property
    def dealt(self) -> int:
        """Number of samples that sites have read or are reading, minus the returned ones."""
        return self.next - sum(share.size for share in self.returned)

    @property
    def merged(self) -> int:
        """Number of samples that the merged weights were trained on."""
        return self.dealt - sum(share.size for shares in self.open.values() for _, share in shares)

    def count_in(self, fragment: int) -> tuple[int, ...]:
        """Return the weight of each site in the mean of a fragment's differences."""
        return self.counted.get(fragment, self.shares or (1,) * self.count)

    def left(self, total: int) -> int:
        """Number of the run's `total` samples that are not assigned yet."""
        return max(0, total - self.next) + sum(share.size for share in self.returned)

    def deal(self, step: int, phases: Phases, total: int) -> dict[int, Portion]:
        """Assign the samples of the step that comes after `step` steps: each training site gets a portion, in the order of site
        numbers, while samples of the run's `total` remain."""
        found = {}
        for site in sorted(self.members):
            if not self.left(total):
                break
            found[site] = portion = self._portion(site, phases, total)
            self.open.setdefault(site, []).extend((step + 1, share) for share in portion.shares)
            if self.backlog is not None:
                self.backlog.note(site, portion.size)
        return found

    def send(self, fragment: int, step: int) -> None:
        """Record that all training sites send their weight differences of a fragment after `step` steps."""
        self.counted[fragment] = self.count_in(fragment)
        if self.backlog is not None:
            self.backlog.send(fragment, step, self.due(step))

    def waiting(self, fragment: int) -> dict[int, tuple[int, ...]]:
        """Return for each site the steps after which it sent differences of a fragment that are not merged yet; empty if merges
        are synchronous."""
        return {} if self.backlog is None else self.backlog.waiting(fragment)

    def taken(self, fragment: int, takes: Sequence[tuple[int, int]]) -> tuple[Taken, ...]:
        """Return a fragment's differences with their weights in the mean of a merge. `takes`: site and step of each
        difference."""
        if self.backlog is not None:
            return self.backlog.taken(fragment, takes)
        counted = self.count_in(fragment)
        return tuple(Taken(site, sent, counted[site]) for site, sent in takes)

    def _portion(self, site: int, phases: Phases, total: int) -> Portion:
        """Return the next samples of one phase: returned ones first, then new ones, up to the site's part of the phase's batch."""
        phase = phases.at(self.returned[0].first if self.returned else self.next)
        end = min((each.first for each in phases.all if each.first > phase.first), default=sys.maxsize)
        missing, found = part_of_batch(phase.global_batch, site, self.count, self.shares), list[Share]()
        while missing and (share := self._take(missing, end, total)).size:
            missing -= share.size
            found.append(share)
        return Portion(tuple(found))

    def _take(self, most: int, end: int, total: int) -> Share:
        """Return up to `most` consecutive samples before sample `end`: returned ones if there are any, else new ones of the run's `total`.
        Returned ones may lie beyond `total`, if the run was resumed with fewer steps."""
        if not self.returned:
            taken = max(0, min(most, end - self.next, total - self.next))
            self.next += taken
            return Share(self.next - taken, taken)
        first, size = self.returned[0]
        taken = max(0, min(size, most, end - first))
        self.returned[:1] = [Share(first + taken, size - taken)] if taken < size else []
        return Share(first, taken)

    def merge(
        self,
        *,
        sent: int,
        step: int,
        merged: Collection[int],
        left: Collection[int],
        joined: Collection[int],
        fragment: int = 0,
        steps: Sequence[int] = (),
    ) -> dict[int, int]:
        """Record a merge after `step` steps, of the differences of a fragment that the sites `merged` sent after `sent` steps. If
        merges are asynchronous, `steps` has for each merged site the step of its newest merged difference. The sites `left` stop
        training and return their shares; the sites `joined` train after this merge. Return the number of samples that each site has
        returned."""
        newest = dict(zip(merged, steps or [sent] * len(merged), strict=True))
        if self.backlog is not None:
            self.backlog.merge(fragment, newest, left)
        for site, last in newest.items():
            self.open[site] = [one for one in self.open.get(site, []) if one[0] > last]
        given = {site: [share for _, share in self.open.pop(site, [])] for site in left}
        self.returned = sorted([*self.returned, *(share for shares in given.values() for share in shares)])
        self.members = {site: since for site, since in self.members.items() if site not in given} | dict.fromkeys(joined, step)
        return {site: sum(share.size for share in shares) for site, shares in given.items()}

    def due(self, sent: int) -> set[int]:
        """Return the sites that send differences after `sent` steps: those that joined earlier and so have trained a step."""
        return {site for site, since in self.members.items() if since < sent}

    def record(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "count": self.count,
            "members": {str(site): since for site, since in self.members.items()},
            "next": self.next,
            "returned": [list(share) for share in self.returned],
            "open": {str(site): [[after, *share] for after, share in shares] for site, shares in self.open.items() if shares},
            "counted": {str(fragment): list(shares) for fragment, shares in self.counted.items()},
        } | (
            ({"shares": list(self.shares)} if self.shares else {})
            | ({} if self.backlog is None else {"backlog": self.backlog.record()})
        )

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Deal":
        """Return the state from its `record`."""
        return cls(
            record["count"],
            {int(site): since for site, since in record["members"].items()},
            record["next"],
            [Share(*share) for share in record["returned"]],
            {int(site): [(after, Share(*share)) for after, *share in shares] for site, shares in record["open"].items()},
            tuple(record.get("shares", ())),
            {int(fragment): tuple(shares) for fragment, shares in record.get("counted", {}).items()},
            Backlog.of(record["backlog"]) if "backlog" in record else None,
        )
