"""One rank's process, from its first line of Python to its exit status.

The fork server calls `begin` in a new child; where forks are unsafe, `python -m megalith.fleet.rank JOB RANK PARENT` does the
same in a new process. In both cases, the rank calls the job's entry function, and saves an exception for the supervisor.
"""

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any, NoReturn

from megalith import disk
from megalith.fleet import causes, heartbeat, rank_info
from megalith.fleet.causes import RankError
from megalith.fleet.evidence import STACKS
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.machine import parent_watch

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # a person, a scheduler, a terminal that closes: stop
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Assignment:
    """The content of the job file, which the supervisor writes for its ranks. `path`: Python's module path. `parent_watch`: a
    descriptor. `placement`: the node of each slot. `memory`: folder that contains the nodes' copies of the state in shared memory
    (empty: no copies). `own`: folder for logs and other files of this supervisor (process `agent`) and its ranks. `heartbeats`:
    the file of heartbeats (empty: no process reads heartbeats). `meeting`: the store for the rendezvous of all ranks
    ("megalith://HOST:PORT"); empty: a file in `own`, if all ranks are on one machine. The run's key is not in the job file,
    because other users may read it.
    """

    entry: str
    arguments: dict[str, Any]
    ranks: int
    threads: int
    environment: dict[str, str]
    run_dir: str
    generation: str
    path: list[str]
    parent_watch: int
    own: str
    agent: int
    placement: list[str] = field(default_factory=lambda: ["0"])
    memory: str = ""
    here: list[int] = field(default_factory=list)
    meeting: str = ""
    heartbeats: str = ""

    @classmethod
    def load(cls, path: Path) -> "Assignment":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @property
    def folder(self) -> Path:
        """Folder of the ranks' logs, errors and store."""
        return Path(self.own)

    @property
    def store(self) -> Path:
        """The file for the rendezvous of this generation's ranks (`torch.distributed.FileStore`)."""
        return self.folder / f"store-{self.generation}"

    @property
    def reports(self) -> Path:
        """Folder of the ranks' reports."""
        return self.folder / "reports"

    @property
    def server_log(self) -> Path:
        return self.folder / "server.log"

    def log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error.json"

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of `rank` in addition to inherited ones."""
        fixed = {
            "RANK": rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.here.index(rank),
            "LOCAL_WORLD_SIZE": len(self.here),
            "MEGALITH_STORE": self.meeting or f"file://{self.store}",
            "MEGALITH_GENERATION": self.generation,
            "MEGALITH_RUN_DIR": self.run_dir,
            rank_info.REPORTS: self.reports,
            rank_info.PLACEMENT: ",".join(self.placement),
            rank_info.AGENT: self.agent,
        }
        if self.memory:
            fixed[rank_info.MEMORY] = self.memory
        if self.heartbeats:
            fixed[heartbeat.VARIABLE] = self.heartbeats
        threads = dict.fromkeys(THREAD_VARIABLES, str(self.threads))
        return threads | self.environment | {name: str(value) for name, value in fixed.items()}


def header(generation: str, what: str) -> bytes:
    """Return the dated line with which a generation begins in a log, and which `evidence.output` searches for."""
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return f"==== {now} generation {generation}: {what} ====\n".encode()


def open_log(assignment: Assignment, rank: int) -> None:
    """Append a header to the rank's log, and then this process's output, line by line."""
    with disk.appending(assignment.log(rank)) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (disk.text_output(disk.Output(descriptor)) for descriptor in (1, 2))
    os.write(1, header(assignment.generation, f"rank {rank} of {assignment.ranks}, process {os.getpid()}"))


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals that request a stop of this process. SIGHUP is left out if it was ignored from the beginning
    (`nohup`)."""
    return tuple(number for number in REQUESTS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


def set_signals() -> None:
    """Set a rank's signal handling, whatever the parent process has set. SIGHUP stays ignored if it was ignored before."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # the entry sets its own handlers; until then there is nothing to save
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the supervisor's, which asks every rank to stop with SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)  # the fork server holds them back
    faulthandler.enable(2)
    faulthandler.unregister(STACKS)  # the fork server's: what is registered already would not be put back over the next line's
    signal.signal(STACKS, lambda number, frame: None)  # do nothing more; a thread that waits for signals still gets it
    faulthandler.register(STACKS, file=2, all_threads=True, chain=True)


def set_threads(threads: int) -> None:
    """Set torch's number of compute threads if torch is imported. Otherwise, torch will read the number from the environment."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def resolve(entry: str) -> Callable[..., object]:
    """Return the function named "module:function". Raises ImportError or AttributeError as Python does."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _write_error(path: Path, error: BaseException, phase: str) -> None:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(traceback.format_exception(error))
    record = RankError(type=name, message=str(error), traceback=text, time=time(), phase=phase)
    print(text, file=sys.stderr, flush=True)
    with disk.if_available(path):
        disk.write_whole(path, json.dumps(asdict(record), indent=1))


def call(assignment: Assignment, rank: int, beats: Heartbeat) -> int:
    """Call the entry function and return the exit status. If the function fails with an exception, write the exception to the log
    and to `rank-R.error.json`."""
    try:
        beats.beat("import")
        entry = resolve(assignment.entry)
        beats.beat("run")
        entry(**assignment.arguments)
    except BaseException as error:
        last, status = beats.read(), causes.status(error)
        if status not in ORDERLY:
            _write_error(assignment.error(rank), error, last.phase)
        beats.beat("stopped" if status in ORDERLY else "failed", last.step)
        return status
    beats.beat("done", beats.read().step)
    return ExitCode.FINISHED


def leave(status: int) -> NoReturn:
    """End the process without shutting the interpreter down, because communication threads that still run would crash during the
    shutdown."""
    if status in ORDERLY:
        atexit._run_exitfuncs()  # a failed rank is gone at once instead, so that it is seen to fail first
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def begin(assignment: Assignment, rank: int, *, parent: int) -> NoReturn:
    """Run `rank` in this process: make the process end with its parent, redirect output to the rank's log, call the entry
    function, and exit."""
    status: int = ExitCode.FAILED
    try:
        parent_watch.die_with_parent(parent)
        open_log(assignment, rank)
        set_signals()
        parent_watch.watch(assignment.parent_watch)
        os.environ.update(assignment.variables(rank))
        set_threads(assignment.threads)
        status = call(assignment, rank, Heartbeat.find())
    except BaseException:  # this runs in a fork of the server: nothing may climb back into the server's own loop
        traceback.print_exc()
    leave(status)


def main() -> NoReturn:
    """Run a rank in a fresh process. Arguments: JOB file, RANK, the parent's process id."""
    assignment, rank, parent = Assignment.load(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    sys.path[:] = assignment.path
    begin(assignment, rank, parent=parent)


if __name__ == "__main__":
    main()
