"""A key-value store that only the processes of one run can use: it authenticates them, limits its memory, and listens at one
address.

One process, one thread. A connection that has not proved that it knows the key uses only the memory for this proof, for a few
seconds. The number of such connections is limited: beyond the limit, a new one replaces the oldest one. So even 4,000 idle
connections of strangers do not affect the run's processes.
"""

import errno
import os
import selectors
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address

from megalith.fleet.secure import messages
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.messages import Operation
from megalith.fleet.secure.session import PROOF_BYTES, Opener, Sealer, ServerHandshake, TooLong

LISTEN = "MEGALITH_LISTEN"
"""Environment variable with the address at which to listen, if other machines reach this machine at an address that none of its own
interfaces has; "0.0.0.0" means all addresses."""

READ_BYTES = 1 << 18
ACCEPTS = 64  # connections accepted in one turn, so that clients are served between turns


@dataclass(frozen=True)
class Limits:
    """Upper limits of the store. `unproved`: number of connections that have not proved yet that they know the key; `seconds`: time for
    this proof. `clients`: number of connections with a proof. `stored`: bytes of all keys and values. `waiting`: bytes of replies that
    one client has not read yet."""

    unproved: int = 128
    seconds: float = 5.0
    clients: int = 65_536
    stored: int = 1 << 30
    waiting: int = 64 << 20


@dataclass
class _Unproved:
    connection: socket.socket
    handshake: ServerHandshake
    until: float
    came: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    opener: Opener
    sealer: Sealer
    out: bytearray = field(default_factory=bytearray)
    waits_for: list[bytes] = field(default_factory=list)  # keys for which the client waits
    until: float = 0.0


def listen(host: str, port: int, *, elsewhere: bool = True) -> socket.socket:
    """Listen at `host`, or, if `elsewhere`, at the address in MEGALITH_LISTEN if that is set. Port 0 means any free port. Raises OSError
    with the address in its message."""
    address = (elsewhere and os.environ.get(LISTEN)) or host.strip("[]")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(
            error.errno,
            f"this machine cannot listen at {address} ({error.strerror}). Set {LISTEN} to one of this machine's addresses",
        ) from error
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
    except OSError as error:
        server.close()
        raise OSError(
            error.errno,
            f"cannot listen at {address}, port {port} ({error.strerror}). Free this port, use another port, or set {LISTEN} "
            f"to another address",
        ) from error
    if ip_address(where[0]).is_loopback and not is_loopback(address):
        print(
            f"{address} is {where[0]} on this machine, which no other machine can reach. "
            f"If the run has other machines, set {LISTEN} to the address at which they reach this one",
            file=sys.stderr,
            flush=True,
        )
    return server


