"""Connections between sites deliver whole messages in order, only from sites, even after a connection broke."""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping

import pytest

from megalith.fleet.secure import peers as transport
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.peers import AT_ONCE, PIECE_BYTES, Address, Peers
from megalith.fleet.secure.session import GREETING_BYTES, PROOF_BYTES
from megalith.fleet.secure.store_server import LISTEN
from tests.fleet.conftest import until
from tests.full import only_full
from tests.keys import KEY, OTHER_KEY
from tests.patience import PATIENCE


@contextlib.contextmanager
def _sites(count: int, *, keys: Mapping[int, Key] | None = None) -> Iterator[list[Peers]]:
    """Make all sites of a run in this process. None has begun to connect."""
    found = list[Peers]()
    for number in range(count):
        key = (keys or {}).get(number, KEY)
        found.append(Peers(number, count, key, address_of=lambda site: found[site].address))
    try:
        yield found
    finally:
        for one in found:
            one.close(seconds=0.0)


def _open(sites: list[Peers]) -> None:
    for one in sites:
        one.open()
    until(lambda: all(one.connected(site.own) for one in sites for site in sites if site is not one), seconds=PATIENCE)


def _messages(peers: Peers, count: int) -> dict[int, list[bytes]]:
    """Return the next messages from each site, `count` in all."""
    found = dict[int, list[bytes]]()
    while sum(map(len, found.values())) < count:
        news = peers.next(PATIENCE)
        assert news is not None, f"{found}"
        if news.message is not None:
            found.setdefault(news.site, []).append(news.message)
    return found


def _greeted(peers: Peers) -> int:
    """Wait for the next event, which must be a new connection, and return its site."""
    news = peers.next(PATIENCE)
    assert news is not None and news.message is None
    return news.site


