"""A run that is trained by commands as a user types them, while others disturb it: its files, processes, ports and output."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from megalith import epochs
from megalith.events import FILE
from megalith.fleet.environment import MEETING
from megalith.fleet.exit_codes import ORDERLY
from megalith.rehearse.supervised_agents import HOST, free_port
from tests.patience import PATIENCE

MANY = 100_000
"""More steps than any run of these tests reaches. It is stopped after the last act."""

QUIET = PATIENCE
"""Seconds without a step or output after which a wait counts as silent. This is longer than `fleet.wait_limit`, whose beginning is
logged, and longer than a start on an overloaded machine."""

RUN = """
name = "careless"
model = {{ layers = 2, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 2, pipeline = 2, zero = 1 }}
data.path = "{data}"
train = {{ steps = {steps}, global_batch = 4, seq_len = 32, precision = "fp32", device = "cpu" }}
optimizer = {{ lr = 1e-3, schedule = "constant", warmup = 0 }}
checkpoint = {{ every = 20, keep = 3 }}
launch = {{ threads = 1, start_timeout = 250.0, timeout = 120.0 }}
fleet = {{ nodes = 2, spares = 1, hang_floor = 3.0, check = "return", wait_limit = 90.0, burn_in = 0.0 }}
"""
"""Four ranks on two nodes, and a third node as a spare."""

Step = tuple[float, float, int]
"""Loss, gradient norm and tokens of a step, from the log."""


class BrokenError(AssertionError):
    """The law does not hold."""


class Scene:
    """One run in `folder`. `agents`: each node has an agent of its own; otherwise one command rehearses the nodes."""

    def __init__(self, folder: Path, data: Path, *, agents: bool) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run, self.file, self.agents = folder, folder / "run", folder / "run.toml", agents
        self.data = shutil.copytree(data, folder / "data")
        self.file.write_text(RUN.format(data=self.data, steps=MANY))
        self.said = folder / "said-0"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.steps: dict[int, set[Step]] = {}
        self._times: set[float] = set()  # the number of steps in the log
        self._sizes: tuple[int, int] = (0, 0)
        self._moved = time.monotonic()
        self._starts = self._port = 0

    # Commands

    @property
    def command(self) -> "subprocess.Popen[bytes]":
        """Return the process whose exit status is the run's."""
        return self.processes[0]

    def type(self, *, steps: int = MANY) -> None:
        """Start the command, or the three commands of the agents."""
        self._starts += 1
        self.said, self._port = self.folder / f"said-{self._starts}", free_port()
        more = ["--set", f"train.steps={steps}"]
        if self.agents:
            self.processes = [self.begin("agent", "--machine", f"m{rank}", *more, env=self._place(rank)) for rank in range(3)]
        else:
            self.processes = [self.begin("train", *more)]
        self._moved = time.monotonic()

    def _place(self, rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": HOST, "MASTER_PORT": str(self._port)}

    def begin_again(self, rank: int) -> None:
        """Start an agent that has ended, as an engine would: it joins the run."""
        joins = self._place(rank) | {MEETING: f"tcp://{HOST}:{self._port}"}
        self.processes[rank] = self.begin("agent", "--machine", f"m{rank}", "--set", f"train.steps={MANY}", env=joins)

    def begin(self, *words: str, env: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
        """Start a command about this run. Its output goes to `said`."""
        command = [sys.executable, "-m", "megalith.cli", words[0], str(self.file), "--run-dir", str(self.run), *words[1:]]
        with self.said.open("ab") as out:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment(env or {}), start_new_session=True
            )

    def ask(self, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Return the exit status and the output of another command."""
        command = [sys.executable, "-m", "megalith.cli", *words]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment(env or {}),
            timeout=PATIENCE, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout.decode(errors="replace")

    def output(self) -> str:
        """Return the command's output so far."""
        return self.said.read_text(encoding="utf-8", errors="replace")

    # Waiting

    def goes_on(self, steps: int) -> bool:
        """Wait until the log has this many more steps; return False if the command ends before. Raises BrokenError for a silent wait."""
        since = time.time()
        while sum(at > since for at in self._times) < steps:
            if self.command.poll() is not None:
                return False
            self._look()
            time.sleep(0.05)
        return True

    def end(self) -> int:
        """Wait for the command to end, and return its exit status. Remaining agents are then ended, as by their engine. Raises the same
        errors as `goes_on`."""
        while self.command.poll() is None:
            self._look()
            time.sleep(0.05)
        self._look()
        leave = self.command.returncode in ORDERLY  # else they wait for another command, until their engine ends them
        until = time.monotonic() + (PATIENCE if leave else 0.0)
        while any(process.poll() is None for process in self.processes) and time.monotonic() < until:
            time.sleep(0.05)
        self.kill()
        return self.command.returncode

    def _look(self) -> None:
        """Record the steps in the log. Raises BrokenError if there was no progress for too long."""
        found = _tail(epochs.newest(self.run, FILE))
        for one in found:
            self.steps.setdefault(one["step"], set()).add((one["loss"], one["grad_norm"], one["tokens"]))
            self._times.add(one["time"])
        sizes = (len(self._times), self.said.stat().st_size)
        if sizes != self._sizes:
            self._sizes, self._moved = sizes, time.monotonic()
        if time.monotonic() - self._moved > QUIET:
            raise BrokenError(f"neither a step nor a word for {QUIET:.0f} s")

    # Targets of acts

    def below(self) -> list[psutil.Process]:
        """Return all processes of the run except the typed commands."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        return [found[pid] for pid in sorted(found)]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train: the youngest ones, below a fork server."""
        below = self.below()
        typed, parents = {process.pid for process in self.processes}, set[int]()
        with contextlib.suppress(psutil.NoSuchProcess):
            parents = {one.ppid() for one in below}
        return [one for one in below if one.pid not in parents and one.is_running() and one.ppid() not in typed]

    def servers(self) -> list[psutil.Process]:
        """Return the fork servers of the ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return list({parent.pid: parent for rank in self.ranks() if (parent := rank.parent()) is not None}.values())
        return []

    def ports(self) -> list[tuple[str, int]]:
        """Return the addresses at which the run's processes listen."""
        found = set[tuple[str, int]]()
        for process in (*(psutil.Process(one.pid) for one in self.processes if one.poll() is None), *self.below()):
            with contextlib.suppress(psutil.Error):
                heard = process.net_connections("tcp")
                found |= {(one.laddr.ip, one.laddr.port) for one in heard if one.status == psutil.CONN_LISTEN}
        return sorted(found)

    def memories(self) -> list[Path]:
        """Return the folders in shared memory that are labelled as this run's."""
        return list(_memories(self.run))

    # The end

    def kill(self) -> None:
        """Kill all processes that still run."""
        for one in self.below():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in self.processes:
            process.kill()
            process.wait()

    def __enter__(self) -> "Scene":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for memory in self.memories():
            shutil.rmtree(memory, ignore_errors=True)


def _environment(more: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGALITH")}
    return kept | {"COLUMNS": "200", **more}


def _memories(run: Path) -> Iterator[Path]:
    for owner in Path("/dev/shm").glob("megalith-*/owner"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(owner.read_text())["run"] == str(run.resolve()):
                yield owner.parent


NUMBERS = {"step", "loss", "grad_norm", "tokens", "time"}
"""Keys of a step in the log, except for a strange line that somebody has written."""


def _tail(log: Path, size: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the steps among the last lines of a log that may be damaged."""
    found = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        for line in file.read().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                one = json.loads(line)
                if isinstance(one, dict) and one.get("type") == "step" and one.keys() >= NUMBERS:
                    found.append(one)
    return found
