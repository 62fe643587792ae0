"""Sites that join a line of merges with the others' weights: the decider's record of them, and the weights that a joining site has
received."""

from collections.abc import Collection

from megalith.train.sites.messages import FragmentValues, Hello, JoinReply, Ready


class Joining:
    """One site's record of the sites that join."""

    def __init__(self, fragments: int) -> None:
        """`fragments`: of the model."""
        self._fragments = fragments
        self.asks: Hello | Ready | None = None
        """This site's request to the decider for the weights."""
        self.asking: set[int] = set()
        """Sites that ask this one for the weights."""
        self.ready: set[int] = set()
        """Sites that have all merges so far, and can train."""
        self._told: JoinReply | None = None
        self._held: dict[int, FragmentValues] = {}

    def forget(self, site: int) -> None:
        """Forget a site that was started again."""
        self.asking.discard(site)
        self.ready.discard(site)

    def clear(self) -> None:
        """Forget all sites: this one decides in a new line."""
        self.asking.clear()
        self.ready.clear()

    def take(self, members: Collection[int]) -> list[int]:
        """Return the sites that ask for the weights, each once; of `members`, only those that have left."""
        found = sorted(self.asking - set(members))
        self.asking -= set(found)
        return found

    def note(self, message: JoinReply | FragmentValues) -> None:
        """Keep a message with weights from the decider."""
        if isinstance(message, JoinReply):
            self._told = message
            self._held.clear()
        else:
            self._held[message.fragment] = message

    @property
    def join_reply(self) -> JoinReply | None:
        """The decider's reply to this site, once the weights of all fragments have arrived; None before."""
        return self._told if len(self._held) == self._fragments else None

    def fragment_values(self, fragment: int) -> FragmentValues:
        """Return the received weights of a fragment, and forget them."""
        self._told = None
        return self._held.pop(fragment)
