"""The verdicts that the leader of a site has at hand: those that came, and those that it gave as the site that decides."""

from collections import deque
from collections.abc import Callable

from megalith.spec.sites import usual_name
from megalith.train.sites.differences import SAME, OutOfStepError
from megalith.train.sites.messages import Verdict
from megalith.train.sites.pending import Pending


class Verdicts:
    """Verdicts by line and number of the merge."""

    def __init__(self, *, kept: int, named: Callable[[int], str] = usual_name) -> None:
        """`kept`: how many of this site's own verdicts a broken connection may have lost. `named`: the name of a site."""
        self._named = named
        self._there: dict[tuple[str, int], Verdict] = {}
        self.given: deque[Verdict] = deque(maxlen=kept)

    def note(self, verdict: Verdict) -> None:
        """Keep a verdict that has come."""
        self._there[verdict.line, verdict.number] = verdict

    def announce(self, verdict: Verdict) -> None:
        """Keep a verdict of this site."""
        self.given.append(verdict)

    @property
    def full(self) -> bool:
        """True if the next verdict of this site takes the place of an earlier one."""
        return len(self.given) == self.given.maxlen

    def has_any(self, line: str) -> bool:
        """True if a verdict of a line has come."""
        return any(line == one for one, _ in self._there)

    def missed(self, line: str, number: int) -> bool:
        """True if later verdicts of a line have come than that of merge `number`."""
        return any(line == one and later > number for one, later in self._there)

    def begin(self, line: str, number: int) -> None:
        """Forget all verdicts but those of a line from merge `number` on."""
        self._there = {key: one for key, one in self._there.items() if key[0] == line and key[1] >= number}

    def take(self, merge: Pending, line: str, *, site: int, decider: int) -> Verdict | None:
        """Return and forget the verdict about a merge; None if it has not come. Raises OutOfStepError if it is about another merge than
        the one that is due at `site`."""
        verdict = self._there.pop((line, merge.number), None)
        if verdict is not None and (verdict.fragment, verdict.sent, verdict.step) != (merge.fragment, merge.sent, merge.step):
            raise OutOfStepError(
                f"{self._named(decider)} merges fragment {verdict.fragment} of step {verdict.sent} at step {verdict.step}, and "
                f"{self._named(site)} fragment {merge.fragment} of step {merge.sent} at step {merge.step}. {SAME}"
            )
        return verdict
