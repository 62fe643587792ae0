"""A slow link on one machine, without a kernel module: bandwidth, delay, lost packets and outages in user space.

With root permission, the link is a wire between two network namespaces with TUN devices: it carries IP packets, and the kernel's
TCP handles losses. Without root permission, the link is a relay on the loopback address, through which one site connects to
another. A relay carries streams, so a lost packet only delays the stream, as a retransmission would.
"""

import contextlib
import fcntl
import mmap
import os
import random
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megalith.machine import networks
from megalith.machine.networks import INTERFACE, Network

MTU = 9000
"""Maximum number of bytes in a packet. With smaller packets, a CPU would be busy all the time."""
QUEUE_SECONDS = 1.0
"""Maximum length of a wire's queue; if the queue is full, packets are dropped, and streams are not read."""
_TUN, _NO_HEADER, _SET_INTERFACE = 0x0001, 0x1000, 0x400454CA  # IFF_TUN, IFF_NO_PI, TUNSETIFF
_BEGINS = 0x02  # SYN, which has a number of its own in the stream
SEGMENT = 1460
"""Number of bytes in a simulated packet of a relayed stream; each such packet may be lost."""
REPEATED_SECONDS = 0.2
"""Delay of a stream after a lost packet, which is Linux's minimum time before a retransmission."""
_SHARED = struct.Struct("<BB6xd4Q")  # cut; times torn; loss; bytes that crossed in each direction; packets lost in each direction


@dataclass(frozen=True)
class Conditions:
    """Properties of a link. `megabits`: millions of bits per second in each direction; `milliseconds`: the round-trip time;
    `loss`: the fraction of packets that are lost at first; `seed`: the seed that determines which packets are lost."""

    megabits: float
    milliseconds: float
    loss: float = 0.0
    seed: int = 0


class Lane:
    """One direction of a wire. Data waits in a queue, is sent at the wire's rate, and arrives after half a round-trip time."""

    def __init__(self, conditions: Conditions) -> None:
        self._rate, self._delay = 1e6 * conditions.megabits / 8, conditions.milliseconds / 2000
        self._crossing = deque[tuple[float, bytes]]()
        self._free = 0.0
        """Time at which the last data in the queue will have been sent."""

    def backlog(self, now: float) -> float:
        """Return how many seconds data would wait in the queue if it were appended now."""
        return max(0.0, self._free - now)

    def put(self, data: bytes, now: float, *, late: float = 0.0) -> None:
        """Append data to the queue. `late`: additional seconds that the data waits before it is sent."""
        self._free = max(self._free, now) + late + len(data) / self._rate
        self._crossing.append((self._free + self._delay, data))

    def arrived(self, now: float) -> Iterator[bytes]:
        """Yield the data that has arrived by now, in order."""
        while self._crossing and self._crossing[0][0] <= now:
            yield self._crossing.popleft()[1]

    @property
    def next(self) -> float | None:
        """Return the time of the next arrival; None if no data is on its way."""
        return self._crossing[0][0] if self._crossing else None


