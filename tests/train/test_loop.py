"""A run reports its saves to the fleet."""

import pytest

from megalith.checkpoint.checkpointer import Failed
from megalith.fleet.signs import SaveFailed
from megalith.train import loop
from megalith.train.loop import Loop


def test_a_save_that_a_rank_s_end_interrupted_is_not_held_against_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(loop, "report", told.append)
    run = Loop.__new__(Loop)
    run._save_failed = False
    run._report_change(Failed(10, "Connection closed by peer", 0.1, 0.0, parted=True))
    assert told == []
    run._report_change(Failed(20, "No space left on device", 0.1, 0.0))
    assert [type(sign) for sign in told] == [SaveFailed]
