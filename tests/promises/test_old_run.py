"""A run of an early version (689ccd2) is read, reported, resumed, exported and imported: the names in its files have not changed.

tests/old_run holds its run file, text, prepared data, log, spec.json and two checkpoints, all written by that version. The model has
experts and multi-token prediction. `first.safetensors` holds its first weights, and `export.json` the sha256 of each exported tensor.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.folder import committed, of_run
from megalith.checkpoint.read import read_full
from megalith.data.inspection import inspect, verify
from megalith.data.prepare import prepare
from megalith.data.tokenizer import load
from megalith.events import Checkpoint, Holding, RunStarted, Step, Validation, of_kind, read
from megalith.models.stage import Stage
from megalith.report.summary import of_folder
from megalith.spec import files
from tests.commands.calling import call
from tests.models.plain import stage
from tests.patience import PATIENCE

OLD = Path(__file__).parents[1] / "old_run"
STEPS, SAVED = 4, 2


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the run and its data, and make their folder the current one, as the run file expects."""
    folder = tmp_path / "old"
    shutil.copytree(OLD, folder)
    monkeypatch.chdir(folder)
    return folder


def _newest(run: Path) -> Path:
    return committed(of_run(run))[0]


def test_its_prepared_data_is_what_the_same_text_gives_today(old: Path) -> None:
    verify("data")
    assert inspect("data", samples=0)["domains"].keys() == {"text"}
    prepare(["text.txt"], tokenizer=load("bytes"), out=Path("again"), validation=0.2)
    for name in ("train", "validation"):
        (before,), (now,) = sorted(Path("data").glob(f"*{name}*.bin")), sorted(Path("again").glob(f"*{name}*.bin"))
        assert before.read_bytes() == now.read_bytes()


def test_its_log_holds_what_it_held(old: Path) -> None:
    reader = read(Path("run"))
    found = list(reader)
    assert reader.skipped == 0 and not any(event.extra for event in found)
    kinds = (RunStarted, Step, Validation, Checkpoint, Holding)
    assert [len(list(of_kind(found, kind))) for kind in kinds] == [1, STEPS, 2, 2, 2]
    assert list(of_kind(found, Step))[-1].experts["max_load"] >= 1


def test_it_is_reported_as_a_finished_run(old: Path) -> None:
    found = of_folder(Path("run"))
    assert (found.state, found.step, found.ranks) == ("finished", STEPS, 2)
    assert found.loss is not None and found.validation_loss is not None and found.bits_per_byte is not None
    result = call("report", "run")
    assert result.exit_code == 0, result.output
    assert "<h1>old" in Path("run/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "saved"), [("old.toml", False), ("run/run.toml", True)])
def test_its_description_is_read_without_a_problem(file: str, saved: bool, old: Path) -> None:
    found = files.read(Path(file), saved=saved)
    assert found.problems == []
    ahead = found.whole().spec.model.build().head.ahead
    assert ahead is not None and ahead.depth == 1


def test_first_weights_are_drawn_from_the_same_names(old: Path) -> None:
    known = load_file("first.safetensors")
    made: Stage = stage(files.load("old.toml").spec.model, seed=files.load("old.toml").spec.train.seed)
    assert made.parameters_by_name().keys() == known.keys()
    assert any(name.startswith("head.ahead.0.block.mlp.experts") for name in known)
    for name, weight in made.parameters_by_name().items():
        torch.testing.assert_close(weight.detach(), known[name], atol=1e-6, rtol=1e-5, msg=name)


def test_it_is_resumed_and_trains_on_as_it_did(old: Path) -> None:
    """The older checkpoint resumed by this version ends in the newer one. Bits may depend on the processor and on torch."""
    expected = read_full(Path("run"))
    shutil.rmtree(_newest(Path("run")))
    command = [sys.executable, "-m", "megalith.cli", "resume", "run", "--set", "launch.start_timeout=600"]  # on a busy machine
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    starts = list(of_kind(read(Path("run")), RunStarted))
    assert [one.resumed_step for one in starts] == [0, SAVED]
    found = read_full(Path("run"))
    assert expected.keys() <= found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}\n{text}")


def test_its_weights_are_exported_with_the_same_bits_and_come_back(old: Path) -> None:
    assert call("export", "run", "--out", "exported").exit_code == 0
    tensors = dict[str, torch.Tensor]()
    for path in Path("exported").glob("*.safetensors"):
        tensors |= load_file(path)
    found = {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}
    assert found == json.loads(Path("export.json").read_text())
    assert call("import", "exported", "--out", "back").exit_code == 0
    weights, back = read_full(Path("run")), read_full(Path("back"))
    counts = "mlp.router.load"  # of the last step's tokens, which are no weights
    names = [name for name in weights if name.startswith("weights.") and not name.endswith(counts)]
    assert any("head.ahead.0" in name for name in names)
    assert all(torch.equal(back[name], weights[name]) for name in names)
