"""The store at which the processes of a run on many machines meet: torch's TCPStore, in a process of its own."""

import os
import signal
from datetime import timedelta

import torch.distributed as dist

from megalith.machine import lifeline

REQUEST_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def serve(port: int) -> tuple[int, int]:
    """Serve a store from a new process, which ends with this one; its process id, and its port (a free one if `port` is 0).

    Not from this process: a fork of one that serves a store leaves the children with locks that nobody will release. For the same reason
    this must be called while there is one thread. Raises RuntimeError when the port cannot be had.
    """
    parent = os.getpid()
    ready, said = os.pipe()
    process = os.fork()
    if process == 0:
        _be_the_server(port, said, parent)
    os.close(said)
    with os.fdopen(ready) as answer:
        text = answer.read()
    if not text.isdecimal():
        os.waitpid(process, 0)
        raise RuntimeError(
            f"no store could be served at port {port}: {text or 'its process ended'}. Free the port, or use another"
        )
    return process, int(text)


def _be_the_server(port: int, said: int, parent: int) -> None:
    try:
        lifeline.die_with_parent(parent)
        for number in REQUEST_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # meant for whoever serves a run; its store goes last
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        os.write(said, str(store.port).encode())
        os.close(said)
        while True:
            signal.pause()
    except BaseException as error:  # this is a fork: nothing may climb back into the caller
        os.write(said, repr(error).encode())
    finally:
        os._exit(1)


def connect(address: str, *, seconds: float) -> dist.TCPStore:
    """A connection of one's own to the store at "tcp://HOST:PORT", waiting `seconds` for it to be there.

    Raises torch's DistNetworkError (a RuntimeError) when it does not come.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout, wait_for_workers=False)
