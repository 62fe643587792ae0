"""Part B: what neighbours on the network, and other users of the machine, could do."""

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.findings.product import Running, events, running

AGENTS = ["--set", "fleet.nodes=2", "--set", "plan.data=2"]


@pytest.fixture(scope="module")
def agents(at: Path) -> Iterator[list[Running]]:
    """Two agents on this machine, whose run has done a step."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(2):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            own = ["--machine", f"m{rank}", *AGENTS]
            started.append(stack.enter_context(running("agent", "run.toml", "--run-dir", "run", *own, at=at, env=env)))
        started[0].until(lambda: events(at / "run", "step"))
        yield started


def _processes(agents: list[Running]) -> Iterator[psutil.Process]:
    for agent in agents:
        yield psutil.Process(agent.process.pid)
        yield from agent.children()


def test_b1_nothing_listens_at_an_address_that_was_not_told(agents: list[Running]) -> None:
    """127.0.0.1 was, so nobody on the network should reach a port of the run."""
    heard = {c.laddr.ip for one in _processes(agents) for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert heard, "agents meet at a port"
    assert {address for address in heard if not (address.startswith("127.") or address == "::1")} == set()


def test_b2_copies_in_shared_memory_are_nobody_elses(agents: list[Running]) -> None:
    """Neither to read nor to write, from the run's own folder down, whatever the umask."""
    mapped = {
        Path(one.path) for process in _processes(agents) for one in process.memory_maps() if one.path.startswith("/dev/shm/mega")
    }
    assert mapped, "the state is copied to shared memory"
    kept = {
        path for file in mapped for path in (file, *file.parents) if path.parts[:3] == ("/", "dev", "shm") and len(path.parts) > 3
    }
    open_to_others = {str(path) for path in kept if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077}
    assert open_to_others == set()