class Wire:
    """Control of a wire that a separate process operates. `network`: the namespaces at the ends of a wire; None for a relay.
    `address`: the address of a relay; None for a wire between namespaces."""

    def __init__(
        self, network: Network | None = None, address: tuple[str, int] | None = None, *, conditions: Conditions | None = None
    ) -> None:
        self.network, self.address = network, address
        self._shared = mmap.mmap(-1, _SHARED.size)
        self.lose(conditions.loss if conditions is not None else 0.0)

    def cut(self, *, cut: bool) -> None:
        """Stop all traffic (`cut` True), or let it pass again (`cut` False)."""
        self._shared[0] = int(cut)

    @property
    def is_cut(self) -> bool:
        """True while nothing crosses."""
        return bool(self._shared[0])

    def tear(self) -> None:
        """Reset all connections through a relay. Data in transit is lost."""
        self._shared[1] = (self._shared[1] + 1) % 256

    @property
    def torn(self) -> int:
        """Number of calls of `tear`, modulo 256."""
        return self._shared[1]

    def lose(self, share: float) -> None:
        """Lose this fraction of packets after this call."""
        struct.pack_into("<d", self._shared, 8, share)

    @property
    def loss(self) -> float:
        """The fraction of packets that are lost."""
        return _SHARED.unpack_from(self._shared)[2]

    @property
    def crossed(self) -> tuple[int, int]:
        """The bytes of TCP payload that were sent from the first end to the second, and in the other direction, without headers
        and retransmissions."""
        return _SHARED.unpack_from(self._shared)[3:5]

    @property
    def lost(self) -> tuple[int, int]:
        """The number of packets lost in each direction: at random, because the wire was cut, or because the queue was full."""
        return _SHARED.unpack_from(self._shared)[5:7]

    def count(self, lane: int, *, crossed: int = 0, lost: int = 0) -> None:
        """Add to the counts of bytes sent and of packets lost in one direction."""
        for place, more in ((2 + lane, crossed), (4 + lane, lost)):
            at = 8 * place
            struct.pack_into("<Q", self._shared, at, struct.unpack_from("<Q", self._shared, at)[0] + more)


def missing() -> str | None:
    """Return the reason why a wire between namespaces cannot be made here; None if it can."""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun, and root, who alone may use it"
    return networks.missing()


@contextlib.contextmanager
def between(nodes: Sequence[str], conditions: Conditions) -> Iterator[Wire]:
    """Create two nodes in separate namespaces, joined by a wire, while the block runs. In each namespace the wire is the
    interface `networks.INTERFACE`. Raises CalledProcessError or OSError if this process may not make namespaces or interfaces."""
    with networks.apart(nodes) as network:
        ends = [_tun(network, node, network.address(number)) for number, node in enumerate(nodes)]
        wire = Wire(network, conditions=conditions)
        try:
            with _kept_up(lambda: _carry_packets(ends, wire, conditions)):
                yield wire
        finally:
            for end in ends:
                os.close(end)


@contextlib.contextmanager
def relay(port: int, conditions: Conditions, *, host: str = "127.0.0.1") -> Iterator[Wire]:
    """While the block runs, run a relay to a port on this machine, with the conditions of a slow link. The relay listens at
    `Wire.address`."""
    server = socket.create_server((host, 0))
    wire = Wire(address=server.getsockname()[:2], conditions=conditions)
    try:
        with _kept_up(lambda: _carry_streams(server, (host, port), wire, conditions)):
            yield wire
    finally:
        server.close()


