"""The fork server, and its client in the supervisor. The server imports the ranks' modules once, then forks ranks in milliseconds, reaps
them, and reports their ends. The server is safe to fork, because it has one thread and no torch process group, store or accelerator
context. A fork of a process with several threads would lack these threads and inherit their locks, which are then never released. The
server reads commands from standard input and writes reports to standard output, one JSON object per line:

    {"prepare": {"path": [...], "preload": [...]}}   ->  {"prepared": seconds}  or  {"problem": text}
    {"fork": {"job": path, "ranks": [...]}}          ->  {"forked": {rank: process id}}  or  {"problem": text}
                                                         {"exit": rank, "code": as in subprocess, "time": seconds since the epoch}

When the input ends, because the supervisor has ended or closed it, the server kills every rank and exits.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from megalith import disk
from megalith.fleet.causes import Exit, Failure, signal_name
from megalith.fleet.evidence import STACKS, output, tail
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.processes import environment, kill_group
from megalith.fleet.rank import REQUESTS, THREAD_VARIABLES, Assignment, begin, header
from megalith.machine import parent_watch

REAP_SECONDS = 1.0  # that the fork server may take to report a rank's end which the kernel shows already


# --- the side that commands it ---


def readable(file: IO[bytes] | int, *, seconds: float) -> bool:
    """True if data or the end of the stream arrives within `seconds`. Uses poll(), because select() fails for descriptors above
    1,023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Handle:
    """A process that is not a child of this one. On Linux it is identified by a descriptor, because its id may be reused for
    another process."""

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


