"""A run on many machines. An agent process runs on each node, started by an engine (such as Slurm), by hand or, on the node that serves the
store, by the process that directs the run. The controller runs on the node that serves the store.

All agents have the run's key, and the store accepts no client without it (docs/security.md).

The engine's variables only decide which process serves the store, and the order in which nodes get ranks. The run's controller decides
which ranks a node has, and which nodes wait as spares.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from megalith.control import supervisor
from megalith.control.controller import Controller
from megalith.control.outcome import Outcome
from megalith.control.owner import Owner
from megalith.control.stop_response import Store
from megalith.fleet import messages, rendezvous
from megalith.fleet.agent import Agent
from megalith.fleet.environment import MEETING, Place
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.remote import RemoteNodes, node_logs
from megalith.fleet.secure import key
from megalith.fleet.secure.key import Key
from megalith.fleet.secure.messages import STRANGERS
from megalith.fleet.secure.store_client import StoreClient, StoreGone
from megalith.fleet.secure.store_server import is_loopback, listen
from megalith.fleet.tiers.copies import held
from megalith.fleet.tiers.roots import disk_root, memory_root
from megalith.machine import admission, parent_watch
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import RunSpec
from megalith.train.store import serve, tcp_store
from megalith.train.stream import open_stream

POLL_SECONDS = 0.02
LEAVE_SECONDS = 10.0  # that an agent may take to end its ranks once the run is over
STRANGERS_SECONDS = 60.0  # between reports of those that the store turned away


@dataclass(frozen=True)
class Host:
    """One machine of a run. `identity` distinguishes this run's copies of the state from those of other runs. `open_data` opens the data
    before ranks start."""

    job: Job
    fleet: FleetSpec
    name: str
    identity: str
    open_data: Callable[[], object]

    @cached_property
    def memory(self) -> Path:
        """Folder for copies of the state in this node's memory."""
        return memory_root(self.job.run_dir, f"{self.identity} {self.name}")

    @cached_property
    def disk(self) -> Path | None:
        """Folder for copies of the state on this node's disk; None: no copies are made there."""
        return disk_root(self.job.run_dir, f"{self.identity} {self.name}", self.fleet)


def directs(place: Place | None) -> bool:
    """True if this process directs the run: it is the engine's first process, and does not join a run in progress."""
    return MEETING not in os.environ and place is not None and place.rank == 0


def serve_node(host: Host, place: Place | None) -> int:
    """Serve as one machine of a run that another process directs, and return the run's exit status. Raises ValueError if no rendezvous
    address is set, NoKey if the run's key is missing, and WrongKey if the store has another key."""
    if MEETING in os.environ:
        _take_key(host, os.environ[MEETING])
        return _serve(host, os.environ[MEETING], order=sys.maxsize, cut_off=_begin_anew)
    if place is None:
        raise ValueError(
            f"no rendezvous address is set. Start this command with torchrun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT (rank 0 directs the run), or set {MEETING}=tcp://HOST:PORT to join a run in progress"
        )
    _take_key(host, place.store, alone=place.local_world == place.world)
    os.environ[MEETING] = meeting = _agree(place, "", seconds=host.job.start_timeout)  # if this process is started again
    return _serve(host, meeting, order=place.rank, cut_off=_begin_anew)


def open_data(spec: RunSpec) -> object:
    """Open the run's data as its ranks will, so that this machine has read the lists of files before the ranks start. Raises DataError if
    files are missing."""
    return open_stream(spec, "train")


def _take_key(host: Host, address: str, *, alone: bool = False) -> Key:
    """Find the run's key and put it into this process's environment, for its child processes and for a new agent that replaces it. If all
    processes are on one machine (`alone`, or by the loopback address) and no key exists, create one: the first process makes the file
    atomically, and the others read it. A key that protects an address which other machines reach must be secret in any case. Raises
    NoKey."""
    if _is_loopback(address):
        found = key.of_run(host.job.run_dir)
    else:
        if alone and key.given() is None:
            key.make(host.job.run_dir)
        found = key.shared(host.job.run_dir)
    os.environ |= found.variables
    return found


def _is_loopback(address: str) -> bool:
    """True if only processes on this machine can reach "SCHEME://HOST:PORT". Host names are not resolved, because machines may resolve them
    differently."""
    return is_loopback(address.partition("://")[2].rpartition(":")[0].strip("[]"))


