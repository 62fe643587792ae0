"""Commands of this tree that tests start, as forks of a process that has imported torch. A new interpreter takes 3 to 5 processor
seconds for these imports, and the suite starts hundreds of commands.

`install` replaces `subprocess.Popen` by a class that asks the *zygote*, a fresh interpreter with one thread, for a fork with the
arguments, environment, folder and descriptors that were given. The fork becomes the caller's child, so signals, exit statuses and
process groups are those of a command that was started anew. What a fork cannot take over (another interpreter or tree, `preexec_fn`,
variables that are read when a library is loaded) is started anew, as is everything where MEGALITH_FRESH is set.
"""

import atexit
import contextlib
import ctypes
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FRESH = "MEGALITH_FRESH"
FORKED = ("megalith.", "tests.")
STARTERS = {"train", "parity", "agent", "quickstart"}
"""Commands that start a fork server: each gets a blank process that becomes it."""
READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "TORCH", "MALLOC", "OMP_", "MKL_", "KMP_", "GLOO_", "CUDA_", FRESH)
IMPORTED = ("numpy", "torch.distributed.tensor", "torch._dynamo", "megalith.train.run", "megalith.cli", "megalith.api")
SUBREAPER = 36  # of prctl: orphans among the descendants become children of this process

_Original = subprocess.Popen


# --- the side of who starts a command ---


def _early(environment: dict[str, str]) -> dict[str, str]:
    single = {name for name, value in environment.items() if name.endswith("_NUM_THREADS") and value == "1"}  # as in the zygote
    return {
        name: value for name, value in environment.items() if name.startswith(READ_EARLY) and name not in {"PYTHONPATH", *single}
    }


class Source:
    """Gives forks to the process that made it: from the zygote, whose forks become this process's children, or, with `blank`, the child
    with this process id, which becomes one command."""

    def __init__(self, connection: socket.socket, early: dict[str, str], *, blank: int | None = None) -> None:
        self._connection, self._early, self._blank = connection, early, blank
        self._owner, self._lock = os.getpid(), threading.Lock()

    def suits(self, module: str, environment: dict[str, str], folder: str) -> bool:
        """True if a fork does what a new interpreter would."""
        places = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        foreign = any((Path(place) / "megalith").is_dir() and Path(place).resolve() != ROOT for place in places)
        mine = os.getpid() == self._owner and (self._blank is None or module == "megalith.fleet.fork_server")
        return mine and not foreign and _early(environment) == self._early and Path(folder).is_dir()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the process id of a new child."""
        with self._lock:
            if self._blank is None:
                _prctl(SUBREAPER, 1)
            try:
                _send(self._connection, request, descriptors)
                answer = self._connection.recv(32)
            finally:
                if self._blank is None:
                    _prctl(SUBREAPER, 0)
            if not answer:
                raise ConnectionError
            return self._blank or int(answer)

    def close(self) -> None:
        """Let the other side end."""
        self._connection.close()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _send(connection: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> None:
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], descriptors)
    connection.sendall(data)


_source: Source | None = None
_zygote: subprocess.Popen[Any] | None = None


class Popen(_Original[Any]):
    """`subprocess.Popen`, which forks what it can."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        _, _, shell, *pipes, _, gid, gids, uid, _, session, group = rest
        reading, _, _, writing, _, failing = pipes
        module = None if shell or executable or preexec_fn or not close_fds or uid or gid or gids else _module(args)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()}
        folder = os.fsdecode(cwd or os.getcwd())
        source = _found() if module and FRESH not in environment else None
        if source is None or module is None or not source.suits(module, environment, folder):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        descriptors = [number if given == -1 else given for number, given in enumerate((reading, writing, failing))]
        request = {
            "command": [os.fsdecode(word) for word in args], "module": module, "environment": environment, "folder": folder,
            "numbers": [0, 1, 2, *pass_fds], "session": session, "group": group, "umask": _umask(),
            "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "processors": sorted(os.sched_getaffinity(0)),
        }  # fmt: skip
        try:
            self.pid = source.fork(request, [*descriptors, *pass_fds])
        except OSError:  # a descriptor that is closed, or a blank that has been used
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _module(command: Any) -> str | None:
    words = [] if isinstance(command, (str, bytes, os.PathLike)) else [os.fsdecode(word) for word in command]
    if words[:1] != [sys.executable]:
        return None
    words = [word for word in words[1:] if word != "-P"]
    return words[1] if words[:1] == ["-m"] and words[1].startswith(FORKED) else None


def _umask() -> int:
    now = os.umask(0o77)
    os.umask(now)
    return now


