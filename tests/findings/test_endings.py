"""Part C: faults that ended runs, or misled users who plan runs."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.findings.product import TREE, Running, events, megalith, running
from tests.full import sampled

LARGE = ["simulate", "--cluster", "h100:16384", "--days", "54", "--seeds", "2"]


def test_c10_waiting_for_nodes_calls_nobody_and_does_not_feed_itself(tmp_path: Path) -> None:
    """Without a spare a run waits. Idle nodes fail less often than busy ones, and a reboot takes little time."""
    said = megalith(*LARGE, "--spares", "0", "--profile", "memory", "--json", at=tmp_path).json
    assert said["stops"] < 3
    assert said["goodput"] > 0.05
    assert said["stops"] <= said["faults"]


def test_c10_the_counts_add_up(tmp_path: Path) -> None:
    printed = megalith(*LARGE, "--spares", "2", at=tmp_path).stdout
    for what in ("faults", "restarts"):
        found = re.search(rf"([\d.,]+) {what} = (.*)$", printed, re.MULTILINE)
        assert found, f"no sum of {what}"
        total, *parts = (float(number.replace(",", "")) for number in (found[1], *re.findall(r"(?:^| \+ )([\d.,]+) ", found[2])))
        assert total == pytest.approx(sum(parts), abs=0.5)


def test_c10_young_and_daly_stand_beside_the_best_interval(tmp_path: Path) -> None:
    said = megalith(*LARGE, "--profile", "cold", "--set", "fleet.memory_every=0", "--sweep", "intervals", at=tmp_path)
    assert said.status == 0
    assert "Daly" in said.stdout
    assert "Young" in said.stdout


@pytest.mark.parametrize("setting", ["interruptions=1e9", "reliability.rack_outages=1e12"])
def test_c10_more_than_can_be_played_is_a_problem(tmp_path: Path, setting: str) -> None:
    said = megalith("simulate", "--cluster", "h100:1024", "--set", setting, at=tmp_path)
    assert "Traceback" not in said.stderr
    assert said.status == 2
    assert "Use at most" in said.words


def test_c10_the_documented_table_is_what_its_command_prints(tmp_path: Path) -> None:
    page = (TREE / "docs/reliability.md").read_text(encoding="utf-8")
    table = page.partition("## What to expect of a cluster")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|(.*)\| *([\d.]+) % *\|$", table, re.MULTILINE)
    assert rows
    commands = [(re.search(r"`megalith (simulate [^`]+)`", row), goodput) for row, goodput in rows]
    assert all(command for command, _ in commands), "a row does not say its command"
    command, goodput = commands[0]
    assert command
    assert f"goodput {goodput}%" in megalith(*shlex.split(command[1]), at=tmp_path).words


def test_c10_a_picture_distinguishes_its_parts_and_says_what_it_shows(tmp_path: Path) -> None:
    """The run waits for nodes and for a person, and has planned stops."""
    asked = ["--spares", "0", "--set", "fleet.no_spare=stop", "--set", "planned=1", "--out", "goodput.svg"]
    assert megalith(*LARGE, *asked, at=tmp_path).status == 0
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(tmp_path / "goodput.svg").getroot()
    style = root.findtext(f"{space}style") or ""
    colours = dict(re.findall(r"--(c\d+):(#\w{6})", style.partition("@media")[0]))
    assert len(set(colours.values())) == len(colours) > 8, "there are more kinds of time than colours"
    words = {text.text or "" for text in root.iter(f"{space}text")}
    assert any("54 days" in one for one in words), "no title"
    assert any(one.startswith("goodput so far") and "(" not in one for one in words), "no name of the axis"
    assert any("seed" in one and "(" not in one for one in words), "no name of the curves"


# One run that continues through the faults of several tests. If a test has ended it, the next test starts another


class Endless:
    """Write a run of more steps than any test needs."""

    def __init__(self, at: Path, stack: contextlib.ExitStack) -> None:
        self._at, self._stack, self._started = at, stack, 0
        self.sound = False

    def begin(self) -> None:
        """Start a run, or keep the last one if its test set `sound`."""
        sound, self.sound = self.sound, False
        if sound and not self.command.ended:
            return
        self._started += 1
        self.folder = self._at / f"endless-{self._started}"
        words = ["train", "run.toml", "--run-dir", self.folder.name, "--set", "train.steps=100000"]
        self.command: Running = self._stack.enter_context(running(*words, at=self._at))
        self.command.until(lambda: events(self.folder, "checkpoint"))

    def await_steps(self, more: int) -> None:
        """Wait for this many steps, or for the run's end."""
        done = self.step
        self.command.until(lambda: self.step > done + more, or_ended=True)

    @property
    def step(self) -> int:
        """Return the newest step in the log."""
        return max((event["step"] for event in events(self.folder, "step")), default=0)


