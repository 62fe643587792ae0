"""The weight differences of fragments that a site's leading rank holds: its own, and those received from other sites."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from megalith.spec.sites import usual_name
from megalith.train.sites.messages import UNKNOWN, Difference, Verdict

SAME = "All sites must run the same version and run file"


class OutOfStepError(RuntimeError):
    """Another site sent an unexpected message, because the sites run different versions or run files."""


class UnequalWeightsError(RuntimeError):
    """Sites computed their weight differences from different merged weights, which should be equal on all sites."""


class Differences:
    """Weight differences that were received or sent, and may still be merged. Each line of merges has its own differences."""

    def __init__(self, site: int, *, kept: int = 1, late: int = 0, named: Callable[[int], str] = usual_name) -> None:
        """`kept`: for each fragment, how many of this site's weight differences are kept in case they must be sent again. `late`: for each
        fragment, how many differences of a site may miss a merge that is due after them. `named`: returns the name of a site."""
        self._named = named
        self._site, self._late = site, late
        self._there: dict[tuple[str, int, int], dict[int, Difference]] = {}  # by line, fragment and step
        self._own = defaultdict[int, deque[Difference]](lambda: deque(maxlen=kept))  # the newest of each fragment
        self._merged: dict[int, int] = {}  # for each fragment, the step of the newest that are merged

    def note(self, site: int, difference: Difference) -> None:
        """Keep a weight difference that a site has sent."""
        self.there(difference.line, difference.fragment, difference.step)[site] = difference

    def there(self, line: str, fragment: int, step: int) -> dict[int, Difference]:
        """Return the weight differences of a fragment, taken after step `step`, that have arrived, by site."""
        return self._there.setdefault((line, fragment, step), {})

    def send(self, difference: Difference, line: str) -> Difference:
        """Keep this site's weight difference, and return it in the form in which it is sent in the line of merges `line`."""
        sent = replace(difference, line=line)
        self._own[sent.fragment].append(sent)
        self.note(self._site, sent)
        return sent

    @property
    def own(self) -> Iterable[Difference]:
        """This site's newest weight differences of each fragment, oldest first. These differences are sent again if a broken connection may
        have lost them."""
        return [one for each in self._own.values() for one in each]

    def enter(self, line: str) -> None:
        """Forget the weight differences of all other lines of merges."""
        self._there = {key: there for key, there in self._there.items() if key[0] == line}

    def under_way(self) -> list[Difference]:
        """Return this site's weight differences that are not merged yet, and forget all of this site's differences."""
        found = [one for one in self.own if one.step > self._merged.get(one.fragment, -1)]
        self._own.clear()
        return found

    def take(
        self, verdict: Verdict, line: str, *, bytes_each: int, waiting: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> list[Difference]:
        """Return the weight differences that a verdict merges, in the order of the sites, and forget those that no later merge can
        contain. `waiting`: as in `Verdict.takes`. Raises OutOfStepError if a difference does not have `bytes_each` bytes, and
        UnequalWeightsError if sites computed their differences from different merged weights."""
        takes = verdict.takes(waiting)
        found = [self.there(line, verdict.fragment, sent)[site] for site, sent in takes]
        for (site, _), one in zip(takes, found, strict=True):
            if len(one.encoded) != bytes_each:
                raise OutOfStepError(
                    f"{self._named(site)} sent fragment {one.fragment} of step {one.step} in {len(one.encoded)} bytes, but "
                    f"{self._named(self._site)} expects {bytes_each} bytes. {SAME}"
                )
        for sent in sorted({sent for _, sent in takes}):
            self._compare_anchors(verdict, sent, {site: one for (site, at), one in zip(takes, found, strict=True) if at == sent})
        own = verdict.newest.get(self._site, -1) if self._late else verdict.sent
        self._merged[verdict.fragment] = max(own, self._merged.get(verdict.fragment, -1))
        mine = [key for key in self._there if key[:2] == (line, verdict.fragment) and key[2] <= verdict.sent]
        for key in sorted(mine)[: len(mine) - self._late]:
            del self._there[key]
        return found

    def _compare_anchors(self, verdict: Verdict, sent: int, taken: Mapping[int, Difference]) -> None:
        """Compare the merged weights from which sites computed the differences `taken` of step `sent`, and this site's own difference of
        that step. In one step all sites have made the same merges, so all have the same merged weights. Raises UnequalWeightsError."""
        own = [(self._site, one) for one in self._own[verdict.fragment] if one.step == sent]
        sites = defaultdict[int, list[int]](list)
        for site, one in sorted(dict([*own, *taken.items()]).items()):
            if one.anchor != UNKNOWN:
                sites[one.anchor].append(site)
        if len(sites) > 1:
            said = "; ".join(f"{anchor:016x} on {', '.join(map(self._named, held))}" for anchor, held in sites.items())
            raise UnequalWeightsError(
                f"at merge {verdict.number}, the merged weights of fragment {verdict.fragment} from which sites trained to step {sent} "
                f"differ: their digest is {said}. They were altered on a site after an earlier merge. All sites must begin from an earlier "
                "checkpoint; if this comes again, remove the checkpoints of the site that is wrong, which then gets the others' weights"
            )
