"""The page of a real run, looked at after every event of its log."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from megalith.events import FILE, parse
from megalith.spec.alerts import AlertsSpec
from megalith.watch import panels
from megalith.watch.alerts import Alert, Alerts
from megalith.watch.source import Source

RULES = AlertsSpec(run="true", on=("ended", "silent", "loss", "memory", "experts"))
"""Alerts for all signs except "slow", since a busy machine is slow."""


def one_page(run: Path, again: Path) -> tuple[dict[int, float], list[str], list[Alert]]:
    """Replay a run's log event by event, each at its own time, in the empty folder `again`. Return the losses by step as drawn by the
    page, the kinds of its marks in the order of their steps, and the alerts sent."""
    again.mkdir()
    (again / FILE).touch()
    told, source = list[Alert](), Source(again, predicts=False)
    alerts = Alerts(source, RULES, lambda _: None)
    with (run / FILE).open("rb") as lines, (again / FILE).open("ab", buffering=0) as log:
        for line in lines:
            event = parse(line.decode())
            assert event is not None
            log.write(line)
            with patch("time.time", return_value=event.time):
                while source.poll():
                    pass
                told += alerts.check(event.time)
    loss = panels.panel(source, "loss", {"points": "2800"})
    source.close()
    assert set(loss["steps"]) <= {1}, "short enough to be drawn step by step"
    return _counted(loss["step"], loss["loss"]["mean"]), [mark["kind"] for mark in loss["marks"]], told


def _counted(steps: Sequence[int], losses: Sequence[float]) -> dict[int, float]:
    """Return the steps that count. Repeated steps replace the earlier ones."""
    found: dict[int, float] = {}
    for step, loss in zip(steps, losses, strict=True):
        if step in found:
            found = {before: one for before, one in found.items() if before < step}
        found[step] = loss
    return found