@pytest.fixture(scope="module")
def _endless(at: Path) -> Iterator[Endless]:
    with contextlib.ExitStack() as stack:
        yield Endless(at, stack)


@pytest.fixture
def run(_endless: Endless) -> Endless:
    _endless.begin()
    return _endless


def test_c1_a_line_of_the_log_that_is_no_event_ends_no_run(run: Endless) -> None:
    """A display shows the log, and must never end the training."""
    with (run.folder / "events.jsonl").open("a") as log:
        log.write("123\n")
    run.await_steps(5)
    assert not run.command.ended, run.command.output[-500:]
    run.sound = True


def test_c1_a_log_that_cannot_be_read_for_a_while_ends_no_run(run: Endless, tmp_path: Path) -> None:
    log = run.folder / "events.jsonl"
    log.rename(tmp_path / "log")
    (log / "a folder that is not empty").mkdir(parents=True)
    run.command.until(lambda: "events.jsonl cannot be read" in run.command.output, or_ended=True)
    time.sleep(3)  # the fault itself: a display gave up after as long
    log.rename(tmp_path / "folder")
    (tmp_path / "log").rename(log)
    run.await_steps(5)
    assert not run.command.ended, run.command.output[-500:]
    run.sound = True


def test_c2_a_run_folder_that_is_away_for_a_while_ends_no_run(run: Endless, tmp_path: Path) -> None:
    """Nothing is written at the folder's old place, which may be a bare mount point."""
    run.folder.rename(tmp_path / "elsewhere")
    ranks = [rank.pid for rank in run.command.ranks()]
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    run.command.until(lambda: not any(map(psutil.pid_exists, ranks)), or_ended=True)
    run.command.until(
        lambda: f"{run.folder.name} cannot be used" in run.command.output, or_ended=True
    )  # it has tried to start them
    made = sorted(run.folder.rglob("*")) if run.folder.exists() else []
    assert not made
    (tmp_path / "elsewhere").rename(run.folder)
    run.await_steps(3)
    assert not run.command.ended, run.command.output[-500:]
    run.sound = True


NOT_ROOT = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Executes a command without root's right to every file."""


def test_c2_a_run_folder_without_permission_for_a_while_ends_no_run(at: Path) -> None:
    under = () if os.geteuid() else NOT_ROOT
    if under and not shutil.which(under[0]):
        pytest.skip("root may read everything, and setpriv, which could forbid it, is not installed")
    folder, words = at / "forbidden", ["train", "run.toml", "--run-dir", "forbidden", "--set", "train.steps=100000"]
    with running(*words, at=at, under=under) as command:
        command.until(lambda: events(folder, "checkpoint"))
        mode, ranks = folder.stat().st_mode, [rank.pid for rank in command.ranks()]
        folder.chmod(0)
        try:
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            command.until(lambda: "Permission denied" in command.output, or_ended=True)
        finally:
            folder.chmod(mode)
        done = max(event["step"] for event in events(folder, "step"))
        command.until(lambda: max(event["step"] for event in events(folder, "step")) > done + 3, or_ended=True)
        assert not command.ended, command.output[-500:]


def test_c3_emptied_shared_memory_restarts_nobody(run: Endless) -> None:
    """A logout (RemoveIPC) or a cleaner of temporary files does this."""
    kept = {Path(one.path).parents[1] for rank in run.command.ranks() for one in rank.memory_maps() if "/own-" in one.path}
    assert kept, "the state is copied to shared memory"
    for folder in kept:
        shutil.rmtree(folder)
    done = run.step
    run.command.until(lambda: run.step > done + 5 or events(run.folder, "incident")[-1:], or_ended=True)
    assert not [one for one in events(run.folder, "incident") if one["cause"] == "nodes_lost"]
    run.sound = True


