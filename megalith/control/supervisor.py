"""Starts the ranks of a run on this machine once, watches them, and says why they ended; `controller` starts them again.

One thread and one loop over three things: ends of processes, heartbeats in shared memory, and signals to this process. Nothing here
imports torch.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from megalith.control.outcome import Outcome
from megalith.control.watch import Request, Watch
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.nodes import Generation
from megalith.fleet.rank import REQUESTS

__all__ = ["Job", "run"]


def run(job: Job, *, tick: Callable[[], None] | None = None) -> Outcome:
    """Start the job's ranks and stay until all have ended; `tick` is called about every 20 ms meanwhile.

    SIGTERM, SIGUSR1 and the first SIGINT to this process are passed on to every rank, once, as SIGTERM; a later SIGINT ends all
    at once. Raises ValueError for a job that cannot be started, with all its problems, and RuntimeError when its run folder is in
    use.
    """
    job.check()
    with alone(job.run_dir), requests_to_stop() as requests:
        nodes = LocalNodes(job)
        try:
            nodes.start(Generation(secrets.token_hex(4), nodes.there()))
            return Watch(job, nodes, requests).until_all_ended(tick or (lambda: None))
        finally:
            nodes.close(forget=True)


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Hold a run folder: two supervisors in it would mix up logs and checkpoints. The lock goes with the process."""
    folder = run_dir.resolve() / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "(unknown)"
            raise RuntimeError(
                f"{folder.parent} is in use by process {holder}. Wait for it, stop it, or use another run folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextlib.contextmanager
def requests_to_stop() -> Iterator[list[Request]]:
    """The signals that ask to stop, as they come: (number, monotonic seconds). Outside the main thread none can be caught."""
    received: list[Request] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append((number, time.monotonic()))

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in REQUESTS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
