"""The traced steps of a run are those with the requested numbers in its log."""

import json
from pathlib import Path

import pytest
import torch

from megalith.train.measure.profiler import Profile, idle_profile


def traced(folder: Path, asked: str, *, done: int = 0, steps: int = 6) -> dict[str, int]:
    """Train from a given step, where step N computes N sines. Return their number in each span of the trace, or nothing
    without a trace."""
    with Profile(folder, asked, 3, steps=steps) as tick:
        tick(done)
        for step in range(done + 1, steps + 1):
            for _ in range(step):
                torch.ones(()).sin()
            tick(step)
    path = folder / "profile/rank-3.json"
    if not path.exists():
        return {}
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    steps_of = [event for event in spans if event["name"].startswith("step ")]
    sines = [event["ts"] for event in spans if event["name"] == "aten::sin"]
    found = {one["name"]: sum(one["ts"] <= at <= one["ts"] + one["dur"] for at in sines) for one in steps_of}
    assert sum(found.values()) == len(sines), "nothing of another step"
    return found


@pytest.mark.parametrize(
    ("asked", "done", "found"),
    [
        ("3:5", 0, {"step 3": 3, "step 4": 4}),
        ("1:2", 0, {"step 1": 1}),
        ("3:6", 3, {"step 4": 4, "step 5": 5}),  # the run resumes from a checkpoint
        ("6:100", 0, {"step 6": 6}),
        ("3:5", 4, {}),
        ("7:9", 0, {}),
        ("1:9", 6, {}),
    ],
)
def test_a_trace_is_of_the_steps_that_were_asked_for_and_its_lack_is_told(
    tmp_path: Path, asked: str, done: int, found: dict[str, int]
) -> None:
    assert traced(tmp_path, asked, done=done) == found
    told = idle_profile(asked, done=done, steps=6)
    assert (told is None) == bool(found)
    assert told is None or f"--profile {asked} traces nothing" in told


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path):
    (tmp_path / "profile").write_text("a file, where a folder is needed")
    said: list[str] = []
    with Profile(tmp_path, "1:2", 0, steps=3, warn=said.append) as tick:
        for step in range(4):
            tick(step)
    assert len(said) == 1 and "could not be written" in said[0]
