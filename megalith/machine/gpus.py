"""Health of this machine's GPUs, from `nvidia-smi`, the kernel's log and DCGM, if these are available.

Some functions of this module run programs such as `nvidia-smi`; pure functions parse and judge the programs' output. No function needs
torch. All findings are `health.Finding`s.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from megalith.machine.health import Finding, Verdict, worst

ASK_SECONDS = 30.0  # that nvidia-smi and dmesg may take: a GPU that has fallen off the bus answers late or never
DIAGNOSE_SECONDS = 120.0  # that the quick diagnosis of DCGM may take
RECENT_SECONDS = 3600.0  # an Xid that is older was survived: it warns, and does not fail

HARDWARE = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    95: "uncontained ECC error",
    110: "security fault",
    119: "the GPU system processor (GSP) does not answer",
    120: "the GPU system processor (GSP) failed",
    140: "unrecovered ECC error",
}
"""Xid codes that report a hardware fault. Xid codes that are not listed can also be caused by a program, or report a repair."""


def doctor(*, diagnose: bool = True) -> list[Finding]:
    """Run every check of this machine's GPUs; return no findings without `nvidia-smi`. `diagnose`: also run DCGM, which takes seconds."""
    if shutil.which("nvidia-smi") is None:
        return []
    found = smi(*_ask("nvidia-smi", "-q", "-x", seconds=ASK_SECONDS))
    if shutil.which("dmesg"):
        code, text = _ask("dmesg", seconds=ASK_SECONDS)
        found += [xids(text, up=_up())] if code == 0 else []  # most systems show it to root alone
    if diagnose and shutil.which("dcgmi"):
        found.append(diagnosis(*_ask("dcgmi", "diag", "-r", "1", "-j", seconds=DIAGNOSE_SECONDS)))
    return found


def _ask(*command: str, seconds: float) -> tuple[int, str]:
    """Return a program's status and output. A program that does not end in time is killed, and the returned output is a note about this."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {seconds:g} s"
    except OSError as error:
        return -1, str(error)
    return done.returncode, done.stdout or done.stderr


def _up() -> float:
    try:
        return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return time.monotonic()


@dataclass(frozen=True)
class Gpu:
    """State of one GPU from `nvidia-smi -q -x`. Counts are None if the device does not count errors (no ECC). `slowed`: the
    driver's names for the reasons why the GPU is slowed down now."""

    name: str
    place: str
    uncorrected: int | None
    uncorrected_ever: int | None
    spoilt: int
    pending: bool
    beyond_repair: bool
    celsius: float | None
    slow_above: float | None
    slowed: tuple[str, ...] = ()


def smi(code: int, text: str) -> list[Finding]:
    """Judge the status and output of `nvidia-smi -q -x`."""
    name, limit = "GPUs", "nvidia-smi answers"
    try:
        gpus = read(text) if code == 0 else None
    except ElementTree.ParseError as error:
        return [
            Finding(
                name, "warn", f"the output of nvidia-smi cannot be parsed ({error})", limit, "Look at `nvidia-smi -q` yourself"
            )
        ]
    if gpus is None:
        way_out = "Check that the driver is loaded. Reset the GPUs, or restart the machine"
        return [Finding(name, "fail", f"status {code}: {' '.join(text.split())[:200]}", limit, way_out)]
    return [finding for number, gpu in enumerate(gpus) for finding in judge(gpu, number)]


def read(text: str) -> list[Gpu]:
    """Parse the output of `nvidia-smi -q -x`. Raises ElementTree.ParseError if the text is not XML."""
    return [_read(one) for one in ElementTree.fromstring(text).iter("gpu")]


def _read(gpu: ElementTree.Element) -> Gpu:
    def said(path: str) -> str:
        return (gpu.findtext(path) or "").strip()

    retired = [_number(said(f"retired_pages/{kind}/retired_count")) for kind in _RETIRED]
    pending = ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement", "retired_pages/pending_blacklist")
    temperature = "temperature/gpu_temp"
    return Gpu(
        name=said("product_name"),
        place=gpu.get("id", ""),
        uncorrected=_uncorrected(gpu.find("ecc_errors/volatile")),
        uncorrected_ever=_uncorrected(gpu.find("ecc_errors/aggregate")),
        spoilt=int(sum(value or 0.0 for value in (*retired, _number(said("remapped_rows/remapped_row_unc"))))),
        pending="Yes" in map(said, pending),
        beyond_repair="Yes" in map(said, ("remapped_rows/remapped_row_failure", "ecc_errors/aggregate/sram_threshold_exceeded")),
        celsius=_number(said(temperature)),
        slow_above=_number(said(f"{temperature}_slow_threshold")),
        slowed=tuple(_slowed(gpu)),
    )


_RETIRED = ("multiple_single_bit_retirement", "double_bit_retirement")
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def _number(text: str) -> float | None:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else None


def _uncorrected(counts: ElementTree.Element | None) -> int | None:
    """Add up the uncorrected errors in one list, under the names of all driver versions; None if there are no counts."""
    if counts is None:
        return None
    values = [_number((one.text or "").strip()) for one in counts if "uncorrectable" in one.tag and "source" not in one.tag]
    values += [_number((one.text or "").strip()) for one in counts.iterfind("double_bit/total")]  # before Ampere
    known = [int(value) for value in values if value is not None]
    return sum(known) if known else None


