"""Records for sites that join and get the merged weights from the decider: on the decider, which sites join; on a joining site, its request
and the weights that it has received."""

from collections.abc import Collection

from megalith.train.sites.messages import FragmentValues, Hello, JoinReply, MergeRecord, Ready


class Joining:
    """One site's record of joining sites."""

    def __init__(self, fragments: int) -> None:
        """`fragments`: the number of fragments of the model."""
        self._fragments = fragments
        self.asks: Hello | Ready | None = None
        """This site's newest request or announcement to the decider about joining."""
        self.asking: set[int] = set()
        """The sites that ask this site for the weights."""
        self.ready: set[int] = set()
        """The sites that have the weights of all merges so far, and can train."""
        self.known: dict[int, tuple[str, ...]] = {}
        """For each site that has asked, marks of merges that its log has."""
        self._record: MergeRecord | None = None
        self._told: JoinReply | None = None
        self._held: dict[int, FragmentValues] = {}

    def forget(self, site: int) -> None:
        """Forget a site, because it was restarted."""
        self.asking.discard(site)
        self.ready.discard(site)

    def clear(self) -> None:
        """Forget all sites, because a new line of merges begins."""
        self.asking.clear()
        self.ready.clear()

    def take(self, members: Collection[int]) -> list[int]:
        """Return the sites that ask for the weights and are not among `members`, and forget their requests."""
        found = sorted(self.asking - set(members))
        self.asking -= set(found)
        return found

    def note(self, message: MergeRecord | JoinReply | FragmentValues) -> None:
        """Keep a message of the decider's reply to this joining site."""
        match message:
            case MergeRecord():
                self._record = message
            case JoinReply():
                self._told = message
                self._held.clear()
            case FragmentValues():
                self._held[message.fragment] = message

    @property
    def join_reply(self) -> JoinReply | None:
        """The decider's reply to this site; None until the weights of all fragments have arrived."""
        return self._told if len(self._held) == self._fragments else None

    def fragment_values(self, fragment: int) -> FragmentValues:
        """Return the received weights of a fragment, and forget them."""
        self._told = None
        return self._held.pop(fragment)

    def take_record(self) -> MergeRecord | None:
        """Return the record of the merges that this site lacks, as the decider sent it, and forget it."""
        found, self._record = self._record, None
        return found