@contextlib.contextmanager
def _kept_up(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a separate process while the block runs, because a thread would compete for Python's global lock."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _tun(network: Network, node: str, address: str) -> int:
    """Make a node's TUN interface, and return the file descriptor for its packets. A separate process enters the namespace and
    creates the interface."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def make() -> None:
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH14x", INTERFACE.encode(), _TUN | _NO_HEADER))
        socket.send_fds(theirs, [b"."], [file])

    process = network.start(node, make)
    with ours, theirs:
        if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            raise OSError(f"no TUN device can be made in the network of node {node}")
        (file,) = socket.recv_fds(ours, 1, 1)[1]
    network.set_up(node, address, mtu=MTU)
    return file


def _carry_packets(ends: Sequence[int], wire: Wire, conditions: Conditions) -> None:
    chance, lanes, streams = random.Random(conditions.seed), (Lane(conditions), Lane(conditions)), (_Streams(), _Streams())
    while True:
        select.select(ends, [], [], _until_next(lanes))
        now = time.monotonic()
        for number, lane in enumerate(lanes):
            for packet in _packets(ends[number]):
                if wire.is_cut or lane.backlog(now) > QUEUE_SECONDS or chance.random() < wire.loss:
                    wire.count(number, lost=1)
                else:
                    wire.count(number, crossed=streams[number].new_bytes(packet))
                    lane.put(packet, now)
            for packet in lane.arrived(now):
                with contextlib.suppress(OSError):  # the interface is down
                    os.write(ends[1 - number], packet)


def _packets(end: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while packet := os.read(end, MTU + 64):
            yield packet


class _Streams:
    """How far each TCP stream in one direction has come. Streams are identified by their ports."""

    def __init__(self) -> None:
        self._ends: dict[bytes, int] = {}

    def new_bytes(self, packet: bytes) -> int:
        """Return how many bytes of this packet's payload are sent for the first time; 0 for a packet that is not TCP."""
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return 0
        at = 4 * (packet[0] & 15)
        ports, (number,), begins = packet[at : at + 4], struct.unpack_from(">I", packet, at + 4), bool(packet[at + 13] & _BEGINS)
        size = len(packet) - at - 4 * (packet[at + 12] >> 4)
        if not begins and not size:
            return 0
        end = (number + begins + size) % (1 << 32)
        new = 0 if begins else (end - self._ends[ports]) % (1 << 32)
        if new >= 1 << 31:  # an older one
            return 0
        self._ends[ports] = end
        return new


def _until_next(lanes: Sequence[Lane]) -> float | None:
    times = [lane.next for lane in lanes if lane.next is not None]
    return max(0.0, min(times) - time.monotonic()) if times else None


class _Stream:
    """One connection through the relay: two sockets, and a lane for each direction."""

    def __init__(self, near: socket.socket, to: tuple[str, int], conditions: Conditions, chance: random.Random) -> None:
        self.sockets = near, socket.create_connection(to)
        self._chance = chance
        self.lanes = Lane(conditions), Lane(conditions)
        self._over = [False, False]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def readable(self, now: float) -> list[socket.socket]:
        pairs = zip(self.sockets, self.lanes, self._over, strict=True)
        return [one for one, lane, over in pairs if not over and lane.backlog(now) < QUEUE_SECONDS]

    def carry(self, ready: Sequence[object], wire: Wire, now: float) -> bool:
        """Read new data, and write data that has arrived; return False once the connection is over."""
        for number, (source, lane) in enumerate(zip(self.sockets, self.lanes, strict=True)):
            if source in ready:
                data = source.recv(1 << 14)
                self._over[number] = not data
                lost = sum(self._chance.random() < wire.loss for _ in range(0, len(data), SEGMENT)) if wire.loss else 0
                # No data is the end of the stream, which crosses like the rest.
                lane.put(data, now, late=REPEATED_SECONDS * bool(lost))
                wire.count(number, crossed=len(data), lost=lost)
            for data in lane.arrived(now):
                self.sockets[1 - number].sendall(data) if data else self.sockets[1 - number].shutdown(socket.SHUT_WR)
        return not all(self._over) or any(lane.next is not None for lane in self.lanes)

    def close(self, *, torn: bool = False) -> None:
        """Close both sockets. `torn`: reset the connection, so that neither end takes this for an orderly end."""
        for each in self.sockets:
            if torn:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


def _carry_streams(server: socket.socket, to: tuple[str, int], wire: Wire, conditions: Conditions) -> None:
    """Carry all connections of a relay, forever. A cut stops traffic, but does not close connections."""
    streams, torn, chance = list[_Stream](), wire.torn, random.Random(conditions.seed)
    while True:
        now = time.monotonic()
        if torn != wire.torn:
            torn = wire.torn
            while streams:
                streams.pop().close(torn=True)
        reading = [one for stream in streams for one in stream.readable(now)]
        wait = _until_next([lane for stream in streams for lane in stream.lanes])
        ready, _, _ = select.select([server, *([] if wire.is_cut else reading)], [], [], min(0.05, wait or 0.05))
        now = time.monotonic()
        if server in ready:
            with contextlib.suppress(OSError):  # nobody listens there yet
                streams.append(_Stream(server.accept()[0], to, conditions, chance))
        for stream in [] if wire.is_cut else list(streams):
            try:
                there = stream.carry(ready, wire, now)
            except OSError:
                there = False
            if not there:
                stream.close()
                streams.remove(stream)