def _agree(place: Place, meeting: str, *, seconds: float) -> str:
    """Agree with the other agents on the rendezvous address, and return it. The engine's own store is used only to announce this address,
    because it may still hold keys from earlier starts."""
    if not place.engine_serves:
        return place.store
    store = dist.PrefixStore("megalith", tcp_store(place.store, serves=False, timeout=timedelta(seconds=seconds)))
    return rendezvous.agree(store, meeting, rank=place.rank, world=place.world, seconds=seconds)


def direct(
    host: Host, place: Place, *, owner: Owner, checkpoints: Store, tick: Callable[[], None], notify: Callable[[str], None]
) -> Outcome:
    """Serve the store, run this node's own agent beside it, and direct the run to its end, as the owner of its folder.

    Must be called while this process has one thread, because it forks the store's process and the agent. Raises TimeoutError if too few
    nodes join, NoKey if a run on several machines has no key, OSError if the address is unusable, and LeaseError if this process no longer
    owns the folder.
    """
    known = _take_key(host, place.store, alone=place.local_world == place.world)
    address, _, port = place.store.rpartition(":")
    server = listen(address.partition("://")[2], 0 if place.engine_serves else int(port))
    meeting = f"{address}:{server.getsockname()[1]}"
    keeper = serve(server, known)
    own = _OwnAgent(host, meeting)
    try:
        with owner.renewing():
            _agree(place, meeting, seconds=host.job.start_timeout)
            print(f"agents meet at {meeting}", file=sys.stderr, flush=True)
            store = StoreClient(meeting, known, seconds=host.job.start_timeout)
            strangers = _Strangers(store)

            def turn() -> None:
                own.tend()
                strangers.report()
                tick()

            try:
                return _control(host, store, owner=owner, checkpoints=checkpoints, tick=owner.checked(turn), notify=notify)
            finally:
                with contextlib.suppress(StoreGone):
                    strangers.report(last=True)
    finally:
        own.end()
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


class _Strangers:
    def __init__(self, store: StoreClient) -> None:
        self._store, self._told, self._next = store, 0, time.monotonic()

    def report(self, *, last: bool = False) -> None:
        if time.monotonic() < self._next and not last:
            return
        self._next = time.monotonic() + STRANGERS_SECONDS
        counts = self._store.strangers()
        if (total := sum(counts.values())) > self._told:
            self._told = total
            what = ", ".join(f"{count} {STRANGERS[name]}" for name, count in counts.items() if count)
            print(f"the agents' store at {self._store.address} has turned away: {what}", file=sys.stderr, flush=True)


