"""The output of GPU tools is parsed and judged correctly. Samples are written by hand from the documented layouts, not recorded."""

import json
from pathlib import Path

import pytest

from megalith.machine import gpus
from megalith.machine.health import worst

SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>550.54.15</driver_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:1B:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>{thermal}</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>7</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>0</dram_correctable>
        <dram_uncorrectable>{now}</dram_uncorrectable>
      </volatile>
      <aggregate>
        <sram_correctable>7</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>0</dram_correctable>
        <dram_uncorrectable>{ever}</dram_uncorrectable>
        <sram_threshold_exceeded>No</sram_threshold_exceeded>
      </aggregate>
      <aggregate_uncorrectable_sram_sources>
        <sram_source_l2>0</sram_source_l2>
      </aggregate_uncorrectable_sram_sources>
    </ecc_errors>
    <retired_pages>
      <multiple_single_bit_retirement><retired_count>N/A</retired_count></multiple_single_bit_retirement>
      <double_bit_retirement><retired_count>N/A</retired_count></double_bit_retirement>
      <pending_retirement>N/A</pending_retirement>
    </retired_pages>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr>
      <remapped_row_unc>{rows}</remapped_row_unc>
      <remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>{failure}</remapped_row_failure>
    </remapped_rows>
    <temperature>
      <gpu_temp>{celsius} C</gpu_temp>
      <gpu_temp_max_threshold>92 C</gpu_temp_max_threshold>
      <gpu_temp_slow_threshold>89 C</gpu_temp_slow_threshold>
    </temperature>
  </gpu>
