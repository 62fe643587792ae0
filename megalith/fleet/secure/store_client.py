"""A process's connection to the store of its run. The client has the methods of `rendezvous.Store`, and those that torch needs from a
store."""

import socket
import threading
import time
from collections.abc import Sequence

from megalith.fleet.secure import messages
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.messages import STRANGERS, Operation
from megalith.fleet.secure.session import GREETING_BYTES, REFUSED, REPLY_BYTES, ClientHandshake, Opener, Sealer

AGAIN_SECONDS = 0.05  # between attempts to connect
PROOF_SECONDS = 5.0  # that a store may take to prove itself
WAIT_SECONDS = 0.5  # that one call may wait at the store for keys; then others of this process have a turn
READ_BYTES = 1 << 18


class StoreGone(RuntimeError):  # noqa: N818  # it says what happened
    """The run's store does not answer, or a key was not set in time."""


class WrongKey(RuntimeError):  # noqa: N818  # it says what was found
    """The process that listens at the store's address has another key than this process, or is not a store."""


class StoreClient:
    """A connection to the store. Threads may share a client, because a call that waits for keys is interrupted every WAIT_SECONDS
    for other calls."""

    def __init__(self, address: str, key: Key, *, seconds: float) -> None:
        """Connect to "SCHEME://HOST:PORT" within `seconds`, which is also the time limit of later calls. Raises StoreGone if no
        process answers at this address, and WrongKey if one with another key answers.
        """
        self.address, self.seconds = address, seconds
        host, _, port = address.partition("://")[2].rpartition(":")
        self._lock = threading.Lock()
        self._connection, self._sealer, self._opener = _connect(host.strip("[]"), int(port), key, address, seconds=seconds)
        self._connection.settimeout(seconds)

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        self._call(Operation.SET, key.encode(), _octets(value))

    def get(self, key: str) -> bytes:
        """Wait until the key exists, and read it. Raises StoreGone if the key is not set within the time limit."""
        self.wait([key])
        found = self._call(Operation.GET, key.encode())
        return self.get(key) if found is None else found[0]

    def check(self, keys: Sequence[str]) -> bool:
        """True if all of these keys are set."""
        return self._call(Operation.CHECK, *(key.encode() for key in keys)) is not None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0, and return the sum."""
        return int(self._some(Operation.ADD, key.encode(), str(amount).encode()))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the current value is `expected`, or if no value exists and `expected` is empty. Return the value
        afterwards."""
        return self._some(Operation.SWAP, key.encode(), _octets(expected), _octets(desired))

    def delete_key(self, key: str) -> bool:
        """Remove a key; return True if it existed."""
        return self._call(Operation.DELETE, key.encode()) is not None

    def delete_prefix(self, prefix: str) -> None:
        """Remove all keys that begin with `prefix`."""
        self._call(Operation.DELETE_PREFIX, prefix.encode())

    def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return int(self._some(Operation.COUNT))

    def wait(self, keys: Sequence[str], seconds: float | None = None) -> None:
        """Wait until all keys are set, for `seconds` at most (default: the time limit). Raises StoreGone if a key is not set in
        time."""
        limit = self.seconds if seconds is None else seconds
        end, names = time.monotonic() + limit, [key.encode() for key in keys]
        while True:
            left = max(0.0, end - time.monotonic())
            milliseconds = round(1000 * min(left, WAIT_SECONDS, self.seconds / 2))
            if self._call(Operation.WAIT, str(milliseconds).encode(), *names) is not None:
                return
            if time.monotonic() >= end:
                raise StoreGone(f"wait timeout after {round(1000 * limit)}ms for {', '.join(keys)} in the run's store")

    def strangers(self) -> dict[str, int]:
        """Return the store's counts of refused connections and messages, by the kinds in `messages.STRANGERS`."""
        counts = self._call(Operation.STRANGERS) or []
        return dict(zip(STRANGERS, map(int, counts), strict=False))

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):  # which a failed start never made
            self.close()

    def _some(self, operation: Operation, *fields: bytes) -> bytes:
        found = self._call(operation, *fields)
        assert found, operation
        return found[0]

    def _call(self, operation: Operation, *fields: bytes) -> list[bytes] | None:
        with self._lock:
            try:
                self._connection.sendall(self._sealer.seal(messages.pack(operation, *fields)))
                reply = self._receive()
            except OSError as error:
                self._connection.close()  # a late reply must not be taken for the next one's
                raise StoreGone(f"the run's store at {self.address}: {_why(error)}") from error
        answer, found = messages.unpack(reply)
        if answer is Operation.ERROR:
            raise StoreGone(f"the run's store at {self.address}: {found[0].decode(errors='replace')}")
        return found if answer is Operation.DONE else None

    def _receive(self) -> bytes:
        while True:
            data = self._connection.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("connection closed by peer")
            for payload in self._opener.feed(data):
                return payload  # there is one reply to a request, and nothing else


def _connect(host: str, port: int, key: Key, address: str, *, seconds: float) -> tuple[socket.socket, Sealer, Opener]:
    """Return an authenticated connection. If the connection breaks before it is authenticated, retry, because connections of
    strangers may fill the store."""
    end = time.monotonic() + seconds
    while True:
        left = max(0.1, end - time.monotonic())
        try:
            connection = socket.create_connection((host, port), timeout=min(left, PROOF_SECONDS))
            try:
                return connection, *_prove(connection, key, address)
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError) as error:
            if time.monotonic() >= end:
                raise StoreGone(f"no store of this run at {address} within {seconds:g} s: {_why(error)}") from error
        time.sleep(AGAIN_SECONDS)


def _prove(connection: socket.socket, key: Key, address: str) -> tuple[Sealer, Opener]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        handshake = ClientHandshake(key, _exactly(connection, GREETING_BYTES))
    except ValueError as error:
        raise WrongKey(f"{address}: {error}. Another program listens at this port: use another port") from error
    connection.sendall(handshake.proof)
    first = _exactly(connection, 1)
    ends = handshake.finish(first + _exactly(connection, REPLY_BYTES - 1)) if first != REFUSED else None
    if ends is None:
        raise WrongKey(
            f"the store at {address} and this process have different keys. Set the same key for both, by one of "
            f"MEGALITH_KEY, the file that "
            "MEGALITH_KEY_FILE names, or ranks/key in the same run folder"
        )
    return ends


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("connection closed by peer")
        data += more
    return data


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "socket timeout"
    return str(error) or type(error).__name__


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