class _OwnAgent:
    """The agent of the machine that directs a run. No engine starts this agent, so the directing process starts a new agent if a signal
    kills it."""

    def __init__(self, host: Host, meeting: str) -> None:
        self._meeting = meeting
        self._forked = os.fork()
        if self._forked == 0:
            _be_the_agent(host, meeting, parent=os.getppid())
        self._again: subprocess.Popen[bytes] | None = None  # there may be more threads by then
        self._code: int | None = None  # how it ended

    def tend(self) -> None:
        """If a signal killed the agent, start another one, which joins the run. An agent that exited by itself is not replaced."""
        if self._code is None:
            self._code = self._look()
        if self._code is not None and self._code < 0:
            print(f"this node's agent was killed by signal {-self._code}; a new agent is started", file=sys.stderr, flush=True)
            with_this = partial(parent_watch.die_with_parent, os.getpid())
            variables = os.environ | {MEETING: self._meeting}
            self._again, self._code = subprocess.Popen(_own_command(), env=variables, preexec_fn=with_this), None

    def _look(self) -> int | None:
        if self._again is not None:
            return self._again.poll()
        process, status = os.waitpid(self._forked, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if process else None

    def end(self) -> None:
        end = time.monotonic() + LEAVE_SECONDS
        while self._code is None and self._look() is None:
            if time.monotonic() >= end:
                os.kill(self._forked if self._again is None else self._again.pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)


def _control(
    host: Host,
    store: rendezvous.RunStore,
    *,
    owner: Owner,
    checkpoints: Store,
    tick: Callable[[], None],
    notify: Callable[[str], None],
) -> Outcome:
    fleet, job = host.fleet, host.job
    with supervisor.requests_to_stop() as requests:
        nodes = RemoteNodes(store, job, fleet)
        outcome = None
        try:
            nodes.await_nodes(fleet.nodes, fleet.nodes + fleet.spares, seconds=job.start_timeout)
            how: dict[str, Any] = {"tick": tick, "notify": notify, "epoch": owner.epoch}
            outcome = Controller(job, fleet=fleet, nodes=nodes, store=checkpoints, requests=requests, **how).run()
            return outcome
        finally:
            code = outcome.code if outcome is not None else ExitCode.LOST
            nodes.leave(code, forget=code in ORDERLY)


def _be_the_agent(host: Host, meeting: str, *, parent: int) -> NoReturn:
    """Run the agent of the machine that directs the run. If the controller treats the agent as lost, for instance because a busy machine
    sent no heartbeat, the agent joins the run again."""
    try:
        parent_watch.die_with_parent(parent)
        os.environ[MEETING] = meeting
        os._exit(_serve(host, meeting, order=0, cut_off=_begin_anew))
    except BaseException:  # this is a fork: nothing may climb back into the caller
        traceback.print_exc()
    finally:
        os._exit(ExitCode.LOST)


def _begin_anew(why: str) -> NoReturn:
    """Replace this process by a new agent. The ranks of the old agent end when their pipe to it closes; the run may then use the healthy
    node as a spare."""
    print(f"this node's agent leaves the run and joins it again: {why}", file=sys.stderr, flush=True)
    os.execv(sys.executable, _own_command())


def _own_command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _serve(host: Host, meeting: str, *, order: int, cut_off: Callable[[str], NoReturn]) -> int:
    seconds = host.job.start_timeout
    known = _take_key(host, meeting)
    try:
        store, beating = (StoreClient(meeting, known, seconds=seconds) for _ in range(2))
    except StoreGone as error:
        print(f"found no run to join at {meeting} within {seconds:g} s: {error}", file=sys.stderr, flush=True)
        return ExitCode.LOST
    if not _is_fit(host, store, seconds=seconds):
        return ExitCode.LOST
    data = host.open_data()
    if (interface := _interface_to(meeting)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    logs = node_logs(host.job.run_dir, host.name)
    ranks_meet = meeting.replace("tcp://", "megalith://")
    local = LocalNodes(host.job, names=(host.name,), memory=host.memory, disk=host.disk, folder=logs, meeting=ranks_meet)
    agent = Agent(
        host.name, local, order=order, store=store, beating=beating, seconds=host.fleet.node_timeout, cut_off=cut_off,
        pieces=lambda: held(host.name, memory=local.memory or host.memory, disk=host.disk, key=known),
    )  # fmt: skip
    agent.take_requests()
    code = agent.run()
    del data  # held open until now
    return code


def _is_fit(host: Host, store: rendezvous.Store, *, seconds: float) -> bool:
    """True if this machine may join the run. If the machine is not fit, print the reason, report it to the controller, and wait up to
    `seconds` until the machine is fit."""

    def notify(why: str) -> None:
        print(f"this node ({host.name}) is not fit to join: {why}. {admission.ANYWAY}", file=sys.stderr, flush=True)
        messages.refuse(store, host.name, why)

    return not host.fleet.looks_before_start or admission.await_fitness(host.job.run_dir, seconds=seconds, notify=notify)


def _interface_to(meeting: str) -> str | None:
    """Return the name of the network interface through which this machine reaches the store, for the ranks' own connections; None if it is
    not found."""
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")
    kind, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: only asks the kernel for a route
        own = probe.getsockname()[0]
    addresses = psutil.net_if_addrs().items()
    return next((name for name, found in addresses if any(one.address == own for one in found)), None)


def own_name(given: str | None) -> str:
    """Return the node's name: `given` or, by default, the machine's host name. Raises ValueError for a name that cannot be part of a path
    or of a comma-separated list."""
    name = given or socket.gethostname()
    if not name or set(name) & set("/, "):
        raise ValueError(
            f"{name!r} is not a name for a node: the name becomes part of paths and lists. Leave out slashes, commas and spaces"
        )
    return name
