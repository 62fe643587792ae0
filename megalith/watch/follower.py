"""Follows runs only to send alerts, until the runs or the parent command end."""

import select
import sys
import time
from collections.abc import Sequence

import psutil

from megalith.spec.alerts import AlertsSpec
from megalith.watch import causes
from megalith.watch.alerts import Alerts
from megalith.watch.source import Source

EVERY = 5.0  # seconds between looks
LEAVE = 10.0  # seconds to wait for the log to tell how the run ended, once its command is gone


def check(source: Source, alerts: Alerts, *, since: float = 0.0) -> None:
    """Read the new part of a run's log, and send its alerts. An end before the time `since` does not count. A file that cannot be
    read now is read at a later call."""
    while source.poll():
        pass
    source.forget_end(since)
    causes.refresh(source)
    for alert in alerts.check(time.monotonic()):
        print(f"alert: {alert.text}", file=sys.stderr, flush=True)


def follow(sources: Sequence[Source], rules: AlertsSpec, *, parent: int | None) -> None:
    """Follow the runs and send their alerts. `parent`: a pipe that the training command closes when it ends; None: follow until a
    signal comes or all runs have ended."""
    alerts = [Alerts(source, rules) for source in sources]
    pairs = list(zip(sources, alerts, strict=True))
    since = 0.0 if parent is None else psutil.Process().create_time()  # the command started this process: an earlier end is past
    while True:
        for source, one in pairs:
            check(source, one, since=since)
        if parent is None:
            if all(one.is_over(time.monotonic()) for one in alerts):
                break
            time.sleep(EVERY)
        elif select.select([parent], [], [], EVERY)[0]:
            _end(pairs)
            break
    for one in alerts:
        one.close()


def _end(pairs: Sequence[tuple[Source, Alerts]]) -> None:
    end = time.monotonic() + LEAVE
    for source, alerts in pairs:
        while source.finished is None and time.monotonic() < end:
            source.poll()
            time.sleep(0.1)
        for alert in alerts.lost(time.monotonic()):
            print(f"alert: {alert.text}", file=sys.stderr, flush=True)
