"""All problems of a run are found at once."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megalith import epochs
from megalith.commands.dryrun import dryrun
from megalith.commands.launch import launch
from megalith.commands.parity import parity
from megalith.commands.shared.arguments import RunRequest
from megalith.commands.shared.runs import _await, check
from megalith.commands.train import train
from megalith.spec import files
from megalith.spec.families.llama import Llama
from megalith.spec.fleet import FleetSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import SpecErrors
from megalith.spec.run import DataSpec, OptimizerSpec, TrainSpec
from tests.check.runs import is_small
from tests.commands.calling import RUN
from tests.specs import tiny_run

FOUR_KINDS = """
model.preset = "tini"
data.path = "nowhere"
train = { step = 100, global_batch = 65, seq_len = 128 }
plan = { data = 4, pipeline = 2 }
"""


def test_unknown_keys_misspelt_presets_values_that_do_not_divide_and_missing_files_are_said_at_once(run: Path):
    run.write_text(FOUR_KINDS)
    with pytest.raises(SpecErrors) as caught:
        check(RunRequest(run))
    found = {problem.key: problem.way_out for problem in caught.value.problems if problem.severity == "error"}
    assert list(found) == ["model.preset", "train.step", "train.global_batch", "data.path"]
    assert 'Did you mean "tiny"?' in found["model.preset"]
    assert (found["train.step"], found["train.global_batch"]) == ("Did you mean train.steps?", "Use 64 or 68.")


@pytest.mark.parametrize("look", [dryrun, parity, partial(launch, engine="local"), partial(train, console=Console(quiet=True))])
def test_every_command_that_reads_a_run_says_them_at_once(run: Path, look: Any):
    with pytest.raises(SpecErrors) as caught:
        look(RunRequest(run, ["train.sed=1", "plan.tensor=3"]))
    assert {"train.sed", "plan.tensor"} <= {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize("settings", [["plan.dat=2"], ["plan.extent=2"], ['plan.data="2"']])
def test_nothing_is_said_of_defaults_that_stand_for_what_is_faulty(run: Path, settings: list[str]):
    """The plan's other ranks will join later."""
    run.write_text(RUN)
    with pytest.raises(SpecErrors) as caught:
        check(RunRequest(run, settings), world=2)
    assert [problem.key for problem in caught.value.problems] == [settings[0].partition("=")[0]]


def test_the_disk_of_the_run_folder_counts_for_all_ranks(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run.write_text(RUN)
    (small := tmp_path / "small").mkdir()
    settings = ["plan.state.optimizer=disk", "plan.data=4", "plan.zero=0"]
    is_small(small, monkeypatch, free=1 << 20)
    for at, refused in ((small, True), (tmp_path, False)):
        found = check(RunRequest(run, settings, at / "run"), look=True).errors
        assert ("plan.state.folder" in [problem.key for problem in found]) == refused
    is_small(small, monkeypatch, free=40 << 20)
    assert check(RunRequest(run, settings, small / "run")).errors == []
    told = check(RunRequest(run, settings, small / "run"), here="error").errors
    assert "plan.state.folder" in [problem.key for problem in told]


FAULTS = [
    f"{table}.{name}={value}"
    for table, spec in (
        ("plan", Plan),
        ("train", TrainSpec),
        ("data", DataSpec),
        ("optimizer", OptimizerSpec),
        ("fleet", FleetSpec),
    )
    for name in spec.model_fields
    for value in ("{x=[]}", "-1")
] + [f"model.{name}=[]" for name in Llama.model_fields]


@pytest.mark.slow
def test_no_rule_fails_or_complains_for_want_of_a_value(run: Path):
    """A faulty value in an otherwise correct run is reported as its only problem."""
    for fault in FAULTS:
        with pytest.raises(SpecErrors) as caught:
            check(RunRequest(run, [fault]))
        assert [p.key for p in caught.value.problems if not p.key.startswith(fault.partition("=")[0])] == []


@pytest.mark.parametrize(
    "faulty", ["plan.zero=5", "plan.data=0", "train.steps=0", "model.dim=0", "optimizer.lr=0", "fleet.nodes=0"]
)
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.vocab=900"], "model.vocab"),
        (["model.kv_heads=3"], "model.kv_heads"),
        (["plan.schedule=zb-x"], "plan.schedule"),
        (["plan.layers=[1, 1]"], "plan.layers"),
        (["plan.pipeline=5", "plan.layers=[1, 1]"], "plan.layers"),
        (["plan.recompute_parts=['mpl']"], "plan.recompute_parts"),
        (["plan.context=4", "plan.ulysses=3"], "plan.ulysses"),
        (["plan.context=2", "train.seq_len=130"], "train.seq_len"),
        (["data.weights={austn=1}"], "data.weights.austn"),
        (["train.init_from=nowhere"], "train.init_from"),
    ],
)
def test_a_value_out_of_range_does_not_silence_what_does_not_depend_on_it(run: Path, settings: list[str], key: str, faulty: str):
    """A12: `plan.zero=5` silenced the rule about the vocabulary, `plan.pipeline=5` that about `plan.layers`."""
    with pytest.raises(SpecErrors) as caught:
        check(RunRequest(run, [*settings, faulty]))
    assert {key, faulty.partition("=")[0]} <= {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize("began", ["run.toml", "run-1.toml"])
def test_a_rank_finds_its_run_whose_file_got_another_name_before_or_after_it_was_read(began: str, tmp_path: Path):
    """Rank 0 of `megalith resume` reads `run.toml`, and writes `run-1.toml` as the folder's next owner."""
    spec, origin = tiny_run(), f"file {tmp_path / 'run.toml'}"
    files.save(
        files.ResolvedRun(spec, {"train.steps": origin, "name": f"default at the time when {tmp_path / 'run.toml'} was written"}),
        tmp_path,
    )
    epochs.begin(tmp_path, 1)
    mine = files.ResolvedRun(
        spec, {"train.steps": f"file {tmp_path / began}", "name": f"default at the time when {tmp_path / began} was written"}
    )
    assert _await(mine, tmp_path, timeout=0.0) is mine
    with pytest.raises(TimeoutError):
        _await(replace(mine, spec=spec.model_copy(update={"name": "another"})), tmp_path, timeout=0.0)
