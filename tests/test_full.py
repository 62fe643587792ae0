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


@dataclass(frozen=True)
class Case:
    nodeid: str
    marked: bool

    def get_closest_marker(self, name: str) -> Any:
        return sampled(3).mark if self.marked and name == "sampled" else None


def _kept(seed: int) -> list[Case]:
    """Return what is left of two sampled tests of one file and one that is not sampled, which have ten cases each."""
    cases: list[Any] = [
        Case(f"file.py::{test}[{number}]", test != "plain") for test in ("one", "other", "plain") for number in range(10)
    ]
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    all_of_them = [*cases]
    config: Any = SimpleNamespace(option=SimpleNamespace(seed=seed), hook=hook)
    conftest.pytest_collection_modifyitems(config, cases)
    assert {*cases} | {*left_out} == {*all_of_them} and not {*cases} & {*left_out}
    return cases


def test_a_sample_follows_from_its_seed_and_is_the_same_for_tests_that_share_fixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "FULL", False)
    kept = _kept(5)
    assert kept == _kept(5)
    assert len({tuple(case.nodeid for case in _kept(seed)) for seed in range(20)}) > 1
    of = {
        test: [case.nodeid.partition("[")[2] for case in kept if f"::{test}[" in case.nodeid]
        for test in ("one", "other", "plain")
    }
    assert of["one"] == of["other"] and len(of["one"]) == 3 and len(of["plain"]) == 10


def test_everything_runs_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "FULL", True)
    assert len(_kept(5)) == 30


def test_one_file_reads_the_variable_so_that_make_finds_all_long_tests_by_its_import() -> None:
    """`make test-full` runs the files that import it."""
    assert [path.name for path in HERE.rglob("*.py") if VARIABLE in path.read_text(encoding="utf-8")] == ["full.py"]
    assert "grep -rl --include='test_*.py' 'from tests.full import' tests" in (HERE.parent / "Makefile").read_text(
        encoding="utf-8"
    )
