"""A small run without problems, with some values changed."""

import shutil
from pathlib import Path

import pytest

from megalith.check import Problem, check
from megalith.spec.files import Layer, read_setting, resolve
from megalith.spec.run import RunSpec

BASE = {
    "model": {"preset": "tiny"},
    "data": {"path": "data"},
    "train": {"steps": 100, "global_batch": 64, "seq_len": 128},
    "optimizer": {"warmup": 10},
}
HYBRID = ("model.preset=nemotron-h-tiny", "train.seq_len=128")


def spec(*settings: str) -> RunSpec:
    """Return a run without problems, with some values changed: "plan.tensor=2"."""
    return resolve([Layer(BASE, "file"), *map(read_setting, settings)]).spec


def found(*settings: str, world: int | None = None) -> list[Problem]:
    """Return the problems of such a run, without reading the disk."""
    return check(spec(*settings), world=world, files=False)


def errors(*settings: str, world: int | None = None) -> list[Problem]:
    """Return its errors."""
    return [problem for problem in found(*settings, world=world) if problem.severity == "error"]


def advice(*settings: str) -> list[str]:
    """Return the keys of its advice."""
    return [problem.key for problem in found(*settings) if problem.severity == "advice"]


def keys(*settings: str, begun: bool = False) -> list[str]:
    """Return the keys of its problems, including problems of files."""
    return [problem.key for problem in check(spec(*settings), begun=begun)]


def is_named(settings: list[str], key: str, said: str) -> None:
    """Assert that there is an error about this key with this text."""
    problems = errors(*settings)
    assert key in [problem.key for problem in problems]
    assert any(said in str(problem) for problem in problems if problem.key == key), [*map(str, problems)]


def is_small(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int = 1 << 20) -> None:
    """Let the disk of a folder have little space, and every other disk plenty."""
    real = shutil.disk_usage("/")

    def usage(path: Path) -> object:
        return real._replace(free=free if Path(path).is_relative_to(folder) else 1 << 60)

    monkeypatch.setattr(shutil, "disk_usage", usage)
