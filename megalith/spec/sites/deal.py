"""The samples that each site reads in each step: a pure function of the run file and of the merges that were recorded. No torch.

In an undisturbed run, site i of M reads the i-th part of each step's batch. A site that leaves returns those of its samples
that no merge contains. Returned samples are assigned first, to the sites that are present, so that no sample is lost or
counted twice.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalith.spec.phases import Phase, Phases
from megalith.spec.sites.late import Backlog, Taken
from megalith.spec.sites.table import part_of_batch


class Share(NamedTuple):
    """The samples that one site reads in one step: `size` of them, from number `first` on, all of one phase."""

    first: int
    size: int


@dataclass
class Deal:
    """The assignment of a run's samples so far. `count`: number of sites that divide a step's batch."""

    count: int
    members: dict[int, int]
    """The sites that train, and the number of finished steps when each joined."""
    next: int = 0
    """The first sample that was never assigned."""
    returned: list[Share] = field(default_factory=list)
    """Returned shares that are not assigned again yet, in order."""
    open: dict[int, list[tuple[int, Share]]] = field(default_factory=dict)
    """Shares of each site that no merge contains yet, each with the number of steps finished once the share is trained."""
    shares: tuple[int, ...] = ()
    """Relative shares of the sites in a step's batch, as in `SitesSpec`; empty: equal shares."""
    counted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each fragment in flight, the weight of each site in its merge: the site's share when its samples were assigned."""
    backlog: Backlog | None = None
    """The unmerged differences; None if merges are synchronous."""

    @classmethod
    def first(cls, count: int, shares: Sequence[int] = (), backlog: Backlog | None = None) -> "Deal":
        """The state at a run's beginning: all sites are present."""
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
        """Return the weight of each site in the merge of a fragment."""
        return self.counted.get(fragment, self.shares or (1,) * self.count)

    def left(self, total: int) -> int:
        """Number of samples, of the run's `total`, that are not assigned yet."""
        return max(0, total - self.next) + sum(share.size for share in self.returned)

    def deal(self, step: int, phases: Phases, total: int) -> dict[int, Share]:
        """Assign the samples of the step that comes after `step` steps: each training site gets a share, in the order of site
        numbers, while samples of the run's `total` remain."""
        found = {}
        for site in sorted(self.members):
            if not self.returned and self.next >= total:
                break
            found[site] = share = self._again(site, phases) if self.returned else self._new(site, phases, total)
            self.open.setdefault(site, []).append((step + 1, share))
            if self.backlog is not None:
                self.backlog.note(site, share.size)
        return found

    def send(self, fragment: int, step: int) -> None:
        """Record that all training sites take their differences of a fragment after `step` steps."""
        self.counted[fragment] = self.count_in(fragment)
        if self.backlog is not None:
            self.backlog.send(fragment, step, self.due(step))

    def waiting(self, fragment: int) -> dict[int, tuple[int, ...]]:
        """Return for each site the steps after which its unmerged differences of a fragment were taken; empty if merges are
        synchronous."""
        return {} if self.backlog is None else self.backlog.waiting(fragment)

    def taken(self, fragment: int, takes: Sequence[tuple[int, int]]) -> tuple[Taken, ...]:
        """Return differences of a fragment with their weights in a merge. `takes`: site and step of each difference."""
        if self.backlog is not None:
            return self.backlog.taken(fragment, takes)
        counted = self.count_in(fragment)
        return tuple(Taken(site, sent, counted[site]) for site, sent in takes)

    def _again(self, site: int, phases: Phases) -> Share:
        """Return the first returned share, or only as many of its samples as the site reads in a step."""
        share = self.returned.pop(0)
        size = min(share.size, self._most(site, phases.at(share.first)))
        if size < share.size:
            self.returned.insert(0, Share(share.first + size, share.size - size))
        return Share(share.first, size)

    def _most(self, site: int, phase: Phase) -> int:
        return part_of_batch(phase.global_batch, site, self.count, self.shares)

    def _new(self, site: int, phases: Phases, total: int) -> Share:
        """Return the next share of new samples. The share ends at the latest where a phase or the run ends."""
        phase = phases.at(self.next)
        ends = [total, *(each.first for each in phases.all if each.first > self.next)]
        size = min([self._most(site, phase), *(end - self.next for end in ends)])
        self.next += size
        return Share(self.next - size, size)

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
    ) -> None:
        """Record a merge, after `step` steps, of the differences of a fragment that the sites `merged` took after `sent` steps.
        If merges are asynchronous, `steps` has for each of these sites the step of its newest merged difference. The sites `left`
        no longer train and return their shares; the sites `joined` train from now on."""
        newest = dict(zip(merged, steps or [sent] * len(merged), strict=True))
        if self.backlog is not None:
            self.backlog.merge(fragment, newest, left)
        for site, last in newest.items():
            self.open[site] = [one for one in self.open.get(site, []) if one[0] > last]
        for site in left:
            self.returned += [share for _, share in self.open.pop(site, [])]
            self.members.pop(site, None)
        self.returned.sort()
        self.members |= dict.fromkeys(joined, step)

    def due(self, sent: int) -> set[int]:
        """Return the sites that take differences after `sent` steps: the sites that have trained at least one step by then."""
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
