"""`make test` takes a sample of long tests, and `make test-full` finds all of them."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.full import sampled

HERE = Path(__file__).parent
VARIABLE = "MEGALITH" + "_FULL"


@dataclass(frozen=True, eq=False)
class Case:
    nodeid: str
    mark: pytest.MarkDecorator | None

    def get_closest_marker(self, name: str) -> Any:
        return self.mark.mark if self.mark and name == "sampled" else None


MARKS = {
    "one": sampled(3),
    "other": sampled(3),
    "plain": None,
    "kin": sampled(4, together=True),
    "akin": sampled(2, together=True),
}


def _kept(seed: int) -> dict[str, list[str]]:
    """Return which of ten cases each test of one file keeps."""
    cases: list[Any] = [Case(f"file.py::{test}[{number}]", mark) for test, mark in MARKS.items() for number in range(10)]
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    all_of_them = [*cases]
    config: Any = SimpleNamespace(option=SimpleNamespace(seed=seed), hook=hook)
    conftest.pytest_collection_modifyitems(config, cases)
    assert {*cases} | {*left_out} == {*all_of_them} and not {*cases} & {*left_out}
    return {test: [case.nodeid.partition("[")[2] for case in cases if f"::{test}[" in case.nodeid] for test in MARKS}


def test_a_sample_follows_from_its_seed_and_is_the_same_for_tests_that_share_fixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "FULL", False)
    kept = _kept(5)
    assert kept == _kept(5)
    assert len({str(_kept(seed)) for seed in range(20)}) > 1
    assert kept["one"] == kept["other"] and len(kept["one"]) == 3 and len(kept["plain"]) == 10


def test_tests_that_are_sampled_together_share_a_number_of_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "FULL", False)
    draws = [_kept(seed) for seed in range(50)]
    assert {len(kept["kin"]) + len(kept["akin"]) for kept in draws} == {4}
    assert all(
        {case for kept in draws for case in kept[test]} == {f"{number}]" for number in range(10)} for test in ("kin", "akin")
    )


def test_everything_runs_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "FULL", True)
    assert all(len(cases) == 10 for cases in _kept(5).values())


def test_one_file_reads_the_variable_so_that_make_finds_all_long_tests_by_its_import() -> None:
    """`make test-full` runs the files that import it."""
    assert [path.name for path in HERE.rglob("*.py") if VARIABLE in path.read_text(encoding="utf-8")] == ["full.py"]
    assert "grep -rl --include='test_*.py' 'from tests.full import' tests" in (HERE.parent / "Makefile").read_text(
        encoding="utf-8"
    )
