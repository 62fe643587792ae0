"""Machines for tests: Linux network namespaces, joined by a switch. A lost machine is really unreachable."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megalith.machine import networks
from megalith.machine.networks import Network


@dataclass(frozen=True)
class Machine:
    """One namespace. `name` is also the host name that its processes see."""

    name: str
    network: Network
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return self.network.namespace(self.name)

    def start(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process in the namespace, which writes to `log`."""
        with log.open("ab") as out:
            words = ["ip", "netns", "exec", self.namespace, *command]
            self.started.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment))
        return self.started[-1]

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes in the namespace, by process id."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        lines = {}
        for process in map(int, found.stdout.split()):
            with contextlib.suppress(OSError):
                lines[process] = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
        return lines

    def kill(self) -> None:
        """Power the machine off: kill all of its processes."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        for process in self.started:
            process.wait()

    def plug(self, *, connected: bool) -> None:
        """Take the network interface up or down."""
        self.network.plug(self.name, connected=connected)


@contextlib.contextmanager
def machines(names: Sequence[str]) -> Iterator[tuple[Machine, ...]]:
    """Yield machines at one switch. All of their processes are killed at the end."""
    with networks.joined(names) as network:
        made = tuple(Machine(name, network, network.address(number)) for number, name in enumerate(names))
        try:
            yield made
        finally:
            for machine in made:
                machine.kill()
