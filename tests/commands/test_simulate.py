"""Simulations of long runs, as they are asked for and printed."""

import json
from pathlib import Path

import pytest

from megalith.commands.simulate import prepare, sweep, sweep_values
from megalith.rehearse.latencies import PROFILES
from megalith.rehearse.prepare import Wanted
from megalith.rehearse.simulate import simulate
from tests.commands.calling import call


def test_every_profile_of_latencies_can_be_simulated():
    for profile in PROFILES:
        plan = prepare(Wanted("h100:16", options={"days": 1, "profile": profile})).scenario
        assert simulate(plan, seeds=1).scenario.latencies.source == PROFILES[profile].source


def test_a_sweep_tries_the_given_value_among_others():
    calls: list[int] = []
    plan = prepare(Wanted("h100:64", options={"days": 1, "fleet.spares": 3})).scenario
    found = sweep(plan, "spares", seeds=2, tick=lambda: calls.append(1))
    assert [one.value for one in found.tried] == sweep_values(plan, "spares") == [0, 1, 2, 3, 4]
    assert calls == [1] * 10


SIMULATE = ["simulate", "--cluster", "h100:64", "--days", "5", "--seeds", "2"]


def test_a_simulation_is_a_table_a_picture_and_json():
    result = call(*SIMULATE, "--out", "pictures/goodput.svg")
    assert result.exit_code == 0, result.output
    assert "8 nodes and 1 spare, a checkpoint every 30 minutes, 2 seeds" in result.stdout
    assert "useful" in result.stdout
    assert Path("pictures/goodput.svg").read_text().startswith("<svg xmlns")
    said = json.loads(call(*SIMULATE, "--json").stdout)
    assert sum(said["seconds"].values()) == pytest.approx(5 * 86_400)
    assert f"goodput {said['goodput']:.1%}" in result.stdout


def test_too_few_spares_are_said():
    assert (
        "0 spares are too few"
        in call("simulate", "--cluster", "h100:1024", "--days", "20", "--seeds", "1", "--spares", "0").stdout
    )


@pytest.mark.parametrize(("what", "best"), [("spares", "per_device"), ("intervals", "goodput")])
def test_a_sweep_marks_the_best(what: str, best: str):
    tried = json.loads(call(*SIMULATE, "--sweep", what, "--json").stdout)["tried"]
    shown = next(line for line in call(*SIMULATE, "--sweep", what, "--out", "s.svg").stdout.splitlines() if "best" in line)
    winner = max(tried, key=lambda one: one[best])["value"] / (60 if what == "intervals" else 1)
    assert shown.split()[1] == f"{winner:g}"
    assert Path("s.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "h10:16"], "Did you mean 'h100'?"),
        (["--cluster", "h100", "--days", "0"], "days = 0.0 command line it must be more than 0"),
        (["--cluster", "h100", "--checkpoint-every", "-5"], "checkpoint_every = -5.0 command line it must be more than 0"),
        (["--cluster", "h100", "--profile", "hot"], "it must be 'cold', 'warm' or 'memory'"),
        (["--campaign", "runs", "--days", "3", "--set", "planned=1"], "Leave out --set, --days, or --campaign."),
        (["--cluster", "h100", "--sweep", "spare"], "Use --sweep intervals or spares"),
        (["--cluster", "h100", "--out", "goodput.png"], "ends in .svg"),
        ([], "Give --cluster, a RUN.toml that names one, or --campaign to play one again."),
    ],
)
def test_mistakes_about_a_simulation_are_said_before_it_runs(arguments: list[str], said: str):
    result = call("simulate", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
