"""Two ways to start the ranks of one machine, with one interface: as forks of a fork server (`fleet.fork_server`), and, where
forks are unsafe, as fresh processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import megalith
from megalith import disk
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.rank import Assignment

METHOD = "MEGALITH_START"
METHODS = ("fork", "spawn")


class Processes(Protocol):
    """Running ranks."""

    def start(self, assignment: Assignment, job: Path) -> None:
        """Start the ranks of the next generation. All ranks of the previous generation must have ended."""
        ...

    @property
    def fit(self) -> bool:
        """True if another generation can be started at once."""
        ...

    def running(self) -> dict[int, int]:
        """Return the process ids of the ranks that were started and have not been reported as ended."""
        ...

    def wait(self, seconds: float) -> list[Exit | Failure]:
        """Wait at most `seconds` for events: exits of ranks, and failures of the process that starts ranks."""
        ...

    def send(self, number: int, ranks: Iterable[int]) -> None:
        """Send a signal to ranks; SIGKILL is also sent to the processes that ranks started."""
        ...

    def show_stack(self) -> None:
        """Make the process that starts ranks write its stack into its log, if there is such a process."""
        ...

    def close(self) -> None:
        """End whatever still runs."""
        ...


def kill_group(process: int) -> None:
    """Send SIGKILL to a process group; an empty group is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, changed so that a new interpreter imports the same megalith. Ranks read this process's
    other module paths from the job file."""
    root = str(Path(megalith.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root} | dict(extra)


class FreshProcesses:
    """Ranks as new Python interpreters, which start more slowly than forks, for systems on which forks are unsafe (macOS)."""

    def __init__(
        self, assignment: Assignment, *, preload: Sequence[str], secret: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        del assignment, preload  # nothing is preloaded for all: each rank imports the modules of its entry
        self._secret = dict(secret)
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()

    def start(self, assignment: Assignment, job: Path) -> None:
        assert not self.running(), f"ranks {sorted(self.running())} of the previous start are still running"
        self._ranks, self._ended = {}, set()
        try:
            for rank in assignment.here:
                self._ranks[rank] = self._start(assignment, job, rank)
        except BaseException:
            self.close()
            raise

    def _start(self, assignment: Assignment, job: Path, rank: int) -> subprocess.Popen[bytes]:
        with disk.appending(assignment.log(rank)) as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "megalith.fleet.rank", str(job), str(rank), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(assignment.variables(rank) | self._secret),
                pass_fds=(assignment.parent_watch,),
                process_group=0,
            )

    @property
    def fit(self) -> bool:
        return not self.running()

    def running(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._ranks.items() if rank not in self._ended}

    def wait(self, seconds: float) -> list[Exit | Failure]:
        happened = self._ends()
        if not happened:
            time.sleep(seconds)
            happened = self._ends()
        return happened

    def _ends(self) -> list[Exit | Failure]:
        happened: list[Exit | Failure] = []
        for rank, process in self._ranks.items():
            if rank not in self._ended and process.poll() is not None:
                kill_group(process.pid)  # what the rank started; the group's id stays taken while it has members
                self._ended.add(rank)
                happened.append(Exit(rank, process.returncode, time.time()))
        return happened

    def send(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            process = self._ranks.get(rank)
            if process is None or process.poll() is not None:
                continue
            if number == signal.SIGKILL:
                kill_group(process.pid)
            process.send_signal(number)

    def show_stack(self) -> None:
        """No-op: the supervisor itself starts the ranks, so no other process has a stack to show."""

    def close(self) -> None:
        self.send(signal.SIGKILL, self.running())
        for process in self._ranks.values():
            process.wait()


def method(environment: Mapping[str, str] = os.environ) -> str:
    """Return how ranks start here: the value of MEGALITH_START, else "fork" on Linux and "spawn" elsewhere. Raises ValueError for
    any other value, and for "fork" on macOS."""
    asked = environment.get(METHOD)
    if asked is None:
        return "fork" if sys.platform == "linux" else "spawn"
    if asked not in METHODS:
        raise ValueError(f"{METHOD}={asked} is not a way to start ranks. Use {' or '.join(METHODS)}, or unset {METHOD}")
    if asked == "fork" and sys.platform == "darwin":
        raise ValueError(f"{METHOD}=fork: system libraries of macOS do not survive a fork. Use spawn, or unset {METHOD}")
    return asked
