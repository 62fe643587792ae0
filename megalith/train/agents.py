"""A run on many machines: one process a node, started by an engine or by hand, and a controller where the store is.

What the engine says of a process decides only who serves the store and in which order nodes get the first places. Which ranks a node has,
and which nodes wait as spares, is decided by the run's controller.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
import torch.distributed as dist

from megalith.control import supervisor
from megalith.control.controller import Controller, Store
from megalith.control.outcome import Outcome
from megalith.fleet import letters, rendezvous
from megalith.fleet.agent import Agent
from megalith.fleet.copies import held
from megalith.fleet.environment import MEETING, Place
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes, disk_root, memory_root
from megalith.fleet.remote import RemoteNodes, node_logs
from megalith.machine import admission, lifeline
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import RunSpec
from megalith.train.store import connect, serve
from megalith.train.stream import open_stream

POLL_SECONDS = 0.02
LEAVE_SECONDS = 10.0  # that an agent may take to end its ranks once the run is over


@dataclass(frozen=True)
class Host:
    """One machine of a run. `identity`: copies of the state of a run with another one are not this run's. `open_data` warms a node."""

    job: Job
    fleet: FleetSpec
    name: str
    identity: str
    open_data: Callable[[], object]

    @property
    def memory(self) -> Path:
        """Where this node keeps copies of the state."""
        return memory_root(self.job.run_dir, f"{self.identity} {self.name}")

    @property
    def disk(self) -> Path | None:
        """Where it keeps copies on its disk; None: it does not."""
        return disk_root(self.job.run_dir, f"{self.identity} {self.name}", self.fleet)


def directs(place: Place | None) -> bool:
    """Whether the process in this place directs the run: the engine's first, unless it joins a run that goes on."""
    return MEETING not in os.environ and place is not None and place.rank == 0


def serve_node(host: Host, place: Place | None) -> int:
    """Be a machine of a run that another process directs; the exit status of the run. Raises ValueError where nothing says how to meet."""
    if MEETING in os.environ:
        return _serve(host, os.environ[MEETING], order=sys.maxsize, cut_off=_begin_anew)
    if place is None:
        raise ValueError(
            f"nothing says where this node meets the others. Start it with torchrun or srun, set RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT (rank 0 directs the run), or {MEETING}=tcp://HOST:PORT to join one that goes on"
        )
    os.environ[MEETING] = meeting = _agree(place, "", seconds=host.job.start_timeout)  # should this process have to begin anew
    return _serve(host, meeting, order=place.rank, cut_off=_begin_anew)


def open_data(spec: RunSpec) -> object:
    """The run's data, opened as ranks will open it: its files are known to this machine by then. Raises DataError if they are not there."""
    return open_stream(spec, "train")


def _agree(place: Place, meeting: str, *, seconds: float) -> str:
    """Where all meet. An engine's own store only serves to say so: what earlier starts left in it must not be met."""
    if not place.engine_serves:
        return place.store
    store = dist.PrefixStore("megalith", connect(place.store, seconds=seconds))
    return rendezvous.agree(store, meeting, rank=place.rank, world=place.world, seconds=seconds)


def direct(host: Host, place: Place, *, checkpoints: Store, tick: Callable[[], None]) -> Outcome:
    """Serve the store, run this node's own agent beside it, and direct the run to its end.

    Must be called while there is one thread: the store's process and the agent are forked from this one. Raises TimeoutError when too
    few nodes come.
    """
    address, _, port = place.store.rpartition(":")
    keeper, port = serve(0 if place.engine_serves else int(port))
    meeting = f"{address}:{port}"
    own = _OwnAgent(host, meeting)

    def turn() -> None:
        own.tend()
        tick()

    try:
        _agree(place, meeting, seconds=host.job.start_timeout)
        print(f"agents meet at {meeting}", file=sys.stderr, flush=True)
        store = connect(meeting, seconds=host.job.start_timeout)
        return _control(host, store, checkpoints=checkpoints, tick=turn)
    finally:
        own.end()
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


