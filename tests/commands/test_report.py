"""The report of a run, from its folder."""

from pathlib import Path

import pytest

from megalith.commands.report import report


def test_a_report_wants_a_run_folder():
    with pytest.raises(FileNotFoundError, match="no run folder"):
        report(Path("data"))
