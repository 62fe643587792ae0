"""A run that was killed and started again ends with the same bits as one that never was."""

import contextlib
import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.data.stream import Stream
from megalith.events import Checkpoint, Incident, Problem, RunStarted, Step, of_kind, read
from megalith.fleet import injection
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.injection import Injection
from megalith.fleet.local import HEARTBEATS, _family, _place
from megalith.rehearse.campaign import may_mount, small_disk
from megalith.spec.run import RunSpec
from megalith.train import loop
from megalith.train.batches import indices
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, at_step, final_state, finish, position, prepare_text, start, train
from tests.specs import tiny_run

PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 3, "pipeline": 2},
    {"tensor": 2, "data": 2, "zero": 1},
    {"pipeline": 2},
]
TYPED = 150
"""Steps of the run that is started as a command: it must outlast what is done to it."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _spec(data: Path, plan: dict[str, Any], **train: Any) -> RunSpec:
    """Two microbatches for a rank in each of twelve steps."""
    return tiny_run(
        model={"vocab": 264},
        plan={"microbatch": 4 // plan.get("data", 1)} | plan,
        data={"path": str(data)},
        train={"steps": 12, "global_batch": 8, "seq_len": 32, "precision": "bf16"} | train,
        checkpoint={"every": 3},
        optimizer={"warmup": 4, "schedule": "cosine"},
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_kill_9_of_any_rank_changes_no_bit(plan: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Each in turn, in one run that is killed again and again."""
    spec = _spec(data, plan)
    train(spec, tmp_path / "whole")
    victims = range(spec.plan.ranks) if spec.plan.pipeline > 1 else [1]
    folder = tmp_path / "killed"
    for number, victim in enumerate(victims):

        def kill(running: dict[int, int], victim: int = victim) -> None:
            os.kill(next(pid for pid, rank in running.items() if rank == victim), signal.SIGKILL)

        codes = finish(start(spec, folder), meanwhile=at_step(5 + number, folder, kill))
        assert codes[victim] == -signal.SIGKILL
    train(spec, folder)
    starts = [event.resumed_step for event in of_kind(read(folder), RunStarted)]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert set(starts[1:]) <= {0, 3, 6, 9}, "went on from a checkpoint, not from the start of the step it died in"
    assert starts[-1] > 0
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert position(folder) == position(tmp_path / "whole") == {"step": 12, "samples": 96, "updates": 12}


