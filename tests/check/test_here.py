"""Resources that a run needs and this machine lacks."""

import re
from pathlib import Path

import pytest

from megalith.check import Case, Problem, check, check_here, node_ranks
from megalith.check.memory import state_on_disk
from megalith.machine.capacity import Machine
from megalith.spec.problem import Severity
from tests.check.runs import is_small, spec

GIB = 2.0**30
LAPTOP = Machine(processors=2, memory=23 * GIB)
SERVER = Machine(processors=64, memory=1024 * GIB, gpus=8, gpu_memory=80 * GIB)


def short(machine: Machine, *settings: str, severity: Severity = "error") -> list[Problem]:
    return check_here(spec(*settings), machine, severity=severity)


def test_a_small_run_lacks_nothing():
    assert short(LAPTOP, "plan.data=2") == []
    assert short(SERVER, "plan.data=8") == []


@pytest.mark.parametrize(
    ("machine", "settings", "said"),
    [
        (LAPTOP, ["train.device=cuda"], "1 rank would start on this machine, but it has 0 GPUs"),
        (SERVER, ["plan.data=16"], "16 ranks would start on this machine, but it has 8 GPUs"),
        (SERVER, ["plan.data=16", "train.device=cuda"], "16 ranks would start on this machine, but it has 8 GPUs"),
    ],
)
def test_fewer_gpus_than_ranks_are_named(machine: Machine, settings: list[str], said: str):
    """A5 and C8: with "auto" all ranks used the CPU without a message; with "cuda" the ranks failed before anything was
    reported."""
    (problem,) = short(machine, *settings)
    assert (problem.severity, problem.key) == ("error", "train.device")
    assert said in problem.reason
    assert short(machine, *settings, "train.device=cpu") == []
    (told,) = short(machine, *settings, severity="advice")
    assert told.severity == "advice" and "this machine" in told.reason


def test_no_gpus_are_denied_where_they_cannot_be_counted():
    assert short(Machine(64, 1024 * GIB, gpus=None), "plan.data=8", "train.device=cuda", "model.preset=llama3-70b") == []


def test_a_run_that_names_gpus_is_told_that_it_would_compute_on_the_cpu():
    (problem,) = short(LAPTOP, "cluster=h100")
    assert (problem.severity, problem.key) == ("advice", "cluster")
    assert short(SERVER, "cluster=h100") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        (LAPTOP, ["model.preset=llama3-70b"]),
        (LAPTOP, ["model.preset=llama3-70b", "plan.pipeline=2", "plan.zero=3"]),
        (Machine(2, 8 * GIB, "the control group job"), ["model.preset=llama-1b"]),
        (SERVER, ["model.preset=llama3-8b"]),
        (SERVER, ["model.preset=llama3-70b", "plan.data=8", "plan.zero=3"]),
    ],
)
def test_a_state_that_memory_cannot_hold_is_named(machine: Machine, settings: list[str]):
    """C8: check passed a 70B model on a laptop."""
    problems = [problem for problem in short(machine, *settings) if problem.severity == "error"]
    assert [problem.key for problem in problems] == ["model.name"]
    where = "each GPU of this machine" if machine.gpus else machine.memory_of
    assert f"but {where} has" in problems[0].reason


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (16, ["model.preset=llama-1b", "train.global_batch=1"]),
        (
            8,
            [
                "model.preset=llama3.2-1b",
                "train.global_batch=2",
                "plan.zero=3",
                "plan.state.optimizer=host",
                "plan.state.weights=host",
            ],
        ),
    ],
)
def test_the_cheapest_change_with_which_a_model_fits_this_machine_is_named_and_fits(size: int, settings: list[str]):
    """Host memory is this machine's own, so state on the host saves nothing."""
    laptop, settings = Machine(2, size * GIB), [*settings, "train.precision=bf16"]
    (problem,) = (one for one in short(laptop, *settings) if one.key == "model.name")
    first = problem.way_out.partition("The cheapest change that fits: ")[2].partition(". Or use")[0].partition(" (")[0]
    changed = [word.replace(" = ", "=") for word in re.split(", | and ", first)]
    assert changed and "host" not in first
    assert not [one for one in check(spec(*settings, *changed), files=False) if one.severity == "error"]
    assert [one for one in short(laptop, *settings, *changed) if one.key == "model.name"] == []


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        (LAPTOP, ["model.preset=llama-1b"]),
        (SERVER, ["model.preset=llama3-8b", "plan.data=8"]),
        (SERVER, ["model.preset=llama3-8b", "train.device=cpu"]),
    ],
)
def test_what_fits_as_far_as_the_state_goes_is_let_be(machine: Machine, settings: list[str]):
    """Activations and copies need more memory; the planner and the dry run check whether these fit."""
    assert short(machine, *settings) == []


