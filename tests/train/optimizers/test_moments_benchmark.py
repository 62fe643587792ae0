"""A short run of the benchmark of training states in few bits is stopped and started again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import prepare_text

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "moments.py"


@pytest.mark.slow
def test_the_benchmark_keeps_what_it_finished(tmp_path: Path) -> None:
    data, out = prepare_text(tmp_path), tmp_path / "moments.jsonl"

    def printed(*cases: str) -> list[str]:
        asked = ["--data", str(data), "--steps", "4", "--seeds", "2", "--beta2", "0.95", "--out", str(out), "--cases", *cases]
        return subprocess.run(
            [sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, check=True
        ).stdout.splitlines()

    printed("compute")
    first = out.read_text()
    assert len(first.splitlines()) == 2
    heading, columns, *rows = printed("compute", "all")
    assert out.read_text().startswith(first) and len(out.read_text().splitlines()) == 4
    assert (heading, columns) == ("beta2 = 0.95", "case       loss    gap")
    assert [row.split()[0] for row in rows] == ["compute", "all"]
    assert rows[1].endswith("to compute") and abs(float(rows[1].split()[2])) < 1
