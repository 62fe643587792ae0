"""Nodes, verification, copies on disk, and the fallback plan."""

from pathlib import Path

import pytest

from megalith.check import check
from tests.check.runs import advice, errors, found, is_named, spec


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["plan.data=4", "fleet.nodes=3"], "fleet.nodes", "does not divide the plan's 4 ranks. Use fleet.nodes = 1, 2 or 4."),
        (
            ["cluster=h100:2", "plan.data=2", "train.precision=bf16", "fleet.verify_every=4"],
            "fleet.verify_every",
            "same bits twice",
        ),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["fleet.verify_every=10"], "fleet.verify_every"),
        (["plan.data=2", "plan.expert=2", "model.preset=deepseek-tiny", "fleet.verify_every=10"], "fleet.verify_every"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["plan.data=2", "fleet.verify_every=10"],
        ["plan.data=2", "fleet.verify_every=10", "train.precision=bf16", "train.device=cpu"],
        ["plan.data=2", "fleet.verify_every=10", "cluster=h100:2", "train.precision=fp32"],
    ],
)
def test_what_is_valid_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []


def test_copies_on_disk_need_a_folder_and_copies_in_memory(data: Path, tmp_path: Path):
    every, file = "fleet.disk_every=8", tmp_path / "file"
    file.touch()
    assert check(spec(every, f"fleet.disk={tmp_path / 'new' / 'folder'}")) == check(spec())
    (found,) = check(spec(every, f"fleet.disk={file / 'folder'}"))
    assert (found.key, f"{file} is not a folder" in found.reason) == ("fleet.disk", True)
    assert check(spec(every, f"fleet.disk={file}"), files=False) == check(spec(f"fleet.disk={file}"), files=False) == []
    (found,) = errors(every, "fleet.memory_every=0")
    assert (found.key, found.way_out) == ("fleet.disk_every", "For example, use fleet.memory_every = 8.")


@pytest.mark.parametrize("kept", [(), ("fleet.memory_every=0",)])
@pytest.mark.parametrize("settings", [("sites.count=2", "sites.inner_steps=5"), ("plan.state.optimizer=disk",)])
def test_copies_on_disk_have_no_effect_without_copies_in_memory(settings: tuple[str, ...], kept: tuple[str, ...]):
    (problem,) = (one for one in found(*settings, *kept, "fleet.disk_every=5") if one.key == "fleet.disk_every")
    assert problem.severity == "advice" and "no copies in memory" in problem.reason and "fleet.disk_every = 0" in problem.way_out
    assert "fleet.disk_every" not in advice(*settings, *kept)


def test_the_plan_that_a_run_falls_back_on_keeps_them_too():
    mixtral = ["model.preset=mixtral-8x7b", "plan.data=4", "fleet.fallback.data=2"]
    assert [p.key for p in errors(*mixtral)] == ["fleet.fallback.data"]
    assert errors(*mixtral, "fleet.fallback.microbatch=2") == errors(*mixtral, "model.balance_set=sequence") == []


def test_the_plan_that_a_run_falls_back_on_is_valid_and_fits_whole_nodes():
    run = ["plan.data=4", "fleet.nodes=2"]
    assert errors(*run, "fleet.fallback.data=2") == []
    (ranks,) = errors(*run, "fleet.fallback.data=3", "train.global_batch=12")
    assert (ranks.key, ranks.way_out) == ("fleet.fallback", "Use a plan of 2 to 2 ranks, a multiple of 2.")
    (more,) = errors(*run, "fleet.fallback.data=4")
    assert "fewer nodes than the run's 2" in more.reason
    three = ["plan.data=6", "fleet.nodes=2", "train.global_batch=60"]
    assert "fleet.fallback.tensor" in {p.key for p in errors(*three, "fleet.fallback.tensor=3")}
