"""Compilers and extras."""

from pathlib import Path

import pytest

from megalith.check import check
from tests.check.runs import errors, spec


@pytest.mark.parametrize("split", ["tensor", "context"])
def test_what_an_older_compiler_computes_wrongly_is_refused_there(split: str, monkeypatch: pytest.MonkeyPatch):
    asked = ("plan.compile=true", f"plan.{split}=2")
    for installed, wrong in (("2.15.0", []), ("2.16.1+cu130", []), ("2.11.0+cu130", ["plan.compile"])):
        monkeypatch.setattr("megalith.check.software.version", lambda package, installed=installed: installed)
        assert [problem.key for problem in errors(*asked)] == wrong
        assert errors("plan.compile=true", "plan.data=2") == []


def test_an_extra_that_is_asked_for_must_be_installed(data: Path, monkeypatch: pytest.MonkeyPatch):
    assert not [p for p in check(spec("log.tensorboard=true")) if p.key == "log.tensorboard"]
    monkeypatch.setattr("megalith.check.software.find_spec", lambda name: None)
    assert [p.key for p in check(spec("log.tensorboard=true")) if p.severity == "error"] == ["log.tensorboard"]
