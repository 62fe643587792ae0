"""A slow link in user space: rate, delay, order, lost packets and outages."""

import contextlib
import os
import random
import socket
import threading
import time

import pytest

from megalith.machine import wire
from megalith.machine.wire import Conditions, Lane

needs_namespaces = [pytest.mark.engines, pytest.mark.skipif(wire.missing() is not None, reason=wire.missing() or "")]


def test_a_lane_delivers_in_order_at_its_rate_after_half_a_round_trip() -> None:
    lane, now, sizes = Lane(Conditions(8, 100)), 5.0, [random.Random(0).randrange(1, 9000) for _ in range(100)]
    for number, size in enumerate(sizes):
        lane.put(bytes([number]) * size, now)
    assert lane.backlog(now) == pytest.approx(sum(sizes) / 1e6)
    found = list[bytes]()
    while lane.next is not None:
        assert lane.next == pytest.approx(now + sum(sizes[: len(found) + 1]) / 1e6 + 0.05)
        assert not list(lane.arrived(lane.next - 1e-6))
        found += lane.arrived(lane.next)
    assert found == [bytes([number]) * size for number, size in enumerate(sizes)]


def test_a_lane_that_was_idle_saves_no_time() -> None:
    lane = Lane(Conditions(8, 0))
    lane.put(bytes(1000), 1.0)
    lane.put(bytes(1000), 7.0)
    assert [len(data) for data in lane.arrived(7.0005)] == [1000] and lane.next == pytest.approx(7.001)


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def test_a_relay_is_as_slow_as_the_link_and_carries_nothing_while_it_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, wire.relay(server.getsockname()[1], Conditions(8, 60)) as link:
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        assert link.address is not None
        with socket.create_connection(link.address) as connection:
            began = time.monotonic()
            connection.sendall(bytes(200_000))
            left = 200_000
            while left:
                left -= len(connection.recv(1 << 16))
            assert time.monotonic() - began >= 0.2 + 0.06
            assert link.crossed == (200_000, 200_000) and link.lost == (0, 0)
            link.cut(cut=True)
            connection.sendall(b"later")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(5)
            link.cut(cut=False)
            connection.settimeout(10)
            assert connection.recv(5) == b"later"


def test_a_relay_tears_its_connections_and_loses_packets_when_it_is_asked_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, wire.relay(server.getsockname()[1], Conditions(1000, 0)) as link:
        assert link.address is not None
        for share in (0.0, 1.0):
            link.lose(share)
            threading.Thread(target=_echo, args=(server,), daemon=True).start()
            with socket.create_connection(link.address) as connection:
                connection.settimeout(10)
                began = time.monotonic()
                connection.sendall(b"here")
                assert connection.recv(4) == b"here"
                assert (time.monotonic() - began >= 2 * wire.REPEATED_SECONDS) == bool(share), "each way has one packet"
                link.tear()
                with pytest.raises(ConnectionResetError):
                    connection.recv(4)
        assert link.lost == (1, 1) and link.crossed == (8, 8)


@pytest.mark.parametrize("loss", [pytest.param(0.0, marks=needs_namespaces), pytest.param(0.02, marks=needs_namespaces)])
def test_a_wire_between_namespaces_has_the_rate_the_delay_and_the_losses_asked_for(loss: float) -> None:
    data = random.Random(1).randbytes(2_000_000)

    def listen() -> None:
        with socket.create_server(("10.77.0.1", 29400)) as server:
            connection, _ = server.accept()
            came = b""
            while len(came) < len(data):
                came += connection.recv(1 << 18)
            assert came == data
            connection.sendall(b".")

    def send() -> None:
        time.sleep(0.5)
        began = time.monotonic()
        with socket.create_connection(("10.77.0.1", 29400)) as connection:
            assert loss or time.monotonic() - began >= 0.06
            connection.sendall(data)
            assert connection.recv(1) == b"."
        assert time.monotonic() - began >= len(data) / 2.5e6 + 0.06

    with wire.between(["a", "b"], Conditions(20, 60, loss)) as link:
        assert link.network is not None
        processes = [link.network.start("a", listen), link.network.start("b", send)]
        assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [0, 0]
        assert link.crossed == (1, len(data)), "each byte once, however often it was sent"
        assert (sum(link.lost) > 0) == (loss > 0)
