"""A user gets one alert with the fault and its cause."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith import events
from megalith.control.times import Times
from megalith.fleet.heartbeat import KINDS, Beat
from megalith.spec.alerts import AlertsSpec
from megalith.watch import follower
from megalith.watch.alerts import Alert, Alerts, post, run
from megalith.watch.health import run_health
from megalith.watch.signs import HealthMessage
from megalith.watch.source import Source
from tests.patience import PATIENCE
from tests.report.run_folder import start, step

ALL = AlertsSpec(run="true", on=("ended", "silent", "loss", "slow", "memory", "experts", "disk", "finished"))


def _live(folder: Path, *, age: float = 0.2, steps: int = 80, **changes: Any) -> Source:
    log, now = events.EventLog(folder), time.time() - age
    begun = start()
    object.__setattr__(begun, "time", now - steps - 5)
    for event in (begun, *(step(i, seconds=1.0, time=now - steps + i, **changes) for i in range(1, steps + 1))):
        log.write(event)
    log.close()
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    source.poll()
    return source


def _looked(source: Source, rules: AlertsSpec = ALL) -> list[Alert]:
    """Return the alerts of a process that has followed a run for a while. Each says a cause."""
    alerts = Alerts(source, rules, lambda _: None)
    found = [*alerts.check(0.0), *alerts.check(50.0)]
    assert all(one.cause for one in found if one.sign != "finished")
    return found


def _more(folder: Path, source: Source, *written: events.Event) -> None:
    log = events.EventLog(folder)
    for event in written:
        log.write(event)
    log.close()
    source.poll()


def test_nothing_is_sent_of_a_run_that_is_well(tmp_path: Path) -> None:
    assert _looked(_live(tmp_path)) == []


def test_silence_says_what_the_run_did_last(tmp_path: Path) -> None:
    (alert,) = _looked(_live(tmp_path, age=500.0))
    assert alert.sign == "silent" and alert.step == 80 and "last seen training" in alert.cause
    assert alert.text.startswith("first light, step 80: Silent for 8 min")
    assert _looked(_live(tmp_path / "more", age=500.0), ALL.model_copy(update={"silent": 1000.0})) == []


def test_a_log_of_a_machine_whose_clock_is_wrong_is_not_silent(tmp_path: Path) -> None:
    """Its clock is an hour behind, so the newest event looks old until the next one comes."""
    source = _live(tmp_path, age=3600.0)
    alerts = Alerts(source, ALL, lambda _: None)
    assert alerts.check(0.0) == []
    _more(tmp_path, source, step(81, seconds=1.0, time=time.time() - 3600.0))
    assert alerts.check(5.0) == [] == alerts.check(500.0) and (source.age() or 99) < 60


def test_silence_of_a_machine_whose_clock_is_ahead_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _live(tmp_path, age=-3600.0)
    alerts = Alerts(source, ALL, lambda _: None)
    _more(tmp_path, source, step(81, seconds=1.0, time=time.time() + 3600.0))
    assert alerts.check(0.0) == []
    later = time.time() + 500.0
    monkeypatch.setattr("time.time", lambda: later)
    assert [one.sign for one in alerts.check(500.0)] == ["silent"]


def test_a_spike_says_its_likely_cause(tmp_path: Path) -> None:
    source = _live(tmp_path, loss=3.0)
    spike = events.Spike(81, 4.5, 2.0, {"loss": 3.2}, "none", [{"cause": "data", "evidence": "sample 7 has loss 11"}])
    _more(tmp_path, source, step(81, loss=4.5, seconds=1.0, time=time.time()), spike)
    (alert,) = _looked(source)
    assert alert.sign == "loss" and "likely cause: data (sample 7 has loss 11)" in alert.cause


def test_throughput_memory_experts_disk_and_prediction(tmp_path: Path) -> None:
    source = _live(tmp_path)
    parts = step(1).breakdown | {"optimizer": 0.65}
    late = {"tokens_per_second": 4000.0, "seconds": 1.0, "breakdown": parts}
    _more(tmp_path, source, *(step(81 + i, time=time.time(), **late) for i in range(12)))
    (alert,) = _looked(source)
    assert alert.sign == "slow" and alert.cause == "optimizer takes 650 ms of a step, but 50 ms is usual"
    assert _looked(source, ALL.model_copy(update={"slower": 0.4})) == []
    source.predicted = {"time": {"step": 0.7}}
    assert "1.43 times the predicted time" in _looked(source, ALL.model_copy(update={"slower": 0.4}))[0].words
    even = {"experts": {"entropy": 0.3, "max_load": 6.0, "dropped": 0.0}}
    (alert,) = _looked(_live(tmp_path / "experts", **even))
    assert alert.sign == "experts" and "evenness of their load is 0.30" in alert.words and "6.0 times" in alert.cause
    full = _live(tmp_path / "disk")
    _more(tmp_path / "disk", full, events.Checkpoint(80, "x", 2**60, 1.0, 0.0))
    assert [one.sign for one in _looked(full)] == ["disk"]


def test_memory_is_compared_with_the_device(tmp_path: Path) -> None:
    source = _live(tmp_path)
    kept = Times(tmp_path, 4)
    for number in range(70, 81):
        own = (0.5,) * len(KINDS)
        kept.note([Beat(number + 1, 1.0, number, True, "step", 0.5, number, float((r + 1) << 30), own) for r in range(4)])
    kept.close()
    source.predicted = {"limit": 4 << 30}
    (alert,) = _looked(source)
    assert alert.sign == "memory" and "rank 3" in alert.words
    source.predicted = {"limit": 8 << 30}
    assert _looked(source) == []


def test_an_end_is_told_with_its_error_and_a_good_one_if_asked_for(tmp_path: Path) -> None:
    source = _live(tmp_path)
    _more(tmp_path, source, events.Problem("error", "rank 3 was killed <9>\nmore"), events.RunFinished("failed", 80))
    (alert,) = _looked(source)
    assert alert.sign == "ended" and alert.cause == "rank 3 was killed <9>"
    other = _live(tmp_path / "good")
    _more(tmp_path / "good", other, events.RunFinished("finished", 80))
    assert [one.sign for one in _looked(other)] == ["finished"]
    assert _looked(other, AlertsSpec(run="true")) == []


def _restart(number: int, kind: str) -> events.Incident:
    return events.Incident(number, time.time(), 80, "rank_failed", "rank 3 was killed", "a", 3, {}, [{"kind": kind}])


def test_an_end_that_the_run_recovers_from_is_not_told_and_the_next_one_is(tmp_path: Path) -> None:
    source = _live(tmp_path)
    alerts = Alerts(source, ALL, lambda _: None)
    assert alerts.check(0.0) == []
    _more(tmp_path, source, events.RunFinished("lost", -1))
    assert alerts.check(100.0) == [], "the incident may follow"
    assert not alerts.is_over(105.0)
    _more(tmp_path, source, _restart(1, "restart"))
    assert alerts.check(200.0) == [] and run_health(source).phase == "recovering"
    _more(tmp_path, source, events.RunFinished("lost", -1))
    assert alerts.check(300.0) == [] == alerts.check(400.0) and not alerts.is_over(400.0), (
        "the ranks failed again, before they began"
    )
    _more(tmp_path, source, events.Problem("error", "rank 3 was killed"), _restart(2, "stop"))
    found = [*alerts.check(500.0), *alerts.check(505.0), *alerts.check(511.0), *alerts.check(600.0)]
    assert [(one.sign, one.words) for one in found] == [("ended", "The run has ended: lost. rank 3 was killed")]
    assert alerts.is_over(600.0)


def test_the_ranks_that_a_preemption_stops_start_again(tmp_path: Path) -> None:
    source = _live(tmp_path)
    _more(tmp_path, source, _restart(1, "save_state"), events.RunFinished("stopped", 80))
    assert _looked(source) == [] and run_health(source).phase == "recovering"
    _more(tmp_path, source, start(80), step(81, seconds=1.0, time=time.time()), events.RunFinished("stopped", 81))
    assert run_health(source).state == "stopped"


def test_an_end_is_told_at_once_when_the_command_has_ended(tmp_path: Path) -> None:
    source = _live(tmp_path)
    alerts = Alerts(source, ALL, lambda _: None)
    _more(tmp_path, source, events.RunFinished("failed", 80))
    assert [one.words for one in alerts.lost(0.0)] == ["The run has ended: failed."]


@pytest.mark.slow
def test_the_same_sign_is_sent_once_until_it_was_gone(tmp_path: Path) -> None:
    source = _live(tmp_path, age=500.0)
    alerts = Alerts(source, ALL, lambda _: None)
    assert alerts.check(-1000.0) == [] and len(alerts.check(0.0)) == 1
    assert not any(alerts.check(float(now)) for now in range(2, 8000, 30)), "it lasts"
    source.last_time = time.time()
    assert alerts.check(8000.0) == []
    source.last_time -= 500.0
    assert len(alerts.check(8200.0)) == 1, "it was gone for a minute, and the last one is more than an hour old"


def test_generations_are_not_compared(tmp_path: Path) -> None:
    source = _live(tmp_path, loss=3.0)
    more = [step(81 + i, loss=3.6, tokens_per_second=3000.0, seconds=1.0, time=time.time()) for i in range(40)]
    _more(tmp_path, source, events.RunStarted(**{**vars(start(80)), "time": time.time()}), *more)
    assert _looked(source) == []


ALERT = Alert("a <b> $(touch x) `c`", "a", "/f", "loss", "words", "cause", 3, 1.0)


def test_a_command_gets_json_and_no_word_of_it_is_run(tmp_path: Path) -> None:
    run(f"cat > {tmp_path}/got", ALERT)
    assert json.loads((tmp_path / "got").read_text()) == vars(ALERT)
    with pytest.raises(RuntimeError, match=r"alerts.run = 'echo no >&2; exit 3' ended with status 3: no"):
        run("echo no >&2; exit 3", ALERT)


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """A server on loopback whose reply is given by the path."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status = int(self.path.strip("/") or 200)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/200")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_an_address_gets_json_and_may_be_a_secret(receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    address, got = receiver
    monkeypatch.setattr("megalith.watch.alerts.TRIES", (0.0, 0.0))
    monkeypatch.setenv("WHERE", address)
    post("env:WHERE", ALERT)
    assert got == [vars(ALERT)]
    with pytest.raises(RuntimeError, match=r"127.0.0.1 answered 302"):
        post(f"{address}/302", ALERT)
    with pytest.raises(RuntimeError, match=r"127.0.0.1 answered 500") as failed:
        post(f"{address}/500", ALERT)
    assert len(got) == 5 and "/500" not in str(failed.value), "tried again; the address is not told"
    with pytest.raises(ValueError, match="NOWHERE"):
        post("env:NOWHERE", ALERT)
    with pytest.raises(ValueError, match="not an http or https address"):
        post("file:///etc/passwd", ALERT)


@pytest.mark.slow
def test_the_follower_tells_that_its_command_is_gone(tmp_path: Path) -> None:
    """The training command starts the process in this way. When the command ends or is killed, the pipe closes."""
    run_dir = tmp_path / "run"
    _live(run_dir).close()
    rules = AlertsSpec(run=f"cat >> {tmp_path}/got")
    command = [sys.executable, "-m", "megalith.cli", "watch", str(run_dir), "--no-page", "--alerts", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(rules.model_dump_json() + "\n")
        process.stdin.close()
        said = process.stderr.read()
        assert process.wait(60) == 0
    (line,) = (tmp_path / "got").read_text().splitlines()
    assert json.loads(line)["sign"] == "ended" and "was it killed?" in said


def test_the_end_of_an_earlier_command_is_past_and_the_new_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed run logs its start only when its ranks are ready, and the process that sends alerts looks before."""
    source, sent, looks = _live(tmp_path, age=86400.0), list[Alert](), list[int]()
    _more(tmp_path, source, events.RunFinished("failed", 80, time=time.time() - 86400.0))
    read, write = os.pipe()

    def trains(followed: Source) -> None:
        looks.append(len(sent))
        if len(looks) == 3:
            again = events.RunStarted(**{**vars(start(80)), "time": time.time()})
            one = step(81, seconds=1.0, time=time.time())
            _more(tmp_path, followed, again, one, events.Problem("error", "new"), events.RunFinished("failed", 81))
            os.close(write)

    monkeypatch.setattr("megalith.watch.alerts.FINAL", 0.0)
    monkeypatch.setattr("megalith.watch.follower.EVERY", 0.05)
    monkeypatch.setattr("megalith.watch.follower.causes", SimpleNamespace(refresh=trains))
    monkeypatch.setattr(Alerts, "_start", lambda _, alert: sent.append(alert))
    follower.follow([source], ALL, parent=read)
    os.close(read)
    assert looks == [0, 0, 0] and [(one.sign, one.words) for one in sent] == [("ended", "The run has ended: failed. new")]


@pytest.mark.slow
def test_alerts_of_a_run_file_and_none_of_a_folder(tmp_path: Path) -> None:
    """A folder may come from anybody, so a command that it names is not run."""
    run_dir = tmp_path / "run"
    source = _live(run_dir, age=500.0)
    source.spec["alerts"] = {"run": f"touch {tmp_path}/ran"}
    assert source.alerts.run, "the page knows it"
    command = [sys.executable, "-m", "megalith.cli", "watch", str(run_dir), "--no-page"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
    command = [sys.executable, "-m", "megalith.cli", "watch", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page = process.stdout.readline().split(": ", 1)[1].strip()
        with urllib.request.urlopen(f"{page}panel/alive", timeout=PATIENCE) as panel:
            assert panel.read(), "the page has looked for signs"
        process.send_signal(signal.SIGTERM)
    assert not (tmp_path / "ran").exists() and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_cause_is_not_said_twice(tmp_path: Path) -> None:
    source = _live(tmp_path)
    alerts = Alerts(source, ALL, lambda _: None)
    alert = alerts._judge(HealthMessage("bad", "It is over: x", "ended", "x"), None, 0.0)
    assert alert is not None and alert.text.count("x") == 1
