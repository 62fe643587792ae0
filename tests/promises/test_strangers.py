"""Neighbours on the network and on the machine attack a run through ports and files. It ends as if they had not been there."""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megalith.fleet.exit_codes import ExitCode
from megalith.spec.files import load
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, newest_step, position, prepare_text, train

RUN = """
name = "strangers"
model = {{ layers = 1, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 2, zero = 1 }}
data.path = "{data}"
train = {{ steps = {steps}, global_batch = 4, seq_len = 32, precision = "fp32" }}
optimizer = {{ lr = 1e-3, schedule = "constant", warmup = 0 }}
checkpoint.every = 500
launch = {{ threads = 1, start_timeout = 250.0, timeout = 120.0 }}
fleet = {{ nodes = 2, node_timeout = 30.0, hang_floor = 60.0, check = "return" }}
"""
MANY = "100_000"
SHARED_MEMORY = Path("/dev/shm")


class Commands:
    """Commands of a run, in processes whose umask lets everybody read and write their files."""

    def __init__(self, folder: Path, *, steps: str) -> None:
        self.folder, self.run_file, self.log = folder / "run", folder / "run.toml", folder / "log"
        self.run_file.write_text(RUN.format(data=prepare_text(folder), steps=steps))
        self.processes: list[subprocess.Popen[bytes]] = []

    def type(self, *words: str, **environment: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "megalith.cli", words[0], str(self.run_file), "--run-dir", str(self.folder), *words[1:]]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("MEGALITH")} | environment
        with self.log.open("ab") as out:
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=variables, umask=0))
        return self.processes[-1]

    def steps(self) -> int:
        return newest_step(self.folder)

    def await_step(self, step: int) -> None:
        """Wait until the run has done this many steps, and assert that all processes continue."""
        end = time.monotonic() + PATIENCE
        while self.steps() < step:
            assert all(process.poll() is None for process in self.processes), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text()[-5000:]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    run = Commands(tmp_path, steps=MANY)
    yield run
    for process in run.processes:
        process.kill()
        process.wait()
    for memory in _memories(run.folder):
        shutil.rmtree(memory, ignore_errors=True)


def _memories(run_dir: Path) -> list[Path]:
    """Return the folders in shared memory that are labelled as this run's."""
    found = []
    for owner in SHARED_MEMORY.glob("megalith-*/owner"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(owner.read_text())["run"] == str(run_dir.resolve()):
                found.append(owner.parent)
    return found


def _six_lines(port: int) -> None:
    """Write everything that a stranger could who knows the agents' keys in the store."""
    with contextlib.suppress(Exception):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
        for member in range(1, store.add("joined", 0) + 1):
            for number in range(1, 50):
                store.set(f"orders/{member}/{number}", json.dumps({"leave": 0, "forget": True}))
            store.set(f"expelled/{member}", "")
        store.set(f"member/{store.add('joined', 1)}", "garbage{")


def _in_a_child(port: int) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            _six_lines(port)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _send(port: int, data: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(data)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_whoever_reaches_the_agents_port_changes_nothing(commands: Commands, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    agents = [commands.type("agent", "--machine", f"m{rank}", RANK=str(rank), **place) for rank in range(2)]
    commands.await_step(3)
    with pytest.raises(OSError, match="refused"):  # it listens at the launcher's address
        socket.create_connection(("127.0.0.2", port), timeout=5)
    idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(300)]
    _in_a_child(port)
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 10_000, b"garbage{\n", bytes(1000)):
        _send(port, data)
    commands.await_step(commands.steps() + 10)
    for one in idle:
        one.close()
    agents[0].send_signal(signal.SIGTERM)
    assert [agent.wait(PATIENCE) for agent in agents] == [ExitCode.STOPPED] * 2, commands.said()
    assert "connections without proof of the key that were closed to make room for newer ones" in commands.log.read_text()

    done = commands.steps()
    commands.run_file.write_text(commands.run_file.read_text().replace(MANY, str(done)))
    train(load(commands.run_file).spec, tmp_path / "unhurt")
    assert position(commands.folder) == position(tmp_path / "unhurt")
    assert_same_bits(final_state(tmp_path / "unhurt"), final_state(commands.folder))

    secret = commands.folder / "ranks" / "key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    files = [path for path in (*commands.folder.rglob("*"), commands.log) if path.is_file()]
    assert [path for path in files if secret.read_bytes().strip() in path.read_bytes()] == [secret]


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_a_folder_that_others_may_write_to_is_named_and_no_state_is_taken_from_it(commands: Commands, tmp_path: Path) -> None:
    """The folder has the right name and the right copies, and its owner could insert any state."""
    commands.run_file.write_text(commands.run_file.read_text().replace(MANY, "200"))
    first = commands.type("train")
    commands.await_step(5)
    (memory,) = _memories(commands.folder)
    inside = [memory, *memory.rglob("*")]
    modes = (
        {stat.S_IMODE(path.stat().st_mode) for path in inside if path.is_file()},
        {stat.S_IMODE(path.stat().st_mode) for path in inside if path.is_dir()},
    )
    assert modes == ({0o600}, {0o700}), "although the umask forbids nothing"
    first.kill()
    first.wait()
    commands.processes.clear()
    memory.chmod(0o777)

    again = commands.type("train")
    assert again.wait(PATIENCE) == ExitCode.FINISHED, commands.said()
    assert f"{memory}: other users may write to it" in commands.log.read_text()
    train(load(commands.run_file).spec, tmp_path / "unhurt")
    assert_same_bits(final_state(tmp_path / "unhurt"), final_state(commands.folder))
    assert memory.is_dir(), "it is somebody else's to remove"
