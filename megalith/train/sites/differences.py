"""The differences of fragments that a site's leading rank holds: its own, and those received from other sites."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from megalith.spec.sites import usual_name
from megalith.train.sites.messages import Difference, Verdict

SAME = "All sites must run the same version and run file"


class OutOfStepError(RuntimeError):
    """Another site sent a message that is not due, because the sites run different programs or run files."""


class Differences:
    """Differences that were received or sent, and may still be merged. Each line of merges has its own."""

    def __init__(self, site: int, *, kept: int = 1, late: int = 0, named: Callable[[int], str] = usual_name) -> None:
        """`kept`: how many of this site's differences of each fragment are kept in case they must be sent again. `late`: how many of a
        site's differences of a fragment may miss a merge that is due after them. `named`: returns the name of a site."""
        self._named = named
        self._site, self._late = site, late
        self._there: dict[tuple[str, int, int], dict[int, Difference]] = {}  # by line, fragment and step
        self._own = defaultdict[int, deque[Difference]](lambda: deque(maxlen=kept))  # the newest of each fragment
        self._merged: dict[int, int] = {}  # for each fragment, the step of the newest that are merged

    def note(self, site: int, difference: Difference) -> None:
        """Keep a difference that a site has sent."""
        self.there(difference.line, difference.fragment, difference.step)[site] = difference

    def there(self, line: str, fragment: int, step: int) -> dict[int, Difference]:
        """Return the differences of a fragment that have arrived, by site."""
        return self._there.setdefault((line, fragment, step), {})

    def send(self, difference: Difference, line: str) -> Difference:
        """Return this site's difference in the form to send in a line, and keep it."""
        sent = replace(difference, line=line)
        self._own[sent.fragment].append(sent)
        self.note(self._site, sent)
        return sent

    @property
    def own(self) -> Iterable[Difference]:
        """This site's newest differences of each fragment, oldest first, to send again if a broken connection has lost them."""
        return [one for each in self._own.values() for one in each]

    def enter(self, line: str) -> None:
        """Forget the differences of all other lines."""
        self._there = {key: there for key, there in self._there.items() if key[0] == line}

    def under_way(self) -> list[Difference]:
        """Return this site's differences that are not merged yet, and forget all other differences."""
        found = [one for one in self.own if one.step > self._merged.get(one.fragment, -1)]
        self._own.clear()
        return found

    def take(
        self, verdict: Verdict, line: str, *, bytes_each: int, waiting: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> list[Difference]:
        """Return the differences that a verdict merges, in the order of the sites, and forget them. `waiting`: as in `Verdict.takes`.
        Raises OutOfStepError for a message of other than `bytes_each` bytes."""
        takes = verdict.takes(waiting)
        found = [self.there(line, verdict.fragment, sent)[site] for site, sent in takes]
        for (site, _), one in zip(takes, found, strict=True):
            if len(one.encoded) != bytes_each:
                raise OutOfStepError(
                    f"{self._named(site)} sent fragment {one.fragment} of step {one.step} in {len(one.encoded)} bytes, and "
                    f"{self._named(self._site)} expects {bytes_each}. {SAME}"
                )
        own = verdict.newest.get(self._site, -1) if self._late else verdict.sent
        self._merged[verdict.fragment] = max(own, self._merged.get(verdict.fragment, -1))
        mine = [key for key in self._there if key[:2] == (line, verdict.fragment) and key[2] <= verdict.sent]
        for key in sorted(mine)[: len(mine) - self._late]:
            del self._there[key]
        return found
