"""The page agrees with the files: live, after restarts, with files of earlier versions, and without files."""

import base64
import io
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megalith import events
from megalith.control.times import ROWS, Times
from megalith.events import Incident, RunFinished, Skipped
from megalith.fleet.heartbeat import KINDS, Beat
from megalith.report import units
from megalith.report.live import LiveLine
from megalith.spec.alerts import AlertsSpec
from megalith.spec.plan import Plan
from megalith.watch import causes, index, panels, predict
from megalith.watch.alerts import Alert, Alerts
from megalith.watch.source import Source
from tests.report import run_folder
from tests.report.run_folder import start, step, write_run
from tests.specs import tiny_run
from tests.watch import synthetic
from tests.watch.timed import write_timed


def _source(folder: Path) -> Source:
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    return source


def _all(source: Source) -> dict[str, Any]:
    """Return every panel as JSON."""
    found = {name: panels.panel(source, name) for name in panels.PANELS}
    return json.loads(json.dumps(found, allow_nan=False, default=str))


def _write(folder: Path, *written: events.Event) -> Source:
    log = events.EventLog(folder)
    for event in written:
        log.write(event)
    log.close()
    return _source(folder)


def _live(folder: Path, *, steps: int = 60, age: float = 0.2, **changes: Any) -> Source:
    now = time.time() - age
    begun = start()
    object.__setattr__(begun, "time", now - steps - 5)
    return _write(folder, begun, *(step(i, seconds=1.0, time=now - steps + i, **changes) for i in range(1, steps + 1)))


def test_every_panel_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    found = _all(_source(write_run(tmp_path)))
    assert found["alive"]["state"] == "finished" and found["alive"]["health"] == "good" and found["alive"]["starts"] == 2
    assert found["loss"]["step"] == [*range(1, 26), *range(21, 41)]
    assert [mark["kind"] for mark in found["loss"]["marks"]] == ["start"]
    assert len(set(found["loss"]["piece"])) == 2
    assert [one["step"] for one in found["loss"]["validation"]] == [25, 20, 30, 40]
    assert found["speed"]["now"]["step"] == pytest.approx(0.5) and found["speed"]["now"]["compute"] == pytest.approx(0.42)
    assert found["rank-heatmap"]["ranks"] == 0 and "earlier version" in found["rank-heatmap"]["why"]
    assert [row["rank"] for row in found["memory"]["rows"]] == [0, 1, 2, 3]
    assert found["incidents"]["problems"][0]["message"] == "rank 3 was killed <9>"
    assert found["samples"]["samples"][0]["text"] == " universally <b>acknowledged</b> & so on"


def test_a_log_of_an_earlier_version_opens(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "old_events.jsonl", tmp_path / events.FILE)
    assert _all(_source(tmp_path))["run"]["name"]