def _slowed(gpu: ElementTree.Element) -> Iterator[str]:
    for one in gpu.iter():
        reason = re.fullmatch(r"clocks_(?:event|throttle)_reason_(\w+)", one.tag)
        if reason and reason[1] in _SLOWED and (one.text or "").strip() == "Active":
            yield reason[1].replace("_", " ")


def judge(gpu: Gpu, number: int) -> list[Finding]:
    """Judge one GPU: its memory errors, replaced rows, and temperature."""
    return [
        _judge_errors(gpu, f"ECC, GPU {number}"),
        _judge_spoilt(gpu, f"spoilt memory, GPU {number}"),
        _judge_heat(gpu, f"heat, GPU {number}"),
    ]


def _judge_errors(gpu: Gpu, check: str) -> Finding:
    limit = "0 uncorrected errors"
    if gpu.uncorrected is None:
        return Finding(check, "ok", f"this {gpu.name} does not count uncorrected errors", limit)
    ever = gpu.uncorrected_ever or 0
    value = f"{gpu.uncorrected:,} uncorrected errors since the driver was loaded, {ever:,} ever"
    if gpu.uncorrected:
        return Finding(check, "fail", value, limit, f"Reset the GPU at {gpu.place}; if the errors return, replace the GPU")
    return Finding(check, "warn" if ever else "ok", value, limit, "Watch this GPU, which had uncorrected errors" if ever else "")


def _judge_spoilt(gpu: Gpu, check: str) -> Finding:
    limit = "nothing to be replaced"
    value = f"{gpu.spoilt} rows or pages retired after uncorrected errors"
    if gpu.beyond_repair:
        return Finding(
            check,
            "fail",
            f"{value}; the GPU says that it cannot repair its memory",
            limit,
            f"Have the GPU at {gpu.place} replaced",
        )
    if gpu.pending:
        return Finding(
            check, "fail", f"{value}, and more will be retired at the next reset", limit, f"Reset the GPU at {gpu.place}"
        )
    return Finding(check, "ok", value, limit)


def _judge_heat(gpu: Gpu, check: str) -> Finding:
    if gpu.celsius is None:
        return Finding(check, "ok", "unknown", "not slowed down")
    limit = f"GPU below {gpu.slow_above:g} C and not slowed down" if gpu.slow_above is not None else "not slowed down"
    hot = gpu.slow_above is not None and gpu.celsius >= gpu.slow_above
    value = f"{gpu.celsius:g} C" + "".join(f", {reason}" for reason in gpu.slowed)
    bad = hot or bool(gpu.slowed)
    return Finding(
        check, "warn" if bad else "ok", value, limit, "Check cooling and power, because the GPU is slowed down" if bad else ""
    )


_XID = re.compile(r"^(?:\[\s*([\d.]+)\])?.*NVRM: Xid \(([^)]*)\): (\d+)", re.MULTILINE)


def xids(log: str, *, up: float) -> Finding:
    """Judge the driver's error messages in the kernel's `log`. `up`: the current time on the log's clock (seconds since the
    kernel started)."""
    check, limit = "Xid", f"no hardware error in the last {RECENT_SECONDS / 60:g} minutes"
    found = [(float(at) if at else up, place.removeprefix("PCI:"), int(number)) for at, place, number in _XID.findall(log)]
    telling = [(at, f"{number} ({HARDWARE[number]}) of {place}") for at, place, number in found if number in HARDWARE]
    if not telling:
        return Finding(check, "ok", f"{len(found)} messages in the kernel's log, none about hardware" if found else "none", limit)
    fresh = [text for at, text in telling if up - at <= RECENT_SECONDS]
    verdict: Verdict = "fail" if fresh else "warn"
    listed = ", ".join(dict.fromkeys(fresh or [text for _, text in telling]))
    way_out = "Reset the GPU or restart the machine; if the error returns, replace the GPU" if fresh else "Watch this machine"
    return Finding(check, verdict, listed, limit, way_out)


def diagnosis(code: int, text: str) -> Finding:
    """Judge the result of `dcgmi diag -r 1 -j`. The name of the outermost JSON object differs between DCGM 2, 3 and 4."""
    check, limit = "DCGM", "no test of `dcgmi diag -r 1` fails"
    tests = _tests(text)
    if tests is None:
        value = f"the output of dcgmi has no diagnosis (status {code}): {' '.join(text.split())[:200]}"
        return Finding(
            check, "warn", value, limit, "Check that DCGM's host engine runs (`nv-hostengine`), then run `dcgmi diag -r 1`"
        )
    failed = [
        Finding(name, "fail" if status == "fail" else "warn", "", "") for name, status in tests if status in ("fail", "warn")
    ]
    if not failed:
        return Finding(check, "ok", f"{sum(status == 'pass' for _, status in tests)} tests of dcgmi passed", limit)
    listed = ", ".join(dict.fromkeys(f"{one.check}: {one.verdict}" for one in failed))
    return Finding(check, worst(failed), listed, limit, "`dcgmi diag -r 1` shows the reason and the GPU")


def _tests(text: str) -> list[tuple[str, str]] | None:
    """Return each result as (name of the test, status), where the status is "pass", "fail", "warn" or "skip"; None if the text is no
    diagnosis."""
    try:
        record = json.loads(text[text.find("{") : text.rfind("}") + 1])  # words may stand around it
        categories = next(value["test_categories"] for value in record.values() if "test_categories" in value)
        return [
            (test["name"], str(result["status"]).lower())
            for category in categories
            for test in category["tests"]
            for result in test["results"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
