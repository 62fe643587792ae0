"""The description of a machine, made without torch."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.machine.describe import GpuModel, describe, processor, read_gpus

X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\nflags\t\t: fpu avx2{}\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(("flags", "bf16"), [(" amx_bf16", True), (" avx512_bf16", True), ("", False)])
def test_a_processor_says_its_name_and_whether_it_takes_bf16(flags: str, bf16: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86.format(flags))
    assert processor(tmp_path) == ("Intel(R) Xeon(R) Platinum 8481C", bf16)


def test_a_system_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert processor(tmp_path)[1] is None


def test_gpus_are_read_as_nvidia_smi_prints_them() -> None:
    h100 = GpuModel("NVIDIA H100 80GB HBM3", 81559 * 2**20, True, "550.54")
    text = (
        "NVIDIA H100 80GB HBM3, 81559, 9.0, 550.54\n" * 2
        + "Tesla V100-SXM2-32GB, 32768, 7.0, 550.54\nNo devices\n[N/A], x, y, z\n"
    )
    assert read_gpus(text) == [h100, h100, GpuModel("Tesla V100-SXM2-32GB", 2**35, False, "550.54")]


def test_this_machine_is_described_in_rows_that_name_everything() -> None:
    found = describe()
    rows = dict(found.rows())
    assert rows["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"system", "torch", "processor", "memory", "/dev/shm", "GPUs"} <= set(rows)
    assert found.processors >= 1 and found.torch is not None
    assert "no GPU found" in dict(replace(found, gpu_count=0, gpus=()).rows())["GPUs"]
    assert "unknown" in dict(replace(found, gpu_count=None, gpus=()).rows())["GPUs"]
    two = replace(found, gpu_count=2, gpus=(GpuModel("H100", 2**36, True, "1"),) * 2).rows()
    assert two[-2:] == [("GPUs", "2 usable"), ("", "2 x H100, 64.0 GiB, bf16, driver 1")]
