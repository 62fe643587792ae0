"""A run's store, attacked through its port: strangers send garbage, nothing, too much, or recorded messages."""

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalith.fleet.causes import SECONDARY_TEXTS
from megalith.fleet.secure import messages, session
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.messages import Operation
from megalith.fleet.secure.session import GREETING_BYTES, PROOF_BYTES, REPLY_BYTES, ClientHandshake, Opener
from megalith.fleet.secure.store_client import StoreClient, StoreGone, WrongKey
from megalith.fleet.secure.store_server import Limits, StoreServer, listen
from tests.fleet.conftest import until
from tests.keys import KEY, OTHER_KEY
from tests.patience import PATIENCE

FEW = Limits(unproved=8, seconds=0.3, clients=4, stored=4096, waiting=1 << 20)


class Store:
    """A store in a process of its own, and its clients."""

    def __init__(self, limits: Limits) -> None:
        server = listen("127.0.0.1", 0)
        self.port = server.getsockname()[1]
        self.address = f"megalith://127.0.0.1:{self.port}"
        self.process = os.fork()
        if self.process == 0:
            try:
                StoreServer(server, KEY, limits).serve()
            finally:
                os._exit(1)
        server.close()

    def client(self, key: Key = KEY, seconds: float = PATIENCE) -> StoreClient:
        return StoreClient(self.address, key, seconds=seconds)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def resident_pages(self) -> int:
        return int(Path(f"/proc/{self.process}/statm").read_text().split()[1])


@pytest.fixture
def store() -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def make(limits: Limits = FEW) -> Store:
        made.append(Store(limits))
        return made[-1]

    yield make
    for one in [one for one in made if one.process]:
        assert os.waitpid(one.process, os.WNOHANG) == (0, 0), "the store has ended"
        os.kill(one.process, signal.SIGKILL)
        os.waitpid(one.process, 0)


def _is_closed(connection: socket.socket) -> bool:
    """True if the store closes a connection. Reads its output first."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    connection.close()
    return True


def _proved(connection: socket.socket) -> ClientHandshake:
    """Exchange the proofs step by step."""
    handshake = ClientHandshake(KEY, _exactly(connection, GREETING_BYTES))
    connection.sendall(handshake.proof)
    return handshake


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, "closed"
        data += more
    return data


def _reply(connection: socket.socket, opener: Opener) -> tuple[Operation, list[bytes]]:
    while True:
        for payload in opener.feed(connection.recv(1 << 16)):
            return messages.unpack(payload)


def test_processes_with_the_key_share_what_they_write(store: Callable[..., Store]) -> None:
    run = store()
    first, second = run.client(), run.client()
    first.set("a", "1")
    second.set("b", b"\0\xff")
    assert (second.get("a"), first.get("b")) == (b"1", b"\0\xff")
    assert first.check(["a", "b"]) and not first.check(["a", "c"])
    assert [first.add("n", 2), second.add("n", -5)] == [2, -3]
    assert [first.compare_set("x", *pair) for pair in (("", "1"), ("0", "2"), ("1", "3"))] == [b"1", b"1", b"3"]
    assert first.num_keys() == 4
    assert first.delete_key("a") and not second.delete_key("a")
    second.delete_prefix("")
    assert first.num_keys() == 0


def test_a_wait_ends_when_the_key_comes_and_lets_other_threads_through(store: Callable[..., Store]) -> None:
    run = store()
    first, second = run.client(), run.client()
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(first.get("late")))
    waiting.start()
    first.set("meanwhile", "said")
    assert second.get("meanwhile") == b"said"
    second.set("late", "come")
    waiting.join(PATIENCE)
    assert found == [b"come"]
    with pytest.raises(StoreGone, match="wait timeout after 100ms for never"):
        first.wait(["never"], 0.1)
    assert first.get("late") == b"come", "the connection is still in step"


def test_who_has_another_key_is_refused_on_both_sides(store: Callable[..., Store]) -> None:
    run = store()
    with pytest.raises(WrongKey, match="different keys"):
        run.client(OTHER_KEY)
    run.client().set("a", "1")
    until(lambda: run.client().strangers()["refused"] == 1, seconds=PATIENCE)


def test_a_stranger_who_plays_the_store_is_not_believed() -> None:
    """The stranger knows the form of the greeting, and replies to the challenge with a recorded proof."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def play() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(session.MAGIC + bytes(session.NONCE_BYTES))
                _exactly(connection, PROOF_BYTES)
                connection.sendall(session.ACCEPTED + bytes(REPLY_BYTES - 1))

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(WrongKey, match="different keys"):
            StoreClient(f"tcp://127.0.0.1:{port}", KEY, seconds=PATIENCE)
        thread.join(PATIENCE)


