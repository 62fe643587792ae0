"""Alert a person to problems of a run, by a shell command or an HTTP POST that the run file defines. A separate process follows
the run's log, as the live page does, so no rank waits until an alert is delivered."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from megalith.events import RunFinished
from megalith.spec.alerts import AlertsSpec, address_of
from megalith.watch.health import RunHealth, run_health
from megalith.watch.signs import HealthMessage
from megalith.watch.source import Source

FINAL = 10.0  # seconds for which a logged end must stand: ranks log theirs up to 2 s before the incident that starts them again
GONE = 60.0  # seconds that a sign must have been gone before it counts as a new one
COMMAND_SECONDS, POST_SECONDS = 60.0, 10.0  # that a delivery may take
TRIES = (0.0, 2.0, 10.0)  # seconds waited before each try to post
LOST = HealthMessage(
    "bad",
    "The training command has ended without logging its end: was it killed?",
    "ended",
    "the log has no event for the end of the run",
)


@dataclass(frozen=True)
class Alert:
    """One message. `text` is the whole message in one line, under the key that most chat services read."""

    text: str
    run: str
    folder: str
    sign: str
    words: str
    cause: str
    step: int | None
    time: float


Deliver = Callable[[Alert], None]


class Alerts:
    """The alerts of one run: the current signs of trouble, and those for which an alert was already sent."""

    def __init__(self, source: Source, rules: AlertsSpec, deliver: Deliver | None = None) -> None:
        """`deliver` sends an alert; None: alerts are sent by the command and to the address of `rules`, each in a thread."""
        self._source, self._rules = source, rules
        source.rules = rules
        self._threads: list[threading.Thread] = []
        self._deliver = deliver or self._start
        self._sent: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._begun: float | None = None  # when it was looked at for the first time
        self._end: tuple[RunFinished | None, float] = None, 0.0  # the logged end, and when it was seen first

    def check(self, now: float) -> list[Alert]:
        """Send new alerts, and return them. `now`: monotonic seconds. Silence is counted only from the first call on, because the
        clock of the machine that wrote the log may be behind. An end counts once it is final (`is_over`)."""
        if self._source.behind:
            return []
        try:
            with self._source.lock:
                found = run_health(self._source)
        except Exception as error:  # whatever is wrong with a run's files, the process that follows the run goes on
            found = RunHealth(
                "unknown",
                "bad",
                "",
                [HealthMessage("bad", f"The run's files cannot be read: {error or type(error).__name__}", "silent")],
            )
        self._begun = now if self._begun is None else self._begun
        ready = {"silent": now - self._begun >= (found.limit or 0.0), "ended": self.is_over(now)}
        says = [message for message in found.says if ready.get(message.sign, True)]
        return [alert for message in says if (alert := self._judge(message, found.step, now))]

    def is_over(self, now: float) -> bool:
        """True if the run has ended, and its controller no longer starts the ranks again."""
        end = self._source.finished
        if end is not self._end[0]:
            self._end = end, now
        return end is not None and (end.reason == "finished" or now - self._end[1] >= FINAL)

    def lost(self, now: float) -> list[Alert]:
        """Send an alert that the training command has ended without logging its end. If the log does contain its end, do the same
        as `check`."""
        if self._source.finished is not None:
            self._end = self._source.finished, now - FINAL
            return self.check(now)
        return [alert for alert in [self._judge(LOST, self._source.last_step(), now)] if alert]

    def _judge(self, message: HealthMessage, step: int | None, now: float) -> Alert | None:
        if message.sign not in self._rules.on:
            return None
        seen = self._seen.get(message.sign, -1e18)
        self._seen[message.sign] = now
        sent = self._sent.get(message.sign)
        if sent is not None and (now - seen < GONE or now - sent < self._rules.again):
            return None
        self._sent[message.sign] = now
        name = self._source.name
        cause = f" Cause: {message.cause}" if message.cause and message.cause not in message.words else ""
        text = f"{name}{'' if step is None else f', step {step}'}: {message.words}{cause}"
        alert = Alert(
            text, name, str(self._source.run_dir.resolve()), message.sign, message.words, message.cause, step, time.time()
        )
        self._deliver(alert)
        return alert

    def _start(self, alert: Alert) -> None:
        for way, target in ((run, self._rules.run), (post, self._rules.post)):
            if target:
                thread = threading.Thread(target=_said, args=(way, target, alert), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self, seconds: float = COMMAND_SECONDS) -> None:
        """Wait until all alerts are sent, `seconds` at most."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _said(way: Callable[[str, Alert], None], target: str, alert: Alert) -> None:
    """Send an alert. If an alert cannot be sent, print it and the reason: an exception must not end the process that follows the
    run."""
    try:
        way(target, alert)
    except Exception as error:
        print(f"alert not sent: {error or type(error).__name__}. The alert: {alert.text}", file=sys.stderr, flush=True)


def run(command: str, alert: Alert) -> None:
    """Run a shell command with the alert as JSON on its input. Raises RuntimeError if the command fails,
    subprocess.TimeoutExpired if it hangs."""
    given = json.dumps(asdict(alert)) + "\n"
    done = subprocess.run(command, shell=True, input=given, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          timeout=COMMAND_SECONDS, check=False, start_new_session=True)  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"alerts.run = {command!r} ended with status {done.returncode}{': ' if last else ''}{last}")


class _Stays(urllib.request.HTTPRedirectHandler):
    """Refuses redirections, so that alerts go only to the address that the user gave."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def post(target: str, alert: Alert) -> None:
    """Post the alert as JSON to an address, or to the address in the environment variable `target`. Redirections are not followed. Raises
    ValueError for text that is not an address, RuntimeError if no server accepted it."""
    address = address_of(target, os.environ)
    body = json.dumps(asdict(alert)).encode()
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"}, method="POST")
    opener = urllib.request.build_opener(_Stays)
    host, reason = urlsplit(address).hostname, ""
    for wait in TRIES:
        time.sleep(wait)
        try:
            with opener.open(request, timeout=POST_SECONDS):
                return
        except urllib.error.HTTPError as error:
            reason = f"{host} answered {error.code} {error.reason}"
        except OSError as error:
            reason = f"{host} cannot be reached: {getattr(error, 'reason', error)}"
    raise RuntimeError(f"alerts.post: {reason}")
