"""A merge that waits for its verdict."""

from collections.abc import Collection, Mapping, Set
from typing import NamedTuple


class Pending(NamedTuple):
    """A merge that waits for its verdict. `members`: as in a `Deal`. `mark`: the digest of all merges before it. `got`: the sites among
    those due whose differences came. `waited`: seconds so far."""

    number: int
    fragment: int
    sent: int
    step: int
    members: Mapping[int, int]
    mark: str = ""
    got: Set[int] = frozenset()
    waited: float = 0.0

    @property
    def due(self) -> set[int]:
        """The sites whose differences it merges, if they come."""
        return {site for site, since in self.members.items() if since < self.sent}


def are(sites: Collection[int]) -> str:
    """Return the beginning of a sentence about sites."""
    return f"site{'s' * (len(sites) > 1)} {', '.join(map(str, sorted(sites)))} {'are' if len(sites) > 1 else 'is'}"