class _OwnAgent:
    """The agent of the machine that directs a run. No engine knows of it, so who directs starts it again when it is killed."""

    def __init__(self, host: Host, meeting: str) -> None:
        """Fork it: there must be one thread."""
        self._meeting = meeting
        self._forked = os.fork()
        if self._forked == 0:
            _be_the_agent(host, meeting, parent=os.getppid())
        self._again: subprocess.Popen[bytes] | None = None  # there may be more threads by then
        self._code: int | None = None  # how it ended

    def tend(self) -> None:
        """Start another one, which joins anew, if it was killed; one that left by itself had its reasons."""
        if self._code is None:
            self._code = self._look()
        if self._code is not None and self._code < 0:
            print(f"this node's agent was killed by signal {-self._code}, and is started again", file=sys.stderr, flush=True)
            with_this = partial(lifeline.die_with_parent, os.getpid())
            variables = os.environ | {MEETING: self._meeting}
            self._again, self._code = subprocess.Popen(_own_command(), env=variables, preexec_fn=with_this), None

    def _look(self) -> int | None:
        if self._again is not None:
            return self._again.poll()
        process, status = os.waitpid(self._forked, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if process else None

    def end(self) -> None:
        """Wait for it, for a while, then kill it."""
        end = time.monotonic() + LEAVE_SECONDS
        while self._code is None and self._look() is None:
            if time.monotonic() >= end:
                os.kill(self._forked if self._again is None else self._again.pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)


def _control(host: Host, store: rendezvous.Store, *, checkpoints: Store, tick: Callable[[], None]) -> Outcome:
    fleet, job = host.fleet, host.job
    with supervisor.alone(job.run_dir), supervisor.requests_to_stop() as requests:
        nodes = RemoteNodes(store, job, fleet)
        outcome = None
        try:
            nodes.await_nodes(fleet.nodes, fleet.nodes + fleet.spares, seconds=job.start_timeout)
            outcome = Controller(job, fleet=fleet, nodes=nodes, store=checkpoints, requests=requests, tick=tick).run()
            return outcome
        finally:
            code = outcome.code if outcome is not None else ExitCode.LOST
            nodes.leave(code, forget=code in ORDERLY)


def _be_the_agent(host: Host, meeting: str, *, parent: int) -> NoReturn:
    """The agent of the machine that directs the run; lost (the machine may have been too busy for a sign of life), it joins anew."""
    try:
        lifeline.die_with_parent(parent)
        os.environ[MEETING] = meeting
        os._exit(_serve(host, meeting, order=0, cut_off=_begin_anew))
    except BaseException:  # this is a fork: nothing may climb back into the caller
        traceback.print_exc()
    finally:
        os._exit(ExitCode.LOST)


def _begin_anew(why: str) -> NoReturn:
    """Become a new agent: the ranks of this one end with its pipe, and the run may take the node as a spare, once it is healthy."""
    print(f"this node's agent begins anew: {why}", file=sys.stderr, flush=True)
    os.execv(sys.executable, _own_command())


def _own_command() -> list[str]:
    """The command that started this process."""
    return [sys.executable, *sys.orig_argv[1:]]


def _serve(host: Host, meeting: str, *, order: int, cut_off: Callable[[str], NoReturn]) -> int:
    """Be an agent; the exit status of the run, LOST if it cannot be joined."""
    seconds = host.job.start_timeout
    try:
        store, beating = (connect(meeting, seconds=seconds) for _ in range(2))
    except RuntimeError as error:
        print(f"no run to join at {meeting} within {seconds:g} s: {error}", file=sys.stderr, flush=True)
        return ExitCode.LOST
    if not _is_fit(host, store, seconds=seconds):
        return ExitCode.LOST
    data = host.open_data()
    if (interface := _interface_to(meeting)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    logs = node_logs(host.job.run_dir, host.name)
    local = LocalNodes(host.job, names=(host.name,), memory=host.memory, disk=host.disk, folder=logs, meeting=meeting)
    agent = Agent(
        host.name, local, order=order, store=store, beating=beating, seconds=host.fleet.node_timeout, cut_off=cut_off,
        pieces=lambda: held(host.name, memory=host.memory, disk=host.disk),
    )  # fmt: skip
    agent.take_requests()
    code = agent.run()
    del data  # held open until now
    return code


def _is_fit(host: Host, store: rendezvous.Store, *, seconds: float) -> bool:
    """Whether this machine may join; one that is not fit says so here and to the controller, and has `seconds` to become it."""

    def tell(why: str) -> None:
        print(f"this node ({host.name}) is not fit to join: {why}. {admission.ANYWAY}", file=sys.stderr, flush=True)
        letters.refuse(store, host.name, why)

    return not host.fleet.looks_before_start or admission.await_fitness(host.job.run_dir, seconds=seconds, tell=tell)


def _interface_to(meeting: str) -> str | None:
    """The network interface that reaches the store: the ranks' messages go the same way. None where it has no name here."""
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")
    kind, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: only asks the kernel for a route
        own = probe.getsockname()[0]
    addresses = psutil.net_if_addrs().items()
    return next((name for name, found in addresses if any(one.address == own for one in found)), None)


def own_name(given: str | None) -> str:
    """The node's name: given, or the machine's. Raises ValueError for one that cannot be part of a folder's name and of a list."""
    name = given or socket.gethostname()
    if not name or set(name) & set("/, "):
        raise ValueError(
            f"{name!r} is no name for a node: it becomes part of folders and lists. Leave out slashes, commas and spaces"
        )
    return name