class ForkServer:
    """Client of a `Server`, a separate process that imports the modules `preload`, forks ranks and reports their ends. The server
    gets its environment, module path and parent watch from the first assignment. `secret`: further environment variables of the
    ranks, which must not be written to a file.
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
        command = [sys.executable, "-P", "-m", "megalith.fleet.fork_server", str(os.getpid()), str(assignment.parent_watch)]
        single = dict.fromkeys(THREAD_VARIABLES, "1")  # read when a library is loaded: before any rank can set its own
        with disk.appending(self._log) as log:
            log.write(header(assignment.generation, "the fork server"))
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(assignment.environment | single | dict(secret)),
                pass_fds=(assignment.parent_watch,),
                process_group=0,  # a Ctrl-C at the terminal is for the supervisor only
                bufsize=0,
            )
        assert self._server.stdin is not None  # both are pipes
        assert self._server.stdout is not None
        self._commands, self._reports = self._server.stdin, self._server.stdout
        self._command({"prepare": {"path": assignment.path, "preload": list(preload)}})

    def start(self, assignment: Assignment, job: Path) -> None:
        assert not self.running(), f"ranks {sorted(self.running())} of the previous start are still running"
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
                reason = "could not import the ranks' modules or fork the ranks"
                return Failure(None, reason, error, tail(text), self._log, time.time(), ExitCode.FAILED)
            case _:
                self._preparing = False
                return None

    def _is_stuck(self) -> bool:
        """True if a rank has ended but the server has not reported this in time, because the server is stopped or hangs."""
        if all(self._handles[rank].alive() for rank in self.running()):
            self._unreported_since = None
            return False
        if self._unreported_since is None:
            self._unreported_since = time.monotonic()
        return time.monotonic() - self._unreported_since > REAP_SECONDS

    def _lost(self, reason: str | None = None) -> Failure:
        """Return the failure of a server that has ended, or that is killed here because it no longer reports (`reason`)."""
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
        """Return the ends of ranks after the server's end, which kills them. The ranks are reported as killed by SIGKILL, because
        their exit statuses are unknown."""
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


# --- the server ---


class NotPristineError(RuntimeError):
    """This process is not safe to fork."""


def impurities() -> list[str]:
    """Return the reasons why this process cannot be forked safely; empty if it can."""
    found = []
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    if threads != 1:
        found.append(f"{threads} threads (a fork has only one of them, and inherits the locks of the others)")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found.append("a process group of torch.distributed (parent and fork would share its connections)")
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        found.append("a CUDA context (which is unusable after a fork)")
    return found


def preload(modules: Sequence[str]) -> None:
    """Import `modules`; in "module:function", call the function, which fills a cache that ranks need. Raises NotPristineError if the
    process cannot be forked safely after these imports, and any exception of an import or a function."""
    for name in modules:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # a rank hangs in OpenMP if its parent ever used more than one thread
    found = impurities()
    if found:
        raise NotPristineError(
            f"the fork server holds {' and '.join(found)} after importing {', '.join(modules)}. From the job's preload, "
            f"remove the module that starts threads, a process group or CUDA, or set MEGALITH_START=spawn to start ranks as fresh "
            f"processes, which is slower"
        )
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page that the ranks share


class Server:
    """Loop of the server in one thread, which wakes up when a command arrives, a child ends, or the input ends."""

    def __init__(self, commands: int, reports: int, parent_watch: int) -> None:
        self._commands = commands
        self._reports = reports
        self._parent_watch = parent_watch
        self._pending = b""
        self._ranks: dict[int, int] = {}  # process id -> rank
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Carry out commands until the input ends or a command fails."""
        while True:
            ready, _, _ = select.select([self._commands, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            if self._commands in ready and not self._read_commands():
                break
        for process in self._ranks:
            kill_group(process)

    def _read_commands(self) -> bool:
        data = os.read(self._commands, 1 << 16)
        *lines, self._pending = (self._pending + data).split(b"\n")
        return bool(data) and all(self._obey(json.loads(line)) for line in lines)

    def _obey(self, command: dict[str, Any]) -> bool:
        try:
            if "prepare" in command:
                begun = time.monotonic()
                sys.path[:] = command["prepare"]["path"]
                preload(command["prepare"]["preload"])
                self._report({"prepared": time.monotonic() - begun})
            else:
                self._fork(Assignment.load(Path(command["fork"]["job"])), command["fork"]["ranks"])
        except BaseException as error:  # also SystemExit from a module that is imported: the supervisor must hear of it
            traceback.print_exc()
            text = "".join(traceback.format_exception(error))
            self._report({"problem": f"{type(error).__name__}: {error}", "traceback": text})
            return False
        return True

    def _fork(self, assignment: Assignment, ranks: Sequence[int]) -> None:
        server = os.getpid()
        forked = {}
        for number in ranks:
            sys.stdout.flush()
            sys.stderr.flush()
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (self._commands, self._reports, self._woken, self._wake):
                    os.close(descriptor)
                os.setpgid(0, 0)
                begin(assignment, number, parent=server)
            # A group of its own, so that what a rank starts can be ended with it; set on both sides, as either may be first.
            with contextlib.suppress(ProcessLookupError):
                os.setpgid(process, process)
            self._ranks[process] = number
            forked[str(number)] = process
        self._report({"forked": forked})

    def _reap(self) -> None:
        while self._ranks:
            # Look first and reap later: while the rank is not reaped its process id, which is its group's too, cannot be reused.
            end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return
            kill_group(end.si_pid)
            _, status = os.waitpid(end.si_pid, 0)
            number = self._ranks.pop(end.si_pid, None)
            if number is not None:
                self._report({"exit": number, "code": os.waitstatus_to_exitcode(status), "time": time.time()})

    def _report(self, report: dict[str, Any]) -> None:
        data = json.dumps(report).encode() + b"\n"
        while data:
            data = data[os.write(self._reports, data) :]


def main() -> None:
    """Run a server. Command-line arguments: the supervisor's process id, and the descriptor of a pipe that is closed when the
    supervisor ends, which ranks watch."""
    parent, watched = int(sys.argv[1]), int(sys.argv[2])
    # Meant for the ranks; the server goes when its input ends. Blocked, not ignored: a rank inherits that, so a request to stop
    # that comes just after its fork waits until the rank has set its own handlers, instead of being lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    parent_watch.die_with_parent(parent)
    faulthandler.enable(2)
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)
    commands, reports = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what an imported module prints goes to the server's log, not among the reports
    Server(commands, reports, watched).serve()


if __name__ == "__main__":
    main()
