"""Two ways to start the ranks of one machine, with one interface: forks of a fork server, fresh processes where a fork is
unsafe."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

import megalith
from megalith.fleet.causes import Exit, Failure, signal_name
from megalith.fleet.evidence import STACKS, output, tail
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.rank import THREAD_VARIABLES, Assignment, header

METHOD = "MEGALITH_START"
REAP_SECONDS = 1.0  # that the fork server may take to report a rank's end which the kernel shows already


def readable(file: IO[bytes] | int, *, seconds: float) -> bool:
    """True if there is something to read, or an end, within `seconds`. Unlike select(), poll() takes descriptors above 1,023 too."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Processes(Protocol):
    """Running ranks."""

    def start(self, assignment: Assignment, job: Path) -> None:
        """Start the next generation; all ranks of the one before must have ended."""
        ...

    @property
    def fit(self) -> bool:
        """True if another generation can be started from here at once."""
        ...

    def running(self) -> dict[int, int]:
        """Process ids of the ranks that were started and have not been reported as ended."""
        ...

    def wait(self, seconds: float) -> list[Exit | Failure]:
        """Wait at most `seconds` for events: exits of ranks, and failures of the process that starts them."""
        ...

    def send(self, number: int, ranks: Iterable[int]) -> None:
        """Send a signal to ranks; SIGKILL goes to the processes they started as well."""
        ...

    def show_stack(self) -> None:
        """Make the process that starts ranks write its stack into its log, if there is such a process."""
        ...

    def close(self) -> None:
        """End whatever still runs."""
        ...


