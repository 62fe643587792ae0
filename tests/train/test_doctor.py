"""The burn-in finds a device that computes differently twice; the collective check finds a rank that got another sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.fleet.health import Finding
from megalith.train import doctor
from tests.ranks import run_ranks


def test_a_sound_device_passes() -> None:
    findings = doctor.burn_in(seconds=0.05)
    assert [finding.check for finding in findings] == ["burn-in float32", "burn-in bfloat16"]
    assert all(finding.verdict == "ok" for finding in findings)


def _flip_a_bit(after: int) -> Callable[..., torch.Tensor]:
    """A matrix product that is wrong in one bit, once."""
    whole, calls = torch.Tensor.__matmul__, [0]

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = whole(left, right)
        calls[0] += 1
        if calls[0] == after:
            result.view(torch.int16)[3, 4] ^= 1
        return result

    return product


@pytest.mark.parametrize("after", [1, 3, 4])
def test_one_wrong_bit_in_one_product_is_found(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the first product, which the others are compared with, was the wrong one."""
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
        return doctor.collectives(size=1000)
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
