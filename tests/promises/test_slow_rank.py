"""A rank that works a fifth longer is named within 20 steps, under every pipeline schedule, while other programs use the processors.
Until then no rank is named."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith.control.times import Times
from megalith.fleet import injection
from megalith.fleet.heartbeat import VARIABLE, Heartbeats
from megalith.fleet.injection import Injection
from megalith.schedule import SCHEDULES
from megalith.spec.plan import Plan
from megalith.spec.run import RunSpec
from megalith.train import inject
from megalith.watch import causes, panels
from megalith.watch.source import Source
from megalith.watch.window import ENOUGH, WINDOW, slow_ranks, window
from tests.full import only_full
from tests.patience import PATIENCE
from tests.runs import finish, prepare_text, start
from tests.specs import tiny_run

SLOWER = 0.25
"""Share of the least that a step took before. It is about a fifth of a usual step."""

FAULT, SLOW = 32, 1
"""The step after which a rank becomes slow, and this rank."""

PLANS: list[dict[str, Any]] = [
    *({"pipeline": 2, "tensor": 2, "schedule": name, "chunks": SCHEDULES[name].chunks.usual} for name in sorted(SCHEDULES)),
    {"pipeline": 4},
    {"data": 2, "tensor": 2},
]
"""Four ranks each. Tensor peers wait for the slow rank; without tensor ranks, each pipeline rank is the only one with its part."""

BUSY = """
import random, time
while True:
    end = time.time() + random.random() / 5
    while time.time() < end:
        pass
    time.sleep(random.random() / 5)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def other_work() -> Iterator[None]:
    """Run a program that computes in bursts, about half of the time."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        try:
            yield
        finally:
            process.kill()


def _spec(data: Path, plan: dict[str, Any]) -> RunSpec:
    """A run whose ranks work some 50 milliseconds a step."""
    model = {"vocab": 264, "layers": 4, "dim": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 192, "context": 64}
    train = {"steps": FAULT + WINDOW, "global_batch": 8, "seq_len": 64}
    launch = {"threads": 1}
    return tiny_run(model=model, plan=plan, data={"path": str(data)}, train=train, launch=launch, checkpoint={"every": 0})


def _train(spec: RunSpec, folder: Path) -> None:
    """Train, and record the seconds of all ranks from their heartbeats, as the process does that supervises them."""
    faults = folder.with_suffix(".json")
    injection.save(faults, [Injection(0, "slow", FAULT, "gradients", (SLOW,), lasts=10_000)])
    folder.mkdir()
    beats, times, done = Heartbeats.create(folder / "beats", spec.ranks), Times(folder, spec.ranks), threading.Event()

    def note() -> None:
        while not done.is_set():
            times.note(beats.read())
            time.sleep(0.005)

    environment = {VARIABLE: str(beats.path), injection.VARIABLE: str(faults)}
    ranks = start(spec, folder, environment=environment)
    thread = threading.Thread(target=note)
    thread.start()
    codes = finish(ranks)
    done.set()
    thread.join()
    times.note(beats.read())
    times.close()
    assert not any(codes), "\n".join(path.read_text()[-3000:] for path in folder.glob("rank-*.log"))


def _named(source: Source, step: int) -> list[int]:
    """Return the ranks that are called slow once `step` steps are done."""
    seen = window(source, step)
    return [] if seen is None else [rank for rank, _ in slow_ranks(seen)]


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
@only_full
def test_a_rank_slowed_by_a_fifth_is_named_within_20_steps_and_nobody_else(
    plan: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Plan(**plan).ranks == 4
    monkeypatch.setattr(inject, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(inject, "SLOW_STEPS", SLOWER)
    folder = tmp_path / "run"
    _train(_spec(data, plan), folder)
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    named = {step: _named(source, step) for step in range(ENOUGH, FAULT + WINDOW + 1)}
    assert not any(named[step] for step in range(ENOUGH, FAULT + 1)), "no rank is slow yet"
    assert named[FAULT + WINDOW] == [SLOW], named
    assert all(ranks in ([], [SLOW]) for ranks in named.values()), named
    (answer,) = panels.panel(source, "what-if", {"rank": str(SLOW)})["without"]
    assert 0 < answer["gain"] < 0.25 and answer["words"].startswith(
        f"If rank {SLOW} were as fast as the others, a step would take "
    )
    if answer["gain"] > causes.GAIN:  # other programs may take most of a step's time here
        (cause,) = [one for one in panels.panel(source, "what-if")["causes"] if one["kind"] == "slow rank"]
        assert cause["who"] == [SLOW] and cause["gain"] == pytest.approx(answer["gain"])
    source.close()
