"""The connections between the leading ranks of sites, over any transport."""

from typing import Protocol

from megalith.fleet.secure.peers import News


class Wire(Protocol):
    """The interface of one site's connections to the other sites, which `fleet.secure.peers.Peers` implements."""

    def send(self, message: bytes, to: int | None = None, *, beside: bool = False) -> None:
        """Send a message to one site, or to all other connected sites, without waiting. `beside`: the message may be long, and leaves as
        much room as before for messages that wait."""
        ...

    def next(self, seconds: float) -> News | None:
        """Return the next message; None if none arrives within `seconds`."""
        ...

    def connected(self, site: int) -> bool:
        """True while this site is connected to site `site`."""
        ...

    def trouble(self, site: int) -> str:
        """Return a text that says why there is no connection to a site."""
        ...

    @property
    def turned_away(self) -> int:
        """The number of connections refused because they did not prove possession of the run's key."""
        ...

    def close(self, *, seconds: float) -> bool:
        """Close all connections, once all messages have been sent and read; return True if this succeeds within `seconds`. May be called
        again."""
        ...
