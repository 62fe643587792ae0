"""The pictures of docs/guide/watching.md: the live page, in a browser, over a run that is simulated. `make watch-pictures` takes them."""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalith import events
from megalith.control.times import Times
from megalith.events import Checkpoint, Event, Holding, Incident, Recovery, RunStarted, Sample, Step, Validation
from megalith.fleet.heartbeat import Beat
from megalith.mesh import Mesh
from megalith.spec import files
from megalith.watch.server import Server
from megalith.watch.source import Source
from tests.watch.browser import Browser

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "guide" / "pictures"
SETTINGS = (
    "plan.data=8",
    "plan.pipeline=4",
    "plan.tensor=2",
    "plan.zero=1",
    "cluster=h100:64",
    "train.steps=2000",
    "fleet.nodes=8",
    "fleet.spares=1",
)
STEPS, SLOW, SINCE = 900, 37, 760


def write(folder: Path, *, steps: int = STEPS, slow: float = 1.2) -> Path:
    """Write a run on 64 devices in which rank SLOW gets slower at step SINCE and one node failed at step 410. It is
    still "training"."""
    spec = files.load(ROOT / "recipes" / "llama3.1-8b-h100.toml", overrides=SETTINGS).spec
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(files.spec_text(spec))
    (folder / "run.toml").write_text("")
    random, mesh = np.random.default_rng(7), Mesh.of(spec.plan)
    tokens = spec.train.global_batch * spec.train.seq_len
    second, now = 3.95, time.time()
    begin = now - steps * second - 400

    def start(at: float, step: int) -> RunStarted:
        versions = {"torch": "2.15.0", "megalith": "0.1.0"}
        return RunStarted(
            spec.model_dump(mode="json"), "NVIDIA H100 80GB HBM3", 64, step, versions, 64 * 989.4e12, "catalogue: bf16, dense", 5.3e10,
            "PaLM's count: matrix products, attention in full, no recomputation", 8_030_000_000, time=at,
        )  # fmt: skip

    def step(number: int, at: float) -> Step:
        wait = (slow - 1) * 0.75 if number >= SINCE else 0.0
        seconds = second * (1 + wait + 0.01 * abs(random.standard_normal()))
        loss = 2.15 + 9.0 / (1 + number / 9) ** 0.75 + 0.02 * random.standard_normal()
        parts = {
            "forward": 1.02,
            "backward": 2.05,
            "communication": 0.25,
            "bubble": 0.44 + wait * second,
            "data": 0.01,
            "optimizer": 0.01,
        }
        return Step(
            number, loss, 0.4 + 3 / math.sqrt(number) + 0.08 * abs(random.standard_normal()), 3e-4 * min(1, number / 500), tokens,
            number * tokens, seconds, tokens / seconds, 5.3e10 * tokens / seconds / (64 * 989.4e12),
            parts | {"other": max(0.0, seconds - sum(parts.values()))}, {"resident": 9 << 30, "peak": 11 << 30}, updates=number, time=at,
        )  # fmt: skip

    def holdings(at: float) -> list[Event]:
        places = [mesh.coordinates(rank) for rank in range(64)]
        return [Holding(rank, place, [], 1_000_000_000, 2 << 30, 4 << 30, 3 << 29, time=at) for rank, place in enumerate(places)]

    found: list[Event] = [start(begin, 0), *holdings(begin)]
    times, at = Times(folder, 64), begin + 60
    for number in range(1, steps + 1):
        at += second
        if number == 411:
            reason = "rank 19 on node2: no heartbeat for 31 s (limit 30 s) in phase `step`; node2 goes, node8 takes its place"
            found += [Incident(1, at, 410, "hang", reason, "node2", 19, {}, [{"kind": "restart"}], time=at + 34)]
            found += [start(at + 70, 408), *holdings(at + 70), Recovery(1, 408, "step 408 in memory", 2, time=at + 75)]
            at += 80
            found += [step(back, at - 3 + back % 2) for back in (409, 410)]
            times.close()
            times = Times(folder, 64)
        found.append(step(number, at))
        if number % 100 == 0:
            loss = 2.17 + 9.0 / (1 + number / 9) ** 0.75
            found.append(Validation(number, loss, {"web": loss + 0.1, "code": loss - 0.5, "papers": loss + 0.02}, 9.0, time=at))
        if number % 250 == 0:
            found.append(Checkpoint(number, f"checkpoints/step-{number:08}", 1 << 30, 4.0, 0.9, time=at))
        own = np.array([3.05 * (1.04 if mesh.coordinates(rank)["pipeline"] == 3 else 1.0) for rank in range(64)])
        own *= 1 + 0.012 * random.standard_normal(64)
        own[SLOW] *= slow if number >= SINCE else 1.0
        times.note(
            [
                Beat(
                    number + 1,
                    at,
                    number,
                    True,
                    "step",
                    own[r],
                    number - 1,
                    (11.1 + 0.1 * (r % 3)) * 2.0**30,
                    (own[r], own[r] / 3, 2 * own[r] / 3, 0.25, max(own) - own[r] + 0.44, 0.01, 0.01, 0.2),
                )
                for r in range(64)
            ]
        )
    times.close()
    found.append(
        Sample(800, "The ship sailed", " before dawn, and by noon the harbour was a line of grey on the horizon.", time=at)
    )
    log = events.EventLog(folder)
    for event in found:
        object.__setattr__(event, "time", event.time + now - at - 2)
        if isinstance(event, Incident):
            object.__setattr__(event, "began", event.began + now - at - 2)
        log.write(event)
    log.close()
    return folder


def serve(folders: Sequence[Path]) -> Server:
    """Return the pages of runs, once the planner's prediction is there."""
    sources = [Source(folder) for folder in folders]
    for source in sources:
        while source.poll():
            pass
        source.await_prediction()
    server = Server(sources)
    server.start()
    return server


def main() -> None:
    """Take the pictures."""
    with tempfile.TemporaryDirectory() as scratch:
        server = serve([write(Path(scratch) / "llama-8b")])
        browser = Browser(Path(scratch) / "profile")
        browser.open(server.address, width=1400, wait=4)
        top = browser.run("[...document.querySelectorAll('.card')].at(-1).getBoundingClientRect().top + scrollY")
        browser.picture(OUT / "watch.png", height=int(top) - 6)  # without the run's path on this machine
        browser.open(server.address, width=400, dark=True, wait=4)
        browser.picture(OUT / "watch-phone.png", height=1500)
        browser.close()
        server.close()


if __name__ == "__main__":
    main()
