"""A run's page and summary once something has gone wrong."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from megalith import events
from megalith.report import page, tables
from tests.report.run_folder import start, step


def _run(folder: Path, *, hurt: bool) -> None:
    log = events.EventLog(folder)
    log.write(start())
    for i in range(1, 11):
        log.write(step(i))
    if hurt:
        sign = {"kind": "rank_failed", "rank": 3}
        log.write(
            events.Incident(
                incident=1, began=1005.5, step=10, cause="rank_failed", reason="rank 3 on n1: killed by SIGKILL", node="n1", rank=3,
                evidence=sign, commands=[{"kind": "restart"}], time=1005.75,
            )
        )  # fmt: skip
        log.write(events.Recovery(incident=1, step=10, restored="step 10 in memory", lost_steps=0, time=1007.0))
        log.write(step(11, time=1007.5))
    log.close()


def _text(folder: Path) -> str:
    shown = StringIO()
    Console(file=shown, width=160).print(tables.summary(folder))
    return shown.getvalue()


def test_an_incident_stands_in_the_summary_and_on_the_page_with_its_cost(tmp_path: Path) -> None:
    _run(tmp_path, hurt=True)
    shown = _text(tmp_path)
    assert "goodput" in shown
    assert "rank 3 on n1: killed by SIGKILL [0.2 s + 1.2 s]" in shown
    written = page.write(tmp_path).read_text()
    assert "<h2>Faults</h2>" in written
    assert "restored step 10 in memory" in written


def test_a_run_without_incidents_does_not_speak_of_them(tmp_path: Path) -> None:
    _run(tmp_path, hurt=False)
    assert "incidents" not in _text(tmp_path)
    assert "<h2>Faults</h2>" not in page.write(tmp_path).read_text()
