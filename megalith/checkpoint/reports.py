"""Reports about a run's saves, written to the run's log and sent to the fleet."""

import time
from collections.abc import Iterable

from megalith.checkpoint.checkpointer import SaveFailure, SaveResult
from megalith.events import Checkpoint, EventLog, Problem
from megalith.fleet.observations import SaveFailed, SaveWorks
from megalith.fleet.report import report
from megalith.fleet.tiers import Tier


class SaveReports:
    """Reports the outcomes of saves, on the one rank that has a log."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log
        self._failed = False

    def report(self, outcomes: Iterable[SaveResult | SaveFailure]) -> None:
        """Log the outcomes of saves."""
        if not self._log:
            return
        for outcome in outcomes:
            self._report_change(outcome)
            if isinstance(outcome, SaveFailure):
                self._log.write(Problem("warning", f"checkpoint of step {outcome.step} was not saved: {outcome.error}"))
            else:
                path = f"{outcome.path.parent.name}/{outcome.path.name}"
                fields = ("step", "bytes", "seconds", "wait_seconds")
                self._log.write(Checkpoint(path=path, **{name: getattr(outcome, name) for name in fields}))

    def _report_change(self, outcome: SaveResult | SaveFailure) -> None:
        failed = isinstance(outcome, SaveFailure)
        if failed and outcome.peer_lost:  # the fault of the rank that is gone, which is reported by its end
            return
        if failed != self._failed:
            told = {"time": time.time(), "step": outcome.step, "tier": Tier.STORE}
            report(SaveFailed(**told, error=outcome.error) if failed else SaveWorks(**told))
        self._failed = failed