def _found() -> Source | None:
    """Return the source of this process. The first call of a test process starts its zygote."""
    global _source, _zygote
    if _source is None and "MEGALITH_TREE" not in os.environ and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        mine, its = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        _zygote = _Original(
            [sys.executable, "-P", __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment, cwd=ROOT
        )
        its.close()
        atexit.register(_end)
        _source = Source(mine, _early(environment))
    return _source


def _end() -> None:
    if _zygote is not None and _source is not None:
        _source.close()
        _zygote.wait()


def install() -> None:
    """Start the commands of this tree as forks from now on."""
    if sys.platform == "linux":
        subprocess.Popen = Popen  # type: ignore[misc]


# --- the zygote ---


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a request. Ends the process when the other side is gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
    if not data:
        os._exit(0)
    left, parts = int.from_bytes(data, "big"), []
    while left:
        parts.append(connection.recv(left))
        if not parts[-1]:
            os._exit(0)
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors


def _serve(connection: socket.socket, early: dict[str, str]) -> None:
    path = [*sys.path]
    while True:
        request, descriptors = _receive(connection)
        ready, go = os.pipe()
        reading, telling = os.pipe()
        if (between := os.fork()) == 0:  # which ends at once: the caller, as the subreaper, becomes the parent of its child
            if child := os.fork():
                os.write(telling, f"{child}\n".encode())
                os._exit(0)
            os.close(go)
            os.read(ready, 1)
            connection.close()
            for descriptor in (ready, reading, telling):
                os.close(descriptor)
            _become(request, descriptors, path, early)
        os.waitpid(between, 0)
        answer = os.read(reading, 32)
        os.write(go, b"1")
        connection.sendall(answer)
        for descriptor in (ready, go, reading, telling, *descriptors):
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int], path: list[str], early: dict[str, str]) -> None:
    """Run the command in this process, and end it."""
    if request["session"]:
        os.setsid()
    if request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["processors"])
    if STARTERS.intersection(request["command"][3:4]):
        _make_blank(path, early, descriptors)
    _take(descriptors, request["numbers"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    given = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*([] if "-P" in request["command"] else [request["folder"]]), *given, *path]
    command, module = request["command"], request["module"]
    sys.orig_argv[:] = command
    sys.argv[:] = ["-m", *command[command.index("-m") + 2 :]]
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    importlib.import_module("numpy").random.seed()
    sys.modules.pop(module, None)
    sys.modules["__main__"] = type(sys)("__main__")
    _run(module)


def _make_blank(path: list[str], early: dict[str, str], descriptors: list[int]) -> None:
    """Fork the process that becomes this command's fork server: later the command has threads, and cannot be forked."""
    global _source
    mine, its = socket.socketpair()
    if (blank := os.fork()) == 0:
        mine.close()
        for descriptor in descriptors:
            os.close(descriptor)
        request, descriptors = _receive(its)
        its.sendall(b"1\n")
        its.close()
        _become(request, descriptors, path, early)
    its.close()
    _source = Source(mine, early, blank=blank)
    subprocess.Popen = Popen  # type: ignore[misc]


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that they had on the other side."""
    kept = {_source._connection.fileno()} if _source is not None else set[int]()
    high = max([*numbers, *descriptors, *kept]) + 1
    if kept and _source is not None:  # out of the way of the numbers
        moved = socket.socket(fileno=os.dup2(_source._connection.fileno(), high, inheritable=False))
        _source._connection.close()
        _source._connection, kept, high = moved, {high}, high + 1
    moving = [os.dup2(descriptor, high + index) for index, descriptor in enumerate(descriptors)]
    for descriptor, number in zip(moving, numbers, strict=True):
        os.dup2(descriptor, number)
    for place in list(Path("/proc/self/fd").iterdir()):
        if int(place.name) not in {*numbers, *kept}:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(place.name))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = sys.__stdout__ = _output(1, "strict")
    sys.stderr = sys.__stderr__ = _output(2, "backslashreplace")


def _output(number: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    at_once = "PYTHONUNBUFFERED" in os.environ
    lines = not at_once and (number == 2 or os.isatty(number))
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=at_once)


def _run(module: str) -> None:
    """Run a module as `python -m` does, and end the process as the interpreter would."""
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = 120
    os._exit(status & 0xFF)


def main() -> None:
    """Import what commands import, and fork until the test process ends."""
    early = _early(dict(os.environ))  # before torch adds its own
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != ROOT / "tests"]
    for module in IMPORTED:
        importlib.import_module(module)
    importlib.import_module("torch").set_num_threads(1)
    _serve(connection, early)


if __name__ == "__main__":
    main()
