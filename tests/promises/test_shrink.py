"""Two nodes, then one, then two: without a spare a run continues under its fallback plan, and grows back. Each step reads its own
samples."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.commands.shared.runs import identity
from megalith.events import Event, Incident, Problem, RunStarted, Step, of_kind, read
from megalith.fleet import injection
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.injection import Injection
from megalith.fleet.rank_info import node_folder
from megalith.fleet.tiers import roots
from megalith.spec.files import load
from tests.patience import PATIENCE
from tests.runs import position, prepare_text, train
from tests.watch.pages import one_page

RUN = """
name = "elastic"
model = {{ layers = 2, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 4, zero = 3 }}
data.path = "{data}"
train = {{ steps = 100_000, global_batch = 8, seq_len = 32, precision = "fp32" }}
optimizer = {{ lr = 1e-3, schedule = "constant", warmup = 0 }}
checkpoint = {{ every = 5, asynchronous = false }}
launch = {{ threads = 1, start_timeout = 600.0, timeout = 600.0 }}
fleet = {{ nodes = 2, no_spare = "shrink", fallback = {{ data = 1, tensor = 2 }}, hang_floor = 600.0, straggler_steps = 1_000_000 }}
"""
"""Slow steps of a busy machine are no incidents here, and a checkpoint exists once its step is over."""

LOST_AT, AFTER = 12, 6


class _Run:
    """A run in a process of its own, and its log."""

    def __init__(self, folder: Path, run_file: Path) -> None:
        self.folder, self.faults = folder, folder.with_suffix(".json")
        injection.save(self.faults, [Injection(0, "node", LOST_AT, "step", (2, 3))])
        command = [sys.executable, "-m", "megalith.cli", "train", str(run_file), "--run-dir", str(folder)]
        environment = os.environ | {injection.VARIABLE: str(self.faults), "OMP_NUM_THREADS": "1"}
        self.log = folder.with_suffix(".log")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def until(self, true: Callable[[list[Event]], bool]) -> list[Event]:
        end = time.monotonic() + PATIENCE
        while not true(events := list(read(self.folder))):
            assert self.process.poll() is None and time.monotonic() < end, f"{_worlds(events)}: {self.log.read_text()[-5000:]}"
            time.sleep(0.05)
        return events


def _worlds(events: list[Event]) -> list[int]:
    return [event.world for event in of_kind(events, RunStarted)]


def _steps_since_start(events: list[Event]) -> int:
    last = max(i for i, event in enumerate(events) if isinstance(event, RunStarted))
    return sum(isinstance(event, Step) for event in events[last:])


def _counted(events: list[Event]) -> dict[int, Step]:
    """Return the steps that count: a start discards the steps after its checkpoint."""
    found: dict[int, Step] = {}
    for event in events:
        if isinstance(event, RunStarted):
            found = {step: one for step, one in found.items() if step <= event.resumed_step}
        elif isinstance(event, Step):
            assert event.step not in found, "a step was done twice"
            found[event.step] = event
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_two_nodes_one_node_two_nodes_and_no_sample_is_lost_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(data=prepare_text(tmp_path)))
    spec = load(tmp_path / "run.toml").spec
    run = _Run(tmp_path / "run", tmp_path / "run.toml")
    try:
        run.until(lambda events: _worlds(events) == [4, 2] and _steps_since_start(events) > AFTER)
        memory = roots.memory_root(run.folder, identity(spec))
        assert not node_folder(memory, "1").exists()
        node_folder(memory, "1").mkdir()  # the node is back
        run.until(lambda events: _worlds(events)[2:] == [4] and _steps_since_start(events) > AFTER)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(PATIENCE) == ExitCode.STOPPED
    finally:
        run.process.kill()
        run.process.wait()

    events = list(read(run.folder))
    steps = _counted(events)
    assert list(steps) == list(range(1, max(steps) + 1))
    assert position(run.folder) == {"step": max(steps), "samples": 8 * max(steps), "updates": max(steps)}
    (lost,) = of_kind(events, Incident)
    assert [command["kind"] for command in lost.commands][-1] == "shrink"
    resumed = [event.resumed_step for event in of_kind(events, RunStarted)]
    assert resumed[:2] == [0, 10], "the newest checkpoint is what another plan can read"
    (shrunk, grown) = [event.message for event in of_kind(events, Problem) if "plan" in event.message]
    assert "results are not bitwise equal to those of" in shrunk
    assert f"step {resumed[2]} in store" in grown

    (tmp_path / "whole.toml").write_text((tmp_path / "run.toml").read_text().replace("100_000", str(max(steps))))
    train(load(tmp_path / "whole.toml").spec, tmp_path / "whole")
    whole = {event.step: event for event in of_kind(read(tmp_path / "whole"), Step)}
    assert {step: one.tokens_seen for step, one in steps.items()} == {step: one.tokens_seen for step, one in whole.items()}
    for step, one in steps.items():
        assert one.loss == pytest.approx(whole[step].loss, rel=1e-4), (step, "other samples")
    losses, marks, alerts = one_page(run.folder, tmp_path / "again")
    assert losses == pytest.approx({step: one.loss for step, one in steps.items()}, rel=1e-5), "one curve on the page"
    assert marks.count("start") == 2 and "incident" in marks and not alerts
    shutil.rmtree(memory, ignore_errors=True)
