"""Slow ranks are named with their cost, and none is named if nothing is slow."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalith import events
from megalith.control.times import decode, encode
from megalith.mesh import Mesh
from megalith.schedule import SCHEDULES
from megalith.spec.plan import Plan
from megalith.watch import panels, predict, window
from megalith.watch.causes import _of_samples, _of_stages
from megalith.watch.replay import Replay, levelled
from megalith.watch.source import Source
from megalith.watch.window import ENOUGH, WINDOW, Window, slow_ranks, steady
from tests.report import run_folder
from tests.specs import tiny_run
from tests.watch.timed import true_seconds, write_timed

SLOW = 1.2


def _plan(schedule: str) -> Plan:
    return Plan(data=4, tensor=2, pipeline=4, schedule=schedule, chunks=SCHEDULES[schedule].chunks.usual, microbatch=1)


def _window(plan: Plan, *, slow: dict[int, float], noise: float, seed: int = 0) -> Window:
    """Return steps as heartbeats encode them: rounded to codes, with a tenth more work on the last stage, and without the waits of
    tensor ranks."""
    mesh, random = Mesh.of(plan), np.random.default_rng(seed)
    places = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    own = np.array([0.5 * (1.1 if place["pipeline"] == plan.pipeline - 1 else 1.0) for place in places])
    for rank, times in slow.items():
        own[rank] *= times
    steps = own * (1 + noise * random.standard_normal((WINDOW, mesh.ranks)))
    base = np.median(steps, axis=1, keepdims=True)
    axes = {axis: np.array([place[axis] for place in places]) for axis in places[0]}
    axes["node"] = np.arange(mesh.ranks) // 4
    return Window(decode(encode(steps / base)) * base, np.arange(WINDOW), axes)


def _replay(plan: Plan, seen: Window, microbatches: int = 8) -> Replay:
    return Replay(plan, microbatches, steady(seen, slow_ranks(seen))[0], seen.pipeline, seen.data)


def _run(folder: Path, written: Sequence[events.Event]) -> Source:
    log = events.EventLog(folder)
    for event in written:
        log.write(event)
    log.close()
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    return source


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("rank", [5, 30])
def test_a_rank_slower_by_a_fifth_is_named_with_its_cost_within_20_steps(schedule: str, rank: int) -> None:
    plan = _plan(schedule)
    seen = _window(plan, slow={rank: SLOW}, noise=0.03)
    (found,) = slow_ranks(seen)
    assert found[0] == rank and found[1] == pytest.approx(SLOW, rel=0.03)
    one = _replay(plan, _window(plan, slow={rank: SLOW}, noise=0.01))
    work = np.array([0.5, 0.5, 0.5, 0.55])
    whole, slowed = (
        true_seconds(plan, work),
        true_seconds(plan, np.where(np.arange(4) == seen.pipeline[rank], SLOW * work, work)),
    )
    gain = one.without([rank], steady(_window(plan, slow={rank: SLOW}, noise=0.01), [(rank, SLOW)])[1])
    assert 1 / (1 - gain) == pytest.approx(slowed / whole, rel=0.02)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_named_where_nobody_is_slow(seed: int) -> None:
    seen = _window(_plan("1f1b"), slow={}, noise=0.02 + 0.02 * seed, seed=seed)
    assert not slow_ranks(seen)


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    seen = _window(_plan("1f1b"), slow={}, noise=0.02)
    seen.own[::3, 9] *= 2
    assert not slow_ranks(seen)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_peers_is_compared_with_its_past(ranks: int, tmp_path: Path) -> None:
    """It was well in ten steps of its generation and phase. Its last stage has a little more work than the others from the beginning."""
    plan, usual = Plan(pipeline=ranks), np.array([0.5] * (ranks - 1) + [0.52])
    slow = np.where(np.arange(ranks) == 1, SLOW, 1.0)
    named = lambda folder, *works: panels.panel(write_timed(tmp_path / folder, plan, works), "what-if")["causes"]  # noqa: E731
    assert not [one for one in named("well", *[usual] * 40) if one["kind"] == "slow rank"]
    (found,) = [one for one in named("slow", *[usual] * ENOUGH, *[usual * slow] * WINDOW) if one["kind"] == "slow rank"]
    assert found["who"] == [1] and "1.2" in found["words"] and "as long as earlier" in found["words"]
    whole, calm = (true_seconds(plan, work, run_folder.BATCH) for work in (usual * slow, usual))
    assert 1 / (1 - found["gain"]) == pytest.approx(whole / calm, rel=0.02)
    assert named("long slow", *[usual] * ENOUGH, *[usual * slow] * 300)[0]["who"] == [1], "also when it has been slow for long"
    assert not [one for one in named("always", *[usual * slow] * 40) if one["kind"] == "slow rank"], "perhaps its stage is larger"


def test_a_new_phase_in_which_stages_share_the_work_differently_blames_nobody(tmp_path: Path) -> None:
    plan, before, after = Plan(pipeline=4), np.full(4, 0.5), np.array([0.5, 0.5, 0.5, 0.7])
    begun = events.PhaseBegan(31, 30 * run_folder.BATCH, 1, 512, run_folder.BATCH, {})
    source = write_timed(tmp_path, plan, [*[before] * 30, *[after] * 40], begun)
    assert [one["kind"] for one in panels.panel(source, "what-if")["causes"]] == ["unbalanced stage"]


@pytest.mark.parametrize("slowdown", [1.1, 1.5, 3.0])
@pytest.mark.parametrize("place", range(4))
def test_a_step_replayed_without_a_slow_stage_is_the_simulated_one(slowdown: float, place: int) -> None:
    """Traces from the simulator with a known slowdown. test_whatif.py has published traces."""
    plan = _plan("1f1b")
    seen = _window(
        plan, slow=dict.fromkeys(np.flatnonzero(_window(plan, slow={}, noise=0).pipeline == place).tolist(), slowdown), noise=0.01
    )
    one = _replay(plan, seen)
    work = np.array([0.5, 0.5, 0.5, 0.55])
    slowed = np.where(np.arange(4) == place, slowdown * work, work)
    levelled_work = slowed.copy()
    levelled_work[place] = np.median(slowed)
    expected = true_seconds(plan, slowed) / true_seconds(plan, levelled_work)
    assert one.seconds() / one.seconds(levelled(one.own, seen.pipeline, place)) == pytest.approx(expected, rel=0.02)


def test_a_site_replays_the_microbatches_of_its_share(tmp_path: Path) -> None:
    seen = _window(run_folder.PLAN, slow={}, noise=0.01)
    begin, phase = run_folder.start(), events.PhaseBegan(1, 0, 1, 256, 2 * run_folder.BATCH, {})

    def of(name: str, *more: events.Event, **sites: int) -> int:
        source = _run(tmp_path / name, [replace(begin, spec=begin.spec | {"sites": sites or None}), *more])
        found = window.replay(source, seen.own[0], seen)
        assert found is not None
        return found.microbatches

    assert of("alone") == 2 * of("site", count=2) == of("phase", phase, count=2) == run_folder.BATCH // 2


def test_an_unbalanced_stage_is_named_and_no_rank() -> None:
    plan = _plan("1f1b")
    seen = _window(plan, slow=dict.fromkeys(range(8, 16), 1.5), noise=0.02)
    assert len(set(seen.pipeline[8:16])) == 1
    assert not slow_ranks(seen)
    one = _replay(plan, seen)
    (cause,) = _of_stages(one, one.own, seen, 1.0)
    assert cause.kind == "unbalanced stage" and f"pipeline rank {seen.pipeline[8]} " in cause.words and cause.gain > 0.1


def test_uneven_samples_slow_another_data_rank_each_time() -> None:
    plan = _plan("1f1b")
    seen = _window(plan, slow={}, noise=0.01)
    for step in range(WINDOW):
        seen.own[step, seen.data == step % 4] *= 1.4
    assert not slow_ranks(seen)
    (cause,) = _of_samples(_replay(plan, seen), seen, 1.0, set())
    assert cause.kind == "uneven samples" and "1.4 times" in cause.words.replace("1.40", "1.4").replace("1.39", "1.4").replace(
        "1.41", "1.4"
    )
    calm = _window(plan, slow={}, noise=0.03)
    assert not list(_of_samples(_replay(plan, calm), calm, 1.0, set()))


PARTS = {"forward": 0.3, "backward": 0.6}


@pytest.mark.parametrize(
    ("part", "kind"),
    [("data", "data"), ("other", "pauses"), ("communication", "communication"), ("optimizer", ""), ("bubble", "")],
)
def test_a_part_of_a_step_that_is_too_long_is_named(part: str, kind: str, tmp_path: Path) -> None:
    short = dict.fromkeys(("data", "other", "communication", "optimizer", "bubble"), 0.02)
    for number, much in enumerate((0.02, 0.5)):
        parts = PARTS | short | {part: much}
        steps = [run_folder.step(at, seconds=sum(parts.values()), breakdown=parts) for at in range(1, 31)]
        found = panels.panel(_run(tmp_path / str(number), [run_folder.start(), *steps]), "what-if")["causes"]
        assert [one["kind"] for one in found] == ([kind] if kind and number else [])
        assert all(one["change"] and one["gain"] > 0.1 and one["seconds"] > 0.1 for one in found)


@pytest.mark.parametrize(("since", "seconds", "named"), [(100, 0.5, False), (100, 10.0, True), (2, 1.0, False), (0, 0.0, False)])
def test_garbage_collection_is_named(since: int, seconds: float, named: bool, tmp_path: Path) -> None:
    """A start has many collections. Logs of earlier versions have none."""
    steps = [run_folder.step(at, seconds=1.0, breakdown={"forward": 1.0}) for at in range(1, 31)]
    spans = events.Spans(30, [], collecting=seconds, since=since)
    found = panels.panel(_run(tmp_path, [run_folder.start(), *steps, spans]), "what-if")["causes"]
    assert [(one["kind"], pytest.approx(one["gain"])) for one in found] == ([("garbage collection", 0.1)] if named else [])


@pytest.mark.parametrize(("pause", "named"), [(0.1, False), (2.0, True)])
def test_saving_that_stops_the_training_is_named(pause: float, named: bool, tmp_path: Path) -> None:
    begun = run_folder.start()
    begun.spec["checkpoint"] = {"every": 10}
    steps = [run_folder.step(at, seconds=1.0, breakdown={"forward": 1.0}) for at in range(1, 31)]
    saves = [events.Checkpoint(at, "x", 1, 3.0, pause) for at in (10, 20, 30)]
    source = _run(tmp_path, [begun, *steps, *saves])
    found = panels.panel(source, "what-if")["causes"]
    assert [(one["kind"], pytest.approx(one["gain"])) for one in found] == ([("saving", 0.2)] if named else [])
    assert panels.panel(source, "speed")["now"]["saving"] == pytest.approx(pause / 10)


def test_a_node_whose_ranks_are_all_slow_is_named_and_no_rank(tmp_path: Path) -> None:
    plan, nodes = Plan(data=8, pipeline=2), 8
    own = np.full(16, 0.5)
    own[2:4] *= 1.3
    source = write_timed(tmp_path, plan, [own] * 30, nodes=nodes)
    assert np.flatnonzero(source.places()["node"] == 1).tolist() == [2, 3]
    kinds = [(one["kind"], one["node"], one["who"]) for one in panels.panel(source, "what-if")["causes"]]
    assert len(kinds) == 1 and kinds[0][:2] == ("slow node", 1) and set(kinds[0][2]) == {2, 3}


def test_a_cause_that_another_plan_remedies_says_what_the_planner_expects(tmp_path: Path) -> None:
    """The run's communication takes three times as long as predicted, so a plan without it gains three times the predicted
    seconds."""
    parts = {"forward": 0.2, "backward": 0.4, "communication": 0.3, "bubble": 0.1}
    source = _run(
        tmp_path, [run_folder.start(), *(run_folder.step(number, seconds=1.0, breakdown=parts) for number in range(1, 31))]
    )
    here = {"compute": 0.6, "communication": 0.1, "bubble": 0.1, "optimizer": 0.0, "other": 0.0}
    others = {"zero 3 -> 1": here | {"communication": 0.0}, "pipeline 2 -> 1": here | {"bubble": 0.0}, "tensor 1 -> 2": here}
    source.predicted = {"time": here | {"step": 0.8}, "others": others}
    found = panels.panel(source, "what-if")
    assert [(one["change"], pytest.approx(one["gain"])) for one in found["plans"]] == [
        ("zero 3 -> 1", 0.3),
        ("pipeline 2 -> 1", 0.1),
    ]
    (fabric,) = [one for one in found["causes"] if one["kind"] == "slow fabric"]
    assert fabric["change"].endswith("The planner expects 30.0 % shorter steps with zero 3 -> 1.")
    source.predicted = {"time": None}
    assert panels.panel(source, "what-if")["plans"] == []
    source.close()


def test_the_prediction_of_a_run_names_plans_that_differ_in_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITH_CACHE", "")
    spec = tiny_run(plan={"data": 2, "pipeline": 2}, train={"seq_len": 256, "global_batch": 16})
    found = predict.predicted(spec.model_copy(update={"cluster": "h100:4"}))
    assert found["time"] is not None and found["others"]
    for change, terms in found["others"].items():
        assert " -> " in change and terms.keys() == found["time"].keys() - {"step"}
    assert 'cluster = "local" names no device' in predict.predicted(spec)["why"]
