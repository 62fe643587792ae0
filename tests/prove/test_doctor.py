"""The burn-in finds a device that gives different results for the same work; the collective check finds a rank with a
wrong sum."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.machine.admission import burn_in as command_of_burn_in
from megalith.machine.admission import burnt
from megalith.machine.health import Finding
from megalith.prove import doctor
from tests.patience import PATIENCE
from tests.ranks import everyone, run_ranks


@pytest.mark.slow
def test_a_sound_device_passes() -> None:
    findings = doctor.burn_in(seconds=0.05)
    assert [finding.check for finding in findings] == ["burn-in float32", "burn-in bfloat16", "burn-in float16"]
    assert all(finding.verdict == "ok" for finding in findings)


def _flip_a_bit(after: int) -> Callable[..., torch.Tensor]:
    """A matrix product that is once wrong in one bit."""
    whole, calls = torch.Tensor.__matmul__, [0]

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = whole(left, right)
        calls[0] += 1
        if calls[0] == after:
            result.view(torch.int16)[3, 4] ^= 1
        return result

    return product


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3, 4])
def test_one_wrong_bit_in_one_product_is_found(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the case that the first product, the reference for the others, is wrong."""
    monkeypatch.setattr(torch.Tensor, "__matmul__", _flip_a_bit(after))
    found = doctor.burn_in(seconds=0.05)[0]
    assert found.verdict == "fail"
    assert found.way_out


def test_zero_and_minus_zero_differ() -> None:
    assert doctor.differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert doctor.differing(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0


def _check(rank: int, wrong_on: int | None) -> list[Finding]:
    if rank == wrong_on:
        whole = dist.all_reduce

        def alter(tensor: torch.Tensor, *args: Any, **rest: Any) -> None:
            whole(tensor, *args, **rest)
            if tensor.numel() > 1:
                tensor[5] += 1

        dist.all_reduce = alter
    try:
        return doctor.collectives(group=everyone(), size=1000)
    finally:
        if rank == wrong_on:
            dist.all_reduce = whole


def test_all_ranks_agree_on_a_sum() -> None:
    for findings in run_ranks(_check, 2, None):
        assert [finding.verdict for finding in findings] == ["ok", "ok"]


def test_the_rank_with_another_sum_is_named_to_all() -> None:
    for findings in run_ranks(_check, 2, 1):
        assert findings[0].verdict == "fail"
        assert "rank 1 of 2" in findings[0].value


def _links(rank: int, wrong_on: int | None) -> list[Finding]:
    if rank == wrong_on:
        whole = doctor._pass_on

        def spoil(sent: torch.Tensor, got: torch.Tensor, *args: Any) -> float:
            seconds = whole(sent, got, *args)
            got[7] ^= 1
            return seconds

        doctor._pass_on = spoil
    try:
        return doctor.links(group=everyone(), size=4096, node=f"node {rank // 2}")
    finally:
        if rank == wrong_on:
            doctor._pass_on = whole


@pytest.mark.slow
def test_links_on_a_machine_and_between_machines_are_distinguished() -> None:
    for findings in run_ranks(_links, 4, None):
        assert [finding.check for finding in findings] == ["links on a machine", "links between machines"]
        assert all(finding.verdict in ("ok", "warn") and "GiB/s" in finding.value for finding in findings)


def test_the_link_that_changes_bytes_is_named() -> None:
    for findings in run_ranks(_links, 2, 1):
        assert findings[0].verdict == "fail"
        assert "rank 0 to 1" in findings[0].value


def test_a_link_much_slower_than_the_others_is_named_and_warns() -> None:
    found = [doctor.Link(rank, rank + 1, False, 1e9 if rank == 2 else 3e9, 0) for rank in range(5)]
    finding = doctor._judge_links("links", found)
    assert finding.verdict == "warn" and "rank 2 to 3" in finding.value


@pytest.mark.slow
def test_ranks_of_this_machine_check_collectives_and_links() -> None:
    findings = doctor.check_ranks(2, wanted="cpu")
    assert [finding.check for finding in findings] == ["all-reduce", "all-reduce speed", "links on a machine"]
    assert findings[0].verdict == "ok"


def test_ranks_that_cannot_meet_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **rest: Any) -> list[Finding]:
        raise RuntimeError("rank 1 of 2 failed first:\nTraceback\nConnectionError: no route")

    monkeypatch.setattr(doctor.worlds, "run_ranks", lost)
    [finding] = doctor.check_ranks(2)
    assert finding.verdict == "fail" and "no route" in finding.value


def test_a_device_that_raises_fails_its_burn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: str, *, seconds: float) -> list[Finding]:
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(doctor, "burn_in", lost)
    assert [(one.verdict, one.value) for one in doctor.burn_in_all("cpu", seconds=1.0)] == [("fail", "CUDA error: device lost")]


@pytest.mark.slow
def test_a_burn_in_of_its_own_process_tells_the_fleet() -> None:
    """A fleet runs this command before a node returns."""
    findings = burnt(command_of_burn_in(0.1, "cpu"), seconds=PATIENCE)
    dtypes = ("float32", "bfloat16", "float16")
    assert [(one.check, one.verdict) for one in findings] == [(f"burn-in {dtype}, cpu", "ok") for dtype in dtypes]


@pytest.mark.slow
def test_under_torchrun_the_first_process_says_what_all_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megalith.cli"]
    done = subprocess.run(
        [*command, "doctor", "--json", "--burn-in", "0.1", "--folder", str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout.count('"findings"') == 1, done.stderr
    found = {one["check"].split(",")[0]: one["verdict"] for one in json.loads(done.stdout)["findings"]}
    assert {"memory", "burn-in bfloat16", "links on a machine"} <= set(found)
    assert found["all-reduce"] == found["burn-in float32"] == "ok"
