"""The origin of a run, without the user's name."""

import subprocess
import sys
from pathlib import Path

import pytest

from megalith.machine import origin as found
from megalith.machine.origin import origin, without_user


@pytest.fixture(autouse=True)
def _alice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the user alice on alice-laptop."""
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(found.socket, "gethostname", lambda: "alice-laptop.example.com")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("/home/alice/runs/first", "~/runs/first"),
        ("/home/alice", "~"),
        ("/home/alicent/runs", "/home/alicent/runs"),
        ("data.path=/scratch/alice/text", "data.path=/scratch/USER/text"),
        ("runs/alice", "runs/USER"),
        ("malice /alice2", "malice /alice2"),
    ],
)
def test_the_users_name_is_left_out_of_paths(words: str, said: str) -> None:
    assert without_user(words) == said


def test_a_run_is_told_by_host_command_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/home/alice/venv/bin/megalith", "train", "/home/alice/a run.toml"])
    assert origin() == {"host": "USER-laptop.example.com", "command": "megalith train '~/a run.toml'"}
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "run.toml").write_text("")
    for asked in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *asked], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert origin()["commit"] == commit[:12]
    (tmp_path / "run.toml").write_text("changed")
    assert origin()["commit"] == f"{commit[:12]}-dirty"


def test_arguments_of_another_program_may_be_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/alice/mine.py", "--token", "secret"])
    assert origin()["command"] == "mine.py"
