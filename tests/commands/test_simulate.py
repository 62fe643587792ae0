"""Options and output of simulations of long runs."""

import json
import re
from pathlib import Path

import pytest

from megalith.commands.simulate import prepare, sweep, sweep_values
from megalith.rehearse.latencies import PROFILES
from megalith.rehearse.prepare import SimulationRequest
from megalith.rehearse.simulate import simulate
from tests.commands.calling import call


def test_every_profile_of_latencies_can_be_simulated():
    for profile in PROFILES:
        plan = prepare(SimulationRequest("h100:16", options={"days": 1, "profile": profile})).scenario
        assert simulate(plan, seeds=1).scenario.latencies.source == PROFILES[profile].source


def test_a_sweep_tries_the_given_value_among_others():
    calls: list[int] = []
    plan = prepare(SimulationRequest("h100:64", options={"days": 1, "fleet.spares": 3})).scenario
    found = sweep(plan, "spares", seeds=2, tick=lambda: calls.append(1))
    assert [one.value for one in found.tried] == sweep_values(plan, "spares") == [0, 1, 2, 3, 4]
    assert calls == [1] * 10


SIMULATE = ["simulate", "--cluster", "h100:64", "--days", "5", "--seeds", "2"]


def test_a_simulation_is_a_table_a_picture_and_json():
    result = call(*SIMULATE, "--out", "pictures/goodput.svg")
    assert result.exit_code == 0, result.output
    assert "8 nodes and 1 spare, a checkpoint every 30 minutes, copies in memory and a buddy's memory, 2 seeds" in result.stdout
    assert "useful" in result.stdout
    assert Path("pictures/goodput.svg").read_text().startswith("<svg xmlns")
    said = json.loads(call(*SIMULATE, "--json").stdout)
    assert sum(said["seconds"].values()) == pytest.approx(5 * 86_400)
    assert f"goodput {said['goodput']:.1%}" in result.stdout


@pytest.mark.parametrize(
    ("days", "arguments"),
    [
        (1.0, ["--cluster", "h100:64", "--set", "merge_every=200000"]),
        (0.005, ["--cluster", "h100:64"]),
        (2.0, ["--cluster", "h100:1024", "--set", "interruptions=0.05"]),
    ],
)
def test_sites_that_never_merge_do_no_useful_work(days: float, arguments: list[str]):
    result = call("simulate", *arguments, "--sites", "2", "--days", str(days), "--seeds", "1", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["goodput"] == 0
    assert sum(said["seconds"].values()) == pytest.approx(days * 86_400)


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
    assert shown.split()[1] == f"{winner:.3g}"
    assert f"best: {winner:.3g}" in Path("s.svg").read_text()


def test_young_and_daly_stand_beside_the_best_interval():
    asked = [*SIMULATE, "--profile", "cold", "--set", "fleet.memory_every=0", "--sweep", "intervals"]
    said = json.loads(call(*asked, "--json").stdout)
    hours = 1 / (64 * 419 / (54 * 24 * 16_384))  # hours between faults of 64 devices
    assert said["young"] == pytest.approx((2 * 30.0 * hours * 3600) ** 0.5)
    assert said["daly"] == pytest.approx(said["young"] - 2 / 3 * 30.0, rel=1e-2)
    assert {said["young"], said["daly"]} < {one["value"] for one in said["tried"]}
    result = " ".join(call(*asked, "--out", "s.svg").stdout.split())
    for words in (
        f"Young {said['young'] / 60:.3g}",
        f"Daly {said['daly'] / 60:.3g}",
        f"the best simulated value is {said['best']['value'] / 60:.3g}",
    ):
        assert words in result
    picture = Path("s.svg").read_text()
    assert f"Young: {said['young'] / 60:.3g}" in picture
    assert f"Daly: {said['daly'] / 60:.3g}" in picture


def test_without_faults_there_is_no_formula():
    asked = [*SIMULATE, "--set", "interruptions=0", "--sweep", "intervals"]
    assert json.loads(call(*asked, "--json").stdout)["young"] is None
    assert "formulas give no interval" in call(*asked).stdout


def test_a_reader_can_add_the_counts_up():
    result = " ".join(call("simulate", "--cluster", "h100:16384", "--days", "9", "--seeds", "1", "--spares", "2").stdout.split())
    faults = re.search(r"([\d.,]+) faults = (.*?) (?=[\d.]+ restarts)", result)
    restarts = re.search(r"([\d.,]+) restarts = (.*?) (?=[\d.]+ stops)", result)
    assert faults and restarts
    for total, parts in (faults.groups(), restarts.groups()):
        assert float(total) == pytest.approx(sum(float(part) for part in re.findall(r"[\d.]+", parts)), abs=0.5)
    started = re.search(r"([\d.]+) restarted the ranks", result)
    assert started and f"{started[1]} for a fault" in result


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
        ([], "Give --cluster, a RUN.toml that names a cluster, or --campaign to replay a campaign."),
    ],
)
def test_mistakes_about_a_simulation_are_said_before_it_runs(arguments: list[str], said: str):
    result = call("simulate", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
