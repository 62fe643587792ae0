"""`megalith coordcheck`: tables, a picture, and JSON."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megalith.cli import app

RUN = """
[model]
preset = "tiny"
layers = 2
[data]
path = "nowhere"
[train]
steps = 10
global_batch = 8
seq_len = 64
[optimizer]
lr = 1e-3
warmup = 0
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    (tmp_path / "run.toml").write_text(RUN)
    return str(tmp_path / "run.toml")


@pytest.mark.slow
def test_it_says_what_is_flat(run: str, tmp_path: Path) -> None:
    asked = ["coordcheck", run, "--widths", "32,64,128,256", "--depths", "0", "--steps", "2"]
    found = CliRunner().invoke(app, [*asked, "--draw", str(tmp_path / "check.svg")])
    assert found.exit_code == 0, found.output
    assert "mup: root mean square by width" in found.output and "grows" in found.output and "flat" in found.output
    assert (tmp_path / "check.svg").read_text().count("<polyline") + (tmp_path / "check.svg").read_text().count("<path") > 4
    found = CliRunner().invoke(
        app, [*asked, "--json", "--set", "model.parametrization=mup", "--set", "model.base_dim=32", "--limit", "0"]
    )
    read = json.loads(found.stdout)
    assert found.exit_code == 1 and not read["ok"], "asked to be exactly flat"
    assert [(one["parametrization"], one["axis"], len(one["series"])) for one in read["checked"]] == [
        ("standard", "width", 8),
        ("mup", "width", 8),
    ]


@pytest.mark.parametrize(
    ("widths", "said"), [("64", "at least two sizes"), ("64,x", "not a list of whole numbers"), ("64,72", "use multiples of 16")]
)
def test_sizes_that_cannot_be_compared(run: str, widths: str, said: str) -> None:
    found = CliRunner().invoke(app, ["coordcheck", run, "--widths", widths, "--depths", "0"])
    text = " ".join((found.output + str(found.exception or "")).replace("│", " ").split())
    assert found.exit_code != 0 and said in text
