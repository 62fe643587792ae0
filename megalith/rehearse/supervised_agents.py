"""Run the agents of a run's machines on this machine, for campaigns that kill agents. Agents are supervised as an engine would
supervise them: a killed agent is started again.

The first agent controls the run. The process that starts the first agent calls `tend` to start the others.
"""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megalith.fleet.environment import MEETING
from megalith.fleet.exit_codes import ORDERLY

HOST = "127.0.0.1"
LEAVE_SECONDS = 10.0  # that all agents together may take to end once their run is over

Begin = Callable[[Sequence[str], Mapping[str, str]], "subprocess.Popen[bytes]"]
"""Function that starts an agent, given further arguments and environment variables."""


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@dataclass
class SupervisedAgents:
    """The agents of the machines `names`, which meet at `port`. `unexplained`: the number of agents that ended without a kill by
    this process."""

    names: tuple[str, ...]
    repair_seconds: float
    port: int = field(default_factory=free_port)
    unexplained: int = 0
    _running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _gone: dict[str, float] = field(default_factory=dict)  # monotonic seconds

    def place(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return the additional arguments of a machine's agent, and the environment variables that an engine would set."""
        rank, world = self.names.index(name), len(self.names)
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": HOST, "MASTER_PORT": str(self.port)}
        return ["--machine", name], variables

    def tend(self, begin: Begin) -> None:
        """Start the agents that do not run, except the first: at first all of them, later each one that was killed or failed,
        once its machine counts as repaired."""
        for name in self.names[1:]:
            if name not in self._running:
                self._running[name] = begin(*self.place(name))
            elif (code := self._running[name].poll()) is not None and code not in ORDERLY and self._is_repaired(name, code):
                arguments, variables = self.place(name)
                self._running[name] = begin(arguments, variables | {MEETING: f"tcp://{HOST}:{self.port}"})

    def _is_repaired(self, name: str, code: int) -> bool:
        if name not in self._gone:
            self._gone[name] = time.monotonic()
            self.unexplained += code != -signal.SIGKILL
        if time.monotonic() - self._gone[name] < self.repair_seconds:
            return False
        del self._gone[name]
        return True

    def __enter__(self) -> "SupervisedAgents":
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the agents to end by themselves, as they do when the run is over; then kill the remaining ones."""
        end = time.monotonic() + LEAVE_SECONDS
        for process in self._running.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()
