"""Each rank's seconds are computed from heartbeats alone."""

from pathlib import Path

import numpy as np
import pytest

from megalith.control.times import FOLDER, MAXIMUM, MINIMUM, ROWS, Times, block, decode, encode
from megalith.fleet.heartbeat import KINDS, Beat
from megalith.pyramid import Reader, View

RANKS = 4


def _beats(step: int, *, slow: float = 1.0, silent: frozenset[int] = frozenset()) -> list[Beat]:
    return [
        Beat()
        if rank in silent
        else Beat(step + 2, 1.0, step + 1, True, "step", 0.1, step, 1e9, (0.1 * (slow if rank == 2 else 1.0),) * len(KINDS))
        for rank in range(RANKS)
    ]


def _read(folder: Path, row: str = "own") -> View:
    return Reader(folder / FOLDER).read([block(row, RANKS)], most=100)


def test_codes_are_within_two_percent() -> None:
    shares = np.geomspace(MINIMUM, MAXIMUM, 5000)
    assert np.abs(decode(encode(shares)) / shares - 1).max() < 0.02
    assert decode(encode(np.array([np.nan, 0.0, 1e9])))[1:].tolist() == [MINIMUM, MAXIMUM]
    assert np.isnan(decode(encode(np.array([np.nan]))))


def test_a_record_a_step_says_who_took_longer(tmp_path: Path) -> None:
    times = Times(tmp_path, RANKS)
    for step in range(10):
        times.note(_beats(step, slow=1.2))
        times.note(_beats(step, slow=1.2))
    times.close()
    view = _read(tmp_path)
    assert view.first.tolist() == list(range(1, 11))  # steps are numbered as in the event log
    assert decode(view.low)[:, 2] == pytest.approx(1.2, rel=0.02)
    assert decode(view.low)[:, [0, 1, 3]] == pytest.approx(1.0, rel=0.02)
    assert view.bases[:, 0] == pytest.approx(0.1) and view.bases[:, 1] == pytest.approx(1e9)
    assert decode(_read(tmp_path, "memory").low) == pytest.approx(1.0, rel=0.02)


def test_a_rank_that_was_missed_is_missing_and_holds_nothing_up(tmp_path: Path) -> None:
    times = Times(tmp_path, RANKS)
    times.note(_beats(0, silent=frozenset({1})))
    assert not (tmp_path / FOLDER).exists()
    times.note(_beats(2))
    times.close()
    view = _read(tmp_path)
    assert view.first.tolist() == [1, 3]
    assert (view.low[0] == 0).tolist() == [False, True, False, False]


def test_records_are_in_the_order_of_steps_although_a_rank_was_missed(tmp_path: Path) -> None:
    times = Times(tmp_path, RANKS)
    for step in range(4):
        times.note(_beats(step))
    late = _beats(4)
    late[1] = _beats(3)[1]  # and its step 4 is never seen
    times.note(late)
    for step in range(5, 10):
        times.note(_beats(step))
    times.close()
    view = _read(tmp_path)
    assert view.first.tolist() == list(range(1, 11))
    assert (view.low[4] == 0).tolist() == [False, True, False, False]
    alone = Reader(tmp_path / FOLDER).read([block("own", RANKS)], first=6, last=6, most=100)
    assert alone.first.tolist() == [6]


def test_beats_of_an_earlier_version_make_no_record(tmp_path: Path) -> None:
    times = Times(tmp_path, RANKS)
    times.note([Beat(3, 1.0, 2, True, "step", 0.1)] * RANKS)
    times.close()
    assert not (tmp_path / FOLDER).exists()


def test_a_folder_that_cannot_be_written_costs_the_record_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks").write_text("in the way")
    times = Times(tmp_path, RANKS)
    times.note(_beats(0))
    times.note(_beats(1))
    times.close()
    assert "continuing without it" in capfd.readouterr().err


def test_a_run_folder_that_is_away_is_not_made_again(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    times = Times(run, RANKS)
    for step in range(4):
        times.note(_beats(step))
    assert not run.exists()
    elsewhere.mkdir()
    elsewhere.rename(run)
    for step in range(4, 8):
        times.note(_beats(step))
    times.close()
    assert _read(run).last[-1] == 8


def test_rows_lie_one_after_the_other() -> None:
    assert [block(row, 7).start for row in ROWS] == [7 * at for at in range(len(ROWS))]
