"""A run that was killed and restarted ends with the same bits as an uninterrupted run."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megalith.check import check_resume
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.data.stream import Stream
from megalith.events import Checkpoint, Incident, Problem, Recovery, RunStarted, Step, of_kind, read
from megalith.fleet import injection
from megalith.fleet.evidence import is_stopped
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Beat, Heartbeat
from megalith.fleet.injection import Injection
from megalith.fleet.local import HEARTBEATS
from megalith.fleet.tiers.roots import _family, copies_place
from megalith.machine.capacity import find_gpus
from megalith.rehearse.campaign import may_mount, small_disk
from megalith.spec.run import RunSpec
from megalith.train import loop
from megalith.train.batches import indices
from tests.fleet.conftest import until
from tests.full import sampled
from tests.patience import PATIENCE
from tests.runs import (
    assert_same_bits,
    await_step,
    die_once_saved,
    final_state,
    finish,
    position,
    prepare_text,
    process_of,
    signal_yourself,
    start,
    train,
    typed,
    when,
)
from tests.specs import tiny_run

PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 3, "pipeline": 2},
    {"tensor": 2, "data": 2, "zero": 1},
    {"pipeline": 2},
]
TYPED = 150
"""The number of steps of the run that is started as a command: enough to outlast the faults."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _spec(data: Path, plan: dict[str, Any], **train: Any) -> RunSpec:
    """A run of twelve steps with two microbatches on each rank."""
    return tiny_run(
        model={"vocab": 264},
        plan={"microbatch": 4 // plan.get("data", 1)} | plan,
        data={"path": str(data)},
        train={"steps": 12, "global_batch": 8, "seq_len": 32, "precision": "bf16"} | train,
        checkpoint={"every": 3},
        optimizer={"warmup": 4, "schedule": "cosine"},
    )


@sampled(6, together=True)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_kill_9_of_any_rank_changes_no_bit(plan: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Kill each rank in turn, in one run, each time after there is a new checkpoint to resume from."""
    spec = _spec(data, plan)
    train(spec, tmp_path / "whole")
    victims = range(spec.plan.ranks) if spec.plan.pipeline > 1 else [1]
    folder = tmp_path / "killed"

    for number, victim in enumerate(victims):
        with when("step", 5 + number, rank=victim, act=lambda: die_once_saved(folder)):
            codes = finish(start(spec, folder))
        assert codes[victim] == -signal.SIGKILL
    train(spec, folder)
    starts = [event.resumed_step for event in of_kind(read(folder), RunStarted)]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert set(starts[1:]) <= {3, 6, 9}, "went on from a checkpoint, not from the start of the step it died in"
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert position(folder) == position(tmp_path / "whole") == {"step": 12, "samples": 96, "updates": 12}


@sampled(6, together=True)
def test_a_signal_saves_and_going_on_changes_no_bit(data: Path, tmp_path: Path) -> None:
    spec = _spec(data, {"data": 2, "zero": 2})
    train(spec, tmp_path / "whole")

    with when("step", 4, rank=1, act=lambda: signal_yourself(signal.SIGTERM)):  # only one rank is told, and all must agree
        codes = finish(start(spec, tmp_path / "asked"))
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


@pytest.mark.slow
@pytest.mark.skipif(find_gpus()[0] > 0, reason='here "auto" is a GPU, whose bits are not those of a CPU')
def test_another_device_key_between_two_commands_changes_no_bit(data: Path, tmp_path: Path) -> None:
    """The device is where the work happens, so a resumed run may name another; without a GPU, "auto" is the CPU too."""

    def brief(device: str, steps: int) -> RunSpec:
        spec = _brief(data, steps=steps)
        return spec.model_copy(update={"train": spec.train.model_copy(update={"device": device})})

    train(brief("auto", 2), tmp_path / "run")
    assert check_resume(brief("auto", 2), brief("cpu", 4)) == []
    train(brief("cpu", 4), tmp_path / "run")
    train(brief("cpu", 4), tmp_path / "whole")
    assert_same_bits(final_state(tmp_path / "whole"), final_state(tmp_path / "run"))
    assert position(tmp_path / "whole") == position(tmp_path / "run")


@sampled(6, together=True)
@pytest.mark.parametrize(
    ("phase", "number", "ends_at"),
    [
        ("joining", signal.SIGUSR1, 1),  # after the first step: only then is there a state on which all agree
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
    """One rank gets the signal in any phase. A checkpoint that is being written is completed."""
    say, write, gone_on = Heartbeat.beat, Checkpointer._write, threading.Event()

    def say_and_be_told(self: Heartbeat, name: str, step: int = -1, **rest: float) -> None:
        say(self, name, step, **rest)
        if name == "last checkpoint" or (name == "step" and step >= 2):
            gone_on.set()
        if name == phase and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)

    def write_slowly(self: Checkpointer, *what: Any) -> Any:
        gone_on.wait(PATIENCE)  # the checkpoint of step 2 is being written when the next step begins
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


@sampled(6, together=True)
@pytest.mark.parametrize("stopped", [False, True], ids=["at the end", "asked to stop"])
def test_no_room_for_the_last_checkpoint_is_waited_for(
    stopped: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later save follows it. A run that is asked to stop cannot wait so long, and does not report that it has saved."""
    folder, write, tries = tmp_path / "told", Checkpointer._write, itertools.count(1)
    failing = range(2, 1000) if stopped else range(10, 13)  # a save is due every second step; the tenth is the last

    def write_where_there_is_room(self: Checkpointer, *what: Any) -> Any:
        if next(tries) in failing:  # on all ranks, since they would otherwise wait for one another
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *what)

    def ask() -> None:
        if stopped:
            signal_yourself(signal.SIGTERM)

    with monkeypatch.context() as patch, when("step", 3, rank=1, act=ask):
        patch.setattr(Checkpointer, "_write", write_where_there_is_room)
        patch.setattr(loop, "AGAIN_SECONDS", 0.05)
        patch.setattr(loop, "STOP_SECONDS", 0.2)
        codes = finish(start(_brief(data, steps=20), folder))
    told = [event.message for event in of_kind(read(folder), Problem)]
    assert any("No space left on device" in message for message in told)
    if stopped:
        assert all(codes)
        assert ExitCode.STOPPED not in codes
        assert any("could not be saved" in message for message in told)
        train(_brief(data, steps=20), folder)
    else:
        assert codes == [ExitCode.FINISHED] * 2
        assert sum("Make room in" in message for message in told) == 1, "said once, however often it is tried"
        assert any("is retried every 0.05 s, for up to 3600 s. Make room" in message for message in told)
        assert any("the last checkpoint was saved" in message for message in told)
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
    """Return the command `megalith train` for a small run, without the folder."""
    return typed(tmp_path_factory.mktemp("typed") / "run.toml", data, steps=TYPED)


@pytest.fixture(scope="module")
def never_killed(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed") / "whole"
    subprocess.run([*command, str(folder)], check=True, capture_output=True, timeout=PATIENCE)
    return folder


def _start(command: list[str], folder: Path, listed: Path, *settings: str) -> "subprocess.Popen[bytes]":
    """Start the command with a list of faults. Its output goes to `said`, beside the list."""
    words = [word for setting in settings for word in ("--set", setting)]
    with listed.with_name("said").open("wb") as out:
        return subprocess.Popen(
            [*command, str(folder), *words], stdout=out, stderr=out, env=os.environ | {injection.VARIABLE: str(listed)}
        )


@sampled(6, together=True)
@pytest.mark.slow
def test_megalith_train_itself_goes_on_after_kill_9(command: list[str], never_killed: Path, tmp_path: Path) -> None:
    """The same through the command, in one run: controller, fork server and ranks."""
    listed, folder = tmp_path / "faults.json", tmp_path / "killed"
    injection.save(listed, [Injection(0, "kill", 8, "step", (1,))])
    code, said = _start(command, folder, listed).wait(PATIENCE), (tmp_path / "said").read_text()
    assert code == ExitCode.FINISHED, said
    assert "rank 1 on 0: killed by SIGKILL" in said
    assert "resumed at step" in said
    assert_same_bits(final_state(never_killed), final_state(folder))


@sampled(6, together=True)
@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_run_folder_without_any_room_ends_no_run(command: list[str], never_killed: Path, tmp_path: Path) -> None:
    """Checkpoints, events and logs find no room, and a rank is killed meanwhile. Another rank dies before it has written its part of the
    last checkpoint, which must be made nevertheless. A rank is stopped until the disk is full."""
    listed, folder = tmp_path / "faults.json", tmp_path / "disk" / "run"
    injection.save(listed, [Injection(0, "stop", 8, "step", (1,)), Injection(1, "kill", TYPED, "saving", (1,))])
    with small_disk(tmp_path / "disk", size=80 << 20):
        process = _start(command, folder, listed, "fleet.hang_floor=600")
        until(lambda: 0 in injection.fired(listed), seconds=PATIENCE)
        ballast, victim = tmp_path / "disk" / "ballast", process_of(1, folder)
        until(lambda: is_stopped(victim), seconds=PATIENCE)

        def beat() -> Beat:
            return Heartbeat.open(next(copies_place().glob(f"{_family(folder)}-*/{HEARTBEATS}")), 0).read()

        def unlogged() -> int:
            return beat().step - max(event.step for event in of_kind(read(folder), Step))

        def held_up() -> bool:
            return "cannot be used (" in (tmp_path / "said").read_text() or (beat().time > killed and beat().step >= 0)

        _keep_full(ballast, until=lambda: True)
        os.kill(victim, signal.SIGCONT)
        _keep_full(ballast, until=lambda: unlogged() > 10)  # a checkpoint is due every few steps
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        _keep_full(ballast, until=held_up)
        assert process.poll() is None, (tmp_path / "said").read_text()
        ballast.unlink()
        assert process.wait(PATIENCE) == ExitCode.FINISHED, (tmp_path / "said").read_text()
    assert [event.cause for event in of_kind(read(folder), Incident)].count("rank_failed") >= 2, "a start may fail, too"
    assert injection.fired(listed).keys() == {0, 1}
    assert_same_bits(final_state(never_killed), final_state(folder))
    assert position(folder) == position(never_killed)


@sampled(6, together=True)
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "moved",
        pytest.param("unmounted", marks=pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")),
    ],
)
def test_a_run_folder_and_data_that_go_away_for_a_while_end_no_run(
    how: str, data: Path, never_killed: Path, tmp_path: Path
) -> None:
    """Running ranks continue without their folder, and starting ranks wait for it and for the data. Nothing is written in their old
    places."""
    folder, own, said = tmp_path / "run", shutil.copytree(data, tmp_path / "data"), tmp_path / "said"
    store = _Moved(folder) if how == "moved" else _Unmounted(folder)
    command = typed(tmp_path / "run.toml", own, steps=TYPED)
    with store, said.open("w") as output:
        process = subprocess.Popen([*command, str(folder)], stdout=output, stderr=subprocess.STDOUT, text=True)

        def until(holds: Callable[[], bool]) -> None:
            while not holds():
                assert process.poll() is None, said.read_text()
                time.sleep(0.02)

        await_step(8, folder, process)
        beats = Heartbeat.open(next(copies_place().glob(f"{_family(folder)}-*/{HEARTBEATS}")), 0)
        store.go()
        begun = beats.read().step
        until(lambda: beats.read().step > begun + 12)  # two checkpoints were due meanwhile
        assert not folder.exists() or not any(folder.iterdir())
        store.come()
        await_step(begun + 14, folder, process)
        own.rename(tmp_path / "elsewhere")
        os.kill(process_of(1, folder), signal.SIGKILL)
        until(
            lambda: (
                f"{own / 'manifest.json'} cannot be used (No such file or directory): waiting until it can" in said.read_text()
            )
        )
        (tmp_path / "elsewhere").rename(own)
        until(lambda: "manifest.json can be used again" in said.read_text())
        begun = len(of_kind(read(folder), Recovery))
        until(lambda: len(of_kind(read(folder), Recovery)) > begun)
        victim = process_of(1, folder)
        store.go()
        os.kill(victim, signal.SIGKILL)
        until(lambda: f"{folder} cannot be used (" in said.read_text())
        assert not folder.exists() or not any(folder.iterdir())
        store.come()
        assert process.wait(timeout=PATIENCE) == ExitCode.FINISHED, said.read_text()
        assert f"{folder} can be used again" in said.read_text()
        assert_same_bits(final_state(never_killed), final_state(folder))
        assert {incident.cause for incident in of_kind(read(folder), Incident)} <= {"rank_failed", "store_away", "save_failed"}


@sampled(6, together=True)
@pytest.mark.slow
def test_copies_that_are_removed_from_memory_are_made_anew_while_the_ranks_stay(
    command: list[str], never_killed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    await_step(8, folder, process)
    for removed in (1, 2):
        (memory,) = copies_place().glob(f"{_family(folder)}-*")
        shutil.rmtree(memory)
        while len(list(memory.glob("node-0/own-*"))) < 6:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        assert len(of_kind(read(folder), RunStarted)) == 1, removed
    os.kill(process_of(1, folder), signal.SIGKILL)
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == ExitCode.FINISHED, said
    assert "were removed by another process, and are written again" in said
    (recovery,) = of_kind(read(folder), Recovery)
    assert "memory" in str(recovery.restored) and recovery.lost_steps <= 2
    assert_same_bits(final_state(never_killed), final_state(folder))


@sampled(6, together=True)
@pytest.mark.slow
def test_a_terminal_that_closes_saves_and_stops_a_run_that_has_not_been_told_to_stay(
    command: list[str], never_killed: Path, tmp_path: Path
) -> None:
    """Under nohup all processes of the run ignore SIGHUP."""
    folder = tmp_path / "run"
    process = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    await_step(8, folder, process)
    process.send_signal(signal.SIGHUP)
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == ExitCode.STOPPED, said
    stopped_at = position(folder)["step"]
    assert 8 <= stopped_at < TYPED
    process = subprocess.Popen(["nohup", *command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    await_step(stopped_at + 3, folder, process)
    everyone = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    assert len(everyone) >= 4, "the command, its fork server, two ranks"
    for one in everyone:
        os.kill(one, signal.SIGHUP)
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == ExitCode.FINISHED, said
    assert not of_kind(read(folder), Incident)
    assert_same_bits(final_state(never_killed), final_state(folder))


class _Moved:
    """A run folder that somebody moves away and back."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._elsewhere = folder, folder.with_name("moved")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def go(self) -> None:
        self._folder.rename(self._elsewhere)

    def come(self) -> None:
        self._elsewhere.rename(self._folder)


class _Unmounted:
    """A run folder that is a mount point and is unmounted for a while, so that only the bare folder remains."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._disk = folder, folder.with_name("disk")

    def __enter__(self) -> None:
        self._folder.mkdir()
        self._disk.mkdir()
        self._mount("mount", "-t", "tmpfs", "megalith-test", str(self._disk))
        self.come()

    def __exit__(self, *_: object) -> None:
        for folder in (self._folder, self._disk):
            # a test that failed while its folder was away must not leave the disk mounted
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)

    def go(self) -> None:
        self._mount("umount", "--lazy", str(self._folder))

    def come(self) -> None:
        self._mount("mount", "--bind", str(self._disk), str(self._folder))

    def _mount(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)


def _keep_full(ballast: Path, *, until: Callable[[], bool]) -> None:
    """Keep a disk full, even if others remove something meanwhile."""
    give_up = time.monotonic() + PATIENCE
    with ballast.open("ab", buffering=0) as file:
        while True:
            assert time.monotonic() < give_up, "what needs no room did not go on"
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            if until():
                return
            time.sleep(0.005)