def test_c4_a_log_that_is_deleted_begins_anew(run: Endless) -> None:
    saved = run.folder / "checkpoints"
    (run.folder / "events.jsonl").unlink()
    before = {path.name for path in saved.iterdir()}
    run.command.until(lambda: len({path.name for path in saved.glob("step-*")} - before) >= 2, or_ended=True)
    assert events(run.folder, "step"), "all that followed went into a file that nobody can open"
    run.sound = True


@sampled(3, together=True)
def test_c6_a_terminal_that_closes_has_the_run_saved(run: Endless) -> None:
    run.command.process.send_signal(signal.SIGHUP)
    assert run.command.end() == 75


@sampled(3, together=True)
def test_c1_an_output_that_is_full_ends_no_run(at: Path) -> None:
    words = ["train", "run.toml", "--run-dir", "full", "--set", "train.steps=20"]
    with Path("/dev/full").open("wb") as full, running(*words, at=at, stdout=full.fileno()) as command:
        assert command.end() == 0


@sampled(3, together=True)
def test_c9b_nor_does_a_reader_that_has_gone_where_a_rank_is_killed(at: Path) -> None:
    words = ["train", "run.toml", "--run-dir", "piped", "--set", "train.steps=40"]
    with running(*words, at=at, stdout=subprocess.PIPE) as command:
        command.until(lambda: events(at / "piped", "step"))
        assert command.process.stdout is not None
        command.process.stdout.close()
        for rank in command.ranks():
            rank.kill()
        assert command.end() == 0


@sampled(3, together=True)
def test_c7_a_run_that_recovered_ends_without_an_error_in_sight(at: Path) -> None:
    words = ["train", "run.toml", "--run-dir", "recovered", "--set", "plan.data=2", "--set", "train.steps=40"]
    with running(*words, at=at) as command:
        command.until(lambda: len(command.ranks()) == 2 and events(at / "recovered", "step"))
        command.ranks()[1].kill()
        assert command.end() == 0
        assert not re.search(r"Error|Exception|Traceback|gloo", command.output)


@pytest.fixture(scope="module")
def diverged(at: Path) -> Iterator[Running]:
    """A run that has ended because its numbers were no longer finite."""
    with running("train", "run.toml", "--run-dir", "diverged", "--set", "optimizer.lr=1e30", at=at) as command:
        command.end()
        yield command


@sampled(3, together=True)
def test_c8_numbers_that_are_not_finite_are_diagnosed_once(diverged: Running) -> None:
    said = diverged.output.partition("run folder:")[0]
    assert diverged.process.returncode == 1
    assert "Traceback" not in said
    assert said.count("not finite") <= 3
    assert len(said.strip().splitlines()) <= 14, "progress, and ten lines"


def test_c5_a_run_that_ends_wrongly_says_what_it_leaves_in_memory(diverged: Running) -> None:
    assert "/dev/shm/megalith-" in diverged.output


def test_c5_and_how_to_clear_it(diverged: Running, at: Path) -> None:
    assert "megalith clean" in diverged.output, "no command clears it"
    left = {Path(path) for path in re.findall(r"/dev/shm/megalith-[\w.-]+", diverged.output)}
    assert any(path.exists() for path in left)
    assert megalith("clean", "diverged", "--yes", at=at).status == 0
    assert not any(path.exists() for path in left)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_c8_a_device_that_is_not_there_starts_nothing(at: Path) -> None:
    said = megalith("train", "run.toml", "--run-dir", "cuda", "--set", "train.device=cuda", at=at)
    assert said.status == 2
    assert not (at / "cuda" / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["plan.data=64", "train.global_batch=64"], "processors"),
        (["model.layers=80", "model.dim=8192", "model.ffn=28672"], "this machine has"),
    ],
)
def test_c8_what_this_machine_is_short_of_is_told_by_check(settings: list[str], told: str, at: Path) -> None:
    said = megalith("check", "run.toml", *(word for one in settings for word in ("--set", one)), at=at)
    assert told in said.words
    assert "this machine" in said.words


@sampled(3, together=True)
def test_c9_ctrl_c_is_answered_with_what_a_second_one_does(at: Path) -> None:
    """A second Ctrl-C, typed because the first had no reply, lost the steps since the last checkpoint."""
    with running("train", "run.toml", "--run-dir", "stopped", at=at) as command:
        command.until(lambda: events(at / "stopped", "step"))
        command.process.send_signal(signal.SIGINT)
        command.until(lambda: command.ended, or_ended=True)
        assert "Ctrl-C again" in command.output
        assert command.process.returncode == 75
