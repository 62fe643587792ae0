"""The benchmark of recipes shows which recipe is coarser, and the effect of an outlier on it."""

from pathlib import Path

import pytest
import torch

from benchmarks import precision
from tests.ranks import run_ranks
from tests.train.prepared import small_data

pytestmark = pytest.mark.slow


def test_errors_of_gradients_distinguish_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("bf16", "fp8", "fp8, tensor, delayed", "nvfp4", "mxfp4, nearest")
    monkeypatch.setattr(precision, "CASES", {name: precision.CASES[name] for name in chosen})
    (ran,) = run_ranks(precision.errors, 1, small_data(tmp_path), torch.device("cpu"), 2, 0, "dense")
    found = {name: parts["all"] for name, parts in ran["recipes"].items()}
    assert [*found] == [*chosen]
    error, cosine, then, _ = zip(*found.values(), strict=True)
    assert error[0] < 0.01 and 2 * error[0] < error[1] < error[3] / 2, found
    assert error[3] < error[4], found
    assert all(1 - angle < 0.05 for angle in cosine) and cosine[0] == max(cosine), found
    assert then[2] > error[2], found