def test_a_folder_in_which_nothing_has_started_yet(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    found = _all(_source(tmp_path))
    assert found["alive"]["state"] == "not started" and found["loss"]["step"] == []


def test_a_run_that_is_well(tmp_path: Path) -> None:
    alive = panels.panel(_live(tmp_path), "alive")
    assert (alive["state"], alive["health"], alive["phase"]) == ("running", "good", "training")
    assert [words for _, words, *_ in alive["says"]] == ["The run is well."]
    assert alive["left"] == 0 and alive["age"] < 5


def test_terms_of_a_step_and_its_speed_are_beside_their_prediction(tmp_path: Path) -> None:
    source = _live(tmp_path)
    assert panels.panel(source, "speed")["now"]["saving"] is None, "nothing was saved yet"
    source.predicted = {"time": {"step": 0.9, "compute": 0.8, "communication": 0.1}, "tokens_per_second": 9000.0, "mfu": 0.3}
    found = panels.panel(source, "speed")
    assert found["now"].keys() >= {"compute", "communication", "bubble", "data", "saving"}
    assert found["predicted"] == {**source.predicted["time"], "data": 0.0, "saving": 0.0}
    assert found["expected"] == {"tokens_per_second": 9000.0, "mfu": 0.3}


def test_money_and_energy_are_of_all_devices_since_the_first_start(tmp_path: Path) -> None:
    source = _live(tmp_path, steps=60)
    assert panels.panel(source, "alive")["dollars"] is None is panels.panel(source, "alive")["kilowatt_hours"]
    source.predicted = {"price_per_hour": 3.6, "watts": 700.0}
    found = panels.panel(source, "alive")
    hours = 4 * (65 + 0) / 3600
    assert found["dollars"] == pytest.approx(3.6 * hours, rel=0.01) and found["kilowatt_hours"] == pytest.approx(
        0.7 * hours, rel=0.01
    )
    assert found["step_age"] == pytest.approx(found["age"], abs=0.1)


def test_a_silent_run_is_in_trouble(tmp_path: Path) -> None:
    alive = panels.panel(_live(tmp_path, age=500.0), "alive")
    assert alive["health"] == "bad" and "Silent for 8 min" in alive["says"][0][1]


def test_a_loss_that_is_not_finite_and_one_that_spikes(tmp_path: Path) -> None:
    source = _live(tmp_path, loss=3.0)
    log = events.EventLog(tmp_path)
    log.write(step(61, loss=4.5, seconds=1.0, time=time.time()))
    source.poll()
    assert panels.panel(source, "alive")["says"][0][1] == "The loss spikes: 4.5000, but 3.0000 is usual."
    log.write(step(62, loss=float("nan"), seconds=1.0, time=time.time()))
    source.poll()
    assert panels.panel(source, "alive")["health"] == "bad"
    log.write(events.Validation(62, float("nan"), {"austen": float("nan")}, seconds=1.0))
    merge = {"step": 62, "fragment": 0, "sent": 61, "sites": 2, "losses": [float("nan"), 3.0], "norm": float("inf")}
    log.write(events.Merge(**merge, spread=float("nan"), waited=0.0, seconds=1.0, bytes_sent=1, bytes_received=1))
    source.poll()
    found = _all(source)
    assert found["alive"]["validation"] is None is found["loss"]["validation"][-1]["domains"]["austen"]
    assert found["sites"]["merges"][0]["losses"] == [None, 3.0] and found["sites"]["merges"][0]["spread"] is None


def test_throughput_that_falls(tmp_path: Path) -> None:
    source = _live(tmp_path, steps=80)
    log = events.EventLog(tmp_path)
    for i in range(12):
        log.write(step(81 + i, tokens_per_second=4000.0, time=time.time()))
    source.poll()
    assert "Slower than usual: 4k tokens/s, but 8.19k is usual." in [
        words for _, words, *_ in panels.panel(source, "alive")["says"]
    ]


def test_a_run_that_was_resumed_compares_nothing_with_the_generation_before(tmp_path: Path) -> None:
    """A restart under another plan is slower, and has another loss for a while. This raises no alarm."""
    source = _live(tmp_path, loss=3.0)
    log = events.EventLog(tmp_path)
    log.write(events.RunStarted(**{**vars(start(60)), "time": time.time()}))
    for i in range(40):
        log.write(step(61 + i, loss=3.5, tokens_per_second=3000.0, seconds=1.0, time=time.time()))
    source.poll()
    alive = panels.panel(source, "alive")
    assert (alive["health"], alive["starts"]) == ("good", 2)


@pytest.mark.slow
def test_a_kill_another_plan_a_shrink_and_a_rewind_are_one_page_without_a_false_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page and alerts of all signs are evaluated after every event of the log, in the log's own time."""
    rules = AlertsSpec(run="true", on=("ended", "silent", "loss", "slow", "memory", "experts"))
    now, log, told = [1000.0], events.EventLog(tmp_path), list[Alert]()
    monkeypatch.setattr("time.time", lambda: now[0])
    log.write(start())
    source = Source(tmp_path, predicts=False)
    alerts = Alerts(source, rules, lambda _: None)

    def write(event: events.Event, *, after: float = 1.0) -> None:
        now[0] += after
        object.__setattr__(event, "time", now[0])
        log.write(event)
        source.poll()
        told.extend(alerts.check(now[0]))
        assert panels.panel(source, "alive")["health"] in ("good", "warn" if source.incidents or source.problems else "good")

    def train(first: int, last: int, *, rate: float = 8192.0, updates: int = 0) -> None:
        for number in range(first, last + 1):
            write(step(number, seconds=1.0, tokens_per_second=rate, updates=number - updates))

    train(1, 60)
    write(Incident(1, now[0], 60, "rank_failed", "rank 3 was killed", "a", 3, {}, [{"kind": "restart"}]))
    write(start(50), after=5.0)
    write(events.Recovery(1, 50, "step 50 in memory", 10))
    train(51, 100)
    write(RunFinished("stopped", 100))
    write(start(100, plan=Plan(data=4)), after=3600.0)
    train(101, 150, rate=5000.0)
    write(Incident(2, now[0], 150, "node_lost", "node b is gone", "b", None, {}, [{"kind": "shrink"}]))
    write(start(150, plan=Plan(data=2)), after=8.0)
    write(events.Recovery(2, 150, "step 150 in the store", 0))
    train(151, 200, rate=2500.0)
    write(events.Rewound(200, 190, 10, 3040, 3200, "memory", 0.4, 1, 3))
    train(201, 260, rate=2500.0, updates=10)

    assert told == []
    found = _all(source)
    assert found["alive"]["health"] == "good"
    assert (found["alive"]["starts"], found["alive"]["incidents"], found["run"]["world"]) == (4, 2, 2)
    assert found["loss"]["step"] == [*range(1, 61), *range(51, 261)], "one curve, with what was done again"
    kinds = [(mark["step"], mark["kind"]) for mark in found["loss"]["marks"]]
    assert kinds == [(50, "start"), (60, "incident"), (100, "start"), (150, "start"), (150, "incident"), (200, "rewound")]
    assert sum("under another plan" in mark["words"] for mark in found["loss"]["marks"]) == 2
    source.close()


def test_a_phase_is_not_compared_with_the_one_before(tmp_path: Path) -> None:
    """Longer sequences and another mixture change loss and speed."""
    source = _live(tmp_path, loss=3.0)
    log = events.EventLog(tmp_path)
    log.write(events.PhaseBegan(61, 60 * 16, 1, 1024, 32, {"code": 1.0}))
    for i in range(70):
        log.write(step(61 + i, loss=3.8, tokens_per_second=3000.0, seconds=8.0, time=time.time()))
        source.poll()
        assert panels.panel(source, "alive")["health"] == "good"
    assert [mark["kind"] for mark in panels.panel(source, "loss")["marks"]] == ["phase"]
    asked = list[tuple[Any, ...]]()
    source._predicts = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "ask", lambda *given: asked.append(given) or {"time": None})
        source.await_prediction()
    assert [number for _, _, number in asked] == [1]