def is_loopback(host: str) -> bool:
    """True if a host name means, on every machine, that machine itself, as "localhost" does."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class StoreServer:
    """The store behind a listening socket."""

    def __init__(self, server: socket.socket, key: Key, limits: Limits = Limits()) -> None:
        self._server, self._key, self._limits = server, key, limits
        self._values: dict[bytes, bytes] = {}
        self._stored = 0
        self._unproved: OrderedDict[int, _Unproved] = OrderedDict()  # by descriptor, the oldest first
        self._clients: dict[int, _Client] = {}
        self._waiting: set[_Client] = set()
        self._turned_away = dict.fromkeys(messages.STRANGERS, 0)
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve for ever."""
        while True:
            self.turn(1.0)

    def turn(self, seconds: float) -> None:
        """Wait at most `seconds` for events on connections, and handle these events."""
        now = time.monotonic()
        ends = [client.until for client in self._waiting] + [one.until for one in list(self._unproved.values())[:1]]
        for key, events in self._selector.select(max(0.0, min([seconds, *(end - now for end in ends)]))):
            descriptor = key.fd
            if key.fileobj is self._server:
                self._accept()
            elif descriptor in self._unproved:
                self._prove(descriptor)
            elif (client := self._clients.get(descriptor)) is not None:
                if events & selectors.EVENT_WRITE:
                    self._write(client)
                if events & selectors.EVENT_READ and descriptor in self._clients:
                    self._read(client)
        self._give_up_waiting()

    # Strangers

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._server.accept()
            except OSError as error:  # no connection is waiting, or it was closed
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._unproved:
                    self._dismiss(next(iter(self._unproved)), "crowded")
                return
            connection.setblocking(False)
            handshake = ServerHandshake(self._key)
            while len(self._unproved) >= self._limits.unproved:
                self._dismiss(next(iter(self._unproved)), "crowded")
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.send(handshake.greeting)  # the kernel's empty send buffer holds all of it
            except OSError:
                connection.close()
                continue
            self._unproved[connection.fileno()] = _Unproved(connection, handshake, time.monotonic() + self._limits.seconds)
            self._selector.register(connection, selectors.EVENT_READ)

    def _prove(self, descriptor: int) -> None:
        one = self._unproved[descriptor]
        try:
            data = one.connection.recv(PROOF_BYTES - len(one.came))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        one.came += data
        if not data:
            self._dismiss(descriptor, "left")
        elif len(one.came) == PROOF_BYTES:
            self._judge(descriptor, one)

    def _judge(self, descriptor: int, one: _Unproved) -> None:
        reply, ends = one.handshake.answer(bytes(one.came))
        try:
            one.connection.send(reply)
        except OSError:
            ends = None
        if ends is None or len(self._clients) >= self._limits.clients:
            self._dismiss(descriptor, "refused")
            return
        del self._unproved[descriptor]
        self._clients[descriptor] = _Client(one.connection, *ends)

    def _dismiss(self, descriptor: int, why: str) -> None:
        self._turned_away[why] += 1
        one = self._unproved.pop(descriptor)
        self._selector.unregister(one.connection)
        one.connection.close()

    def _give_up_waiting(self) -> None:
        now = time.monotonic()
        while self._unproved and next(iter(self._unproved.values())).until <= now:
            self._dismiss(next(iter(self._unproved)), "late")
        for client in [client for client in self._waiting if client.until <= now]:
            self._end_wait(client, there=False)

    # Clients

    def _read(self, client: _Client) -> None:
        before = client.opener.dropped
        try:
            data = client.connection.recv(READ_BYTES)
            if not data:
                self._close(client)
            for payload in client.opener.feed(data):
                self._obey(client, payload)
        except BlockingIOError:
            return
        except (OSError, TooLong):
            self._close(client)
        finally:
            self._turned_away["dropped"] += client.opener.dropped - before

    def _close(self, client: _Client) -> None:
        if self._clients.pop(client.connection.fileno(), None) is not None:
            self._selector.unregister(client.connection)
            self._waiting.discard(client)
            client.connection.close()

    def _obey(self, client: _Client, payload: bytes) -> None:
        try:
            operation, fields = messages.unpack(payload)
            reply = self._done(client, operation, fields)
        except (ValueError, IndexError) as error:  # a process of the run has another version
            reply = messages.pack(Operation.ERROR, f"not understood: {error}".encode())
        if reply is not None:
            self._reply(client, reply)

    def _reply(self, client: _Client, reply: bytes) -> None:
        client.out += client.sealer.seal(reply)
        self._write(client)

    def _write(self, client: _Client) -> None:
        try:
            del client.out[: client.connection.send(client.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(client)
            return
        if len(client.out) > self._limits.waiting:
            self._close(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events)

    def _done(self, client: _Client, operation: Operation, fields: list[bytes]) -> bytes | None:
        match operation, fields:
            case Operation.SET, [key, value]:
                return self._set(key, value) or messages.pack(Operation.DONE)
            case Operation.GET, [key]:
                value = self._values.get(key)
                return messages.pack(Operation.NO) if value is None else messages.pack(Operation.DONE, value)
            case Operation.CHECK, keys:
                return messages.pack(Operation.DONE if self._are_there(keys) else Operation.NO)
            case Operation.ADD, [key, amount]:
                total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
                return self._set(key, total) or messages.pack(Operation.DONE, total)
            case Operation.SWAP, [key, expected, desired]:
                return self._swap(key, expected, desired)
            case Operation.DELETE, [key]:
                there = key in self._values
                self._forget([key])
                return messages.pack(Operation.DONE if there else Operation.NO)
            case Operation.DELETE_PREFIX, [prefix]:
                self._forget([key for key in self._values if key.startswith(prefix)])
                return messages.pack(Operation.DONE)
            case Operation.COUNT, []:
                return messages.pack(Operation.DONE, str(len(self._values)).encode())
            case Operation.WAIT, [milliseconds, *keys]:
                if self._are_there(keys):
                    return messages.pack(Operation.DONE)
                client.waits_for, client.until = keys, time.monotonic() + int(milliseconds) / 1000
                self._waiting.add(client)
                return None
            case Operation.STRANGERS, []:
                counts = [str(count).encode() for count in self._turned_away.values()]
                return messages.pack(Operation.DONE, *counts)
        raise ValueError(f"{operation.name} with {len(fields)} fields")

    def _are_there(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _set(self, key: bytes, value: bytes) -> bytes | None:
        old = self._values.get(key)
        more = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._stored + more > self._limits.stored:
            return messages.pack(Operation.ERROR, f"the store is full: it holds {self._stored} bytes".encode())
        self._values[key] = value
        self._stored += more
        for client in [client for client in self._waiting if key in client.waits_for and self._are_there(client.waits_for)]:
            self._end_wait(client, there=True)
        return None

    def _swap(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Compare and swap, as in torch's stores: a key that does not exist is written only if the expected value is empty."""
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            return self._set(key, desired) or messages.pack(Operation.DONE, desired)
        return messages.pack(Operation.DONE, expected if value is None else value)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            value = self._values.pop(key, None)
            if value is not None:
                self._stored -= len(key) + len(value)

    def _end_wait(self, client: _Client, *, there: bool) -> None:
        self._waiting.discard(client)
        client.waits_for = []
        self._reply(client, messages.pack(Operation.DONE if there else Operation.NO))
