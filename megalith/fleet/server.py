"""The fork server: imports what all ranks need once, then forks ranks in milliseconds, reaps them, and reports.

It stays pristine: one thread, no process group, no store, no accelerator context. A fork of any other process inherits locks that
are never released and threads that do not exist. Commands come on standard input and reports go to standard output, one JSON
object a line:

    {"prepare": {"path": [...], "preload": [...]}}   ->  {"prepared": seconds}  or  {"problem": text}
    {"fork": {"job": path, "ranks": [...]}}          ->  {"forked": {rank: process id}}  or  {"problem": text}
                                                         {"exit": rank, "code": as in subprocess, "time": seconds since the epoch}

The end of the input means that the supervisor is gone or done: every rank is killed and the server leaves.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalith.fleet import rank
from megalith.fleet.evidence import STACKS
from megalith.machine import lifeline


class NotPristineError(RuntimeError):
    """A fork of this process would not work."""


def impurities() -> list[str]:
    """Return the reasons why a fork of this process is unsafe; empty when it is safe."""
    found = []
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else 1
    if threads != 1:
        found.append(f"{threads} threads (a fork copies one of them, and every lock that the others hold)")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found.append("a process group of torch.distributed (its connections and threads would be shared)")
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        found.append("a CUDA context (it does not survive a fork)")
    return found


def preload(modules: Sequence[str]) -> None:
    """Import `modules`. Raises NotPristineError if that left anything that must not be forked, and whatever an import raises."""
    for module in modules:
        importlib.import_module(module)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # a rank hangs in OpenMP if its parent ever used more than one thread
    found = impurities()
    if found:
        raise NotPristineError(
            f"the fork server holds {' and '.join(found)} after importing {', '.join(modules)}. Take the module that does "
            f"this out of the job's preload, or set MEGALITH_START=spawn to start the ranks as fresh processes (slower)"
        )
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page that the ranks share


class Server:
    """The loop: one thread, woken by a command, a child's end, or the end of the input."""

    def __init__(self, commands: int, reports: int, lifeline_end: int) -> None:
        self._commands = commands
        self._reports = reports
        self._lifeline = lifeline_end
        self._pending = b""
        self._ranks: dict[int, int] = {}  # process id -> rank
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Until the input ends, or a command could not be obeyed."""
        while True:
            ready, _, _ = select.select([self._commands, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._reap()
            if self._commands in ready and not self._read_commands():
                break
        for process in self._ranks:
            _kill_group(process)

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
                self._fork(rank.Assignment.load(Path(command["fork"]["job"])), command["fork"]["ranks"])
        except BaseException as error:  # even SystemExit from an imported module: the supervisor must be told
            traceback.print_exc()
            text = "".join(traceback.format_exception(error))
            self._report({"problem": f"{type(error).__name__}: {error}", "traceback": text})
            return False
        return True

    def _fork(self, assignment: rank.Assignment, ranks: Sequence[int]) -> None:
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
                rank.begin(assignment, number, parent=server)
            # Give each rank a process group of its own, so that the processes it starts can be ended with it. Both sides set
            # it, as either may be first.
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
            _kill_group(end.si_pid)
            _, status = os.waitpid(end.si_pid, 0)
            number = self._ranks.pop(end.si_pid, None)
            if number is not None:
                self._report({"exit": number, "code": os.waitstatus_to_exitcode(status), "time": time.time()})

    def _report(self, report: dict[str, Any]) -> None:
        data = json.dumps(report).encode() + b"\n"
        while data:
            data = data[os.write(self._reports, data) :]


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def main() -> None:
    """Arguments: the supervisor's process id, and the descriptor of the lifeline that the ranks will watch."""
    parent, lifeline_end = int(sys.argv[1]), int(sys.argv[2])
    # Meant for the ranks; the server goes when its input ends. Blocked, not ignored: a rank inherits that, so a request to stop
    # that comes just after its fork waits until the rank has set its own handlers, instead of being lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, rank.REQUESTS)
    lifeline.die_with_parent(parent)
    faulthandler.enable(2)
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)
    commands, reports = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # the output of imported modules goes to the server's log, not among the reports
    Server(commands, reports, lifeline_end).serve()


if __name__ == "__main__":
    main()
