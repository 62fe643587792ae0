"""Authenticated connections between the processes that lead a run's sites, one between any two present sites. A site connects to
all sites with lower numbers, and retries while they are absent. Both ends of a connection prove that they know the run's key
(`fleet.secure.session`), and each frame carries a MAC and a counter, with or without encryption (`fleet.secure.tls`). Threads
send and receive while the rank computes. Messages on one connection arrive complete and in order. If a connection breaks, the
caller must send lost messages again.
"""

import contextlib
import hashlib
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.session import (
    GREETING_BYTES,
    PROOF_BYTES,
    REFUSED,
    REPLY_BYTES,
    ClientHandshake,
    Opener,
    Sealer,
    ServerHandshake,
    TooLong,
)
from megalith.fleet.secure.store_server import is_loopback, listen
from megalith.fleet.secure.tls import Connection, Tls

PIECE_BYTES = 1 << 20  # of a message in one frame
READ_BYTES = 1 << 18
MAX_MESSAGE_BYTES = 1 << 40
PROOF_SECONDS = 5.0  # that one end of a new connection may take to prove itself
AGAIN_SECONDS = 0.25  # between attempts to connect
CUT_SECONDS = 20  # without an acknowledgement, after which a connection counts as broken
AT_ONCE = 64  # connections that have not proved themselves yet; a further one is closed
RESUMED = 1 << 63  # added to a length: the message goes on behind so many bytes that the other end has
_HELLO = struct.Struct(">I8sQ32s")  # the number of a site, the name of this start of its ranks, and the `_Part` that it has
_LENGTH = struct.Struct(">Q")

Address = tuple[str, int]


class PeerGone(RuntimeError):  # noqa: N818  # it says what happened
    """Too few other sites answer. When this site is started again, it can continue from its newest checkpoint or from the other
    sites' merged weights."""

    exit_code = ExitCode.LOST


class News(NamedTuple):
    """A message from a site, or the news that the site connected (`message` None). `start`: random name of the current start of
    that site's ranks."""

    site: int
    start: bytes
    message: bytes | None


class _Part(NamedTuple):
    """The part of an interrupted message that arrived before the connection broke, including the message's length field."""

    data: bytes = b""
    digest: bytes = bytes(32)

    @classmethod
    def of(cls, data: bytes) -> "_Part":
        return cls(data, hashlib.sha256(data).digest()) if len(data) > _LENGTH.size else cls()


@dataclass
class _Peer:
    """Another site that is connected. `has`: the number of bytes of an interrupted message that the other site has received, and
    their digest."""

    site: int
    start: bytes
    connection: Connection
    sealer: Sealer
    opener: Opener
    has: tuple[int, bytes]
    out: "queue.SimpleQueue[bytes | None]" = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    broken: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0
    """Bytes of messages that were not passed to TCP yet."""
    beside: int = 0
    """Bytes by which `waiting` may exceed the limit of all connections."""


