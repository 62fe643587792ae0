"""Settings of `megalith simulate` on the command line: each reaches the simulation, and all mistakes are reported at once."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.rehearse.latencies import PROFILES
from megalith.rehearse.prepare import WITHOUT_EFFECT, PreparedSimulation, SimulationRequest, prepare
from megalith.spec import files
from megalith.spec.fleet import FleetSpec
from megalith.spec.simulation import LatencySpec, SimulationSpec
from megalith.spec.sizes import model_parameters

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "tests/rehearse/campaign"
OUTAGES = ROOT / "clusters/h100-16k-outages.toml"
RUN = """
name = "large"
cluster = "h100"
model.preset = "llama3.1-8b"
data.path = "data"
plan = { data = 64, zero = 1 }
train = { steps = 100, global_batch = 64, seq_len = 128 }
checkpoint.every = 60
fleet = { spares = 3, memory_every = 5, buddy = "next" }
"""


def _simulated(*arguments: str, days: float = 5) -> dict[str, Any]:
    """Return the JSON output."""
    result = CliRunner().invoke(app, ["simulate", *arguments, "--days", f"{days:g}", "--seeds", "1", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _on_64(*arguments: str, days: float = 5) -> dict[str, Any]:
    return _simulated("--cluster", "h100:64", *arguments, days=days)


def _mistakes(*arguments: str) -> dict[str, str]:
    """Return key -> reason and way out."""
    result = CliRunner().invoke(app, ["simulate", *arguments, "--json"])
    assert result.exit_code == 2, result.output
    return {one["key"]: f"{one['reason']}. {one['way_out']}" for one in json.loads(result.stdout)["problems"]}


def _at(found: Any, path: str) -> Any:
    for name in path.split("/"):
        found = found[name]
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


@pytest.mark.parametrize(
    ("arguments", "where", "value"),
    [
        (["--spares", "5"], "fleet/spares", 5),
        (["--checkpoint-every", "10"], "store_every", 600.0),
        (["--profile", "cold"], "latencies/restart", 600.0),
        (["--sites", "4"], "nodes", 2),
        (["--set", "sites=4"], "sites", 4),
        (["--set", "sites=2", "--set", "merge_every=60"], "merge_every", 60.0),
        (["--set", "sites=2", "--set", "merge_every=60"], "grace", 60.0),
        (["--set", "sites=2", "--set", "merge_seconds=30"], "merge_seconds", 30.0),
        (["--set", "sites=2", "--set", "return_seconds=7"], "return_seconds", 7.0),
        (["--set", "sites=2", "--set", "grace=9"], "grace", 9.0),
        (["--set", "sites=2", "--set", "patience=11"], "patience", 11.0),
        (["--set", "sites=2", "--set", "decides=1"], "decides", 1),
        (["--set", "planned=0.87"], "planned", 0.87),
        (["--set", "step_seconds=7"], "step_seconds", 7.0),
        (["--set", "interruptions=1e-3"], "faults", 8e-3),
        (["--set", "state_bytes=1e12", "--set", "storage=1e10"], "latencies/restore/store", 100.0),
        (["--set", "state_bytes=6.4e12"], "latencies/restore/buddy", 2.0),
        (["--set", "fleet.verify_every=100"], "fleet/verify_every", 100),
        (["--set", "fleet.no_spare=shrink"], "fleet/no_spare", "shrink"),
        (["--set", "reliability.rack_nodes=4"], "reliability/rack_nodes", 4),
        (["--set", "latencies.hang=123"], "latencies/hang", 123.0),
        (["--set", "latencies.restore.disk=77"], "latencies/restore/disk", 77.0),
    ],
)
def test_a_setting_reaches_what_is_played(arguments: list[str], where: str, value: Any) -> None:
    assert _at(_on_64(*arguments, days=1)["scenario"], where) == pytest.approx(value)
    assert _at(_on_64(days=1)["scenario"], where) != value


def test_planned_stops_take_time() -> None:
    assert _on_64("--set", "planned=2")["seconds"]["planned"] > 0 == _on_64()["seconds"]["planned"]


def test_merges_take_time_between_sites() -> None:
    rounds = ("--sites", "2", "--set", "merge_every=100", "--set", "merge_seconds=100", "--set", "interruptions=0")
    assert 0.4 < _on_64(*rounds)["goodput"] < 0.5


def test_a_runs_own_sites_are_played(tmp_path: Path) -> None:
    """The run file has the sites' number, steps, grace and link. A site that was away gets 8 bytes a parameter over the link."""
    run = tmp_path / "run.toml"
    run.write_text(
        'model.preset = "tiny"\ndata.path = "unused"\n[train]\nsteps = 100\nglobal_batch = 32\nseq_len = 128\n[sites]\ncount = 2\n'
        "inner_steps = 20\nfragments = 4\noverlap = 0\nbits = 32\ngrace = 33\ndecides = 1\n[sites.link]\nmegabits = 10\n"
        "milliseconds = 100\n"
    )
    plan = _prepared_of(run, "step_seconds=3").scenario
    assert (plan.sites, plan.merge_every, plan.grace, plan.decides) == (2, 15.0, 33.0, 1)
    size = sum(prod(each.shape) for each in model_parameters(files.load(run).spec.model.build()).values())
    assert plan.return_seconds == pytest.approx(8 * size * 8 / 10e6) and plan.merge_seconds > 0.1
    assert _prepared_of(run, "step_seconds=3", "sites.inner_steps=8").scenario.merge_every == 6.0
    assert _prepared_of(run, "step_seconds=3", "merge_every=7").scenario.merge_every == 7.0
    assert _prepared_of(run, "step_seconds=3", "sites=1").scenario.sites == 1


