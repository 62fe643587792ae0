"""Causes and their order, derived from findings."""

import math
from dataclasses import replace

from megalith.train.decide import Rewind, Skip, Stop, Update, Vitals
from megalith.train.stability.findings import (
    Findings,
    OutputGrowth,
    RecomputedWindow,
    SampleLoss,
    first_moved,
    spike_event,
)
from megalith.train.stability.history import Departure, LearningRateJump

FOUND = Findings(
    departures=(Departure("loss", 9.0, 3.0, 4.0),), to_log=True, repeated=True, first="loss 9", read=(range(320, 328),)
)


def causes(found: Findings) -> list[str]:
    return [cause for cause, _ in found.causes]


def test_nothing_is_named_where_nothing_points_to_it() -> None:
    assert causes(FOUND) == []
    assert FOUND.words == "No evidence points to a cause."


def test_causes_come_in_the_order_of_what_they_prove() -> None:
    jump = LearningRateJump(39, 1e-3, 2e-2)
    damaged = replace(FOUND, sound=False, batch_before="the samples of step 40 had loss 3 in that step, and have 8 now")
    assert causes(damaged) == ["numerics"]
    assert causes(replace(damaged, replayed=RecomputedWindow(5))) == ["numerics"]
    assert causes(replace(damaged, jump=jump)) == ["schedule", "numerics"]
    assert causes(replace(damaged, jump=jump, replayed=RecomputedWindow(3, 40, 3.0, 2.0))) == ["hardware", "schedule", "numerics"]
    assert causes(replace(FOUND, sound=True)) == ["data"]
    assert causes(replace(FOUND, sound=True, jump=jump)) == ["schedule", "data"]
    assert causes(replace(FOUND, repeated=False)) == ["hardware"]
    assert causes(replace(FOUND, repeated=False, reported=True)) == [], "the fleet's own report says that"


def test_samples_and_parts_are_named() -> None:
    found = replace(FOUND, sound=True, batch_before="all well", samples=(SampleLoss(323, 7.5, "letters in 0.bin"),), typical=5.5)
    (cause, evidence), *_ = found.causes
    assert cause == "data"
    assert evidence == (
        "all well, so the weights are sound; samples 320 to 327 have median loss 5.5; the samples with the largest losses: "
        "323 (7.5, letters in 0.bin)"
    )
    returned = replace(found, read=(range(30, 36), range(42, 48)), samples=())
    assert returned.causes[0][1] == "all well, so the weights are sound; samples 30 to 35, 42 to 47", "a site's returned samples"
    damaged = replace(FOUND, sound=False, batch_before="worse", compared=True)
    assert "shows first in the head" in damaged.causes[0][1]
    moved = replace(damaged, moved=OutputGrowth("blocks.1", 3.0, 300.0))
    words = "blocks.1 is the first part whose output is much larger with the damaged weights (300) than with the good ones (3)"
    assert words in moved.causes[0][1]


def test_the_first_part_that_moved_is_the_first_in_the_models_order() -> None:
    order = ("embedding", "blocks.0", "blocks.1", "head")
    was = {"blocks.1": 4.0, "embedding": 1.0, "blocks.0": 2.0}
    assert first_moved(was, was, order) is None
    assert first_moved(was, was | {"blocks.1": 40.0, "blocks.0": 3.5}, order) == OutputGrowth("blocks.0", 2.0, 3.5)
    found = first_moved(was, was | {"blocks.1": math.nan}, order)
    assert found is not None and found.part == "blocks.1"
    assert first_moved({}, was, order) is None


def test_the_log_is_told_numbers_answer_and_causes() -> None:
    vitals = Vitals(9.0, 1.0, step=40)
    told = [spike_event(vitals, each, FOUND) for each in (Update(), Skip("x", spike=True), Stop("x", spike=True))]
    told.append(spike_event(vitals, Rewind("x", 30, Stop("x")), replace(FOUND, sound=True, batch_before="all well")))
    assert [one.answer for one in told] == ["none", "skipped", "stopped", "rewound"]
    assert told[0].words == "spike at step 41: loss 9 above 4"
    assert told[3].words.startswith("spike at step 41: loss 9 above 4; likely cause: data (all well, so the weights are sound;")
    assert spike_event(replace(vitals, loss=math.nan), Stop("x"), Findings()).loss is None
    accident = replace(FOUND, departures=(), repeated=False)
    assert spike_event(vitals, Update(), accident).answer == "repeated"
