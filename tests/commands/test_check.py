"""Output of the check of a run."""

import json
from pathlib import Path

import pytest

from megalith import Run
from megalith.checkpoint import folder as checkpoints
from megalith.checkpoint.folder import Manifest
from megalith.machine import capacity
from megalith.spec import files
from tests.commands.calling import call


def test_a_valid_run_is_described():
    result = call("check", "run.toml", "--set", "plan.data=2")
    assert result.exit_code == 0
    assert (
        "first: no errors found: 2 ranks (data 2 x tensor 1 x pipeline 1), 32 microbatches a step, 8,192 tokens a step"
        in result.stdout
    )


def test_show_prints_every_value_and_its_origin():
    shown = call("check", "run.toml", "--show", "--set", "train.steps=9").stdout
    assert "# command line" in shown
    assert "# preset tiny" in shown
    assert "[optimizer]" in shown


@pytest.mark.parametrize("setting", ["plan.tensor=3", "plan.tensr=3"])
def test_check_speaks_json(setting: str):
    result = call("check", "run.toml", "--json", "--set", setting)
    said = json.loads(result.stdout)
    assert result.exit_code == 2
    assert said["ok"] is False
    assert {"severity", "key", "value", "reason", "way_out", "source"} == set(said["problems"][0])
    assert said["problems"][0]["source"] == "command line"


def test_check_says_the_whole_run_as_json():
    said = json.loads(call("check", "run.toml", "--json").stdout)
    assert said["ok"] is True
    assert said["spec"]["train"]["steps"] == 100
    assert said["provenance"]["model.dim"] == "preset tiny"


@pytest.mark.parametrize("named", [[], ["--run-dir", "there"]], ids=["default", "named"])
def test_check_reports_what_train_refuses_in_the_folder_of_a_run_that_has_begun(named: list[str]):
    where = Path(*named[1:] or ["runs/first"])
    files.save(files.load(Path("run.toml")), where)
    (where / "checkpoints/step-00000010").mkdir(parents=True)
    changed = ["run.toml", *named, "--set", "optimizer.lr=1"]
    checked, trained = call("check", *changed), call("train", *changed)
    assert checked.exit_code == trained.exit_code == 2, checked.output
    assert "optimizer.lr" in checked.stderr and checked.stderr == trained.stderr
    said = json.loads(call("check", *changed, "--json").stdout)
    assert (said["ok"], said["problems"][0]["key"]) == (False, "optimizer.lr")
    assert call("check", "run.toml", *named, "--set", "train.steps=200").exit_code == 0
    run = Run.load("run.toml", run_dir=where)
    assert [one.key for one in run.set({"optimizer.lr": 1}).check() if one.severity == "error"] == ["optimizer.lr"]


@pytest.mark.parametrize("setting", ["plan.zero=5", "plan.zeros=1", "optimizer.eps=-1", 'branch="x"'])
@pytest.mark.parametrize("own_file", [True, False], ids=["run file", "checkpoints alone"])
def test_an_invalid_value_does_not_hide_what_a_resumed_run_may_not_change(own_file: bool, setting: str):
    """Nothing is said of the invalid value but that it is invalid, although the run in the folder has another one."""
    begun, where = files.load(Path("run.toml")), Path("runs/first")
    path = where / "checkpoints/step-00000010"
    path.mkdir(parents=True)
    if own_file:
        files.save(begun, where)
    else:
        checkpoints.write_manifest(path, Manifest(10, 10, {"spec": begun.spec.model_dump(mode="json")}, {}))
    changed = ["run.toml", "--set", setting, "--set", "optimizer.lr=1"]
    checked, trained = call("check", *changed), call("train", *changed)
    assert checked.exit_code == trained.exit_code == 2, checked.output
    assert checked.stderr == trained.stderr
    errors = [
        row["key"] for row in json.loads(call("check", *changed, "--json").stdout)["problems"] if row["severity"] == "error"
    ]
    assert errors == [setting.partition("=")[0], "optimizer.lr"]


def test_check_shows_which_parameters_are_updated_in_which_way():
    groups = 'optimizer.groups=[{pattern="*.mlp.*", kind="lion", lr=0.1}, {pattern="*norm*", weight_decay=0.5}]'
    shown = call("check", "run.toml", "--set", "optimizer.kind=muon", "--set", groups).stdout
    table = [line.split() for line in shown.splitlines() if line.startswith(("*", "others"))]
    assert [row[:5] for row in table] == [
        ["*.mlp.*", "lion", "x", "0.1", "0.1"],
        ["*norm*", "adamw", "x", "1", "0.5"],
        ["others", "adamw", "x", "1", "0.1"],
        ["others", "muon", "x", "1", "0.1"],
    ]
    said = json.loads(call("check", "run.toml", "--json", "--set", "optimizer.kind=muon").stdout)
    assert {row["kind"] for row in said["updated"]} == {"muon", "adamw"}
    assert "blocks.0.attention.q.weight" in next(row["parameters"] for row in said["updated"] if row["kind"] == "muon")


