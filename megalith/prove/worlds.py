"""Small worlds: run a function on several ranks. The ranks are forked from this process, so that torch is imported only once, and
communicate by gloo, which they join through a file.

Checks and tests use such worlds, of which they run many one after another. The ranks of a real run are started and watched by
`megalith.fleet`.
"""

import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # ranks would each import it at their first DTensor operation
import torch.distributed as dist
import torch.distributed.tensor

from megalith import disk
from megalith.parallel import one_round


def _rank(rank: int, ranks: int, folder: Path, timeout: float, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    outcome: tuple[str, Any]
    try:
        gc.freeze()  # garbage of the parent may belong to threads that this process does not have
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        one_round.install()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        world = dist.group.WORLD
        dist.barrier(group=world)  # joined on this rank is not yet joined on all: a function that leaves at once fails the slower
        outcome = ("result", function(rank, *args))
        written = pickle.dumps(outcome)
        dist.barrier(group=world)  # a rank that leaves early fails one that is still connecting to it
    except BaseException:
        outcome = ("error", traceback.format_exc())
        written = pickle.dumps(outcome)
    disk.write_whole(folder / f"{rank}", written)
    os._exit(0 if outcome[0] == "result" else 1)  # skip exit handlers: they belong to the parent


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `function(rank, *args)` on each of `ranks` processes, with one compute thread each; return the results in rank order.

    This process must use one thread too: a forked child that uses several threads hangs in OpenMP if its parent ever did.

    Raises RuntimeError with the first failing rank's traceback, or TimeoutError naming the ranks that did not finish.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children: dict[int, int] = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _rank(rank, ranks, folder, timeout, function, args)
            children[pid] = rank
        running, failed, end = dict(children), None, time.monotonic() + timeout
        try:
            while running and failed is None and time.monotonic() < end:
                for pid in list(running):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done and status:
                        failed = running[pid]
                    if done:
                        del running[pid]
                time.sleep(0.002)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        outcomes = {int(p.name): pickle.loads(p.read_bytes()) for p in folder.iterdir() if p.name.isdigit()}
    errors = {rank: text for rank, (kind, text) in sorted(outcomes.items()) if kind == "error"}
    if failed is not None:
        first = errors.get(failed, "died without a Python error")
        raise RuntimeError(f"rank {failed} of {ranks} failed first:\n{first}\nother ranks: {sorted(set(errors) - {failed})}")
    if running:
        raise TimeoutError(f"ranks {sorted(running.values())} of {ranks} did not finish in {timeout} s")
    return [outcomes[rank][1] for rank in range(ranks)]
