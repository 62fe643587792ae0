"""Entries of the ranks in these tests. They import no torch unless their docstring says so, and start in milliseconds."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megalith.fleet.environment import find
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat


def _rank() -> int:
    return int(os.environ["RANK"])


def _start() -> Heartbeat:
    """Record this process's id, and report that it is ready."""
    folder = Path(os.environ["MEGALITH_RUN_DIR"])
    part = folder / f"pids-{_rank()}.new"
    part.write_text(f"{os.getpid()} {os.getppid()}")
    part.rename(folder / f"pids-{_rank()}")
    beats = Heartbeat.find()
    beats.beat("ready")
    return beats


def finish(word: str) -> None:
    _start()
    print(f"{word} from rank {_rank()} of {os.environ['WORLD_SIZE']}")
    assert find() is not None


def wait() -> None:
    _start()
    _forever()


def _forever() -> None:
    """Wait until this process is ended; a handled signal does not end the sleep."""
    while True:
        time.sleep(3600)


def one_raises(own: int) -> None:
    """Rank `own` raises an error. The others lose their connections because of it, and end before it has reported the error."""
    _start()
    if _rank() != own:
        raise ConnectionResetError("[Errno 104] Connection reset by peer")
    folder, others = Path(os.environ["MEGALITH_RUN_DIR"]), set(range(int(os.environ["WORLD_SIZE"]))) - {own}
    while not all((folder / f"ranks/rank-{rank}.error.json").exists() for rank in others):
        time.sleep(0.01)
    raise ValueError("the token 70000 is not below the vocabulary's 32000")


def one_raises_rest_waits(own: int) -> None:
    _start()
    if _rank() == own:
        raise ValueError("mine")
    _forever()


def kill_yourself(own: int, number: int) -> None:
    beats = _start()
    beats.beat("forward", 7)
    if _rank() == own:
        if number == signal.SIGSEGV:
            ctypes.string_at(0)
        os.kill(os.getpid(), number)
    _forever()


def never_ready(own: int) -> None:
    beats = Heartbeat.find()
    if _rank() == own:
        sleep_in_a_function_with_this_name()
    beats.beat("join")
    _forever()


def sleep_in_a_function_with_this_name() -> None:
    while True:
        time.sleep(3600)


def fall_silent(own: int) -> None:
    """All ranks send heartbeats until rank `own` hangs in step 3 and the others wait for it in step 4."""
    beats = _start()
    for step in range(3 if _rank() == own else 4):
        beats.beat("step", step + 1)
        time.sleep(0.02)
    _forever()


def save_when_asked() -> None:
    """Stop gracefully at SIGTERM."""
    asked: list[int] = []  # not an Event: the code that the handler interrupts may hold its lock
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _start()
    while not asked:
        time.sleep(0.01)
    print("saved")
    raise SystemExit(ExitCode.STOPPED)


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()


def leave_with(code: int) -> None:
    _start()
    error = RuntimeError("asks for a status")
    error.exit_code = code  # type: ignore[attr-defined]
    raise error


def start_a_process() -> None:
    """A rank is killed while a process that it started still runs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    Path(os.environ["MEGALITH_RUN_DIR"], "grandchild").write_text(str(child.pid))
    _start()
    os.kill(os.getpid(), signal.SIGKILL)


def all_reduce(fail: int | None = None) -> None:
    """Ranks meet through a file store (torch). Then one may fail while the others wait for it."""
    import torch  # imported here so that only tests that preload it pay for it
    import torch.distributed as dist

    begun = time.monotonic()
    place = find()
    assert place is not None and place.generation is not None
    store: Any = dist.PrefixStore(place.generation, dist.FileStore(place.store.removeprefix("file://"), place.world))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == place.world
    print(f"first all-reduce after {time.monotonic() - begun:.3f} s with {torch.get_num_threads()} threads")
    Heartbeat.find().beat("ready")
    if place.rank == fail:
        raise ValueError("mine")
    dist.all_reduce(total)
    dist.destroy_process_group()


def wait_like_the_others(own: int) -> None:
    """All ranks end up in a call named `wait`: three of them in a collective that rank `own` never begins."""
    import torch
    import torch.distributed as dist

    from megalith.train import collective_progress

    collective_progress.answer()
    place, never = find(), threading.Event()
    assert place is not None
    store: Any = dist.FileStore(place.store.removeprefix("file://"), place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)
    total = torch.ones(1)
    for _ in range(3):
        dist.all_reduce(total)
    Heartbeat.find().beat("ready")
    Heartbeat.find().beat("step", 3)
    if place.rank == own:
        never.wait()
    work = dist.all_reduce(total, async_op=True)
    Path(os.environ["MEGALITH_RUN_DIR"], f"begun-{place.rank}").touch()
    work.wait()