def test_something_else_at_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def play() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(WrongKey, match="not the store of a run"):
            StoreClient(f"tcp://127.0.0.1:{port}", KEY, seconds=PATIENCE)
        thread.join(PATIENCE)


def test_nobody_at_the_port_is_waited_for_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(StoreGone, match=rf"no store of this run at tcp://127\.0\.0\.1:{port} within 0\.2 s.*refused"):
        StoreClient(f"tcp://127.0.0.1:{port}", KEY, seconds=0.2)


GARBAGE = {
    "nothing": b"",
    "text": b"hello\n" * 1000,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100_000),
    "huge length": struct.pack(">IQ", 0xFFFFFFFF, 1) + bytes(1000),
    "torch's store": bytes([0]) + struct.pack("<I", 0x3C85F7CE) + bytes(200),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_ends_its_own_connection_and_nothing_else(store: Callable[..., Store], what: str) -> None:
    run = store()
    client = run.client()
    client.set("a", "1")
    for _ in range(5):
        stranger = run.stranger()
        with contextlib.suppress(ConnectionError):
            stranger.sendall(GARBAGE[what])
        assert _is_closed(stranger)
    assert client.get("a") == b"1" and client.num_keys() == 1
    assert sum(client.strangers().values()) == 5


def test_idle_connections_get_neither_time_nor_places(store: Callable[..., Store]) -> None:
    """The newest connection replaces the oldest, so honest processes get through, and each connection has a deadline."""
    run = store(Limits(unproved=8, seconds=3600.0))
    client = run.client()
    before = run.resident_pages()
    idle = [run.stranger() for _ in range(200)]
    newcomer = run.client()
    newcomer.set("a", "1")
    assert client.get("a") == b"1"
    counts = client.strangers()
    assert counts["crowded"] >= 200 - 8
    assert run.resident_pages() - before < 2048, "of 4 KiB each"
    for one in idle:
        one.close()
    late = store(Limits(unproved=8, seconds=0.2))
    assert _is_closed(late.stranger())
    assert late.client().strangers()["late"] == 1


def test_what_was_recorded_says_nothing_a_second_time(store: Callable[..., Store]) -> None:
    """A recorded message is not accepted in its own connection, in another one, or sent back to its sender."""
    run = store()
    connection = run.stranger()
    handshake = _proved(connection)
    ends = handshake.finish(_exactly(connection, REPLY_BYTES))
    assert ends is not None
    sealer, opener = ends
    add = sealer.seal(messages.pack(Operation.ADD, b"n", b"1"))
    connection.sendall(add)
    assert _reply(connection, opener) == (Operation.DONE, [b"1"])
    connection.sendall(add + add)
    connection.sendall(sealer.seal(messages.pack(Operation.GET, b"n")))
    assert _reply(connection, opener) == (Operation.DONE, [b"1"])

    other = run.stranger()  # the whole conversation again, but the server's nonce is a new one
    _exactly(other, GREETING_BYTES)
    other.sendall(handshake.proof + add)
    assert _is_closed(other)
    client = run.client()
    assert client.get("n") == b"1"
    counts = client.strangers()
    assert (counts["dropped"], counts["refused"]) == (2, 1)
    connection.close()


