"""Nodes on one machine as Linux network namespaces. In `joined`, each node has one interface, at a common switch, so a node whose
interface is down is really unreachable.

A campaign of injected faults uses such namespaces to take a node's interface down without affecting other nodes. If `VARIABLE`
is set, each rank enters its node's namespace.
"""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MEGALITH_NETWORK"
INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Network:
    """Namespaces of nodes; their names begin with `family` and a dash."""

    family: str

    def namespace(self, node: str) -> str:
        """The name of a node's namespace."""
        return f"{self.family}-{node}"

    def address(self, number: int) -> str:
        """The address of the node with this number, from 0."""
        return f"10.77.0.{number + 1}"

    def set_up(self, node: str, address: str, *, mtu: int | None = None) -> None:
        """Set the address of a node's interface, and enable the interface."""
        own = self.namespace(node)
        _ip("-n", own, "address", "add", f"{address}/24", "dev", INTERFACE)
        if mtu is not None:
            _ip("-n", own, "link", "set", INTERFACE, "mtu", str(mtu))
        for device in ("lo", INTERFACE):
            _ip("-n", own, "link", "set", device, "up")

    def start(self, node: str, act: Callable[[], object]) -> int:
        """Call `act` on a node in a new process, and return the process id. The process ends with status 0, or 1 if `act` raised an
        exception."""
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.environ[VARIABLE] = self.family
                enter(node)
                act()
                code = 0
            finally:
                os._exit(code)
        return process

    def plug(self, node: str, *, connected: bool) -> None:
        """Enable a node's interface, or disable it."""
        _ip("-n", self.namespace(node), "link", "set", INTERFACE, "up" if connected else "down")

    def is_connected(self, node: str) -> bool:
        """True if a node's interface is enabled."""
        return bool(_ip("-n", self.namespace(node), "link", "show", INTERFACE, "up"))


def find(environment: Mapping[str, str] = os.environ) -> Network | None:
    """Return the network of this run's nodes; None if they use the machine's own network."""
    family = environment.get(VARIABLE)
    return Network(family) if family else None


def enter(node: str) -> None:
    """Limit this thread, and threads that it starts later, to the network of `node`, if the run's nodes have networks. Raises
    OSError."""
    network = find()
    if network is None:
        return
    file = os.open(f"/var/run/netns/{network.namespace(node)}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of node {node}")
    finally:
        os.close(file)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def missing() -> str | None:
    """Return the reason why namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "needs `ip` (apt install iproute2)"
    if os.geteuid() != 0:
        return "needs root, who alone may make network namespaces"
    try:
        with joined(["probe"]):
            return None
    except subprocess.CalledProcessError as error:
        return f"networks cannot be made here: {error.stderr.strip()}"


@contextlib.contextmanager
def joined(nodes: Sequence[str]) -> Iterator[Network]:
    """Make nodes at one switch while the block runs. Raises CalledProcessError if this process may not make them."""
    with apart(["switch", *nodes]) as network:
        switch = network.namespace("switch")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, node in enumerate(nodes):
            own = network.namespace(node)
            _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", INTERFACE, "netns", own)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            network.set_up(node, network.address(number))
        yield network


@contextlib.contextmanager
def apart(nodes: Sequence[str]) -> Iterator[Network]:
    """Make nodes without any interface while the block runs. Raises CalledProcessError if this process may not make them."""
    clear_abandoned()
    network, made = Network(f"mega{os.getpid()}"), list[str]()
    try:
        for node in nodes:
            _ip("netns", "add", network.namespace(node))
            made.append(network.namespace(node))
        yield network
    finally:
        for namespace in made:
            _remove(namespace)


def clear_abandoned() -> None:
    """Remove the namespaces of processes that were killed before they could remove them."""
    for line in _ip("netns", "list").splitlines():
        owner = re.match(r"mega(\d+)-", line)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(line.split()[0])


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], check=False)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
