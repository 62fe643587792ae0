"""Part B: attacks by neighbours on the network and by other users of the machine."""

import contextlib
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.findings.product import PATIENCE, Running, events, running
from tests.full import only_full

AGENTS = ["--set", "fleet.nodes=2", "--set", "plan.data=2"]


@pytest.fixture(scope="module")
def port() -> int:
    """Return the port of the agents' store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def agents(at: Path, port: int) -> Iterator[list[Running]]:
    """Two agents on this machine whose run has done a step."""
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(2):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            own = ["--machine", f"m{rank}", *AGENTS, "--set", "train.steps=100000"]
            started.append(stack.enter_context(running("agent", "run.toml", "--run-dir", "run", *own, at=at, env=env)))
        started[0].until(lambda: events(at / "run", "step"))
        yield started


def _processes(agents: list[Running]) -> Iterator[psutil.Process]:
    for agent in agents:
        yield psutil.Process(agent.process.pid)
        yield from agent.children()


def test_b1_nothing_listens_at_an_address_that_was_not_told(agents: list[Running]) -> None:
    """The launcher's address was 127.0.0.1, so nobody on the network should reach a port of the run."""
    heard = {c.laddr.ip for one in _processes(agents) for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert heard, "agents meet at a port"
    assert {address for address in heard if not (address.startswith("127.") or address == "::1")} == set()


def test_b2_copies_in_shared_memory_are_nobody_elses(agents: list[Running]) -> None:
    """Other users can neither read nor write these files and their folders, from the run's own down, whatever the umask."""
    mapped = {
        Path(one.path) for process in _processes(agents) for one in process.memory_maps() if one.path.startswith("/dev/shm/mega")
    }
    assert mapped, "the state is copied to shared memory"
    assert _open_to_others(mapped) == set()


def _open_to_others(mapped: set[Path]) -> set[str]:
    """Return the files in shared memory, and the folders above them, that other users may read or write."""
    kept = {
        path for file in mapped for path in (file, *file.parents) if path.parts[:3] == ("/", "dev", "shm") and len(path.parts) > 3
    }
    return {str(path) for path in kept if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077}


SIX_LINES = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
for member in range(1, store.add("joined", 0) + 1):
    for number in range(1, 50):
        store.set(f"orders/{member}/{number}", json.dumps({"leave": 0, "forget": True}))
    store.set(f"expelled/{member}", "")
store.set(f"member/{store.add('joined', 1)}", "garbage{")
"""


THREE_VALUES = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
for number in range(3):
    store.set(f"value/{number}", bytes(100 << 20))
"""


def test_b1_values_of_a_stranger_are_not_kept(agents: list[Running], port: int) -> None:
    """300 MiB of them stayed in the memory of the agents' store."""

    def held() -> int:
        return sum(process.memory_info().rss for process in _processes(agents))

    before = held()
    subprocess.run([sys.executable, "-c", THREE_VALUES, str(port)], capture_output=True, timeout=PATIENCE, check=False)
    assert held() - before < 200 << 20
    assert not any(agent.ended for agent in agents)


@only_full
def test_b1_thousands_of_idle_connections_lose_no_agent(at: Path, agents: list[Running], port: int) -> None:
    """Some 4,000 slowed the store's answers until an agent counted as lost."""
    count, limits = 4000, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], count + 1000), limits[1]))
    before = len(events(at / "run", "incident"))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(count):
            with contextlib.suppress(OSError):  # refused
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        begun, done = time.monotonic(), len(events(at / "run", "step"))
        agents[0].until(  # longer than an agent may be silent
            lambda: time.monotonic() - begun > 90 and len(events(at / "run", "step")) > done + 5, or_ended=True
        )
    assert not any(agent.ended for agent in agents), agents[0].output[-500:]
    assert len(events(at / "run", "incident")) == before


def test_b1_whoever_reaches_the_port_orders_nobody_about(at: Path, agents: list[Running], port: int) -> None:
    """This is the last test of these agents: if it fails, they end."""
    subprocess.run([sys.executable, "-c", SIX_LINES, str(port)], capture_output=True, timeout=PATIENCE, check=False)
    done = len(events(at / "run", "step"))
    agents[0].until(lambda: agents[1].ended or len(events(at / "run", "step")) > done + 5, or_ended=True)
    assert not any(agent.ended for agent in agents), agents[0].output[-500:]


def test_b2_copies_are_not_kept_in_a_folder_that_others_may_write_to(at: Path) -> None:
    """The folder's name is predictable, so anyone who creates it first could replace the state."""
    words = ["train", "run.toml", "--run-dir", "foreseen", "--set", "train.steps=100000"]
    with running(*words, at=at) as command:
        command.until(lambda: events(at / "foreseen", "step"))
        folders = {file.parents[1] for file in _copies(command)}
    assert folders
    for folder in folders:
        folder.chmod(0o777)
    done = len(events(at / "foreseen", "step"))
    with running(*words, at=at) as command:
        command.until(lambda: len(events(at / "foreseen", "step")) > done + 3)
        assert _open_to_others(_copies(command)) == set()
        command.process.send_signal(signal.SIGTERM)
        command.end()


def _copies(command: Running) -> set[Path]:
    """Return the files of copies that a run's ranks have mapped."""
    maps = [one.path for rank in command.ranks() for one in rank.memory_maps()]
    return {Path(path) for path in maps if path.startswith("/dev/shm/megalith-") and "/own-" in path}