@pytest.mark.slow
def test_a_prediction_is_for_the_sizes_of_a_phase(tmp_path: Path) -> None:
    """Twice the sequences in a step take longer."""
    ramp = [{"begin": 64, "global_batch": 32}]
    spec = tiny_run(plan={"data": 2}, train={"seq_len": 256, "global_batch": 16, "batch_ramp": ramp})
    spec = spec.model_copy(update={"cluster": "h100:2"})
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    first, second = (predict.ask(tmp_path, spec.plan, number)["time"]["step"] for number in (0, 1))
    assert second > 1.5 * first


def test_recovering_and_failing(tmp_path: Path) -> None:
    source = _live(tmp_path)
    log = events.EventLog(tmp_path)
    log.write(Incident(1, time.time() - 1, 60, "rank_failed", "rank 3 died", "b", 3, {}, [{"kind": "restart"}]))
    source.poll()
    alive = panels.panel(source, "alive")
    assert (alive["phase"], alive["health"]) == ("recovering", "warn")
    log.write(Skipped(61, "loss is NaN", 4096, 1.0, 9))
    log.write(RunFinished("failed", 60))
    source.poll()
    assert panels.panel(source, "alive")["health"] == "bad"
    assert [mark["kind"] for mark in panels.panel(source, "loss")["marks"]] == ["incident", "skipped"]