def test_messages_arrive_whole_and_in_order() -> None:
    sizes = (0, 1, PIECE_BYTES - 8, PIECE_BYTES, 3 * PIECE_BYTES + 5)
    with _sites(3) as sites:
        _open(sites)
        for one in sites:
            for size in sizes:
                one.send(bytes([one.own]) * size)
        for one in sites:
            wanted = {site.own: [bytes([site.own]) * size for size in sizes] for site in sites if site is not one}
            assert _messages(one, 2 * len(sizes)) == wanted
        frames = sum(-(-(8 + size) // PIECE_BYTES) for size in sizes)
        assert [one.sent for one in sites] == [2 * (sum(sizes) + 8 * len(sizes) + 44 * frames)] * 3


def test_sites_of_one_machine_listen_at_the_address_that_they_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEGALITH_LISTEN is for addresses that other machines reach."""
    monkeypatch.setenv(LISTEN, "127.0.0.2")
    with _sites(2) as sites:
        _open(sites)
        assert sites[0]._server is not None and sites[0]._server.getsockname()[0] == "127.0.0.1"


def test_a_message_may_be_for_one_site() -> None:
    with _sites(3) as sites:
        _open(sites)
        sites[0].send(b"for 1", to=1)
        sites[0].send(b"for all")
        assert _messages(sites[1], 2) == {0: [b"for 1", b"for all"]}
        assert _messages(sites[2], 1) == {0: [b"for all"]}


def test_what_was_sent_before_the_end_still_arrives() -> None:
    with _sites(2) as sites:
        _open(sites)
        sites[1].send(bytes(5 * PIECE_BYTES))
        sites[1].close(seconds=PATIENCE)
        assert _messages(sites[0], 1) == {1: [bytes(5 * PIECE_BYTES)]}
        until(lambda: not sites[0].connected(1), seconds=PATIENCE)


@pytest.mark.slow
def test_closing_says_whether_all_was_read() -> None:
    """The other site is too slow in the beginning."""
    with _sites(2) as sites:
        _open(sites)
        slow, free = sites[0]._peers[1].opener, threading.Event()
        feed = slow.feed
        slow.feed = lambda data: feed(data) if free.wait(PATIENCE) else iter(())  # type: ignore[method-assign]
        sites[1].send(bytes(64 * PIECE_BYTES))
        assert not sites[1].close(seconds=0.1) and not sites[1].close(seconds=0.1)
        free.set()
        assert sites[1].close(seconds=PATIENCE)
        assert _messages(sites[0], 1) == {1: [bytes(64 * PIECE_BYTES)]}


def test_a_broken_connection_is_made_again() -> None:
    with _sites(2) as sites:
        _open(sites)
        assert _greeted(sites[0]) == 1 and _greeted(sites[1]) == 0
        sites[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)
        assert _greeted(sites[0]) == 1 and _greeted(sites[1]) == 0
        sites[0].send(b"hello")
        assert _messages(sites[1], 1) == {0: [b"hello"]}


def test_a_site_that_is_started_again_has_another_name() -> None:
    with _sites(2) as sites:
        _open(sites)
        first = sites[1].next(PATIENCE)
        sites[0].close(seconds=0.0)
        sites[0] = Peers(0, 2, KEY, address_of=lambda _: None)
        sites[0].open()
        second = sites[1].next(PATIENCE)
        assert first and second and first.site == second.site == 0 and first.start != second.start


def test_another_key_is_refused() -> None:
    with _sites(2, keys={1: OTHER_KEY}) as sites:
        for one in sites:
            one.open()
        until(lambda: sites[0].turned_away > 0, seconds=PATIENCE)
        assert not sites[0].connected(1) and not sites[1].connected(0)
        until(lambda: "has another key" in sites[1].trouble(0), seconds=PATIENCE)


def test_it_is_known_why_a_site_is_missing() -> None:
    with _sites(3) as sites:
        sites[0].close(seconds=0.0)
        sites[2].open()
        until(lambda: "refused" in sites[2].trouble(0), seconds=PATIENCE)
        assert sites[2].trouble(0).startswith("127.0.0.1:") and sites[1].trouble(2) == "it has not connected"


def test_a_link_that_is_too_slow_fills_no_memory() -> None:
    """The connection is cut, both ends notice, and queued messages are lost."""
    with _sites(2) as sites:
        sites[0]._most_waiting = 64 * PIECE_BYTES
        _open(sites)
        stuck, there = sites[1]._peers[0], sites[0]._peers[1]
        stuck.opener.feed = lambda data: time.sleep(PATIENCE) or iter(())  # type: ignore[method-assign, func-returns-value]
        sites[0].send(bytes(80 * PIECE_BYTES), 1, beside=True)
        sites[0].send(bytes(PIECE_BYTES))
        assert not there.broken.is_set(), "a long message leaves as much room as before"
        while not there.broken.is_set():
            sites[0].send(bytes(PIECE_BYTES))
        assert there.waiting <= 144 * PIECE_BYTES


def _break_after(peers: Peers, site: int, frames: int) -> None:
    """Break the connection to a site once this many more frames have been sent."""
    there, left = peers._peers[site], [frames]
    seal = there.sealer.seal

    def counted(data: bytes) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("the link is cut")
        return seal(data)

    there.sealer.seal = counted  # type: ignore[method-assign]


MIDDLE = {"the same message": (0, 3), "another one": (1, 0), "another one of the same beginning": (9 * PIECE_BYTES, 3)}


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("what", MIDDLE)
def test_a_message_that_was_cut_goes_on_where_it_was(what: str, sender: int) -> None:
    """Received bytes are not sent again if they are the beginning of the next message."""
    differs, arrived = MIDDLE[what]
    message = bytearray(bytes(range(256)) * (10 * PIECE_BYTES // 256))
    with _sites(2) as sites:
        one, other = sites[sender], sites[1 - sender]
        _open(sites)
        assert _greeted(one) == other.own and _greeted(other) == one.own
        _break_after(one, other.own, 3)
        one.send(bytes(message))
        assert _greeted(one) == other.own and _greeted(other) == one.own
        before = one.sent
        message[differs] ^= what != "the same message"
        one.send(b"short")
        one.send(bytes(message))
        one.send(bytes(message))
        assert _messages(other, 3) == {one.own: [b"short", bytes(message), bytes(message)]}
        until(lambda: one._peers[other.own].waiting == 0, seconds=PATIENCE)
        rest = 8 + len(message) - arrived * PIECE_BYTES + (8 if arrived else 0)
        whole = 8 + len(message)
        frames = sum(-(-size // PIECE_BYTES) for size in (rest, whole, 13))
        assert one.sent - before == rest + whole + 13 + 44 * frames
        assert not other._parts or what != "the same message"


def test_a_cut_message_is_resumed_behind_a_longer_one() -> None:
    """After a cut the fragments of a model are sent anew, in another order."""
    cut, longer = bytes(10 * PIECE_BYTES), b"x" * (20 * PIECE_BYTES)
    with _sites(2) as sites:
        one, other = sites
        _open(sites)
        assert _greeted(one) == other.own and _greeted(other) == one.own
        _break_after(one, other.own, 3)
        one.send(cut)
        assert _greeted(one) == other.own and _greeted(other) == one.own
        before = one.sent
        one.send(longer)
        one.send(cut)
        assert _messages(other, 2) == {one.own: [longer, cut]}
        until(lambda: one._peers[other.own].waiting == 0, seconds=PATIENCE)
        assert one.sent - before < len(longer) + len(cut) - 2 * PIECE_BYTES, "what had arrived crossed again"
        assert not other._parts and other.own in one._peers


@pytest.mark.slow
def test_what_has_left_waits_no_longer() -> None:
    """A site gets all weights if the link is faster than new messages come. Half a message counts as half."""
    with _sites(2) as sites:
        sites[0]._most_waiting = 80 * PIECE_BYTES
        _open(sites)
        slow, there = sites[1]._peers[0], sites[0]._peers[1]
        feed, go_on, taken = slow.opener.feed, threading.Event(), [0]

        def some(data: bytes) -> Iterator[bytes]:
            taken[0] += len(data)
            if taken[0] > 40 * PIECE_BYTES:
                go_on.wait(PATIENCE)
            return feed(data)

        slow.opener.feed = some  # type: ignore[method-assign]
        sites[0].send(bytes(64 * PIECE_BYTES))
        until(lambda: there.waiting < 30 * PIECE_BYTES, seconds=PATIENCE)
        sites[0].send(bytes(40 * PIECE_BYTES))
        assert sites[0].connected(1), "104 MiB would be too much"
        go_on.set()
        assert [len(message) for message in _messages(sites[1], 2)[0]] == [64 * PIECE_BYTES, 40 * PIECE_BYTES]
        until(lambda: there.waiting == 0, seconds=PATIENCE)


STRANGERS = {
    "garbage": bytes(range(256)) * 4,
    "a huge length": b"\xff" * (PROOF_BYTES + 64),
    "silence": b"",
    "half a proof": b"\x00" * (PROOF_BYTES // 2),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_do_not_keep_sites_apart(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers connect in greater number than there are places, before any site connects and while sites are connected."""
    monkeypatch.setattr(transport, "PROOF_SECONDS", 1.0)
    crowd = list[socket.socket]()

    def crowd_in() -> None:
        for _ in range(AT_ONCE + 8):
            with contextlib.suppress(OSError):
                crowd.append(socket.create_connection(sites[0].address, timeout=PATIENCE))
                crowd[-1].sendall(STRANGERS[what])

    with _sites(2) as sites:
        sites[0].open()
        crowd_in()
        began = time.monotonic()
        _open(sites)
        assert time.monotonic() - began < PATIENCE
        crowd_in()
        sites[0].send(b"hello")
        assert _messages(sites[1], 1) == {0: [b"hello"]}
        until(lambda: sites[0].turned_away >= AT_ONCE + 8, seconds=PATIENCE)
        assert _greeted(sites[0]) == 1 and sites[0].next(0.0) is None, "the connection between the sites was not disturbed"
    for one in crowd:
        one.close()


@only_full
def test_ten_thousand_strangers_do_not_disturb_two_sites() -> None:
    """Every one is turned away and counted, and messages between the sites arrive meanwhile."""
    with _sites(2) as sites:
        _open(sites)
        crowd = deque[socket.socket]()
        for number in range(10_000):
            with contextlib.suppress(OSError):
                crowd.append(socket.create_connection(sites[0].address, timeout=PATIENCE))
                crowd[-1].sendall(STRANGERS["garbage"])
            if len(crowd) > 100:
                crowd.popleft().close()
            if number % 1000 == 0:
                sites[0].send(b"%d" % number)
                assert _messages(sites[1], 1) == {0: [b"%d" % number]}
        until(lambda: sites[0].turned_away >= 9_900, seconds=PATIENCE)
        assert _greeted(sites[0]) == 1 and sites[0].connected(1)
        for one in crowd:
            one.close()


def test_an_altered_frame_ends_the_connection() -> None:
    """An attacker on the path can only cut the connection."""
    with _sites(2) as sites:
        _open(sites)
        assert _greeted(sites[0]) == 1
        sites[1]._peers[0].connection.sendall(bytes(44 + 10))
        assert _greeted(sites[0]) == 1, "it was made again, and nothing came of the frame"


def test_who_proves_itself_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives in time, but the whole greeting would not, and meanwhile the site would not try again."""
    monkeypatch.setattr(transport, "PROOF_SECONDS", 1.0)
    given = 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        peers = Peers(1, 2, KEY, address_of=lambda _: server.getsockname())
        peers.open()
        stranger, _ = server.accept()
        stranger.settimeout(0.5)
        with stranger, contextlib.suppress(ConnectionError):
            while given < GREETING_BYTES:
                stranger.sendall(b"x")
                given += 1
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
        again, _ = server.accept()
        again.close()
        peers.close(seconds=0.0)
    assert given < GREETING_BYTES


def test_an_address_that_cannot_be_read_is_asked_for_again() -> None:
    addresses = iter([ValueError("'?' is not an address of a site"), PermissionError(13, "Permission denied")])

    def address_of(_: int) -> Address:
        if error := next(addresses, None):
            raise error
        return one.address

    one = Peers(0, 2, KEY, address_of=lambda _: None)
    other = Peers(1, 2, KEY, address_of=address_of)
    for each in (one, other):
        each.open()
    until(lambda: one.connected(1) and other.connected(0), seconds=PATIENCE)
    for each in (one, other):
        each.close(seconds=0.0)
