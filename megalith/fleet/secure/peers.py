"""Authenticated connections between the processes that lead a run's sites: every site has one to every other.

They meet once, at a start of the ranks. A port is open only until all have met. Both ends of a connection prove that they know the run's
key (`fleet.secure.session`), and each frame carries a MAC and a counter. Nothing is encrypted. Threads send and receive, so that a rank
computes meanwhile. Messages of one site arrive in the order in which they were sent.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from megalith.fleet.secure.store_server import listen

PIECE_BYTES = 1 << 20  # of a message in one frame
READ_BYTES = 1 << 18
PROOF_SECONDS = 5.0  # that one end of a new connection may take to prove itself
AGAIN_SECONDS = 0.05  # between attempts to connect
AT_ONCE = 64  # connections that have not proved themselves yet; a further one is closed
_HELLO = struct.Struct(">I32s")  # the number of the site that connects, and the name of this start of the ranks
_LENGTH = struct.Struct(">Q")


class PeerGone(RuntimeError):  # noqa: N818  # it says what happened
    """Another site does not answer, or its connection broke. The run continues from its newest checkpoint."""

    exit_code = ExitCode.LOST


@dataclass
class _Peer:
    """One other site, once it is connected."""

    connection: socket.socket
    sealer: Sealer
    opener: Opener
    out: "queue.SimpleQueue[bytes | None]" = field(default_factory=queue.SimpleQueue)
    arrived: deque[bytes] = field(default_factory=deque)
    lost: str = ""


class Peers:
    """The other sites of a run, as the leader of site `own` of `count` reaches them. `start`: 32 bytes, a name for this start of all
    ranks, so that nobody meets those of an earlier one."""

    def __init__(self, own: int, count: int, key: Key, *, start: bytes = bytes(32), host: str = "127.0.0.1") -> None:
        """Listen at `host`, on a free port. Raises OSError where that is impossible."""
        self.own, self.count = own, count
        self._key, self._hello = key, _HELLO.pack(own, start)
        self._start = start
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._server = listen(host, 0) if own < count - 1 else None  # a site connects to those before it
        self.address = (host, self._server.getsockname()[1] if self._server else 0)
        self.sent = 0
        """Bytes given to TCP since all sites met, those of all connections together."""
        self.sending: list[threading.Thread] = []
        self.turned_away = 0
        """Connections that did not prove the key."""

    def meet(self, addresses: Sequence[tuple[str, int]], *, seconds: float) -> None:
        """Connect to all other sites, by the `address` of each. Raises PeerGone for those that are not there within `seconds`."""
        end = time.monotonic() + seconds
        accepting = threading.Thread(target=self._accept, args=(end,), name="sites-accept", daemon=True)
        if self._server is not None:
            accepting.start()
        try:
            for number in range(self.own):
                self._connect(number, addresses[number], end)
            with self._changed:
                self._changed.wait_for(lambda: len(self._peers) == self.count - 1, timeout=max(0.0, end - time.monotonic()))
                missing = sorted(set(range(self.count)) - set(self._peers) - {self.own})
        finally:
            if self._server is not None:
                self._server.close()
                accepting.join()
        if missing:
            self.close()
            raise PeerGone(f"site {self.own} has not met site {', '.join(map(str, missing))} within {seconds:g} s")
        for number, peer in self._peers.items():
            peer.connection.settimeout(None)
            threading.Thread(target=self._receive_all, args=(peer,), name=f"site-{number}", daemon=True).start()
            self.sending.append(threading.Thread(target=self._send_all, args=(peer,), name=f"site-{number}", daemon=True))
            self.sending[-1].start()

    def send(self, message: bytes) -> None:
        """Send a message to all other sites. Returns at once."""
        for peer in self._peers.values():
            peer.out.put(message)

    def receive(self, number: int, *, seconds: float) -> bytes:
        """Wait for the next message of a site. Raises PeerGone when none comes within `seconds`, or the connection broke."""
        peer = self._peers[number]
        with self._changed:
            self._changed.wait_for(lambda: peer.arrived or peer.lost, timeout=seconds)
            if peer.arrived:
                return peer.arrived.popleft()
        why = peer.lost or f"wait timeout after {round(1000 * seconds)}ms"
        raise PeerGone(f"site {number} is away: {why}")

    def close(self) -> None:
        """End all connections, once everything has been sent."""
        for peer in self._peers.values():
            peer.out.put(None)

    # --- threads ---

    def _send_all(self, peer: _Peer) -> None:
        while (message := peer.out.get()) is not None:
            data = _LENGTH.pack(len(message)) + message
            try:
                for at in range(0, len(data), PIECE_BYTES):
                    frame = peer.sealer.seal(data[at : at + PIECE_BYTES])
                    peer.connection.sendall(frame)
                    with self._changed:
                        self.sent += len(frame)
            except OSError as error:
                self._lose(peer, str(error))
                return
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_WR)

    def _receive_all(self, peer: _Peer) -> None:
        came, data, open_ = bytearray(), b"", True  # a first message may have come together with the hello
        try:
            while open_:
                for payload in peer.opener.feed(data):
                    came += payload
                if peer.opener.dropped:
                    raise ConnectionError("connection closed: a frame was altered or injected")
                self._deliver(peer, came)
                data = peer.connection.recv(READ_BYTES)
                open_ = bool(data)
            self._lose(peer, "connection closed by peer")
        except (OSError, TooLong) as error:
            self._lose(peer, str(error))

    def _deliver(self, peer: _Peer, came: bytearray) -> None:
        """Take the whole messages out of what came."""
        while len(came) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(came)
            end = _LENGTH.size + length
            if len(came) < end:
                return
            message = bytes(came[_LENGTH.size : end])
            del came[:end]
            with self._changed:
                peer.arrived.append(message)
                self._changed.notify_all()

    def _lose(self, peer: _Peer, why: str) -> None:
        peer.connection.close()
        with self._changed:
            peer.lost = peer.lost or why
            self._changed.notify_all()

    # --- meeting ---

    def _connect(self, number: int, address: tuple[str, int], end: float) -> None:
        """Connect to a site. One that is not there yet, or whose places strangers take, is tried again."""
        why = "nobody answers"
        while (left := end - time.monotonic()) > 0:
            connection = None
            try:
                connection = socket.create_connection(address, timeout=min(left, PROOF_SECONDS))
                _prepare(connection)
                handshake = ClientHandshake(self._key, _exactly(connection, GREETING_BYTES))
                connection.sendall(handshake.proof)
                first = _exactly(connection, 1)
                ends = None if first == REFUSED else handshake.finish(first + _exactly(connection, REPLY_BYTES - 1))
                if ends is not None:
                    connection.sendall(ends[0].seal(self._hello))
                    self._take(number, connection, *ends)
                    return
                why = "it knows another key"
            except (OSError, EOFError, ValueError) as error:
                why = str(error)
            if connection is not None:
                connection.close()
            time.sleep(AGAIN_SECONDS)
        raise PeerGone(f"site {number} at {address[0]}, port {address[1]}, cannot be reached: {why}")

    def _accept(self, end: float) -> None:
        """Let sites in until all are there, or the port is closed."""
        assert self._server is not None
        places = threading.BoundedSemaphore(AT_ONCE)
        self._server.settimeout(AGAIN_SECONDS)
        while time.monotonic() < end and len(self._peers) < self.count - 1:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:  # closed: the others are missing
                return
            if places.acquire(blocking=False):
                threading.Thread(target=self._judge, args=(connection, places), name="sites-judge", daemon=True).start()
            else:
                self._turn_away(connection)

    def _judge(self, connection: socket.socket, places: threading.BoundedSemaphore) -> None:
        """Let a connection in if it proves the key within PROOF_SECONDS, and is of a site of this start."""
        timer = threading.Timer(PROOF_SECONDS, _cut, (connection,))  # each byte may come in time, and the whole not
        timer.daemon = True
        timer.start()
        try:
            _prepare(connection)
            connection.settimeout(PROOF_SECONDS)
            handshake = ServerHandshake(self._key)
            connection.sendall(handshake.greeting)
            reply, ends = handshake.answer(_exactly(connection, PROOF_BYTES))
            connection.sendall(reply)
            if ends is None:
                raise ValueError("another key")
            opener, sealer = ends
            number, start = _HELLO.unpack(_first(connection, opener))
            if not self.own < number < self.count or start != self._start or number in self._peers:
                raise ValueError("no site that is awaited")
        except (OSError, EOFError, ValueError, struct.error):
            self._turn_away(connection)
        else:
            self._take(number, connection, sealer, opener)
        finally:
            timer.cancel()
            places.release()

    def _turn_away(self, connection: socket.socket) -> None:
        connection.close()
        with self._changed:
            self.turned_away += 1

    def _take(self, number: int, connection: socket.socket, sealer: Sealer, opener: Opener) -> None:
        with self._changed:
            self._peers[number] = _Peer(connection, sealer, opener)
            self._changed.notify_all()

    @property
    def met(self) -> Mapping[int, object]:
        """The sites that are connected."""
        return self._peers


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _first(connection: socket.socket, opener: Opener) -> bytes:
    """The first message of a proved connection: a hello, which is one frame and nothing behind it."""
    while True:
        data = connection.recv(READ_BYTES)
        if not data:
            raise EOFError("closed")
        for payload in opener.feed(data):
            return payload
        if opener.dropped:
            raise ValueError("an altered frame")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("closed")
        data += more
    return data
