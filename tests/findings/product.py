"""The product as its users see it: the commands, files, processes and ports of the tree under test.

MEGALITH_TREE names that tree; the default is the tree of these tests. This module imports nothing from `megalith`, so the same tests
run against any commit (`benchmarks/was_broken.py`).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]
TREE = Path(os.environ.get("MEGALITH_TREE") or ROOT).resolve()
PATIENCE = 600.0
"""Seconds after which a condition counts as one that never comes: no test depends on a machine's speed."""

UNKNOWN = re.compile(r"No such (option|command)|ModuleNotFoundError|ImportError|is no key|unknown key")


class IncomparableError(Exception):
    """The tree under test does not know a command or an option. This proves nothing about a finding."""


@dataclass(frozen=True)
class Said:
    """A command's exit status and output."""

    status: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """Return the whole output on one line."""
        return " ".join(f"{self.stdout} {self.stderr}".split())

    @property
    def json(self) -> dict[str, Any]:
        """Return the object that --json printed."""
        return json.loads(self.stdout)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEGALITH", "PYTEST"))}
    return kept | {"PYTHONPATH": str(TREE), "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more}


def megalith(*arguments: object, at: Path, piped: str = "") -> Said:
    """Run a command in the folder `at` until it ends; `piped`: text in a pipe, its standard input. Raises IncomparableError if this tree
    does not know the command or an option."""
    done = subprocess.run(
        [sys.executable, "-m", "megalith.cli", *map(str, arguments)],
        cwd=at, env=_environment({}), input=piped, capture_output=True, text=True, errors="surrogateescape", timeout=2 * PATIENCE,
        check=False,
    )  # fmt: skip
    said = Said(done.returncode, done.stdout, done.stderr)
    if UNKNOWN.search(said.words):
        raise IncomparableError(said.words)
    return said


class Running:
    """A command that runs while a test observes it."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process, self._output = process, output

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def children(self) -> list[psutil.Process]:
        """Return all processes that the command started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """Return the youngest generation of the command's processes: those that train."""
        found = self.children()
        parents = {child.ppid() for child in found}
        return [child for child in found if child.pid not in parents]

    def end(self) -> int:
        """Wait until the command ends, and return its exit status. Raises subprocess.TimeoutExpired."""
        return self.process.wait(PATIENCE)

    def until(self, what: Callable[[], Any], *, or_ended: bool = False) -> None:
        """Wait for a condition. Raises TimeoutError if it does not hold in time, or, unless `or_ended`, if the command
        ends before."""
        limit = time.monotonic() + PATIENCE
        while not what():
            if self.ended:
                if or_ended:
                    return
                raise TimeoutError(f"ended with {self.process.returncode}: {self.output[-2000:]}")
            if time.monotonic() > limit:
                raise TimeoutError(f"the sign did not come: {self.output[-2000:]}")
            time.sleep(0.05)


@contextmanager
def running(
    *arguments: object,
    at: Path,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    under: Sequence[str] = (),
) -> Iterator[Running]:
    """Start a command in the folder `at`, and kill it with all its processes at the end. Standard output goes to `stdout`, if given;
    `output` is then only its standard error. `under`: a program, with its arguments, that executes the command."""
    output = at / f"output-{time.monotonic_ns()}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*under, sys.executable, "-m", "megalith.cli", *map(str, arguments)],
            cwd=at, env=_environment(env or {}), stdin=subprocess.DEVNULL, stdout=file if stdout is None else stdout, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    command = Running(process, output)
    try:
        yield command
    finally:
        for one in command.children():
            _kill(one.pid)
        _kill(process.pid)
        process.wait()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in a run's log so far, without a line that is still being written."""
    try:
        lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(one, dict) and one.get("type") == kind:
            found.append(one)
    return found


RUN = """
name = "findings"
model = { family = "llama", layers = 1, dim = 32, heads = 2, ffn = 48, vocab = 264, context = 64 }
data.path = "data"
train = { steps = 300, global_batch = 2, seq_len = 32, precision = "fp32", device = "cpu" }
checkpoint = { every = 10, keep = 2 }
optimizer.warmup = 4
"""


def write_run(folder: Path) -> None:
    """Write a tiny run and its data."""
    (folder / "run.toml").write_text(RUN)
    write_verse(folder / "verse.txt")
    assert megalith("data", "prepare", "verse.txt", "--tokenizer", "bytes", "--out", "data", at=folder).status == 0


def write_verse(path: Path, lines: int = 200) -> None:
    """Write a text of about 36 bytes a line."""
    path.write_text("".join(f"Line {i} of a verse with {i} words.\n\n" for i in range(lines)))