</nvidia_smi_log>
"""
SOUND = {"now": 0, "ever": 0, "rows": 0, "pending": "No", "failure": "No", "celsius": 34, "thermal": "Not Active"}

OLD = """<nvidia_smi_log><gpu id="00000000:00:1E.0"><product_name>Tesla V100-SXM2-16GB</product_name>
<clocks_throttle_reasons><clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown>
</clocks_throttle_reasons>
<ecc_errors><volatile><single_bit><total>0</total></single_bit>
<double_bit><device_memory>2</device_memory><total>2</total></double_bit></volatile>
<aggregate><double_bit><total>3</total></double_bit></aggregate></ecc_errors>
<retired_pages><double_bit_retirement><retired_count>3</retired_count></double_bit_retirement>
<pending_retirement>Yes</pending_retirement></retired_pages>
<temperature><gpu_temp>40 C</gpu_temp></temperature></gpu></nvidia_smi_log>"""

PLAIN = """<nvidia_smi_log><gpu id="0"><product_name>GeForce</product_name>
<ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors></gpu></nvidia_smi_log>"""


def _verdicts(text: str) -> dict[str, str]:
    return {one.check.split(",")[0]: one.verdict for one in gpus.smi(0, text)}


@pytest.mark.parametrize(
    ("changed", "check", "verdict"),
    [
        ({}, "ECC", "ok"),
        ({"now": 1, "ever": 1}, "ECC", "fail"),
        ({"ever": 3}, "ECC", "warn"),
        ({"rows": 4}, "spoilt memory", "ok"),
        ({"pending": "Yes"}, "spoilt memory", "fail"),
        ({"failure": "Yes"}, "spoilt memory", "fail"),
        ({"celsius": 90}, "heat", "warn"),
        ({"thermal": "Active"}, "heat", "warn"),
    ],
)
def test_each_fault_is_told_by_its_own_finding(changed: dict[str, object], check: str, verdict: str) -> None:
    sound = {"ECC": "ok", "spoilt memory": "ok", "heat": "ok"}
    assert _verdicts(SMI.format(**{**SOUND, **changed})) == {**sound, check: verdict}
    assert all(one.way_out for one in gpus.smi(0, SMI.format(**{**SOUND, **changed})) if one.verdict != "ok")


def test_older_devices_name_their_counts_otherwise() -> None:
    [gpu] = gpus.read(OLD)
    assert (gpu.uncorrected, gpu.uncorrected_ever, gpu.spoilt, gpu.pending) == (2, 3, 3, True)
    assert gpu.slowed == ("hw power brake slowdown",)
    assert _verdicts(OLD) == {"ECC": "fail", "spoilt memory": "fail", "heat": "warn"}


def test_a_device_that_counts_nothing_is_not_blamed() -> None:
    assert set(_verdicts(PLAIN).values()) == {"ok"}


def test_a_driver_that_does_not_answer_fails_and_one_that_babbles_warns() -> None:
    [silent] = gpus.smi(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert silent.verdict == "fail" and "communicate" in silent.value
    assert gpus.smi(0, "no XML")[0].verdict == "warn"


XIDS = """[    5.000000] nvidia: loading out-of-tree module taints kernel.
[  100.250000] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 9000.000000] NVRM: Xid (PCI:0000:1b:00): 31, pid=4242, name=python, Ch 00000008, MMU Fault
"""


@pytest.mark.parametrize(("up", "verdict"), [(200.0, "fail"), (9001.0, "warn")])
def test_an_xid_of_hardware_counts_for_an_hour(up: float, verdict: str) -> None:
    found = gpus.xids(XIDS, up=up)
    assert found.verdict == verdict
    assert "79 (the GPU has fallen off the bus) of 0000:1b:00" in found.value


def test_an_xid_of_a_program_is_not_the_machines() -> None:
    found = gpus.xids(XIDS.splitlines()[2], up=9001.0)
    assert found.verdict == "ok" and "1 messages" in found.value
    assert gpus.xids("", up=1.0).value == "none"


def _dcgm(key: str, status: str) -> str:
    tests = [
        {"name": "Denylist", "results": [{"gpu_id": "0", "status": "Pass"}]},
        {"name": "Page Retirement/Row Remap", "results": [{"gpu_id": "0", "status": status, "warnings": "a pending row"}]},
        {"name": "Graphics Processes", "results": [{"gpu_id": "0", "status": "Skip"}]},
    ]
    return json.dumps({key: {"test_categories": [{"category": "Deployment", "tests": tests}], "version": "x"}})


@pytest.mark.parametrize("key", ["DCGM GPU Diagnostic", "DCGM Diagnostic"])
@pytest.mark.parametrize(("status", "verdict"), [("Pass", "ok"), ("Fail", "fail"), ("Warn", "warn")])
def test_dcgms_worst_test_decides(key: str, status: str, verdict: str) -> None:
    found = gpus.diagnosis(0 if status == "Pass" else 226, f"some words\n{_dcgm(key, status)}\n")
    assert found.verdict == verdict
    assert ("Row Remap" in found.value) == (verdict != "ok")


def test_a_dcgm_that_does_not_run_only_warns() -> None:
    found = gpus.diagnosis(255, "Error: unable to establish a connection to the specified host: localhost")
    assert found.verdict == "warn" and "unable to establish" in found.value
    assert gpus.diagnosis(0, "{}").verdict == "warn"


def test_programs_are_asked_where_they_are_and_nothing_is_said_where_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.doctor() == []
    (tmp_path / "answer").write_text(SMI.format(**{**SOUND, "now": 2}))
    (tmp_path / "diagnosis").write_text(_dcgm("DCGM Diagnostic", "Fail"))
    for name, script in {
        "nvidia-smi": f'while read -r line; do echo "$line"; done < {tmp_path}/answer',
        "dcgmi": f'while read -r line || [ -n "$line" ]; do echo "$line"; done < {tmp_path}/diagnosis; exit 226',
        "dmesg": "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    found = gpus.doctor()
    assert [one.check for one in found] == ["ECC, GPU 0", "spoilt memory, GPU 0", "heat, GPU 0", "DCGM"]
    assert [one.verdict for one in found] == ["fail", "ok", "ok", "fail"]
    assert worst(gpus.doctor(diagnose=False)) == "fail"
