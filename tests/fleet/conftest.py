"""Jobs for these tests, and the processes that they leave running."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith.control.supervisor import Job
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.local import HEARTBEATS
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TICK = 0.05  # seconds by which a Clock advances at each reading


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """`job("wait", ranks=2, seconds=1.0)` calls an entry of these tests; names of Job's own fields go to the job."""

    def make(entry: str, *, ranks: int = 2, **rest: Any) -> Job:
        own = {name: rest.pop(name) for name in list(rest) if name in Job.__dataclass_fields__}
        limits: dict[str, Any] = {"start_timeout": PATIENCE, "silence_timeout": PATIENCE, "threads": 1}
        return Job(entry=f"tests.fleet.entries:{entry}", arguments=rest, ranks=ranks, run_dir=tmp_path, **limits | own)

    return make


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a supervisor in a process of its own and wait until its ranks are ready."""
    started: list[subprocess.Popen[str]] = []

    def start(entry: str, *, ranks: int = 2, method: str = "fork", **rest: Any) -> subprocess.Popen[str]:
        fields = {"entry": f"tests.fleet.entries:{entry}", "arguments": {}, "ranks": ranks, "run_dir": str(tmp_path), **rest}
        command = [sys.executable, "-m", "tests.control.supervise", json.dumps(fields)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGALITH_START": method}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        until(lambda: all((tmp_path / f"pids-{rank}").exists() for rank in range(ranks)), seconds=PATIENCE)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Clock:
    """A supervisor's clock, which stands until `sign` exists and then advances by `seconds`. So limits can be tested on a
    machine of any speed."""

    def __init__(self, sign: Callable[[], bool], *, seconds: float) -> None:
        self._sign, self._left, self._now, self._there = sign, seconds, 0.0, False

    def monotonic(self) -> float:
        self._there = self._there or self._sign()
        if self._there and self._left > 0:
            self._now, self._left = self._now + TICK, self._left - TICK
        return self._now

    @staticmethod
    def time() -> float:
        return time.time()


def until(true: Callable[[], bool], *, seconds: float) -> None:
    """Wait for a condition; raise if it does not become true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"did not happen within {seconds} s")
        time.sleep(0.01)


def processes(run_dir: Path) -> dict[str, int]:
    """Return the process ids of each rank and its parent, as recorded by the entries of these tests."""
    found = {}
    for file in run_dir.glob("pids-?"):
        own, parent = file.read_text().split()
        found |= {file.name: int(own), "parent": int(parent)}
    return found


def beats(run_dir: Path, *, ranks: int) -> list[tuple[str, int]]:
    """Return the last phase and step of each rank; empty before there are any."""
    try:
        found = [Heartbeat.open(run_dir / "ranks" / HEARTBEATS, rank).read() for rank in range(ranks)]
    except (OSError, ValueError):
        return []
    return [(beat.phase, beat.step) for beat in found]


def is_alive(process: int) -> bool:
    """True if a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
