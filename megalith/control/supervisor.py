"""Starts the ranks of a run on this machine once, watches them, and reports why they ended; `controller` restarts them. One loop in one
thread handles ends of processes, heartbeats in shared memory, and signals to this process. This module does not import torch.
"""

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from megalith import epochs
from megalith.control import incidents
from megalith.control.outcome import Outcome
from megalith.control.owner import Owner, owned
from megalith.control.stop_response import StopResponse, Store, no_copies, print_line
from megalith.control.watch import Request, Watch
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.nodes import Generation
from megalith.fleet.rank import heeded

__all__ = ["Job", "run"]


def run(
    job: Job,
    *,
    tick: Callable[[], None] = lambda: None,
    notify: Callable[[str], None] = print_line,
    store: Store = no_copies,
    owner: Owner | None = None,
) -> Outcome:
    """Start the job's ranks, and return when all have ended. `tick` is called about every 20 ms. `notify` receives messages for
    the user. `store` lists the checkpoints. SIGTERM, SIGUSR1, SIGHUP (unless it is ignored) and the first SIGINT to this process
    are passed on to every rank as one SIGTERM; a later SIGINT ends all ranks immediately. `owner`: the ownership of the run
    folder, if the caller has it. Raises ValueError, with all problems, for a job that cannot be started, and InUseError if
    another process owns its run folder.
    """
    job.check()
    with owned(job.run_dir, owner) as own, requests_to_stop() as requests:
        nodes = LocalNodes(job, folder=epochs.of_ranks(job.run_dir, own.epoch))
        try:
            nodes.start(Generation(secrets.token_hex(4), nodes.there(), epoch=own.epoch))
            response = StopResponse(requests, notify, beats=nodes.beats, copies=store)
            watch = Watch(job, nodes, requests, stop_response=response, epoch=own.epoch)
            return incidents.write(watch.until_all_ended(own.checked(tick)), job.run_dir, epoch=own.epoch)
        finally:
            nodes.close(forget=True)


@contextlib.contextmanager
def requests_to_stop() -> Iterator[list[Request]]:
    """Yield a list to which (number, monotonic seconds) of each received signal that requests a stop is appended. Signals are
    received only in the main thread."""
    received: list[Request] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append((number, time.monotonic()))

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, note) for number in heeded()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
