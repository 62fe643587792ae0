"""The stores for the ranks' rendezvous: for a run with agents, an authenticated store with torch's interface; otherwise torch's own
TCPStore."""

import os
import signal
import socket
from datetime import timedelta

import torch.distributed as dist

from megalith.fleet.rank import REQUESTS
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.store_client import StoreClient
from megalith.fleet.secure.store_server import StoreServer, listen
from megalith.machine import parent_watch


def serve(server: socket.socket, key: Key) -> int:
    """Fork a process that serves an authenticated store on a listening socket and ends with this process; return its process id. The socket
    is closed in this process, which must have only one thread, because a fork copies locks that other threads hold.
    """
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        _be_the_server(server, key, parent)
    server.close()
    return process


def _be_the_server(server: socket.socket, key: Key, parent: int) -> None:
    try:
        parent_watch.die_with_parent(parent)
        for number in REQUESTS:
            signal.signal(number, signal.SIG_IGN)  # meant for the process that serves a run; its store ends last
        StoreServer(server, key).serve()
    finally:  # this is a fork: nothing may climb back into the caller
        os._exit(1)


def tcp_store(address: str, *, serves: bool, timeout: timedelta) -> dist.TCPStore:
    """Return torch's own store at "tcp://HOST:PORT", for ranks that no agent started. torch's store checks no key. The store listens only
    at the given address (or at MEGALITH_LISTEN), whereas torch would listen at all addresses of the machine. Raises OSError if the address
    cannot be used.
    """
    host, _, port = address.partition("://")[2].rpartition(":")
    if not serves:
        return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout, wait_for_workers=False)
    server = listen(host, int(port))
    own = server.getsockname()
    return dist.TCPStore(
        own[0] if own[0] not in ("0.0.0.0", "::") else host.strip("[]"),
        own[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


_ALIVE: list["RunStore"] = []
"""Keeps the stores of process groups alive. torch's C++ code keeps only its own half of a store, and would otherwise call methods of a
deleted Python object."""


class RunStore(dist.Store):
    """The authenticated store, with the interface that torch's process groups need. The object exists until its process ends."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        _ALIVE.append(self)
        self._client = client
        self.set_timeout(timedelta(seconds=client.seconds))

    def clone(self) -> "RunStore":
        """Return this store itself; all threads share its connection, one at a time."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until the key is set, and read its value."""
        return self._client.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a counter that begins at 0, and return the sum."""
        return self._client.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """True if all of these keys are set."""
        return self._client.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys are set."""
        self._client.wait(keys, None if timeout is None else timeout.total_seconds())

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace the key's value if it is the expected one, and return the current value."""
        return self._client.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return True if it existed."""
        return self._client.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._client.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  # as torch calls them from C++
