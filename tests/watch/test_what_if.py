"""Answers to what-if questions agree with the simulation of a step that was made slow in a known way."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.mesh import Mesh
from megalith.schedule import SCHEDULES
from megalith.spec.plan import Plan
from megalith.watch import panels
from megalith.watch.what_if import KINDS
from tests.watch.timed import step_seconds, write_timed

STEPS, SLOW, NODES = 25, 1.3, 8
WELL = {"forward": 0.2, "backward": 0.4, "optimizer": 0.02}


def _plan(schedule: str) -> Plan:
    return Plan(data=2, pipeline=4, schedule=schedule, chunks=SCHEDULES[schedule].chunks.usual)


def _kinds(plan: Plan) -> dict[str, np.ndarray]:
    return {kind: np.full(plan.ranks, seconds) for kind, seconds in WELL.items()}


def _own(kinds: dict[str, np.ndarray]) -> np.ndarray:
    return np.sum([*kinds.values()], axis=0)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("what", "which"), [("rank", 5), ("node", 3), ("data", 1), ("stage", 2)])
def test_without_what_is_slow_a_step_takes_as_long_as_a_simulated_one(
    what: str, which: int, schedule: str, tmp_path: Path
) -> None:
    plan = _plan(schedule)
    mesh, kinds = Mesh.of(plan), _kinds(plan)
    calm = step_seconds(plan, _own(kinds))
    places = {"rank": range(8), "node": range(8)}
    for name, axis in (("data", "data"), ("stage", "pipeline")):
        places[name] = [mesh.coordinates(rank)[axis] for rank in range(8)]
    slow = {kind: seconds * np.where(np.array(places[what]) == which, SLOW, 1.0) for kind, seconds in kinds.items()}
    source = write_timed(tmp_path, plan, [slow] * STEPS, nodes=NODES)
    (answer,) = panels.panel(source, "what-if", {what: str(which)})["without"]
    whole = step_seconds(plan, _own(slow))
    assert 1 / (1 - answer["gain"]) == pytest.approx(whole / calm, rel=0.02) and whole / calm > 1.05
    assert answer["seconds"] == pytest.approx(whole - calm, rel=0.15)
    assert f" {which} " in answer["words"] and " % less time." in answer["words"]
    if what != "data":  # half of all ranks: none is called slow
        first = panels.panel(source, "what-if")["without"][0]
        assert first["gain"] >= answer["gain"] - 1e-9, "the list begins with the largest gain"
    other = {"rank": 0, "node": 1, "data": 0, "stage": 1}[what]
    (nothing,) = panels.panel(source, "what-if", {what: str(other)})["without"]
    assert nothing["gain"] < 0.005


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_computation_that_is_slow_on_one_rank(kind: str, tmp_path: Path) -> None:
    plan = _plan("1f1b")
    kinds = _kinds(plan)
    kinds[kind][6] += 0.2
    source = write_timed(tmp_path, plan, [kinds] * STEPS)
    expected = step_seconds(plan, _own(kinds)) / step_seconds(plan, _own(_kinds(plan)))
    for one in KINDS:
        (answer,) = panels.panel(source, "what-if", {"kind": one})["without"]
        assert 1 / (1 - answer["gain"]) == pytest.approx(expected if one == kind else 1.0, rel=0.02)
    assert ("kind", kind) in [(one["what"], one["which"]) for one in panels.panel(source, "what-if")["without"]]


def test_a_run_in_which_nothing_is_slow_has_no_such_list(tmp_path: Path) -> None:
    plan = _plan("1f1b")
    assert panels.panel(write_timed(tmp_path, plan, [_kinds(plan)] * STEPS, noise=0.03), "what-if")["without"] == []


@pytest.mark.parametrize("asked", [{"rank": "99"}, {"rank": "x"}, {"node": "-1"}, {"kind": "everything"}, {"stage": "4"}])
def test_a_question_about_something_that_is_not_there_has_no_answer(asked: dict[str, str], tmp_path: Path) -> None:
    plan = _plan("1f1b")
    assert panels.panel(write_timed(tmp_path, plan, [_kinds(plan)] * STEPS), "what-if", asked)["without"] == []


@pytest.mark.slow
def test_the_command_asks_too(tmp_path: Path) -> None:
    plan = _plan("1f1b")
    kinds = _kinds(plan)
    kinds["backward"][3] *= SLOW
    write_timed(tmp_path, plan, [kinds] * STEPS)
    found = CliRunner().invoke(app, ["watch", str(tmp_path), "--json", "what-if", "--ask", "rank=3"])
    (answer,) = json.loads(found.output)["without"]
    assert answer["words"].startswith("If rank 3 were as fast as the others, a step would take ") and answer["gain"] > 0.05
