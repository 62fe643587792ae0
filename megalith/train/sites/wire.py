"""The connection of the rank that leads a site to the leading ranks of the others, over any transport."""

from typing import Protocol

from megalith.fleet.secure.peers import News


class Wire(Protocol):
    """The connections of one site to the others: `fleet.secure.peers.Peers`."""

    def send(self, message: bytes, to: int | None = None) -> None:
        """Send to a site, or to all others that are connected, without waiting."""
        ...

    def next(self, seconds: float) -> News | None:
        """Return the next message; None if none arrives within `seconds`."""
        ...

    def connected(self, site: int) -> bool:
        """True while there is a connection to a site."""
        ...

    def trouble(self, site: int) -> str:
        """Return why there is no connection to a site, in words."""
        ...

    @property
    def turned_away(self) -> int:
        """Connections that did not prove the run's key."""
        ...

    def close(self, *, seconds: float) -> bool:
        """End all connections, once everything has been sent and read; True if that is so within `seconds`. May be called again."""
        ...
