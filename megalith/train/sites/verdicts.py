"""The verdicts about merges that a site's leading rank holds: those that it received, and those that it made as the decider."""

from collections import deque
from collections.abc import Callable

from megalith.spec.sites import usual_name
from megalith.train.sites.differences import SAME, OutOfStepError
from megalith.train.sites.messages import Verdict
from megalith.train.sites.pending import Pending


class Verdicts:
    """Verdicts, by the line of merges and the number of the merge."""

    def __init__(self, *, kept: int, named: Callable[[int], str] = usual_name) -> None:
        """`kept`: how many of this site's own newest verdicts are kept, because a broken connection may have lost them. `named` returns the
        name of a site."""
        self._named = named
        self._there: dict[tuple[str, int], Verdict] = {}
        self.given: deque[Verdict] = deque(maxlen=kept)

    def note(self, verdict: Verdict) -> None:
        """Keep a received verdict."""
        self._there[verdict.line, verdict.number] = verdict

    def announce(self, verdict: Verdict) -> None:
        """Keep a verdict that this site made as the decider."""
        self.given.append(verdict)

    @property
    def full(self) -> bool:
        """True if the next verdict that this site makes will replace an earlier one."""
        return len(self.given) == self.given.maxlen

    def has_any(self, line: str) -> bool:
        """True if a verdict of the line of merges `line` has arrived."""
        return any(line == one for one, _ in self._there)

    def missed(self, line: str, number: int) -> bool:
        """True if a verdict about a later merge than number `number` has arrived in the line of merges `line`."""
        return any(line == one and later > number for one, later in self._there)

    def begin(self, line: str, number: int) -> None:
        """Forget all verdicts except those about merges of `line` from number `number` on."""
        self._there = {key: one for key, one in self._there.items() if key[0] == line and key[1] >= number}

    def take(self, merge: Pending, line: str, *, site: int, decider: int) -> Verdict | None:
        """Return the verdict about a merge and forget it; None if it has not arrived. Raises OutOfStepError if the verdict is about another
        merge than the one that is due at `site`."""
        verdict = self._there.pop((line, merge.number), None)
        if verdict is not None and (verdict.fragment, verdict.sent, verdict.step) != (merge.fragment, merge.sent, merge.step):
            raise OutOfStepError(
                f"{self._named(decider)} merges fragment {verdict.fragment} of step {verdict.sent} at step {verdict.step}, but "
                f"{self._named(site)} merges fragment {merge.fragment} of step {merge.sent} at step {merge.step}. {SAME}"
            )
        return verdict
