"""Sites that are killed, cut off and slowed end with the bits of a replay of their recorded merges, or of an undisturbed run if the faults
changed no merge."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.full import only_full, sampled
from tests.patience import PATIENCE
from tests.runs import prepare_text

RECIPE = Path(__file__).parents[2] / "recipes/cpu-sites-campaign.toml"
TWO = ("sites.count=2", "sites.decides=0")
SLOW = "launch.start_timeout=900"
"""A machine that does much else imports torch for minutes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _campaign(data: Path, out: Path, *settings: str, faults: int, kinds: tuple[str, ...] = (), seed: int = 1) -> dict[str, Any]:
    """Run the command, and return what it prints for programs."""
    words = [word for setting in (f"data.path={data}", SLOW, *settings) for word in ("--set", setting)]
    words += [word for kind in kinds for word in ("--kind", kind)]
    command = [sys.executable, "-m", "megalith.cli", "campaign", str(RECIPE), "--faults", str(faults), "--seed", str(seed)]
    done = subprocess.run([*command, "--out", str(out), "--json", *words], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["ok"] == (done.returncode == 0)
    return found


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE)
@sampled(1, together=True)
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (TWO, ("kill", "cut", "torn")),
        pytest.param((*TWO, "sites.staleness=1"), ("kill", "slow"), marks=only_full),
        pytest.param((), ("kill", "cut", "loss", "slow", "torn"), marks=only_full),
    ],
)
def test_sites_that_come_and_go_end_with_the_bits_of_their_replay(
    settings: tuple[str, ...], kinds: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    """The others go on without a site that is killed or cut off, whichever it is, and it comes back."""
    found = _campaign(data, tmp_path / "out", *settings, faults=len(kinds), kinds=kinds)
    assert found["ok"], found["problems"]
    assert (found["law"], found["same_end"], found["lost"], found["doubled"]) == ("replay", True, 0, 0)
    rows = {row["kind"]: row for row in found["rows"]}
    assert rows.keys() == {*kinds} and rows["kill"]["without"] == 1, "the others went on without the killed site"
    assert found["handled"] == found["injected"] == len(kinds)


@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE)
@sampled(1, together=True)
def test_faults_that_change_no_merge_leave_the_bits_of_the_undisturbed_run(data: Path, tmp_path: Path) -> None:
    """The others wait for a site for longer than a fault lasts."""
    kinds = ("torn", "loss", "slow")
    found = _campaign(data, tmp_path / "out", *TWO, "sites.grace=300.0", faults=3, kinds=kinds)
    assert found["ok"], found["problems"]
    assert (found["law"], found["same_end"]) == ("undisturbed", True)
    assert not any(row["without"] for row in found["rows"])
