"""A table of values by step: any part of it is read in few records, whatever happens to the files."""

import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megalith import pyramid
from megalith.pyramid import FAN, Reader, Writer
from megalith.pyramid.format import segments

ALL = [slice(0, 3)]


def _write(folder: Path, steps: range, *, keep: int = pyramid.KEEP, close: bool = True) -> Writer:
    writer = Writer(folder, kind="numbers", width=3, keep=keep)
    for step in steps:
        values = np.array([step, -step, 1.0 if step % 2 else np.nan], dtype=np.float32)
        writer.append(step, values, time=float(step), bases=(step, 2 * step))
    if close:
        writer.close()
    return writer


@pytest.mark.parametrize("steps", [1, 3, FAN, FAN + 1, 100, 1000])
@pytest.mark.parametrize("close", [True, False])
def test_every_step_is_in_exactly_one_record_at_any_width(steps: int, close: bool, tmp_path: Path) -> None:
    writer = _write(tmp_path, range(1, steps + 1), close=close)
    for most in (1, 7, 50, 2000):
        view = Reader(tmp_path).read(ALL, most=most)
        assert view.steps.sum() == steps
        assert view.first[0] == 1 and view.last[-1] == steps
        assert (view.first[1:] == view.last[:-1] + 1).all()
        assert len(view) <= max(most, 1) + FAN * pyramid.LEVELS
    writer.close()
    assert Reader(tmp_path).span() == (1, steps)


def test_a_record_has_the_least_the_most_and_the_mean_of_what_it_covers(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 257))
    view = Reader(tmp_path).read(ALL, most=16)
    assert len(view) == 16
    for row in range(16):
        covered = np.arange(view.first[row], view.last[row] + 1)
        assert view.low[row].tolist() == [covered.min(), -covered.max(), 1.0]
        assert view.high[row].tolist() == [covered.max(), -covered.min(), 1.0]
        assert view.mean[row].tolist() == [covered.mean(), -covered.mean(), 1.0]
        assert view.bases[row].tolist() == [covered.mean(), 2 * covered.mean()]


def test_a_missing_code_counts_neither_as_least_nor_as_most(tmp_path: Path) -> None:
    writer = Writer(tmp_path, kind="codes", width=3)
    for step, row in enumerate(([0, 7, 0], [5, 0, 0], [9, 200, 0], [6, 8, 0])):
        writer.append(step, np.array(row, dtype=np.uint8))
    writer.close()
    view = Reader(tmp_path).read(ALL, most=1)
    assert (view.low.tolist(), view.high.tolist()) == ([[5, 7, 0]], [[9, 200, 0]])


def test_a_part_of_the_steps_and_of_the_values(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 1001))
    view = Reader(tmp_path).read([slice(1, 2)], first=500, last=509, most=100)
    assert view.mean[:, 0].tolist() == [-float(step) for step in range(500, 510)]


def test_steps_that_are_done_again_come_again_in_the_order_of_their_doing(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 26), close=False)
    _write(tmp_path, range(21, 41))
    view = Reader(tmp_path).read(ALL, most=100)
    assert view.first.tolist() == [*range(1, 26), *range(21, 41)]
    assert view.piece.tolist() == [0] * 25 + [1] * 20


def test_a_short_piece_has_few_files_which_are_listed_once(tmp_path: Path) -> None:
    """Each restart of a run begins a piece. Once, its 13 files were listed 26 times, and after 300 restarts this took a second."""
    for piece in range(40):
        with mock.patch("megalith.pyramid.writer.segments", side_effect=segments) as listed:
            _write(tmp_path, range(piece + 1, piece + 6))
        assert listed.call_count == 1
    assert len(list(tmp_path.iterdir())) == 40 * 4  # five steps: records of 1, of 4, of 4 + 1, and one at the coarsest level
    view = Reader(tmp_path).read(ALL, most=1000)
    assert view.steps.sum() == 40 * 5 and (view.steps == 1).all()
    view = Reader(tmp_path).read(ALL, most=40)
    assert len(view) == 80 and view.steps.tolist() == [4, 1] * 40


@pytest.mark.slow
def test_old_steps_are_kept_coarsely_within_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.pyramid.writer.MINIMUM", 64)
    _write(tmp_path, range(1, 5001), keep=0)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    most = (64 + 64 // pyramid.SEGMENTS) * pyramid.record_bytes("numbers", 3, 1)
    assert sum(sizes) < pyramid.LEVELS * (most + 100)
    view = Reader(tmp_path).read(ALL, most=50)
    assert view.first[0] == 1 and view.last[-1] == 5000 and view.steps.sum() == 5000
    newest = Reader(tmp_path).read(ALL, first=4990, most=50)
    assert newest.first.tolist() == list(range(4990, 5001))


@pytest.mark.parametrize("cut", [1, 20, 50])
def test_a_torn_end_costs_its_record_alone_and_the_next_writer_begins_another_file(cut: int, tmp_path: Path) -> None:
    _write(tmp_path, range(1, 11))
    path = next(path for path in tmp_path.iterdir() if path.name.startswith("000000-00"))
    os.truncate(path, path.stat().st_size - cut)
    assert Reader(tmp_path).read(ALL, most=100).steps.sum() == 9
    _write(tmp_path, range(10, 13))
    assert Reader(tmp_path).read(ALL, most=100).first.tolist() == list(range(1, 13))


def test_foreign_and_empty_files_are_left_out(tmp_path: Path) -> None:
    assert Reader(tmp_path / "nowhere").span() is None
    assert len(Reader(tmp_path / "nowhere").read(ALL)) == 0
    (tmp_path / "000000-00-000000000000001.bin").write_bytes(b"x" * 500)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "000001-00-000000000000001.bin").touch()
    assert Reader(tmp_path).span() is None
    _write(tmp_path, range(1, 4))
    assert Reader(tmp_path).read(ALL).first.tolist() == [1, 2, 3]


def test_garbage_within_a_file_is_no_step(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 5), close=False)
    path = next(path for path in tmp_path.iterdir() if path.name.startswith("000000-00"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - pyramid.record_bytes("numbers", 3, 0))
        file.write(b"\xff" * 30)
    assert Reader(tmp_path).read(ALL, most=100).first.tolist() == [1, 2, 3]


def test_another_width_is_another_table(tmp_path: Path) -> None:
    _write(tmp_path, range(1, 5))
    writer = Writer(tmp_path, kind="numbers", width=2)
    writer.append(5, np.zeros(2, dtype=np.float32))
    writer.close()
    assert Reader(tmp_path).read([slice(0, 2)]).first.tolist() == [5]
    assert Reader(tmp_path).read(ALL, width=3).first.tolist() == [1, 2, 3, 4]


def test_a_folder_that_is_made_anew_is_read_anew(tmp_path: Path) -> None:
    """The new files may have the inodes of the old ones."""
    _write(tmp_path / "a", range(1, 100))
    reader = Reader(tmp_path / "a")
    assert reader.span() == (1, 99)
    shutil.rmtree(tmp_path / "a")
    _write(tmp_path / "a", range(100, 199))
    assert reader.span() == Reader(tmp_path / "a").span() == (100, 198)
    assert reader.newest() == Reader(tmp_path / "a").newest()
