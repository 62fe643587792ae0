"""The peak for MFU is that of the actual device, never of one that was only named."""

import os
import threading
from pathlib import Path

import pytest
import torch

from megalith.spec import cluster
from megalith.train.measure import peak
from megalith.train.measure.peak import catalogue_peak, matmul_rate, yardstick_of
from tests.parallel.running import trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

V100, H100 = "Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3"


def rate(name: str, precision: str) -> float:
    return cluster.catalogue()[name].peak[precision]  # type: ignore[index]


@pytest.mark.parametrize("asked", ["local", "h100", "h100:8", "a100-80gb:8"])
def test_a_device_that_is_known_has_its_own_peak(asked: str) -> None:
    found = catalogue_peak(asked, H100, "bf16")
    assert found.rate == rate("h100", "bf16")
    assert ("names a100-80gb, but this machine has another device" in found.instead) == asked.startswith("a100")


@pytest.mark.parametrize("asked", ["local", "v100-32gb:8"])
def test_a_known_device_without_a_rate_for_a_precision_is_not_called_unknown(asked: str) -> None:
    found = catalogue_peak(asked, V100, "bf16")
    assert found.rate is None
    assert (
        found.source
        == "NVIDIA V100 SXM2 32 GB: the catalogue has no bf16 peak, so no MFU is computed; it has peaks for fp32, fp16"
    )
    assert catalogue_peak(asked, V100, "fp32").rate == rate("v100-32gb", "fp32")


def test_an_unknown_device_is_what_the_cluster_names() -> None:
    assert catalogue_peak("h100:8", "NVIDIA H100 in a box", "bf16").rate == rate("h100", "bf16")
    found = catalogue_peak("local", "NVIDIA H100 in a box", "bf16")
    assert found.rate is None and "unknown device 'NVIDIA H100 in a box'" in found.source


def test_ranks_on_a_cpu_are_not_measured_against_a_gpu() -> None:
    found = catalogue_peak("h100:8", "CPU", "bf16")
    assert found.rate is None and "names h100, but this machine has another device" in found.instead
    assert catalogue_peak("cpu:8", "CPU", "bf16").instead == catalogue_peak("local", "CPU", "bf16").instead == ""


def test_a_cluster_file_may_say_what_its_own_device_computes(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'count = 2\n[accelerator]\nname = "mine"\ntitle = "Mine"\nvendor = "me"\npeak = { bf16 = 1e12 }\nsource = {}\n'
    )
    assert catalogue_peak(str(path), "CPU", "bf16").rate == 1e12


def test_the_measured_rate_is_that_of_a_matrix_product_and_takes_its_time():
    began, threads = os.times().elapsed, threading.active_count()
    rate = matmul_rate(torch.float32, torch.device("cpu"), seconds=0.05)
    assert 1e8 < rate < 1e14
    assert os.times().elapsed - began < 10 and threading.active_count() == threads


@pytest.mark.parametrize(("rate", "rows"), [(1e12, 1024), (2e8, 128)])
def test_a_processor_that_is_slow_in_a_precision_is_measured_with_small_products(
    rate: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some CPUs take seconds in bf16 for work that others do in milliseconds. A run must start quickly on both."""
    taken: list[tuple[int, float]] = []

    def product(dtype: torch.dtype, device: torch.device, size: int, *, seconds: float) -> float:
        taken.append((size, max(seconds, 2 * 2 * size**3 / rate)))
        return 2 * size**3 / rate

    monkeypatch.setattr(peak, "_product", product)
    assert matmul_rate(torch.bfloat16, torch.device("cpu"), seconds=0.25) == pytest.approx(rate)
    assert taken[-1][0] == rows
    assert sum(seconds for _, seconds in taken) < 3 * 0.25


def _peaks(rank: int, folder: Path) -> list[float]:
    """Return the measured peaks of starts with no file of an earlier start, with a file that a full disk cut off, and with a whole file."""
    trainer, file, found = trainer_of(tiny_run()), folder / "ranks" / "peak-fp32-1", []
    (folder / "ranks").mkdir()
    for text in (None, "", "3.5e9"):
        if text is not None:
            file.write_text(text)
        found.append(yardstick_of(trainer, folder).peak or 0.0)
        assert float(file.read_text()) == found[-1]
    return found


@pytest.mark.slow
def test_a_file_that_a_full_disk_cut_off_is_written_anew(tmp_path: Path) -> None:
    first, again, kept = run_ranks(_peaks, 1, tmp_path)[0]
    assert first > 0 and again > 0 and kept == 3.5e9
