"""Spikes in reports, and their cost in the account of a run's time."""

from pathlib import Path

from megalith.control import ledger
from megalith.events import Event, Lowered, Rewound, Skipped, Spike, Step
from megalith.report import spikes
from megalith.report.history import gather
from megalith.report.page import render

DATA = {"cause": "data", "evidence": "samples 320 to 327"}


def step(number: int, time: float) -> Step:
    rest = {"mfu": None, "breakdown": {}, "memory": {}, "updates": number}
    return Step(number, 3.0, 1.0, 1e-3, 512, 512 * number, 1.0, 512.0, **rest, time=time)


EVENTS: list[Event] = [
    *(step(number, float(number)) for number in range(1, 6)),
    Skipped(6, "loss 9 above 4 (median 3)", 512, 1.0, 10, spike=True, time=6.0),
    Spike(6, 9.0, 1.0, {"loss": 4.0}, "rewound", [DATA, {"cause": "numerics", "evidence": "x"}], time=6.0),
    Rewound(6, 2, 3, 16, 47, "memory", 0.01, 0, 4, time=6.0),
    step(7, 7.0),
    Spike(7, 9.0, 1.0, {"loss": 4.0}, "lowered", [], time=7.0),
    Lowered(7, 0.5, 207, time=7.0),
]


def test_each_spike_is_a_row_with_what_was_done() -> None:
    first, second = spikes.rows(EVENTS)
    went = "the run went back from step 6 to the state after step 2 (copy in memory): samples 16 to 47 are skipped."
    assert first[:2] == ("6", "loss above 4") and first[2].startswith(went)
    assert first[3] == "data: samples 320 to 327; numerics: x"
    assert second[2].startswith("the learning rate is multiplied by 0.5") and second[3] == "unknown"
    assert spikes.counted(EVENTS) == "2 spikes, 1 step without update, 1 rewind, the learning rate lowered 1 time"
    assert spikes.counted(EVENTS[:5]) == "" and not spikes.rows(EVENTS[:5])


def test_a_report_shows_them() -> None:
    run = gather(EVENTS)
    page = render(run, folder=Path("nowhere"))
    assert "<h2>Spikes</h2>" in page and "samples 320 to 327" in page
    said = [one.message.partition(":")[0] for one in run.problems]
    assert said[:2] == ["spike at step 6", "the run went back from step 6 to the state after step 2 (copy in memory)"]
    assert "<h2>Spikes</h2>" not in render(gather(EVENTS[:5]), folder=Path("nowhere"))


def test_steps_that_a_rewind_undid_are_lost() -> None:
    account = ledger.goodput(EVENTS)
    seconds = {cause: taken for cause, taken, _, _ in account.rows()}
    assert seconds["lost steps"] == 4.0, "three steps after the copy, and the one in which it went back"