def test_injected_and_altered_messages_are_dropped_and_the_connection_goes_on(store: Callable[..., Store]) -> None:
    run = store()
    connection = run.stranger()
    ends = _proved(connection).finish(_exactly(connection, REPLY_BYTES))
    assert ends is not None
    sealer, opener = ends
    message = sealer.seal(messages.pack(Operation.SET, b"a", b"1"))
    altered = bytearray(message)
    altered[-1] ^= 1
    injected = message[:4] + struct.pack(">Q", 2) + bytes(32) + message[44:]
    connection.sendall(bytes(altered) + injected + message)
    assert _reply(connection, opener) == (Operation.DONE, [])
    client = run.client()
    assert client.get("a") == b"1"
    assert client.strangers()["dropped"] == 2
    connection.sendall(struct.pack(">IQ", session.MAX_PAYLOAD_BYTES + 1, 2) + bytes(32))
    assert _is_closed(connection), "nothing that follows can be read"


def test_a_reply_that_was_altered_or_came_before_is_not_taken(store: Callable[..., Store]) -> None:
    """A man in the middle who forwards everything, repeats replies and alters some."""
    run = store()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pass_on() -> None:
            near, _ = server.accept()
            far = run.stranger()
            near.settimeout(PATIENCE)
            near.sendall(_exactly(far, GREETING_BYTES))
            far.sendall(_exactly(near, PROOF_BYTES))
            near.sendall(_exactly(far, REPLY_BYTES))
            last = b""
            while request := near.recv(1 << 16):
                far.sendall(request)
                reply = far.recv(1 << 16)
                wrong = bytearray(reply)
                wrong[-1] ^= 1
                near.sendall(last + bytes(wrong) + reply)
                last = reply
            near.close()
            far.close()

        thread = threading.Thread(target=pass_on)
        thread.start()
        client = StoreClient(f"tcp://127.0.0.1:{server.getsockname()[1]}", KEY, seconds=PATIENCE)
        assert [client.add("n", 1) for _ in range(3)] == [1, 2, 3]
        assert client._opener.dropped == 3 + 2
        client.close()
        thread.join(PATIENCE)


def test_the_store_is_bounded_and_says_when_it_is_full(store: Callable[..., Store]) -> None:
    run = store()
    client = run.client()
    client.set("a", "1" * 4000)
    with pytest.raises(StoreGone, match="the store is full"):
        client.set("b", "1" * 100)
    client.set("a", "1")
    client.set("b", "1" * 100)
    with pytest.raises(session.TooLong):
        client.set("c", b"1" * session.MAX_PAYLOAD_BYTES)
    assert client.get("b") == b"1" * 100


def test_a_message_that_means_nothing_is_answered_so(store: Callable[..., Store]) -> None:
    run = store()
    connection = run.stranger()
    ends = _proved(connection).finish(_exactly(connection, REPLY_BYTES))
    assert ends is not None
    sealer, opener = ends
    wrong = [
        b"",
        b"\xee",
        bytes([Operation.SET]) + b"\0\0",
        bytes([Operation.SET]) + b"\0\0\0\x09a",
        messages.pack(Operation.SET, b"a"),
    ]
    wrong += [messages.pack(Operation.ADD, b"a", b"x"), messages.pack(Operation.DONE), messages.pack(Operation.WAIT)]
    for one in wrong:
        connection.sendall(sealer.seal(one))
        answer, [why] = _reply(connection, opener)
        assert answer is Operation.ERROR and b"not understood" in why
    assert run.client().num_keys() == 0
    connection.close()


def test_a_store_that_ends_is_an_error_that_ranks_blame_nobody_for(store: Callable[..., Store]) -> None:
    run = store()
    client = run.client()
    os.kill(run.process, signal.SIGKILL)
    os.waitpid(run.process, 0)
    run.process = 0
    with pytest.raises(StoreGone) as error:
        client.set("a", "1")
    assert SECONDARY_TEXTS.search(str(error.value))
