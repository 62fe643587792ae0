"""A run reports its saves to the fleet."""

from pathlib import Path

import pytest

from megalith.checkpoint import reports
from megalith.checkpoint.checkpointer import SaveFailure
from megalith.checkpoint.reports import SaveReports
from megalith.events import EventLog
from megalith.fleet.observations import SaveFailed


def test_a_save_that_a_rank_s_end_interrupted_is_not_held_against_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[object] = []
    monkeypatch.setattr(reports, "report", told.append)
    saves = SaveReports(EventLog(tmp_path))
    saves.report([SaveFailure(10, "Connection closed by peer", 0.1, 0.0, peer_lost=True)])
    assert told == []
    saves.report([SaveFailure(20, "No space left on device", 0.1, 0.0)])
    assert [type(observation) for observation in told] == [SaveFailed]