def _beat(source_dir: Path, ranks: int, steps: int, slow: int, times_slow: float) -> None:
    times, random = Times(source_dir, ranks), np.random.default_rng(1)
    for number in range(steps):
        own = 0.5 * (1 + 0.02 * random.standard_normal(ranks))
        own[slow] *= times_slow
        times.note(
            [Beat(number + 2, 1.0, number + 1, True, "step", 0.5, number, 2.0**30, (own[r],) * len(KINDS)) for r in range(ranks)]
        )
    times.close()


def test_the_heatmap_shows_and_the_causes_name_the_slow_rank(tmp_path: Path) -> None:
    source = _live(tmp_path)
    _beat(tmp_path, 4, 60, slow=1, times_slow=1.5)
    found = panels.panel(source, "rank-heatmap")
    codes = np.frombuffer(base64.b64decode(found["codes"]), dtype=np.uint8).reshape(4, len(found["step"]))
    shares = 2 ** ((codes.astype(float) - 1) * found["octaves"] / 254 - found["zero"])
    assert found["step"] == list(range(1, 61)) and found["rows"][3] == {
        "ranks": [3],
        "of": 1,
        "slowest": 3,
        "pipeline": 1,
        "data": 1,
        "context": 0,
        "tensor": 0,
        "node": 0,
    }
    assert np.median(shares, axis=1).argmax() == 1 and np.median(shares[1]) == pytest.approx(1.5, rel=0.04)
    slowest = panels.panel(source, "rank-heatmap", {"sort": "slowest"})
    assert slowest["rows"][0]["ranks"] == [1]
    cause = panels.panel(source, "what-if")["causes"][0]
    assert (cause["kind"], cause["who"]) == ("slow rank", [1]) and cause["seconds"] > 0
    assert any("rank 1" in words for _, words, *_ in panels.panel(source, "alive")["says"])
    assert panels.panel(source, "memory")["rows"][0]["peak"] == pytest.approx(2.0**30, rel=0.02)


def test_rows_and_orders_of_the_heatmap(tmp_path: Path) -> None:
    source = write_timed(tmp_path, run_folder.PLAN, [np.array([0.5, 0.5, 0.8, 0.5])] * 20, nodes=2)
    for row in (*ROWS, "nonsense"):
        for sort in ("rank", "node", "stage", "data", "slowest", "nonsense"):
            found = panels.panel(source, "rank-heatmap", {"row": row, "sort": sort, "columns": "7", "from": "-3", "to": "x"})
            assert len(base64.b64decode(found["codes"])) == len(found["rows"]) * len(found["step"])
            assert sorted(rank for one in found["rows"] for rank in one["ranks"]) == [0, 1, 2, 3]
    for sort, axis in (("node", "node"), ("stage", "pipeline"), ("data", "data")):
        rows = panels.panel(source, "rank-heatmap", {"sort": sort})["rows"]
        assert [row[axis] for row in rows] == [0, 0, 1, 1]
        assert all(source.places()[axis][row["ranks"][0]] == row[axis] for row in rows)
    assert [row["ranks"][0] for row in panels.panel(source, "rank-heatmap")["rows"]] == [0, 1, 2, 3]
    (row,) = panels.panel(source, "rank-heatmap", {"rows": "1"})["rows"]
    assert (row["of"], row["slowest"]) == (4, 2)
    assert panels.panel(source, "rank-heatmap", {"sort": "slowest"})["rows"][0]["slowest"] == 2


@pytest.mark.slow
def test_ten_million_steps_of_a_thousand_ranks_are_looked_at_at_once(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path / "run", steps=10_000_000, data=64, pipeline=4, tensor=4, slow=77, least=512, keep=0)
    began = time.process_time()
    source = _source(folder)
    found = _all(source)
    assert time.process_time() - began < 5  # a second on an idle machine
    assert found["loss"]["step"][0] < 100_000 and found["loss"]["step"][-1] > 9_990_000
    assert found["rank-heatmap"]["ranks"] == 1024 and len(found["rank-heatmap"]["rows"]) == 256
    assert found["what-if"]["causes"][0]["who"] == [77]
    near = panels.panel(source, "loss", {"from": "9999900", "to": "9999990"})
    assert 90 <= len(near["step"]) <= 92