def test_the_state_on_a_machine_is_that_of_its_own_ranks():
    """A 1B model's state in four shards on four nodes, none of which could hold it whole."""
    run = spec("model.preset=llama-1b", "plan.data=4", "plan.zero=3", "fleet.nodes=4", "train.precision=fp32")
    small = Machine(processors=2, memory=8 * GIB)
    assert check_here(run, small, count=node_ranks, severity="error") == []
    assert "model.name" in [problem.key for problem in check_here(run, small, severity="error")]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.preset=llama3.1-8b", "plan.state.optimizer=host"], "plan.state.optimizer"),
        (["model.preset=llama3.2-1b", "plan.retain.blocks=host", "train.seq_len=32768"], "plan.retain.blocks"),
    ],
)
def test_what_leaves_gpus_is_compared_with_the_memory_of_the_machine(settings: list[str], key: str):
    """8 billion parameters take 18 bytes each, and each of eight ranks keeps its own share of them, or its own activations."""
    settings = [*settings, "train.precision=bf16", "plan.data=8"]
    small = Machine(processors=64, memory=128 * GIB, gpus=8, gpu_memory=80 * GIB)
    assert short(SERVER, *settings) == []
    (problem,) = short(small, *settings)
    assert (problem.severity, problem.key) == ("error", key)
    assert "8 ranks on this machine" in problem.reason and "this machine has 128.0 GiB" in problem.reason


def test_a_disk_holds_the_files_of_all_ranks_that_start_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = ["plan.state.optimizer=disk", "plan.data=8", "plan.zero=0"]
    one = state_on_disk(Case(spec(*settings), None, files=False))
    is_small(tmp_path, monkeypatch, free=int(7.5 * one))
    (problem,) = check_here(spec(*settings), SERVER, severity="error", folder=tmp_path / "run")
    assert (problem.severity, problem.key) == ("error", "plan.state.folder")
    assert f"for 8 ranks on this machine, but {tmp_path} has" in problem.reason
    assert check_here(spec(*settings), SERVER, severity="error", folder=tmp_path / "run", count=lambda run: 4) == []


@pytest.mark.parametrize("severity", ["advice", "error"])
def test_more_ranks_than_processors_are_never_an_error(severity: Severity):
    (problem,) = short(LAPTOP, "plan.data=64", severity=severity)
    assert (problem.severity, problem.key) == ("advice", "plan.data")
    assert "64 ranks would share the 2 processors of this machine" in problem.reason


def test_what_a_machine_lacks_is_no_fault_of_the_run():
    run = spec("model.preset=llama3-70b", "plan.data=64")
    assert not [problem for problem in check(run, files=False) if problem.severity == "error"]


CALIBRATED = """
count = 2
per_node = 2
[accelerator]
name = "this-machine"
title = "made up"
vendor = "any"
device_names = ["cpu"]
peak = { fp32 = 1e9, bf16 = 1e9 }
per_node = 2
source = { peak = "measured" }
[measured]
device = "cpu"
processor = "Made Up 9000"
at = "2026-01-01 00:00"
torch = "2.9"
ranks = 2
wide = 1.0
ramp = 0.0
attention_forward = 1.0
attention_backward = 1.0
memory = 1.0
launch = 1e-6
in_turn = true
"""


def test_figures_of_another_processor_are_named_before_a_run_trusts_them(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(CALIBRATED)
    run = spec("plan.data=2", f'cluster="{file}"')
    assert check_here(run, LAPTOP, processor="Made Up 9000") == []
    (told,) = check_here(run, LAPTOP, severity="error", processor="Other 1")
    assert (told.severity, told.key) == ("advice", "cluster")
    assert "was measured on Made Up 9000, but this machine has Other 1" in told.reason
    assert "--calibrate FILE.toml --ranks 2 here" in told.way_out
    (told,) = check_here(spec("plan.data=1", f'cluster="{file}"'), LAPTOP, processor="Made Up 9000")
    assert (told.severity, told.key) == ("advice", "cluster")
    assert "was measured while 2 ranks computed, but the run starts 1 rank here" in told.reason
