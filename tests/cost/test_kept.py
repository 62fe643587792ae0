"""A function's result is kept on disk until the code on which it depends changes."""

from pathlib import Path
from typing import Any

import pytest

from megalith.cost import kept
from megalith.cost.memory import _program


def _counting(calls: list[tuple[Any, ...]], *patterns: str):
    @kept.kept(*patterns, when=lambda name, *_: name != "mine")
    def _work(name: str, number: int) -> tuple[tuple[int, ...], float]:
        calls.append((name, number))
        return (number, number + 1), 0.5

    return _work


def test_a_second_process_reads_what_the_first_worked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.CACHE, str(tmp_path))
    calls: list[tuple[Any, ...]] = []
    results = [_counting(calls, "schedule/*.py")("theirs", 3) for _ in range(2)]  # each with an empty in-memory cache
    assert results == 2 * [((3, 4), 0.5)]
    assert calls == [("theirs", 3)]


def test_what_depends_on_more_than_its_values_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.CACHE, str(tmp_path))
    calls: list[tuple[Any, ...]] = []
    for _ in range(2):
        _counting(calls, "schedule/*.py")("mine", 3)
    assert calls == 2 * [("mine", 3)]
    assert not list(tmp_path.iterdir())


def test_other_code_works_it_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.CACHE, str(tmp_path))
    calls: list[tuple[Any, ...]] = []
    for patterns in (("schedule/*.py",), ("schedule/table.py",)):
        _counting(calls, *patterns)("theirs", 3)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", [lambda path: path.write_text("[1"), Path.unlink])
def test_a_file_that_is_cut_off_or_gone_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    monkeypatch.setenv(kept.CACHE, str(tmp_path))
    calls: list[tuple[Any, ...]] = []
    for _ in range(2):
        _counting(calls, "schedule/*.py")("theirs", 3)
        (path,) = tmp_path.rglob("*.json")
        damage(path)
    assert len(calls) == 2


def test_programs_read_from_disk_are_those_that_were_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept.CACHE, str(tmp_path))
    found = []
    for _ in range(2):
        _program.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
        found.append(_program("zb-v", 4, 8, 2))
    assert found[0] == found[1] == _program.__wrapped__("zb-v", 4, 8, 2)  # pyright: ignore[reportFunctionMemberAccess]
    hash(found[1])


def test_a_cache_that_can_be_neither_read_nor_written_ends_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(kept.CACHE, str(tmp_path / "file" / "below"))
    path = kept.file("kind", 1)
    kept.write(path, 3)
    assert kept.read(path) is None
    assert kept.read(tmp_path) is None  # a folder where a file is expected
