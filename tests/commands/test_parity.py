"""Parity of a run's plan, and of plans drawn at random."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.commands import parity
from megalith.commands.shared.arguments import RunRequest
from megalith.control import supervisor
from megalith.control.outcome import Outcome
from megalith.fleet import environment
from megalith.fleet.environment import Place
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.problem import SpecErrors
from tests.commands.calling import call
from tests.full import sampled


def test_parity_needs_no_data(run: Path, monkeypatch: pytest.MonkeyPatch):
    found = {"equal": True, "rows": []}

    def start(job: supervisor.Job, *, tick: Any = None, **_: Any) -> Outcome:
        assert (job.entry, job.arguments["steps"], job.ranks) == ("megalith.prove.parity:main", 2, 4)
        Path(str(job.arguments["run_dir"]), "parity.json").write_text(json.dumps(found))
        return Outcome(ExitCode.FINISHED, False, None, (), (), (), 1.0)

    monkeypatch.setattr(supervisor, "run", start)
    assert parity.parity(RunRequest(run, ["data.path=nowhere"]), steps=2) == found


def test_parity_refuses_an_illegal_plan(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors, match=r"plan\.tensor"):
        parity.parity(RunRequest(run, ["plan.tensor=3"]))
    assert jobs == []


@sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "loss"), [("fp32", "loss, |difference|"), ("bf16", "loss, excess distance from fp32")])
def test_a_run_is_compared_in_its_precision(run: Path, precision: str, loss: str):
    """The command starts four ranks for the plan."""
    settings = [f"train.precision={precision}", "launch.start_timeout=600"]
    result = call("parity", str(run), *(part for one in settings for part in ("--set", one)), "--steps", "1", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["equal"], told["precision"]) == (0, True, precision), result.output
    assert any(row["quantity"].startswith(loss) for row in told["rows"]), told


def test_draws_are_all_equal_only_if_as_many_as_asked_for_are(monkeypatch: pytest.MonkeyPatch):
    outcomes = ["equal", "tie", "equal"]
    drawn = SimpleNamespace(name="dense; data 2 shards", choices=(("data", "2 shards"),), ranks=2)

    def prove_drawn(count: int, seed: int, *, starting: Any) -> Any:
        for outcome in outcomes:
            starting(drawn)
            yield SimpleNamespace(draw=drawn, outcome=outcome, rows=(), tokens_tied=0, error="")

    monkeypatch.setattr("megalith.prove.prove.prove_drawn", prove_drawn)
    heard: list[Any] = []
    found = parity.of_draws(2, seed=1, starting=lambda name, ranks: heard.append(ranks), ended=heard.append)
    assert found["equal"]
    assert found["outcomes"] == {"equal": 2, "tie": 1, "NOT equal": 0, "failed": 0}
    assert heard == [2, "equal", 2, "tie", 2, "equal"]
    assert not parity.of_draws(3, seed=1)["equal"]


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_parity_fails_on_a_gap(monkeypatch: pytest.MonkeyPatch, equal: bool, status: int):
    row = {"quantity": "loss", "gap": 0.25, "limit": 1e-5, "where": "step 1", "equal": equal}
    monkeypatch.setattr(
        parity, "parity", lambda request, **options: {"equal": equal, "precision": "bf16", "rows": [row], **options}
    )
    result = call("parity", "run.toml", "--steps", "2")
    assert result.exit_code == status
    assert ("equal in bf16: the plan changes nothing" in result.stdout) == equal
    assert ("NOT equal in bf16: the plan changes the result" in result.stdout) == (not equal)
    told = json.loads(call("parity", "run.toml", "--json", "--steps", "2").stdout)
    assert (told["steps"], told["precision"]) == (2, "bf16")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_of_the_ranks_that_torchrun_started_only_the_first_speaks(monkeypatch: pytest.MonkeyPatch, options: list[str]):
    monkeypatch.setattr(parity, "parity", lambda request, **_: {"equal": False, "precision": "fp32", "rows": []})
    for rank in range(2):
        monkeypatch.setattr(environment, "find", lambda rank=rank: Place(rank, 2, rank, 2, "torchrun", "tcp://localhost:1", "g"))
        result = call("parity", "run.toml", *options)
        assert result.exit_code == 1
        assert bool(result.output) == (rank == 0)


def proven(outcome: str, name: str = "dense; data 2 shards") -> dict[str, Any]:
    row = {"quantity": "loss", "gap": 0.25, "limit": 1e-5, "where": "step 1", "equal": outcome == "equal"}
    tokens, error = (3, "") if outcome == "tie" else (0, "Traceback\nrank 1 [broke]" if outcome == "failed" else "")
    return {"name": name, "ranks": 2, "outcome": outcome, "tokens_tied": tokens, "rows": [] if error else [row], "error": error}


@pytest.mark.parametrize(
    ("outcomes", "status", "said"),
    [
        (["equal", "equal"], 0, "equal: 2 combinations (seed 7, up to 2 ranks) give the same result as one process"),
        (["equal", "NOT equal"], 1, "NOT equal: 1 of 2 combinations"),
        (["equal", "failed"], 1, "rank 1 [broke]"),
        (["equal", "tie", "equal"], 0, "1 combination not counted"),
        (["equal", "tie"], 1, "not shown: only 1 combinations could be compared, but 2 were requested"),
    ],
    ids=str,
)
def test_draws_fail_on_a_gap_and_do_not_count_ties(monkeypatch: pytest.MonkeyPatch, outcomes: list[str], status: int, said: str):
    def of_draws(count: int, *, seed: int, starting: Any, ended: Any) -> dict[str, Any]:
        for outcome in outcomes:
            starting("dense", 2)
            ended(outcome)
        counts = {word: outcomes.count(word) for word in ("equal", "tie", "NOT equal", "failed")}
        return {
            "equal": counts["equal"] == count,
            "asked": count,
            "seed": seed,
            "outcomes": counts,
            "cases": [*map(proven, outcomes)],
        }

    monkeypatch.setattr(parity, "of_draws", of_draws)
    result = call("parity", "--random", "2", "--seed", "7")
    assert result.exit_code == status
    assert said in result.stdout
    assert "1/2  dense on 2 ranks: equal" in result.stderr
    assert json.loads(call("parity", "--random", "2", "--json").stdout)["ok"] == (status == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.toml", "--random", "2", "--steps", "1"], "does not use RUN.toml or --steps"),
        ([], "Name a run"),
        (["run.toml", "--seed", "2"], "--seed chooses the draws of --random"),
    ],
)
def test_parity_of_a_run_and_of_draws_do_not_mix(arguments: list[str], said: str):
    result = call("parity", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
