"""Messages when a run fails, recovers or is stopped: the cause comes first, once, within ten lines. There is no error
after a success."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from megalith.checkpoint.folder import committed
from megalith.control.incidents import FOLDER
from megalith.control.watch import BOUNCE_SECONDS
from megalith.events import Incident, Step, of_kind, read
from megalith.fleet import injection
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.injection import Injection
from tests.fleet.conftest import until
from tests.full import sampled
from tests.patience import PATIENCE
from tests.runs import prepare_text

pytestmark = pytest.mark.slow

RUN = """
model = {{ layers = 2, dim = 32, heads = 4, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 3, zero = 1 }}
data.path = "{data}"
train = {{ steps = 8, global_batch = 6, seq_len = 32, precision = "fp32" }}
optimizer = {{ warmup = 0, schedule = "constant" }}
checkpoint.every = 5
launch = {{ threads = 1, start_timeout = 600.0 }}
fleet = {{ hang_floor = 600.0, straggler_steps = 1_000 }}
"""
LOST_PEER = re.compile(r"gloo|connection (closed|reset)|exception raised from|frame #", re.IGNORECASE)
"""Messages of ranks that lost a peer."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "run.toml").write_text(RUN.format(data=prepare_text(folder)))
    return folder / "run.toml"


@pytest.fixture
def start(run_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Start `megalith train` in `tmp_path / "run"`, with faults."""
    started = list[subprocess.Popen[str]]()

    def begin(
        *settings: str, faults: list[Injection] | None = None, variables: Mapping[str, str] = MappingProxyType({})
    ) -> "subprocess.Popen[str]":
        injection.save(tmp_path / "faults.json", faults or [])
        words = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "megalith.cli", "train", str(run_file), "--run-dir", str(tmp_path / "run"), *words]
        environment = os.environ | {injection.VARIABLE: str(tmp_path / "faults.json")} | dict(variables)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _said(process: "subprocess.Popen[str]") -> list[str]:
    return process.communicate(timeout=PATIENCE)[0].splitlines()


def _block(said: list[str]) -> list[str]:
    """Return the lines after the last line about the running training."""
    last = max(i for i, line in enumerate(said) if re.match(r"step \d+/|incident at|resumed at|warning", line))
    return said[last + 1 :]


@sampled(2, together=True)
def test_a_run_that_recovered_ends_without_an_error_in_sight(start: Start, tmp_path: Path) -> None:
    process = start(faults=[Injection(0, "kill", 3, "step", (1,))])
    said = _said(process)
    assert process.returncode == ExitCode.FINISHED, said
    assert [line for line in said if LOST_PEER.search(line)] == []
    assert [line for line in said if line.startswith("error")] == []
    incidents = [line for line in said if line.startswith("incident at")]
    assert [line.partition(" (")[0] for line in incidents] == [
        "incident at step 3: rank 1 on 0: killed by SIGKILL in phase `step`"
    ]
    assert said[-1].startswith("report: ")
    kept = (tmp_path / "run" / FOLDER / "001.txt").read_text()
    assert "first cause: rank 1 killed by SIGKILL" in kept
    assert "ended by the supervisor" in kept or "after it: rank" in kept


@sampled(2, together=True)
def test_an_error_that_comes_again_and_again_is_said_once_at_the_end(start: Start, tmp_path: Path) -> None:
    process = start(faults=[Injection(number, "exception", 3, "step", (1,)) for number in range(3)])
    said = _said(process)
    assert process.returncode == ExitCode.FAILED, said
    block = _block(said)
    assert len(block) <= 10, block
    assert "Injected: fault" in block[0]
    assert "the third time at step 3" in block[0]
    assert sum("Injected: fault" in line for line in block) == 1
    assert not [line for line in block if LOST_PEER.search(line) or line.startswith("Traceback")]
    (file,) = [line.split()[-1] for line in block if FOLDER in line]
    assert f"incident {len(of_kind(read(tmp_path / 'run'), Incident))}," in Path(file).read_text()
    assert "Traceback (most recent call last)" in Path(file).read_text()


@sampled(2, together=True)
def test_numbers_that_are_not_finite_are_diagnosed_once(start: Start) -> None:
    process = start("optimizer.lr=300", "optimizer.clip=0")
    said = _said(process)
    assert process.returncode == ExitCode.FAILED, said
    block = _block(said)
    assert len(block) <= 10, block
    assert "not finite" in block[0]
    assert "Lower optimizer.lr" in block[0]
    assert sum("optimizer.lr" in line or "not finite" in line for line in block) == 1, block
    assert not [line for line in said if line.startswith("Traceback") or LOST_PEER.search(line)]


@sampled(2, together=True)
def test_without_recovery_a_killed_rank_is_named_in_ten_lines_and_may_have_been_out_of_memory(start: Start) -> None:
    process = start("fleet.recover=false", faults=[Injection(0, "kill", 3, "step", (1,))])
    said = _said(process)
    assert process.returncode == ExitCode.LOST, said
    block = _block(said)
    assert len(block) <= 10, block
    assert block[0].startswith("rank 1 killed by SIGKILL in phase `step` (not out of memory")
    assert not [line for line in said if LOST_PEER.search(line)]


@sampled(2, together=True)
def test_ctrl_c_is_answered_at_once_with_what_a_second_one_loses(start: Start, tmp_path: Path) -> None:
    """A rank is stopped in the step after the seventh. That step does not end, so there is time for a second Ctrl-C."""
    folder, settings = tmp_path / "run", ("train.steps=100_000", "checkpoint.asynchronous=false", "fleet.recover=false")
    process = start(*settings, faults=[Injection(0, "stop", 7, "step", (1,))])
    assert process.stdout is not None
    until(lambda: bool(injection.fired(tmp_path / "faults.json")) and _done(folder) == 7, seconds=PATIENCE)
    process.send_signal(signal.SIGINT)
    said = list[str]()
    while not (said and said[-1].startswith("Ctrl-C again")):
        said.append(process.stdout.readline())
        assert said[-1], said
    assert said[-2] == "stopping after this step, then saving\n"
    assert said[-1] == "Ctrl-C again: stop now and lose 2 steps (the newest copy of the state is step 5 in store)\n"
    time.sleep(2 * BOUNCE_SECONDS)  # not before the first was received: the two would count as one key press
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == ExitCode.INTERRUPTED, rest
    assert "ended at once" in rest
    assert [path.name for path in committed(folder / "checkpoints")] == ["step-00000005"], "two of the seven steps are lost"


def _done(folder: Path) -> int:
    return max((event.step for event in of_kind(read(folder), Step)), default=0)


def test_under_another_launcher_one_rank_says_why_the_run_failed(start: Start) -> None:
    """All ranks find the same error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    ranks = [start("plan.data=2", "optimizer.lr=1e30", variables=meeting | place) for place in places]
    said = [line for rank in ranks for line in _said(rank)]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert len([line for line in said if "NaN or Inf in gradients" in line]) == 1
    assert len([line for line in said if re.fullmatch(r"rank \d ends: NotFinite: another rank has the same error", line)]) == 1
    assert not [line for line in said if "Traceback" in line]
    begun = next(number for number, line in enumerate(said) if re.fullmatch(r"rank \d failed", line))
    assert "NaN or Inf" in said[begun + 1] and "MEGALITH_TRACEBACK=1" in "".join(said[begun : begun + 10])
