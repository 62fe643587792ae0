"""The report of a run, made from its folder."""

import subprocess
from pathlib import Path

import pytest

from megalith.commands.report import report, report_if_any
from megalith.rehearse.campaign import may_mount, small_disk
from tests.commands.calling import call
from tests.report.run_folder import write_run


def _write(folder: Path) -> None:
    """Write a run folder with the files that `report` needs."""
    write_run(folder)
    (folder / "run.toml").write_text('name = "first"\n')


def test_a_report_wants_a_run_folder():
    with pytest.raises(FileNotFoundError, match="run folder"):
        report(Path("data"))


def test_a_report_goes_where_it_is_told(tmp_path: Path):
    _write(tmp_path / "run")
    result = call("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 0, result.output
    assert "<html" in (tmp_path / "page.html").read_text()
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_read_only_run_folder_is_reported_on_elsewhere(tmp_path: Path):
    with small_disk(tmp_path / "disk", size=1 << 22):
        run = tmp_path / "disk" / "run"
        _write(run)
        remount = ["mount", "-o", "remount,ro", str(tmp_path / "disk")]
        subprocess.run(remount, check=True)
        try:
            result = call("report", str(run), "--trace")
            assert result.exit_code == 0, result.output
            assert "training loss" in result.stdout
            page = Path(result.stdout.rpartition("report: ")[2].partition("\n")[0])
            assert page.is_file() and (page.parent / "trace.json").is_file() and not page.is_relative_to(tmp_path)
            assert "Read-only" in report_if_any(run)[1], "a run that ends writes no pages elsewhere"
        finally:
            subprocess.run([*remount[:2], "remount,rw", remount[3]], check=True)
