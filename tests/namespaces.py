"""Machines for tests: network namespaces of Linux, joined by a switch. What is lost here is really unreachable."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


def missing() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if shutil.which("ip") is None:
        return "needs `ip` (apt install iproute2)"
    if os.geteuid() != 0:
        return "needs root, who alone may make network namespaces"
    name = f"mega{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    kinds = (["switch", "type", "bridge"], ["one", "type", "veth", "peer", "name", "other"])
    adding = [
        subprocess.run(["ip", "-n", name, "link", "add", *kind], capture_output=True, text=True, check=False) for kind in kinds
    ]
    subprocess.run(["ip", "netns", "del", name], check=False)
    problems = " ".join(done.stderr.strip() for done in adding if done.returncode)
    return f"networks cannot be made here: {problems}" if problems else None


@dataclass(frozen=True)
class Machine:
    """One namespace. `name` is also what its processes call their machine."""

    name: str
    namespace: str
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process here, which writes to `log`."""
        with log.open("ab") as out:
            words = ["ip", "netns", "exec", self.namespace, *command]
            self.started.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment))
        return self.started[-1]

    def processes(self) -> dict[int, str]:
        """Command lines of all that run here, by process id."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        lines = {}
        for process in map(int, found.stdout.split()):
            with contextlib.suppress(OSError):
                lines[process] = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
        return lines

    def kill(self) -> None:
        """Power off: nothing that runs here can do anything more."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        for process in self.started:
            process.wait()

    def plug(self, *, connected: bool) -> None:
        """Take the network interface up or down."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up" if connected else "down")


@contextlib.contextmanager
def machines(names: Sequence[str]) -> Iterator[tuple[Machine, ...]]:
    """Machines at one switch; everything that runs on them is killed at the end."""
    family = f"mega{os.getpid()}"
    switch = f"{family}switch"
    made: list[Machine] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, start=1):
            machine = Machine(name, f"{family}{name}", f"10.77.0.{number}")
            _ip("netns", "add", machine.namespace)
            made.append(machine)
            _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", machine.namespace, "link", "set", device, "up")
        yield tuple(made)
    finally:
        for machine in made:
            machine.kill()
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False)
        subprocess.run(["ip", "netns", "del", switch], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
