"""Connections between sites: whole messages in order, and nobody else's."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from megalith.fleet.secure.key import Key
from megalith.fleet.secure.peers import AT_ONCE, PIECE_BYTES, PeerGone, Peers
from megalith.fleet.secure.session import PROOF_BYTES
from tests.keys import KEY, OTHER_KEY
from tests.patience import PATIENCE


def _met(
    count: int,
    *,
    keys: dict[int, Key] | None = None,
    before: Callable[[list[Peers]], object] = lambda peers: None,
    seconds: float = PATIENCE,
) -> tuple[list[Peers], list[str]]:
    """All sites of a run in this process, and what kept each from meeting the others."""
    peers = [Peers(number, count, (keys or {}).get(number, KEY)) for number in range(count)]
    before(peers)
    errors = [""] * count

    def meet(number: int) -> None:
        try:
            peers[number].meet([one.address for one in peers], seconds=seconds)
        except PeerGone as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return peers, errors


def _accepts(peers: Peers) -> bool:
    try:
        socket.create_connection(peers.address, timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True


def test_messages_arrive_whole_and_in_order() -> None:
    peers, errors = _met(3)
    assert errors == ["", "", ""]
    sizes = (0, 1, PIECE_BYTES - 8, PIECE_BYTES, 3 * PIECE_BYTES + 5)
    for number, one in enumerate(peers):
        for size in sizes:
            one.send(bytes([number]) * size)
    for number, one in enumerate(peers):
        for other in {0, 1, 2} - {number}:
            assert [one.receive(other, seconds=PATIENCE) for _ in sizes] == [bytes([other]) * size for size in sizes]
    frames = sum(-(-(8 + size) // PIECE_BYTES) for size in sizes)
    for one in peers:
        one.close()
        for thread in one.sending:
            thread.join()
        assert one.sent == 2 * (sum(sizes) + 8 * len(sizes) + 44 * frames)


def test_no_port_is_open_once_sites_have_met() -> None:
    peers, _ = _met(2)
    assert not _accepts(peers[0])


def test_a_site_that_ends_is_noticed() -> None:
    peers, _ = _met(2)
    peers[1].send(b"last")
    peers[1].close()
    assert peers[0].receive(1, seconds=PATIENCE) == b"last"
    with pytest.raises(PeerGone, match="site 1 is away: connection closed by peer"):
        peers[0].receive(1, seconds=PATIENCE)


def test_a_site_that_is_silent_is_not_waited_for_longer() -> None:
    peers, _ = _met(2)
    with pytest.raises(PeerGone, match="site 1 is away: wait timeout after 50ms"):
        peers[0].receive(1, seconds=0.05)


def test_another_key_is_refused() -> None:
    peers, errors = _met(2, keys={1: OTHER_KEY}, seconds=1.0)
    assert "cannot be reached: it knows another key" in errors[1]
    assert errors[0] == "site 0 has not met site 1 within 1 s"
    assert peers[0].turned_away


STRANGERS = {
    "garbage": bytes(range(256)) * 4,
    "a huge length": b"\xff" * (PROOF_BYTES + 64),
    "silence": b"",
    "half a proof": b"\x00" * (PROOF_BYTES // 2),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_do_not_keep_sites_apart(what: str) -> None:
    """More of them than there are places, before any site comes."""
    crowd = list[socket.socket]()

    def crowd_in(peers: list[Peers]) -> None:
        for _ in range(AT_ONCE + 8):
            crowd.append(socket.create_connection(peers[0].address, timeout=PATIENCE))
            crowd[-1].sendall(STRANGERS[what])

    began = time.monotonic()
    peers, errors = _met(2, before=crowd_in)
    assert errors == ["", ""] and time.monotonic() - began < PATIENCE
    peers[0].send(b"hello")
    assert peers[1].receive(0, seconds=PATIENCE) == b"hello"
    for one in crowd:
        one.close()


def test_an_altered_frame_ends_the_connection() -> None:
    """Whoever is on the path can cut it, and nothing else."""
    peers, _ = _met(2)
    connection = peers[1]._peers[0].connection
    connection.sendall(bytes(44 + 10))
    with pytest.raises(PeerGone, match=r"connection closed: a frame was altered or injected"):
        peers[0].receive(1, seconds=PATIENCE)
