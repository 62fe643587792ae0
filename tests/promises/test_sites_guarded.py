"""Faults that a site's own guards find, and its own spare: the site goes back and returns, and the other site is not disturbed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megalith.events import Incident, Merge, Recovery, RunStarted, of_kind, read
from megalith.fleet import injection
from megalith.fleet.injection import Injection
from megalith.spec import files
from megalith.spec.phases import Phases
from megalith.spec.sites import at_site, folder_of
from megalith.train.sites.record import merged_samples, recorded
from tests.full import sampled
from tests.keys import GIVEN
from tests.patience import PATIENCE
from tests.runs import final_state, prepare_text

STEPS, HURT = 16, 1
RUN = """
[model]
layers = 2
dim = 32
heads = 4
ffn = 48
vocab = 264
context = 64
[data]
path = "{data}"
[sites]
inner_steps = 4
fragments = 2
overlap = 1
bits = 4
[[sites.each]]
share = 1
plan = {{}}
[[sites.each]]
share = 3
plan = {{ data = {data_ranks} }}
[train]
steps = {steps}
global_batch = 12
seq_len = 32
precision = "fp32"
[optimizer]
warmup = 2
[checkpoint]
every = 3
[launch]
threads = 1
start_timeout = 900
[fleet]
check = "return"
"""
WRONG = Injection(0, "gradient", 7, "gradients", (1,), place=0.5)
FLIPPED = Injection(0, "weight", 7, "resting", (0,), place=0.5)
SPARE = ("fleet.nodes=3", "fleet.spares=1", "fleet.verify_every=1", "fleet.verify=all")


def _command(file: Path, run_dir: Path, site: int, settings: tuple[str, ...], faults: Path | None) -> "subprocess.Popen[str]":
    """Start the command of one site."""
    words = [word for setting in (f"sites.site={site}", *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "megalith.cli", "train", str(file), "--run-dir", str(folder_of(run_dir, site)), *words]
    hurt = {injection.VARIABLE: str(faults)} if faults else {}
    environment = os.environ | GIVEN | hurt
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE)
@sampled(1)
@pytest.mark.parametrize(
    ("fault", "settings", "found"),
    [(FLIPPED, (), "state_corrupt"), (WRONG, SPARE, "gradient_wrong")],
    ids=["a bit of a weight", "a gradient, with a spare"],
)
def test_a_finding_in_one_site_acts_in_that_site_only(
    fault: Injection, settings: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    ranks = 3 if settings else 1
    file, run_dir = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(RUN.format(data=prepare_text(tmp_path), data_ranks=ranks, steps=STEPS))
    injection.save(tmp_path / "faults.json", [fault])
    run_dir.mkdir()
    commands = [
        _command(file, run_dir, 0, (), None),
        _command(file, run_dir, HURT, settings, tmp_path / "faults.json"),
    ]
    said = [command.communicate()[0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], said

    folders = [folder_of(run_dir, site) for site in (0, HURT)]
    other, hurt = ([*read(folder)] for folder in folders)
    assert not [*of_kind(other, Incident)] and len([*of_kind(other, RunStarted)]) == 1, "nothing happened to the other site"
    (incident,) = of_kind(hurt, Incident)
    assert incident.cause == found and incident.rank in (*fault.ranks, None)
    assert len([*of_kind(hurt, RunStarted)]) == 2 and len([*of_kind(hurt, Recovery)]) == 1
    replaced = [order for order in incident.commands if order["kind"] == "replace"]
    assert [(order["slot"], order["spare"]) for order in replaced] == ([(1, "3")] if settings else [])
    left = {site for one in of_kind(other, Merge) for site in one.left}
    joined = {site for one in of_kind(other, Merge) for site in one.joined}
    assert left == joined == {HURT}
    _assert_whole(file, folders)


def _assert_whole(file: Path, folders: list[Path]) -> None:
    """Check that every sample was merged once, that both sites end with the same weights, and that a replay has their bits."""
    spec, made = files.load(file).spec, recorded(folders)
    merged = Counter(merged_samples(at_site(spec), [made[number] for number in sorted(made)]))
    assert merged == Counter(range(Phases.of(spec).after(0, spec.train.steps)))
    ends = [{name: each for name, each in final_state(folder).items() if name.startswith("weights.")} for folder in folders]
    assert ends[0].keys() == ends[1].keys() and all(each.equal(ends[1][name]) for name, each in ends[0].items())
    command = [
        sys.executable,
        "-m",
        "megalith.cli",
        "replay",
        *map(str, folders),
        "--out",
        str(folders[0].parent / "again"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["ok"], (answer, done.stderr)