def test_a_run_file_names_the_cluster_of_one_site(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    sites = "[sites]\ncount = 2\ndecides = 1\n"
    run.write_text(f"{RUN.replace('data = 64', 'data = 16').strip()}\n{sites}")
    of = lambda **given: prepare(SimulationRequest(run=run, overrides=("step_seconds=3",), **given)).scenario  # noqa: E731
    assert (of().nodes, of().sites) == (2, 2) and of(options={"sites": 4}).nodes == 2, "nodes of a site"
    assert of(cluster="h100:64").nodes == 4, "a cluster on the command line is that of all sites"
    run.write_text(run.read_text().replace("decides = 1", "decides = 3").replace("count = 2", "count = 4"))
    assert "Name one with" in _mistakes(str(run), "--sites", "2", "--set", "step_seconds=3")["decides"]
    both = '[[sites.each]]\ncluster = "h100:16"\n[[sites.each]]\ncluster = "a100:16"\n'
    run.write_text(run.read_text().partition("[sites]")[0] + "[sites]\ncount = 2\n" + both)
    assert "a100:16, h100:16" in _mistakes(str(run), "--set", "step_seconds=3")["sites.each"]


LINKED = """
model.preset = "tiny"
data.path = "data"
plan = { data = 64, zero = 3 }
train = { steps = 10000, global_batch = 384, seq_len = 256 }
sites = { count = 3, link = { megabits = 0.125, milliseconds = 50 } }
"""


@pytest.mark.slow
def test_a_method_left_out_is_chosen_for_the_link_as_plan_does(tmp_path: Path) -> None:
    """DiLoCo with the default interval would compute for 9 % of the time."""
    run = tmp_path / "run.toml"
    run.write_text(LINKED)
    own, set_ = ("--cluster", "h100:192", "--set", "step_seconds=2"), ("bits=32", "inner_steps=30", "overlap=0", "fragments=1")
    found = _simulated(str(run), *own)
    assert found["goodput"] > 0.9 and found["link"]["proposed"]["use"] > 0.98 > found["link"]["across"]["use"]
    every = found["link"]["proposed"]["inner_steps"] / found["link"]["proposed"]["fragments"]
    assert found["scenario"]["merge_every"] == pytest.approx(2 * every) and found["link"]["gain"] > 2.9
    text = CliRunner().invoke(app, ["simulate", str(run), *own, "--seeds", "1", "--days", "1"]).stdout
    assert "method chosen for this link" in text and "3 sites process" in text
    kept = _simulated(str(run), *own, *(word for key in set_ for word in ("--set", f"sites.{key}")))
    assert kept["goodput"] < 0.2 and kept["link"]["proposed"] is None and kept["link"]["gain"] < 1
    fewer = _simulated(str(run), *own, "--sites", "2")["link"]
    assert fewer["across"]["sites"] == 2 and 2 * fewer["across"]["bytes"] == found["link"]["across"]["bytes"]


def test_a_link_that_is_fast_enough_for_gradients_is_simulated_with_merges(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(LINKED.replace("megabits = 0.125", "megabits = 1e9").replace("milliseconds = 50", "milliseconds = 0.01"))
    found = _prepared_of(run, "step_seconds=2").linked
    assert found is not None and found.chosen is not None and not found.chosen.exchanges_gradients


@pytest.mark.slow
def test_a_step_is_predicted_for_the_devices_of_one_site(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(LINKED)
    notes = _simulated(str(run), "--cluster", "h100:192", days=1)["notes"]
    assert not any("a step takes 10 s, assumed" in note for note in notes) and any("a step takes " in note for note in notes)


def _prepared_of(run: Path, *settings: str) -> PreparedSimulation:
    return prepare(SimulationRequest(cluster="h100:64", run=run, overrides=settings))


@pytest.mark.slow
def test_verification_finds_what_is_wrong_silently() -> None:
    often = ("--set", "interruptions=1e-2", "--spares", "8", "--set", "reliability.part_hours=1")
    blind, seeing = _on_64(*often, days=60), _on_64(*often, "--set", "fleet.verify_every=50", days=60)
    assert blind["fates"]["were never noticed"] > 3 > seeing["fates"].get("were never noticed", 0)
    assert any("latencies.verify" in note for note in seeing["notes"])


def test_racks_break_where_the_shipped_cluster_says_so() -> None:
    """1,024 racks fail once in twenty years each, and nodes as in the plain file."""
    found = _simulated("--cluster", str(OUTAGES), days=20)
    assert 0 < found["causes"]["rack"] < 10
    assert not {"rack", "switch"} & set(_simulated("--cluster", str(OUTAGES).replace("-outages", ""), days=20)["causes"])
    own = found["scenario"]["reliability"]
    assert (own["lemon_share"], own["lemon_factor"]) == (0.01, 20.0)


@pytest.mark.slow
def test_switches_take_their_racks_along() -> None:
    """In a year there are 0.05 outages for each of 1,024 racks, and those of 6 switches."""
    quiet = ("--cluster", str(OUTAGES), "--set", "interruptions=1e-7")
    found = _simulated(*quiet, days=365)
    stormy = _simulated(*quiet, "--set", "reliability.switch_outages=5", days=365)
    assert 30 < found["causes"]["rack"] < 80
    assert stormy["causes"]["switch"] > 15 > found["causes"].get("switch", 0)
    assert stormy["goodput"] < found["goodput"]


def test_the_shipped_cluster_names_every_key_of_reliability() -> None:
    named = set(re.findall(r"^(\w+) = ", OUTAGES.read_text().partition("[reliability]")[2], re.MULTILINE))
    assert named == set(_on_64(days=1)["scenario"]["reliability"])


def test_lemon_nodes_are_taken_out_one_after_the_other() -> None:
    """The same number of faults is on few nodes. With few repairs, a node that is out stays out."""
    crowd = ("--set", "interruptions=2e-3", "--spares", "3", "--set", "reliability.part_hours=0.1")
    lemons = ("--set", "reliability.lemon_share=0.2", "--set", "reliability.lemon_factor=500")
    assert _on_64(*crowd, *lemons, days=20)["seeds"] != _on_64(*crowd, days=20)["seeds"]


def test_slow_repairs_cost_more_than_quick_ones() -> None:
    rough = ("--set", "interruptions=2e-3", "--spares", "1")
    quick, slow = (_on_64(*rough, "--set", f"reliability.part_hours={hours}", days=20)["goodput"] for hours in (0.5, 48))
    assert slow < quick - 0.1


def test_latencies_come_from_a_campaigns_log() -> None:
    found = _on_64("--latencies", str(CAMPAIGN), "--set", "latencies.check=60", days=1)["scenario"]["latencies"]
    assert found["restart"] == pytest.approx(0.3224, abs=1e-3)
    assert found["hang"] == pytest.approx(1.136, abs=1e-3)
    assert found["restore"]["disk"] == PROFILES["warm"].restore["disk"]  # nothing in the log was restored from a disk
    assert found["start"] == PROFILES["warm"].start
    assert found["check"] == 60.0
    assert found["source"].startswith("means of 25 incidents and 15 saves in ")
    assert _on_64("--latencies", str(CAMPAIGN / "faulted"), days=1)["scenario"]["latencies"]["restart"] == found["restart"]


def test_a_large_state_takes_its_time_at_the_clusters_rates_whatever_the_log_says() -> None:
    large = ("--latencies", str(CAMPAIGN), "--set", "state_bytes=1e12", "--set", "storage=1e10")
    found = _on_64(*large, days=1)["scenario"]["latencies"]
    assert (found["restore"]["store"], found["write"]) == (100.0, 100.0)
    assert found["hang"] == pytest.approx(1.136, abs=1e-3)


def test_a_campaign_is_played_with_the_latencies_of_another(tmp_path: Path) -> None:
    (tmp_path / "faulted").mkdir()
    lines = (CAMPAIGN / "faulted/events.jsonl").read_text().splitlines()
    steps = [line.replace('"seconds":', '"seconds":1') if '"type":"step"' in line else line for line in lines]
    (tmp_path / "faulted/events.jsonl").write_text("".join(f"{line}\n" for line in steps))
    own, other = (
        json.loads(CliRunner().invoke(app, ["simulate", "--campaign", str(CAMPAIGN), *more, "--json"]).stdout)["goodput"]
        for more in ([], ["--latencies", str(tmp_path)])
    )
    assert own != other


def test_a_run_file_gives_fleet_state_checkpoints_and_cluster(run: Path) -> None:
    found = _simulated(str(run), "--set", "storage=1e10", "--set", "step_seconds=4", days=1)
    plan = found["scenario"]
    assert (plan["nodes"], plan["fleet"]["spares"], plan["fleet"]["memory_every"], plan["fleet"]["buddy"]) == (8, 3, 5, "next")
    assert plan["store_every"] == 60 * 4
    assert plan["latencies"]["write"] * 1e10 == pytest.approx(12 * 8.03e9, rel=0.01)  # 8.03 billion parameters of 12 bytes
    assert "checkpoint.every = 60: a checkpoint every 4 minutes" in found["notes"]


def test_the_command_line_goes_before_the_run_file(run: Path) -> None:
    own = ("--set", "step_seconds=4", "--spares", "7", "--set", "fleet.memory_every=2", "--checkpoint-every", "5")
    plan = _simulated(str(run), "--cluster", "h100:128", *own, days=1)["scenario"]
    assert (plan["nodes"], plan["fleet"]["spares"], plan["fleet"]["memory_every"], plan["store_every"]) == (16, 7, 2, 300.0)


@pytest.mark.slow
def test_a_step_of_a_run_is_predicted_where_its_plan_uses_the_cluster(run: Path) -> None:
    assert _simulated(str(run), days=1)["scenario"]["step_seconds"] not in (0.0, 10.0)
    notes = _simulated(str(run), "--cluster", "h100:128", days=1)["notes"]
    assert any("a step takes 10 s, assumed" in note for note in notes)


def test_a_sweep_names_the_best_for_programs() -> None:
    found = _on_64("--sweep", "intervals", "--profile", "cold", "--set", "fleet.memory_every=0")
    assert found["best"] == max(found["tried"], key=lambda one: one["goodput"])


def test_every_mistake_is_said_at_once(tmp_path: Path) -> None:
    wrong = [
        "days=0", "grace=7", "storage=1e9", "reliability.faults=llama", "fleet.hang_floor=3", "fleet.verify_evry=3", "nothing",
        "latencies.restor=1", "spare=2",
    ]  # fmt: skip
    settings = [word for one in wrong for word in ("--set", one)]
    found = _mistakes("--cluster", "h10:64", "--latencies", str(tmp_path), *settings)
    said = {
        "days": "it must be more than 0", "grace": "Use --sites 2", "storage": "state_bytes=BYTES", "cluster": "Did you mean 'h100'",
        "fleet.hang_floor": "Use latencies.hang", "fleet.verify_evry": "fleet.verify_every", "--latencies": "megalith campaign",
        "latencies.restor": "Did you mean latencies.restore", "--set nothing": "a value are needed",
        "spare": "Did you mean fleet.spares",
    }  # fmt: skip
    assert set(said) <= set(found), found
    assert all(words in found[key] for key, words in said.items()), found
    assert "Did you mean 'llama3'" in _mistakes("--cluster", "h100:64", "--set", "reliability.faults=llama")["reliability.faults"]
    assert "Use 1 to 8" in _mistakes("--cluster", "h100:64", "--sites", "9")["sites"]


@pytest.mark.parametrize(
    "setting", ["interruptions=1e9", "planned=1e9", "reliability.rack_outages=1e9", "reliability.switch_outages=1e9", "days=1e9"]
)
def test_more_than_can_be_played_is_a_problem_and_no_traceback(setting: str) -> None:
    (problem,) = _mistakes("--cluster", "h100:1024", "--set", setting).values()
    assert re.search(r"one every \S+ seconds: too many to simulate\. Use at most \S+, or fewer days", problem)


def test_more_nodes_than_memory_holds_are_a_problem() -> None:
    assert "Use at most 8,000,000 devices" in _mistakes("--cluster", "h100:99999999999")["--cluster"]
    assert "Use at most 1,000,000" in _mistakes("--cluster", "h100:64", "--spares", "99999999999")["fleet.spares"]


def test_a_run_files_mistakes_are_among_them(run: Path) -> None:
    run.write_text(RUN.replace("h100", "local") + "[optimizer]\nwarmpu = 3\n")
    assert {"optimizer.warmpu", "sites"} <= set(_mistakes(str(run), "--sites", "0"))
    run.write_text(RUN.replace("h100", "local"))
    assert "--cluster h100:16384" in _mistakes(str(run))["--cluster"]


def test_every_key_of_fleet_matters_or_is_refused() -> None:
    sources = [
        *(ROOT / "megalith/control/policy").glob("*.py"),
        *(ROOT / "megalith/rehearse" / name for name in ("simulate.py", "site.py")),
    ]
    read = "".join(path.read_text() for path in sources)
    used = set(re.findall(r"fleet\.(\w+)", read)) | {"memory_every", "buddy", "disk_every"}  # set by tiers and buddy_distance
    assert set(FleetSpec.model_fields) - used == set(WITHOUT_EFFECT)


def test_every_key_is_in_the_manual() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    assert [key for key in (*SimulationSpec.model_fields, *LatencySpec.model_fields) if f"`{key}" not in page] == []