class Peers:
    """The connections of the leading rank of site `own` to the other sites of a run with `count` sites."""

    def __init__(
        self,
        own: int,
        count: int,
        key: Key,
        *,
        address_of: Callable[[int], Address | None],
        host: str = "127.0.0.1",
        port: int = 0,
        most_waiting: int = 1 << 40,
        tls: Tls | None = None,
    ) -> None:
        """Listen at `host`, on a free port if `port` is 0. `address_of` returns a site's address; None while it is not known.
        `most_waiting`: a connection is closed if more bytes than this wait to be sent. `tls`: settings for encryption; None: no
        encryption. Raises OSError if this process cannot listen at `host`."""
        self.own, self.count, self.start = own, count, secrets.token_bytes(8)
        self._key, self._address_of, self._most_waiting = key, address_of, most_waiting
        self._tls = tls
        self._troubles: dict[int, str] = {}
        self._peers: dict[int, _Peer] = {}
        self._parts: dict[int, _Part] = {}
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self.sent = 0
        """Bytes of messages that were passed to TCP, over all connections."""
        self._turned_away = 0
        self._server = listen(host, port, elsewhere=not is_loopback(host)) if own < count - 1 else None
        self.address: Address = (host, self._server.getsockname()[1] if self._server else 0)

    def open(self) -> None:
        """Begin to accept connections and to connect to the other sites. `next` returns their messages."""
        if self._server is not None:
            self._begin(self._accept, "accept")
        for site in range(self.own):
            self._begin(self._keep_connected, str(site), site)

    def _begin(self, work: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name=f"sites-{name}", daemon=True)
        thread.start()
        return thread

    @property
    def turned_away(self) -> int:
        """Number of incoming connections that were refused: without proof of the key, above the limit AT_ONCE, or from an
        unexpected site."""
        return self._turned_away

    def connected(self, site: int) -> bool:
        """True while this site is connected to `site`."""
        return site in self._peers

    def trouble(self, site: int) -> str:
        """Return the reason why this site is not connected to `site`, as text for the user."""
        return self._troubles.get(site, "it has not connected")

    def send(self, message: bytes, to: int | None = None, *, beside: bool = False) -> None:
        """Queue a message to one site, or to all other sites, for sending; it is dropped for sites that are not connected. `beside`:
        the connection may have as many more bytes waiting from now on."""
        slow = list[_Peer]()
        with self._changed:
            for site, peer in self._peers.items():
                if to not in (None, site):
                    continue
                peer.beside += beside * len(message)
                if peer.waiting and peer.waiting + len(message) > self._most_waiting + peer.beside:
                    slow.append(peer)
                else:
                    peer.waiting += len(message)
                    peer.out.put(message)
        for peer in slow:
            self._lose(peer)

    def next(self, seconds: float) -> News | None:
        """Return the next message or new connection of any site; None if there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._news.get(timeout=seconds) if seconds > 0 else self._news.get_nowait()
        return None

    def close(self, *, seconds: float) -> bool:
        """Close all connections after the sites have read all messages; return True if they do so within `seconds`. May be called
        again."""
        end = time.monotonic() + seconds
        self._closed.set()
        if self._server is not None:
            _cut(self._server)  # closing alone does not wake the thread that waits for connections
            self._server.close()
        with self._changed:
            peers = list(self._peers.values())
        for peer in peers:
            peer.out.put(None)
        threads = [thread for peer in peers for thread in peer.threads]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # --- one connection ---

    def _take(
        self, site: int, start: bytes, has: tuple[int, bytes], connection: Connection, sealer: Sealer, opener: Opener
    ) -> _Peer:
        connection.settimeout(None)
        peer = _Peer(site, start, connection, sealer, opener, has)
        with self._changed:
            before, self._peers[site] = self._peers.get(site), peer
            self._news.put(News(site, start, None))
            # With the lock: a thread that finds the peer can wait for its threads.
            peer.threads += [
                self._begin(self._send_all, f"to-{site}", peer),
                self._begin(self._receive_all, f"from-{site}", peer),
            ]
        if before is not None:
            self._lose(before)
        return peer

    def _send_all(self, peer: _Peer) -> None:
        while (message := peer.out.get()) is not None:
            data, waiting = _rest(peer, _LENGTH.pack(len(message)) + message), len(message)
            try:
                for at in range(0, len(data), PIECE_BYTES):
                    frame = peer.sealer.seal(data[at : at + PIECE_BYTES])
                    peer.connection.sendall(frame)
                    left = min(waiting, len(data) - at - PIECE_BYTES) if at + PIECE_BYTES < len(data) else 0
                    with self._changed:
                        self.sent += len(frame)
                        peer.waiting -= waiting - left
                    waiting = left
            except OSError:
                self._lose(peer)
                return
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_WR)

    def _receive_all(self, peer: _Peer) -> None:
        came, data, open_ = bytearray(), b"", True  # a first message may have come together with the hello
        with contextlib.suppress(OSError, TooLong):
            while open_:
                for payload in peer.opener.feed(data):
                    came += payload
                if peer.opener.dropped:  # a frame was altered or injected
                    break
                self._deliver(peer, came)
                data = peer.connection.recv(READ_BYTES)
                open_ = bool(data)
        if len(came) > len(self._parts.get(peer.site, _Part()).data):
            self._parts[peer.site] = _Part.of(bytes(came))
        self._lose(peer)

    def _deliver(self, peer: _Peer, came: bytearray) -> None:
        while len(came) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(came)
            part = self._parts.get(peer.site, _Part())
            if part.data and length == RESUMED | len(part.data):
                came[: _LENGTH.size] = self._parts.pop(peer.site).data
                continue
            if length > MAX_MESSAGE_BYTES:
                raise TooLong(f"the length field of a message is {length} bytes, which is too large")
            end = _LENGTH.size + length
            if len(came) < end:
                return
            self._news.put(News(peer.site, peer.start, bytes(came[_LENGTH.size : end])))
            if (
                part.data and came[: min(end, len(part.data))] == part.data
            ):  # the interrupted message arrived complete; others may come before it
                self._parts.pop(peer.site)
            del came[:end]

    def _hello(self, peer: _Peer | None, site: int) -> bytes:
        """Close the earlier connection `peer` to `site` and wait until its messages are read; then return the first message of a
        new connection."""
        if peer is not None:
            self._lose(peer)
            for thread in peer.threads[1:]:  # the one that receives
                thread.join(PROOF_SECONDS / 2)
        part = self._parts.get(site, _Part())
        return _HELLO.pack(self.own, self.start, len(part.data), part.digest)

    def _lose(self, peer: _Peer) -> None:
        with self._changed:
            if self._peers.get(peer.site) is peer:
                del self._peers[peer.site]
        peer.out.put(None)
        _cut(peer.connection)
        peer.connection.close()
        peer.broken.set()

    # --- meeting ---

    def _keep_connected(self, site: int) -> None:
        last = None
        while not self._closed.is_set():
            if (peer := self._connect(site, self._hello(last, site))) is not None:
                peer.broken.wait()
            last = peer
            self._closed.wait(AGAIN_SECONDS)

    def _connect(self, site: int, hello: bytes) -> _Peer | None:
        """Connect to a site. If the process at the site's address does not prove the key within PROOF_SECONDS, record the reason
        and return None."""
        connection: Connection | None = None
        timer: threading.Timer | None = None
        where, trouble = "", "the process that listens at this address has another key"
        try:
            if (address := self._address_of(site)) is None:
                raise ValueError(
                    "the site has not started in this run's folder. Sites with other run folders, or on other machines, need "
                    "sites.addresses"
                )
            where = f"{address[0]}:{address[1]}: "
            plain = connection = socket.create_connection(address, timeout=PROOF_SECONDS)
            timer = _cut_later(plain)
            _prepare(plain)
            connection = plain if self._tls is None else self._tls.connect(plain, address[0])
            handshake = ClientHandshake(self._key, _exactly(connection, GREETING_BYTES))
            connection.sendall(handshake.proof)
            first = _exactly(connection, 1)
            ends = None if first == REFUSED else handshake.finish(first + _exactly(connection, REPLY_BYTES - 1))
            if ends is not None:
                connection.sendall(ends[0].seal(hello))
                number, start, *has = _HELLO.unpack(_first(connection, ends[1]))
                if number == site:
                    timer.cancel()
                    return self._take(site, start, (has[0], has[1]), connection, *ends)
                trouble = f"site {number} listens at this address"
        except OSError as error:
            trouble = error.strerror or str(error)
        except (EOFError, ValueError, struct.error) as error:
            trouble = str(error)
        finally:
            if timer is not None:
                timer.cancel()
        self._troubles[site] = f"{where}{trouble}"
        if connection is not None:
            connection.close()
        return None

    def _accept(self) -> None:
        assert self._server is not None
        places = threading.BoundedSemaphore(AT_ONCE)
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or too many open files, which strangers may have caused
                self._closed.wait(AGAIN_SECONDS)
                continue
            if places.acquire(blocking=False):
                self._begin(self._judge, "judge", connection, places)
            else:
                self._turn_away(connection)

    def _judge(self, plain: socket.socket, places: threading.BoundedSemaphore) -> None:
        timer = _cut_later(plain)
        try:
            _prepare(plain)
            plain.settimeout(PROOF_SECONDS)
            connection = plain if self._tls is None else self._tls.accept(plain)
            handshake = ServerHandshake(self._key)
            connection.sendall(handshake.greeting)
            reply, ends = handshake.answer(_exactly(connection, PROOF_BYTES))
            connection.sendall(reply)
            if ends is None:
                raise ValueError("another key")
            opener, sealer = ends
            number, start, *has = _HELLO.unpack(_first(connection, opener))
            if not self.own < number < self.count:
                raise ValueError(f"site {number} does not connect to site {self.own}, or does not exist")
            connection.sendall(sealer.seal(self._hello(self._peers.get(number), number)))
        except (OSError, EOFError, ValueError, struct.error):
            self._turn_away(plain)
        else:
            timer.cancel()
            self._take(number, start, (has[0], has[1]), connection, sealer, opener)
        finally:
            timer.cancel()
            places.release()

    def _turn_away(self, connection: socket.socket) -> None:
        connection.close()
        with self._changed:
            self._turned_away += 1


def _rest(peer: _Peer, data: bytes) -> bytes:
    size, digest = peer.has
    if not _LENGTH.size < size < len(data) or hashlib.sha256(data[:size]).digest() != digest:
        return data
    peer.has = (0, b"")
    return _LENGTH.pack(RESUMED | size) + data[size:]


def _prepare(connection: socket.socket) -> None:
    """Set the TCP options that detect a dead link. Without these options, a site that was cut off would seem to be connected for
    hours."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {"KEEPIDLE": CUT_SECONDS // 2, "KEEPINTVL": CUT_SECONDS // 4, "KEEPCNT": 2, "USER_TIMEOUT": 1000 * CUT_SECONDS}
    for name, value in limits.items():
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _cut_later(connection: socket.socket) -> threading.Timer:
    """Start a timer that closes a connection after PROOF_SECONDS, unless the timer is cancelled. The timer limits the whole
    proof; a socket's timeout would limit only each read."""
    timer = threading.Timer(PROOF_SECONDS, _cut, (connection,))
    timer.daemon = True
    timer.start()
    return timer


def _cut(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _first(connection: Connection, opener: Opener) -> bytes:
    while True:
        data = connection.recv(READ_BYTES)
        if not data:
            raise EOFError("the other end has closed the connection")
        for payload in opener.feed(data):
            return payload
        if opener.dropped:
            raise ValueError("an altered frame")


def _exactly(connection: Connection, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("the other end has closed the connection")
        data += more
    return data
