"""Helpers that a training command starts: the index of its log, and separate processes for the live page, for alerts and for other
tools."""

import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from megalith import epochs
from megalith.machine import parent_watch
from megalith.spec.alerts import AlertsSpec
from megalith.spec.run import SINKS, LogSpec
from megalith.watch import index

LEAVE_SECONDS = 2.0  # that the server has to end


class WatchHelpers:
    """The helpers of one run; the training command calls `poll` often. No method raises an exception, because a helper must not end the
    training."""

    def __init__(
        self, run_dir: Path, *, serves: bool, alerts: AlertsSpec | None = None, log: LogSpec | None = None, epoch: int = 0
    ) -> None:
        """`serves`: start the server once the run folder contains run.toml. `alerts`: alerts to send. `log`: tools to feed. `epoch`: the
        number in the file names of the run folder's owner (`megalith.epochs`)."""
        self._run_dir, self._serves = run_dir, serves
        self._alerts = alerts if alerts is not None and (alerts.run or alerts.post) else None
        self._log = log if log is not None and any(getattr(log, name) for name in SINKS) else None
        self._alerting: subprocess.Popen[bytes] | None = None
        self._feeding: subprocess.Popen[bytes] | None = None
        self._index: index.Index | None = None
        self._server: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(Exception):
            self._index = index.Index(run_dir, run_dir / epochs.name(index.FOLDER, epoch))

    def poll(self) -> None:
        """Add the new part of the log to the index, and start helpers that are not running yet."""
        with contextlib.suppress(Exception):
            if self._index is not None:
                self._index.poll()
            if (self._serves or self._alerts or self._log) and epochs.newest(self._run_dir, "run.toml").exists():
                serves, alerts, log = self._serves, self._alerts, self._log
                self._serves, self._alerts, self._log = False, None, None
                if log is not None:
                    self._feeding = _told([sys.executable, "-m", "megalith.watch.sinks", str(self._run_dir)], log)
                if alerts is not None:
                    self._alerting = self._start_alerts(alerts)
                if serves:
                    self._server = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the server, which prints its address on stderr. The server ignores Ctrl-C and ends with this process."""
        command = [sys.executable, "-m", "megalith.cli", "watch", str(self._run_dir)]
        with_this = partial(parent_watch.die_with_parent, os.getpid())
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=with_this, start_new_session=True
        )

    def _start_alerts(self, alerts: AlertsSpec) -> "subprocess.Popen[bytes]":
        """Start the sender of alerts. The sender outlives this process, because it must report this process's end, which it
        notices when its input ends."""
        command = [sys.executable, "-m", "megalith.cli", "watch", str(self._run_dir), "--no-page", "--alerts", "-"]
        return _told(command, alerts)

    def __enter__(self) -> "WatchHelpers":
        return self

    def __exit__(self, *_: object) -> None:
        self.poll()
        with contextlib.suppress(Exception):
            if self._index is not None:
                self._index.close()
            for process in (self._alerting, self._feeding):
                if process is not None and process.stdin is not None:
                    process.stdin.close()  # it ends when its messages are sent
            if self._server is not None:
                self._server.terminate()
                self._server.wait(LEAVE_SECONDS)


def _told(command: list[str], what: AlertsSpec | LogSpec) -> "subprocess.Popen[bytes]":
    """Start a process that gets `what` on its input. The new process outlives this one, and when its input ends, it knows that
    this process has ended."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(what.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    return process