HOST, RARELY = {"plan.state.optimizer": "host"}, {"plan.state.optimizer": "host", "fleet.memory_every": "8"}
DISK, NARROW = {"plan.state.optimizer": "disk"}, {"plan.microbatch": "64", "train.precision": "bf16"}
AHEAD = "then runs while the next forward computes; an update before the norm would need"
WAYS = [
    ({}, ""),
    (HOST, "ends before the next step begins, because fleet.memory_every = 1 copies the state"),
    (RARELY, f"{AHEAD} copies of 12 bytes a parameter to undo it"),
    (RARELY | {"optimizer.kind": "lion"}, f"{AHEAD} copies of 8 bytes"),
    (DISK, f"{AHEAD} the slots on disk that are not in use"),
    (HOST | {"optimizer.kind": "muon"}, 'ends before the next step begins, because optimizer.kind = "muon" needs all parts'),
    ({"plan.post_validation": "true"}, "validated in the next step; copies of 12 bytes a parameter undo a wrong update"),
    (DISK | NARROW | {"plan.state.release": "true"}, "before the norm is known; the slots on disk that are not in use undo it"),
    (HOST | {"optimizer.clip": "0"}, ""),
]


@pytest.mark.parametrize(("settings", "said"), WAYS, ids=str)
def test_check_says_in_which_exact_way_a_run_clips_and_why(settings: dict[str, str], said: str):
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    result = call("check", "run.toml", *given)
    assert result.exit_code == 0, result.output
    assert ("clipping: " in result.stdout) == bool(said) and said in result.stdout
    found = json.loads(call("check", "run.toml", "--json", *given).stdout)["clipping"]
    assert said in found and bool(found) == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "key"), [("model.preset=llama3-70b", "model.name"), ("train.device=cuda", "train.device")])
def test_what_this_machine_lacks_is_advice_and_an_error_for_a_run_here(setting: str, key: str, monkeypatch: pytest.MonkeyPatch):
    """C8: users check run files for clusters on laptops."""
    monkeypatch.setattr(capacity, "measure", lambda: capacity.Machine(2, 23 * 2.0**30))
    for flags, status in (([], 0), (["--here"], 2)):
        result = call("check", "run.toml", "--json", "--set", setting, *flags)
        said = json.loads(result.stdout)
        assert (result.exit_code, said["ok"]) == (status, not status)
        (problem,) = [one for one in said["problems"] if "this machine" in one["reason"]]
        assert (problem["key"], problem["severity"]) == (key, "error" if flags else "advice")


def test_what_is_wrong_with_the_run_and_with_the_machine_is_said_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "measure", lambda: capacity.Machine(2, 23 * 2.0**30))
    settings = ["plan.tensor=3", "train.device=cuda", "plan.zero=5", "model.vocab=900"]
    result = call("check", "run.toml", "--json", *(word for setting in settings for word in ("--set", setting)))
    said = json.loads(result.stdout)["problems"]
    assert {"plan.tensor", "plan.zero", "model.vocab", "train.device"} <= {one["key"] for one in said}


def test_what_products_in_8_bits_gain_each_layer_is_shown_without_torch() -> None:
    """Wide layers of 8B on one H100: keys lose, the MLP gains. A run that multiplies so is advised about them without being asked."""
    sizes = ["model.preset=llama3.1-8b", "model.layers=4", "train.seq_len=8192", "train.global_batch=1", "cluster=h100:1"]
    flags = [word for setting in sizes for word in ("--set", setting)]
    found = json.loads(call("check", "run.toml", "--json", "--fp8", *flags).stdout)
    gain = {row["name"]: row["gain"] for row in found["gains"]["layers"]}
    assert gain["attention.k"] < 1 < gain["mlp.up"]
    assert found["gains"]["recipe"] == {"multiply": "codes", "wide": [f"*.{name}" for name, one in gain.items() if one <= 1]}
    shown = call("check", "run.toml", "--fp8", *flags).stdout
    assert "attention.k" in shown and 'multiply = "codes"' in shown and '[train]\nprecision = "fp8"\n\n[precision]\n' in shown
    few = call("check", "run.toml", "--fp8", *flags, "--set", "model.layers=2").stdout
    assert "all blocks stay wide" in few and "no layer gains" not in few

    codes = [*flags, "--set", "train.precision=fp8", "--set", "precision.multiply=codes"]
    said = json.loads(call("check", "run.toml", "--json", *codes).stdout)
    (advice,) = [one for one in said["problems"] if one["key"] == "precision.multiply"]
    assert advice["severity"] == "advice" and '"*.attention.k"' in advice["way_out"]
    assert "gains" not in said
    gaining = [f"*.{name}" for name, one in gain.items() if one > 1]
    said = json.loads(call("check", "run.toml", "--json", *codes, "--set", f"precision.wide={gaining}").stdout)
    (advice,) = [one for one in said["problems"] if one["key"] == "precision.multiply"]
    assert "every layer that is not in precision.wide slower" in advice["reason"] and '"*.attention.k"' in advice["way_out"]
    wide = f"precision.wide={found['gains']['recipe']['wide']}"
    said = json.loads(call("check", "run.toml", "--json", *codes, "--set", wide).stdout)
    assert not [one for one in said["problems"] if one["key"] == "precision.multiply"]


def test_a_device_without_products_in_8_bits_has_no_table_of_gains() -> None:
    for cluster in ("local", "a100-80gb:1"):
        result = call("check", "run.toml", "--fp8", "--set", f"cluster={cluster}")
        assert result.exit_code == 0 and "would only be emulated" in result.stdout
