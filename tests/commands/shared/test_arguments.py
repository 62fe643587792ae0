"""Unknown values of options, and the run file of a run folder."""

from pathlib import Path

import pytest

from megalith import epochs
from megalith.commands.shared.arguments import RunRequest
from tests.commands.calling import call


def test_a_format_that_is_not_known_is_a_usage_error():
    assert call("export", "runs/first", "--to", "gguf", "--out", "x").exit_code == 2
    assert call("import", "folder", "--from", "gguf", "--out", "x").exit_code == 2


def test_the_run_file_of_the_newest_owner_is_read_and_a_plain_one_that_differs_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("first")
    epochs.begin(tmp_path, 1)
    assert RunRequest.in_folder(tmp_path).file == tmp_path / "run-1.toml"
    assert not capsys.readouterr().err
    (tmp_path / "run.toml").write_text("changed")
    assert RunRequest.in_folder(tmp_path).file == tmp_path / "run-1.toml"
    assert f"{tmp_path / 'run.toml'} is only a copy, and differs from {tmp_path / 'run-1.toml'}" in capsys.readouterr().err