class Handle:
    """A process that someone else reaps. On Linux it is held by descriptor: its id alone could come to mean another process."""

    def __init__(self, process: int) -> None:
        self.process = process
        self._descriptor: int | None = None
        self.gone = False
        try:
            self._descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            self.gone = True
        except (AttributeError, OSError):  # another system, or a sandbox that forbids it: signals go by process id
            pass

    def send(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        if not self.alive():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._descriptor is None:
                os.kill(self.process, number)
            else:
                signal.pidfd_send_signal(self._descriptor, number)

    def alive(self) -> bool:
        """True if the process has not ended yet."""
        if not self.gone and self._descriptor is not None:
            self.gone = readable(self._descriptor, seconds=0)
        elif not self.gone:
            try:
                os.kill(self.process, 0)
            except ProcessLookupError:
                self.gone = True
        return not self.gone

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self.gone = True


def kill_group(process: int) -> None:
    """SIGKILL a process group; nothing happens when it is empty."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, in which a fresh interpreter finds the same megalith; the job file has the rest of the path."""
    root = str(Path(megalith.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root} | dict(extra)


class ForkServer:
    """Ranks as forks of `megalith.fleet.fork_server`, which has imported `preload` and reports their ends.

    It takes its environment, module path and lifeline from the first assignment. `secret`: further variables for the ranks that
    must not be in a file.
    """

    def __init__(
        self, assignment: Assignment, *, preload: Sequence[str], secret: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._log = assignment.server_log
        self._generation = assignment.generation
        self._handles: dict[int, Handle] = {}
        self._ended: set[int] = set()
        self._pending = b""
        self._alive = True
        self._preparing, self._forking = True, False
        self._unreported_since: float | None = None
        command = [sys.executable, "-P", "-m", "megalith.fleet.fork_server", str(os.getpid()), str(assignment.lifeline)]
        single = dict.fromkeys(THREAD_VARIABLES, "1")  # read when a library is loaded: before any rank can set its own
        with self._log.open("ab", buffering=0) as log:
            log.write(header(assignment.generation, "the fork server"))
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(assignment.environment | single | dict(secret)),
                pass_fds=(assignment.lifeline,),
                process_group=0,  # a Ctrl-C at the terminal is for the supervisor only
                bufsize=0,
            )
        assert self._server.stdin is not None  # both are pipes
        assert self._server.stdout is not None
        self._commands, self._reports = self._server.stdin, self._server.stdout
        self._command({"prepare": {"path": assignment.path, "preload": list(preload)}})

    def start(self, assignment: Assignment, job: Path) -> None:
        assert not self.running(), f"ranks {sorted(self.running())} of the generation before still run"
        for handle in self._handles.values():
            handle.close()
        self._handles, self._ended, self._forking = {}, set(), True
        self._command({"fork": {"job": str(job), "ranks": assignment.here}})

    def _command(self, command: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # a server that is gone already is reported by `wait`
            self._commands.write(json.dumps(command).encode() + b"\n")

    @property
    def fit(self) -> bool:
        return self._alive and not self._preparing and not self._forking and not self.running()

    def running(self) -> dict[int, int]:
        return {rank: handle.process for rank, handle in self._handles.items() if rank not in self._ended}

    def wait(self, seconds: float) -> list[Exit | Failure]:
        if not self._alive:
            time.sleep(seconds)
            return self._orphans()
        if not readable(self._reports, seconds=seconds):
            return [self._lost("no longer reports")] if self._is_stuck() else []
        self._unreported_since = None
        data = os.read(self._reports.fileno(), 1 << 16)
        if not data:
            return [self._lost()]
        *lines, self._pending = (self._pending + data).split(b"\n")
        happened = [self._understand(json.loads(line)) for line in lines]
        return [what for what in happened if what is not None]

    def _understand(self, report: dict[str, object]) -> Exit | Failure | None:
        match report:
            case {"exit": int(rank), "code": int(code), "time": float(at)}:
                self._ended.add(rank)
                return Exit(rank, code, at)
            case {"forked": dict(processes)}:
                self._forking = False
                for rank, process in processes.items():
                    self._handles[int(rank)] = Handle(int(process))
                return None
            case {"problem": str(error), "traceback": str(text)}:
                reason = "could not prepare the ranks"
                return Failure(None, reason, error, tail(text), self._log, time.time(), ExitCode.FAILED)
            case _:
                self._preparing = False
                return None

    def _is_stuck(self) -> bool:
        """True if ranks have ended and the server does not report it: it is stopped, or hangs."""
        if all(self._handles[rank].alive() for rank in self.running()):
            self._unreported_since = None
            return False
        if self._unreported_since is None:
            self._unreported_since = time.monotonic()
        return time.monotonic() - self._unreported_since > REAP_SECONDS

    def _lost(self, reason: str | None = None) -> Failure:
        """Return the failure of a server that will report nothing more: it has ended, or must be ended."""
        self._alive = False
        at = time.time()
        if reason is not None:
            self._server.kill()
        try:
            code = self._server.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._server.kill()
            code = self._server.wait()
        reason = reason or (f"was killed by {signal_name(-code)}" if code < 0 else f"ended with status {code}")
        return Failure(None, reason, "", tail(output(self._log, self._generation)), self._log, at, ExitCode.LOST)

    def _orphans(self) -> list[Exit | Failure]:
        """Return the ends that the server can no longer report. How they ended is unknown; the server's end kills its ranks."""
        ended = [rank for rank in self.running() if not self._handles[rank].alive()]
        self._ended.update(ended)
        return [Exit(rank, -signal.SIGKILL, time.time()) for rank in ended]

    def send(self, number: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._ended or rank not in self._handles:
                continue
            handle = self._handles[rank]
            if number == signal.SIGKILL and handle.alive():
                kill_group(handle.process)
            handle.send(number)

    def show_stack(self) -> None:
        self._server.send_signal(STACKS)

    def close(self) -> None:
        self._commands.close()
        try:
            self._server.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self.send(signal.SIGKILL, self.running())
        self._reports.close()
        for handle in self._handles.values():
            handle.close()


class FreshProcesses:
    """Ranks as fresh interpreters: slower, and right where a fork is unsafe (macOS)."""

    def __init__(
        self, assignment: Assignment, *, preload: Sequence[str], secret: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        del assignment, preload  # nothing is shared: each rank imports what its entry needs
        self._secret = dict(secret)
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()

    def start(self, assignment: Assignment, job: Path) -> None:
        assert not self.running(), f"ranks {sorted(self.running())} of the generation before still run"
        self._ranks, self._ended = {}, set()
        try:
            for rank in assignment.here:
                self._ranks[rank] = self._start(assignment, job, rank)
        except BaseException:
            self.close()
            raise

    def _start(self, assignment: Assignment, job: Path, rank: int) -> subprocess.Popen[bytes]:
        with assignment.log(rank).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "megalith.fleet.rank", str(job), str(rank), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(assignment.variables(rank) | self._secret),
                pass_fds=(assignment.lifeline,),
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
        """No process stands between the supervisor and these ranks."""

    def close(self) -> None:
        self.send(signal.SIGKILL, self.running())
        for process in self._ranks.values():
            process.wait()


STARTS: dict[str, Callable[..., Processes]] = {"fork": ForkServer, "spawn": FreshProcesses}


def method(environment: Mapping[str, str] = os.environ) -> str:
    """Return how ranks start here: the value of MEGALITH_START, else "fork" on Linux and "spawn" elsewhere. ValueError for
    another word."""
    asked = environment.get(METHOD)
    if asked is None:
        return "fork" if sys.platform == "linux" else "spawn"
    if asked not in STARTS:
        raise ValueError(f"{METHOD}={asked} is not a way to start ranks. Use {' or '.join(sorted(STARTS))}, or leave it out")
    if asked == "fork" and sys.platform == "darwin":
        raise ValueError(f"{METHOD}=fork: system libraries of macOS do not survive a fork. Use spawn, or leave it out")
    return asked
