"""The store of a run on many machines."""

import os
import signal
import socket

import pytest

from megalith.train.store import connect, serve


def test_a_store_in_a_process_of_its_own_is_shared_and_survives_its_clients() -> None:
    keeper, port = serve(0)
    try:
        first, second = (connect(f"tcp://localhost:{port}", seconds=60) for _ in range(2))
        first.set("word", "said")
        del first
        assert second.get("word") == b"said" and second.add("count", 2) == 2
        assert not second.check(["nothing"]) and second.delete_key("word")
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"at port {port}"):
            serve(port)