def test_a_signal_saves_and_going_on_changes_no_bit(data: Path, tmp_path: Path) -> None:
    spec = _spec(data, {"data": 2, "zero": 2})
    train(spec, tmp_path / "whole")

    def ask(running: dict[int, int]) -> None:
        os.kill(max(running), signal.SIGTERM)  # one rank alone is told: all must agree

    codes = finish(start(spec, tmp_path / "asked"), meanwhile=at_step(4, tmp_path / "asked", ask))
    assert codes == [ExitCode.STOPPED] * 2
    stopped_at = position(tmp_path / "asked")["step"]
    assert 4 < stopped_at < 12
    train(spec, tmp_path / "asked")
    assert_same_bits(final_state(tmp_path / "whole"), final_state(tmp_path / "asked"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(_brief(data), folder)
    return folder


def _brief(data: Path, *, steps: int = 4) -> RunSpec:
    return tiny_run(
        model={"layers": 2, "vocab": 264},
        plan={"data": 2, "zero": 1},
        data={"path": str(data)},
        train={"steps": steps, "global_batch": 2, "seq_len": 32, "precision": "fp32"},
        validation={"every": 2, "samples": 4},
        checkpoint={"every": 2},
    )


@pytest.mark.parametrize(
    ("phase", "number", "ends_at"),
    [
        ("joining", signal.SIGUSR1, 1),  # the first step is done: only then there is a state that all agree on
        ("building", signal.SIGTERM, 1),
        ("restoring", signal.SIGUSR1, 1),
        ("validation", signal.SIGTERM, 3),
        ("checkpoint", signal.SIGUSR1, 3),
        ("last checkpoint", signal.SIGTERM, 4),
    ],
)
def test_a_signal_in_any_phase_is_an_agreed_stop(
    phase: str, number: int, ends_at: int, data: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one rank, whenever it is in that phase. A checkpoint under way by then is written all the same."""
    say, write = Heartbeat.beat, Checkpointer._write

    def say_and_be_told(self: Heartbeat, name: str, step: int = -1, **rest: float) -> None:
        say(self, name, step, **rest)
        if name == phase and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)

    def write_slowly(self: Checkpointer, *what: Any) -> Any:
        time.sleep(0.5)  # longer than a step
        return write(self, *what)

    with monkeypatch.context() as patch:
        patch.setattr(Heartbeat, "beat", say_and_be_told)
        patch.setattr(Checkpointer, "_write", write_slowly)
        codes = finish(start(_brief(data), tmp_path / "told"))
    assert codes == [ExitCode.STOPPED if ends_at < 4 else ExitCode.FINISHED] * 2
    saved = [event.step for event in of_kind(read(tmp_path / "told"), Checkpoint)]
    assert saved == sorted({min(2, ends_at), ends_at})
    train(_brief(data), tmp_path / "told")
    assert_same_bits(final_state(undisturbed), final_state(tmp_path / "told"))
    assert position(tmp_path / "told") == position(undisturbed)


@pytest.mark.parametrize("stopped", [False, True], ids=["at the end", "asked to stop"])
def test_no_room_for_the_last_checkpoint_is_waited_for(
    stopped: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes after it. A run that is asked to stop cannot wait as long, and does not say that it has saved."""
    folder, write, tries = tmp_path / "told", Checkpointer._write, itertools.count(1)
    failing = range(2, 1000) if stopped else range(10, 13)  # a save is due every second step; the tenth is the last

    def write_where_there_is_room(self: Checkpointer, *what: Any) -> Any:
        if next(tries) in failing:  # on all ranks, which else would wait for one another
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *what)

    def ask(running: dict[int, int]) -> None:
        if stopped:
            os.kill(max(running), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_write", write_where_there_is_room)
        patch.setattr(loop, "AGAIN_SECONDS", 0.05)
        patch.setattr(loop, "STOP_SECONDS", 0.2)
        codes = finish(start(_brief(data, steps=20), folder), meanwhile=at_step(3, folder, ask))
    told = [event.message for event in of_kind(read(folder), Problem)]
    assert any("No space left on device" in message for message in told)
    if stopped:
        assert all(codes)
        assert ExitCode.STOPPED not in codes
        assert any("could not be saved" in message for message in told)
        train(_brief(data, steps=20), folder)
    else:
        assert codes == [ExitCode.FINISHED] * 2
        assert sum("make room in" in message for message in told) == len(failing)
    train(_brief(data, steps=20), tmp_path / "whole")
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_used(data: Path, tmp_path: Path) -> None:
    spec = _spec(data, {"data": 2, "zero": 3})
    train(spec, tmp_path / "run")
    whole = final_state(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000012"
    broken = newest / "rank-00001.safetensors"
    os.truncate(broken, broken.stat().st_size // 2)
    train(spec, tmp_path / "run")
    told = [event.message for event in of_kind(read(tmp_path / "run"), Problem)]
    assert any("step-00000012" in message and "rank-00001.safetensors" in message for message in told), told
    assert [event.resumed_step for event in of_kind(read(tmp_path / "run"), RunStarted)] == [0, 9]
    assert_same_bits(whole, final_state(tmp_path / "run"))


def test_the_same_samples_in_the_same_steps_for_any_number_of_ranks(data: Path) -> None:
    stream = Stream(data, seq_len=32, seed=5)
    orders = []
    for ranks, microbatch in ((1, 1), (1, 4), (2, 2), (4, 1), (8, 1)):
        spec = _spec(data, {"data": ranks, "microbatch": microbatch})
        steps = []
        for step in range(6):
            numbers = [n for rank in range(ranks) for part in indices(spec, first=step * 8, data_rank=rank) for n in part]
            assert sorted(numbers) == list(range(step * 8, step * 8 + 8)), "a sample lost or seen twice"
            steps.append([stream.sample(n).tokens.tobytes() for n in sorted(numbers)])
        orders.append(steps)
    assert all(order == orders[0] for order in orders)


@pytest.fixture(scope="module")
def command(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`megalith train` of a small run, to which the folder is added."""
    file = tmp_path_factory.mktemp("typed") / "run.toml"
    file.write_text(
        "[model]\nlayers = 2\ndim = 32\nheads = 4\nffn = 48\nvocab = 264\ncontext = 64\n[plan]\ndata = 2\nzero = 3\n"
        f'[data]\npath = "{data}"\n[train]\nsteps = {TYPED}\nglobal_batch = 4\nseq_len = 32\nprecision = "fp32"\n'
        "[optimizer]\nwarmup = 2\n[checkpoint]\nevery = 5\n[launch]\nthreads = 1\n"
    )
    return [sys.executable, "-m", "megalith.cli", "train", str(file), "--run-dir"]


@pytest.fixture(scope="module")
def never_killed(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed") / "whole"
    subprocess.run([*command, str(folder)], check=True, capture_output=True, timeout=PATIENCE)
    return folder


@pytest.mark.slow
def test_megalith_train_itself_goes_on_after_kill_9(command: list[str], never_killed: Path, tmp_path: Path) -> None:
    """The same through the command, in one go: controller, fork server, ranks."""
    folder = tmp_path / "killed"
    process = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _await_step(8, folder, process)
    os.kill(_process_of(1, folder), signal.SIGKILL)
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == ExitCode.FINISHED, said
    assert "rank 1 on 0: killed by SIGKILL" in said
    assert "going on at step" in said
    assert_same_bits(final_state(never_killed), final_state(folder))


def _await_step(step: int, folder: Path, process: "subprocess.Popen[str]") -> None:
    while not any(event.step >= step for event in of_kind(read(folder), Step)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def _process_of(rank: int, folder: Path) -> int:
    header = re.search(rf"rank {rank} of 2, process (\d+)", (folder / f"ranks/rank-{rank}.log").read_text())
    assert header
    return int(header[1])


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_run_folder_without_any_room_ends_no_run(command: list[str], never_killed: Path, tmp_path: Path) -> None:
    """Neither checkpoints nor events nor logs find room, and a rank is killed meanwhile; another one dies before it has written its part
    of the last checkpoint, which must be made all the same."""
    listed = tmp_path / "faults.json"
    injection.save(listed, [Injection(0, "kill", TYPED, "saving", (1,))])
    folder, environment = tmp_path / "disk" / "run", os.environ | {injection.VARIABLE: str(listed)}
    with small_disk(tmp_path / "disk", size=80 << 20):
        process = subprocess.Popen(
            [*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        _await_step(8, folder, process)
        ballast = tmp_path / "disk" / "ballast"
        beats = Heartbeat.open(next(_place().glob(f"{_family(folder)}-*/{HEARTBEATS}")), 0)

        def unlogged() -> int:
            return beats.read().step - max(event.step for event in of_kind(read(folder), Step))

        _keep_full(ballast, until=lambda: unlogged() > 10)  # a checkpoint is due every few steps
        os.kill(_process_of(1, folder), signal.SIGKILL)
        soon = time.monotonic() + 1.5
        _keep_full(ballast, until=lambda: time.monotonic() > soon)
        assert process.poll() is None, process.communicate()[0]
        ballast.unlink()
        said = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == ExitCode.FINISHED, said
    assert [event.cause for event in of_kind(read(folder), Incident)].count("rank_failed") >= 2, "a start may fail, too"
    assert injection.fired(listed)
    assert_same_bits(final_state(never_killed), final_state(folder))
    assert position(folder) == position(never_killed)


def _keep_full(ballast: Path, *, until: Callable[[], bool]) -> None:
    """Leave no room on a disk, also where others remove something meanwhile."""
    give_up = time.monotonic() + PATIENCE
    with ballast.open("ab", buffering=0) as file:
        while not until():
            assert time.monotonic() < give_up, "what needs no room did not go on"
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            time.sleep(0.005)
