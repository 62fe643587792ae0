"""Asynchronous merges: the weight differences that sites have sent and that are not merged yet, as a pure function of the run
file and the recorded merges. No torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any, NamedTuple


class Due(NamedTuple):
    """An unmerged weight difference that a site sent after `sent` steps; `samples` is the number of samples that the site trained
    on since its previous difference."""

    sent: int
    samples: int


class Taken(NamedTuple):
    """A merged weight difference: its site, the number of steps after which it was sent, and its weight in the mean. `age`:
    number of newer differences of this fragment that the site has sent."""

    site: int
    sent: int
    weight: int
    age: int = 0


@dataclass
class Backlog:
    """The unmerged weight differences of each fragment and site, oldest first, and the number of samples that each site has read
    since it sent its newest difference."""

    due: dict[int, dict[int, list[Due]]] = field(default_factory=dict)
    read: dict[int, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def of_fragments(cls, count: int) -> "Backlog":
        """The state at a run's beginning. `count`: number of the model's fragments."""
        return cls({number: {} for number in range(count)}, {number: {} for number in range(count)})

    def note(self, site: int, samples: int) -> None:
        """Record that a site reads this number of samples."""
        for each in self.read.values():
            each[site] = each.get(site, 0) + samples

    def send(self, fragment: int, sent: int, sites: Collection[int]) -> None:
        """Record that these sites send their differences of a fragment after `sent` steps. A repeated call for the same step has
        no effect."""
        due = self.due[fragment]
        for site in sites:
            if not due.get(site) or due[site][-1].sent != sent:
                due.setdefault(site, []).append(Due(sent, self.read[fragment].pop(site, 0)))

    def waiting(self, fragment: int) -> dict[int, tuple[int, ...]]:
        """Return for each site the steps after which it sent its unmerged differences of a fragment."""
        return {site: tuple(one.sent for one in each) for site, each in self.due[fragment].items() if each}

    def taken(self, fragment: int, takes: Sequence[tuple[int, int]]) -> tuple[Taken, ...]:
        """Return the differences with their weights, which are proportional to samples / (1 + age) (Zhang et al. 2016,
        arXiv:1511.05950) and are whole numbers without a common divisor. `takes`: site and step of each difference."""
        found = list[tuple[int, int, int, int]]()
        for site, sent in takes:
            steps = [one.sent for one in self.due[fragment][site]]
            place = steps.index(sent)
            found.append((site, sent, max(1, self.due[fragment][site][place].samples), len(steps) - 1 - place))
        common = lcm(*(1 + age for *_, age in found))
        weights = [samples * common // (1 + age) for *_, samples, age in found]
        least = gcd(*weights)
        return tuple(Taken(site, sent, weight // least, age) for (site, sent, _, age), weight in zip(found, weights, strict=True))

    def merge(self, fragment: int, newest: Mapping[int, int], left: Collection[int]) -> None:
        """Remove the merged differences, which are each site's differences up to the step in `newest`. Also remove all data of
        the sites `left`."""
        due = self.due[fragment]
        for site, sent in newest.items():
            due[site] = [one for one in due[site] if one.sent > sent]
        for site in left:
            for each in (*self.due.values(), *self.read.values()):
                each.pop(site, None)

    def record(self) -> dict[str, Any]:
        """Return the state as JSON."""
        due = {
            str(number): {str(site): [list(one) for one in each] for site, each in sites.items()}
            for number, sites in self.due.items()
        }
        return {
            "due": due,
            "read": {str(number): {str(site): samples for site, samples in each.items()} for number, each in self.read.items()},
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Backlog":
        """Return the state from its `record`."""
        due = {
            int(number): {int(site): [Due(*one) for one in each] for site, each in sites.items()}
            for number, sites in record["due"].items()
        }
        read = {int(number): {int(site): samples for site, samples in each.items()} for number, each in record["read"].items()}
        return cls(due, read)