def test_causes_are_not_looked_for_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = _live(tmp_path), []
    monkeypatch.setattr(causes, "_find", lambda one: calls.append(1) or time.sleep(0.05) or causes.CauseReport())
    for _ in range(5):
        source.revision += 1
        causes.causes(source)
    assert len(calls) == 1


def test_the_merges_of_sites_with_bytes_saved(tmp_path: Path) -> None:
    """Totals include all merges, even those that are no longer drawn."""
    merge = {"fragment": 0, "sites": 2, "count": 3, "losses": [3.0, None, 3.2], "bytes_received": 0, "seconds": 0.5}
    merge |= {"merged": [0, 1, 2], "left": [3], "names": ["oslo", "bergen", "turku", "umea"]}
    made = [
        events.Merge(step=10 * i, sent=10 * i, bytes_sent=700, waited=0.25, norm=1.0 / i, spread=0.5 / i, **merge)
        for i in range(1, panels.POINTS + 11)
    ]
    found = panels.panel(_write(tmp_path, start(), *made), "sites")
    assert found["count"] == panels.POINTS + 10 and len(found["merges"]) == panels.POINTS
    assert found["merges"][-1] == {
        "step": made[-1].step, "sent_after": made[-1].sent, "fragment": 0, "norm": made[-1].norm, "spread": made[-1].spread,
        "losses": [3.0, None, 3.2], "waited": 0.25, "seconds": 0.5,
        "merged": ["oslo", "bergen", "turku"], "left": ["umea"], "joined": [],
    }  # fmt: skip
    assert found["sent"] == 700 * len(made) and found["waited"] == 0.25 * len(made)
    assert found["sites"] == 3, "all, not only those that merged last"
    assert found["instead"] == 4 * start().parameters * made[-1].step * 2, "to each of two others"
    assert panels.panel(_live(tmp_path / "alone"), "sites")["merges"] == []


def test_the_live_line_and_the_page_show_the_same_figures(tmp_path: Path) -> None:
    """Speed, MFU and time left are correct in a run that skipped updates and speeds up, also for a page that is opened later."""
    log, console = events.EventLog(tmp_path), Console(file=io.StringIO(), width=200)
    log.write(start())
    follow = LiveLine(tmp_path, run_folder.STEPS, console)
    now = time.time() - 40
    for number in range(1, 31):
        rate = 4096.0 if number < 10 else 8192.0 + number
        log.write(step(number, tokens_per_second=rate, mfu=rate / 1e5, updates=number - min(number, 5), time=now + number))
    log.close()
    follow.poll()
    live = follow.line()
    for source in (_source(tmp_path), _reopened(tmp_path)):
        found = panels.panel(source, "alive")
        assert live.startswith(f"step {found['step']}/{found['total']}  loss {found['loss']:.4f}")
        assert f"{units.count(found['tokens_per_second'])} tokens/s  MFU {units.percent(found['mfu'])}" in live
        assert found["left"] == pytest.approx(15) and f"ETA {units.clock(found['left'])}" in live
        source.close()


def _reopened(folder: Path) -> Source:
    """Return a run with an index, as seen by a page that is opened later."""
    kept = index.Index(folder, folder / index.FOLDER)
    while kept.poll():
        pass
    kept.close()
    return _source(folder)


def test_errors_of_a_step_that_was_trained_again_are_the_newer_ones(tmp_path: Path) -> None:
    looks = [
        events.PrecisionWatched(step=4, errors={"blocks.1": 0.5, "head": None}, seconds=1.0, limit=0.1, raised="blocks.1"),
        events.PrecisionWatched(step=4, errors={"blocks.1": 0.25}, seconds=1.0),
        events.PrecisionWatched(step=8, errors={"blocks.1": 0.125, "head": 0.5}, seconds=1.0),
    ]
    source = _write(tmp_path, start(), *looks)
    found = _all(source)["precision"]
    assert found == {"step": [4, 8], "errors": {"blocks.1": [0.25, 0.125], "head": [None, 0.5]}, "limit": 0.0}
    (mark,) = [one for one in panels.marks(source) if one["kind"] == "precision_watched"]
    assert (
        mark["step"] == 4
        and "all matrix products of blocks.1 are in bf16 from step 5 on" in mark["words"]
        and "0.5" in mark["words"]
    )
